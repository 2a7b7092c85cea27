# SPDX-License-Identifier: Apache-2.0
"""Training losses by class, from the training's own forward and backward passes: no pass of our own, and no labels.

A forward hook sees the logits, a hook on the way back their gradient, and both together give each sample's label and
loss (see `class_losses`). The table by class counts each sample once, as the received model finds it: the first pass
over the client's data, or all steps where `data` is unknown. A batch that is looked at again before the next one (SAM,
LBFGS, two passes with dropout) is counted once. `train.loss_last` is of the last eighth of the last pass.

Of a language model the table is by bands of tokens and of lengths of texts: a row without a gradient is no target.
Of a regression whose targets `data` has as a tensor, the moments of the residuals are measured instead (`residuals`).
A single output per sample is that of two classes, whose logits are 0 and it, or probabilities after a sigmoid.

At a step only two small tensors are kept. They are evaluated together when the client's scope closes, or before they
exceed MOST_WAITING numbers. Of an output with more than MOST_NUMBERS, only some of the rows are used.
"""

from __future__ import annotations

import functools
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedvitals.catalog import CATALOG
from fedvitals.errors import UnsuitedError
from fedvitals.kernels.cuda.sums import upload
from fedvitals.model_hooks import Hook, can_be_hooked, hook_passes, trained_part
from fedvitals.probes.class_losses import (
    ClassSums,
    ClassTotals,
    JudgedRows,
    judge_gradients,
    last_quota,
    text_rows,
)
from fedvitals.probes.forward_passes import (
    Batch,
    batch_size,
    first_tensor,
    is_captured,
    logits_among,
    obstacle_of,
    pass_length,
    reference_to,
    rows_of,
)
from fedvitals.probes.residuals import ResidualSums, regression_targets, residual_metrics
from fedvitals.probes.token_counts import is_vocabulary, tokens_among
from fedvitals.probes.view import View
from fedvitals.stats import Array

MOST_NUMBERS = 1 << 20  # of one output; of a larger one, rows that are spread evenly
MOST_WAITING = 1 << 20  # of outputs that wait to be evaluated, and as many of their gradients
CAST = "ToCopyBackward0"  # of autograd: to another precision
SIGMOID = "SigmoidBackward0"
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


_Span = tuple[int, int, int]  # of an output: the number of its first sample, its samples, its rows


class _Output:
    """One forward pass in training: logits [rows, classes], and their gradients after its backward pass."""

    __slots__ = ("batch", "first", "gradients", "logits", "samples", "stride", "text_rows", "texts", "version")

    def __init__(self, logits: Tensor, stride: int, samples: int, batch: Batch | None, texts: int) -> None:
        """`stride`: every so many rows of the output are looked at. `samples`, `texts`: in the batch; 0: not texts."""
        self.logits: Tensor | None = logits
        self.batch = batch
        self.gradients: Tensor | None = None
        self.stride, self.samples, self.texts = stride, samples, texts
        self.text_rows: Tensor | None = None
        self.first = 0  # the number of its first sample, in the order of the backward passes
        self.version = logits._version  # noqa: SLF001 - autograd's own counter of changes in place


class MeasuredLosses:
    """Sums over a client's training, before they are copied to the host. Raises UnsuitedError if they are undefined."""

    def __init__(self, totals: ClassTotals | ResidualSums | None, model: type, reason: str | None) -> None:
        self.model = model
        self.numbers = None if totals is None or reason is not None else totals.numbers
        self._totals, self._reason = totals, reason

    def results(self, numbers: Array | None) -> tuple[dict[str, float], dict[str, Array]]:
        """Return the metrics, and the matrices by family, from `numbers` on the host."""
        if self._reason is not None:
            raise UnsuitedError(NOT_MEASURED + self._reason)
        if self._totals is None or numbers is None:
            return {}, {}
        if isinstance(self._totals, ResidualSums):
            return residual_metrics(numbers), {}
        sums = ClassSums(self._totals, numbers)
        if sums.is_odd:
            raise UnsuitedError(NOT_MEASURED + OTHER_LOSS)
        if not sums.samples[0]:
            return {}, {}
        own = {name: float(values[0]) for name, values in sums.metrics.items()}
        metrics = {name: number for name, number in own.items() if not (CATALOG[name].rare and math.isnan(number))}
        return metrics, {family: matrices[0] for family, matrices in sums.tables.items()}


class TrainingLosses:
    """Hooks on a client's model from creation until `stop`; `seconds` is the training time they took.

    Call `step` at each optimiser step. `failed` is called with errors of ours.
    """

    def __init__(self, view: View, failed: Callable[[Exception], None]) -> None:
        self.seconds = 0.0
        self.batch: int | None = None  # samples in the first forward pass of the training
        self._model, self._failed = type(view.model), failed
        self._reason: str | None = None
        self._total = pass_length(view.data)  # samples in a pass; None: unknown
        self._quota = 0 if self._total is None else last_quota(self._total)
        self._samples = 0  # that the training has seen so far
        self._awaited: list[_Output] = []  # outputs whose backward pass has not happened yet
        self._waiting: list[_Output] = []  # to be evaluated
        self._numbers = 0  # numbers in these
        self._evaluated: deque[tuple[list[_Span], JudgedRows]] = deque()  # those that may belong to the last pass
        self._totals: ClassTotals | None = None
        self._targets = regression_targets(view.data)
        self._residuals: ResidualSums | None = None
        self._trained = trained_part(view.model)
        self._vocabularies: dict[int, bool] = {}  # by numbers of outputs: whether they are over the model's tokens
        self._normalised = self._sigmoid = False  # whether the outputs are log-probabilities, or after a sigmoid
        self._counted: Batch | None = None  # the batch whose samples were counted last
        self._handles: list[Any] = []
        if can_be_hooked(view.model):
            self._handles = hook_passes(view.model, Hook(self._on_forward, self._broken))
        else:
            self._reason = "the model is compiled or scripted, and cannot be looked into."

    def step(self) -> None:
        """Release outputs without a gradient when an optimiser steps, because they do not belong to training."""
        for output in self._awaited:
            output.logits = None
        self._awaited.clear()

    def remove(self) -> None:
        """Remove the hooks, and release all outputs."""
        while self._handles:
            self._handles.pop().remove()
        self.step()
        self._waiting.clear()
        self._evaluated.clear()

    def stop(self, steps: int) -> MeasuredLosses:
        """End and return what was measured, in part still on its device; `steps` are those of the optimiser."""
        began = time.perf_counter()
        self.step()
        if self._reason is None:
            self._evaluate()
            self._add_last()
        totals = self._totals or self._residuals
        if self._reason is None and steps and totals is None:
            self._reason = NOT_SEEN
        measured = MeasuredLosses(totals, self._model, self._reason)
        self.remove()
        self.seconds += time.perf_counter() - began
        return measured

    def _broken(self, error: Exception) -> None:
        self._refuse("measuring them failed.")
        self._failed(error)

    def _refuse(self, reason: str) -> None:
        """Stop measuring in this client-round."""
        self._reason = self._reason or reason
        self.remove()

    # -- at each forward and backward pass ----------------------------------------------------------------------------

    def _on_forward(self, module: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any], output: Any) -> None:
        if not module.training or not torch.is_grad_enabled() or self._reason is not None:
            return
        began = time.perf_counter()
        logits = logits_among(output)
        own_input = first_tensor(arguments, named)
        batch = batch_size(logits, own_input)
        source = None if own_input is None else reference_to(own_input)
        # Whether a sample of it may belong to the first pass, or to the end of any.
        total, now = self._total, self._samples
        awaited = sum(caught.samples for caught in self._awaited) if self._awaited else 0
        if total is None or now < total or now % total + awaited + batch > total - self._quota:
            self._await_gradient(logits, batch, source, tokens_among(arguments, named))
        elif not self._is_counted(source, batch):
            self._samples, self._counted = now + batch, source
        self.seconds += time.perf_counter() - began

    def _is_counted(self, source: Batch | None, batch: int) -> bool:
        """Return whether these are the samples that were counted last; a batch of all samples is a pass of its own."""
        before, total = self._counted, self._total
        if source is None or before is None or total is None or batch >= total:
            return False
        return before[1] == source[1] and before[0]() is source[0]() is not None

    def _await_gradient(self, logits: Any, batch: int, source: Batch | None, tokens: Tensor | None) -> None:
        obstacle = obstacle_of(logits)
        if obstacle is not None:
            self._refuse(obstacle)
            return
        node, numbers, stride = logits.grad_fn, logits.numel(), 1
        if node is None or not numbers or is_captured(logits):
            return
        rows = rows_of(logits)
        texts = 0 if tokens is None or len(rows) % len(tokens) or not self._are_tokens(rows.shape[1]) else len(tokens)
        if numbers > MOST_NUMBERS:
            stride = -(-numbers // MOST_NUMBERS)
            rows = rows[::stride].clone()
        output = _Output(rows, stride, batch, source, texts)
        if self.batch is None:
            kind = type(node).__name__
            self.batch, self._normalised = batch, kind.startswith("LogSoftmax")
            self._sigmoid = kind == SIGMOID and rows.shape[1] == 1
        self._awaited.append(output)
        if len(self._awaited) > MOST_AWAITED:  # passes without a backward pass, as in an evaluation
            self._awaited.pop(0).logits = None
        # On the node rather than the tensor, which is faster and equivalent.
        node.register_prehook(functools.partial(self._on_backward, output, logits.output_nr))
        if type(node).__name__ == CAST:  # a float32 copy for the caller; the model computed its loss before it
            (before, place), *_ = node.next_functions
            if before is not None:
                before.register_prehook(functools.partial(self._on_backward, output, place))

    def _are_tokens(self, classes: int) -> bool:
        if classes not in self._vocabularies:
            self._vocabularies[classes] = is_vocabulary(self._trained, classes)
        return self._vocabularies[classes]

    def _on_backward(self, output: _Output, place: int, gradients: Sequence[Tensor | None]) -> None:
        """Record the gradient of an output on its first arrival; runs inside the backward pass."""
        logits, gradient = output.logits, gradients[place]
        if logits is None or gradient is None or output.gradients is not None or self._reason is not None:
            return
        began = time.perf_counter()
        try:
            self._awaited.remove(output)
            if logits._version == output.version:  # noqa: SLF001
                self._keep(output, logits, gradient)
            else:
                self._refuse("the model's output is changed in place before the loss.")
        except Exception as error:  # noqa: BLE001 - nothing of ours may stop the training
            self._broken(error)
        self.seconds += time.perf_counter() - began

    def _keep(self, output: _Output, logits: Tensor, gradient: Tensor) -> None:
        if self._is_counted(output.batch, output.samples):
            output.logits = None
            return
        self._counted = output.batch
        output.first, rows = self._samples, rows_of(gradient)
        self._samples += output.samples
        if output.texts:
            targets = rows.amax(1) > rows.amin(1)  # one of these alone may underflow; two reductions are the fastest
            output.text_rows = text_rows(targets.view(output.texts, -1), output.stride)
        output.gradients = rows if output.stride == 1 else rows[:: output.stride].clone()
        self._waiting.append(output)
        self._numbers += logits.numel()
        if self._numbers >= MOST_WAITING:
            self._forget_middle()
            if self._numbers >= MOST_WAITING // 2:
                self._evaluate()

    def _forget_middle(self) -> None:
        """Release outputs after the first pass and before the last."""
        total = self._total
        if total is None:
            return
        since = self._samples - total
        while self._evaluated and sum(self._evaluated[0][0][-1][:2]) <= since:
            self._evaluated.popleft()
        self._waiting = [o for o in self._waiting if o.first < total or o.first + o.samples > since]
        self._numbers = sum(output.logits.numel() for output in self._waiting if output.logits is not None)

    # -- evaluation of waiting outputs ------------------------------------------------------------------------------

    @torch.no_grad()
    def _evaluate(self) -> None:
        """Evaluate the waiting outputs, and add up those of the first pass."""
        self._forget_middle()
        waiting = [(output, output.logits, output.gradients) for output in self._waiting]
        outputs = [(o, z, g) for o, z, g in waiting if z is not None and g is not None]
        self._waiting, self._numbers = [], 0
        if not outputs:
            return
        if self._targets is not None:
            self._add_residuals(outputs, self._targets)
            return
        known = [] if self._totals is None else [(self._totals.classes, self._totals.numbers.device)]
        if len({*known, *((max(z.shape[1], 2), z.device) for _, z, _ in outputs)}) > 1:
            self._refuse("the model's outputs have differing numbers of classes, or are on several devices.")
            return
        logits, gradients = torch.cat([z for _, z, _ in outputs]), torch.cat([g for _, _, g in outputs])
        if logits.shape[1] == 1:
            logits, gradients = _as_two_classes(logits.float(), gradients.float(), sigmoid=self._sigmoid)
        text_rows_of = [output.text_rows for output, _, _ in outputs if output.text_rows is not None]
        texts = torch.cat(text_rows_of) if len(text_rows_of) == len(outputs) else None
        if self._totals is None:
            self._totals = ClassTotals(logits.shape[1], logits.device, language=texts is not None)
        totals = self._totals
        spans, numbers = [(output.first, output.samples, len(z)) for output, z, _ in outputs], None
        if totals.classes == 2:
            sizes = [len(z) for _, z, _ in outputs]
            single = max(sizes) == 1  # rows have no others of their output then: all outputs have one weight
            places = np.zeros(len(sizes), np.int64) if single else np.repeat(np.arange(len(sizes)), sizes)
            numbers = upload(torch.from_numpy(places), logits.device)
        judged = judge_gradients(logits, gradients, numbers, normalised=self._normalised, texts=texts)
        totals.add_judged(judged)
        first = len(logits) if self._total is None else _rows_before(spans, self._total)
        if first:
            totals.add_first(judged if first == len(logits) else judged.part(slice(first)))
        if self._total is not None:
            self._evaluated.append((spans, judged))

    def _add_residuals(self, outputs: Sequence[tuple[_Output, Tensor, Tensor]], targets: Tensor) -> None:
        """Add the samples of the first pass."""
        for output, z, g in outputs:
            rows = _rows_before([(output.first, output.samples, len(z))], self._total or 0)
            if rows:
                self._residuals = self._residuals or ResidualSums(targets, z.device)
                self._residuals.add(z[:rows], g[:rows], z.numel())

    @torch.no_grad()
    def _add_last(self) -> None:
        """Add the rows of the last pass: the ends of passes among the last samples, by `pass_masks`."""
        total, end = self._total, self._samples
        if total is None or self._totals is None:
            return
        last_end = end // total * total  # of a pass
        for finished in (last_end, last_end + total):
            begin, until = max(finished - self._quota, end - total), min(finished, end)
            for spans, judged in self._evaluated if begin < until else ():
                rows = slice(_rows_before(spans, begin), _rows_before(spans, until))
                if rows.start < rows.stop:
                    self._totals.add_last(judged.part(rows))


def _rows_before(spans: Sequence[_Span], place: int) -> int:
    """Return how many rows of outputs belong to samples before this one, in the order of the training."""
    count = 0
    for first, length, rows in spans:
        if place <= first:
            break
        count += rows * min(place - first, length) // length
    return count


def _as_two_classes(outputs: Tensor, gradients: Tensor, *, sigmoid: bool) -> tuple[Tensor, Tensor]:
    """Return logits and gradients [rows, 2] of outputs [rows, 1]: logits of the second class, or its probabilities."""
    if sigmoid:
        outputs, gradients = outputs.logit(), gradients * outputs * (1 - outputs)
    return torch.cat([torch.zeros_like(outputs), outputs], 1), torch.cat([-gradients, gradients], 1)
