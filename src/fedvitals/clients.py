# SPDX-License-Identifier: Apache-2.0
"""The clients that are training in this process: opened, watched and closed, each on whatever thread it runs.

The same for a monitor and for a worker process; who uses it says what becomes of a client's update and results.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import Token
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from fedvitals.catalog import public_name
from fedvitals.chart import Chart
from fedvitals.errors import ConfigError
from fedvitals.probes.results import Results
from fedvitals.probes.session import ClientSession, Instruments, tables_of
from fedvitals.probes.view import View
from fedvitals.profiling.memory import resident_bytes
from fedvitals.protocols import Node
from fedvitals.records import Transfer
from fedvitals.scope import Scope
from fedvitals.stats import Array
from fedvitals.telemetry.recorder import where


@dataclass(slots=True)
class OpenClient:
    """How to close it again, and what it has gathered."""

    scope: Scope
    token: Token[Scope | None]
    began: float = field(default_factory=time.perf_counter)
    session: ClientSession | None = None  # of a client with a model
    tables: Mapping[str, str] = field(default_factory=dict)
    logged: set[str] = field(default_factory=set)


class Clients:
    """`sent` takes a client's update as one vector with its nine sums per layer, `joined` its scope and results."""

    def __init__(
        self,
        chart: Chart,
        kit: Instruments,
        sent: Callable[[Node, Tensor, Array | None], Any],
        joined: Callable[[Scope, Results, bool], None],
    ) -> None:
        self._chart, self._kit, self._sent, self._joined = chart, kit, sent, joined
        self._open: dict[Node, OpenClient] = {}

    def __len__(self) -> int:
        return len(self._open)

    @contextlib.contextmanager
    def scope(self, opened: OpenClient | None) -> Iterator[None]:
        """The stretch in which a client that `begin` gave trains; closed however it is left."""
        outcome: BaseException | None = None
        try:
            yield
        except BaseException as error:
            outcome = error
            raise
        finally:
            self.end(opened, outcome)

    def begin(
        self,
        node: Node,
        model: Any = None,
        data: Any = None,
        group: str | None = None,
        loss: Callable[..., Any] | None = None,
        *,
        inside: Scope | None = None,
    ) -> OpenClient | None:
        """What was opened, to be closed by whoever opened it; None if that name is open already."""

        def watch(opened: OpenClient) -> None:
            view = View(model, round=opened.scope.round, node=node, data=data, loss=loss)
            if not self._kit.preset.brief:
                tables = tables_of(self._kit, view)
                self._chart.know(tables)
                opened.tables = {rows: table.digest for rows, table in tables.items()}
            report = functools.partial(self._chart.report, scope=opened.scope)
            opened.session = ClientSession(self._kit, view, report)

        def begin() -> OpenClient:
            if node in self._open:
                raise ConfigError(f"Client '{node}' is already open. Give each client of a round a name of its own.")
            entered = self._chart.enter(node, group=group, client=True, inside=inside)
            opened = self._open[node] = OpenClient(*entered)
            if model is not None:
                self._chart.guard("watching a client", lambda: watch(opened), opened.scope)
            return opened

        opened: OpenClient | None = self._chart.guard("opening a client", begin)
        return opened

    def end(self, opened: OpenClient | None, outcome: BaseException | None) -> None:
        def end(opened: OpenClient) -> None:
            self._open.pop(opened.scope.node or "", None)
            try:
                if outcome is not None:
                    self._chart.exception(opened.scope, "client.failed", outcome)
                self._finish(opened, failed=outcome is not None)
            finally:
                self._chart.leave(opened.scope, opened.token)

        if opened is not None and self._open.get(opened.scope.node or "") is opened:
            self._chart.guard("closing a client", lambda: end(opened), opened.scope)

    def end_of(self, node: Node, outcome: BaseException | None = None) -> None:
        self.end(self._open.get(node), outcome)

    def end_all(self) -> None:
        for node in list(self._open):
            self.end_of(node)

    def abandon(self) -> None:
        """Close all without a word."""
        for opened in self._open.values():
            if opened.session is not None:
                opened.session.abandon()
            self._chart.leave(opened.scope, opened.token)
        self._open.clear()

    def log(self, values: Mapping[str, float]) -> None:
        """Metrics of the user's own, for the client or the round that is open (or was open last)."""

        def emit() -> None:
            scope = self._chart.here()
            client = self._open.get(scope.node or "")
            for name, value in values.items():
                number = value.detach() if isinstance(value, Tensor) else value
                self._chart.record.metric(scope, public_name(name), float(number))
                if client is not None:
                    client.logged.add(name)

        self._chart.guard("log()", emit)

    def transfer(
        self, sender: Node, receiver: Node, size: int, raw: int | None, seconds: float | None, kind: str
    ) -> None:
        scope = replace(self._chart.here(), node=receiver if sender == "server" else sender)
        before = size if raw is None else raw
        self._chart.emit(Transfer(where(scope), time.time(), sender, receiver, int(size), int(before), seconds, kind))

    def _finish(self, opened: OpenClient, *, failed: bool) -> None:
        results = Results()
        scope, node = opened.scope, opened.scope.node or ""
        if opened.session is not None:
            results, update, rows = opened.session.finish()
            results.tables = opened.tables
            started = time.perf_counter()
            self._sent(node, update, rows)
            results.take({"monitor.cost": opened.session.cost + time.perf_counter() - started})
        results.take({"time.client": time.perf_counter() - opened.began})
        resident = resident_bytes()
        if resident is not None:
            results.take({"memory.resident": resident})
        after = [value for name, value, _ in results.metrics if name == "fit.loss_after"]
        if after and "loss" not in opened.logged:
            results.take({"loss": after[0]})
        self._chart.tell(scope, results)
        self._chart.record.span(scope, "client", time.perf_counter() - opened.began, failed=failed)
        self._joined(scope, results, failed)
