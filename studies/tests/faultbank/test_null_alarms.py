# SPDX-License-Identifier: Apache-2.0
"""False alarms of sequential decisions where nothing is wrong: measured by the detectors, and not above the claim."""

import math

import numpy as np
import pytest

from fedvitals_studies.faultbank import null_alarms
from fedvitals_studies.faultbank.intervals import poisson_rate


@pytest.mark.thorough
def test_no_decision_raises_more_alarms_than_claimed():
    for rate in null_alarms.rates(3):
        low = poisson_rate(rate.alarms, rate.looks).low
        assert rate.claimed is None or low <= rate.claimed, rate.words
        assert rate.words.count("|") == 6


def test_a_client_that_really_fails_is_counted():
    """The simulation sees alarms where there are some."""
    failed = np.zeros((null_alarms.ROUNDS, null_alarms.CLIENTS), bool)
    failed[20:40, 3] = True
    history = null_alarms._history({"steps": np.where(failed, np.nan, 4.0)}, null_alarms._failures(failed))

    def detector(history, number):
        return null_alarms.frequent_failures(history, number, "DROP_OUT", "failed", "client.dropped_out")

    assert null_alarms._accused(history, detector) == 1


def test_the_formula_for_a_cusum_is_siegmunds():
    """For an allowance of 0.5 and a limit of 4 tables have an average run of 336 looks (one-sided)."""
    assert 1 / null_alarms.cusum_rate(0.5, 4.0) == pytest.approx(336, rel=0.02)
    assert math.isclose(null_alarms.cusum_rate(), 1.57e-10, rel_tol=0.05)
