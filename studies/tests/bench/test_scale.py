# SPDX-License-Identifier: Apache-2.0
"""`fedvitals bench scale`: its rows, on federations small enough for a test; no figure is asserted."""

import pytest

from fedvitals_studies.bench import scale

pytestmark = pytest.mark.thorough


def test_watched_and_unwatched_rounds_take_turns():
    heard = []
    throughput, with_gradient_scale, lost = scale._with_and_without(4, 3, 1, ">= 0.6", 0.6, heard.append)
    assert len(heard) == 3
    assert throughput["verdict"] in ("met", "missed", "open")
    assert (with_gradient_scale["bar"], with_gradient_scale["verdict"]) == ("", "")
    assert (lost["measured"], lost["verdict"]) == (0, "met")


def test_a_long_run_tells_how_time_and_memory_grew():
    heard = []
    slower, larger, detectors, overview, lost, thinned = scale._growth(40, 4, 8, heard.append)
    assert len(heard) == 8
    assert slower["measured"].endswith("ms")
    assert larger["measured"].endswith("MB")
    assert float(detectors["measured"].removesuffix(" ms")) >= 1
    assert overview["measured"].endswith(" s")
    assert [(row["measured"], row["verdict"]) for row in (lost, thinned)] == [(0, "met")] * 2


def test_growth_is_of_the_last_quarter_over_the_one_before():
    flat = scale._growth_row("", [9.0] * 40 + [2.0, 2.02] * 20, 1.0, "ms")
    grown = scale._growth_row("", [1.0] * 60 + [1.1] * 20, 1.0, "ms")
    assert (flat["verdict"], grown["verdict"]) == ("met", "missed")
    assert grown["measured"] == "10.0 % (10.0 to 10.0), to 1 ms"


def test_the_interval_lies_around_the_median():
    low, high = scale._interval([0.5, 0.6, 0.7, 0.55, 0.65])
    assert 0.5 <= low <= 0.6 <= high <= 0.7
