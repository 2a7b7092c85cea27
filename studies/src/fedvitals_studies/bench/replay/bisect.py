# SPDX-License-Identifier: Apache-2.0
"""Twenty federations that one or two clients begin to harm in some round: does bisect name the round and the clients?

Each has a twin without the fault. A case only counts if its model is visibly worse than that twin's at the end.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from fedvitals import lab
from fedvitals.monitor.monitor import Monitor
from fedvitals.replay.counterfactual.bisect import bisect
from fedvitals.replay.player.player import Player
from fedvitals.replay.tape.reader import open_tape
from fedvitals.replay.tape.tape import Tape

Row = dict[str, Any]
Tell = Callable[[str], None]

SEEDS, MILDER = range(100, 120), 110
FAULTS: Mapping[str, tuple[dict[str, float], dict[str, float]]] = {  # of the first ten cases, and of the others
    "sign_flip": ({"strength": 30.0}, {"strength": 10.0}),
    "scaling": ({"factor": 200.0}, {"factor": 60.0}),
    "gaussian": ({"strength": 300.0}, {"strength": 150.0}),
    "wrong_learning_rate": ({"factor": 500.0}, {"factor": 300.0}),
    "input_scale": ({"factor": 255.0}, {"factor": 100.0}),
}
MODELS = ("mlp", "logistic", "cnn", "mlp")
WORSE = 0.10, 1.5  # at the end, less accuracy, or times the loss: smaller differences are not visible


@dataclass(frozen=True, slots=True)
class Case:
    """A federation in which a fault begins in some round."""

    seed: int
    fault: str
    model: str
    clients: int
    rounds: int
    since: int
    nodes: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.fault} of {' and '.join(self.nodes)} from round {self.since}, {self.model}, seed {self.seed}"

    @property
    def good(self) -> int:
        """Return a round remembered as good: not the last good one."""
        return self.since // 2

    @property
    def bad(self) -> int:
        return self.rounds - 1

    @property
    def most(self) -> float:
        """Return the most re-runs: by the rounds between the good and the bad one, fewer than the run has."""
        return 2 * math.log2(self.bad - self.good) + self.clients

    def experiment(self) -> lab.Experiment:
        how = FAULTS[self.fault][self.seed >= MILDER]
        fault = getattr(lab, self.fault)(nodes=self.nodes, since=self.since, **how)
        rate = 0.02 if self.model == "cnn" else 0.1
        return lab.Experiment(
            name=self.name,
            dataset="digits",
            model=self.model,
            clients=self.clients,
            rounds=self.rounds,
            local=lab.Local(iterations=10, batch=16, optimizer=lab.sgd(learning_rate=rate, momentum=0.5)),
            faults=(fault,),
            seed=self.seed,
        )

    def twin(self) -> lab.Experiment:
        return msgspec.structs.replace(self.experiment(), faults=())


def planted() -> list[Case]:
    return [case_of(seed) for seed in SEEDS]


def case_of(seed: int) -> Case:
    chance = random.Random(seed)  # noqa: S311 - the same ones each time
    fault = [*FAULTS][seed % len(FAULTS)]
    clients, rounds = chance.randint(6, 12), chance.randint(10, 24)
    since = chance.randint(2, rounds - 4)
    struck = chance.sample(range(clients), 1 + seed // len(FAULTS) % 2)
    return Case(
        seed, fault, MODELS[seed % len(MODELS)], clients, rounds, since, tuple(f"c{i}" for i in sorted(struck))
    )  # fmt: skip


def recorded(case: Case, store: Path) -> tuple[str, dict[str, float]]:
    """Return the run's id; and relative to its twin, at the end, the accuracy that it lacks and the ratio of losses."""
    with Monitor(store, case.name, host="lab", tape=Tape()) as monitor:
        ill = lab.run(case.experiment(), monitor, workers=1).rounds[-1].metrics
    well = lab.run(case.twin(), workers=1).rounds[-1].metrics
    loss = ill["loss"] / well["loss"] if math.isfinite(ill["loss"]) else math.inf
    return monitor.run.id, {"accuracy": well["accuracy"] - ill["accuracy"], "loss": loss}


def visible(worse: Mapping[str, float]) -> bool:
    return worse["accuracy"] >= WORSE[0] or worse["loss"] >= WORSE[1]


def tried(cases: Sequence[Case], folder: Path, tell: Tell) -> list[Row]:
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for number, case in enumerate(cases, 1):
        tell(f"{number} of {len(cases)}: {case.name}")
        store = folder / "runs.db"
        run, worse = recorded(case, store)
        with Player(open_tape(store, run), workers=1) as player:
            culprit = bisect(player, case.good, case.bad)
        right = culprit.round == case.since and {*culprit.clients} == {*case.nodes} and visible(worse)
        found.append(
            {
                "case": case.name,
                "right": right,
                "worse": worse,
                "round": culprit.round,
                "clients": [*culprit.clients],
                "reruns": culprit.reruns,
                "most": case.most,
            }
        )
        said = f"round {culprit.round}, {', '.join(culprit.clients)}; {culprit.reruns} re-runs"
        tell(f"  {'right' if right else 'WRONG'}: {said}")
    return found
