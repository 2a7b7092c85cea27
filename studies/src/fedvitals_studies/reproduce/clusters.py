# SPDX-License-Identifier: Apache-2.0
"""Data on which SR-FCA really forms clusters, and what the gradient scale says there.

`python -m fedvitals_studies.reproduce.clusters FOLDER [--seeds 5] [--minutes 8]`: 20 clients of the digits, IID, with
labels that four groups permute, and by Dirichlet 0.1; centralized and clustered. On the paper's IID data clustering
ends in one group, so that the paper cannot conclude anything about it. The threshold λ lies between the distances of
models within and between the permuted groups, measured with seed 9001. It continues where it was stopped.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedvitals import lab
from fedvitals.monitor.monitor import Monitor
from fedvitals.probes.presets import Planned, Preset
from fedvitals.probes.scale import scale
from fedvitals.protocols import History
from fedvitals.report.markup import Table
from fedvitals.store import MemoryStore
from fedvitals_studies.reproduce import rows as rows_of_study

FILE = "clusters.json"
SEEDS = 5
CLIENTS, ROUNDS, GROUPS = 20, 10, 4
THRESHOLD = 2.3  # λ: after a round, models of one permutation were 1.6 to 2.1 apart, of two of them 2.4 to 2.9
DATA: dict[str, Any] = {
    "IID": lab.iid(),
    "labels permuted by 4 groups": lab.permuted_labels(groups=GROUPS),
    "Dirichlet 0.1": lab.dirichlet(0.1),
}
TOPOLOGIES: dict[str, Any] = {
    "centralized": lab.Centralized(),
    "clustered": lab.Clustered(threshold=THRESHOLD, smallest=2),
}


def run(data: str, topology: str, seed: int) -> dict[str, Any]:
    """Train one federation. Returns its clusters, their purity, its local accuracy and its gradient scales."""
    experiment = lab.Experiment(
        dataset="digits",
        partition=DATA[data],
        model=lab.paper_cnn(channels=(16, 32)),
        local=lab.Local(iterations=60, optimizer=lab.adam(1e-3), clip=lab.Clip(1.0)),
        topology=TOPOLOGIES[topology],
        clients=CLIENTS,
        rounds=ROUNDS,
        seed=seed,
    )
    store = MemoryStore()
    probes = Preset("scale", (Planned(scale(), rounds=ROUNDS - 1),), fit_percent=0, brief=True)
    with Monitor(None, host="lab", sinks=[store], detectors=(), probes=probes) as monitor:
        lab.run(experiment, monitor, engine="stacked", workers=1)
        name = monitor.run.id
    history = store.history(name)
    groups = _groups(history)
    scales = history.latest("scale.gsc", ROUNDS - 1)
    levels = [
        statistics.median(np.log10([scales[node] for node in members if scales.get(node, 0) > 0] or [np.nan]))
        for members in groups.values()
    ]
    local = [v for node, v in history.latest("local.accuracy", ROUNDS - 1).items() if node.startswith("c")]
    return {
        "data": data, "topology": topology, "seed": seed, "clusters": len(groups),
        "purity": sum(max(Counter(int(node[1:]) % GROUPS for node in m).values()) for m in groups.values()) / CLIENTS,
        "accuracy": float(np.mean(local)) if local else None,
        "gsc": float(f"{statistics.median(scales.values()):.4g}"),
        "orders_between_clusters": float(f"{max(levels) - min(levels):.3g}"),
        "orders_between_clients": float(f"{np.ptp(np.log10([v for v in scales.values() if v > 0])):.3g}"),
    }  # fmt: skip


def _groups(history: History) -> dict[str, list[str]]:
    """Return the final clusters; all clients as one if there are none."""
    events = history.events("groups")
    members = {str(group): [str(node) for node in nodes] for group, nodes in events[-1].data.items()} if events else {}
    return {group: nodes for group, nodes in members.items() if nodes} or {"all": [f"c{i}" for i in range(CLIENTS)]}


def table(rows: Sequence[Mapping[str, Any]]) -> Table | None:
    """Return the results on each kind of data under each topology."""
    lines = []
    for data in DATA:
        for topology in TOPOLOGIES:
            own = [row for row in rows if (row["data"], row["topology"]) == (data, topology)]
            if own:
                purity = _range(own, "purity") if "permuted" in data and topology == "clustered" else "–"
                columns = ("clusters", "accuracy", "gsc", "orders_between_clusters", "orders_between_clients")
                clusters, *numbers = (_range(own, column) for column in columns)
                lines.append((f"{data}, {topology}", clusters, purity, *numbers, str(len(own))))
    if not lines:
        return None
    return Table(
        "Where clustering forms clusters, and what GSC says there",
        ("data, topology", "clusters", "purity", "accuracy at home", "GSC, median client", "orders between clusters",
         "orders between clients", "seeds"),
        tuple(lines),
        f"Digits, {CLIENTS} clients, round {ROUNDS - 1}, the paper's CNN with 16 and 32 channels, baseline; ranges "
        f"over the seeds. λ = {THRESHOLD}, chosen on another seed. Purity: the share of clients in a cluster that "
        "mostly has their permutation. Accuracy is the global model's, or the client's cluster's, on the clients' own "
        "local tests.",
    )  # fmt: skip


def _range(rows: Sequence[Mapping[str, Any]], name: str) -> str:
    values = [row[name] for row in rows if row[name] is not None]
    if not values:
        return "–"
    words = [f"{value:.3g}" for value in (min(values), max(values))]
    return words[0] if words[0] == words[1] else f"{words[0]} to {words[1]}"


def main() -> None:
    chosen = rows_of_study.options("Data on which clusters form, and their gradient scale.", seeds=SEEDS).parse_args()
    path = chosen.folder / FILE
    there = {(row["data"], row["topology"], row["seed"]) for row in rows_of_study.read(path)}
    wanted = [(d, t, n) for n in range(chosen.seeds) for d in DATA for t in TOPOLOGIES if (d, t, n) not in there]
    rows_of_study.go_on(path, wanted, run, chosen.minutes)


if __name__ == "__main__":
    main()
