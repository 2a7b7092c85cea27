# SPDX-License-Identifier: Apache-2.0
"""Read a few of a client's own samples without disturbing its training.

Iterating a user's DataLoader would advance its generator and change the training. So samples are read by index: from a
loader's data set, from a data set, from a pair of arrays or from a list of batches. Random streams that this uses
(augmentation) are restored. Data that can only be iterated (streams, one-shot iterators) are rejected with a reason.
"""

from __future__ import annotations

import bisect
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from fedvitals.errors import ConfigError, UnsuitedError

LABELS = ("labels", "label", "targets", "target", "y")  # the label part of a batch that is a mapping
_LEAST_DIMENSIONS = (("input_ids", 2), *((name, 1) for name in LABELS))  # of the parts of a batch
Inputs = Tensor | Mapping[str, Tensor] | tuple[Tensor, ...]
Batch = tuple[Inputs, Tensor]  # inputs and labels
MOST_OBJECTS = 500  # searched for random generators
Stream = torch.Generator | random.Random | np.random.Generator | np.random.RandomState


def size(data: Any) -> int:
    """Return the number of samples."""
    match data:
        case DataLoader() if hasattr(data.dataset, "__len__") and not isinstance(data.dataset, IterableDataset):
            return len(data.dataset)  # samples of any kind
        case DataLoader():
            return size(data.dataset)
        case (Tensor() | np.ndarray(), Tensor() | np.ndarray()):
            if len(data[0]) != len(data[1]):
                raise ConfigError(
                    f"data= takes as many labels as inputs; got {len(data[0]):,} inputs and {len(data[1]):,} labels."
                )
            return len(data[0])
        case IterableDataset():
            raise UnsuitedError(
                f"The client's own samples are not looked at: a stream ({type(data).__name__}) has no size, and cannot "
                "be read without consuming it."
            )
        case _ if (
            isinstance(data, Tensor | np.ndarray)  # inputs without labels
            or _is_rows(data)
            or (isinstance(data, Dataset) and hasattr(data, "__len__"))
        ):
            return len(data)
        case list() | tuple():
            return sum(_length(batch) for batch in data)
        case Mapping():
            return _length(data)
    raise ConfigError(
        "data= takes a DataLoader, a map-style Dataset, a pair of tensors or arrays (x, y), or a list of batches "
        f"or tokenised texts; got {type(data).__name__}. One-shot iterators are refused: reading them would change the "
        "training."
    )


def batch_size(data: Any) -> int | None:
    """Return the number of samples in a batch of this data; None if it has no batches."""
    match data:
        case DataLoader():
            return data.batch_size
        case (Tensor() | np.ndarray(), Tensor() | np.ndarray()):
            return None
        case list() if _is_rows(data):
            return None
        case list() | tuple() if data:
            return -(-size(data) // len(data))
    return None


def read(data: Any, indices: Sequence[int]) -> Batch:  # noqa: PLR0911 - one for each kind of data
    """Return the samples at these indices, as (x, y); x may be several tensors, see `Inputs`."""
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
        case _ if _is_rows(data):
            return _pair(_from_rows([data[i] for i in indices]))
        case list() | tuple():
            return _from_batches(data, indices)
        case Mapping():
            return _pair({name: torch.as_tensor(part)[torch.as_tensor(indices)] for name, part in data.items()})
        case _:
            with preserved_random_streams(data):
                return _pair(default_collate([data[i] for i in indices]))


def spread_indices(total: int, wanted: int, turn: int) -> list[int]:
    """Return `wanted` indices spread evenly over `total`.

    They differ at each turn, so that eventually all are used.
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
    on_devices = torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing()
    device_states = torch.cuda.get_rng_state_all() if on_devices else None
    own = [(stream, _state_of(stream)) for stream in streams_in(data)]
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        if device_states is not None:
            torch.cuda.set_rng_state_all(device_states)
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        for stream, state in own:
            _set_state(stream, state)


def streams_in(data: Any) -> list[Stream]:
    """Return the random generators held by a data set, its transforms, or data sets inside it."""
    streams: list[Stream] = []
    seen: set[int] = set()
    waiting = [data]
    while waiting and len(seen) < MOST_OBJECTS:
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


def _pair(batch: Any) -> Batch:
    """Return a batch as inputs and labels: a pair, a longer tuple whose last part is the labels, or a mapping.

    Raises UnsuitedError if the parts cannot be identified.
    """
    if isinstance(batch, Mapping):
        tensors = {name: part for name, part in batch.items() if isinstance(part, Tensor)}
        label = next((name for name in LABELS if name in tensors), None)
        inputs = {str(name): part for name, part in tensors.items() if name != label}
        if label is not None and inputs:
            return next(iter(inputs.values())) if len(inputs) == 1 else inputs, tensors[label]
    elif isinstance(batch, list | tuple) and len(batch) > 1 and all(isinstance(part, Tensor) for part in batch):
        return batch[0] if len(batch) == 2 else tuple(batch[:-1]), batch[-1]
    kind = type(batch).__name__
    parts = f" of {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else ""
    raise UnsuitedError(
        f"The client's own samples are not looked at: a batch is expected as (x, y), as a mapping with one of "
        f"{', '.join(LABELS)} in it, or as a tuple that ends with the labels, all of them tensors; got a {kind}{parts}."
    )


def apply(model: nn.Module, x: Inputs) -> Any:
    """Return the model's output for inputs as returned by `read`: several by name, or in their order."""
    if isinstance(x, Tensor):
        return model(x)
    return model(**x) if isinstance(x, Mapping) else model(*x)


def mapped(x: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """Return inputs with each of their tensors changed."""
    if isinstance(x, Tensor):
        return change(x)
    return {name: change(part) for name, part in x.items()} if isinstance(x, Mapping) else tuple(map(change, x))


def _length(batch: Any) -> int:
    """Return the number of samples in a batch."""
    if isinstance(batch, Mapping):
        return next((len(part) for part in batch.values() if isinstance(part, Tensor | np.ndarray) and part.ndim), 0)
    return len(batch[-1])


def _is_rows(data: Any) -> bool:
    """Return whether data are samples, each a mapping: in a list, or in a Dataset of Hugging Face.

    In a list of batches, labels have a dimension for the samples, and texts have two.
    """
    if not isinstance(data, list):
        return any(kind.__module__ == "datasets.arrow_dataset" for kind in type(data).__mro__)
    first = data[0] if data and isinstance(data[0], Mapping) else {}
    return any(_dimensions(first[name]) < least for name, least in _LEAST_DIMENSIONS if name in first)


def _dimensions(part: Any) -> int:
    if isinstance(part, list | tuple):
        return 1 + (_dimensions(part[0]) if part else 0)
    return int(getattr(part, "ndim", 0))


def _from_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Return samples, each a mapping, as one batch. Non-numeric parts, such as a text itself, are left out."""
    batch = {}
    for name in rows[0]:
        try:
            parts = [torch.as_tensor(row[name]) for row in rows]
        except (TypeError, ValueError, RuntimeError):
            continue
        if len({part.shape for part in parts}) > 1:
            raise UnsuitedError(
                f"Texts as mappings are not padded, and their «{name}» have different lengths: pass a DataLoader with "
                "the trainer's collate_fn."
            )
        batch[name] = torch.stack(parts)
    return batch


def _from_batches(batches: Sequence[Any], indices: Sequence[int]) -> Batch:
    starts = [0, *itertools.accumulate(map(_length, batches))][:-1]
    picked: list[Batch] = []
    for index in indices:
        batch = bisect.bisect_right(starts, index) - 1
        place = index - starts[batch]
        x, y = _pair(_of_tensors(batches[batch]))
        picked.append((mapped(x, lambda part: part[place]), y[place]))  # noqa: B023 - called at once
    inputs, labels = zip(*picked, strict=True)
    first = inputs[0]
    stacked: Inputs
    if isinstance(first, Tensor):
        stacked = torch.stack(inputs)
    elif isinstance(first, Mapping):
        stacked = {name: torch.stack([own[name] for own in inputs]) for name in first}
    else:
        stacked = tuple(torch.stack(parts) for parts in zip(*inputs, strict=True))
    return stacked, torch.stack(labels)


def _of_tensors(batch: Any) -> Any:
    """Return a batch with its NumPy arrays as tensors."""
    if isinstance(batch, Mapping):
        return {name: torch.as_tensor(part) if isinstance(part, np.ndarray) else part for name, part in batch.items()}
    return tuple(torch.as_tensor(part) if isinstance(part, np.ndarray) else part for part in batch)
