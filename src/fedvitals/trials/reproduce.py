# SPDX-License-Identifier: Apache-2.0
"""Drives the reproduction: what is still to be run, how long that takes, one file per condition, then the page.

It may be stopped at any moment and goes on where it was; two of them may work on different conditions of one folder.
"""

from __future__ import annotations

import dataclasses
import importlib
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from fedvitals.errors import ConfigError, MissingExtraError
from fedvitals.trials.reproduce_conditions import BEGINNING_OF, BY_NAME, Condition
from fedvitals.trials.reproduce_results import Result, beginning, checked, load, save

Progress = Callable[[int, int], None]
"""Rounds done, rounds in all."""

SECONDS_PER_STEP = {"paper-cnn": 0.008, "mlp": 0.003, "transformer": 0.03, "resnet": 0.8}
"""Of one client's mini-batch on two cores: a guess, used until something has been measured here."""

FAILURES_IN_A_ROW = 3  # that is no accident of one condition


class Measure(Protocol):
    def __call__(self, condition: Condition, repeat: int, *, data: Path | None, progress: Progress) -> Result:
        """Trains one condition once and gives what `reproduce_results.FACTS` names."""


@dataclass(frozen=True, slots=True)
class Job:
    condition: Condition
    repeat: int

    def __str__(self) -> str:
        return f"{self.condition.name}, repeat {self.repeat + 1}"


@dataclass(frozen=True, slots=True)
class Plan:
    todo: tuple[Job, ...]
    done: tuple[Job, ...]
    seconds: float  # that `todo` will take, as far as one can tell
    guessed: bool  # nothing has been measured here yet


def default_measure(device: str | None = None) -> Measure:
    """Training in the lab; loaded only now, since a page can be drawn without it."""
    found: Any = importlib.import_module("fedvitals.trials.reproduce_measure").measure
    return partial(found, device=device) if device else found


def has_gtsrb(data: Path | None) -> bool:
    """Whether GTSRB lies where the lab would look for it."""
    from fedvitals.lab.data_gtsrb import GTSRB  # noqa: PLC0415 - loads torch
    from fedvitals.lab.data_sources import places  # noqa: PLC0415

    try:
        GTSRB().find(places(data))
    except ConfigError:
        return False
    return True


def plan(folder: Path, conditions: Sequence[Condition], repeats: int) -> Plan:
    """What is there and what is not: the first repeat of everything before the second of anything."""
    if repeats < 1:
        raise ConfigError(f"The number of repeats cannot be {repeats}: it must be at least 1.")
    todo: list[Job] = []
    done: list[Job] = []
    found: list[Result] = []
    for repeat in range(repeats):
        for condition in conditions:
            result = load(folder, condition, repeat)
            (done if result else todo).append(Job(condition, repeat))
            found += [result] if result else []
    free = [job for job in todo if _longer(job.condition) in conditions]
    seconds = sum(_seconds(job, found) for job in todo if job not in free)
    return Plan(tuple(todo), tuple(done), seconds, guessed=not found)


def _longer(condition: Condition) -> Condition | None:
    """The condition that this one is the beginning of, if it has the paper's rounds."""
    name = BEGINNING_OF.get(condition.name)
    if name is None or condition.rounds != BY_NAME[condition.name].rounds:
        return None
    return dataclasses.replace(condition, name=name, study=BY_NAME[name].study, rounds=BY_NAME[name].rounds)


def _seconds(job: Job, found: Sequence[Result]) -> float:
    """From what a mini-batch took before: of the same sort if there is one, else of the same network, else a guess."""
    wanted = job.condition
    known = [run for run in found if "beginning_of" not in run and run["described"]["model"] == wanted.model]
    alike = [
        run
        for run in known
        if run["described"]["every_iteration"] == wanted.every_iteration
        and run["described"]["whole_set"] == wanted.whole_set
    ]
    chosen = alike or known
    if not chosen:
        return wanted.client_steps * SECONDS_PER_STEP[wanted.model]
    steps = sum(_steps(run) for run in chosen)
    return float(wanted.client_steps * sum(run["seconds"] for run in chosen) / steps)


def _steps(run: Result) -> int:
    described = {**run["described"], "channels": tuple(run["described"]["channels"])}
    return Condition(**described).client_steps


def measure_all(
    folder: Path,
    conditions: Sequence[Condition],
    *,
    repeats: int,
    measure: Measure,
    data: Path | None = None,
    tell: Callable[[str], None] = lambda _: None,
    progress: Callable[[Job], Progress] = lambda _: lambda *_: None,
) -> list[str]:
    """Runs what is missing and writes each result at once; gives what failed, in words.

    One condition that fails does not stop the others; what cannot be meant (no data, wrong settings) stops all.
    """
    failed: list[str] = []
    in_a_row = 0
    todo = plan(folder, conditions, repeats).todo
    for place, job in enumerate(todo, 1):
        if load(folder, job.condition, job.repeat):  # another process was quicker
            continue
        tell(f"{place} of {len(todo)}: {job}")
        try:
            result = _result(folder, job, measure, data, progress(job))
        except (ConfigError, MissingExtraError):
            raise
        except Exception as error:  # whatever it is, the other conditions can still be run
            last = traceback.extract_tb(error.__traceback__)[-1]
            failed.append(f"{job}: {type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})")
            tell(f"  failed: {failed[-1]}")
            in_a_row += 1
            if in_a_row == FAILURES_IN_A_ROW:
                raise
            continue
        in_a_row = 0
        save(folder, result, job.condition)
        rest = plan(folder, conditions, repeats).seconds
        tell(f"  {result['seconds']:.0f} s; about {in_words(rest)} left" if rest else f"  {result['seconds']:.0f} s")
    return failed


def _result(folder: Path, job: Job, measure: Measure, data: Path | None, progress: Progress) -> Result:
    longer = _longer(job.condition)
    whole = load(folder, longer, job.repeat) if longer else None
    if whole is not None:
        return checked(beginning(whole, job.condition), job.condition, job.repeat)
    return checked(measure(job.condition, job.repeat, data=data, progress=progress), job.condition, job.repeat)


def in_words(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes} min" if minutes else f"{seconds:.0f} s"
