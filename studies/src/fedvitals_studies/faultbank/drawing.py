# SPDX-License-Identifier: Apache-2.0
"""Draws the fault bank's cases from settings, domains and faults, by the bank's seed.

The draws of a published bank must never change: a setting that was added later draws from a separate stream, and only
if a bank asks for it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from fedvitals.errors import ConfigError
from fedvitals.lab.experiment import Experiment
from fedvitals_studies.faultbank.matrix import called

ALL_TAKE_PART = ("hierarchical", "rings", "clustered", "asynchronous")
CHANGES_OF_UPDATES = ("compression", "privacy", "secure_aggregation")  # fields of an experiment


class Domain(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A data set with a model, and the local trainings under which it learns.

    A local training may have `least_clients`: with fewer, each client has so many samples that it would take too long.
    """

    name: str
    dataset: Any
    model: Any
    local: list[dict[str, Any]]
    most_clients: int = 100
    least_clients: int = 1
    tags: list[str] = msgspec.field(default_factory=list)  # by which faults select domains, besides the name
    partitions: list[Any] | None = None  # instead of the settings'


class Struck(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fault, its number of cases, and the strengths that take turns."""

    kind: str
    cases: int
    vary: list[dict[str, Any]] = msgspec.field(default_factory=lambda: [{}])
    culprits: str = "some"  # «some»: one, or two to seven of thirty and more; «attackers»: a fifth; «all»: the run
    strength: str | None = None  # the setting that determines its strength
    onset: bool = True  # whether it may begin after the first round
    lasts: int | None = None  # number of rounds, from the onset on; None: to the end
    also: list[dict[str, Any]] = msgspec.field(default_factory=list)  # further faults, of the same nodes and rounds
    flips_largest: bool = False  # for a label flip: from the client's most frequent class
    network: dict[str, Any] | None = None
    domains: list[str] | None = None  # only these, by name or by tag
    topologies: list[str] | None = None
    partitions: list[Any] | None = None  # instead of the domain's and the settings'
    least_clients: int = 1
    most_epochs: int | None = None  # of local training
    transformed: float | None = None  # another share of transformed runs than the settings'


class Transformation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A transformation of updates on their way: fields of an experiment, and where it is possible."""

    experiment: dict[str, Any]
    untold: bool = False  # the monitor is not told
    topologies: list[str] | None = None
    without: list[str] = msgspec.field(default_factory=list)  # domains, by name or by tag, that cannot have it
    all_take_part: bool = False  # only if all clients are asked in each round


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is drawn for each case; an entry that is listed twice is drawn twice as often."""

    clients: list[int]
    partitions: list[Any]
    participations: list[float]
    topologies: list[Any]
    rounds: list[int]
    rounds_partial: list[int]  # if only some take part, more rounds are needed for the same evidence
    transformations: list[Transformation] = msgspec.field(default_factory=list)
    transformed: float = 0.0  # share of the runs with one of them
    late: float = 0.0  # share of the faults that begin in the second half of the run
    # Minimum number of rounds in which each culprit takes part with its fault, if there are such clients
    strikes: int = 0
    network: dict[str, Any] | None = None  # for asynchronous federations


class DrawnRun(NamedTuple):
    name: str
    domain: str
    experiment: Experiment
    strength: str | None
    flips_largest: bool
    transformation: str | None
    untold: bool


def drawn_runs(
    bank: str, seed: int, settings: Settings, domains: Sequence[Domain], faults: Sequence[Struck]
) -> Iterator[DrawnRun]:
    """Yield the faulty runs of a bank, fault by fault; domains and strengths take turns."""
    for place, fault in enumerate(faults):
        possible = [domain for domain in domains if _fits(domain, fault, settings)]
        if not possible:
            raise ConfigError(f"No domain of the bank {bank} is among those of {fault.kind}: {fault.domains}.")
        for number in range(fault.cases):
            key = f"{seed}/{fault.kind}/{place}/{number}"
            # Domains and strengths take turns, at different paces, so that all pairs occur.
            domain = possible[(number + place) % len(possible)]
            turn = number if len(possible) == 1 else number // len(possible) + number
            strength = fault.vary[turn % len(fault.vary)]
            draw = _Draw(settings, domain, fault, strength, key)
            transformation = draw.transformation()
            experiment = draw.experiment(f"{bank}-{fault.kind}", transformation)
            yield DrawnRun(
                f"{fault.kind}-{place}/{number:02d}",
                domain.name,
                experiment,
                fault.strength,
                fault.flips_largest,
                None if transformation is None else transformation_of(transformation.experiment),
                transformation is not None and transformation.untold,
            )


def transformation_of(table: Mapping[str, Any]) -> str | None:
    """Return the name of an experiment's transformation of updates, such as «int8» or «top_k, feedback»; None: none."""
    names = []
    for field in CHANGES_OF_UPDATES:
        described = table.get(field)
        if described is not None:
            name = "secure" if field == "secure_aggregation" else _kind(described)
            more = dict(described) if isinstance(described, Mapping) else {}
            if field == "privacy" and not more.get("noise", 1):
                name = "clipping"
            names.append(f"{name}, feedback" if more.get("error_feedback") else name)
    return " and ".join(names) or None


def _named(domain: Domain, names: Sequence[str]) -> bool:
    return bool({domain.name, *domain.tags} & {*names})


def _fits(domain: Domain, fault: Struck, settings: Settings) -> bool:
    wanted = fault.domains is None or _named(domain, fault.domains)
    return wanted and bool(_numbers_of_clients(domain, fault, settings))


def _numbers_of_clients(domain: Domain, fault: Struck, settings: Settings) -> list[int]:
    least = max(domain.least_clients, fault.least_clients)
    return [number for number in settings.clients if least <= number <= domain.most_clients]


class _Draw:
    """The drawing of one run. Its main stream is that of the first bank; later additions use another."""

    def __init__(
        self, settings: Settings, domain: Domain, fault: Struck, strength: Mapping[str, Any], key: str
    ) -> None:
        self._settings, self._domain, self._fault, self._strength = settings, domain, fault, strength
        self._chance = chance = random.Random(key)  # noqa: S311 - no secrets here
        self._later = random.Random(f"{key}/later")  # noqa: S311 - no secrets here
        self.clients = chance.choice(_numbers_of_clients(domain, fault, settings))
        allowed = [t for t in settings.topologies if fault.topologies is None or _kind(t) in fault.topologies]
        self.topology = chance.choice([t for t in allowed if _members(t) <= self.clients])
        self.participation = 1.0
        if self.clients >= 20 and _kind(self.topology) not in ALL_TAKE_PART:
            self.participation = chance.choice(settings.participations)
        self.rounds = chance.choice(settings.rounds if self.participation == 1 else settings.rounds_partial)

    def transformation(self) -> Transformation | None:
        settings, share = self._settings, self._fault.transformed
        share = settings.transformed if share is None else share
        if not settings.transformations or self._later.random() >= share:
            return None
        possible = [
            each
            for each in settings.transformations
            if (each.topologies is None or _kind(self.topology) in each.topologies)
            and not _named(self._domain, each.without)
            and not (each.all_take_part and self.participation < 1)
        ]
        return self._later.choice(possible) if possible else None

    def experiment(self, name: str, transformation: Transformation | None) -> Experiment:
        fault, chance, settings = self._fault, self._chance, self._settings
        since = 0 if not fault.onset or chance.random() < 0.35 else chance.randint(3, max(3, min(10, self.rounds // 2)))
        since = self._late(since)
        struck: dict[str, Any] = {"kind": fault.kind, "since": since, **self._strength}
        drawn = fault.culprits != "all" and not settings.strikes
        if drawn:
            struck["nodes"] = self._names(chance.sample(range(self.clients), self._count()))
        if fault.lasts is not None:
            struck["until"] = since + fault.lasts - 1
        local = chance.choice(self._local())
        partitions = fault.partitions or self._domain.partitions or settings.partitions
        network = fault.network
        if network is None and _kind(self.topology) == "asynchronous":
            network = settings.network
        table: dict[str, Any] = {
            "name": name,
            "dataset": self._domain.dataset,
            "model": self._domain.model,
            "local": local,
            "clients": self.clients,
            "partition": chance.choice(partitions),
            "participation": self.participation,
            "rounds": self.rounds,
            "topology": self.topology,
            "network": network,
            "seed": chance.randrange(2**31),
            **({} if transformation is None else transformation.experiment),
        }
        if fault.culprits != "all" and not drawn:
            struck["nodes"] = self._struck_often(Experiment(**table), since)
        where_and_when = {key: struck[key] for key in ("nodes", "since", "until") if key in struck}
        faults = [struck, *({**where_and_when, **other} for other in fault.also)]
        return Experiment(**{**table, "faults": faults})

    def _late(self, since: int) -> int:
        """Return a later onset, in the second half of the run, if that is drawn and leaves enough rounds."""
        settings = self._settings
        if not self._fault.onset or not settings.late or self._later.random() >= settings.late:
            return since
        share = self.participation / self._strength.get("every", 1)
        if _kind(self.topology) == "asynchronous":
            share *= self.topology["buffer"] / self.clients
        latest = self.rounds - round(max(1, settings.strikes) / share)
        return self._later.randint(self.rounds // 2, latest) if latest >= self.rounds // 2 else since

    def _local(self) -> list[dict[str, Any]]:
        most = self._fault.most_epochs
        possible = [
            each
            for each in self._domain.local
            if each.get("least_clients", 1) <= self.clients and (most is None or each.get("epochs", 0) <= most)
        ]
        return [{key: value for key, value in each.items() if key != "least_clients"} for each in possible]

    def _count(self) -> int:
        if self._fault.culprits == "attackers":
            return max(2, self.clients // 5)
        if self._fault.culprits == "some" and self.clients >= 30 and self._chance.random() < 0.4:
            return self._chance.randint(2, 7)
        return 1

    def _names(self, places: Sequence[int]) -> list[str]:
        return [f"c{index}" for index in sorted(places)]

    def _struck_often(self, healthy: Experiment, since: int) -> list[str]:
        """Return culprits that take part often enough with their fault, from clients that are asked as often as any
        other.
        """
        count, every = self._count(), self._strength.get("every", 1)
        strikes = {
            int(node[1:]): sum(at >= since and (at - since) % every == 0 for at in rounds)
            for node, rounds in called(healthy).items()
        }
        often = sorted(index for index, times in strikes.items() if times >= self._settings.strikes)
        if len(often) < count:
            often = sorted(strikes, key=lambda index: (-strikes[index], index))[:count]
        return self._names(self._chance.sample(often, count))


def _kind(described: Any) -> str:
    return described if isinstance(described, str) else str(described["kind"])


def _members(topology: Any) -> int:
    """Return the minimum number of clients of a topology: two at each edge, in each ring."""
    table: Mapping[str, Any] = {} if isinstance(topology, str) else topology
    own = {"hierarchical": 2 * table.get("edges", 1), "rings": 2 * table.get("rings", 3), "clustered": 4}
    return int(max(1, own.get(_kind(topology), 1), table.get("buffer", 0)))
