# SPDX-License-Identifier: Apache-2.0
"""Healthy runs of every kind: what looks for faults of machines, of updates and of averaging finds none."""

import pytest

from fedvitals.diagnosis import detect_aggregation, detect_guards, detect_system
from lab_examined import HEALTHY, said, watched

# Together, because a run takes longer to train than to be examined.
DETECTORS = (*detect_aggregation.DETECTORS, *detect_guards.DETECTORS, *detect_system.DETECTORS)


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_runs_are_silent(name):
    assert said(watched(**HEALTHY[name]), DETECTORS) == []
