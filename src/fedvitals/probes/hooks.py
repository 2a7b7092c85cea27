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
Measure = Callable[[Optimizer, Owned, int, bool], None]
"""Called with the optimiser, its parameters per layer, the step's number, and whether the step was skipped."""


class StepCounter:
    """Counts the steps on a model's parameters, for those who measure nothing at them: one hook, and quick."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.steps = 0
        self._ids = {id(p) for p in parameters}
        self._mine: dict[int, tuple[Optimizer, bool]] = {}
        self._handle = register_optimizer_step_pre_hook(self._before_step)

    def remove(self) -> None:
        self._handle.remove()
        self._mine.clear()

    def _before_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        known = self._mine.get(id(optimizer))
        if known is None:
            own = any(id(p) in self._ids for group in optimizer.param_groups for p in group["params"])
            known = self._mine[id(optimizer)] = (optimizer, own)
        self.steps += known[1]


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
        self._known: dict[int, tuple[Optimizer, Owned | None]] = {}
        self._steps: dict[int, int] = {}
        self._handles: list[Any] = [register_optimizer_step_pre_hook(self._meet)]
        self._forget_scaler = watch_scalers(self)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._forget_scaler()
        self._handles.clear()
        self._known.clear()

    def _meet(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        """First sight of an optimiser: if it acts on our parameters, hook it.

        Hooks of all optimisers run before an optimiser's own ones, among which the user's may clip. So the measuring
        hook is added to the optimiser itself, last; torch walks the hooks lazily and reaches it in this very step.
        """
        key = id(optimizer)
        if key in self._known:
            return
        acted_on = {id(p) for group in optimizer.param_groups for p in group["params"]} & self._ids
        if not acted_on:
            self._known[key] = (optimizer, None)
            return
        self._known[key] = (optimizer, [p if id(p) in acted_on else None for p in self._parameters])
        self._steps[key] = 0
        self._handles.append(optimizer.register_step_pre_hook(self._before_step))

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            return self._count(optimizer)

        def measured_closure() -> Any:
            loss = closure()
            self._count(optimizer)
            return loss

        if len(args) > 1:
            return (args[0], measured_closure, *args[2:]), kwargs
        return args, {**kwargs, "closure": measured_closure}

    def _count(self, optimizer: Optimizer, skipped: bool = False) -> None:
        key = id(optimizer)
        owned = self._known[key][1]
        if owned is not None:
            step = self._steps[key]
            self._steps[key] = step + 1
            self._measure(optimizer, owned, step, skipped)

    def steps_of(self, optimizer: Optimizer) -> int:
        return self._steps.get(id(optimizer), 0)

    def scaler_unscaled(self) -> None:
        """After `GradScaler.unscale_`: the gradients are the true ones now, and not yet clipped."""
        if self._unscaled is not None:
            self._unscaled()

    def scaler_stepped(self, optimizer: Optimizer, steps_before: int) -> None:
        """After `GradScaler.step`: if the optimiser was not reached, the step was skipped; its gradients still stand."""
        self._meet(optimizer, (), {})
        if self._known[id(optimizer)][1] is not None and self.steps_of(optimizer) == steps_before:
            self._count(optimizer, skipped=True)


_scaler_lock = threading.Lock()


def watch_scalers(hooks: StepHooks) -> Callable[[], None]:
    """Tell `hooks` after each `step` and `unscale_` of any GradScaler; returns the function that ends it.

    GradScaler has no hooks of its own. Its two methods are replaced while any scope is open and put back after the
    last: the list of watchers lives on the replacement, so scopes on several threads may close in any order.
    """
    scaler: Any = torch.amp.GradScaler
    with _scaler_lock:
        if not hasattr(scaler.step, "watchers"):
            watching: list[StepHooks] = []
            scaler.step = _watched_step(scaler.step, watching)
            scaler.unscale_ = _watched_unscale(scaler.unscale_, watching)
        watchers: list[StepHooks] = scaler.step.watchers
        watchers.append(hooks)

    def forget() -> None:
        with _scaler_lock:
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
            hooks.scaler_unscaled()

    unscale_.original = original  # type: ignore[attr-defined]
    return unscale_
