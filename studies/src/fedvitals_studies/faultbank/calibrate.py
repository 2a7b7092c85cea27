# SPDX-License-Identifier: Apache-2.0
"""Calibrate the probability behind a sum of evidence: `python -m fedvitals_studies.faultbank.calibrate RUNS`.

RUNS are recordings of the bank `tune-wide`, each used as it is and once more with lying culprits. Clients explained by
an exact relation or by their data are excluded, since they are named by these; so are clients without any possible
cause. What remains is the share of faulty clients by sum of evidence, for each view, separately for federations whose
clients pass models to each other, where healthy neighbours of a faulty client look faulty.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

import numpy as np

from fedvitals.diagnosis.evidence.exact_relations import exact_relations
from fedvitals.diagnosis.evidence.faulty_clients import FaultyClientLocator
from fedvitals.diagnosis.evidence.learning_rates import own_learning_rates
from fedvitals.diagnosis.evidence.log_odds import VIEWS
from fedvitals.diagnosis.evidence.suspect_data import examine_data
from fedvitals.diagnosis.examine import DetectorExamination
from fedvitals.protocols import History
from fedvitals.records import Finding
from fedvitals_studies.faultbank.cases import Case, read_bank
from fedvitals_studies.faultbank.lying import lying
from fedvitals_studies.faultbank.outcome import liars, planted
from fedvitals_studies.faultbank.pool import is_there, load
from fedvitals_studies.faultbank.recording import Recording

KNOTS = (0.0, 0.25, 1.0, 2.0, 4.0, 6.5, 8.0, 10.0, 14.0, 20.0)  # sums of evidence
SUREST = 0.97  # with few cases, no higher probability is justified
EVIDENCE = "evidence.json"


@dataclass
class Sums:
    """Sums of evidence of client-rounds, by view and topology, each with whether the client was faulty then."""

    totals: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    faulty: dict[tuple[str, str], list[bool]] = field(default_factory=dict)

    def add_run(self, recording: Recording, struck: dict[str, int]) -> None:
        """Add a run. `struck`: the faulty clients, and since when."""
        locator = FaultyClientLocator()

        def collect(history: History, round_index: int) -> Iterator[Finding]:
            trend = locator.trend_up_to(history, round_index)
            explained = {
                *exact_relations(history, round_index),
                *own_learning_rates(history, round_index),
                *examine_data(history, round_index).suspects,
            }
            for node in () if trend.scores is None else trend.scores.nodes:
                cleared = bool(trend.accusing_views(node)) and node not in trend.suspected_kinds
                if node not in explained and not cleared:
                    topology = "exchanging" if trend.exchanging else "plain"
                    for view, total in trend.totals(node).items():
                        self.totals.setdefault((view, topology), []).append(total)
                        self.faulty.setdefault((view, topology), []).append(round_index >= struck.get(node, 1 << 30))
            yield from ()

        examination = DetectorExamination(recording, (collect,), None, finished=True)
        for number in recording.rounds():
            _ = [*examination.findings_of(number)]

    def certainty(self, view: str, topology: str) -> list[list[float]]:
        """Return knots: sums of evidence, and the share of clients with such a sum that were faulty, never falling."""
        from sklearn.isotonic import IsotonicRegression  # noqa: PLC0415 - needed for learning only

        fitted = IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip").fit(
            self.totals[view, topology], self.faulty[view, topology]
        )
        return [[*KNOTS], np.asarray(fitted.predict(KNOTS)).clip(0, SUREST).round(4).tolist()]


def _runs(case: Case, folder: Path) -> Iterator[tuple[Recording, dict[str, int]]]:
    recording, about = load(folder, case)
    faults = planted(case, about, None)
    if any(fault.whole for fault in faults):
        return
    culprits = liars(faults)
    yield recording, culprits
    if culprits:
        yield lying(recording, culprits), culprits


def main(folder: str) -> None:
    sums = Sums()
    for case in read_bank("tune-wide").cases:
        if not case.transformation and is_there(Path(folder), case):
            for recording, culprits in _runs(case, Path(folder)):
                sums.add_run(recording, culprits)
    path = Path(str(files("fedvitals.diagnosis.evidence").joinpath(EVIDENCE)))
    model = json.loads(path.read_text(encoding="utf-8"))
    model.pop("certainty", None)
    for view in VIEWS:
        model["views"][view]["certainty"] = {name: sums.certainty(view, name) for name in ("plain", "exchanging")}
        print(view, model["views"][view]["certainty"], file=sys.stderr)  # noqa: T201 - it is run by hand
    path.write_text(json.dumps(model) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
