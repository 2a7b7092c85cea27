# SPDX-License-Identifier: Apache-2.0
"""How well corrections work: each faulty run with its automatically corrected twin, and its healthy twin.

And how much they harm: a healthy run with a twin in which false findings are raised.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import msgspec

from fedvitals import lab
from fedvitals.diagnosis.corrections.policy import CorrectionPolicy
from fedvitals.diagnosis.examine import choose_detectors
from fedvitals.lab.experiment import Experiment
from fedvitals.monitor.monitor import Monitor
from fedvitals.protocols import Detector
from fedvitals.records import Action
from fedvitals.store import MemoryStore


@dataclass(frozen=True, slots=True)
class CorrectedRun:
    """One run with corrections: its final accuracy, and the actions taken."""

    accuracy: float
    actions: tuple[Action, ...]


@dataclass(frozen=True, slots=True)
class Cure:
    """Final accuracies: of the healthy run, the faulty run, and the corrected faulty run."""

    name: str
    seed: int
    clean: float
    faulty: float
    cured: float
    actions: tuple[Action, ...] = ()

    @property
    def recovered(self) -> float:
        """Return the corrected run's share of the clean run's accuracy."""
        return self.cured / self.clean if self.clean else 0.0

    @property
    def harm(self) -> float:
        """Return the percentage points of accuracy below the clean run; negative if above."""
        return 100 * (self.clean - self.cured)


def course(
    experiment: Experiment,
    detectors: Sequence[Detector],
    cure: str | dict[str, str] | CorrectionPolicy,
    data: str | os.PathLike[str] | None = None,
    engine: str = "auto",
) -> CorrectedRun:
    """Run an experiment with corrections, in this process."""
    memory = MemoryStore(everything=True)
    with Monitor(None, sinks=[memory], detectors=detectors, cure=cure, host="lab") as monitor:
        accuracy = lab.run(experiment, monitor, data=data, engine=engine, workers=1).accuracy
        monitor.flush()
        actions = tuple(memory.records(monitor.run.id, Action))
    return CorrectedRun(accuracy or 0.0, actions)


def measure(
    experiments: Iterable[Experiment],
    detectors: Sequence[Detector],
    cure: str | dict[str, str] | CorrectionPolicy = "auto",
    data: str | os.PathLike[str] | None = None,
    engine: str = "auto",
) -> list[Cure]:
    """Run each experiment with faults without its faults, with them, and with them and corrections.

    For one without faults, the harm that corrections do: detectors that raise false findings show the worst case.
    """
    found = []
    for experiment in experiments:
        well = msgspec.structs.replace(experiment, faults=())
        clean = lab.run(well, data=data, engine=engine, workers=1).accuracy or 0.0
        faulty = clean
        if experiment.faults:
            faulty = lab.run(experiment, data=data, engine=engine, workers=1).accuracy or 0.0
        treated = course(experiment, detectors, cure, data, engine)
        found.append(Cure(experiment.name, experiment.seed, clean, faulty, treated.accuracy, treated.actions))
    return found


def recovered(cures: Sequence[Cure]) -> float:
    """Return the median share of the clean run's accuracy, over all runs, harmed by their fault or not."""
    return median(cure.recovered for cure in cures)


def worst_harm(cures: Sequence[Cure]) -> float:
    """Return the most percentage points of accuracy that a correction has cost."""
    return max(cure.harm for cure in cures)


# -- the study of docs/cure.md: python -m fedvitals_studies.faultbank.cures ----------------------------------------

CURABLE = (
    lab.not_finite(nodes=["c3"], since=3),
    lab.wrong_learning_rate(nodes=["c3"], factor=30.0, since=3),
    lab.scaling(nodes=["c3", "c5"], factor=20.0, since=3),
    lab.sign_flip(nodes=["c3", "c5"], strength=5.0, since=3),
    lab.gaussian(nodes=["c3", "c5"], strength=10.0, since=3),
    lab.server_rate_too_high(factor=8.0),
)


def study(seeds: Sequence[int]) -> list[Cure]:
    """Measure harmful faults, found by the shipped detectors rather than planted findings; and as many healthy runs."""
    plain = lab.Experiment(
        dataset="digits",
        model=lab.MLP(hidden=(32,)),
        local=lab.Local(iterations=10, optimizer=lab.SGD(0.2)),
        clients=12,
        rounds=24,
    )
    ill = [
        msgspec.structs.replace(plain, name=type(fault).__name__, faults=(fault,), seed=seed)
        for fault in CURABLE
        for seed in seeds
    ]
    well = [msgspec.structs.replace(plain, name="healthy", seed=100 + seed) for seed in range(len(ill))]
    return measure([*ill, *well], choose_detectors("standard"), engine="stacked")


def main() -> None:
    cures = study((1, 2))
    for cure in cures:
        done = ", ".join(f"{a.kind} {a.target or ''} {a.status}" for a in cure.actions if a.status != "suggested")
        say(f"{cure.name:18} clean {cure.clean:.3f} ill {cure.faulty:.3f} treated {cure.cured:.3f}  {done[:110]}")
    ill = [cure for cure in cures if cure.name != "healthy"]
    well = [cure for cure in cures if cure.name == "healthy"]
    say(f"recovered, median of {len(ill)}: {recovered(ill):.1%}")
    say(f"most harm to any of {len(well)} healthy runs: {worst_harm(well):.2f} points")


def say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - a study that is run by hand


if __name__ == "__main__":
    main()
