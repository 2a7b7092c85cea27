# SPDX-License-Identifier: Apache-2.0
"""Gradients: nine sums per layer at each step, and their summary over a client-round."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from fedvitals.kernels import histogram, sums
from fedvitals.probes.view import View
from fedvitals.stats import COUNT, INFS, NANS, STEP_COLUMNS, SUM_SQUARES, Array, merge_sums


def gradients(view: View) -> Mapping[str, Any]:
    """Measure every layer's gradient, as the optimiser is about to use it.

    At scheduled steps the monitor computes the same sums with a faster recorder.

    Args:
        view: The client's model at this moment, and its data.

    Returns:
        {"gradient": [layers, 9]}: count, sum, sum of squares, sum of magnitudes, least and largest value, and the
        numbers of zeros, NaN and infinities.
    """
    return {"gradient": sums(view.gradients)}


def last_gradient(view: View) -> Mapping[str, Any]:
    """Measure the gradients that remain when the scope closes.

    Args:
        view: The client's model at this moment, and its data.

    Returns:
        Their norm «gradient.norm_last» and the number of values that are not finite; nothing if they were cleared.
    """
    own = [p.grad for p in view.parameters]
    if not any(gradient is not None and gradient.numel() for gradient in own):
        return {}
    measured = sums(own)
    if isinstance(measured, Tensor):  # on a device, where they stay until all results are copied to the host
        totals = measured.sum(0)  # few operations: the device is faster than the host that launches them
        return {"gradient.norm_last": totals[SUM_SQUARES].sqrt(), "gradient.nonfinite": totals[NANS : INFS + 1].sum()}
    rows = measured.tolist()  # plain numbers, faster than numpy for a few layers
    return {
        "gradient.norm_last": math.sqrt(sum(row[SUM_SQUARES] for row in rows)),
        "gradient.nonfinite": sum(row[NANS] + row[INFS] for row in rows),
    }


def gradient_histogram(view: View) -> Mapping[str, Any]:
    """Count the gradient's values by sign and size, in steps of a factor of two.

    Args:
        view: The client's model at this moment, and its data.

    Returns:
        {"gradient.histogram": [layers, 128]}: one column for each sign and binary exponent.
    """
    return {"gradient.histogram": histogram(view.gradients)}


def summarise(steps: Sequence[int], rows: Array) -> tuple[dict[str, Array], dict[str, tuple[float, int | None]]]:
    """Summarise the steps of a client-round: layer matrices by family, and metrics as (value, step).

    `rows` is [measurements, layers, 9]; two optimisers produce two measurements of one step, of different layers.
    """
    present = rows[..., COUNT] > 0
    if not present.any():
        return {}, {}
    norms = np.sqrt(rows[..., SUM_SQUARES])
    matrices = {
        "gradient": merge_sums(rows),
        "gradient.steps": _step_norms(np.asarray(steps, dtype=np.float64), norms, present),
    }
    numbers, index = np.unique(np.asarray(steps), return_inverse=True)
    whole = np.sqrt(np.bincount(index, weights=rows[..., SUM_SQUARES].sum(axis=1)))
    largest = int(whole.argmax())
    metrics: dict[str, tuple[float, int | None]] = {
        "gradient.norm": (float(whole.mean()), None),
        "gradient.norm_max": (float(whole[largest]), int(numbers[largest])),
        "gradient.norm_last": (float(whole[-1]), int(numbers[-1])),
        "gradient.nonfinite": (float(rows[..., NANS].sum() + rows[..., INFS].sum()), None),
    }
    change = _relative_change(whole)
    if change.size:
        metrics["gradient.change"] = (float(change.max()), int(numbers[1:][change.argmax()]))
    return matrices, metrics


def _relative_change(norms: Array) -> Array:
    """Return |n_s − n_{s−1}| / n_{s−1} along the first axis; 0 if both are 0, inf if a norm follows 0."""
    before, after = norms[:-1], norms[1:]
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(before == after, 0.0, np.abs(after - before) / before)


def _step_norms(steps: Array, norms: Array, present: npt.NDArray[np.bool_]) -> Array:
    """Return per layer the number of steps, the sum, largest and last norm, and the largest change with its step."""
    result = np.zeros((norms.shape[1], len(STEP_COLUMNS)))
    everywhere = present.all(axis=0)
    result[everywhere] = _columns(steps, norms[:, everywhere])
    for layer in np.flatnonzero(~everywhere & present.any(axis=0)):
        seen = present[:, layer]
        result[layer] = _columns(steps[seen], norms[seen, layer : layer + 1])[0]
    return result


def _columns(steps: Array, norms: Array) -> Array:
    """Return [layers, STEP_COLUMNS] for layers that were all measured at all of these steps."""
    result = np.zeros((norms.shape[1], len(STEP_COLUMNS)))
    result[:, 0], result[:, 1] = len(norms), norms.sum(axis=0)
    result[:, 2], result[:, 3] = norms.max(axis=0), steps[norms.argmax(axis=0)]
    result[:, 4], result[:, 5] = norms[-1], steps[-1]
    if len(norms) > 1:
        change = _relative_change(norms)
        result[:, 6], result[:, 7] = change.max(axis=0), steps[1:][change.argmax(axis=0)]
    return result
