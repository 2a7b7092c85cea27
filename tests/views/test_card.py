# SPDX-License-Identifier: Apache-2.0
"""The health card of a run: its vital signs."""

import fedvitals as fv
from fedvitals.store import open_reader
from fedvitals.views.card import health_card
from support.adapter_runs import federate, lora_model


def test_the_signs_of_low_rank_adapters_are_vital_where_there_are_any(tmp_path):
    with fv.Monitor(tmp_path / "runs.db", strict=True, machine=False) as monitor:
        federate(monitor, lora_model(), ranks=(2, 2, 4))
    with open_reader(tmp_path / "runs.db") as reader:
        signs = {sign.name: sign for sign in health_card(reader, monitor.run.id).signs}
    adapters = [name for name in signs if name.startswith("adapter.")]
    assert adapters == ["adapter.effective_rank", "adapter.product_error", "adapter.energy_kept"]
    assert {signs[name].of for name in adapters} == {"server"}
    assert signs["adapter.energy_kept"].values[-1] < 0.5  # padded with zeros
