# SPDX-License-Identifier: Apache-2.0
"""Adapters that no client moves: counted at the server, and named where other parts of the model train."""

import copy
import math

import numpy as np
import pytest
import torch

from fedvitals.monitor.monitor import Monitor
from fedvitals.stats import ADAPTER_COLUMNS
from fedvitals.testing import MemorySink
from support.adapter_runs import federate, lora_model, only_trains


@pytest.mark.parametrize("ranks", [(4, 4, 4), (2, 4, 4)])  # of a lower rank: less than what there was is no move
def test_an_adapter_that_nobody_moves_is_counted(tmp_path, ranks):
    sink = MemorySink()
    with Monitor(str(tmp_path / "runs.db"), sinks=[sink], strict=True) as monitor:
        federate(monitor, lora_model(), stepped="2.", ranks=ranks)
    assert sink.value("adapter.unmoved", round=1, node="server") == 1


def test_an_adapter_that_nobody_moves_is_named_by_its_layer(tmp_path):
    monitor = Monitor(str(tmp_path / "runs.db"), strict=True)
    federate(monitor, lora_model(), rounds=3, stepped="2.")
    monitor.flush()
    dead = [finding for finding in monitor.findings() if finding.issue == "DEAD_ADAPTER"]
    monitor.close()
    assert [(finding.where.round, finding.where.layer) for finding in dead] == [(1, "0"), (2, "0")]


@pytest.mark.parametrize("rate", [0.5, 0.0])
def test_adapters_of_which_none_moves_are_dead_where_clients_train(tmp_path, rate):
    """With A and B both 0 no adapter has a gradient; the bias beside them learns."""
    model = only_trains(lora_model(), "lora_A.weight", "lora_B.weight", "2.layer.bias")
    for name, parameter in model.named_parameters():
        if "lora" in name:
            parameter.data.zero_()
    sink = MemorySink()
    with Monitor(str(tmp_path / "runs.db"), sinks=[sink], strict=True) as monitor:
        for number in range(3):
            with monitor.round(number, model):
                with monitor.client("a", own := copy.deepcopy(model)):
                    optimizer = torch.optim.SGD([p for p in own.parameters() if p.requires_grad], rate)
                    for _ in range(2 if rate else 0):
                        optimizer.zero_grad()
                        own(torch.randn(4, 20)).square().mean().backward()
                        optimizer.step()
                model.load_state_dict(own.state_dict())
        monitor.flush()
        dead = [finding for finding in monitor.findings() if finding.issue == "DEAD_ADAPTER"]
    assert [m.value for m in sink.metrics("adapter.unmoved")] == [2] * 3
    assert [finding.where.round for finding in dead] == ([1, 2] if rate else [])
    assert all(finding.message.endswith("The clients train, but no adapter changes.") for finding in dead)


def test_adapters_that_take_turns_are_found_dead_and_counted_as_all(tmp_path, monkeypatch):
    monkeypatch.setattr("fedvitals.probes.adapters.watch.WORK", 27_000.0)  # one of the two adapters in a round
    sink = MemorySink()
    monitor = Monitor(str(tmp_path / "runs.db"), sinks=[sink], strict=True)
    federate(monitor, lora_model(), rounds=6, stepped="2.")
    monitor.flush()
    dead = [finding for finding in monitor.findings() if finding.issue == "DEAD_ADAPTER"]
    monitor.close()
    measured = [np.isfinite(sink.layers("update.adapters", node="server", round=r).matrix[:, 1]) for r in range(6)]
    assert all(own.sum() == 1 for own in measured)
    seen = [r for r in range(6) if measured[r][0]]
    assert {finding.where.layer for finding in dead} == {"0"}
    assert min(finding.where.round for finding in dead) >= seen[1]
    assert dead[0].evidence["since"] in seen
    change = ADAPTER_COLUMNS.index("change")
    own = sink.layers("update.adapters", node="server", round=1).matrix[:, change]
    assert sink.value("adapter.change", round=1, node="server") == pytest.approx(math.sqrt(2) * np.nanmax(own))
