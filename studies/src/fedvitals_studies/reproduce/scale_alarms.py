# SPDX-License-Identifier: Apache-2.0
"""How often the detector on the gradient scale accuses a healthy run, and how often it detects a faulty one.

`python -m fedvitals_studies.reproduce.scale_alarms FOLDER [--seeds 6] [--minutes 8]`: networks that train well, each
several times with its own seed and with learning rates a factor of 10 apart, one store for each network, so that every
run is also compared with the previous ones. Then the paper's exploding and vanishing first weights in the same stores.
It continues where it was stopped; the page of the reproduction shows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedvitals import lab
from fedvitals.diagnosis.detectors.gradient_scale import DETECTORS
from fedvitals.monitor.monitor import Monitor
from fedvitals.probes.presets import Preset, preset
from fedvitals.report.markup import Table
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
ALL = "all"


def run(folder: Path, network: str, kind: str, seed: int) -> dict[str, Any]:
    """Train one run into its network's store. Returns the rounds in which the detector raised a finding."""
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


def table(rows: Sequence[Mapping[str, Any]]) -> Table | None:
    """Return alarms in healthy rounds and the faulty runs that were detected, by network and in total."""
    if not rows:
        return None
    lines = []
    for network in (*NETWORKS, ALL):
        own = [row for row in rows if network in (row["network"], ALL)]
        healthy, ill = ([row for row in own if (row["kind"] == "healthy") == want] for want in (True, False))
        rounds, alarms = sum(row["rounds"] for row in healthy), sum(len(row["alarms"]) for row in healthy)
        rate = poisson_rate(alarms, rounds) if rounds else None
        words = f"{rate.value:.2f} [{rate.low:.2f}, {rate.high:.2f}]" if rate else "–"
        seen = f"{sum(bool(row['alarms']) for row in ill)} of {len(ill)}" if ill else "–"
        lines.append((network, str(len(healthy)), str(rounds), str(alarms), words, seen))
    return Table(
        "False alarms of the detector on the gradient scale",
        ("network", "healthy runs", "rounds", "alarms", "alarms in 100 rounds, 95 % interval", "ill runs seen"),
        tuple(lines),
        "The detector compares the gradient scale with the run's own past and with earlier runs of the same model in "
        "the store. Healthy runs have learning rates that differ by a factor of 10. Ill runs begin with the paper's "
        "exploding or vanishing weights. `python -m fedvitals_studies.reproduce.scale_alarms FOLDER`.",
    )


def main() -> None:
    chosen = rows_of_study.options("False alarms of the detector on the gradient scale.", seeds=SEEDS).parse_args()
    path = chosen.folder / FILE
    chosen.folder.mkdir(parents=True, exist_ok=True)
    there = {(row["network"], row["kind"], row["seed"]) for row in rows_of_study.read(path)}
    wanted = [(n, "healthy", seed) for seed in range(chosen.seeds) for n in NETWORKS]
    wanted += [(n, kind, 100 + place) for n in NETWORKS for place, kind in enumerate(ILL)]
    left = [(chosen.folder, *each) for each in wanted if each not in there]
    shown = table(rows_of_study.go_on(path, left, run, chosen.minutes))
    print(shown.rows[-1] if shown else "Nothing was run.")  # noqa: T201 - a study that is run by hand


if __name__ == "__main__":
    main()
