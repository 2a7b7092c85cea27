# SPDX-License-Identifier: Apache-2.0
"""Sums of sharded parameters (DTensor, as FSDP uses them), added up over the processes that hold the shards.

Each process measures its own shards. Their sums travel through the key-value store of `torch.distributed`, never
through a collective operation, which would hang where one of the processes is not watched. The process of the lowest
rank waits for the others, briefly, and reports the whole; the others report their own shards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import msgspec
import numpy as np
from torch import Tensor, distributed

from fedvitals.stats import Array, merge_sums

PATIENCE = timedelta(seconds=5)  # once: a process that did not come is not waited for again


class ShardGroup:
    """The processes that hold the shards of a run's models."""

    def __init__(self) -> None:
        self._times: Counter[tuple[int | None, str]] = Counter()  # that a client's round was measured here
        self._absent: set[int] = set()

    def add_up(
        self,
        parameters: Sequence[Tensor],
        place: tuple[int | None, str],
        rows: Sequence[Array],
        totals: Sequence[Array],
    ) -> tuple[list[Array], list[Array], tuple[int, int]]:
        """Return nine sums per layer and plain totals, added up over all processes; and how many of them were there.

        Unchanged where nothing is sharded, and in all processes but that of the lowest rank.
        """
        ranks = _ranks(parameters)
        if len(ranks) < 2:
            return [*rows], [*totals], (1, 1)
        self._times[place] += 1
        round_index, node = place
        own, name = distributed.get_rank(), f"fedvitals/{round_index}/{node}/{self._times[place]}"
        store: Any = distributed.distributed_c10d._get_default_store()  # noqa: SLF001 - torch has no other way to it
        if own != ranks[0]:
            store.set(f"{name}/{own}", _encode([*rows, *totals]))
            return [*rows], [*totals], (1, len(ranks))
        parts = [[*rows, *totals], *self._received(store, name, ranks[1:])]
        fitting = [part for part in parts if [a.shape for a in part] == [a.shape for a in parts[0]]]
        arrays = [np.stack(same) for same in zip(*fitting, strict=True)]
        merged = [merge_sums(array) for array in arrays[: len(rows)]]
        return merged, [array.sum(axis=0) for array in arrays[len(rows) :]], (len(fitting), len(ranks))

    def _received(self, store: Any, name: str, ranks: Sequence[int]) -> list[list[Array]]:
        """Return the arrays of the other processes, as far as they come in time."""
        received = []
        for rank in ranks:
            key = f"{name}/{rank}"
            try:
                if rank in self._absent and not store.check([key]):
                    continue
                store.wait([key], PATIENCE)
            except (RuntimeError, ValueError):  # it did not come in time
                self._absent.add(rank)
                continue
            received.append(_decode(store.get(key)))
            store.delete_key(key)
        return received


def _ranks(parameters: Sequence[Tensor]) -> list[int]:
    """Return the ranks of the processes that hold these parameters, in order; none if they are not sharded."""
    mesh = next((p.device_mesh for p in parameters if hasattr(p, "device_mesh")), None)
    return [] if mesh is None else sorted({int(rank) for rank in mesh.mesh.flatten().tolist()})


def _encode(arrays: Sequence[Array]) -> bytes:
    return msgspec.msgpack.encode([(array.shape, np.ascontiguousarray(array).tobytes()) for array in arrays])


def _decode(encoded: bytes) -> list[Array]:
    parts = msgspec.msgpack.decode(encoded, type=list[tuple[tuple[int, ...], bytes]])
    return [np.frombuffer(values, np.float64).reshape(shape) for shape, values in parts]
