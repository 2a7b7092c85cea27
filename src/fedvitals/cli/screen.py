# SPDX-License-Identifier: Apache-2.0
"""Numbers and small pictures for a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedvitals.views.units import number, seconds, size, with_unit

__all__ = ["number", "seconds", "shown", "size", "sparkline", "with_unit"]

BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """Return values as small blocks, with a gap for what is missing. Long series keep each bucket's last value."""
    if len(values) > width:
        values = [values[(i + 1) * len(values) // width - 1] for i in range(width)]
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return "·" * len(values)
    low, high = min(finite), max(finite)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((v - low) * scale)] if math.isfinite(v) else "·" for v in values)


def shown(text: str) -> str:
    """Return text from a record that is safe on a terminal: no control characters, no markup."""
    from rich.markup import escape

    return escape("".join(c if c.isprintable() else "?" for c in text))
