# SPDX-License-Identifier: Apache-2.0
"""The ends of a linear axis: wide enough not to mislead, and never beyond what the unit allows.

The dashboard's `static/charts/scales.js` has the same rule; `tests/views/test_axis_ends.py` checks both against it.
"""

from __future__ import annotations

LEAST = {"share": 0.1, "points": 10.0}  # smallest length of an axis in a unit
LEAST_PART = 0.1  # the same for any other unit, relative to the largest value
LEAST_PARTS = {"seconds": 0.25, "s": 0.25, "bytes": 0.25, "B": 0.25}  # amounts, whose heights are read as ratios
COUNTS = ("steps", "samples", "values", "events", "clients", "rounds", "records")  # units without fractions
TO_ZERO = 0.5  # of the largest value: if the smallest is below it, the axis begins at 0
ROOM = 0.06  # of the values' span, above and below them


def honest_ends(low: float, high: float, unit: str) -> tuple[float, float]:
    """Return the ends of an axis for values from `low` to `high`.

    A small change stays a small slope: accuracy that falls from 10.3 % to 9.5 % is no cliff. A share never reaches 110
    %, and values that are never negative have their floor at 0. If one value is at least twice another, the axis begins
    at 0, so that heights are in proportion.
    """
    least = LEAST.get(unit, LEAST_PARTS.get(unit, LEAST_PART) * max(abs(low), abs(high)))
    least = max(least, 1.0) if unit in COUNTS else least
    missing = max(0.0, least - (high - low)) / 2
    room = max(missing, ROOM * (high - low))
    bottom, top = low - room, high + room
    if 0 <= low < TO_ZERO * high:
        bottom = 0.0
    elif low >= 0 and bottom < 0:
        bottom, top = 0.0, max(top, least) if missing else top
    if unit == "share" and high <= 1 < top:
        bottom, top = min(bottom, 1 - least) if missing else bottom, 1.0
    return (bottom, top) if top > bottom else (bottom, bottom + 1.0)  # if all values are zero, they lie on the floor
