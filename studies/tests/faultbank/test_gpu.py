# SPDX-License-Identifier: Apache-2.0
"""A case of the fault bank on a GPU: the same federation as on the CPU, the same truth, and everything measured."""

import pytest
import torch

pytest.importorskip("tomli_w")

from fedvitals import lab
from fedvitals_studies.faultbank.cases import Case
from fedvitals_studies.faultbank.outcome import outcome_of
from fedvitals_studies.faultbank.run import watch

pytestmark = pytest.mark.gpu

MODELS = {
    "mlp": (lab.Synthetic(samples=300, classes=3, features=8), lab.MLP(hidden=(8,))),
    "tokens": (
        lab.Synthetic(samples=300, classes=3, sequence=6, vocabulary=20),
        lab.Transformer(width=8, heads=2, layers=1),
    ),
}


@pytest.mark.parametrize("name", ["mlp", "tokens"])
def test_a_case_is_the_same_on_a_gpu(name):
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    dataset, model = MODELS[name]
    experiment = lab.Experiment(
        dataset=dataset,
        model=model,
        local=lab.Local(iterations=4),
        clients=6,
        rounds=4,
        seed=3,
        faults=(lab.SignFlip(nodes=("c2",), since=1),),
    )
    case = Case("own/case", "own", "synthetic", experiment)
    here, there = watch(case), watch(case, None, "cuda")
    assert (there.about.device, there.about.engine) == (torch.cuda.get_device_name(), "stacked")
    assert there.about.faults == here.about.faults
    assert there.about.present == here.about.present
    assert set(there.about.updates) == set(here.about.updates)
    missing = {m for m in set(here.recording.metrics) - set(there.recording.metrics) if m.startswith(("update", "fit"))}
    assert not missing
    assert set(here.recording.families) <= set(there.recording.families)
    assert there.about.accuracy[-1] == pytest.approx(here.about.accuracy[-1], abs=0.1)
    outcome = outcome_of(case, there.recording, there.about)
    assert set(outcome.methods) == set(outcome_of(case, here.recording, here.about).methods)
