# SPDX-License-Identifier: Apache-2.0
"""Weak records of the tensors that a client's hooks see: which of them are still alive some rounds later.

The inputs and outputs of the client's model, its parameters and their gradients are recorded. A record keeps nothing
alive: it holds a weak reference to a tensor's storage, so that a view, a detached copy or a NumPy array that the user
keeps counts as well. For an output that has a graph it also holds a weak reference to a mark in the metadata of the
graph's last node. The mark lives as long as that node, which a loss keeps alive after the output itself is gone.

The heap is never enumerated, and the garbage collector is never started. `gc.get_objects()` returns tuples that another
thread is still building, and that thread then fails with `SystemError`.
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fedvitals.model_hooks import Hook, can_be_hooked
from fedvitals.resources.tensors import graph_nodes, storage_bytes, tensors_in, tensors_saved_by

MOST_RECORDS = 4096  # live records of a process; above that half of them are dropped, and the others count twice
MOST_FORWARDS = 32  # recorded for one client in one round; above that likewise
TENSORS = 4  # recorded for one forward pass: this many inputs, and this many outputs
PARAMETERS, GRADIENTS = 16, 4  # the largest ones, recorded at the end of a client
GRAPHS_MEASURED = 1  # clients per round whose graphs' saved tensors are recorded
GRAPH_NODES = 1000  # of a measured graph
SAVED = 64  # storages recorded for a measured graph, the largest first
MARK = "fedvitals"  # in the metadata of a node

# What tensors counted together have in common: "output", "input", "parameter" or "gradient"; shape and type; and
# whether graphs of such outputs are counted instead of the tensors.
Group = tuple[str, tuple[int, ...], torch.dtype, bool]


class _Mark:
    __slots__ = ("__weakref__",)


class _Gone(weakref.ref[_Mark]):
    """Callable that returns whether a mark is gone."""

    __slots__ = ()

    def __call__(self) -> bool:  # type: ignore[override]
        return super().__call__() is None


@dataclass(slots=True)
class TensorRecord:
    """One storage, or one graph, that was alive when it was seen. `weight`: how many similar ones it stands for."""

    group: Group
    bytes: int
    expired: Callable[[], bool]
    storage: int | None = None  # address of the storage; None for a graph
    saved: Sequence[tuple[StorageWeakRef, int]] | None = None  # by a measured graph
    round_index: int = 0
    weight: int = 1

    def held_bytes(self) -> int:
        """Return the bytes that a measured graph still keeps for a backward pass."""
        return sum(size for reference, size in self.saved or () if not reference.expired())


@dataclass(slots=True)
class TensorTotals:
    """Live records of one group."""

    count: int = 0
    bytes: int = 0
    rounds: set[int] = field(default_factory=set)  # in which they were seen
    held: list[int] = field(default_factory=list)  # bytes of each measured graph
    exact: bool = True  # False: some records stand for several tensors


class SeenTensors:
    """The records of one process in one run."""

    def __init__(self) -> None:
        # By address, which is not reused while a weak reference exists.
        self._storages: dict[int, TensorRecord] = {}
        self._graphs: list[TensorRecord] = []
        self._lock = threading.RLock()  # a finalizer may close another client on the thread that holds it
        self.random = random.Random(0)  # noqa: S311 - chooses which to drop: every second one might all be of one kind

    def __len__(self) -> int:
        return len(self._storages) + len(self._graphs)

    def add(self, records: Iterable[TensorRecord]) -> None:
        """Record tensors, without keeping them alive."""
        with self._lock:
            for record in records:
                if record.storage is None:
                    self._graphs.append(record)
                else:
                    self._storages.setdefault(record.storage, record)
            if len(self) > 2 * MOST_RECORDS:
                self.forget_expired()

    def clear(self) -> None:
        """Forget all tensors."""
        with self._lock:
            self._storages, self._graphs = {}, []

    def forget_expired(self) -> None:
        """Drop the records of what is gone, and thin out the others if there are too many."""
        with self._lock:
            self._graphs = [record for record in self._graphs if not record.expired()]
            storages = [record for record in list(self._storages.values()) if not record.expired()]
            while len(storages) + len(self._graphs) > MOST_RECORDS:
                self._graphs, storages = self._half(self._graphs), self._half(storages)
            self._storages = {record.storage: record for record in storages if record.storage is not None}

    def alive(self, after: int, until: int) -> dict[Group, TensorTotals]:
        """Return what was seen after one round and until another, and is still alive."""
        piles: dict[Group, TensorTotals] = {}
        with self._lock:
            self.forget_expired()
            for record in [*self._graphs, *self._storages.values()]:
                if after < record.round_index <= until:
                    pile = piles.setdefault(record.group, TensorTotals())
                    pile.count += record.weight
                    pile.bytes += record.weight * record.bytes
                    pile.rounds.add(record.round_index)
                    pile.exact = pile.exact and record.weight == 1
                    if record.saved is not None:
                        pile.held.append(record.held_bytes())
        return piles

    def _half(self, records: list[TensorRecord]) -> list[TensorRecord]:
        kept = self.random.sample(records, len(records) // 2)
        for record in kept:
            record.weight *= 2
        return kept


class ClientTensors:
    """Records what is seen of one client while it trains; `close` hands over the records and cleans up the model."""

    def __init__(
        self,
        seen: SeenTensors,
        model: Any,
        parameters: Sequence[Tensor],
        round_index: int,
        *,
        rounds: int = 1,
        measure_graph: bool = False,
    ) -> None:
        """`rounds`: how many this one stands for. `measure_graph`: whether to record what the first graph saves."""
        self._seen, self._parameters, self._round_index, self._rounds = seen, parameters, round_index, rounds
        self._measure_graph = measure_graph
        self._stride = 1  # one in this many forward passes is recorded
        self._records: list[list[TensorRecord]] = []  # for each of them
        self._handle: Any = None
        if can_be_hooked(model):
            hook = Hook(self._after_forward, self._failed)
            self._handle = model.register_forward_hook(hook, with_kwargs=True)

    def close(self) -> None:
        """Hand over the records and remove the hooks. A second call does nothing."""
        self._remove_hook()
        records, self._records = self._records, []
        for record in itertools.chain.from_iterable(records):
            record.weight = self._stride * self._rounds
        largest = heapq.nlargest(PARAMETERS, self._parameters, key=Tensor.numel)
        self._parameters = ()
        gradients = [parameter.grad for parameter in largest[:GRADIENTS] if parameter.grad is not None]
        at_end = [*_storages("parameter", largest), *_storages("gradient", gradients)]
        for record in at_end:
            record.weight = self._rounds
        records.append(at_end)
        for record in itertools.chain.from_iterable(records):
            record.round_index = self._round_index
        self._seen.add(itertools.chain.from_iterable(records))

    def _remove_hook(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()

    def _failed(self, _error: Exception) -> None:
        """Stop recording outputs, as a model's outputs may be of any kind."""
        self._remove_hook()

    def _after_forward(self, model: Any, inputs: Any, named: Any, output: Any) -> None:
        if self._stride > 1 and self._seen.random.random() * self._stride >= 1:
            return
        outputs = [output] if type(output) is Tensor else list(itertools.islice(tensors_in(output), TENSORS))
        received = [value for value in (*inputs, *named.values()) if isinstance(value, Tensor)]
        graphs = _graphs(outputs)
        if self._measure_graph and graphs:
            self._measure_graph = False
            graphs[0].saved = _saved_for_backward(model, outputs, received)
        self._records.append([*_storages("input", received[:TENSORS]), *_storages("output", outputs), *graphs])
        if len(self._records) >= MOST_FORWARDS:
            half = self._seen.random.sample(self._records, MOST_FORWARDS // 2)
            self._records, self._stride = half, 2 * self._stride


def _is_plain(tensor: Tensor) -> bool:
    """Whether its storage shows its size: not for subclasses, which may compute, nor for tensors without memory."""
    kind = type(tensor)
    return (kind is Tensor or kind is torch.nn.Parameter) and not tensor.is_meta


def _storages(kind: str, tensors: Iterable[Tensor]) -> list[TensorRecord]:
    records = []
    for tensor in tensors:
        if _is_plain(tensor):
            try:
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
            except (RuntimeError, NotImplementedError):  # sparse, or a tensor of torch.func
                continue
            group = (kind, tensor.shape, tensor.dtype, False)
            records.append(TensorRecord(group, storage.nbytes(), reference.expired, reference.cdata))
    return records


def _graphs(outputs: Iterable[Tensor]) -> list[TensorRecord]:
    records = []
    for tensor in outputs:
        node: Any = tensor.grad_fn if _is_plain(tensor) else None
        if node is not None:
            mark = node.metadata.setdefault(MARK, _Mark())
            records.append(TensorRecord(("output", tensor.shape, tensor.dtype, True), 0, _Gone(mark)))
    return records


def _saved_for_backward(
    model: Any, outputs: Iterable[Tensor], inputs: Iterable[Tensor]
) -> list[tuple[StorageWeakRef, int]]:
    """Return the largest storages that the graph of these outputs keeps, without those of the model and its inputs.

    An input is often part of the data set, which lives on long after the graph has been freed.
    """
    others: set[int] = set()
    for tensors in (model.parameters(), model.buffers(), inputs):
        storage_bytes(tensors, others)
    saved: dict[int, tuple[StorageWeakRef, int]] = {}
    for node in itertools.islice(graph_nodes(outputs), GRAPH_NODES):
        for tensor in tensors_saved_by(node):
            if _is_plain(tensor) and tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in others and storage.data_ptr() not in saved:
                    saved[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
    return heapq.nlargest(SAVED, saved.values(), key=lambda pair: pair[1])
