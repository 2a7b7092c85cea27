# SPDX-License-Identifier: Apache-2.0
"""What clients' data alone tell: the cases of a bank without any training, a few hundred in a minute.

    python -m fedvitals_studies.faultbank.data_only held-out --data DIR

Each client's data are described when a run begins and whenever they change, as in a monitored run, and judged as the
detectors of data do (`diagnosis.evidence.data_suspects`), with all clients taking part. Groups are left out: whether a
model serves them worse needs one.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from fedvitals.diagnosis.evidence.data_comparison import compare_data
from fedvitals.diagnosis.evidence.data_sketches import DataSketches
from fedvitals.diagnosis.evidence.data_suspects import judge_data
from fedvitals.errors import ConfigError
from fedvitals.lab.description import kind_of
from fedvitals.lab.engines.site import Site
from fedvitals.lab.run import prepare_site
from fedvitals.probes.data_sketch import DataWatch
from fedvitals.protocols import Node
from fedvitals.records import Event, Where
from fedvitals_studies.faultbank.cases import Case, read_bank
from fedvitals_studies.faultbank.intervals import poisson_limits
from fedvitals_studies.faultbank.run import filled

KINDS = ("label_noise", "label_flip", "input_noise", "input_scale")


@dataclass
class DataFigures:
    """Culprits and how many of them were accused, by kind of fault; healthy clients that were accused."""

    culprits: Counter[str] = field(default_factory=Counter)
    accused: Counter[str] = field(default_factory=Counter)
    named: Counter[str] = field(default_factory=Counter)  # with the right kind
    clients: int = 0  # of clean runs
    rounds: int = 0
    alarms: list[str] = field(default_factory=list)  # healthy clients that were accused
    skipped: Counter[str] = field(default_factory=Counter)  # cases that cannot be run here, by what is missing


def accusations(site: Site) -> dict[Node, str]:
    """Return the clients of a federation whose data are called wrong at any time, and the kind of fault."""
    experiment = site.experiment
    sketches, watch, accused = DataSketches(), DataWatch(), dict[Node, str]()
    changes = {round_index for fault in experiment.faults for round_index in (fault.since, fault.until or 0)}
    if experiment.population is not None:
        changes.update(experiment.population.rounds_of_change(experiment.rounds))
    for round_index in sorted({0, *(change for change in changes if change < experiment.rounds)}):
        events = []
        for node in experiment.nodes:
            for _ in range(2 if round_index else 1):  # data are looked at in the rounds between, too
                told = watch.look(node, site.tensors(node, max(0, round_index - 1) if not _ else round_index))
            if told is not None:
                events.append(Event(Where("", round_index, node), float(round_index), "info", *told[1]))
        sketches.update(events)
        present = [node for node in experiment.nodes if node in sketches.newest]
        judged = judge_data(sketches, present, compare_data(sketches.newest))
        accused = {**{node: suspect.kind for node, suspect in judged.suspects.items()}, **accused}
    return accused


def count_case(figures: DataFigures, case: Case, data: Path | None) -> None:
    """Add one case of a bank to the figures."""
    try:
        site = prepare_site(filled(case, data), data)
        accused = accusations(site)
    except ConfigError as error:
        figures.skipped[str(error).partition(".")[0]] += 1
        return
    faults = site.experiment.faults
    culprits = {node: kind_of(type(fault).__name__) for fault in faults for node in site.experiment.nodes if fault.nodes == "all" or node in fault.nodes}
    if not faults:
        figures.clients += site.experiment.clients
        figures.rounds += site.experiment.rounds
    for node, kind in culprits.items():
        figures.culprits[kind] += 1
        figures.accused[kind] += node in accused
        figures.named[kind] += accused.get(node) == kind
    figures.alarms += [f"{case.name} {node}: {kind}" for node, kind in accused.items() if node not in culprits]
