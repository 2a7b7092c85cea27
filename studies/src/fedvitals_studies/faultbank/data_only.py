# SPDX-License-Identifier: Apache-2.0
"""What clients' data alone tell: the cases of a bank without any training, a few hundred in a minute.

    python -m fedvitals_studies.faultbank.data_only held-out --data DIR

Each client's data are described when a run begins and whenever they change, as in a monitored run, and judged as the
detectors of data do (`diagnosis.evidence.suspect_data`), with all clients taking part. Groups are left out: whether a
model serves them worse needs one.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from fedvitals.diagnosis.evidence.compared_data import compare_data
from fedvitals.diagnosis.evidence.described_data import DataSketches
from fedvitals.diagnosis.evidence.suspect_data import judge_data
from fedvitals.errors import ConfigError
from fedvitals.lab.description import kind_of
from fedvitals.lab.engines.site import Site
from fedvitals.lab.run import prepare_site
from fedvitals.probes.data_watch import DataWatch
from fedvitals.protocols import Node
from fedvitals.records import Event, Where
from fedvitals_studies.faultbank.cases import Case, read_bank
from fedvitals_studies.faultbank.intervals import poisson_rate, share
from fedvitals_studies.faultbank.run import filled, healthy_site

KINDS = ("label_noise", "label_flip", "input_noise", "input_scale")


@dataclass
class DataFigures:
    """Culprits, and for each whether it was accused and rightly named, by kind of fault; and the false accusations."""

    accused: dict[str, list[bool]] = field(default_factory=dict)
    named: dict[str, list[bool]] = field(default_factory=dict)
    clients: int = 0  # of clean runs
    rounds: int = 0
    alarms: list[str] = field(default_factory=list)  # in clean runs
    beside: list[str] = field(default_factory=list)  # healthy clients in runs with a culprit
    skipped: Counter[str] = field(default_factory=Counter)  # cases that cannot be run here, by what is missing

    def add(self, case: Case, data: Path | None, *, from_start: bool = False) -> None:
        """Judge one case of a bank, if its fault is one of the data or it has none. `from_start`: as if the fault had
        been there from the beginning, so that peers decide rather than the past.
        """
        if {kind_of(type(fault).__name__) for fault in case.experiment.faults} - {*KINDS}:
            return
        try:
            experiment = filled(case, healthy_site(case.experiment, data))
            if from_start:
                faults = [msgspec.structs.replace(fault, since=0, until=None) for fault in experiment.faults]
                experiment = msgspec.structs.replace(experiment, faults=tuple(faults))
            site = prepare_site(experiment, data)
            accused = accusations(site)
        except ConfigError as error:
            self.skipped[str(error).partition(".")[0]] += 1
            return
        experiment = site.experiment
        culprits = {
            node: kind_of(type(fault).__name__)
            for fault in experiment.faults
            for node in (experiment.nodes if fault.nodes == "all" else fault.nodes)
        }
        for node, kind in culprits.items():
            self.accused.setdefault(kind, []).append(node in accused)
            self.named.setdefault(kind, []).append(accused.get(node) == kind)
        healthy = [f"{case.name} {node}: {kind}" for node, kind in accused.items() if node not in culprits]
        if experiment.faults:
            self.beside += healthy
            return
        self.alarms += healthy
        self.clients, self.rounds = self.clients + experiment.clients, self.rounds + experiment.rounds

    def lines(self) -> list[str]:
        """Return the figures as lines of a Markdown table, with intervals."""
        table = ["| kind | culprits | accused [95 %] | of these rightly named |", "| --- | --- | --- | --- |"]
        for kind, accused in sorted(self.accused.items()):
            found = share([float(own) for own in accused], [1.0] * len(accused))
            named = f"{sum(self.named[kind])} of {sum(accused)}"
            table.append(
                f"| {kind} | {len(accused)} | {found.value:.2f} [{found.low:.2f}, {found.high:.2f}] | {named} |"
            )
        rate = poisson_rate(len(self.alarms), self.rounds)
        alarms = (
            f"{rate.value:.3f} [{rate.low:.3f}, {rate.high:.3f}] per 100 rounds" if self.rounds else "no healthy run"
        )
        table += [
            "",
            f"{len(self.alarms)} of {self.clients:,} healthy clients in {self.rounds:,} rounds accused: {alarms}.",
        ]
        table.append(f"Healthy clients accused beside a culprit: {len(self.beside)}.")
        return table + [f"- {words}" for words in (*self.alarms, *self.beside)]


def accusations(site: Site) -> dict[Node, str]:
    """Return the clients of a federation whose data are ever called wrong, and the kind of fault."""
    experiment, sketches, watch = site.experiment, DataSketches(), DataWatch()
    accused: dict[Node, str] = {}
    changes = {change for fault in experiment.faults for change in (fault.since, fault.until or 0)}
    if experiment.population is not None:
        changes.update(experiment.population.rounds_of_change(experiment.rounds))
    for round_index in sorted({0, *(change for change in changes if change < experiment.rounds)}):
        for before in range(max(0, round_index - 1), round_index):  # they were examined then, and had not changed
            _look(site, watch, before)
        sketches.update(_look(site, watch, round_index))
        present = [node for node in experiment.nodes if node in sketches.newest]
        judged = judge_data(sketches, present, compare_data(sketches.newest))
        accused = {**{node: suspect.kind for node, suspect in judged.suspects.items()}, **accused}
    return accused


def _look(site: Site, watch: DataWatch, round_index: int) -> list[Event]:
    """Return what the clients report of their data in a round."""
    told = {node: watch.look(node, site.tensors(node, round_index)) for node in site.experiment.nodes}
    place = {node: Where("", round_index, node) for node in told}
    return [Event(place[node], float(round_index), "info", *own[1]) for node, own in told.items() if own is not None]


def main() -> None:
    """Run the cases of a bank and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bank")
    parser.add_argument("--data", type=Path, help="the folder of the data sets")
    parser.add_argument("--from-start", action="store_true", help="as if all faults were there from the beginning")
    parser.add_argument("--every", type=int, default=1, help="only every so many cases")
    asked = parser.parse_args()
    bank, figures, began = read_bank(asked.bank), DataFigures(), time.perf_counter()
    for case in bank.cases[:: asked.every]:
        figures.add(case, asked.data, from_start=asked.from_start)
    head = f"Bank {bank.name}, digest {bank.digest}, {time.perf_counter() - began:.0f} s."
    left_out = [f"Left out {count}: {words}." for words, count in figures.skipped.items()]
    sys.stdout.write("\n".join([head, "", *figures.lines(), *left_out, ""]))


if __name__ == "__main__":
    main()
