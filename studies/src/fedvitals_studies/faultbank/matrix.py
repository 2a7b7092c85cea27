# SPDX-License-Identifier: Apache-2.0
"""A matrix of healthy settings: each trains with several seeds, and with some of them once more for each fault.

A fault begins once the model has begun to learn, at a client that then takes part often enough to be judged. All runs
of a seed are the same federation, so that the healthy one is the clean control of the faulty ones.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from fedvitals.errors import ConfigError
from fedvitals.lab import streams
from fedvitals.lab.experiment import Experiment

ENOUGH = 6  # participations of a culprit with its fault
SPARE = 2  # additional ones, if all take part


class Setting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One healthy federation. What its experiment does not set is as in the matrix's base."""

    name: str
    group: str
    experiment: dict[str, Any] = msgspec.field(default_factory=dict)
    rounds: int = 30
    seeds: int = 10
    onset: int = 8
    faults: list[dict[str, Any]] | None = None  # instead of the matrix's
    untold: bool = False  # the monitor is not told that updates are transformed
    undecidable: dict[str, str] = msgspec.field(default_factory=dict)  # fault kind → why it may remain undetected


class Matrix(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings, what they have in common, and the faults of their twins."""

    settings: list[Setting]
    base: dict[str, Any] = msgspec.field(default_factory=dict)
    faults: list[dict[str, Any]] = msgspec.field(default_factory=list)
    twins: int = 3  # seeds with faults


class Run(NamedTuple):
    setting: str
    number: int
    experiment: Experiment
    fault: str | None = None
    untold: bool = False


def runs_of(matrix: Matrix, seed: int) -> Iterator[Run]:
    """Yield for each setting and seed the healthy run, then the faulty ones."""
    for setting in matrix.settings:
        for number in range(setting.seeds):
            chance = random.Random(f"{seed}/{setting.name}/{number}")  # noqa: S311 - no secrets here
            table = {**matrix.base, **setting.experiment, "name": setting.name, "seed": chance.randrange(2**31)}
            healthy = _experiment(setting, {**table, "rounds": setting.rounds})
            yield Run(setting.name, number, healthy, None, setting.untold)
            if number < matrix.twins:
                for fault in matrix.faults if setting.faults is None else setting.faults:
                    struck = _struck(setting, table, fault, chance)
                    yield Run(setting.name, number, struck, fault["kind"], setting.untold)


def _struck(setting: Setting, table: dict[str, Any], fault: dict[str, Any], chance: random.Random) -> Experiment:
    """Return the federation with a fault, with as many rounds of it as are needed to judge a culprit."""
    participation = table.get("participation", 1.0)
    buffer = (table.get("topology") or {}).get("buffer") if isinstance(table.get("topology"), dict) else None
    if buffer is not None:  # asynchronous: this many of the clients arrive in a round
        participation = buffer / table["clients"]
    after = math.ceil((ENOUGH + SPARE) / min(1.0, participation))
    clean = _experiment(setting, {**table, "rounds": setting.onset + after})
    counts = {node: sum(number >= setting.onset for number in rounds) for node, rounds in called(clean).items()}
    often = [node for node, count in counts.items() if count >= ENOUGH]
    if not often:
        raise ConfigError(f"No client of the setting '{setting.name}' takes part often enough to be judged.")
    struck = {"nodes": [chance.choice(often)], "since": setting.onset, **fault}
    return _experiment(setting, {**table, "rounds": setting.onset + after, "faults": [struck]})


def _experiment(setting: Setting, table: dict[str, Any]) -> Experiment:
    try:
        return Experiment(**table)
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"The setting '{setting.name}' is no experiment: {error}") from error


def called(experiment: Experiment) -> dict[str, list[int]]:
    """Return the rounds in which each client was asked to take part, whatever the outcome."""
    found: dict[str, list[int]] = {}
    for number in range(experiment.rounds):
        members = experiment.members(number)
        order = torch.randperm(len(members), generator=streams.stream(experiment.seed, "cohort", number))
        for index in sorted(order[: experiment.asked(number)].tolist()):
            found.setdefault(members[index], []).append(number)
    return found


def scaled(matrix: Matrix, times: float, twins: int | None, only: Sequence[str] | None) -> Matrix:
    """Return the matrix with `times` as many seeds of each setting, rounded up; of some settings only."""
    known = [setting.name for setting in matrix.settings]
    if only is not None and set(only) - set(known):
        raise ConfigError(f"There is no setting {min(set(only) - set(known))!r}. Known: {', '.join(known)}.")
    settings = [
        msgspec.structs.replace(setting, seeds=math.ceil(setting.seeds * times - 1e-9))
        for setting in matrix.settings
        if only is None or setting.name in only
    ]
    return msgspec.structs.replace(matrix, settings=settings, twins=matrix.twins if twins is None else twins)
