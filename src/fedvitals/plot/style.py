# SPDX-License-Identifier: Apache-2.0
"""The common look of all pictures: colours that colour-blind readers can tell apart, hairlines, plain text.

Loads without matplotlib: what a page or a trial needs of colours must not need an extra.
"""

from __future__ import annotations

from collections.abc import Mapping

from fedvitals.views.short_ids import short

# Okabe and Ito's colours (2008) that can be seen on white and on black.
BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"
COLOURS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY)
INK, HAIRLINE = "#222222", "#767676"  # on a page, INK becomes the text's own colour
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

# From blue over paper to orange, for what has a sign: the same stops as the pages have (static/colour.js).
SIGNED = (
    "#08306b", "#2166ac", "#4f93c7", "#92c0de", "#cfe1ee", "#f4f4f2", "#fbe0c3", "#f6b26b", "#e08214", "#b35806",
    "#7f3b08",
)  # fmt: skip

NOT_THERE, FAILED, NOT_FINITE = "#d4d4d4", "#8a8a8a", "#000000"  # cells without a value

SEVERITY: Mapping[str, tuple[str, str]] = {  # colour and matplotlib's name of the shape: never colour alone
    "note": (BLUE, "o"),
    "warning": (ORANGE, "^"),
    "critical": (VERMILLION, "s"),
}

# Of the parts of a round, as the terminal has them (cli/bars.py).
PARTS: Mapping[str, str] = {
    "download": GREEN,
    "data": "#c9b400",
    "compute": SKY,
    "forward": SKY,
    "backward": BLUE,
    "optimizer": "#88ccee",
    "measure": "#bbbbbb",
    "upload": VERMILLION,
    "receive": ORANGE,
    "server": ORANGE,
    "aggregate": PURPLE,
    "aggregation": PURPLE,
    "evaluate": "#b37400",
    "queue": "#666666",
    "wait": "#e3e3e3",
    "idle": "#f0f0f0",
    "away": "#f0f0f0",
}
OTHER_PART = "#999999"
LONGEST_NAME = 28  # characters of a name on an axis


def part_colour(part: str) -> str:
    return PARTS.get(part, OTHER_PART)


def words(text: object, longest: int = LONGEST_NAME) -> str:
    """Return text from a record for a picture: without control characters or TeX mathematics, and not too long."""
    clean = "".join(c if c.isprintable() else "?" for c in short(str(text)))
    if len(clean) > longest:
        clean = f"{clean[: longest - 1]}…"
    return clean.replace("$", r"\$")


def axis_unit(unit: str) -> str:
    """Return the unit that follows a sign's name on its axis."""
    return {"1": "", "": "", "0/1": "", "share": " (%)", "seconds": " (s)"}.get(unit, f" ({unit})")
