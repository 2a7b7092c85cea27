# SPDX-License-Identifier: Apache-2.0
"""What a client's training spends its time on: loading data, forward, backward, optimiser; and our own measuring.

Every step tells when the optimiser began and ended, and how long DataLoaders kept it waiting. What lies between,
forward and backward, is divided as in the first steps and every eighth: a hook on a model costs more than the clock.

Between two steps lies the loading of data. Where a DataLoader is used its own time is known, and the rest of the gap is
left unaccounted for, which is honest: it is whatever else the user's loop does. Where none is, the gap counts as
loading. Work on a GPU goes on after its call has returned: there the parts tell when the host was kept waiting, and
the whole is right, not its division.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import dataloader

now = time.perf_counter

TICKS = 2**20  # in a second: what is told to a microsecond is half as long on the wire
FIRST, EVERY = 3, 8  # steps that are looked into: so many at the beginning, and then each eighth

# What a client is doing; what ends next is counted there.
START, BETWEEN, FORWARD, BACKWARD, MEASURING, STEP = range(6)


class _Turn(threading.local):
    """Of a thread: which client trained on it last, until when, and how long it has waited for DataLoaders so far."""

    clock: StepClock | None = None
    mark = 0.0
    loading = 0.0
    loaders = 0  # batches that came from one


_turn = _Turn()


class StepClock:
    """Of one client while it trains. `begin_step`, `measured` and `end_step` are called around an optimiser's step."""

    __slots__ = (
        "_backward",
        "_batches",
        "_compute",
        "_data",
        "_forget",
        "_forward",
        "_gap",
        "_handles",
        "_inside",
        "_loaded",
        "_mark",
        "_model",
        "_nested",
        "_optimizer",
        "_seen_loader",
        "_state",
        "_wait",
        "_whole",
        "batch",
        "measure",
        "steps",
    )

    def __init__(self) -> None:
        self._data = self._optimizer = self._wait = self._compute = self._whole = self.measure = 0.0
        self._gap = self._forward = self._backward = self._inside = 0.0  # of the steps that were looked into
        self.batch = self.steps = self._batches = self._nested = 0
        self._model: Any = None
        self._state = START  # until the first batch: optimisers and loaders are made, which is neither
        self._handles: list[Any] = []
        self._forget: Callable[[], None] | None = None

    def start(self, model: Any) -> None:
        """Training begins."""
        self._forget = watch_loaders()
        self._model = model if _can_be_hooked(model) else None
        self._look()
        turn = _turn
        self._mark = turn.mark = now()
        self._loaded, self._seen_loader = turn.loading, turn.loaders
        turn.clock = self

    def remove(self) -> None:
        self._unhook()
        self._model = None
        if self._forget is not None:
            self._forget()
        if _turn.clock is self:
            _turn.clock = None

    def begin_step(self, at: float) -> None:
        """An optimiser is about to step, and we to measure."""
        if self._state == STEP:  # an optimiser that calls another one's step
            self._optimizer += at - self._mark
            self._nested += 1
        elif self._handles:
            self._forward_or_backward(at)
            self._unhook()
        else:
            self._whole += self._since(at)
        self._state, self._mark = MEASURING, at

    def measured(self, at: float) -> None:
        self.measure += at - self._mark
        self._state, self._mark = STEP, at

    def end_step(self) -> None:
        at, turn = now(), _turn
        if self._state == BACKWARD:  # a closure went forward and backward inside the step
            self._backward += at - self._mark
        else:
            self._optimizer += at - self._mark
        if self._nested:
            self._nested -= 1
            self._mark = at
            return
        self.steps += 1
        if self.steps < FIRST or self.steps % EVERY == 0:
            self._look()
        turn.clock, turn.mark = self, at
        self._state, self._mark = BETWEEN, at

    def _since(self, at: float) -> float:
        """What went by since the last mark, less what is known of it: others' turns on this thread, and loading."""
        turn = _turn
        gap = at - self._mark
        if turn.clock is not self:
            others = min(max(0.0, turn.mark - self._mark), gap)
            self._wait += others
            gap -= others
            turn.clock = self
        if turn.loaders != self._seen_loader:
            loaded = min(turn.loading - self._loaded, gap)
            self._data += loaded
            self._loaded, self._seen_loader = turn.loading, turn.loaders
            gap -= loaded
        return gap

    # -- in the steps that are looked into ----------------------------------------------------------------------------

    def _look(self) -> None:
        if self._model is not None:
            self._handles = [
                self._model.register_forward_pre_hook(self._forward_begins),
                self._model.register_forward_hook(self._forward_ends),
            ]

    def _unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _forward_begins(self, _module: Any, inputs: tuple[Any, ...]) -> None:
        if self._state == MEASURING:  # a probe of ours looks through the model
            return
        at = now()
        gap = self._since(at)
        if self._state == BETWEEN:
            self._gap += gap
        elif self._state == STEP:
            self._optimizer += gap
        elif self._state != START:
            self._backward += gap
        if torch.is_grad_enabled() and inputs and isinstance(inputs[0], torch.Tensor) and inputs[0].dim():
            self.batch = inputs[0].shape[0]
            self._inside += self.batch
        self._state, self._mark = FORWARD, at

    def _forward_ends(self, *_: Any) -> None:
        if self._state != MEASURING:
            at = now()
            self._forward += at - self._mark
            self._state, self._mark = BACKWARD, at

    def _forward_or_backward(self, at: float) -> None:
        self._batches += 1
        if self._state == BACKWARD:
            self._backward += self._since(at)
        else:
            self._compute += self._since(at)  # a model that was not called as a whole: no more is known

    # -- at the end ---------------------------------------------------------------------------------------------------

    @property
    def samples(self) -> int:
        """That went through the model; exact in the steps that were looked into."""
        return round(self._inside / self._batches * self.steps) if self._batches else 0

    def parts(self, measure: float) -> dict[str, float]:
        """Seconds by part, without those that took none. `measure`: what measuring took, in the steps and around."""
        seen = {"gap": self._gap, "forward": self._forward, "backward": self._backward, "compute": self._compute}
        total = sum(seen.values())
        times = 1 + self._whole / total if total else 1.0
        gap, forward, backward, compute = (seconds * times for seconds in seen.values())
        found = {
            "data": self._data + (gap if not self._seen_loader else 0.0),
            "forward": forward,
            "backward": backward,
            "optimizer": self._optimizer,
            "compute": compute if total else self._whole,
            "measure": max(measure, self.measure),
            "wait": self._wait,
        }
        return {name: ticks / TICKS for name, seconds in found.items() if (ticks := int(seconds * TICKS)) > 0}


def _can_be_hooked(model: Any) -> bool:
    """Not where a hook would have the model compiled anew, or is not called."""
    compiled = getattr(model, "_compiled_call_impl", None) is not None
    return isinstance(model, torch.nn.Module) and not compiled and not isinstance(model, torch.jit.ScriptModule)


_lock = threading.Lock()
_watching = [0]
_Iterator: Any = dataloader._BaseDataLoaderIter  # noqa: SLF001 - torch tells it nowhere else


def watch_loaders() -> Callable[[], None]:
    """Time every DataLoader from here on; gives the function that ends it. Its method is put back after the last."""
    with _lock:
        if not _watching[0]:
            _Iterator.__next__ = _timed_next(_Iterator.__next__)
        _watching[0] += 1
    ended: list[bool] = []

    def forget() -> None:
        with _lock:
            if ended:
                return
            ended.append(True)
            _watching[0] -= 1
            if not _watching[0] and hasattr(_Iterator.__next__, "original"):
                _Iterator.__next__ = _Iterator.__next__.original

    return forget


def _timed_next(original: Any) -> Any:
    def __next__(self: Any) -> Any:  # noqa: N807 - it stands in for that method
        began = now()
        try:
            return original(self)
        finally:
            _turn.loading += now() - began
            _turn.loaders += 1

    __next__.original = original  # type: ignore[attr-defined]
    return __next__
