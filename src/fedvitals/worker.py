# SPDX-License-Identifier: Apache-2.0
"""Clients that train in other processes: the observer that goes there, and the records that come home.

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
import pickle  # only to ask whether a user's probe can go along; nothing is ever loaded from it
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fedvitals.chart import Chart
from fedvitals.clients import Clients
from fedvitals.errors import ConfigError, RecordError
from fedvitals.parts import CLIENT, edge_span, of_the_whole
from fedvitals.probes.cohort import Cohort
from fedvitals.probes.presets import Planned, Preset
from fedvitals.probes.results import Results
from fedvitals.probes.session import Instruments
from fedvitals.profiling.capture import Capture
from fedvitals.profiling.ledger import Ledger
from fedvitals.protocols import Node, Stack
from fedvitals.records import (
    AnyName,
    Event,
    LayerStats,
    LayerTable,
    Metric,
    Record,
    Run,
    Span,
    Transfer,
    node_name,
    round_index,
    run_of,
)
from fedvitals.scope import Scope
from fedvitals.stats import FAMILIES
from fedvitals.store.delivered import Intervals, fresh
from fedvitals.telemetry.outlet import SOURCE
from fedvitals.telemetry.parcel import LOST, Parcel
from fedvitals.telemetry.privacy import Policy
from fedvitals.telemetry.sender import Sender, as_seen
from fedvitals.telemetry.traceparent import arrived
from fedvitals.telemetry.wire import decode

__all__ = ["Arrivals", "Sender", "WorkerObserver"]

INITIAL_BYTES = 2 << 20  # the run's first model goes along to workers up to this size
SOURCES = 10_000  # processes whose deliveries are remembered
TABLES = 1_000  # kinds of models in one run: each is written again whenever something about the run changes


# -- in the child -----------------------------------------------------------------------------------------------------


class _Desk:
    """What a worker process keeps of a run between clients, so that allowances last and layer tables go home once."""

    def __init__(self, worker: WorkerObserver) -> None:
        self.parcel = Parcel(worker.policy, worker.known)
        self.kit = Instruments(worker.preset, update_memory=0)
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
    preset: Preset
    policy: Policy
    strict: bool
    round: int | None  # that was open when this was made
    trace: str
    span: str | None
    known: frozenset[str]  # layer tables that the parent has
    initial: bytes | None  # the run's first model, float32
    profile: bool = True  # whether to tell what a client's time went to
    capture: Capture | None = None

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
        round: int | None = None,  # noqa: A002 - the domain's word
    ) -> Iterator[WorkerObserver]:
        """One client's local training, as `Monitor.client`.

        `round` is needed where this observer was made in an earlier round; without any, `absorb` fills in its own.
        """
        desk = self._desk()
        with desk.clients.scope(self._begin(desk, name, model, data, group, loss, round)):
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
        round: int | None = None,  # noqa: A002
    ) -> None:
        self._begin(self._desk(), node, model, data, group, loss, round)

    def client_end(self, node: AnyName, outcome: BaseException | None = None) -> None:
        self._desk().clients.end_of(node, outcome)

    def stack_begin(self, stack: Stack, *, round: int | None = None) -> None:  # noqa: A002
        """Clients begin to train as one batch: records as of `client_begin`, for all of them at `stack_end`."""
        desk = self._desk()
        desk.kit.norms.clear()
        desk.clients.begin_stack(stack, inside=self._inside(desk, round))

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
        with self._desk().clients.watching(node, model, data, loss):
            yield self

    def _begin(self, desk: _Desk, node: Any, model: Any, data: Any, group: Any, loss: Any, number: int | None) -> Any:
        desk.kit.norms.clear()  # the last round of this client may have been in another process: the parent compares
        inside = self._inside(desk, number)
        if model is None:
            inside = replace(inside, watch=functools.partial(self.watching, node))
        return desk.clients.begin(node, model, data, group, loss, inside=inside)

    def _inside(self, desk: _Desk, number: int | None) -> Scope:
        """The round's scope, as far as it is known here."""
        own = None if number is None else desk.chart.guard("opening a client", lambda: round_index(number))
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
        if desk.kit.initial is None and self.initial is not None:
            desk.kit.initial = torch.frombuffer(bytearray(self.initial), dtype=torch.float32)
        desk.parcel.known.update(self.known)
        return desk


# -- in the parent ----------------------------------------------------------------------------------------------------


class Arrivals:
    """Takes payloads home: each record once, and each client into its round. Tells of those that never came."""

    def __init__(
        self, chart: Chart, kit: Instruments, policy: Policy, ledger: Ledger | None, capture: Capture | None = None
    ) -> None:
        self._chart, self._kit, self.policy, self._ledger = chart, kit, policy, ledger
        self._lock = threading.Lock()
        self._capture = capture
        self._delivered: dict[tuple[str, str], Intervals] = {}
        self._expected: dict[Node, None] = {}
        self._labels: dict[Node, Any] = {}  # each client's label histogram, as last told

    def observer(self) -> WorkerObserver:
        """For a child process; it knows what is known now."""
        chart, kit = self._chart, self._kit
        here, initial = chart.round, kit.initial
        if initial is not None:
            small = initial.numel() * 4 <= INITIAL_BYTES and initial.dtype == torch.float32
            initial = initial.cpu() if small else None
        return WorkerObserver(
            run=chart.run.id,
            name=chart.run.name,
            preset=self._sendable(kit.preset),
            policy=self.policy,
            strict=chart.strict,
            round=None if here is None else here.round,
            trace=chart.trace,
            span=None if here is None else here.span,
            known=frozenset(chart.tables),
            initial=None if initial is None else initial.numpy().tobytes(),
            profile=self._ledger is not None,
            capture=self._capture,
        )

    def expect(self, nodes: Iterable[AnyName]) -> None:
        self._expected.update(dict.fromkeys(map(node_name, nodes)))

    def take(self, payload: bytes, cohort: Cohort | None, sender: Sender | None = None) -> None:
        """Into the queues with their own identity; clients that finished into the cohort of the open round."""
        if payload == b"":
            return
        with self._lock:  # a pool's callbacks come on a thread of their own
            try:
                records = decode(payload)
                if sender is not None:
                    records = [sender.own(record, self._chart.run.id) for record in records]
                self._check(records)
            except RecordError:
                self._chart.missed += 1
                raise
            for record in records:
                if isinstance(record, Run):
                    self._chart.know({table.digest: table for table in record.tables})
            new = [self._placed(r) for r in fresh(records, self._delivered) if not isinstance(r, Run)]
            new = self._without_known_labels(new)
            if sender is not None and self._ledger is not None:
                new = [as_seen(record, self._ledger.seen(sender.node)) for record in new]
            while len(self._delivered) > SOURCES:
                self._delivered.pop(next(iter(self._delivered)))
            self._chart.admit(new)
            self._join(new, cohort)
            self._tell_size(new, len(payload))

    def _tell_size(self, records: Sequence[Record], size: int) -> None:
        """What watching itself has added to the way of each client's message."""
        spans = [r for r in records if isinstance(r, Span) and r.name == CLIENT and r.where.node is not None]
        for span in spans if self._ledger is not None else ():
            share, node = size // len(spans), span.where.node or ""
            at = span.at + span.seconds
            self._chart.emit(Transfer(span.where, at, node, "server", share, share, None, "telemetry"))

    def forget(self) -> None:
        """Nobody is expected any more."""
        self._expected = {}

    def close_round(self, scope: Scope, cohort: Cohort) -> None:
        """Clients that were handed out and did not come home, each with a word of it."""
        missing, self._expected = [*self._expected], {}
        for node in missing:
            self._chart.missed += 1
            text = f"The worker of client '{node}' did not bring its records home."
            self._chart.record.event(replace(scope, node=node), "warning", LOST, text)
            if node not in cohort:
                cohort.add(node, None, Results(), failed=True)

    def _check(self, records: Sequence[Record]) -> None:
        """Well-formed is not enough: they must be of this run, of a worker, and about layers that are known."""
        run = self._chart.run.id
        tables = dict(self._chart.tables)
        for record in records:
            if run_of(record) != run:
                raise RecordError(f"A payload of run '{run_of(record)[:80]}' was given to run '{run}'.")
            if record.source == "" or record.source.startswith(SOURCE):
                raise RecordError(f"A payload has records of source '{record.source}', which is no worker's.")
            if isinstance(record, Span | Metric) and of_the_whole(record):
                told = f"{type(record).__name__} '{record.name[:80]}'"
                raise RecordError(f"A payload has the {told} of the whole round, which is not a worker's to tell.")
            if isinstance(record, Run):
                tables |= {table.digest: table for table in record.tables}
                if len(tables) > TABLES:
                    raise RecordError(f"A payload brings layer tables beyond the {TABLES} that a run may have.")
            elif isinstance(record, LayerStats):
                table = tables.get(record.table)
                if table is None or len(table.layers) != len(record.matrix):
                    rows = f"{len(record.matrix)} layers of table '{record.table[:80]}'"
                    raise RecordError(f"A payload has statistics of {rows}, which no run record tells of.")

    def _placed(self, record: Record) -> Record:
        """In the round that is open, where the worker did not know it."""
        here = self._chart.round
        if self._ledger is not None:
            record = _by_our_clock(record, self._ledger)
        if isinstance(record, Run) or here is None or record.where.round is not None:
            return record
        if isinstance(record, Span) and record.parent is None:
            group = record.where.group
            record = replace(record, parent=here.span if group is None else edge_span(here.span, group))
        return replace(record, where=replace(record.where, round=here.round))

    def _without_known_labels(self, records: list[Record]) -> list[Record]:
        """A process that meets a client for the first time tells its labels; told once by another, that is enough."""
        known: set[Node | None] = set()
        for record in records:
            if isinstance(record, Event) and record.name == "labels" and record.where.node is not None:
                histogram = record.data.get("histogram")
                if self._labels.get(record.where.node) == histogram:
                    known.add(record.where.node)
                self._labels[record.where.node] = histogram
        return [r for r in records if not known or not _about_labels(r, known)]

    def _join(self, records: Sequence[Record], cohort: Cohort | None) -> None:
        finished: dict[Node, tuple[Span, Results]] = {}
        for record in records:
            if isinstance(record, Span) and record.name == "client" and record.where.node is not None:
                finished[record.where.node] = (record, Results(tables={}))
        for record in records:
            if isinstance(record, Event) and record.name == LOST:
                lost = record.data.get("records")
                self._chart.missed += lost if isinstance(lost, int) and 0 < lost < 1 << 40 else 1
            elif isinstance(record, Transfer) and cohort is not None:
                cohort.count_traffic(record.sender, record.receiver, record.bytes)
            elif isinstance(record, Metric | LayerStats) and record.where.node in finished:
                _gather(finished[record.where.node][1], record)
        for node, (span, results) in finished.items():
            self._expected.pop(node, None)
            self._compare(span, results)
            if self._ledger is not None:
                self._ledger.trained(span)
            if cohort is not None:
                cohort.add(node, span.where.group, results, failed=bool(span.attributes.get("failed")))
                cohort.cost += sum(value for name, value, _ in results.metrics if name == "monitor.cost")

    def _compare(self, span: Span, results: Results) -> None:
        """`gradient.change_round`, which a worker cannot know: the client's last round may have been elsewhere."""
        node = span.where.node or ""
        norm = next((value for name, value, _ in results.metrics if name == "gradient.norm"), None)
        if norm is None:
            return
        before, self._kit.norms[node] = self._kit.norms.get(node), norm
        if before:
            change = abs(norm - before) / before
            self._chart.emit(Metric(span.where, span.at + span.seconds, "gradient.change_round", change))

    def _sendable(self, preset: Preset) -> Preset:
        """Without the user's own probes that cannot be sent to another process."""
        going = functools.partial(self._chart.guard, "for_worker()")
        probes = tuple(planned for planned in preset.probes if going(functools.partial(_goes, planned)))
        return preset if len(probes) == len(preset.probes) else replace(preset, probes=probes)


def _by_our_clock(record: Record, ledger: Ledger) -> Record:
    """With the times of the server's clock, and inside of the client's journey, where the host told of one."""
    if isinstance(record, Run):
        return record
    node = record.where.node
    if isinstance(record, Span) and record.name == CLIENT and node is not None:
        record = replace(record, parent=ledger.journey(node) or record.parent)
    ahead = ledger.ahead(node)
    return replace(record, at=record.at - ahead) if ahead else record


def _goes(planned: Planned) -> bool:
    try:
        pickle.dumps(planned)
    except Exception as error:
        name = getattr(planned.probe, "__name__", str(planned.probe))
        raise ConfigError(
            f"The probe '{name}' or its schedule cannot go to a worker process ({error}). "
            "Make it a function of a module; workers measure without it until then."
        ) from error
    return True


def _about_labels(record: Record, nodes: Container[Node | None]) -> bool:
    if not isinstance(record, Event | Metric) or record.where.node not in nodes:
        return False
    return record.name in ("labels", "label.entropy")


def _gather(results: Results, record: Metric | LayerStats) -> None:
    if isinstance(record, Metric):
        results.metrics.append((record.name, record.value, record.where.step))
    else:
        results.matrices.append((record.family, record.matrix, record.where.step))
        results.tables = {**results.tables, FAMILIES[record.family].rows: record.table}
