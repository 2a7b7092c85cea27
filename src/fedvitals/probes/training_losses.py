# SPDX-License-Identifier: Apache-2.0
"""Training losses by class, from the training's own forward and backward passes: no pass of our own, and no labels.

A forward hook sees the logits, a hook on the way back their gradient, and both together give each sample's label and
loss (see `class_losses`). The table by class counts each sample once, as the received model finds it: the first pass
over the client's data, or all steps where `data` is unknown. `train.loss_last` is of the last quarter of the last pass.

At a step only two small tensors are kept. They are evaluated together when the client's scope closes, or before they
exceed MOST_WAITING numbers. Of an output with more than MOST_NUMBERS, some of the rows are looked at.
"""

from __future__ import annotations

import functools
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fedvitals.catalog import CATALOG
from fedvitals.errors import ConfigError, UnsuitedError
from fedvitals.kernels.cuda.sums import upload
from fedvitals.model_hooks import Hook, can_be_hooked
from fedvitals.probes import samples
from fedvitals.probes.class_losses import ClassSums, ClassTotals, Mask, Places, judge_gradients, last_quota, pass_masks
from fedvitals.probes.differentiate import logits_of
from fedvitals.probes.view import View
from fedvitals.stats import Array

MOST_NUMBERS = 1 << 20  # of one output; of a larger one, rows that are spread evenly
MOST_WAITING = 1 << 20  # of outputs that wait to be evaluated, and as many of their gradients
MOST_AWAITED = 32  # outputs without a backward pass

NOT_MEASURED = "Training losses by class are not measured: "
OTHER_LOSS = (
    "they are defined for the cross-entropy of one label per sample, and the gradient of this model's outputs is of "
    "another loss (soft, mixed or smoothed labels, regression, several labels per sample)."
)
NOT_SEEN = (
    "no forward and backward pass of the model was seen, although it trained. It may be compiled, or called otherwise "
    "than by model(x)."
)


@dataclass(slots=True, eq=False)
class _Output:
    """One forward pass in training: logits [rows, classes], and their gradients once its backward pass has come."""

    logits: Tensor | None
    stride: int  # every so many rows of the output are looked at
    version: int  # of the logits: a counter of changes in place
    first: int  # the number of its first sample, in the order of the training
    samples: int  # in the batch
    gradients: Tensor | None = None

    def places(self) -> Places:
        """Return the numbers of the samples that the rows are of: several rows each, where these are sequences."""
        rows = 0 if self.logits is None else len(self.logits)
        return self.first + np.arange(rows) * self.samples // max(1, rows)


class MeasuredLosses:
    """What was summed over a client's training, on its way to the host. Raises UnsuitedError if it cannot be told."""

    def __init__(self, totals: ClassTotals | None, model: type, reason: str | None) -> None:
        self.model = model
        self.numbers = None if totals is None or reason is not None else totals.numbers
        self._totals, self._reason = totals, reason

    def results(self, numbers: Array | None) -> tuple[dict[str, float], Array | None]:
        """Return the metrics and the matrix of `training.classes`, from `numbers` on the host."""
        if self._reason is not None:
            raise UnsuitedError(NOT_MEASURED + self._reason)
        if self._totals is None or numbers is None:
            return {}, None
        sums = ClassSums(self._totals, numbers)
        if sums.is_odd:
            raise UnsuitedError(NOT_MEASURED + OTHER_LOSS)
        if not sums.samples[0]:
            return {}, None
        own = {name: float(values[0]) for name, values in sums.metrics.items()}
        metrics = {name: number for name, number in own.items() if not (CATALOG[name].rare and math.isnan(number))}
        return metrics, sums.table[0] if self._totals.tabulated else None


class TrainingLosses:
    """Hooks on a client's model from its creation until `stop`; `seconds` is what they took of the training.

    Call `step` at each optimiser step. `failed` is told of errors of ours.
    """

    def __init__(self, view: View, failed: Callable[[Exception], None]) -> None:
        self.seconds = 0.0
        self.batch: int | None = None  # samples in the first forward pass of the training
        self._model, self._failed = type(view.model), failed
        self._reason: str | None = None
        self._total = _pass_length(view.data)  # samples in a pass; None: unknown
        self._quota = 0 if self._total is None else last_quota(self._total)
        self._samples = 0  # of all forward passes so far
        self._awaited: list[_Output] = []  # whose backward pass has not come yet
        self._waiting: deque[_Output] = deque()  # to be evaluated
        self._numbers = 0  # of these
        self._evaluated: deque[tuple[Places, Tensor, Tensor]] = deque()  # that may be of the last pass: losses, counted
        self._totals: ClassTotals | None = None
        self._normalised = False  # whether the outputs are log-probabilities
        self._handle: Any = None
        if can_be_hooked(view.model):
            hook = Hook(self._on_forward, self._broken)
            self._handle = view.model.register_forward_hook(hook, with_kwargs=True)
        else:
            self._reason = "the model is compiled or scripted, and cannot be looked into."

    def step(self) -> None:
        """Let go of outputs whose gradient has not come when an optimiser steps: they belong to no training."""
        for output in self._awaited:
            output.logits = None
            self._samples -= output.samples
        self._awaited.clear()

    def remove(self) -> None:
        """Remove the hooks, and let go of all outputs."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        self.step()
        self._waiting.clear()
        self._evaluated.clear()

    def stop(self, steps: int) -> MeasuredLosses:
        """End it and return what was measured, in part still on its device; `steps` are those of the optimiser."""
        began = time.perf_counter()
        self.step()
        if self._reason is None and steps and self._totals is None:
            self._reason = NOT_SEEN
        if self._reason is None:
            self._evaluate()
            self._add_last()
        measured = MeasuredLosses(self._totals, self._model, self._reason)
        self.remove()
        self.seconds += time.perf_counter() - began
        return measured

    def _broken(self, error: Exception) -> None:
        self._refuse("measuring them failed.")
        self._failed(error)

    def _refuse(self, reason: str) -> None:
        """Measure nothing more in this client-round."""
        self._reason = self._reason or reason
        self.remove()

    # -- at each forward and backward pass ----------------------------------------------------------------------------

    def _on_forward(self, module: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any], output: Any) -> None:
        if not module.training or not torch.is_grad_enabled() or self._reason is not None:
            return
        began = time.perf_counter()
        logits = output if type(output) is Tensor else logits_of(output)
        obstacle = _obstacle(logits)
        if obstacle is not None:
            self._refuse(obstacle)
        elif logits.grad_fn is not None and logits.numel() and not _is_captured(logits):
            batch = _batch_size(logits, arguments, named)
            self.batch = self.batch or batch
            if self._is_wanted(batch):
                self._await_gradient(logits, batch)
            self._samples += batch
        self.seconds += time.perf_counter() - began

    def _is_wanted(self, batch: int) -> bool:
        """Return whether a sample of the next batch belongs to the first pass, or to the end of any."""
        total = self._total
        return total is None or self._samples < total or self._samples % total + batch > total - self._quota

    def _await_gradient(self, logits: Tensor, batch: int) -> None:
        rows, stride = _rows(logits), -(-logits.numel() // MOST_NUMBERS)
        if stride > 1:
            rows = rows[::stride].clone()
        output = _Output(rows, stride, rows._version, self._samples, batch)  # noqa: SLF001 - what autograd itself checks
        self._awaited.append(output)
        if len(self._awaited) > MOST_AWAITED:  # passes without a way back, as in an evaluation
            self._awaited.pop(0).logits = None
        # On the node and not on the tensor: that is quicker, and the same.
        logits.grad_fn.register_prehook(functools.partial(self._on_backward, output, logits.output_nr))  # type: ignore[union-attr]
        self._normalised = self._normalised or type(logits.grad_fn).__name__.startswith("LogSoftmax")

    def _on_backward(self, output: _Output, place: int, gradients: Sequence[Tensor | None]) -> None:
        """Take the gradient of an output, the first time that it comes; runs inside the backward pass."""
        gradient = gradients[place]
        if output.logits is None or output.gradients is not None or gradient is None or self._reason is not None:
            return
        began = time.perf_counter()
        try:
            self._awaited.remove(output)
            self._take(output, output.logits, gradient)
        except Exception as error:  # noqa: BLE001 - nothing of ours may stop the training
            self._broken(error)
        self.seconds += time.perf_counter() - began

    def _take(self, output: _Output, logits: Tensor, gradient: Tensor) -> None:
        if self._totals is None:
            self._totals = ClassTotals(logits.shape[1], logits.device)
        if logits._version != output.version:  # noqa: SLF001
            self._refuse("the model's output is changed in place before the loss.")
        elif logits.shape[1] != self._totals.classes or logits.device != self._totals.numbers.device:
            self._refuse("the model's outputs have differing numbers of classes, or are on several devices.")
        else:
            rows = _rows(gradient)
            output.gradients = rows if output.stride == 1 else rows[:: output.stride].clone()
            self._waiting.append(output)
            self._numbers += logits.numel()
            self._forget_middle()
            if self._numbers >= MOST_WAITING:
                self._evaluate()

    def _forget_middle(self) -> None:
        """Let go of outputs that lie behind the first pass and before the last."""
        total = self._total
        if total is None:
            return
        while self._evaluated and self._evaluated[0][0][-1] < self._samples - total:
            self._evaluated.popleft()
        behind = [o for o in self._waiting if o.first >= total and o.first + o.samples <= self._samples - total]
        for output in behind:
            self._waiting.remove(output)
            self._numbers -= 0 if output.logits is None else output.logits.numel()

    # -- all that waits, at once --------------------------------------------------------------------------------------

    @torch.no_grad()
    def _evaluate(self) -> None:
        """Evaluate the outputs that wait, and add up those of the first pass."""
        outputs = [
            (o, o.logits, o.gradients) for o in self._waiting if o.logits is not None and o.gradients is not None
        ]
        if self._totals is None or not outputs:
            return
        logits, gradients = torch.cat([z for _, z, _ in outputs]), torch.cat([g for _, _, g in outputs])
        places = np.concatenate([output.places() for output, _, _ in outputs])
        numbers = None
        if self._totals.classes == 2:
            sizes = [len(z) for _, z, _ in outputs]
            numbers = upload(torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes)), logits.device)
        judged = judge_gradients(logits, gradients, numbers, normalised=self._normalised)
        self._totals.add_judged(judged)
        first, _ = self._masks(places)
        if first.any():
            self._totals.add_first(judged, None if first.all() else _to_device(first, logits))
        if self._total is not None:
            self._evaluated.append((places, judged.losses, judged.counted))
        self._waiting.clear()
        self._numbers = 0

    def _masks(self, places: Places) -> tuple[Mask, Mask]:
        """Return which rows are of the first pass, and which of the end of the last as far as it is known."""
        if self._total is None:
            return np.ones(len(places), np.bool_), np.zeros(len(places), np.bool_)
        return pass_masks(places, self._total, self._quota, self._samples)

    @torch.no_grad()
    def _add_last(self) -> None:
        """Add the losses of the last pass."""
        if self._totals is None:
            return
        for places, losses, counted in self._evaluated:
            _, last = self._masks(places)
            if last.any():
                self._totals.add_last(losses, counted if last.all() else counted & _to_device(last, counted))


def _rows(tensor: Tensor) -> Tensor:
    """Return [rows, classes] of an output or its gradient, without its graph."""
    own = tensor.detach()
    return own if own.dim() == 2 else own.flatten(0, -2)


def _to_device(mask: Mask, like: Tensor) -> Tensor:
    return upload(torch.from_numpy(mask), like.device)


def _obstacle(logits: Any) -> str | None:
    """Return why an output cannot be measured; None if it can."""
    if not isinstance(logits, Tensor):
        returned = f"a {type(logits).__name__}"
    elif type(logits) is not Tensor or torch._C._functorch.is_functorch_wrapped_tensor(logits):  # noqa: SLF001
        returned = f"a tensor of another kind ({type(logits).__name__}, or one inside torch.func)"
    elif logits.dim() in (2, 3) and logits.shape[-1] > 1 and logits.is_floating_point():
        return None
    else:
        returned = f"a tensor of shape {tuple(logits.shape)}"
    return f"they need outputs [samples, classes] or [samples, steps, classes], and this model returns {returned}."


def _is_captured(logits: Tensor) -> bool:
    """Return whether this is the capture of a CUDA graph, whose tensors nobody may keep."""
    return logits.is_cuda and torch.cuda.is_current_stream_capturing()


def _batch_size(logits: Tensor, arguments: Sequence[Any], named: Mapping[str, Any]) -> int:
    """Return the samples in a batch: the length of the first input, else of the output."""
    for part in arguments or named.values():
        if isinstance(part, Tensor) and part.dim():
            return max(1, len(part))
    return len(logits)


def _pass_length(data: Any) -> int | None:
    """Return how many samples one pass over the data has; None if that is unknown."""
    try:
        total = 0 if data is None else samples.size(data)
    except ConfigError:
        return None  # which `fit` reports
    if isinstance(data, DataLoader) and data.drop_last and data.batch_size:
        total -= total % data.batch_size
    return total or None
