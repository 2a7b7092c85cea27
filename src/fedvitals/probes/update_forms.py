# SPDX-License-Identifier: Apache-2.0
"""The forms in which a loop may pass an update: arrays by name, a list of arrays, or one flat vector.

Arrays are NumPy's, torch's, or nested lists of numbers. Nothing here imports torch by itself.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from fedvitals.errors import ConfigError
from fedvitals.records import Layer, LayerTable


def by_client(updates: Any) -> dict[Any, Any]:
    """Return updates by client as a dictionary; ConfigError for anything else."""
    try:
        return dict(updates)
    except (TypeError, ValueError) as error:
        kind = type(updates).__name__
        wanted = "{'c1': update, 'c2': update}"
        raise ConfigError(f"updates() takes updates by client, such as {wanted}; got {kind}.") from error


def as_layers(update: Any, tables: Sequence[LayerTable]) -> Sequence[Any]:
    """Return an update as one array for each layer: tensors if torch is loaded, else NumPy arrays.

    `tables` are the known layers, newest first. They give the order of the model's parameters for a mapping (other
    entries, such as buffers, are left out), and the sizes to cut a flat vector into layers.
    """
    if hasattr(update, "vector"):  # a host's own type, already contiguous
        return list(update) if not isinstance(update, list) else update
    if isinstance(update, Mapping):
        names = next((names for names in map(_names, tables) if update.keys() >= set(names)), None)
        return [_array(update[name]) for name in (update if names is None else names)]
    if hasattr(update, "shape"):
        return _cut(_array(update), tables)
    if isinstance(update, Iterable) and not isinstance(update, str | bytes):
        return [_array(values) for values in update]
    raise ConfigError(
        "An update is a list or a mapping of arrays, one for each layer, or one flat vector; got "
        f"{type(update).__name__}."
    )


def tables_of_update(update: Any, layers: Sequence[Any]) -> dict[str, LayerTable]:
    """Return the layer tables for an update of an unknown model: by its names, or by number."""
    named = isinstance(update, Mapping) and len(update) == len(layers)
    names = [str(name) for name in update] if named else [f"layer {number}" for number in range(len(layers))]
    kinds = [(tuple(array.shape), str(array.dtype).removeprefix("torch.")) for array in layers]
    own = tuple(Layer(name, *kind) for name, kind in zip(names, kinds, strict=True))
    whole = Layer("model", (sum(math.prod(shape) for shape, _ in kinds),), kinds[0][1] if kinds else "float32")
    return {"parameter": LayerTable("parameter", own), "model": LayerTable("model", (whole,))}


def _names(table: LayerTable) -> list[str]:
    return [layer.name for layer in table.layers]


def _cut(vector: Any, tables: Sequence[LayerTable]) -> list[Any]:
    """Cut a flat vector into the layers of the newest table that fits; otherwise it is one layer."""
    if vector.ndim != 1:
        return [vector]
    for table in tables:
        ends = [*itertools.accumulate(math.prod(layer.shape) for layer in table.layers)]
        if ends and ends[-1] == len(vector):
            places = zip([0, *ends[:-1]], ends, table.layers, strict=True)
            return [vector[first:last].reshape(tuple(layer.shape)) for first, last, layer in places]
    return [vector]


def _array(values: Any) -> Any:
    """Return values as an array of the library that measures updates."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(values, torch.Tensor):
        return values.detach()
    array = np.asarray(values)
    if array.dtype.kind not in "biufc":
        raise ConfigError(f"An update consists of numbers; an array of it is of type {array.dtype}.")
    if torch is None:
        return array
    # torch cannot wrap read-only memory, negative strides or foreign byte order.
    plain = array.flags.writeable and array.dtype.isnative and all(stride >= 0 for stride in array.strides)
    return torch.from_numpy(array if plain else np.array(array, array.dtype.newbyteorder("="), order="C"))
