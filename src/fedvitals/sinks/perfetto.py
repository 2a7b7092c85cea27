# SPDX-License-Identifier: Apache-2.0
"""Exports a run, or some of its rounds, in Chrome's trace event format, for ui.perfetto.dev and chrome://tracing.

    with open("trace.json", "w") as file:
        file.writelines(perfetto(run, spans))

One process per group of nodes (the server, each edge, the clients without a group), one thread per node. The lab's
virtual clock has separate processes. Times are microseconds since the run began.
"""

from __future__ import annotations

import json
import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fedvitals.plain_json import PlainJson, no_fields
from fedvitals.records import Event, Finding, Metric, Run, Span, Transfer, Where, natural
from fedvitals.time_parts import unfold

Json = dict[str, Any]

SERVER, CLIENTS = "server", "clients"  # processes of nodes that are in no group
WHOLE = "rounds"  # the thread for everything that is not about a single node
COUNTERS = ("accuracy", "loss", "local.accuracy", "local.loss", "memory.peak", "clients", "clients.failed")
TROUBLE = ("warning", "error", "critical")
TEXT = 300  # characters
POINT = 1000  # nanoseconds of a slice that represents a moment, as arrows do not bind to slices without a length
LONGEST = 10**18  # nanoseconds, 31 years: anything further from the run's start is no valid time


def perfetto(
    run: Run,
    spans: Iterable[Span],
    *,
    events: Iterable[Event] = (),
    transfers: Iterable[Transfer] = (),
    findings: Iterable[Finding] = (),
    metrics: Iterable[Metric] = (),
    rounds: Container[int] | None = None,
) -> Iterator[str]:
    """Yield the pieces of one JSON text; joined, they are the file. `rounds`: only these.

    Findings, warnings and errors are instants, transfers are slices with an arrow between them, and values of the whole
    federation (accuracy, loss, bytes) are counters.
    """
    trace = _Trace(run.started)
    chosen = [span for span in spans if _is_in(span.where, rounds)]
    _add_spans(trace, chosen)
    _add_transfers(trace, [transfer for transfer in transfers if _is_in(transfer.where, rounds)])
    for event in events:
        if event.level in TROUBLE and _is_in(event.where, rounds):
            trace.instant(event.where, event.at, event.name, {"message": event.message, "level": event.level})
    for finding in findings:
        if _is_in(finding.where, rounds):
            about = {"message": finding.message, "severity": finding.severity, "confidence": finding.confidence}
            trace.instant(finding.where, finding.at, f"finding: {finding.issue}", about)
    for metric in metrics:
        if metric.name in COUNTERS and metric.where.node is None and _is_in(metric.where, rounds):
            trace.counter(metric.at, metric.name, metric.value)
    about_run = {"run": run.id, "name": run.name, "host": run.host, "topology": run.topology or "", "by": "fedvitals"}
    yield f'{{"displayTimeUnit":"ms","otherData":{_text(about_run)},"traceEvents":[\n'
    first = True
    for event_ in trace.written():
        yield ("" if first else ",\n") + _text(event_)
        first = False
    yield "\n]}\n"


@dataclass(frozen=True, slots=True)
class _Slice:
    begin: int  # nanoseconds since the run began
    end: int
    name: str
    args: Mapping[str, Any]
    flows: tuple[tuple[str, int], ...] = ()  # «s» where an arrow begins, «f» where it ends; and its number


@dataclass(slots=True)
class _Trace:
    """Slices by process and thread, and everything else that will be written."""

    started: float
    slices: dict[tuple[str, str], list[_Slice]] = field(default_factory=dict)
    instants: list[tuple[tuple[str, str], Json]] = field(default_factory=list)
    counters: list[Json] = field(default_factory=list)
    groups: dict[str, str] = field(default_factory=dict)  # of nodes, if a span names one
    arrows: int = 0

    def nanoseconds(self, at: float) -> int | None:
        """Return nanoseconds since the run began, 0 for earlier times; None for invalid times."""
        since = (at - self.started) * 1e9
        return None if not math.isfinite(since) or since > LONGEST else max(0, round(since))

    def track(self, where: Where, clock: str = "real") -> tuple[str, str]:
        """Return the process and the thread of a node."""
        node = where.node
        if node is None or node == SERVER:
            process, thread = SERVER, WHOLE if node is None else SERVER
        else:
            process = where.group or self.groups.get(node) or CLIENTS
            thread = node
        return process if clock == "real" else f"{process} ({clock} clock)", thread

    def slice(
        self, track: tuple[str, str], at: float, seconds: float, name: str, args: Mapping[str, Any], **more: Any
    ) -> tuple[int, int] | None:
        begin = self.nanoseconds(at)
        if begin is None or not 0 <= seconds * 1e9 < LONGEST:
            return None
        end = begin + max(round(seconds * 1e9), POINT if "flows" in more else 0)
        self.slices.setdefault(track, []).append(_Slice(begin, end, name, args, **more))
        return begin, end

    def instant(self, where: Where, at: float, name: str, args: Json) -> None:
        begin = self.nanoseconds(at)
        if begin is not None:
            instant = {"ph": "i", "s": "t", "name": name, "ts": begin / 1000, "args": {"round": where.round, **args}}
            self.instants.append((self.track(where), instant))

    def counter(self, at: float, name: str, value: float) -> None:
        begin = self.nanoseconds(at)
        if begin is not None and math.isfinite(value):  # a counter cannot show NaN or infinity
            self.counters.append({"ph": "C", "name": name, "ts": begin / 1000, "args": {name: value}})

    def written(self) -> Iterator[Json]:
        tracks = dict.fromkeys((*self.slices, *(track for track, _ in self.instants)))
        if self.counters:
            tracks[SERVER, WHOLE] = None
        processes = {name: number for number, name in enumerate(sorted({p for p, _ in tracks}, key=_order), 1)}
        for process, pid in processes.items():
            yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": process}}
            yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
        # After 104 days a float can no longer represent every nanosecond.
        long = any(part.end > 2**53 for slices in self.slices.values() for part in slices)
        coarse = _whole_microseconds if long else lambda part: part
        threads: dict[tuple[str, str], int] = {}
        tid = 0
        for track in sorted(tracks, key=lambda t: (processes[t[0]], _thread_order(t[1]))):
            threads[track] = tid + 1
            for lane in _lanes([coarse(part) for part in self.slices.get(track, [])]) or [[]]:
                tid += 1
                name = track[1] if tid == threads[track] else f"{track[1]} ({tid - threads[track] + 1})"
                place: Json = {"pid": processes[track[0]], "tid": tid}
                yield {"ph": "M", "name": "thread_name", **place, "args": {"name": name}}
                yield {"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": tid}}
                for part in lane:
                    yield from _written(part, place)
        for track, timed_event in self.instants:
            yield {**timed_event, "pid": processes[track[0]], "tid": threads[track]}
        for timed_event in self.counters:
            yield {**timed_event, "pid": processes[SERVER], "tid": 0}


def _add_spans(trace: _Trace, spans: Sequence[Span]) -> None:
    for span in spans:
        if span.where.node is not None and span.where.group is not None:
            trace.groups.setdefault(span.where.node, span.where.group)
            trace.groups.setdefault(span.where.group, span.where.group)  # an edge is shown among its clients
    by_id = {span.id: span for span in spans}
    for span in spans:
        virtual = span.attributes.get("clock") == "virtual"
        track = trace.track(span.where, "virtual" if virtual else "real")
        whole = span.where.node is None and span.where.round is not None
        name = f"{span.name} {span.where.round}" if whole else span.name
        about = {"round": span.where.round, "step": span.where.step, "span": span.id, **span.attributes}
        inside = trace.slice(track, span.at, span.seconds, name, about)
        if inside is None:
            continue
        parent = by_id.get(span.parent or "")
        for part in unfold(span):
            _add_part(trace, part, track, inside, parent if virtual else None)


def _add_part(trace: _Trace, part: Span, track: tuple[str, str], inside: tuple[int, int], parent: Span | None) -> None:
    """Add a part of a span's time, inside it. On the virtual clock, a transfer to or from a client is also an arrow."""
    at = trace.nanoseconds(part.at)
    if at is None or not 0 < part.seconds * 1e9 < LONGEST:
        return
    # The parts are sums of floats: their end may lie slightly after the end of the whole.
    begin = min(max(at, inside[0]), inside[1])
    end = min(begin + round(part.seconds * 1e9), inside[1])
    flows: tuple[tuple[str, int], ...] = ()
    if parent is not None and part.name in ("download", "upload") and end - begin >= POINT:
        trace.arrows += 1
        there = trace.track(parent.where, "virtual")
        ours, theirs = ("f", "s") if part.name == "download" else ("s", "f")
        flows = ((ours, trace.arrows),)
        moment = begin if part.name == "download" else end
        name = f"{part.name} {part.where.node}"
        # An arrow binds to a slice: a short one on a separate thread, so that it cuts none of the server's.
        far = _Slice(moment, moment + POINT, name, {"round": part.where.round}, ((theirs, trace.arrows),))
        trace.slices.setdefault((there[0], f"{there[1]} traffic"), []).append(far)
    folded = {"folded": "a sum of many short stretches"} if part.attributes.get("folded") else {}
    drawn_part = _Slice(begin, end, part.name, {"round": part.where.round, **folded}, flows)
    trace.slices.setdefault(track, []).append(drawn_part)


def _add_transfers(trace: _Trace, transfers: Sequence[Transfer]) -> None:
    """Add transfers as slices of both sides, on the real clock, if it was recorded; the lab's seconds are virtual."""
    total = 0
    virtual = any(process.endswith("(virtual clock)") for process, _ in trace.slices)
    for transfer in sorted(transfers, key=lambda transfer: transfer.at):
        seconds = 0.0 if virtual or transfer.seconds is None else max(0.0, transfer.seconds)
        trace.arrows += 1
        about: Json = {"round": transfer.where.round, "bytes": transfer.bytes, "raw_bytes": transfer.raw_bytes}
        about["seconds"] = transfer.seconds
        began = transfer.at - seconds  # it is recorded when it is over
        there = (transfer.sender, "s", f"{transfer.kind} to {transfer.receiver}")
        here = (transfer.receiver, "f", f"{transfer.kind} from {transfer.sender}")
        for node, side, name in (there, here):
            process, thread = trace.track(Where(transfer.where.run, node=node))
            flows = ((side, trace.arrows),)
            trace.slice((process, f"{thread} traffic"), began, seconds, name, about, flows=flows)
        total += transfer.bytes
        trace.counter(transfer.at, "traffic.bytes", float(total))


def _lanes(slices: Sequence[_Slice]) -> list[list[_Slice]]:
    """Distribute the slices to as few lanes as possible, such that any two in a lane are disjoint or nested."""
    lanes: list[tuple[list[_Slice], list[int]]] = []  # slices, and the ends of those that are open
    for part in sorted(slices, key=lambda part: (part.begin, -part.end)):
        fitting = (lane for lane in lanes if _fits(part, lane[1]))
        lane, open_ends = next(fitting, ([], []))
        if not lane:
            lanes.append((lane, open_ends))
        lane.append(part)
        open_ends.append(part.end)
    return [lane for lane, _ in lanes]


def _whole_microseconds(part: _Slice) -> _Slice:
    """Return the slice rounded down on both sides: a slice inside another one stays inside it."""
    return replace(part, begin=part.begin // 1000 * 1000, end=part.end // 1000 * 1000)


def _fits(part: _Slice, open_ends: list[int]) -> bool:
    while open_ends and open_ends[-1] <= part.begin:
        open_ends.pop()
    return not open_ends or part.end <= open_ends[-1]


def _written(part: _Slice, place: Json) -> Iterator[Json]:
    begin, length = part.begin / 1000, (part.end - part.begin) / 1000
    yield {"ph": "X", "name": part.name, "ts": begin, "dur": length, **place, "args": part.args}
    for side, number in part.flows:
        at = (part.end - POINT // 2) / 1000 if side == "f" else begin  # strictly inside, or it would bind to nothing
        binding = {"bp": "e"} if side == "f" else {}  # to the enclosing slice, not to the next
        yield {"ph": side, "name": "transfer", "cat": "transfer", "id": number, "ts": at, **binding, **place}


def _order(process: str) -> tuple[bool, bool, tuple[object, ...]]:
    virtual = process.endswith("(virtual clock)")
    return virtual, not process.startswith(SERVER), natural(process)


def _thread_order(thread: str) -> tuple[bool, bool, tuple[object, ...]]:
    return thread != WHOLE, not thread.startswith(SERVER), natural(thread)


def _is_in(where: Where, rounds: Container[int] | None) -> bool:
    return rounds is None or (where.round is not None and where.round in rounds)


def _cut(value: Any) -> str:
    return str(value)[:TEXT]


_PLAIN = PlainJson(
    nonfinite=str, fields=no_fields, unknown=_cut, name=_cut, text=_cut, most=1000, absent=False, depth=6
)


def _text(value: Any) -> str:
    return json.dumps(_PLAIN(value), separators=(",", ":"), allow_nan=False)
