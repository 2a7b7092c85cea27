# SPDX-License-Identifier: Apache-2.0
"""What a client's training spends its time on: loading data, forward, backward, optimiser; and our own measuring.

The total is known to the microsecond, and so is the time in DataLoaders. How the rest divides is sampled at the first
three steps and each seventeenth, by their median: hooks at every step took 1 % of a small model's training, and a step
in which the machine did something else must not count seventeenfold. With up to three steps nothing is estimated. Where
even that would cost over a sixth of a percent, clients take turns, and a round that was not sampled is divided like the
client's last sampled one.

Between two steps lies the loading of data. If a DataLoader is used, its own time is known, and the rest of the gap is
left unaccounted for, since it is whatever else the user's loop does. If none is used, the gap counts as loading. Work
on a GPU continues after its call has returned: there the parts measure how long the host was kept waiting, and the
total is right, but not its division.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch.utils.data import dataloader

from fedvitals.model_hooks import Hook, can_be_hooked
from fedvitals.resources.turns import turn as _turn

now = time.perf_counter

TICKS = 2**20  # in a second: times that are multiples of a tick are half as long on the wire
ALLOWED = 1 / 600  # share of the training's time that sampling may take
# Seconds per client and per sampled step, measured on the steps of a small CNN
LOOKING, LOOKING_AT_A_STEP = 120e-6, 8e-6
LONGEST_TURN, CLIENTS = 20, 100_000
FIRST, EVERY = 3, 17  # the sampled steps; a prime, so that each of several optimisers has its turn

# What a client is doing; the activity that ends next is counted there.
START, BETWEEN, FORWARD, BACKWARD, MEASURING, STEP = range(6)
GAP, WAITED, WENT_FORWARD, WENT_BACKWARD, COMPUTED, OPTIMIZED, SAMPLES = range(7)  # of one step


class StepClock:
    """The clock of one client's training: `begin_step` and `measured` before an optimiser's step, if it is `due`."""

    def __init__(self) -> None:
        self._state = START  # until the first batch: creating optimisers and loaders, which is neither
        self._row, self._rows = [0.0] * 7, list[list[float]]()
        self._looking = True  # whether the next step is sampled
        self._count, self._wakes = 0, 1  # steps so far, and the next one to be sampled
        self._nested = self._inner = self.batch = self.steps = 0
        self._set_up = self._whole = self._loaded = self._after = self._rest = self._inside = 0.0
        self._hooks: list[Any] = []
        self._posts: dict[int, Any] = {}  # by optimiser
        self._forget: Callable[[], None] | None = None
        self._model: Any = None
        self.error: Exception | None = None

    def start(self, model: Any) -> None:
        """Start the clock, as training begins."""
        self._forget = watch_loaders()
        self._model = model if can_be_hooked(model) else None
        self._thread = threading.get_ident()
        self._hook()
        turn = _turn
        self._began = self._mark = turn.mark = now()
        self._loading_before = self._loading = turn.loading
        self._loaders_before = turn.loaders
        turn.clock = self

    def due(self) -> bool:
        """Whether the step that begins now, or the next, is sampled."""
        if self._posts and not self._looking:  # not in the hook itself, while torch iterates over the hooks
            self._release()
        self._count += 1
        return self._looking or self._count == self._wakes

    def begin_step(self, at: float) -> None:
        """Note that an optimiser is about to step, and our measuring begins."""
        if self._state == STEP:  # an optimiser that calls another optimiser's step
            self._row[OPTIMIZED] += at - self._mark
            self._nested += 1
            self._inner += 1
        elif self._looking:
            self._row[WENT_BACKWARD if self._state == BACKWARD else COMPUTED] += self._since(at)
            self._unhook()
        self._state, self._mark = MEASURING, at

    def measured(self, optimizer: Any, skipped: Any) -> None:
        if not self._nested:
            after = self._count
            self._wakes = after if after < FIRST else -(-after // EVERY) * EVERY
            if after == self._wakes:
                self._hook()
                self._wakes = after
        if id(optimizer) not in self._posts:
            self._posts[id(optimizer)] = optimizer.register_step_post_hook(Hook(self._end_step, self._fail))
        self._state, self._mark = STEP, now()
        if skipped is True:  # by a GradScaler: the optimiser's step is not reached
            self._end_step()

    def _end_step(self, *_: Any) -> None:
        at, turn = now(), _turn
        if self._state not in (STEP, BACKWARD):  # of an optimiser that stepped outside of a sampled step
            return
        # A closure may have run forward and backward passes inside the step.
        self._row[WENT_BACKWARD if self._state == BACKWARD else OPTIMIZED] += at - self._mark
        if self._nested:
            self._nested -= 1
            self._mark = at
            return
        if self._looking:
            self._rows.append(self._row)
        self._row = [0.0] * 7
        self._looking = bool(self._hooks) or (self._model is None and self._count < FIRST)
        self._state, self._mark, self._loading = BETWEEN, at, turn.loading
        turn.clock, turn.mark = self, at

    def stop(self, steps: int, last: float, measuring: float, inside: float = 0.0) -> None:
        """Stop the clock: `steps` were made, the last of which began at `last`; measuring them took `measuring`
        seconds, `inside` of which during forward and backward passes.
        """
        turn = _turn
        at = now()
        if turn.clock is not self and steps:
            self._after = max(0.0, turn.mark - last)  # other clients have continued, and were closed, since
        self.steps = steps
        if threading.get_ident() == self._thread and turn.loaders != self._loaders_before:
            self._loaded = turn.loading - self._loading_before
        self._inside = inside
        self._whole = max(0.0, last - self._began - self._set_up - measuring) if steps else 0.0
        self._rest = max(0.0, at - last - self._after)

    def remove(self) -> None:
        """Take the clock's hooks off the model."""
        self._unhook()
        self._release()
        self._model = None
        if self._forget is not None:
            self._forget()
        if _turn.clock is self:
            _turn.clock = None

    def _since(self, at: float) -> float:
        """Return the time since the last mark, without other clients' turns on this thread, and without loading."""
        turn = _turn
        gap = at - self._mark
        if turn.clock is not self:
            others = min(max(0.0, turn.mark - self._mark), gap)
            self._row[WAITED] += others
            gap -= others
            turn.clock = self
        loaded = min(max(0.0, turn.loading - self._loading), gap)  # on another thread than before, it is unknown
        self._loading = turn.loading
        return gap - loaded

    # -- in sampled steps ----------------------------------------------------------------------------------------------

    def _hook(self) -> None:
        if self._model is not None and not self._hooks:
            self._hooks += [
                self._model.register_forward_pre_hook(Hook(self._forward_begins, self._fail), with_kwargs=True),
                self._model.register_forward_hook(Hook(self._forward_ends, self._fail)),
            ]

    def _unhook(self) -> None:
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()

    def _release(self) -> None:
        for handle in self._posts.values():
            handle.remove()
        self._posts.clear()

    def _fail(self, error: Exception) -> None:
        """Stop sampling, because the user's model behaves in an unexpected way, and report the error at the end."""
        self.error = error
        self._model = None
        self._looking, self._wakes = False, -1

    def _forward_begins(self, _module: Any, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        if self._state == MEASURING:  # one of our probes is running the model
            return
        at = now()
        gap = self._since(at)
        if self._state == START:
            self._set_up = gap
        elif self._state == BETWEEN:
            self._row[GAP] += gap
        elif self._state == STEP:
            self._row[OPTIMIZED] += gap
        else:
            self._row[WENT_BACKWARD] += gap
        first = next(iter((*inputs[:1], *named.values())), None)  # a batch may be passed by name, as in Hugging Face's
        if torch.is_grad_enabled() and isinstance(first, torch.Tensor) and first.dim():
            self.batch = int(first.shape[0])
            self._row[SAMPLES] += self.batch
        self._state, self._mark = FORWARD, at

    def _forward_ends(self, *_: Any) -> None:
        if self._state != MEASURING:
            at = now()
            self._row[WENT_FORWARD] += at - self._mark
            self._state, self._mark = BACKWARD, at

    # -- at the end ---------------------------------------------------------------------------------------------------

    @property
    def samples(self) -> int:
        """The number of samples that went through the model; exact if every step was sampled."""
        return round(self._over_all()[SAMPLES]) if self._rows else 0

    def parts(self, measure: float) -> dict[str, float]:
        """Return seconds by part, without those that took none. `measure`: all time spent on measuring."""
        row = self._over_all()
        attributes = {
            "data": self._loaded + (row[GAP] if not self._loaded else 0.0),
            "forward": row[WENT_FORWARD],
            "backward": row[WENT_BACKWARD],
            "optimizer": row[OPTIMIZED],
            "compute": row[COMPUTED],
            "measure": measure,
            "wait": row[WAITED] + self._after,
        }
        return {name: _ticks(seconds) for name, seconds in attributes.items() if seconds * TICKS >= 1}

    def _over_all(self) -> list[float]:
        """Return all steps' seconds, divided as in the sampled ones."""
        rows = self._rows
        if not rows:
            return [0.0] * 4 + [self._whole] + [0.0] * 2
        steps = self._count * len(rows) / (len(rows) + self._inner)  # some of which were inside of others
        if len(rows) >= steps:
            row = [sum(column) for column in zip(*rows, strict=True)]
            in_forward = min(self._inside, row[WENT_FORWARD])
            row[WENT_FORWARD] -= in_forward
            row[WENT_BACKWARD] = max(0.0, row[WENT_BACKWARD] - self._inside + in_forward)
            return row
        usual = rows[1:] or rows  # the first step sets up what the others reuse
        row = [median(column) * steps for column in zip(*usual, strict=True)]
        # The total ended when the last step began: its optimiser comes on top.
        whole = max(0.0, self._whole - self._loaded + min(row[OPTIMIZED] / steps, self._rest))
        spent = sum(row[:SAMPLES])
        return [*(seconds * whole / spent if spent else 0.0 for seconds in row[:SAMPLES]), row[SAMPLES]]


@dataclass(slots=True)
class _Known:
    """A client's state: in which of its rounds it is sampled, and the last sample."""

    place: int  # among the clients, so that not all are sampled in the same round
    rounds: int = 0
    every: int = 1
    shares: dict[str, float] = field(default_factory=dict)  # of a client's time, without measuring
    samples: dict[str, int] = field(default_factory=dict)


class Clocks:
    """Decides whose steps are sampled over a run."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}

    def begin(self, node: str) -> StepClock | None:
        """Return a clock for this client-round; None if it is not its turn."""
        known = self._known.get(node)
        if known is None:
            if len(self._known) >= CLIENTS:
                self._known.clear()
            known = self._known[node] = _Known(len(self._known))
        known.rounds += 1
        return StepClock() if known.rounds == 1 or (known.rounds + known.place) % known.every == 0 else None

    def end(self, node: str, clock: StepClock | None, seconds: float, measure: float) -> dict[str, Any]:
        """Return attributes for the client's Span: parts, and samples and batch if they are known."""
        known = self._known.get(node)
        if known is None:  # dropped in between because of too many others
            return {}
        training = max(seconds - measure, 0.0)
        if clock is not None:
            parts = clock.parts(measure)
            cost = LOOKING + LOOKING_AT_A_STEP * clock.steps
            known.every = min(LONGEST_TURN, max(1, math.ceil(cost / max(ALLOWED * training, 1e-9))))
            known.shares = {name: part / training for name, part in parts.items() if name != "measure" and training}
            known.samples = {"samples": clock.samples, "batch": clock.batch} if clock.samples else {}
        else:
            parts = {name: _ticks(share * training) for name, share in known.shares.items()}
            parts["measure"] = _ticks(measure)
        others = sum(part for name, part in parts.items() if name != "measure")  # two clocks differ by microseconds
        parts["measure"] = min(parts["measure"], _ticks(max(0.0, seconds - others)))
        return {"parts": parts, "folded": True, **known.samples}


def _ticks(seconds: float) -> float:
    return int(seconds * TICKS) / TICKS


_lock = threading.Lock()
_watching = [0]
_replaced: list[tuple[Any, Any]] = []  # our method, and the one that it replaces
_Iterator: Any = dataloader._BaseDataLoaderIter  # noqa: SLF001 - torch offers no public way


def watch_loaders() -> Callable[[], None]:
    """Time every DataLoader from now on. Returns the function that ends it; the last one restores the method."""
    with _lock:
        if not _watching[0]:
            _replaced.append((_timed_next(_Iterator.__next__), _Iterator.__next__))
            _Iterator.__next__ = _replaced[-1][0]
        _watching[0] += 1
    ended: list[bool] = []

    def forget() -> None:
        with _lock:
            if ended:
                return
            ended.append(True)
            _watching[0] -= 1
            if not _watching[0]:
                ours, original = _replaced.pop()
                if _Iterator.__next__ is ours:  # otherwise another replacement calls ours, which stays in place
                    _Iterator.__next__ = original

    return forget


def _timed_next(original: Any) -> Any:
    def __next__(self: Any) -> Any:  # noqa: N807 - it replaces that method
        turn = _turn
        began = now()
        turn.inside += 1
        try:
            return original(self)
        finally:
            turn.inside -= 1
            if not turn.inside:  # a loader that reads from another one also waits for it
                turn.loading += now() - began
                turn.loaders += 1

    return __next__
