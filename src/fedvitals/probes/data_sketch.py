# SPDX-License-Identifier: Apache-2.0
"""Describes a client's own samples in a few hundred numbers, once per change of its data, without running a model.

Every sample is projected onto the same few directions for all clients (a random projection; inputs of few features as
they are; of tokens the mean of a random vector per token). What leaves the client are the means of these projections by
class, their pooled covariance within classes, and scalars such as the spread of the inputs; no sample by itself. The
server compares them with the peers' (`diagnosis.evidence.data_comparison`): labels that are wrong move the means of
classes towards each other, noise on inputs raises their spread.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from fedvitals.probes import samples
from fedvitals.stats import Array

EVENT = "data"  # the event that carries the description
DIMENSIONS = 16  # of a projection
MOST_OF_ARRAYS, MOST_OF_OTHERS = 1024, 128  # samples that are described: of tensors, and of data that are read one by one
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
    projected = np.asarray(project(flat, tokens=tokens).cpu().numpy(), np.float64)
    labelled = y is not None and y.dim() == 1 and not y.is_floating_point() and len(y) == len(flat)
    classes = y.detach().cpu().numpy().astype(np.int64) if labelled and y is not None else np.zeros(len(flat), np.int64)
    scalars = {name.removeprefix("data."): value for name, value in metrics.items()}
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


@functools.lru_cache(maxsize=8)
def _signs(rows: int) -> Any:
    """Return the directions, [rows, DIMENSIONS] of ±1: the same in every process."""
    return np.random.default_rng(rows).integers(0, 2, (rows, DIMENSIONS)).astype(np.float32) * 2 - 1


def _first_tensor(x: samples.Inputs) -> Tensor | None:
    parts = [x] if isinstance(x, Tensor) else [*x.values()] if isinstance(x, Mapping) else [*x]
    return next((part for part in parts if isinstance(part, Tensor)), None)


def _number_metrics(flat: Tensor) -> dict[str, float]:
    numbers = flat.float()
    finite = torch.isfinite(numbers)
    kept = numbers if bool(finite.all()) else torch.where(finite, numbers, torch.nan)
    mean = torch.nanmean(kept)
    spread = torch.nanmean((kept - mean) ** 2).sqrt()
    constant = (numbers == numbers[0]).all(0).double().mean()
    edges = torch.nan_to_num(torch.stack(torch.aminmax(torch.nan_to_num(numbers))))
    values = torch.stack([mean, spread, 1 - finite.double().mean(), constant, *edges]).double().cpu().tolist()
    names = ("data.mean", "data.std", "data.missing", "data.constant", "data.min", "data.max")
    return dict(zip(names, values, strict=True)) | {"data.duplicates": _duplicates(flat)}


def _token_metrics(flat: Tensor) -> dict[str, float]:
    lengths = (flat != 0).sum(1).double()
    return {"data.length": float(lengths.mean()), "data.duplicates": _duplicates(flat)}


def _duplicates(flat: Tensor) -> float:
    """Return the share of samples that equal an earlier one."""
    own = flat.detach().cpu()
    rows = np.ascontiguousarray((own.float() if own.dtype == torch.bfloat16 else own).numpy())
    return 1 - len({row.tobytes() for row in rows}) / len(rows)


def _sketch(projected: Array, classes: Array) -> dict[str, Any]:
    """Return counts, means and the covariance within classes of projections [n, dimensions] of these classes [n]."""
    names, places, counts = np.unique(classes, return_inverse=True, return_counts=True)
    sums = np.zeros((len(names), projected.shape[1]))
    np.add.at(sums, places, projected)
    means = sums / counts[:, None]
    residuals = projected - means[places]
    freedom = max(1, len(projected) - len(names))
    covariance = residuals.T @ residuals / freedom
    spreads = np.bincount(places, (residuals**2).sum(axis=1), len(names)) / np.maximum(counts - 1, 1)
    told = np.flatnonzero(counts >= FEWEST_OF_CLASS)
    told = np.sort(told[np.argsort(-counts[told], kind="stable")[:MOST_CLASSES]])
    return {
        "classes": names[told].tolist(),
        "counts": counts[told].tolist(),
        "means": [_rounded(row) for row in means[told]],
        "spreads": _rounded(spreads[told]),
        "covariance": _rounded(covariance[np.triu_indices(len(covariance))]),
        "freedom": freedom,
    }


def _rounded(values: Array) -> list[float]:
    return [float(f"{value:.{_DIGITS}g}") for value in values]
