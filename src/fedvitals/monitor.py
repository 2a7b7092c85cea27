# SPDX-License-Identifier: Apache-2.0
"""The spine: scopes of run, round, edge and client. Probes become records here, and leave for the sinks.

    monitor = Monitor("runs.db", run="digits")
    with monitor.round(0, global_model):
        with monitor.client("c7", local_model):
            train(local_model)

The context managers are a thin skin over the `Observer` methods, which a host may call itself. Nothing in here may
stop, slow or change the training: what fails is reported once per cause, counted, and (only with `strict`) raised.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import Token
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch

from fedvitals.catalog import public_name
from fedvitals.chart import Chart, close_at_exit
from fedvitals.diagnosis.live import Findings
from fedvitals.errors import ConfigError
from fedvitals.kernels import sums
from fedvitals.probes.cohort import Cohort
from fedvitals.probes.presets import resolve
from fedvitals.probes.results import Results
from fedvitals.probes.session import ClientSession, Instruments, tables_of
from fedvitals.probes.view import View, flatten
from fedvitals.probes.weights import check_initialisation
from fedvitals.profiling.memory import peak_bytes, resident_bytes
from fedvitals.protocols import Detector, Node, Sink
from fedvitals.records import Action, Run, Transfer
from fedvitals.scope import Scope
from fedvitals.telemetry.recorder import where


@dataclass(slots=True)
class _Open:
    """An open scope: how to close it again, and what it has gathered."""

    scope: Scope
    token: Token[Scope | None]
    began: float = field(default_factory=time.perf_counter)
    cohort: Cohort = field(default_factory=Cohort)  # of a round
    session: ClientSession | None = None  # of a client with a model
    tables: Mapping[str, str] = field(default_factory=dict)
    logged: set[str] = field(default_factory=set)


class Monitor:
    """Watches one run. Opens nothing until its first event; `close()`, or leaving a `with`, ends the run.

    `store`: a file or `postgresql://...`; None leaves records to `sinks` alone. `run`: a name for people, which several
    runs may share. `probes`: «light», «standard», «deep», or a list with probes of your own. `privacy`: from 0 (timings
    only) to 4, see docs/metrics.md. `update_memory`: bytes that may be held for exact cosines between updates.
    `strict` raises what is otherwise counted: for tests.
    """

    def __init__(
        self,
        store: str | os.PathLike[str] | None = "runs.db",
        run: str = "run",
        *,
        probes: Any = "standard",
        detectors: Sequence[Detector] = (),
        sinks: Sequence[Sink] = (),
        privacy: int = 3,
        config: Mapping[str, Any] | None = None,
        seed: int | None = None,
        topology: str | None = None,
        host: str = "torch",
        update_memory: int = 512 << 20,
        strict: bool = False,
    ) -> None:
        if privacy not in range(5):
            raise ConfigError(f"privacy= is a level from 0 to 4, got {privacy!r}. See docs/metrics.md, «Privacy».")
        self._kit = Instruments(resolve(probes), update_memory)
        self._detectors, self._privacy = tuple(detectors), privacy
        described = Run(
            id=f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(3).hex()}",
            name=run,
            host=host,
            topology=topology,
            config={**(config or {}), "fedvitals": {"probes": self._kit.preset.name, "privacy": privacy}},
            seed=seed,
        )
        self._chart = Chart(described, store, tuple(sinks), self._detectors, privacy=privacy, strict=strict)
        self._record, self._guard = self._chart.record, self._chart.guard
        self._lock = threading.Lock()
        self._closed = False
        self._round: _Open | None = None
        self._clients: dict[Node, _Open] = {}
        self._chart.owner = self
        close_at_exit(self)

    # -- what people write --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def round(self, number: int, global_model: Any = None) -> Iterator[Monitor]:
        """One round of the federation; what is logged or raised inside belongs to it."""
        self.round_begin(number, global_model)
        try:
            yield self
        except BaseException as error:
            self._chart.exception(self._chart.here(), "round.failed", error)
            raise
        finally:
            self.round_end(number, global_model)

    @contextlib.contextmanager
    def client(
        self,
        name: Node,
        model: Any = None,
        optimizer: Any = None,  # noqa: ARG002 - found by its parameters
        *,
        data: Any = None,
        loss: Callable[..., Any] | None = None,
        group: str | None = None,
    ) -> Iterator[Monitor]:
        """One client's local training: hooks on, and off again at the end.

        Only name and model are needed. `data` (a DataLoader, a Dataset, a pair of tensors or a list of batches) and
        `loss` add how well the model suits the client's own samples. The optimiser is found by its parameters.
        """
        opened: _Open | None = self._begin_client(name, model, data, group, loss)
        outcome: BaseException | None = None
        try:
            yield self
        except BaseException as error:
            outcome = error
            raise
        finally:
            self._end_client(opened, outcome)

    @contextlib.contextmanager
    def edge(self, name: Node, model: Any = None) -> Iterator[Monitor]:
        """An edge node, cluster or ring: the clients inside belong to it (it is their `group`)."""
        opened: _Open | None = self._guard("opening an edge", lambda: _Open(*self._chart.enter(name, group=name)))
        before = None if model is None else self._guard("reading a model", lambda: flatten([*model.parameters()]))
        try:
            yield self
        except BaseException as error:
            self._chart.exception(self._chart.here(), "edge.failed", error)
            raise
        finally:
            if opened is not None:
                self._guard("closing an edge", lambda: self._leave_edge(opened, model, before))

    def log(self, values: Mapping[str, float] | None = None, /, **more: float) -> None:
        """Metrics of your own, for the client or the round that is open (or was open last)."""

        def emit() -> None:
            scope = self._chart.here()
            client = self._clients.get(scope.node or "")
            for name, value in {**(values or {}), **more}.items():
                self._record.metric(scope, public_name(name), float(value))
                if client is not None:
                    client.logged.add(name)

        self._guard("log()", emit)

    def findings(self) -> Findings:
        """What the detectors have found so far, worst first. Waits until they have seen everything."""
        self.flush()
        return Findings(self._chart.found, installed=len(self._detectors))

    def flush(self, timeout: float = 30.0) -> bool:
        """Wait until everything so far is written. False: not in time, or something was lost."""
        return self._chart.flush(timeout)

    def discard(self) -> None:
        """Close the open round and its clients without a word: nothing happened in them."""
        for opened in [*self._clients.values(), *([self._round] if self._round else [])]:
            if opened.session is not None:
                opened.session.abandon()
            self._chart.leave(opened.token)
        self._clients.clear()
        self._round = self._chart.round = None

    def close(self) -> None:
        """End the run: scopes closed, records written, hooks and threads gone. A second call does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for node in list(self._clients):
            self.client_end(node)
        if self._round is not None:
            self.round_end(self._round.scope.round or 0)
        self._chart.close()

    @property
    def run(self) -> Run:
        """What is known of the run itself: id, name, configuration, versions."""
        return self._chart.run

    @property
    def lost(self) -> int:
        """Records lost so far."""
        return self._chart.lost

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the Observer protocol ----------------------------------------------------------------------------------------

    def round_begin(self, round: int, global_state: Any = None) -> None:  # noqa: A002 - the domain's word
        def begin() -> None:
            if self._round is not None:
                unclosed = self._round.scope.round
                self._record.event(self._chart.here(), "warning", "round.unclosed", f"Round {unclosed} was still open.")
                self.round_end(unclosed or 0)
            self._round = _Open(*self._chart.enter_round(round))
            self._round.cohort = Cohort(approximate_before=self._kit.updates.approximate)
            if self._kit.initial is None and hasattr(global_state, "named_parameters"):
                self._first_model(global_state)

        self._guard("opening a round", begin)

    def client_begin(
        self,
        node: Node,
        model: Any = None,
        optimizer: Any = None,  # noqa: ARG002 - found by its parameters; part of the protocol
        data: Any = None,
        group: str | None = None,
        *,
        loss: Callable[..., Any] | None = None,
    ) -> None:
        self._begin_client(node, model, data, group, loss)

    def stats(self, node: Node | Sequence[Node], family: str, array: Any) -> None:
        """Statistics that the host computed itself: [layers, columns], or [clients, layers, columns] for many nodes."""

        def emit(node: Node, matrix: Any) -> None:
            results = Results(matrices=[(family, matrix, None)])
            self._chart.tell(replace(self._chart.here(), node=node), results)
            if self._round is not None:
                self._round.cohort.add(node, None, results, failed=False)

        def emit_all() -> None:
            matrices = np.asarray(torch.as_tensor(array).cpu(), dtype=np.float64)
            nodes, matrices = ([node], matrices[None]) if isinstance(node, str) else (node, matrices)
            for name, matrix in zip(nodes, matrices, strict=True):
                emit(name, matrix)

        self._guard("stats()", emit_all)

    def client_end(self, node: Node, outcome: BaseException | None = None) -> None:
        self._end_client(self._clients.get(node), outcome)

    def updates(self, round: int, updates: Mapping[Node, Any]) -> Sequence[Action]:  # noqa: A002, ARG002
        """What each client sends, where the host holds it: a sequence of tensors. No guard answers yet."""

        def take(node: Node, tensors: Sequence[torch.Tensor]) -> None:
            rows = np.asarray(torch.as_tensor(sums(tensors)).cpu())
            self._kit.updates.add(node, flatten(tensors), rows)
            if self._round is not None and node in self._round.cohort:
                return  # it trained in a scope of its own, which tells the rest
            results = Results(matrices=[("update", rows, None)])
            self._chart.tell(replace(self._chart.here(), node=node), results)
            if self._round is not None:
                self._round.cohort.add(node, None, results, failed=False)

        for node, tensors in updates.items():
            self._guard("updates()", functools.partial(take, node, tensors))
        return ()

    def transfer(
        self,
        sender: Node,
        receiver: Node,
        bytes: int,  # noqa: A002 - the unit is the name
        raw_bytes: int | None = None,
        seconds: float | None = None,
        kind: str = "update",
    ) -> None:
        def emit() -> None:
            scope = replace(self._chart.here(), node=receiver if sender == "server" else sender)
            raw = bytes if raw_bytes is None else raw_bytes
            self._chart.emit(Transfer(where(scope), time.time(), sender, receiver, int(bytes), int(raw), seconds, kind))
            if self._round is not None:
                self._round.cohort.count_traffic(sender, receiver, int(bytes))

        self._guard("transfer()", emit)

    def round_end(
        self,
        round: int,  # noqa: A002
        global_state: Any = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        def end() -> None:
            opened, self._round, self._chart.round = self._round, None, None
            if opened is None:
                return
            try:
                for name, value in (metrics or {}).items():
                    self._record.metric(opened.scope, public_name(name), float(value))
                self._finish_round(opened, global_state if hasattr(global_state, "named_parameters") else None)
            finally:
                self._chart.leave(opened.token)

        self._guard(f"closing round {round}", end)

    # -- scopes -------------------------------------------------------------------------------------------------------

    def _begin_client(
        self, node: Node, model: Any, data: Any, group: str | None, loss: Callable[..., Any] | None
    ) -> _Open | None:
        """What was opened, to be closed by whoever opened it; None if that name is open already."""

        def watch(opened: _Open) -> None:
            view = View(model, round=opened.scope.round, node=node, data=data, loss=loss)
            if not self._kit.preset.brief:
                tables = tables_of(self._kit, view)
                self._chart.know(tables)
                opened.tables = {rows: table.digest for rows, table in tables.items()}
            opened.session = ClientSession(self._kit, view, self._chart.report)

        def begin() -> _Open:
            if node in self._clients:
                raise ConfigError(f"Client '{node}' is already open. Give each client of a round a name of its own.")
            opened = self._clients[node] = _Open(*self._chart.enter(node, group=group))
            if model is not None:
                self._guard("watching a client", lambda: watch(opened))
            return opened

        opened: _Open | None = self._guard("opening a client", begin)
        return opened

    def _end_client(self, opened: _Open | None, outcome: BaseException | None) -> None:
        def end(opened: _Open) -> None:
            self._clients.pop(opened.scope.node or "", None)
            try:
                if outcome is not None:
                    self._chart.exception(opened.scope, "client.failed", outcome)
                self._finish_client(opened, failed=outcome is not None)
            finally:
                self._chart.leave(opened.token)

        if opened is not None and self._clients.get(opened.scope.node or "") is opened:
            self._guard("closing a client", lambda: end(opened))

    def _finish_client(self, opened: _Open, *, failed: bool) -> None:
        results = Results()
        scope, node = opened.scope, opened.scope.node or ""
        if opened.session is not None:
            results, update, rows = opened.session.finish()
            results.tables = opened.tables
            started = time.perf_counter()
            self._kit.updates.add(node, update, rows)
            cost = opened.session.cost + time.perf_counter() - started
            results.take({"monitor.cost": cost})
            if self._round is not None:
                self._round.cohort.cost += cost
        results.take({"time.client": time.perf_counter() - opened.began})
        resident = resident_bytes()
        if resident is not None:
            results.take({"memory.resident": resident})
        after = [value for name, value, _ in results.metrics if name == "fit.loss_after"]
        if after and "loss" not in opened.logged:
            results.take({"loss": after[0]})
        self._chart.tell(scope, results)
        self._record.span(scope, "client", time.perf_counter() - opened.began, failed=failed)
        if self._round is not None:
            self._round.cohort.add(node, scope.group, results, failed=failed)

    def _finish_round(self, opened: _Open, model: Any) -> None:
        started = time.perf_counter()
        scope, cohort = opened.scope, opened.cohort
        if model is not None:
            self._chart.know(tables_of(self._kit, View(model)))
        for (node, group), results in cohort.close(self._kit, model, self._privacy):
            self._chart.tell(replace(scope, node=node, group=group), results)
        peak = peak_bytes()
        if peak is not None:
            self._record.metric(scope, "memory.peak", peak)
        self._record.metric(scope, "monitor.lost", self.lost)
        self._record.metric(scope, "monitor.cost", cohort.cost + time.perf_counter() - started)
        seconds = time.perf_counter() - opened.began
        self._record.span(scope, "round", seconds)
        self._record.metric(scope, "time.round", seconds)  # last: it marks the round as complete

    def _leave_edge(self, opened: _Open, model: Any, before: torch.Tensor | None) -> None:
        self._chart.leave(opened.token)
        if before is not None:
            change = (flatten([*model.parameters()]) - before).double()
            self._record.metric(opened.scope, "weight.difference", float(change.sum()))
            self._record.metric(opened.scope, "weight.difference_absolute", float(change.abs().sum()))
            if self._round is not None:
                self._round.cohort.measured_edges.add(opened.scope.node or "")
        self._record.span(opened.scope, "edge", time.perf_counter() - opened.began)

    def _first_model(self, model: torch.nn.Module) -> None:
        """The run's first global model: what all drift is measured from, and how well it was initialised."""
        self._kit.initial = flatten([*model.parameters()])
        self._chart.know(tables_of(self._kit, View(model)))
        for layer, remark in check_initialisation(model):
            self._record.event(self._chart.here(), "warning", "initialisation", f"{layer}: {remark}.", {"layer": layer})
