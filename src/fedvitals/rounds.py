# SPDX-License-Identifier: Apache-2.0
"""The round that is open: what its clients bring, and what is told of it when it closes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import Token
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fedvitals.catalog import public_name
from fedvitals.chart import Chart
from fedvitals.parts import EDGE, JOURNEY, ROUND, SERVER
from fedvitals.probes.cohort import Cohort
from fedvitals.probes.results import Results
from fedvitals.profiling.ledger import Ledger
from fedvitals.profiling.memory import peak_bytes, resident_bytes
from fedvitals.protocols import Node
from fedvitals.records import Span
from fedvitals.scope import Scope
from fedvitals.stats import Array
from fedvitals.telemetry.timing import new_span_id
from fedvitals.worker import Arrivals

if TYPE_CHECKING:
    from torch import Tensor

    from fedvitals.probes.kits import Kit

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

    def __init__(self, chart: Chart, kit: Kit, arrivals: Arrivals, ledger: Ledger | None, least: int) -> None:
        self._chart, self._kit, self._arrivals, self._ledger, self._least = chart, kit, arrivals, ledger, least
        self._record = chart.record
        self.open: OpenScope | None = None

    def begin(self, number: int, model: Any) -> None:
        self.open = OpenScope(*self._chart.enter_round(number))
        if self._ledger is not None:
            self._ledger.begin(self.open.scope.span, self.open.at)
        self.open.cohort = Cohort(approximate_before=self._kit.updates.approximate)
        if model is None:
            return
        self._kit.updates.begin_round(number, self._kit.parameters(model))
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
            self._know_layers(model)
        for (node, group), results in cohort.receive(opened.sent):
            self._chart.tell(replace(scope, node=node, group=group), results)
        self._arrivals.close_round(scope, cohort)
        self._kit.updates.know(self._chart.tables.values())
        for (node, group), results in cohort.close(self._kit, model, self._least):
            self._chart.tell(replace(scope, node=node, group=group), results)
        for name, size in (("memory.peak", peak_bytes()), ("memory.resident", resident_bytes())):
            if size is not None:
                self._record.metric(scope, name, size)
        self._record.metric(scope, "monitor.lost", self._chart.lost)
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

    @contextmanager
    def edge(self, name: Node, model: Any) -> Iterator[None]:
        """The stretch in which an edge node, cluster or ring does its share."""
        guard = self._chart.guard
        opened: OpenScope | None = guard("opening an edge", lambda: OpenScope(*self._chart.enter(name, group=name)))
        before = None if model is None else guard("reading a model", lambda: self._vector(model))
        try:
            yield
        except BaseException as error:
            self._chart.exception(self._chart.here(), "edge.failed", error)
            raise
        finally:
            if opened is not None:
                guard("closing an edge", lambda: self._leave_edge(opened, model, before))

    def _leave_edge(self, opened: OpenScope, model: Any, before: Tensor | None) -> None:
        self._chart.leave(opened.scope, opened.token)
        if before is not None:
            change = (self._vector(model) - before).double()
            results = Results(clients=0 if self.open is None else self.open.cohort.clients_of(opened.scope.node))
            results.take({"weight.difference": change.sum(), "weight.difference_absolute": change.abs().sum()})
            self._chart.tell(opened.scope, results)
            if self.open is not None:
                self.open.cohort.measured_edges.add(opened.scope.node or "")
        if self._ledger is not None:
            self._ledger.told_edges.add(opened.scope.node or "")
        self._record.span(opened.scope, EDGE, opened.at, time.perf_counter() - opened.began, {})

    def _vector(self, model: Any) -> Tensor:
        """All parameters of a PyTorch model that are measured, as one vector."""
        from fedvitals.probes.view import flatten  # noqa: PLC0415 - imports torch

        return flatten(self._kit.parameters(model))

    def _know_layers(self, model: Any) -> None:
        for tables in self._kit.tables(model):
            self._chart.know(tables)

    def _first_model(self, model: Any) -> None:
        """The run's first global model: what all drift is measured from, and how well it was initialised."""
        self._know_layers(model)
        for layer, remark in self._kit.first_model(model):
            self._record.event(self._chart.here(), "warning", "initialisation", f"{layer}: {remark}.", {"layer": layer})
