# SPDX-License-Identifier: Apache-2.0
"""Follow every link: of the Markdown files in the repository, and of the pages of the built site."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

FENCE = re.compile(r"^(```+|~~~+).*?^\1$", re.DOTALL | re.MULTILINE)
INLINE_CODE = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)", re.DOTALL)
LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\]\()([^()\s]+(?:\([^()\s]*\))?)((?: \"[^\"]*\")?\))")
HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
# Tags and attributes by which a page loads something as soon as it is shown. An <a href> waits for a click.
LOADED = {
    "audio": ("src",), "embed": ("src",), "iframe": ("src",), "image": ("href", "xlink:href"), "img": ("src", "srcset"),
    "input": ("src",), "object": ("data",), "script": ("src",), "source": ("src", "srcset"), "use": ("href",),
    "video": ("src", "poster"),
}  # fmt: skip
LOADING_RELATIONS = {
    "stylesheet",
    "icon",
    "preload",
    "prefetch",
    "preconnect",
    "dns-prefetch",
    "modulepreload",
    "manifest",
}
STYLE_ADDRESS = re.compile(r"(?:url\(\s*|@import\s+)['\"]?((?:https?:)?//[^'\")\s]+)")


def markdown_files(root: Path) -> list[Path]:
    """Return the Markdown files of the repository that people read: the root's, docs, examples and studies."""
    folders = ("docs", "examples", "studies", ".github")
    nested = [file for folder in folders for file in (root / folder).rglob("*.md")]
    return sorted([*root.glob("*.md"), *(file for file in nested if not {"build", "node_modules"} & {*file.parts})])


def without_code(text: str) -> str:
    """Return Markdown with its code blanked out, so that nothing in it is taken for a link; places stay the same."""

    def blanked(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match[0])

    return INLINE_CODE.sub(blanked, FENCE.sub(blanked, text))


def slug(heading: str) -> str:
    """Return the anchor of a heading, as forges and the site make it."""
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "")
    return re.sub(r"[^\w\- ]", "", words.lower()).strip().replace(" ", "-")


def anchors(text: str) -> set[str]:
    """Return the anchors of a Markdown text: its headings (repeated ones are numbered) and explicit ids."""
    seen: dict[str, int] = {}
    found = set(re.findall(r"\bid=\"([^\"]+)\"", text))
    for heading in HEADING.findall(FENCE.sub("", text)):
        name = slug(heading)
        found.add(f"{name}-{seen[name]}" if name in seen else name)
        seen[name] = seen.get(name, 0) + 1
    return found


def broken_in_sources(root: Path) -> list[str]:
    """Return «file:line: what is wrong» for each relative link of the Markdown files that leads nowhere.

    Args:
        root: The repository's folder.

    Returns:
        One line for each broken link: a missing file, a missing anchor, or a path that leaves the repository.
    """
    return [problem for file in markdown_files(root) for problem in _broken_in_source(root, file)]


def _broken_in_source(root: Path, file: Path) -> Iterator[str]:
    text = file.read_text(encoding="utf-8")
    for match in LINK.finditer(without_code(text)):
        parts = urlsplit(match[2])
        if parts.scheme or parts.netloc:
            continue
        place = f"{file.relative_to(root)}:{text[: match.start()].count(chr(10)) + 1}"
        target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
        if not target.is_relative_to(root):
            yield f"{place}: {match[2]} leads out of the repository"
        elif not target.exists():
            yield f"{place}: {match[2]} does not exist"
        elif parts.fragment and target.suffix == ".md" and parts.fragment not in anchors(target.read_text("utf-8")):
            yield f"{place}: {match[2]}: there is no such heading"


class _Page(HTMLParser):
    """Collects a page's ids, the links that a reader may follow, and the addresses that it loads by itself."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        text = file.read_text(encoding="utf-8")
        self.feed(text)
        self.loaded += STYLE_ADDRESS.findall(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = {name: value for name, value in attrs if value}
        self.ids |= {named[name] for name in ("id", "name") if name in named}
        relations = set(named.get("rel", "").split())
        if tag == "a" and "href" in named:
            self.links.append(named["href"])
        elif tag == "link" and "href" in named and relations & LOADING_RELATIONS:
            self.loaded.append(named["href"])
        else:
            self.loaded += [named[name] for name in LOADED.get(tag, ()) if name in named]


def broken_in_site(site: Path) -> list[str]:
    """Return «page: what is wrong» for each link of the built site that leads nowhere, and each foreign resource.

    Args:
        site: The folder of the built site.

    Returns:
        One line for each broken link or anchor, and for each picture, script, style or font that a page or a style
        sheet would load from another machine.
    """
    pages = {file: _Page(file) for file in sorted(site.rglob("*.html"))}
    problems = []
    for file, page in pages.items():
        shown = file.relative_to(site)
        problems += [f"{shown}: loads {address}" for address in page.loaded if urlsplit(address).netloc]
        for link in {*page.links, *(address for address in page.loaded if not address.startswith("data:"))}:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            place = unquote(parts.path)
            folder = site if place.startswith("/") else file.parent
            target = (folder / place.lstrip("/")).resolve() if place else file
            target = target / "index.html" if target.is_dir() else target
            known = pages[target].ids if target in pages else set()
            if not target.is_relative_to(site) or not target.exists():
                problems.append(f"{shown}: {link} does not exist")
            elif parts.fragment and target in pages and parts.fragment not in known | {"__search"}:
                problems.append(f"{shown}: {link}: there is no such anchor")
    for style in site.rglob("*.css"):
        addresses = STYLE_ADDRESS.findall(style.read_text(encoding="utf-8"))
        problems += [f"{style.relative_to(site)}: loads {address}" for address in addresses]
    return problems
