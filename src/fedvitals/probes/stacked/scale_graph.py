# SPDX-License-Identifier: Apache-2.0
"""Gradient scale of stacked clients as a captured CUDA graph, for hosts that measure it at every step.

Launched individually, its eighty small operations cost the host more than the device: twenty times a round, that is
longer than the training. Captured once for each shape, they are launched together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from fedvitals.kernels.cuda.graphs import captured
from fedvitals.probes.stacked.model import StackModel
from fedvitals.probes.stacked.scale import measure_scale, scale_samples
from fedvitals.probes.stacked.signs import BufferedSigns
from fedvitals.probes.view import evaluation_mode

_WARM_UPS = 3
_MOST = 4  # graphs, each of which keeps memory for all its activations; other shapes are computed directly


class ScaleGraph:
    """Computes `scale_samples` faster from the second call of a shape on. Kept across the rounds of a run.

    `failures` says why a shape could not be captured; it is then measured directly, as is everything on a CPU.
    """

    def __init__(self) -> None:
        self._recorded: dict[tuple[object, ...], _Recording | None] = {}
        self.failures: list[str] = []

    def __call__(self, model: StackModel, x: Tensor, seeds: Sequence[int], *, exact: bool = False) -> Tensor:
        """Return GSC and sensitivity, [2, clients, samples] in float64, on the device."""
        if not x.is_cuda or not x.is_floating_point():
            return scale_samples(model, x, seeds, exact=exact)
        # A recording keeps its module alive, so that no other can get the same id.
        key = (id(model.module), tuple(model.states.shape), tuple(x.shape), x.dtype, x.device, exact)
        if key not in self._recorded and len(self._recorded) < _MOST:
            self._recorded[key] = self._record(model, x, exact=exact)
        recording = self._recorded.get(key)
        if recording is None:
            return scale_samples(model, x, seeds, exact=exact)
        return recording.replay(model, x, seeds)

    def _record(self, model: StackModel, x: Tensor, *, exact: bool) -> _Recording | None:
        try:
            return _Recording(model, x, exact=exact)
        except (RuntimeError, Warning) as error:  # an operation that waits, or no memory for a separate pool
            self.failures.append(f"{tuple(x.shape)}: {error}")
            return None


class _Recording:
    """One shape's graph, with the buffers for states, samples and signs that it reads."""

    def __init__(self, model: StackModel, x: Tensor, *, exact: bool) -> None:
        self._model, self._x = model.with_states(model.states.detach().clone()), x.detach().clone()
        self._signs = BufferedSigns(x.device)
        self._exact = exact
        self._samples: Tensor
        self._model.together(x.device)  # called in advance, since the driver may not answer during capture
        with evaluation_mode(model.module):
            self._graph = captured(self._measure, [*[self._measure] * _WARM_UPS, self._rehearse], device=x.device)

    def _measure(self) -> None:
        self._signs.rewind()
        self._samples = measure_scale(self._model, self._x, self._signs, exact=self._exact)

    def _rehearse(self) -> None:
        with _waiting_refused():
            self._measure()

    def replay(self, model: StackModel, x: Tensor, seeds: Sequence[int]) -> Tensor:
        self._model.states.copy_(model.states.detach())
        self._x.copy_(x.detach())
        self._signs.fill(seeds)
        self._graph.replay()
        return self._samples.clone()  # the next replay overwrites it


@contextmanager
def _waiting_refused() -> Iterator[None]:
    """Reject operations that synchronise, in a rehearsal: they would break a capture, and torch's allocator with it."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
