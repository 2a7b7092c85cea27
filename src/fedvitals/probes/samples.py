# SPDX-License-Identifier: Apache-2.0
"""A few of a client's own samples, read without disturbing its training.

Iterating a user's DataLoader would advance its generator and change the training. So samples are read by index: from a
loader's data set, from a data set, from a pair of arrays or from a list of batches. Whatever random numbers that draws
(augmentation) are put back. What can only be iterated (streams, one-shot iterators) is refused, and the reason told.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from fedvitals.errors import ConfigError


def size(data: Any) -> int:
    """How many samples there are."""
    match data:
        case DataLoader():
            return size(data.dataset)
        case (Tensor(), Tensor()):
            return len(data[0])
        case list() | tuple():
            return sum(len(batch[1]) for batch in data)
        case IterableDataset():
            raise ConfigError(f"A stream ({type(data).__name__}) has no size and cannot be read without consuming it.")
        case Dataset() if hasattr(data, "__len__"):
            return len(data)
    raise ConfigError(
        f"data= takes a DataLoader, a map-style Dataset, a pair of tensors (x, y) or a list of batches; got "
        f"{type(data).__name__}. One-shot iterators are refused: reading them would change the training."
    )


def read(data: Any, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The samples at these places, as (x, y)."""
    match data:
        case DataLoader():
            if isinstance(data.dataset, TensorDataset):
                return read(data.dataset, indices)
            collate = data.collate_fn if data.batch_sampler is not None else default_collate
            with all_random_streams_kept():
                return _pair(collate([data.dataset[i] for i in indices]))
        case TensorDataset():
            return _pair([tensor[torch.as_tensor(indices)] for tensor in data.tensors])
        case (Tensor(), Tensor()):
            index = torch.as_tensor(indices)
            return data[0][index], data[1][index]
        case list() | tuple():
            return _from_batches(data, indices)
        case _:
            with all_random_streams_kept():
                return _pair(default_collate([data[i] for i in indices]))


def spread(total: int, wanted: int, turn: int) -> list[int]:
    """`wanted` places spread evenly over `total`, others at each turn, so that over the rounds all are seen."""
    wanted = min(total, wanted)
    if not wanted:
        return []
    stride = total / wanted
    return [int(turn + k * stride) % total for k in range(wanted)]


@contextmanager
def all_random_streams_kept() -> Iterator[None]:
    """torch's, Python's and (if it was ever used) numpy's random streams stand afterwards where they stood before."""
    numpy_random = sys.modules.get("numpy.random")
    states = (torch.get_rng_state(), random.getstate(), numpy_random.get_state() if numpy_random else None)
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        if numpy_random:
            numpy_random.set_state(states[2])


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
