# SPDX-License-Identifier: Apache-2.0
"""The round that is open: what its clients bring, and what is told of it when it closes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import Token
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from fedvitals.catalog import public_name
from fedvitals.chart import Chart
from fedvitals.parts import EDGE, JOURNEY, ROUND, SERVER
from fedvitals.probes.cohort import Cohort
from fedvitals.probes.results import Results
from fedvitals.probes.session import Instruments, tables_of
from fedvitals.probes.view import View, flatten
from fedvitals.probes.weights import check_initialisation
from fedvitals.profiling.ledger import Ledger
from fedvitals.profiling.memory import peak_bytes, resident_bytes
from fedvitals.protocols import Node
from fedvitals.records import AnyName, Span, node_name, round_index
from fedvitals.scope import Scope
from fedvitals.stats import Array
from fedvitals.telemetry.timing import new_span_id
from fedvitals.worker import Arrivals

# Parts that are told as metrics, too: of the round, and of each client that is elsewhere.
TOLD_PARTS = {SERVER: ("aggregate", "evaluate"), JOURNEY: ("download", "queue", "start", "upload", "reply", "wait")}


@dataclass(slots=True)
class OpenScope:
    """A round or an edge: how to close it again, and what it has gathered."""

    scope: Scope
    token: Token[Scope | None]
    began: float = field(default_factory=time.perf_counter)
    at: float = field(default_factory=time.time)
    cohort: Cohort = field(default_factory=Cohort)  # of a round
    sent: dict[Node, Array] = field(default_factory=dict)  # nine sums per layer of the updates that the host gave


class Rounds:
    """`open` is the round that is open; `least`: the fewest clients whose sum may be told. `ledger`: None, no times."""

    def __init__(self, chart: Chart, kit: Instruments, arrivals: Arrivals, ledger: Ledger | None, least: int) -> None:
        self._chart, self._kit, self._arrivals, self._ledger, self._least = chart, kit, arrivals, ledger, least
        self._record = chart.record
        self.open: OpenScope | None = None

    def begin(self, number: object, model: Any) -> None:
        """Open a round. What is recorded in one whose number is refused (ConfigError) belongs to no round."""
        self._chart.last_round = None
        number = round_index(number)
        self.open = OpenScope(*self._chart.enter_round(number))
        if self._ledger is not None:
            self._ledger.begin(self.open.scope.span, self.open.at)
        self.open.cohort = Cohort(approximate_before=self._kit.updates.approximate)
        if model is None:
            return
        self._kit.updates.begin_round(number, [*model.parameters()])
        # A run that goes on does not begin anew with the model that it happens to have now.
        if self._kit.initial is None and not self._chart.continued:
            self._first_model(model)

    def joined(self, span: Span, results: Results) -> None:
        """A client has finished in this process."""
        if self.open is None:
            return
        cohort, node = self.open.cohort, span.where.node or ""
        cohort.add(node, span.where.group, results, failed=bool(span.attributes["failed"]))
        cohort.cost += sum(value for name, value, _ in results.metrics if name == "monitor.cost")
        if self._ledger is not None:
            self._ledger.trained(span)

    def close(self) -> OpenScope | None:
        """The open round, which from now on is none: to be told of by `finish`, or forgotten."""
        opened, self.open, self._chart.round = self.open, None, None
        return opened

    def finish(self, opened: OpenScope, model: Any, metrics: Mapping[str, float]) -> None:
        try:
            for name, value in metrics.items():
                self._record.metric(opened.scope, public_name(name), float(value))
            self._tell(opened, model)
        finally:
            self._chart.leave(opened.scope, opened.token)

    def _tell(self, opened: OpenScope, model: Any) -> None:
        started = time.perf_counter()
        scope, cohort = opened.scope, opened.cohort
        if model is not None:
            self._chart.know(tables_of(self._kit, View(model)))
        for (node, group), results in cohort.receive(opened.sent):
            self._chart.tell(replace(scope, node=node, group=group), results)
        self._arrivals.close_round(scope, cohort)
        self._kit.updates.know(self._chart.tables.values())
        for (node, group), results in cohort.close(self._kit, model, self._least):
            self._chart.tell(replace(scope, node=node, group=group), results)
        for name, size in (("memory.peak", peak_bytes()), ("memory.resident", resident_bytes())):
            if size is not None:
                self._record.metric(scope, name, size)
        self._chart.record_lost(scope)
        self._record.metric(scope, "monitor.cost", cohort.cost + time.perf_counter() - started)
        if self._ledger is not None:
            self._ledger.spent("measure", time.perf_counter() - started, "server")
        seconds = time.perf_counter() - opened.began
        self._tell_time(scope, opened.at + seconds)
        self._record.span(scope, ROUND, opened.at, seconds, {})
        self._record.metric(scope, "time.round", seconds)  # last: it marks the round as complete

    def _tell_time(self, scope: Scope, ended: float) -> None:
        """The Spans of server, groups and journeys, and of these the seconds that detectors look at."""
        for told in () if self._ledger is None else self._ledger.close(ended):
            own = replace(scope, node=told.node, group=told.group, span=told.id or new_span_id(), parent=told.parent)
            self._record.span(own, told.name, told.began, told.seconds, {"parts": told.parts, **told.attributes})
            for part in TOLD_PARTS.get(told.name, ()):
                if part in told.parts:
                    self._record.metric(own if told.name == JOURNEY else scope, f"time.{part}", told.parts[part])

    def stats(self, node: Any, family: str, array: Any) -> None:
        """Statistics that the host computed itself: [layers, columns] of one node, or [clients, ...] of many."""
        matrices = np.asarray(torch.as_tensor(array).cpu(), dtype=np.float64)
        nodes, matrices = ([node], matrices[None]) if matrices.ndim < 3 else (node, matrices)
        for name, matrix in zip(map(node_name, nodes), matrices, strict=True):
            results = Results(matrices=[(family, matrix, None)])
            self._chart.tell(replace(self._chart.here(), node=name), results)
            if self.open is not None:
                self.open.cohort.add(name, None, results, failed=False)

    @contextmanager
    def edge(self, name: AnyName, model: Any) -> Iterator[None]:
        """The stretch in which an edge node, cluster or ring does its share."""
        guard = self._chart.guard

        def begin() -> OpenScope:
            node = node_name(name)
            return OpenScope(*self._chart.enter(node, group=node))

        opened: OpenScope | None = guard("opening an edge", begin)
        before = None if model is None else guard("reading a model", lambda: flatten([*model.parameters()]))
        try:
            yield
        except BaseException as error:
            self._chart.exception(self._chart.here(), "edge.failed", error)
            raise
        finally:
            if opened is not None:
                guard("closing an edge", lambda: self._leave_edge(opened, model, before))

    def _leave_edge(self, opened: OpenScope, model: Any, before: torch.Tensor | None) -> None:
        self._chart.leave(opened.scope, opened.token)
        if before is not None:
            change = (flatten([*model.parameters()]) - before).double()
            results = Results(clients=0 if self.open is None else self.open.cohort.clients_of(opened.scope.node))
            results.take({"weight.difference": change.sum(), "weight.difference_absolute": change.abs().sum()})
            self._chart.tell(opened.scope, results)
            if self.open is not None:
                self.open.cohort.measured_edges.add(opened.scope.node or "")
        if self._ledger is not None:
            self._ledger.told_edges.add(opened.scope.node or "")
        self._record.span(opened.scope, EDGE, opened.at, time.perf_counter() - opened.began, {})

    def _first_model(self, model: torch.nn.Module) -> None:
        """The run's first global model: what all drift is measured from, and how well it was initialised."""
        self._kit.initial = flatten([*model.parameters()])
        self._chart.know(tables_of(self._kit, View(model)))
        for layer, remark in check_initialisation(model):
            self._record.event(self._chart.here(), "warning", "initialisation", f"{layer}: {remark}.", {"layer": layer})
