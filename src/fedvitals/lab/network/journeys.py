# SPDX-License-Identifier: Apache-2.0
"""Every client's way through a round on the virtual clock: who is in time, who is late, away or lost.

Journeys are known before anybody trains, since they do not depend on the weights. So a client whose update would not
be used is not trained at all: as in a real deployment, what it measured rides in the message that did not come.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedvitals.lab.compression import update_bytes
from fedvitals.lab.engines.site import Site
from fedvitals.lab.engines.work import Node, Task
from fedvitals.lab.faults import table as ill
from fedvitals.lab.faults.fault import Fault
from fedvitals.lab.network import virtual_clock
from fedvitals.lab.network.timetable import Timetable, synchronous
from fedvitals.lab.network.virtual_clock import EdgeWay, Journey, Network

if TYPE_CHECKING:
    from fedvitals.protocols import Observer

TROUBLES = {
    "late": ("update.late", "was still under way when the round was closed"),
    "failed": ("update.lost", "was lost or unreadable on the way"),
    "absent": ("client.dropped_out", "was asked and is not there"),
}


class Journeys:
    """Without a network in the experiment nothing takes time, but a fault of the links still finds one to strike."""

    def __init__(self, site: Site) -> None:
        self._site = site
        e = site.experiment
        ailing = any(type(fault).journey is not Fault.journey for fault in e.faults)
        self.network: Network | None = e.network or (Network() if ailing else None)
        self.made: dict[Node, Journey] = {}  # of the round that was planned last
        self.ways: dict[Node, EdgeWay] = {}  # of its edge nodes
        self.tables: list[Timetable] = []  # of this round; one, unless a topology trains several times in it
        if self.network is not None:
            self.bytes = site.layout.size * 4  # of a model
            self.flops = site.flops  # counted now: that takes a second, which is no round's

    def of(self, number: int, task: Task, node: Node, began: float = 0.0, queue: float = 0.0) -> Journey:
        """The way of one client of a task."""
        assert self.network is not None  # noqa: S101 - asked by the caller
        e, site = self._site.experiment, self._site
        settings = ill.apply_local(e.faults, number, node, task.local or e.local)
        steps = task.iterations or settings.steps(site.samples(node))
        messages = 1 if task.exchange is None else steps  # who exchanges, sends after each iteration
        made = virtual_clock.journey(
            self.network,
            node,
            number,
            messages * self.bytes,
            messages * self.upload_bytes(),
            self.flops * steps * settings.batch,
            e.seed,
            began=began,
            messages=messages,
            samples=steps * settings.batch,
            queue=queue,
            line=self.network.server_bits_per_second if task.parent == "server" else None,
            group=task.group,
        )
        return ill.apply_journey(e.faults, number, made, e.seed)

    def plan(self, number: int, tasks: Sequence[Task], began: float) -> Timetable:
        """A synchronous round of these tasks, which begins now."""
        assert self.network is not None  # noqa: S101
        e, sent = self._site.experiment, 0  # models that the server has sent
        self.made, self.ways = {}, {}
        for task in tasks:
            queue = self.sending(sent)
            if task.parent == task.group:
                way = virtual_clock.edge_way(self.network, task.parent, number, self.bytes, e.seed, queue)
                self.ways[task.parent] = way
                queue, sent = way.queue + way.download, sent + 1
            for node in task.nodes:
                self.made[node] = one = self.of(number, task, node, began, queue)
                if task.parent == "server" and one.available:
                    sent += 1
                    queue = self.sending(sent)
        needed = None if self.network.over_selection == 1 else max(1, round(e.clients * e.participation))
        averaging = virtual_clock.aggregation_seconds(self.network, len(self.made), self._site.layout.size)
        self.tables.append(
            synchronous(
                [*self.made.values()],
                began=began,
                needed=needed,
                deadline=self.network.deadline_seconds,
                aggregate=averaging,
                ways=self.ways,
            )
        )
        return self.tables[-1]

    def sending(self, receivers: int) -> float:
        """Until the server has sent the model to so many."""
        assert self.network is not None  # noqa: S101
        return virtual_clock.sending_seconds(self.network, self.bytes, receivers)

    def evaluate(self) -> float:
        """Add a test of the model at the server to the round; gives how long that takes."""
        if not self.tables or self.network is None:
            return 0.0
        seconds = virtual_clock.evaluation_seconds(
            self.network, len(self._site.dataset.test_y), self._site.forward_flops
        )
        self.tables[-1] = dataclasses.replace(self.tables[-1], evaluate=seconds)
        return seconds

    def upload_bytes(self) -> int:
        """Of an update on the wire."""
        compression, layout = self._site.experiment.compression, self._site.layout
        return self.bytes if compression is None else update_bytes(compression, layout.size, layout.weights)

    def way_seconds(self, sender: Node, receiver: Node) -> float | None:
        """Of a model between an edge node and the server, where that way takes time."""
        if sender == "server" and receiver in self.ways:
            return self.ways[receiver].download or None
        return (self.ways[sender].upload or None) if receiver == "server" and sender in self.ways else None


def in_time(tasks: Sequence[Task], table: Timetable, observer: Observer) -> list[Task]:
    """The tasks with those members whose updates will be used; of the others the observer hears."""
    for field, (name, words) in TROUBLES.items():
        for node in getattr(table, field):
            whose = node if field == "absent" else f"{node}'s update"
            observer.event("warning", name, f"{whose} {words}.", node=node)
    usable = set(table.accepted)
    left = [dataclasses.replace(task, nodes=tuple(n for n in task.nodes if n in usable)) for task in tasks]
    return [task for task in left if task.nodes]
