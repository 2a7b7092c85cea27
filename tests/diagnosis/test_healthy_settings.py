# SPDX-License-Identifier: Apache-2.0
"""Healthy trainings of mainstream kinds: no warning and no critical finding (`healthy_settings` runs more seeds)."""

import pytest

from fedvitals.diagnosis.abstentions import examination
from fedvitals.diagnosis.cases import cases
from fedvitals.diagnosis.examine import examine
from support.healthy.settings import settings, trained, troubles

SETTINGS = settings()
QUICK = {"regression, MSE", "by hand, fp16", "summed cross-entropy"}  # for scripts/test --fast; the others take minutes


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.thorough) for name in SETTINGS]
)
def test_a_healthy_training_raises_no_alarm(name):
    if name.startswith("Flower"):
        pytest.importorskip("flwr")
    history = trained(SETTINGS[name], seed=7)
    assert troubles(cases(examine(history))) == []
    compressed = name.startswith(("lab", "by hand")) or "level" in name
    assert ("transformed" in examination(history).not_judged) == compressed
