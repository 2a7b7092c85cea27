# SPDX-License-Identifier: Apache-2.0
"""Weights: their statistics, how far they moved, and whether they were initialised well."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedvitals.kernels import local, sums
from fedvitals.probes.snapshot import MeasuredUpdate
from fedvitals.probes.view import View
from fedvitals.stats import COUNT, INFS, NANS, SUM, SUM_MAGNITUDES, SUM_SQUARES, Array, derive

FADING, FADING_NORMALISED, GROWING = 0.1, 0.02, 4.0  # gains of initial weights; the second in models with layer norms
FEWEST_FADING = 2  # matrices with a gain: a single one may begin small


def weights(view: View) -> Mapping[str, Any]:
    """Measure every parameter and, separately, every buffer, such as batch norm's running statistics.

    Args:
        view: The client's model at this moment, and its data.

    Returns:
        {"weight": [layers, 9], "buffer": [buffers, 9]}, with the sums of `gradient_sums`, and of the whole model
        «weight.norm» and «weight.nonfinite».
    """
    measured = weight_rows(view)
    return {**measured, **whole_model(measured["weight"])}


def weight_rows(view: View) -> dict[str, Any]:
    """Return the rows of `weights`: of the parameters and, if there are any, of the buffers."""
    result = {"weight": sums(view.parameters)}
    buffers = view.named_buffers
    if buffers:
        result["buffer"] = sums([b for _, b in buffers])
    return result


def whole_model(rows: Any) -> dict[str, Any]:
    """Return the norm and the number of non-finite values of the whole model, from its nine sums per layer."""
    return {
        "weight.norm": rows[:, SUM_SQUARES].sum() ** 0.5,
        "weight.nonfinite": rows[:, NANS].sum() + rows[:, INFS].sum(),
    }


def movement(update: MeasuredUpdate) -> dict[str, float]:
    """Return how far the weights moved.

    `weight.difference` is Σ(after − before), signed and absolute: the signed sum over the round's iterations of the
    paper's per-iteration difference telescopes to it.
    """
    drift = float(np.sqrt(update.rows[:, SUM_SQUARES].sum()))
    result = {
        "weight.drift": drift,
        "weight.difference": float(update.rows[:, SUM].sum()),
        "weight.difference_absolute": float(update.rows[:, SUM_MAGNITUDES].sum()),
    }
    if update.start_norm > 0:
        result["weight.update_ratio"] = drift / update.start_norm
    if update.drift is not None:
        result["weight.drift_init"] = update.drift
    return result


def check_initialisation(model: nn.Module) -> list[tuple[str, str]]:
    """Return what looks wrong with new weights, before any training: (parameter, remark).

    The gain of a layer is rms(w)·√fan_in: about 1 to 1.4 for the usual schemes (Glorot, He). One that is far off makes
    signals grow or fade by that factor at every layer. A spread of 0 keeps all units equal forever. Frozen parameters
    are not checked, since they are not meant to learn; nor are matrices that start at 0 on purpose (`starts_at_zero`).
    Layer norms restore the scale of a signal, and transformers start the last matrix of each branch small on purpose
    (GPT-2: 0.02/√(2 layers)), so the lower limit is lower in models that have them.
    """
    matrices = _trained_matrices(model)
    if not matrices:
        return []
    rows, gains = _rows_and_gains(matrices)
    std, rms, mean = (derive("weight", rows, name) for name in ("std", "rms", "mean"))
    without_gain = _without_gain(model)
    least = FADING_NORMALISED if any(map(_normalises, model.modules())) else FADING
    meant = set(starts_at_zero(model))
    remarks = []
    for i, (name, matrix) in enumerate(matrices):
        gain = gains[i]
        if not rows[i, COUNT]:
            continue  # for a sharded one, no values are here
        if rows[i, NANS] or rows[i, INFS]:
            remarks.append((name, f"{int(rows[i, NANS] + rows[i, INFS])} values are NaN or Inf"))
        elif name in meant:
            continue
        elif std[i] <= 1e-6 * max(rms[i], 1e-30):
            if matrix.numel() > max(matrix.shape):  # not a row of factors, which differ in what they scale
                remarks.append((name, f"all values equal {mean[i]:.3g}: every unit will learn the same"))
        elif name not in without_gain and not least <= gain <= GROWING:
            size = "grow" if gain > 1 else "fade"
            remarks.append((name, f"gain {gain:.3g} (rms·√fan_in, usually 0.5 to 1.5): signals {size} at this layer"))
    return remarks


def fades_everywhere(model: nn.Module) -> bool:
    """Return whether every matrix with a gain begins far too small: a mistake of scale, which no scheme makes.

    Known schemes keep at least one gain above the lower limit of networks with layer norms; only single matrices, such
    as a head, are smaller on purpose. False for fewer than two such matrices, where a value is not finite or not here,
    and where a parameter is frozen: adapters of a frozen network begin small, so that they change nothing at first.
    """
    if not all(p.requires_grad for p in model.parameters()):
        return False
    left_out = _without_gain(model) | set(starts_at_zero(model))
    matrices = [(name, p) for name, p in _trained_matrices(model) if name not in left_out]
    if len(matrices) < FEWEST_FADING:
        return False
    rows, gains = _rows_and_gains(matrices)
    usable = rows[:, COUNT].all() and not rows[:, NANS : INFS + 1].any()
    return bool(usable and max(gains) < FADING_NORMALISED)


def _rows_and_gains(matrices: list[tuple[str, Tensor]]) -> tuple[Array, list[float]]:
    """Return the sums of matrices, and the gain rms(w)·√fan_in of each; one of a sharded matrix that is elsewhere is
    NaN.
    """
    rows = np.asarray(torch.as_tensor(sums([p for _, p in matrices])).cpu())
    rms = derive("weight", rows, "rms")
    return rows, [float(rms[i]) * math.prod(p.shape[1:]) ** 0.5 for i, (_, p) in enumerate(matrices)]


def starts_at_zero(model: nn.Module) -> list[str]:
    """Return the trained matrices that start at exactly 0, as adapters, residual branches and heads do on purpose.

    Next to nonzero weights, such a matrix gets a gradient from its first or second step on. If more than half of a
    model's matrices are 0, the signal cannot pass: that is a bad start, and none of them is returned. If it is unknown
    what trains (a model known only by its arrays, which may all be adapters), all are returned.
    """
    matrices = [(name, p) for name, p in model.named_parameters() if p.dim() > 1 and p.numel() > 1]
    zero = {name for name, p in matrices if not local(p.detach()).any()}
    trained = {name for name, p in matrices if p.requires_grad}
    if not trained:
        return [name for name, _ in matrices if name in zero]
    return [] if 2 * len(zero) > len(matrices) else [name for name, _ in matrices if name in zero & trained]


def _normalises(module: nn.Module) -> bool:
    return isinstance(module, nn.LayerNorm) or type(module).__name__.endswith("RMSNorm")


def _trained_matrices(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the trained weights of more than one dimension; all of them if no parameter is marked as trained."""
    parameters = [*model.named_parameters()]
    anything = any(p.requires_grad for _, p in parameters)
    return [
        (name, p.detach())
        for name, p in parameters
        if p.dim() > 1 and p.numel() > 1 and (p.requires_grad or not anything)
    ]


def _without_gain(model: nn.Module) -> set[str]:
    """Return parameters whose gain has no meaning.

    These are embeddings, arrays of a module that is not a convolution, and input weights of recurrent cells. The shape
    of a position embedding [1, positions, width] or of a stack of experts does not show its fan-in. torch scales all
    weights of a recurrent cell by its hidden size, so that those of few inputs are small by design.
    """
    convolutions = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    without = set()
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix, recurse=False):
            lookup = isinstance(module, nn.Embedding | nn.EmbeddingBag)
            cell = isinstance(module, nn.RNNBase | nn.RNNCellBase) and "weight_ih" in name.rpartition(".")[2]
            if lookup or cell or (parameter.dim() > 2 and not isinstance(module, convolutions)):
                without.add(name)
    return without
