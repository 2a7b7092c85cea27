# SPDX-License-Identifier: Apache-2.0
"""Flower's arrays as layers: names, tensors, updates, and a model's outline to hold them.

On the wire a model is a list of arrays. Which of them are trained is not told: whole numbers are not, and neither are
the running statistics of normalisation, by their names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, RecordDict
from torch import Tensor, nn

from fedvitals.errors import ConfigError

BUFFERS = re.compile(r"(^|\.)(running_mean|running_var|num_batches_tracked)$")


def model_of(content: RecordDict) -> ArrayRecord | None:
    """The arrays of a message, if it holds one model."""
    found = [record for record in content.values() if isinstance(record, ArrayRecord)]
    return found[0] if len(found) == 1 else None


def tensors_of(record: Mapping[str, Array], layers: Sequence[str] | None = None) -> dict[str, Tensor]:
    """The trained arrays by name; `layers`: names in the place of a wire's numbers."""
    named = renamed(record, layers)
    found: dict[str, Tensor] = {}
    for name, array in named.items():
        if not BUFFERS.search(name):
            values = array.numpy()
            if np.issubdtype(values.dtype, np.floating):
                found[name] = torch.from_numpy(values if values.flags.writeable else values.copy())
    return found


def renamed(record: Mapping[str, Any], layers: Sequence[str] | None) -> dict[str, Any]:
    if layers is None:
        return dict(record)
    if len(layers) != len(record):
        raise ConfigError(f"layers= has {len(layers)} names, and a model on the wire has {len(record)} arrays.")
    return dict(zip(layers, record.values(), strict=True))


def update_of(sent: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> list[Tensor]:
    """What a client changed, layer by layer; where shapes differ, what it sent: it shall be seen that they do."""
    if [*sent] == [*got] and all(a.shape == b.shape for a, b in zip(sent.values(), got.values(), strict=True)):
        return [b - a for a, b in zip(sent.values(), got.values(), strict=True)]
    return [*got.values()]


def arrays_like(record: ArrayRecord, tensors: Mapping[str, Tensor], layers: Sequence[str] | None = None) -> ArrayRecord:
    """The record with these values in the place of its own."""
    names = dict(zip(record, renamed(record, layers), strict=True))
    changed = ArrayRecord()
    for key, array in record.items():
        tensor = tensors.get(names[key])
        changed[key] = array if tensor is None else Array(tensor.numpy().astype(array.numpy().dtype, copy=False))
    return changed


class Outline(nn.Module):
    """A model of which only names and values are known, in the order of the wire."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._values = {name: nn.Parameter(tensor.clone(), requires_grad=False) for name, tensor in tensors.items()}

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self._values.items()

    def fits(self, tensors: Mapping[str, Tensor]) -> bool:
        return {n: p.shape for n, p in self._values.items()} == {n: t.shape for n, t in tensors.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        for parameter, tensor in zip(self._values.values(), tensors.values(), strict=True):
            parameter.data.copy_(tensor)
