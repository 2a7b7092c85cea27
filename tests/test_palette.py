# SPDX-License-Identifier: Apache-2.0
"""The palette: read by everybody, the same everywhere, and written down once."""

import itertools
import math
import re

import pytest

from fedvitals import palette
from support.paths import TESTS

# Dichromatic vision after Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB.
VISION = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protan": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deutan": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
    "tritan": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.3039)),
}
APART = 0.05  # in OKLab, where black and white are 1 apart
SOURCES = TESTS.parent / "src" / "fedvitals"
# Cells without a value, marks on them, and text over any colour: black, white and greys without a meaning.
WITHOUT_HUE = re.compile(r"#(?P<two>[0-9a-f]{2})(?P=two)(?P=two)$")


def linear(colour):
    shares = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]


def oklab(rgb):
    r, g, b = (min(1.0, max(0.0, share)) for share in rgb)
    long = (0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b) ** (1 / 3)
    medium = (0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b) ** (1 / 3)
    short = (0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b) ** (1 / 3)
    return (
        0.2104542553 * long + 0.793617785 * medium - 0.0040720468 * short,
        1.9779984951 * long - 2.428592205 * medium + 0.4505937099 * short,
        0.0259040371 * long + 0.7827717662 * medium - 0.808675766 * short,
    )


def seen(colour, vision):
    return oklab([sum(a * b for a, b in zip(row, linear(colour), strict=True)) for row in VISION[vision]])


def alike(colours):
    """Pairs that a reader cannot tell apart, with the kind of vision."""
    return [
        (first, other, vision, round(math.dist(seen(first, vision), seen(other, vision)), 3))
        for first, other in itertools.combinations(dict.fromkeys(colours), 2)
        for vision in VISION
        if math.dist(seen(first, vision), seen(other, vision)) < APART
    ]


def contrast(*colours):
    lights = sorted(sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear(x), strict=True)) for x in colours)
    return (lights[1] + 0.05) / (lights[0] + 0.05)


@pytest.mark.parametrize(
    "colours",
    [
        palette.SERIES_LIGHT,
        palette.SERIES_DARK,
        tuple(palette.PARTS.values()),
        tuple(palette.DARK_PARTS.values()),
        *(tuple(theme[f"{name}-fill"] for name in ("note", "warning", "critical", "ok"))
          for theme in (palette.LIGHT, palette.DARK)),
    ],
    ids=["lines", "lines on dark", "parts", "parts on dark", "severities", "severities on dark"],
)  # fmt: skip
def test_colours_of_one_picture_differ_for_every_kind_of_colour_vision(colours):
    assert alike(colours) == []


def test_the_check_sees_red_and_green():
    assert alike(("#b00000", "#5a6a00"))


@pytest.mark.parametrize("theme", [palette.LIGHT, palette.DARK], ids=["light", "dark"])
def test_text_has_a_contrast_of_four_and_a_half_and_lines_of_three(theme):
    for name in ("ink", "ink-2", "accent", "note", "warning", "critical", "ok", "unjudged"):
        assert contrast(theme[name], theme["paper"]) >= 4.5, name
    lines = palette.SERIES_LIGHT if theme is palette.LIGHT else palette.SERIES_DARK
    assert min(contrast(colour, theme["paper"]) for colour in lines) >= 3


def test_no_other_file_has_colours_of_its_own():
    found = {}
    for path in SOURCES.rglob("*"):
        if path.suffix not in (".py", ".js", ".css") or path.name == "palette.py":
            continue
        own = [one for one in re.findall(r"#[0-9a-fA-F]{6}\b", path.read_text()) if not WITHOUT_HUE.match(one.lower())]
        if own:
            found[str(path.relative_to(SOURCES))] = own
    assert found == {}


def test_the_dashboard_gets_the_palette_as_css_and_as_a_module():
    from fedvitals.dashboard.files import Files

    files = Files()
    assert f"--critical: {palette.DARK['critical']};" in files.get("palette.css").body.decode()
    assert palette.PARTS["compute"] in files.get("palette.js").body.decode()
    assert "palette.js" in files.modules("app.js", "views/overview.js")
