# SPDX-License-Identifier: Apache-2.0
"""Clients that train in other processes: the observer that goes there; `arrivals` takes in what it records.

    def task(worker, node, state):                       # in the child
        model = build(state)
        with worker.client(node, model):
            train(model)
        return difference(model, state), worker.payload()

    monitor.host.expect(node)                                 # in the parent, inside the round
    update, payload = pool.submit(task, monitor.host.for_worker(), node, state).result()
    monitor.host.absorb(payload)
    monitor.updates(round, {node: update})

A child never opens the store. It measures as the parent would, and hands over bytes.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fedvitals.loop_tape import LoopTape
from fedvitals.monitor.clients import Clients
from fedvitals.monitor.lifecycle import Lifecycle
from fedvitals.monitor.losses import LostRecords
from fedvitals.monitor.spine import Spine
from fedvitals.probes.allowance import Turn
from fedvitals.probes.backends import WorkerInstruments
from fedvitals.probes.presets import Preset
from fedvitals.probes.results import Results
from fedvitals.records import (
    AnyName,
    LayerTable,
    Run,
    as_round_index,
    node_name,
)
from fedvitals.resources.capture import Capture
from fedvitals.resources.stack_requests import StackAnswers
from fedvitals.scope import Scope
from fedvitals.stack import Stack
from fedvitals.transport.payload_buffer import PayloadBuffer
from fedvitals.transport.privacy import WORDS, PrivacyPolicy
from fedvitals.transport.traceparent import arrived

INITIAL_BYTES = 2 << 20  # the run's first model goes along to workers up to this size


class _WorkerRun:
    """What a worker process keeps of a run between clients, so that tables are only sent once."""

    def __init__(self, worker: WorkerObserver) -> None:
        self.buffer = PayloadBuffer(worker.policy, worker.known)
        self.kit = WorkerInstruments(worker.preset)
        self.spine = Spine.of(
            Run(worker.run, worker.name),
            worker.policy,
            strict=worker.strict,
            lifecycle=lambda: self.lifecycle,
        )
        self.guard = self.spine.guard
        self.lifecycle = Lifecycle(self.spine, LostRecords(self.spine), lambda: self.buffer)
        nothing: list[Callable[..., None]] = [lambda *_: None] * 3  # the parent process takes updates and results
        self.clients = Clients(self.spine, LoopTape(), self.kit, *nothing, **worker.profiling())
        # The process of the monitor reports its own stack traces.
        allowed = worker.policy.level >= WORDS and worker.policy.tracebacks and worker.monitor_process != os.getpid()
        self.stacks = (
            StackAnswers(worker.trace, self._open_clients, self.spine.scopes.client_threads) if allowed else None
        )

    def _open_clients(self) -> Mapping[str, float]:
        awaited = self.clients.awaited()
        return {} if awaited is None else awaited.since


@functools.lru_cache(maxsize=1)
def _runs(_process: int) -> dict[tuple[str, PrivacyPolicy], _WorkerRun]:
    """Return the runs of this process by run and privacy policy, since a message may be under a stricter policy.

    A forked child starts with none: what it inherited belongs to its parent.
    """
    return {}


@dataclass(frozen=True)
class WorkerObserver:
    """Watches clients in a child process, by fork or spawn; created by `monitor.host.for_worker()`, and safe to pickle.

    Pass it along with each task, or once per process. `payload()` returns what was recorded since the last call.
    """

    run: str
    name: str
    preset: Preset | str  # a preset given by name is built where it is needed
    policy: PrivacyPolicy
    strict: bool
    round: int | None  # the round that was open when this was created
    trace: str
    span: str | None
    known: frozenset[str]  # layer tables that the parent already has
    initial: bytes | None  # the run's first model, float32
    profile: bool = True  # whether to record what a client's time went to
    capture: Capture | None = None
    trained: frozenset[str] = frozenset()  # names of the layers that train, as far as the parent knows
    turn: Turn = field(default_factory=Turn)  # decides which clients are measured in this round
    monitor_process: int | None = None  # the process id of the monitor that created it for others

    def profiling(self) -> dict[str, Any]:
        """Return the run's settings for profiling, which the clients of this process need, by name."""
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
        """Watch one client's local training, like `Monitor.client`.

        Args:
            name: The client's name, as text.
            model: The module that trains; None if only time and failures are to be measured.
            optimizer: The optimiser; by default the one that steps the model's parameters is detected.
            data: The client's own samples, to measure how well the model suits them, as in `Monitor.client`.
            loss: The loss function, for the same purpose.
            group: The edge, cluster or ring that the client belongs to.
            round_index: The round, if this observer was created in another one. By default that in which it was
                created or, outside of any, that in which the parent calls `monitor.host.absorb`.

        Returns:
            A context manager that gives this observer.
        """
        worker_run = self._worker_run()
        with worker_run.clients.scope(self._begin(worker_run, name, model, data, group, loss, round_index)):
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
        """Open a client, like `client`, for hosts that cannot use `with`.

        Args:
            node: The client's name, as text.
            model: The module that trains, if there is one to measure.
            optimizer: The optimiser; by default the one that steps the model's parameters is detected.
            data: The client's own samples, as in `client`.
            group: The edge, cluster or ring that the client belongs to.
            loss: The loss function, as in `client`.
            round_index: The round, as in `client`.
        """
        self._begin(self._worker_run(), node, model, data, group, loss, round_index)

    def client_end(self, node: AnyName, outcome: BaseException | None = None) -> None:
        """Close a client that has trained.

        Args:
            node: The client.
            outcome: The exception that its training raised; None: it has finished.
        """
        self._worker_run().clients.end_of(node, outcome)

    def stack_begin(self, stack: Stack, *, round_index: int | None = None) -> None:
        """Open clients that train as one batch; their records are those of `client_begin`, made at `stack_end`.

        Args:
            stack: The clients, and how to reach their states and samples.
            round_index: The round, as in `client`.
        """
        worker_run = self._worker_run()
        worker_run.guard("watching clients", worker_run.kit.prepare)
        worker_run.clients.begin_stack(stack, inside=self._inside(worker_run, round_index))
        if worker_run.stacks is not None:
            worker_run.guard("looking for requests", worker_run.stacks.watch)

    def stack_step(self, step: int, gradients: Any, losses: Any) -> None:  # noqa: ARG002 - of batches, not of clients
        """Measure the gradients of clients that train as one batch, before an optimiser step.

        Args:
            step: The step, counted from 0.
            gradients: The gradients, [clients, weights], which are valid only during the call.
            losses: The loss of each client's batch.
        """
        self._worker_run().clients.step_stack(step, gradients)

    def stack_end(self, failed: Mapping[Any, BaseException]) -> None:
        """Close the batch of clients.

        Args:
            failed: The clients that failed, each with the exception.
        """
        self._worker_run().clients.end_stack(failed)

    def log(self, values: Mapping[str, float] | None = None, /, *, node: AnyName | None = None, **more: float) -> None:
        """Record metrics of your own, for the open client or for a node that you name.

        Args:
            values: Numbers by name, for names that are no Python identifiers.
            node: The node that they belong to; by default the open client.
            more: Numbers by name: `worker.log(accuracy=0.9)`.
        """
        self._worker_run().clients.log({**(values or {}), **more}, node)

    def transfer(
        self,
        sender: AnyName,
        receiver: AnyName,
        bytes: int,  # noqa: A002
        raw_bytes: int | None = None,
        seconds: float | None = None,
        kind: str = "update",
    ) -> None:
        """Record a message between two nodes.

        Args:
            sender: Who sent it.
            receiver: Who received it.
            bytes: Its size as sent.
            raw_bytes: Its size before compression.
            seconds: How long it took.
            kind: «update», «model», or a word of yours.
        """
        worker_run = self._worker_run()
        transfer = functools.partial(worker_run.clients.transfer, (sender, receiver, bytes, raw_bytes, seconds, kind))
        worker_run.guard("transfer()", transfer)

    def event(
        self, level: str, name: str, message: str, *, node: AnyName | None = None, data: Mapping[str, Any] | None = None
    ) -> None:
        """Record an event.

        Args:
            level: «debug», «info», «warning», «error» or «critical».
            name: What kind of event it is, such as «client.failed».
            message: One sentence for people.
            node: The node that it is about; by default the open client.
            data: More about it, as plain JSON values.
        """
        worker_run = self._worker_run()
        worker_run.guard("event()", lambda: worker_run.clients.event(level, name, message, node, data))

    def tell_layers(self, node: AnyName, family: str, matrix: Any, table: LayerTable) -> None:
        """Record statistics that a host computed of a node's layers.

        Args:
            node: The node.
            family: The family of the statistics, such as «update» (docs/metrics.md).
            matrix: The numbers, [layers, columns].
            table: The names and shapes of the layers.
        """
        worker_run = self._worker_run()
        results = Results(matrices=[(family, np.asarray(matrix), None)], tables={table.rows: table.digest})

        def tell() -> None:
            worker_run.spine.emission.layer_tables({table.rows: table})
            worker_run.spine.emission.results(replace(self._inside(worker_run, None), node=node_name(node)), results)

        worker_run.guard("tell_layers()", tell)

    def payload(self, most: int | None = None) -> bytes:
        """Return what was recorded in this process since the last call, for `monitor.host.absorb` in the parent.

        Args:
            most: The largest size in bytes; None: no limit. With a limit, each payload is complete in itself, including
                the names of layers, because an earlier one may have been lost.

        Returns:
            The records, encoded as bytes.
        """
        worker_run = self._worker_run()
        if most is not None:
            worker_run.buffer.known.clear()
        return worker_run.guard("payload()", functools.partial(worker_run.buffer.take, most)) or b""

    def restrict(self, level: int) -> None:
        """Apply at most this privacy level to everything recorded until the next `payload`.

        Args:
            level: The privacy level, from 0 to 4.
        """
        self._worker_run().buffer.restrict(level)

    def inside(self, headers: Mapping[str, str]) -> WorkerObserver:
        """Return an observer for clients of another round: that in which the server created these headers.

        Args:
            headers: What `monitor.host.headers(node)` returned.

        Returns:
            An observer like this one, of that round.
        """
        scope = arrived(headers, lambda _: None, run=self.run)
        return replace(self, round=scope.round, trace=scope.trace, span=scope.span)

    @contextlib.contextmanager
    def watching(self, node: AnyName, model: Any, *, data: Any = None, loss: Any = None) -> Iterator[WorkerObserver]:
        """Watch the model of a client that was opened without it.

        Args:
            node: The client, which is open.
            model: The module that trains.
            data: The client's own samples, as in `client`.
            loss: The loss function, as in `client`.

        Returns:
            A context manager around the training, which gives this observer.
        """
        worker_run = self._worker_run()
        worker_run.guard("watching a client", worker_run.kit.prepare)
        with worker_run.clients.watching(node, model, data, loss):
            yield self

    def _begin(
        self, worker_run: _WorkerRun, node: Any, model: Any, data: Any, group: Any, loss: Any, number: int | None
    ) -> Any:
        if model is not None:
            worker_run.guard("watching a client", worker_run.kit.prepare)
        inside, watch = self._inside(worker_run, number), functools.partial(self.watching, node)
        opened = worker_run.clients.begin(node, model, data, group, loss, inside=inside, watch=watch)
        if worker_run.stacks is not None:
            worker_run.guard("looking for requests", worker_run.stacks.watch)
        return opened

    def _inside(self, worker_run: _WorkerRun, number: int | None) -> Scope:
        """Return the round's scope, as far as it is known here."""
        own = None if number is None else worker_run.guard("opening a client", lambda: as_round_index(number))
        number = self.round if number is None else own
        span = self.span if number == self.round else None
        return Scope(self.run, worker_run.spine.emission.emit, number, trace=self.trace, span=span)

    def _worker_run(self) -> _WorkerRun:
        runs = _runs(os.getpid())
        worker_run = runs.get((self.run, self.policy))
        if worker_run is None:
            for other, old in [*runs.items()]:
                if other[0] != self.run and not old.clients:
                    runs.pop(other).lifecycle.close()
            worker_run = runs[self.run, self.policy] = _WorkerRun(self)
        worker_run.kit.know(self.initial, self.trained, self.turn)
        worker_run.buffer.known.update(self.known)
        return worker_run
