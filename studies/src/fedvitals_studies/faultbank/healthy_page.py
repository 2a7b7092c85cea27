# SPDX-License-Identifier: Apache-2.0
"""Writes the page of a matrix of healthy settings, and each alarm and each missed fault as a line of JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from fedvitals.report.markup import Block, Code, Heading, Points, Table, Text, markdown, page
from fedvitals_studies.faultbank.healthy import LEAST_RECALL, Healthy, Line, ratio
from fedvitals_studies.faultbank.intervals import Estimate
from fedvitals_studies.faultbank.page import bar_row, words
from fedvitals_studies.faultbank.score import WITHIN
from fedvitals_studies.reproduce.results import as_json

ALARMS, MISSED = "alarms.jsonl", "missed.jsonl"
NOTES = (
    (
        "Alarms: cases of severity «warning» or worse in healthy runs; a case is one issue at one place, however long "
        "it lasts. The interval is that of a Poisson process."
    ),
    (
        f"Recall: the culprit named within {WITHIN} participations of the onset, with the right issue; in brackets "
        "with whatever issue. In rings and under edges the culprit's group counts."
    ),
    (
        f"Of plain: recall as a share of the first setting's; at least {100 * LEAST_RECALL:.0f} % is asked for. A "
        "fault that a setting hides from everybody is not decidable, if the findings say that rules did not judge."
    ),
    "Score: of the global model on the server's test, in the first and the last round, mean over the healthy runs.",
)


def write_matrix_page(matrix: Healthy, folder: Path, remarks: Sequence[str] = ()) -> tuple[Path, ...]:
    """Write index.html, README.md, summary.json and the two lists. Returns the files."""
    blocks = _blocks(matrix, remarks)
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "index.html": page(blocks, f"fedvitals: {matrix.bank}"),
        "README.md": markdown(blocks),
        "summary.json": as_json(matrix.as_facts()),
        ALARMS: "".join(f"{json.dumps(fact)}\n" for fact in matrix.alarms),
        MISSED: "".join(f"{json.dumps(fact)}\n" for fact in matrix.missed),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return tuple(folder / name for name in texts)


def head(matrix: Healthy) -> tuple[str, ...]:
    """Return the columns of a table of settings."""
    kinds = tuple(kind.replace("_", " ") for kind in matrix.pooled.recall)
    return ("setting", "rounds", "alarms per 100 [95 %]", "critical", *kinds, "of plain", "not judged", "score")


def row(line: Line, matrix: Healthy) -> tuple[str, ...]:
    held = ratio(line, matrix.plain)
    return (
        line.name,
        str(line.rounds),
        words(line.alarms),
        str(line.critical),
        *(_recall_words(line, kind) for kind in matrix.pooled.recall),
        "–" if held is None else f"{100 * held:.0f} %",
        words(line.not_judged, percent=True).partition(" [")[0],
        f"{line.score_name} {line.score[0]:.3g} → {line.score[1]:.3g}" if line.score else line.score_name,
    )


def _recall_words(line: Line, kind: str) -> str:
    if kind in line.undecidable:
        return f"not decidable: {line.undecidable[kind]}"
    right, node = (figures.get(kind, Estimate(None, None, None, 0)) for figures in (line.recall, line.located))
    if right.value is None or node.value is None:
        return "–"
    return f"{right.value * right.count:.0f} ({node.value * node.count:.0f}) of {right.count:.0f}"


def _blocks(matrix: Healthy, remarks: Sequence[str]) -> list[Block]:
    verdicts = [bar.verdict for bar in matrix.bars]
    groups = list(dict.fromkeys(line.group for line in matrix.lines))
    tables = [
        Table(group, head(matrix), tuple(row(line, matrix) for line in matrix.lines if line.group == group))
        for group in groups
    ]
    return [
        Heading(1, f"The healthy matrix: {matrix.bank}"),
        Text(f"**{verdicts.count('met')} bars met, {verdicts.count('missed')} missed.**"),
        Points((*(f"{name}: {count}" for name, count in matrix.counts.items()), *remarks)),
        Heading(2, "The bars"),
        Table(
            "What was asked for, and what was obtained",
            ("bar", "asked", "obtained [95 %]", "verdict", ""),
            tuple(bar_row(bar) for bar in matrix.bars),
        ),
        Heading(2, "Settings"),
        Table("Together", head(matrix), ((*row(matrix.pooled, matrix)[:-1], ""),)),
        *tables,
        Heading(2, "How it is counted"),
        Points(NOTES),
        Text(f"Each alarm and each missed fault: {ALARMS} and {MISSED} beside this page."),
        Code((f"fedvitals faultbank --bank {matrix.bank}",)),
    ]
