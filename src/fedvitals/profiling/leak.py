# SPDX-License-Identifier: Apache-2.0
"""Memory that grows from round to round, and which tensors it is made of.

A process whose resident memory keeps rising after its first rounds is suspected, no more: caches fill, too. Then the
living tensors are counted, by shape and type, and some rounds later again. What has grown in between is told as the
event `memory.census`; whether it is a leak is for a detector to say (`diagnosis.detect_memory`), who sees all rounds.
"""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedvitals.profiling.tensors import saved_bytes

CENSUS = "memory.census"
WARM_UP = 3  # rounds in which allocators, kernels and caches settle
BASELINE = 2  # rounds after these, whose least is compared with
SUSPICIOUS = 8 << 20  # bytes above it
APART = 3  # rounds from the first census to the second; then twice as many each time
MOST = 8  # censuses of a process in a run: each may take a tenth of a second
SHARE = 1 / 400  # of the time, for censuses; more only where the growth presses
PRESSING = 24 << 20  # bytes
EXPECTED = 0.15  # seconds of a census, before one was taken
GROUPS = 12  # that an event tells of
SECONDS = 1.0  # that a census may take; one that is not done by then is not used

Group = tuple[tuple[int, ...], str, bool]  # shape, type, whether it holds its graph


@dataclass(slots=True)
class Counted:
    """Tensors of one group."""

    count: int = 0
    bytes: int = 0
    example: Tensor | None = None  # only while the census runs


@dataclass(frozen=True, slots=True)
class Census:
    groups: dict[Group, Counted]
    complete: bool
    seconds: float


def census(objects: Iterable[Any] | None = None, seconds: float = SECONDS) -> Census:
    """The living tensors by shape and type, each storage once. Those of C++ alone are not seen: see `_held_by`."""
    began = time.thread_time()  # of this thread's own work: a busy machine must not end it early
    groups: dict[Group, Counted] = {}
    seen: set[int] = set()
    complete = True
    if objects is None and gc.isenabled():
        gc.collect()  # what only waits to be collected is no leak; it would be collected soon in any case
    for number, one in enumerate(gc.get_objects() if objects is None else objects):
        if number % 4096 == 0 and time.thread_time() - began > seconds:
            complete = False
            break
        kind = type(one)  # not isinstance: that may run code of the object's own
        if kind is Tensor or kind is torch.nn.Parameter:
            with contextlib.suppress(RuntimeError, NotImplementedError):  # one of torch.func's, without a storage
                _count(one, groups, seen)
    return Census(groups, complete, time.thread_time() - began)


def _count(tensor: Tensor, groups: dict[Group, Counted], seen: set[int]) -> None:
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return
    key = (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.grad_fn is not None)
    group = groups.setdefault(key, Counted())
    group.count += 1
    if key[2]:
        group.example = tensor
    storage = tensor.untyped_storage()
    if storage.data_ptr() not in seen:
        seen.add(storage.data_ptr())
        group.bytes += storage.nbytes()


class LeakWatch:
    """Of one process and one run. `note` is told the resident memory at the end of each client."""

    def __init__(self) -> None:
        self._rounds: list[int] = []  # in which clients trained here
        self._lows: list[int] = []  # the least at the end of any of them: what was garbage is gone by then
        self._first: tuple[int, int, dict[Group, tuple[int, int]]] | None = None  # round, resident, count and bytes
        self._due = 0  # how many rounds must have passed
        self._taken = 0
        self._began, self._spent, self._cost = time.perf_counter(), 0.0, EXPECTED

    @property
    def suspected(self) -> bool:
        return self._first is not None

    def note(self, round: int | None, resident: int) -> dict[str, Any] | None:  # noqa: A002 - the domain's word
        """The data of an event, if there is something to tell."""
        if round is None:
            return None
        if self._rounds and self._rounds[-1] == round:
            self._lows[-1] = min(self._lows[-1], resident)
            return None
        found = self._look() if len(self._rounds) >= max(self._due, WARM_UP + BASELINE + 1) else None
        self._rounds.append(round)
        self._lows.append(resident)
        return found

    def _look(self) -> dict[str, Any] | None:
        """At the begin of a round, when the one before is known."""
        usual, now = min(self._lows[WARM_UP : WARM_UP + BASELINE]), self._lows[-1]
        if now - usual < SUSPICIOUS or self._taken >= MOST:
            return None
        if self._first is not None and now - self._first[1] < SUSPICIOUS // 2:
            return None
        elapsed = time.perf_counter() - self._began
        if now - usual < PRESSING and self._spent + self._cost > SHARE * elapsed:
            return None  # a few megabytes can wait until the run is long enough to pay for the counting
        self._taken += 1
        taken = census()
        self._cost = time.perf_counter() - self._began - elapsed
        self._spent += self._cost
        self._due = len(self._rounds) + APART * 2 ** max(0, self._taken - 2)
        if not taken.complete:
            return None
        told = None if self._first is None else _grown(taken, self._first, self._rounds[-1], now)
        if self._first is None:
            counts = {key: (group.count, group.bytes) for key, group in taken.groups.items()}
            self._first = (self._rounds[-1], now, counts)
        return told


def _grown(
    taken: Census, first: tuple[int, int, dict[Group, tuple[int, int]]], number: int, resident: int
) -> dict[str, Any]:
    """What there is more of than at the first census, the largest first."""
    since, before, counts = first
    rows: list[dict[str, Any]] = []
    for key, group in taken.groups.items():
        count, size = counts.get(key, (0, 0))
        if group.count > count:
            shape, kind, graph = key
            held = _held_by(group.example) if graph else 0
            more = {"count": group.count, "more": group.count - count, "more_bytes": max(0, group.bytes - size)}
            rows.append({"shape": list(shape), "type": kind, "graph": graph, **more, "held_bytes": held})
    # Who holds most by its graph holds the others; of those that hold nothing any more, the loss is the smallest.
    rows.sort(key=lambda row: (row["graph"], row["held_bytes"], -math.prod(row["shape"])), reverse=True)
    rows = [*(row for row in rows if row["graph"])][: GROUPS // 2] + sorted(
        (row for row in rows if not row["graph"]), key=lambda row: (row["more_bytes"], row["more"]), reverse=True
    )
    told = {"since": since, "until": number, "grown_bytes": resident - before, "groups": rows[:GROUPS]}
    return {**told, "seconds": round(taken.seconds, 4)}


def _held_by(tensor: Tensor | None) -> int:
    """Bytes that a tensor keeps alive by its graph, for a way back that nobody goes; 0 where they are freed."""
    return 0 if tensor is None else saved_bytes([tensor], set()) or 0


def in_words(told: dict[str, Any]) -> str:
    """The event's sentence."""
    grown = f"Memory grew by {told['grown_bytes'] / 2**20:.1f} MiB from round {told['since']} to {told['until']}"
    if not told["groups"]:
        return f"{grown}; the number of tensors did not."
    most = told["groups"][0]
    graph = " that hold their graph" if most["graph"] else ""
    return f"{grown}; {most['more']:,} more tensors of shape {most['shape']} ({most['type']}){graph} are alive."
