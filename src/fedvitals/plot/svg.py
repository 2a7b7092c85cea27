# SPDX-License-Identifier: Apache-2.0
"""A figure as small SVG: the same data give the same bytes, text stays text, and ids do not clash on one page."""

from __future__ import annotations

import re

from fedvitals.plot.style import INK


def for_page(svg: str) -> str:
    """The same picture for a page of any background: no white behind it, ink in the text's colour."""
    return re.sub(r'<rect class="paper"[^>]*/>', "", svg).replace(INK, "currentColor")


def tidied(svg: str, title: str) -> str:
    """Without what a page does not need: header, metadata, ids that nothing refers to, decimals that nobody sees."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"\s*<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r' id="[A-Za-z0-9]+_\d+"', "", svg)
    svg = re.sub(r' (?:d|x|y|transform)="[^"]+"', lambda found: re.sub(r"-?\d+\.\d\d+", _tenths, found[0]), svg)
    svg = re.sub(r' d="[^"]+"', lambda found: re.sub(r"\s*([MLz])\s*", r"\1", found[0]), svg)
    svg = re.sub(r"(font: (?:\d+ )?[\d.]+px) [^;\"]+", r"\1 system-ui, sans-serif", svg)
    svg = re.sub(r"\n\s*", "\n", svg)
    head = svg.index(">") + 1
    words = title.replace("&", "&amp;").replace("<", "&lt;")
    opening = svg[:head].replace("<svg", '<svg role="img"', 1)
    paper = '<rect class="paper" width="100%" height="100%" fill="#fff"/>'
    return f"{opening}\n<title>{words}</title>\n{paper}{svg[head:]}"


def _tenths(number: re.Match[str]) -> str:
    return f"{float(number[0]):.1f}".removesuffix(".0")
