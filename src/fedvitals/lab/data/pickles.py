# SPDX-License-Identifier: Apache-2.0
"""Read CIFAR-10's official python batches, which are pickles, without trusting them.

A pickle can call any function that it names. These files name three: numpy's `_reconstruct`, `ndarray` and `dtype`. The
reader replaces each with a stand-in that records its arguments, from which the array is built afterwards. Any other
name is refused.
"""

from __future__ import annotations

import io
import pickle  # what it can call is restricted below
from typing import Any

import numpy as np

from fedvitals.errors import ConfigError

PIXELS = 3072  # 3 colours of 32 × 32


class _ArrayStandIn:
    """Stand-in for the array: keeps the state that numpy would have received."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _DtypeStandIn:
    """Stand-in for `numpy.dtype`: keeps its name, such as u1."""

    def __init__(self, name: Any = None, *_: Any) -> None:
        self.name = name

    def __setstate__(self, state: Any) -> None:
        """The byte order: one byte has none."""


class _NdarrayStandIn:
    """Stand-in for `numpy.ndarray`, which is only named."""


def _reconstruct(*_: Any) -> _ArrayStandIn:
    return _ArrayStandIn()


ADMITTED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): _NdarrayStandIn,
    ("numpy", "dtype"): _DtypeStandIn,
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return ADMITTED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no batch of CIFAR-10 needs") from None


def read_batch(raw: bytes, name: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the images [N, 3, 32, 32] and labels [N] of one batch."""
    try:
        return _images_and_labels(_Reader(io.BytesIO(raw), encoding="bytes").load())
    except Exception as error:  # a hostile or torn pickle can fail in any way: the user gets one answer
        raise ConfigError(f"CIFAR-10: {name} is not an official python batch: {error}. Get it anew.") from error


def _images_and_labels(content: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    batch = {key.decode() if isinstance(key, bytes) else key: value for key, value in content.items()}
    _, shape, element, _, data = batch["data"].state
    labels = np.asarray([int(label) for label in batch["labels"]], np.int64)
    if element.name not in ("u1", b"u1") or tuple(shape) != (len(labels), PIXELS) or not isinstance(data, bytes):
        raise ValueError(f"its data are {shape} of {element.name}, not [{len(labels)}, {PIXELS}] bytes")
    return np.frombuffer(data, np.uint8).reshape(len(labels), 3, 32, 32).copy(), labels
