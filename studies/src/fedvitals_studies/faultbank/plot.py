# SPDX-License-Identifier: Apache-2.0
"""The fault bank's plots as small SVG, written by hand: no library is needed, the same figures give the same bytes.

Colours are Okabe and Ito's; every line has its name at its end and its own dash pattern, every cell its number.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

from fedvitals.palette import MODEL as BLUE
from fedvitals.plot.style import COLOURS, HAIRLINE, INK
from fedvitals_studies.faultbank.intervals import Bin
from fedvitals_studies.faultbank.report import Confusion, Curve

DASHES = ("", "6 3", "2 2", "8 3 2 3", "4 4", "1 3")
LEFT, TOP, WIDE, HIGH = 44, 26, 230, 180  # of a panel's axes, in points
LINE_GAP = 13  # between two labels
LETTER = 6.6  # average width of a letter at most, in points: reserves the room of a label
CELL, ROW = 40, 20  # of a matrix
PAGE = 832  # width of a page in points: a narrow plot is not scaled up to it


def delay_curves(panels: Sequence[tuple[str, Sequence[Curve]]], title: str) -> str:
    """Return the share of targets found by the n-th participation; panels side by side."""
    parts, left = [], 0
    for name, curves in panels:
        points = max((len(curve.shares) for curve in curves), default=2)
        across = [LEFT + WIDE * at / max(1, points - 1) for at in range(points)]
        body = [_axes(name, "participation after the onset", [(x, str(at + 1)) for at, x in enumerate(across)])]
        drawn = [curve for curve in curves if curve.shares]
        for number, curve in enumerate(drawn):
            line = " ".join(f"{x:.1f},{_height(share):.1f}" for x, share in zip(across, curve.shares, strict=True))
            dash = f' stroke-dasharray="{DASHES[number % len(DASHES)]}"' if number % len(DASHES) else ""
            colour = COLOURS[number % len(COLOURS)]
            body.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.6"{dash}/>')
        body += _labels(drawn)
        parts.append(f'<g transform="translate({left},0)">{"".join(body)}</g>')
        left += LEFT + WIDE + 20 + round(LETTER * max((len(_named(curve)) for curve in drawn), default=0))
    return _svg(left, TOP + HIGH + 40, title, "".join(parts))


def reliability(bins: Sequence[Bin], title: str) -> str:
    """Return stated probabilities against observed frequencies; a dot's area is its bin's mass, the diagonal is
    perfect.
    """
    ticks = [(LEFT + WIDE * at, f"{100 * at:.0f} %") for at in (0, 0.25, 0.5, 0.75, 1)]
    body = [_axes("how often it was so", "probability that was stated", ticks)]
    body.append(_line(LEFT, _height(0), LEFT + WIDE, _height(1), dash="3 3"))
    most = max((each.count for each in bins), default=1)
    points = " ".join(f"{LEFT + WIDE * each.stated:.1f},{_height(each.observed):.1f}" for each in bins)
    body.append(f'<polyline points="{points}" fill="none" stroke="{BLUE}" stroke-width="1.4"/>')
    for each in bins:
        radius = 1.5 + 3.5 * (each.count / most) ** 0.5
        words = f"stated {each.stated:.3f}, so {each.observed:.3f}, {each.count} times"
        body.append(
            f'<circle cx="{LEFT + WIDE * each.stated:.1f}" cy="{_height(each.observed):.1f}" r="{radius:.1f}" '
            f'fill="{BLUE}" fill-opacity="0.7"><title>{words}</title></circle>'
        )
    return _svg(LEFT + WIDE + 30, TOP + HIGH + 40, title, "".join(body))


def matrix(confusion: Confusion, title: str) -> str:
    """Return a matrix with the true kinds as rows and the named ones as columns. Shade: share of the row; number:
    count.
    """
    left = 8 + round(LETTER * max((len(kind) for kind in confusion.kinds), default=8))
    head = 14 + 0.77 * LETTER * max((len(cause) for cause in confusion.causes), default=8)
    body = []
    for column, cause in enumerate(confusion.causes):
        x = left + CELL * column + CELL / 2
        body.append(f'<text transform="translate({x:.0f},{head - 6:.0f}) rotate(-50)">{_words(cause.lower())}</text>')
    for place, (kind, counts) in enumerate(zip(confusion.kinds, confusion.counts, strict=True)):
        y = head + ROW * place
        body.append(f'<text x="{left - 6}" y="{y + 14:.0f}" text-anchor="end">{_words(kind)}</text>')
        for column, count in enumerate(counts):
            part = count / max(1, sum(counts))
            x = left + CELL * column
            hint = _words(f"{kind} called {cause.lower()}: {count}")
            body.append(
                f'<rect x="{x}" y="{y:.0f}" width="{CELL - 1}" height="{ROW - 1}" fill="{BLUE}" '
                f'fill-opacity="{0.6 * part + 0.04:.2f}"><title>{hint}</title></rect>'
            )
            if count:
                body.append(f'<text x="{x + CELL / 2:.0f}" y="{y + 14:.0f}" text-anchor="middle">{count}</text>')
    wide = left + CELL * len(confusion.causes) + head
    return _svg(wide, head + ROW * len(confusion.kinds) + 10, title, "".join(body))


def _height(share: float) -> float:
    return TOP + HIGH * (1 - share)


def _axes(name: str, x: str, ticks: Sequence[tuple[float, str]]) -> str:
    parts = [f'<text x="{LEFT}" y="{TOP - 10}">{_words(name)}</text>']
    for share in (0, 0.25, 0.5, 0.75, 1):
        parts.append(_line(LEFT, _height(share), LEFT + WIDE, _height(share), opacity=0.35))
        parts.append(f'<text x="{LEFT - 5}" y="{_height(share) + 4:.0f}" text-anchor="end">{100 * share:.0f} %</text>')
    parts += [f'<text x="{at:.0f}" y="{TOP + HIGH + 15}" text-anchor="middle">{label}</text>' for at, label in ticks]
    parts.append(f'<text x="{LEFT + WIDE / 2:.0f}" y="{TOP + HIGH + 31}" text-anchor="middle">{_words(x)}</text>')
    return "".join(parts)


def _labels(curves: Sequence[Curve]) -> list[str]:
    """Return names at the line ends, moved apart where they would overlap."""
    order = sorted(range(len(curves)), key=lambda number: curves[number].shares[-1])
    parts, above = [], TOP + HIGH + LINE_GAP + 4.0
    heights = {}
    for number in order:
        above = min(_height(curves[number].shares[-1]) + 4, above - LINE_GAP)
        heights[number] = above
    lift = max(0.0, TOP - above)  # the topmost stays within the plot
    for number in order:
        curve, end = curves[number], _height(curves[number].shares[-1])
        at = heights[number] + lift
        parts.append(_line(LEFT + WIDE + 2, end, LEFT + WIDE + 14, at - 4, COLOURS[number % len(COLOURS)]))
        parts.append(f'<text x="{LEFT + WIDE + 17}" y="{at:.0f}">{_words(_named(curve))}</text>')
    return parts


def _named(curve: Curve) -> str:
    return f"{curve.label} ({curve.targets})"


def _line(
    x1: float, y1: float, x2: float, y2: float, colour: str = HAIRLINE, dash: str = "", opacity: float = 1.0
) -> str:
    more = (f' stroke-dasharray="{dash}"' if dash else "") + (f' opacity="{opacity:g}"' if opacity < 1 else "")
    return f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="{colour}" stroke-width="0.7"{more}/>'


def _words(text: str) -> str:
    return html.escape(text, quote=False)


def _svg(wide: float, high: float, title: str, body: str) -> str:
    wide = max(wide, PAGE)
    return (
        f'<svg role="img" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:.0f} {high:.0f}" width="{wide:.0f}" '
        f'height="{high:.0f}" font-family="system-ui, sans-serif" font-size="11" fill="{INK}">\n'
        f"<title>{_words(title)}</title>\n"
        f'<rect class="paper" width="100%" height="100%" fill="#fff"/>{body}\n</svg>\n'
    )
