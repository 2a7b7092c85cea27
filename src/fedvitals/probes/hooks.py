# SPDX-License-Identifier: Apache-2.0
"""Being called before every optimiser step on a model's parameters, whoever made the optimiser, without a trace after.

The hook sees what the optimiser is about to use: after clipping, after unscaling. Three cases need more than a hook:

- a closure (LBFGS): the gradients exist only after the closure ran, so the closure is wrapped;
- `GradScaler`: a step whose gradients are not finite never reaches the optimiser, so the scaler's `step` is watched
  while a scope is open, and the skipped step is reported;
- clipping: the unclipped gradient is gone by the time the hook runs. A gradient that was changed in place has a raised
  version counter; once that is seen, one more hook looks at the gradients at the end of the backward pass.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

Owned = Sequence[Tensor | None]
Measure = Callable[[Optimizer, Owned, int, Any], None]
"""Called with the optimiser, its parameters per layer, the step's number, and whether the step was skipped.

The last is a bool, or a tensor of one where only the device knows."""


class StepCounter:
    """Counts the steps on a model's parameters, for those who measure nothing at them: one hook, and quick."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.steps = 0
        self._ids = {id(p) for p in parameters}
        self._mine: dict[int, tuple[Optimizer, int]] = {}  # steps so far; negative: acts on other parameters
        self._forget = tell_of_steps(self)

    def remove(self) -> None:
        self._forget()
        self._mine.clear()

    def meet(self, optimizer: Optimizer) -> None:
        known = self._mine.get(id(optimizer))
        if known is None:
            own = any(id(p) in self._ids for group in optimizer.param_groups for p in group["params"])
            known = (optimizer, 0 if own else -1)
        steps = known[1] + 1 if known[1] >= 0 else -1
        self._mine[id(optimizer)] = (optimizer, steps)
        self.steps = max(self.steps, steps)  # two optimisers of one model step together


class StepHooks:
    """Hooks for the length of one scope. `measure` is called on the thread that trains."""

    def __init__(
        self, parameters: Sequence[Tensor], measure: Measure, unscaled: Callable[[], None] | None = None
    ) -> None:
        self._parameters = parameters
        self._ids = {id(p) for p in parameters}
        self._measure = measure
        self._unscaled = unscaled
        # Strong references: a freed optimiser's id could come back as another one's.
        self._known: dict[int, tuple[Optimizer, int, Owned | None]] = {}
        self._steps: dict[int, int] = {}
        self._handles: list[Any] = []
        self._forget = (tell_of_steps(self), tell_of_scalers(self))

    def remove(self) -> None:
        for forget in self._forget:
            forget()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._known.clear()

    def meet(self, optimizer: Optimizer) -> None:
        """First sight of an optimiser, or of new parameters in it: if it acts on ours, hook it.

        Hooks of all optimisers run before an optimiser's own ones, among which the user's may clip. So the measuring
        hook is added to the optimiser itself, last; torch walks the hooks lazily and reaches it in this very step.
        """
        key, groups = id(optimizer), len(optimizer.param_groups)
        known = self._known.get(key)
        if known is not None and known[1] == groups:
            return
        acted_on = {id(p) for group in optimizer.param_groups for p in group["params"]} & self._ids
        if not acted_on:
            self._known[key] = (optimizer, groups, None)
            return
        self._known[key] = (optimizer, groups, [p if id(p) in acted_on else None for p in self._parameters])
        if key not in self._steps:
            self._steps[key] = 0
            self._handles.append(optimizer.register_step_pre_hook(self._before_step))

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            # A fused optimiser is reached, told by the scaler to change nothing. Not read here: it may lie on a GPU.
            found_inf = getattr(optimizer, "found_inf", None)
            return self._count(optimizer, False if found_inf is None else found_inf > 0)

        def measured_closure() -> Any:
            loss = closure()
            self._count(optimizer)
            return loss

        if len(args) > 1:
            return (args[0], measured_closure, *args[2:]), kwargs
        return args, {**kwargs, "closure": measured_closure}

    def _count(self, optimizer: Optimizer, skipped: bool | Tensor = False) -> None:
        key = id(optimizer)
        owned = self._known[key][2]
        if owned is not None:
            step = self._steps[key]
            self._steps[key] = step + 1
            self._measure(optimizer, owned, step, skipped)

    def steps_of(self, optimizer: Optimizer) -> int:
        return self._steps.get(id(optimizer), 0)

    def scaler_unscaled(self, optimizer: Optimizer) -> None:
        """After `GradScaler.unscale_`: the gradients are the true ones now, and not yet clipped."""
        self.meet(optimizer)
        if self._unscaled is not None and self._known[id(optimizer)][2] is not None:
            self._unscaled()

    def scaler_stepped(self, optimizer: Optimizer, steps_before: int) -> None:
        """After `GradScaler.step`: an optimiser that was not reached skipped its step; its gradients still stand."""
        self.meet(optimizer)
        if self._known[id(optimizer)][2] is not None and self.steps_of(optimizer) == steps_before:
            self._count(optimizer, skipped=True)


_lock = threading.Lock()
_met: list[StepHooks | StepCounter] = []  # who is told of optimiser steps
_handle: list[Any] = []  # of the one hook that tells them


def tell_of_steps(hooks: StepHooks | StepCounter) -> Callable[[], None]:
    """Call `hooks.meet` before each step of any optimiser; returns the function that ends it.

    torch has one table of such hooks for the process, and fails in the user's own `step` if it changes while another
    thread walks it. So there is one hook in it for all scopes, from the first that opens to the last that closes.
    """
    with _lock:
        if not _met:
            _handle.append(register_optimizer_step_pre_hook(_meet_all))
        _met.append(hooks)

    def forget() -> None:
        with _lock:
            if hooks in _met:
                _met.remove(hooks)
                if not _met:
                    _handle.pop().remove()

    return forget


def _meet_all(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    for hooks in tuple(_met):
        hooks.meet(optimizer)


def tell_of_scalers(hooks: StepHooks) -> Callable[[], None]:
    """Tell `hooks` after each `step` and `unscale_` of any GradScaler; returns the function that ends it.

    GradScaler has no hooks of its own. Its two methods are replaced while any scope is open and put back after the
    last: the list of watchers lives on the replacement, so scopes on several threads may close in any order.
    """
    scaler: Any = torch.amp.GradScaler
    with _lock:
        if not hasattr(scaler.step, "watchers"):
            watching: list[StepHooks] = []
            scaler.step = _watched_step(scaler.step, watching)
            scaler.unscale_ = _watched_unscale(scaler.unscale_, watching)
        watchers: list[StepHooks] = scaler.step.watchers
        watchers.append(hooks)

    def forget() -> None:
        with _lock:
            if hooks in watchers:
                watchers.remove(hooks)
            if not watchers and getattr(scaler.step, "watchers", None) is watchers:
                scaler.step, scaler.unscale_ = scaler.step.original, scaler.unscale_.original

    return forget


def _watched_step(original: Any, watchers: list[StepHooks]) -> Any:
    @functools.wraps(original)
    def step(self: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        before = [(hooks, hooks.steps_of(optimizer)) for hooks in tuple(watchers)]
        result = original(self, optimizer, *args, **kwargs)
        for hooks, steps in before:
            hooks.scaler_stepped(optimizer, steps)
        return result

    step.watchers, step.original = watchers, original  # type: ignore[attr-defined]
    return step


def _watched_unscale(original: Any, watchers: list[StepHooks]) -> Any:
    @functools.wraps(original)
    def unscale_(self: Any, optimizer: Optimizer) -> None:
        original(self, optimizer)
        for hooks in tuple(watchers):
            hooks.scaler_unscaled(optimizer)

    unscale_.original = original  # type: ignore[attr-defined]
    return unscale_
