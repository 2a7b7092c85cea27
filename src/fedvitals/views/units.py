# SPDX-License-Identifier: Apache-2.0
"""Formats numbers for people: three digits, a unit, thin spaces between thousands.

The dashboard's `static/format.js` has the same rules; `tests/number_cases.json` checks both. Only the spaces differ: a
terminal and a report use plain ones before a unit.
"""

from __future__ import annotations

import math
from decimal import ROUND_HALF_UP, Context, Decimal

from fedvitals.views.axis_ends import COUNTS

THIN = "\u2009"  # between thousands
NONE = "–"
MINUS = "−"
SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
PREFIXES = ("", "k", "M", "G", "T", "P", "E")
MINUTE, HOUR, DAY = 60, 3600, 86400
_THREE = Context(prec=3, rounding=ROUND_HALF_UP)


def _unusual(value: float | None) -> str | None:
    """Return the text for a value that is no finite number; None if it is one."""
    if value is None:
        return NONE
    if math.isnan(value):
        return "NaN"
    return None if math.isfinite(value) else "∞" if value > 0 else f"{MINUS}∞"


def _three(size: float) -> Decimal:
    return _THREE.create_decimal(Decimal(size))


def _thousands(whole: int) -> str:
    return f"{whole:,}".replace(",", THIN)


def number(value: float | None, unit: str = "") -> str:
    """Return three significant digits, integers under ten million in full, and the unit as given."""
    word = _unusual(value)
    if word is not None or value is None:
        return word or NONE
    return f"{MINUS if value < 0 else ''}{_size(abs(value))}{unit}"


def _size(size: float) -> str:
    if float(size).is_integer() and size < 1e7:
        return _thousands(int(size))
    if size >= 1e6 or size < 1e-3:
        short = _three(size)
        mantissa, power = f"{float(short.scaleb(-short.adjusted())):g}", str(short.adjusted()).translate(SUPERSCRIPT)
        return f"{'' if mantissa == '1' else f'{mantissa}×'}10{power}"
    return _thousands(math.floor(size + 0.5)) if size >= 1000 else f"{float(_three(size)):g}"


def size(value: float | None, unit: str = "B") -> str:
    """Return an amount of bytes."""
    word = _unusual(value)
    if word is not None or value is None:
        return word or NONE
    rest, step = abs(value), 0
    # 999.9 would round to «1000 kB»: take the next prefix there.
    while step < len(PREFIXES) - 1 and _three(rest) >= 1000:
        rest, step = rest / 1000, step + 1
    return f"{MINUS if value < 0 else ''}{float(_three(rest)):g} {PREFIXES[step]}{unit}"


def seconds(value: float | None) -> str:
    """Format a duration."""
    word = _unusual(value)
    if word is not None or value is None:
        return word or NONE
    sign, size = MINUS if value < 0 else "", abs(value)
    if size == 0:
        return "0 s"
    for below, factor, unit in ((0.9995e-6, 1e9, "ns"), (0.9995e-3, 1e6, "µs"), (0.9995, 1e3, "ms"), (59.95, 1, "s")):
        if size < below:
            return f"{sign}{number(size * factor)} {unit}"
    whole = math.floor(size + 0.5)
    if whole < HOUR:
        return sign + _pair(whole, MINUTE, "min", "s")
    if whole < DAY:
        return sign + _pair(math.floor(whole / MINUTE + 0.5), 60, "h", "min")
    return sign + _pair(math.floor(whole / HOUR + 0.5), 24, "d", "h")


def _pair(count: int, many: int, large: str, small: str) -> str:
    whole, rest = divmod(count, many)
    return f"{_thousands(whole)} {large}{f' {rest} {small}' if rest else ''}"


def percent(share: float | None) -> str:
    """Return a share between 0 and 1 as per cent."""
    word = _unusual(share)
    if word is not None or share is None:
        return word or NONE
    return number(float(_three(share * 100)), " %")


def whole_percent(share: float | None) -> str:
    """Return a share in whole per cent, if more digits would be meaningless; for a probability, see `certainty`."""
    return NONE if share is None or not math.isfinite(share) else f"{100 * share:.0f} %"


def compared(value: float | None, unit: str) -> str:
    """Return a number of a comparison of runs: «never» for rounds that were not reached, «3 ×» for factors."""
    if value is None and unit == "rounds":
        return "never"
    if unit in ("rounds", "cases"):
        return number(value)  # the row's name says what is counted
    return f"{number(value)} ×" if unit == "times" and value is not None else with_unit(value, unit)


def with_unit(value: float | None, unit: str) -> str:
    """Return a metric's value in the catalogue's unit, formatted for people."""
    known = {"seconds": seconds, "s": seconds, "bytes": size, "B": size, "share": percent}
    word = _unusual(value)
    if word is not None:
        return word
    if unit in known:
        return known[unit](value)
    if unit == "bytes/s":
        return size(value, "B/s")
    unit = unit.removesuffix("s") if value == 1 and unit in COUNTS else unit
    return number(value, "" if unit in ("", "1", "0/1", "class") else f" {'%' if unit == 'percent' else unit}")
