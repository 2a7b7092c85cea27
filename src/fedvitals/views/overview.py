# SPDX-License-Identifier: Apache-2.0
"""Computes the overview of a run: the verdict, its cases in brief, the suspects, and the available signs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fedvitals.catalog import CATALOG
from fedvitals.diagnosis.cases import Case, is_trouble
from fedvitals.diagnosis.issues.table import how_sure
from fedvitals.plain_json import copied
from fedvitals.stats import FAMILIES, HISTOGRAM_COLUMNS
from fedvitals.store.read.metrics import SeriesByNode, count_nodes_that_told, measured_names, series_of
from fedvitals.store.read.reader import Reader
from fedvitals.views.card import VITAL_SIGNS
from fedvitals.views.cases import Brief, Marked, brief, case_key, cases_of, since_of
from fedvitals.views.evidence_signs import layer_statistic_behind, metrics_behind, named_signs
from fedvitals.views.outline import OUTCOMES, FamilyKnown, Known, known_families, known_metric, outline_of
from fedvitals.views.verdict import Verdict, facts_of, judge

LONGEST_LIST = 200  # cases; the page of findings has the rest
SAMPLED = 5  # rounds in which the nodes that report a sign are counted
ENOUGH = 0.5  # share of the clients that trained which must report a sign for it to represent them
# What distinguishes clients, the plainest first: shown unless the user chooses another.
FIRST_SIGHT = (
    "loss",
    "fit.loss_before",
    "local.loss",
    "update.cosine_mean",
    "gradient.norm",
    "update.norm",
    "time.client",
)
LEARNING = ("loss", "fit.loss_before", "local.loss", "fit.loss_after", "gradient.norm", "update.norm", "weight.drift")


@dataclass(frozen=True, slots=True)
class SuspectLine:
    """A suspect, with its worst case."""

    node: str
    label: str
    score: float | None
    sure: str  # the score in words
    reason: str
    severity: str
    since: int | None
    key: str


@dataclass(frozen=True, slots=True)
class SignLine(Known):
    """A sign of which clients have values, in the catalogue's words."""

    vital: bool  # one of the few on a health card


@dataclass(frozen=True, slots=True)
class Overview:
    """Everything that the overview shows except the plots."""

    verdict: Verdict
    cases: list[Brief]  # current ones, worst first; then past ones; muted ones last
    total_cases: int
    muted: int
    suspects: list[SuspectLine]
    clients: int
    first_round: int | None
    last_round: int | None
    signs: list[SignLine]
    sign: str | None  # the client heat map's initial sign: the one behind the verdict's finding, if clients have it
    family: str | None  # of the layers' heat map, likewise; None: the finding is about no layer
    statistic: str | None
    learning: str | None  # whose cohort is the band in the learning plot
    outcomes: list[str]  # signs of the federation itself that show how well it learns
    scale: str | None  # gradient scale: «scale.gsc», if it was measured
    families: list[FamilyKnown]


def overview(reader: Reader, run: str) -> Overview:
    """Read the overview of a run; ConfigError if there is none with that id."""
    outline = outline_of(reader, run)
    rounds, marks = outline.rounds, Marked(outline.marks)
    cases = cases_of(reader, run, rounds=rounds)
    facts = facts_of(reader, run, outline, cases)
    lines = [brief(case, marks, facts.labels) for case in cases]
    by_key = {line.key: line for line in lines}
    lines.sort(key=lambda line: _there_first(by_key.get(line.follows or "", line)))
    measured = measured_names(reader, run, outline.nodes)
    names, of_clients = measured.names, measured.of_clients
    # How many nodes reported each of these signs, in a few rounds from all over the run.
    sampled = sorted({rounds[int((i + 0.5) * len(rounds) / SAMPLED)] for i in range(SAMPLED)}) if rounds else []
    verdict = judge(cases, facts)
    families = [
        family for family in known_families(reader, run) if FAMILIES[family.name].columns is not HISTOGRAM_COLUMNS
    ]
    worst = next((case for case in cases if case_key(case) == verdict.key), None)
    behind = [] if worst is None else metrics_behind(worst, of_clients)
    asked = [name for name in of_clients if name in {*FIRST_SIGHT, *LEARNING, *behind}]
    counts = count_nodes_that_told(reader, run, asked, sampled)
    by_layer = None if worst is None else layer_statistic_behind(worst, {f.name: f.statistics for f in families})
    return Overview(
        verdict=verdict,
        cases=lines[:LONGEST_LIST],
        total_cases=len(lines),
        muted=sum(line.muted for line in lines),
        suspects=suspects((case for case in cases if case_key(case) not in facts.muted), facts.labels),
        clients=facts.clients,
        first_round=rounds[0] if rounds else None,
        last_round=rounds[-1] if rounds else None,
        signs=[
            copied(SignLine, known_metric(name), vital=name in VITAL_SIGNS) for name in sorted(of_clients, key=_order)
        ],
        sign=_for_clients(counts, of_clients) if worst is None or not behind else _behind(worst, behind, counts),
        family=None if by_layer is None else by_layer[0],
        statistic=None if by_layer is None else by_layer[1],
        learning=_for_learning(counts, of_clients),
        outcomes=_outcomes(reader, run, names, outline.outcomes),
        scale="scale.gsc" if "scale.gsc" in names else None,
        families=families,
    )


def _there_first(line: Brief) -> tuple[bool, bool]:
    return line.muted, not line.still_there


def suspects(cases: Iterable[Case], labels: Mapping[str, str]) -> list[SuspectLine]:
    """Return the suspects of troubles that are still there, each once, for its worst; the most suspected first."""
    worst: dict[str, SuspectLine] = {}
    for case in cases:
        if not case.still_there:
            continue
        # A client that the finding itself is about is as suspect as the finding is sure.
        scores = {case.node: case.confidence}
        named = [(s.node, scores.get(s.node, s.score), s.reason) for s in case.newest.suspects]
        if not named and case.node is not None:
            named = [(case.node, case.confidence, "")]
        for node, score, reason in named:
            before = worst.get(node)
            why, label = reason or case.issue_entry.title, labels.get(node, "")
            line = SuspectLine(
                node,
                label,
                score,
                how_sure(case.issue, score),
                why,
                case.severity,
                since_of(case),
                case_key(case),
            )
            if before is None or (is_trouble(case), score) > (before.severity != "note", before.score or 0.0):
                worst[node] = line
    return sorted(worst.values(), key=lambda line: (line.severity == "note", -(line.score or 0.0)))


def _behind(case: Case, behind: Sequence[str], counts: Mapping[str, Sequence[int]]) -> str:
    """Return the first sign that the finding names, or that most clients have: one measured in turns shows little."""
    named = {sign.name for sign, _ in named_signs(case)}
    most = max(sum(own) for own in counts.values())
    return next((name for name in behind if name in named or sum(counts[name]) > ENOUGH * most), behind[0])


def _for_clients(counts: Mapping[str, Sequence[int]], names: Sequence[str]) -> str | None:
    """Return the first sign that most clients have in most rounds: an occasional one would leave a map empty."""
    most = max((sum(counts[name]) for name in FIRST_SIGHT if name in counts), default=0)
    dense = [name for name in FIRST_SIGHT if name in counts and sum(counts[name]) > ENOUGH * most]
    return next(iter([*dense, *(name for name in FIRST_SIGHT if name in names), *names]), None)


def _for_learning(counts: Mapping[str, Sequence[int]], names: Sequence[str]) -> str | None:
    """Return the first sign of learning that some node has in most rounds."""
    usual = [name for name in LEARNING if name in counts and sum(map(bool, counts[name])) * 2 > len(counts[name])]
    return next(iter([*usual, *(name for name in LEARNING if name in names)]), None)


def _outcomes(reader: Reader, run: str, names: Collection[str], known: SeriesByNode) -> list[str]:
    """Return what the federation or its server reports about learning: accuracy and loss, else what users logged."""
    own = [name for name in names if name.startswith("user.")][:8]
    measured = {name for name, _ in {**known, **(series_of(reader, run, own, (None, "server")) if own else {})}}
    return [name for name in (*OUTCOMES, *own) if name in measured]


def _order(name: str) -> tuple[int, int, str]:
    """Return the sort key: vital signs first, in the order of a medical chart; then in the order of the catalogue."""
    if name in VITAL_SIGNS:
        return 0, VITAL_SIGNS.index(name), name
    return (1, list(CATALOG).index(name), name) if name in CATALOG else (2, 0, name)
