# SPDX-License-Identifier: Apache-2.0
"""Pages made of blocks, written as Markdown with pictures beside it or as one self-contained HTML file.

Text has three marks, as in Markdown: `code`, **strong** and a backslash that escapes the next character. Text from
records goes through `literal`, so that no name is ever markup, in either form.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fedvitals.errors import MissingExtraError
from fedvitals.palette import DARK, LIGHT
from fedvitals.plot.svg import dark_style, for_page, svg_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Heading:
    """A heading; level 1 is the title."""

    level: int
    text: str


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph."""

    text: str
    kind: str = ""  # a class of the style: «quiet», «lead»


@dataclass(frozen=True, slots=True)
class Points:
    """A list, numbered or not."""

    points: tuple[str, ...]
    numbered: bool = False


@dataclass(frozen=True, slots=True)
class Code:
    """Lines shown literally, without characters that no page can show."""

    lines: tuple[str, ...]
    language: str = "sh"

    @property
    def clean(self) -> list[str]:
        shown = (part for line in self.lines for part in line.expandtabs(4).split("\n"))
        return ["".join(c if c.isprintable() else "?" for c in line) for line in shown]


@dataclass(frozen=True, slots=True)
class Picture:
    """An SVG with its description."""

    svg: str
    file: str  # relative to the page
    words: str  # description for readers who cannot see it
    caption: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A table with a title, column heads and a note."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    numbers: frozenset[int] = field(default_factory=frozenset)  # right-aligned columns


@dataclass(frozen=True, slots=True)
class Facts:
    """Pairs of a name and its value."""

    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Card:
    """Blocks that belong together; a page break does not separate them."""

    kind: str  # a class of the style
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Folded:
    """Blocks under a title that a reader opens; on paper and as Markdown they are open."""

    title: str
    blocks: tuple[Block, ...]
    level: int = 3  # of its heading


Block = Heading | Text | Points | Code | Picture | Table | Facts | Card | Folded

WHOLE = 12  # rows of a table that is not split across pages
_MARKS = re.compile(r"([\\`*_\[\]<>#~$&!])")
_ESCAPED = re.compile(r"\\([!-/:-@\[-`{-~])")
_TOKENS = re.compile(r"\\[!-/:-@\[-`{-~]|`[^`]+`|\*\*(?:[^*\\]|\\.)+\*\*|<br>", re.DOTALL)


def literal(text: object, longest: int = 0) -> str:
    """Return text from a record without markup and control characters, cut to a length if one is given."""
    clean = "".join(c if c.isprintable() else "?" for c in str(text))
    if longest and len(clean) > longest:
        clean = f"{clean[: longest - 1]}…"
    # At the beginning of a line, Markdown would make it a list or a quotation.
    clean = _MARKS.sub(r"\\\1", clean)
    return re.sub(r"^(\s*\d*)([-+.)])(?=\s)", r"\1\\\2", clean)


# -- as Markdown ------------------------------------------------------------------------------------------------------


def markdown(blocks: Sequence[Block]) -> str:
    """Return the blocks as Markdown; pictures are files beside it."""
    return "\n\n".join(_markdown(block) for block in blocks) + "\n"


def _markdown(block: Block) -> str:  # noqa: PLR0911 - one for each kind
    match block:
        case Heading():
            return f"{'#' * block.level} {block.text}"
        case Text():
            return block.text
        case Points():
            marks = (f"{place}." if block.numbered else "-" for place in range(1, len(block.points) + 1))
            return "\n".join(f"{mark} {point}" for mark, point in zip(marks, block.points, strict=True))
        case Code():
            longest = max((len(run) for line in block.clean for run in re.findall(r"`+", line)), default=0)
            fence = "`" * max(3, longest + 1)
            return "\n".join((f"{fence}{block.language}", *block.clean, fence))
        case Picture():
            picture = f"![{block.words}]({block.file})"
            return f"{picture}\n\n{block.caption}" if block.caption else picture
        case Facts():
            return "\n".join(f"- **{name}**: {value}" for name, value in block.pairs)
        case Card():
            return "\n\n".join(_markdown(inner) for inner in block.blocks)
        case Folded():
            return "\n\n".join(_markdown(inner) for inner in (Heading(block.level, block.title), *block.blocks))
        case Table():
            rule = tuple("---:" if place in block.numbers else "---" for place in range(len(block.head)))
            rows = [block.head, rule, *block.rows]
            lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
            title = (f"**{block.title}**", "") if block.title else ()
            return "\n".join((*title, *lines, *(("", block.note) if block.note else ())))


# -- as HTML ----------------------------------------------------------------------------------------------------------


def page(blocks: Sequence[Block], title: str, *, foot: str = "", unfolded: bool = False) -> str:
    """Return one HTML file with pictures and style inside it, without scripts, light or dark, ready for printing.

    `unfolded`: with all folded parts open, for a printer.
    """
    anchors = _Anchors()
    named = [(block, anchors.of(block)) for block in blocks]
    links = "".join(
        f'<li class="level-{block.level}"><a href="#{anchor}">{_inline(_title(block))}</a></li>'
        for block, anchor in named
        if isinstance(block, Heading | Folded) and block.level in {2, 3}
    )
    first = next((place for place, block in enumerate(blocks) if isinstance(block, Heading) and block.level == 2), 0)
    before = "\n".join(_html(block, anchor) for block, anchor in named[:first])
    contents = f'<nav aria-label="Contents"><ol>{links}</ol></nav>' if links else ""
    text = PAGE.format(
        title=html.escape(title),
        before=before,
        contents=contents,
        sections="\n".join(_sections(named[first:])),
        foot=f"<footer><p>{_inline(foot)}</p></footer>\n" if foot else "",
    )
    return text.replace("<details>", "<details open>") if unfolded else text


class _Anchors:
    """Creates a unique name for each heading."""

    def __init__(self) -> None:
        self._used: dict[str, int] = {}

    def of(self, block: Block) -> str:
        if not isinstance(block, Heading | Folded):
            return ""
        name = re.sub(r"[^a-z0-9]+", "-", _ESCAPED.sub(r"\1", _title(block)).lower()).strip("-")[:60] or "section"
        self._used[name] = self._used.get(name, 0) + 1
        return name if self._used[name] == 1 else f"{name}-{self._used[name]}"


def _title(block: Heading | Folded) -> str:
    return block.text if isinstance(block, Heading) else block.title


def _sections(named: Sequence[tuple[Block, str]]) -> Iterable[str]:
    """Yield each level-2 heading with what follows it, up to the next."""
    opened = False
    for block, anchor in named:
        if isinstance(block, Heading) and block.level == 2:
            if opened:
                yield "</section>"
            yield f'<section aria-labelledby="{anchor}">'
            opened = True
        yield _html(block, anchor)
    if opened:
        yield "</section>"


def _html(block: Block, anchor: str = "") -> str:  # noqa: PLR0911 - one for each kind
    match block:
        case Heading():
            own = f' id="{anchor}"' if anchor else ""
            return f"<h{block.level}{own}>{_inline(block.text)}</h{block.level}>"
        case Text():
            kind = f' class="{html.escape(block.kind)}"' if block.kind else ""
            return f"<p{kind}>{_inline(block.text)}</p>"
        case Points():
            tag = "ol" if block.numbered else "ul"
            return f"<{tag}>{''.join(f'<li>{_inline(point)}</li>' for point in block.points)}</{tag}>"
        case Code():
            return f"<pre>{html.escape(chr(10).join(block.clean))}</pre>"
        case Picture():
            caption = f"<figcaption>{_inline(block.caption)}</figcaption>" if block.caption else ""
            return f'<figure><div class="wide">{for_page(block.svg)}</div>{caption}</figure>'
        case Facts():
            pairs = "".join(
                f"<div><dt>{_inline(name)}</dt><dd>{_inline(value)}</dd></div>" for name, value in block.pairs
            )
            return f"<dl>{pairs}</dl>"
        case Card():
            inside = "\n".join(_html(inner) for inner in block.blocks)
            return f'<article class="card {html.escape(block.kind)}">{inside}</article>'
        case Folded():
            inside = "\n".join(_html(inner) for inner in block.blocks)
            head = _html(Heading(block.level, block.title), anchor)
            return f"<details><summary>{head}</summary>\n{inside}</details>"
        case Table():
            return _table(block)


def _table(block: Table) -> str:
    right = [' class="num"' if place in block.numbers else "" for place in range(len(block.head))]
    head = "".join(f'<th scope="col"{kind}>{_inline(cell)}</th>' for cell, kind in zip(block.head, right, strict=True))
    rows = "".join(
        f"<tr>{''.join(f'<td{kind}>{_inline(cell)}</td>' for cell, kind in zip(row, right, strict=False))}</tr>\n"
        for row in block.rows
    )
    caption = f"<caption>{_inline(block.title)}</caption>" if block.title else ""
    note = f'<p class="quiet">{_inline(block.note)}</p>' if block.note else ""
    kind = ' class="short"' if len(block.rows) <= WHOLE else ""
    inside = f"{caption}<thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody>"
    return f'<div class="wide"><table{kind}>{inside}</table></div>{note}'


def _inline(text: str) -> str:
    parts, at = [], 0
    for token in _TOKENS.finditer(text):
        parts.append(html.escape(text[at : token.start()], quote=False))
        parts.append(_marked(token[0]))
        at = token.end()
    return "".join((*parts, html.escape(text[at:], quote=False)))


def _marked(token: str) -> str:
    if token.startswith("\\"):
        return html.escape(token[1:], quote=False)
    if token.startswith("`"):
        return f"<code>{html.escape(token[1:-1], quote=False)}</code>"
    if token.startswith("**"):
        return f"<strong>{_inline(token[2:-2])}</strong>"
    return (
        token  # <br>, the one tag that a cell of a table needs, as in Markdown; in a record's text it has a backslash
    )


def words_of(text: str) -> str:
    """Return the text without its markup, for a title or a terminal."""
    return _ESCAPED.sub(r"\1", re.sub(r"(?<!\\)[`*]", "", text))


# The style of a page: light or dark as set on the reader's system, with figures not split on paper.


# Nothing may be loaded and nothing may run: pictures are in the page, their colours too, and there is no script.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"

COLOURS = ("ink", "ink-2", "paper", "line", "note", "warning", "critical", "ok", "unjudged")


def _theme(colours: Mapping[str, str]) -> str:
    return ":root{" + "".join(f"--{name}:{colours[name]};" for name in COLOURS) + "}"


THEMES = (
    f":root{{color-scheme:light dark}}{_theme(LIGHT)}\n"
    f"@media screen and (prefers-color-scheme:dark){{{_theme(DARK)}:root{{{dark_style()}}}}}\n"
    "@media print{:root{font-size:12px;color-scheme:light}}"
)
STYLE = """
*{box-sizing:border-box}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:60rem;margin:2rem auto;
padding:0 1rem;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
h1{font-size:1.6rem;line-height:1.25}h2{font-size:1.3rem;margin-top:3rem;border-bottom:1px solid var(--line)}
h3{font-size:1rem;margin:2rem 0 .5rem}h4,h5{font-size:.95rem;margin:1rem 0 .25rem}
a{color:inherit}figure{margin:1rem 0}figure svg{display:block;width:100%;min-width:40rem;height:auto;max-width:52rem}
figcaption{color:var(--ink-2);font-size:13px}
.wide{overflow-x:auto;background:linear-gradient(90deg,var(--paper) 40%,transparent) 0/2rem 100% no-repeat local,
linear-gradient(270deg,var(--paper) 40%,transparent) 100%/2rem 100% no-repeat local,
linear-gradient(90deg,var(--line),transparent) 0/.75rem 100% no-repeat scroll,
linear-gradient(270deg,var(--line),transparent) 100%/.75rem 100% no-repeat scroll}
table{border-collapse:collapse;font-size:13px;line-height:1.4}
caption{text-align:left;font-weight:600;padding:1rem 0 .25rem}
th,td{text-align:left;vertical-align:top;padding:.25rem .75rem .25rem 0;border-bottom:1px solid var(--line)}
td,th{overflow-wrap:break-word;max-width:28rem}th.num,td.num{text-align:right;white-space:nowrap}
th{color:var(--ink-2);font-weight:600}code,pre{font:13px/1.5 ui-monospace,monospace}
pre{border:1px solid var(--line);padding:.5rem .75rem;overflow-x:auto;white-space:pre-wrap}
.quiet{color:var(--ink-2);font-size:13px}.lead{font-size:1.1rem}
nav ol{columns:2;font-size:13px;list-style:none;padding:0}nav .level-3{padding-left:1rem}
dl{display:grid;grid-template-columns:repeat(auto-fill,minmax(15rem,1fr));gap:.5rem 1.5rem;margin:1rem 0;font-size:14px}
dt{color:var(--ink-2);font-size:13px}dd{margin:0}
summary{cursor:pointer}summary h3,summary h4{display:inline;line-height:2.2}
details{border-top:1px solid var(--line)}.card details{border-top:0}
.card{border-left:3px solid var(--line);padding:0 0 0 1rem;margin:1.5rem 0}.card h3{margin-top:0}
.verdict{border-left-width:6px}.verdict .lead{margin:.25rem 0;font-weight:600}
.critical,.ill{border-color:var(--critical)}.warning{border-color:var(--warning)}.note,.watch{border-color:var(--note)}
.healthy{border-color:var(--ok)}.unjudged{border-color:var(--unjudged)}
footer{color:var(--ink-2);font-size:13px;margin-top:3rem;border-top:1px solid var(--line)}
@media (max-width:40rem){nav ol{columns:1}}
@media print{@page{size:A4;margin:13mm 12mm}
body{margin:0;padding:0;max-width:none;font-size:9.5pt;line-height:1.4;orphans:3;widows:3}
h2{margin-top:1.75rem}h3{margin:1.25rem 0 .25rem}h2,h3,h4,h5,caption,thead{break-after:avoid}p,ol,ul,dl{margin:.5rem 0}
table,code,pre,figcaption,dt,nav ol,.quiet,footer{font-size:8.5pt}dl{font-size:9.5pt;gap:.25rem 1.5rem}
figure{margin:.5rem 0}figure svg{min-width:0;max-width:none}
figure,tr,pre,dl>div,.verdict,table.short{break-inside:avoid}thead{display:table-header-group}
summary{list-style:none}.card{padding-left:.6rem;margin:.75rem 0}.wide{overflow:visible;background:none}
a{text-decoration:none}}
"""

PAGE = (
    '<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8">\n'
    f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
    '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
    "<title>{title}</title>\n<style>" + f"{THEMES}{STYLE}".replace("{", "{{").replace("}", "}}") + "</style></head>\n"
    "<body>\n<header>\n{before}\n</header>\n{contents}\n<main>\n{sections}\n</main>\n{foot}</body>\n</html>\n"
)


class Pictures:
    """Draws pictures and gives each a unique name, which its ids and files use."""

    def __init__(self, folder: str = "figures") -> None:
        self.folder = folder
        self._names: set[str] = set()

    def of(self, name: str, words: str, draw: Callable[[], Figure], caption: str = "") -> Block:
        """Return the picture. `words` describe it for screen readers."""
        place = 1
        unique = name
        while unique in self._names:
            place += 1
            unique = f"{name}-{place}"
        self._names.add(unique)
        try:
            svg = svg_of(draw(), words_of(words), unique)
        except MissingExtraError:
            raise
        except Exception as error:  # noqa: BLE001 - odd records must not cost the rest of the report
            return Text(f"The picture «{words}» could not be drawn: {literal(repr(error), 300)}.", "quiet")
        return Picture(svg, f"{self.folder}/{unique}.svg", words, caption)
