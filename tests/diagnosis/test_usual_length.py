# SPDX-License-Identifier: Apache-2.0
"""How long rounds usually take, and which are too long."""

import numpy as np
import pytest

from fedvitals.diagnosis.usual_length import FEWEST, usual_length


def test_nothing_is_said_of_few_rounds():
    assert usual_length([3.0] * (FEWEST - 1)) is None


@pytest.mark.parametrize("spread", [0.0, 0.02, 0.05])
def test_even_rounds_may_take_nearly_twice_the_usual(spread):
    lengths = 3 * np.exp(spread * np.random.default_rng(1).standard_normal(12))
    usual = usual_length([*lengths])
    assert usual.seconds == pytest.approx(3, rel=0.1)
    assert 1.9 * usual.seconds == pytest.approx(usual.limit)


def test_uneven_rounds_may_take_longer():
    rng = np.random.default_rng(2)
    too_long = 0
    for _ in range(100):
        lengths = [*np.exp(0.3 * rng.standard_normal(30))]
        too_long += sum(lengths[i] > usual_length(lengths[:i]).limit for i in range(FEWEST, 30))
    assert too_long <= 3  # of 2,500 rounds
