# SPDX-License-Identifier: Apache-2.0
"""The processes that train one client's model together: by copies of it (DDP) or by shards (DTensor, FSDP).

Each process measures its own part. Measurements travel through the key-value store of `torch.distributed`, never
through a collective operation, which would hang if one of the processes is not watched or has died. The process of the
lowest rank reports the client. It waits, briefly, for those that were watched when the training began.

A process numbers the trainings in which it took part. Of another process's messages, the next one with the same number
of steps counts, because processes that train together step together.
"""

from __future__ import annotations

import math
import os
import socket
import sys
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from fedvitals.kernels import is_sharded
from fedvitals.model_hooks import named_members
from fedvitals.records import printable
from fedvitals.stats import Array, merge_sums

PATIENCE = 5.0  # seconds; only once: a process that did not answer is not awaited again
Quartiles = tuple[float, ...]  # of the seconds of a step until the processes first wait for each other; or empty
PAUSE = 0.01  # seconds between two checks
ANSWER = timedelta(seconds=5)  # within which the store answers
NO_STEPS = -1  # for a training that is not reported
UNREAD = 8  # messages of a process that wait in the store; nobody reads them where the reporting process has no monitor

Message = TypeVar("Message")

_together: weakref.WeakKeyDictionary[nn.Module, tuple[int, ...]] = weakref.WeakKeyDictionary()


def train_together(model: nn.Module, ranks: Sequence[int]) -> None:
    """Record that these processes train copies of a model together, for models that do not say so themselves."""
    _together[model] = tuple(ranks)


def unwrapped(model: Any) -> Any:
    """Return the model inside a DDP wrapper, whose layers have the same names as elsewhere."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def _is_distributed() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def ranks_of(model: nn.Module) -> tuple[int, ...]:
    """Return the ranks of the processes that train this model together, in order; empty for a single process."""
    if not _is_distributed():
        return ()
    mesh = next((p.device_mesh for _, p in parameters_of(model) if hasattr(p, "device_mesh")), None)
    if mesh is not None:
        ranks = sorted({int(rank) for rank in mesh.mesh.flatten().tolist()})
    elif isinstance(model, DistributedDataParallel):
        ranks = sorted(distributed.get_process_group_ranks(model.process_group))
    else:
        ranks = sorted(_together.get(model, ()))
    return tuple(ranks) if len(ranks) > 1 else ()


def parameters_of(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return a model's parameters by name; for sharded ones, the shards, which optimisers hold.

    FSDP replaces the shards by whole parameters while it computes, and leaves those of the outermost module in place
    after an evaluation.
    """
    named = named_members(model, "_parameters")
    if not _is_distributed():
        return named
    sharded: list[Any] = [module for module in model.modules() if hasattr(type(module), "_get_fsdp_state")]
    states = [module._get_fsdp_state() for module in sharded]  # noqa: SLF001 - torch has no public name for it
    # In earlier versions of torch, a module has at most one group, and not a list of them.
    several = [getattr(state, "_fsdp_param_groups", [getattr(state, "_fsdp_param_group", None)]) for state in states]
    groups = [group for own_groups in several for group in own_groups if group is not None]
    own = [own for group in groups for own in group.fsdp_params if hasattr(own, "_unsharded_param")]
    shards = {id(parameter._unsharded_param): parameter.sharded_param for parameter in own}  # noqa: SLF001
    return [(name, shards.get(id(parameter), parameter)) for name, parameter in named]


class RankMessage(msgspec.Struct, array_like=True):
    """The measurements of a process in a training: its arrays as shapes and bytes, all float64."""

    steps: int
    before_exchange: Quartiles
    arrays: list[tuple[tuple[int, ...], bytes]]


class RankMark(msgspec.Struct, array_like=True):
    """Where a rank's process runs, and how many trainings it has begun.

    `numbering`: the namespace of the process's number.
    """

    begun: int
    host: str
    process: int
    numbering: str

    @classmethod
    def own(cls, begun: int) -> RankMark:
        """Return the mark of this process."""
        return cls(begun, socket.gethostname(), os.getpid(), _numbering())

    @property
    def is_gone(self) -> bool:
        """Whether the process is known to have ended, as far as that can be seen from here."""
        if sys.platform == "win32" or (self.host, self.numbering) != (socket.gethostname(), _numbering()):
            return False  # on Windows signal 0 is Ctrl-C: asking would interrupt the process
        try:
            os.kill(self.process, 0)
            status = Path(f"/proc/{self.process}/stat").read_text(encoding="ascii", errors="replace")
            return status.rpartition(")")[2].split()[0] == "Z"
        except ProcessLookupError:
            return True
        except (OSError, OverflowError):
            return False

    @property
    def words(self) -> str:
        return f"process {self.process} on {printable(self.host[:100])}"


@dataclass(slots=True)
class Gathered:
    """The measurements of all processes.

    These are nine sums per layer, totals, and the times before the first exchange by rank; and the ranks that were not
    watched, or were watched and did not answer.
    """

    rows: list[Array]
    totals: list[Array]
    sharded: bool
    before_exchange: dict[int, Quartiles] = field(default_factory=dict)
    unwatched: list[int] = field(default_factory=list)
    lost: dict[int, RankMark] = field(default_factory=dict)


class RankGroup:
    """The processes that train a run's models together, as seen by this one.

    `begin` and `gather` enclose each training.
    """

    def __init__(self, ranks: tuple[int, ...], store: Any, *, sharded: bool) -> None:
        self.ranks, self.sharded, self.own = ranks, sharded, distributed.get_rank()
        self.reports = self.own == ranks[0]
        self._shared = store
        self.store = self.connect()
        self._prefix = f"fedvitals/{ranks[0]}-{ranks[-1]}-{len(ranks)}-{sharded:d}"
        self._count = 0  # trainings that this process has begun
        self._taken: dict[int, int] = {}  # by rank: the number of its last training read here
        self._absent: set[int] = set()

    def connect(self) -> Any:
        """Return the store with a connection of its own, because a waiting call blocks others on the same one."""
        if not hasattr(self._shared, "clone"):  # torch before 2.8
            return self._shared
        store = self._shared.clone()
        store.set_timeout(ANSWER)
        return store

    def begin(self) -> None:
        """Begin a training. Earlier messages of others belong to trainings that this process did not take part in."""
        self._count += 1
        for rank in self.ranks[1:] if self.reports else ():
            mark = self.mark_of(rank)
            number = self._next(rank, mark)
            while mark is not None and number <= mark.begun and self.store.check([self._key(rank, number)]):
                self.store.delete_key(self._key(rank, number))
                self._taken[rank], number = number, number + 1
        self.store.set(f"{self._prefix}/begun/{self.own}", msgspec.msgpack.encode(RankMark.own(self._count)))

    def divide(self, *, divided: bool) -> None:
        """Publish, in the reporting process, whether it divides its training into rounds or trains for a federation."""
        if self.reports:
            self.store.set(f"{self._prefix}/divided", b"1" if divided else b"0")

    @property
    def is_divided(self) -> bool:
        """Return whether the reporting process divides its training into rounds; True unless it says otherwise."""
        key = f"{self._prefix}/divided"
        return self.reports or not self.store.check([key]) or bool(self.store.get(key) == b"1")

    def abandon(self) -> None:
        """End the training without a report."""
        if not self.reports:
            self._send(RankMessage(NO_STEPS, (), []))

    def gather(
        self, steps: int, before_exchange: Quartiles, rows: Sequence[Array], totals: Sequence[Array]
    ) -> Gathered:
        """Return the measurements of all processes in the reporting process; in the others, their own."""
        arrays = [*rows, *totals]
        if not self.reports:
            self._send(RankMessage(steps, before_exchange, [_encode(array) for array in arrays]))
            return Gathered([*rows], [*totals], self.sharded)
        gathered = Gathered([*rows], [*totals], self.sharded, {self.own: before_exchange})
        parts = [arrays]
        for rank in self.ranks[1:]:
            message = self._message_of(rank, steps, gathered)
            if message is None:
                continue
            part = _decoded(message)
            fits = [array.shape for array in part[: len(rows)]] == [array.shape for array in rows]
            if fits and len(part) == len(arrays):
                parts.append(part)
                gathered.before_exchange[rank] = message.before_exchange
            else:
                gathered.unwatched.append(rank)
        if self.sharded:  # copies are the same in all processes
            gathered.rows = [merge_sums(np.stack([part[i] for part in parts])) for i in range(len(rows))]
        for i, own in enumerate(totals):
            others = [part[len(rows) + i] for part in parts[1:]]
            gathered.totals[i] = own + sum((other for other in others if other.shape == own.shape), np.zeros(own.shape))
        return gathered

    def _send(self, message: RankMessage) -> None:
        self.store.set(self._key(self.own, self._count), msgspec.msgpack.encode(message))
        if self._count > UNREAD:
            self.store.delete_key(self._key(self.own, self._count - UNREAD))

    def _next(self, rank: int, mark: RankMark | None) -> int:
        """Return the number of the next message of a rank that can still be in the store."""
        return max(self._taken.get(rank, 0), 0 if mark is None else mark.begun - UNREAD) + 1

    def _message_of(self, rank: int, steps: int, gathered: Gathered) -> RankMessage | None:
        """Return what a rank's process sent about this training; None if nothing arrived in time."""
        mark = self.mark_of(rank)
        if mark is None or mark.begun <= self._taken.get(rank, 0):
            gathered.unwatched.append(rank)
            return None
        for number in range(self._next(rank, mark), mark.begun + 1):
            encoded = self._wait_for(self._key(rank, number), rank, mark)
            if encoded is None:
                gathered.lost[rank] = mark
                return None
            self._taken[rank] = number
            message = _decode(encoded, RankMessage)
            if message is None:
                break
            if message.steps == steps:
                return message
        gathered.unwatched.append(rank)
        return None

    def mark_of(self, rank: int, store: Any = None) -> RankMark | None:
        """Return the mark of a rank's process from its last begun training; None if there is none.

        `store`: a connection of the caller's own.
        """
        store, key = store or self.store, f"{self._prefix}/begun/{rank}"
        return _decode(store.get(key), RankMark) if store.check([key]) else None

    def _wait_for(self, key: str, rank: int, mark: RankMark) -> bytes | None:
        until = time.monotonic() + PATIENCE
        while not self.store.check([key]):
            if rank in self._absent or mark.is_gone or time.monotonic() > until:
                self._absent.add(rank)
                return None
            time.sleep(PAUSE)  # not `store.wait`, which prints to the user's screen on a timeout
        encoded: bytes = self.store.get(key)
        self.store.delete_key(key)
        return encoded

    def _key(self, rank: int, number: int) -> str:
        return f"{self._prefix}/{number}/{rank}"


_groups: dict[tuple[Any, ...], tuple[Any, RankGroup]] = {}  # per process: the others count its trainings, not runs


def group_of(model: nn.Module) -> RankGroup | None:
    """Return the processes that train this model together; None for a single process."""
    ranks = ranks_of(model)
    if not ranks or distributed.get_rank() not in ranks:
        return None
    store: Any = distributed.distributed_c10d._get_default_store()  # noqa: SLF001 - torch has no other way to it
    sharded = is_sharded([p for _, p in parameters_of(model)])
    known = _groups.get((ranks, sharded))
    if known is None or known[0] is not store:  # processes have joined anew
        known = _groups[ranks, sharded] = (store, RankGroup(ranks, store, sharded=sharded))
    return known[1]


def _numbering() -> str:
    """Return the name of the namespace of this process's number; a container has one of its own."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _encode(array: Array) -> tuple[tuple[int, ...], bytes]:
    own = np.ascontiguousarray(array, np.float64)
    return own.shape, own.tobytes()


def _decode(encoded: bytes, kind: type[Message]) -> Message | None:
    """Return a message; None for bytes that are none, as under a key that somebody else uses, too."""
    try:
        return msgspec.msgpack.decode(encoded, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _decoded(message: RankMessage) -> list[Array]:
    """Return a message's arrays; [] if one has not the size that it announces."""
    if len(message.before_exchange) not in (0, 3) or any(
        min(shape, default=0) < 0 or 8 * math.prod(shape) != len(values) for shape, values in message.arrays
    ):
        return []
    return [np.frombuffer(values, np.float64).reshape(shape) for shape, values in message.arrays]
