# SPDX-License-Identifier: Apache-2.0
"""Planted and healthy federations, each judged by the findings of the detectors of «standard».

A planted problem counts as found if its issue is named within three rounds of its onset, and not before. In healthy
federations every case above a note is an alarm, whatever its issue. Limits were set on seeds below 2000; none were set
for the second part. The seeds of the two parts begin at 2000 and 4000.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from fedvitals.diagnosis.cases import cases, is_trouble
from fedvitals_studies.adapters.federation import ISSUES, drawn_setting, watched_run

TUNING_SEED = 1000
PLANTED_RUNS, HEALTHY_RUNS, HEALTHY_ROUNDS = 40, 50, 10
WITHIN = 3  # rounds
FOUND_BAR, ALARM_BAR = 0.95, 0.7


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the study: its faults, its first seed, and whether healthy texts are also padded or foreign."""

    faults: tuple[str, ...]
    first_seed: int
    other_texts: bool


PARTS = {
    "adapters": Part(("rank_collapse", "aggregation_bias", "scale_mismatch", "forgetting"), 2000, other_texts=False),
    "texts": Part(("length_imbalance", "loss_spike", "dead_adapter"), 4000, other_texts=True),
}


@dataclass(frozen=True, slots=True)
class Judged:
    """One federation: the round in which its fault was named, and the cases of other issues."""

    seed: int
    fault: str | None
    rounds: int
    onset: int | None
    named: int | None
    alarms: tuple[str, ...]
    seconds: float

    @property
    def is_found(self) -> bool:
        return self.onset is not None and self.named is not None and self.onset <= self.named < self.onset + WITHIN


def judged_run(seed: int, fault: str | None, *, other_texts: bool) -> Judged:
    """Run one federation: until three rounds after the onset, or for HEALTHY_ROUNDS."""
    setting = drawn_setting(seed, fault, HEALTHY_ROUNDS, other_texts=other_texts and fault is None)
    if fault is not None:
        setting = replace(setting, rounds=setting.onset + WITHIN)
    began = time.perf_counter()
    findings, _, _ = watched_run(setting)
    own = [f.where.round for f in findings if fault is not None and f.issue == ISSUES[fault]]
    others = [case for case in cases(findings) if is_trouble(case) and (fault is None or case.issue != ISSUES[fault])]
    alarms = tuple(f"{case.issue} {case.node or ''} since round {case.newest.where.round}" for case in others)
    rounds = [number for number in own if number is not None]
    return Judged(
        seed,
        fault,
        setting.rounds,
        None if fault is None else setting.onset,
        min(rounds, default=None),
        alarms,
        round(time.perf_counter() - began, 2),
    )


def planned(faults: Sequence[str], first: int, planted: int, healthy: int) -> Iterator[tuple[int, str | None]]:
    """Yield the seeds and faults of a part, with each kind spread evenly over it."""
    for place in range(max(planted, healthy)):
        for fault in (*faults, None):
            if place < (healthy if fault is None else planted):
                yield first + place, fault


def run_study(
    results: Path,
    part: Part,
    planted: int,
    healthy: int,
    tell: Callable[[Judged], None] = lambda _: None,
    seconds: float | None = None,
) -> list[Judged]:
    """Run what is missing from the results of a part, one line each; returns all. `seconds`: after which no further run
    is begun.
    """
    began = time.perf_counter()
    results.parent.mkdir(parents=True, exist_ok=True)
    done = {(run.seed, run.fault): run for run in kept_runs(results)}
    wanted = [*planned(part.faults, part.first_seed, planted, healthy)]
    with results.open("a", encoding="utf-8") as file:
        for seed, fault in wanted:
            if (seed, fault) not in done and (seconds is None or time.perf_counter() - began < seconds):
                run = done[seed, fault] = judged_run(seed, fault, other_texts=part.other_texts)
                file.write(json.dumps(asdict(run)) + "\n")
                file.flush()
                tell(run)
    return [done[key] for key in wanted if key in done]


def kept_runs(results: Path) -> list[Judged]:
    """Return the runs of a file of results."""
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    return [Judged(**{**row, "alarms": tuple(row["alarms"])}) for row in map(json.loads, lines)]


def found_share(runs: Sequence[Judged], fault: str) -> tuple[int, int]:
    """Return how many planted runs of a fault were found, and how many there are."""
    own = [run for run in runs if run.fault == fault]
    return sum(run.is_found for run in own), len(own)


def alarm_rate(runs: Sequence[Judged]) -> tuple[int, int]:
    """Return the alarms of healthy runs, and their rounds."""
    healthy = [run for run in runs if run.fault is None]
    return sum(len(run.alarms) for run in healthy), sum(run.rounds for run in healthy)


def summary(runs: Sequence[Judged]) -> str:
    """Return the study's figures as a table in Markdown, each beside its bar."""
    lines = ["| what | measured | bar | |", "| --- | ---: | ---: | --- |"]
    for fault in dict.fromkeys(run.fault for run in runs if run.fault is not None):
        found, total = found_share(runs, fault)
        share = found / total if total else math.nan
        verdict = "met" if share >= FOUND_BAR else "missed"
        lines.append(
            f"| {ISSUES[fault]} found within {WITHIN} rounds | {found} of {total} | {FOUND_BAR:.0%} | {verdict} |"
        )
    alarms, rounds = alarm_rate(runs)
    rate = 100 * alarms / rounds if rounds else math.nan
    verdict = "met" if rate <= ALARM_BAR else "missed"
    lines.append(f"| alarms per 100 healthy rounds | {rate:.2f} ({alarms} in {rounds}) | {ALARM_BAR} | {verdict} |")
    return "\n".join(lines)
