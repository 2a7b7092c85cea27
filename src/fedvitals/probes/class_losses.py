# SPDX-License-Identifier: Apache-2.0
"""Losses, right answers and confusions by class, of rows of logits whose labels are known or follow from a gradient.

For a cross-entropy, the gradient of a row of logits is w (p − e_y): p is the softmax of the row, e_y is 1 at the label
and 0 elsewhere, and w > 0 is the row's weight in the loss. So the label is the only negative entry, the row adds up to
0, and its other entries are proportional to p. That holds for the mean and the sum, for class weights, for scaled and
accumulated losses, and for any loss that depends on p_y alone. Soft or smoothed labels and other losses break it, and
such rows are counted as `odd`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedvitals.stats import CLASS_COLUMNS, MOST_CLASSES, Array

TOLERANCE = 1e-3  # of a row's gradient, against the one that its label would give; more for half precision
ROUNDING = 1e-6  # of a row's weight: p_y − 1 cancels where the model is sure
CERTAIN = 1e-4  # nats: below this loss, rounding may leave nothing of the label's own entry
WEIGHT_TOLERANCE = 0.02  # two classes: among rows of one step and label, which have the same weight
ODD_SHARE = 0.01  # of all rows; with more of them, the loss is no cross-entropy of single labels


@dataclass(frozen=True, slots=True)
class JudgedRows:
    """Of each row of logits: its label, the model's guess, the loss, whether it counts, and whether it is odd."""

    labels: Tensor
    guesses: Tensor
    losses: Tensor  # cross-entropy, whatever weight the training gives to the row
    counted: Tensor
    odd: Tensor

    def part(self, rows: slice) -> JudgedRows:
        """Return some of the rows."""
        parts = (self.labels, self.guesses, self.losses, self.counted, self.odd)
        return JudgedRows(*(part[rows] for part in parts))


def judge_gradients(logits: Tensor, gradients: Tensor, steps: Tensor | None = None) -> JudgedRows:
    """Return what rows of logits, [rows, classes], and the gradients of these tell.

    Rows without any gradient, such as padding, and rows that are not finite do not count. `steps` tells rows of
    different steps apart; only two classes need it.
    """
    tolerance = max(TOLERANCE, 8 * torch.finfo(gradients.dtype).eps)
    logits, gradients = logits.float(), gradients.float()
    logs = logits.log_softmax(1)
    largest, guesses = logs.max(1)
    lowest, places = gradients.min(1)
    negative = lowest < 0
    labels = torch.where(negative, places, guesses)[:, None]
    losses = -logs.gather(1, labels)[:, 0]
    size = gradients.abs().sum(1)
    others = logs.exp().scatter_(1, labels, 0.0)
    weights = (size + lowest) / others.sum(1)  # a sum over all but the label, of gradients and of probabilities
    residual = (gradients - weights[:, None] * others).abs_().sum(1) + lowest
    odd = residual + (size + 2 * lowest).abs() > tolerance * size + ROUNDING * weights
    # Log-probabilities and their negative mean, as `nll_loss` takes them: the label's entry is the only one.
    normalised = (logits[:, 0] - logs[:, 0]).abs() < TOLERANCE
    odd &= ~(normalised & (size + lowest <= tolerance * size))
    if logits.shape[1] == 2 and steps is not None:
        odd |= _weights_differ(weights, 2 * steps + labels[:, 0], negative, max(WEIGHT_TOLERANCE, tolerance))
    finite = size.isfinite() & ~largest.isnan()
    certain = largest > -CERTAIN
    odd = finite & torch.where(negative, odd, ~certain & (size > 0))
    return JudgedRows(labels[:, 0], guesses, losses, finite & (negative | certain) & ~odd, odd)


def _weights_differ(weights: Tensor, kinds: Tensor, valid: Tensor, tolerance: float) -> Tensor:
    """Return which rows have another weight than the rows of the same kind (a step and a label) on average.

    Of two classes every gradient that adds up to 0 looks like one of a label; soft labels show in the weights.
    """
    usable = valid & weights.isfinite()
    totals = weights.new_zeros(2, 2 * len(weights))
    totals[0].index_add_(0, kinds, torch.where(usable, weights, 0.0))
    totals[1].index_add_(0, kinds, usable.to(weights.dtype))
    usual = (totals[0] / totals[1])[kinds]
    return usable & ((weights - usual).abs() > tolerance * usual)


def judge_labels(logits: Tensor, labels: Tensor) -> JudgedRows:
    """Return the same of rows whose labels are known; a negative label, such as that of padding, does not count."""
    logs = logits.float().log_softmax(1)
    largest, guesses = logs.max(1)
    losses = -logs.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    counted = (labels >= 0) & ~largest.isnan()
    return JudgedRows(labels.clamp(min=0), guesses, losses, counted, torch.zeros_like(counted))


class ClassTotals:
    """Sums over rows on their device, for one or more clients; nothing waits for the device.

    `numbers` holds, of each client: confusion counts [classes, classes] and sums of losses and of their squares
    [classes, 2], unless there are more than MOST_CLASSES classes; then, over the first pass, rows, their losses and
    right answers; over the last pass, rows and losses; over both, all rows and odd ones.
    """

    def __init__(self, classes: int, device: torch.device, clients: int = 1) -> None:
        self.classes, self.clients = classes, clients
        self.tabulated = classes <= MOST_CLASSES
        dtype = torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
        cells = classes if self.tabulated else 0
        lengths = [clients * cells * cells, clients * cells * 2, clients * 7]
        self.numbers = torch.zeros(sum(lengths), dtype=dtype, device=device)
        confusion, sums, scalars = self.numbers.split(lengths)
        self._confusion, self._sums, self._scalars = confusion, sums.view(-1, 2), scalars.view(clients, 7)

    def add_first(self, rows: JudgedRows, client: Tensor | None = None) -> None:
        """Add rows of the first pass; `client` is the place of each row's client, None for the only one."""
        weights, losses = self._weighed(rows.losses, rows.counted)
        right = weights * (rows.labels == rows.guesses)
        self._add(0, torch.stack([weights, losses, right], 1), client)
        if self.tabulated:
            places = rows.labels if client is None else client * self.classes + rows.labels
            self._confusion.index_add_(0, places * self.classes + rows.guesses, weights)
            self._sums.index_add_(0, places, torch.stack([losses, losses * losses], 1))

    def add_last(self, losses: Tensor, counted: Tensor, client: Tensor | None = None) -> None:
        """Add losses of the last pass, as far as they count."""
        self._add(3, torch.stack(self._weighed(losses, counted), 1), client)

    def add_judged(self, rows: JudgedRows) -> None:
        """Count rows of a single client, and the odd ones among them."""
        judged = torch.stack([rows.counted | rows.odd, rows.odd], 1)
        self._add(5, judged.to(self.numbers.dtype), None)

    def _weighed(self, losses: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
        return counted.to(self.numbers.dtype), torch.where(counted, losses, 0.0).to(self.numbers.dtype)

    def _add(self, first: int, columns: Tensor, client: Tensor | None) -> None:
        scalars = self._scalars[:, first : first + columns.shape[1]]
        if client is None:
            scalars += columns.sum(0)
        else:
            scalars.index_add_(0, client, columns)


@dataclass(frozen=True, slots=True)
class ClassSums:
    """The numbers of `ClassTotals` on the host, with a leading axis of clients."""

    confusion: Array  # [clients, classes, classes]: label, guess; without classes where there are too many
    losses: Array  # [clients, classes, 2]: sums, and sums of squares
    scalars: Array  # [clients, 7]

    @classmethod
    def of(cls, totals: ClassTotals, numbers: Array) -> ClassSums:
        """Return the numbers by their meaning."""
        cells = totals.classes if totals.tabulated else 0
        ends = np.cumsum([totals.clients * cells * cells, totals.clients * cells * 2])
        confusion, losses, scalars = np.split(numbers, ends)
        shape = (totals.clients, cells)
        return cls(confusion.reshape(*shape, cells), losses.reshape(*shape, 2), scalars.reshape(totals.clients, 7))

    @property
    def is_odd(self) -> bool:
        """Whether the gradients of the single client are not those of a cross-entropy of single labels."""
        return bool(self.scalars[0, 6] > ODD_SHARE * self.scalars[0, 5])

    @property
    def measured(self) -> Array:
        """Which clients have any sample that counts."""
        return self.scalars[:, 0] > 0

    def table(self) -> Array:
        """Return the matrices of the family `training.classes`, [clients, classes, columns]."""
        right = np.diagonal(self.confusion, axis1=1, axis2=2)
        columns = [self.confusion.sum(2), self.losses[..., 0], self.losses[..., 1], right, self.confusion.sum(1)]
        assert len(columns) == len(CLASS_COLUMNS)  # noqa: S101 - the order is that of the columns
        return np.stack(columns, axis=-1)

    def metrics(self) -> dict[str, Array]:
        """Return the `train.*` metrics, [clients] each; NaN for what a client does not have."""
        rows, losses, right, last_rows, last_losses = self.scalars.T[:5]
        with np.errstate(divide="ignore", invalid="ignore"):
            metrics = {
                "train.loss_first": losses / rows,
                "train.loss_last": last_losses / last_rows,
                "train.accuracy": right / rows,
            }
        if self.confusion.shape[1]:
            shares, pairs = confused_pairs(self.confusion)
            metrics["train.confusion"] = shares
            metrics["train.confused_label"], metrics["train.confused_guess"] = pairs.T
        return metrics


def confused_pairs(counts: Array) -> tuple[Array, Array]:
    """Return how far errors concentrate in one pair of classes, and that pair, [clients, 2]; NaN where they do not.

    counts: [clients, labels, guesses]. max over a≠b of max(C_ab − 1, 0) / (n_a + 2); of equal pairs the first.
    """
    clients, classes, _ = counts.shape
    sizes, wrong = counts.sum(axis=2, keepdims=True), counts.copy()
    wrong[:, np.arange(classes), np.arange(classes)] = 0
    shares = (np.maximum(wrong - 1, 0) / (sizes + 2)).reshape(clients, -1)
    best = shares.argmax(axis=1)
    largest = shares[np.arange(clients), best]
    return largest, np.where(largest[:, None] > 0, np.stack(np.divmod(best, classes), axis=1), np.nan)
