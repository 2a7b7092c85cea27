# SPDX-License-Identifier: Apache-2.0
"""Flower's arrays as layers: names, tensors, updates, and a model outline that holds them.

On the wire a model is a list of arrays, without a note of which are trained: integers are not, and neither are the
running statistics of normalisation, by their names.
"""

from __future__ import annotations

import io
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord, RecordDict

from fedvitals.errors import ConfigError
from fedvitals.probes.numpy_updates import FlatArrays

if TYPE_CHECKING:
    from torch import Tensor

    from fedvitals.probes.array_difference import ArrayDifference

Values = npt.NDArray[Any]
PLAIN = b"\x93NUMPY\x01\x00"  # how the bytes of an array begin, version 1
USED_BY_NOBODY = 2  # references to an object that lies in an attribute, as `getrefcount` counts
HEADER = 10 + 65_535  # bytes at most
BUFFERS = re.compile(r"(^|\.)(running_mean|running_var|num_batches_tracked)$")


def model_of(content: RecordDict) -> ArrayRecord | None:
    """Return the arrays of a message if it holds exactly one model, else None."""
    models = [record for record in content.values() if isinstance(record, ArrayRecord)]
    return models[0] if len(models) == 1 else None


def values_of(record: Mapping[str, Array], layers: Sequence[str] | None = None) -> dict[str, Values]:
    """Return the trained arrays by name, read-only; `layers`: names to use instead of the wire's numbers."""
    arrays = {
        name: _in_place(array) for name, array in with_layer_names(record, layers).items() if not BUFFERS.search(name)
    }
    return {name: values for name, values in arrays.items() if np.issubdtype(values.dtype, np.floating)}


def tensors_of(record: Mapping[str, Array], layers: Sequence[str] | None = None) -> dict[str, Tensor]:
    """Return the trained arrays as tensors, which are copies."""
    import torch  # noqa: PLC0415 - for corrections alone

    return {name: torch.from_numpy(values.copy()) for name, values in values_of(record, layers).items()}


def _in_place(array: Array) -> Values:
    """Return an array over its own bytes where possible: copying a large model costs more than everything computed
    here.
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
    """Return the record's entries under the names of `layers`, if these are given."""
    if layers is None:
        return dict(record)
    if len(layers) != len(record):
        raise ConfigError(f"layers= has {len(layers)} names, and a model on the wire has {len(record)} arrays.")
    return dict(zip(layers, record.values(), strict=True))


class ReusableVector:
    """A vector that is reused from update to update: in a large model, allocating costs four times what subtracting
    does.
    """

    def __init__(self) -> None:
        self._room = np.empty(0, np.float32)

    def __call__(self, size: int, dtype: Any) -> Values:
        # Two: our own, and that of the call. A tensor that somebody keeps holds one more.
        """Return a vector of this size and type; the last one, unless somebody still holds it."""
        if self._room.size != size or self._room.dtype != dtype or sys.getrefcount(self._room) > USED_BY_NOBODY:
            self._room = np.empty(size, dtype)
        return self._room


def difference_of(sent: Mapping[str, Values], got: Mapping[str, Values]) -> ArrayDifference:
    """Return what a client changed, layer by layer; where shapes differ, what it sent, so that the difference shows.

    Needs torch.
    """
    from fedvitals.probes.array_difference import ArrayDifference  # noqa: PLC0415 - imports torch

    return ArrayDifference([*sent.values()] if _alike(sent, got) else None, [*got.values()])


def update_of(
    sent: Mapping[str, Values], got: Mapping[str, Values], room: Callable[..., Values] = np.empty
) -> FlatArrays:
    """Return the same as arrays, in one vector. Needs no torch."""
    shapes = {name: values.shape for name, values in got.items()}
    alike = _alike(sent, got)
    vector = room(sum(values.size for values in got.values()), difference_dtype(got))
    at = 0
    for name, values in got.items():
        place = vector[at : at + values.size].reshape(values.shape)
        at += values.size
        np.copyto(place, values) if not alike else np.subtract(values, sent[name], out=place, casting="same_kind")
    return FlatArrays(vector, [*shapes.values()])


def difference_dtype(got: Mapping[str, Values]) -> np.dtype[Any]:
    """Return the type of a model's difference from another: float64 if any of its arrays is, else float32."""
    return np.dtype(np.float64 if any(values.dtype == np.float64 for values in got.values()) else np.float32)


def _alike(sent: Mapping[str, Values], got: Mapping[str, Values]) -> bool:
    """Return whether two models have the same names, in the same order, and the same shapes."""
    return [(name, values.shape) for name, values in sent.items()] == [(n, values.shape) for n, values in got.items()]


def arrays_like(record: ArrayRecord, tensors: Mapping[str, Tensor], layers: Sequence[str] | None = None) -> ArrayRecord:
    """Return the record with these values in place of its own."""
    names = dict(zip(record, with_layer_names(record, layers), strict=True))
    changed = ArrayRecord()
    for key, array in record.items():
        tensor = tensors.get(names[key])
        changed[key] = array if tensor is None else Array(tensor.numpy().astype(array.numpy().dtype, copy=False))
    return changed


class ArrayOutline:
    """A model of which only names and values are known, in the order of the wire; needs no torch."""

    def __init__(self, model: Mapping[str, Values]) -> None:
        self._values = {name: values.copy() for name, values in model.items()}

    def named_parameters(self) -> Iterator[tuple[str, Values]]:
        yield from self._values.items()

    def parameters(self) -> Iterator[Values]:
        yield from self._values.values()

    def fits(self, model: Mapping[str, Values]) -> bool:
        """Return whether a model has the same names and shapes."""
        return {n: v.shape for n, v in self._values.items()} == {n: v.shape for n, v in model.items()}

    def load(self, model: Mapping[str, Values]) -> None:
        """Copy a model's values into this outline."""
        for own, values in zip(self._values.values(), model.values(), strict=True):
            np.copyto(own, values, casting="same_kind")
