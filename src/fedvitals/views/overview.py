# SPDX-License-Identifier: Apache-2.0
"""A run at a glance: the verdict, its troubles in short, who is suspected, and which signs there are to look at."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fedvitals.catalog import CATALOG
from fedvitals.diagnosis.cases import Case, is_trouble
from fedvitals.records import is_client
from fedvitals.stats import FAMILIES, HISTOGRAM_COLUMNS, statistics_of
from fedvitals.store.read import queries
from fedvitals.store.read.reader import Reader
from fedvitals.views.briefs import Brief, Marked, brief, since_of
from fedvitals.views.card import VITAL_SIGNS
from fedvitals.views.cases import case_key, cases_of
from fedvitals.views.verdict import Verdict, facts_of, judge

LONGEST_LIST = 200  # cases; the page of findings has the rest
SAMPLED = 5  # rounds in which is counted who tells a sign
ENOUGH = 0.5  # of the clients that trained, which must tell a sign for it to stand for them
# What tells clients apart, the plainest first: opened with where nobody chose another.
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
    node: str
    label: str
    score: float | None
    reason: str
    severity: str
    since: int | None
    key: str


@dataclass(frozen=True, slots=True)
class SignLine:
    """A sign of which clients have values, in the catalogue's words."""

    name: str
    unit: str
    meaning: str
    vital: bool  # of the few that stand on a health card


@dataclass(frozen=True, slots=True)
class FamilyLine:
    name: str
    rows: str
    statistics: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Overview:
    verdict: Verdict
    cases: list[Brief]  # those that are there now, worst first; then those that are over; muted ones last
    total_cases: int
    muted: int
    suspects: list[SuspectLine]
    clients: int
    first_round: int | None
    last_round: int | None
    signs: list[SignLine]
    sign: str | None  # what the client heat map opens with
    learning: str | None  # whose cohort stands in the band of learning
    outcomes: list[str]  # signs of the federation itself that say how well it learns
    scale: str | None  # gradient scale: «scale.gsc», where it was measured
    families: list[FamilyLine]


def overview(reader: Reader, run: str) -> Overview:
    found, facts, marked = cases_of(reader, run), facts_of(reader, run), Marked(reader, run)
    lines = [brief(case, marked, facts.labels) for case in found]
    lines.sort(key=lambda line: (line.muted, not line.still_there))
    history = reader.history(run)
    rounds, names = history.rounds(), queries.metric_names(reader, run)
    told = clients_tell(reader, run, names)
    counts = _told_by(reader, run, rounds, [name for name in told if name in {*FIRST_SIGHT, *LEARNING}])
    clients = sum(is_client(node) for node in history.nodes())
    return Overview(
        verdict=judge(found, facts),
        cases=lines[:LONGEST_LIST],
        total_cases=len(lines),
        muted=sum(line.muted for line in lines),
        suspects=suspects((case for case in found if case_key(case) not in facts.muted), facts.labels),
        clients=clients,
        first_round=rounds[0] if rounds else None,
        last_round=rounds[-1] if rounds else None,
        signs=[_sign(name) for name in sorted(told, key=_order)],
        sign=_for_clients(counts, told),
        learning=_for_learning(counts, told),
        outcomes=_outcomes(reader, run, names),
        scale="scale.gsc" if "scale.gsc" in names else None,
        families=[
            FamilyLine(family, FAMILIES[family].rows, statistics_of(family))
            for family in queries.layer_families(reader, run)
            if family in FAMILIES and FAMILIES[family].columns is not HISTOGRAM_COLUMNS
        ],
    )


def suspects(found: Iterable[Case], labels: Mapping[str, str]) -> list[SuspectLine]:
    """Who is suspected in troubles that are still there, each once, for its worst; the most suspected first."""
    worst: dict[str, SuspectLine] = {}
    for case in found:
        if not case.still_there:
            continue
        named = [(s.node, s.score, s.reason) for s in case.newest.suspects]
        if not named and case.node is not None:
            named = [(case.node, case.confidence, "")]
        for node, score, reason in named:
            before = worst.get(node)
            why, label = reason or case.issue_entry.title, labels.get(node, "")
            line = SuspectLine(node, label, score, why, case.severity, since_of(case), case_key(case))
            if before is None or (is_trouble(case), score) > (before.severity != "note", before.score or 0.0):
                worst[node] = line
    return sorted(worst.values(), key=lambda line: (line.severity == "note", -(line.score or 0.0)))


def clients_tell(reader: Reader, run: str, names: Collection[str]) -> list[str]:
    """Of these metrics, those that clients have values of."""
    number = reader.names.number(run)
    nodes = reader.database.rows(
        "SELECT s.id, s.text FROM run_node AS n JOIN symbol AS s ON s.id = n.node WHERE n.run = ?", (number,)
    )
    others = [identity for identity, text in nodes if not is_client(text)]
    holes = ", ".join("?" * len(others))
    sql = (
        # Nodes stand together in the index, so that the first client is found after as few rows as there are servers.
        "SELECT 1 FROM metric WHERE run = ? AND name = ? AND round IS NOT NULL AND node IS NOT NULL "  # noqa: S608
        f"{f'AND node NOT IN ({holes}) ' if others else ''}AND layer IS NULL LIMIT 1"
    )
    return [name for name in names if reader.database.rows(sql, (number, reader.names.number(name), *others))]


def _told_by(reader: Reader, run: str, rounds: Sequence[int], names: Iterable[str]) -> dict[str, list[int]]:
    """How many nodes told each of these signs, in a few rounds from all over the run."""
    number = reader.names.number(run)
    chosen = sorted({rounds[int((i + 0.5) * len(rounds) / SAMPLED)] for i in range(SAMPLED)}) if rounds else []
    sql = "SELECT COUNT(*) FROM metric WHERE run = ? AND name = ? AND round = ? AND node IS NOT NULL AND layer IS NULL"
    return {
        name: [reader.database.rows(sql, (number, reader.names.number(name), r))[0][0] for r in chosen]
        for name in names
    }


def _for_clients(counts: Mapping[str, Sequence[int]], told: Sequence[str]) -> str | None:
    """The first sign that most clients have in most rounds: one that is probed now and then leaves a map empty."""
    most = max((sum(counts[name]) for name in FIRST_SIGHT if name in counts), default=0)
    dense = [name for name in FIRST_SIGHT if name in counts and sum(counts[name]) >= max(1.0, ENOUGH * most)]
    return next(iter([*dense, *(name for name in FIRST_SIGHT if name in told), *told]), None)


def _for_learning(counts: Mapping[str, Sequence[int]], told: Sequence[str]) -> str | None:
    """The first sign of learning that somebody has in most rounds."""
    usual = [name for name in LEARNING if name in counts and sum(map(bool, counts[name])) * 2 > len(counts[name])]
    return next(iter([*usual, *(name for name in LEARNING if name in told)]), None)


def _outcomes(reader: Reader, run: str, names: Collection[str]) -> list[str]:
    """What the federation or its server tells of how well it learns: accuracy and loss, else what users logged."""
    history = reader.history(run)
    own = [name for name in names if name.startswith("user.")][:8]
    wanted = ["accuracy", "loss", "local.accuracy", "local.loss", *own]
    return [
        name
        for name in wanted
        if name in names and (history.series(name, None)[0] or history.series(name, "server")[0])
    ]


def _sign(name: str) -> SignLine:
    known = CATALOG.get(name)
    return SignLine(name, known.unit if known else "", known.meaning if known else "", name in VITAL_SIGNS)


def _order(name: str) -> tuple[int, int, str]:
    """Vital signs first, in the order of a patient's chart; then as the catalogue has them."""
    if name in VITAL_SIGNS:
        return 0, VITAL_SIGNS.index(name), name
    return (1, list(CATALOG).index(name), name) if name in CATALOG else (2, 0, name)
