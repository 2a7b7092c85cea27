# SPDX-License-Identifier: Apache-2.0
"""Axes are honest: small changes look small, and no share reaches 110 %. The browser's axes follow the same rule."""

import pytest

from fedvitals.views.axis_ends import honest_ends
from support.dashboard_server import needs_browser
from support.gallery_server import gallery_served

CASES = [
    (0.095, 0.103, "share"),
    (0.0, 0.958, "share"),
    (0.97, 1.0, "share"),
    (0.2, 1.0, "share"),
    (0.0, 0.0, "share"),
    (2.300, 2.302, "1"),
    (0.0, 3.0, "1"),
    (0.0, 0.0, "1"),
    (-1.0, 1.0, "1"),
    (0.9, 1.3, "share"),
    (0.02, 0.15, "seconds"),
    (134e3, 155e3, "bytes"),
    (9.0, 9.0, "steps"),
    (0.0, 1.0, "events"),
]


def test_a_small_change_of_accuracy_is_no_cliff():
    bottom, top = honest_ends(0.095, 0.103, "share")
    assert top - bottom == pytest.approx(0.1)
    assert (0.103 - 0.095) / (top - bottom) < 0.1


def test_what_is_twice_as_long_is_drawn_twice_as_high():
    assert honest_ends(0.0146, 0.146, "seconds")[0] == 0
    assert honest_ends(0.2, 1.0, "share") == (0, 1)
    assert honest_ends(1.9, 2.3, "1")[0] > 1.5


def test_a_small_change_of_an_amount_is_no_cliff():
    bottom, top = honest_ends(134e3, 155e3, "bytes")
    assert (155 - 134) * 1e3 / (top - bottom) < 0.6


@pytest.mark.parametrize(("low", "high", "unit"), CASES)
def test_an_axis_holds_its_values_and_what_its_unit_allows(low, high, unit):
    bottom, top = honest_ends(low, high, unit)
    assert bottom <= low
    assert top >= high
    assert bottom >= 0 or low < 0
    assert top <= 1 or unit != "share" or high > 1


@pytest.mark.browser
@needs_browser
def test_the_browser_has_the_same_axes(page):
    with gallery_served() as gallery:
        page.goto(gallery)
        ends = page.evaluate(
            """async (cases) => {
              const { honestEnds } = await import("/static/charts/scales.js");
              return cases.map((one) => honestEnds(...one));
            }""",
            CASES,
        )
    assert [tuple(pair) for pair in ends] == [pytest.approx(honest_ends(*case)) for case in CASES]
