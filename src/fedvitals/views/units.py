# SPDX-License-Identifier: Apache-2.0
"""Numbers as people read them: three digits, a unit, thin spaces between thousands. One way for every view."""

from __future__ import annotations

import math

THIN = "\u2009"  # between thousands


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


def percent(share: float | None) -> str:
    """A share or a probability, in whole percent."""
    return "–" if share is None or not math.isfinite(share) else f"{100 * share:.0f} %"
