# SPDX-License-Identifier: Apache-2.0
"""Fit of stacked clients: the same numbers as `fit`, for all due clients by two batched forward passes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedvitals.catalog import CATALOG
from fedvitals.probes.allowance import FIRST_SAMPLES, Turn
from fedvitals.probes.fit import Fit, confidently_wrong, confusion, is_classifier, per_sample
from fedvitals.probes.stacked.model import StackModel, rows_of
from fedvitals.probes.view import evaluation_without_gradients
from fedvitals.stack import Stack
from fedvitals.stats import Array

Batch = tuple[Sequence[int], Tensor, Tensor]  # rows of clients, and their samples and labels
Whole = npt.NDArray[np.int64]
_MOST_PAIRS = 1_000_000  # of classes, over all clients


class StackFit(Fit):
    """The fit probe for a whole stack: for the same clients, with as many samples, as if each trained alone."""

    def received(
        self, stack: Stack, model: StackModel, turn: Turn | None = None
    ) -> tuple[dict[str, Array], list[Batch]]:
        """Return metrics of the received models, [clients] each, without values of clients that are not due.

        Return also the samples for `trained`, grouped by clients that use equally many.
        """
        batches: list[Batch] = []
        metrics: dict[str, Array] = {}
        for count, rows in self._due(stack, turn or Turn()).items():
            x, y = (rows_of(torch.as_tensor(part), rows).to(model.states.device) for part in stack.samples(count))
            if x.shape[1]:
                batches.append((rows, x, y))
                fill_rows(metrics, self._received(stack, model.of_clients(rows), x, y), rows, len(stack.nodes))
        return metrics, batches

    def trained(self, stack: Stack, model: StackModel, batches: Sequence[Batch]) -> dict[str, Array]:
        """Return metrics of the trained models on the same samples."""
        metrics: dict[str, Array] = {}
        for rows, x, y in batches:
            predictions, classes = _predict(stack, model.of_clients(rows), x, y)
            own = {"fit.loss_after": predictions[0].mean(1)}
            if classes:
                own["fit.accuracy_after"] = (predictions[1] == predictions[2]).mean(axis=1)
            fill_rows(metrics, own, rows, len(stack.nodes))
        return metrics

    def _due(self, stack: Stack, turn: Turn) -> dict[int, list[int]]:
        """Return the rows of clients to measure, by their number of samples."""
        rows: dict[int, list[int]] = {}
        if stack.loss is not None:
            silent = set(stack.silent)
            for row, (node, own) in enumerate(zip(stack.nodes, sample_counts(stack), strict=True)):
                count = 0 if node in silent else self.count(node, turn, own)
                if count:
                    rows.setdefault(count, []).append(row)
        return rows

    def _received(self, stack: Stack, model: StackModel, x: Tensor, y: Tensor) -> dict[str, Array]:
        predictions, classes = _predict(stack, model, x, y)
        losses, count = predictions[0], y.shape[1]
        metrics = {"fit.samples": np.full(len(y), float(count)), "fit.loss_before": losses.mean(1)}
        if count > 1:
            metrics["fit.loss_p90"] = np.sort(losses, axis=1)[:, math.ceil(0.9 * count) - 1]
        if classes:
            labels, guesses = predictions[1:3].astype(np.int64)
            metrics["fit.accuracy_before"] = (labels == guesses).mean(axis=1)
            metrics["fit.confusion"], pairs = confusions(labels, guesses, classes)
            metrics["fit.confused_label"], metrics["fit.confused_guess"] = pairs.T
            metrics["fit.confident_wrong"] = predictions[3].mean(axis=1)
        return metrics


def sample_counts(stack: Stack) -> list[int]:
    """Return how many samples each client has; FIRST_SAMPLES if the host does not say."""
    return [FIRST_SAMPLES] * len(stack.nodes) if stack.labels is None else [len(own) for own in stack.labels]


def fill_rows(metrics: dict[str, Array], own: Mapping[str, Array], rows: Sequence[int], clients: int) -> None:
    """Set the values of some clients in metrics of all of them, [clients] each, the others without a value.

    Missing values are masked, or NaN in a metric where that means missing.
    """
    for name, values in own.items():
        if name not in metrics:
            nothing = np.full(clients, np.nan)
            metrics[name] = nothing if CATALOG[name].rare else np.ma.masked_array(nothing, mask=True)
        metrics[name][list(rows)] = values


def confusions(labels: Whole, guesses: Whole, classes: int) -> tuple[Array, Array]:
    """Return `fit.confusion` of each client, from [clients, samples], and its pair, [clients, 2]; NaN if there is none.

    Computed for all clients at once if a table of all pairs is small.
    """
    clients = len(labels)
    if clients * classes**2 > _MOST_PAIRS or labels.min() < 0 or labels.max() >= classes:
        both = [confusion(*own) for own in zip(labels.tolist(), guesses.tolist(), strict=True)]
        pairs = [(math.nan, math.nan) if pair is None else pair for _, pair in both]
        return np.array([share for share, _ in both]), np.array(pairs, float)
    place = (np.arange(clients)[:, None] * classes + labels) * classes + guesses
    counts = np.bincount(place.ravel(), minlength=clients * classes**2).reshape(clients, classes, classes)
    sizes = counts.sum(axis=2, keepdims=True)
    counts[:, np.arange(classes), np.arange(classes)] = 0  # correct guesses
    shares = (np.maximum(counts - 1, 0) / (sizes + 2)).reshape(clients, -1)
    best = shares.argmax(axis=1)
    largest_shares = shares[np.arange(clients), best]
    return largest_shares, np.where(largest_shares[:, None] > 0, np.stack(np.divmod(best, classes), axis=1), np.nan)


def _predict(stack: Stack, model: StackModel, x: Tensor, y: Tensor) -> tuple[Array, int]:
    """Return each sample's loss, in evaluation mode, and the number of classes, 0 if it is not a classifier.

    For a classifier also label, guess and whether it is confidently wrong, [1 or 4, clients, samples]. Uses one copy to
    the host.
    """
    assert stack.loss is not None  # noqa: S101 - asked by the caller
    with evaluation_without_gradients(model.module):
        # A copy: a model may modify its input in place, and the samples are needed again.
        output = torch.cat([model.apply(x[part].clone(), part) for part in model.parts(x)])
        losses = per_sample(stack.loss, output.flatten(0, 1), y.flatten(0, 1)).view(y.shape[:2])
        classes = output.shape[2] if is_classifier(output.flatten(0, 1), y.flatten(0, 1)) else 0
        known = [y, output.argmax(2), confidently_wrong(output, y)] if classes else []
        return torch.stack([part.double() for part in (losses, *known)]).cpu().numpy(), classes
