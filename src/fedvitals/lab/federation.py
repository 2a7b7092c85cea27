# SPDX-License-Identifier: Apache-2.0
"""The federation as a topology sees it: cohort, training, aggregation and transfers.

A topology decides who trains with whom, from which model, and how the updates are used. On their way updates pass the
experiment's faults, network and compression, and the observer is told about all of it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedvitals.errors import ConfigError
from fedvitals.lab import streams, tape_recording
from fedvitals.lab.aggregators.averages import AggregationError, WeightError, check_update
from fedvitals.lab.aggregators.drift import DriftCorrection, DriftMemory
from fedvitals.lab.compression import send_update
from fedvitals.lab.corrections import ActiveCorrections
from fedvitals.lab.description import kind_of
from fedvitals.lab.engines.engine import AnyEngine
from fedvitals.lab.engines.site import Site
from fedvitals.lab.engines.tasks import Home, Node, Task, Update
from fedvitals.lab.experiment import Experiment
from fedvitals.lab.faults import table as fault_table
from fedvitals.lab.local import Local
from fedvitals.lab.network.journey_planner import JourneyPlanner, drop_unused
from fedvitals.lab.network.spans import record_round_spans
from fedvitals.lab.privacy import accountant_of, protect_at_server, protect_on_client
from fedvitals.lab.secure_aggregation import MaskedRound
from fedvitals.lab.state import SplitVector, StateCopies
from fedvitals.protocols import Observer
from fedvitals.records import is_client

HOME = "home/"  # in the server's memory, which is saved: what each client keeps at home; no part of what it sends
RULE = "aggregator/"  # before the names of what the aggregation rule keeps in the server's memory
SMALL_MODEL = 1 << 14  # weights, up to which all clients' changes are computed together

Message = tuple[Node, Node, int, int, float | None, str]  # sender, receiver, bytes, bytes uncompressed, seconds, kind


@dataclass
class ServerState:
    """The state of the server between two rounds: everything that must be saved to resume a run."""

    model: Tensor  # [size]: the global model
    memory: dict[str, Tensor] = field(default_factory=dict)  # of the aggregator and the topology
    notes: dict[str, Any] = field(default_factory=dict)  # of the topology: groups and the like, as JSON
    clock: float = 0.0  # seconds on the virtual clock
    past: list[Tensor] = field(default_factory=list)  # earlier models, newest last, for faults that remember

    def move(self, device: torch.device) -> None:
        """Move all tensors to the engine's device."""
        self.model = self.model.to(device)
        self.memory = {name: tensor.to(device) for name, tensor in self.memory.items()}
        self.past = [model.to(device) for model in self.past]


@dataclass(slots=True)
class ServerModelHistory:
    """The server's recent models and its aggregation rule, for the faults that need them."""

    server: ServerState
    weights: int
    rule: Any

    @property
    def server_learning_rate(self) -> float:
        return float(getattr(self.rule, "server_learning_rate", getattr(self.rule, "learning_rate", 1.0)))

    def aggregate(self, updates: Sequence[Update]) -> Tensor:
        memory = {name.removeprefix(RULE): t.clone() for name, t in self.server.memory.items() if name.startswith(RULE)}
        total = self.rule.begin(self.server.model, memory, self.weights)
        try:
            for update in updates:
                total.add(update.state, float(update.samples), update.node)
            return total.finish()  # type: ignore[no-any-return]
        except AggregationError:
            return self.server.model

    def model(self, rounds_ago: int) -> Tensor | None:
        if rounds_ago == 0:
            return self.server.model
        return self.server.past[-rounds_ago] if rounds_ago <= len(self.server.past) else None


class Federation:
    """Runs one round at a time; `round` is its index.

    The states of server and clients are on the engine's device, and an ordinary round never waits for it. Random
    numbers are drawn on the CPU, so that they are the same everywhere.
    """

    def __init__(self, site: Site, engine: AnyEngine, observer: Observer, server: ServerState) -> None:
        self.site, self.engine, self.observer, self.server = site, engine, observer, server
        self.experiment: Experiment = site.experiment
        server.move(torch.device(getattr(engine, "device", "cpu")))  # it may come from a file
        self.round = 0
        self.bytes = site.layout.size * 4 + site.vector_bytes  # of a model as it is
        self.journey_planner = JourneyPlanner(site)
        self._sizes = [math.prod(shape) for shape in site.layout.shapes[: site.layout.trained]]
        self.losses: dict[Node, Tensor] = {}  # of this round's local batches, by client
        self.corrections = ActiveCorrections()  # corrections in force in this round
        self.watch = Stopwatch()  # of this round
        self._past = ServerModelHistory(server, site.layout.weights, self.experiment.aggregator)
        self._cpu_model: tuple[Tensor, Tensor] | None = None  # the server's model, and the same on the CPU
        self.tape_copies = StateCopies(site.layout)
        parts = (
            self.experiment.topology,
            self.experiment.aggregator,
            self.experiment.compression,
            *self.experiment.faults,
        )
        # A user's own topology or aggregator may write into a state that it has received.
        self.never_modifies_updates = all(
            part is None or type(part).__module__.startswith("fedvitals.lab.") for part in parts
        )
        self._fell_back = False
        self.drift: DriftMemory | None = None
        if isinstance(rule := self.experiment.aggregator, DriftCorrection):
            self.drift = DriftMemory(rule, server, self.experiment.clients, site.layout.weights)
        self.accountant = accountant_of(self.experiment)
        self._reported_cut = False

    def model_on_cpu(self) -> Tensor:
        """Return the server's model on the CPU, copied once per model."""
        model = self.server.model
        if self._cpu_model is None or self._cpu_model[0] is not model:
            self._cpu_model = model, model.cpu()
        return self._cpu_model[1]

    # -- what topologies use ------------------------------------------------------------------------------------------

    def cohort(self) -> list[Node]:
        """Return the clients selected for this round, in the order of their names."""
        e = self.experiment
        members, count = e.members(self.round), e.asked(self.round)
        again = ("again",) if self.corrections.resample_cohort else ()
        stream = streams.stream(e.seed, "cohort", self.round, *again)
        chosen = torch.randperm(len(members), generator=stream)[:count]
        return [members[index] for index in sorted(chosen.tolist())]

    def train(self, tasks: Iterable[Task], *, timed: bool = True) -> Iterator[Update]:
        """Train the tasks and yield the updates that arrive at their parents, after faults, network and compression.

        Updates come in the order of the tasks; failed ones are left out. A state is valid until the next update is
        taken. With secure aggregation there is one update, of the whole cohort. With `timed`, this is a synchronous
        round on the virtual clock, if the experiment has one; a topology that manages the clock itself passes False.
        """
        corrections, recorder = self.corrections, self.observer.recorder
        tasks = [task for task in map(corrections.adjust_task, tasks) if task.nodes]
        asked = [node for task in tasks for node in task.nodes]
        unmasked: list[Update] = []  # with secure aggregation: what clients hold, and the server never sees
        if timed and self.journey_planner.network is not None:
            timing = self.journey_planner.plan_round(self.round, tasks, self.server.clock)
            tasks = drop_unused(tasks, timing, self.observer)
            self.server.clock = timing.ends
        tasks = self._personal_tasks(tasks)
        self.observer.expect(*(node for task in tasks for node in task.nodes))
        task_of = {node: task for task in tasks for node in task.nodes}
        self.watch.lap("aggregate")  # who calls us: the topology's own work
        batches = self._train_batches(tasks)
        if fault_table.any_collusion(self.experiment.faults, self.round):
            batches = iter([self._apply_collusion(batches)])
        for batch in batches:
            messages: list[Message] = []
            arrived = [update for update in batch if self._receive(update, task_of[update.node], messages)]
            self.observer.transfer_each(messages)
            if self.experiment.secure_aggregation is not None:
                unmasked += self._hold_unmasked(batch, arrived, task_of)
                continue
            excluded = self._report_updates(arrived, task_of)
            tape_recording.messages(self, recorder, batch, arrived, excluded, task_of)
            for update in arrived:
                if update.node not in excluded and not corrections.is_quarantined(update.node, update.group):
                    taken = corrections.adjust_update(update, task_of[update.node].start, self.site.layout.weights)
                    if self.drift is not None:
                        self.drift.received(update.node)
                    self.watch.lap("receive")
                    yield taken
                    self.watch.lap("aggregate")

        if self.experiment.secure_aggregation is not None:
            yield from self._aggregate_securely(asked, unmasked)

    def aggregate(self, updates: Iterable[Update], model: Tensor | None = None, memory: str = RULE) -> Tensor:
        """Return the new model: the experiment's aggregator applied to the server's model (or `model`) and the updates.

        Unusable updates are left out and reported; if none is left, the model is returned unchanged. `memory` is the
        prefix of the aggregator's stored tensors, for topologies with several models.
        """
        before = self.server.model if model is None else model
        own = {key.removeprefix(memory): t for key, t in self.server.memory.items() if key.startswith(memory)}
        rule = self.corrections.aggregator or self.site.adapter_mean or self.experiment.aggregator
        total = rule.begin(before, own, self.site.layout.weights)
        counts_steps = getattr(rule, "counts_steps", False)
        for update in protect_at_server(self, updates, before):
            counted = {"steps": self._settings(update.node).gradient_weight(update.steps)} if counts_steps else {}
            try:
                total.add(update.state, float(update.samples), update.node, **counted)
            except AggregationError as error:
                self.refused(update.node, error)
        try:
            after = total.finish()
        except AggregationError as error:
            self.observer.event("error", "aggregation.failed", f"{error} The model stays as it was.")
            return before.clone()
        self.server.memory |= {memory + key: tensor for key, tensor in own.items()}
        if self.drift is not None:
            after = self.drift.correct(after)
        weights = self.site.layout.weights
        after = fault_table.apply_server(self.experiment.faults, self.round, before, after, weights)
        return self.corrections.adjust_model(before, after, weights)

    def refused(self, node: Node, error: AggregationError) -> None:
        """Report that a client's update cannot be used. The reason is also given as a flag that passes every privacy
        level.
        """
        weight = {"weight": True} if isinstance(error, WeightError) else None
        self.observer.event("error", "update.refused", str(error), node=node, data=weight)

    def passed(self, sender: Node, receiver: Node, times: int = 1, kind: str = "model") -> None:
        """Report that whole models went from one node to another, as one transfer of all their bytes."""
        size = times * self.bytes
        seconds = self.journey_planner.edge_seconds(sender, receiver)
        self.observer.transfer_each([(sender, receiver, size, size, seconds, kind)])

    def groups(self, members: Mapping[str, Sequence[Node]]) -> None:
        """Report the groups of this round if they have changed."""
        here = set(self.experiment.members(self.round))
        groups = {group: [node for node in nodes if node in here] for group, nodes in members.items()}
        if self.server.notes.get("groups") != groups:
            self.server.notes["groups"] = groups
            self.observer.event("info", "groups", f"{len(groups)} groups.", data=groups)

    def present_members(self, groups: Mapping[str, Sequence[Node]]) -> dict[str, tuple[Node, ...]]:
        """Return the members of each group that are selected for this round."""
        cohort = set(self.cohort())
        return {group: tuple(node for node in members if node in cohort) for group, members in groups.items()}

    def client_models(self, states: Mapping[Node, Tensor]) -> tuple[dict[Node, Tensor], dict[Node, Home]]:
        """Return these clients' states as they would receive them, and what they have at home."""
        homes = {} if self.site.home is None else {node: self._home(node) for node in states}
        return {node: self._held_part(node, state) for node, state in states.items()}, homes

    def close_clock(self, *, evaluated: bool) -> None:
        """End the round on the virtual clock, and report its timing."""
        if evaluated:
            self.server.clock += self.journey_planner.evaluate()
        record_round_spans(self.journey_planner.timings, self.observer, metrics=self.experiment.network is not None)
        self.journey_planner.timings = []

    # -- on the way ---------------------------------------------------------------------------------------------------

    def _personal_tasks(self, tasks: Sequence[Task]) -> list[Task]:
        """Return the tasks with what each client has of its own: a shift, a rank, a part at home."""
        if self.drift is not None:
            tasks = self.drift.prepare(tasks, self.experiment.local)
        if not self.site.clients_differ:
            return [*tasks]
        personal, states = [], dict[tuple[int, int | None], Tensor]()
        for task in tasks:
            start, lora = task.start, self.site.lora
            if lora is not None and lora.ranks:
                if len(task.nodes) > 1:
                    raise ConfigError("Clients that train as a group need one rank: leave ranks out of lora.")
                key = (id(task.start), lora.rank_of(task.nodes[0]))
                start = states.setdefault(key, self._held_part(task.nodes[0], task.start))
            homes = None if self.site.home is None else {node: self._home(node) for node in task.nodes}
            personal.append(dataclasses.replace(task, start=start, homes=homes))
        return personal

    def _held_part(self, node: Node, state: Tensor) -> Tensor:
        """Return a state with 0 for what a client of a lower rank does not hold."""
        held = self.site.held(node)
        return state if held is None else torch.where(held.to(state.device), state, 0.0)

    def _home(self, node: Node) -> Home:
        """Return what a client has at home, at first as initialised."""
        assert self.site.home is not None  # noqa: S101 - asked by the caller
        kept = self.server.memory.get(HOME + node)
        return (self.site.home.flat(self.site.module) if kept is None else kept).numpy()

    def _train_batches(self, tasks: Sequence[Task]) -> Iterator[list[Update]]:
        """Yield batches of updates, timing the wait for them separately from reading their measurements."""

        def absorb(payload: bytes) -> None:
            self.watch.lap("wait")
            self.observer.absorb(payload)
            self.watch.lap("receive")

        for batch in self.engine.train(tasks, self.observer, absorb):
            self.watch.lap("wait")
            for update in batch:
                if update.home is not None:
                    self.server.memory[HOME + update.node] = torch.from_numpy(update.home)
                if self.drift is not None and update.error is None:
                    rate = self._settings(update.node).optimizer.learning_rate
                    self.drift.trained(update, rate * update.steps)
            yield batch
            self.watch.lap("receive")

    def _settings(self, node: Node) -> Local:
        """Return the settings with which a client trains in this round."""
        settings = self.corrections.local or self.experiment.local
        return fault_table.apply_local(self.experiment.faults, self.round, node, settings)

    def _apply_collusion(self, batches: Iterator[list[Update]]) -> list[Update]:
        """Collect all updates of the round and apply the attacks that need every client's update."""
        held = []
        for update in itertools.chain.from_iterable(batches):
            update.state = update.state.clone()
            if update.error is None and not update.sent:
                self._apply_sending(update)
                update.sent = True
            held.append(update)
        working = [update for update in held if update.error is None]
        fault_table.apply_collusion(self.experiment.faults, self.round, working, self._past, self.experiment.seed)
        return held

    def _apply_sending(self, update: Update) -> None:
        """Apply what a client does to its update: it protects it, unless a fault sends something else."""
        protect_on_client(self, update)
        fault_table.apply_update(self.experiment.faults, self.round, update, self._past, self.experiment.seed)

    def _receive(self, update: Update, task: Task, messages: list[Message]) -> bool:
        """Apply faults and compression to an update, and add its transfers to the messages; returns whether it is
        usable.
        """
        observer = self.observer
        if update.error is not None:
            if update.error_type in ("WorkerDied", "WorkerKilled"):  # who raised has told of it already
                exception = {"exception": update.error_type}
                observer.event("error", "client.failed", update.error, node=update.node, data=exception)
            return False
        if not update.sent:
            self._apply_sending(update)
        size = self._compress(update, task.start)
        journey = self.journey_planner.journeys.get(update.node)
        # Where a group exchanges at each iteration, the journey holds all those messages; this is one of them.
        times = 1 if task.exchange is None else max(1, update.steps)
        down, up = (None, None) if journey is None else (journey.download / times, journey.upload / times)
        plain = self.bytes - self.site.lacking_bytes(update.node)
        if not is_client(task.parent):  # in a ring the model came as the update of the client before
            messages.append((task.parent, update.node, plain, plain, down, "model"))
        size, plain = size + self.site.vector_bytes, plain - self.site.residual_bytes
        messages.append((update.node, task.parent, size, plain, up, "update"))
        try:
            check_update(update.state, float(update.samples), update.node, task.start)
        except AggregationError as error:  # here, so that no topology has to know
            self.refused(update.node, error)
            return False
        if update.losses.numel():
            self.losses[update.node] = update.losses
        return True

    def _report_updates(self, arrived: Sequence[Update], task_of: Mapping[Node, Task]) -> set[Node]:
        """Show the clients' changes to the observer before aggregation; returns the clients that it wants excluded."""
        sizes = self._sizes
        if not arrived:
            return set()
        sent = self._changes(arrived, task_of)
        parts = zip(*(part.unbind() for part in sent.split(sizes, dim=1)), strict=True)
        rows = zip(arrived, sent.unbind(), parts, strict=True)
        deltas = {update.node: SplitVector(row, own) for update, row, own in rows}
        self.observer.log_each("update.samples", {update.node: float(update.samples) for update in arrived})
        answers = self.observer.updates(self.round, deltas)
        return {action.target for action in answers if action.kind == "exclude" and action.target is not None}

    def _changes(self, arrived: Sequence[Update], task_of: Mapping[Node, Task]) -> Tensor:
        """Return each client's weights minus those that it was trained from, [clients, weights], in new memory."""
        weights = self.site.layout.weights
        states, starts = [update.state for update in arrived], [task_of[update.node].start for update in arrived]
        if not states[0].is_cpu or weights <= SMALL_MODEL:  # a call costs more than its computation
            alike = all(start is starts[0] for start in starts)
            changes = torch.stack([state[:weights] for state in states])
            return changes.sub_(starts[0][:weights] if alike else torch.stack([start[:weights] for start in starts]))
        changes = torch.empty(len(states), weights, dtype=states[0].dtype)
        for change, state, start in zip(changes, states, starts, strict=True):
            torch.sub(state[:weights], start[:weights], out=change)
        return changes

    def _hold_unmasked(
        self, batch: Sequence[Update], arrived: Sequence[Update], task_of: Mapping[Node, Task]
    ) -> Iterator[Update]:
        """Yield copies of the updates that clients will mask, but for the clients that the server leaves out."""
        self.observer.log_each("update.samples", {update.node: float(update.samples) for update in arrived})
        tape_recording.messages(self, self.observer.recorder, batch, (), set(), task_of)
        for update in arrived:
            if not self.corrections.is_quarantined(update.node, update.group):
                held = self.corrections.adjust_update(update, update.start, self.site.layout.weights)
                held.state = held.state.clone()
                yield held

    def _aggregate_securely(self, asked: Sequence[Node], unmasked: Sequence[Update]) -> Iterator[Update]:
        """Yield the mean of all updates as one update, by the protocol; nothing if too few clients are left."""
        e = self.experiment
        assert e.secure_aggregation is not None  # noqa: S101 - asked by the caller
        for update in unmasked[:1]:
            self._report_fallback("secure_aggregation", update.state)
        masked = MaskedRound(e.secure_aggregation, asked, e.seed, self.round)
        changes = {update.node: (update.state - update.start).cpu() for update in unmasked}
        self._report_cut_values(changes, e.secure_aggregation.limit)
        try:
            mean = masked.mean(changes, {update.node: update.samples for update in unmasked})
        except AggregationError as error:
            self.observer.event("error", "secure_aggregation.failed", str(error))
            return
        start = unmasked[0].start
        state = (start.double() + mean.to(start.device)).to(start.dtype)
        yield Update("cohort", state, start, sum(update.samples for update in unmasked))

    def _report_cut_values(self, changes: Mapping[Node, Tensor], limit: float) -> None:
        """Warn, once, if secure aggregation cuts off more than a thousandth of a client's values."""
        if self._reported_cut:
            return
        cut = {node: float((change.abs() > limit).double().mean()) for node, change in changes.items()}
        most = max(cut, key=lambda node: cut[node], default=None)
        if most is not None and cut[most] > 0.001:
            text = (
                f"Secure aggregation cuts changes off at {limit:g}, which strikes {cut[most]:.1%} of the values of "
                f"{most}. Give it a higher limit, or let clients train less."
            )
            self.observer.event("warning", "secure_aggregation.cut", text, data={"share": cut[most]})
            self._reported_cut = True

    def _compress(self, update: Update, start: Tensor) -> int:
        """Compress an update in place, and return its bytes on the wire."""
        if self.experiment.secure_aggregation is not None:
            return self.experiment.secure_aggregation.message_bytes(update.state.numel())
        if self.experiment.compression is None:
            unsent = self.site.lacking_bytes(update.node) + self.site.residual_bytes
            return update.state.numel() * update.state.element_size() - unsent
        self._report_fallback("compression " + kind_of(type(self.experiment.compression).__name__), update.state)
        residual = f"residual/{update.node}"
        kept = self.server.memory.get(residual)
        weights = self.site.layout.weights
        message = send_update(self.experiment.compression, update.state, start, weights, residual=kept)
        update.state = message.state
        if message.residual is not None:
            self.server.memory[residual] = message.residual
        return message.bytes - self.site.residual_bytes

    def _report_fallback(self, part: str, state: Tensor) -> None:
        """Report once that a part of the way is computed on the CPU, if states are elsewhere."""
        if not state.is_cpu and not self._fell_back:
            self._fell_back = True
            device, kind = state.device.type, part.removeprefix("compression ")
            text = f"The {part} runs on the CPU: each update goes there from {device}, and back."
            self.observer.event("info", "device.fallback", text, data={"part": kind, "from": device, "to": "cpu"})


# The server's real time in a round, attributed completely to parts.


class Stopwatch:
    """Attributes the time since the last lap to a part of `fedvitals.time_parts`."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self._parts: dict[str, float] = {}
        self._at = time.perf_counter()

    def lap(self, part: str) -> None:
        now = time.perf_counter()
        self._parts[part] = self._parts.get(part, 0.0) + now - self._at
        self._at = now

    def report(self, observer: Observer) -> None:
        """Report the seconds of each part to the observer."""
        for part, seconds in self._parts.items():
            observer.spent(part, seconds)
