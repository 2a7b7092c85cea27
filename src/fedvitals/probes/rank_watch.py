# SPDX-License-Identifier: Apache-2.0
"""Watches the processes that train one model together: which of them lags, and which no longer shows a sign of life.

Processes wait for each other when they exchange: with copies (DDP) during the backward pass, with shards (FSDP) from
the forward pass on. The one that others wait for takes longest from its last optimiser step until then. GPU work that
the host does not wait for is not seen.

A thread of each process signals every few seconds that it is alive, and how many steps it has made; the thread of the
reporting process monitors the others. It ends with the training.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from statistics import median, quantiles
from typing import Any

import msgspec
from torch import nn

from fedvitals.model_hooks import Hook, can_be_hooked
from fedvitals.probes.ranks import Gathered, Quartiles, RankGroup
from fedvitals.probes.results import Results
from fedvitals.stats import Array

BEAT = 2.0  # seconds between two signs of life
SILENCE = 15.0  # seconds without one, after which a process is named
KEPT = 512  # steps whose times are kept
FEWEST_STEPS = 9  # of a process, needed to judge it
LAG_SHARE, LEAST_LAG = 0.2, 1e-3  # of a step, and seconds of it, that the others wait
LOST, LAGGING = "rank.lost", "rank.lagging"
Remark = tuple[str, str, Mapping[str, Any]]
Tell = Callable[[str, str, Mapping[str, Any]], None]


class RankWatch:
    """One training, as seen by one of its processes, from creation until `remove`.

    `step` is called at each step of an optimiser; `tell` receives what is to be reported at once: name, text and data
    of an event.
    """

    def __init__(self, group: RankGroup, model: nn.Module, tell: Tell) -> None:
        self.group, self._tell = group, tell
        self.steps = 0
        self._times: deque[float] = deque(maxlen=KEPT)
        self._mark = self._began = time.perf_counter()
        self._seconds = 0.0  # duration of the training
        self._before: float | None = None  # from then until the processes first wait for each other
        self._handle: Any = None
        self._stopped = threading.Event()
        group.begin()
        if can_be_hooked(model):
            hook = Hook(self._reached, lambda _: None)
            # With copies, passes without an exchange may precede the one that has it, so the last one counts.
            self._handle = (model.register_forward_pre_hook if group.sharded else model.register_forward_hook)(hook)
        threading.Thread(target=self._work, name="fedvitals-ranks", daemon=True).start()

    def _reached(self, *_: Any) -> None:
        if self._before is None or not self.group.sharded:
            self._before = time.perf_counter() - self._mark

    def step(self) -> None:
        """Note that an optimiser steps, so the processes have exchanged their parts."""
        self.steps += 1
        if self._before is not None and self.steps > 1:  # the first one also includes what came before it
            self._times.append(self._before)
        self._before, self._mark = None, time.perf_counter()

    @property
    def before_exchange(self) -> Quartiles:
        """Return the quartiles of the times until the processes first wait for each other; empty for few steps."""
        return tuple(quantiles(self._times)) if len(self._times) >= FEWEST_STEPS else ()

    def remove(self) -> None:
        """Stop watching, when the training is over."""
        self._stopped.set()
        self._seconds = time.perf_counter() - self._began
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def gather(self, results: Results, steps: int, rows: list[Array], totals: list[Array]) -> Gathered:
        """Return what all processes measured of so many steps, and remark in the results who lags or is lost."""
        gathered = self.group.gather(steps, self.before_exchange, rows, totals)
        results.remarks += rank_remarks(gathered, len(self.group.ranks), steps, self._seconds)
        return gathered

    # -- signs of life ------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        if self._stopped.wait(BEAT):
            return
        try:
            store = self.group.connect()
            work = self._looking(store) if self.group.reports else self._beating(store)
            while not self._stopped.is_set():
                next(work)
                self._stopped.wait(BEAT)
        except Exception:  # noqa: BLE001 - the store is gone, with the process that had it
            return

    def _key(self, rank: int) -> str:
        return f"fedvitals/alive/{rank}"

    def _beating(self, store: Any) -> Any:
        beats = 0
        while True:
            beats += 1
            store.set(self._key(self.group.own), msgspec.msgpack.encode((beats, self.steps)))
            yield

    def _looking(self, store: Any) -> Any:
        others = self.group.ranks[1:]
        heard = {rank: (None, time.monotonic()) for rank in others}  # the last sign, and when it changed
        named: set[int] = set()
        while True:
            for rank in [rank for rank in others if rank not in named]:
                sign = store.get(self._key(rank)) if store.check([self._key(rank)]) else None
                last, since = heard[rank]
                if sign != last:
                    heard[rank] = (sign, time.monotonic())
                    continue
                mark = self.group.mark_of(rank, store)
                silence = time.monotonic() - since
                if mark is not None and not self._stopped.is_set() and (mark.is_gone or silence > SILENCE):
                    named.add(rank)
                    steps = None if sign is None else msgspec.msgpack.decode(sign)[1]
                    self._tell(*lost_rank(rank, mark.words, steps, ended=mark.is_gone))
            yield


def lost_rank(rank: int, process: str, steps: int | None = None, *, ended: bool) -> Remark:
    """Return the remark about a process that no longer trains with the others."""
    how = "has ended" if ended else "gives no sign of life"
    progress = "" if steps is None else f", after {steps} steps"
    text = f"Rank {rank} ({process}) of this client {how}{progress}: the other processes wait for it, or have failed."
    return LOST, text, {"rank": rank, "process": process, "steps": steps, "ended": ended}


def rank_remarks(gathered: Gathered, ranks: int, steps: int, seconds: float) -> list[Remark]:
    """Return the remarks about the processes of a training: which are lost, and which lag."""
    remarks = [lost_rank(rank, mark.words, ended=mark.is_gone) for rank, mark in gathered.lost.items()]
    missing = len(gathered.unwatched) + len(gathered.lost)
    if missing and gathered.sharded:
        text = f"The sums of sharded layers are those of {ranks - missing} of {ranks} processes."
        remarks.append(("layers.sharded", text, {"processes": ranks - missing, "of": ranks}))
    times = {rank: own for rank, own in gathered.before_exchange.items() if own}
    slowest = max(times, key=lambda rank: times[rank], default=None)
    if slowest is None or len(times) < 2:
        return remarks
    low, own, _ = times[slowest]
    usual, high = (median(times[rank][i] for rank in times if rank != slowest) for i in (1, 2))
    if low - high > max(LEAST_LAG, LAG_SHARE * seconds / steps):  # in nearly all steps rather than in a few
        text = (
            f"Rank {slowest} lags: it takes {own:.3g} s of a step before the processes exchange, the others "
            f"{usual:.3g} s, and they wait for it."
        )
        data = {"rank": slowest, "seconds": own, "others_seconds": usual, "step_seconds": seconds / steps}
        remarks.append((LAGGING, text, data))
    return remarks
