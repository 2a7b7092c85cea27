# SPDX-License-Identifier: Apache-2.0
"""Computes the list of a run's findings, and everything about one of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fedvitals.diagnosis.cases import Case, is_trouble
from fedvitals.diagnosis.evidence.vital_signs import as_measured
from fedvitals.diagnosis.issues.table import ISSUES_BY_CODE, RATES, how_sure, measured_rates
from fedvitals.plain_json import copied
from fedvitals.records import Action, Event
from fedvitals.store.read import queries
from fedvitals.store.read.reader import Reader
from fedvitals.views.case_sentences import clause, sure
from fedvitals.views.cases import (
    Brief,
    Marked,
    actions_about,
    brief,
    case_key,
    case_of,
    cases_of,
    concerns,
    failures_of,
    marked,
    more_of,
    number_of,
    numbers_of,
    text_of,
    traceback_of,
)
from fedvitals.views.evidence import Evidence, evidence_of
from fedvitals.views.evidence_signs import COMPARED, NEAREST, SHARES, meaning_of, sign_of, title_of, unit_of
from fedvitals.views.labels import labels_of
from fedvitals.views.metric_titles import in_words, metric_title
from fedvitals.views.outline import outline_of
from fedvitals.views.verdict import Verdict, facts_of, judge

Where = Literal["open", "past", "muted", "acknowledged", "all"]
LONGEST = 2000  # characters of one piece of evidence
PLACES = {"first": "the first layer", "head": "the last layer"}
MOST_ROUNDS = 200  # of a case in a list; the page of the case has all


@dataclass(frozen=True, slots=True)
class CaseCard(Brief):
    """A case on a card."""

    family: str
    sentence: str  # as a full sentence
    now: str  # the severity of the newest finding
    sure: str  # the confidence in words: «96 %»
    group: str | None
    first: int | None
    rounds: tuple[int, ...]  # the newest in which it was seen
    confidences: tuple[float, ...]
    seen: int  # in how many rounds
    returned: int
    reason: str | None  # why it was muted


@dataclass(frozen=True, slots=True)
class Counts:
    """The number of cases in each state."""

    open: int
    past: int
    muted: int
    acknowledged: int
    all: int


@dataclass(frozen=True, slots=True)
class Findings:
    """A page of cases, current ones first, worst first among them.

    `total` are those that match the filter, `counts` all that exist.
    """

    verdict: Verdict
    examined: str  # what was examined, and what of it was not judged, in words; empty: not recorded
    not_judged: float | None  # share of client-rounds; None: not recorded
    notes: int  # cases that are hidden because they were never more than a note
    cases: tuple[CaseCard, ...]
    total: int
    offset: int
    limit: int
    counts: Counts
    severities: dict[str, int]  # of the open ones


@dataclass(frozen=True, slots=True)
class NumberRow:
    """One number of the finding, with its usual value."""

    name: str
    title: str
    meaning: str
    compared_as: str  # «log», «artanh»: the scale of value and usual; empty: as measured
    value: float | None
    usual: float | None
    of: str
    score: float | None  # robust standard deviations
    raw_value: float | None  # as measured, whatever the scale of the comparison
    raw_usual: float | None
    unit: str  # of these two


@dataclass(frozen=True, slots=True)
class SuspectRow:
    """A suspected node."""

    node: str
    label: str
    score: float | None
    sure: str  # the score in words
    reason: str


@dataclass(frozen=True, slots=True)
class ActionRow:
    """An action that was proposed or taken about a case."""

    kind: str
    target: str | None
    status: str
    round: int | None
    at: float
    why: str
    arguments: str  # the rest, as text


@dataclass(frozen=True, slots=True)
class Failed:
    """The error that a case is about."""

    event: str
    round: int | None
    message: str
    traceback: tuple[str, ...]  # none if privacy withheld them


@dataclass(frozen=True, slots=True)
class Trust:
    """How the confidence was determined, and the measured error rates of such findings."""

    words: str
    false_alarms: float | None  # per 100 healthy rounds of the fault bank
    healthy_rounds: int | None  # the number behind that figure


@dataclass(frozen=True, slots=True)
class FindingDetails:
    """Everything about a case except its plots, which take longer to compute."""

    case: CaseCard
    symptom: str
    causes: tuple[str, ...]
    remedies: tuple[str, ...]
    refutation: str
    reference: str
    exact: bool
    numbers: tuple[NumberRow, ...]
    more: tuple[tuple[str, str], ...]  # evidence specific to the issue: name and text
    suspects: tuple[SuspectRow, ...]
    actions: tuple[ActionRow, ...]
    error: Failed | None
    trust: Trust


@dataclass(frozen=True, slots=True)
class FullFinding(FindingDetails):
    """Everything about one case, with the plots behind it."""

    evidence: Evidence


def card(case: Case, marked: Marked, labels: Mapping[str, str]) -> CaseCard:
    """Summarise a case as a card."""
    short = brief(case, marked, labels)
    return copied(
        CaseCard,
        short,
        case,
        family=case.issue_entry.family,
        sentence=clause([case], labels),
        now=case.newest.severity,
        sure=sure(case),
        group=case.newest.where.group,
        rounds=case.rounds[-MOST_ROUNDS:],
        confidences=case.confidences[-MOST_ROUNDS:],
        seen=len(case.rounds),
        reason=marked.muted.get(short.key) or None,
    )


@dataclass(frozen=True, slots=True)
class FindingsAsked:
    """A selection of a run's cases."""

    where: Where = "all"
    severity: str | None = None
    node: str | None = None
    search: str = ""  # words that must all occur
    limit: int = 100
    offset: int = 0
    notes: bool = False  # also those that were never more than a note; `severity` «note» implies these


def findings_page(reader: Reader, run: str, asked: FindingsAsked) -> Findings:
    """Read a page of the list of findings; `asked`: which, and how many."""
    outline = outline_of(reader, run)
    every_case = cases_of(reader, run, rounds=outline.rounds, notes=True)
    wanted = asked.notes or asked.severity == "note"
    cases = [case for case in every_case if wanted or is_trouble(case)]
    facts = facts_of(reader, run, outline, cases)
    marks = Marked(outline.marks)
    briefs = {case_key(case): card(case, marks, facts.labels) for case in cases}
    chosen = [
        line
        for case in cases
        if _is_there(line := briefs[case_key(case)], asked.where)
        and (asked.severity is None or line.severity == asked.severity)
        and (asked.node is None or concerns(case, asked.node))
        and _mentions(line, asked.search)
    ]
    chosen.sort(key=lambda line: _there_first(line, briefs))
    counts = {name: sum(_is_there(line, name) for line in briefs.values()) for name in Counts.__dataclass_fields__}
    still = [line for line in briefs.values() if _is_there(line, "open")]
    return Findings(
        verdict=judge(cases, facts),
        examined="" if facts.examined is None else str(facts.examined),
        not_judged=None if facts.examined is None else facts.examined.share,
        notes=len(every_case) - len(cases),
        cases=tuple(chosen[asked.offset : asked.offset + asked.limit]),
        total=len(chosen),
        offset=asked.offset,
        limit=asked.limit,
        counts=Counts(**counts),
        severities={name: sum(line.severity == name for line in still) for name in ("critical", "warning", "note")},
    )


def _there_first(line: CaseCard, lines: Mapping[str, CaseCard]) -> tuple[bool, bool]:
    """Sort current cases before past ones; consequences stay below their case."""
    head = lines.get(line.follows or "", line)
    return head.muted, not head.still_there


def _is_there(line: CaseCard, where: str) -> bool:
    """Whether a case belongs into this part of the list: muted ones only among the muted, unless all are requested."""
    heard = not line.muted
    return {
        "muted": line.muted,
        "acknowledged": heard and line.acknowledged,
        "open": heard and line.still_there,
        "past": heard and not line.still_there,
    }.get(where, True)


def _mentions(line: CaseCard, search: str) -> bool:
    text = f"{line.issue} {line.title} {line.place} {line.sentence} {line.message} {line.family}".lower()
    return all(word in text for word in search.lower().split())


def full_finding(reader: Reader, run: str, key: str) -> FullFinding:
    """Read everything about one case; ConfigError if there is none with that key."""
    finding = finding_details(reader, run, key)
    return copied(FullFinding, finding, evidence=evidence_of_key(reader, run, key))


def evidence_of_key(reader: Reader, run: str, key: str) -> Evidence:
    """Read the plots behind one case; ConfigError if there is none with that key."""
    return evidence_of(reader, run, case_of(reader, run, key))


def finding_details(reader: Reader, run: str, key: str) -> FindingDetails:
    """Read one case in full; ConfigError if there is none with that key."""
    case, labels = case_of(reader, run, key), labels_of(reader, run)
    actions = actions_about(case, queries.records(reader, run, Action))
    return copied(
        FindingDetails,
        case.issue_entry,
        case=card(case, marked(reader, run), labels),
        numbers=tuple(number_row(row, case) for row in numbers_of(case)),
        causes=tuple(map(in_words, case.issue_entry.causes)),
        remedies=tuple(map(in_words, case.issue_entry.remedies)),
        reference=in_words(case.issue_entry.reference),
        more=tuple((name.replace("_", " "), text_of(value)[:LONGEST]) for name, value in more_of(case)),
        suspects=tuple(
            SuspectRow(
                s.node,
                labels.get(s.node, ""),
                number_of(s.score),
                how_sure(case.issue, s.score),
                s.reason,
            )
            for s in case.newest.suspects
        ),
        actions=tuple(_action(action) for action in actions if action.kind != "advise"),  # they repeat the remedies
        error=_failed(failures_of(reader, run, [case])[0]),
        trust=trust_of(case),
    )


def number_row(row: Mapping[str, Any], case: Case) -> NumberRow:
    """Return a number of a finding's evidence with its title, as measured, and with its unit."""
    name = str(row.get("name"))
    sign = sign_of(name, case)
    value, usual = number_of(row.get("value")), number_of(row.get("usual"))
    if name in NEAREST:
        sign = None  # computed on the spot: it has no unit and no meaning but those of its name
    as_it_is = sign is None or (not sign.statistic and not sign.events and name not in COMPARED)
    return NumberRow(
        name=name,
        title=metric_title(name) if as_it_is or sign is None else title_of(sign, PLACES.get(sign.layer, case.layer)),
        meaning="" if sign is None else meaning_of(sign),
        compared_as=COMPARED[name][1] if name in COMPARED else "",
        value=value,
        usual=usual,
        of={"peers": "other clients"}.get(of := str(row.get("of") or ""), of),
        score=number_of(row.get("score")),
        raw_value=as_measured(name, value),
        raw_usual=as_measured(name, usual),
        unit=("share" if name in SHARES else "") if sign is None else unit_of(sign),
    )


def _action(action: Action) -> ActionRow:
    rest = {name: value for name, value in action.arguments.items() if name not in ("why", "by", "id")}
    why = str(action.arguments.get("why", ""))[:LONGEST]
    return copied(ActionRow, action, round=action.where.round, why=why, arguments=text_of(rest)[:LONGEST])


def _failed(failure: Event | None) -> Failed | None:
    if failure is None:
        return None
    return Failed(failure.name, failure.where.round, failure.message, tuple(traceback_of(failure)))


def trust_of(case: Case) -> Trust:
    """Return how a case's confidence was determined: by equality, calibrated evidence, or a rule's own statement."""
    known = ISSUES_BY_CODE.get(case.issue)
    rate = measured_rates().get(case.issue)
    if known is None:
        words = "Stated by a detector of your own; nothing was measured of it."
    elif known.exact or _has_exact_view(case):
        words = "An equality test: what it says has happened. There is nothing to be unsure of but its cause."
    elif isinstance(case.newest.evidence.get("evidence"), Mapping):
        words = (
            "Calibrated: of the clients in the fault bank's tuning runs against whom there was as much evidence, this "
            "share was really faulty."
        )
    else:
        words = "Stated by the rule itself, the same for every such finding; it is not fitted to data."
    return Trust(words, rate, _healthy_rounds() if rate is not None else None)


def _has_exact_view(case: Case) -> bool:
    views = case.newest.evidence.get("views")
    return isinstance(views, list | tuple) and "exact" in map(str, views)


def _healthy_rounds() -> int | None:
    rates = json.loads(RATES.read_text(encoding="utf-8")) if RATES.exists() else {}
    rounds = rates.get("healthy_rounds")
    return rounds if isinstance(rounds, int) else None
