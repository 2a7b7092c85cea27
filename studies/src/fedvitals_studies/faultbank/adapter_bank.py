# SPDX-License-Identifier: Apache-2.0
"""A bank whose cases are federations of a language model with adapters: run by `fedvitals_studies.adapters`, which
plants the issues of language models, and judged by the live findings of the detectors of «standard».
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from fedvitals_studies.adapters.federation import ISSUES, drawn_setting
from fedvitals_studies.adapters.study import (
    ALARM_BAR,
    FOUND_BAR,
    HEALTHY_ROUNDS,
    WITHIN,
    Judged,
    Part,
    planned,
    run_study,
    summary,
)
from fedvitals_studies.faultbank.bars import Bar
from fedvitals_studies.faultbank.intervals import rate, share

RESULTS, PAGE = "runs.jsonl", "README.md"


class Federations(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A number of federations of each fault, and healthy ones, by consecutive seeds; in healthy ones, texts may also be
    padded or foreign (`other_texts`).
    """

    faults: tuple[str, ...]
    first_seed: int
    planted: int
    healthy: int
    other_texts: bool = False

    def __post_init__(self) -> None:
        unknown_faults = sorted({*self.faults} - {*ISSUES})
        if unknown_faults:
            raise ValueError(f"no such fault of adapters: {', '.join(unknown_faults)}; known: {', '.join(ISSUES)}")

    def runs(self) -> Iterator[tuple[int, str | None]]:
        """Yield seeds and faults, in the order in which they are run."""
        return planned(self.faults, self.first_seed, self.planted, self.healthy)

    def text(self) -> str:
        """Return all drawn settings as text, which identifies them."""
        other = self.other_texts
        drawn = (drawn_setting(s, f, HEALTHY_ROUNDS, other_texts=other and f is None) for s, f in self.runs())
        return "\n".join(repr(asdict(setting)) for setting in drawn)


@dataclass(frozen=True, slots=True)
class AdapterSummary:
    """The results of the federations: counts, and a bar for each fault and for alarms in healthy rounds."""

    counts: dict[str, int]
    bars: Sequence[Bar]


def listing(federations: Sequence[Federations]) -> dict[str, Any]:
    """Return how many runs there are, by fault."""
    faults = [fault for own in federations for _, fault in own.runs()]
    return {
        "faulty runs": sum(fault is not None for fault in faults),
        "clean runs": faults.count(None),
        "healthy rounds": HEALTHY_ROUNDS * faults.count(None),
        "fault kinds": {fault: faults.count(fault) for fault in sorted({f for f in faults if f is not None})},
    }


def run_federations(
    federations: Sequence[Federations], folder: Path, done: Callable[[str], None], seconds: float | None
) -> tuple[AdapterSummary, tuple[Path, ...]]:
    """Run what is missing from the folder, for at most `seconds`. Returns the figures, and the files written."""
    runs: list[Judged] = []
    for own in federations:
        part = Part(own.faults, own.first_seed, own.other_texts)
        runs += run_study(
            folder / RESULTS, part, own.planted, own.healthy, lambda run: done(f"{run.fault}/{run.seed}"), seconds
        )
    page = folder / PAGE
    page.write_text(f"# The bank of adapters\n\n{summary(runs)}\n", encoding="utf-8")
    return summarised(runs), (page, folder / RESULTS)


def summarised(runs: Sequence[Judged]) -> AdapterSummary:
    """Return the counts and bars of judged federations."""
    healthy = [run for run in runs if run.fault is None]
    bars = []
    for fault in dict.fromkeys(run.fault for run in runs if run.fault is not None):
        hits = [float(run.is_found) for run in runs if run.fault == fault]
        name = f"{ISSUES[fault]} within {WITHIN} rounds"
        bars.append(Bar(name, FOUND_BAR, True, share(hits, [1.0] * len(hits)), "%"))
    if healthy:
        obtained = rate([len(run.alarms) for run in healthy], [run.rounds for run in healthy])
        bars.append(Bar("alarms per 100 healthy rounds", ALARM_BAR, False, obtained))
    counts = {
        "faulty runs": len(runs) - len(healthy),
        "clean runs": len(healthy),
        "healthy rounds": sum(run.rounds for run in healthy),
    }
    return AdapterSummary(counts, bars)
