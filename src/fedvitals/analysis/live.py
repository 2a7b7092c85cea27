# SPDX-License-Identifier: Apache-2.0
"""What each round is bound by, as metrics during the run, for detectors, which see no Spans.

These are the shares of `bottleneck`, computed from sums to which each Span is added as it arrives: that costs
microseconds, independent of the number of clients. They are emitted when the round is over, after the detectors have
examined it: one round late.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fedvitals.analysis.bottleneck import SLOWER, max_stragglers
from fedvitals.analysis.round_shape import WAITED
from fedvitals.analysis.timeline import may_report
from fedvitals.measurements import Emitted
from fedvitals.protocols import Sink
from fedvitals.records import Metric, Record, Span, Where
from fedvitals.resources.node_spans import CLOSE, clamped_parts, recorded_parts
from fedvitals.time_parts import CLIENT, JOURNEY, REST, ROUND, SERVER, WORK, clock_of

ROUND_COMPLETE = "time.round"  # the monitor's last record of a round
PREFIX = "bottleneck."
KINDS = tuple(dict.fromkeys(WORK.values()))  # «download», «data loading», ...
STRAGGLER = "straggler"
LATEST = 64  # clients remembered by name: those that finished last
ROUNDS = 8  # open at a time; beyond that, the oldest are dropped
LONGEST = 366 * 86_400.0  # seconds; longer ones are dropped
SPANS = 32_768  # of one round and clock, checked for repetition; more are dropped


@dataclass(frozen=True, slots=True)
class _SpanWork:
    """The work in a Span's time; for clients that trained as one batch, a client's share of it."""

    attributes: object  # of the Span
    seconds: float
    work: dict[str, float]
    busy: float  # seconds of work
    whole: float  # seconds of work of the whole batch
    rest: float
    waited: tuple[float, ...]
    stacked: bool

    @classmethod
    def of(cls, span: Span) -> _SpanWork:
        work: dict[str, float] = {}
        rest = 0.0
        parts = clamped_parts(recorded_parts(span), span.seconds)
        sent_late = "download" in parts and next(iter(parts)) == "queue"  # the server was sending to others until then
        for part, seconds in parts.items():
            kind = "download" if sent_late and part == "queue" else WORK.get(part)
            if kind is not None:
                work[kind] = work.get(kind, 0.0) + seconds
            elif part in ("wait", "away"):
                rest += seconds
        waited = tuple(seconds for part, seconds in parts.items() if part in REST)
        busy = whole = sum(work.values())
        together = span.attributes.get("stacked")
        shared = together if isinstance(together, int) and together > 1 else 1
        if shared > 1:  # trained as one batch: the time belongs to all of them
            work = {kind: seconds / shared for kind, seconds in work.items()}
            busy /= shared
        return cls(span.attributes, span.seconds, work, busy, whole, rest, waited, shared > 1)


@dataclass(slots=True)
class _SpanSums:
    """Sums over spans of one kind: journeys, or clients' own training."""

    count: int = 0
    total: float = 0.0  # seconds of work, over all
    classes: dict[str, float] = field(default_factory=dict)
    first: float = float("inf")
    last: float = float("-inf")
    last_began: float = float("-inf")
    first_ended: float = float("inf")
    ends: float = 0.0  # the sum of all ends, relative to the start of the first Span
    base: float = 0.0
    inside: float = 0.0  # seconds of Spans
    waited: float = 0.0  # of which spent waiting
    stacked: bool = False
    latest: list[tuple[float, int, str, float, dict[str, float]]] = field(default_factory=list)  # a heap, by the end
    newest: _SpanWork | None = None  # of the most recent Span

    def add(self, span: Span) -> None:
        own = self.newest
        if own is None or own.attributes is not span.attributes or own.seconds != span.seconds:
            own = self.newest = _SpanWork.of(span)  # otherwise from a client that trained in the same batch
        for seconds in own.waited:
            self.waited += seconds
        self.inside += span.seconds
        if own.whole <= 0:
            return
        ended = span.at + (max(own.whole, span.seconds - own.rest) if span.name == JOURNEY else span.seconds)
        self.stacked |= own.stacked
        self.base = self.base if self.count else span.at
        self.count += 1
        self.total += own.busy
        self.ends += ended - self.base
        self.first, self.last = min(self.first, span.at), max(self.last, ended)
        self.last_began, self.first_ended = max(self.last_began, span.at), min(self.first_ended, ended)
        for kind, seconds in own.work.items():
            self.classes[kind] = self.classes.get(kind, 0.0) + seconds
        entry = (ended, self.count, span.where.node or "", own.busy, own.work)
        if len(self.latest) < LATEST:
            heapq.heappush(self.latest, entry)
        else:
            heapq.heappushpop(self.latest, entry)

    def slots(self, under_way: float) -> int | None:
        """Return how many clients work at a time, if they take turns; by the same criteria as `round_shape`."""
        if self.count < 2 or under_way <= 0:
            return None
        turns = self.stacked or self.waited > WAITED * self.inside
        if not turns and self.last_began + CLOSE < self.first_ended:  # at some moment all of them worked
            return None
        return max(1, round(self.total / under_way))


@dataclass(slots=True)
class _RoundSums:
    """The sums of one round on one clock."""

    began: float | None = None
    seconds: float = 0.0
    journeys: _SpanSums = field(default_factory=_SpanSums)
    clients: _SpanSums = field(default_factory=_SpanSums)
    server: dict[str, float] = field(default_factory=dict)
    seen: set[tuple[str, str, str | None]] = field(default_factory=set)  # what arrived: a batch may be delivered twice

    def add(self, span: Span) -> None:
        own = (span.id, span.name, span.where.node)
        fine = 0 <= span.seconds <= LONGEST and -1e15 < span.at < 1e15 and may_report(span)
        if not fine or own in self.seen or (len(self.seen) >= SPANS and span.name != ROUND):
            return
        self.seen.add(own)
        if span.name == ROUND:
            self.began, self.seconds = span.at, span.seconds
        elif span.name == JOURNEY:
            self.journeys.add(span)
        elif span.name == CLIENT:
            self.clients.add(span)
        elif span.name == SERVER:
            for part, seconds in clamped_parts(recorded_parts(span), span.seconds).items():
                if part in WORK:
                    self.server[WORK[part]] = self.server.get(WORK[part], 0.0) + seconds


class LiveProfile(Sink):
    """A sink that emits the metrics of each round that is over; it runs on a queue's worker."""

    name = "profile"
    takes_measurements = takes_transfers = True  # and ignores them: a round is described by its Spans

    def __init__(self, emit: Callable[[Record], None]) -> None:
        self._emit = emit
        self._open: dict[tuple[str, int], dict[str, _RoundSums]] = {}

    def write(self, records: Sequence[Emitted], /) -> None:
        for record in records:
            if isinstance(record, Span):
                self._add(record)
            elif isinstance(record, Metric) and record.name == ROUND_COMPLETE and record.where.node is None:
                number = record.where.round
                if number is not None:
                    self._close(record.where.run, number, record.at)

    def _add(self, span: Span) -> None:
        number = span.where.round
        if number is None or span.name not in (ROUND, SERVER, JOURNEY, CLIENT):
            return
        key = span.where.run, number
        own = self._open.get(key)
        if own is None:
            while len(self._open) >= ROUNDS:
                del self._open[next(iter(self._open))]
            own = self._open[key] = {}
        clock = clock_of(span)
        if clock not in own:
            own[clock] = _RoundSums()
        own[clock].add(span)

    def _close(self, run: str, round_index: int, at: float) -> None:
        own = self._open.pop((run, round_index), {})
        sums = next((own[c] for c in ("virtual", "real") if c in own and own[c].began is not None), None)
        if sums is None or sums.seconds <= 0:
            return
        shares, slowest, seconds = round_shares(sums)
        where = Where(run, round_index)
        for kind, share in shares.items():
            name = PREFIX + kind.replace(" ", "_")
            self._emit(Metric(where, at, name, min(max(share, 0.0), 1.0)))
        if slowest is not None:
            self._emit(Metric(Where(run, round_index, slowest), at, "time.critical", seconds))


def _straggler_seconds(
    clients: _SpanSums, latest: list[tuple[float, int, str, float, dict[str, float]]], began: float
) -> float:
    """Return how long the last client was waited for after all but the slowest few were done.

    Two clients count as few only if both are slow.
    """
    if clients.count < 3:
        return 0.0
    gone = min(max_stragglers(clients.count), len(latest) - 1)
    if gone == 2:
        others = (
            clients.base
            - began
            + (clients.ends - sum(entry[0] - clients.base for entry in latest[:2])) / (clients.count - 2)
        )
        gone = 2 if latest[1][0] - began >= SLOWER * others else 1
    return latest[0][0] - latest[gone][0]


def round_shares(sums: _RoundSums) -> tuple[dict[str, float], str | None, float]:
    """Return the shares of the round by kind, the client that was done last, and the seconds until then."""
    whole = sums.seconds
    shares = dict.fromkeys((*KINDS, STRAGGLER), 0.0)
    clients = sums.journeys if sums.journeys.count else sums.clients
    slowest, slowest_seconds, worked = None, 0.0, 0.0
    if clients.count:
        latest = sorted(clients.latest, reverse=True)
        began = sums.began or 0.0
        slots = clients.slots(min(whole, clients.last - clients.first)) if clients is sums.clients else None
        early = clients is sums.journeys and clients.first < began - 0.05 * whole  # asynchronous: nobody is waited for
        if early:
            work, worked = clients.classes, min(whole, max(0.0, clients.last - began))
        elif slots is not None:
            _, _, slowest, slowest_seconds, _ = max(latest, key=lambda entry: entry[3])
            work, worked = clients.classes, min(whole, clients.total / slots)
            usual = (clients.total - slowest_seconds) / (clients.count - 1)
            alone = (
                latest[0][0] - latest[1][0] if slots > 1 and latest[0][2] == slowest else 0.0
            )  # when all others were done
            shares[STRAGGLER] = max((slowest_seconds - usual) / slots, alone, 0.0) / whole
        else:
            ended, _, slowest, _, work = latest[0]
            slowest_seconds = min(max(0.0, ended - began), whole)
            worked = min(whole, sum(work.values()))
            shares[STRAGGLER] = _straggler_seconds(clients, latest, began) / whole
        scale = worked / sum(work.values())
        for kind, seconds in work.items():
            shares[kind] += seconds * scale / whole
    # The server's work counts as far as there is time that the clients do not explain.
    serving = sum(sums.server.values())
    if serving > 0:
        scale = min(1.0, (whole - worked) / serving)
        for kind, seconds in sums.server.items():
            shares[kind] += seconds * scale / whole
    return shares, slowest, slowest_seconds
