# SPDX-License-Identifier: Apache-2.0
"""Counts records that were lost or left out, and reports the counts at each round's end and once after the run.

Losses are counted by sink. What the store has lost is missing from the run; what an exporter has lost is not.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from fedvitals.monitor.spine import Spine
from fedvitals.records import Event, Metric, Where
from fedvitals.scope import Scope
from fedvitals.store import spill_folder
from fedvitals.transport.sink_writer import SinkWriter
from fedvitals.transport.spill import Spill


class LostRecords:
    """Counts records lost by the sinks, and records of workers that never arrived. `store`: None if there is none."""

    def __init__(self, spine: Spine, store: str | os.PathLike[str] | None = None) -> None:
        self._context, self._emission, self._scopes, self._store = spine.context, spine.emission, spine.scopes, store
        self._missed = 0  # of workers, as far as known
        self._thinned = 0  # client-rounds of which workers left out details
        self._recorded = 0  # the total last recorded
        self._recorded_sinks: dict[int, int] = {}  # losses of the other sinks as last recorded, by position

    def miss(self, count: int = 1) -> None:
        """Count records of workers or senders that did not arrive."""
        self._missed += count

    def thin(self, client_rounds: int) -> None:
        """Count client-rounds for which a worker's payload had no room for all details."""
        self._thinned += client_rounds

    @property
    def total(self) -> int:
        """Records lost so far by any sink."""
        return self._missed + (0 if self._emission.writer is None else self._emission.writer.lost)

    @property
    def count(self) -> int:
        """Records lost so far before they were stored, or, without a store, before the detectors saw them."""
        writer = self._emission.writer
        if not isinstance(writer, SinkWriter):
            return self.total
        return self._missed + sum(lost for _, lost in writer.lost_by_sink[: writer.own if self._store is None else 1])

    @property
    def unjudged(self) -> int:
        """Records lost so far before they were stored, or before the detectors saw them."""
        writer = self._emission.writer
        if not isinstance(writer, SinkWriter):
            return self.total
        return self._missed + sum(lost for _, lost in writer.lost_by_sink[: writer.own])

    @property
    def by_sink(self) -> dict[str, int]:
        """Records lost so far by sinks other than the store and the detectors, by their names."""
        writer = self._emission.writer
        others = writer.lost_by_sink[writer.own :] if isinstance(writer, SinkWriter) else ()
        return {name: lost for name, lost in others if lost}

    @property
    def thinned(self) -> int:
        """Client-rounds whose layer statistics were left out so far, see `transport.thinning`, `payload_buffer`."""
        writer = self._emission.writer
        return self._thinned + (writer.thinned[0] if isinstance(writer, SinkWriter) else 0)

    def record(self, scope: Scope) -> None:
        """Record how many records were lost and how many client-rounds thinned so far, as metrics of a round."""
        self._recorded = self.count
        self._emission.record.metric(scope, "monitor.lost", self._recorded)
        if self.thinned:
            self._emission.record.metric(scope, "monitor.thinned", self.thinned)
        writer = self._emission.writer
        for event in self._sink_events(writer, final=False) if isinstance(writer, SinkWriter) else ():
            self._emission.emit(event)

    def _sink_events(self, writer: SinkWriter, *, final: bool) -> Iterator[Event]:
        """Yield what sinks other than the store have lost: reported at the first loss and when the run has ended."""
        first = writer.own if self._store is None else 1
        for place, (name, lost) in enumerate(writer.lost_by_sink[first:]):
            known = self._recorded_sinks.get(place, 0)
            if lost > known and (final or not known):
                self._recorded_sinks[place] = lost
                words = f"The sink '{name}' has lost {lost} records; the store is not affected."
                at = Where(self._context.run.id, self._scopes.last_round)
                yield Event(at, time.time(), "warning", "sink.lost", words, {"sink": name, "records": lost})

    def record_final(self) -> None:
        """Store the final count once all other sinks have closed, since the last round's count may be too low."""
        writer = self._emission.writer
        if self._store is None or not isinstance(writer, SinkWriter):
            return
        if writer.thinned[0]:
            event = self._thinning_event(*writer.thinned)
            for record in (Metric(event.where, event.at, "monitor.thinned", float(self.thinned)), event):
                writer.store(record)
        for event in self._sink_events(writer, final=True):
            writer.store(event)
        if self.count != self._recorded:
            self._recorded, event = self.count, self._event(writer)
            for record in (Metric(event.where, event.at, "monitor.lost", float(self._recorded)), event):
                writer.store(record)

    def spill_unrecorded(self) -> None:
        """Write what the store no longer accepted into the folder beside it, for the next process to import."""
        writer = self._emission.writer
        if self.count <= self._recorded or self._store is None or not isinstance(writer, SinkWriter):
            return
        spill = Spill(spill_folder(self._store), "losses")
        try:
            spill.append(writer.stamped(self._event(writer)))
        finally:
            spill.close(keep=True)

    def _event(self, writer: SinkWriter) -> Event:
        """Return the event that says how many records were lost so far, and by which sink."""
        causes = {"workers": self._missed, **writer.losses_of_store}
        listed = ", ".join(f"{cause}: {count}" for cause, count in causes.items() if count)
        place = Where(self._context.run.id, self._scopes.last_round)
        words = f"{self.count} records were lost ({listed})."
        return Event(place, time.time(), "warning", "telemetry.lost", words, {"records": self.count})

    def _thinning_event(self, detail: int, rest: int) -> Event:
        """Return the event that says for how many client-rounds something was left out, and what."""
        place = Where(self._context.run.id, self._scopes.last_round)
        metrics = f"; of {rest} of them metrics, spans and transfers as well" if rest else ""
        words = f"Layer statistics of {detail} client-rounds were left out, the store or the detectors being too slow"
        data = {"client_rounds": detail, "without_metrics": rest}
        return Event(place, time.time(), "warning", "telemetry.thinned", f"{words}{metrics}.", data)
