# SPDX-License-Identifier: Apache-2.0
"""A stack's steps on CUDA: captured once for a shape, replayed for every step of every round.

Started one by one, a step's kernels leave the device waiting for Python most of the time. So the memory of a step (a
*room*) is kept, and what is done in it is captured as graphs: gradients with losses, then clipping and statistics, then
the optimiser. Whatever differs from step to step is looked up on the device, in tables made before the round, at the
line that a counter there names. Who has fewer steps than the others, or has failed, rests by its line in the table; a
stack with fewer clients than the room has leaves rows at rest. So neither needs a graph of its own.

Faults that act at a step, and whoever watches, come between two graphs. Nobody waits for the device before the round
is over, but where a client is to be stopped at a loss that is not finite.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from fedvitals.kernels.cuda import stacked_optimizer as kernel
from fedvitals.kernels.cuda.graphs import captured
from fedvitals.kernels.cuda.sums import DeviceRing
from fedvitals.lab.engines.work import Task
from fedvitals.lab.local import SGD, Adam
from fedvitals.lab.stacked.plans import Plan, plans
from fedvitals.lab.stacked.round import Crew, clip, moments_of
from fedvitals.lab.topologies.exchanges import Together, together
from fedvitals.protocols import Stack, WorkerObserver
from fedvitals.stats import INFS, NANS, SUM_SQUARES

if TYPE_CHECKING:
    from fedvitals.lab.stacked.steps import Stacked

_LOG = logging.getLogger("fedvitals.lab")
_WARM_UPS = 2  # what is compiled or chosen at a first call is so before the capture
_NEARLY = 1.3
_TIMED = 3  # replays of each plan, of which the quickest counts

_FEW = 8  # clients whose memory is measured
_SHARE = 0.6  # of the free memory that a stack may take: what watches it needs some, too

# By what they depend on: a process asks once.
_chosen: dict[Hashable, str] = {}  # the quickest plan's name
_most: dict[Hashable, int] = {}  # clients that fit


class Replayed(Protocol):
    def replay(self) -> None: ...


class AtOnce:
    """In place of a graph that could not be captured: the work itself."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = work


def _pool(device: torch.device) -> Any:
    """Memory that graphs share; they are never replayed at the same time."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


class Room:
    """Memory for so many clients and steps; one line more, at which everybody rests."""

    def __init__(self, desk: Stacked, clients: int, steps: int) -> None:
        layout, device, local = desk.layout, desk.device, desk.site.experiment.local
        self.desk, self.clients, self.steps = desk, clients, steps
        self.states = torch.zeros(clients, layout.size, device=device)
        self.starts: Tensor | None = None  # where there is a pull towards them
        self.gradients = torch.zeros(clients, layout.weights, device=device)
        self.weights, self.layers = layout.views(self.states), layout.views(self.gradients)
        self.moments = [torch.zeros_like(self.gradients) for _ in range(moments_of(local.optimizer))]
        self.rows = torch.zeros(steps + 1, clients, local.batch, dtype=torch.int64, device=device)
        self.table = torch.zeros(steps + 1, clients, 3, device=device)
        self.proximal = torch.zeros(clients, 1, device=device)
        self.losses = torch.zeros(steps + 1, clients, device=device)
        self.counter = torch.zeros(1, dtype=torch.int64, device=device)
        self.sizes = [view.numel() // clients for view in self.layers.values()]
        numbers = torch.arange(len(self.sizes), dtype=torch.int32)
        self.layer_of = numbers.repeat_interleave(torch.tensor(self.sizes)).to(device)
        self._rings: dict[str, DeviceRing] = {}
        self._graphs: dict[tuple[Hashable, ...], Replayed] = {}
        self._data: tuple[Tensor, Tensor] | None = None
        self._pool = _pool(device)

    def ring(self, name: str, slots: int) -> DeviceRing:
        if name not in self._rings:
            trained = [True] * len(self.sizes)
            self._rings[name] = DeviceRing(self.sizes, trained, self.clients, slots, self.desk.device)
        return self._rings[name]

    def graph(self, key: tuple[Hashable, ...], work: Callable[[], None]) -> Replayed:
        """The work as a graph, captured where it is new: tried before at the line where everybody rests."""
        if key not in self._graphs:
            now = self.counter.clone()

            def rested() -> None:
                self.counter.fill_(self.steps)
                work()

            try:
                self._graphs[key] = captured(work, [rested] * _WARM_UPS, self._pool)
            except (RuntimeError, Warning) as error:
                _LOG.warning("A step could not be captured as a CUDA graph, and is started call by call: %s", error)
                self._graphs[key] = AtOnce(work)
            self.counter.copy_(now)
        return self._graphs[key]

    def hold(self, x: Tensor, y: Tensor) -> None:
        """These are the data now; graphs that read others are of no use."""
        if self._data is None or self._data[0] is not x:
            self._graphs.clear()
            self._pool = _pool(x.device)  # one whose graphs are all gone cannot be used again
            self._data = (x, y)


class Rooms:
    """A desk's rooms: another one where the clients, or their steps, are more than before, or far fewer."""

    def __init__(self, desk: Stacked) -> None:
        self.desk = desk
        self.plans = plans(desk.module, desk.device, desk.precision)
        self.ahead: tuple[Any, Tensor] | None = None  # the next round's batches, drawn while the device was busy
        self._made: list[Room] = []

    def crew(self, tasks: Sequence[Task], watcher: WorkerObserver | None) -> DeviceCrew:
        return DeviceCrew(self.desk, tasks, self, watcher)

    def fitting(self, clients: int, steps: int) -> Room:
        for room in self._made:
            if clients <= room.clients <= max(8, 2 * clients) and steps <= room.steps:
                return room
        e = self.desk.site.experiment
        usual = min(max(1, round(e.clients * e.participation)), self.largest(e.clients))
        wide = usual if clients <= usual <= 2 * clients else clients  # a cohort from which some drop out fits, too
        long = max(16, 1 << (steps - 1).bit_length())
        # One that this one can stand in for is given up: else cohorts of ever other sizes would fill the memory.
        self._made = [
            old for old in self._made if not old.clients <= wide <= max(8, 2 * old.clients) or old.steps > long
        ]
        room = Room(self.desk, wide, long)
        self._made.append(room)
        return room

    def largest(self, members: int) -> int:
        """How many clients fit into the device's memory at once, by what a few of them take."""
        if self.desk.device.type != "cuda" or members <= _FEW:
            return members
        key = (*self.key, members)
        if key not in _most:
            free = torch.cuda.mem_get_info(self.desk.device)[0]
            _most[key] = max(1, min(members, int(_SHARE * free / self._bytes_each())))
        return _most[key]

    def _bytes_each(self) -> float:
        """Of one client while it trains: its rows of everything, and what a step needs on its way."""
        desk = self.desk
        x, y, firsts, _ = desk.samples.training(desk.site.experiment.nodes, 0)
        torch.cuda.synchronize(desk.device)
        torch.cuda.reset_peak_memory_stats(desk.device)
        before = torch.cuda.memory_allocated(desk.device)
        room = Room(desk, _FEW, 1)
        rows = firsts[:1].to(x.device).expand(_FEW * room.rows.shape[2])
        shape = (_FEW, room.rows.shape[2])
        samples = (x.index_select(0, rows).unflatten(0, shape), y.index_select(0, rows).view(shape))
        for plan in self.plans:
            try:
                plan.gradients(room.weights, room.layers, *samples)
            except Exception as error:  # noqa: BLE001 - whatever a compiler says; the simplest plan needs none
                _LOG.warning("The plan «%s» cannot be used here: %s", plan.name, error)
            else:
                break
        torch.cuda.synchronize(desk.device)
        return (torch.cuda.max_memory_allocated(desk.device) - before) / _FEW

    @property
    def key(self) -> tuple[Hashable, ...]:
        """What the speed and the memory of a step depend on, but for the number of clients."""
        desk = self.desk
        return (repr(desk.module), desk.site.experiment.local.batch, desk.precision, str(desk.device))


class DeviceCrew(Crew):
    """The clients of one stack, in a room."""

    def __init__(self, desk: Stacked, tasks: Sequence[Task], rooms: Rooms, watcher: WorkerObserver | None) -> None:
        self._rooms, self._watched = rooms, watcher is not None
        self._taken, self._pulled = 0, False
        super().__init__(desk, tasks)
        self._fill_table()
        self.desk.plan = self._quickest()
        # What a captured graph depends on, besides its data.
        self._mark = (self.desk.plan.name, self.local.clip, self._kind(), self._watched, self._pulled)
        spoilt = bool(self.spoilers) or self.stop_at_nonfinite
        parts = [[self._differentiate], [self._measure]] if spoilt else [[self._differentiate, self._measure]]
        self._graphs = [
            self._graph(f"{number}{spoilt}", work) for number, work in enumerate([*parts, [self._optimise]])
        ]
        self._together = self._exchanges()
        self.room.counter.zero_()

    def make_room(self) -> None:
        clients, steps = len(self.nodes), len(self.losses)
        self.room = room = self._rooms.fitting(clients, steps)
        room.states[:clients] = self._starts()
        self._pulled = any(local.proximal for local in self.settings)
        if self._pulled:
            room.starts = torch.zeros_like(room.states) if room.starts is None else room.starts
            room.starts[:clients] = room.states[:clients]
            pulls = [[local.proximal] for local in self.settings]
            room.proximal[:clients] = torch.tensor(pulls, device=room.states.device)
        self.states, self.gradients = room.states[:clients], room.gradients[:clients]
        self.losses = room.losses[:steps, :clients]
        self.moments = [moment[:clients].zero_() for moment in room.moments]
        room.hold(self.x, self.y)
        room.rows[:, clients:] = 0
        room.rows[:steps, :clients] = self.batches(self.number).to(room.rows.device, non_blocking=True)

    def batches(self, number: int) -> Tensor:
        ahead, self._rooms.ahead = self._rooms.ahead, None
        if ahead is not None and ahead[0] == self._drawn_for(number):
            return ahead[1]
        return super().batches(number)

    def look_ahead(self) -> None:
        """The device is busy with this round: time to draw the batches of the next, in case it has the same clients."""
        self._rooms.ahead = (self._drawn_for(self.number + 1), super().batches(self.number + 1))

    def _drawn_for(self, number: int) -> Any:
        """All that batches depend on."""
        return number, self.local.batch, self.nodes, *(t.tolist() for t in (self.steps, self.samples, self.firsts))

    def _starts(self) -> Tensor:
        """One copy of what all members begin from; the same for everybody in most topologies."""
        if all(task.start is self.tasks[0].start for task in self.tasks):
            return self.tasks[0].start.to(self.desk.device).expand(len(self.nodes), -1)
        return super()._starts()

    def _fill_table(self) -> None:
        """Rates, Adam's corrections and whose turn it is, for each step; computed in float64."""
        steps, clients = self.losses.shape
        optimizer = self.local.optimizer
        rates = torch.tensor([local.optimizer.learning_rate for local in self.settings], dtype=torch.float64)
        table = torch.zeros(steps, clients, 3, dtype=torch.float64)
        table[..., kernel.RATE], table[..., kernel.SCALE] = rates, 1.0
        if isinstance(optimizer, Adam):
            counts = torch.tensor(self.before, dtype=torch.float64) + torch.arange(1, steps + 1)[:, None]
            table[..., kernel.RATE] /= 1 - optimizer.beta1**counts
            table[..., kernel.SCALE] = (1 - optimizer.beta2**counts) ** -0.5
        table[..., kernel.ACTIVE] = torch.arange(steps)[:, None] < self.steps
        self.room.table.zero_()
        self.room.table[:steps, :clients] = table.float().to(self.room.table.device, non_blocking=True)

    def _kind(self) -> tuple[str, tuple[float, float], float]:
        optimizer = self.local.optimizer
        if isinstance(optimizer, SGD):
            return ("momentum" if optimizer.momentum else "sgd", (optimizer.momentum, 0.0), 0.0)
        return ("adam", (optimizer.beta1, optimizer.beta2), optimizer.epsilon)

    def _graph(self, name: str, work: Sequence[Callable[[], None]]) -> Replayed:
        def all_of_it() -> None:
            for part in work:
                part()

        return self.room.graph((name, self._mark), all_of_it)

    # -- what is captured ---------------------------------------------------------------------------------------------

    def _differentiate(self) -> None:
        room = self.room
        rows = room.rows.index_select(0, room.counter)[0]
        x = self.x.index_select(0, rows.view(-1)).unflatten(0, rows.shape)
        y = self.y.index_select(0, rows.view(-1)).view(rows.shape)
        losses = self.desk.plan.gradients(room.weights, room.layers, x, y)
        room.losses.index_copy_(0, room.counter, losses[None])

    def _measure(self) -> None:
        room = self.room
        if self._pulled and room.starts is not None:
            room.gradients.addcmul_(room.states - room.starts, room.proximal)
        if self.local.clip is not None:
            self._clip()
        if self._watched:
            room.ring("statistics", room.steps + 1).record(room.gradients, room.counter)

    def _clip(self) -> None:
        settings, room = self.local.clip, self.room
        assert settings is not None  # noqa: S101 - asked by the caller
        if settings.by == "value":
            clip(room.gradients, room.layers, settings)
            return
        sums = room.ring("clipping", 1)
        sums.record(room.gradients, room.counter)
        found = sums.ring[0]
        if settings.by == "whole":
            found = found.sum(1, keepdim=True)
        norms = found[..., SUM_SQUARES].sqrt()
        # The sums leave out what is not finite; a norm does not.
        norms = norms.masked_fill(found[..., INFS] > 0, torch.inf).masked_fill(found[..., NANS] > 0, torch.nan)
        factors = (settings.limit / norms).clamp(max=1.0).float().expand(-1, len(room.sizes)).contiguous()
        kernel.scale(room.gradients, factors, room.layer_of)

    def _optimise(self) -> None:
        room, (kind, betas, epsilon) = self.room, self._kind()
        kernel.step(kind, room.states, room.gradients, room.moments, room.table, room.counter, betas, epsilon)
        room.counter.add_(1)

    # -- a step -------------------------------------------------------------------------------------------------------

    def step(self, step: int, watcher: WorkerObserver | None) -> None:
        *before, optimise = self._graphs
        before[0].replay()
        if self.stop_at_nonfinite:
            self.stop_where_not_finite(self.losses[step], step)
        known = len(self.failed)
        if self.spoilers or self.stepping:
            self.before_step(step)
        if len(self.failed) > known or self.stop_at_nonfinite:
            for row, node in enumerate(self.nodes):
                if node in self.failed:
                    self.room.table[step:, row, kernel.ACTIVE] = 0
        for graph in before[1:]:
            graph.replay()
        if watcher is not None:
            watcher.stack_step(step, self.gradients, self.losses[step])
        optimise.replay()
        self._taken = step + 1

    def stack(self) -> Stack:
        layout, plan = self.desk.layout, self.desk.plan
        ring = self.room.ring("statistics", self.room.steps + 1).ring
        return dataclasses.replace(
            super().stack(),
            forward=lambda states, x: plan.outputs(layout.views(states), x),
            sums=lambda: ring[: self._taken, : len(self.nodes)],
        )

    def _exchanges(self) -> Together | None:
        kinds = {task.exchange for task in self.tasks}
        if kinds == {None} or len(kinds) > 1:
            return None
        (exchange,) = kinds
        assert exchange is not None  # noqa: S101 - asked above
        return together(exchange, self.members(), self.samples, self.desk.device)

    def exchange(self) -> None:
        if self._together is not None:
            self._together(self.states)
        elif any(task.exchange is not None for task in self.tasks):
            super().exchange()

    # -- the quickest plan --------------------------------------------------------------------------------------------

    def _quickest(self) -> Plan:
        """Measured once per process for a network and a shape, in graphs as they are used."""
        desk, room, found = self.desk, self.room, self._rooms.plans
        key = (*self._rooms.key, room.clients)
        if key not in _chosen:
            times = {}
            room.counter.fill_(room.steps)  # the line where everybody rests
            for plan in found if len(found) > 1 else ():
                desk.plan = plan
                try:
                    warm_ups = [self._differentiate] * _WARM_UPS
                    times[plan.name] = _seconds(captured(self._differentiate, warm_ups, _pool(desk.device)))
                except Exception as error:  # noqa: BLE001 - no memory, no graph of it, or Triton cannot compile it
                    _LOG.info("The plan '%s' cannot be used here: %s", plan.name, error)
            _chosen[key] = _clearly_quickest(times) if times else found[-1].name
        return next(plan for plan in found if plan.name == _chosen[key])


def _clearly_quickest(times: Mapping[str, float]) -> str:
    """The quickest; but the first of those that are nearly as quick, so that each process chooses the same."""
    return next(name for name in times if times[name] <= _NEARLY * min(times.values()))


def _seconds(graph: Replayed) -> float:
    """Of one replay."""
    times = []
    for _ in range(_TIMED):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)))
    return min(times)
