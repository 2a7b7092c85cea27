# SPDX-License-Identifier: Apache-2.0
"""The gradient norm before the user's clipping, at no cost to users who do not clip.

A gradient that was changed in place has a raised version counter. That suggests clipping, although gradient
accumulation raises it too. On suspicion a hook is registered that measures all gradients at the end of the backward
pass; if they differ at the optimiser's step, it was clipping, and the hook stays; otherwise it is removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedvitals.kernels import sums
from fedvitals.stats import SUM_SQUARES, Array


class ClipWatch:
    """Detects gradient clipping, and measures the norm before it."""

    def __init__(self, parameters: Sequence[Tensor], *, confirmed: bool = False) -> None:
        self.confirmed = confirmed  # clipping was seen; carried over between scopes, so that no step is missed
        self.norms: list[Tensor | Array] = []  # before clipping, of each step that was clipped; possibly on a device
        self._parameters = parameters
        self._cleared = False
        self._handle: Any = None
        self._reference: tuple[list[int], Any] | None = None
        if confirmed:
            self._set_hook(next((p for p in parameters if p.requires_grad), None))

    def before_step(self, owned: Sequence[Tensor | None]) -> None:
        """Store the L2 norm that this step's gradient had before clipping, if it was clipped and measured then."""
        if self._reference is None:
            # A confirmed watcher without a reference is attached to a parameter that no backward pass reaches.
            if not self._cleared and (self._handle is None or self.confirmed):
                self._suspect(owned)
            return
        versions = self._versions(owned)
        before, unclipped_sums = self._reference
        changed = [i for i, (old, new) in enumerate(zip(before, versions, strict=True)) if new > old >= 0]
        if not changed:
            if not self.confirmed:
                self.remove()
                self._cleared = True
            return
        self.confirmed = True
        squares = unclipped_sums[:, SUM_SQUARES]
        if -1 in versions:  # an optimiser for some of the layers
            squares = squares[[i for i, version in enumerate(versions) if version >= 0]]
        self.norms.append(squares.sum() ** 0.5)

    def _suspect(self, owned: Sequence[Tensor | None]) -> None:
        """Check the version of a single gradient, since this runs at every step even without clipping."""
        for p in owned:
            if p is not None and (gradient := p.grad) is not None:
                if gradient._version > 0:  # noqa: SLF001 - what autograd itself checks
                    self._set_hook(p)
                return

    def look(self) -> None:
        """Record the current gradients as the unclipped ones: after a backward pass, after unscaling."""
        if self._handle is not None:
            self._reference = (self._versions(self._parameters), sums([p.grad for p in self._parameters]))

    def remove(self) -> None:
        """Remove the hook."""
        if self._handle is not None:
            self._handle.remove()
        self._handle = self._reference = None

    def _set_hook(self, parameter: Tensor | None) -> None:
        if parameter is not None:
            self.remove()
            self._handle = parameter.register_post_accumulate_grad_hook(self._at_end_of_backward)

    def _at_end_of_backward(self, _parameter: Tensor) -> None:
        # A gradient hook runs in the middle of the backward pass; the engine calls this once all have run. What is
        # queued from there comes last, after DDP has averaged the gradients of all processes.
        queue = torch.autograd.Variable._execution_engine.queue_callback  # noqa: SLF001
        queue(lambda: queue(self.look))

    @staticmethod
    def _versions(owned: Sequence[Tensor | None]) -> list[int]:
        return [-1 if p is None or p.grad is None else p.grad._version for p in owned]  # noqa: SLF001
