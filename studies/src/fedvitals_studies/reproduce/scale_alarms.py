# SPDX-License-Identifier: Apache-2.0
"""How often the detector on the gradient scale accuses a healthy run, and how often it sees an ill one.

`python -m fedvitals_studies.reproduce.scale_alarms FOLDER [--seeds 6] [--minutes 8]`: networks that train well, each
several times with its own seed and with learning rates a factor of 10 apart, one store for each network, so that every
run is also compared with the ones before it. Then the paper's exploding and vanishing first weights in the same
stores. It goes on where it was stopped, and prints alarms per 100 healthy rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedvitals import lab
from fedvitals.diagnosis.detectors.gradient_scale import DETECTORS
from fedvitals.monitor.monitor import Monitor
from fedvitals.probes.presets import Preset, preset
from fedvitals_studies.faultbank.intervals import poisson_rate
from fedvitals_studies.reproduce import rows as rows_of_study
from fedvitals_studies.reproduce.paper_weights import PaperWeights

FILE = "scale_alarms.json"
SEEDS, ROUNDS = 6, 12
RATES = (1.0, 3.0, 0.3)  # of the usual learning rate, in turns
SCALE = next(planned for planned in preset("standard").probes if planned.name == "scale")
NETWORKS: dict[str, tuple[Any, Any]] = {
    "digits, the paper's CNN": ("digits", lab.paper_cnn(channels=(16, 32))),
    "digits, MLP": ("digits", lab.mlp(hidden=(64, 64))),
    "digits, transformer": ("digits", lab.transformer()),
    "synthetic, MLP": ("synthetic", lab.mlp(hidden=(32,))),
    "GTSRB, the paper's CNN": (lab.gtsrb(samples=1200, test_samples=100), lab.paper_cnn(channels=(16, 32))),
}
ILL = ("exploding", "vanishing")


def run(folder: Path, network: str, kind: str, seed: int) -> dict[str, Any]:
    """Train one run into its network's store, and return the rounds in which the detector spoke."""
    data, model = NETWORKS[network]
    if kind != "healthy":
        paper = isinstance(model, lab.PaperCNN)
        model = lab.paper_cnn(scenario=kind, channels=(16, 32)) if paper else PaperWeights(model, kind)
    rate = 1e-3 * (RATES[seed % len(RATES)] if kind == "healthy" else 1.0)
    experiment = lab.Experiment(
        dataset=data,
        model=model,
        local=lab.Local(iterations=10, optimizer=lab.adam(rate)),
        clients=5,
        rounds=ROUNDS if kind == "healthy" else 4,
        seed=seed,
    )
    store = folder / f"{network.replace(', ', '-').replace(' ', '-')}.db"
    alone = Preset("scale", (SCALE,), fit_percent=0, brief=True)
    with Monitor(store, run=f"{kind}-{seed}", host="lab", probes=alone, detectors=DETECTORS, machine=False) as monitor:
        lab.run(experiment, monitor, engine="sequential")
        monitor.flush()
        findings = [finding for finding in monitor.findings(notes=True) if finding.issue == "GRADIENT_SCALE"]
    return {
        "network": network, "kind": kind, "seed": seed, "rounds": experiment.rounds,
        "alarms": sorted({finding.where.round for finding in findings}),
        "messages": sorted({finding.message for finding in findings})[:2],
    }  # fmt: skip


def in_words(rows: Sequence[dict[str, Any]]) -> str:
    """Return the figures: alarms of healthy rounds, and the ill runs that were seen."""
    healthy, ill = ([row for row in rows if (row["kind"] == "healthy") == want] for want in (True, False))
    rounds, alarms = sum(row["rounds"] for row in healthy), sum(len(row["alarms"]) for row in healthy)
    seen = sum(bool(row["alarms"]) for row in ill)
    rate = poisson_rate(alarms, rounds)
    per_network = [
        f"{network}: {sum(len(row['alarms']) for row in healthy if row['network'] == network)}, "
        f"{sum(bool(row['alarms']) for row in ill if row['network'] == network)} of "
        f"{sum(row['network'] == network for row in ill)}"
        for network in NETWORKS
    ]
    return (
        f"{alarms} alarms in {rounds} healthy rounds of {len(healthy)} runs: {rate.value:.2f} per "
        f"100 (95 %: {rate.low:.2f} to {rate.high:.2f}); {seen} of {len(ill)} ill runs seen. "
        "By network, alarms and ill runs seen: " + "; ".join(per_network) + "."
    )


def main() -> None:
    chosen = rows_of_study.options("False alarms of the detector on the gradient scale.", seeds=SEEDS).parse_args()
    path = chosen.folder / FILE
    chosen.folder.mkdir(parents=True, exist_ok=True)
    there = {(row["network"], row["kind"], row["seed"]) for row in rows_of_study.read(path)}
    wanted = [(n, "healthy", seed) for seed in range(chosen.seeds) for n in NETWORKS]
    wanted += [(n, kind, 100 + place) for n in NETWORKS for place, kind in enumerate(ILL)]
    left = [(chosen.folder, *each) for each in wanted if each not in there]
    print(in_words(rows_of_study.go_on(path, left, run, chosen.minutes)))  # noqa: T201 - a study that is run by hand


if __name__ == "__main__":
    main()
