# SPDX-License-Identifier: Apache-2.0
"""How well the received model, and then the trained one, fits the client's own samples.

This is the strongest sign of wrong labels, and the most expensive: two forward passes. `Fit` stays within a share of
the training's work by choosing how many samples it uses, from 8 to 64, and how often (see `allowance`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from fedvitals.errors import UnsuitedError, text_of
from fedvitals.probes import samples
from fedvitals.probes.allowance import CALL, FLOOR_ROUNDS, FORWARD, Allowance, Turn, training_work
from fedvitals.probes.differentiate import logits_of
from fedvitals.probes.view import View, evaluation_without_gradients
from fedvitals.stats import LABEL_CLASSES

# Fewer than eight cost hardly less, since a small forward pass is mostly overhead.
MOST, FEWEST = 64, 8
CONFIDENT = 0.7
CHECKED_LABELS = 4  # samples that are read to see whether a data set's own list of labels is that of its samples


class Fit:
    """The fit probe of a run: as many samples, from 8 to 64, as `percent` of the training's work allows, in turns.

    If percent is None it always uses `most` samples.
    """

    def __init__(self, percent: float | None, floor_rounds: int = FLOOR_ROUNDS, most: int = MOST) -> None:
        self.most = most
        self._allowance = Allowance(percent, floor_rounds)

    def count(self, node: str | None, turn: Turn, samples: int, batch: int | None = None) -> int:
        """Return how many of a client's samples to use in this round; 0 if it is not the client's turn.

        The expected work of the training is that of the median client in the previous round.
        """
        if self._allowance.percent is None:
            return self.most
        work = training_work(samples, turn.steps, batch)
        # Powers of two: convolution libraries prepare for each new batch size, at many times its cost.
        count = self.most
        while count > FEWEST and fit_work(count) > self._allowance.earned(work):
            count //= 2
        return count if self._allowance.due(node, turn, fit_work(count), work) else 0

    def before(self, view: View, turn: Turn | None = None) -> tuple[dict[str, float], samples.Batch | None]:
        """Return metrics of the received model, and the samples for `after` (None if it is not the client's turn)."""
        total = samples.size(view.data)
        metrics: dict[str, float] = {"samples": total}
        if view.loss is None or not total:
            return metrics, None
        count = self.count(view.node, turn or Turn(view.round), total, samples.batch_size(view.data))
        if not count:
            return metrics, None
        x, y = samples.read(view.data, samples.spread_indices(total, count, (view.round or 0) * count))
        batch = to_device(view.model, x, y)
        return metrics | self.before_on(view, batch), batch

    def before_on(self, view: View, batch: samples.Batch) -> dict[str, float]:
        """Return metrics of the received model on these samples."""
        x, y = batch
        assert view.loss is not None  # noqa: S101 - there would be no batch
        output, losses = predict(view.model, view.loss, x, y)
        metrics: dict[str, float] = {"fit.samples": len(y), "fit.loss_before": math.fsum(losses) / len(y)}
        if len(y) > 1:
            metrics["fit.loss_p90"] = sorted(losses)[math.ceil(0.9 * len(y)) - 1]
        logits = logits_of(output)
        if is_classifier(logits, y):
            labels, guesses = y.tolist(), logits.argmax(1).tolist()
            metrics["fit.accuracy_before"] = accuracy(labels, guesses)
            metrics["fit.confusion"], pair = confusion(labels, guesses)
            if pair is not None:
                metrics["fit.confused_label"], metrics["fit.confused_guess"] = pair
            metrics["fit.confident_wrong"] = float(confidently_wrong(logits, y).double().mean())
        return metrics

    def after(self, view: View, batch: samples.Batch) -> dict[str, float]:
        """Return metrics of the trained model on the same samples."""
        x, y = batch
        assert view.loss is not None  # noqa: S101 - `before` gave no batch otherwise
        output, losses = predict(view.model, view.loss, x, y)
        metrics = {"fit.loss_after": math.fsum(losses) / len(y)}
        logits = logits_of(output)
        if is_classifier(logits, y):
            metrics["fit.accuracy_after"] = accuracy(y.tolist(), logits.argmax(1).tolist())
        return metrics


def fit_work(samples: int) -> float:
    """Return the sample-passes of a measurement: a forward pass before the training, and another after it."""
    return float(2 * FORWARD * (samples + CALL))


def predict(model: nn.Module, loss: Callable[..., Any], x: samples.Inputs, y: Tensor) -> tuple[Any, list[float]]:
    """Return outputs and per-sample losses in evaluation mode; the model and the random streams are not changed.

    Raises UnsuitedError if the model does not accept such inputs, or the loss its output and labels.
    """
    with evaluation_without_gradients(model):
        try:
            # A model may modify its input in place, and `after` needs it unchanged.
            output = samples.apply(model, samples.mapped(x, Tensor.clone))
            return output, per_sample(loss, output, y).tolist()
        except Exception as error:
            raise UnsuitedError(
                "How well the model fits the client's own samples is not measured: `loss(model(x), y)` on samples of "
                f"`data` raised {type(error).__name__}: {text_of(error)}"
            ) from error


def per_sample(loss: Callable[..., Tensor], output: Any, y: Tensor) -> Tensor:
    """Return the loss of each sample: unreduced if the function supports it, else by one call per sample."""
    if isinstance(loss, nn.Module) and hasattr(loss, "reduction"):
        unreduced: Any = copy.copy(loss)
        unreduced.reduction = "none"
        losses = torch.as_tensor(unreduced(output, y))
    else:
        try:
            losses = torch.as_tensor(loss(output, y, reduction="none"))
        except TypeError:
            losses = torch.zeros(())
    if losses.dim() == 0:  # still reduced: the argument was unknown or ignored
        losses = torch.stack([torch.as_tensor(loss(_sample(output, i), y[i : i + 1])) for i in range(len(y))])
    return losses.reshape(len(y), -1).mean(1)


def _sample(output: Any, place: int) -> Any:
    """Return one sample's part of an output, as a batch of one; for several heads, of each of them."""
    if isinstance(output, dict):
        parts = {name: _sample(part, place) for name, part in output.items()}
        return parts if type(output) is dict else type(output)(**parts)  # a class with attributes, as in Hugging Face
    if isinstance(output, tuple | list):
        own = [_sample(part, place) for part in output]
        return type(output)(*own) if hasattr(output, "_fields") else tuple(own)
    return output[place : place + 1] if isinstance(output, Tensor) and output.dim() else output


def is_classifier(output: Any, y: Tensor) -> bool:
    """Return whether the output has one row of logits per sample, and the labels are integers."""
    return isinstance(output, Tensor) and output.dim() == 2 and y.dim() == 1 and not y.is_floating_point()


def accuracy(labels: list[int], guesses: list[int]) -> float:
    return sum(a == b for a, b in zip(labels, guesses, strict=True)) / len(labels)


def confusion(labels: list[int], guesses: list[int]) -> tuple[float, tuple[int, int] | None]:
    """Return how far errors concentrate in one pair of classes, and that pair (label, guess); None if they do not.

    It is max over a≠b of max(C_ab − 1, 0) / (n_a + 2); the first of equal pairs.
    """
    counts: dict[tuple[int, int], int] = {}
    sizes: dict[int, int] = {}
    for label, other in zip(labels, guesses, strict=True):
        sizes[label] = sizes.get(label, 0) + 1
        if label != other:
            counts[label, other] = counts.get((label, other), 0) + 1
    shares = {pair: (n - 1) / (sizes[pair[0]] + 2) for pair, n in counts.items() if n > 1}
    if not shares:
        return 0.0, None
    share, label, other = min((-share, *pair) for pair, share in shares.items())
    return -share, (label, other)


def confidently_wrong(output: Tensor, y: Tensor) -> Tensor:
    """Return for each sample whether the model predicts another class than its label with more than CONFIDENT."""
    chances, guesses = output.float().softmax(-1).max(-1)
    return (chances > CONFIDENT) & (guesses != y)


def label_entropy(histogram: Mapping[int, int]) -> float:
    total = sum(histogram.values())
    return -sum(n / total * math.log(n / total) for n in histogram.values() if n)


def labels_remark(histogram: Mapping[int, int]) -> tuple[str, str, dict[str, Any]]:
    """Return the remark (name, message, data) that says how many samples of each label a client holds.

    With more than LABEL_CLASSES classes it lists the most frequent, and how many classes and samples are left out.
    """
    kept, data = histogram, dict[str, Any]()
    text = ", ".join(f"{label}: {count}" for label, count in islice(histogram.items(), 1000))
    if len(histogram) > LABEL_CLASSES:
        frequent = sorted(histogram, key=lambda label: (-histogram[label], label))[:LABEL_CLASSES]
        kept = {label: histogram[label] for label in sorted(frequent)}
        rest = sum(histogram.values()) - sum(kept.values())
        data = {"other_classes": len(histogram) - len(kept), "other_samples": rest}
        text = f"{LABEL_CLASSES:,} most frequent of {len(histogram):,} classes ({rest:,} samples are of others)."
    return "labels", text[:1000], {"histogram": {str(label): count for label, count in kept.items()}, **data}


def labels_of(data: Any, most: int = 100_000) -> dict[int, int] | None:
    """Return how many samples each label has, if that is cheap, see `labels_tensor`."""
    labels = labels_tensor(data)
    if labels is None or labels.dim() != 1 or labels.is_floating_point() or len(labels) > most:
        return None
    low, high = torch.aminmax(labels) if len(labels) else (torch.tensor(-1), torch.tensor(0))
    if low < 0 or high >= most:
        return None
    return {label: n for label, n in enumerate(torch.bincount(labels).tolist()) if n}


def labels_tensor(data: Any) -> Tensor | None:
    """Return all labels as one tensor if they are known without reading every sample; else None.

    They are for tensors, for data sets with their labels in `targets` or `labels` (as torchvision's), and for subsets
    of both. The labels that a data set lists count only if a few of its samples have them.
    """
    source = data.dataset if isinstance(data, DataLoader) else data
    labels = _own_labels(source)
    if labels is None or not len(labels) or not isinstance(source, Dataset) or isinstance(source, TensorDataset):
        return labels
    places = samples.spread_indices(len(labels), CHECKED_LABELS, 0)
    try:
        read = samples.read(data, places)[1]
    except (UnsuitedError, TypeError, ValueError, RuntimeError):
        return None  # samples that make no batch
    return labels if torch.equal(read.cpu(), labels[places].to(read.dtype).cpu()) else None


def _own_labels(data: Any) -> Tensor | None:
    match data:
        case Subset():
            labels = _own_labels(data.dataset)
            return None if labels is None else labels[torch.as_tensor(data.indices, device=labels.device)]
        case TensorDataset():
            return data.tensors[1] if len(data.tensors) == 2 else None
        case (_, Tensor() as labels):
            return labels
        case Dataset() if hasattr(data, "__len__"):
            labels = next((getattr(data, name) for name in ("targets", "labels") if hasattr(data, name)), None)
            try:
                known = None if labels is None else torch.as_tensor(labels)
            except (TypeError, ValueError, RuntimeError):
                return None  # as words, or in pieces of different lengths
            return known if known is not None and known.dim() and len(known) == len(data) else None
    return None


def to_device(model: nn.Module, x: samples.Inputs, y: Tensor) -> samples.Batch:
    parameter = next(model.parameters(), None)
    if parameter is None or parameter.device == y.device:
        return x, y
    return samples.mapped(x, lambda part: part.to(parameter.device)), y.to(parameter.device)
