# SPDX-License-Identifier: Apache-2.0
"""Findings of a run while it trains: queues the detectors, keeps their findings and notifies the listeners."""

from __future__ import annotations

import pickle
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from fedvitals.diagnosis.gaps import gaps
from fedvitals.diagnosis.live_detectors import FindingList, LiveDetectors
from fedvitals.monitor.losses import LostRecords
from fedvitals.monitor.spine import Spine
from fedvitals.protocols import Detector, History
from fedvitals.records import Event, Finding
from fedvitals.store import MemoryStore

FINDINGS_KEPT = 20_000  # in memory, for one run


class KeptFindings:
    """The findings of a run in bounded memory: as bytes, about 0.4 KB each, a tenth of the size of the objects.

    Of a series (one issue of one client) the first finding is stored whole and the others as differences from it,
    because a client with a fault has a finding in every round. When there are too many, every second finding of the
    longest series is dropped, except its first and its newest, so that a single event is never lost to a long series.
    """

    def __init__(self, most: int = FINDINGS_KEPT) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._series: dict[tuple[str, str | None], list[tuple[int, bytes]]] = {}
        self._kept = self._added = 0

    def add(self, finding: Finding) -> None:
        """Keep a finding."""
        content = pickle.dumps(finding)
        with self._lock:
            series = self._series.setdefault((finding.issue, finding.where.node), [])
            series.append((self._added, _packed(content, series[0][1]) if series else content))
            self._added += 1
            self._kept += 1
            if self._kept > self._most:
                self._thin()

    def _thin(self) -> None:
        longest = max(self._series.values(), key=len)
        if len(longest) > 2:  # keep the first and the newest
            before = len(longest)
            del longest[1:-1:2]
            self._kept -= before - len(longest)
        else:
            self._kept -= len(self._series.pop(next(iter(self._series))))

    @property
    def dropped(self) -> int:
        """The number of findings dropped so far."""
        with self._lock:
            return self._added - self._kept

    def __iter__(self) -> Iterator[Finding]:
        """Iterate over the kept findings in order of arrival."""
        with self._lock:
            entries = sorted(
                (at, content, series[0][1] if i else b"")
                for series in self._series.values()
                for i, (at, content) in enumerate(series)
            )
        for _, content, like in entries:
            yield pickle.loads(_unpacked(content, like) if like else content)  # noqa: S301 - our own bytes


def _packed(content: bytes, like: bytes) -> bytes:
    """Compress bytes as the difference from similar bytes."""
    packer = zlib.compressobj(zdict=like)
    return packer.compress(content) + packer.flush()


def _unpacked(packed: bytes, like: bytes) -> bytes:
    return zlib.decompressobj(zdict=like).decompress(packed)


class RunFindings:
    """The detectors of one run and their findings. `memory` holds the history that the detectors use.

    `on_finding` is called with each finding, on the detectors' thread; `earlier` returns an event about earlier runs.
    """

    def __init__(
        self,
        spine: Spine,
        memory: MemoryStore,
        detectors: Sequence[Detector],
        lost: LostRecords,
        on_finding: Callable[[Finding], None],
        earlier: Callable[[], Event | None] | None = None,
    ) -> None:
        self._earlier = earlier
        self._run, self._memory, self._detectors = spine.context.run.id, memory, detectors
        self._emission, self._guard, self._lost, self._on_finding = spine.emission, spine.guard, lost, on_finding
        self._live: LiveDetectors | None = None
        self._findings = KeptFindings()

    def open(self) -> LiveDetectors | None:
        """Return the detectors as a sink; None if there are none. Called once, when the run opens."""
        if self._detectors:
            self._live = LiveDetectors(
                self._run,
                self._memory,
                self._detectors,
                self.take,
                self._guard.report,
                self._emission.emit,
                self._earlier,
            )
        return self._live

    def history(self) -> History:
        """The history that the detectors have seen so far."""
        return self._memory.history(self._run)

    def so_far(self, *, complete: bool = True, notes: bool = False) -> FindingList:
        """Return the findings so far. `complete`: whether the detectors have seen everything."""
        attendance = None if self._live is None else self._live.attendance
        examined = None if self._live is None else self._live.examined()
        missing = gaps(
            self._guard.failures,
            self._lost.unjudged,
            self._lost.thinned,
            examined=examined,
            sinks=self._lost.by_sink,
            outside=() if self._live is None else sorted(self._live.outside),
            unseen=self._live is not None and self._live.unseen,
        )
        if not complete and not self._lost.unjudged:
            missing = (*missing, "some records still wait for the store or the detectors")
        if self._findings.dropped:
            missing = (*missing, f"{self._findings.dropped} earlier findings are no longer in memory")
        return FindingList(
            self._findings,
            installed=len(self._detectors),
            attendance=attendance,
            gaps=missing,
            examined=examined,
            notes=notes,
        )

    def take(self, finding: Finding) -> None:
        """Keep a finding, emit it and pass it on; on any thread but the training's."""
        # A copy, because emitting assigns an identity. A detector does not know the run, and may leave the time unset.
        finding = replace(finding, where=replace(finding.where, run=self._run), at=finding.at or time.time())
        self._guard("keeping a finding", lambda: self._findings.add(finding))
        self._emission.emit(finding)
        self._guard("answering a finding", lambda: self._on_finding(replace(finding)))
