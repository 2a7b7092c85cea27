# SPDX-License-Identifier: Apache-2.0
"""The fault bank's cases: every one an experiment of the lab, and beside each faulty one its clean twin.

A bank is a TOML file: settings to draw from, domains (a data set with a model), and faults with their strengths. It is
expanded by its seed, identically everywhere; its digest is that of all experiments in it. Cases may also be written out
one by one (`[[cases]]`), which is how users add their own. `[[federations]]` are not of the lab (see `adapter_bank`). A
bank may be `like` another: drawn from the same settings, domains and faults, by another seed. `[[controls]]` are
healthy runs without a faulty twin. A `[matrix]` of healthy settings is expanded by `matrix`.
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
from fedvitals_studies.faultbank.adapter_bank import Federations
from fedvitals_studies.faultbank.drawing import Domain, Settings, Struck, drawn_runs, transformation_of
from fedvitals_studies.faultbank.matrix import Matrix, Setting, runs_of, scaled

BANKS = Path(__file__).parent / "banks"
LATER = ('pool = "max"\n',)
"""Settings that the lab gained after a bank was published, as they are by default: the digest does not know them."""


class Written(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A case written out: an experiment as in a separate file."""

    name: str
    experiment: dict[str, Any]
    domain: str = "own"


class Control(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A healthy federation that looks unlike the others, with a number of seeds: any alarm on it is false."""

    name: str
    group: str  # by which alarms are counted
    experiment: dict[str, Any]
    domain: str = "control"
    runs: int = 3
    untold: bool = False  # the monitor is not told that updates are transformed


class File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    seed: int = 0
    like: str | None = None  # a bank whose settings, domains and faults are used as well
    times: float = 1.0  # factor for the number of cases of each of its faults, rounded up
    settings: Settings | None = None
    domains: list[Domain] = msgspec.field(default_factory=list)
    faults: list[Struck] = msgspec.field(default_factory=list)
    cases: list[Written] = msgspec.field(default_factory=list)
    controls: list[Control] = msgspec.field(default_factory=list)
    levels: list[int] = msgspec.field(default_factory=list)  # privacy levels at which each run is examined again
    matrix: Matrix | None = None
    twins: int | None = None  # for the matrix of the bank that it is like: seeds with faults
    only: list[str] | None = None  # only these of its settings
    federations: list[Federations] = msgspec.field(default_factory=list)  # of adapters, outside of the lab


@dataclass(frozen=True)
class Case:
    """One run of the bank."""

    name: str
    bank: str
    domain: str
    experiment: Experiment
    strength: str | None = None
    flips_largest: bool = False
    setting: str | None = None  # of a matrix, which is only about our own detectors: no baselines, no lies
    untold: bool = False  # the monitor is not told that updates are transformed
    control: Case | None = None  # a clean run shared with others; None: one of its own
    transformation: str | None = None  # of updates on their way, by its name
    control_group: str | None = None  # of a healthy run that is no run's twin
    levels: tuple[int, ...] = ()  # privacy levels at which it is examined again

    @property
    def faulty(self) -> bool:
        return bool(self.experiment.faults)

    @property
    def text(self) -> str:
        """The experiment as text, which identifies the case."""
        text = self.experiment.to_toml()
        for line in LATER:
            text = text.replace(line, "")
        return f"{text}# untold\n" if self.untold else text

    @property
    def twin(self) -> Case:
        """The same case without its faults: the clean control, and the reference for the damage."""
        if self.control is not None:
            return self.control
        clean = msgspec.structs.replace(self.experiment, faults=())
        return replace(self, name=f"{self.name}/clean", experiment=clean, strength=None, flips_largest=False)


@dataclass(frozen=True)
class Bank:
    name: str
    faulty: tuple[Case, ...]
    settings: tuple[Setting, ...] = ()  # of a matrix
    federations: tuple[Federations, ...] = ()  # of adapters, outside of the lab

    @cached_property
    def cases(self) -> tuple[Case, ...]:
        """Return each faulty case, then its twin; a user's case without a fault is a clean control as it is."""
        found: dict[str, Case] = {}
        for one in self.faulty:
            for case in (one, one.twin) if one.faulty else (one,):
                found.setdefault(case.name, case)  # several may share a twin
        return tuple(found.values())

    @cached_property
    def digest(self) -> str:
        text = "\n".join(f"{case.name} {case.flips_largest}\n{case.text}" for case in self.faulty)
        text += "\n".join(own.text() for own in self.federations)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def read_bank(source: str | Path) -> Bank:
    """Return a bank by its name («tune», «held-out», «held-out-large», «quick», «healthy», …) or from a file."""
    path = path_of(source)
    file = _read(path)
    if file.like is not None:
        file = _like(file, path)
    cases = (*_written(file), *_drawn(file), *_controls(file), *_of_matrix(file))
    if cases and file.federations:
        raise ConfigError(f"{path} has [[federations]] and cases of the lab: make two banks of them.")
    if file.federations:
        return Bank(file.name, (), federations=tuple(file.federations))
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
    """Return the file with the settings that it takes from another bank filled in."""
    if file.settings is not None or file.domains or file.faults or file.controls or file.matrix is not None:
        raise ConfigError(
            f"{path} is like {file.like}: it has no [settings], [[domains]], [[faults]], [[controls]] or [matrix] of "
            "its own."
        )
    other = _read(path_of(str(file.like)))
    # A billionth less, so that 1.1 times 10 is 11 in binary digits, too.
    faults = [msgspec.structs.replace(f, cases=math.ceil(f.cases * file.times - 1e-9)) for f in other.faults]
    matrix = None if other.matrix is None else scaled(other.matrix, file.times, file.twins, file.only)
    return msgspec.structs.replace(
        file,
        settings=other.settings,
        domains=other.domains,
        faults=faults,
        controls=other.controls,
        levels=other.levels,
        matrix=matrix,
    )


def _written(file: File) -> Iterator[Case]:
    for case in file.cases:
        experiment = _described(file, case.name, case.experiment)
        yield Case(f"{file.name}/{case.name}", file.name, case.domain, experiment, levels=tuple(file.levels))


def _described(file: File, name: str, table: Mapping[str, Any]) -> Experiment:
    try:
        return Experiment(**table)
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"The case '{name}' of the bank {file.name} is no experiment: {error}") from error


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
    for run in (
        () if file.settings is None else drawn_runs(file.name, file.seed, file.settings, file.domains, file.faults)
    ):
        yield Case(
            f"{file.name}/{run.name}",
            file.name,
            run.domain,
            run.experiment,
            run.strength,
            run.flips_largest,
            untold=run.untold,
            transformation=run.transformation,
            levels=tuple(file.levels),
        )


def _controls(file: File) -> Iterator[Case]:
    for control in file.controls:
        for number in range(control.runs):
            chance = random.Random(f"{file.seed}/control/{control.name}/{number}")  # noqa: S311 - no secrets here
            table = {**control.experiment, "name": control.name, "seed": chance.randrange(2**31)}
            yield Case(
                f"{file.name}/control-{control.name}/{number:02d}",
                file.name,
                control.domain,
                _described(file, control.name, table),
                untold=control.untold,
                transformation=transformation_of(table),
                control_group=control.group,
                levels=tuple(file.levels),
            )


def healthy_rounds(cases: Sequence[Case]) -> int:
    return sum(case.experiment.rounds for case in cases if not case.faulty)
