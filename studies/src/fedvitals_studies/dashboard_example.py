# SPDX-License-Identifier: Apache-2.0
"""The example that ships with the dashboard: one federation twice, once with a client that becomes faulty."""

from __future__ import annotations

import lzma
from pathlib import Path

from fedvitals import lab
from fedvitals.monitor.monitor import Monitor
from fedvitals.probes.activations import activations
from fedvitals.probes.gradients import gradient_histogram, gradients
from fedvitals.probes.nonlinearity import nonlinearity
from fedvitals.probes.presets import Planned, Preset, preset
from fedvitals.probes.scale import scale
from fedvitals.probes.weights import weights
from fedvitals.schedule import always, budget

ILL = "c7"


def experiment(*, ill: bool, seed: int = 7) -> lab.Experiment:
    return lab.Experiment(
        dataset="digits",
        model="cnn",
        clients=10,
        rounds=16,
        seed=seed,
        partition=lab.dirichlet(1.0),
        local=lab.Local(epochs=10),
        network=lab.Network(links={"fibre": 0.5, "4g": 0.5}, devices={"laptop": 0.5, "phone": 0.5}, spread=0.3),
        faults=(lab.label_noise(nodes=[ILL], rate=0.9, since=5),) if ill else (),
    )


def _everything() -> Preset:
    """Return everything that a page can show except single steps, which would be most of the file."""
    planned = (
        Planned(gradients, always),
        Planned(gradient_histogram, budget(3.0)),
        Planned(weights),
        Planned(activations, budget(2.0)),
        Planned(scale()),
        Planned(nonlinearity(), rounds=8),
    )
    return Preset("everything", planned, fit_percent=None)


def make(store: Path) -> None:
    """Train both into a store."""
    for name, ill in (("hospitals, all well", False), ("hospitals", True)):
        wanted = experiment(ill=ill)
        probes, plan = _everything() if ill else preset("standard"), {"rounds": wanted.rounds}
        with Monitor(store, run=name, probes=probes, seed=wanted.seed, config=plan) as monitor:
            lab.run(wanted, monitor)


def pack(store: Path, target: Path) -> int:
    """Compress a store for shipping. Returns the number of bytes."""
    packed = lzma.compress(store.read_bytes(), preset=9 | lzma.PRESET_EXTREME)
    target.write_bytes(packed)
    return len(packed)
