# SPDX-License-Identifier: Apache-2.0
"""How a population changes over the rounds: clients that join and leave, new data, and seasons. None of it is a fault.

A change is a function from a client's shard to another shard, so training, local tests, the network's times and all
engines follow it. It depends on (seed, its kind and position, node) and on its phase only; the shards of two rounds in
the same phases are equal.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import torch
from torch import Tensor

from fedvitals.errors import ConfigError
from fedvitals.lab.data.datasets import Dataset
from fedvitals.lab.data.partition import Shard, log_gammas
from fedvitals.lab.description import Description, Part, kind_of, require
from fedvitals.lab.engines.tasks import Node
from fedvitals.lab.streams import stream

if TYPE_CHECKING:
    from fedvitals.lab.experiment import Experiment
    from fedvitals.protocols import Observer


@dataclass(frozen=True, eq=False)
class Pool:
    """The samples of all clients, from which new data are drawn: those for training and those for local tests."""

    dataset: Dataset
    shards: Sequence[Shard]

    @functools.cached_property
    def train(self) -> list[Tensor]:
        """The training samples of each class."""
        return self._by_class(torch.cat([shard.train for shard in self.shards]))

    @functools.cached_property
    def test(self) -> list[Tensor]:
        """The samples of local tests of each class."""
        return self._by_class(torch.cat([shard.test for shard in self.shards]))

    def _by_class(self, members: Tensor) -> list[Tensor]:
        members, labels = members.sort().values, self.dataset.labels
        return [members[labels[members] == label] for label in range(self.dataset.classes)]

    def counts(self, members: Tensor) -> Tensor:
        """Return the numbers of samples of each class, [classes]."""
        return torch.bincount(self.dataset.labels[members], minlength=self.dataset.classes)


class NewData(Description, frozen=True, kw_only=True):
    """From some round on a client has other samples, drawn from those of all clients, its own coming last. Its local
    test is drawn in the same way from the local tests.

    Args:
        nodes: The clients.
        since: The first round with the new samples.
        alpha: The new label mix is drawn from a Dirichlet distribution with this concentration; None: it stays the
            same.
        factor: How many times as many samples as before, as far as all clients together have enough.
    """

    nodes: tuple[str, ...] | str = "all"
    since: int
    alpha: float | None = None
    factor: float = 1.0

    def __post_init__(self) -> None:
        _check_nodes(self)
        require(self.since >= 1, "first round (since) of new_data", self.since, "1 or more")
        require(self.alpha is None or 0 < self.alpha < math.inf, "alpha of new_data", self.alpha, "above 0 and finite")
        require(0 < self.factor < math.inf, "factor of new_data", self.factor, "above 0 and finite")

    def phase(self, round_index: int) -> int | None:
        """Return a number that is the same in rounds of the same data; None: as dealt."""
        return 0 if round_index >= self.since else None

    def apply(self, shard: Shard, phase: int, pool: Pool, generator: torch.Generator) -> Shard:  # noqa: ARG002
        """Return the client's shard in this phase."""
        mix = pool.counts(shard.train).double()
        if self.alpha is not None:
            nowhere = torch.tensor([len(members) == 0 for members in pool.train])
            logs = log_gammas(self.alpha, len(mix), generator).masked_fill(nowhere, -torch.inf)
            mix = torch.softmax(logs, 0)
        train = self._draw(shard.train, pool.train, mix, generator)
        return dataclasses.replace(shard, train=train, test=self._draw(shard.test, pool.test, mix, generator))

    def _draw(self, held: Tensor, pool: list[Tensor], mix: Tensor, generator: torch.Generator) -> Tensor:
        there = torch.tensor([len(members) for members in pool])
        count = max(1, round(self.factor * len(held))) if len(held) else 0
        drawn = [held[:0]]
        for members, number in zip(pool, apportion(mix, count, there), strict=True):
            order = members[torch.randperm(len(members), generator=generator)]
            own = torch.isin(order, held)
            drawn.append(torch.cat([order[~own], order[own]])[:number])
        return torch.cat(drawn).sort().values


class Season(Description, frozen=True, kw_only=True):
    """Data that repeat after some rounds. In round r the pixels are multiplied by 1 + brightness · sin(2π r / period),
    and the share of the samples of class c that is present is proportional to
    1 + labels · cos(2π (r / period − c / classes)): each class has a season of its own.

    Args:
        nodes: The clients, or «all».
        period: The number of rounds.
        brightness: By how much brightness swings.
        labels: By how much classes come and go.
    """

    nodes: tuple[str, ...] | str = "all"
    period: int = 12
    brightness: float = 0.0
    labels: float = 0.0

    def __post_init__(self) -> None:
        _check_nodes(self)
        require(self.period >= 2, "period of season", self.period, "2 rounds or more")
        require(0 <= self.brightness < 1, "brightness of season", self.brightness, "from 0, below 1")
        require(0 <= self.labels <= 1, "labels of season", self.labels, "from 0 to 1")
        require(
            self.brightness + self.labels > 0, "brightness and labels of season", 0, "above 0, one of them at least"
        )

    def phase(self, round_index: int) -> int | None:
        """Return a number that is the same in rounds of the same data; None: as dealt."""
        return round_index % self.period

    def apply(self, shard: Shard, phase: int, pool: Pool, generator: torch.Generator) -> Shard:
        """Return the client's shard in this phase."""
        light = shard.brightness * (1 + self.brightness * math.sin(2 * math.pi * phase / self.period))
        if not self.labels:
            return dataclasses.replace(shard, brightness=light)
        classes = torch.arange(pool.dataset.classes, dtype=torch.float64)
        swing = 1 + self.labels * torch.cos(2 * math.pi * (phase / self.period - classes / len(classes)))
        train, test = (
            self._in_season(held, swing / (1 + self.labels), pool, generator) for held in (shard.train, shard.test)
        )
        return dataclasses.replace(shard, train=train if len(train) else shard.train[:1], test=test, brightness=light)

    def _in_season(self, held: Tensor, shares: Tensor, pool: Pool, generator: torch.Generator) -> Tensor:
        """Return the share of each class that is there, the same samples whenever it is that large."""
        order = held[torch.randperm(len(held), generator=generator)]
        numbers = (shares * pool.counts(held)).round().long().tolist()
        labels = pool.dataset.labels[order]
        parts = [order[labels == label][:number] for label, number in enumerate(numbers)]
        return torch.cat(parts).sort().values


CHANGES = (NewData, Season)


class Population(Part, frozen=True):
    """Who is in the federation when, and how the clients' data change. A client that leaves before it joins is away in
    between.

    Args:
        joins: The first round in which a client may be asked, by client.
        leaves: The first round in which it no longer is, by client.
        changes: `lab.NewData` and `lab.Season`.
    """

    joins: dict[str, int] = msgspec.field(default_factory=dict)
    leaves: dict[str, int] = msgspec.field(default_factory=dict)
    changes: tuple[NewData | Season, ...] = ()

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "changes", tuple(self.changes))
        for field in ("joins", "leaves"):
            for node, first in getattr(self, field).items():
                require(first >= 1, f"round in which {node} {field}", first, "1 or more: all begin in round 0")
        for node in self.joins:
            fits = self.joins[node] != self.leaves.get(node)
            require(fits, f"round in which {node} leaves", self.joins[node], "another than the one in which it joins")

    def check(self, experiment: Experiment) -> None:
        """Raise ConfigError for clients and rounds that the experiment does not have, and rounds without clients."""
        nodes, last = set(experiment.nodes), experiment.rounds - 1
        changed = [node for change in self.changes if change.nodes != "all" for node in change.nodes]
        for node in (*self.joins, *self.leaves, *changed):
            if node not in nodes:
                known = f"{experiment.nodes[0]} to {experiment.nodes[-1]}"
                raise ConfigError(f"There is no client '{node}' in the population. Known: {known}.")
        for first in (*self.joins.values(), *self.leaves.values(), *self._rounds_of_new_data()):
            require(first <= last, "round in which the population changes", first, f"in the run, up to {last}")
        if not self.fewest(experiment.nodes):
            raise ConfigError("The population is empty in some round: let one of the clients stay.")

    def check_data(self, dataset: Dataset) -> None:
        """Raise ConfigError if the data set cannot change like this."""
        for change in self.changes:
            season = change if isinstance(change, Season) else None
            if season is not None and season.brightness and dataset.vocabulary is not None:
                raise ConfigError(f"The samples of {dataset.name} are tokens: they have no brightness for a season.")

    def present(self, nodes: tuple[Node, ...], round_index: int) -> tuple[Node, ...]:
        """Return those of the clients that are in the federation in a round, in their order."""
        away = {node for node in (*self.joins, *self.leaves) if not self._is_present(node, round_index)}
        return tuple(node for node in nodes if node not in away) if away else nodes

    def _is_present(self, node: Node, round_index: int) -> bool:
        joins, leaves = self.joins.get(node, 0), self.leaves.get(node, math.inf)
        if joins < leaves:
            return joins <= round_index < leaves
        return round_index < leaves or round_index >= joins

    def fewest(self, nodes: tuple[Node, ...]) -> int:
        """Return the number of clients in the round in which they are fewest."""
        rounds = {0, *self.joins.values(), *self.leaves.values()}
        return min(len(self.present(nodes, round_index)) for round_index in rounds)

    def phases(self, round_index: int) -> tuple[int | None, ...]:
        """Return each change's phase in a round: rounds of equal phases have equal data."""
        return tuple(change.phase(round_index) for change in self.changes)

    def shard(self, shard: Shard, node: Node, phases: Sequence[int | None], pool: Pool, seed: int) -> Shard:
        """Return a client's shard in these phases of the changes, from the one that it was dealt."""
        for place, (change, phase) in enumerate(zip(self.changes, phases, strict=True)):
            if phase is not None:
                generator = stream(seed, f"population/{kind_of(type(change).__name__)}/{place}", node)
                shard = change.apply(shard, phase, pool, generator)
        return shard

    def rounds_of_change(self, rounds: int) -> list[int]:
        """Return a round of each phase that the data of the run go through."""
        periods = [change.period for change in self.changes if isinstance(change, Season)]
        return sorted({0, *self._rounds_of_new_data(), *range(min(rounds, math.lcm(*periods)) if periods else 1)})

    def _rounds_of_new_data(self) -> Iterator[int]:
        return (change.since for change in self.changes if isinstance(change, NewData))

    def announce(self, experiment: Experiment, round_index: int, observer: Observer) -> None:
        """Report to the observer what begins in this round."""
        here = set(self.present(experiment.nodes, round_index))
        for field, name, words in (
            ("joins", "client.joined", "joins the federation"),
            ("leaves", "client.left", "has left the federation"),
        ):
            for node in (node for node, first in getattr(self, field).items() if first == round_index):
                observer.event("info", name, f"{node} {words}.", node=node)
        for change in self.changes:
            if isinstance(change, Season):
                if round_index == 0:
                    data = msgspec.to_builtins(change)
                    observer.event("info", "season", f"The data repeat every {change.period} rounds.", data=data)
            elif change.since == round_index and change.nodes == "all":
                observer.event("info", "data.new", "All clients have new data from this round on.")
            elif change.since == round_index:
                for node in (node for node in change.nodes if node in here):
                    observer.event("info", "data.new", f"{node} has new data from this round on.", node=node)


def apportion(mix: Tensor, count: int, there: Tensor) -> list[int]:
    """Return whole numbers in proportion to `mix` with the sum `count`, by largest remainders, each at most `there`."""
    weights = torch.where(there > 0, mix.double(), 0.0)
    exact = count * weights / weights.sum().clamp(min=1e-300)
    numbers = exact.floor().long()
    missing = max(0, round(float(exact.sum())) - int(numbers.sum()))
    numbers[(exact - numbers).sort(descending=True, stable=True).indices[:missing]] += 1
    counts: list[int] = torch.minimum(numbers, there).tolist()
    return counts


def _check_nodes(change: NewData | Season) -> None:
    kind = kind_of(type(change).__name__)
    if isinstance(change.nodes, str):
        require(change.nodes == "all", f"nodes of {kind}", change.nodes, 'a list of names, or "all"')
        return
    msgspec.structs.force_setattr(change, "nodes", tuple(change.nodes))
    require(bool(change.nodes), f"nodes of {kind}", [], 'at least one name, or "all"')
