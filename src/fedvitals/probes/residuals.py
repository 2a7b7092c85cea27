# SPDX-License-Identifier: Apache-2.0
"""Moments of the residuals of a regression, from a training's own outputs and their gradients.

For a squared error, the gradient of an output is proportional to its residual r, the prediction less the target. The
factor depends on how the loss is averaged and scaled. It is the one with which outputs less residuals have the sum and
the sum of squares of the client's own targets, over a first pass that sees each of them once. Other losses, weighted
samples and transformed targets do not meet both sums, so that nothing is told of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fedvitals.errors import UnsuitedError
from fedvitals.probes.data_watch import tensors_of
from fedvitals.stats import Array

EXACT = 1e-5  # of both sums, relative: what rounding in float32 leaves
APART = 0.02  # relative: two factors that differ by it must not both meet the sums
NOT_RESIDUALS = (
    "Training residuals are not measured: the gradients of this model's outputs do not lead back to the targets in "
    "`data`. They do for a squared error in float32 whose first pass sees each target once; not for another loss, soft "
    "labels, targets that the training transforms, weighted, repeated or dropped samples."
)


def regression_targets(data: Any) -> Tensor | None:
    """Return the targets of data that are two tensors and whose targets are numbers other than 0 and 1; else None."""
    arrays = tensors_of(data)
    if arrays is None or not arrays.y.is_floating_point() or not len(arrays):
        return None
    targets = arrays.labels().detach()
    return None if bool(((targets == 0) | (targets == 1)).all()) else targets


class ResidualSums:
    """Sums over outputs and gradients on their device; `numbers` holds them and those of the targets.

    They are n, Σz, Σz² of outputs z; Σzh, Σh, Σh², Σh³, Σh⁴ of gradients h times the numbers in their output, as a mean
    over these has divided by them; the same of h as it is; n, Σy, Σy² of targets y.
    """

    def __init__(self, targets: Tensor, device: torch.device) -> None:
        dtype = torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
        self.numbers = torch.zeros(16, dtype=dtype, device=device)
        self.numbers[13:] = _power_sums(targets.to(device, dtype).flatten(), 2)

    def add(self, outputs: Tensor, gradients: Tensor, size: int) -> None:
        """Add rows of an output that has `size` numbers."""
        z, gradient = (rows.to(self.numbers.dtype).flatten() for rows in (outputs, gradients))
        self.numbers[:3] += _power_sums(z, 2)
        for first, h in ((3, gradient * size), (8, gradient)):
            self.numbers[first] += z @ h
            self.numbers[first + 1 : first + 5] += _power_sums(h, 4)[1:]


def _power_sums(numbers: Tensor, highest: int) -> Tensor:
    powers = [numbers**power for power in range(1, highest + 1)]
    return torch.stack([torch.ones_like(numbers).sum(), *(power.sum() for power in powers)])


def residual_metrics(numbers: Array) -> dict[str, float]:
    """Return the metrics from the numbers on the host. Raises UnsuitedError where they are of no squared error."""
    factors = {sums: f for sums in (3, 8) for f in _factors(numbers[:3], numbers[sums : sums + 5], numbers[13:])}
    if not factors:
        raise UnsuitedError(NOT_RESIDUALS)
    first, factor = next(iter(factors.items()))
    count = numbers[0]
    m1, m2, m3, m4 = (numbers[first + k] * factor**k / count for k in range(1, 5))
    variance = max(m2 - m1 * m1, 0.0)
    metrics = {"train.residual_mean": m1, "train.residual_std": math.sqrt(variance)}
    if variance > 0:
        fourth = m4 - 4 * m1 * m3 + 6 * m1 * m1 * m2 - 3 * m1**4
        metrics["train.residual_kurtosis"] = fourth / variance**2
    return {name: float(value) for name, value in metrics.items()}


def _factors(outputs: Array, products: Array, targets: Array) -> Iterator[float]:
    """Yield the factor of gradients h with which z − f h has the sums of the targets; none if there is not just one."""
    (n, z, zz), (zh, h, hh) = outputs.tolist(), products[:3].tolist()
    wanted, y, yy = targets.tolist()
    squares = zz + yy
    if n != wanted or not math.isfinite(squares + hh) or not hh:
        return
    root = math.sqrt(max(zh * zh - hh * (zz - yy), 0.0))
    candidates = [(zh + root) / hh, (zh - root) / hh, *([(z - y) / h] if h else [])]

    def error(f: float) -> float:
        by_sum, by_squares = z - f * h - y, zz - 2 * f * zh + f * f * hh - yy
        return float(max(abs(by_sum) / math.sqrt(n * squares), abs(by_squares) / squares))

    fitting = sorted((f for f in candidates if f > 0 and error(f) < EXACT), key=error)
    if fitting:
        best = fitting[0]
        sharp = min(error(best * (1 - APART)), error(best * (1 + APART))) > EXACT
        if sharp and all(abs(f / best - 1) < APART for f in fitting):
            yield best
