# SPDX-License-Identifier: Apache-2.0
"""Clients that train in other processes: the observer that goes there; `arrivals` takes in what it records.

    def task(worker, node, state):                       # in the child
        model = build(state)
        with worker.client(node, model):
            train(model)
        return difference(model, state), worker.payload()

    monitor.expect(node)                                 # in the parent, inside the round
    update, payload = pool.submit(task, monitor.for_worker(), node, state).result()
    monitor.absorb(payload)
    monitor.updates(round, {node: update})

A child never opens the store. It measures as the parent would, and hands over bytes.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fedvitals.monitor.chart import Chart
from fedvitals.monitor.clients import Clients
from fedvitals.probes.backends import WorkerInstruments
from fedvitals.probes.presets import Preset
from fedvitals.probes.results import Results
from fedvitals.protocols import Stack
from fedvitals.records import (
    AnyName,
    LayerTable,
    Run,
    as_round_index,
    node_name,
)
from fedvitals.resources.capture import Capture
from fedvitals.scope import Scope
from fedvitals.transport.payload_buffer import Parcel
from fedvitals.transport.privacy import Policy
from fedvitals.transport.traceparent import arrived

if TYPE_CHECKING:
    pass

INITIAL_BYTES = 2 << 20  # the run's first model goes along to workers up to this size


class _Desk:
    """What a worker process keeps of a run between clients, so that allowances last and layer tables go home once."""

    def __init__(self, worker: WorkerObserver) -> None:
        self.parcel = Parcel(worker.policy, worker.known)
        self.kit = WorkerInstruments(worker.preset)
        run = Run(worker.run, worker.name)
        self.chart = Chart(run, None, (), (), policy=worker.policy, strict=worker.strict, outlet=self.parcel)
        self.clients = Clients(self.chart, self.kit, lambda *_: None, lambda *_: None, **worker.profiling())


@functools.lru_cache(maxsize=1)
def _desks(_process: int) -> dict[tuple[str, Policy], _Desk]:
    """By run, and by what may leave: a message may be under a stricter rule than the one before.

    A forked child starts with none: what it inherited belongs to its parent.
    """
    return {}


@dataclass(frozen=True)
class WorkerObserver:
    """Watches clients in a child process, by fork or spawn; made by `Monitor.for_worker()`, and safe to pickle.

    Hand it over with each task, or once per process. `payload()` gives what was recorded since the last time.
    """

    run: str
    name: str
    preset: Preset | str  # a preset by its name is made where it is needed
    policy: Policy
    strict: bool
    round: int | None  # that was open when this was made
    trace: str
    span: str | None
    known: frozenset[str]  # layer tables that the parent has
    initial: bytes | None  # the run's first model, float32
    profile: bool = True  # whether to tell what a client's time went to
    capture: Capture | None = None
    trained: frozenset[str] = frozenset()  # names of the layers that train, as far as the parent knows

    def profiling(self) -> dict[str, Any]:
        return {"profile": self.profile, "capture": self.capture}

    @contextlib.contextmanager
    def client(
        self,
        name: AnyName,
        model: Any = None,
        optimizer: Any = None,  # noqa: ARG002 - found by its parameters
        *,
        data: Any = None,
        loss: Callable[..., Any] | None = None,
        group: AnyName | None = None,
        round_index: int | None = None,
    ) -> Iterator[WorkerObserver]:
        """One client's local training, as `Monitor.client`.

        `round` is needed where this observer was made in an earlier round; without any, `absorb` fills in its own.
        """
        desk = self._desk()
        with desk.clients.scope(self._begin(desk, name, model, data, group, loss, round_index)):
            yield self

    def client_begin(
        self,
        node: AnyName,
        model: Any = None,
        optimizer: Any = None,  # noqa: ARG002
        data: Any = None,
        group: AnyName | None = None,
        *,
        loss: Callable[..., Any] | None = None,
        round_index: int | None = None,
    ) -> None:
        self._begin(self._desk(), node, model, data, group, loss, round_index)

    def client_end(self, node: AnyName, outcome: BaseException | None = None) -> None:
        self._desk().clients.end_of(node, outcome)

    def stack_begin(self, stack: Stack, *, round_index: int | None = None) -> None:
        """Clients begin to train as one batch: records as of `client_begin`, for all of them at `stack_end`."""
        desk = self._desk()
        desk.chart.guard("watching clients", desk.kit.prepare)
        desk.clients.begin_stack(stack, inside=self._inside(desk, round_index))

    def stack_step(self, step: int, gradients: Any, losses: Any) -> None:  # noqa: ARG002 - of batches, not of clients
        """Before an optimiser step: the clients' gradients, [clients, weights], valid only now."""
        self._desk().clients.step_stack(step, gradients)

    def stack_end(self, failed: Mapping[Any, BaseException]) -> None:
        self._desk().clients.end_stack(failed)

    def log(self, values: Mapping[str, float] | None = None, /, *, node: AnyName | None = None, **more: float) -> None:
        """Metrics of your own, for the client that is open, or for a node that you name."""
        self._desk().clients.log({**(values or {}), **more}, node)

    def transfer(
        self,
        sender: AnyName,
        receiver: AnyName,
        bytes: int,  # noqa: A002
        raw_bytes: int | None = None,
        seconds: float | None = None,
        kind: str = "update",
    ) -> None:
        desk = self._desk()
        told = functools.partial(desk.clients.transfer, sender, receiver, bytes, raw_bytes, seconds, kind)
        desk.chart.guard("transfer()", told)

    def event(
        self, level: str, name: str, message: str, *, node: AnyName | None = None, data: Mapping[str, Any] | None = None
    ) -> None:
        """Something that happened, as `Monitor.event`."""
        desk = self._desk()
        desk.chart.guard("event()", lambda: desk.clients.event(level, name, message, node, data))

    def tell_layers(self, node: AnyName, family: str, matrix: Any, table: LayerTable) -> None:
        """Statistics that a host computed of a node's layers, [layers, columns]."""
        desk = self._desk()
        results = Results(matrices=[(family, np.asarray(matrix), None)], tables={table.rows: table.digest})

        def tell() -> None:
            desk.chart.know({table.rows: table})
            desk.chart.tell(replace(self._inside(desk, None), node=node_name(node)), results)

        desk.chart.guard("tell_layers()", tell)

    def payload(self, most: int | None = None) -> bytes:
        """What was recorded in this process since the last time, for `Monitor.absorb`.

        `most`: bytes that it may have. It is then whole in itself, with the layers' names: the last one may be lost.
        """
        desk = self._desk()
        if most is not None:
            desk.parcel.known.clear()
        return desk.chart.guard("payload()", functools.partial(desk.parcel.take, most)) or b""

    def inside(self, headers: Mapping[str, str]) -> WorkerObserver:
        """The same, for clients of the round in which `Monitor.headers` were made."""
        found = arrived(headers, lambda _: None, run=self.run)
        return replace(self, round=found.round, trace=found.trace, span=found.span)

    @contextlib.contextmanager
    def watching(self, node: AnyName, model: Any, *, data: Any = None, loss: Any = None) -> Iterator[WorkerObserver]:
        """Inside the scope of a client that was opened without its model: the stretch in which that trains."""
        desk = self._desk()
        desk.chart.guard("watching a client", desk.kit.prepare)
        with desk.clients.watching(node, model, data, loss):
            yield self

    def _begin(self, desk: _Desk, node: Any, model: Any, data: Any, group: Any, loss: Any, number: int | None) -> Any:
        if model is not None:
            desk.chart.guard("watching a client", desk.kit.prepare)
        inside = self._inside(desk, number)
        if model is None:
            inside = replace(inside, watch=functools.partial(self.watching, node))
        return desk.clients.begin(node, model, data, group, loss, inside=inside)

    def _inside(self, desk: _Desk, number: int | None) -> Scope:
        """The round's scope, as far as it is known here."""
        own = None if number is None else desk.chart.guard("opening a client", lambda: as_round_index(number))
        number = self.round if number is None else own
        span = self.span if number == self.round else None
        return Scope(self.run, desk.chart.emit, number, trace=self.trace, span=span)

    def _desk(self) -> _Desk:
        desks = _desks(os.getpid())
        desk = desks.get((self.run, self.policy))
        if desk is None:
            for other, old in [*desks.items()]:
                if other[0] != self.run and not old.clients:
                    desks.pop(other).chart.close()
            desk = desks[self.run, self.policy] = _Desk(self)
        desk.kit.know(self.initial, self.trained)
        desk.parcel.known.update(self.known)
        return desk
