# SPDX-License-Identifier: Apache-2.0
"""Describes a client's own samples in a few hundred numbers, without running a model.

Every sample is projected onto the same few directions for all clients (a random projection; inputs of few features as
they are; for tokens the mean of a random vector per token). Only the means of these projections by class, their pooled
covariance within classes, and scalars such as the spread of the inputs leave the client, never a single sample. The
server compares them with the peers' (`diagnosis.evidence.compared_data`): wrong labels move the means of classes
towards each other, and noise on inputs raises their spread.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from fedvitals.data_change import MOST_COLUMNS
from fedvitals.probes import samples
from fedvitals.stats import Array

EVENT = "data"  # the event that carries the description
DIMENSIONS = 16  # of a projection, and as many for the patches of an image
FILTERS, PATCH, STRIDE, GRID = 16, 5, 2, 3  # of these patches; pixels; fields along each side of an image
SMALLEST_IMAGE = 2 * GRID + PATCH - 1  # pixels along each side; below 16, patches are taken at every pixel
FEWEST_ROWS, MOST_ROWS = 32, 256  # samples, from which quartiles are computed
MOST_TARGETS = 64  # numbers to predict of each sample
ENOUGH, PER_DIMENSION = 40, 4  # samples, and for each direction, for a regression
OUT_OF_RANGE = 10.0  # times the distance between a column's quartiles, beyond these
FEWEST_OF_CLASS = 4  # samples; a mean of fewer would reveal single samples
MOST_CLASSES = 64  # the most frequent ones
TOKENS = 4096  # random vectors for tokens, whose ids are taken modulo this
DIGITS = 4  # significant digits of transmitted numbers


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
    inputs = first_tensor(x)
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
    quartiles = _quartiles(flat) if not tokens and inputs.dim() == 2 else None
    if quartiles is not None:
        metrics["data.out_of_range"] = scalars["out_of_range"] = _out_of_range(flat, quartiles)
    about = {"samples": total, "features": int(flat.shape[1]), "tokens": tokens, "labelled": labelled, **scalars}
    checks = {"inputs": checksum(flat), "labels": 0 if y is None else checksum(y)}
    own = _sketch(projected, classes)
    explained = None if labelled or y is None else _explained(projected, y)
    if explained is not None:
        metrics["data.explained"] = about["explained"] = explained
    if len(own["classes"]) > 1:
        metrics["data.within_classes"] = own["within_classes"]
    if quartiles is not None:
        own["columns"] = [_rounded(row) for row in (*quartiles.double().cpu().numpy(), _spreads_within(flat, classes))]
    return DataDescription(metrics, about | checks | own)


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
    """Return how strongly patches of images [n, channels, height, width] respond to random filters.

    Returns a list of one tensor, [n, DIMENSIONS], with the projected responses of all filters in all fields of the
    image, or an empty list for inputs that are not images. Brightness and contrast of an image have no effect. Classes
    of natural images differ by their patches more than by their pixels: along these directions they lie two to three
    times as far apart.
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


def first_tensor(x: samples.Inputs) -> Tensor | None:
    """Return the first tensor of a batch's inputs; None if they have none."""
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


def _quartiles(flat: Tensor) -> Tensor | None:
    """Return the quartiles and the median of each column of a table, [3, columns]; None of other inputs."""
    if len(flat) < FEWEST_ROWS or flat.shape[1] > MOST_COLUMNS:
        return None
    some = flat[:: -(-len(flat) // MOST_ROWS)].float()
    numbers = torch.nan_to_num(some, nan=0.0, posinf=0.0, neginf=0.0)
    return torch.quantile(numbers, torch.tensor([0.25, 0.5, 0.75], device=flat.device), dim=0)


def _out_of_range(flat: Tensor, quartiles: Tensor) -> float:
    """Return the share of numbers far outside the quartiles of their columns; those without a width do not count."""
    low, _, high = quartiles
    width = high - low
    beyond = ((flat - high > OUT_OF_RANGE * width) | (low - flat > OUT_OF_RANGE * width)) & (width > 0)
    return float(beyond.double().mean())


def _spreads_within(flat: Tensor, classes: npt.NDArray[np.int64]) -> Array:
    """Return the standard deviation of each column within these classes [n]."""
    numbers = torch.nan_to_num(flat.double(), nan=0.0, posinf=0.0, neginf=0.0).cpu().numpy()
    _, places, counts = np.unique(classes, return_inverse=True, return_counts=True)
    sums = np.zeros((len(counts), numbers.shape[1]))
    np.add.at(sums, places, numbers)
    residuals = numbers - (sums / counts[:, None])[places]
    return np.asarray(np.sqrt((residuals**2).sum(axis=0) / max(1, len(numbers) - len(counts))))


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


def _explained(projected: Array, y: Tensor) -> float | None:
    """Return the share of the variance of numeric targets [n] or [n, targets] that a linear regression explains.

    Adjusted for the number of directions, so that it is 0 on average for targets that have nothing to do with the
    inputs. None of other targets, and of too few samples.
    """
    count, dimensions = projected.shape
    if y.dim() not in (1, 2) or y[0].numel() > MOST_TARGETS or count < max(ENOUGH, PER_DIMENSION * (dimensions + 1)):
        return None
    targets = y.detach().double().cpu().numpy().reshape(count, -1)
    centred = targets - targets.mean(axis=0)
    total = float((centred**2).sum())
    if not math.isfinite(total) or total <= 0:
        return None
    inputs = np.column_stack([np.ones(count), projected])
    residuals: Array = centred - inputs @ np.linalg.lstsq(inputs, centred, rcond=None)[0]
    unexplained = float((residuals**2).sum()) / total
    return float(1 - unexplained * (count - 1) / (count - dimensions - 1))


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
    squares = (residuals[:, -DIMENSIONS:] ** 2).sum(axis=1)
    spreads = np.bincount(places, squares, len(names)) / np.maximum(counts - 1, 1)
    total = ((projected - projected.mean(axis=0))[:, -DIMENSIONS:] ** 2).sum() / max(1, len(projected) - 1)
    large = np.flatnonzero(counts >= FEWEST_OF_CLASS)
    described = np.sort(large[np.argsort(-counts[large], kind="stable")[:MOST_CLASSES]])
    return {
        "classes": names[described].tolist(),
        "counts": counts[described].tolist(),
        "means": [_rounded(row) for row in means[described]],
        "spreads": _rounded(spreads[described]),
        "within_classes": min(1.0, float(squares.sum() / freedom / total)) if total > 0 else 1.0,
        "covariance": _rounded(covariance[np.triu_indices(len(covariance))], 3),
        "freedom": freedom,
    }


def _rounded(values: Array, digits: int = DIGITS) -> list[float]:
    return [float(f"{value:.{digits}g}") for value in values]
