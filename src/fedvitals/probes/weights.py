# SPDX-License-Identifier: Apache-2.0
"""Weights: their statistics, how far they moved, and whether they started well."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedvitals.kernels import sums
from fedvitals.probes.view import View
from fedvitals.stats import INFS, NANS, SUM, SUM_MAGNITUDES, SUM_SQUARES, Array, derive


def weights(view: View) -> Mapping[str, Any]:
    """The nine sums of every parameter and, apart, of every buffer (batch norm's running statistics)."""
    found = sums([p.detach() for p in view.parameters])
    result = {"weight": found, **whole_model(found)}
    buffers = view.named_buffers
    if buffers:
        result["buffer"] = sums([b for _, b in buffers])
    return result


def whole_model(found: Any) -> dict[str, Any]:
    return {
        "weight.norm": found[:, SUM_SQUARES].sum() ** 0.5,
        "weight.nonfinite": found[:, NANS].sum() + found[:, INFS].sum(),
    }


def movement(update: Array, before: Tensor, now: Tensor, initial: Tensor | None) -> dict[str, float]:
    """How far the weights moved, from the nine sums of (now − before) and the two vectors themselves.

    `weight.difference` is Σ(after − before), signed and absolute: the sum over the round's iterations of the paper's
    per-iteration difference telescopes to it when signed.
    """
    drift = float(np.sqrt(update[:, SUM_SQUARES].sum()))
    start = float(torch.linalg.vector_norm(before))
    result = {
        "weight.drift": drift,
        "weight.difference": float(update[:, SUM].sum()),
        "weight.difference_absolute": float(update[:, SUM_MAGNITUDES].sum()),
    }
    if start > 0:
        result["weight.update_ratio"] = drift / start
    if initial is not None and initial.shape == now.shape:
        result["weight.drift_init"] = float(torch.dist(now, initial.to(now.device)))
    return result


def check_initialisation(model: nn.Module) -> list[tuple[str, str]]:
    """What looks wrong with freshly made weights, before any training: (parameter, remark).

    The gain of a layer is rms(w)·√fan_in: about 1 to 1.4 for the usual schemes (Glorot, He). One that is far off makes
    signals grow or fade by that factor at every layer. A spread of 0 leaves all units equal for ever.
    """
    remarks = []
    matrices = [(name, p.detach()) for name, p in model.named_parameters() if p.dim() > 1 and p.numel() > 1]
    if not matrices:
        return []
    found = np.asarray(torch.as_tensor(sums([p for _, p in matrices])).cpu())
    std, rms, mean = (derive("weight", found, name) for name in ("std", "rms", "mean"))
    embeddings = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    for i, (name, parameter) in enumerate(matrices):
        gain = float(rms[i]) * (parameter[0].numel() ** 0.5)
        if found[i, NANS] or found[i, INFS]:
            remarks.append((name, f"{int(found[i, NANS] + found[i, INFS])} values are NaN or Inf"))
        elif std[i] <= 1e-6 * max(rms[i], 1e-30):
            remarks.append((name, f"all values equal {mean[i]:.3g}: every unit will learn the same"))
        elif name not in embeddings and not 0.1 <= gain <= 4:
            size = "grow" if gain > 1 else "fade"
            remarks.append((name, f"gain {gain:.3g} (rms·√fan_in, usually 0.5 to 1.5): signals {size} at this layer"))
    return remarks
