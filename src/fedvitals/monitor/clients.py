# SPDX-License-Identifier: Apache-2.0
"""Clients that train in this process: opened, measured and closed, each on whichever thread it runs.

Used by monitors and by worker processes; the callables passed in receive the updates and the results.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fedvitals.catalog import public_name
from fedvitals.diagnosis.gaps import OUTSIDE_ROUND
from fedvitals.errors import ConfigError, unknown
from fedvitals.loop_tape import LoopTape
from fedvitals.measurements import Measurements, Transfers
from fedvitals.monitor.open_clients import OpenClient, UnsettledClients
from fedvitals.monitor.progress import TRAIN, Awaited
from fedvitals.monitor.spine import Spine
from fedvitals.monitor.stacks import Stacks
from fedvitals.probes.results import Key, Results, metric_of_nodes
from fedvitals.protocols import Node
from fedvitals.records import AnyName, Span, Transfer, Where, group_name
from fedvitals.resources.capture import OPERATORS, Capture, Captures
from fedvitals.resources.memory import resident_bytes
from fedvitals.resources.turns import turn_over
from fedvitals.scope import Scope
from fedvitals.stack import Stack
from fedvitals.time_parts import CLIENT
from fedvitals.transport.logs import bounded
from fedvitals.transport.recorder import where
from fedvitals.transport.timing import new_span_id

if TYPE_CHECKING:
    from torch import Tensor

    from fedvitals.probes.instruments import Instruments
    from fedvitals.probes.pending_results import PendingResults
    from fedvitals.probes.session import ClientSession
    from fedvitals.resources.client_memory import ClientMemory
    from fedvitals.resources.phases import Clocks

logger = logging.getLogger("fedvitals")
LEVELS = ("debug", "info", "warning", "error", "critical")  # of events


class Clients:
    """Opens, measures and closes clients. `sent` receives an update (as `UpdateTracker.add` does).

    `joined` receives a client's Span and results, `joined_stack` those of clients that trained as one batch. `profile`:
    whether to record what time and memory went to. `capture`: whose operators are recorded. `defers`: whether an ended
    client may be reported later, by `settle`, while its results are still on a device.
    """

    def __init__(
        self,
        spine: Spine,
        loop_tape: LoopTape,
        kit: Callable[[], Any],
        sent: Callable[..., Any],
        joined: Callable[[Span, Results], None],
        joined_stack: Callable[[Sequence[Span], Measurements], None],
        *,
        profile: bool,
        capture: Capture | None = None,
        defers: Callable[[], bool] = lambda: False,
    ) -> None:
        self._context, self._scopes = spine.context, spine.scopes
        self._emission, self._guard = spine.emission, spine.guard
        self._loop_tape, self._kit_of_run, self._sent, self._joined = loop_tape, kit, sent, joined
        self._profile, self._captures, self._defers = profile, Captures(capture), defers
        self._unsettled = UnsettledClients(spine.guard)
        self._open: dict[Node, OpenClient] = {}
        self._warned_outside = False
        self._stacks = Stacks(spine, kit, lambda: self._memory, sent, joined_stack, profile=profile)

    # Model instruments import torch, so they are created for the first model: a client may have neither.

    @property
    def _kit(self) -> Instruments:
        kit: Instruments = self._kit_of_run()
        return kit

    @functools.cached_property
    def _clocks(self) -> Clocks:
        from fedvitals.resources.phases import Clocks  # noqa: PLC0415

        return Clocks()

    @functools.cached_property
    def _memory(self) -> ClientMemory:
        from fedvitals.resources.client_memory import ClientMemory  # noqa: PLC0415

        return ClientMemory()

    def __len__(self) -> int:
        return len(self._open) + (self._stacks.open is not None)

    @contextlib.contextmanager
    def scope(self, opened: OpenClient | None) -> Iterator[None]:
        """Context in which a client returned by `begin` trains; closes it however the block is left."""
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
        name: AnyName,
        model: Any = None,
        data: Any = None,
        group: AnyName | None = None,
        loss: Callable[..., Any] | None = None,
        *,
        inside: Scope | None = None,
        watch: Callable[..., Any] | None = None,
    ) -> OpenClient | None:
        """Open a client, which the caller must close; returns None if the name is already open or is not valid.

        `watch`: called with the model of a client that is opened without one.
        """

        def begin() -> OpenClient:
            node = self._scopes.client(name)
            if node in self._open:
                raise ConfigError(f"Client '{node}' is already open. Give each client of a round a name of its own.")
            entered = self._scopes.enter(node, group=group_name(group), client=True, inside=inside, watch=watch)
            opened = self._open[node] = OpenClient(*entered)
            self._guard("taping a client", lambda: self._loop_tape.client_begin(node, model, entered[0].group))
            if model is not None:
                begin_watching = functools.partial(self._watch, opened, model, data, loss)
                self._guard("watching a client", begin_watching, opened.scope)
            return opened

        opened: OpenClient | None = self._guard("opening a client", begin)
        return opened

    @contextlib.contextmanager
    def watching(
        self, node: AnyName, model: Any, data: Any = None, loss: Callable[..., Any] | None = None
    ) -> Iterator[None]:
        """Context in which the model of a client trains that was opened without one; only the first model counts."""
        opened = self._opened(node)
        if opened is None or opened.session is not None or opened.attributes:
            yield
            return
        watch = functools.partial(self._watch, opened, model, data, loss)
        self._guard("watching a client", watch, opened.scope)
        failed = True
        try:
            yield
            failed = False
        finally:
            self._guard("measuring a client", lambda: self._measure(opened, failed=failed), opened.scope)

    def _watch(self, opened: OpenClient, model: Any, data: Any, loss: Callable[..., Any] | None) -> None:
        if not hasattr(model, "named_parameters"):
            raise ConfigError(
                f"The model of a client is a torch module, and this is {type(model).__name__}. Leave it out and hand "
                "what clients send to monitor.updates(round, {name: update}), which takes arrays of any kind."
            )
        from fedvitals.probes.instruments import tables_of  # noqa: PLC0415 - imports torch
        from fedvitals.probes.rank_watch import RankWatch  # noqa: PLC0415 - imports torch
        from fedvitals.probes.ranks import group_of, unwrapped  # noqa: PLC0415 - imports torch
        from fedvitals.probes.session import ClientSession  # noqa: PLC0415 - imports torch

        node, guard = opened.scope.node or "", functools.partial(self._guard, scope=opened.scope)
        group = guard("looking for other processes", lambda: group_of(model))
        model = unwrapped(model)
        view = self._kit.view(model, round_index=opened.scope.round, node=node, data=data, loss=loss)
        if not self._kit.preset.brief:
            tables = tables_of(self._kit, view)
            self._emission.layer_tables(tables)
            opened.tables = {rows: table.digest for rows, table in tables.items()}
        report = functools.partial(self._guard.report, scope=opened.scope)
        # A preset that measures nothing at steps installs no hooks, which the clock would need.
        opened.clock = self._clocks.begin(node) if self._profile and not self._kit.preset.brief else None
        tell = functools.partial(self._emission.record.event, opened.scope, "warning")
        ranks = None if group is None else functools.partial(RankWatch, group, model, tell)
        opened.session = ClientSession(self._kit, view, report, opened.clock, ranks)
        if self._profile:
            opened.memory = self._memory.begin(model, view.parameters, node, opened.scope.round)
        opened.recording = self._captures.begin(node, opened.scope.round, model, report)

    def end(self, opened: OpenClient | None, outcome: BaseException | None) -> None:
        """Close a client that `begin` returned; `outcome` is what its training raised."""

        def end(opened: OpenClient) -> None:
            self._open.pop(opened.scope.node or "", None)
            try:
                if outcome is not None:
                    self._guard.exception(opened.scope, "client.failed", outcome)
                self._finish(opened, failed=outcome is not None)
            finally:
                self._guard("taping a client", lambda: self._tape(opened, outcome), opened.scope)
                self._let_go(opened)
                self._scopes.leave(opened.scope, opened.token)

        if opened is not None and self._open.get(opened.scope.node or "") is opened:
            self._guard("closing a client", lambda: end(opened), opened.scope)
            self.settle(wait=False)

    def settle(self, *, wait: bool = True) -> None:
        """Report the clients that have ended and whose results were still on a device at that time.

        Unless `wait`, only those whose results have arrived.
        """
        self._unsettled.settle(wait=wait)

    def _tape(self, opened: OpenClient, outcome: BaseException | None) -> None:
        self._loop_tape.client_end(opened.scope.node or "", opened.results.metrics, outcome)

    def end_of(self, node: AnyName, outcome: BaseException | None = None) -> None:
        """Close the open client of that name, if there is one."""
        self.end(self._opened(node), outcome)

    def awaited(self) -> Awaited | None:
        """Return the clients that train in this process now; None if there are none."""
        since = {node: opened.at for node, opened in [*self._open.items()]} or self._stacks.since()
        return Awaited(TRAIN, since, asked=False) if since else None

    def _opened(self, node: AnyName) -> OpenClient | None:
        """Return the open client of that name; None if there is none, or the name is not valid."""
        name: str | None = self._guard("naming a client", lambda: self._scopes.client(node))
        return None if name is None else self._open.get(name)

    def end_all(self) -> None:
        """Close all clients and the stack."""
        for node in list(self._open):
            self.end_of(node)
        self.end_stack({})

    def _let_go(self, opened: OpenClient) -> None:
        """Remove everything that profiling has installed, however the client was closed."""
        if opened.memory is not None:
            self._memory.close(opened.memory)
        if opened.recording is not None:
            opened.recording.close()

    # -- clients that train as one batch ------------------------------------------------------------------------------

    def begin_stack(self, stack: Stack, *, inside: Scope | None = None) -> None:
        """Open clients that train as one batch."""
        self._stacks.begin(stack, inside)

    def step_stack(self, step: int, gradients: Tensor) -> None:
        """Measure before an optimiser step of the open stack."""
        self._stacks.step(step, gradients)

    def end_stack(self, failed: Mapping[Any, BaseException]) -> None:
        """Close the batch of clients."""
        self._stacks.end(failed)

    def abandon(self) -> None:
        """Close everything without recording anything."""
        self._unsettled.clear()
        for opened in self._open.values():
            if opened.session is not None:
                opened.session.abandon()
            self._let_go(opened)
            self._scopes.leave(opened.scope, opened.token)
        self._open.clear()
        self._stacks.abandon()

    def at(self, name: AnyName | None) -> Scope:
        """Return the scope of a node that the host names, as far as it is open here; for None, the caller's scope."""
        if name is None:
            return self._scopes.here()
        node = self._scopes.node(name)
        client = self._open.get(node)
        if client is not None:
            return client.scope
        stacked = self._stacks.at(node)
        if stacked is not None:
            return stacked
        outer = self._scopes.round or self._scopes.here()
        return replace(outer, node=node, group=None)

    def key(self, name: AnyName) -> Key:
        """Return the key of a node that the host names, with its group if it is open here."""
        node = self._scopes.node(name)
        if self._stacks.open is None and node not in self._open:
            return node, None
        return node, self.at(node).group

    def log(self, values: Mapping[str, float], node: AnyName | None = None) -> None:
        """Record the user's own metrics for a node, or else for the client or round that is open (or was open last)."""

        def emit() -> None:
            scope = self.at(node)
            client = self._open.get(scope.node or "")
            wrong = {}
            for name, value in values.items():
                try:
                    number = float(value.detach() if hasattr(value, "detach") else value)
                except (TypeError, ValueError, RuntimeError):
                    wrong[name] = repr(value)[:80]
                    continue
                self._emission.record.metric(scope, public_name(name), number)
                self._loop_tape.logged(scope.node, name, number)
                if client is not None:
                    client.logged.add(name)
                elif self._stacks.open is not None and scope.node is not None:
                    self._stacks.open.logged.add((scope.node, name))
            if wrong:
                listed = ", ".join(f"{name}={received}" for name, received in wrong.items())
                raise ConfigError(f"log() takes numbers, such as log(accuracy=0.9). These are not numbers: {listed}.")

        self._guard("log()", emit)

    def log_each(self, name: str, values: Mapping[Any, float]) -> None:
        """Record one metric of several nodes in one block."""
        by_key: dict[Key, float] = {}
        for node, value in values.items():
            key = self.key(node)
            by_key[key] = float(value)
            self._loop_tape.logged(key[0], name, float(value))
        if by_key:
            here = self._scopes.round or self._scopes.here()
            self._emission.emit(metric_of_nodes(here.run, here.round, time.time(), public_name(name), by_key))

    def warn_outside_round(self, node: AnyName) -> None:
        """Warn once that clients outside a round are not judged."""
        if self._warned_outside:
            return
        self._warned_outside = True
        text = (
            f"Client '{node}' was opened outside of a round: what is measured of it belongs to no round, and no "
            "detector looks at it. Open clients inside of `with monitor.round(number, global_model):`."
        )
        logger.warning("%s", text)
        self.event("warning", OUTSIDE_ROUND, text, node, None)

    def span(
        self,
        node: AnyName | None,
        name: str,
        began: float,
        seconds: float,
        parent: str | None,
        attributes: Mapping[str, Any],
    ) -> str:
        """Record a span on the host's own clock, which was 0 when the run began. Returns its id."""
        self._scopes.open_run()  # which sets the run's start
        scope, own = self.at(node), new_span_id()
        place = where(scope) if "group" not in attributes else replace(where(scope), group=str(attributes["group"]))
        kept = {key: value for key, value in attributes.items() if key != "group"}
        at = self._context.run.started + float(began)
        self._emission.emit(Span(place, at, name, float(seconds), scope.trace, own, parent or scope.span, kept))
        return own

    def event(self, level: str, name: str, message: str, node: AnyName | None, data: Mapping[str, Any] | None) -> None:
        """Record an event of a node. ConfigError for an unknown level."""
        if level not in LEVELS:
            raise ConfigError(unknown("level of an event", level, LEVELS))
        self._emission.record.event(self.at(node), level, name, bounded(message), data)

    def transfer(self, message: Sequence[Any]) -> tuple[Node, Node, int]:
        """Record a message between two nodes, as `HostObserver.transfer` takes it; returns the names and the bytes."""
        sender, receiver, size, raw, seconds, kind = self._scopes.message(*message)
        here = self._scopes.here()
        place = Where(here.run, here.round, receiver if sender == "server" else sender, None, None, here.group)
        self._emission.emit(Transfer(place, time.time(), sender, receiver, size, raw, seconds, kind))
        return sender, receiver, size

    def transfer_each(self, messages: Sequence[Sequence[Any]]) -> Transfers | None:
        """Record several messages like `transfer`, in one block, which is returned; None if there is none.

        A message that cannot be recorded is reported by itself.
        """
        try:
            rows = [self._scopes.message(*message) for message in messages]
        except Exception:  # noqa: BLE001 - because of some of them
            attempts = [
                self._guard("transfer()", functools.partial(self._scopes.message, *message)) for message in messages
            ]
            rows = [row for row in attempts if row is not None]
        if not rows:
            return None
        here, now, count = self._scopes.here(), time.time(), len(rows)
        senders, receivers, sizes, raw_sizes, seconds, kinds = zip(*rows, strict=True)
        nodes = [to if sender == "server" else sender for sender, to in zip(senders, receivers, strict=True)]
        place = (here.run, here.round, nodes, [here.group] * count, [now] * count)
        block = Transfers(*place, senders, receivers, sizes, raw_sizes, seconds, kinds)
        self._emission.emit(block)
        return block

    def _finish(self, opened: OpenClient, *, failed: bool) -> None:
        self._measure(opened, failed=failed)
        results, scope, attributes = opened.results, opened.scope, {**opened.attributes, "failed": failed}
        guard = functools.partial(self._guard, scope=scope)
        seconds = time.perf_counter() - opened.began
        results.take({"time.client": seconds})
        memory = opened.memory_metrics
        if memory is None:
            memory = guard("measuring memory", lambda: self._memory_of(opened, failed=failed)) or {}
        results.take(memory)
        logged = "loss" in opened.logged
        report = functools.partial(self._report, scope, (opened.at, seconds), attributes, results, logged=logged)
        if opened.pending is None:
            report()
        else:
            self._unsettled.append(scope, opened.pending, functools.partial(report, pending=opened.pending))
        turn_over()

    def _report(
        self,
        scope: Scope,
        when: tuple[float, float],
        attributes: Mapping[str, Any],
        results: Results,
        *,
        logged: bool,
        pending: PendingResults | None = None,
    ) -> None:
        """Emit what is known of a client that has ended; `when` is its start and its duration."""
        if pending is not None:
            self._take_results(scope.node or "", pending)
        _tell_loss(results, logged=logged)
        self._emission.results(scope, results)
        self._joined(self._emission.record.span(scope, CLIENT, *when, attributes), results)

    def _measure(self, opened: OpenClient, *, failed: bool) -> None:
        """Take the final measurements of a client's model, once."""
        session, opened.session = opened.session, None
        guard = functools.partial(self._guard, scope=opened.scope)  # one guard per part: no failure may lose the client
        guard("letting a model go", lambda: self._let_go(opened))  # before probes look through the model
        if session is None:
            return
        pending = session.stop()
        results = opened.results = pending.results
        results.tables = opened.tables
        if pending.awaits_device and self._defers():
            opened.pending = pending
        else:
            self._take_results(opened.scope.node or "", pending)
        cost = pending.cost
        opened.attributes = {"failed": failed}
        if self._profile and not self._kit.preset.brief:
            opened.attributes |= guard("telling what time went to", lambda: self._phases(opened, cost, results)) or {}
        memory = guard("measuring memory", lambda: self._memory_of(opened, session, failed=failed))
        opened.memory_metrics = memory or {}
        recorded = guard("recording operators", lambda: opened.recording and opened.recording.finish())
        if recorded is not None:
            results.remarks.append((OPERATORS, *recorded))

    def _take_results(self, node: Node, pending: PendingResults) -> None:
        """Collect the rest of a client's results, and its update; waits for a device."""
        update = pending.finish()
        started = time.perf_counter()
        self._sent(node, update.vector, update.rows, update.sketch)
        pending.results.take({"monitor.cost": pending.cost + time.perf_counter() - started})

    def _phases(self, opened: OpenClient, cost: float, results: Results) -> dict[str, Any]:
        """Return the attributes for a client's Span that describe its time; adds its throughput to the results."""
        seconds = time.perf_counter() - opened.began
        attributes = self._clocks.end(opened.scope.node or "", opened.clock, seconds, cost)
        training = seconds - sum(attributes.get("parts", {}).get(name, 0.0) for name in ("measure", "wait"))
        if attributes.get("samples") and training > 0:
            results.take({"throughput.samples": attributes["samples"] / training})
        if opened.clock is not None and opened.clock.error is not None:
            self._guard.report(opened.clock.error, "timing a model", opened.scope)
        return attributes

    def _memory_of(
        self, opened: OpenClient, session: ClientSession | None = None, *, failed: bool
    ) -> Mapping[str, float]:
        scope = opened.scope
        if opened.memory is None or session is None:
            resident = resident_bytes()
            return {} if resident is None else {"memory.resident": resident}
        own = (opened.memory, scope.node or "", scope.round, session.optimizers, session.held_bytes)
        memory = self._memory.end(*own, failed=failed)
        self._stacks.tell_growth(scope, memory.get("memory.resident"))
        return memory


def _tell_loss(results: Results, *, logged: bool) -> None:
    """Set `loss` for a client that logged none, to the loss measured on its own samples."""
    after = [value for name, value, _ in results.metrics if name == "fit.loss_after"]
    if after and not logged:
        results.take({"loss": after[0]})
