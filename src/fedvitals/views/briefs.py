# SPDX-License-Identifier: Apache-2.0
"""Summarises a case in the one form that lists, rows and cards show."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fedvitals.diagnosis.cases import Case
from fedvitals.plain_json import copied
from fedvitals.store.marks import Mark, marks
from fedvitals.store.read.reader import Reader
from fedvitals.views.cases import case_key
from fedvitals.views.labels import place_of


@dataclass(frozen=True, slots=True)
class Brief:
    """A case in short."""

    key: str
    issue: str
    title: str
    place: str
    node: str | None
    label: str  # of its node, where it has one; see `views.labels`
    layer: str | None
    severity: str  # the worst that it had
    confidence: float | None
    since: int | None  # as the detector says, else the first round in which it was seen
    last: int | None
    still_there: bool
    course: str  # since when, how often, still there
    message: str
    acknowledged: bool
    muted: bool


class Marked:
    """What people have said of a run's cases."""

    def __init__(self, marks: Iterable[Mark]) -> None:
        by_kind = [(mark.kind, mark.target, mark.value) for mark in marks]
        self.acknowledged = {target for kind, target, _ in by_kind if kind == "acknowledged"}
        self.muted = {target: reason for kind, target, reason in by_kind if kind == "muted"}


def marked(reader: Reader, run: str) -> Marked:
    """Read what people have said of a run's cases."""
    return Marked(marks(reader, run))


def since_of(case: Case) -> int | None:
    """Return the round since which a case exists: as the detector says, else the first in which it was seen."""
    return case.since if case.since is not None else case.first


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
        since=since_of(case),
        course=case.timeline,
        message=case.newest.message,
        acknowledged=key in marked.acknowledged,
        muted=key in marked.muted,
    )
