# SPDX-License-Identifier: Apache-2.0
"""Detector of memory that grows from round to round, and the forecast of when it runs out.

A process grows in its first rounds, as allocators, caches and our own history fill, and it grows and shrinks as garbage
is made and collected. The first rounds are therefore left out, and the lows of four stretches of the rest are compared:
a leak raises each of them, the last no less than the ones before. Where memory would run out soon, fewer rounds do, if
each of them raises it alike.

Clients of one process share its memory. A client is named where the growth happens while it trains, and hardly while
others do; or where it has a process of its own, which alone grows. Which tensors accumulate is reported by
`memory.census` (see `resources.leaks`). Its rows count tensors that hooks have seen. Older stores hold censuses of all
tensors on the heap, whose rows have no kind.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from fedvitals.diagnosis.detectors.memory import newest_value
from fedvitals.diagnosis.evidence.attendance import newest_values, rounds_until
from fedvitals.diagnosis.finding import Number, finding
from fedvitals.diagnosis.history_cutoff import LOOK_BACK, shared
from fedvitals.diagnosis.memory_fit import size_words
from fedvitals.diagnosis.memory_forecast import Growth, MemoryForecast, forecast, growth_of
from fedvitals.protocols import Detector, History, Node
from fedvitals.records import Event, Finding

WARM_UP = 3  # rounds
FEWEST = 8  # rounds after these
WINDOW = 40  # rounds that are looked back on
STRETCHES = 4
LEVELLING = 0.7  # of the mean rise, that the last stretch must have
LEAST = 8 << 20  # bytes over the window, and
LEAST_SHARE = 0.02  # of the process: below, nobody has trouble with it
# Where no tensors are seen to pile up: more is asked for, and what our own history of the run takes is left out.
BLIND, BLIND_SHARE, BLIND_ROUNDS = 64 << 20, 0.1, 16
OWN_BYTES = 64 << 10  # per client and round, at most
# The same where two censuses saw the heap in use grow by this part of the growth: then it is not fragmentation.
HEAP, HEAP_SHARE, HEAP_PART = 16 << 20, 0.03, 0.5
EXPLAINED = 0.3  # of the growth, by the tensors that pile up, to name them
STEADY = 0.7  # of the tensors per round that an earlier census saw, in a later one
KINDS = ("output", "input", "parameter", "gradient")  # of tensors that hooks have seen
SURE, SURE_OF_GARBAGE, SURE_OF_GROWTH = 0.97, 0.9, 0.8  # with tensors; that no collection has met; without any
# Where memory would run out soon, and each round raises it alike: so many rounds are enough, if the growth over them is
# at least this, and this share of what there is.
SOON, SOON_FEWEST, SOON_BYTES, SOON_SHARE, ALIKE = 25, 5, 32 << 20, 0.02, 0.5
CRITICAL = 10  # rounds until memory runs out
LARGEST = 32  # client processes that are looked at one by one
OUTSIDE, INSIDE = 0.3, 0.7  # of the growth, while clients train: the rest, or nearly all of it
OWN_GROWTH = 0.5  # of all growth, that one client has to keep, more than its peers do, to be named


@dataclass(frozen=True, slots=True)
class MemoryGrowth:
    """How much memory grew, over how many rounds, and since when."""

    since: int
    rounds: int
    bytes: float

    @property
    def per_round(self) -> float:
        return self.bytes / self.rounds


@dataclass(frozen=True, slots=True)
class GrowingProcess:
    """Memory of a process by round, after its first rounds; `of`: whose it is, in words; `node`: the one client's."""

    of: str
    points: Sequence[tuple[int, float]]
    node: Node | None = None

    @property
    def now(self) -> float:
        return self.points[-1][1]

    @property
    def rounds(self) -> list[int]:
        return [number for number, _ in self.points]

    @property
    def sizes(self) -> list[float]:
        return [size for _, size in self.points]


def leaks(history: History, round_index: int) -> Iterator[Finding]:
    """MEMORY_LEAK: a process of clients or the server grows and does not level off; with the time until it is full."""
    numbers = rounds_until(history, round_index, LOOK_BACK)[WARM_UP:][-WINDOW:]
    if len(numbers) < SOON_FEWEST:
        return
    for process in _processes(history, round_index, numbers):
        growth = growth_of(process.rounds, process.sizes)
        if growth is None or process.rounds[-1] != round_index:
            continue
        ahead = _ahead(history, round_index, process, growth)
        grown = memory_growth(process.rounds, process.sizes)
        if grown is not None:
            group = None if process.node else _accumulating_tensors(history, round_index, grown)
            if group is not None or _beyond_doubt(history, round_index, grown, process.points):
                yield _leak(history, round_index, process, grown, group, growth, ahead)
                return
        if ahead is not None and ahead.rounds <= SOON:
            grown = steady_growth(process.rounds, process.sizes, newest_value(history, "memory.limit", round_index))
            if grown is not None:
                yield _leak(history, round_index, process, grown, None, growth, ahead)
                return


def _processes(history: History, round_index: int, numbers: Sequence[int]) -> Iterator[GrowingProcess]:
    """Yield what may be one process: that of all clients, the server's, and those of the largest clients."""
    server = dict(newest_values(history.series("memory.resident", None), round_index, WINDOW))
    for of, sizes in (("Memory", _lowest_memory(history, numbers)), ("The server's memory", server)):
        points = [(n, sizes[n]) for n in numbers if n in sizes]
        if points:
            yield GrowingProcess(of, points)
    latest = history.latest("memory.resident", round_index)
    for node in sorted(filter(None, latest), key=lambda name: -latest[name])[:LARGEST]:
        own = dict(newest_values(history.series("memory.resident", node), round_index, WINDOW))
        points = [(n, own[n]) for n in numbers if n in own]
        if len(points) >= SOON_FEWEST and points[-1][1] - points[0][1] >= LEAST:
            yield GrowingProcess(f"Memory of the process of {node}", points, node)


def _ahead(history: History, round_index: int, process: GrowingProcess, growth: Growth) -> MemoryForecast | None:
    """Return when the process will be full: what it needs for a while inside of a round is left out of the room."""
    limit = newest_value(history, "memory.limit", round_index, process.node)
    if limit is None or process.now >= limit:
        return None
    room = limit - process.now
    if process.node is None:
        room -= _needed_for_a_while(history, round_index)
        free = history.latest("machine.memory_free", round_index).get("server")
        room = room if free is None else min(room, free)
    return forecast(growth, room)


def _needed_for_a_while(history: History, round_index: int) -> float:
    """Return by how much a round's peak, as in its evaluation, lies above what is held at the round's end.

    The peak that is known is the largest so far: only rounds that raised it tell.
    """
    peaks = newest_values(history.series("memory.peak", None), round_index, WINDOW)
    held = dict(newest_values(history.series("memory.resident", None), round_index, WINDOW))
    raised = [peak - held[n] for (_, before), (n, peak) in pairwise(peaks) if peak > before and n in held]
    return max(0.0, float(np.median(raised[-5:]))) if raised else 0.0


def steady_growth(numbers: Sequence[int], sizes: Sequence[float], limit: float | None) -> MemoryGrowth | None:
    """Return how far memory grew over the newest rounds, if each raised it alike and it is much of what there is."""
    rises = np.diff(np.asarray(sizes, np.float64))[-(SOON_FEWEST - 1) :]
    total = float(rises.sum())
    if len(rises) < SOON_FEWEST - 1 or limit is None or not np.isfinite(sizes).all():
        return None
    alike = rises.min() >= ALIKE * np.median(rises) and rises[-1] >= LEVELLING * rises.mean()
    if not alike or rises.min() <= 0 or total < max(SOON_BYTES, SOON_SHARE * limit):
        return None
    return MemoryGrowth(numbers[-len(rises) - 1], len(rises), total)


def _lowest_memory(history: History, numbers: Sequence[int]) -> dict[int, float]:
    """Return for each round the least memory that a process held at the end of any client."""
    lows = {n: _lowest_memory_of(history, n) for n in numbers}
    return {n: low for n, low in lows.items() if low is not None}


@shared
def _lowest_memory_of(history: History, round_index: int) -> float | None:
    """Return the same for one round; None where no client tells."""
    values = [value for node, value in history.latest("memory.resident", round_index).items() if node]
    return min(values) if values else None


def memory_growth(numbers: Sequence[int], values: Sequence[float]) -> MemoryGrowth | None:
    """Return how far memory grew, if the low of each stretch lies above that before and the last rise is no smaller;
    else None.
    """
    if len(values) < FEWEST or not np.isfinite(values).all():
        return None
    lows = [float(stretch.min()) for stretch in np.array_split(np.asarray(values, dtype=np.float64), STRETCHES)]
    rises = np.diff(lows)
    total = lows[-1] - lows[0]
    if rises.min() <= 0 or rises[-1] < LEVELLING * rises.mean() or total < max(LEAST, LEAST_SHARE * lows[0]):
        return None
    between = len(values) * (STRETCHES - 1) / STRETCHES  # from the middle of the first stretch to that of the last
    return MemoryGrowth(numbers[0], max(1, round(between)), total)


def _accumulating_tensors(history: History, round_index: int, grown: MemoryGrowth) -> Mapping[str, Any] | None:
    """Return the row of the newest census whose tensors two censuses saw more and more of, if they explain the growth.

    One census is not enough: models of the last rounds may still wait to be collected. What accumulates grows with the
    rounds.
    """
    censuses = [_census_rows(event) for event in _censuses(history, round_index)]
    known = [census for census in censuses if census is not None][-2:]
    if len(known) < 2:
        return None
    (earlier, before), (later, now) = known
    for key, row in now.items():
        past = before.get(key)
        if past is None or later <= earlier or row["more"] / later < STEADY * past["more"] / earlier:
            continue
        if row["more"] > past["more"] and _explains(row, grown.per_round * later, later):
            return {**row, "rounds": later}
    return None


def _censuses(history: History, round_index: int) -> list[Event]:
    return [event for event in history.events("memory.census") if (event.where.round or 0) <= round_index]


def _no_seen_tensors_accumulate(history: History, round_index: int) -> bool:
    """Return whether the newest census of tensors that hooks have seen counted none that accumulated."""
    censuses = _censuses(history, round_index)
    return bool(censuses) and "collections" in censuses[-1].data and censuses[-1].data.get("groups") in ([], ())


def _census_rows(event: Event) -> tuple[int, dict[Any, Mapping[str, Any]]] | None:
    """Return how many rounds a census looks back on, and its valid rows by kind, shape, type and graph."""
    since, until, rows = (event.data.get(key) for key in ("since", "until", "groups"))
    if not isinstance(since, int) or not isinstance(until, int) or not isinstance(rows, list | tuple) or until <= since:
        return None
    collected = event.data.get("collections") != 0
    counts: dict[Any, Mapping[str, Any]] = {
        (row.get("kind"), tuple(row["shape"]), row["type"], bool(row.get("graph"))): {**row, "collected": collected}
        for row in rows
        if _is_row(row)
    }
    return until - since, counts


def _is_row(row: Any) -> bool:
    numbers = ("more", "more_bytes", "held_bytes")
    return (
        isinstance(row, Mapping)
        and all(isinstance(row.get(key), int | float) and 0 <= row[key] < 2**60 for key in numbers)
        and isinstance(row.get("shape"), list | tuple)
        and len(row["shape"]) < 20
        and all(isinstance(side, int) for side in row["shape"])
        and str(row.get("type", "")).isidentifier()
        and row.get("kind") in (None, *KINDS)
    )


def _explains(row: Mapping[str, Any], grown: float, rounds: int) -> bool:
    """By its bytes; or it is a pile of tensors with graphs, whose nodes are not counted in bytes."""
    held = row["more_bytes"] + row["held_bytes"] * row["more"]
    return bool(held >= EXPLAINED * grown or (row.get("graph") and row["more"] >= 5 * rounds))


def _beyond_doubt(history: History, round_index: int, grown: MemoryGrowth, points: Sequence[tuple[int, float]]) -> bool:
    clients = np.median([len(history.latest("memory.resident", n)) for n, _ in points[-3:]])
    ours = OWN_BYTES * float(clients)  # per round
    least, share = (HEAP, HEAP_SHARE) if _heap_grows(history, round_index, grown, ours) else (BLIND, BLIND_SHARE)
    enough = max(least, share * points[0][1])
    return len(points) >= BLIND_ROUNDS and grown.bytes - ours * grown.rounds > enough


def _heap_grows(history: History, round_index: int, grown: MemoryGrowth, ours: float) -> bool:
    """Whether the last two censuses agree on how fast the heap in use grows, and that is most of the growth."""
    rates: list[float] = []
    for event in _censuses(history, round_index)[-2:]:
        since, until, heap = (event.data.get(key) for key in ("since", "until", "heap_grown_bytes"))
        if not (isinstance(since, int) and isinstance(until, int) and isinstance(heap, int)):
            return False
        if since >= until or heap <= 0:
            return False
        rates.append(heap / (until - since))
    return len(rates) == 2 and rates[1] >= STEADY * rates[0] and rates[1] - ours >= HEAP_PART * grown.per_round


def _leak(
    history: History,
    round_index: int,
    process: GrowingProcess,
    grown: MemoryGrowth,
    group: Mapping[str, Any] | None,
    growth: Growth,
    ahead: MemoryForecast | None,
) -> Finding:
    node, share = (process.node, 1.0) if process.node else _leaking_client(history, round_index, grown) or (None, 0.0)
    who = process.of if node is None or process.node else f"Memory grows while {node} trains: it"
    text = f"{who} grows by {growth} since round {grown.since}, and does not level off."
    if group is not None:
        text += _tensor_words(group)
    elif process.node is None and _no_seen_tensors_accumulate(history, round_index):
        text += (
            " It is outside of the tensors that fedvitals sees: inputs, outputs, parameters and gradients of models."
        )
    inside = None if process.node or node else _share_while_clients_train(history, round_index, grown)
    text += _phase_words(inside)
    more: dict[str, Any] = {"bytes_per_round": growth.bytes, "bytes_per_round_interval": [growth.least, growth.most]}
    if ahead is not None:
        limit = newest_value(history, "memory.limit", round_index, process.node) or 0.0
        text += f" {ahead} {size_words(process.now)} of {size_words(limit)} are in use."
        more["forecast"] = {"rounds": ahead.rounds, "least": ahead.least, "most": ahead.most}
    numbers = [Number("memory.resident", process.now, process.now - grown.bytes, of="own past")]
    if group is not None:
        more["tensors"] = {key: group[key] for key in ("shape", "type", "more", "more_bytes", "held_bytes", "rounds")}
        more["tensors"] |= {"graph": bool(group.get("graph"))} | ({"kind": group["kind"]} if group.get("kind") else {})
    if node is not None:
        more["share_of_growth"] = share
    sure = SURE_OF_GROWTH if group is None else SURE if group["collected"] else SURE_OF_GARBAGE
    soon = ahead is not None and ahead.rounds <= CRITICAL
    return finding(
        "MEMORY_LEAK",
        round_index,
        text,
        confidence=sure,
        since=grown.since,
        node=node,
        severity="critical" if soon else None,
        numbers=numbers,
        more=more,
    )


def _share_while_clients_train(history: History, round_index: int, grown: MemoryGrowth) -> float | None:
    """Return the share of the growth that clients of one process keep when they end; None where that is not known.

    By the heap in use: resident memory grows later than what fills it, as long as there is room that others have freed.
    """
    own = _kept_by_client(history, round_index, grown)
    clients = [*filter(None, history.latest("memory.resident", round_index))]
    if not clients or any(len(own.get(node, ())) < 2 for node in clients):
        return None
    return sum(float(np.median(own[node])) for node in clients) / grown.per_round


def _kept_by_client(history: History, round_index: int, grown: MemoryGrowth) -> dict[Node, list[float]]:
    """Return what each client kept of the heap, in the rounds of the growth in which it was asked for."""
    own: dict[Node, list[float]] = {}
    for n in rounds_until(history, round_index, WINDOW):
        if n >= grown.since:
            for node, value in history.latest("memory.kept", n).items():
                if math.isfinite(value):
                    own.setdefault(node, []).append(value)
    return own


def _phase_words(inside: float | None) -> str:
    if inside is None or OUTSIDE <= inside <= INSIDE:
        return ""
    if inside > INSIDE:
        return " It grows while clients train."
    return " It grows outside of the clients' training: in the aggregation, the evaluation, or the loop itself."


def _tensor_words(row: Mapping[str, Any]) -> str:
    """Which tensors pile up, as a sentence. `row`: of a census, with the number of `rounds` that it looks back on."""
    kind, tensors = row.get("kind"), f"of shape {row['shape']} ({row['type']})"
    each = f"{'about ' if row.get('exact') is False else ''}{row['more'] / row['rounds']:,.0f} more"
    if kind is None:  # a census of the whole heap
        graph = " that hold their graph" if row.get("graph") else ""
        return f" {each} tensors {tensors}{graph} are alive after each."
    text = f" {each} {kind}s {tensors} are alive after each."
    if row.get("graph"):
        text = f" The graphs of {each} {kind}s {tensors} are alive after each: losses or outputs are kept with them."
    if not row["collected"]:
        text += " No full garbage collection ran since: if `gc.collect()` frees them, they were in reference cycles."
    return text


def _leaking_client(history: History, round_index: int, grown: MemoryGrowth) -> tuple[Node, float] | None:
    """Return the client during whose training the process grows, and its fraction of all growth."""
    own = _kept_by_client(history, round_index, grown)
    usual = {node: float(np.median(values)) for node, values in own.items() if len(values) >= 3}
    if len(usual) < 3:
        return None
    # A model and the optimiser's state outlive their client's scope a little: what all keep is no leak.
    peers = float(np.median([*usual.values()]))
    over = sorted(((value - peers, node) for node, value in usual.items()), reverse=True)
    (most, node), (next_most, _) = over[:2]
    share = most / grown.per_round
    return (node, min(1.0, share)) if share > OWN_GROWTH and most > 3 * max(next_most, 0.0) else None


DETECTORS: tuple[Detector, ...] = (leaks,)
