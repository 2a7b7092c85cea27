# SPDX-License-Identifier: Apache-2.0
"""Buffered asynchronous learning (FedBuff, Nguyen et al. 2022): nobody waits for slow clients.

It runs on the virtual clock. A round is one aggregation of K updates. Clients train from the model that they received
when they began; one that began τ models ago counts 1 / (1 + τ)^exponent. When a client finishes, another one starts at
once.

Where the paper leaves it open: updates are also weighted by their samples, as everywhere in the lab; a client
contributes at most one update to a buffer; one that is lost, or misses the network's deadline, only frees its place.
The model is evaluated beside the aggregation, which takes no time on the virtual clock.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedvitals.errors import ConfigError
from fedvitals.lab import streams
from fedvitals.lab.description import Description, require
from fedvitals.lab.engines.tasks import Node, Task, Update
from fedvitals.lab.network import virtual_clock
from fedvitals.lab.network.round_timing import journey_parts, time_metrics
from fedvitals.lab.network.spans import part_metrics, record_journey_span
from fedvitals.lab.network.virtual_clock import Journey
from fedvitals.time_parts import ROUND, SERVER

if TYPE_CHECKING:
    from fedvitals.lab.experiment import Experiment
    from fedvitals.lab.federation import Federation

NOTE, LINE = "flights", "line free"


class Asynchronous(Description, frozen=True):
    """The server averages some updates at a time, while the other clients continue.

    Args:
        buffer: Updates in one aggregation.
        concurrency: Clients that train at a time; by default the share that takes part.
        exponent: How fast a late update loses its weight: one that began τ models ago counts (1 + τ)^−exponent.
    """

    buffer: int = 10  # K: updates in one aggregation
    concurrency: int | None = None  # clients that train at a time; by default the share that takes part
    exponent: float = 0.5  # how fast a late update loses its weight

    def __post_init__(self) -> None:
        require(self.buffer >= 1, "buffer of asynchronous", self.buffer, "1 update or more")
        require(self.concurrency is None or self.concurrency >= 1, "concurrency", self.concurrency, "at least 1")
        possible = math.isfinite(self.exponent) and self.exponent >= 0
        require(possible, "exponent of asynchronous", self.exponent, "finite, 0 or more")

    def check(self, experiment: Experiment) -> None:
        if experiment.network is None:
            raise ConfigError(
                "The topology 'asynchronous' needs a network, since who arrives first depends on links and devices. "
                'Give one, such as network = {links = "4g", devices = "phone"}.'
            )
        clients = experiment.fewest_members
        allowed = f"at most the number of clients, {clients}"
        require(self.buffer <= clients, "buffer of asynchronous", self.buffer, allowed)
        at_once = self.concurrency or 1
        require(at_once <= clients, "concurrency of asynchronous", at_once, allowed)

    def updates_together(self, clients: int) -> int:  # noqa: ARG002
        """Return how many updates are aggregated at once: as many as the buffer takes."""
        return self.buffer

    def round(self, federation: Federation) -> Tensor:
        server, number = federation.server, federation.round
        server.memory[version_key(number)] = server.model
        e = federation.experiment
        pending = PendingUpdates(federation, self.concurrency or e.needed(number))
        arrived = pending.collect(self.buffer)
        federation.journey_planner.journeys = {update.node: update.journey for update in arrived}

        tasks = [Task(number, (update.node,), server.memory[version_key(update.began)]) for update in arrived]
        late = {update.node: number - update.began for update in arrived}
        updates = federation.train(tasks, timed=False)
        model = federation.aggregate(self._discounted(federation, late, updates), memory="aggregator/")

        pending.record_spans(arrived)
        pending.keep()
        return model

    def _discounted(self, federation: Federation, late: dict[Node, int], updates: Iterable[Update]) -> Iterator[Update]:
        """Yield the updates as changes of the current model, discounted by their staleness.

        Buffers, such as running variances, move towards the client's by that discount: a sum of changes from several
        older models could make a variance negative.
        """
        model, weights = federation.server.model, federation.site.layout.weights
        for update in updates:
            models_ago = late[update.node]
            federation.observer.log({"update.staleness": float(models_ago)}, node=update.node)
            if models_ago and update.state.shape == model.shape:
                before = torch.cat([update.start[:weights], model[weights:]])
                update.state = model + (update.state - before) / (1 + models_ago) ** self.exponent
            yield update


@dataclasses.dataclass(frozen=True, slots=True)
class PendingUpdate:
    """A client that is training the model of round `began`."""

    began: int
    journey: Journey
    deadline: float

    @property
    def node(self) -> Node:
        return self.journey.node

    @property
    def ends(self) -> float:
        """The time at which the update arrives, or the client is given up."""
        return min(self.journey.ends, self.journey.began + self.deadline)

    @property
    def trouble(self) -> tuple[str, str] | None:
        """The event and its message if the update will not be used, or None."""
        if not self.journey.usable:
            return "update.lost", "was lost or unreadable on the way"
        return ("update.late", "came after the deadline") if self.journey.total > self.deadline else None


class PendingUpdates:
    """The clients in training, kept from round to round, and the virtual clock, which advances from arrival to
    arrival.
    """

    def __init__(self, federation: Federation, max_concurrency: int) -> None:
        self.federation, self.max_concurrency = federation, max_concurrency
        settings = federation.experiment.network
        assert settings is not None  # noqa: S101 - `check` has seen it
        self.network = settings
        limit = settings.deadline_seconds
        self.deadline = math.inf if limit is None else virtual_clock.to_ticks(limit)
        saved: list[dict[str, Any]] = federation.server.notes.get(NOTE, [])
        self.in_progress = [PendingUpdate(kept["began"], Journey(**kept["journey"]), self.deadline) for kept in saved]
        self.clock = federation.server.clock
        self.line_free: float = federation.server.notes.get(LINE, 0.0)  # when the server has sent what it is sending
        self.given_up: list[PendingUpdate] = []
        self.absent: list[Journey] = []
        e, number = federation.experiment, federation.round
        members = e.members(number)
        if e.population is not None:  # who has left takes along what it was training
            self.in_progress = [pending for pending in self.in_progress if pending.node in members]
        order = torch.randperm(len(members), generator=streams.stream(e.seed, "flights", number)).tolist()
        self._queue = [members[place] for place in order]  # each is asked once in a round

    def collect(self, count: int) -> list[PendingUpdate]:
        """Return the next `count` usable updates, sorted by client; other clients start in the free places."""
        collected: list[PendingUpdate] = []
        self._start_clients(collected)
        while len(collected) < count and self.in_progress:
            update = min(self.in_progress, key=lambda pending: (pending.ends, pending.node))
            if math.isinf(update.ends):
                break
            self.in_progress.remove(update)
            self.clock = update.ends
            if update.trouble is None:
                collected.append(update)
            else:
                self.given_up.append(update)
                name, words = update.trouble
                message = f"{update.node}'s update {words}."
                self.federation.observer.event("warning", name, message, node=update.node)
            if len(collected) < count:
                self._start_clients(collected)
        places = {node: place for place, node in enumerate(self.federation.experiment.nodes)}
        return sorted(collected, key=lambda pending: places[pending.node])

    def _start_clients(self, collected: list[PendingUpdate]) -> None:
        """Fill the free places with clients that are neither training nor in the buffer."""
        federation, number = self.federation, self.federation.round
        busy = {update.node for update in (*self.in_progress, *collected)}
        for node in [node for node in self._queue if node not in busy]:
            if len(self.in_progress) >= self.max_concurrency:
                return
            self._queue.remove(node)
            task = Task(number, (node,), federation.server.model)
            queue = max(0.0, self.line_free - self.clock)
            journey = federation.journey_planner.journey_of(number, task, node, self.clock, queue)
            if journey.available:
                self.in_progress.append(PendingUpdate(number, journey, self.deadline))
                self.line_free = self.clock + queue + federation.journey_planner.sending_seconds(1)
            else:
                self.absent.append(journey)
                message = f"{node} was asked and is not there."
                federation.observer.event("warning", "client.dropped_out", message, node=node)

    def record_spans(self, collected: list[PendingUpdate]) -> None:
        """Record the spans of collected and given-up updates and of the server, and advance the clock past the
        aggregation.

        A journey's span reaches from when the client was asked, possibly many rounds ago, to the end of this round.
        """
        server, observer = self.federation.server, self.federation.observer
        averaging = virtual_clock.aggregation_seconds(self.network, len(collected), self.federation.site.layout.size)
        began, ends = server.clock, self.clock + averaging
        round_span = observer.span(None, ROUND, began, ends - began, clock="virtual")
        last = max(collected, key=lambda update: (update.ends, update.node)).node if collected else None
        waits = {"wait": self.clock - began, "aggregate": averaging}
        parts = {name: seconds for name, seconds in waits.items() if seconds > 0}
        more = {} if last is None else {"waited_for": last}
        observer.span("server", SERVER, began, ends - began, parent=round_span, clock="virtual", parts=parts, **more)
        for update in (*collected, *self.given_up):
            journey, seconds = update.journey, ends - update.journey.began
            parts = journey_parts(journey, min(seconds, self.deadline), seconds)
            trouble = {} if update.trouble is None else {update.trouble[0].removeprefix("update."): True}
            waited_for = "server" if journey.node == last else last
            record_journey_span(observer, journey, seconds, parts, round_span, waited_for, trouble)
            if update.trouble is None:
                observer.log({**time_metrics(journey), **part_metrics(parts)}, node=journey.node)
        for journey in self.absent:
            seconds = ends - journey.began
            parts = journey_parts(journey, seconds, seconds)
            record_journey_span(observer, journey, seconds, parts, round_span, None, {})
        observer.log({"time.round_virtual": ends - began})
        server.clock = ends

    def keep(self) -> None:
        """Keep the clients in training and the models that they received; forget all others."""
        server = self.federation.server
        kept = ((update.began, dataclasses.asdict(update.journey)) for update in self.in_progress)
        server.notes[NOTE] = [{"began": began, "journey": journey} for began, journey in kept]
        if self.network.server_bits_per_second is not None:
            server.notes[LINE] = self.line_free
        needed = {version_key(update.began) for update in self.in_progress}
        for key in [key for key in server.memory if key.startswith(version_key("")) and key not in needed]:
            del server.memory[key]


def version_key(number: int | str) -> str:
    """Return the key under which the model of a round's start is kept."""
    return f"version/{number}"
