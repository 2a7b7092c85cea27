# SPDX-License-Identifier: Apache-2.0
"""Run detectors on a run while it trains: they read every record in memory and report when a round is complete."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from fedvitals import html_display as html
from fedvitals.diagnosis.abstentions import ExaminationCounts, Examined
from fedvitals.diagnosis.cases import (
    CASE_TITLES,
    Attendance,
    Case,
    case_cells,
    cases,
    is_trouble,
    key_of,
    notes_in_words,
    record_attendance,
    severity_rank,
)
from fedvitals.diagnosis.examine import DetectorExamination, compares_clients, with_run_and_time
from fedvitals.diagnosis.gaps import OUTSIDE_ROUND, UNSEEN, incomplete, statement
from fedvitals.measurements import Emitted, Measurements, Telemetry, Transfers
from fedvitals.protocols import Detector, History, Node, Sink
from fedvitals.records import Action, Event, Finding, Metric, Run, Truth, Where, is_client

ROUND_COMPLETE = "time.round"  # the monitor's last record of a round
CLIENT_COMPLETE = "time.client"  # its last record of a client
SHOWN = 20  # cases in a notebook's display


class HistorySink(Protocol):
    """A sink that can also return the history of what was written to it."""

    def write(self, records: Sequence[Telemetry], /) -> None: ...

    def note(self, messages: Transfers, /) -> None: ...

    def history(self, run: str) -> History: ...


class LiveDetectors(Sink):
    """A sink that runs the detectors on a queue's worker, so that they take no time from the training thread.

    `on_finding` is called with each finding; `on_failure` with an error and the work that failed; `on_record` with what
    could not be judged in a round, see `abstentions`. `earlier` returns an event about earlier runs; it is called once,
    before the first round is examined.
    """

    name = "detectors"
    takes_measurements = takes_transfers = True
    ignores = (Finding, Action, Truth)  # detectors must not see these; see `transport.sink_writer`

    def __init__(
        self,
        run: str,
        memory: HistorySink,
        detectors: Sequence[Detector],
        on_finding: Callable[[Finding], None],
        on_failure: Callable[[Exception, str], None],
        on_record: Callable[[Metric | Event], None] = lambda _: None,
        earlier: Callable[[], Event | None] | None = None,
    ) -> None:
        self._run, self._memory, self._found, self._failed = run, memory, on_finding, on_failure
        self._earlier = earlier
        self._on_record, self._counts = on_record, ExaminationCounts() if compares_clients(detectors) else None
        self.outside: set[Node] = set()  # clients that trained outside any round
        self.unseen = False  # whether the host says that it sees nothing of the training
        self._examination = DetectorExamination(memory.history(run), detectors, on_failure)
        self.attendance: dict[Node | None, list[int]] = {}  # see `record_attendance`
        self._with_findings: set[Node | None] = set()

    def write(self, records: Sequence[Emitted], /) -> None:
        """Add records and examine each completed round.

        Failures are reported and do not stop the other detectors.
        """
        try:
            for record in records:
                if isinstance(record, Transfers):
                    self._memory.note(record)
            seen = [r for r in records if not isinstance(r, Transfers) and not isinstance(r, self.ignores)]
            self._memory.write([_measured(record) for record in seen])
        except Exception as error:  # noqa: BLE001 - of one record; the others are kept
            self._failed(error, "keeping records for the detectors")
        for record in records:
            if isinstance(record, Metric) and record.name == ROUND_COMPLETE and _of_whole_round(record.where):
                self._examine(record.where.round or 0)
            elif isinstance(record, Measurements) and record.round is None and CLIENT_COMPLETE in record.names:
                self.outside.update(node for node in record.measured_nodes() if node is not None and is_client(node))
            elif isinstance(record, Event) and record.name == OUTSIDE_ROUND and record.where.node is not None:
                self.outside.add(record.where.node)
            elif isinstance(record, Event) and record.name == UNSEEN and record.where.node is None:
                self.unseen = True

    def examined(self) -> Examined | None:
        """Return what was examined so far; None if no detector compares clients."""
        return None if self._counts is None else self._counts.examined()

    def _examine(self, round_index: int) -> None:
        earlier, self._earlier = self._earlier, None
        try:
            if earlier is not None and (event := earlier()) is not None:
                self._memory.write([event])
                self._on_record(event)
        except Exception as error:  # noqa: BLE001
            self._failed(error, "reading earlier runs")
        try:
            record_attendance(self.attendance, self._memory.history(self._run), round_index, self._with_findings)
        except Exception as error:  # noqa: BLE001
            self._failed(error, "noting who took part")
        try:
            for finding in self._examination.findings_of(round_index):
                self._take(finding)
        except Exception as error:  # noqa: BLE001 - a detector's own errors are caught before
            self._failed(error, "examining a round")
        try:
            for metric in self._counts.add(self._examination.history, round_index) if self._counts else ():
                self._on_record(replace(metric, where=replace(metric.where, run=self._run), at=time.time()))
        except Exception as error:  # noqa: BLE001
            self._failed(error, "counting what was judged")

    def _take(self, finding: Finding) -> None:
        try:
            self._with_findings.add(finding.where.node)
            self._found(with_run_and_time(finding, self._run, time.time()))
        except Exception as error:  # noqa: BLE001 - whatever a user's detector has made
            self._failed(error, "taking a finding")


def _of_whole_round(where: Where) -> bool:
    """Return whether a record is about the whole round rather than a client, which could claim anything."""
    return where.round is not None and where.node is None


def _measured(record: Telemetry) -> Telemetry:
    """Return the record without the run's configuration, which may name injected faults that detectors must not see."""
    return replace(record, config={}) if isinstance(record, Run) else record


class FindingList(list[Finding]):
    """A list of `fv.Finding`, worst first, one for each round in which an issue was seen; printed as cases.

    `cases` are these findings joined over the rounds; `gaps` says, a sentence each, what could not be judged, and is
    empty if everything was; `examined` says what the detectors looked at; `hidden_notes` counts the cases that were
    never more than a note and are left out.
    """

    def __init__(
        self,
        findings: Iterable[Finding],
        *,
        installed: int,
        attendance: Attendance | None = None,
        gaps: Sequence[str] = (),
        examined: Examined | None = None,
        notes: bool = True,
    ) -> None:
        everything = sorted(findings, key=lambda f: (severity_rank(f.severity), -f.confidence))
        self.cases: list[Case] = cases(everything, attendance)  # worst first
        self.hidden_notes = 0
        if not notes:
            left_out = {key for case in self.cases if not is_trouble(case) for key in case.keys}
            self.hidden_notes = sum(not is_trouble(case) for case in self.cases)
            self.cases = [case for case in self.cases if is_trouble(case)]
            everything = [finding for finding in everything if key_of(finding) not in left_out]
        super().__init__(everything)
        self.installed = installed  # the number of detectors that ran
        self.examined = examined  # what they examined; None if unknown
        self.gaps = tuple(gaps)  # why the run was not fully examined; empty if it was

    def __str__(self) -> str:
        if not self.installed:
            return 'No findings: no detector is installed. Leave out Monitor(detectors=...), or say ["standard", ...].'
        lines = [*map(str, self.cases)]
        if self.gaps or not self:
            lines.append(statement(self.installed, self.gaps, self.examined, silent=not self))
        if self.hidden_notes:
            lines.append(f"{notes_in_words(self.hidden_notes)}: findings(notes=True).")
        return "\n".join(lines)

    __repr__ = __str__

    @property
    def verdict(self) -> str:
        """The verdict on the run so far as text: the number of problems, or what was examined, and what was not."""
        now = sum(is_trouble(case) and case.still_there for case in self.cases)
        over = sum(is_trouble(case) and not case.still_there for case in self.cases)
        if not self.installed:
            return "Not judged: no detector is installed."
        if not now + over:
            return statement(self.installed, self.gaps, self.examined, silent=True)
        counts = [f"{now} problem{'s' * (now != 1)} now"] * bool(now) + [f"{over} resolved"] * bool(over)
        missing = f" {incomplete(self.gaps)}" if self.gaps else ""
        return f"{', '.join(counts)}.{missing}"

    def _repr_html_(self) -> str:
        hidden = f"{notes_in_words(self.hidden_notes)}: findings(notes=True)." if self.hidden_notes else ""
        cells = map(case_cells, self.cases[:SHOWN])
        more = f"and {len(self.cases) - SHOWN} more" if len(self.cases) > SHOWN else ""
        parts = html.paragraph(self.verdict), html.table(CASE_TITLES, cells)
        return html.display(*parts, *(html.paragraph(words, quiet=True) for words in (more, hidden)))
