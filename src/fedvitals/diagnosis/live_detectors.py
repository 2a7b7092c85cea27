# SPDX-License-Identifier: Apache-2.0
"""Run detectors on a run while it trains: they see every record in memory and report when a round is complete."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from fedvitals.diagnosis.cases import Attendance, Case, cases, record_attendance, severity_rank
from fedvitals.diagnosis.examine import DetectorExamination, with_run_and_time
from fedvitals.diagnosis.gaps import incomplete, no_all_clear
from fedvitals.measurements import Emitted, Telemetry, Transfers
from fedvitals.protocols import Detector, History, Node, Sink
from fedvitals.records import Action, Finding, Metric, Run, Truth, Where

ROUND_COMPLETE = "time.round"  # the monitor's last record of a round


class HistorySink(Protocol):
    """A sink that can also return the history of what was written to it."""

    def write(self, records: Sequence[Telemetry], /) -> None: ...

    def note(self, messages: Transfers, /) -> None: ...

    def history(self, run: str) -> History: ...


class LiveDetectors(Sink):
    """A sink that runs the detectors on a queue's worker, so that they take no time from the training thread.

    `on_finding` is called with each finding; `on_failure` with an error and what was being done.
    """

    name = "detectors"
    takes_measurements = takes_transfers = True
    ignores = (Finding, Action, Truth)  # no detector may see these; see `transport.sink_writer`

    def __init__(
        self,
        run: str,
        memory: HistorySink,
        detectors: Sequence[Detector],
        on_finding: Callable[[Finding], None],
        on_failure: Callable[[Exception, str], None],
    ) -> None:
        self._run, self._memory, self._found, self._failed = run, memory, on_finding, on_failure
        self._examination = DetectorExamination(memory.history(run), detectors, on_failure)
        self.attendance: dict[Node | None, list[int]] = {}  # see `record_attendance`
        self._with_findings: set[Node | None] = set()

    def write(self, records: Sequence[Emitted], /) -> None:
        """Take in records and examine each completed round. Failures are reported and do not keep detectors from the
        rest.
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

    def _examine(self, round_index: int) -> None:
        try:
            record_attendance(self.attendance, self._memory.history(self._run), round_index, self._with_findings)
        except Exception as error:  # noqa: BLE001
            self._failed(error, "noting who took part")
        try:
            for finding in self._examination.findings_of(round_index):
                self._take(finding)
        except Exception as error:  # noqa: BLE001 - a detector's own errors are caught before
            self._failed(error, "examining a round")

    def _take(self, finding: Finding) -> None:
        try:
            self._with_findings.add(finding.where.node)
            self._found(with_run_and_time(finding, self._run, time.time()))
        except Exception as error:  # noqa: BLE001 - whatever a user's detector has made
            self._failed(error, "taking a finding")


def _of_whole_round(where: Where) -> bool:
    """Return whether a record is about the whole round, not about a client, which could claim anything."""
    return where.round is not None and where.node is None


def _measured(record: Telemetry) -> Telemetry:
    """Return the record without the run's configuration: it may name injected faults, which detectors must not see."""
    return replace(record, config={}) if isinstance(record, Run) else record


class FindingList(list[Finding]):
    """Findings, worst first, one per round in which an issue was seen; printed as cases, one line each."""

    def __init__(
        self,
        findings: Iterable[Finding],
        *,
        installed: int,
        attendance: Attendance | None = None,
        gaps: Sequence[str] = (),
    ) -> None:
        super().__init__(sorted(findings, key=lambda f: (severity_rank(f.severity), -f.confidence)))
        self.installed = installed  # how many detectors looked
        self.gaps = tuple(gaps)  # why these need not be all; empty: everything was judged
        self._attendance = attendance

    @property
    def cases(self) -> list[Case]:
        """Return the findings grouped into cases, worst first."""
        return cases(self, self._attendance)

    def __str__(self) -> str:
        if not self.installed:
            return 'No findings: no detector is installed. Leave out Monitor(detectors=...), or say ["standard", ...].'
        if not self:
            return no_all_clear(self.gaps) if self.gaps else f"No findings by {self.installed} detectors."
        return "\n".join([*map(str, self.cases), *([incomplete(self.gaps)] if self.gaps else [])])

    __repr__ = __str__
