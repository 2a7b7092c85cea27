# SPDX-License-Identifier: Apache-2.0
"""A page made of blocks, once as Markdown with pictures beside it, once as one HTML file that needs nothing else."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass

from fedvitals.trials.reproduce_beyond import Table
from fedvitals.trials.reproduce_plot import for_page


@dataclass(frozen=True, slots=True)
class Heading:
    level: int
    text: str


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph; `code` and **strong** are all the markup there is."""

    text: str


@dataclass(frozen=True, slots=True)
class Points:
    points: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Code:
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Picture:
    svg: str
    file: str  # relative to the page
    words: str  # for who cannot see it


Block = Heading | Text | Points | Code | Picture | Table

STYLE = """
:root{color-scheme:light dark;--ink:#1c1c1c;--quiet:#5d5d5d;--paper:#fff;--hair:#d5d5d5}
@media (prefers-color-scheme:dark){:root{--ink:#e6e6e6;--quiet:#a2a2a2;--paper:#141414;--hair:#3a3a3a}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:60rem;margin:2rem auto;
padding:0 1rem;font-variant-numeric:tabular-nums}
h1{font-size:1.6rem;line-height:1.25}h2{font-size:1.3rem;margin-top:3rem;border-bottom:1px solid var(--hair)}
h3{font-size:1rem;margin:2rem 0 .5rem}
figure{margin:0}figure svg{width:100%;height:auto;max-width:52rem}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:13px;line-height:1.4}
caption{text-align:left;font-weight:600;padding:1rem 0 .25rem}
th,td{text-align:left;vertical-align:top;padding:.25rem .75rem .25rem 0;border-bottom:1px solid var(--hair)}
th{color:var(--quiet);font-weight:600}code,pre{font:13px/1.5 ui-monospace,monospace}
pre{border:1px solid var(--hair);padding:.5rem .75rem;overflow-x:auto}
.quiet{color:var(--quiet);font-size:13px}nav{columns:2;font-size:13px}nav a{display:block;color:inherit}
"""


def markdown(blocks: Sequence[Block]) -> str:
    """For a reader of the repository; pictures are files beside it."""
    return "\n\n".join(_markdown(block) for block in blocks) + "\n"


def _markdown(block: Block) -> str:
    match block:
        case Heading():
            return f"{'#' * block.level} {block.text}"
        case Text():
            return block.text
        case Points():
            return "\n".join(f"- {point}" for point in block.points)
        case Code():
            return "\n".join(("```sh", *block.lines, "```"))
        case Picture():
            return f"![{block.words}]({block.file})"
        case Table():
            rows = [block.head, ("---",) * len(block.head), *block.rows]
            lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
            return "\n".join((f"**{block.title}**", "", *lines, *(("", block.note) if block.note else ())))


def page(blocks: Sequence[Block], title: str) -> str:
    """One file: pictures and style inside it, no script, light or dark as the reader has it."""
    sections = [block for block in blocks if isinstance(block, Heading) and block.level in {2, 3}]
    links = "".join(
        f'<a href="#{_anchor(block.text)}">{"  " * (block.level - 2)}{_inline(block.text)}</a>' for block in sections
    )
    first = next((place for place, block in enumerate(blocks) if isinstance(block, Heading) and block.level == 2), 0)
    body = "\n".join(_html(block) for block in blocks[:first])
    rest = "\n".join(_html(block) for block in blocks[first:])
    return (
        f'<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{html.escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{STYLE}</style></head>\n'
        f"<body>\n{body}\n<nav>{links}</nav>\n{rest}\n</body>\n</html>\n"
    )


def _html(block: Block) -> str:
    match block:
        case Heading():
            return f'<h{block.level} id="{_anchor(block.text)}">{_inline(block.text)}</h{block.level}>'
        case Text():
            return f"<p>{_inline(block.text)}</p>"
        case Points():
            return "<ul>" + "".join(f"<li>{_inline(point)}</li>" for point in block.points) + "</ul>"
        case Code():
            return f"<pre>{html.escape(chr(10).join(block.lines))}</pre>"
        case Picture():
            return f"<figure>{for_page(block.svg)}</figure>"
        case Table():
            head = "".join(f"<th>{_inline(cell)}</th>" for cell in block.head)
            rows = "".join(f"<tr>{''.join(f'<td>{_inline(c)}</td>' for c in row)}</tr>\n" for row in block.rows)
            note = f'<p class="quiet">{_inline(block.note)}</p>' if block.note else ""
            return (
                f'<div class="wide"><table><caption>{_inline(block.title)}</caption>'
                f"<thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody></table></div>{note}"
            )


def _inline(text: str) -> str:
    text = html.escape(text, quote=False)
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", text)
    text = re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", text)
    return text.replace("&lt;br&gt;", "<br>")  # the one tag that a cell of a table needs, as in Markdown


def _anchor(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
