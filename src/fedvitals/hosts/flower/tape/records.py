# SPDX-License-Identifier: Apache-2.0
"""Convert Flower's records to what a tape can store, and back: tensors by name, and a JSON outline of the rest.

Together the two restore the records exactly. An array that NumPy wrote plainly becomes a tensor over the array's own
bytes; any other (of another library, or of a type that torch lacks) is kept as its bytes.
"""

from __future__ import annotations

import base64
import binascii
import ctypes
import io
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedvitals.errors import StoreError
from fedvitals.hosts.flower.arrays import HEADER, PLAIN

if TYPE_CHECKING:
    from torch import Tensor

NUMPY = "numpy.ndarray"
KINDS = ("<f2", "<f4", "<f8", "|i1", "<i2", "<i4", "<i8", "|u1", "|b1")  # of numpy, which torch and safetensors have
LONGEST_TEXT = 64 << 10  # bytes of a text or of bytes in an outline: longer ones are left out, or become a tensor
ARRAYS, METRICS, CONFIG = "arrays", "metrics", "config"

Outline = dict[str, Any]
Tensors = dict[str, "Tensor"]


# -- arrays -----------------------------------------------------------------------------------------------------------


def tensor_of(array: Array) -> tuple[Tensor, dict[str, Any] | None]:
    """Return a tensor over the array's own, immutable bytes; and how to read it, unless it is plain."""
    import torch  # noqa: PLC0415 - a server without a tape does not need it

    data = array.data
    if array.stype == NUMPY and data[:8] == PLAIN:
        file = io.BytesIO(data[:HEADER])
        file.seek(8)
        shape, in_columns, dtype = np.lib.format.read_array_header_1_0(file)
        start, count = file.tell(), math.prod(shape)
        fits = start + count * dtype.itemsize == len(data) and start % 8 == 0
        if dtype.str in KINDS and fits and not (in_columns and len(shape) > 1):
            return torch.from_numpy(_bytes_view(data)[start:].view(dtype).reshape(shape)), None
    how = {"dtype": array.dtype, "shape": list(array.shape), "stype": array.stype}
    return torch.from_numpy(_bytes_view(data)), how


def array_of(tensor: Tensor, how: Mapping[str, Any] | None) -> Array:
    """Return the array of a tensor. `how`: as `tensor_of` returned it."""
    if how is None:
        return Array(tensor.contiguous().numpy())
    return Array(
        dtype=str(how["dtype"]),
        shape=tuple(int(size) for size in how["shape"]),
        stype=str(how["stype"]),
        data=tensor.numpy().tobytes(),
    )


def _bytes_view(data: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return bytes as an array without a copy. torch requires writable memory, although it is never written to."""
    if not data:
        return np.empty(0, np.uint8)
    room = (ctypes.c_uint8 * len(data)).from_address(np.frombuffer(data, np.uint8).ctypes.data)
    room.held_by = data  # type: ignore[attr-defined]  # it stays as long as somebody looks at it
    return np.ctypeslib.as_array(room)


def tensors_of(record: Mapping[str, Array], names: Mapping[str, str] | None = None) -> tuple[Tensors, Outline]:
    """Return the tensors and the outline of an ArrayRecord; `names`: the names of its arrays among the tensors."""
    tensors, arrays = Tensors(), []
    for name, array in record.items():
        key = name if names is None else names[name]
        tensors[key], how = tensor_of(array)
        arrays.append([name, key] if how is None else [name, key, how])
    return tensors, {"kind": ARRAYS, "arrays": arrays}


def record_of(outline: Outline, tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Return the ArrayRecord of an outline. Raises StoreError if an array is missing."""
    record = ArrayRecord()
    for name, key, *how in outline["arrays"]:
        if key not in tensors:
            raise StoreError(f"The array '{name}' is not among what the tape has: {', '.join([*tensors][:9])}.")
        record[str(name)] = array_of(tensors[key], how[0] if how else None)
    return record


# -- contents ---------------------------------------------------------------------------------------------------------


def outline_of(
    content: Mapping[str, Any],
    *,
    whole: bool = False,
    layers: Sequence[str] | None = None,
) -> tuple[Outline, Tensors]:
    """Return the outline and the tensors of a message's or a context's records.

    Arrays keep their names if there is one model. `whole`: long bytes and texts become tensors; otherwise they are left
    out, which is noted. `layers`: names for the arrays of one model, if the transport has numbers.
    """
    alone = sum(isinstance(record, ArrayRecord) for record in content.values()) == 1
    outline, tensors = Outline(), Tensors()
    for key, record in content.items():
        if isinstance(record, ArrayRecord):
            names = {name: name if alone else f"{key}/{name}" for name in record}
            if alone and layers is not None and len(layers) == len(record):
                names = dict(zip(record, layers, strict=True))
            names = _unique_names(names, tensors)
            own, outline[key] = tensors_of(record, names)
            tensors |= own
        else:
            kind = METRICS if isinstance(record, MetricRecord) else CONFIG
            outline[key] = {"kind": kind, "values": _values(key, record, tensors if whole else None)}
    return outline, tensors


def content_of(outline: Outline, tensors: Mapping[str, Tensor]) -> RecordDict:
    """Return the records of an outline. Raises StoreError if the outline, which comes from a file, is not valid."""
    try:
        content = RecordDict()
        for key, record_outline in outline.items():
            if record_outline["kind"] == ARRAYS:
                content[key] = record_of(record_outline, tensors)
            else:
                values = {name: value_from_json(value, tensors) for name, value in record_outline["values"].items()}
                values = {name: value for name, value in values.items() if value is not LEFT_OUT}
                content[key] = MetricRecord(values) if record_outline["kind"] == METRICS else ConfigRecord(values)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise StoreError(f"A message on the tape cannot be read: {type(error).__name__}: {error}") from error
    return content


def left_out_names(outline: Outline) -> list[str]:
    """Return what was too long for the tape, as record/name."""
    names = []
    for key, record_outline in outline.items():
        for name, value in record_outline.get("values", {}).items():
            if isinstance(value, dict) and "left_out" in value:
                names.append(f"{key}/{name}")
    return names


def _unique_names(names: dict[str, str], taken: Mapping[str, Any]) -> dict[str, str]:
    """Return unique names, because two records may produce the same one: «a/b» and «c», «a» and «b/c»."""
    unique: dict[str, str] = {}
    for name, key in names.items():
        own = key
        while own in taken or own in unique.values():
            own += "'"
        unique[name] = own
    return unique


def _values(key: str, record: Mapping[str, Any], tensors: Tensors | None) -> dict[str, Any]:
    import torch  # noqa: PLC0415 - as above

    values: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, str | bytes) and len(value) > LONGEST_TEXT and tensors is not None:
            own = _unique_names({name: f"{key}/{name}"}, tensors)[name]
            data = value.encode() if isinstance(value, str) else value
            tensors[own] = torch.from_numpy(_bytes_view(data))
            values[name] = {"tensor": own, "text": isinstance(value, str)}
        else:
            values[name] = json_value(value)
    return values


# -- values -----------------------------------------------------------------------------------------------------------

LEFT_OUT = object()


def json_value(value: Any) -> Any:
    """Return a value as JSON from which it can be restored: numbers keep their type and bits."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, list | tuple):
        return [json_value(entry) for entry in value]
    return _number_or_words(value)


def _number_or_words(value: Any) -> Any:
    if isinstance(value, int) and -(2**63) <= value < 2**64:
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": float(value).hex()}
    if isinstance(value, str) and len(value) <= LONGEST_TEXT:
        return str(value)
    if isinstance(value, bytes) and len(value) <= LONGEST_TEXT:
        return {"bytes": base64.b64encode(value).decode()}
    return {"left_out": type(value).__name__, "size": len(value) if isinstance(value, str | bytes) else None}


def value_from_json(document: Any, tensors: Mapping[str, Tensor] | None = None) -> Any:
    """Return the value from its JSON; LEFT_OUT if it was too long to be kept."""
    if isinstance(document, list):
        return [value_from_json(entry) for entry in document]
    if not isinstance(document, dict):
        return document
    try:
        if "float" in document:
            return float.fromhex(document["float"])
        if "bytes" in document:
            return base64.b64decode(document["bytes"], validate=True)
        if "tensor" in document and tensors is not None:
            data = tensors[document["tensor"]].numpy().tobytes()
            return data.decode() if document.get("text") else data
    except (ValueError, TypeError, KeyError, binascii.Error) as error:
        raise StoreError(f"A value on the tape cannot be read: {error}") from error
    return LEFT_OUT
