# SPDX-License-Identifier: Apache-2.0
"""What a Flower server does, round by round, told to a monitor: who was asked, who answered, when, and with what.

Clients are known by Flower's node ids. Nothing in here may stop or change the run: what fails is told once, and the
reply goes on as it came.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ArrayRecord, Message

from fedvitals.hosts.flower import arrays, corrections, guard, protection, replies
from fedvitals.hosts.flower.corrections import Ward
from fedvitals.hosts.flower.known_models import KnownModels
from fedvitals.hosts.flower.replies import renamed
from fedvitals.hosts.flower.reply_envelope import bytes_of, node_name, told_round
from fedvitals.hosts.flower.tape.server import Scribe
from fedvitals.monitor.guard import CAUSES_OF_CLIENT, CAUSES_REPORTED
from fedvitals.monitor.monitor import Monitor
from fedvitals.resources.node_spans import covered

logger = logging.getLogger("fedvitals")
TRAIN, EVALUATE = "train", "evaluate"
NAMED = 200  # nodes in one event
OWED = 10_000  # messages without an answer that are remembered


@dataclass(slots=True)
class Asked:
    """A message on its way."""

    message: Message
    node: str
    phase: str
    number: int
    sent: float
    size: int
    busy: bool = False  # the node still owed an answer when it was asked


@dataclass
class Phase:
    """Who did what in one round's training or evaluation."""

    asked: dict[str, None] = field(default_factory=dict)
    answered: dict[str, None] = field(default_factory=dict)
    failed: dict[str, None] = field(default_factory=dict)
    late: dict[str, None] = field(default_factory=dict)
    busy: dict[str, None] = field(default_factory=dict)


class Journal:
    """`weight`: the metric that clients are weighed by. `hidden`: what forbids to tell of single clients."""

    def __init__(
        self,
        monitor: Monitor,
        *,
        way: str = guard.REPORT,
        layers: Sequence[str] | None = None,
        weight: str = "num-examples",
        hidden: str | None = None,
    ) -> None:
        self.monitor, self.way, self.layers, self.weight, self.hidden = monitor, way, layers, weight, hidden
        self.ward = Ward(monitor.host)
        self.models = KnownModels(layers)
        self.scribe = Scribe(self)  # for the tape, if there is one
        self.number: int | None = None  # of the open round
        self._last = 0
        self.metrics: dict[str, float] = {}  # of the open round, by the server's own evaluation
        self._averaged: dict[str, float] = {}  # of the open round, averaged from the clients' evaluations
        self.evaluates = False  # whether the server evaluates the model itself, be it only now and then
        self._lock = threading.RLock()
        self._way: dict[str, Asked] = {}  # by the message's id
        self.owed: dict[str, Asked] = {}  # given up by the server, and still without an answer
        self.dead: dict[str, Asked] = {}  # processes that died, and with whom: see `failures.dead_process`
        self._phases: dict[str, Phase] = {}
        self._worked: list[tuple[float, float]] = []  # stretches in which somebody did something
        self._began = 0.0
        self._reported: dict[str | None, set[str]] = {}  # causes of what failed, by the node that it was about
        self.metric_names: dict[str, set[str]] = {}  # that each node has told its server in replies
        self._instead: ArrayRecord | None = None  # an earlier model, until there is a new one
        self._evaluating: float | None = None
        self.hooked = False  # whether a strategy tells which round it is

    # -- rounds -------------------------------------------------------------------------------------------------------

    def begin(self, number: int, model: ArrayRecord | None = None) -> None:
        """A round begins, unless it is open already; the one before it is over."""
        with self._lock:
            if self.number == number:
                return
            self.end()
            before = self.start_of(model)
            self._guarded("prescribing", lambda: self.ward.follow(self.monitor.host.prescribed(number), number, before))
            self.models.forget()
            self._instead = self.ward.restored or self._instead
            start = self.start_of(model)
            self.number = self._last = number
            self._began = time.time()
            self.models.started = start
            outline = None if start is None else self._guarded("reading a model", lambda: self.models.outline(start))
            self.monitor.host.round_begin(number, outline)
            self._guarded("recording a round", lambda: self.scribe.begins(number))

    def end(self, model: ArrayRecord | None = None) -> None:
        """The open round is over; its last model, where it is known."""
        with self._lock:
            if self.number is None:
                return
            number, self.number = self.number, None
            for name, phase in self._phases.items():
                self._tell_phase(name, phase)
            whole = max(time.time() - self._began, 1e-9)
            self.monitor.host.log({"time.worked": min(1.0, covered(self._worked) / whole)})
            after = model or self.models.newest
            outline = None if after is None else self._guarded("reading a model", lambda: self.models.outline(after))
            metrics = self._metrics_by_source()
            self._guarded("recording a round", lambda: self.scribe.ends(metrics))
            self.monitor.host.round_end(number, outline, metrics)
            self._phases, self._worked, self.metrics, self._averaged = {}, [], {}, {}

    def close(self) -> None:
        """The server has ended."""
        self.end()
        self.monitor.flush()

    def failed(self, error: BaseException) -> None:
        """The server's own code raised; the round ends with it."""
        data = {"exception": type(error).__name__}
        self.monitor.host.event("error", "round.failed", f"{type(error).__name__}: {error}"[:1000], data=data)

    def start_of(self, model: ArrayRecord | None) -> ArrayRecord | None:
        """What the clients begin with: the strategy's model, unless a correction went back to an earlier one."""
        return model if self._instead is None else self._instead

    def robust(self, replies: list[Message]) -> list[Message]:
        """The replies as they are aggregated, where a correction asks for another rule."""
        rule, start = self.ward.orders.robust, self.models.started
        if rule is None or start is None:
            return replies
        robust = functools.partial(
            corrections.robust, rule, replies, arrays.tensors_of(start, self.layers), self.layers
        )
        return self._guarded("aggregating robustly", robust) or replies

    def aggregated(self, model: ArrayRecord) -> ArrayRecord:
        """The round's new model, or a correction's in its place."""
        rate, start = self.ward.orders.server_rate, self.models.started
        if rate != 1 and start is not None:
            slower = functools.partial(corrections.slowed, rate, start, model, self.layers)
            model = self._guarded("slowing the server", slower) or model
        self._instead, self.models.newest = None, model
        return model

    def tell_tape(self, what: Callable[[Scribe], None]) -> None:
        self._guarded("recording an aggregation", lambda: what(self.scribe))

    def heard(self, told: Mapping[str, Any], *, best: bool) -> None:
        """Metrics of the global model; `best`: by the server's own evaluation, otherwise averaged from the clients'."""
        self.evaluates = self.evaluates or best
        if self.number is None:
            return  # of the model before the first round
        numbers = {name: float(value) for name, value in told.items() if isinstance(value, int | float)}
        numbers.pop(self.weight, None)
        (self.metrics if best else self._averaged).update(renamed(numbers))

    def _metrics_by_source(self) -> dict[str, float]:
        """The round's metrics, one source for each name.

        Where the server evaluates, the clients' averages get the prefix `local.`: on other data they are other numbers,
        and a curve that takes now the one and now the other shows jumps that never were.
        """
        if not self.evaluates:
            return dict(self._averaged)
        return {**{f"local.{name}": value for name, value in self._averaged.items()}, **self.metrics}

    def evaluating(self, *, begin: bool) -> None:
        """The clients' evaluation, from the first message to the last answer."""
        now = time.perf_counter()
        if not begin and self._evaluating is not None:
            self.monitor.host.spent("examine", now - self._evaluating)
        self._evaluating = now if begin else None

    @contextmanager
    def busy_with(self, part: str) -> Iterator[None]:
        """A stretch of the server's own work."""
        began, clock = time.time(), time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - clock
            self._worked.append((began, began + seconds))
            self.monitor.host.spent(part, seconds)

    # -- messages -----------------------------------------------------------------------------------------------------

    def asked(self, messages: Sequence[Message], ids: Sequence[str | None], sent: float) -> None:
        with self._lock:
            for message, key in zip(messages, ids, strict=True):
                if key:
                    self._guarded("noting a message", functools.partial(self._ask, message, key, sent))

    def _ask(self, message: Message, key: str, sent: float) -> None:
        phase = message.metadata.message_type.partition(".")[0]
        number = self.number_of(message)
        if number is not None and phase == TRAIN:
            self.begin(number, arrays.model_of(message.content))
        node = node_name(message.metadata.dst_node_id)
        size = bytes_of(message.content)
        if protection.masked(message.content):
            self.hidden = self.hidden or "secure aggregation"
        one = Asked(message, node, phase, self.number or 0, sent, size)
        one.busy = any(owing.node == node for owing in self.owed.values())
        self._way[key] = one
        place = self._phases.setdefault(phase, Phase())
        place.asked[node] = None
        if one.busy:
            place.busy[node] = None
            text = f"{node} is asked to {phase}, and still owes an answer."
            self.monitor.host.event("info", "client.busy", text, node=node, data={"phase": phase})
        self.monitor.host.transfer("server", node, size, kind="model" if phase == TRAIN else phase)
        self._guarded("recording a message", lambda: self.scribe.asked(one))

    def number_of(self, message: Message) -> int | None:
        """The round that a message says it is of; where it does not: one more, once a node is asked to train again."""
        if self.hooked:
            return None
        told = told_round(message)
        if told is not None:
            return told
        node = node_name(message.metadata.dst_node_id)
        training = self._phases.get(TRAIN, Phase())
        if self.number is None or node in training.asked:
            return self._last + 1
        return self.number

    def returned(self, reply: Message, at: float) -> Message:
        """Read what rides along, tell what there is to tell; the reply, or another in its place."""
        with self._lock:
            asked = self._way.pop(reply.metadata.reply_to_message_id, None)
            if asked is None:
                return reply
            for key in [key for key, owing in self.owed.items() if owing.node == asked.node]:
                self.owed.pop(key)
            began = time.perf_counter()
            instead = self._guarded("reading a reply", lambda: replies.read(self, asked, reply, at), asked.node)
            self.monitor.host.spent("receive", time.perf_counter() - began)
            if isinstance(instead, guard.NonFiniteUpdateError):
                self._way.clear()  # nobody waits for the others any more
                self.close()
                raise instead
            self._guarded("recording a reply", lambda: self.scribe.came(asked, reply, instead), asked.node)
            return reply if instead is None else instead

    def came_late(self, reply: Message, at: float) -> None:
        """The answer to a message that the server had given up."""
        with self._lock:
            asked = self.owed.pop(reply.metadata.reply_to_message_id, None)
            if asked is not None:
                self._guarded("reading a late reply", lambda: replies.read_late(self, asked, reply, at), asked.node)

    def given_up(self, ids: set[str]) -> None:
        """No answer came in time."""
        with self._lock:
            for key in sorted(ids):
                asked = self._way.pop(key, None)
                if asked is not None:
                    self._late(key, asked)

    def _late(self, key: str, asked: Asked) -> None:
        self.owed[key] = asked
        while len(self.owed) > OWED:
            self.owed.pop(next(iter(self.owed)))
        self._phases.setdefault(asked.phase, Phase()).late[asked.node] = None
        self._guarded("recording a message", lambda: self.scribe.missing(asked))
        waited = time.time() - asked.sent
        text = f"{asked.node} was asked to {asked.phase} and did not answer within {waited:.1f} s."
        data = {"phase": asked.phase, "waited": waited, "busy": asked.busy}
        self.monitor.host.event("warning", "update.late", text, node=asked.node, data=data)

    def answered(self, asked: Asked, *, failed: bool) -> None:
        place = self._phases.setdefault(asked.phase, Phase())
        (place.failed if failed else place.answered)[asked.node] = None

    def worked(self, began: float, ended: float) -> None:
        self._worked.append((began, ended))

    def _tell_phase(self, name: str, phase: Phase) -> None:
        """Those who were asked by a loop of the user's own, and of whom nothing was heard until the round was over."""
        for key, asked in [*self._way.items()]:
            if asked.phase == name and asked.node in phase.asked:
                self._way.pop(key)
                self._late(key, asked)
        lists = {kind: [*getattr(phase, kind)] for kind in ("asked", "answered", "failed", "late", "busy")}
        told = ", ".join(f"{len(nodes)} {kind}" for kind, nodes in lists.items() if nodes or kind == "asked")
        data = {"phase": name, **{kind: nodes[:NAMED] for kind, nodes in lists.items()}}
        self.monitor.host.event("info", "cohort", f"{name}: {told}.", data=data)

    def _guarded(self, doing: str, work: Callable[[], Any], node: str | None = None) -> Any:
        """The result of our own work, or None if it failed: told once per cause, and of the node that it was about."""
        try:
            return work()
        except guard.NonFiniteUpdateError as error:
            return error
        except Exception as error:  # noqa: BLE001 - the run goes on, whatever happens to us
            cause = f"{doing}: {type(error).__name__}: {error}"[:1000]
            reported = self._reported.setdefault(node, set())
            if cause not in reported and len(reported) < (CAUSES_REPORTED if node is None else CAUSES_OF_CLIENT):
                reported.add(cause)
                about = "" if node is None else f" (client '{node}')"
                logger.warning("fedvitals could not finish %s%s; training goes on.", cause, about)
                data = {"doing": doing, "exception": type(error).__name__}
                self.monitor.host.event("warning", "monitor.error", cause, node=node, data=data)
            return None
