# SPDX-License-Identifier: Apache-2.0
"""Healthy trainings of mainstream kinds: no warning and no critical finding (`healthy_settings` runs more seeds)."""

import pytest

from support.healthy.settings import judged, settings, troubles

SETTINGS = settings()
QUICK = {"regression, MSE", "by hand, fp16", "summed cross-entropy"}  # for scripts/test --fast; the others take minutes


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.thorough) for name in SETTINGS]
)
def test_a_healthy_training_raises_no_alarm(name):
    if name.startswith("Flower"):
        pytest.importorskip("flwr")
    cases = judged(SETTINGS[name], seed=7)
    assert troubles(cases) == []
    compressed = name.startswith(("lab", "by hand")) or "level" in name
    assert ("TRANSFORMED_UPDATES" in {case.issue for case in cases}) == compressed
