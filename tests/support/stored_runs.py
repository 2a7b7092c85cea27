# SPDX-License-Identifier: Apache-2.0
"""Eight small federations of the lab with one planted fault each (or none), stored one after the other.

From the command line, in `tests/`: `python -m support.stored_runs FILE [SEED]`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from fedvitals import lab
from fedvitals.monitor.monitor import Monitor


def _digits(seed: int, **settings: object) -> lab.Experiment:
    return lab.Experiment(**{"dataset": "digits", "model": "mlp", "clients": 8, "rounds": 9, "seed": seed, **settings})


def _network() -> lab.Network:
    """Return weak devices on a virtual clock, on which a straggler costs the test no seconds."""
    return lab.Network(devices="weak", profiles={"weak": lab.Device(flops_per_second=2e8, memory_bytes=1 << 30)})


# Kind of run → its experiment with a seed. Who is at fault and since when is part of the plan, not of the seed.
RUNS: dict[str, Callable[[int], lab.Experiment]] = {
    "nan": lambda seed: _digits(seed, faults=(lab.not_finite(nodes=["c5"], since=6), lab.crash(nodes=["c2"], since=4))),
    "label noise": lambda seed: _digits(seed, clients=10, faults=(lab.label_noise(nodes=["c7"], since=4),)),
    "straggler": lambda seed: _digits(seed, network=_network(), faults=(lab.straggler(nodes=["c3"], since=3),)),
    "rings": lambda seed: _digits(
        seed, clients=9, topology=lab.rings(3), faults=(lab.sign_flip(nodes=["c4"], since=4),)
    ),
    "crash": lambda seed: _digits(seed, faults=(lab.crash(nodes=["c1"], since=3),)),
    "drift": lambda seed: _digits(seed, faults=(lab.client_drift(),)),
    "healthy": _digits,
    "lora": lambda seed: _digits(
        seed,
        parameters=lab.Parameters(adapters=lab.lora(rank=4)),
        faults=(lab.adapter_scale(factor=2.0, nodes=["c6"], since=3),),
    ),
}


def store_runs(path: Path, seed: int) -> dict[str, str]:
    """Train and store the eight runs; returns the id of each by its kind."""
    runs = {}
    for place, (kind, experiment_of) in enumerate(RUNS.items()):
        experiment = experiment_of(seed + place)
        with Monitor(path, run=kind, seed=experiment.seed, config={"rounds": experiment.rounds}) as monitor:
            lab.run(experiment, monitor)
        runs[kind] = monitor.run.id
    return runs


if __name__ == "__main__":
    store_runs(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1)
