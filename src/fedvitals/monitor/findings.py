# SPDX-License-Identifier: Apache-2.0
"""FindingList of a run as it trains: the detectors behind their queue, what they found, and who else is notified."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from fedvitals.diagnosis.gaps import gaps
from fedvitals.diagnosis.live_detectors import FindingList, LiveDetectors
from fedvitals.monitor.losses import LostRecords
from fedvitals.monitor.spine import Spine
from fedvitals.protocols import Detector, History
from fedvitals.records import Finding
from fedvitals.store import MemoryStore


class RunFindings:
    """The detectors of one run and what they have found. `memory` keeps what they look back on. All findings of the run
    are kept, as bytes: about 1 KB each, a fifth of what the objects take. An ill client has one in every round.

    `on_finding` is called with each finding, on the detectors' thread.
    """

    def __init__(
        self,
        spine: Spine,
        memory: MemoryStore,
        detectors: Sequence[Detector],
        lost: LostRecords,
        on_finding: Callable[[Finding], None],
    ) -> None:
        self._run, self._memory, self._detectors = spine.context.run.id, memory, detectors
        self._emission, self._guard, self._lost, self._on_finding = spine.emission, spine.guard, lost, on_finding
        self._live: LiveDetectors | None = None
        self._findings: list[bytes] = []

    def open(self) -> LiveDetectors | None:
        """The detectors as a sink; None where there are none. Called once, when the run opens."""
        if self._detectors:
            self._live = LiveDetectors(self._run, self._memory, self._detectors, self._take, self._guard.report)
        return self._live

    def history(self) -> History:
        """What the detectors have seen so far."""
        return self._memory.history(self._run)

    def so_far(self, *, complete: bool = True) -> FindingList:
        """What the detectors have found so far. `complete`: whether they have seen everything."""
        attendance = None if self._live is None else self._live.attendance
        missing = gaps(self._guard.failures, self._lost.unjudged, self._lost.thinned)
        if not complete and not self._lost.unjudged:
            missing = (*missing, "some records still wait for the store or the detectors")
        findings = map(pickle.loads, tuple(self._findings))  # our own bytes
        return FindingList(findings, installed=len(self._detectors), attendance=attendance, gaps=missing)

    def _take(self, finding: Finding) -> None:
        # A copy: what is emitted gets an identity. A detector knows no run, and may leave the time to us.
        finding = replace(finding, where=replace(finding.where, run=self._run), at=finding.at or time.time())
        self._guard("keeping a finding", lambda: self._findings.append(pickle.dumps(finding)))
        self._emission.emit(finding)
        self._guard("answering a finding", lambda: self._on_finding(replace(finding)))
