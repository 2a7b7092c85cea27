# SPDX-License-Identifier: Apache-2.0
"""Flower's arrays as layers: their names, values and tensors."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import Array, ArrayRecord, RecordDict

from fedvitals.errors import ConfigError
from fedvitals.hosts.array_models import BUFFERS, Values

if TYPE_CHECKING:
    from torch import Tensor

PLAIN = b"\x93NUMPY\x01\x00"  # the first bytes of an array, version 1
HEADER = 10 + 65_535  # bytes at most


def model_of(content: RecordDict) -> ArrayRecord | None:
    """Return the arrays of a message if it holds exactly one model, else None."""
    models = [record for record in content.values() if isinstance(record, ArrayRecord)]
    return models[0] if len(models) == 1 else None


def values_of(record: Mapping[str, Array], layers: Sequence[str] | None = None) -> dict[str, Values]:
    """Return the trained arrays by name, read-only; `layers`: names to use instead of the transport's numbers.

    Raises whatever NumPy raises if an array cannot be read.
    """
    return trained_of({name: _in_place(array) for name, array in record.items()}, layers)


def read_arrays(record: Mapping[str, Array]) -> dict[str, Values | None]:
    """Return all arrays by their transport names, read-only; None for those that cannot be read."""
    return {name: _read(array) for name, array in record.items()}


def trained_of(read: Mapping[str, Values | None], layers: Sequence[str] | None = None) -> dict[str, Values]:
    """Return the trained arrays among those that were read, named by `layers` if given."""
    named = with_layer_names(read, layers)
    return {
        name: values
        for name, values in named.items()
        if values is not None and not BUFFERS.search(name) and np.issubdtype(values.dtype, np.floating)
    }


def tensors_of(record: Mapping[str, Array], layers: Sequence[str] | None = None) -> dict[str, Tensor]:
    """Return the trained arrays as tensors, which are copies."""
    import torch  # noqa: PLC0415 - for corrections alone

    return {name: torch.from_numpy(values.copy()) for name, values in values_of(record, layers).items()}


def _read(array: Array) -> Values | None:
    try:
        return _in_place(array)
    except Exception:  # noqa: BLE001 - bytes of a machine that may send anything
        return None


def _in_place(array: Array) -> Values:
    """Return an array over its own bytes if possible.

    Copying a large model costs more than everything computed here.
    """
    if array.stype == "numpy.ndarray" and array.data[:8] == PLAIN:
        file = io.BytesIO(array.data[:HEADER])
        file.seek(8)
        shape, in_columns, dtype = np.lib.format.read_array_header_1_0(file)
        if not in_columns and not dtype.hasobject:
            count = math.prod(shape)
            return np.frombuffer(array.data, dtype, count, offset=file.tell()).reshape(shape)
    return array.numpy()


def with_layer_names(record: Mapping[str, Any], layers: Sequence[str] | None) -> dict[str, Any]:
    """Return the record's entries, named by `layers` if given."""
    if layers is None:
        return dict(record)
    if len(layers) != len(record):
        raise ConfigError(f"layers= has {len(layers)} names, and a model on the wire has {len(record)} arrays.")
    return dict(zip(layers, record.values(), strict=True))


def arrays_like(record: ArrayRecord, tensors: Mapping[str, Tensor], layers: Sequence[str] | None = None) -> ArrayRecord:
    """Return the record with these values in place of its own."""
    names = dict(zip(record, with_layer_names(record, layers), strict=True))
    changed = ArrayRecord()
    for key, array in record.items():
        tensor = tensors.get(names[key])
        changed[key] = array if tensor is None else Array(tensor.numpy().astype(array.numpy().dtype, copy=False))
    return changed
