# SPDX-License-Identifier: Apache-2.0
"""Hooks before every optimiser step on a model's parameters, for any optimiser; removed without a trace.

The hook sees the gradients that the optimiser will use: after clipping, after unscaling. Three cases need more:

- a closure (LBFGS): the gradients exist only after the closure ran, so the closure is wrapped;
- `GradScaler`: a step whose gradients are not finite never reaches the optimiser, so the scaler's `step` is wrapped
  while a scope is open, and the skipped step is reported;
- clipping: the unclipped gradient is gone by the time the hook runs. A gradient that was changed in place has a raised
  version counter; once that is seen, one more hook measures the gradients at the end of the backward pass.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

Owned = Sequence[Tensor | None]
Measure = Callable[[Optimizer, Owned, int, Any], None]
"""Called with the optimiser, its parameters per layer, the step's number, and whether the step was skipped.

It is a bool, or a tensor if only the device knows.
"""


def _measure_nothing(_optimizer: Optimizer, _owned: Owned, _step: int, _skipped: Any) -> None:
    """Do nothing, for hooks that were removed while another thread was calling them."""


def _nothing(_optimizer: Optimizer) -> None:
    """Do nothing before the first step."""


class StepCounter:
    """Counts the optimiser steps on a model's parameters without measuring; `first` is called before the first one."""

    def __init__(self, parameters: Sequence[Tensor], first: Callable[[Optimizer], None] = _nothing) -> None:
        self.steps, self._first = 0, first
        self._ids = {id(p) for p in parameters}
        self._mine: dict[int, tuple[Optimizer, int]] = {}  # steps so far; negative: it acts on other parameters
        self._forget = register_step_hooks(self)

    def remove(self) -> None:
        self._forget()
        self._mine.clear()
        self._first = _nothing  # a cycle would keep the user's model until it is garbage-collected

    def on_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        known = self._mine.get(id(optimizer))
        if known is None:
            own = any(id(p) in self._ids for group in optimizer.param_groups for p in group["params"])
            known = (optimizer, 0 if own else -1)
        steps = known[1] + 1 if known[1] >= 0 else -1
        if steps == 1 and not self.steps:
            self._first(optimizer)
        self._mine[id(optimizer)] = (optimizer, steps)
        self.steps = max(self.steps, steps)  # two optimisers of one model step together

    def optimizers(self) -> list[Optimizer]:
        """Return the optimisers that stepped on these parameters."""
        return [optimizer for optimizer, steps in self._mine.values() if steps >= 0]


@dataclass(slots=True)
class _KnownOptimizer:
    """An optimiser that stepped while a scope was open."""

    optimizer: Optimizer  # a strong reference, since the id of a freed optimiser could be reused
    groups: int  # number of parameter groups, when last checked
    owned: Owned | None  # per layer the parameter that it acts on; None: it acts on other models
    steps: int = 0
    late: bool = False  # measured by a hook of its own, after the user's


class StepHooks:
    """Hooks for the duration of one scope. `measure` is called on the training thread."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        measure: Measure,
        unscaled: Callable[[], None] | None = None,
    ) -> None:
        self._parameters = parameters
        self._ids = {id(p) for p in parameters}
        self._measure = measure
        self._unscaled = unscaled
        self._known: dict[int, _KnownOptimizer] = {}
        self._handles: list[Any] = []
        self._forget: tuple[Callable[[], None], ...] = (register_step_hooks(self), register_scaler_hooks(self))

    def remove(self) -> None:
        for forget in self._forget:
            forget()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._known.clear()
        # A cycle between the observer and these hooks would keep the user's model until it is garbage-collected.
        self._forget, self._measure, self._unscaled = (), _measure_nothing, None

    def on_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Measure before a step of any optimiser, if it acts on our parameters.

        Hooks for all optimisers, like this one, run before an optimiser's own, among which the user's may clip. Where
        an optimiser has any, ours is added to it, last; torch iterates the hooks lazily and reaches it in this same
        step.
        """
        known = self._known.get(id(optimizer))
        if known is None or known.groups != len(optimizer.param_groups):
            known = self._look_at(optimizer)
        if known.owned is None or known.late:
            return None
        if optimizer._optimizer_step_pre_hooks:  # noqa: SLF001 - torch tells it nowhere else
            known.late = True
            self._handles.append(optimizer.register_step_pre_hook(self._before_step))
            return None
        if len(args) > 1 or kwargs:
            return self._before_step(optimizer, args, kwargs)
        # The usual case, repeated with fewer calls, because this runs at every step of every model.
        found_inf = getattr(optimizer, "found_inf", None)
        known.steps += 1
        self._measure(optimizer, known.owned, known.steps - 1, False if found_inf is None else found_inf > 0)
        return None

    def optimizers(self) -> list[Optimizer]:
        """Return the optimisers that stepped on these parameters."""
        return [known.optimizer for known in self._known.values() if known.owned is not None]

    def _look_at(self, optimizer: Optimizer) -> _KnownOptimizer:
        """Return what is known about an optimiser, at its first step here or after it was given new parameters."""
        acted_on = {id(p) for group in optimizer.param_groups for p in group["params"]} & self._ids
        owned = [p if id(p) in acted_on else None for p in self._parameters] if acted_on else None
        known = self._known.setdefault(id(optimizer), _KnownOptimizer(optimizer, 0, None))
        known.groups, known.owned = len(optimizer.param_groups), owned
        return known

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            # A fused optimiser is called but told by the scaler to change nothing. Not read here: the flag may be on a
            # GPU.
            found_inf = getattr(optimizer, "found_inf", None)
            return self._count(self._known[id(optimizer)], False if found_inf is None else found_inf > 0)

        def measured_closure() -> Any:
            loss = closure()
            self._count(self._known[id(optimizer)])
            return loss

        if len(args) > 1:
            return (args[0], measured_closure, *args[2:]), kwargs
        return args, {**kwargs, "closure": measured_closure}

    def _count(self, known: _KnownOptimizer, skipped: bool | Tensor = False) -> None:
        if known.owned is not None:
            known.steps += 1
            self._measure(known.optimizer, known.owned, known.steps - 1, skipped)

    def steps_of(self, optimizer: Optimizer) -> int:
        known = self._known.get(id(optimizer))
        return 0 if known is None else known.steps

    def scaler_unscaled(self, optimizer: Optimizer) -> None:
        """Handle `GradScaler.unscale_`: the gradients are now the true ones, and not yet clipped."""
        known = self._known.get(id(optimizer)) or self._look_at(optimizer)
        if self._unscaled is not None and known.owned is not None:
            self._unscaled()

    def scaler_stepped(self, optimizer: Optimizer, steps_before: int) -> None:
        """Handle `GradScaler.step`: an optimiser that was not called skipped its step; its gradients still exist."""
        known = self._known.get(id(optimizer)) or self._look_at(optimizer)
        if known.owned is not None and known.steps == steps_before:
            self._count(known, skipped=True)


_lock = threading.Lock()
_registered: list[StepHooks | StepCounter] = []  # receivers of optimiser steps
_handle: list[Any] = []  # of the one hook that notifies them


def register_step_hooks(hooks: StepHooks | StepCounter) -> Callable[[], None]:
    """Call `hooks.on_step` before each step of any optimiser; returns the function that ends it.

    torch has one table of such hooks for the process, and fails in the user's own `step` if it changes while another
    thread iterates over it. So there is one hook in it for all scopes, from the first that opens to the last that
    closes.
    """
    with _lock:
        if not _registered:
            _handle.append(register_optimizer_step_pre_hook(_call_all))
        _registered.append(hooks)

    def forget() -> None:
        with _lock:
            if hooks in _registered:
                _registered.remove(hooks)
                if not _registered:
                    _handle.pop().remove()

    return forget


def _call_all(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    changed = None
    for hooks in tuple(_registered):
        result = hooks.on_step(optimizer, args, kwargs)
        if result is not None:  # a wrapped closure, which the next scope may wrap again
            changed = args, kwargs = result
    return changed


def register_scaler_hooks(hooks: StepHooks) -> Callable[[], None]:
    """Notify `hooks` after each `step` and `unscale_` of any GradScaler; returns the function that ends it.

    GradScaler has no hooks of its own. Its two methods are replaced while any scope is open and restored after the
    last: the list of watchers is stored on the replacement, so scopes on several threads may close in any order.
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
