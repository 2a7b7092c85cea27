# SPDX-License-Identifier: Apache-2.0
"""How well corrections work: each ill run beside its twin that is corrected by itself, and its twin that is well.

And how much they harm: a healthy run beside its twin in which findings are raised that are not true.
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
    """One run under care: what its accuracy was at the end, and what was done."""

    accuracy: float
    actions: tuple[Action, ...]


@dataclass(frozen=True, slots=True)
class Cure:
    """Accuracies at the end: of the well, the ill, and the ill that was corrected."""

    name: str
    seed: int
    clean: float
    faulty: float
    cured: float
    actions: tuple[Action, ...] = ()

    @property
    def recovered(self) -> float:
        """Share of the clean run's accuracy."""
        return self.cured / self.clean if self.clean else 0.0

    @property
    def harm(self) -> float:
        """Points of accuracy, in hundredths, that are missing to the clean run; below 0: there are more."""
        return 100 * (self.clean - self.cured)


def course(
    experiment: Experiment,
    detectors: Sequence[Detector],
    cure: str | dict[str, str] | CorrectionPolicy,
    data: str | os.PathLike[str] | None = None,
    engine: str = "auto",
) -> CorrectedRun:
    """Run an experiment under care, in this process."""
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
    """For each experiment with faults: without its faults, with them, and with them under care.

    For one without faults, the harm that care does to it: detectors that raise false findings show the worst case.
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
    """The median share of the clean run's accuracy, of the runs that their fault had hurt or not."""
    return median(cure.recovered for cure in cures)


def worst_harm(cures: Sequence[Cure]) -> float:
    """The most points of accuracy that a correction has cost."""
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
    """Faults that hurt, found by the shipped detectors, not planted ones; and as many runs without a fault."""
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
