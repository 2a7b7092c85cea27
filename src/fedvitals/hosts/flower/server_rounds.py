# SPDX-License-Identifier: Apache-2.0
"""Report a Flower server's rounds to a monitor: which clients were asked, which replied, when, and with what.

Clients are identified by Flower's node ids. Nothing here may stop or change the run: a failure is reported once, and
the reply is passed on unchanged.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from flwr.app import ArrayRecord, Message

from fedvitals.errors import text_of
from fedvitals.hosts import array_models, participation, update_guard
from fedvitals.hosts.background_work import BackgroundWork
from fedvitals.hosts.flower import arrays, corrections, guard, protection, replies
from fedvitals.hosts.flower.connections import NodeConnections
from fedvitals.hosts.flower.corrections import FlowerCorrections
from fedvitals.hosts.flower.known_models import KnownModels
from fedvitals.hosts.flower.misfits import ReplyChecks
from fedvitals.hosts.flower.protection import SecureRound
from fedvitals.hosts.flower.reply_envelope import bytes_of, node_name, round_of_message
from fedvitals.hosts.flower.tape.server import ServerTape
from fedvitals.hosts.metric_names import as_train_metrics, numbers_of, with_known_names
from fedvitals.hosts.participation import PhaseParticipation
from fedvitals.monitor.monitor import Monitor
from fedvitals.records import Action
from fedvitals.resources.node_spans import covered

TRAIN, EVALUATE = "train", "evaluate"
UNANSWERED_KEPT = 10_000  # unanswered messages remembered


@dataclass(slots=True)
class ClientRequest:
    """A message to a client that has not been answered."""

    message: Message
    node: str
    phase: str
    round_index: int
    sent: float
    size: int
    busy: bool = False  # the node still owed an answer when it was asked


@dataclass(slots=True)
class HandlerTimes:
    """The time a client's handler took in a round, over all its messages.

    Secure aggregation asks a client several times. `cpu`: processor seconds; `seconds`: by the client's clock.
    """

    count: int = 0
    cpu: float = 0.0
    seconds: float = 0.0

    def add(self, cpu: float, seconds: float) -> None:
        """Add one message."""
        self.count += 1
        self.cpu += cpu
        self.seconds += max(0.0, seconds)


class ServerRounds:
    """Follows a server's rounds. `weight`: the metric by which clients are weighted.

    `hidden`: the reason why single clients must not be reported.
    """

    def __init__(
        self,
        monitor: Monitor,
        *,
        guard_mode: str = update_guard.REPORT,
        layers: Sequence[str] | None = None,
        weight: str = "num-examples",
        hidden: str | None = None,
    ) -> None:
        self.monitor, self.guard_mode, self.layers = monitor, guard_mode, layers
        self.weight, self.hidden = weight, hidden
        self.corrections = FlowerCorrections(monitor.host)
        self.models = KnownModels(layers)
        self.tape = ServerTape(self)  # records on the tape, if there is one
        self.round_index: int | None = None  # of the open round
        self._last = 0
        self.metrics: dict[str, float] = {}  # of the open round, from the server's own evaluation
        self._initial: dict[str, float] = {}  # of the model before the first round
        self._averaged: dict[str, float] = {}  # of the open round, averaged from the clients' evaluations
        self.evaluates = False  # whether the server evaluates the model itself, even if only sometimes
        self._lock = threading.RLock()
        self._pending: dict[str, ClientRequest] = {}  # by the message's id
        self.unanswered: dict[str, ClientRequest] = {}  # given up by the server, and still unanswered
        # Processes that died, and with which client: see `failures.dead_process`.
        self.dead_processes: dict[str, ClientRequest] = {}
        self._phases: dict[str, PhaseParticipation] = {}
        self._checks: dict[str, ReplyChecks] = {}
        self._handler_times: dict[str, HandlerTimes] = {}
        self._secure = SecureRound()
        self._worked: list[tuple[float, float]] = []  # intervals of work
        self._began = 0.0
        self._restored_model: ArrayRecord | None = None  # an earlier model, until there is a new one
        self._evaluating: float | None = None
        self.hooked = False  # whether a strategy's hooks determine the round
        self._takes_stale = False  # whether the app accepts replies of earlier rounds: there is no barrier
        self.same_metrics = False  # whether the strategy needs the same metrics in all replies
        self._measuring = BackgroundWork("fedvitals-updates")
        self.connections = NodeConnections(monitor.host.event)
        monitor.host.awaits(lambda: participation.awaited([*self._pending.values()]))

    # -- rounds -------------------------------------------------------------------------------------------------------

    def begin(self, round_index: int, model: ArrayRecord | None = None) -> None:
        """Begin a round and end the previous one, unless the round is already open."""
        with self._lock:
            if self.round_index == round_index:
                return
            self.end()
            before = self.start_of(model)
            prescribed = self.monitor.host.prescribed
            self._guarded("prescribing", lambda: self.corrections.follow(prescribed(round_index), round_index, before))
            self.models.forget()
            self._restored_model = self.corrections.restored or self._restored_model
            start = self.start_of(model)
            self.round_index = self._last = round_index
            self._began = time.time()
            self.models.started = start
            outline = None if start is None else self._guarded("reading a model", lambda: self.models.outline(start))
            self.monitor.host.round_begin(round_index, outline)
            self.monitor.host.log(self._initial)
            self._initial = {}
            self._guarded("recording a round", lambda: self.tape.begins(round_index))

    def end(self, model: ArrayRecord | None = None) -> None:
        """End the open round; `model`: its last model, if known."""
        with self._lock:
            if self.round_index is None:
                return
            self._guarded("checking replies", lambda: guard.judge_replies(self))
            round_index, self.round_index = self.round_index, None
            self._measuring.wait()
            for name, phase in self._phases.items():
                self._report_phase(name, phase)
            if self._secure.is_halted(aggregation_seen=self.hooked):
                self._report_halt()
            self._guarded("comparing the lists of nodes", self.connections.round_ends)
            whole = max(time.time() - self._began, 1e-9)
            self.monitor.host.log({"time.worked": min(1.0, covered(self._worked) / whole)})
            after = model or self.models.newest
            outline = None if after is None else self._guarded("reading a model", lambda: self.models.outline(after))
            metrics = self._metrics_by_source()
            self._guarded("recording a round", lambda: self.tape.ends(metrics))
            self.monitor.host.round_end(round_index, outline, metrics)
            self._phases, self._checks, self._worked, self.metrics, self._averaged = {}, {}, [], {}, {}
            self._handler_times, self._secure = {}, SecureRound()

    def close(self) -> None:
        """End the open round, because the server has ended. A forked process leaves that to its parent."""
        if self.monitor.host.monitored.lifecycle.is_of_parent:
            return  # before any lock, which a thread of the parent may have held
        self.end()
        self.monitor.flush()

    def failed(self, error: BaseException) -> None:
        """Report that the server's own code raised."""
        data = {"exception": type(error).__name__, "raised_by": "server"}
        self.monitor.host.event("error", "round.failed", f"{type(error).__name__}: {text_of(error)}"[:1000], data=data)

    def nothing_aggregated(self) -> None:
        """Report that the strategy made no new model from the round's replies."""
        answered = len(self._phases.get(TRAIN, PhaseParticipation()).answered)
        text = f"The strategy made no model of {answered} answers."
        self.monitor.host.event("error", "aggregation.failed", text, data={"answered": answered})

    def _report_halt(self) -> None:
        """Report that secure aggregation ended without a sum.

        Flower continues with the unchanged model, and only says so in its log.
        """
        phase = self._phases.get(TRAIN, PhaseParticipation())
        text = f"It halted in the stage {self._secure.stage or 'unknown'}: of "
        text += f"{len(phase.asked)} clients {len(phase.answered)} answered in all stages."
        self.monitor.host.event("error", "secure_aggregation.failed", text)
        self.monitor.host.event("error", "aggregation.failed", text, data={"answered": len(phase.answered)})

    def start_of(self, model: ArrayRecord | None) -> ArrayRecord | None:
        """Return the model that clients start from: the strategy's, unless a correction restored an earlier one."""
        return model if self._restored_model is None else self._restored_model

    def handler_times(self, node: str) -> HandlerTimes:
        """Return the time a client's handler has taken in the open round so far."""
        return self._handler_times.setdefault(node, HandlerTimes())

    def reply_checks(self, phase: str) -> ReplyChecks:
        """Return the checks of the open round's replies in a phase."""
        return self._checks.setdefault(phase, ReplyChecks())

    def fitting(self, replies: list[Message], phase: str = TRAIN, *, entries: bool = False) -> list[Message]:
        """Return the replies to aggregate.

        Replies that do not fit the others are reported, and replaced if the guard requires it. `entries`: the strategy
        also needs the same metrics in all of them.
        """
        instead = self._judged(phase, entries=entries)
        return [instead.get(reply.metadata.reply_to_message_id, reply) for reply in replies] if instead else replies

    def unfitting_nodes(self) -> dict[str, str]:
        """Return the nodes whose reply to «train» the guard leaves out, with the reason; for the older API."""
        instead = self._judged(TRAIN).values()
        return {node_name(reply.metadata.src_node_id): str(reply.error.reason) for reply in instead}

    def _judged(self, phase: str, *, entries: bool = False) -> dict[str, Message]:
        with self._lock:
            judge = functools.partial(guard.judge_replies, self, phase, entries=entries)
            instead = self._guarded("checking replies", judge) or {}
        if isinstance(instead, guard.UnusableUpdateError):
            raise instead
        return dict(instead)

    @contextmanager
    def aggregating(self, phase: str) -> Iterator[None]:
        """Time the strategy's aggregation. If it raises, report the clients whose metrics differ from the others'."""
        self._secure.aggregated = self._secure.aggregated or phase == TRAIN
        try:
            with self.busy_with("aggregate") if phase == TRAIN else nullcontext():
                yield
        except Exception:
            if self.guard_mode == update_guard.REPORT:
                self._guarded("checking replies", lambda: guard.report_entry_misfits(self, phase))
            raise

    def robust(self, replies: list[Message]) -> list[Message]:
        """Return the replies to aggregate, changed if a correction requires another rule."""
        rule, start = self.corrections.in_force.robust, self.models.started
        if rule is None or start is None:
            return replies
        robust = functools.partial(
            corrections.with_robust_aggregate, rule, replies, arrays.tensors_of(start, self.layers), self.layers
        )
        return self._guarded("aggregating robustly", robust) or replies

    def aggregated(self, model: ArrayRecord) -> ArrayRecord:
        """Return the round's new model, changed if a correction requires it."""
        rate, start = self.corrections.in_force.server_rate, self.models.started
        if rate != 1 and start is not None:
            slower = functools.partial(corrections.scaled_server_step, rate, start, model, self.layers)
            model = self._guarded("slowing the server", slower) or model
        self._restored_model, self.models.newest = None, model
        return model

    def record_on_tape(self, record: Callable[[ServerTape], None]) -> None:
        """Call `record` with the server's tape; errors cost only the tape."""
        self._guarded("recording an aggregation", lambda: record(self.tape))

    def record_metrics(self, metrics: Mapping[str, Any], *, best: bool) -> None:
        """Record metrics of the global model.

        `best`: from the server's own evaluation, otherwise averaged from the clients'.
        """
        self.evaluates = self.evaluates or best
        numbers = numbers_of(metrics)
        numbers.pop(self.weight, None)
        named = with_known_names(numbers)
        if self.round_index is None:  # of the model before the first round, reported with that round
            self._initial |= {f"initial.{name}": value for name, value in named.items()}
        else:
            (self.metrics if best else self._averaged).update(named)

    def record_train_metrics(self, metrics: Any) -> None:
        """Record the strategy's result for the clients' train metrics, if any."""
        if isinstance(metrics, Mapping):
            numbers = numbers_of(metrics)
            numbers.pop(self.weight, None)
            self.monitor.host.log(as_train_metrics(numbers))

    def _metrics_by_source(self) -> dict[str, float]:
        """Return the round's metrics, one source per name.

        If the server evaluates, the clients' averages get the prefix `local.`: they are measured on other data, and a
        curve that mixes the two would show jumps that never happened.
        """
        if not self.evaluates:
            return dict(self._averaged)
        return {**{f"local.{name}": value for name, value in self._averaged.items()}, **self.metrics}

    def evaluating(self, *, begin: bool) -> None:
        """Time the clients' evaluation, from the first message to the last reply."""
        now = time.perf_counter()
        if not begin and self._evaluating is not None:
            self.monitor.host.spent("examine", now - self._evaluating)
        self._evaluating = now if begin else None

    @contextmanager
    def busy_with(self, part: str) -> Iterator[None]:
        """Time a part of the server's own work."""
        began = time.time()
        try:
            with self.monitor.host.part(part):
                yield
        finally:
            self._worked.append((began, max(began, time.time())))

    # -- messages -----------------------------------------------------------------------------------------------------

    def messages_sent(self, messages: Sequence[Message], ids: Sequence[str | None], sent: float) -> None:
        """Record the messages that were sent, and begin a round if they start one."""
        with self._lock:
            for message, key in zip(messages, ids, strict=True):
                if key:
                    self._guarded("noting a message", functools.partial(self._note_request, message, key, sent))

    def _note_request(self, message: Message, key: str, sent: float) -> None:
        phase = message.metadata.message_type.partition(".")[0]
        round_index = self.round_of(message)
        if round_index is not None and phase == TRAIN:
            self.begin(round_index, arrays.model_of(message.content))
        node = node_name(message.metadata.dst_node_id)
        size = bytes_of(message.content)
        if protection.masked(message.content):
            self.hidden = self.hidden or "secure aggregation"
            self._secure.sent(message.content)
        request = ClientRequest(message, node, phase, self.round_index or 0, sent, size)
        request.busy = any(owing.node == node for owing in self.unanswered.values())
        self._pending[key] = request
        participation = self._phases.setdefault(phase, PhaseParticipation())
        participation.asked[node] = None
        self.connections.asked(node)
        if request.busy:
            participation.busy[node] = None
            text = f"{node} is asked to {phase}, and still owes an answer."
            self.monitor.host.event("info", "client.busy", text, node=node, data={"phase": phase})
        self.monitor.host.transfer("server", node, size, kind="model" if phase == TRAIN else phase)
        self._guarded("recording a message", lambda: self.tape.asked(request))

    def round_of(self, message: Message) -> int | None:
        """Return the round of a message; if it does not say, the next one once a node is asked to train again."""
        if self.hooked:
            return None
        round_index = round_of_message(message)
        if round_index is not None:
            return round_index
        node = node_name(message.metadata.dst_node_id)
        training = self._phases.get(TRAIN, PhaseParticipation())
        if self.round_index is None or node in training.asked:
            return self._last + 1
        return self.round_index

    def reply_received(self, reply: Message, at: float) -> Message:
        """Read a reply, report what it contains, and return it or a replacement."""
        with self._lock:
            key = reply.metadata.reply_to_message_id
            request = self._pending.pop(key, None) or self.unanswered.pop(key, None)
            if request is None:
                return reply
            self._note_age(request)
            for key in [key for key, owing in self.unanswered.items() if owing.node == request.node]:
                self.unanswered.pop(key)
            began = time.perf_counter()
            read = functools.partial(replies.read_reply, self, request, reply, at)
            instead = self._guarded("reading a reply", read, request.node)
            self.monitor.host.spent("receive", time.perf_counter() - began)
            if isinstance(instead, guard.UnusableUpdateError):
                self._pending.clear()  # nobody waits for the others any more
                self.close()
                raise instead
            if not any(checked.message is reply for checked in self.reply_checks(request.phase).waiting):
                self._guarded("recording a reply", lambda: self.tape.came(request, reply, instead), request.node)
            return reply if instead is None else instead

    def _note_age(self, request: ClientRequest) -> None:
        """Log how many rounds ago a client was asked, if the app accepts its reply in a later round."""
        age = self._last - request.round_index
        if age > 0 and request.phase == TRAIN:
            self._takes_stale = True
            self.monitor.host.log({"update.staleness": float(age)}, node=request.node)

    def replies_read(self, replies: list[Message]) -> list[Message]:
        """Return the replies that a custom loop gets, once all that it waited for have arrived.

        Strategies have their replies checked when they aggregate them.
        """
        waited_for = any(request.phase == TRAIN for request in self._pending.values())
        return replies if self.hooked or waited_for else self.fitting(replies)

    def late_reply_received(self, reply: Message, at: float) -> None:
        """Read the reply to a message that the server had given up on."""
        with self._lock:
            request = self.unanswered.pop(reply.metadata.reply_to_message_id, None)
            if request is not None:
                read = functools.partial(replies.read_late_reply, self, request, reply, at)
                self._guarded("reading a late reply", read, request.node)

    def nodes_listed(self, ids: Iterable[int]) -> None:
        """Update from the grid's list of connected nodes."""
        with self._lock:
            self._guarded("reading a list of nodes", lambda: self.connections.listed(ids))

    def replies_given_up(self, ids: set[str]) -> None:
        """Note that no reply to these messages came in time."""
        with self._lock:
            for key in sorted(ids):
                request = self._pending.pop(key, None)
                if request is not None:
                    self._late(key, request)

    def _late(self, key: str, request: ClientRequest) -> None:
        self.unanswered[key] = request
        while len(self.unanswered) > UNANSWERED_KEPT:
            self.unanswered.pop(next(iter(self.unanswered)))
        participation = self._phases.setdefault(request.phase, PhaseParticipation())
        participation.late[request.node] = None
        participation.answered.pop(request.node, None)  # after answering an earlier stage
        self._guarded("recording a message", lambda: self.tape.missing(request))
        waited = time.time() - request.sent
        text = f"{request.node} was asked to {request.phase} and did not answer within {waited:.1f} s."
        data = {"phase": request.phase, "waited": waited, "busy": request.busy}
        self.monitor.host.event("warning", "update.late", text, node=request.node, data=data)

    def measure_update(
        self, request: ClientRequest, start: Mapping[str, array_models.Values], end: Mapping[str, array_models.Values]
    ) -> Sequence[Action]:
        """Measure a client's update on a thread of our own, before the round's end; nothing waits for it.

        If a correction may follow at once, it is measured here, and the actions are returned.
        """
        clients = len(self._phases.get(TRAIN, PhaseParticipation()).asked)
        host, round_index, node = self.monitor.host, request.round_index, request.node
        what = (host, round_index, node, start, end, clients, self.models.spare)
        measure = functools.partial(array_models.measure_update, *what)
        if host.corrects_at_once:
            return measure()
        self._measuring.submit(functools.partial(self._guarded, "measuring an update", measure, node))
        return ()

    def answered(self, request: ClientRequest, *, failed: bool) -> None:
        """Record that a client replied, or failed."""
        participation = self._phases.setdefault(request.phase, PhaseParticipation())
        (participation.failed if failed else participation.answered)[request.node] = None
        if failed:  # in one of several stages
            participation.answered.pop(request.node, None)
        if not failed:
            self.connections.answered(request.node)

    def worked(self, began: float, ended: float) -> None:
        """Record an interval of work."""
        self._worked.append((began, ended))

    def _report_phase(self, name: str, phase: PhaseParticipation) -> None:
        """Report a phase; clients of a custom loop that did not reply by the round's end count as late.

        Unless the loop has no barrier, and accepts their replies in a later round.
        """
        for key, request in [] if self._takes_stale else [*self._pending.items()]:
            if request.phase == name and request.node in phase.asked:
                self._pending.pop(key)
                self._late(key, request)
        participation.report(self.monitor.host, name, phase)

    def _guarded(self, doing: str, work: Callable[[], Any], node: str | None = None) -> Any:
        """Return the result of our own work, or None if it failed, which is reported.

        The error of an update that must not be used is raised.
        """

        def usable() -> Any:
            try:
                return work()
            except guard.UnusableUpdateError as error:
                return error

        return self.monitor.host.guarded(doing, usable, node)
