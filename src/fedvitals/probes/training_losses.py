# SPDX-License-Identifier: Apache-2.0
"""Training losses by class, from the training's own forward and backward passes: no pass of our own, and no labels.

A forward hook sees the logits, a hook on these sees their gradient, and both together give each sample's label and loss
(see `class_losses`). The table by class counts each sample once, as the received model finds it: the first pass over
the client's data, or all steps where `data` is unknown. `train.loss_last` is of the last pass.

At a step only two small tensors are kept. They are evaluated together when the client's scope closes, or before they
exceed MOST_WAITING numbers. Of an output with more than MOST_NUMBERS, some of the rows are looked at.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fedvitals.errors import ConfigError, UnsuitedError
from fedvitals.kernels.cuda.sums import upload
from fedvitals.model_hooks import Hook, can_be_hooked
from fedvitals.probes import samples
from fedvitals.probes.class_losses import ClassSums, ClassTotals, judge_gradients
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
    """One forward pass in training: logits [rows, classes], and their gradients once its backward pass has come; after
    that has been evaluated, losses and whether they count, [rows] each.
    """

    logits: Tensor | None
    stride: int  # every so many rows of the output are looked at
    version: int  # of the logits: a counter of changes in place
    samples: int  # in the batch
    rows: int
    gradients: Tensor | None = None
    first_rows: int = 0  # in the first pass
    losses: tuple[Tensor, Tensor] | None = None

    def rows_of(self, samples: int) -> int:
        """Return how many rows so many samples of the batch have: several each, where these are sequences."""
        return self.rows * min(samples, self.samples) // self.samples


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
        sums = ClassSums.of(self._totals, numbers)
        if sums.is_odd:
            raise UnsuitedError(NOT_MEASURED + OTHER_LOSS)
        if not sums.measured[0]:
            return {}, None
        own = {name: float(values[0]) for name, values in sums.metrics().items()}
        rare = ("train.loss_last", "train.confused_label", "train.confused_guess")
        metrics = {name: number for name, number in own.items() if name not in rare or number == number}  # noqa: PLR0124
        return metrics, sums.table()[0] if self._totals.tabulated else None


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
        self._seen = 0  # samples of all backward passes so far
        self._awaited: list[_Output] = []  # whose backward pass has not come yet
        self._first: list[_Output] = []  # of the first pass, and not evaluated yet
        self._last: deque[_Output] = deque()  # of the last pass so far, evaluated or not
        self._last_samples = 0
        self._waiting = 0  # numbers that are not evaluated yet
        self._totals: ClassTotals | None = None
        self._handle: Any = None
        if can_be_hooked(view.model):
            hook = Hook(self._on_forward, self._broken)
            self._handle = view.model.register_forward_hook(hook, with_kwargs=True)
        else:
            self._reason = "the model is compiled or scripted, and cannot be looked into."

    def step(self) -> None:
        """Let go of outputs whose gradient has not come: an optimiser steps, and the next forward pass is another's."""
        for output in self._awaited:
            output.logits = None
        self._awaited.clear()

    def remove(self) -> None:
        """Remove the hooks, and let go of all outputs."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        self.step()
        self._first.clear()
        self._last.clear()

    def stop(self, steps: int) -> MeasuredLosses:
        """End it and return what was measured, in part still on its device; `steps` are those of the optimiser."""
        began = time.perf_counter()
        if self._reason is None and steps and not self._seen:
            self._reason = NOT_SEEN
        if self._reason is None and self._seen:
            self._evaluate(end=True)
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
        elif logits.requires_grad and logits.numel() and not _is_captured(logits):
            self._await_gradient(logits, _batch_size(logits, arguments, named))
        self.seconds += time.perf_counter() - began

    def _await_gradient(self, logits: Tensor, batch: int) -> None:
        rows = logits.detach()
        if rows.dim() > 2:
            rows = rows.flatten(0, -2)
        stride = -(-logits.numel() // MOST_NUMBERS)
        if stride > 1:
            rows = rows[::stride].clone()
        output = _Output(rows, stride, rows._version, batch, len(rows))  # noqa: SLF001 - what autograd itself checks
        self.batch = self.batch or batch
        self._awaited.append(output)
        if len(self._awaited) > MOST_AWAITED:  # passes without a way back, as in an evaluation
            self._awaited.pop(0).logits = None
        logits.register_hook(Hook(functools.partial(self._on_gradient, output), self._broken))

    def _on_gradient(self, output: _Output, gradient: Tensor) -> None:
        if output.logits is None or output.gradients is not None or self._reason is not None:
            return
        began = time.perf_counter()
        self._awaited.remove(output)
        rows = gradient.detach()
        if rows.dim() > 2:
            rows = rows.flatten(0, -2)
        output.gradients = rows if output.stride == 1 else rows[:: output.stride].clone()
        if output.logits._version != output.version:  # noqa: SLF001
            self._refuse("the model's output is changed in place before the loss.")
        elif self._totals is not None and output.logits.shape[1] != self._totals.classes:
            self._refuse("the model's outputs have differing numbers of classes.")
        else:
            self._keep(output, output.logits)
        self.seconds += time.perf_counter() - began

    def _keep(self, output: _Output, logits: Tensor) -> None:
        """Keep an output for as long as it may belong to the first or the last pass."""
        if self._totals is None:
            self._totals = ClassTotals(logits.shape[1], logits.device)
        self._waiting += logits.numel()
        if self._total is None or self._seen < self._total:
            output.first_rows = output.rows if self._total is None else output.rows_of(self._total - self._seen)
            self._first.append(output)
        self._seen += output.samples
        if self._total is not None:
            self._last.append(output)
            self._last_samples += output.samples
            while self._last_samples - self._last[0].samples >= self._total:
                old = self._last.popleft()
                self._last_samples -= old.samples
                if old.logits is not None and not old.first_rows:
                    self._waiting -= old.logits.numel()
        if self._waiting >= MOST_WAITING:
            self._evaluate()

    # -- all that waits, at once --------------------------------------------------------------------------------------

    @torch.no_grad()
    def _evaluate(self, *, end: bool = False) -> None:
        """Evaluate the outputs that wait, and add up those of the first pass; at the end also those of the last."""
        last = [output for output in self._last if output.logits is not None]
        outputs = [*self._first, *(output for output in last if not output.first_rows)]
        pairs = [(o.logits, o.gradients) for o in outputs if o.logits is not None and o.gradients is not None]
        if self._totals is None or not pairs:
            return
        logits, gradients = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        judged = judge_gradients(logits, gradients, self._steps_of(outputs, logits))
        self._totals.add_judged(judged)
        first = sum(output.first_rows for output in self._first)
        if first:
            self._totals.add_first(judged.part(slice(first)) if first < len(logits) else judged)
        waiting = sum(output.rows for output in last)  # outputs are in their order, so these come last
        losses, counted = judged.losses[len(logits) - waiting :], judged.counted[len(logits) - waiting :]
        if end:
            self._add_last(losses, counted)
            return
        for output in outputs:
            output.logits = output.gradients = None
        sizes = [output.rows for output in last]
        for output, *parts in zip(last, losses.split(sizes), counted.split(sizes), strict=True):
            output.losses = (parts[0], parts[1])
        self._first.clear()
        self._waiting = 0

    def _steps_of(self, outputs: Sequence[_Output], logits: Tensor) -> Tensor | None:
        """Return which output each row is of, for tasks of two classes."""
        if logits.shape[1] != 2:
            return None
        sizes = torch.tensor([output.rows for output in outputs])
        return upload(torch.arange(len(sizes)).repeat_interleave(sizes), logits.device)

    def _add_last(self, losses: Tensor, counted: Tensor) -> None:
        """Add the losses of the last pass: those evaluated before, then these."""
        if self._totals is None or self._total is None:
            return
        before = [output.losses for output in self._last if output.losses is not None]
        if before:
            losses = torch.cat([*(part for part, _ in before), losses])
            counted = torch.cat([*(part for _, part in before), counted])
        surplus = self._last[0].rows_of(max(0, self._last_samples - self._total))
        self._totals.add_last(losses[surplus:], counted[surplus:])


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
