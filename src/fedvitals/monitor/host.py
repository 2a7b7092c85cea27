# SPDX-License-Identifier: Apache-2.0
"""The interface by which a host (a plain loop with its own transport, the lab, Flower) reports to a monitor."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fedvitals.errors import ConfigError, RecordError
from fedvitals.monitor.arrivals import REFUSED
from fedvitals.monitor.monitored_run import MonitoredRun
from fedvitals.monitor.open_clients import OpenClient
from fedvitals.monitor.progress import TRAIN, Awaited
from fedvitals.monitor.workers import WorkerObserver
from fedvitals.probes.backends import flatten_and_sum_each
from fedvitals.probes.results import Results
from fedvitals.probes.update_forms import as_layers, by_client, tables_of_update
from fedvitals.protocols import Node, TapeRecorder
from fedvitals.records import Action, AnyName, Record, as_round_index, printable
from fedvitals.resources.clocks import why_impossible
from fedvitals.resources.time_ledger import Exchange
from fedvitals.stack import Stack
from fedvitals.stats import Array
from fedvitals.transport.logs import bounded
from fedvitals.transport.privacy import SCALARS, TRUSTED_HOSTS, described_policy, policy_for
from fedvitals.transport.sender import Sender
from fedvitals.transport.traceparent import carried

if TYPE_CHECKING:
    from fedvitals.probes.array_difference import ArrayDifference


OF_SENDERS = ("accuracy", "local.accuracy", "local.loss", "loss")  # metrics with a meaning that a client may log
PHASES = {"model": TRAIN, "update": TRAIN, "evaluate": "evaluate"}  # phases of a round, by the kind of message
REASON_BYTES = 500  # limits the reason why telemetry is rejected, which may quote its sender


class HostObserver:
    """The `Observer` of a monitored run, with what a host needs beyond the protocol; failures are reported by `Guard`.

    `monitored`: the run; several observers may share it.
    """

    def __init__(self, monitored: MonitoredRun) -> None:
        self.monitored = monitored
        spine = monitored.spine
        self._context, self._scopes = spine.context, spine.scopes
        self._emission, self._guard = spine.emission, spine.guard
        self._rounds, self._clients, self._arrivals = monitored.rounds, monitored.clients, monitored.arrivals
        self._progress = monitored.progress

    # -- whose run it is ----------------------------------------------------------------------------------------------

    @property
    def attached(self) -> bool:
        """Whether a framework has attached itself to this monitor."""
        return self.monitored.has_closing_host

    def before_close(self, work: Callable[[], None]) -> None:
        """Register a framework's `work`, to be called before the run ends because a round may be open."""
        self.monitored.before_close(work)

    def describe(
        self, host: str, config: Mapping[str, Any] | None = None, *, trace: str | None = None, most: int = 4
    ) -> None:
        """Declare which framework runs the federation, before anything has happened, and what else is known of the run.

        Its default privacy then applies unless the user chose one. `most`: the highest privacy level it allows.
        `trace`: the trace id that all its machines know. ConfigError if the run has begun, or the user chose more.
        """
        privacy, cohort, tracebacks = self.monitored.chosen_privacy
        if privacy is not None and privacy > most:
            raise ConfigError(
                f"Monitor(privacy={privacy}) would reveal single clients, and this federation hides them (secure "
                f"aggregation or differential privacy): at most level {most} goes with it. Leave privacy= out."
            )
        level = min(policy_for(host, privacy, cohort, tracebacks).level, most)
        policy = replace(policy_for(host, level, cohort, tracebacks), hides=most < SCALARS)
        known = self.monitored.run.config
        ours = {**known["fedvitals"], **described_policy(policy)}
        self.monitored.lifecycle.set_host(host, {**known, **(config or {}), "fedvitals": ours}, policy, trace)

    def experiment(self, text: str) -> None:
        """Keep the lab's experiment with the run; ignored once that has begun or has one, or of another framework."""
        if self.monitored.run.host in TRUSTED_HOSTS and "experiment" not in self.monitored.run.config:
            with contextlib.suppress(ConfigError):
                self.describe("lab", {"experiment": text})

    @property
    def recorder(self) -> TapeRecorder | None:
        """Return the tape recorder, for hosts that give it their states; None if there is no tape."""
        self.monitored.lifecycle.open()
        self.monitored.tape.loop.leave_to_host()
        return self.monitored.tape.recorder

    def discard(self) -> None:
        """Close the open round and its clients without recording anything, because nothing happened in them."""
        self.monitored.discard_open()

    # -- the Observer protocol ----------------------------------------------------------------------------------------

    def round_begin(self, round_index: int, global_state: Any = None) -> None:
        """Open a round. `global_state`: the global model, if it is a module."""
        if self.monitored.has_ended():
            return

        def begin() -> None:
            if self._rounds.open is not None:
                unclosed = self._rounds.open.scope.round
                here, text = self._scopes.here(), f"Round {unclosed} was still open."
                self._emission.record.event(here, "warning", "round.unclosed", text)
                self.round_end(unclosed or 0)
            self._rounds.begin(round_index, _model(global_state))

        self._guard("opening a round", begin)
        opened = self._rounds.open
        if opened is not None:
            number = opened.scope.round or 0
            self._progress.begin_round(number)
            self._guard("taping a round", lambda: self.monitored.tape.loop.round_begin(number, global_state))

    def client_begin(
        self,
        node: AnyName,
        model: Any = None,
        optimizer: Any = None,  # noqa: ARG002 - found by its parameters; part of the protocol
        data: Any = None,
        group: AnyName | None = None,
        *,
        loss: Callable[..., Any] | None = None,
    ) -> None:
        """Open a client that trains in this process, like `Monitor.client`."""
        self.open_client(node, model, data, group, loss)

    def open_client(
        self, node: AnyName, model: Any, data: Any, group: AnyName | None, loss: Callable[..., Any] | None
    ) -> OpenClient | None:
        """Open a client of this process; None if it cannot be opened or the run was closed."""
        if self.monitored.has_ended():
            return None
        if self._rounds.open is None:
            self._guard("opening a client", lambda: self._clients.warn_outside_round(node))
        self._progress.moved(TRAIN)
        return self._clients.begin(node, model, data, group, loss, watch=functools.partial(self._watching, node))

    @contextlib.contextmanager
    def _watching(self, node: AnyName, model: Any, *, data: Any = None, loss: Any = None) -> Iterator[HostObserver]:
        with self._clients.watching(node, model, data, loss):
            yield self

    def stats(self, node: Any, family: str, array: Any) -> None:
        """Record statistics computed by the host: [layers, columns], or [clients, layers, columns] for many nodes."""
        self._guard("stats()", lambda: self._rounds.stats(node, family, array))

    def client_end(self, node: AnyName, outcome: BaseException | None = None) -> None:
        """Close a client that has trained; `outcome` is the exception that its training raised."""
        self._clients.end_of(node, outcome)
        self._progress.moved()

    def updates(self, round_index: int, updates: Mapping[Any, Any]) -> Sequence[Action]:
        """Measure what each client sent, as a sequence of tensors held by the host. Returns the clients to leave out.

        The `target` of an action is the client's name as text, even if the keys are integers: str(key) == target.
        """
        answers: list[Action] = []
        if self.monitored.has_ended():
            return ()
        self._progress.moved()
        self._clients.settle()  # the update that the host holds takes precedence over what the clients trained
        number: int | None = self._guard("updates()", lambda: as_round_index(round_index))
        if number is None:
            return ()
        named = self._guard("updates()", lambda: self._scopes.by_client(updates)) or {}
        attempt = functools.partial(self._guard.attempt, here=self._clients.at)
        for node, vector, rows in self._guard("updates()", lambda: flatten_and_sum_each(named, attempt)) or ():
            try:
                answers += self._take_update(number, node, vector, rows)
            except Exception as error:  # noqa: BLE001 - of this client: the others are taken
                self._guard.report(error, "updates()", self._clients.at(node), each=True)
        excluded = [action.target for action in answers if action.target is not None]
        self._guard("taping updates", lambda: self.monitored.tape.loop.sent(number, named, excluded))
        return tuple(answers)

    def any_updates(self, round_index: int, updates: Mapping[Any, Any]) -> Sequence[Action]:
        """Like `updates`, in any of the forms that `Monitor.updates` takes; unknown layers are learnt from these."""
        if self.monitored.has_ended():
            return ()

        def read(update: Any) -> Sequence[Any]:
            known = [t for t in reversed(self._context.own_tables.values()) if t.rows == "parameter"]
            layers = as_layers(update, known)
            if not known and not self.monitored.kit.preset.brief:
                self._emission.layer_tables(tables_of_update(update, layers))
            return layers

        attempt = functools.partial(self._guard.attempt, here=self._clients.at)
        by_node = self._guard("updates()", lambda: by_client(updates)) or {}
        layers = {node: attempt("updates()", functools.partial(read, update), node) for node, update in by_node.items()}
        return self.updates(round_index, {node: own for node, own in layers.items() if own is not None})

    def update_difference(
        self, round_index: int, node: AnyName, difference: ArrayDifference, clients: int
    ) -> Sequence[Action]:
        """Measure the update of one of `clients` clients, where the host holds arrays. Returns whether to leave it out.

        If memory has no room for the updates of that many clients, the difference is measured piece by piece.
        """
        if self.monitored.kit.updates.has_room(difference.nbytes, clients):
            return self.updates(round_index, {node: difference.tensors()})

        self._clients.settle()

        def take() -> list[Action]:
            rows, sketch = difference.measure()
            return self._take_update(as_round_index(round_index), self._scopes.client(node), None, rows, sketch)

        return self._guard("updates()", take, self._clients.at(node)) or ()

    def _take_update(self, round_index: int, node: Node, vector: Any, rows: Array, *sketch: Any) -> list[Action]:
        """Add a measured update to its round, and return the actions that follow."""
        self.monitored.kit.updates.add(node, vector, rows, *sketch)
        if self._rounds.open is None:
            scope = replace(self._scopes.here(), node=node)
            self._emission.results(scope, Results(matrices=[("update", rows, None)]))
        else:
            self._rounds.open.sent[node] = rows  # recorded at the round's end, unless the client reported the same
        actions = [
            self.monitored.care.unusable(round_index, node, issue, why)
            for issue, why in (self.monitored.unusable(rows) if self.monitored.cure.automatic else ())
        ]
        return [action for action in actions if action is not None]

    def prescribed(self, round_index: int) -> Sequence[Action]:
        """Return the corrections in force in the coming round.

        Waits for the detectors if anything may be done unasked.
        """
        self.monitored.asked()
        if not self.monitored.cure.automatic:
            return ()
        self.monitored.lifecycle.flush(30.0, own=True)
        return self._guard("prescribing", lambda: self.monitored.care.prescribed(as_round_index(round_index))) or ()

    @property
    def corrects_at_once(self) -> bool:
        """Whether `updates` may return actions; if so, a host waits for it before it uses the updates."""
        return self.monitored.cure.automatic

    def refused(self, action: Action, why: str) -> None:
        """Note that the host cannot apply a correction; another one is tried instead."""
        self._guard("refused()", lambda: self.monitored.care.refused(action, why))

    def log(self, values: Mapping[str, float] | None = None, /, *, node: AnyName | None = None, **more: float) -> None:
        """Record metrics of a node; by default of the client or round that is open, or was open last."""
        if not self.monitored.has_ended():
            self._progress.moved()
            self._guard("log()", lambda: self._clients.log({**(values or {}), **more}, node))

    def log_each(self, name: str, values: Mapping[Any, float]) -> None:
        """Record one metric of several nodes, like `log` for each of them but in one block."""
        self._guard("log()", lambda: self._clients.log_each(name, values))

    def transfer(
        self,
        sender: AnyName,
        receiver: AnyName,
        bytes: int,  # noqa: A002 - the unit is the name
        raw_bytes: int | None = None,
        seconds: float | None = None,
        kind: str = "update",
    ) -> None:
        """Record a message between two nodes. `raw_bytes`: its size before compression."""

        def emit() -> None:
            message = self._clients.transfer((sender, receiver, bytes, raw_bytes, seconds, kind))
            if self._rounds.open is not None:
                self._rounds.open.cohort.count_traffic(message[:1], message[1:2], message[2:])

        self._progress.moved(PHASES.get(kind))
        self._guard("transfer()", emit)

    def transfer_each(self, messages: Sequence[tuple[AnyName, AnyName, int, int | None, float | None, str]]) -> None:
        """Record several messages, each with all the parameters of `transfer`."""

        def emit() -> None:
            block = self._clients.transfer_each(messages)
            if block is not None and self._rounds.open is not None:
                self._rounds.open.cohort.count_traffic(block.senders, block.receivers, block.sizes)

        if messages:
            self._progress.moved()
            self._guard("transfer()", emit)

    def truth(self, fault: Mapping[str, Any]) -> None:
        """Record a fault that the host planted on purpose, for trials. Detectors never see it."""
        self._guard("truth()", lambda: self._emission.record.truth(self._context.run.id, fault))

    def span(
        self, node: AnyName | None, name: str, began: float, seconds: float, *, parent: str | None = None, **more: Any
    ) -> str | None:
        """Record a span on the host's clock, `began` seconds after the run began.

        `clock="virtual"` for simulated time.
        """
        record = functools.partial(self._clients.span, node, name, began, seconds, parent, more)
        own: str | None = self._guard("span()", record)
        return own

    def spent(self, part: str, seconds: float, node: AnyName = "server") -> None:
        """Record that a node spent seconds of the open round on a part (see `time_parts`); repeated calls add up."""
        if self.monitored.ledger is not None:
            ledger = self.monitored.ledger
            self._guard("spent()", lambda: ledger.spent(part, seconds, self._scopes.node(node)))

    @contextlib.contextmanager
    def part(self, name: str, node: AnyName = "server") -> Iterator[None]:
        """Context that records the time a node spends on a part of the round (see `time_parts`)."""
        began = time.perf_counter()
        try:
            with self._progress.part(name):
                yield
        finally:
            self.spent(name, time.perf_counter() - began, node)

    def awaits(self, source: Callable[[], Awaited | None]) -> None:
        """Register a `source` that returns whom the server is waiting for; it is called when a round stalls.

        It runs on a thread of its own and must not take a lock.
        """
        self.monitored.watch.sources.append(source)

    def exchange(
        self,
        node: AnyName,
        sent: float,
        received: float,
        replied: float,
        returned: float,
        *,
        started: float | None = None,
        span: str | None = None,
    ) -> None:
        """Record a completed exchange with a remote client, before `absorb`. Times since the epoch, on each own clock.

        `started`: of the process that took the message there. `span`: the id by which the client knows its journey. If
        the client's times are impossible because its clock was set meanwhile, they are ignored and an event
        `client.clock` says so. For a client that reports no times: `received=sent, replied=returned`.
        """
        ledger = self.monitored.ledger

        def take() -> None:
            assert ledger is not None  # noqa: S101 - asked below
            exchange = Exchange(sent, received, replied, returned, started, span)
            why = why_impossible(sent, received, replied, returned)
            if why is not None and sent <= returned:
                exchange = Exchange(sent, sent, returned, returned, None, span)
                text = f"The clock of {node}, or that of the server, was set while it worked: {why}."
                text += " Its times of this exchange are not used."
                self._clients.event("info", "client.clock", text, node, None)
            error = ledger.exchange(client := self._scopes.client(node), exchange).beyond_doubt
            if error:
                self._emission.record.metric(self._clients.at(client), "time.clock_error", error)

        if ledger is not None:
            self._guard("exchange()", take, self._clients.at(node))

    def event(
        self, level: str, name: str, message: str, *, node: AnyName | None = None, data: Mapping[str, Any] | None = None
    ) -> None:
        """Record an event, of a node or of the round: a level («info», «warning» …), a name and a sentence."""
        self._guard("event()", lambda: self._clients.event(level, name, message, node, data))

    def guarded(self, doing: str, work: Callable[[], Any], node: AnyName | None = None) -> Any:
        """Return the result of a host's own work, or None if it raised, which is reported once per cause and node."""
        try:
            return work()
        except Exception as error:  # noqa: BLE001 - the federation goes on, whatever happens to us
            self.monitored.lifecycle.open()  # reporting does not open a run that has not begun
            self._guard.report(error, doing, self._clients.at(node), each=True)
            return None

    def stack_begin(self, stack: Stack) -> None:
        """Open clients that train as one batch in this process (`WorkerObserver` does the same elsewhere)."""
        self._progress.moved(TRAIN)
        self._clients.begin_stack(stack)

    def stack_step(self, step: int, gradients: Any, losses: Any) -> None:  # noqa: ARG002 - part of the protocol
        """Measure before an optimiser step: the clients' gradients, [clients, weights], valid only during the call."""
        self._progress.moved()
        self._clients.step_stack(step, gradients)

    def stack_end(self, failed: Mapping[Any, BaseException]) -> None:
        """Close the batch of clients; `failed`: the clients that failed, and why."""
        self._clients.end_stack(failed)
        self._progress.moved()

    def headers(self, node: AnyName) -> dict[str, str]:
        """Return the W3C trace context for a request to a client.

        `WorkerObserver.inside` then assigns the client's records to this round. Texts by name, `traceparent` and
        `baggage`, for whatever the host's messages can hold.
        """
        return self._guard("headers()", lambda: carried(self._scopes.here(), node=self._scopes.client(node))) or {}

    def admit(self, records: Sequence[Record], sender: AnyName | None = None, size: int = 0) -> tuple[int, str]:
        """Admit records that came by another route than `absorb`, such as `hosts.otlp.receiver`.

        `sender`: the node that sent them, only believed about itself; None: a source trusted with the whole run.
        `size`: bytes of their message. Returns how many records were rejected, and why the first of them was.
        """
        if sender is None:
            self._guard("admit()", lambda: self._emission.admit(records))
            return 0, ""

        def take() -> tuple[int, str]:
            own = self._sender_of(sender)
            refused, why = len(records), ""
            try:
                refused, why = self._arrivals.take_records(records, own, size)
            except RecordError as error:
                why = str(error)
            if refused:
                self._report_refusal(own, f"{refused} of {len(records)} records; the first: {why}")
            return refused, why

        return self._guard("admit()", take) or (0, "")

    def log_of_sender(self, values: Mapping[str, float], node: AnyName) -> str:
        """Log metrics that a client sent of its own accord, under names of its own; return what was left out, and why.

        Returns an empty string if nothing was left out. `loss`, `accuracy` and `local.*` keep their names; only the
        server may log other names that have a meaning here.
        """
        named = {
            name if name in OF_SENDERS else f"user.{printable(name).removeprefix('user.')}": value
            for name, value in values.items()
        }
        kept, left_out = self._arrivals.within_names(client := self._scopes.client(node), named)
        if kept:
            self.log(kept, node=client)
        return left_out

    def _sender_of(self, sender: Sender | AnyName) -> Sender:
        own = sender if isinstance(sender, Sender) else Sender(self._scopes.client(sender), self._context.run.id)
        return own.counted_to(self._scopes.last_round)

    def _of_sender(self, sender: Sender, take: Callable[[], None]) -> None:
        """Accept what a sender delivers, or report that it was rejected and why."""
        try:
            take()
        except RecordError as error:
            self._report_refusal(sender, str(error))

    def _report_refusal(self, sender: Sender, why: str) -> None:
        if self._arrivals.refuse(sender.node):
            text = bounded(f"Telemetry of '{sender.node}' is refused: {why}", REASON_BYTES)
            self.event("warning", REFUSED, text, node=sender.node, data={"messages": 1})

    def for_worker(self) -> WorkerObserver:
        """Return an observer that can be sent to a child process, and watches clients there (see `worker`)."""
        return self._arrivals.observer()

    def expect(self, *nodes: AnyName) -> None:
        """Declare clients that train in workers in this round; those whose records never arrive are reported lost."""
        self._progress.moved(TRAIN)
        self._guard("expect()", lambda: self._arrivals.expect(nodes))

    def absorb(self, payload: bytes, sender: Sender | AnyName | None = None) -> None:
        """Accept what a worker's `payload()` returned, inside its round. Anything invalid is reported and counted.

        `sender`: the client that sent it, where payloads come from machines that may lie: it may only report on itself,
        and on no round that has not begun.
        """
        cohort = None if self._rounds.open is None else self._rounds.open.cohort
        own = None if sender is None else self._sender_of(sender)
        take = functools.partial(self._arrivals.take, payload, cohort, own)
        self._progress.moved()
        if own is None:
            self._guard("absorb()", take)
        else:
            self._guard("absorb()", lambda: self._of_sender(own, take), self._clients.at(own.node))

    def round_end(
        self,
        round_index: int,  # noqa: ARG002 - the one that is open
        global_state: Any = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Close the open round. `global_state`: the new global model, if it is a module."""
        self.monitored.end_round(_model(global_state), metrics, global_state)


def _model(state: Any) -> Any:
    """Return the host's global model without a DDP wrapper; None if it is not a module."""
    own = state.module if type(state).__name__ == "DistributedDataParallel" else state
    return own if hasattr(own, "named_parameters") else None
