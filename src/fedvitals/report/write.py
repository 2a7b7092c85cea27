# SPDX-License-Identifier: Apache-2.0
"""Writes a report: HTML with everything inside, Markdown with its pictures beside it, or PDF."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedvitals import __version__
from fedvitals.errors import ConfigError
from fedvitals.report import sections
from fedvitals.report.comparison import comparison
from fedvitals.report.findings_part import findings_part, verdict_card, what_next
from fedvitals.report.markup import Block, Card, Folded, Heading, Picture, Pictures, literal, markdown, page, words_of
from fedvitals.report.pdf import pdf_of
from fedvitals.store.read import queries
from fedvitals.store.read.reader import Reader
from fedvitals.views.card import health_card
from fedvitals.views.profile import profile_of
from fedvitals.views.verdict import Verdict

FORMATS = (".html", ".pdf", ".md")
OURS = b"Written by fedvitals"  # contained in every report, marks it as a file that may be overwritten


@dataclass(frozen=True, slots=True)
class WrittenReport:
    """The file that was written, its pictures, and the verdicts in it."""

    file: str
    format: str
    bytes: int
    pictures: tuple[str, ...]  # files beside a Markdown page
    runs: tuple[str, ...]
    verdicts: tuple[Verdict, ...]


def report(reader: Reader, runs: Sequence[str], file: Path | None = None, *, force: bool = False) -> WrittenReport:
    """Write the report on a run, or on the comparison of several; by default as RUN-report.html in this folder."""
    ids = list(dict.fromkeys(queries.find_run(reader, run) for run in runs))
    target = file if file is not None else Path(default_name(queries.get_run(reader, ids[0]).name, ids))
    kind = target.suffix.lower()
    if kind not in FORMATS:
        raise ConfigError(f"A report is a file that ends in {', '.join(FORMATS)}; got '{target.name}'.")
    check(target, force=force)
    folder = f"{target.stem}_files"
    verdicts, blocks = content_of(reader, ids, Pictures(folder))
    beside: tuple[str, ...] = ()
    if kind == ".md":
        for picture in _pictures(blocks):
            check(_place(target, picture), force=force)
        data = f"{markdown(blocks)}\n{FOOT.partition('. ')[0]}.\n".encode()
        beside = tuple(_beside(target, blocks))
    else:
        html = html_of(blocks, unfolded=kind == ".pdf")
        # Comments are allowed after a PDF's end: they identify our own files.
        data = html.encode() if kind == ".html" else pdf_of(html) + b"\n% " + OURS + b"\n"
    target.write_bytes(data)
    return WrittenReport(str(target), kind[1:], len(data), beside, tuple(ids), tuple(verdicts))


def content_of(reader: Reader, ids: Sequence[str], pictures: Pictures) -> tuple[Sequence[Verdict], list[Block]]:
    """Return the verdicts and blocks of a report on one run, or on several."""
    if len(ids) > 1:
        return comparison(reader, ids, pictures)
    verdict, blocks = story(reader, ids[0], pictures)
    return [verdict], blocks


def html_of(blocks: Sequence[Block], *, unfolded: bool = False) -> str:
    """Return the blocks as an HTML page; `unfolded`: with all folded parts open."""
    title = next((words_of(block.text) for block in blocks if isinstance(block, Heading)), "report")
    return page(blocks, f"{title} · fedvitals", foot=FOOT, unfolded=unfolded)


def default_name(name: str, ids: Sequence[str]) -> str:
    """Return the file name of a report: the run's name, without characters that a file name should not have."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:60] or ids[0]
    return f"{plain}-{'comparison' if len(ids) > 1 else 'report'}.html"


def check(target: Path, *, force: bool) -> None:
    """Raise ConfigError unless `target` can be written: an existing report may be replaced, other files only with
    `force`.
    """
    if target.is_dir() or not target.parent.is_dir():
        raise ConfigError(f"'{target}' cannot be written: {'it is a folder' if target.is_dir() else 'no such folder'}.")
    if not target.exists():
        return
    with target.open("rb") as old:
        start = old.read(6)
        old.seek(max(0, target.stat().st_size - 4096))
        end = old.read()
    if start == b"SQLite":
        raise ConfigError(f"'{target}' is a store. Name another file.")
    if OURS not in end and not force:
        raise ConfigError(
            f"'{target}' exists and is not a report of ours. Name another file, or write over it with --force."
        )


def _beside(target: Path, blocks: Sequence[Block]) -> Iterator[str]:
    for picture in _pictures(blocks):
        file = _place(target, picture)
        file.write_text(f"{picture.svg.rstrip()}\n<!-- {OURS.decode()} -->\n", encoding="utf-8")
        yield str(file)


def _place(target: Path, picture: Picture) -> Path:
    file = target.parent / picture.file
    file.parent.mkdir(exist_ok=True)
    return file


def _pictures(blocks: Sequence[Block]) -> Iterator[Picture]:
    for block in blocks:
        if isinstance(block, Picture):
            yield block
        elif isinstance(block, Card | Folded):
            yield from _pictures(block.blocks)


# The report on one run: what happened, the evidence, what to do, and everything else in an appendix.


FOOT = f"Written by fedvitals {__version__} from the run's store. This file needs nothing else: no network, no script."


def story(reader: Reader, run: str, pictures: Pictures) -> tuple[Verdict, list[Block]]:
    """Return the verdict, and the whole report as blocks."""
    card, profile = health_card(reader, run), profile_of(reader, run)
    findings = findings_part(reader, run, pictures)
    appendix = (
        findings.others,
        sections.signs_part(reader, run, card),
        sections.clients_part(reader, run, pictures),
        sections.layers_part(reader, run, pictures),
        sections.adapters_part(reader, run, pictures),
        sections.cost_part(reader, run, profile, pictures),
        sections.configuration_part(card),
        sections.trust_part(reader, run, card, profile),
    )
    blocks: list[Block] = [
        Heading(1, literal(card.run.name or run, 120)),
        verdict_card(findings.page.verdict),
        Heading(2, "What happened"),
        sections.facts_part(reader, run, card),
        sections.learning_picture(reader, run, pictures),
        Heading(2, "Evidence"),
        *findings.evidence,
        *what_next(findings.page, findings.full, profile, run),
        Heading(2, "Appendix"),
        *(part for part in appendix if part is not None),
    ]
    return findings.page.verdict, blocks
