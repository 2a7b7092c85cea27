# SPDX-License-Identifier: Apache-2.0
"""Describes a client's own samples in a few hundred numbers, once per change of its data, without running a model.

Every sample is projected onto the same few directions for all clients (a random projection; inputs of few features as
they are; for tokens the mean of a random vector per token). Only the means of these projections by class, their pooled
covariance within classes, and scalars such as the spread of the inputs leave the client, never a single sample. The
server compares them with the peers' (`diagnosis.evidence.compared_data`): wrong labels move the means of classes
towards each other, and noise on inputs raises their spread.
"""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, Subset, TensorDataset

from fedvitals.data_change import UNCHANGED, OwnData, sketch_from, vanished_labels
from fedvitals.probes import samples
from fedvitals.probes.fit import labels_of, labels_tensor
from fedvitals.stats import Array

EVENT = "data"  # the event that carries the description
DIMENSIONS = 16  # of a projection, and as many for the patches of an image
FILTERS, PATCH, STRIDE, GRID = 16, 5, 2, 3  # of these patches; pixels; fields along each side of an image
SMALLEST_IMAGE = 2 * GRID + PATCH - 1  # pixels along each side; below 16, patches are taken at every pixel
MOST_OF_ARRAYS, MOST_OF_OTHERS = (
    1024,
    128,
)  # samples described: of tensors, and of data that are read one by one
MOST_NUMBERS = 1 << 20  # of tensors, unless that allows fewer samples than for other data
FEWEST_OF_CLASS = 4  # samples; a mean of fewer would reveal single samples
MOST_CLASSES = 64  # the most frequent ones
TOKENS = 4096  # random vectors for tokens, whose ids are taken modulo this
CHECKED = 8  # samples compared to detect a change of the data
CHECK_ROUNDS = 5  # participations between two checks of data that must be read sample by sample
LONGEST_WAIT = 40  # the same if the data differ at each check, as augmented ones do
_DIGITS = 4  # significant digits of transmitted numbers


@dataclass(frozen=True, slots=True)
class DataDescription:
    """A description of a client's data: scalars by name, and the content of the event."""

    metrics: dict[str, float]
    event: dict[str, Any]

    def remark(self, looks: int) -> tuple[str, str, Mapping[str, Any]]:
        """Return it as an event's name, message and data. `looks`: how often the previous data were found unchanged."""
        text = f"{self.event['samples']:,} samples of {self.event['features']:,} numbers."
        return EVENT, text, {**self.event, "looks": looks}


def describe(x: samples.Inputs, y: Tensor | None, total: int) -> DataDescription | None:
    """Describe samples [n, ...] and their labels [n] of a client that has `total`; None if there are too few.

    Labels that are not integers, one per sample, are left out; all samples then belong to class 0.
    """
    inputs = _first_tensor(x)
    if inputs is None or inputs.dim() == 0 or len(inputs) < FEWEST_OF_CLASS:
        return None
    flat = inputs.detach().reshape(len(inputs), -1)
    tokens = not (flat.is_floating_point() or flat.is_complex()) and inputs.dtype != torch.uint8
    metrics = _token_metrics(flat) if tokens else _number_metrics(flat)
    parts = [project(flat, tokens=tokens), *([] if tokens else _looks(inputs.detach()))]
    projected = np.concatenate([np.asarray(part.cpu().numpy(), np.float64) for part in parts], axis=1)
    labelled = y is not None and y.dim() == 1 and not y.is_floating_point() and len(y) == len(flat)
    classes = y.detach().cpu().numpy().astype(np.int64) if labelled and y is not None else np.zeros(len(flat), np.int64)
    scalars = {name.removeprefix("data."): value for name, value in metrics.items()}
    if not tokens:
        scalars["std_error"] = _spread_error(flat)
    about = {"samples": total, "features": int(flat.shape[1]), "tokens": tokens, "labelled": labelled, **scalars}
    checks = {"inputs": checksum(flat), "labels": 0 if y is None else checksum(y)}
    return DataDescription(metrics, about | checks | _sketch(projected, classes))


def checksum(tensor: Tensor) -> int:
    """Return a number that differs between data that differ."""
    own = tensor.detach().cpu()
    return zlib.crc32(np.ascontiguousarray((own.float() if own.dtype == torch.bfloat16 else own).numpy()).tobytes())


def project(flat: Tensor, *, tokens: bool) -> Tensor:
    """Return inputs [n, features] projected on the common directions, [n, at most DIMENSIONS], on their device."""
    if tokens:
        table = torch.from_numpy(_signs(TOKENS)).to(flat.device)
        return table[flat.long().remainder(TOKENS)].mean(1)
    numbers = torch.nan_to_num(flat.float(), nan=0.0, posinf=0.0, neginf=0.0)
    if flat.shape[1] <= DIMENSIONS:
        return numbers
    return numbers @ torch.from_numpy(_signs(flat.shape[1])).to(flat.device) / math.sqrt(flat.shape[1])


def _looks(images: Tensor) -> list[Tensor]:
    """Return how strongly patches of images [n, channels, height, width] respond to random filters, [n, DIMENSIONS].

    A list of one tensor, the projected responses per filter and field of the image; empty for inputs that are not
    images. Brightness and contrast of an image have no effect. Classes of natural images differ by their patches more
    than by their pixels: along these directions they lie two to three times as far apart.
    """
    if images.dim() != 4:
        return []
    if images.shape[3] <= 4 < images.shape[1]:  # channels last
        images = images.permute(0, 3, 1, 2)
    if images.shape[1] > 4 or min(images.shape[2:]) < SMALLEST_IMAGE:
        return []
    numbers = torch.nan_to_num(images.float(), nan=0.0, posinf=0.0, neginf=0.0)
    spread = _variance(numbers.flatten(1), 1)[:, None].sqrt() + 1e-12
    filters = torch.from_numpy(_filters(images.shape[1])).to(images.device)
    stride = STRIDE if min(images.shape[2:]) >= 16 else 1
    # The filters sum to 0 and everything after is linear in the scale, as if each image had been standardised.
    answers = functional.conv2d(numbers, filters, stride=stride).relu_()
    fields = functional.adaptive_avg_pool2d(answers, GRID).flatten(1) / spread
    return [fields @ torch.from_numpy(_signs(fields.shape[1])).to(images.device) / math.sqrt(fields.shape[1])]


@functools.lru_cache(maxsize=4)
def _filters(channels: int) -> Any:
    """Return the filters, [FILTERS, channels, PATCH, PATCH], which ignore uniform patches; equal in every process."""
    drawn = np.random.default_rng(channels).standard_normal((FILTERS, channels * PATCH * PATCH))
    drawn -= drawn.mean(axis=1, keepdims=True)
    drawn /= np.linalg.norm(drawn, axis=1, keepdims=True)
    return drawn.astype(np.float32).reshape(FILTERS, channels, PATCH, PATCH)


@functools.lru_cache(maxsize=8)
def _signs(rows: int) -> Any:
    """Return the directions, [rows, DIMENSIONS] of ±1; equal in every process."""
    return np.random.default_rng(rows).integers(0, 2, (rows, DIMENSIONS)).astype(np.float32) * 2 - 1


def _first_tensor(x: samples.Inputs) -> Tensor | None:
    parts = [x] if isinstance(x, Tensor) else [*x.values()] if isinstance(x, Mapping) else [*x]
    return next((part for part in parts if isinstance(part, Tensor)), None)


def _number_metrics(flat: Tensor) -> dict[str, float]:
    numbers = flat.float()
    lowest, highest = numbers.amin(0), numbers.amax(0)
    missing, edges = 0.0, torch.stack([lowest.min(), highest.max()])
    kept = numbers
    if not bool(torch.isfinite(edges).all()):  # then the smallest and the largest are not finite either
        finite = torch.isfinite(numbers)
        kept, missing = numbers[finite], 1 - float(finite.double().mean())
        edges = torch.stack(torch.aminmax(kept)) if kept.numel() else torch.zeros_like(edges)
    mean, variance = kept.mean(), _variance(kept.flatten(), 0)
    constant = (lowest == highest).double().mean()
    values = torch.stack([mean, variance.sqrt(), constant, *edges]).double().cpu().tolist()
    names = ("data.mean", "data.std", "data.constant", "data.min", "data.max")
    return dict(zip(names, values, strict=True)) | {"data.missing": missing, "data.duplicates": _duplicates(flat)}


def _variance(numbers: Tensor, axis: int) -> Tensor:
    """Return the variance along an axis, in two passes, because torch's own takes ten times as long on a CPU."""
    return (numbers - numbers.mean(axis, keepdim=True)).square_().mean(axis)


def _spread_error(flat: Tensor) -> float:
    """Return the relative standard error of the inputs' spread, from the differences between single samples."""
    numbers = torch.nan_to_num(flat.float(), nan=0.0, posinf=0.0, neginf=0.0)
    squares = ((numbers - numbers.mean()) ** 2).mean(1).double()
    spread, mean = torch.stack([squares.std(), squares.mean()]).cpu().tolist()
    return float(0.5 * spread / mean / math.sqrt(len(squares))) if mean > 0 else 0.0


def _token_metrics(flat: Tensor) -> dict[str, float]:
    lengths = (flat != 0).sum(1).double()
    return {"data.length": float(lengths.mean()), "data.duplicates": _duplicates(flat)}


def _duplicates(flat: Tensor) -> float:
    """Return the share of samples that equal an earlier one."""
    own = flat.detach().cpu()
    rows = np.ascontiguousarray((own.float() if own.dtype == torch.bfloat16 else own).numpy())
    return 1 - len({row.tobytes() for row in rows}) / len(rows)


def _sketch(projected: Array, classes: npt.NDArray[np.int64]) -> dict[str, Any]:
    """Return counts, means and the covariance within classes of projections [n, dimensions] of these classes [n]."""
    names, places, counts = np.unique(classes, return_inverse=True, return_counts=True)
    sums = np.zeros((len(names), projected.shape[1]))
    np.add.at(sums, places, projected)
    means = sums / counts[:, None]
    residuals = projected - means[places]
    freedom = max(1, len(projected) - len(names))
    covariance = residuals.T @ residuals / freedom
    # The last directions: for images those of their patches, which do not depend on the unit of the inputs.
    spreads = np.bincount(places, (residuals[:, -DIMENSIONS:] ** 2).sum(axis=1), len(names)) / np.maximum(counts - 1, 1)
    told = np.flatnonzero(counts >= FEWEST_OF_CLASS)
    told = np.sort(told[np.argsort(-counts[told], kind="stable")[:MOST_CLASSES]])
    return {
        "classes": names[told].tolist(),
        "counts": counts[told].tolist(),
        "means": [_rounded(row) for row in means[told]],
        "spreads": _rounded(spreads[told]),
        "covariance": _rounded(covariance[np.triu_indices(len(covariance))], 3),
        "freedom": freedom,
    }


def _rounded(values: Array, digits: int = _DIGITS) -> list[float]:
    return [float(f"{value:.{digits}g}") for value in values]


@dataclass(slots=True)
class _KnownData:
    """What is remembered of a client's data: its tensors, checksum, description and labels.

    And when to check again.
    """

    tensors: tuple[weakref.ref[Tensor], ...] = ()
    versions: tuple[int, ...] = ()
    rows: Sequence[int] | None = None  # of these tensors, where not all are the client's
    checksum: int | None = None  # of tensors
    sums: Mapping[int, int] = field(default_factory=dict)  # checksums by index, of samples read one by one
    total: int = 0  # samples, of which these are
    targets: int | None = None  # checksum of all its labels, where these can be had without its samples
    source: Callable[[], Any] = lambda: None  # the data set that is read one by one, as long as it exists
    seen: int = 0  # participations with this very one
    looks: int = 0  # that found the data unchanged
    wait: int = CHECK_ROUNDS  # participations between two looks
    left: int = 0  # participations until the next look
    own: OwnData = field(default_factory=OwnData)
    labels: Mapping[int, int] = field(default_factory=dict)
    vanished: frozenset[int] = frozenset()


class DataWatch:
    """Detects when the data of a run's clients are new or have changed, and describes them then."""

    def __init__(self) -> None:
        self._known: dict[str, _KnownData] = {}

    def look(self, node: str, data: Any) -> tuple[dict[str, float], tuple[str, str, Mapping[str, Any]]] | None:
        """Return metrics and the remark about a client's data if they are new; None while they stay the same.

        Tensors are compared in every round, at almost no cost if they are the same objects; data that must be read
        sample by sample, only every few participations, and less often the more often they differ.
        """
        known = self._known.setdefault(node, _KnownData())
        arrays = tensors_of(data)
        if arrays is not None:
            return self._look_at_tensors(known, arrays) if len(arrays) else None
        total = samples.size(data)
        replaced = self._is_replaced(known, data) or total != known.total
        if not total or (known.left > 0 and not replaced):
            known.left -= bool(total)
            return None
        unchanged = total == known.total and self._is_as_described(known, data, whole=replaced)
        differs_again = bool(known.sums) and not unchanged and not replaced
        known.wait = min(2 * known.wait, LONGEST_WAIT) if differs_again else CHECK_ROUNDS
        known.left = known.wait - 1
        if unchanged:
            known.looks += 1
            return None
        places = samples.spread_indices(total, MOST_OF_OTHERS, 0)
        batch = samples.read(data, places)
        known.total, known.sums, known.targets = total, _checksums(batch, places), _checksum_of_labels(data)
        return _report(known, describe(*batch, total), labels_of(data))

    @staticmethod
    def _is_replaced(known: _KnownData, data: Any) -> bool:
        """Return whether this is another data set than the one that was there in several participations."""
        source = data.dataset if isinstance(data, DataLoader) else data
        same = known.source() is source
        replaced = not same and known.seen > 1
        known.seen = known.seen + 1 if same else 1
        with contextlib.suppress(TypeError):  # a list cannot be referred to so, and counts as another each time
            known.source = weakref.ref(source)
        return replaced

    @staticmethod
    def _is_as_described(known: _KnownData, data: Any, *, whole: bool) -> bool:
        """Return whether data are the described ones, by all labels if they are at hand and a few samples: others at
        each look, so that what was changed in a few of them is noticed in the end. `whole`: by all of these samples.
        """
        stride = 1 if whole else max(1, len(known.sums) // CHECKED)
        places = [*known.sums][known.looks % stride :: stride][: None if whole else CHECKED]
        sums = _checksums(samples.read(data, places), places)
        return all(known.sums[place] == own for place, own in sums.items()) and (
            known.targets == _checksum_of_labels(data)
        )

    def look_at_all(
        self, nodes: Sequence[str], inputs: Sequence[Tensor], labels: Sequence[Tensor]
    ) -> dict[int, tuple[dict[str, float], tuple[str, str, Mapping[str, Any]]]]:
        """Do the same for clients that train as one batch, by their rows, with two copies from the device."""
        picked = [x[torch.as_tensor(samples.spread_indices(len(x), CHECKED, 0), device=x.device)] for x in inputs]
        both = [
            [part.numpy() for part in torch.cat([*own]).cpu().split([len(part) for part in own])]
            for own in (picked, labels)
        ]
        told = {}
        for row, (node, few, own) in enumerate(zip(nodes, *both, strict=True)):
            known = self._known.setdefault(node, _KnownData())
            if self._is_unchanged(known, zlib.crc32(own.tobytes(), zlib.crc32(few.tobytes()))):
                continue
            report = _report(known, _describe_tensors(_Arrays(inputs[row], labels[row])), labels_of((few, labels[row])))
            if report is not None:
                told[row] = report
        return told

    def _look_at_tensors(
        self, known: _KnownData, own: _Arrays
    ) -> tuple[dict[str, float], tuple[str, str, Mapping[str, Any]]] | None:
        arrays = own.x, own.y
        same = len(known.tensors) == 2 and all(ref() is part for ref, part in zip(known.tensors, arrays, strict=True))
        versions = tuple(part._version for part in arrays)  # noqa: SLF001 - counts changes in place
        if same and versions == known.versions and known.rows is own.rows:
            known.looks += 1
            return None
        known.tensors, known.versions, known.rows = tuple(map(weakref.ref, arrays)), versions, own.rows
        few, _ = own.at(samples.spread_indices(len(own), CHECKED, 0))
        labels = own.labels()
        if self._is_unchanged(known, _checksum_of((few, labels))):
            return None
        return _report(known, _describe_tensors(own), labels_of((few, labels)))

    @staticmethod
    def _is_unchanged(known: _KnownData, checksum: int) -> bool:
        unchanged = known.checksum == checksum
        known.looks += unchanged
        known.checksum = checksum
        return unchanged


@dataclass(frozen=True, slots=True)
class _Arrays:
    """Data that are two tensors, or these rows of them."""

    x: Tensor
    y: Tensor
    rows: Sequence[int] | None = None

    def __len__(self) -> int:
        return samples.size((self.x, self.y)) if self.rows is None else len(self.rows)

    def at(self, places: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return inputs and labels of these samples."""
        rows = torch.as_tensor(places if self.rows is None else [int(self.rows[place]) for place in places])
        return self.x[rows.to(self.x.device)], self.y[rows.to(self.y.device)]

    def labels(self) -> Tensor:
        """Return all labels."""
        return self.y if self.rows is None else self.y[torch.as_tensor(self.rows, device=self.y.device)]


def tensors_of(data: Any) -> _Arrays | None:
    """Return inputs and labels of data that are two tensors, or rows of these; None of any others."""
    match data:
        case DataLoader():
            return tensors_of(data.dataset)
        case TensorDataset(tensors=(Tensor() as x, Tensor() as y)):
            return _Arrays(x, y)
        case Subset(dataset=TensorDataset(tensors=(Tensor() as x, Tensor() as y)), indices=rows):
            return _Arrays(x, y, rows)
        case (Tensor() as x, Tensor() as y):
            return _Arrays(x, y)
        case (np.ndarray() as x, np.ndarray() as y):
            return _Arrays(torch.as_tensor(x), torch.as_tensor(y))
    return None


def _describe_tensors(own: _Arrays) -> DataDescription | None:
    numbers = len(own) * math.prod(own.x.shape[1:])
    most = min(MOST_OF_ARRAYS, max(MOST_OF_OTHERS, MOST_NUMBERS * len(own) // max(numbers, 1)))
    return describe(*own.at(samples.spread_indices(len(own), most, 0)), len(own))


def _report(
    known: _KnownData, description: DataDescription | None, labels: Mapping[int, int] | None = None
) -> tuple[dict[str, float], tuple[str, str, Mapping[str, Any]]] | None:
    """Return the report on new or changed data, with what changed in them.

    `labels`: how many samples each label has, if known.
    """
    looks, known.looks = known.looks, 0
    if description is None:
        return None
    name, text, event = description.remark(looks)
    is_first = known.own.newest is None
    known.own.add(sketch_from(0, event))
    change = known.own.change
    if labels is not None:
        known.vanished = vanished_labels(known.labels, labels, known.vanished)
        known.labels = labels
    if is_first:
        return description.metrics, (name, text, event)
    told: dict[str, Any] = {"change": UNCHANGED if change is None else change.kind}
    if change is not None and math.isfinite(change.moved):
        told["moved"] = float(f"{change.moved:.{_DIGITS}g}")
    if known.vanished:
        told["classes_lost"] = len(known.vanished)
    return description.metrics, (name, text, {**event, **told})


def _checksum_of(batch: samples.Batch) -> int:
    x = _first_tensor(batch[0])
    return zlib.crc32(checksum(batch[1]).to_bytes(4, "big"), 0 if x is None else checksum(x))


def _checksums(batch: samples.Batch, places: Sequence[int]) -> dict[int, int]:
    """Return the checksum of each of these samples, by its index."""
    x, y = _first_tensor(batch[0]), batch[1]
    return {place: _checksum_of((y[row] if x is None else x[row], y[row])) for row, place in enumerate(places)}


def _checksum_of_labels(data: Any) -> int | None:
    labels = labels_tensor(data)
    return None if labels is None else checksum(labels)
