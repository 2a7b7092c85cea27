# SPDX-License-Identifier: Apache-2.0
"""The page of the fault bank: bars with verdicts first, then every table, each figure with its interval.

Nothing is written by hand, and nothing is omitted because it looks bad.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedvitals.report.markup import Block, Code, Heading, Picture, Points, Table, Text, markdown, page
from fedvitals_studies.faultbank import comparison as beside
from fedvitals_studies.faultbank import plot
from fedvitals_studies.faultbank.asked import ATTACKER_FIGURES
from fedvitals_studies.faultbank.bars import Bar
from fedvitals_studies.faultbank.figures import Row
from fedvitals_studies.faultbank.intervals import DRAWS, Estimate
from fedvitals_studies.faultbank.report import (
    ATTACK_FIGURES,
    GROUP_FIGURES,
    KIND_FIGURES,
    METHOD_FIGURES,
    TARGET_FIGURES,
    Summary,
)
from fedvitals_studies.faultbank.score import WITHIN, Outcome
from fedvitals_studies.faultbank.strict import LEVEL_FIGURES, LIAR_FIGURES, STRICT_FIGURES, STRICT_KIND_FIGURES
from fedvitals_studies.reproduce.results import as_json

MARKS = {"met": "●", "missed": "○", "not measured": "–"}
HEADS = {
    "f1": "F1",
    "precision": "precision",
    "recall": "recall",
    "node_f1": "F1, node only",
    "node_recall": "recall, node only",
    "culprit_f1": "culprits: F1",
    "culprit_precision": "culprits: precision",
    "culprit_recall": "culprits: recall",
    "top_1": "top-1",
    "top_3": "top-3",
    "delay": "median delay",
    "cause": "cause right",
    "family": "family right",
    "strict_f1": "F1, wrong names counted",
    "strict_precision": "precision, wrong names counted",
    "accused_clean": "accused, clean runs",
    "accused_faulty": "accused, faulty runs",
    "alarms": "alarms per 100 healthy rounds",
    "share": "share",
    "attack": "attack succeeds",
    "damage": "accuracy lost",
}
PERCENT = frozenset(
    {"top_1", "top_3", "cause", "family", "accused_clean", "accused_faulty", "share", "time", "attack", "damage"}
)
ISSUE_FIGURES = ("f1", "precision", "recall", "alarms")
METHODS = "Methods side by side"
ATTACKERS = (
    "Culprits: attackers accused at any time, whatever the issue. ByzFL's attacks stand with the clean runs of the "
    "bank. The other methods are implemented as published, and see the same runs."
)
LYING_FIGURES = ("culprit_f1", "culprit_precision", "culprit_recall", "recall")


def write_page(
    summary: Summary,
    outcomes: Sequence[Outcome],
    folder: Path,
    remarks: Sequence[str] = (),
    trained: Mapping[str, int] | None = None,
    other: Mapping[str, Any] | None = None,
) -> tuple[Path, ...]:
    """Write index.html, README.md, summary.json and the figures. Returns the files.

    `remarks`: on how it was run. `trained`: device → number of runs. `other`: another page's facts, to be shown beside
    these.
    """
    trained = trained or {}
    pictures = _pictures(summary)
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    for picture in pictures.values():
        (folder / picture.file).write_text(picture.svg, encoding="utf-8")
    blocks = _blocks(summary, outcomes, pictures, remarks)
    if other is not None:
        place = next(i for i, block in enumerate(blocks) if isinstance(block, Heading) and block.text == METHODS)
        blocks[place:place] = _beside(summary, trained, other)
    files = tuple(folder / name for name in ("index.html", "README.md", "summary.json"))
    files[0].write_text(page(blocks, f"fedvitals: fault bank, {', '.join(summary.banks)}"), encoding="utf-8")
    files[1].write_text(markdown(blocks), encoding="utf-8")
    files[2].write_text(as_json({**summary.as_facts(), "trained": trained}), encoding="utf-8")
    return files


# -- figures in words -------------------------------------------------------------------------------------------------


def words(estimate: Estimate, percent: bool = False) -> str:
    """Return `0.912 [0.871, 0.951] of 336`, a share as `91.2 % [87.1, 95.1] of 336`; a dash if there is nothing."""
    if estimate.value is None:
        return "–"
    factor = 100 if percent else 1
    unit = " %" if percent else ""
    text = f"{_number(factor * estimate.value)}{unit}"
    if estimate.low is not None and estimate.high is not None:
        text += f" [{_number(factor * estimate.low)}, {_number(factor * estimate.high)}]"
    return text


def _number(value: float) -> str:
    if math.isinf(value):
        return "∞"
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _count(estimate: Estimate) -> str:
    return f"{estimate.count:.0f}"


def _table(title: str, first: str, rows: Sequence[Row], figures: Sequence[str], note: str = "") -> Table:
    """Return a table, with the number of targets besides the runs if it is about targets."""
    counted = "recall" in figures
    head = (first, "runs", *(("targets",) if counted else ()), *(HEADS[figure] for figure in figures))
    body = tuple(
        (
            row.name,
            str(row.runs),
            *((_count(row.figures["recall"]),) if counted else ()),
            *(words(row.figures[figure], figure in PERCENT) for figure in figures),
        )
        for row in rows
    )
    return Table(title, head, body, note)


def bar_row(bar: Bar) -> tuple[str, ...]:
    percent = bar.unit == "%"
    sign = "≥" if bar.at_least else "≤"
    limit = f"{sign} {_number(100 * bar.limit)} %" if percent else f"{sign} {_number(bar.limit)}"
    doubt = "" if bar.verdict == "not measured" or bar.certain else ", the interval reaches across"
    return bar.name, limit, words(bar.obtained, percent), f"{MARKS[bar.verdict]} {bar.verdict}{doubt}", bar.note


# -- the page ---------------------------------------------------------------------------------------------------------


def _blocks(
    summary: Summary, outcomes: Sequence[Outcome], pictures: Mapping[str, Picture], remarks: Sequence[str]
) -> list[Block]:
    return [
        *_opening(summary, outcomes, remarks),
        *_bars(summary),
        *_strict(summary),
        Heading(2, METHODS),
        _table(
            "The same runs, one table",
            "method",
            summary.methods,
            METHOD_FIGURES,
            "Methods that name no issue can only be compared by the node: «node only» and «culprits». Baselines are "
            "implemented here, as published.",
        ),
        Heading(2, "By fault kind"),
        _table("Each fault kind", "fault", summary.kinds, KIND_FIGURES, "Precision: of all cases raised in its runs."),
        Heading(2, "By issue"),
        _table("Each issue", "issue", summary.issues, ISSUE_FIGURES, "A case is right only with the right issue."),
        Heading(2, "By group"),
        *(_table(f"By {name}", name, rows, GROUP_FIGURES) for name, rows in summary.groups.items()),
        Heading(2, "False alarms by rule"),
        _table("In clean runs, the noisiest first", "rule", summary.rules, ("alarms",), "Others never fired there."),
        Heading(2, "Label faults"),
        *(_table(f"By {name}", "fault", rows, TARGET_FIGURES) for name, rows in summary.labels.items()),
        Heading(2, "By damage and strength"),
        _table("All faults by damage", "damage", summary.damage, TARGET_FIGURES),
        _table("All faults by strength", "fault", summary.strengths, TARGET_FIGURES),
        *_attacks(summary),
        Heading(2, "Lying telemetry"),
        _table(
            "Runs with culprits",
            "method",
            summary.lying,
            LYING_FIGURES,
            "The same cases twice; no clean runs.",
        ),
        _table("Which view hit first", "view", summary.views, ("share",), "Of the hits of which the view is known."),
        Heading(2, "Causes"),
        pictures["causes"],
        Text("Rows: what it was; columns: what it was called when found. The number is how many culprits."),
        Heading(2, "Delays"),
        pictures["delays"],
        Text("Share of all targets found by then, in brackets how many there are."),
        Heading(2, "Calibration"),
        pictures["reliability"],
        _reliability(summary),
        Heading(2, "How it is counted"),
        Points(_DEFINITIONS),
        Code(tuple(f"fedvitals faultbank --bank {bank}" for bank in summary.banks)),
    ]


def _strict(summary: Summary) -> list[Block]:
    """Return the blocks by issue and node."""
    attackers = _table("Attackers, by method", "runs: method", summary.attackers, ATTACKER_FIGURES, ATTACKERS)
    liars = _table("Culprits that lie", "fault", summary.liars, LIAR_FIGURES, "No clean runs.")
    levels = _table(
        "The same runs, with what each privacy level releases",
        "level",
        summary.levels,
        LEVEL_FIGURES,
        "Removed from the recording: what may not leave a client, and what the server computes from it.",
    )
    return [
        Heading(2, "By issue and node"),
        _table(
            "Wrong names counted",
            "runs",
            summary.strict,
            STRICT_FIGURES,
            "«F1» and «precision» are the older, lenient figures: there a wrong name on the right client is no error. "
            "Parts have the faulty runs with their clean twins.",
        ),
        _table("By fault kind, with the clean twins", "fault", summary.strict_kinds, STRICT_KIND_FIGURES),
        *(
            _table(f"Alarms by {name}, exact limits", name, rows, ("alarms",))
            for name, rows in summary.alarm_groups.items()
            if len(rows) > 1
        ),
        *([levels] if summary.levels else []),
        *([liars] if summary.liars else []),
        *([attackers] if summary.attackers else []),
    ]


def _attacks(summary: Summary) -> list[Block]:
    if not summary.attacks:
        return []
    note = "Success: the share of test samples with the trigger that the global model takes for the target, at the end."
    return [Heading(2, "Backdoors"), _table("By kind", "fault", summary.attacks, ATTACK_FIGURES, note)]


def _beside(summary: Summary, trained: Mapping[str, int], other: Mapping[str, Any]) -> list[Block]:
    table = (
        (name, words(here, percent), words(there, percent), beside.verdict(here, there))
        for name, percent, here, there in beside.rows(summary, other, HEADS, PERCENT)
    )
    here = beside.title(summary.banks, summary.counts["runs"], trained)
    there = beside.title(other["banks"], other["counts"]["runs"], other.get("trained", {}))
    return beside.blocks(table, here, there)


def _looks(summary: Summary) -> list[Block]:
    """Return the same bars, by whether the runs were examined before."""
    if not summary.looks:
        return []
    body = tuple(
        (
            *bar_row(own[0])[:2],
            *(f"{words(bar.obtained, bar.unit == '%')} {MARKS[bar.verdict]}" for bar in own),
        )
        for own in zip(*summary.looks.values(), strict=True)
    )
    note = "First look: these runs had never been examined by any detector. Second look: by an earlier version."
    return [Table("By whether runs were examined before", ("bar", "asked", *summary.looks), body, note)]


def _bars(summary: Summary) -> list[Block]:
    return [
        Heading(2, "The bars"),
        Table(
            "What the issue «Find what is ill» asks for, and what was obtained",
            ("bar", "asked", "obtained [95 %]", "verdict", ""),
            tuple(bar_row(bar) for bar in summary.asked),
            "A wrong name on the right client counts against precision. The limits of a group's alarms are those of a "
            "Poisson rate.",
        ),
        *_looks(summary),
        Table(
            "Older bars: a wrong name on the right client counts as precise",
            ("bar", "asked", "obtained [95 %]", "verdict", ""),
            tuple(bar_row(bar) for bar in summary.bars),
            "Verdicts are by the figure itself. Corrections and the cost with 100 clients × 20 layers are measured "
            "elsewhere (`docs/cure.md`, `fedvitals bench diagnosis`).",
        ),
        Table(
            "Whether the bank is large enough",
            ("size", "asked", "there are", "verdict", ""),
            tuple(bar_row(bar) for bar in summary.size),
        ),
    ]


_DEFINITIONS = (
    (
        f"A hit: the right issue (`faultbank/accepted.py`) on the right node within {WITHIN} participations of "
        "the onset; a trouble of the whole run: on any node, within as many rounds. The onset is delay 0. In "
        "rings and under edges, where members train on one another's work, the culprit's group counts as the culprit."
    ),
    (
        "Precision counts every case raised: an issue at a place, once, however long it lasts, anew after more than "
        f"{WITHIN} silent participations. A case on a struck client is true even with another issue; a case that "
        "began before the onset is false. Notes do not count."
    ),
    (
        "Unjudged, neither true nor false: a trouble of the whole run after a fault has struck (a diverging loss is a "
        "fact there, too); the other one of a pair of copies; in a fault of the whole run, an issue on a client that "
        "does not blame it."
    ),
    (
        "Node only: the client within the window, whatever the issue. Culprits: clients accused at any time, against "
        "clients struck, the count unknown. Both count healthy clients accused in clean runs, too."
    ),
    (
        "Top-1, top-3: healthy clients that rank level with the best-ranked culprit rank before it. Runs in which only "
        "the system fails are left out."
    ),
    (
        "Alarms: cases newly raised in clean runs. Accused: client-rounds in which a healthy client stood accused; the "
        "rounds of a culprit before its onset are healthy."
    ),
    "Median delay: within which half of all targets were found; ∞: fewer were.",
    (
        f"Intervals: 95 %, runs drawn again with replacement {DRAWS} times; where no run differs from the others, the "
        "exact bound for so many runs (alarms and accusations: for so many rounds, as of a Poisson process)."
    ),
)


def _opening(summary: Summary, outcomes: Sequence[Outcome], remarks: Sequence[str]) -> list[Block]:
    verdicts = [bar.verdict for bar in summary.asked]
    lengths = [outcome.rounds for outcome in outcomes]
    clients = [outcome.clients for outcome in outcomes]
    blocks: list[Block] = [
        Heading(1, f"Fault bank: {', '.join(summary.banks)}"),
        Text(
            f"**{verdicts.count('met')} bars met, {verdicts.count('missed')} missed, "
            f"{verdicts.count('not measured')} not measured.** Method in detail: {summary.ours}."
        ),
    ]
    if "tune" in summary.banks:
        blocks.append(Text("**The detectors were made on the set `tune`: its figures flatter. Quote held-out ones.**"))
    facts = [f"{name}: {count}" for name, count in summary.counts.items()]
    facts += [
        f"rounds of a run: {min(lengths)} to {max(lengths)}; clients: {min(clients)} to {max(clients)}",
        f"domains: {', '.join(sorted({outcome.domain for outcome in outcomes}))}",
        f"beside them, runs heard again with culprits that lie: {sum(outcome.lying for outcome in outcomes)}",
        f"and at lower privacy levels: {sum(outcome.level is not None for outcome in outcomes)}",
        f"cases left unjudged: {summary.unjudged}",
        f"time of the detectors: {words(summary.time, percent=True)} of the bank's rounds, which are tiny ones",
        *remarks,
    ]
    blocks.append(Points(tuple(facts)))
    return blocks


def _reliability(summary: Summary) -> Table:
    rows = tuple((f"{each.stated:.3f}", f"{each.observed:.3f}", str(each.count)) for each in summary.reliability)
    note = f"Expected calibration error {words(summary.calibration)}. Equal probabilities share a bin."
    return Table("Bins of about equal mass", ("stated", "so", "times"), rows, note)


def _pictures(summary: Summary) -> dict[str, Picture]:
    drawn = {
        "causes": (plot.matrix(summary.confusion, "Causes: given against true"), "matrix of causes"),
        "delays": (
            plot.delay_curves(tuple(summary.delays.items()), "Share found, by participation after the onset"),
            "share found by the first, second, ... participation after the onset",
        ),
        "reliability": (
            plot.reliability(summary.reliability, "Stated probability against what was so"),
            "reliability diagram",
        ),
    }
    return {name: Picture(svg, f"figures/{name}.svg", alt) for name, (svg, alt) in drawn.items()}
