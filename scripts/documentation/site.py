# SPDX-License-Identifier: Apache-2.0
"""The documentation site: docs/ as static files, with the reference, and the files outside of docs/ that pages link to.

Zensical builds it from a copy in build/docs/pages, in which links that leave docs/ lead to copies of their targets.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from urllib.parse import unquote, urlsplit

from documentation import links, reference

ROOT = Path(__file__).resolve().parents[2]
DOCS, BUILD = ROOT / "docs", ROOT / "build" / "docs"
STAGED, SITE = BUILD / "pages", BUILD / "site"
SETTINGS = ROOT / "zensical.toml"
OUTSIDE = "repository"  # the site's folder for files that are not in docs/
COPIED = {".svg", ".png", ".css", ".ipynb", ".json", ".jsonl", ".gz"}
MOST_LINKED = 30  # files of a folder; a longer list is shown without the files themselves
LANGUAGES = {".py": "python", ".toml": "toml", ".md": "markdown", ".json": "json", ".sh": "sh", "": "sh"}


class Staging:
    """Copies pages to where the site is built from, and rewrites the links between them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._waiting: list[Path] = []
        self._known: set[Path] = set()

    def place_of(self, source: Path) -> Path:
        """Return where a file of the repository lies in the site's sources, as a path relative to their folder."""
        inside = source.relative_to(DOCS) if source.is_relative_to(DOCS) else Path(OUTSIDE) / source.relative_to(ROOT)
        if source.is_dir():
            return inside / "contents.md"
        if source.name == "README.md" and inside.parts[0] != OUTSIDE:
            return inside.with_name("index.md")
        return inside if source.suffix in {".md", *COPIED} else inside.with_name(f"{inside.name}.md")

    def add(self, source: Path) -> Path:
        """Ask for a file to be in the site; return its place."""
        if source not in self._known:
            self._known.add(source)
            self._waiting.append(source)
        return self.place_of(source)

    def write(self) -> None:
        """Write everything that was asked for, and what that links to."""
        while self._waiting:
            source = self._waiting.pop()
            target = self._folder / self.place_of(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                target.write_text(self._listing(source, target), encoding="utf-8")
            elif source.suffix == ".md":
                target.write_text(self._linked(source, source.read_text(encoding="utf-8")), encoding="utf-8")
            elif source.suffix in COPIED:
                shutil.copyfile(source, target)
            else:
                target.write_text(_shown(source), encoding="utf-8")

    def _relative(self, source: Path, target: Path) -> str:
        place = self.place_of(source).parent
        return Path(os.path.relpath(self.add(target), place)).as_posix()

    def _linked(self, source: Path, text: str) -> str:
        blanked, pieces, end = links.without_code(text), [], 0
        for match in links.LINK.finditer(blanked):
            parts = urlsplit(match[2])
            if parts.scheme or parts.netloc or not parts.path:
                continue
            target = (source.parent / unquote(parts.path)).resolve()
            fragment = f"#{parts.fragment}" if parts.fragment else ""
            if target.is_relative_to(ROOT) and target.exists():
                start = match.start(2)
                pieces += [text[end:start], self._relative(source, target) + fragment]
                end = match.end(2)
        return "".join([*pieces, text[end:]])

    def _listing(self, folder: Path, page: Path) -> str:
        files = sorted(file for file in folder.rglob("*") if file.is_file() and _is_source(file))
        rows = [f"- {file.relative_to(folder)}" for file in files]
        if len(files) <= MOST_LINKED:
            rows = []
            for file in files:
                link = Path(os.path.relpath(self._folder / self.add(file), page.parent)).as_posix()
                rows.append(f"- [{file.relative_to(folder)}]({link})")
        return "\n".join([f"# {folder.relative_to(ROOT)}", "", *rows, ""])


def _is_source(file: Path) -> bool:
    hidden = any(part in {"__pycache__", "build", "tests"} or part.endswith(".egg-info") for part in file.parts)
    return not hidden and file.suffix in {".py", ".toml", ".md", ".ipynb"}


def _shown(source: Path) -> str:
    """Return a page that shows a file's text."""
    fence = "~~~~"
    language = LANGUAGES.get(source.suffix, "text")
    text = source.read_text(encoding="utf-8")
    return f"# {source.relative_to(ROOT)}\n\n{fence}{language}\n{text}{fence}\n"


def navigation_pages() -> list[str]:
    """Return the pages that the navigation lists, in its order."""

    def pages_of(part: object) -> list[str]:
        if isinstance(part, str):
            return [part]
        parts = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        return [page for inner in parts for page in pages_of(inner)]

    return pages_of(tomllib.loads(SETTINGS.read_text(encoding="utf-8"))["project"]["nav"])


def stage() -> None:
    """Write the site's sources: docs/, the generated reference, and what pages link to."""
    shutil.rmtree(BUILD, ignore_errors=True)
    staging = Staging(STAGED)
    for file in sorted(DOCS.rglob("*")):
        if file.suffix == ".md" or (file.suffix in COPIED and "figures" in file.parts):
            staging.add(file)
    for style in DOCS.glob("site/*.css"):
        staging.add(style)
    staging.write()
    for name, text in reference.pages().items():
        target = STAGED / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")


def build() -> list[str]:
    """Build the site in build/docs/site.

    Returns:
        What Zensical complained about, a line each.
    """
    stage()
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--config-file", str(SETTINGS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S603
    said = done.stdout + done.stderr
    if done.returncode:
        return [said.strip() or "zensical failed"]
    return [line for line in said.splitlines() if "warning" in line.lower() or "error" in line.lower()]
