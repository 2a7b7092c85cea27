# SPDX-License-Identifier: Apache-2.0
"""Detects memory that grows from round to round, and which tensors it consists of.

A process whose resident memory keeps rising after its first rounds is only suspected, since caches fill, too. From then
on the tensors that the clients' hooks see are recorded by weak references (`resources.seen_tensors`). Some rounds
later, those still alive are counted by kind, shape and type, and the result is the event `memory.census`. If none of
them has piled up, the event says that the growth is outside of what was seen. In that case, the heap in use, as counted
by the C library, distinguishes growth from fragmentation. Whether it is a leak is decided by a detector
(`diagnosis.detectors.memory`), which sees all rounds.

Everything here depends on counts of rounds and bytes, never on elapsed time: a busy machine reports the same.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from torch import Tensor

from fedvitals.resources.memory import heap_bytes
from fedvitals.resources.seen_tensors import GRAPHS_MEASURED, ClientTensors, Group, SeenTensors, TensorTotals

CENSUS = "memory.census"
WARM_UP = 3  # rounds in which allocators, kernels and caches settle
BASELINE = 2  # rounds after these, whose minimum is the reference
SUSPICIOUS = 8 << 20  # bytes above it
# Rounds from the suspicion to the first census, and to the second; then twice as many each time. Tensors are recorded
# for as many rounds between two censuses, so that a long run is hardly ever hooked.
APART = 3
MOST = 8  # censuses of a process in a run
LAPSE = 20  # rounds after which a suspicion ends, if the process has not grown by half of SUSPICIOUS since
PILED_UP = 0.6  # share of the rounds from which a pile holds tensors; with fewer, they are just long-lived
SMALL = 0.05  # share of the growth: smaller groups of tensors are not reported, unless they have graphs
GROUPS = 12  # reported in an event


@dataclass(frozen=True, slots=True)
class Suspicion:
    """The round in which tensors began to be recorded, which is not complete."""

    round_index: int
    position: int  # its position among the rounds in which clients trained here
    collections: int  # full runs of the garbage collector until then
    heap: int | None  # bytes in use then


class LeakWatch:
    """Watches one process in one run. `note` receives the resident memory at the end of each client."""

    def __init__(self) -> None:
        self._rounds: list[int] = []  # in which clients trained here
        self._lows: list[int] = []  # the minimum at the end of any of them: garbage has been freed by then
        self._usual: int | None = None  # resident bytes from which growth is measured
        self._suspicion: Suspicion | None = None
        self._due = WARM_UP + BASELINE + 1  # how many rounds must have passed
        self._taken = 0
        self._seen = SeenTensors()
        self._recorded: list[int] = []  # rounds since the suspicion in which tensors were recorded
        self._clients = self._clients_before = 0  # in this round and in the previous one

    @property
    def suspected(self) -> bool:
        return self._suspicion is not None

    def watch(self, model: Any, parameters: Sequence[Tensor], round_index: int | None) -> ClientTensors | None:
        """Return hooks that record the tensors of a client that begins; None unless this round is to be recorded."""
        self._clients += 1
        if self._suspicion is None or self._taken >= MOST or round_index is None:
            return None
        fresh = not self._rounds or self._rounds[-1] != round_index
        position = len(self._rounds) if fresh else len(self._rounds) - 1
        stride = 2 ** max(0, self._taken - 1)
        if (position - self._suspicion.position) % stride:
            return None
        if round_index not in self._recorded[-1:]:
            self._recorded.append(round_index)
        every = max(1, self._clients_before // GRAPHS_MEASURED)
        measure_graph = (self._clients + round_index) % every == 0
        return ClientTensors(self._seen, model, parameters, round_index, rounds=stride, measure_graph=measure_graph)

    def note(self, round_index: int | None, resident: int) -> dict[str, Any] | None:
        """Return the data of a census, if one is due and the process has grown."""
        if round_index is None:
            return None
        if self._rounds and self._rounds[-1] == round_index:
            self._lows[-1] = min(self._lows[-1], resident)
            return None
        self._seen.forget_expired()
        self._clients, self._clients_before = 0, self._clients
        census = self._look(round_index) if len(self._rounds) >= self._due else None
        self._rounds.append(round_index)
        self._lows.append(resident)
        return census

    def _look(self, round_index: int) -> dict[str, Any] | None:
        """Check for growth at the end of a round's first client, when the rounds before it are complete."""
        now = self._lows[-1]
        if self._usual is None:
            self._usual = min(self._lows[WARM_UP : WARM_UP + BASELINE])
        if self._suspicion is None:
            if now - self._usual >= SUSPICIOUS and self._taken < MOST:
                self._suspicion = Suspicion(round_index, len(self._rounds), _full_collections(), heap_bytes())
                self._due = len(self._rounds) + 1 + APART
            return None
        if self._taken >= MOST:
            return None
        grown = now - self._lows[self._suspicion.position]
        if grown < SUSPICIOUS // 2:
            if len(self._rounds) - self._suspicion.position > LAPSE:
                self._end_suspicion(now)
            return None
        census = self._census(self._suspicion, grown)
        self._taken += 1
        self._due = len(self._rounds) + APART * 2 ** max(0, self._taken - 1)
        if self._taken >= MOST:
            self._seen.clear()
        return census

    def _end_suspicion(self, resident: int) -> None:
        """End a suspicion, as the process has levelled off: nothing is recorded until it grows again."""
        self._suspicion, self._usual, self._recorded = None, resident, []
        self._seen.clear()

    def _census(self, suspicion: Suspicion, grown: int) -> dict[str, Any]:
        """Return the groups of tensors seen since the suspicion of which some are still alive from most rounds."""
        since, until = suspicion.round_index, self._rounds[-1]
        rounds = len({number for number in self._recorded if since < number <= until})
        piles = self._seen.alive(after=since, until=until)
        rows = [_row(group, pile) for group, pile in piles.items() if len(pile.rounds) >= PILED_UP * rounds]
        # An output whose graph holds most also holds the others.
        graphs = sorted((row for row in rows if row["graph"]), key=_held_most, reverse=True)
        tensors = [row for row in rows if not row["graph"] and row["more_bytes"] >= SMALL * grown]
        tensors.sort(key=_largest, reverse=True)
        heap = heap_bytes()
        return {
            "since": since,
            "until": until,
            "grown_bytes": grown,
            "groups": [*graphs[: GROUPS // 2], *tensors][:GROUPS],
            "rounds_seen": rounds,
            "heap_grown_bytes": None if heap is None or suspicion.heap is None else heap - suspicion.heap,
            "collections": _full_collections() - suspicion.collections,
        }


def _full_collections() -> int:
    """Return how often the garbage collector has made a full run. Reading it starts no collection."""
    return int(gc.get_stats()[-1]["collections"])


def _row(group: Group, pile: TensorTotals) -> dict[str, Any]:
    kind, shape, dtype, graph = group
    return {
        "kind": kind,
        "shape": list(shape),
        "type": str(dtype).removeprefix("torch."),
        "graph": graph,
        "more": pile.count,
        "more_bytes": pile.bytes,
        "held_bytes": int(median(pile.held)) if pile.held else 0,
        "exact": pile.exact,
    }


def _held_most(row: dict[str, Any]) -> tuple[int, int, int]:
    return row["held_bytes"], row["more"], -math.prod(row["shape"])


def _largest(row: dict[str, Any]) -> tuple[int, int]:
    return row["more_bytes"], row["more"]


def in_words(census: dict[str, Any]) -> str:
    """Return the event's sentence."""
    growth = f"Memory grew by {census['grown_bytes'] / 2**20:.1f} MiB from round {census['since']} to {census['until']}"
    if not census["rounds_seen"]:
        return f"{growth}. fedvitals saw no tensors in these rounds."
    if not census["groups"]:
        return (
            f"{growth}. None of the tensors seen by fedvitals (inputs, outputs, parameters and gradients of the "
            "clients' models) piled up: the growth is outside of what it sees."
        )
    row = census["groups"][0]
    number = f"{'' if row['exact'] else 'about '}{row['more']:,}"
    tensors = f"{row['kind']}s of shape {row['shape']} ({row['type']})"
    kept = f"the graphs of {number} {tensors}" if row["graph"] else f"{number} {tensors}"
    return f"{growth}; {kept} from these rounds are still alive."
