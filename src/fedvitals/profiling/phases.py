# SPDX-License-Identifier: Apache-2.0
"""What a client's training spends its time on: loading data, forward, backward, optimiser; and our own measuring.

Between two local steps lies the loading of data. Where a DataLoader is used its own time is known, and the rest of the
gap is left unaccounted for, which is honest: it is whatever else the user's loop does. Where none is, the gap counts as
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

# What a session is doing; what ends next is counted there.
START, BETWEEN, FORWARD, BACKWARD, MEASURING, STEP = range(6)


class _Turn(threading.local):
    """Of a thread: which client trained on it last, and how long it has waited for DataLoaders so far."""

    clock: StepClock | None = None
    loading = 0.0
    loaders = 0  # batches that came from one


_turn = _Turn()


class StepClock:
    """Of one client while it trains. `begin_step`, `measured` and `end_step` are called around an optimiser's step.

    Written for speed: it runs five times in each local step.
    """

    __slots__ = (
        "_forget",
        "_handles",
        "_loaded",
        "_mark",
        "_seen_loader",
        "_state",
        "backward",
        "batch",
        "compute",
        "data",
        "forward",
        "measure",
        "optimizer",
        "samples",
        "wait",
    )

    def __init__(self) -> None:
        self.data = self.forward = self.backward = self.optimizer = self.compute = self.measure = self.wait = 0.0
        self.samples = self.batch = 0  # that went through the model, in all and in the newest batch
        self._state = START  # until the first batch: optimisers and loaders are made, which is neither
        self._handles: list[Any] = []
        self._forget: Callable[[], None] | None = None

    def start(self, model: Any) -> None:
        """Training begins."""
        self._forget = watch_loaders()
        if _can_be_hooked(model):
            self._handles = [
                model.register_forward_pre_hook(self._forward_begins),
                model.register_forward_hook(self._forward_ends),
            ]
        self._mark = now()
        self._loaded, self._seen_loader = _turn.loading, _turn.loaders
        _turn.clock = self

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._forget is not None:
            self._forget()
        if _turn.clock is self:
            _turn.clock = None

    def _forward_begins(self, _module: Any, inputs: tuple[Any, ...]) -> None:
        if self._state == MEASURING:  # a probe of ours looks through the model
            return
        at, turn = now(), _turn
        gap = at - self._mark
        if turn.clock is not self:  # others trained on this thread in between
            self.wait += gap
            turn.clock = self
        elif turn.loaders != self._seen_loader:
            loaded = min(turn.loading - self._loaded, gap)
            self.data += loaded
            if self._state == BACKWARD:  # gradients are gathered over several batches
                self.backward += gap - loaded
        elif self._state == BETWEEN:
            self.data += gap
        elif self._state == STEP:
            self.optimizer += gap
        elif self._state != START:
            self.backward += gap
        self._loaded, self._seen_loader = turn.loading, turn.loaders
        if torch.is_grad_enabled() and inputs and isinstance(inputs[0], torch.Tensor) and inputs[0].dim():
            self.batch = inputs[0].shape[0]
            self.samples += self.batch
        self._state, self._mark = FORWARD, at

    def _forward_ends(self, *_: Any) -> None:
        if self._state == MEASURING:
            return
        at = now()
        self.forward += at - self._mark
        self._state, self._mark = BACKWARD, at

    def begin_step(self, at: float) -> None:
        """An optimiser is about to step, and we to measure."""
        if self._state == BACKWARD:
            self.backward += at - self._mark
        elif self._state == STEP:  # an optimiser that calls another one's step
            self.optimizer += at - self._mark
        else:
            self.compute += at - self._mark  # a model that was not called as a whole: no more is known
        self._state, self._mark = MEASURING, at

    def measured(self, at: float) -> None:
        self.measure += at - self._mark
        self._state, self._mark = STEP, at

    def end_step(self) -> None:
        at = now()
        if self._state == BACKWARD:  # a closure went forward and backward inside the step
            self.backward += at - self._mark
        else:
            self.optimizer += at - self._mark
        self._state, self._mark = BETWEEN, at

    def parts(self, measure: float) -> dict[str, float]:
        """Seconds by part, without those that took none. `measure`: what measuring took, in the steps and around."""
        found = {
            "data": self.data,
            "forward": self.forward,
            "backward": self.backward,
            "optimizer": self.optimizer,
            "compute": self.compute,
            "measure": max(measure, self.measure),
            "wait": self.wait,
        }
        return {name: seconds for name, seconds in found.items() if seconds > 0}


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
