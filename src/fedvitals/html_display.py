# SPDX-License-Identifier: Apache-2.0
"""Small pieces of HTML for notebooks: text is escaped, colours are inherited, there are no scripts or classes.

Text and background are the notebook's own, so that a display is readable in light and dark themes; a severity is a
word with a coloured edge.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from fedvitals.palette import SEVERITY_FILLS

_CELL = "text-align:left;vertical-align:top;padding:2px 10px 2px 6px"


def text(words: object) -> str:
    """Return text of any origin as HTML: markup escaped, characters that cannot be shown as «?»."""
    return escape("".join(c if c.isprintable() else "?" for c in str(words)))


def heading(name: object, *facts: object) -> str:
    """Return a line with a name in bold, followed by facts."""
    quiet = " · ".join(text(fact) for fact in facts)
    return f'<div><b>{text(name)}</b> <span style="opacity:.75">{quiet}</span></div>'


def paragraph(words: object, *, quiet: bool = False) -> str:
    """Return a paragraph; `quiet`: with less contrast."""
    return f'<div style="margin:4px 0{";opacity:.75" if quiet else ""}">{text(words)}</div>' if words else ""


def table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table of text, empty without rows. A cell that is a severity has its colour at the left edge."""
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    if not body:
        return ""
    head = "".join(f'<th style="{_CELL};opacity:.75">{text(title)}</th>' for title in titles)
    style = "border-collapse:collapse;color:inherit;font:inherit"  # by default browsers inherit neither
    return f'<table style="{style}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _cell(content: object) -> str:
    colour = SEVERITY_FILLS.get(content) if isinstance(content, str) else None
    edge = f";border-left:4px solid {colour}" if colour else ""
    return f'<td style="{_CELL}{edge}">{text("–" if content is None else content)}</td>'


def display(*parts: str) -> str:
    """Return parts as one display, one below the other."""
    return f'<div style="max-width:70em;overflow-x:auto">{"".join(parts)}</div>'
