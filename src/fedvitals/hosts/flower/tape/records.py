# SPDX-License-Identifier: Apache-2.0
"""Flower's records as what a tape can keep: tensors by name, and an outline as JSON of all that is no array.

Both together give the very records back. An array that numpy wrote plainly is a tensor, which lies where the array's
own bytes lie; any other (of another library, of a kind that torch has not) is kept as the bytes that it is.
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
WORDS = 64 << 10  # bytes of a text or of bytes in an outline: what is longer is left out, or becomes a tensor
ARRAYS, METRICS, CONFIG = "arrays", "metrics", "config"

Outline = dict[str, Any]
Tensors = dict[str, "Tensor"]


# -- arrays -----------------------------------------------------------------------------------------------------------


def tensor_of(array: Array) -> tuple[Tensor, dict[str, Any] | None]:
    """A tensor over the array's own bytes, which nobody can change; and how to read it, unless it is plain."""
    import torch  # noqa: PLC0415 - a server without a tape does not need it

    data = array.data
    if array.stype == NUMPY and data[:8] == PLAIN:
        file = io.BytesIO(data[:HEADER])
        file.seek(8)
        shape, in_columns, dtype = np.lib.format.read_array_header_1_0(file)
        start, count = file.tell(), math.prod(shape)
        fits = start + count * dtype.itemsize == len(data) and start % 8 == 0
        if dtype.str in KINDS and fits and not (in_columns and len(shape) > 1):
            return torch.from_numpy(_shown(data)[start:].view(dtype).reshape(shape)), None
    how = {"dtype": array.dtype, "shape": list(array.shape), "stype": array.stype}
    return torch.from_numpy(_shown(data)), how


def array_of(tensor: Tensor, how: Mapping[str, Any] | None) -> Array:
    if how is None:
        return Array(tensor.contiguous().numpy())
    return Array(
        dtype=str(how["dtype"]),
        shape=tuple(int(size) for size in how["shape"]),
        stype=str(how["stype"]),
        data=tensor.numpy().tobytes(),
    )


def _shown(data: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Bytes as they lie in memory, without a copy. torch wants memory that could be written to; nobody does."""
    if not data:
        return np.empty(0, np.uint8)
    room = (ctypes.c_uint8 * len(data)).from_address(np.frombuffer(data, np.uint8).ctypes.data)
    room.held_by = data  # type: ignore[attr-defined]  # it stays as long as somebody looks at it
    return np.ctypeslib.as_array(room)


def tensors_of(record: Mapping[str, Array], names: Mapping[str, str] | None = None) -> tuple[Tensors, Outline]:
    """An ArrayRecord; `names`: what its arrays are called among the tensors."""
    found, arrays = Tensors(), []
    for name, array in record.items():
        key = name if names is None else names[name]
        found[key], how = tensor_of(array)
        arrays.append([name, key] if how is None else [name, key, how])
    return found, {"kind": ARRAYS, "arrays": arrays}


def record_of(outline: Outline, tensors: Mapping[str, Tensor]) -> ArrayRecord:
    record = ArrayRecord()
    for name, key, *how in outline["arrays"]:
        if key not in tensors:
            raise StoreError(f"The array '{name}' is not among what the tape has: {', '.join([*tensors][:9])}.")
        record[str(name)] = array_of(tensors[key], how[0] if how else None)
    return record


# -- contents ---------------------------------------------------------------------------------------------------------


def outlined(
    content: Mapping[str, Any],
    *,
    whole: bool = False,
    layers: Sequence[str] | None = None,
) -> tuple[Outline, Tensors]:
    """A message's records, or a context's. Arrays keep their own names if there is one model.

    `whole`: long bytes and texts become tensors; otherwise they are left out, and it is noted that they are. `layers`:
    better names for the arrays of one model, where the wire has numbers.
    """
    alone = sum(isinstance(record, ArrayRecord) for record in content.values()) == 1
    outline, tensors = Outline(), Tensors()
    for key, record in content.items():
        if isinstance(record, ArrayRecord):
            names = {name: name if alone else f"{key}/{name}" for name in record}
            if alone and layers is not None and len(layers) == len(record):
                names = dict(zip(record, layers, strict=True))
            names = _apart(names, tensors)
            own, outline[key] = tensors_of(record, names)
            tensors |= own
        else:
            kind = METRICS if isinstance(record, MetricRecord) else CONFIG
            outline[key] = {"kind": kind, "values": _values(key, record, tensors if whole else None)}
    return outline, tensors


def content_of(outline: Outline, tensors: Mapping[str, Tensor]) -> RecordDict:
    """The records again. An outline comes from a file: what is wrong in it is an error that says so."""
    try:
        content = RecordDict()
        for key, told in outline.items():
            if told["kind"] == ARRAYS:
                content[key] = record_of(told, tensors)
            else:
                values = {name: given_back(value, tensors) for name, value in told["values"].items()}
                values = {name: value for name, value in values.items() if value is not LEFT_OUT}
                content[key] = MetricRecord(values) if told["kind"] == METRICS else ConfigRecord(values)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise StoreError(f"A message on the tape cannot be read: {type(error).__name__}: {error}") from error
    return content


def left_out(outline: Outline) -> list[str]:
    """What was too long for the tape, as record/name."""
    found = []
    for key, told in outline.items():
        for name, value in told.get("values", {}).items():
            if isinstance(value, dict) and "left_out" in value:
                found.append(f"{key}/{name}")
    return found


def _apart(names: dict[str, str], taken: Mapping[str, Any]) -> dict[str, str]:
    """Two records may spell one name: «a/b» and «c», «a» and «b/c»."""
    found: dict[str, str] = {}
    for name, key in names.items():
        own = key
        while own in taken or own in found.values():
            own += "'"
        found[name] = own
    return found


def _values(key: str, record: Mapping[str, Any], tensors: Tensors | None) -> dict[str, Any]:
    import torch  # noqa: PLC0415 - as above

    found: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, str | bytes) and len(value) > WORDS and tensors is not None:
            own = _apart({name: f"{key}/{name}"}, tensors)[name]
            data = value.encode() if isinstance(value, str) else value
            tensors[own] = torch.from_numpy(_shown(data))
            found[name] = {"tensor": own, "text": isinstance(value, str)}
        else:
            found[name] = plain(value)
    return found


# -- values -----------------------------------------------------------------------------------------------------------

LEFT_OUT = object()


def plain(value: Any) -> Any:
    """A value as JSON that gives the same value back: numbers keep their kind and bits."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return _number_or_words(value)


def _number_or_words(value: Any) -> Any:
    if isinstance(value, int) and -(2**63) <= value < 2**64:
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": float(value).hex()}
    if isinstance(value, str) and len(value) <= WORDS:
        return str(value)
    if isinstance(value, bytes) and len(value) <= WORDS:
        return {"bytes": base64.b64encode(value).decode()}
    return {"left_out": type(value).__name__, "size": len(value) if isinstance(value, str | bytes) else None}


def given_back(told: Any, tensors: Mapping[str, Tensor] | None = None) -> Any:
    if isinstance(told, list):
        return [given_back(one) for one in told]
    if not isinstance(told, dict):
        return told
    try:
        if "float" in told:
            return float.fromhex(told["float"])
        if "bytes" in told:
            return base64.b64decode(told["bytes"], validate=True)
        if "tensor" in told and tensors is not None:
            data = tensors[told["tensor"]].numpy().tobytes()
            return data.decode() if told.get("text") else data
    except (ValueError, TypeError, KeyError, binascii.Error) as error:
        raise StoreError(f"A value on the tape cannot be read: {error}") from error
    return LEFT_OUT
