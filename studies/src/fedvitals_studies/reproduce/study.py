# SPDX-License-Identifier: Apache-2.0
"""Drives the reproduction: what is still to be run, how long that takes, one file per condition, then the page.

It may be stopped at any moment and continues where it was; two processes may work on different conditions of one
folder. With a number of minutes it stops by itself, before a run that would not fit: for machines that are lent.
"""

from __future__ import annotations

import dataclasses
import importlib
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from fedvitals.errors import ConfigError, MissingExtraError
from fedvitals_studies.reproduce.conditions import BEGINNING_OF, BY_NAME, Condition
from fedvitals_studies.reproduce.results import Result, beginning, checked, file_of, load, save

Progress = Callable[[int, int], None]
"""Rounds done, rounds in all."""

SECONDS_PER_STEP = {
    "cpu": {"paper-cnn": 0.008, "mlp": 0.003, "transformer": 0.03, "resnet": 0.8},
    "cuda": {"paper-cnn": 1e-4, "mlp": 5e-5, "transformer": 2.5e-3, "resnet": 2e-2},
}
"""Of one client's mini-batch, on two cores or one GPU: a guess, used until something has been measured here."""

ALIKE = ("every_iteration", "whole_set", "pool", "channels", "drop_out")  # what a mini-batch's time depends on
MARGIN = 1.3  # a run may take this many times as long as estimated
FAILURES_IN_A_ROW = 3  # more than an accident of one condition


class Measure(Protocol):
    def __call__(self, condition: Condition, repeat: int, *, data: Path | None, progress: Progress) -> Result:
        """Train one condition once. Returns what `reproduce_results.FACTS` names."""


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
    seconds: float  # estimated duration of `todo`
    guessed: bool  # nothing has been measured here yet


def default_measure(device: str | None = None, *, arrays: bool = False) -> Measure:
    """Return training in the lab, imported late, since a page can be drawn without it. `arrays`: as on a GPU."""
    found: Any = importlib.import_module("fedvitals_studies.reproduce.measure").measure
    settings: dict[str, Any] = {"device": device} if device else {}
    settings |= {"arrays": True} if arrays else {}
    return partial(found, **settings) if settings else found


def has_gtsrb(data: Path | None) -> bool:
    """Whether GTSRB is where the lab would look for it."""
    from fedvitals.lab.data.gtsrb import GTSRB  # noqa: PLC0415 - loads torch
    from fedvitals.lab.data.sources import search_folders  # noqa: PLC0415

    try:
        GTSRB().find(search_folders(data))
    except ConfigError:
        return False
    return True


def plan(folder: Path, conditions: Sequence[Condition], repeats: int, device: str = "cpu") -> Plan:
    """Return what exists and what does not: the first repeat of everything before the second of anything."""
    todo, done, found = _looked_up(folder, conditions, repeats)
    return Plan(tuple(todo), tuple(done), _rest(todo, conditions, found, device), guessed=not found)


def _looked_up(
    folder: Path, conditions: Sequence[Condition], repeats: int
) -> tuple[list[Job], list[Job], list[Result]]:
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
    return todo, done, found


def _rest(todo: Sequence[Job], conditions: Sequence[Condition], finished: Sequence[Result], device: str) -> float:
    return sum(_seconds(job, finished, device) for job in todo if _longer(job.condition) not in conditions)


def _longer(condition: Condition) -> Condition | None:
    """Return the condition of which this one is the beginning, if it has the paper's rounds."""
    name = BEGINNING_OF.get(condition.name)
    if name is None or condition.rounds != BY_NAME[condition.name].rounds:
        return None
    return dataclasses.replace(condition, name=name, study=BY_NAME[name].study, rounds=BY_NAME[name].rounds)


def _seconds(job: Job, finished: Sequence[Result], device: str = "cpu") -> float:
    """Estimate from earlier mini-batches: of the same kind if there is one, else of the same network, else a guess."""
    wanted = job.condition
    known = [
        run
        for run in finished
        if "beginning_of" not in run and run["described"]["model"] == wanted.model and _on(run, device)
    ]
    alike = [run for run in known if _sort(run["described"]) == _sort(dataclasses.asdict(wanted))]
    chosen = alike or known
    if not chosen:
        return wanted.client_steps * SECONDS_PER_STEP[device.partition(":")[0]][wanted.model]
    steps = sum(_steps(run) for run in chosen)
    return float(wanted.client_steps * sum(run["seconds"] for run in chosen) / steps)


def _on(run: Result, device: str) -> bool:
    return bool(run["device"].partition(":")[0] == device.partition(":")[0])


def _sort(described: dict[str, Any]) -> str:
    plain = dataclasses.asdict(Condition("", ""))
    return repr([[*v] if isinstance(v := described.get(n, plain[n]), list | tuple) else v for n in ALIKE])


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
    minutes: float | None = None,
    device: str = "cpu",
    done: Callable[[Result, Condition], None] = lambda *_: None,
) -> list[str]:
    """Run what is missing and write each result at once. Returns what failed, in words.

    A condition that fails does not stop the others; an invalid call (no data, wrong settings) stops all. With
    `minutes`, none is begun that would not fit, judged by the previous ones; `done` receives each result.
    """
    end = None if minutes is None else time.perf_counter() + 60 * minutes
    failed: list[str] = []
    in_a_row = place = 0
    todo, _, found = _looked_up(folder, conditions, repeats)
    total = len(todo)
    while todo:
        job = _next(folder, todo, found, device, end)
        if job is None:
            break
        todo.remove(job)
        place += 1
        if file_of(folder, job.condition.name, job.repeat).exists():  # another process was faster
            continue
        tell(f"{place} of {total}: {job}")
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
        done(result, job.condition)
        found.append({**result, "described": dataclasses.asdict(job.condition)})
        rest = _rest(todo, conditions, found, device)
        tell(f"  {result['seconds']:.3g} s; about {in_words(rest)} left" if rest else f"  {result['seconds']:.3g} s")
    if todo:
        rest = _rest(todo, conditions, found, device)
        tell(f"Stopped in time: {len(todo)} runs are left, about {in_words(rest)}. The same command goes on with them.")
    return failed


def _next(folder: Path, todo: Sequence[Job], finished: Sequence[Result], device: str, end: float | None) -> Job | None:
    """Return the first job that still fits: one that is the beginning of an existing run takes no time."""
    if end is None:
        return todo[0]
    left = end - time.perf_counter()
    for job in todo:
        longer = _longer(job.condition)
        free = longer is not None and file_of(folder, longer.name, job.repeat).exists()
        if left > 0 and (free or _seconds(job, finished, device) * MARGIN <= left):
            return job
    return None


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
