# SPDX-License-Identifier: Apache-2.0
"""Read a few of a client's own samples without disturbing its training.

Iterating a user's DataLoader would advance its generator and change the training. So samples are read by index: from a
loader's data set, from a data set, from a pair of arrays or from a list of batches. Random streams that this uses
(augmentation) are restored. Data that can only be iterated (streams, one-shot iterators) are refused, with the reason.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from fedvitals.errors import ConfigError

Stream = torch.Generator | random.Random | np.random.Generator | np.random.RandomState


def size(data: Any) -> int:
    """Return the number of samples."""
    match data:
        case DataLoader():
            return size(data.dataset)
        case (Tensor() | np.ndarray(), Tensor() | np.ndarray()):
            return len(data[0])
        case list() | tuple():
            return sum(len(batch[1]) for batch in data)
        case IterableDataset():
            raise ConfigError(f"A stream ({type(data).__name__}) has no size and cannot be read without consuming it.")
        case Dataset() if hasattr(data, "__len__"):
            return len(data)
    raise ConfigError(
        f"data= takes a DataLoader, a map-style Dataset, a pair of tensors or arrays (x, y), or a list of batches; got "
        f"{type(data).__name__}. One-shot iterators are refused: reading them would change the training."
    )


def batch_size(data: Any) -> int | None:
    """Return the number of samples in a batch of this data; None where it has no batches."""
    match data:
        case DataLoader():
            return data.batch_size
        case (Tensor() | np.ndarray(), Tensor() | np.ndarray()):
            return None
        case list() | tuple() if data:
            return -(-size(data) // len(data))
    return None


def read(data: Any, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the samples at these indices, as (x, y)."""
    match data:
        case DataLoader():
            if isinstance(data.dataset, TensorDataset):
                return read(data.dataset, indices)
            collate = data.collate_fn if data.batch_sampler is not None else default_collate
            with preserved_random_streams(data):
                return _pair(collate([data.dataset[i] for i in indices]))
        case TensorDataset():
            return _pair([tensor[torch.as_tensor(indices)] for tensor in data.tensors])
        case (Tensor() | np.ndarray(), Tensor() | np.ndarray()):
            return torch.as_tensor(data[0][indices]), torch.as_tensor(data[1][indices])
        case list() | tuple():
            return _from_batches(data, indices)
        case _:
            with preserved_random_streams(data):
                return _pair(default_collate([data[i] for i in indices]))


def spread_indices(total: int, wanted: int, turn: int) -> list[int]:
    """Return `wanted` indices spread evenly over `total`, different ones at each turn, so that eventually all are
    seen.
    """
    wanted = min(total, wanted)
    if not wanted:
        return []
    stride = total / wanted
    return [int(turn + k * stride) % total for k in range(wanted)]


@contextmanager
def preserved_random_streams(data: Any) -> Iterator[None]:
    """Restore torch's, Python's and numpy's random streams, and those inside `data`, after the block."""
    torch_state, python_state, numpy_state = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
    own = [(stream, _state_of(stream)) for stream in streams_in(data)]
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        for stream, state in own:
            _set_state(stream, state)


def streams_in(data: Any, most: int = 500) -> list[Stream]:
    """Return the random generators held by a data set, its transforms, or data sets inside it."""
    streams: list[Stream] = []
    seen: set[int] = set()
    waiting = [data]
    while waiting and len(seen) < most:
        candidate = waiting.pop()
        if id(candidate) in seen or isinstance(candidate, Tensor | np.ndarray | str | bytes | type | ModuleType):
            continue
        seen.add(id(candidate))
        if isinstance(candidate, Stream):
            streams.append(candidate)
        elif isinstance(candidate, list | tuple | dict):
            waiting += (
                (candidate.values() if isinstance(candidate, dict) else candidate) if len(candidate) <= 32 else ()
            )
        else:
            waiting += getattr(candidate, "__dict__", {}).values()
    return streams


def _state_of(stream: Stream) -> Any:
    match stream:
        case np.random.Generator():
            return stream.bit_generator.state
        case random.Random():
            return stream.getstate()
    return stream.get_state()


def _set_state(stream: Stream, state: Any) -> None:
    match stream:
        case np.random.Generator():
            stream.bit_generator.state = state
        case random.Random():
            stream.setstate(state)
        case _:
            stream.set_state(state)


def _pair(batch: Any) -> tuple[Tensor, Tensor]:
    if isinstance(batch, list | tuple) and len(batch) == 2 and all(isinstance(part, Tensor) for part in batch):
        return batch[0], batch[1]
    raise ConfigError(f"data= must yield pairs of tensors (x, y); a batch of it is {type(batch).__name__}.")


def _from_batches(batches: Sequence[Any], indices: Sequence[int]) -> tuple[Tensor, Tensor]:
    starts, total = [], 0
    for batch in batches:
        starts.append(total)
        total += len(_pair(batch)[1])
    picked = []
    for index in indices:
        b = max(i for i, start in enumerate(starts) if start <= index)
        picked.append((batches[b][0][index - starts[b]], batches[b][1][index - starts[b]]))
    return torch.stack([torch.as_tensor(x) for x, _ in picked]), torch.stack([torch.as_tensor(y) for _, y in picked])
