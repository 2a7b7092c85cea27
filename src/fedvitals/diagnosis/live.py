# SPDX-License-Identifier: Apache-2.0
"""Detectors on a run as it trains: they see every record in memory, and speak when a round is complete."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from fedvitals.protocols import Detector, History, Sink
from fedvitals.records import Finding, Metric, Record, Run, Truth

ROUND_COMPLETE = "time.round"  # the monitor's last record of a round
_WORST_FIRST = {"critical": 0, "warning": 1, "note": 2}


class Memory(Sink, Protocol):
    def history(self, run: str) -> History: ...


class LiveDetectors:
    """A sink, so it runs on a queue's worker: detectors take no time from the training thread."""

    name = "detectors"

    def __init__(
        self,
        run: str,
        memory: Memory,
        detectors: Sequence[Detector],
        found: Callable[[Finding], None],
        failed: Callable[[Exception, str], None],
    ) -> None:
        self._run, self._memory, self._detectors, self._found, self._failed = run, memory, detectors, found, failed

    def write(self, records: Sequence[Record], /) -> None:
        self._memory.write([_measured(record) for record in records if not isinstance(record, Finding | Truth)])
        for record in records:
            if isinstance(record, Metric) and record.name == ROUND_COMPLETE and record.where.round is not None:
                self._examine(record.where.round)

    def _examine(self, number: int) -> None:
        history = self._memory.history(self._run)
        for detector in self._detectors:
            try:
                for finding in detector(history, number):
                    self._found(finding)
            except Exception as error:  # noqa: BLE001 - a user's detector may do anything; the others go on
                self._failed(error, f"the detector '{getattr(detector, '__name__', type(detector).__name__)}'")


def _measured(record: Record) -> Record:
    """Without the configuration, which may tell what was made ill: not even behind the `History` shall it be found."""
    return replace(record, config={}) if isinstance(record, Run) else record


class Findings(list[Finding]):
    """Findings, worst first; printed as sentences."""

    def __init__(self, findings: Iterable[Finding], *, installed: int) -> None:
        super().__init__(sorted(findings, key=lambda f: (_WORST_FIRST.get(f.severity, 3), -f.confidence)))
        self.installed = installed  # how many detectors looked

    def __str__(self) -> str:
        if not self.installed:
            return "No findings: no detector is installed. Pass some with Monitor(detectors=[...])."
        if not self:
            return f"No findings by {self.installed} detectors."
        return "\n".join(f"{f.severity}: {f.message} ({f.issue}, {f.confidence:.0%})" for f in self)

    __repr__ = __str__
