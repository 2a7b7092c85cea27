# SPDX-License-Identifier: Apache-2.0
"""Reads a forward pass of a model: its logits, its batch, and whether they can be measured."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from fedvitals.errors import ConfigError
from fedvitals.model_hooks import holds_numbers
from fedvitals.probes import samples
from fedvitals.probes.differentiate import logits_of

Batch = tuple[weakref.ref[Tensor], int]  # the first input of a forward pass, and its version


def rows_of(tensor: Tensor) -> Tensor:
    """Return [rows, classes] of an output or its gradient, without its graph."""
    own = tensor.detach()
    if own.dim() == 2:
        return own
    if own.dim() > 3:  # [samples, classes, height, width], as torch has it
        own = own.movedim(1, -1)
    return own[:, None] if own.dim() == 1 else own.flatten(0, -2)


def logits_among(output: Any) -> Any:
    """Return the tensor of logits in a model's output: it itself, the one of that name, the first with rows."""
    if type(output) is Tensor:
        return output
    logits = logits_of(output)
    if logits is not output or not isinstance(output, tuple | list | Mapping):
        return logits
    parts = output.values() if isinstance(output, Mapping) else output
    return next((part for part in parts if _has_rows(part)), output)


def _has_rows(part: Any) -> bool:
    return isinstance(part, Tensor) and part.dim() > 1 and part.is_floating_point() and part.requires_grad


def first_tensor(arguments: Sequence[Any], named: Mapping[str, Any]) -> Tensor | None:
    """Return the first input of a forward pass that has samples."""
    for part in (*arguments, *named.values()) if named else arguments:
        if isinstance(part, Tensor) and part.dim():
            return part
    return None


def obstacle_of(logits: Any) -> str | None:
    """Return why an output cannot be measured; None if it can."""
    if not isinstance(logits, Tensor):
        returned = f"a {type(logits).__name__}"
    elif type(logits) is not Tensor or not holds_numbers(logits):
        returned = f"a tensor of another kind ({type(logits).__name__}, or one inside torch.func)"
    elif logits.dim() and logits.is_floating_point():
        return None
    else:
        returned = f"a tensor of shape {tuple(logits.shape)}"
    return f"they need outputs [samples, classes] or [samples, steps, classes], and this model returns {returned}."


def is_captured(logits: Tensor) -> bool:
    """Return whether a CUDA graph is being captured, whose tensors must not be kept."""
    return logits.is_cuda and torch.cuda.is_current_stream_capturing()


def reference_to(own_input: Tensor) -> Batch | None:
    """Return by what a batch is known again; None of tensors without a version."""
    return None if own_input.is_inference() else (weakref.ref(own_input), own_input._version)  # noqa: SLF001


def batch_size(logits: Any, own_input: Tensor | None) -> int:
    """Return the samples in a batch: the length of the first input, else of the output."""
    if own_input is not None:
        return max(1, len(own_input))
    return max(1, len(logits)) if isinstance(logits, Tensor) and logits.dim() else 1


def pass_length(data: Any) -> int | None:
    """Return the number of samples in one pass over the data; None if unknown."""
    try:
        total = 0 if data is None else samples.size(data)
    except ConfigError:
        return None  # reported by `fit`
    if isinstance(data, DataLoader) and data.drop_last and data.batch_size:
        total -= total % data.batch_size
    return total or None
