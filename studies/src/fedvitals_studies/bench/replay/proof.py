# SPDX-License-Identifier: Apache-2.0
"""Runs of all synchronous topologies, healthy and faulty, that are recorded and then executed again from the seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedvitals import lab
from fedvitals.monitor.monitor import Monitor
from fedvitals.replay.player.player import Player
from fedvitals.replay.player.proof import verify
from fedvitals.replay.tape.reader import open_tape
from fedvitals.replay.tape.tape import Tape

Row = dict[str, Any]
Tell = Callable[[str], None]

TOPOLOGIES = ("centralized", "hierarchical", "rings", "clustered")
MODELS = ("mlp", "cnn", "lstm")  # whose engines are stacked, whichever is faster, and reuse
SEEDS = 3
CLIENTS, ROUNDS = 10, 7


def runs(*, quick: bool = False) -> list[lab.Experiment]:
    """Return each topology with each model and seed: healthy, then with a fault and half the clients away, then both
    worse.
    """
    seeds, rounds = (range(1, 2), 3) if quick else (range(SEEDS), ROUNDS)
    models = MODELS[:1] if quick else MODELS
    return [run_of(t, m, seed, rounds) for t in TOPOLOGIES for m in models for seed in seeds]


def run_of(topology: str, model: str, seed: int, rounds: int) -> lab.Experiment:
    own: list[dict[str, Any]] = [
        {},
        {"participation": 0.5, "faults": [lab.label_noise(nodes=["c4"], rate=0.8, since=1)]},
        {
            "participation": 0.8,
            "partition": lab.dirichlet(0.5),
            "compression": lab.top_k(),
            "faults": [
                lab.gaussian(nodes=["c1"], since=1),
                lab.free_rider(nodes=["c2"]),
                lab.crash(nodes=["c3"], since=2, until=2),
                lab.drop_out(nodes=["c5"], rate=0.5),
            ],
        },
    ]
    if topology != "clustered":  # it has its own averaging rule
        own[2]["aggregator"] = lab.fedadam()
    return lab.Experiment(
        name=f"{topology} {model} {seed}",
        dataset="digits",
        model=model,
        topology=topology,
        clients=CLIENTS,
        rounds=rounds,
        local=lab.Local(iterations=5, batch=16),
        seed=seed,
        **own[seed % len(own)],
    )


def proved(experiments: Sequence[lab.Experiment], folder: Path, tell: Tell) -> list[Row]:
    """Record with as many processes as there are cores, and execute again in one."""
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for number, experiment in enumerate(experiments, 1):
        tell(f"{number} of {len(experiments)}: {experiment.name}")
        store = folder / "runs.db"
        with Monitor(store, experiment.name, host="lab", tape=Tape()) as monitor:
            engine = lab.run(experiment, monitor).engine
        with Player(open_tape(store, monitor.run.id), workers=1) as player:
            proof = verify(player)
        found.append(
            {
                "run": experiment.name,
                "engine": engine,
                "rounds": experiment.rounds,
                "exact": len(proof.proved) if proof.exact and proof.start == 0 else 0,
                "seconds": proof.seconds,
                "mismatch": None if proof.mismatch is None else str(proof.mismatch),
            }
        )
    return found
