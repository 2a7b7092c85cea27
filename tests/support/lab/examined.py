# SPDX-License-Identifier: Apache-2.0
"""A small federation of the lab, made ill or left healthy, and what some detectors say of it round after round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fedvitals import lab
from fedvitals.diagnosis.examine import examine
from fedvitals.monitor.monitor import Monitor
from fedvitals.probes.presets import preset
from fedvitals.protocols import Detector, History
from fedvitals.records import Finding
from fedvitals.store import MemoryStore

ONSET = 3
CULPRIT = ["c3"]
NETWORK = lab.Network(links="fibre", devices="laptop", spread=0.3, jitter=0.1)


def watched(*faults: Any, **settings: Any) -> History:
    """The history of a run: 8 clients that learn digits, 8 rounds, unless told otherwise."""
    usual: dict[str, Any] = {
        "dataset": "digits",
        "model": lab.mlp(hidden=[16]),
        "clients": 8,
        "rounds": 8,
        "local": lab.Local(iterations=6, optimizer=lab.sgd(learning_rate=0.1)),
    }
    experiment = lab.Experiment(**usual | settings, faults=list(faults))
    store = MemoryStore()
    # The clients are so small that what they measure of their own samples would exceed its share of the time.
    probes = replace(preset("standard"), fit_percent=None)
    with Monitor(None, host="lab", sinks=[store], probes=probes, detectors=(), strict=True) as monitor:
        engine = "stacked" if getattr(experiment.model, "stackable", False) else "sequential"
        lab.run(experiment, monitor, engine=engine, workers=1)
        run = monitor.run.id
    return store.history(run)


def findings_by(history: History, detectors: Sequence[Detector]) -> list[Finding]:
    return examine(history, detectors=detectors)


def first_rounds(findings: Sequence[Finding]) -> dict[tuple[str, str | None], int]:
    """Each trouble (issue, node) with the round in which it was first said."""
    first: dict[tuple[str, str | None], int] = {}
    for finding in findings:
        first.setdefault((finding.issue, finding.where.node), finding.where.round or 0)
    return first


HEALTHY: dict[str, dict[str, Any]] = {
    "iid": {},
    "skewed": {"partition": lab.dirichlet(0.1)},
    "a third takes part": {"clients": 20, "participation": 0.3, "rounds": 12, "partition": lab.dirichlet(0.3)},
    "hierarchical": {"topology": lab.Hierarchical(edges=2)},
    "rings": {"topology": lab.Rings(), "partition": lab.dirichlet(0.3)},
    "clustered": {"topology": lab.Clustered(threshold=3.0)},
    "asynchronous": {"topology": lab.Asynchronous(buffer=4), "network": NETWORK, "rounds": 12},
    "phones that are away at times": {
        "network": lab.Network(
            links={"4g": 0.7, "3g": 0.3}, devices={"phone": 0.5, "laptop": 0.5}, spread=0.5, availability=0.9
        ),
        "clients": 20,
        "rounds": 12,
    },
    "transformer": {"model": lab.transformer(width=8, heads=2, layers=1, patch=4), "rounds": 5},
    "compressed": {"compression": lab.top_k(share=0.05)},
    "epochs and Adam": {
        "local": lab.Local(epochs=1, optimizer=lab.adam(learning_rate=3e-3)),
        "partition": lab.dirichlet(0.1),
    },
}
