# SPDX-License-Identifier: Apache-2.0
"""The fault bank's cases: every one an experiment of the lab, and beside each faulty one its clean twin.

A bank is a TOML file: settings to draw from, domains (a data set with a model), and faults with their strengths. It
is expanded by its seed, the same everywhere; its digest is that of all experiments in it. Cases may also be written
out one by one (`[[cases]]`), which is how others bring their own. A bank may be `like` another: drawn from the same
settings, domains and faults, by another seed. A `[matrix]` of healthy settings is expanded by `matrix`.
"""

from __future__ import annotations

import hashlib
import math
import random
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from fedvitals.errors import ConfigError, unknown
from fedvitals.lab.experiment import Experiment
from fedvitals_studies.faultbank.matrix import Matrix, Setting, runs_of, scaled

BANKS = Path(__file__).parent / "banks"
GROUPED = ("hierarchical", "rings", "clustered")
LATER = ('pool = "max"\n',)
"""Settings that the lab gained after a bank was published, as they are by default: the digest does not know them."""


class Domain(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A data set with a model, and the local trainings under which it learns."""

    name: str
    dataset: Any
    model: Any
    local: list[dict[str, Any]]
    most_clients: int = 100


class Struck(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fault, how many cases of it, and the strengths that take turns."""

    kind: str
    cases: int
    vary: list[dict[str, Any]] = msgspec.field(default_factory=lambda: [{}])
    culprits: str = "some"  # «some»: one, or two to seven of thirty and more; «attackers»: a fifth; «all»: the run
    strength: str | None = None  # which setting tells how strong it is
    onset: bool = True  # whether it may begin later than the run
    lasts: int | None = None  # so many rounds, from the onset on; None: to the end
    also: list[dict[str, Any]] = msgspec.field(default_factory=list)  # other faults, of the same nodes and rounds
    flips_largest: bool = False  # of a label flip: from the class of which the client has most
    network: dict[str, Any] | None = None
    domains: list[str] | None = None  # only these
    topologies: list[str] | None = None


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is drawn for each case; an entry that stands there twice is drawn twice as often."""

    clients: list[int]
    partitions: list[Any]
    participations: list[float]
    topologies: list[Any]
    rounds: list[int]
    rounds_partial: list[int]  # where only some take part, more rounds are needed for the same evidence


class Written(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A case written out: an experiment as in a file of its own."""

    name: str
    experiment: dict[str, Any]
    domain: str = "own"


class File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    seed: int = 0
    like: str | None = None  # a bank whose settings, domains and faults these are, too
    times: float = 1.0  # as many cases of each of its faults, rounded up
    settings: Settings | None = None
    domains: list[Domain] = msgspec.field(default_factory=list)
    faults: list[Struck] = msgspec.field(default_factory=list)
    cases: list[Written] = msgspec.field(default_factory=list)
    matrix: Matrix | None = None
    twins: int | None = None  # of a matrix that it is like: seeds with faults
    only: list[str] | None = None  # of its settings


@dataclass(frozen=True)
class Case:
    """One run of the bank."""

    name: str
    bank: str
    domain: str
    experiment: Experiment
    strength: str | None = None
    flips_largest: bool = False
    setting: str | None = None  # of a matrix, which is about our own detectors only: no baselines, no lies
    untold: bool = False  # nobody tells the monitor that updates are transformed
    control: Case | None = None  # a clean run that it shares with others; None: one of its own

    @property
    def faulty(self) -> bool:
        return bool(self.experiment.faults)

    @property
    def text(self) -> str:
        """The experiment, written out: by this a case is known."""
        text = self.experiment.to_toml()
        for line in LATER:
            text = text.replace(line, "")
        return f"{text}# untold\n" if self.untold else text

    @property
    def twin(self) -> Case:
        """The same without its faults: the clean control, and what the damage is measured against."""
        if self.control is not None:
            return self.control
        clean = msgspec.structs.replace(self.experiment, faults=())
        return replace(self, name=f"{self.name}/clean", experiment=clean, strength=None, flips_largest=False)


@dataclass(frozen=True)
class Bank:
    name: str
    faulty: tuple[Case, ...]
    settings: tuple[Setting, ...] = ()  # of a matrix

    @cached_property
    def cases(self) -> tuple[Case, ...]:
        """Each faulty case, then its twin; one of somebody's own without a fault is a clean control as it is."""
        found: dict[str, Case] = {}
        for one in self.faulty:
            for case in (one, one.twin) if one.faulty else (one,):
                found.setdefault(case.name, case)  # several may share a twin
        return tuple(found.values())

    @cached_property
    def digest(self) -> str:
        text = "\n".join(f"{case.name} {case.flips_largest}\n{case.text}" for case in self.faulty)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def read_bank(source: str | Path) -> Bank:
    """A bank by its name («tune», «held-out», «held-out-large», «quick», «healthy», …) or from a file."""
    path = path_of(source)
    file = _read(path)
    if file.like is not None:
        file = _like(file, path)
    cases = (*_written(file), *_drawn(file), *_of_matrix(file))
    if not cases:
        raise ConfigError(
            f"{path} has no cases: give [[faults]] with [settings] and [[domains]], [[cases]], or a [matrix]."
        )
    return Bank(file.name, cases, () if file.matrix is None else tuple(file.matrix.settings))


def path_of(source: str | Path) -> Path:
    named = BANKS / f"{str(source).replace('-', '_')}.toml"
    return named if named.exists() else Path(source)


def _read(path: Path) -> File:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        known = sorted(file.stem.replace("_", "-") for file in BANKS.glob("*.toml"))
        raise ConfigError(f"{unknown('bank', str(path), known)} Nor is it a file that can be read: {error}.") from None
    try:
        return msgspec.convert(tomllib.loads(text), File)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(
            f"{path} is no fault bank: {error}. See docs/faultbank.md for what one looks like."
        ) from error


def _like(file: File, path: Path) -> File:
    """With what it takes from another bank filled in."""
    if file.settings is not None or file.domains or file.faults or file.matrix is not None:
        raise ConfigError(
            f"{path} is like {file.like}: it has no [settings], [[domains]], [[faults]] or [matrix] of its own."
        )
    other = _read(path_of(str(file.like)))
    # A billionth less, so that 1.1 times 10 are 11 in binary digits, too.
    faults = [msgspec.structs.replace(f, cases=math.ceil(f.cases * file.times - 1e-9)) for f in other.faults]
    matrix = None if other.matrix is None else scaled(other.matrix, file.times, file.twins, file.only)
    return msgspec.structs.replace(file, settings=other.settings, domains=other.domains, faults=faults, matrix=matrix)


def _written(file: File) -> Iterator[Case]:
    for case in file.cases:
        try:
            experiment = Experiment(**case.experiment)
        except (ConfigError, TypeError) as error:
            raise ConfigError(f"The case '{case.name}' of the bank {file.name} is no experiment: {error}") from error
        yield Case(f"{file.name}/{case.name}", file.name, case.domain, experiment)


def _of_matrix(file: File) -> Iterator[Case]:
    control: Case | None = None
    for run in () if file.matrix is None else runs_of(file.matrix, file.seed):
        name = f"{file.name}/{run.setting}/{run.number:02d}{'' if run.fault is None else f'/{run.fault}'}"
        case = Case(name, file.name, run.setting, run.experiment, setting=run.setting, untold=run.untold)
        if run.fault is None:
            control = case
        yield case if run.fault is None else replace(case, control=control)


def _drawn(file: File) -> Iterator[Case]:
    if file.faults and (file.settings is None or not file.domains):
        raise ConfigError(
            f"The bank {file.name} has [[faults]], which need [settings] and [[domains]] to be drawn from."
        )
    for place, fault in enumerate(file.faults):
        domains = [d for d in file.domains if fault.domains is None or d.name in fault.domains]
        if not domains:
            raise ConfigError(f"No domain of the bank {file.name} is among those of {fault.kind}: {fault.domains}.")
        for number in range(fault.cases):
            assert file.settings is not None  # noqa: S101 - asked above
            chance = random.Random(f"{file.seed}/{fault.kind}/{place}/{number}")  # noqa: S311 - no secrets here
            # Domains and strengths take turns, at different paces, so that all pairs come up.
            domain = domains[(number + place) % len(domains)]
            turn = number if len(domains) == 1 else number // len(domains) + number
            strength = fault.vary[turn % len(fault.vary)]
            experiment = _experiment(file, fault, domain, strength, chance)
            name = f"{file.name}/{fault.kind}-{place}/{number:02d}"
            yield Case(name, file.name, domain.name, experiment, fault.strength, fault.flips_largest)


def _experiment(
    file: File, fault: Struck, domain: Domain, strength: Mapping[str, Any], chance: random.Random
) -> Experiment:
    settings = file.settings
    assert settings is not None  # noqa: S101 - asked by the caller
    clients = chance.choice([n for n in settings.clients if n <= domain.most_clients])
    allowed = [t for t in settings.topologies if fault.topologies is None or _kind(t) in fault.topologies]
    topology = chance.choice(allowed)
    participation = 1.0
    if clients >= 20 and _kind(topology) not in GROUPED:
        participation = chance.choice(settings.participations)
    rounds = chance.choice(settings.rounds if participation == 1 else settings.rounds_partial)
    since = 0 if not fault.onset or chance.random() < 0.35 else chance.randint(3, max(3, min(10, rounds // 2)))
    struck = {"kind": fault.kind, "since": since, **strength}
    if fault.culprits != "all":
        struck["nodes"] = _culprits(fault.culprits, clients, chance)
    if fault.lasts is not None:
        struck["until"] = since + fault.lasts - 1
    where_and_when = {key: struck[key] for key in ("nodes", "since", "until") if key in struck}
    table: dict[str, Any] = {
        "name": f"{file.name}-{fault.kind}",
        "dataset": domain.dataset,
        "model": domain.model,
        "local": chance.choice(domain.local),
        "clients": clients,
        "partition": chance.choice(settings.partitions),
        "participation": participation,
        "rounds": rounds,
        "topology": topology,
        "network": fault.network,
        "faults": [struck, *({**where_and_when, **other} for other in fault.also)],
        "seed": chance.randrange(2**31),
    }
    return Experiment(**table)


def _kind(described: Any) -> str:
    return described if isinstance(described, str) else str(described["kind"])


def _culprits(how: str, clients: int, chance: random.Random) -> list[str]:
    count = 1
    if how == "attackers":
        count = max(2, clients // 5)
    elif how == "some" and clients >= 30 and chance.random() < 0.4:
        count = chance.randint(2, 7)
    return [f"c{index}" for index in sorted(chance.sample(range(clients), count))]


def healthy_rounds(cases: Sequence[Case]) -> int:
    return sum(case.experiment.rounds for case in cases if not case.faulty)
