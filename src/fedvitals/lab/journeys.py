# SPDX-License-Identifier: Apache-2.0
"""Every client's way through a round on the virtual clock: who is in time, who is late, away or lost.

Journeys are known before anybody trains, since they do not depend on the weights. So a client whose update would not
be used is not trained at all: as in a real deployment, what it measured rides in the message that did not come.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fedvitals.lab import faults as ill
from fedvitals.lab import network
from fedvitals.lab.compression import update_bytes
from fedvitals.lab.fault import Fault
from fedvitals.lab.network import Journey, Network, Timetable, times_told
from fedvitals.lab.site import Site
from fedvitals.lab.work import Node, Task

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

    def of(self, number: int, task: Task, node: Node, began: float = 0.0) -> Journey:
        """The way of one client of a task."""
        assert self.network is not None  # noqa: S101 - asked by the caller
        e, site = self._site.experiment, self._site
        settings = ill.apply_local(e.faults, number, node, task.local or e.local)
        steps = task.iterations or settings.steps(site.samples(node))
        messages = 1 if task.exchange is None else steps  # who exchanges, sends after each iteration
        down, up = messages * site.layout.size * 4, messages * self.upload_bytes()
        flops = site.flops * steps * settings.batch
        made = network.journey(self.network, node, number, down, up, flops, e.seed, began=began, messages=messages)
        return ill.apply_journey(e.faults, number, made, e.seed)

    def timetable(self, number: int, tasks: Sequence[Task], began: float) -> Timetable:
        """A synchronous round of these tasks."""
        assert self.network is not None  # noqa: S101
        e = self._site.experiment
        made = [self.of(number, task, node, began) for task in tasks for node in task.nodes]
        needed = None if self.network.over_selection == 1 else max(1, round(e.clients * e.participation))
        averaging = network.aggregation_seconds(self.network, len(made), self._site.layout.size)
        self.made = {one.node: one for one in made}
        limit = self.network.deadline_seconds
        return network.synchronous(made, began=began, needed=needed, deadline=limit, aggregate=averaging)

    def upload_bytes(self) -> int:
        """Of an update on the wire."""
        compression, layout = self._site.experiment.compression, self._site.layout
        return layout.size * 4 if compression is None else update_bytes(compression, layout.size, layout.weights)


def in_time(tasks: Sequence[Task], table: Timetable, observer: Observer) -> list[Task]:
    """The tasks with those members whose updates will be used; of the others the observer hears."""
    for field, (name, words) in TROUBLES.items():
        for node in getattr(table, field):
            whose = node if field == "absent" else f"{node}'s update"
            observer.event("warning", name, f"{whose} {words}.", node=node)
    usable = set(table.accepted)
    left = [dataclasses.replace(task, nodes=tuple(n for n in task.nodes if n in usable)) for task in tasks]
    return [task for task in left if task.nodes]


def tell(table: Timetable, made: Mapping[Node, Journey], observer: Observer) -> None:
    """The round's spans; a client whose clock is wrong tells its own by that clock."""
    for part in table.stretches:
        skew = made[part.node].clock_offset if part.node in made else 0.0
        observer.span(part.node, part.name, part.began + skew, part.seconds, clock="virtual")
    for node in table.accepted:
        observer.log(times_told(made[node]), node=node)
    observer.span(None, "round.virtual", table.began, table.seconds, clock="virtual")
    observer.log({"time.round_virtual": table.seconds})
