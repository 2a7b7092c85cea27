# SPDX-License-Identifier: Apache-2.0
"""The cases of a stored run, and what belongs to each: its key in addresses, its actions, the error it is about."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote, unquote

from fedvitals.diagnosis.cases import Case, cases
from fedvitals.diagnosis.corrections.catalog import finding_label
from fedvitals.errors import ConfigError
from fedvitals.records import FAILURES, Action, Event, Finding
from fedvitals.store.read import queries
from fedvitals.store.read.reader import Reader

TOLD_APART = ("since", "numbers")  # of the evidence; the rest is the issue's own


def case_key(case: Case) -> str:
    """What names a case in addresses and marks: the same in every reading, and one part of a path once it is quoted."""
    parts = (case.issue, case.node, case.group, case.layer)
    return "~".join(quote(part or "", safe="").replace("~", "%7E") for part in parts)


def cases_of(reader: Reader, run: str, number: int | None = None) -> list[Case]:
    """Every trouble of a run once, worst first; with `number`, as it stood after that round."""
    findings = list(queries.records(reader, run, Finding))
    if number is not None:
        findings = [f for f in findings if f.where.round is not None and f.where.round <= number]
    attendance = queries.attendance(reader, run, {finding.where.node for finding in findings})
    if number is not None:
        attendance = {who: [r for r in rounds if r <= number] for who, rounds in attendance.items()}
    return cases(findings, attendance)


def case_of(reader: Reader, run: str, key: str) -> Case:
    """The case of that key, also where somebody on the way has undone its quoting; ConfigError where there is none."""
    found = {case_key(case): case for case in cases_of(reader, run)}
    plain = {unquote(known): case for known, case in found.items()}
    case = found.get(key) or plain.get(key)
    if case is None:
        raise ConfigError(f"The run {run} has no finding '{key}'. `fedvitals findings {run}` lists those that it has.")
    return case


def concerns(case: Case, node: str) -> bool:
    """Whether the node is ill, or under suspicion; of an edge, cluster or ring, whether it is the group."""
    return node in (case.node, case.group) or any(suspect.node == node for suspect in case.newest.suspects)


def culprits(case: Case) -> tuple[str, ...]:
    """Whom it names: the node or group that is ill, else those under suspicion."""
    own = case.node or case.group
    return (own,) if own is not None else tuple(suspect.node for suspect in case.newest.suspects)


def actions_about(case: Case, actions: Iterable[Action]) -> list[Action]:
    """What was proposed or done about a case, and what became of it last."""
    answers = finding_label(case.newest)
    newest = {(action.kind, action.target): action for action in actions if action.finding == answers}
    return list(newest.values())


def failures_of(reader: Reader, run: str, found: Sequence[Case]) -> list[Event | None]:
    """For each case that is about an error, the newest event of it that the case knows of; None for the others."""
    about = [case.newest.evidence.get("event") for case in found]
    events = queries.events(reader, run, level="error") if any(about) else []
    errors: list[Event | None] = []
    for case, name in zip(found, about, strict=True):
        same = [e for e in events if (e.name, e.where.node) == (name, case.node) and e.where.round in case.rounds]
        errors.append(max(same, key=lambda e: e.at, default=None))
    return errors


def failures_by_client(reader: Reader, run: str, number: int | None = None) -> dict[str, list[tuple[str, int]]]:
    """What failed of each client (`records.FAILURES`), by name and round; with `number`, in that round only."""
    names = ", ".join("?" * len(FAILURES))
    one = "" if number is None else "AND e.round = ? "
    found = reader.database.rows(
        "SELECT node.text, name.text, e.round FROM event AS e JOIN symbol AS name ON name.id = e.name "  # noqa: S608 - our own words
        "JOIN symbol AS node ON node.id = e.node WHERE e.run = (SELECT id FROM symbol WHERE text = ?) "
        f"{one}AND name.text IN ({names}) AND e.round IS NOT NULL",
        (run, *(() if number is None else (number,)), *FAILURES),
    )
    events: dict[str, list[tuple[str, int]]] = {}
    for node, name, when in found:
        events.setdefault(node, []).append((name, when))
    return events


def traceback_of(failure: Event) -> list[str]:
    """Its lines; none where privacy kept them."""
    kept = failure.data.get("traceback")
    return [line.rstrip() for line in kept.splitlines() if line.strip()] if isinstance(kept, str) else []


def number_of(value: Any) -> float | None:
    """What JSON may have made of a number in evidence: NaN and infinity are words there."""
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError):
        return None


def numbers_of(case: Case) -> list[Mapping[str, Any]]:
    """The numbers that the newest finding rests on; a user's own detector may have put anything there."""
    rows = case.newest.evidence.get("numbers")
    return [row for row in rows if isinstance(row, Mapping)] if isinstance(rows, list | tuple) else []


def more_of(case: Case) -> Iterable[tuple[str, Any]]:
    """Evidence of the issue's own, besides the numbers."""
    return ((name, value) for name, value in case.newest.evidence.items() if name not in TOLD_APART)


def text_of(value: Any) -> str:
    """A piece of evidence in one line."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {text_of(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        pairs = (" ".join(map(text_of, item)) if isinstance(item, list | tuple) else text_of(item) for item in value)
        return "; ".join(pairs)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
