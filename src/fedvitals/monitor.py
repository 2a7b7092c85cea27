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
from fedvitals.probes.weights import check_initialisation, weights
from fedvitals.profiling.memory import peak_bytes, resident_bytes
from fedvitals.protocols import Detector, Node, Sink
from fedvitals.records import Action, Run, Transfer
from fedvitals.scope import Scope, current
from fedvitals.stats import FAMILIES
from fedvitals.telemetry.recorder import where
from fedvitals.telemetry.timing import new_span_id, new_trace


@dataclass(slots=True)
class _Open:
    """An open scope: how to close it again, and what it has gathered."""

    scope: Scope
    token: Token[Scope | None]
    began: float = field(default_factory=time.perf_counter)
    cohort: Cohort = field(default_factory=Cohort)  # of a round
    session: ClientSession | None = None  # of a client with a model
    view: View | None = None
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
        self._detectors = tuple(detectors)
        described = Run(
            id=f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(3).hex()}",
            name=run,
            host=host,
            topology=topology,
            config={**(config or {}), "fedvitals": {"probes": self._kit.preset.name, "privacy": privacy}},
            seed=seed,
        )
        self._chart = Chart(
            described, store, tuple(sinks), self._detectors, privacy=privacy, strict=strict, scope=self._scope
        )
        self._record, self._guard = self._chart.record, self._chart.guard
        self._trace = new_trace()
        self._lock = threading.Lock()
        self._closed = False
        self._round: _Open | None = None
        self._last_round: int | None = None
        self._clients: dict[Node, _Open] = {}
        close_at_exit(self)

    # -- what people write --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def round(self, number: int, global_model: Any = None) -> Iterator[Monitor]:
        """One round of the federation; what is logged or raised inside belongs to it."""
        self.round_begin(number, global_model)
        try:
            yield self
        except BaseException as error:
            self._chart.exception("round.failed", error)
            raise
        finally:
            self.round_end(number, global_model)

    @contextlib.contextmanager
    def client(
        self,
        name: Node,
        model: Any = None,
        optimizer: Any = None,
        *,
        data: Any = None,
        loss: Callable[..., Any] | None = None,
        group: str | None = None,
    ) -> Iterator[Monitor]:
        """One client's local training: hooks on, and off again at the end.

        Only name and model are needed. `data` (a DataLoader, a Dataset, a pair of tensors or a list of batches) and
        `loss` add how well the model suits the client's own samples. The optimiser is found by its parameters.
        """
        self.client_begin(name, model, optimizer, data, group, loss=loss)
        outcome: BaseException | None = None
        try:
            yield self
        except BaseException as error:
            outcome = error
            raise
        finally:
            self.client_end(name, outcome)

    @contextlib.contextmanager
    def edge(self, name: Node, model: Any = None) -> Iterator[Monitor]:
        """An edge node, cluster or ring: the clients inside belong to it (it is their `group`)."""
        opened: _Open | None = self._guard("opening an edge", lambda: self._enter(name, group=name))
        before = None if model is None else self._guard("reading a model", lambda: flatten([*model.parameters()]))
        try:
            yield self
        except BaseException as error:
            self._chart.exception("edge.failed", error)
            raise
        finally:
            if opened is not None:
                self._guard("closing an edge", lambda: self._leave_edge(opened, model, before))

    def log(self, values: Mapping[str, float] | None = None, /, **more: float) -> None:
        """Metrics of your own, for the client or the round that is open (or was open last)."""

        def emit() -> None:
            scope = self._scope()
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
                self._record.event(self._scope(), "warning", "round.unclosed", f"Round {unclosed} was still open.")
                self.round_end(unclosed or 0)
            self._round, self._last_round = self._enter(None, round=round), round
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
        def begin() -> None:
            if node in self._clients:
                raise ConfigError(f"Client '{node}' is already open. Give each client of a round a name of its own.")
            opened = self._clients[node] = self._enter(node, group=group)
            if model is not None:
                opened.view = View(model, round=opened.scope.round, node=node, data=data, loss=loss)
                if not self._kit.preset.brief:
                    self._chart.know(tables_of(self._kit, opened.view))
                opened.session = ClientSession(self._kit, opened.view, self._chart.report)

        self._guard("opening a client", begin)

    def stats(self, node: Node, family: str, array: Any) -> None:
        """Statistics that the host computed itself: [layers, columns], of the layers that were announced last."""

        def emit() -> None:
            results = Results(matrices=[(family, np.asarray(array, dtype=np.float64), None)])
            self._chart.tell(replace(self._scope(), node=node), results)
            if self._round is not None:
                self._round.cohort.add(node, None, results, failed=False)

        self._guard("stats()", emit)

    def client_end(self, node: Node, outcome: BaseException | None = None) -> None:
        def end() -> None:
            opened = self._clients.pop(node, None)
            if opened is None:
                return
            try:
                if outcome is not None:
                    self._chart.exception("client.failed", outcome)
                self._finish_client(opened, failed=outcome is not None)
            finally:
                self._leave(opened)

        self._guard("closing a client", end)

    def updates(self, round: int, updates: Mapping[Node, Any]) -> Sequence[Action]:  # noqa: A002, ARG002
        """What each client sends, where the host holds it: a sequence of tensors. No guard answers yet."""

        def take(node: Node, tensors: Sequence[torch.Tensor]) -> None:
            rows = np.asarray(torch.as_tensor(sums(tensors)).cpu())
            self._kit.updates.add(node, flatten(tensors), rows)
            if self._round is not None and node in self._round.cohort:
                return  # it trained in a scope of its own, which tells the rest
            results = Results(matrices=[("update", rows, None)])
            self._chart.tell(replace(self._scope(), node=node), results)
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
            scope = replace(self._scope(), node=receiver if sender == "server" else sender)
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
            opened, self._round = self._round, None
            if opened is None:
                return
            try:
                for name, value in (metrics or {}).items():
                    self._record.metric(opened.scope, public_name(name), float(value))
                self._finish_round(opened, global_state if hasattr(global_state, "named_parameters") else None)
            finally:
                self._leave(opened)

        self._guard(f"closing round {round}", end)

    # -- scopes -------------------------------------------------------------------------------------------------------

    def _enter(self, node: Node | None, *, round: int | None = None, group: str | None = None) -> _Open:  # noqa: A002
        parent = self._scope()
        scope = replace(
            parent,
            round=parent.round if round is None else round,
            node=node,
            group=group or parent.group,
            span=new_span_id(),
            parent=parent.span,
        )
        return _Open(scope, current.set(scope))

    def _leave(self, opened: _Open) -> None:
        # A host may close a scope on another thread than it was opened on; that one has a contextvar of its own.
        with contextlib.suppress(ValueError):
            current.reset(opened.token)

    def _scope(self) -> Scope:
        """Where the caller stands: its own scope; on a thread without one, the round that is open (or was last)."""
        scope = current.get()
        if scope is not None and scope.run == self.run.id:
            return scope
        if self._round is not None:
            return self._round.scope
        return Scope(self.run.id, self._chart.emit, self._last_round, trace=self._trace)

    def _finish_client(self, opened: _Open, *, failed: bool) -> None:
        results = Results()
        scope, node = opened.scope, opened.scope.node or ""
        if opened.session is not None and opened.view is not None:
            results, update, rows = opened.session.finish()
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
        was_approximate = self._kit.updates.approximate
        for (node, group), results in cohort.close(self._kit):
            self._chart.tell(replace(scope, node=node, group=group), results)
        if model is not None:
            view = View(model)
            self._chart.know(tables_of(self._kit, view))
            found = weights(view)
            server = Results()
            server.take({name: value for name, value in found.items() if name not in FAMILIES})
            server.matrices = [
                (n, np.asarray(torch.as_tensor(v).cpu()), None) for n, v in found.items() if n in FAMILIES
            ]
            self._chart.tell(replace(scope, node="server"), server)
        if self._kit.updates.approximate and not was_approximate:
            text = "Updates exceed update_memory: cosines are estimated from sketches, standard error 0.06."
            self._record.event(scope, "info", "updates.approximate", text)
        peak = peak_bytes()
        if peak is not None:
            self._record.metric(scope, "memory.peak", peak)
        self._record.metric(scope, "monitor.lost", self.lost)
        self._record.metric(scope, "monitor.cost", cohort.cost + time.perf_counter() - started)
        seconds = time.perf_counter() - opened.began
        self._record.span(scope, "round", seconds)
        self._record.metric(scope, "time.round", seconds)  # last: it marks the round as complete

    def _leave_edge(self, opened: _Open, model: Any, before: torch.Tensor | None) -> None:
        if before is not None:
            change = (flatten([*model.parameters()]) - before).double()
            self._record.metric(opened.scope, "weight.difference", float(change.sum()))
            self._record.metric(opened.scope, "weight.difference_absolute", float(change.abs().sum()))
            if self._round is not None:
                self._round.cohort.measured_edges.add(opened.scope.node or "")
        self._record.span(opened.scope, "edge", time.perf_counter() - opened.began)
        self._leave(opened)

    def _first_model(self, model: torch.nn.Module) -> None:
        """The run's first global model: what all drift is measured from, and how well it was initialised."""
        self._kit.initial = flatten([*model.parameters()])
        self._chart.know(tables_of(self._kit, View(model)))
        for layer, remark in check_initialisation(model):
            self._record.event(self._scope(), "warning", "initialisation", f"{layer}: {remark}.", {"layer": layer})
