# SPDX-License-Identifier: Apache-2.0
"""Plans every client's journey through a round on the virtual clock: who is in time, late, absent or lost.

Journeys are known before anybody trains, since they do not depend on the weights. A client whose update would not be
used is therefore not trained at all: as in a real deployment, its telemetry is lost with its message.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedvitals.lab.compression import update_bytes
from fedvitals.lab.engines.site import Site
from fedvitals.lab.engines.tasks import Node, Task
from fedvitals.lab.faults import table as fault_table
from fedvitals.lab.faults.fault import Fault
from fedvitals.lab.network import virtual_clock
from fedvitals.lab.network.round_timing import RoundTiming, time_synchronous_round
from fedvitals.lab.network.virtual_clock import EdgeTransfer, Journey, Network

if TYPE_CHECKING:
    from fedvitals.protocols import Observer

UNUSED_EVENTS = {
    "late": ("update.late", "was still under way when the round was closed"),
    "failed": ("update.lost", "was lost or unreadable on the way"),
    "absent": ("client.dropped_out", "was asked and is not there"),
}


class JourneyPlanner:
    """Plans the journeys of a federation's clients.

    Without a network in the experiment nothing takes time, but faults of the links still apply to a default one.
    """

    def __init__(self, site: Site) -> None:
        self._site = site
        e = site.experiment
        has_link_faults = any(type(fault).journey is not Fault.journey for fault in e.faults)
        self.network: Network | None = e.network or (Network() if has_link_faults else None)
        self.journeys: dict[Node, Journey] = {}  # of the round that was planned last
        self.edge_transfers: dict[Node, EdgeTransfer] = {}  # of its edge nodes
        self.timings: list[RoundTiming] = []  # of this round; one, unless a topology trains several times in it
        if self.network is not None:
            self.bytes = site.layout.size * 4 + site.vector_bytes  # of a model
            self.flops = site.flops  # counted now: that takes a second, which is no round's

    def journey_of(self, round_index: int, task: Task, node: Node, began: float = 0.0, queue: float = 0.0) -> Journey:
        """Return the journey of one client of a task."""
        assert self.network is not None  # noqa: S101 - asked by the caller
        e, site = self._site.experiment, self._site
        settings = fault_table.apply_local(e.faults, round_index, node, task.local or e.local)
        steps = task.iterations or settings.steps(site.samples(node, round_index))
        messages = 1 if task.exchange is None else (steps - 1) // task.every + 1  # who exchanges, sends each time
        lacking = site.lacking_bytes(node)
        journey = virtual_clock.plan_journey(
            self.network,
            node,
            round_index,
            messages * (self.bytes - lacking),
            messages * (self.upload_bytes() - lacking),
            self.flops * steps * settings.step_samples,
            e.seed,
            began=began,
            messages=messages,
            samples=steps * settings.step_samples,
            queue=queue,
            line=self.network.server_bits_per_second if task.parent == "server" else None,
            group=task.group,
        )
        return fault_table.apply_journey(e.faults, round_index, journey, e.seed)

    def plan_round(self, round_index: int, tasks: Sequence[Task], began: float) -> RoundTiming:
        """Plan a synchronous round of these tasks that begins now, and return its timing."""
        assert self.network is not None  # noqa: S101
        e, sent = self._site.experiment, 0  # models that the server has sent
        self.journeys, self.edge_transfers = {}, {}
        for task in tasks:
            queue = self.sending_seconds(sent)
            if task.parent == task.group:
                edge = virtual_clock.edge_transfer(self.network, task.parent, round_index, self.bytes, e.seed, queue)
                self.edge_transfers[task.parent] = edge
                queue, sent = edge.queue + edge.download, sent + 1
            for node in task.nodes:
                self.journeys[node] = journey = self.journey_of(round_index, task, node, began, queue)
                if task.parent == "server" and journey.available:
                    sent += 1
                    queue = self.sending_seconds(sent)
        needed = None if self.network.over_selection == 1 else e.needed(round_index)
        averaging = virtual_clock.aggregation_seconds(self.network, len(self.journeys), self._site.layout.size)
        timing = time_synchronous_round(
            [*self.journeys.values()],
            began=began,
            needed=needed,
            deadline=self.network.deadline_seconds,
            aggregate=averaging,
            edge_transfers=self.edge_transfers,
        )
        self.timings.append(timing)
        return timing

    def sending_seconds(self, receivers: int) -> float:
        """Return the seconds until the server has sent the model to this many receivers."""
        assert self.network is not None  # noqa: S101
        return virtual_clock.sending_seconds(self.network, self.bytes, receivers)

    def evaluate(self) -> float:
        """Add an evaluation at the server to the round; returns its seconds."""
        if not self.timings or self.network is None:
            return 0.0
        samples, flops = len(self._site.dataset.test_y), self._site.forward_flops
        seconds = virtual_clock.evaluation_seconds(self.network, samples, flops)
        self.timings[-1] = dataclasses.replace(self.timings[-1], evaluate=seconds)
        return seconds

    def upload_bytes(self) -> int:
        """Return the bytes of an encoded update."""
        e, layout = self._site.experiment, self._site.layout
        if e.secure_aggregation is not None:
            return e.secure_aggregation.message_bytes(layout.size)
        if e.compression is None:
            return self.bytes - self._site.residual_bytes
        whole = update_bytes(e.compression, layout.size, layout.weights) + self._site.vector_bytes
        return whole - self._site.residual_bytes

    def edge_seconds(self, sender: Node, receiver: Node) -> float | None:
        """Return the seconds of a model's transfer between an edge node and the server, or None if it takes no time."""
        if sender == "server" and receiver in self.edge_transfers:
            return self.edge_transfers[receiver].download or None
        if receiver == "server" and sender in self.edge_transfers:
            return self.edge_transfers[sender].upload or None
        return None


def drop_unused(tasks: Sequence[Task], timing: RoundTiming, observer: Observer) -> list[Task]:
    """Return the tasks without the members whose updates will not be used, and report those to the observer."""
    for field, (name, words) in UNUSED_EVENTS.items():
        for node in getattr(timing, field):
            whose = node if field == "absent" else f"{node}'s update"
            observer.event("warning", name, f"{whose} {words}.", node=node)
    usable = set(timing.accepted)
    left = [dataclasses.replace(task, nodes=tuple(n for n in task.nodes if n in usable)) for task in tasks]
    return [task for task in left if task.nodes]
