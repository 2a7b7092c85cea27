# SPDX-License-Identifier: Apache-2.0
"""The open round: what it collects from its clients, and what is recorded of it when it closes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import Token
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from fedvitals.catalog import public_name
from fedvitals.measurements import Measurements
from fedvitals.monitor.arrivals import Arrivals
from fedvitals.monitor.losses import LostRecords
from fedvitals.monitor.spine import Spine
from fedvitals.probes.attempts import Attempt
from fedvitals.probes.backends import as_array
from fedvitals.probes.cohort import Cohort, Key, agreeing_claims
from fedvitals.probes.node_columns import NodeColumns
from fedvitals.probes.results import Results
from fedvitals.protocols import Node
from fedvitals.records import AnyName, LayerStats, LayerTable, Span, as_round_index, node_name
from fedvitals.resources.memory import limit_bytes, peak_bytes, resident_bytes
from fedvitals.resources.time_ledger import Ledger, LedgerSpan
from fedvitals.scope import Scope
from fedvitals.stats import Array
from fedvitals.time_parts import EDGE, JOURNEY, ROUND, SERVER
from fedvitals.transport.payload_check import is_claim
from fedvitals.transport.timing import new_span_id

if TYPE_CHECKING:
    from torch import Tensor

    from fedvitals.probes.backends import AnyInstruments

# Parts that are also recorded as metrics: of the round, and of each remote client.
PART_METRICS = {SERVER: ("aggregate", "evaluate"), JOURNEY: ("download", "queue", "start", "upload", "reply", "wait")}


TELL_LIMIT_EVERY = 20  # rounds: the detectors' history is limited


@dataclass(slots=True)
class OpenScope:
    """A round or an edge: how to close it, and what it has gathered."""

    scope: Scope
    token: Token[Scope | None]
    began: float = field(default_factory=time.perf_counter)
    at: float = field(default_factory=time.time)
    cohort: Cohort = field(default_factory=Cohort)  # of a round
    sent: dict[Node, Array] = field(default_factory=dict)  # nine sums per layer of the updates that the host supplied


class Rounds:
    """`open`: the open round.

    `least`: the fewest clients whose sum may be reported. `ledger`: None if times are not kept.
    """

    def __init__(
        self,
        spine: Spine,
        lost: LostRecords,
        kit: AnyInstruments,
        arrivals: Arrivals,
        ledger: Ledger | None,
        least: int,
    ) -> None:
        self._context, self._scopes = spine.context, spine.scopes
        self._emission, self._guard = spine.emission, spine.guard
        self._lost, self._kit, self._arrivals, self._ledger, self._least = lost, kit, arrivals, ledger, least
        self._record = spine.emission.record
        self.open: OpenScope | None = None
        self._limit_told = -TELL_LIMIT_EVERY  # the round in which the limit was last recorded

    def begin(self, number: object, model: Any) -> None:
        """Open a round. After a number that is rejected (ConfigError), records belong to no round."""
        self._scopes.forget_last_round()
        number = as_round_index(number)
        self.open = OpenScope(*self._scopes.enter_round(number))
        if self._ledger is not None:
            self._ledger.begin(self.open.scope.span, self.open.at)
        self.open.cohort = Cohort(approximate_before=self._kit.updates.approximate)
        self._kit.turns.begin(number)
        self._kit.global_parameters = () if model is None else self._kit.parameters(model)
        if model is None:
            return
        if not self._kit.preset.brief:
            self._kit.updates.begin_round(number, self._kit.global_parameters)
        if not self._kit.preset.brief:
            self._guard("reading adapters", lambda: self._emission.layer_tables(self._kit.begin_adapters(model)))
        # A continued run must not take the model it happens to have now for its first one.
        if self._kit.initial is None and not self._context.continued:
            self._first_model(model)
        elif not self._context.own_tables:  # a continued run: the store does not say which of its tables are ours
            self._tell_layers(self._kit.tables(model))

    def joined(self, span: Span, results: Results) -> None:
        """Add a client that has finished in this process."""
        if self.open is None:
            return
        cohort, node = self.open.cohort, span.where.node or ""
        cohort.add(node, span.where.group, results, failed=bool(span.attributes["failed"]))
        cohort.cost += sum(value for name, value, _ in results.metrics if name == "monitor.cost")
        if self._ledger is not None:
            self._ledger.trained(span)

    def joined_stack(self, spans: Sequence[Span], measured: Measurements) -> None:
        """Add clients that have finished as one batch in this process."""
        if self.open is None:
            return
        self.open.cohort.add_measured({span.where.node or "": span for span in spans}, [measured])
        if self._ledger is not None:
            for span in spans:
                self._ledger.trained(span)

    def close(self) -> OpenScope | None:
        """Return the open round, which is no longer open; the caller passes it to `finish` or drops it."""
        opened, self.open = self.open, None
        self._kit.global_parameters = ()
        self._scopes.leave_round()
        return opened

    def measure_model(self, model: Any) -> Callable[[], Results] | None:
        """Begin to measure the open round's new model, so that a device does so while clients' results are awaited."""
        if self.open is None or model is None:
            return None
        started, attempt = time.perf_counter(), self._attempts(self.open.scope)
        tables, results = attempt("measuring the global model", lambda: self._kit.measure_model(model)) or ((), None)
        attempt("reading a model's layers", lambda: self._tell_layers(tables))
        spent = time.perf_counter() - started
        self.open.cohort.cost += spent
        if self._ledger is not None:
            self._ledger.spent("measure", spent, "server")
        return results

    def finish(
        self, opened: OpenScope, model_results: Callable[[], Results] | None, metrics: Mapping[str, float]
    ) -> None:
        """Record a round that is over. Each step runs by itself, so a failure loses only that step's records."""
        attempt = self._attempts(opened.scope)
        try:
            for name, value in metrics.items():
                attempt("noting a metric", partial(self._tell_metric, opened.scope, name, value))
            self._tell(opened, model_results, attempt)
        finally:
            self._scopes.leave(opened.scope, opened.token)

    def _tell_metric(self, scope: Scope, name: str, value: Any) -> None:
        self._record.metric(scope, public_name(name), float(value))

    def _attempts(self, scope: Scope) -> Attempt:
        """Return a function that runs each piece of work by itself, and reports failures for the node they concern."""
        return partial(self._guard.attempt, here=lambda node: scope if node is None else replace(scope, node=node))

    def _tell(self, opened: OpenScope, model_results: Callable[[], Results] | None, attempt: Attempt) -> None:
        started = time.perf_counter()
        scope, cohort = opened.scope, opened.cohort
        self._tell_updates(opened, attempt)
        attempt("noting who is missing", lambda: self._arrivals.close_round(scope, cohort))
        attempt("reading layers", lambda: self._kit.updates.know(self._context.own_tables.values()))
        attempt("reading layers", lambda: self._kit.adapters.know(self._context.own_tables.values()))
        closing = partial(cohort.close, self._kit, model_results, self._least, attempt)
        columns, measurements = attempt("comparing clients", closing) or ((), ())
        for own in columns:
            self._tell_columns(scope, own, attempt)
        self._tell_all(scope, measurements, attempt)
        attempt("measuring memory", lambda: self._tell_memory(scope))
        cost = cohort.cost + time.perf_counter() - started
        self._lost.record(scope)
        self._record.metric(scope, "monitor.cost", cost)
        if self._ledger is not None:
            self._ledger.spent("measure", time.perf_counter() - started, "server")
        seconds = time.perf_counter() - opened.began
        attempt("telling what time went to", lambda: self._tell_time(scope, opened.at + seconds))
        self._record.span(scope, ROUND, opened.at, seconds, {})
        self._record.metric(scope, "time.round", seconds)  # last: it marks the round as complete

    def _tell_updates(self, opened: OpenScope, attempt: Attempt) -> None:
        """Record what the server measured of the updates.

        A sender's own claim only counts where there is no measurement.
        """
        cohort, sent = opened.cohort, opened.sent
        held = self._arrivals.take_held()
        claims = {
            node: [r for r in own if isinstance(r, LayerStats) and r.family == "update" and r.where.step is None]
            for node, own in held.items()
        }
        back = self._kit.updates.steps_back
        measurements = attempt(
            "comparing updates with what clients reported of them", lambda: cohort.receive(sent, claims, back)
        )
        if measurements is None:  # one update caused a failure: measure each by itself, so that the others are kept
            apart = [(node, partial(cohort.receive, {node: rows}, claims, back)) for node, rows in sent.items()]
            measurements = [
                measurement for node, work in apart for measurement in attempt("measuring an update", work, node) or ()
            ]
        others = [r for own in held.values() for r in own if isinstance(r, LayerStats) and not is_claim(r)]
        attempt("taking in statistics of layers", lambda: self._emission.admit(self._by_acceptance(others)))
        for node, own in held.items():
            stands = filter(is_claim, own) if node not in sent else self._usable(claims[node], sent[node])
            attempt("reading what a client reports of its update", partial(self._emission.admit, stands), node)
        self._tell_all(opened.scope, measurements, attempt)

    def _by_acceptance(self, statistics: Sequence[LayerStats]) -> list[LayerStats]:
        """Sort senders' statistics so that layer tables come last that the server or most senders have.

        A history takes a family's layer names from the newest table, so no client may rename them for all.
        """
        nodes: dict[tuple[str, str], set[Node | None]] = defaultdict(set)
        for record in statistics:
            nodes[record.family, record.table].add(record.where.node)
        own = self._context.own_tables
        return sorted(statistics, key=lambda r: (r.table in own, len(nodes[r.family, r.table])))

    def _usable(self, claims: Sequence[LayerStats], rows: Array) -> Sequence[LayerStats]:
        """Return a sender's own sums if they equal ours and ours are of layers whose names are unknown."""
        return () if self._context.own_table("parameter", len(rows)) else agreeing_claims(claims, rows)

    def _tell_all(self, scope: Scope, measurements: Iterable[tuple[Key, Results]], attempt: Attempt) -> None:
        rows = [*measurements]
        try:
            self._emission.results_of_nodes(scope, rows)
        except Exception:  # noqa: BLE001 - because of somebody: each by itself, so that it costs nobody else
            for (node, group), results in rows:
                own = replace(scope, node=node, group=group)
                attempt("telling what was measured", partial(self._emission.results, own, results), node)

    def _tell_columns(self, scope: Scope, columns: NodeColumns, attempt: Attempt) -> None:
        try:
            self._emission.columns(scope, columns)
        except Exception:  # noqa: BLE001 - as above
            for row, (node, _) in enumerate(columns.keys):
                tell = partial(self._emission.columns, scope, columns.of_row(row))
                attempt("telling what was measured", tell, node)

    def _tell_memory(self, scope: Scope) -> None:
        sizes = [("memory.peak", peak_bytes()), ("memory.resident", resident_bytes())]
        if (scope.round or 0) - self._limit_told >= TELL_LIMIT_EVERY:
            self._limit_told = scope.round or 0
            sizes.append(("memory.limit", limit_bytes()))
        for name, size in sizes:
            if size is not None:
                self._record.metric(scope, name, size)

    def _tell_time(self, scope: Scope, ended: float) -> None:
        """Record the Spans of server, groups and journeys, and the seconds of their parts that detectors use."""
        attempt = self._attempts(scope)
        seconds: dict[tuple[Node, str], float] = {}  # of each node's parts, summed over all its journeys
        for ledger_span in () if self._ledger is None else self._ledger.close(ended):
            tell = partial(self._tell_parts, scope, ledger_span, seconds)
            attempt("telling what time went to", tell, ledger_span.node)

    def _tell_parts(self, scope: Scope, ledger_span: LedgerSpan, seconds: dict[tuple[Node, str], float]) -> None:
        own = replace(
            scope,
            node=ledger_span.node,
            group=ledger_span.group,
            span=ledger_span.id or new_span_id(),
            parent=ledger_span.parent,
        )
        self._record.span(
            own,
            ledger_span.name,
            ledger_span.began,
            ledger_span.seconds,
            {"parts": ledger_span.parts, **ledger_span.attributes},
        )
        for part in PART_METRICS.get(ledger_span.name, ()):
            if part in ledger_span.parts:
                key = ledger_span.node, part
                seconds[key] = seconds.get(key, 0.0) + ledger_span.parts[part]
                self._record.metric(own if ledger_span.name == JOURNEY else scope, f"time.{part}", seconds[key])

    def stats(self, node: Any, family: str, array: Any) -> None:
        """Record statistics computed by the host: [layers, columns] of one node, or [clients, ...] of many."""
        matrices = as_array(array)
        nodes, matrices = ([node], matrices[None]) if matrices.ndim < 3 else (node, matrices)
        for name, matrix in zip(map(self._scopes.node, nodes), matrices, strict=True):
            results = Results(matrices=[(family, matrix, None)])
            self._emission.results(replace(self._scopes.here(), node=name), results)
            if self.open is not None:
                self.open.cohort.add(name, None, results, failed=False)

    @contextmanager
    def edge(self, name: AnyName, model: Any) -> Iterator[None]:
        """Context in which an edge node, cluster or ring does its part."""
        guard = self._guard

        def begin() -> OpenScope:
            node = node_name(name)
            return OpenScope(*self._scopes.enter(node, group=node))

        opened: OpenScope | None = guard("opening an edge", begin)
        before = None if model is None else guard("reading a model", lambda: self._vector(model))
        try:
            yield
        except BaseException as error:
            self._guard.exception(self._scopes.here(), "edge.failed", error)
            raise
        finally:
            if opened is not None:
                guard("closing an edge", lambda: self._leave_edge(opened, model, before))

    def _leave_edge(self, opened: OpenScope, model: Any, before: Tensor | None) -> None:
        self._scopes.leave(opened.scope, opened.token)
        if before is not None:
            change = (self._vector(model) - before).double()
            results = Results(clients=0 if self.open is None else self.open.cohort.clients_of(opened.scope.node))
            results.take({"weight.difference": change.sum(), "weight.difference_absolute": change.abs().sum()})
            self._emission.results(opened.scope, results)
            if self.open is not None:
                self.open.cohort.measured_edges.add(opened.scope.node or "")
        if self._ledger is not None:
            self._ledger.recorded_edges.add(opened.scope.node or "")
        self._record.span(opened.scope, EDGE, opened.at, time.perf_counter() - opened.began, {})

    def _vector(self, model: Any) -> Tensor:
        """Return all measured parameters of a PyTorch model as one vector."""
        from fedvitals.probes.view import flatten  # noqa: PLC0415 - imports torch

        return flatten(self._kit.parameters(model))

    def _tell_layers(self, tables: Iterable[Mapping[str, LayerTable]]) -> None:
        for own in tables:
            self._emission.layer_tables(own)

    def _first_model(self, model: Any) -> None:
        """Record the run's first global model: how it was initialised, and the reference for all drift."""
        self._tell_layers(self._kit.tables(model))
        for layer, remark, everywhere in self._kit.first_model(model):
            data = {"layer": layer} | ({"everywhere": True} if everywhere else {})
            self._record.event(self._scopes.here(), "warning", "initialisation", f"{layer}: {remark}.", data)
        trained = self._kit.trained_parts(model)
        if trained is not None:
            text, adapters = trained
            self._record.event(self._scopes.here(), "info", "layers.trained", text, {"adapters": adapters})
        zero = self._kit.zero_layers(model)
        if zero:  # detectors need this: the gradients next to an all-zero matrix begin at or near 0
            text = f"{len(zero)} of the trained matrices begin at 0, as adapters and residual branches do."
            self._record.event(self._scopes.here(), "info", "initialisation.zero", text, {"layers": zero})
