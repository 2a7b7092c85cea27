# SPDX-License-Identifier: Apache-2.0
"""Numbers and small pictures for a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

BARS = "▁▂▃▄▅▆▇█"
THIN = "\u2009"  # between thousands


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """The course of a value; what is missing or not finite is a gap. Longer courses keep each bucket's last value."""
    if len(values) > width:
        values = [values[(i + 1) * len(values) // width - 1] for i in range(width)]
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return "·" * len(values)
    low, high = min(finite), max(finite)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((v - low) * scale)] if math.isfinite(v) else "·" for v in values)


def number(value: float | None, unit: str = "") -> str:
    """Three significant digits, thin spaces between thousands, and the unit."""
    if value is None:
        return "–"
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0:
        text = "0"
    elif abs(value) >= 1e6 or abs(value) < 1e-4:
        text = f"{value:.2e}"
    elif abs(value) >= 1000 or float(value).is_integer():
        text = f"{value:,.0f}".replace(",", THIN)
    else:
        text = f"{value:.3g}"
    return f"{text}{unit}".replace("-", "−")


def seconds(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "–"
    if value >= 7200:
        hours, minutes = divmod(round(value / 60), 60)
        return f"{hours} h {minutes} min"
    if value >= 120:
        return f"{value // 60:.0f} min {value % 60:.0f} s"
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
        if value * factor >= 1:
            return f"{value * factor:.3g} {unit}"
    return "0 s"


def size(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "–"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(value) < 1000 or unit == "TB":
            return f"{value:.3g} {unit}"
        value /= 1000
    return "–"


def with_unit(value: float | None, unit: str) -> str:
    """A metric's value in the catalogue's unit, as people write it."""
    match unit:
        case "seconds":
            return seconds(value)
        case "bytes":
            return size(value)
        case "1" | "":
            return number(value)
        case "share" if value is not None and math.isfinite(value):
            return f"{100 * value:.3g} %"
        case _:
            return number(value)


def shown(text: str) -> str:
    """Text from a record, fit for a terminal: no control character moves the cursor, no markup changes the style."""
    from rich.markup import escape

    return escape("".join(c if c.isprintable() else "?" for c in text))
