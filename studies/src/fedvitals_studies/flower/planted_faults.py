# SPDX-License-Identifier: Apache-2.0
"""Flower's patient in simulation, with one fault at a time: does the store name the right client and the right issue?

Judged by what a user gets: the cases of the stored run. A fault is named correctly if its client has a case of the
planted issue, and no other client has a case that is more than a note.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedvitals.diagnosis.cases import Case, is_trouble
from fedvitals.records import Event
from fedvitals.store import open_reader
from fedvitals.store.read import queries
from fedvitals.store.read.reader import Reader
from fedvitals.views.cases import cases_of, culprits
from fedvitals_studies.flower.simulation import FlowerError, SuperLink
from fedvitals_studies.flower.spans import spans_joined

NODES = 8
SEEDS = 5
DEADLINE = 6.0  # seconds: several times a round, so that only a sleeping client misses it
USUAL: Mapping[str, Any] = {"num-server-rounds": 8, "warm-up": True, "learning-rate": 0.05, "local-epochs": 2}
ISSUES: Mapping[str, frozenset[str]] = {
    "none": frozenset(),
    "fail": frozenset({"CRASH"}),
    "timeout": frozenset({"TIMEOUT"}),
    # It is not visible from outside who killed a process; lack of memory is the usual reason.
    "kill": frozenset({"CRASH", "OUT_OF_MEMORY"}),
    "nan": frozenset({"NAN_UPDATE"}),
    "label-noise": frozenset({"LABEL_NOISE"}),
}
OWN: Mapping[str, Mapping[str, Any]] = {  # differences from the usual settings
    "none": {},
    "fail": {"since": 3, "num-server-rounds": 5},
    "timeout": {"since": 2, "num-server-rounds": 5, "round-timeout": DEADLINE},
    "kill": {"since": 3, "num-server-rounds": 5},
    "nan": {"since": 3, "num-server-rounds": 5},
    "label-noise": {"since": 1, "num-server-rounds": 10},
}


@dataclass(frozen=True, slots=True)
class Plant:
    """One run of the patient."""

    fault: str
    seed: int = 0

    @property
    def faulty(self) -> int:
        """Return the faulty partition: a different one for each seed."""
        return (2 + 3 * self.seed) % NODES

    @property
    def name(self) -> str:
        return f"{self.fault}-{self.seed}"

    def settings(self) -> dict[str, Any]:
        return {**USUAL, **OWN[self.fault], "fault": self.fault, "faulty": self.faulty, "seed": self.seed}


@dataclass(frozen=True, slots=True)
class PlantedRun:
    """What the store reports of one run."""

    plant: Plant
    node: str | None  # the faulty client, by fedvitals' name
    right: bool
    cases: tuple[str, ...]  # all that are more than a note, in words
    joined: int = 0  # client spans that belong to their round
    answered: int = 0
    missing: tuple[str, ...] = field(default=())  # clients that answered without such a span, and when


def run_plant(link: SuperLink, app: Path, plant: Plant, store: Path) -> PlantedRun:
    """Simulate it, with its records in `store`, a separate file; FlowerError if the run itself failed."""
    settings = {**plant.settings(), "store": store, "results": store.with_suffix("")}
    log = link.simulate(app, settings, nodes=NODES)
    if not (store.with_suffix("") / "rounds.json").exists() or not store.exists():
        raise FlowerError(f"The run {plant.name} left no results:\n{log[-4000:]}")
    return judged(plant, store)


def judged(plant: Plant, store: Path) -> PlantedRun:
    """Return what the newest run of a store reports, compared with what was planted."""
    with open_reader(str(store)) as reader:
        run = queries.list_runs(reader)[0].id
        found = [case for case in cases_of(reader, run) if is_trouble(case)]
        node = partitions(reader, run).get(plant.faulty)
        answered, joined, missing = spans_joined(reader, run)
    own = [case for case in found if case.issue in ISSUES[plant.fault] and culprits(case) == (node,)]
    others = {name for case in found for name in culprits(case)} - {node}
    right = not found if plant.fault == "none" else bool(own) and not others
    told = tuple(_words(case, node) for case in found)
    return PlantedRun(plant, node, right, told, joined, answered, missing)


def partitions(reader: Reader, run: str) -> dict[int, str]:
    """Return the node of each partition, as reported by the clients."""
    found = {}
    for event in queries.records(reader, run, Event):
        partition = event.data.get("partition")
        if event.name == "client.partition" and isinstance(partition, int) and event.where.node is not None:
            found[partition] = event.where.node
    return found


def _words(case: Case, node: str | None) -> str:
    who = ", ".join("the struck one" if name == node else name for name in culprits(case)) or "the run"
    return f"{case.issue} ({case.severity}) of {who}, round {case.first}"
