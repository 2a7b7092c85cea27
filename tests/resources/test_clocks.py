# SPDX-License-Identifier: Apache-2.0
"""Two machines' clocks: the offset lies within its bounds, and no duration that follows is negative."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedvitals.errors import RecordError
from fedvitals.resources.clocks import DRIFT, Offset

seconds = st.floats(1e-4, 100)


def times(start, offset, down, work, up):
    """The four times of an exchange, as two clocks tell them."""
    return start, start + down + offset, start + down + work + offset, start + down + work + up


@given(st.floats(-1e5, 1e5), st.lists(st.tuples(seconds, seconds, seconds), min_size=1, max_size=8))
def test_the_true_offset_lies_within_the_bounds_and_no_duration_is_negative(offset, ways):
    known, start, told = Offset(), 1e6, []
    for way in ways:
        told.append(times(start, offset, *way))
        known = known.learn(*told[-1])
        start += 300
    rounding = 1e-9 * (abs(offset) + 1e6)
    assert known.low - rounding <= offset <= known.high + rounding
    assert abs(known.seconds - offset) <= known.error + rounding
    sent, received, replied, returned = told[-1]
    assert received - known.seconds - sent >= -rounding
    assert returned - (replied - known.seconds) >= -rounding


def test_bounds_are_those_of_the_fastest_way_of_each_direction():
    known = Offset().learn(*times(100.0, 5.0, down=0.1, work=1.0, up=3.0))
    known = known.learn(*times(200.0, 5.0, down=4.0, work=1.0, up=0.2))
    assert known.low == pytest.approx(4.8, abs=0.02)
    assert known.high == pytest.approx(5.1, abs=0.02)
    assert known.seconds == pytest.approx(4.95, abs=0.02)
    assert known.beyond_doubt == known.low


def test_a_clock_that_may_be_right_is_taken_for_right():
    """A fast download and a slow upload on one machine: the middle would be half a second wrong."""
    known = Offset().learn(*times(100.0, 0.0, down=0.01, work=1.0, up=1.0))
    assert (known.seconds, known.beyond_doubt) == (0.0, 0.0)
    assert known.error == pytest.approx(1.0)


def test_bounds_widen_as_clocks_drift_and_begin_anew_when_a_clock_is_set():
    known = Offset().learn(*times(100.0, 5.0, 0.1, 1.0, 0.1))
    later = known.learn(*times(10_100.0, 5.5, 10.0, 1.0, 10.0))
    assert later.high == pytest.approx(5.1 + DRIFT * 10_000, rel=0.01)
    moved = known.learn(*times(110.0, -70.0, 0.1, 1.0, 0.1))
    assert moved.seconds == pytest.approx(-70, abs=0.01)
    assert moved.beyond_doubt == pytest.approx(-69.9)


@pytest.mark.parametrize("hours", [1, 6, 24])
@pytest.mark.parametrize("fast", [20e-6, DRIFT])
def test_a_clock_that_runs_fast_moves_its_offset_while_a_client_works(hours, fast):
    """It seems to have worked longer than it was away, and its offset went from 5 s to a little more."""
    worked = 3600.0 * hours
    known = Offset().learn(1e6, 1e6 + 0.001 + 5, 1e6 + 0.001 + 5 + worked * (1 + fast), 1e6 + 0.002 + worked)
    assert known.low == pytest.approx(5.001, abs=1e-6)
    assert known.high == pytest.approx(5 - 0.001 + worked * fast, abs=1e-6)


@pytest.mark.parametrize(
    ("four", "words"),
    [
        ((1.0, 2.0, 3.0, math.nan), "since the epoch"),
        ((1.0, 2.0, 3.0, "soon"), "since the epoch"),
        ((5.0, 2.0, 3.0, 4.0), "before it began"),
        ((1.0, 3.0, 2.0, 4.0), "before it received"),
        ((1.0, 0.0, 9.0, 2.0), "worked for 9.000 s, and it was away for 1.000 s"),
        ((1.0, 0.0, 4e9, 2.0), "away for 1.000 s"),
    ],
)
def test_times_that_cannot_be_true_are_refused(four, words):
    with pytest.raises(RecordError, match=words):
        Offset().learn(*four)
