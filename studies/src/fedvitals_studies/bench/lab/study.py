# SPDX-License-Identifier: Apache-2.0
"""How long one repeat of the whole study takes here, from a few timed rounds of each of its conditions."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from typing import Any

import msgspec

from fedvitals import lab
from fedvitals.monitor.monitor import Monitor
from fedvitals_studies.bench.lab.work import PAPER_CLIENTS, Data, has_gtsrb, images
from fedvitals_studies.reproduce.conditions import BEGINNING_OF, CONDITIONS, Condition
from fedvitals_studies.reproduce.measure import NLC_ROUNDS, CohortSums, experiment_of, probes_of

Tell = Callable[[str], None]
ROUNDS = 3  # timed per condition: one in which everything is measured, and two others


@dataclasses.dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of one condition's rounds."""

    condition: Condition
    start_up: float
    thorough: float  # of a round in which nonlinearity and whole-set gradients are measured as well
    plain: tuple[float, ...]  # of others

    def whole(self, choose: Callable[[tuple[float, ...]], float]) -> float:
        """Return the total of all rounds, with plain ones estimated by `choose`."""
        thorough = -(-self.condition.rounds // NLC_ROUNDS)
        return self.start_up + thorough * self.thorough + (self.condition.rounds - thorough) * choose(self.plain)


def conditions() -> list[Condition]:
    """Return the paper's two studies, without runs that are the beginning of others."""
    return [c for c in CONDITIONS if c.study in ("initial", "extended") and c.name not in BEGINNING_OF]


def seconds(
    condition: Condition,
    *,
    every_iteration: bool,
    data: Data = None,
    clients: int,
    iterations: int,
    rounds: int = ROUNDS,
) -> Timed:
    """Time a condition as the study runs it: trained, evaluated and measured, with the metrics at the last iteration of
    each round, or at every one.
    """
    chosen = dataclasses.replace(condition, clients=clients, iterations=iterations, every_iteration=every_iteration)
    experiment = experiment_of(chosen, 0)
    if clients < PAPER_CLIENTS or not has_gtsrb(data):
        experiment = msgspec.structs.replace(experiment, dataset=images(clients, data))
    found: list[float] = []
    began = time.perf_counter()
    with Monitor(None, run=chosen.name, probes=probes_of(chosen), sinks=[CohortSums(chosen)], host="lab") as monitor:
        running: Any = lab.rounds(experiment, monitor, data=os.fspath(data) if data else None)
        for result in running:
            monitor.flush()
            found.append(time.perf_counter() - began - sum(found))
            if len(result.rounds) == rounds:
                start_up = found[0] - result.rounds[0].seconds
                break
        running.close()
    return Timed(condition, start_up, found[0] - start_up, tuple(found[1:]))


def study(*, data: Data = None, quick: bool = False, tell: Tell = lambda _text: None) -> dict[str, Any]:
    """Return the hours of one repeat: with metrics at a round's last iteration (low, middle, high), and as in the
    study.
    """
    clients, iterations = (4, 2) if quick else (100, 20)
    last: list[Timed] = []
    every: dict[str, Timed] = {}
    for condition in conditions()[:: 5 if quick else 1]:
        tell(f"study: {condition.name}")
        last.append(seconds(condition, every_iteration=False, data=data, clients=clients, iterations=iterations))
        if condition.every_iteration:
            tell(f"study: {condition.name}, measured at every iteration")
            every[condition.name] = seconds(
                condition, every_iteration=True, data=data, clients=clients, iterations=iterations
            )
    hours: dict[str, Any] = {name: sum(t.whole(choose) for t in last) / 3600 for name, choose in CHOICES.items()}
    hours["as asked"] = sum(every.get(t.condition.name, t).whole(_middle) for t in last) / 3600
    watched = [t for t in last if t.condition.name in every]
    alone = sum(t.whole(_middle) for t in watched)
    hours["added percent"] = 100 * (sum(t.whole(_middle) for t in every.values()) / alone - 1) if watched else None
    hours["rounds"] = {t.condition.name: _middle(t.plain) for t in last}
    return hours


def _middle(values: tuple[float, ...]) -> float:
    return sum(values) / len(values)


CHOICES: dict[str, Callable[[tuple[float, ...]], float]] = {"low": min, "middle": _middle, "high": max}
