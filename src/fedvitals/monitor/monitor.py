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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from fedvitals.diagnosis.corrections.correction_trials import CorrectionTrials
from fedvitals.diagnosis.corrections.policy import CorrectionPolicy, correction_policy_of
from fedvitals.diagnosis.evidence.unusable_updates import UnusableUpdateCheck
from fedvitals.diagnosis.examine import STANDARD, choose_detectors
from fedvitals.diagnosis.live_detectors import Findings
from fedvitals.errors import ConfigError, RecordError
from fedvitals.monitor.arrivals import Arrivals
from fedvitals.monitor.chart import Chart
from fedvitals.monitor.clients import Clients
from fedvitals.monitor.lifecycle import check_parts, close_at_exit
from fedvitals.monitor.rounds import Rounds
from fedvitals.monitor.workers import WorkerObserver
from fedvitals.probes.backends import instruments, measured_apart
from fedvitals.probes.results import Results
from fedvitals.protocols import Detector, Node, Recorder, Sink, Stack
from fedvitals.records import Action, AnyName, Record, Run, Truth, Where, as_round_index, node_name
from fedvitals.resources.capture import Capture
from fedvitals.resources.time_ledger import Exchange, Ledger
from fedvitals.scope import Scope
from fedvitals.stats import Array
from fedvitals.transport.privacy import LEAST_CLIENTS, SCALARS, described_policy, policy_for
from fedvitals.transport.sender import Sender
from fedvitals.transport.traceparent import carried


class Monitor:
    """Watches one run. Opens nothing until its first event; `close()`, or leaving a `with`, ends the run.

    `store`: a file or `postgresql://...`; None leaves records to `sinks` alone. `run`: a name for people, which several
    runs may share. `probes`: «light», «standard», «deep», or a list with probes of your own. `detectors`: «standard», a
    list of your own (which may have "standard" in it), or () for none; `false_alarms`: how many per 100 healthy rounds
    you allow. `privacy`: from 0 (timings only) to 4, by
    default 3, in a deployment 2; `cohort`: the fewest clients whose sum may be told from level 1 on; `tracebacks`: on
    from level 3, in a deployment off: see docs/metrics.md. `update_memory`: bytes that may be held for exact cosines
    between updates. `profile`: whether to tell what the time and memory of rounds and clients went to
    (docs/profile.md); `machine`: whether to sample the machine, where psutil is there; `capture`: see there. `tape`:
    a `fv.Tape()`, from which the run can be replayed: see docs/replay.md.
    `cure`: what may be done about findings, «off», «suggest» or «auto», for all or by issue, family or
    kind of correction, {"NAN_UPDATE": "auto"}: see docs/cure.md. `strict` raises what is otherwise counted: for tests.
    `id`: of a run that the store may have already, which is then continued.
    """

    def __init__(
        self,
        store: str | os.PathLike[str] | None = "runs.db",
        run: str = "run",
        *,
        probes: Any = "standard",
        detectors: str | Sequence[Detector | str] = STANDARD,
        false_alarms: float = 1.0,
        cure: str | Mapping[str, str] | CorrectionPolicy = "suggest",
        sinks: Sequence[Sink] = (),
        privacy: int | None = None,
        cohort: int = LEAST_CLIENTS,
        tracebacks: bool | None = None,
        config: Mapping[str, Any] | None = None,
        seed: int | None = None,
        topology: str | None = None,
        host: str = "torch",
        profile: bool = True,
        machine: bool = True,
        capture: Capture | None = None,
        tape: Any = None,
        update_memory: int = 512 << 20,
        strict: bool = False,
        id: str | None = None,  # noqa: A002 - the domain's word
    ) -> None:
        check_parts(sinks, capture, tape)
        self._wanted = (privacy, cohort, tracebacks)  # of privacy
        self._policy = policy_for(host, *self._wanted)
        self._kit = instruments(probes, update_memory)
        self._detectors = choose_detectors(detectors, false_alarms)
        self._cure = correction_policy_of(cure)
        described = Run(
            id=id or f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(3).hex()}",
            name=run,
            host=host,
            topology=topology,
            config={**(config or {}), "fedvitals": self._settings(false_alarms)},
            seed=seed,
        )
        own: dict[str, Any] = {
            "policy": self._policy, "strict": strict, "again": id is not None, "profile": profile
        }  # fmt: skip
        self._chart = Chart(described, store, tuple(sinks), self._detectors, tape=tape, **own)
        self._record, self._guard = self._chart.record, self._chart.guard
        self._lock = threading.Lock()
        self._closed = False
        self._asked = False  # whether the host has ever asked what to do
        self.ending: Callable[[], None] = lambda: None  # told before the run ends: a host that has a round open
        self._ledger = Ledger() if profile else None
        self._arrivals = Arrivals(self._chart, self._kit, self._policy, self._ledger, capture)
        self._rounds = Rounds(self._chart, self._kit, self._arrivals, self._ledger, self._policy.cohort)
        joining = (self._kit.updates.add, self._rounds.joined)
        self._clients = Clients(self._chart, lambda: self._kit, *joining, profile=profile, capture=capture)
        if machine:
            self._chart.watch_machine()
        self._care = CorrectionTrials(described.id, self._cure, self._chart.emit, self._chart.history)
        self._chart.heard = self._care.add_finding
        self._unusable = UnusableUpdateCheck()
        self._chart.owner = self
        close_at_exit(self)

    def _settings(self, false_alarms: float) -> dict[str, Any]:
        """What the run's configuration says of us."""
        ours = {"probes": self._kit.preset.name, "detectors": len(self._detectors), "cure": self._cure.described()}
        return {**ours, "false_alarms": false_alarms, **described_policy(self._policy)}

    def hosted(
        self, host: str, config: Mapping[str, Any] | None = None, *, trace: str | None = None, most: int = 4
    ) -> None:
        """A framework takes the monitor in, before anything happened: its name, and what else is known of the run.

        From here on the privacy of such a host holds, where the user chose none. `most`: the highest level that it
        allows. `trace`: the id that all its machines know.
        """
        privacy, cohort, tracebacks = self._wanted
        if privacy is not None and privacy > most:
            raise ConfigError(
                f"Monitor(privacy={privacy}) would tell of single clients, and this federation hides them (secure "
                f"aggregation or differential privacy): at most level {most} goes with it. Leave privacy= out."
            )
        level = min(policy_for(host, privacy).level, most)
        self._policy = replace(policy_for(host, level, cohort, tracebacks), hides=most < SCALARS)
        ours = {**self.run.config["fedvitals"], **described_policy(self._policy)}
        self._chart.hosted(host, {**self.run.config, **(config or {}), "fedvitals": ours}, self._policy, trace)
        self._arrivals.policy = self._policy

    # -- what people write --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def round(self, number: int, global_model: Any = None) -> Iterator[Monitor]:
        """One round of the federation, counted from 0 or 1; what is logged or raised inside belongs to it."""
        self.round_begin(number, global_model)
        try:
            yield self
        except BaseException as error:
            self._chart.exception(self._chart.here(), "round.failed", error)
            self._chart.loop.failed(error)
            raise
        finally:
            self.round_end(number, global_model)

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
    ) -> Iterator[Monitor]:
        """One client's local training: hooks on, and off again at the end.

        Only name and model are needed; a name is taken as its text, so 3 and "3" are one client. `data` (a
        DataLoader, a Dataset, a pair of tensors or a list of batches) and
        `loss` add how well the model suits the client's own samples. The optimiser is found by its parameters.
        """
        with self._clients.scope(self._clients.begin(name, model, data, group, loss)):
            yield self

    @contextlib.contextmanager
    def edge(self, name: AnyName, model: Any = None) -> Iterator[Monitor]:
        """An edge node, cluster or ring: the clients inside belong to it (it is their `group`)."""
        with self._rounds.edge(name, model):
            yield self

    @contextlib.contextmanager
    def part(self, name: str, node: AnyName = "server") -> Iterator[None]:
        """A stretch of the round that goes to «aggregate», «evaluate», ... (see docs/profile.md)."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.spent(name, time.perf_counter() - began, node)

    def log(self, values: Mapping[str, float] | None = None, /, *, node: AnyName | None = None, **more: float) -> None:
        """Metrics of your own, for a node, or for the client or the round that is open (or was open last)."""
        self._guard("log()", lambda: self._clients.log({**(values or {}), **more}, node))

    def findings(self) -> Findings:
        """What the detectors have found so far, worst first. Waits until they have seen everything."""
        return self._chart.findings(complete=self.flush() or self._chart.flush(1.0, own=True))

    def flush(self, timeout: float = 30.0) -> bool:
        """Wait until everything so far is written. False: not in time, or something was lost."""
        return self._chart.flush(timeout)

    def discard(self) -> None:
        """Close the open round and its clients without a word: nothing happened in them."""
        self._clients.abandon()
        self._arrivals.forget()
        opened = self._rounds.close()
        if opened is not None:
            self._chart.leave(opened.scope, opened.token)

    def close(self) -> None:
        """End the run: scopes closed, records written, hooks and threads gone. A second call does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._guard("ending a host's round", self.ending)
        self._clients.end_all()
        if self._rounds.open is not None:
            self.round_end(self._rounds.open.scope.round or 0)
        self._chart.close()

    @property
    def recorder(self) -> Recorder | None:
        """The tape, for hosts that hand it their states."""
        self._chart.open()
        self._chart.loop.leave_to_host()
        return self._chart.recorder

    @property
    def run(self) -> Run:
        """What is known of the run itself: id, name, configuration, versions."""
        return self._chart.run

    @property
    def file(self) -> Path | None:
        """The store's file; None where it is a database, or there is none."""
        return self._chart.file

    @property
    def lost(self) -> int:
        """Records lost so far."""
        return self._chart.lost

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the Observer protocol ----------------------------------------------------------------------------------------

    def round_begin(self, round_index: int, global_state: Any = None) -> None:
        def begin() -> None:
            if self._rounds.open is not None:
                unclosed = self._rounds.open.scope.round
                self._record.event(self._chart.here(), "warning", "round.unclosed", f"Round {unclosed} was still open.")
                self.round_end(unclosed or 0)
            self._rounds.begin(round_index, _model(global_state))

        self._guard("opening a round", begin)
        opened = self._rounds.open
        if opened is not None:
            number = opened.scope.round or 0
            self._guard("taping a round", lambda: self._chart.loop.round_begin(number, global_state))

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
        self._clients.begin(node, model, data, group, loss)

    def stats(self, node: Any, family: str, array: Any) -> None:
        """Statistics that the host computed itself: [layers, columns], or [clients, layers, columns] for many nodes."""
        self._guard("stats()", lambda: self._rounds.stats(node, family, array))

    def client_end(self, node: AnyName, outcome: BaseException | None = None) -> None:
        self._clients.end_of(node, outcome)

    def updates(self, round_index: int, updates: Mapping[Any, Any]) -> Sequence[Action]:
        """What each client sends, where the host holds it: a sequence of tensors. Gives whom to leave out.

        The `target` of an action is the client's name as text, also where the keys are integers: str(key) == target.
        """
        answers: list[Action] = []
        number: int | None = self._guard("updates()", lambda: as_round_index(round_index))
        if number is None:
            return ()

        def take(node: Node, vector: Any, rows: Array) -> None:
            self._kit.updates.add(node, vector, rows)
            if self._rounds.open is None:
                self._chart.tell(replace(self._chart.here(), node=node), Results(matrices=[("update", rows, None)]))
            else:
                self._rounds.open.sent[node] = rows  # told at the round's end, unless the client itself told the same
            for issue, why in self._unusable(rows) if self._cure.automatic else ():
                action = self._care.unusable(number, node, issue, why)
                answers.extend([] if action is None else [action])

        named = self._guard("updates()", lambda: {node_name(node): sent for node, sent in updates.items()}) or {}
        attempt = functools.partial(self._chart.attempt, here=self._clients.at)
        for node, vector, rows in self._guard("updates()", lambda: measured_apart(named, attempt)) or ():
            attempt("updates()", functools.partial(take, node, vector, rows), node)
        excluded = [action.target for action in answers if action.target is not None]
        self._guard("taping updates", lambda: self._chart.loop.sent(number, named, excluded))
        return tuple(answers)

    def prescribed(self, round_index: int) -> Sequence[Action]:
        """The corrections in force in the coming round. Waits for the detectors, if anything may be done unasked."""
        self._asked = True
        if not self._cure.automatic:
            return ()
        self._chart.flush(30.0, own=True)
        return self._guard("prescribing", lambda: self._care.prescribed(as_round_index(round_index))) or ()

    def refused(self, action: Action, why: str) -> None:
        """The host cannot apply a correction: noted, and another one gets its turn."""
        self._guard("refused()", lambda: self._care.refused(action, why))

    def transfer(
        self,
        sender: AnyName,
        receiver: AnyName,
        bytes: int,  # noqa: A002 - the unit is the name
        raw_bytes: int | None = None,
        seconds: float | None = None,
        kind: str = "update",
    ) -> None:
        def emit() -> None:
            ends = self._clients.transfer(sender, receiver, bytes, raw_bytes, seconds, kind)
            if self._rounds.open is not None:
                self._rounds.open.cohort.count_traffic(*ends, int(bytes))

        self._guard("transfer()", emit)

    def truth(self, fault: Mapping[str, Any]) -> None:
        """Keep what the host made ill on purpose, for trials. Detectors get no word of it."""

        def emit() -> None:
            told = {"nodes": (), "since": 0, "until": None, **fault}
            kind, nodes, since, until = (told.pop(name) for name in ("kind", "nodes", "since", "until"))
            nodes = nodes if isinstance(nodes, Iterable) and not isinstance(nodes, str) else (nodes,)
            nodes = tuple(map(node_name, nodes))
            self._chart.emit(Truth(Where(self.run.id), time.time(), kind, nodes, since, until, told))

        self._guard("truth()", emit)

    def span(
        self,
        node: AnyName | None,
        name: str,
        began: float,
        seconds: float,
        *,
        parent: str | None = None,
        **attributes: Any,
    ) -> str | None:
        """A stretch of time on the host's clock: `began` seconds after the run did. `clock="virtual"` if it is none."""
        own: str | None = self._guard(
            "span()", lambda: self._clients.span(node, name, began, seconds, parent, attributes)
        )
        return own

    def spent(self, part: str, seconds: float, node: AnyName = "server") -> None:
        """A node spent so many seconds of the open round on a part (see `time_parts`); what is told adds up."""
        if self._ledger is not None:
            ledger = self._ledger
            self._guard("spent()", lambda: ledger.spent(part, seconds, node_name(node)))

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
        """A client elsewhere was asked and has answered; before `absorb`. Times since the epoch, of the two clocks.

        `started`: of the process that took the message there. `span`: the id by which the client knows its journey.
        """
        ledger = self._ledger

        def take() -> None:
            assert ledger is not None  # noqa: S101 - asked below
            error = ledger.exchange(
                node_name(node), Exchange(sent, received, replied, returned, started, span)
            ).beyond_doubt
            if error:
                self._record.metric(self._clients.at(node), "time.clock_error", error)

        if ledger is not None:
            self._guard("exchange()", take)

    def event(
        self, level: str, name: str, message: str, *, node: AnyName | None = None, data: Mapping[str, Any] | None = None
    ) -> None:
        """Something that happened, at a node or in the round: level «info», «warning»..., a name, and a sentence."""
        self._guard("event()", lambda: self._clients.event(level, name, message, node, data))

    def stack_begin(self, stack: Stack) -> None:
        """Clients begin to train as one batch, in this process (see `WorkerObserver`, which is the same elsewhere)."""
        self._clients.begin_stack(stack)

    def stack_step(self, step: int, gradients: Any, losses: Any) -> None:  # noqa: ARG002 - part of the protocol
        self._clients.step_stack(step, gradients)

    def stack_end(self, failed: Mapping[Any, BaseException]) -> None:
        self._clients.end_stack(failed)

    def headers(self, node: AnyName) -> dict[str, str]:
        """W3C trace context for the message that asks a client: `WorkerObserver.inside` makes its records the round's.

        Texts by name, `traceparent` and `baggage`, for whatever the host's messages can hold.
        """
        return self._guard("headers()", lambda: carried(self._chart.here(), node=node_name(node))) or {}

    def admit(self, records: Sequence[Record]) -> None:
        """Records that came another way than by `absorb`, as by `hosts.otlp.receiver`."""
        self._guard("admit()", lambda: self._chart.admit(records))

    def for_worker(self) -> WorkerObserver:
        """An observer that can be sent to a child process, and watches clients there (see `worker`)."""
        return self._arrivals.observer()

    def expect(self, *nodes: AnyName) -> None:
        """These clients train in workers in this round: whoever's records do not come home is told as lost."""
        self._guard("expect()", lambda: self._arrivals.expect(nodes))

    def absorb(self, payload: bytes, sender: Sender | None = None) -> None:
        """Take what a worker's `payload()` gave, inside its round. What is no such thing is told and counted.

        `sender`: where payloads come from machines that may lie, who it is: they may tell of nobody else.
        """
        cohort = None if self._rounds.open is None else self._rounds.open.cohort

        def take() -> None:
            try:
                self._arrivals.take(payload, cohort, sender)
            except RecordError as error:
                if sender is None:
                    raise
                text, counted = f"Telemetry is refused: {error}", {"records": 1}
                self.event("warning", "telemetry.refused", text, node=sender.node, data=counted)

        self._guard("absorb()", take, None if sender is None else self._clients.at(sender.node))

    def round_end(
        self,
        round_index: int,  # noqa: ARG002 - the one that is open
        global_state: Any = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        opened = self._rounds.close()
        if opened is None:
            return

        def end() -> None:
            self._rounds.finish(opened, _model(global_state), metrics or {})
            self._tell_unasked(opened.scope)

        number = opened.scope.round or 0
        self._guard(f"closing round {number}", end)
        self._guard("taping a round", lambda: self._chart.loop.round_end(number, global_state, metrics or {}))

    def _tell_unasked(self, scope: Scope) -> None:
        """Once: corrections are the host's to apply, and a plain loop that does not ask for them applies none."""
        if self._cure.automatic and not self._asked:
            self._asked = True
            why = "Nothing is corrected by itself: this host does not ask what to do."
            cure = 'Call monitor.prescribed(round) before each round, or take cure="suggest".'
            self._record.event(scope, "warning", "cure.unasked", f"{why} {cure}")


def _model(state: Any) -> Any:
    """The host's global model, if that is what it gave: a module."""
    return state if hasattr(state, "named_parameters") else None
