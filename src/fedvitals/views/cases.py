# SPDX-License-Identifier: Apache-2.0
"""Reads the cases of a stored run, with the key, the actions and the error of each, and summarises them for lists."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote, unquote

from fedvitals.diagnosis.abstentions import LOOKED_AT
from fedvitals.diagnosis.cases import Case, CaseFindings, CaseKey, cases_from, group_findings, is_trouble
from fedvitals.diagnosis.corrections.catalog import finding_label
from fedvitals.diagnosis.issues.table import ISSUES_BY_CODE
from fedvitals.errors import ConfigError
from fedvitals.plain_json import copied
from fedvitals.records import Action, Event, Finding
from fedvitals.store.marks import Mark, marks
from fedvitals.store.read import events, queries
from fedvitals.store.read.metrics import newest_round_of
from fedvitals.store.read.nodes import rounds_attended
from fedvitals.store.read.paging import record_pages, records_of_kind
from fedvitals.store.read.reader import Reader
from fedvitals.views.case_sentences import sure
from fedvitals.views.cause_levels import CauseLevel, levels_of, what_looks_wrong
from fedvitals.views.labels import place_of
from fedvitals.views.memo import remembered
from fedvitals.views.waiting import waiting_in

PAGE = 100  # findings held at once, 7 kB each: a faulty run that trains for days has one per round
# Parts of the evidence with their own place; the rest is specific to the issue
TOLD_APART = ("since", "numbers", "levels")


def case_key(case: Case) -> str:
    """Return the key of a case in addresses and marks: stable, and a single path segment once it is quoted."""
    return key_text(case.key)


def key_text(key: CaseKey) -> str:
    """Return the text of a key."""
    return "~".join(quote(part or "", safe="").replace("~", "%7E") for part in key)


def cases_of(
    reader: Reader, run: str, number: int | None = None, *, rounds: list[int] | None = None, notes: bool = False
) -> list[Case]:
    """Read the cases of a run, each trouble once, the worst first; with `number`, as they were after that round.

    `rounds`: the run's rounds, ascending, if known already. `notes`: also cases that were never more than a note.
    A slow client for which no round waits is a note, whatever its detector called it.
    """
    if number is not None:
        findings = records_of_kind(reader, run, Finding, page=PAGE)
        by_case = group_findings(f for f in findings if f.where.round is not None and f.where.round <= number)
        cases = _cases_from(reader, run, by_case, number, rounds)
    else:
        grouped = remembered(reader, "findings", run, None, _GroupedFindings)
        with grouped.lock:
            grouped.read(reader, run)
            cases = _cases_from(reader, run, grouped.by_case, None, rounds)
    cases = _weighed_by_damage(reader, run, cases)
    return cases if notes else [case for case in cases if is_trouble(case)]


def _weighed_by_damage(reader: Reader, run: str, cases: list[Case]) -> list[Case]:
    """Return the cases, worst first, with slow clients that cost under a hundredth of the rounds' time as notes."""
    slow = [case for case in cases if case.issue == "STRAGGLER" and case.node is not None and is_trouble(case)]
    waiting = waiting_in(reader, run) if slow else None
    if waiting is None or waiting.first is None:
        return cases
    idle = [case for case in slow if (case.last or 0) >= waiting.first and not waiting.is_costly({case.node or ""})]
    weighed = [_as_note(case) if case in idle else case for case in cases]
    return sorted(weighed, key=lambda case: not is_trouble(case)) if idle else cases


def _as_note(case: Case) -> Case:
    message = f"{case.newest.message} Rounds waited less than 1 % of their time for it."
    return replace(case, severity="note", newest=replace(case.newest, severity="note", message=message))


class _GroupedFindings:
    """The findings of a run by case, to which only new ones are added: a faulty run has thousands."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.by_case: dict[CaseKey, CaseFindings] = {}
        self._until = -1

    def read(self, reader: Reader, run: str) -> None:
        for until, findings in record_pages(reader, run, Finding, PAGE, self._until):
            group_findings(findings, self.by_case)
            self._until = until


def _cases_from(
    reader: Reader, run: str, by_case: Mapping[CaseKey, CaseFindings], number: int | None, rounds: list[int] | None
) -> list[Case]:
    if not by_case:
        return []
    nodes = {node for _, node, _, _ in by_case}
    attendance: dict[str | None, list[int]] = {
        None: reader.history(run).rounds() if rounds is None else rounds,
        **rounds_attended(reader, run, [node for node in nodes if node is not None]),
    }
    until = _judged_until(reader, run, by_case, attendance) if number is None else number
    if until is not None:
        attendance = {who: rounds[: bisect_right(rounds, until)] for who, rounds in attendance.items()}
    return cases_from(by_case, attendance)


def _judged_until(
    reader: Reader, run: str, by_case: Mapping[CaseKey, CaseFindings], attendance: Mapping[str | None, list[int]]
) -> int | None:
    """Return the last round that detectors have examined; None if it is unknown, or makes no difference.

    While a run trains, a trouble is not over because a newer round has not been judged yet.
    """
    newest = max((same.rounds[-1] for same in by_case.values() if same.rounds), default=-1)
    if all(not rounds or rounds[-1] <= newest for rounds in attendance.values()):
        return None
    looked_at = newest_round_of(reader, run, LOOKED_AT)
    return None if looked_at is None else max(looked_at, newest)


def case_of(reader: Reader, run: str, key: str) -> Case:
    """Return the case with that key, even if its quoting was undone on the way; ConfigError if there is none."""
    by_key = {key_text(key): case for case in cases_of(reader, run, notes=True) for key in case.keys}
    plain = {unquote(known): case for known, case in by_key.items()}
    case = by_key.get(key) or plain.get(key)
    if case is None:
        raise ConfigError(f"The run {run} has no finding '{key}'. `fedvitals findings {run}` lists those that it has.")
    return case


def concerns(case: Case, node: str) -> bool:
    """Whether the node is faulty or suspected; for an edge, cluster or ring, whether it is the group."""
    return node in (case.node, case.group) or any(suspect.node == node for suspect in case.newest.suspects)


def culprits(case: Case) -> tuple[str, ...]:
    """Return the nodes that a case names: the faulty node or group, else the suspects."""
    own = case.node or case.group
    return (own,) if own is not None else tuple(suspect.node for suspect in case.newest.suspects)


def actions_about(case: Case, actions: Iterable[Action]) -> list[Action]:
    """Return what was proposed or done about a case, each action in its current state."""
    answers = finding_label(case.newest)
    newest = {(action.kind, action.target): action for action in actions if action.finding == answers}
    return list(newest.values())


def failures_of(reader: Reader, run: str, cases: Sequence[Case]) -> list[Event | None]:
    """Return for each case about an error its newest event that the case knows of; None for the others."""
    about = [case.newest.evidence.get("event") for case in cases]
    logged = queries.events(reader, run, level="error") if any(about) else []
    errors: list[Event | None] = []
    for case, name in zip(cases, about, strict=True):
        same = [e for e in logged if (e.name, e.where.node) == (name, case.node) and e.where.round in case.rounds]
        errors.append(max(same, key=lambda e: e.at, default=None))
    return errors


def failures_by_client(reader: Reader, run: str, number: int | None = None) -> dict[str, list[tuple[str, int]]]:
    """Return the failures (`records.FAILURES`) of each client by name and round; with `number`, of that round."""
    by_client: dict[str, list[tuple[str, int]]] = {}
    for node, name, round_index in events.failures(reader, run, number):
        by_client.setdefault(node, []).append((name, round_index))
    return by_client


def traceback_of(failure: Event) -> list[str]:
    """Return the lines of an event's traceback; none if privacy withheld them."""
    kept = failure.data.get("traceback")
    return [line.rstrip() for line in kept.splitlines() if line.strip()] if isinstance(kept, str) else []


def number_of(value: Any) -> float | None:
    """Read a number in evidence, where JSON has NaN and infinity as words; None if it is not a number."""
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError):
        return None


def numbers_of(case: Case) -> list[Mapping[str, Any]]:
    """Return the numbers behind the newest finding; a user's own detector may have stored anything there."""
    rows = case.newest.evidence.get("numbers")
    return [row for row in rows if isinstance(row, Mapping)] if isinstance(rows, list | tuple) else []


def more_of(case: Case) -> Iterable[tuple[str, Any]]:
    """Yield the evidence specific to the issue, besides the numbers."""
    return ((name, value) for name, value in case.newest.evidence.items() if name not in TOLD_APART)


def text_of(value: Any) -> str:
    """Format a piece of evidence in one line."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {text_of(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        pairs = (" ".join(map(text_of, item)) if isinstance(item, list | tuple) else text_of(item) for item in value)
        return "; ".join(pairs)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True, slots=True)
class Brief:
    """A case in brief."""

    key: str
    issue: str
    title: str
    place: str
    node: str | None
    label: str  # of its node, if it has one; see `views.labels`
    layer: str | None
    severity: str  # the worst so far
    confidence: float | None
    sure: str  # in words: «96 %»
    since: int | None  # as reported by the detector, else the first round in which it was seen
    last: int | None
    still_there: bool
    timeline: str  # since when, how often, whether it is still there
    alternatives: tuple[tuple[str, float], ...]  # titles of other issues that it may be, with their probabilities
    levels: tuple[CauseLevel, ...]  # something is wrong, of which family, the exact cause; empty if no causes are known
    looks: str  # what looks wrong, if the exact cause is below 50 %; else empty
    follows: str | None  # the key of the case of which it is a consequence
    message: str
    acknowledged: bool
    muted: bool


class Marked:
    """The marks that people have set on a run's cases."""

    def __init__(self, marks: Iterable[Mark]) -> None:
        by_kind = [(mark.kind, mark.target, mark.value) for mark in marks]
        self.acknowledged = {target for kind, target, _ in by_kind if kind == "acknowledged"}
        self.muted = {target: reason for kind, target, reason in by_kind if kind == "muted"}


def marked(reader: Reader, run: str) -> Marked:
    """Read the marks that people have set on a run's cases."""
    return Marked(marks(reader, run))


def since_of(case: Case) -> int | None:
    """Return the round since which a case exists: as reported by the detector, else the first in which it was seen."""
    return case.since if case.since is not None else case.first


def _title(issue: str) -> str:
    return ISSUES_BY_CODE[issue].title if issue in ISSUES_BY_CODE else issue


def brief(case: Case, marked: Marked, labels: Mapping[str, str]) -> Brief:
    """Summarise a case; `labels`: of nodes, see `views.labels`."""
    key = case_key(case)
    return copied(
        Brief,
        case,
        key=key,
        title=case.issue_entry.title,
        place=place_of(case, labels),
        label=labels.get(case.node or "", ""),
        sure=sure(case),
        since=since_of(case),
        timeline=case.timeline,
        alternatives=tuple((_title(issue), chance) for issue, chance in case.alternatives),
        levels=levels_of(case),
        looks=what_looks_wrong(case),
        follows=None if case.cause is None else key_text(case.cause),
        message=case.newest.message,
        acknowledged=key in marked.acknowledged,
        muted=key in marked.muted,
    )
