# SPDX-License-Identifier: Apache-2.0
"""The loss of a model on samples that no client trains on, where forgetting shows first."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, cast

from torch import Tensor, nn
from torch.nn import functional

from fedvitals.errors import UnsuitedError
from fedvitals.kernels import is_sharded
from fedvitals.probes import samples
from fedvitals.probes.differentiate import logits_of
from fedvitals.probes.fit import per_sample, to_device
from fedvitals.probes.view import evaluation_without_gradients

MOST, TOGETHER = 512, 32  # samples, the same in each round; and how many of them per pass


def held_back_loss(model: nn.Module, data: Any, loss: Callable[..., Any] | None = None) -> float:
    """Return the mean loss of a model on held-back samples, in evaluation mode; nothing is changed by it.

    data: as of `Monitor.client`; of more than MOST samples, that many, spread evenly. loss: `loss(model(x), y)`; by
    default the model's own, if it takes labels (Hugging Face), else the cross-entropy. Raises UnsuitedError where
    neither applies.
    """
    model = model.module if type(model).__name__ == "DistributedDataParallel" else model  # type: ignore[assignment]
    if is_sharded([*model.parameters()]):
        raise UnsuitedError("Held-back samples are not measured of a sharded model: one process cannot run it alone.")
    total = samples.size(data)
    indices = samples.spread_indices(total, MOST, 0)
    losses: list[float] = []
    for first in range(0, len(indices), TOGETHER):
        x, y = to_device(model, *samples.read(data, indices[first : first + TOGETHER]))
        with evaluation_without_gradients(model):
            losses += [_batch_loss(model, x, y, loss)] * len(y)
    if not losses:
        raise UnsuitedError("There are no held-back samples.")
    return math.fsum(losses) / len(losses)


def _takes_labels(model: nn.Module) -> bool:
    """Return whether a model computes its own loss; wrappers of peft and of the compiler count as what they wrap."""
    own: Any = (
        cast("Any", model).get_base_model() if hasattr(model, "get_base_model") else getattr(model, "_orig_mod", model)
    )
    return "labels" in inspect.signature(own.forward).parameters


def _batch_loss(model: nn.Module, x: samples.Inputs, y: Tensor, loss: Callable[..., Any] | None) -> float:
    if loss is None and _takes_labels(model):
        named = {**x, "labels": y} if isinstance(x, Mapping) else None
        output = model(**named) if named else model(*(x if isinstance(x, tuple) else (x,)), labels=y)
        own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if isinstance(own, Tensor):
            return float(own)
    output = samples.apply(model, x)
    if loss is not None:
        return float(per_sample(loss, output, y).mean())
    logits = logits_of(output)
    if not isinstance(logits, Tensor) or logits.shape[:-1] != y.shape or y.is_floating_point():
        raise UnsuitedError("Held-back samples are not measured: pass loss=, a function of the model's output and y.")
    return float(functional.cross_entropy(logits.flatten(0, -2), y.flatten()))
