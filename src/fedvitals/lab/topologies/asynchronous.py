# SPDX-License-Identifier: Apache-2.0
"""Asynchronous, buffered (FedBuff, Nguyen et al. 2022): nobody waits for the slow; the server averages K at a time.

Runs on the virtual clock. A round is one aggregation. Clients train on, from the model that they were given when they
began; one that began τ models ago counts 1 / (1 + τ)^exponent. When one is back, another is sent off at once.

Where the paper leaves room: updates are weighted by their samples, too, as everywhere in the lab; a client brings at
most one update into a buffer; one that is lost, or past the network's deadline, frees its place, and only that. The
model is tested beside the aggregation, so that nobody waits for it: on the virtual clock it takes no time.
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
from fedvitals.lab.engines.work import Node, Task, Update
from fedvitals.lab.network import virtual_clock
from fedvitals.lab.network.spans import part_metrics, tell_journey
from fedvitals.lab.network.timetable import journey_parts, times_told
from fedvitals.lab.network.virtual_clock import Journey
from fedvitals.time_parts import ROUND, SERVER

if TYPE_CHECKING:
    from fedvitals.lab.experiment import Experiment
    from fedvitals.lab.federation import Federation

NOTE, LINE = "flights", "line free"


class Asynchronous(Description, frozen=True):
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
        allowed = f"at most the number of clients, {experiment.clients}"
        require(self.buffer <= experiment.clients, "buffer of asynchronous", self.buffer, allowed)
        at_once = self.concurrency or 1
        require(at_once <= experiment.clients, "concurrency of asynchronous", at_once, allowed)

    def round(self, federation: Federation) -> Tensor:
        server, number = federation.server, federation.round
        server.memory[version(number)] = server.model
        flights = Flights(federation, self._places(federation.experiment))
        arrived = flights.land(self.buffer)
        federation.journeys.made = {flight.node: flight.journey for flight in arrived}

        tasks = [Task(number, (flight.node,), server.memory[version(flight.began)]) for flight in arrived]
        late = {flight.node: number - flight.began for flight in arrived}
        updates = federation.train(tasks, timed=False)
        model = federation.aggregate(self._discounted(federation, late, updates), memory="aggregator/")

        flights.tell(arrived)
        flights.keep()
        return model

    def _places(self, experiment: Experiment) -> int:
        return self.concurrency or max(1, round(experiment.clients * experiment.participation))

    def _discounted(self, federation: Federation, late: dict[Node, int], updates: Iterable[Update]) -> Iterator[Update]:
        """What each client changed, put on top of the present model, the less the later it comes."""
        model = federation.server.model
        for update in updates:
            models_ago = late[update.node]
            federation.observer.log({"update.staleness": float(models_ago)}, node=update.node)
            if models_ago and update.state.shape == model.shape:
                update.state = model + (update.state - update.start) / (1 + models_ago) ** self.exponent
            yield update


@dataclasses.dataclass(frozen=True, slots=True)
class Flight:
    """One client under way, with the model of round `began`."""

    began: int
    journey: Journey
    deadline: float

    @property
    def node(self) -> Node:
        return self.journey.node

    @property
    def ends(self) -> float:
        """When the client is back, or given up."""
        return min(self.journey.ends, self.journey.began + self.deadline)

    @property
    def trouble(self) -> tuple[str, str] | None:
        if not self.journey.usable:
            return "update.lost", "was lost or unreadable on the way"
        return ("update.late", "came after the deadline") if self.journey.total > self.deadline else None


class Flights:
    """Who is under way, kept from round to round; and the virtual clock, which goes from landing to landing."""

    def __init__(self, federation: Federation, places: int) -> None:
        self.federation, self.places = federation, places
        settings = federation.experiment.network
        assert settings is not None  # noqa: S101 - `check` has seen it
        self.network = settings
        self.deadline = math.inf if settings.deadline_seconds is None else virtual_clock.tick(settings.deadline_seconds)
        saved: list[dict[str, Any]] = federation.server.notes.get(NOTE, [])
        self.under_way = [Flight(one["began"], Journey(**one["journey"]), self.deadline) for one in saved]
        self.clock = federation.server.clock
        self.line_free: float = federation.server.notes.get(LINE, 0.0)  # when the server has sent what it is sending
        self.given_up: list[Flight] = []
        self.absent: list[Journey] = []
        e, number = federation.experiment, federation.round
        order = torch.randperm(e.clients, generator=streams.stream(e.seed, "flights", number)).tolist()
        self._queue = [e.nodes[place] for place in order]  # each is asked once in a round

    def land(self, count: int) -> list[Flight]:
        """The next `count` that bring something, in the order of the clients; their places are taken by others."""
        landed: list[Flight] = []
        self._send_off(landed)
        while len(landed) < count and self.under_way:
            flight = min(self.under_way, key=lambda one: (one.ends, one.node))
            if math.isinf(flight.ends):
                break
            self.under_way.remove(flight)
            self.clock = flight.ends
            if flight.trouble is None:
                landed.append(flight)
            else:
                self.given_up.append(flight)
                name, words = flight.trouble
                message = f"{flight.node}'s update {words}."
                self.federation.observer.event("warning", name, message, node=flight.node)
            if len(landed) < count:
                self._send_off(landed)
        return sorted(landed, key=lambda one: self.federation.experiment.nodes.index(one.node))

    def _send_off(self, landed: list[Flight]) -> None:
        """Fill the free places with clients that are neither under way nor in the buffer."""
        federation, number = self.federation, self.federation.round
        busy = {flight.node for flight in (*self.under_way, *landed)}
        for node in [node for node in self._queue if node not in busy]:
            if len(self.under_way) >= self.places:
                return
            self._queue.remove(node)
            task = Task(number, (node,), federation.server.model)
            queue = max(0.0, self.line_free - self.clock)
            journey = federation.journeys.of(number, task, node, self.clock, queue)
            if journey.available:
                self.under_way.append(Flight(number, journey, self.deadline))
                self.line_free = self.clock + queue + federation.journeys.sending(1)
            else:
                self.absent.append(journey)
                message = f"{node} was asked and is not there."
                federation.observer.event("warning", "client.dropped_out", message, node=node)

    def tell(self, landed: list[Flight]) -> None:
        """The spans of who has landed, or was given up, and of the server; the clock goes on to the aggregation's end.

        A journey's span reaches from when the client was asked, maybe many rounds ago, to the end of this round.
        """
        server, observer = self.federation.server, self.federation.observer
        averaging = virtual_clock.aggregation_seconds(self.network, len(landed), self.federation.site.layout.size)
        began, ends = server.clock, self.clock + averaging
        whole = observer.span(None, ROUND, began, ends - began, clock="virtual")
        last = max(landed, key=lambda flight: (flight.ends, flight.node)).node if landed else None
        waits = {"wait": self.clock - began, "aggregate": averaging}
        parts = {name: seconds for name, seconds in waits.items() if seconds > 0}
        more = {} if last is None else {"waited_for": last}
        observer.span("server", SERVER, began, ends - began, parent=whole, clock="virtual", parts=parts, **more)
        for flight in (*landed, *self.given_up):
            one, seconds = flight.journey, ends - flight.journey.began
            parts = journey_parts(one, min(seconds, self.deadline), seconds)
            trouble = {} if flight.trouble is None else {flight.trouble[0].removeprefix("update."): True}
            tell_journey(observer, one, seconds, parts, whole, "server" if one.node == last else last, trouble)
            if flight.trouble is None:
                observer.log({**times_told(one), **part_metrics(parts)}, node=one.node)
        for one in self.absent:
            seconds = ends - one.began
            tell_journey(observer, one, seconds, journey_parts(one, seconds, seconds), whole, None, {})
        observer.log({"time.round_virtual": ends - began})
        server.clock = ends

    def keep(self) -> None:
        """Who is under way, and the models that they were given; all others are forgotten."""
        server = self.federation.server
        server.notes[NOTE] = [
            {"began": flight.began, "journey": dataclasses.asdict(flight.journey)} for flight in self.under_way
        ]
        if self.network.server_bits_per_second is not None:
            server.notes[LINE] = self.line_free
        needed = {version(flight.began) for flight in self.under_way}
        for key in [key for key in server.memory if key.startswith(version("")) and key not in needed]:
            del server.memory[key]


def version(number: int | str) -> str:
    """Where the model of the beginning of a round is kept."""
    return f"version/{number}"
