# SPDX-License-Identifier: Apache-2.0
"""Detectors of memory problems: clients that ran out of memory, and memory that grows from round to round.

A process grows in its first rounds, as allocators, caches and our own history fill, and it grows and shrinks as garbage
is made and collected. The first rounds are therefore left out, and the lows of four stretches of the rest are compared:
a leak raises each of them, the last no less than the ones before.

Clients of one process share its memory. A client is named where the growth happens while it trains, and hardly while
others do. Which tensors accumulate is reported by `memory.census` (see `resources.leaks`). Its rows count tensors that
hooks have seen. Older stores hold censuses of all tensors on the heap, whose rows have no kind.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedvitals.diagnosis.evidence.attendance import newest_values, rounds_until, values_up_to
from fedvitals.diagnosis.finding import Number, finding
from fedvitals.diagnosis.history_cutoff import LOOK_BACK, shared
from fedvitals.diagnosis.memory_fit import SHARES, WORDS, largest_share, memory_remedies, predicted_peak, size_words
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
OWN_GROWTH = 0.5  # of all growth, that one client has to keep, more than its peers do, to be named
REAL_PART = 0.2  # of the process, or of what there is: tensors that are less did not fill it
FILLED = 0.5  # of what there is: who held less was refused one large piece, or others filled the rest
KILLED = re.compile(r"worker process .*killed", re.IGNORECASE)  # as the lab words it


@dataclass(frozen=True, slots=True)
class MemoryGrowth:
    """How much memory grew, over how many rounds, and since when."""

    since: int
    rounds: int
    bytes: float

    @property
    def per_round(self) -> float:
        return self.bytes / self.rounds


def leaks(history: History, round_index: int) -> Iterator[Finding]:
    """MEMORY_LEAK: the process that holds the clients, or the server, grows and does not level off."""
    numbers = rounds_until(history, round_index, LOOK_BACK)[WARM_UP:][-WINDOW:]
    if len(numbers) < FEWEST:
        return
    for lows in (
        _lowest_memory(history, numbers),
        dict(newest_values(history.series("memory.resident", None), round_index, WINDOW)),
    ):
        points = [(n, lows[n]) for n in numbers if n in lows]
        grown = memory_growth([n for n, _ in points], [value for _, value in points])
        if grown is None or points[-1][0] != round_index:
            continue
        group = _accumulating_tensors(history, round_index, grown)
        if group is None and not _beyond_doubt(history, round_index, grown, points):
            continue
        yield _leak(history, round_index, grown, group, points[-1][1])
        return


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
    grown: MemoryGrowth,
    group: Mapping[str, Any] | None,
    now: float,
) -> Finding:
    node, share = _leaking_client(history, round_index, grown) or (None, 0.0)
    who = "Memory" if node is None else f"Memory grows while {node} trains: it"
    text = f"{who} grows by {size_words(grown.per_round)} a round since round {grown.since}, and does not level off."
    if group is not None:
        text += _tensor_words(group)
    elif _no_seen_tensors_accumulate(history, round_index):
        text += (
            " It is outside of the tensors that fedvitals sees: inputs, outputs, parameters and gradients of models."
        )
    limit = _newest_value(history, "memory.limit", round_index)
    if limit is not None and now < limit:
        text += f" The {size_words(limit)} that there are last for {(limit - now) / grown.per_round:,.0f} more rounds."
    numbers = [Number("memory.resident", now, now - grown.bytes, of="own past")]
    more: dict[str, Any] = {"bytes_per_round": grown.per_round}
    if group is not None:
        more["tensors"] = {key: group[key] for key in ("shape", "type", "more", "more_bytes", "held_bytes", "rounds")}
        more["tensors"] |= {"graph": bool(group.get("graph"))} | ({"kind": group["kind"]} if group.get("kind") else {})
    if node is not None:
        more["share_of_growth"] = share
    sure = SURE_OF_GROWTH if group is None else SURE if group["collected"] else SURE_OF_GARBAGE
    return finding(
        "MEMORY_LEAK", round_index, text, confidence=sure, since=grown.since, node=node, numbers=numbers, more=more
    )


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
    own: dict[Node, list[float]] = {}
    for n in rounds_until(history, round_index, WINDOW):
        if n >= grown.since:
            for node, value in history.latest("memory.kept", n).items():
                if math.isfinite(value):
                    own.setdefault(node, []).append(value)
    usual = {node: float(np.median(values)) for node, values in own.items() if len(values) >= 3}
    if len(usual) < 3:
        return None
    # A model and the optimiser's state outlive their client's scope a little: what all keep is no leak.
    peers = float(np.median([*usual.values()]))
    over = sorted(((value - peers, node) for node, value in usual.items()), reverse=True)
    (most, node), (next_most, _) = over[:2]
    share = most / grown.per_round
    return (node, min(1.0, share)) if share > OWN_GROWTH and most > 3 * max(next_most, 0.0) else None


# -- out of memory ----------------------------------------------------------------------------------------------------


def memory_words(history: History, round_index: int, event: Event) -> tuple[str, dict[str, Any]]:
    """Return what took most memory and what would have fitted, for a client that ran out of memory: a text, and its
    evidence.

    A step's tensors are only blamed where they are a substantial part of the process or of the available memory.
    """
    node = event.where.node
    shares, batch, tried = _shares_of(history, round_index, node)
    if not shares:
        return "", {}
    text, peak = "", predicted_peak(shares, batch, tried)
    limit = _newest_value(history, "memory.limit", round_index, node)
    resident = _newest_value(history, "memory.resident", round_index, node)
    wholes = [whole for whole in (resident, limit) if whole]
    more: dict[str, Any] = {"shares": shares, "peak_bytes": peak}
    more |= {"resident_bytes": resident} if resident else {}
    if wholes and peak < REAL_PART * min(wholes):
        return _other_than_tensors(peak, resident, limit), more | {"limit_bytes": limit, "explained": False}
    if batch and tried and tried != batch and "activations" in shares:
        shares = {**shares, "activations": shares["activations"] * tried / batch}
        more["shares"] = shares
    largest = largest_share(shares)
    # Nobody is sent after what we hold ourselves, unless that alone is a real part.
    ours = largest is not None and largest[0] == "telemetry"
    if largest is not None and not (ours and shares["telemetry"] < REAL_PART * min(wholes, default=math.inf)):
        name, part = largest
        text += f" {WORDS[name].capitalize()} took most: {size_words(shares[name])}, {part:.0%} of a step's tensors"
        text += f" (batch of {tried or batch:.0f})." if name == "activations" and (tried or batch) else "."
        more["largest"] = name
    free = _available(history, round_index, limit, peak)
    if free is not None:
        remedies = memory_remedies(shares, free, tried or batch)
        more |= {"limit_bytes": limit, "remedies": {remedy.kind: remedy.value for remedy in remedies}}
        if remedies:
            text += f" In {size_words(free)} would fit: {'; or '.join(remedy.text for remedy in remedies)}."
    return text, more


def _shares_of(
    history: History, round_index: int, node: Node | None
) -> tuple[dict[str, float], float | None, float | None]:
    """Return bytes by share, the batch that activations were measured on, and the one that was tried now.

    The client's own values as last reported; what it never reported is taken from its peers, who train the same model.
    """
    newest: dict[str, float] = {}
    measured: float | None = None
    for who in [node, *(n for n in history.nodes() if n != node)]:
        series = {
            name: dict(values_up_to(history.series(f"memory.{name}", who), round_index)) for name in (*SHARES, "batch")
        }
        for name in SHARES:
            if series[name] and name not in newest:
                last = max(series[name])
                newest[name] = series[name][last]
                if name == "activations":
                    measured = series["batch"].get(last)
        if "activations" in newest and "model" in newest:
            break
    tried = None if node is None else history.latest("memory.batch", round_index).get(node)
    shares = {name: size for name, size in newest.items() if size == 0 or 1 <= size < math.inf}
    return shares, _samples(measured), _samples(tried) or _samples(measured)


def _samples(batch: float | None) -> float | None:
    """Return the size of a batch if it is plausible: a client may report anything."""
    return batch if batch is not None and 1 <= batch < math.inf else None


def _other_than_tensors(peak: float, resident: float | None, limit: float | None) -> str:
    """Return where to look instead: data, caches and results, or one allocation that was too large."""
    text = f" What took the memory is not in the model's tensors, which are {size_words(peak)} in a step"
    if resident is None:
        return f"{text}: look at data, caches and results that are kept."
    text += f"; the process held {size_words(resident)}"
    if limit is not None and resident < FILLED * limit:
        return f"{text} of {size_words(limit)}: one large piece was asked for, or other processes took the rest."
    return f"{text}: look at data, caches and results that are kept."


def _newest_value(history: History, name: str, round_index: int, node: Node | None = None) -> float | None:
    """Return the node's last reported value of a metric; if it never reported one, any other node's."""
    for who in [*([] if node is None else [node]), *(other for other in history.nodes() if other != node)]:
        values = [value for _, value in values_up_to(history.series(name, who), round_index) if math.isfinite(value)]
        if values:
            return values[-1]
    return None


def _available(history: History, round_index: int, limit: float | None, peak: float) -> float | None:
    """Return the bytes a step may take: the limit; where that was far from reached, what others left of it."""
    if limit is None:
        return None
    free = history.latest("machine.memory_free", round_index).get("server")
    if peak < limit / 2 and free is not None and free < peak:
        return free
    return limit


def killed_words(history: History, round_index: int, event: Event) -> tuple[str, float] | None:
    """Return what is known about who killed a process, and how sure that is; None if it was not killed."""
    if event.data.get("exception") != "WorkerKilled" and not KILLED.search(event.message):
        return None
    kills = history.latest("machine.oom_kills", round_index).get("server", 0.0)
    who = event.where.node or "A process"
    if kills > 0:
        return f"The process of {who} was killed by the kernel, which had run out of memory.", 1.0
    resident, limit = (
        _newest_value(history, f"memory.{name}", round_index, event.where.node) for name in ("resident", "limit")
    )
    small = resident is not None and limit is not None and resident < FILLED * limit  # so others may have filled it
    return f"The process of {who} was killed, as the kernel does when memory runs out.", 0.6 if small else 0.8


DETECTORS: tuple[Detector, ...] = (leaks,)
