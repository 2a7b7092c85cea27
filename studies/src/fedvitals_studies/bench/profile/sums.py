# SPDX-License-Identifier: Apache-2.0
"""How much of each node's round its parts explain: all topologies of the lab on both clocks, and a plain loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from fedvitals import lab
from fedvitals.analysis.timeline import RoundTime, rounds_of_clock, timeline
from fedvitals.lab import demo
from fedvitals.monitor.monitor import Monitor
from fedvitals.records import Span
from fedvitals.store import open_reader
from fedvitals.store.read import queries

Row = dict[str, Any]

TOPOLOGIES: dict[str, Any] = {
    "centralized": lab.Centralized(),
    "hierarchical": lab.Hierarchical(edges=3),
    "clustered": lab.Clustered(every=2),
    "rings": lab.Rings(rings=3),
    "asynchronous": lab.Asynchronous(buffer=4),
}


def sums(*, quick: bool = False, tell: Callable[[str], None] = lambda _: None) -> list[Row]:
    """Return a row for each topology and clock, and for the demo's plain loop."""
    rows: list[Row] = []
    with TemporaryDirectory() as folder:
        store = Path(folder) / "runs.db"
        for name, topology in TOPOLOGIES.items():
            tell(f"parts of a round: {name}")
            times = in_the_lab(topology, store, rounds=3 if quick else 6)
            rows += [row(name, clock, rounds_of_clock(times, clock)) for clock in ("real", "virtual")]
        tell("parts of a round: the demo's loop")
        with Monitor(store, detectors=(), machine=False, strict=True) as monitor:
            settings = demo.DemoSettings(rounds=2 if quick else 5)
            for _ in demo.federate(settings, monitor):
                pass
        rows.append(row("plain loop", "real", read(store, monitor.run.id)))
    return rows


def in_the_lab(topology: Any, store: Path, rounds: int) -> list[RoundTime]:
    """Return the times of a small federation of this topology, from the store."""
    experiment = lab.Experiment(
        dataset="digits",
        model="cnn",
        clients=12,
        rounds=rounds,
        topology=topology,
        local=lab.Local(iterations=10),
        network=lab.Network(links="4g", devices="phone", edge_links="fibre", jitter=0.2, spread=0.3),
    )
    with Monitor(store, host="lab", detectors=(), machine=False, strict=True) as monitor:
        lab.run(experiment, monitor, engine="reuse", workers=1)
    return read(store, monitor.run.id)


def read(store: Path, run: str) -> list[RoundTime]:
    with open_reader(str(store)) as reader:
        return timeline(queries.records(reader, run, Span))


def row(name: str, clock: str, times: Sequence[RoundTime]) -> Row:
    """Return by how much the known parts miss a round's length: of all nodes together, and of the worst one.

    A part «unaccounted» is not a known part: it is what is missing.
    """
    missed = [shortfall(time) for time in times]
    nodes = np.concatenate([list(one.values()) for one in missed]) if missed else np.zeros(0)
    return {
        "topology": name,
        "clock": clock,
        "rounds": len(times),
        "nodes": len(nodes),
        "missed_percent": 100 * float(nodes.mean()) if len(nodes) else float("nan"),
        "worst_round_percent": 100 * max((float(np.mean([*one.values()])) for one in missed), default=float("nan")),
        "worst_node_percent": 100 * float(nodes.max()) if len(nodes) else float("nan"),
    }


def shortfall(time: RoundTime) -> dict[str, float]:
    """Return each node's share of the round by which its known parts miss the round's length, in either direction."""
    return {node: abs(time.seconds - sum(known(one.parts.items()))) / time.seconds for node, one in time.nodes.items()}


def known(parts: Iterable[tuple[str, float]]) -> list[float]:
    return [seconds for part, seconds in parts if part != "unaccounted"]
