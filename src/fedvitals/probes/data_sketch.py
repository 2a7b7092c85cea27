# SPDX-License-Identifier: Apache-2.0
"""Describes a client's own samples in a few hundred numbers, once per change of its data, without running a model.

Every sample is projected onto the same few directions for all clients (a random projection; inputs of few features as
they are; of tokens the mean of a random vector per token). What leaves the client are the means of these projections by
class, their pooled covariance within classes, and scalars such as the spread of the inputs; no sample by itself. The
server compares them with the peers' (`diagnosis.evidence.compared_data`): labels that are wrong move the means of
classes towards each other, noise on inputs raises their spread.
"""

from __future__ import annotations

import functools
import math
import weakref
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from fedvitals.data_change import UNCHANGED, OwnData, sketch_from, vanished_labels
from fedvitals.probes import samples
from fedvitals.probes.fit import labels_of
from fedvitals.stats import Array

EVENT = "data"  # the event that carries the description
DIMENSIONS = 16  # of a projection, and as many of what an image's patches look like
FILTERS, PATCH, STRIDE, GRID = 16, 5, 2, 3  # of these patches; pixels; fields of an image, along each side
SMALLEST_IMAGE = 2 * GRID + PATCH - 1  # pixels along each side; where it is below 16, patches follow pixel by pixel
MOST_OF_ARRAYS, MOST_OF_OTHERS = (
    1024,
    128,
)  # samples that are described: of tensors, and of data that are read one by one
MOST_NUMBERS = 1 << 20  # of tensors, unless that would be fewer samples than of others
FEWEST_OF_CLASS = 4  # samples; means of fewer would show single samples
MOST_CLASSES = 64  # the most frequent ones
TOKENS = 4096  # random vectors for tokens, whose ids are taken modulo this
CHECKED = 8  # samples that are compared to notice a change of the data
CHECK_ROUNDS = 5  # participations between two looks at data that have to be read sample by sample
LONGEST_WAIT = 40  # the same where the data differ at each look, as augmented ones do
_DIGITS = 4  # significant, of what is sent


@dataclass(frozen=True, slots=True)
class DataDescription:
    """What is told of a client's data: scalars by name, and what stands in the event."""

    metrics: dict[str, float]
    event: dict[str, Any]

    def remark(self, looks: int) -> tuple[str, str, Mapping[str, Any]]:
        """Return it as an event's name, message and data. `looks`: how often the data before were found unchanged."""
        text = f"{self.event['samples']:,} samples of {self.event['features']:,} numbers."
        return EVENT, text, {**self.event, "looks": looks}


def describe(x: samples.Inputs, y: Tensor | None, total: int) -> DataDescription | None:
    """Describe samples [n, ...] and their labels [n] of a client that has `total`; None if there are too few.

    Labels that are not whole numbers, one per sample, are left out; all samples then are of one class, 0.
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
    """Return inputs [n, features] on the common directions, [n, at most DIMENSIONS], where they lie."""
    if tokens:
        table = torch.from_numpy(_signs(TOKENS)).to(flat.device)
        return table[flat.long().remainder(TOKENS)].mean(1)
    numbers = torch.nan_to_num(flat.float(), nan=0.0, posinf=0.0, neginf=0.0)
    if flat.shape[1] <= DIMENSIONS:
        return numbers
    return numbers @ torch.from_numpy(_signs(flat.shape[1])).to(flat.device) / math.sqrt(flat.shape[1])


def _looks(images: Tensor) -> list[Tensor]:
    """Return what the patches of images [n, channels, height, width] look like, as one [n, DIMENSIONS]: how strongly
    they answer to random filters, in each field of the image; nothing of inputs that are no images.

    Brightness and contrast of an image count for nothing here. Classes of natural images differ by their patches more
    than by their pixels: with these directions they lie two to three times as far apart.
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
    # The filters add up to 0 and all that follows is linear in the scale: as if each image had been standardised.
    answers = functional.conv2d(numbers, filters, stride=stride).relu_()
    fields = functional.adaptive_avg_pool2d(answers, GRID).flatten(1) / spread
    return [fields @ torch.from_numpy(_signs(fields.shape[1])).to(images.device) / math.sqrt(fields.shape[1])]


@functools.lru_cache(maxsize=4)
def _filters(channels: int) -> Any:
    """Return the filters, [FILTERS, channels, PATCH, PATCH], which see no uniform patch: the same in every process."""
    drawn = np.random.default_rng(channels).standard_normal((FILTERS, channels * PATCH * PATCH))
    drawn -= drawn.mean(axis=1, keepdims=True)
    drawn /= np.linalg.norm(drawn, axis=1, keepdims=True)
    return drawn.astype(np.float32).reshape(FILTERS, channels, PATCH, PATCH)


@functools.lru_cache(maxsize=8)
def _signs(rows: int) -> Any:
    """Return the directions, [rows, DIMENSIONS] of ±1: the same in every process."""
    return np.random.default_rng(rows).integers(0, 2, (rows, DIMENSIONS)).astype(np.float32) * 2 - 1


def _first_tensor(x: samples.Inputs) -> Tensor | None:
    parts = [x] if isinstance(x, Tensor) else [*x.values()] if isinstance(x, Mapping) else [*x]
    return next((part for part in parts if isinstance(part, Tensor)), None)


def _number_metrics(flat: Tensor) -> dict[str, float]:
    numbers = flat.float()
    lowest, highest = numbers.amin(0), numbers.amax(0)
    missing, edges = 0.0, torch.stack([lowest.min(), highest.max()])
    kept = numbers
    if not bool(torch.isfinite(edges).all()):  # the smallest and the largest of what is not finite are not, either
        finite = torch.isfinite(numbers)
        kept, missing = numbers[finite], 1 - float(finite.double().mean())
        edges = torch.stack(torch.aminmax(kept)) if kept.numel() else torch.zeros_like(edges)
    mean, variance = kept.mean(), _variance(kept.flatten(), 0)
    constant = (lowest == highest).double().mean()
    values = torch.stack([mean, variance.sqrt(), constant, *edges]).double().cpu().tolist()
    names = ("data.mean", "data.std", "data.constant", "data.min", "data.max")
    return dict(zip(names, values, strict=True)) | {"data.missing": missing, "data.duplicates": _duplicates(flat)}


def _variance(numbers: Tensor, axis: int) -> Tensor:
    """Return the variance along an axis, in two passes: torch's own takes ten times as long on a CPU."""
    return (numbers - numbers.mean(axis, keepdim=True)).square_().mean(axis)


def _spread_error(flat: Tensor) -> float:
    """Return the relative standard error of the inputs' spread, by how much single samples differ in theirs."""
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
    # The last directions: of images those of their patches, which do not depend on the unit of the inputs.
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
    """What is remembered of a client's data: which tensors they were, their checksum, and when to look again; how they
    were described, and which labels they had.
    """

    tensors: tuple[weakref.ref[Tensor], ...] = ()
    versions: tuple[int, ...] = ()
    checksum: int | None = None
    looks: int = 0  # that found the data unchanged
    wait: int = CHECK_ROUNDS  # participations between two looks
    left: int = 0  # participations until the next look
    own: OwnData = field(default_factory=OwnData)
    labels: Mapping[int, int] = field(default_factory=dict)
    vanished: frozenset[int] = frozenset()


class DataWatch:
    """Notices when the data of a run's clients are new or have changed, and describes them then."""

    def __init__(self) -> None:
        self._known: dict[str, _KnownData] = {}

    def look(self, node: str, data: Any) -> tuple[dict[str, float], tuple[str, str, Mapping[str, Any]]] | None:
        """Return metrics and the remark about a client's data if they are new; None while they stay as they are.

        Tensors are compared in every round, at next to no cost where they are the same objects; data that have to be
        read sample by sample every few participations, and the less often the more often they differ.
        """
        known = self._known.setdefault(node, _KnownData())
        arrays = tensors_of(data)
        if arrays is not None:
            return self._look_at_tensors(known, arrays) if samples.size(arrays) else None
        if known.left > 0:
            known.left -= 1
            return None
        total = samples.size(data)
        if not total:
            return None
        few = samples.read(data, samples.spread_indices(total, CHECKED, 0))
        is_new, unchanged = known.checksum is None, self._is_unchanged(known, _checksum_of(few))
        known.wait = CHECK_ROUNDS if unchanged or is_new else min(2 * known.wait, LONGEST_WAIT)
        known.left = known.wait - 1
        if unchanged:
            return None
        return _report(known, describe(*samples.read(data, samples.spread_indices(total, MOST_OF_OTHERS, 0)), total))

    def look_at_all(
        self, nodes: Sequence[str], inputs: Sequence[Tensor], labels: Sequence[Tensor]
    ) -> dict[int, tuple[dict[str, float], tuple[str, str, Mapping[str, Any]]]]:
        """Do the same for clients that train as one, by their rows; what is compared leaves a device in two copies."""
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
            report = _report(known, _describe_tensors(inputs[row], labels[row]), labels_of((few, labels[row])))
            if report is not None:
                told[row] = report
        return told

    def _look_at_tensors(
        self, known: _KnownData, arrays: tuple[Tensor, Tensor]
    ) -> tuple[dict[str, float], tuple[str, str, Mapping[str, Any]]] | None:
        same = len(known.tensors) == 2 and all(ref() is own for ref, own in zip(known.tensors, arrays, strict=True))
        versions = tuple(own._version for own in arrays)  # noqa: SLF001 - counts changes in place
        if same and versions == known.versions:
            known.looks += 1
            return None
        known.tensors, known.versions = tuple(map(weakref.ref, arrays)), versions
        x, y = arrays
        few = x[torch.as_tensor(samples.spread_indices(len(x), CHECKED, 0), device=x.device)]
        if self._is_unchanged(known, _checksum_of((few, y))):
            return None
        return _report(known, _describe_tensors(x, y), labels_of((x, y)))

    @staticmethod
    def _is_unchanged(known: _KnownData, checksum: int) -> bool:
        unchanged = known.checksum == checksum
        known.looks += unchanged
        known.checksum = checksum
        return unchanged


def tensors_of(data: Any) -> tuple[Tensor, Tensor] | None:
    """Return inputs and labels of data that are two tensors; None of any others."""
    match data:
        case DataLoader():
            return tensors_of(data.dataset)
        case TensorDataset(tensors=(Tensor() as x, Tensor() as y)):
            return x, y
        case (Tensor() as x, Tensor() as y):
            return x, y
        case (np.ndarray() as x, np.ndarray() as y):
            return torch.as_tensor(x), torch.as_tensor(y)
    return None


def _describe_tensors(x: Tensor, y: Tensor) -> DataDescription | None:
    most = min(MOST_OF_ARRAYS, max(MOST_OF_OTHERS, MOST_NUMBERS * len(x) // max(x.numel(), 1)))
    places = torch.as_tensor(samples.spread_indices(len(x), most, 0), device=x.device)
    return describe(x[places], y[places.to(y.device)], len(x))


def _report(
    known: _KnownData, description: DataDescription | None, labels: Mapping[int, int] | None = None
) -> tuple[dict[str, float], tuple[str, str, Mapping[str, Any]]] | None:
    """Return what is told of data that are new or have changed, with what changed in them. `labels`: how many samples
    each label has, if that is known.
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
