# SPDX-License-Identifier: Apache-2.0
"""Healthy runs of every kind: what looks for faults of machines, of updates and of averaging finds none."""

import pytest

from fedvitals.diagnosis.detectors import aggregation, guards, system
from support.lab.examined import HEALTHY, findings_by, watched

# Together, because a run takes longer to train than to be examined.
DETECTORS = (*aggregation.DETECTORS, *guards.DETECTORS, *system.DETECTORS)


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_runs_are_silent(name):
    assert findings_by(watched(**HEALTHY[name]), DETECTORS) == []
