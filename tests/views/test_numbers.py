# SPDX-License-Identifier: Apache-2.0
"""Numbers for people: Python (terminal, report, plots) and the dashboard's JavaScript write them by the same rules."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from fedvitals.views import units
from support.dashboard_server import needs_browser
from support.gallery_server import gallery_served
from support.paths import GOLDEN

CASES = json.loads((GOLDEN / "number_cases.json").read_text(encoding="utf-8"))
NAMES = {"bytes": units.size, "with_unit": units.with_unit}


def plain(text: str) -> str:
    """With one kind of space: a terminal and a browser want different ones."""
    return re.sub(r"\s", " ", text)


def test_python_writes_them_so():
    for name, cases in CASES.items():
        write = NAMES.get(name) or getattr(units, name)
        for *asked, wanted in cases:
            assert plain(write(*asked)) == wanted, (name, asked)


@pytest.mark.parametrize(("value", "wanted"), [(float("nan"), "NaN"), (float("inf"), "∞"), (float("-inf"), "−∞")])
def test_what_is_no_number_is_said_so(value, wanted):
    assert {write(value) for write in (units.number, units.size, units.seconds, units.percent)} == {wanted}
    assert units.with_unit(value, "seconds") == wanted


@pytest.mark.parametrize(
    ("value", "unit", "wanted"), [(1, "cases", "1"), (0, "cases", "0"), (14, "rounds", "14"), (None, "rounds", "never")]
)
def test_what_a_comparison_counts_is_named_by_its_row(value, unit, wanted):
    assert units.compared(value, unit) == wanted


@pytest.mark.browser
@needs_browser
def test_the_dashboard_counts_places(page: Any):
    with gallery_served() as gallery:
        page.goto(gallery)
        written = page.evaluate(
            """async (places) => {
              const { ordinal } = await import("/static/format.js");
              return places.map(ordinal);
            }""",
            [1, 2, 3, 4, 11, 12, 13, 21, 102, 111],
        )
    assert written == ["1st", "2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "102nd", "111th"]


@pytest.mark.browser
@needs_browser
def test_the_dashboard_writes_them_so(page: Any):
    with gallery_served() as gallery:
        page.goto(gallery)
        written = page.evaluate(
            """async (cases) => {
              const { number, bytes, seconds, percent, withUnit } = await import("/static/format.js");
              const by = { number, bytes, seconds, percent, with_unit: withUnit };
              return Object.fromEntries(Object.entries(cases).map(
                ([name, rows]) => [name, rows.map((row) => by[name](...row.slice(0, -1)))]));
            }""",
            CASES,
        )
    for name, cases in CASES.items():
        assert [plain(text) for text in written[name]] == [wanted for *_, wanted in cases], name
