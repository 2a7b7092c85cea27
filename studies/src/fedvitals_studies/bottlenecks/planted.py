# SPDX-License-Identifier: Apache-2.0
"""Planted bottlenecks, and whether they are named: `python -m fedvitals_studies.bottlenecks.planted [lab] [real]`.

Each federation is run and stored as a user's would be; the verdict is that of `fedvitals profile`, from the store. In
the lab the first remedy that it can run is then run, and compared with the prediction.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedvitals import lab
from fedvitals.analysis.bottleneck import RunVerdict, judge
from fedvitals.analysis.remedies import Remedy, remedies
from fedvitals.analysis.timeline import RoundTime, rounds_of_clock, timeline
from fedvitals.analysis.what_if import what_if
from fedvitals.lab.rerun import RemedyTrial, try_remedies
from fedvitals.monitor.monitor import Monitor
from fedvitals.records import Span, Transfer
from fedvitals.store import open_reader
from fedvitals.store.read import queries
from fedvitals.views.profile import latency_in
from fedvitals_studies.bottlenecks.lab import Plant, controls, latent, plants
from fedvitals_studies.bottlenecks.real import RealFederation, RealPlant, real_plants

STRONGLY = 0.45  # share of a round from which a verdict on a control is an accusation
LOCAL = "local.accuracy"  # on the clients' own tests: the server's test set is sized to make it slow
ENGINE: dict[str, Any] = {"engine": "stacked", "workers": 1}

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PlantedVerdict:
    """The verdict on one planted federation."""

    plant: Plant | RealPlant
    verdict: RunVerdict
    times: tuple[RoundTime, ...] = field(repr=False)
    remedies: tuple[Remedy, ...] = field(repr=False)
    tried: tuple[RemedyTrial, ...] = ()

    @property
    def right(self) -> bool:
        """Whether the kind is right, and for a straggler also who and why; a control must not be accused."""
        plant, verdict = self.plant, self.verdict
        if plant.kind == "nothing":
            return verdict.kind == "nothing" or verdict.share < STRONGLY
        named = (verdict.kind, verdict.bound_by, verdict.stragglers)
        return named == (plant.kind, plant.bound_by, plant.stragglers)

    @property
    def words(self) -> str:
        """The verdict in words: «upload», «straggler c3, by upload»."""
        verdict = self.verdict
        if not verdict.stragglers:
            return verdict.kind
        return f"straggler {', '.join(verdict.stragglers)}, by {verdict.bound_by}"


def read(store: str | Path, run: str, plant: Plant | RealPlant) -> PlantedVerdict:
    """Return the verdict on a stored run, as `fedvitals profile` reads it."""
    with open_reader(str(store)) as reader:
        times = rounds_of_clock(timeline(queries.records(reader, run, Span)))
        transfers = queries.records(reader, run, Transfer)
    verdict = judge(times)
    assert verdict is not None  # noqa: S101 - it has rounds
    latency = latency_in(plant.experiment, times, transfers) if isinstance(plant, Plant) else None
    rows = what_if(times, transfers=transfers, latency=latency)
    return PlantedVerdict(plant, verdict, tuple(times), tuple(remedies(verdict, rows)))


def in_the_lab(
    cases: Iterable[Plant] | None = None, *, most: int = 1, tell: Tell = lambda _: None
) -> list[PlantedVerdict]:
    """Return the verdicts on the lab's planted federations and controls; `most` remedies of each are tried."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "runs.db"
        for plant in [*plants(), *latent(), *controls()] if cases is None else cases:
            tell(f"{plant.name}, {plant.strength:.0%}")
            with Monitor(store, host="lab", probes="light", detectors=(), machine=False, strict=True) as monitor:
                lab.run(plant.experiment, monitor, **ENGINE)
            said = read(store, monitor.run.id, plant)
            if plant.kind != "nothing" and most:
                able = [one for one in said.remedies if plant.tried is None or plant.tried in one.key]
                tried = try_remedies(plant.experiment, able, most=most, accuracy=LOCAL, **ENGINE)
                said = PlantedVerdict(plant, said.verdict, said.times, said.remedies, tuple(tried))
            found.append(said)
    return found


def on_processes(cases: Sequence[RealPlant] | None = None, *, tell: Tell = lambda _: None) -> list[PlantedVerdict]:
    """Return the same for a real federation of processes."""
    found = []
    with tempfile.TemporaryDirectory() as folder, RealFederation() as federation:
        store = Path(folder) / "runs.db"
        for plant in real_plants() if cases is None else cases:
            tell(plant.name)
            found.append(read(store, federation.run(plant, store), plant))
    return found


def table(verdicts: Iterable[PlantedVerdict]) -> list[str]:
    """Return lines of Markdown, one for each case."""
    columns = (
        "planted",
        "strength",
        "said",
        "share",
        "right",
        "remedy",
        "round",
        "predicted",
        "re-run",
        "error of gain",
    )
    lines = [f"| {' | '.join((*columns, 'accuracy'))} |", "| --- | ---: | --- | ---: " + "| --- " * 7 + "|"]
    for one in verdicts:
        strength = f"{one.plant.strength:.0%}" if isinstance(one.plant, Plant) else ""
        cells = [one.plant.name, strength, one.words, f"{one.verdict.share:.0%}", "yes" if one.right else "NO"]
        tried = [_tried(each) for each in one.tried] or [["", f"{one.verdict.seconds:.3g} s", "", "", "", ""]]
        lines += [f"| {' | '.join([*cells, *each])} |" for each in tried]
    return lines


def _tried(tried: RemedyTrial) -> list[str]:
    seconds = [f"{value:.3g} s" for value in (tried.before, tried.predicted, tried.measured)]
    known = tried.accuracy_before is not None and tried.accuracy_after is not None
    accuracy = f"{tried.accuracy_before:.3f} → {tried.accuracy_after:.3f}" if known else ""
    return [tried.remedy.name, *seconds, f"{tried.gain_error:.1%}", accuracy]


def main(parts: Sequence[str]) -> None:
    def say(text: str) -> None:
        print(text, flush=True)  # noqa: T201 - a study that is run by hand

    for part, judged in (("lab", in_the_lab), ("real", on_processes)):
        if part in parts or not parts:
            said = judged()
            say("\n".join(table(said)))
            say(f"{sum(one.right for one in said)} of {len(said)} right\n")


if __name__ == "__main__":
    main(sys.argv[1:])
