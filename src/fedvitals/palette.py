# SPDX-License-Identifier: Apache-2.0
"""The colours of fedvitals, each with one meaning, for the dashboard, reports, `fv.plot`, notebooks and the terminal.

The dashboard gets them as `static/palette.css` and `static/palette.js`, which this module writes. Colour is never the
only sign: severities have a shape, and parts of a round and lines have a label. `tests/test_palette.py` checks that
colours used in the same picture differ for readers with any kind of colour vision.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

# Ink, paper and severities by theme. A severity's own colour is for text and lines, its fill for areas.
LIGHT: Mapping[str, str] = {
    "ink": "#17202a", "ink-2": "#55606b", "paper": "#ffffff", "paper-2": "#f5f6f8", "paper-3": "#e9ecef",
    "line": "#d6dae0", "accent": "#005f94",
    "note": "#0a63a8", "warning": "#8a5300", "critical": "#b3261e", "ok": "#0b6b3a", "unjudged": "#6b3f86",
    "note-fill": "#2f7fc0", "warning-fill": "#e69f00", "critical-fill": "#c8322a", "ok-fill": "#3fae83",
}  # fmt: skip
DARK: Mapping[str, str] = {
    "ink": "#e8ebee", "ink-2": "#a3adb8", "paper": "#14181c", "paper-2": "#1c2126", "paper-3": "#272d34",
    "line": "#363e47", "accent": "#6cbcf0",
    "note": "#7fbef2", "warning": "#f0b84a", "critical": "#ff8f85", "ok": "#5fd39b", "unjudged": "#d3a4ea",
    "note-fill": "#4a94d6", "warning-fill": "#e69f00", "critical-fill": "#e5584e", "ok-fill": "#4fc79b",
}  # fmt: skip

# Lines: first the model or the first run, then clients or further runs. Hues of Okabe and Ito (2008), made darker or
# lighter until each has a contrast of 3 to its paper and no two of them look alike to any reader.
SERIES_LIGHT = ("#0072b2", "#d55e00", "#0b5d3b", "#b53a8b", "#7d5a00", "#3399e0", "#7b5bd6", "#868b93")
SERIES_DARK = ("#3d9bf0", "#f0682a", "#2fc79a", "#b9789f", "#ecb445", "#a5dcff", "#e4f06a", "#d0d0d4")
MODEL, CLIENT, OTHERS = *SERIES_LIGHT[:2], "#767676"  # the federation's model, a client, the other clients

# Parts of a round. Work has a hue and waiting is grey, so grey marks time in which nothing was done.
WAITING, QUEUEING = "#c9cdd2", "#e2e5e8"
PARTS: Mapping[str, str] = {
    "download": "#56b4e9",
    "data": "#f0e442",  # loading
    "compute": "#0072b2",
    "forward": "#0072b2",
    "backward": "#0b3a5e",
    "optimizer": "#7a4a12",
    "measure": "#6b7178",  # the time that fedvitals itself takes
    "upload": "#009e73",
    "receive": "#d55e00",
    "aggregate": "#cc79a7",
    "evaluate": "#e69f00",
    "examine": "#e69f00",
    "queue": QUEUEING,
    "start": QUEUEING,
    "reply": QUEUEING,
    "wait": WAITING,
    "idle": WAITING,
    "away": WAITING,
    "unaccounted": WAITING,
    # what bounds a round, and where bytes go
    "data loading": "#f0e442",
    "server": "#d55e00",
    "aggregation": "#cc79a7",
    "waiting": WAITING,
    "up": "#009e73",
    "down": "#56b4e9",
    "between": "#cc79a7",
    "telemetry": "#6b7178",
}
# On dark paper: dark areas become lighter, and waiting stays near the paper.
DARK_PARTS: Mapping[str, str] = {
    **PARTS, "backward": "#2b5f86", "optimizer": "#8a5417", "measure": "#a7adb5",
    **dict.fromkeys(("queue", "start", "reply"), "#363b42"),
    **dict.fromkeys(("wait", "idle", "away", "unaccounted", "waiting"), "#4a4f57"), "telemetry": "#a7adb5",
}  # fmt: skip

# Magnitudes (cividis), and signed values: blue to orange, with the paper in the middle.
CIVIDIS = (
    "#00224e", "#002e6a", "#1a386f", "#32436d", "#434e6c", "#535a6d", "#61656f", "#6f7073", "#7d7c78", "#8c8878",
    "#9b9476", "#aba072", "#bcae6c", "#cdbb63", "#dec958", "#f0d846", "#fee838",
)  # fmt: skip
SIGNED_LIGHT = (
    "#08306b", "#2166ac", "#4f93c7", "#92c0de", "#cfe1ee", "#f4f4f2", "#fbe0c3", "#f6b26b", "#e08214", "#b35806",
    "#7f3b08",
)  # fmt: skip
SIGNED_DARK = (
    "#b9dcf5", "#86c0ea", "#5596cc", "#356a99", "#2a4560", "#303236", "#5a4630", "#96632b", "#d18636", "#f2ab5c",
    "#fcd9ad",
)  # fmt: skip

SEVERITY_FILLS: Mapping[str, str] = {name: LIGHT[f"{name}-fill"] for name in ("note", "warning", "critical")}
SHAPES: Mapping[str, str] = {"note": "·", "warning": "▲", "critical": "■"}  # of a severity: never its colour alone

# Replacements on dark paper for the colours of pictures drawn for light paper.
ON_DARK: Mapping[str, str] = {
    **{colour: DARK_PARTS[part] for part, colour in PARTS.items() if colour != DARK_PARTS[part]},
    **dict(zip(SERIES_LIGHT, SERIES_DARK, strict=True)),
}


def part_colour(part: str) -> str:
    """Return the colour of a part of a round; grey for an unknown one."""
    return PARTS.get(part, WAITING)


def custom_properties(theme: Mapping[str, str]) -> str:
    """Return a theme as CSS declarations: «--ink: #17202a; …»."""
    return " ".join(f"--{name}: {colour};" for name, colour in theme.items())


def stylesheet() -> str:
    """Return both themes as CSS: light or dark by the system's preference, or by the page's `data-theme`."""
    dark = f"color-scheme: dark; {custom_properties(DARK)}"
    return (
        f":root {{ color-scheme: light; {custom_properties(LIGHT)} }}\n"
        f':root[data-theme="dark"] {{ {dark} }}\n'
        f"@media (prefers-color-scheme: dark) {{ :root:not([data-theme]) {{ {dark} }} }}\n"
    )


def javascript() -> str:
    """Return the palette as a JavaScript module."""
    names = {
        "THEMES": {"light": LIGHT, "dark": DARK},
        "SERIES": {"light": SERIES_LIGHT, "dark": SERIES_DARK},
        "PARTS": {"light": PARTS, "dark": DARK_PARTS},
        "SIGNED": {"light": SIGNED_LIGHT, "dark": SIGNED_DARK},
        "CIVIDIS": CIVIDIS,
        "SHAPES": SHAPES,
    }
    return "".join(f"export const {name} = {json.dumps(value)};\n" for name, value in names.items())
