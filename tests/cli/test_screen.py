# SPDX-License-Identifier: Apache-2.0
"""Numbers and small pictures for a terminal."""

import math

import pytest

from fedvitals.cli.screen import number, seconds, shown, size, sparkline, with_unit


def test_sparkline_shows_the_course_and_its_gaps():
    """Lowest to highest; what is not finite is a gap; one level when nothing changes."""
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, math.nan, 1]) == "▁·█"
    assert sparkline([3.0, 3.0]) == "▅▅"  # one level, and no cliff:
    assert sparkline([0.103, 0.095], unit="share") in ("▅▄", "▅▅", "▄▄")
    assert sparkline([math.nan]) == "·"
    assert len(sparkline(list(range(1000)))) == 24


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (1234567.0, "1\u2009234\u2009567"), (1234567.5, "1.23×10⁶"),
     (12345.0, "12\u2009345"), (0.12345, "0.123"), (-0.5, "−0.5"), (None, "–"),
     (math.nan, "NaN"), (math.inf, "∞"), (7.0, "7"), (0.00001, "10⁻⁵")],
)  # fmt: skip
def test_numbers_have_three_digits(value, text):
    assert number(value) == text


def test_units_are_scaled():
    assert (seconds(0.0123), seconds(3e-6), seconds(75), seconds(125), seconds(None)) == (
        "12.3 ms", "3 µs", "1 min 15 s", "2 min 5 s", "–",
    )  # fmt: skip
    assert (size(1234), size(5.2e8), size(None)) == ("1.23 kB", "520 MB", "–")
    assert (with_unit(0.5, "share"), with_unit(0.5, "seconds"), with_unit(0.5, "1")) == ("50 %", "500 ms", "0.5")


def test_long_times_are_hours():
    """From 60 minutes on, and days from 24 hours on; a minute that is nearly full is the next one."""
    assert (seconds(3599), seconds(7200), seconds(86_400 + 3600.4)) == ("59 min 59 s", "2 h", "1 d 1 h")
    assert seconds(3 * 3600 - 1) == "3 h"


def test_control_characters_are_shown_not_obeyed():
    assert shown("a\x1b[2Jb\nc") == "a?[2Jb?c"
    assert shown("[red]x[/red]") == "\\[red]x\\[/red]"
