# SPDX-License-Identifier: Apache-2.0
"""Small federations, most of them with one faulty client, drawn from seeds, with the truth stored separately."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedvitals import lab
from fedvitals.monitor.monitor import Monitor

CAUSES = (
    "wrong labels", "flipped update", "scaled update", "noise for an update", "values not finite",
    "learning rate too high", "slow client", "client fails",
)  # fmt: skip
HEALTHY = "none"
RUNS = 40  # in one set: four of each cause, and eight healthy ones
TUNING, JUDGED = 1_000, 3_000  # the first seed of each set; the runs from 2,000 on have been looked at


@dataclass(frozen=True, slots=True)
class Truth:
    """What was planted in a run."""

    run: str
    client: str | None
    cause: str
    since: int


def drawn(first_seed: int) -> Iterator[tuple[lab.Experiment, Truth]]:
    """Yield the experiments of a set with their truths. A run is determined by its seed."""
    kinds = [*CAUSES * 4, *[HEALTHY] * (RUNS - 4 * len(CAUSES))]
    for place, cause in enumerate(kinds):
        yield _experiment(first_seed + place, cause)


def _experiment(seed: int, cause: str) -> tuple[lab.Experiment, Truth]:
    draw = random.Random(seed)  # noqa: S311 - a study, repeated with the same seed
    clients, since = draw.choice((8, 10, 12)), draw.randint(3, 6)
    client = f"c{draw.randrange(clients)}"
    data: dict[str, Any] = draw.choice((
        {"dataset": "digits", "model": {"kind": "mlp", "hidden": [24]}},
        {"dataset": "digits", "model": "cnn"},
        {"dataset": {"kind": "synthetic", "samples": 3000, "features": 30, "classes": 10, "separation": 4.0, "seed": 5},
         "model": {"kind": "mlp", "hidden": [32, 24]}},
    ))  # fmt: skip
    experiment = lab.Experiment(
        name=f"run {seed}",
        **data,
        clients=clients,
        rounds=14,
        seed=seed,
        partition=draw.choice((lab.iid(), lab.dirichlet(1.0))),
        local=lab.Local(iterations=10, optimizer=lab.SGD(learning_rate=0.1)),
        network=lab.Network(spread=0.3),
        faults=_faults(cause, client, since, draw),
    )
    return experiment, Truth(experiment.name, None if cause == HEALTHY else client, cause, since)


def _faults(cause: str, client: str, since: int, draw: random.Random) -> tuple[Any, ...]:
    """Return the fault of that cause, with a random strength; none for a healthy run."""
    crashes = draw.random() < 0.5
    faults: dict[str, Any] = {
        "wrong labels": lambda: {"kind": "label_noise", "rate": draw.uniform(0.7, 1.0)},
        "flipped update": lambda: {"kind": "sign_flip"},
        "scaled update": lambda: {"kind": "scaling", "factor": draw.uniform(5, 20)},
        "noise for an update": lambda: {"kind": "gaussian"},
        "values not finite": lambda: {"kind": "not_finite", "at_step": draw.randint(1, 6)},
        "learning rate too high": lambda: {"kind": "wrong_learning_rate", "factor": draw.uniform(6, 15)},
        "slow client": lambda: {"kind": "straggler", "factor": draw.uniform(4, 10)},
        "client fails": lambda: {"kind": "crash"} if crashes else {"kind": "drop_out", "rate": 1.0},
    }
    return ({**faults[cause](), "nodes": [client], "since": since},) if cause in faults else ()


def train(store: Path, first_seed: int) -> list[Truth]:
    """Train a set into a store. Returns the truths, which the tools' answers do not contain."""
    truths = []
    for experiment, truth in drawn(first_seed):
        with Monitor(store, run=experiment.name, seed=experiment.seed) as monitor:
            lab.run(experiment, monitor)
        truths.append(truth)
    return truths
