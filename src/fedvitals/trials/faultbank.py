# SPDX-License-Identifier: Apache-2.0
"""The fault bank from its file to its page: train what is missing, examine everything, write what came of it."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedvitals.diagnosis.issues import ISSUES_BY_CODE
from fedvitals.errors import ConfigError
from fedvitals.lab.data_sources import places
from fedvitals.lab.description import kind_of
from fedvitals.trials.faultbank_cases import Bank, Case, healthy_rounds
from fedvitals.trials.faultbank_examine import examine_all, sources, to_examine
from fedvitals.trials.faultbank_page import write_page
from fedvitals.trials.faultbank_pool import Done, is_there, watch_all
from fedvitals.trials.faultbank_report import Summary, summarise

RUNS, OUTCOMES = "runs", "outcomes"  # below the folder of results
Stage = Callable[[str, int], Done]
"""A stage of the work begins: its name, and how many cases it has; what it gives hears of each case that is over."""


@dataclass(frozen=True, slots=True)
class Absent:
    """A data set that is not there, and the cases that are left out because of it."""

    dataset: str
    cases: int
    words: str  # where it was sought, and how to get it


@dataclass(frozen=True, slots=True)
class Taken:
    """A bank that has been run, with its page."""

    bank: Bank
    summary: Summary
    files: Sequence[Path]
    absent: Sequence[Absent]
    failed: Sequence[tuple[str, str]]  # cases, and what went wrong


def listing(bank: Bank) -> dict[str, Any]:
    """What is in a bank, and the digest by which it is known."""
    faulty = [case for case in bank.cases if case.faulty]
    kinds = Counter(kind_of(type(case.experiment.faults[0]).__name__) for case in faulty)
    return {
        "bank": bank.name,
        "digest": bank.digest,
        "faulty runs": len(faulty),
        "clean runs": len(bank.cases) - len(faulty),
        "healthy rounds": healthy_rounds(bank.cases),
        "fault kinds": dict(sorted(kinds.items())),
        "domains": dict(sorted(Counter(case.domain for case in faulty).items())),
    }


def without_absent(cases: Sequence[Case], data: Path | None) -> tuple[list[Case], list[Absent]]:
    """The cases whose data sets are there, and what is missing."""
    folders = places(data)
    words: dict[str, str] = {}
    for case in cases:
        described = case.experiment.dataset
        kind = kind_of(type(described).__name__)
        if kind not in words and hasattr(described, "find"):
            try:
                described.find(folders)
            except ConfigError as error:
                words[kind] = str(error)
    count = Counter(kind_of(type(case.experiment.dataset).__name__) for case in cases)
    left = [case for case in cases if kind_of(type(case.experiment.dataset).__name__) not in words]
    return left, [Absent(kind, count[kind], text) for kind, text in words.items()]


def take(bank: Bank, folder: Path, data: Path | None, workers: int, stage: Stage) -> Taken:
    """Run a bank. What is in the folder already is not run again; stopped at any moment, it goes on where it was."""
    cases, absent = without_absent(bank.cases, data)
    if not cases:
        raise ConfigError("\n".join([f"No case of the bank {bank.name} can be run.", *(a.words for a in absent)]))
    failed: dict[str, str] = {}
    missing = [case for case in cases if not is_there(folder / RUNS, case)]
    if missing:
        watch_all(missing, folder / RUNS, data, workers, _noting(failed, stage("training", len(missing))))
    there = [case for case in cases if is_there(folder / RUNS, case)]
    told = _noting(failed, stage("examining", to_examine(there, folder / OUTCOMES)))
    outcomes = examine_all(there, folder / RUNS, folder / OUTCOMES, workers, told)
    if not outcomes:
        raise ConfigError(f"Every case failed. The first, {next(iter(failed))}:\n{next(iter(failed.values()))}")
    summary = summarise(outcomes)
    files = write_page(summary, outcomes, folder, _remarks(bank, absent, failed))
    files = (*files, write_rates(summary, bank, folder))
    return Taken(bank, summary, files, absent, tuple(failed.items()))


def write_rates(summary: Summary, bank: Bank, folder: Path) -> Path:
    """Each rule's false alarms, as `diagnosis/rates.json` ships them for docs/issues.md: copied there by hand."""
    rates = dict.fromkeys(ISSUES_BY_CODE, 0.0) | {
        row.name: round(row.figures["alarms"].value or 0.0, 3) for row in summary.rules
    }
    told = {"bank": bank.digest, "healthy_rounds": summary.counts["healthy rounds"], "per_100_rounds": rates}
    path = folder / "rates.json"
    path.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    return path


def _noting(failed: dict[str, str], told: Done) -> Done:
    def done(name: str, error: str | None) -> None:
        if error is not None:
            failed[name] = error
        told(name, error)

    return done


def _remarks(bank: Bank, absent: Sequence[Absent], failed: Mapping[str, str]) -> list[str]:
    found = [f"digest of the bank: `{bank.digest}`; of the detectors and all else that makes an outcome: `{sources()}`"]
    found += [f"left out, since the data set {a.dataset} was not there: {a.cases} runs" for a in absent]
    if failed:
        found.append(f"failed, and left out: {len(failed)} runs ({', '.join(list(failed)[:5])}, ...)")
    return found


def usable_cores() -> int:
    """As many as this process may use, not as many as the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
