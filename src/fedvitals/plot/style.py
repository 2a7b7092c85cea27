# SPDX-License-Identifier: Apache-2.0
"""The common look of all pictures: colours that colour-blind readers can tell apart, hairlines, plain text.

Can be imported without matplotlib: using the colours in a page or a trial must not need an extra.
"""

from __future__ import annotations

from collections.abc import Mapping

from fedvitals.palette import SERIES_LIGHT, SEVERITY_FILLS
from fedvitals.views.short_ids import differing_parts, short

COLOURS = SERIES_LIGHT[:6]
INK, HAIRLINE = "#222222", "#767676"  # on a page, INK becomes the text's own colour
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

NOT_THERE, FAILED, NOT_FINITE = "#d4d4d4", "#8a8a8a", "#000000"  # cells without a value

_SHAPES = {"note": "o", "warning": "^", "critical": "s"}  # matplotlib's names
SEVERITY: Mapping[str, tuple[str, str]] = {  # colour and shape: never the colour alone
    name: (colour, _SHAPES[name]) for name, colour in SEVERITY_FILLS.items()
}
LONGEST_NAME = 28  # characters of a name on an axis


def words(text: object, longest: int = LONGEST_NAME) -> str:
    """Return text from a record for a picture: without control characters or TeX mathematics, and not too long."""
    clean = "".join(c if c.isprintable() else "?" for c in short(str(text)))
    if len(clean) > longest:
        (clean,) = differing_parts([clean], longest)
    return clean.replace("$", r"\$")


def axis_unit(unit: str) -> str:
    """Return the unit that follows a sign's name on its axis."""
    return {"1": "", "": "", "0/1": "", "share": " (%)", "seconds": " (s)"}.get(unit, f" ({unit})")
