# SPDX-License-Identifier: Apache-2.0
"""Losses, correct answers and confusions by class, for rows of logits with known labels or with gradients; of a
language model by bands of tokens and of lengths of texts.

For a cross-entropy, the gradient of a row of logits is w (p − e_y): p is the softmax of the row, e_y is 1 at the label
and 0 elsewhere, and w > 0 is the row's weight in the loss. So the label is the only negative entry, the row adds up to
0, and its other entries are proportional to p. That holds for the mean and the sum, for class weights, for scaled and
accumulated losses, and for any loss that depends on p_y alone. Soft or smoothed labels and other losses violate it, and
such rows are counted as `odd`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedvitals.kernels.cuda.sums import upload
from fedvitals.stats import (
    CLASS_COLUMNS,
    COMMON_TOKENS,
    FEWEST_IN_BAND,
    LENGTH_BOUNDS,
    LENGTH_COLUMNS,
    LONG_TEXT,
    MOST_CLASSES,
    TOKEN_BOUNDS,
    TOKEN_COLUMNS,
    Array,
)

LAST_SHARE, LAST_SAMPLES = 8, 16  # `train.loss_last` covers the last eighth of a pass, and at least 16 samples
TOLERANCE = 1e-3  # of a row's gradient, relative to the one that its label implies; larger for half precision
ROUNDING = 1e-6  # of a row's weight: p_y − 1 cancels if the model is certain
CERTAIN = 1e-4  # nats: below this loss, rounding may remove the label's own entry
WEIGHT_TOLERANCE = 0.02  # for two classes: among rows of one step and label, which have the same weight
ODD_SHARE = 0.01  # of all rows; above this, the loss is not a cross-entropy of single labels
BANDS = len(TOKEN_BOUNDS) + 1, len(LENGTH_BOUNDS) + 1


Places = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class JudgedRows:
    """The label, the model's guess and the loss of each row of logits, and whether it counts."""

    labels: Tensor
    guesses: Tensor
    losses: Tensor  # cross-entropy, whatever weight the row has in training
    counted: Tensor | None  # None: all rows
    odd: Tensor | None = None  # whether the gradient is not that of a cross-entropy; None: for no row
    texts: Tensor | None = None  # of a language model, see `text_rows`

    def part(self, rows: slice) -> JudgedRows:
        """Return some of the rows."""
        counted, odd, texts = (None if own is None else own[rows] for own in (self.counted, self.odd, self.texts))
        return JudgedRows(self.labels[rows], self.guesses[rows], self.losses[rows], counted, odd, texts)


def text_rows(targets: Tensor, stride: int = 1) -> Tensor:
    """Return [rows, 2] of a language model: the targets in each row's text, and how much of that text the row is.

    `targets`: which positions of the texts are targets, [..., texts, positions]. Every `stride`th position has a row.
    """
    lengths = targets.sum(-1, keepdim=True).expand(targets.shape).reshape(-1)[::stride].float()
    return torch.stack([lengths, stride / lengths], 1)


def judge_gradients(
    logits: Tensor,
    gradients: Tensor,
    outputs: Tensor | None = None,
    *,
    normalised: bool = False,
    texts: Tensor | None = None,
) -> JudgedRows:
    """Return what can be derived from rows of logits, [rows, classes], and their gradients.

    Rows without any gradient, such as padding, and non-finite rows do not count. `outputs` identifies the forward pass
    of each row; only needed for two classes. `normalised`: the rows are log-probabilities, for which `nll_loss` gives
    only the label's entry a gradient. `texts`: as `text_rows`; without a gradient, a row is padding then, however
    certain the model is.
    """
    tolerance = max(TOLERANCE, 8 * torch.finfo(gradients.dtype).eps)
    gradients = gradients.float()
    guesses, shifted, chances, normaliser = _softmax(logits)
    lowest, places = gradients.min(1, keepdim=True)
    negative = lowest[:, 0] < 0
    labels = torch.where(negative, places[:, 0], guesses)
    column = labels[:, None]
    log_chance = shifted.gather(1, column).sub_(normaliser)  # log p_y
    others = log_chance.expm1()  # p_y − 1, minus the sum of the other probabilities, without cancellation
    weights = lowest / others
    wanted = chances.scatter_(1, column, others)
    residual = torch.addcmul(gradients, weights, wanted, value=-1).abs_().sum(1)
    # The size of a row, the sum of its magnitudes, is −2 × its lowest entry.
    odd = residual > torch.add(weights * ROUNDING, lowest, alpha=-2 * tolerance)[:, 0]
    if normalised:
        odd &= gradients.abs().sum(1) + lowest[:, 0] > -tolerance * lowest[:, 0]
    if outputs is not None:
        kinds, own = 2 * outputs + labels, gradients.amax(1) / -others[:, 0]  # by the entry that does not cancel
        odd |= _weights_differ(own, kinds, negative, max(WEIGHT_TOLERANCE, tolerance))
    losses = log_chance[:, 0].neg()
    if logits.is_cpu and math.isfinite(residual.sum()) and negative.all() and not odd.any():
        return JudgedRows(labels, guesses, losses, None, texts=texts)  # the usual case; on a device, a check would wait
    size, surprise = gradients.abs().sum(1), normaliser[:, 0]
    certain, finite = surprise < CERTAIN, (size + surprise).isfinite()
    odd = torch.where(negative, odd, (size > 0) & ~certain) & finite
    if texts is not None:
        certain &= size > 0
    return JudgedRows(labels, guesses, losses, (negative | certain) & finite & ~odd, odd, texts)


def _softmax(logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the index of each row's largest entry, the logits minus that entry, the softmax, and the log normaliser.

    The last is [rows, 1], the logarithm of the sum of exponentials of the shifted logits: 0 if the model is certain,
    and not finite with the row. For few classes this is several times as fast as `log_softmax` on a CPU, which the
    training has called anyway.
    """
    logits = logits.float()
    largest, guesses = logits.max(1, keepdim=True)
    shifted = logits - largest
    chances = shifted.exp()
    totals = chances.sum(1, keepdim=True)
    return guesses[:, 0], shifted, chances.div_(totals), totals.log()


def _weights_differ(weights: Tensor, kinds: Tensor, valid: Tensor, tolerance: float) -> Tensor:
    """Return which rows have a weight unlike the mean of rows of the same kind (an output and a label).

    With two classes every gradient that sums to 0 looks like that of a label; soft labels show in the weights.
    """
    usable = valid & weights.isfinite()
    totals = weights.new_zeros(2, 2 * len(weights))
    totals[0].index_add_(0, kinds, torch.where(usable, weights, 0.0))
    totals[1].index_add_(0, kinds, usable.to(weights.dtype))
    usual = (totals[0] / totals[1])[kinds]
    return usable & ((weights - usual).abs() > tolerance * usual)


def judge_labels(logits: Tensor, labels: Tensor, texts: Tensor | None = None) -> JudgedRows:
    """Return the same for rows whose labels are known; a negative label, such as that of padding, does not count."""
    guesses, shifted, _, normaliser = _softmax(logits)
    known = labels.clamp(min=0)
    losses = (normaliser - shifted.gather(1, known[:, None]))[:, 0]
    return JudgedRows(known, guesses, losses, (labels >= 0) & normaliser[:, 0].isfinite(), texts=texts)


def last_quota(total: int) -> int:
    """Return how many samples `train.loss_last` covers for a pass of this length."""
    return min(total, max(LAST_SAMPLES, -(-total // LAST_SHARE)))


def pass_masks(places: Places, total: Any, quota: Any, end: Any) -> tuple[Mask, Mask]:
    """Return which samples belong to the first pass, and which to the end of the last.

    places: numbers of samples in the order of the training, from 0. total: samples in a pass. end: of the training. The
    end of a pass is its last `quota` samples; the last such end lies within the last `total` samples of the training,
    so that the end of the training need not be known in advance.
    """
    before_end = places < end
    return before_end & (places < total), before_end & (places % total >= total - quota) & (places >= end - total)


class ClassTotals:
    """Sums over rows on their device, for one or more clients; never waits for the device.

    `numbers` holds, for all clients, of the first pass: confusion counts [classes, classes] and sums of losses and of
    their squares [classes, 2]; with more than MOST_CLASSES classes there is no such table, but only rows, losses and
    correct answers. Then rows and losses of the last pass, and counted and odd rows of all that was examined. Of a
    language model at last the sums of the first pass by bands of tokens and of lengths, [bands, LENGTH_COLUMNS].
    """

    def __init__(self, classes: int, device: torch.device, clients: int = 1, *, language: bool = False) -> None:
        self.classes, self.clients, self.tabulated = classes, clients, classes <= MOST_CLASSES
        self.language = language
        dtype = torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
        self.numbers = torch.zeros(sum(self.lengths), dtype=dtype, device=device)
        confusion, sums, scalars, bands = self.numbers.split(self.lengths)
        self._confusion, self._sums, self._scalars = confusion, sums.view(-1, 2), scalars.view(clients, 7)
        self._bands = bands.view(-1, len(LENGTH_COLUMNS))
        self._bounds = [upload(torch.tensor(own), device) for own in (TOKEN_BOUNDS, LENGTH_BOUNDS) if language]

    @property
    def lengths(self) -> list[int]:
        """The lengths of the parts of `numbers`."""
        cells = self.classes if self.tabulated else 0
        bands = sum(BANDS) * len(LENGTH_COLUMNS) if self.language else 0
        return [self.clients * own for own in (cells * cells, cells * 2, 7, bands)]

    def add_first(self, rows: JudgedRows, chosen: Tensor | None = None, client: Tensor | None = None) -> None:
        """Add the chosen rows (None: all) of the first pass; `client` is each row's client, None for the only one."""
        weights, losses = self._weighed(rows, chosen)
        if self.language and rows.texts is not None:
            self._add_bands(rows, rows.texts, weights, losses, client)
        if not self.tabulated:
            self._add(0, torch.stack([weights, losses, weights * (rows.labels == rows.guesses)], 1), client)
            return
        places = rows.labels if client is None else client * self.classes + rows.labels
        self._confusion.index_add_(0, places * self.classes + rows.guesses, weights)
        self._sums.index_add_(0, places, torch.stack([losses, losses * losses], 1))

    def _add_bands(
        self, rows: JudgedRows, texts: Tensor, weights: Tensor, losses: Tensor, client: Tensor | None
    ) -> None:
        """Add rows to the bands of their labels and of the lengths of their texts."""
        right, shares = weights * (rows.labels == rows.guesses), torch.where(weights > 0, texts[:, 1], 0.0)
        sums = torch.stack([weights, losses, losses * losses, right, shares.to(weights.dtype)], 1)
        first = 0 if client is None else client * sum(BANDS)
        for values, bounds, before in zip(
            (rows.labels, texts[:, 0].contiguous()), self._bounds, (0, BANDS[0]), strict=True
        ):
            self._bands.index_add_(0, torch.bucketize(values, bounds, right=True) + first + before, sums)

    def add_last(self, rows: JudgedRows, chosen: Tensor | None = None, client: Tensor | None = None) -> None:
        """Add the chosen rows of the last pass."""
        self._add(3, torch.stack(self._weighed(rows, chosen), 1), client)

    def add_judged(self, rows: JudgedRows) -> None:
        """Count the rows of a single client, and the odd ones among them."""
        if rows.counted is None:
            self._scalars[0, 5] += len(rows.labels)
        elif rows.odd is not None:
            self._add(5, torch.stack([rows.counted, rows.odd], 1), None)

    def _weighed(self, rows: JudgedRows, chosen: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return 1 for each row that counts and is chosen, else 0; and its loss, else 0."""
        counted = rows.counted if chosen is None else chosen
        if chosen is not None and rows.counted is not None:
            counted = rows.counted & chosen
        dtype = self.numbers.dtype
        if counted is None:
            return self.numbers.new_ones(len(rows.labels)), rows.losses.to(dtype)
        return counted.to(dtype), torch.where(counted, rows.losses, 0.0).to(dtype)

    def _add(self, first: int, columns: Tensor, client: Tensor | None) -> None:
        scalars = self._scalars[:, first : first + columns.shape[1]]
        if client is None:
            scalars += columns.sum(0)
        else:
            scalars.index_add_(0, client, columns)


class ClassSums:
    """The numbers of `ClassTotals` on the host, with a leading axis of clients.

    `tables` holds the matrices of families, [clients, classes or bands, columns]: `training.classes` if there are not
    too many classes; `training.tokens` and `training.lengths` of a language model. `metrics` are the `train.*` metrics,
    [clients] each, NaN where a client has none.
    """

    def __init__(self, totals: ClassTotals, numbers: Array) -> None:
        cells = totals.classes if totals.tabulated else 0
        confusion, losses, scalars, bands = np.split(numbers, np.cumsum(totals.lengths[:3]))
        pairs, losses = confusion.reshape(totals.clients, cells**2), losses.reshape(totals.clients, cells, 2)
        first, last, self._judged = np.split(scalars.reshape(totals.clients, 7), (3, 5), axis=1)
        self.tables = dict[str, Array]()
        if totals.tabulated:
            table = self.tables["training.classes"] = self._table(pairs.reshape(totals.clients, cells, cells), losses)
            first = table.sum(1)[:, [CLASS_COLUMNS.index(name) for name in ("samples", "loss", "right")]]
        self.samples = first[:, 0]
        with np.errstate(divide="ignore", invalid="ignore"):
            means, last_means = first[:, 1:] / first[:, :1], last[:, 1] / last[:, 0]
        self.metrics = {"train.loss_first": means[:, 0], "train.loss_last": last_means, "train.accuracy": means[:, 1]}
        if totals.tabulated:
            shares, pair = confused_pairs(pairs, table[..., 0])
            self.metrics["train.confusion"] = shares
            self.metrics["train.confused_label"], self.metrics["train.confused_guess"] = pair.T
        if totals.language:
            self._add_bands(bands.reshape(totals.clients, sum(BANDS), len(LENGTH_COLUMNS)), totals.classes)

    def _add_bands(self, bands: Array, classes: int) -> None:
        """Add what is known by bands, without bands of few targets or texts."""
        tokens, lengths = bands[:, : BANDS[0], : len(TOKEN_COLUMNS)], bands[:, BANDS[0] :]
        lengths[..., -1] = np.rint(lengths[..., -1])  # texts: each row added its share of one
        halves = []
        for table, bounds, bound, counted in (
            (tokens, TOKEN_BOUNDS, COMMON_TOKENS, 0),
            (lengths, LENGTH_BOUNDS, LONG_TEXT, -1),
        ):
            place = bounds.index(bound) + 1
            halves += [_if_enough(part.sum(1), counted) for part in (table[:, :place], table[:, place:])]
        with np.errstate(divide="ignore", invalid="ignore"):
            common, rare, short, long = (sums[:, 1] / sums[:, 0] for sums in halves)
        if classes > COMMON_TOKENS:
            self.metrics |= {"train.loss_common": common, "train.loss_rare": rare}
        self.metrics |= {"train.loss_short": short, "train.loss_long": long}
        self.tables["training.tokens"] = _if_enough(tokens, 0)
        self.tables["training.lengths"] = _if_enough(lengths, -1)

    @staticmethod
    def _table(confusion: Array, losses: Array) -> Array:
        table = np.empty((*confusion.shape[:2], len(CLASS_COLUMNS)))
        table[..., 0], table[..., 4] = confusion.sum(2), confusion.sum(1)
        table[..., 1:3], table[..., 3] = losses, np.diagonal(confusion, axis1=1, axis2=2)
        return table

    @property
    def is_odd(self) -> bool:
        """Whether the single client's gradients are not those of a cross-entropy of single labels."""
        counted, odd = self._judged[0].tolist()
        return bool(odd > ODD_SHARE * (counted + odd))


def _if_enough(sums: Array, counted: int) -> Array:
    """Return zeros instead of the sums of fewer than FEWEST_IN_BAND of what this column counts."""
    return np.where(sums[..., counted, None] >= FEWEST_IN_BAND, sums, 0.0)


def confused_pairs(counts: Array, sizes: Array) -> tuple[Array, Array]:
    """Return how far errors concentrate in one pair of classes, and that pair, [clients, 2]; NaN if they do not.

    counts: [clients, labels × guesses]; sizes: samples of each label, [clients, labels]. It is max over a≠b of max(C_ab
    − 1, 0) / (n_a + 2); the first of equal pairs.
    """
    classes = sizes.shape[1]
    shares = (counts - 1).reshape(len(counts), classes, classes) / (sizes + 2)[:, :, None]
    flat = shares.reshape(len(counts), -1)
    flat[:, :: classes + 1] = 0  # correct guesses
    best = flat.argmax(axis=1)
    largest = np.maximum(flat[np.arange(len(flat)), best], 0)
    pairs = np.stack(np.divmod(best, classes), axis=1).astype(np.float64)
    pairs[largest <= 0] = np.nan
    return largest, pairs
