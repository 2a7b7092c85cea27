# SPDX-License-Identifier: Apache-2.0
"""Models that a host holds as arrays by name: their differences, and an outline that the monitor can measure.

The transport says which arrays there are, but not which are trained: integers are not, and neither are the running
statistics of normalisation layers, recognised by name.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fedvitals.probes import numpy_updates
from fedvitals.probes.backends import torch_is_loaded
from fedvitals.probes.numpy_updates import FlatArrays

if TYPE_CHECKING:
    from fedvitals.hosts.outline import Outline
    from fedvitals.monitor.host import HostObserver
    from fedvitals.probes.array_difference import ArrayDifference
    from fedvitals.records import Action

Values = npt.NDArray[Any]
USED_BY_NOBODY = 2  # references to an object in a list as counted by `getrefcount`: the list's, and the call's
KEPT_BYTES = 64 << 20
BUFFERS = re.compile(r"(^|\.)(running_mean|running_var|num_batches_tracked)$")


class ReusableVectors:
    """Vectors that are reused once nobody holds them any more.

    In a large model, allocating takes four times as long as subtracting. At most `most` bytes of them are kept.
    """

    def __init__(self, most: int = KEPT_BYTES) -> None:
        self._most = most
        self._kept: list[Values] = []
        self._lock = threading.Lock()

    def __call__(self, size: int, dtype: Any) -> Values:
        """Return an uninitialised vector of this size and type, which nobody else holds."""
        with self._lock:
            self._kept = [own for own in self._kept if own.size == size and own.dtype == dtype]
            for place in range(len(self._kept)):
                if sys.getrefcount(self._kept[place]) <= USED_BY_NOBODY:  # a tensor or a view adds a reference
                    return self._kept[place]
            vector = np.empty(size, dtype)
            if (len(self._kept) + 1) * vector.nbytes <= self._most:
                self._kept.append(vector)
            return vector


def difference_of(
    sent: Mapping[str, Values], got: Mapping[str, Values], room: Callable[..., Values] = np.empty
) -> ArrayDifference:
    """Return a client's change, layer by layer; if shapes differ, what it sent, so that the difference shows.

    `room`: returns the vector for it. Needs torch.
    """
    from fedvitals.probes.array_difference import ArrayDifference  # noqa: PLC0415 - imports torch

    return ArrayDifference([*sent.values()] if _alike(sent, got) else None, [*got.values()], room)


def update_of(
    sent: Mapping[str, Values], got: Mapping[str, Values], room: Callable[..., Values] = np.empty
) -> FlatArrays:
    """Return the same as arrays, in one vector. Does not need torch."""
    shapes = {name: values.shape for name, values in got.items()}
    alike = _alike(sent, got)
    vector = room(sum(values.size for values in got.values()), difference_dtype(got))
    at = 0
    for name, values in got.items():
        place = vector[at : at + values.size].reshape(values.shape)
        at += values.size
        np.copyto(place, values) if not alike else np.subtract(values, sent[name], out=place, casting="same_kind")
    return FlatArrays(vector, [*shapes.values()])


def measure_update(
    host: HostObserver,
    round_index: int,
    node: str,
    start: Mapping[str, Values],
    end: Mapping[str, Values],
    clients: int,
    room: Callable[..., Values] = np.empty,
) -> Sequence[Action]:
    """Measure the update of one of `clients` clients, by torch if it is loaded; return the resulting actions.

    `room`: returns the vector for the difference.
    """
    if torch_is_loaded():
        return host.update_difference(round_index, node, difference_of(start, end, room), clients)
    return host.updates(round_index, {node: update_of(start, end, room)})


def update_sums(before: Mapping[str, Values], after: Mapping[str, Values]) -> Any:
    """Return nine statistics of each layer of an update, by torch's kernel if torch is loaded, else by NumPy."""
    if torch_is_loaded():
        return difference_of(before, after).sums()
    return numpy_updates.sums(update_of(before, after))


def difference_dtype(got: Mapping[str, Values]) -> np.dtype[Any]:
    """Return the type of a model's difference from another: float64 if any of its arrays is, else float32."""
    return np.dtype(np.float64 if any(values.dtype == np.float64 for values in got.values()) else np.float32)


def _alike(sent: Mapping[str, Values], got: Mapping[str, Values]) -> bool:
    """Return whether two models have the same names, in the same order, and the same shapes."""
    return [(name, values.shape) for name, values in sent.items()] == [(n, values.shape) for n, values in got.items()]


class ArrayOutline:
    """A model of which only names and values are known, in transport order; does not need torch."""

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


def new_outline(values: Mapping[str, Values]) -> Outline | ArrayOutline:
    """Return the outline of a model: of tensors if torch is loaded, else of arrays."""
    if not torch_is_loaded():
        return ArrayOutline(values)
    from fedvitals.hosts.outline import Outline  # noqa: PLC0415 - imports torch

    return Outline(values)
