# SPDX-License-Identifier: Apache-2.0
"""Figures as small SVG: the same data give the same bytes, text stays text, and ids do not clash on one page."""

from __future__ import annotations

import html
import io
import re
import warnings
from typing import TYPE_CHECKING

from fedvitals.palette import ON_DARK
from fedvitals.plot.style import INK

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ON_LIGHT = re.compile("|".join(ON_DARK), re.IGNORECASE)
NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}


def svg_of(figure: Figure, title: str, key: str) -> str:
    """Return the figure as SVG with a title for screen readers. `key` keeps its ids distinct from other figures'."""
    import matplotlib as mpl  # noqa: PLC0415 - an extra; a figure is there, so this is, too

    from fedvitals.plot.canvas import in_style  # noqa: PLC0415

    buffer = io.StringIO()
    with in_style(), mpl.rc_context({"svg.hashsalt": key}), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a character that our font lacks: the reader's browser has it
        figure.savefig(buffer, format="svg", metadata=NO_METADATA, facecolor="none", edgecolor="none")
    return apart(tidied(buffer.getvalue(), title), key)


def apart(svg: str, key: str) -> str:
    """Add the key to every remaining id, and to the references to it."""
    names = set(re.findall(r' id="([^"]+)"', svg))
    for name in sorted(names, key=len, reverse=True):
        for before, after in ((f'id="{name}"', f'id="{key}-{name}"'), (f'href="#{name}"', f'href="#{key}-{name}"')):
            svg = svg.replace(before, after)
        svg = svg.replace(f"url(#{name})", f"url(#{key}-{name})")
    return svg


def for_page(svg: str) -> str:
    """Return the picture for a page of any background: no white behind it, ink in the text's colour.

    Colours that differ in dark mode become custom properties, which `dark_style` sets.
    """
    svg = re.sub(r'<rect class="paper"[^>]*/>', "", svg).replace(INK, "currentColor")
    return _ON_LIGHT.sub(lambda colour: f"var({_property(colour[0])},{colour[0]})", svg)


def dark_style() -> str:
    """Return the declarations that give pictures on a page their colours in dark mode."""
    return "".join(f"{_property(light)}:{dark};" for light, dark in ON_DARK.items())


def _property(colour: str) -> str:
    return f"--on-{colour.removeprefix('#').lower()}"


def tidied(svg: str, title: str) -> str:
    """Remove what a page does not need: header, metadata, ids without references, invisible decimals."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"\s*<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r' id="[A-Za-z0-9]+_\d+"', "", svg)
    svg = re.sub(r' (?:d|x|y|transform)="[^"]+"', lambda match: re.sub(r"-?\d+\.\d\d+", _tenths, match[0]), svg)
    svg = re.sub(r' d="[^"]+"', lambda match: re.sub(r"\s*([MLz])\s*", r"\1", match[0]), svg)
    svg = re.sub(r"(font: (?:\d+ )?[\d.]+px) [^;\"]+", r"\1 system-ui, sans-serif", svg)
    svg = re.sub(r"\n\s*", "\n", svg)
    head = svg.index(">") + 1
    words = html.escape(title, quote=False)
    opening = svg[:head].replace("<svg", '<svg role="img"', 1)
    paper = '<rect class="paper" width="100%" height="100%" fill="#fff"/>'
    return f"{opening}\n<title>{words}</title>\n{paper}{svg[head:]}"


def _tenths(number: re.Match[str]) -> str:
    return f"{float(number[0]):.1f}".removesuffix(".0")
