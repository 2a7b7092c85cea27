# SPDX-License-Identifier: Apache-2.0
"""The fault bank from its file to its page: train what is missing, examine everything, write the results."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedvitals.diagnosis.issues.table import ISSUES_BY_CODE
from fedvitals.errors import ConfigError
from fedvitals.lab.data.sources import search_folders
from fedvitals.lab.description import kind_of
from fedvitals.lab.engines.devices import resolve_device
from fedvitals.report.markup import literal
from fedvitals_studies.faultbank import adapter_bank
from fedvitals_studies.faultbank.adapter_bank import AdapterSummary
from fedvitals_studies.faultbank.bars import Bar
from fedvitals_studies.faultbank.bundle import OUTCOMES, RUNS, merge
from fedvitals_studies.faultbank.cases import Bank, Case, healthy_rounds
from fedvitals_studies.faultbank.comparison import read_other
from fedvitals_studies.faultbank.examine import examine_all, read_all, sources, to_examine
from fedvitals_studies.faultbank.healthy import Healthy, summarise_matrix
from fedvitals_studies.faultbank.healthy_page import write_matrix_page
from fedvitals_studies.faultbank.outcome_lines import write_outcomes
from fedvitals_studies.faultbank.page import write_page
from fedvitals_studies.faultbank.pool import Done, is_there, load_about, watch_all
from fedvitals_studies.faultbank.report import Summary, summarise
from fedvitals_studies.faultbank.score import Outcome

Stage = Callable[[str, int], Done]
"""A stage of the work begins: its name, and how many cases it has; what it gives hears of each case that is over."""


@dataclass(frozen=True, slots=True)
class Absent:
    """A missing data set, and the cases that are left out because of it."""

    dataset: str
    cases: int
    words: str  # where it was searched, and how to get it


@dataclass(frozen=True, slots=True)
class Taken:
    """A bank that has been run, with its page."""

    bank: Bank
    summary: Summary | Healthy | AdapterSummary
    files: Sequence[Path]
    absent: Sequence[Absent]
    failed: Sequence[tuple[str, str]]  # cases, and what went wrong

    @property
    def bars(self) -> Sequence[Bar]:
        """Return the current bars."""
        return self.summary.asked if isinstance(self.summary, Summary) else self.summary.bars


def listing(bank: Bank) -> dict[str, Any]:
    """Return the content of a bank, and the digest that identifies it."""
    if bank.federations:
        return {"bank": bank.name, "digest": bank.digest, **adapter_bank.listing(bank.federations)}
    faulty = [case for case in bank.cases if case.faulty]
    kinds = Counter(kind_of(type(fault).__name__) for case in faulty for fault in case.experiment.faults)
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
    """Return the cases whose data sets exist, and what is missing."""
    folders = search_folders(data)
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


@dataclass(frozen=True, slots=True)
class How:
    """Options for running a bank."""

    workers: int = 1
    device: str = "cpu"
    seconds: float | None = None  # of training; what is not trained by then is skipped
    beside: Path | None = None  # another page's summary.json
    seen: Collection[str] = ()  # cases that were examined before
    detectors: tuple[str, ...] = ()  # brought by a user, judged beside ours


def take(bank: Bank, folder: Path, data: Path | None, how: How, stage: Stage) -> Taken:
    """Run a bank. Existing results are reused; after an interruption at any moment, it continues where it was."""
    if bank.federations:
        return _take_federations(bank, folder, how, stage)
    other = None if how.beside is None else read_other(how.beside)
    resolve_device(how.device)
    made_by = sources(how.detectors)
    cases, absent = without_absent(bank.cases, data)
    if not cases:
        raise ConfigError("\n".join([f"No case of the bank {bank.name} can be run.", *(a.words for a in absent)]))
    failed: dict[str, str] = {}
    missing = [case for case in cases if not is_there(folder / RUNS, case)]
    if missing:
        told = _noting(failed, stage("training", len(missing)))
        watch_all(missing, folder / RUNS, data, how.workers, told, how.device, how.seconds)
    there = [case for case in cases if is_there(folder / RUNS, case)]
    told = _noting(failed, stage("examining", to_examine(there, folder / OUTCOMES, how.detectors)))
    outcomes = examine_all(there, folder / RUNS, folder / OUTCOMES, how.workers, told, how.detectors)
    if not outcomes and not failed:
        raise ConfigError("No case was trained in that time: give it more minutes.")
    if not outcomes:
        raise ConfigError(f"Every case failed. The first, {next(iter(failed))}:\n{next(iter(failed.values()))}")
    remarks = [f"left out, since the data set {a.dataset} was not there: {a.cases} runs" for a in absent]
    return _summary_of_bank(bank, folder, outcomes, {made_by}, failed, remarks, other, absent, how.seen)


def _take_federations(bank: Bank, folder: Path, how: How, stage: Stage) -> Taken:
    if how.detectors or how.beside is not None or how.device != "cpu":
        raise ConfigError(
            f"The bank {bank.name} trains on the CPU and is judged while it trains: leave --device, --detector and "
            "--beside out."
        )
    count = sum(1 for own in bank.federations for _ in own.runs())
    told = stage("training", count)
    summary, files = adapter_bank.run_federations(bank.federations, folder, lambda name: told(name, None), how.seconds)
    return Taken(bank, summary, files, (), ())


def take_home(
    bank: Bank, files: Sequence[Path], folder: Path, beside: Path | None = None, seen: Collection[str] = ()
) -> Taken:
    """Write the page of what was trained and examined on another machine (`remote_run`); nothing is trained here."""
    other = None if beside is None else read_other(beside)
    merged = merge(bank, files, folder)
    outcomes, made_by = read_all(bank.cases, folder / OUTCOMES)
    if not outcomes:
        raise ConfigError(f"There is no finished case of the bank {bank.name} in what was brought.")
    remarks = [
        f"trained and examined elsewhere: {fact['device']}, torch {fact['torch']}, {fact['processes']} processes, "
        f"{fact['seconds']:.0f} s, commit {fact['commit']}"
        for fact in merged.calls
    ]
    return _summary_of_bank(bank, folder, outcomes, made_by, merged.failed, remarks, other, seen=seen)


def _summary_of_bank(
    bank: Bank,
    folder: Path,
    outcomes: Sequence[Outcome],
    made_by: Collection[str],
    failed: Mapping[str, str],
    remarks: Sequence[str],
    other: Mapping[str, Any] | None,
    absent: Sequence[Absent] = (),
    seen: Collection[str] = (),
) -> Taken:
    there = [case for case in bank.cases if is_there(folder / RUNS, case)]
    abouts = {case.name: load_about(folder / RUNS, case) for case in there}
    devices = Counter((about.device, about.engine) for about in abouts.values())
    trained = Counter[str]()
    for (device, _), count in devices.items():
        trained[device] += count
    not_run = len(bank.cases) - len(there) - len(failed) - sum(a.cases for a in absent)
    found = [
        f"digest of the bank: `{bank.digest}`; of the detectors and all else that makes an outcome: "
        + ", ".join(f"`{each}`" for each in sorted(made_by)),
        *(f"trained on {device} by the engine {engine}: {count} runs" for (device, engine), count in devices.items()),
        *remarks,
    ]
    found += _left_out(failed)
    if not_run > 0:
        found.append(f"not run, for want of time: {not_run} runs")
    if bank.settings:
        matrix = summarise_matrix(bank, outcomes, abouts)
        return Taken(bank, matrix, write_matrix_page(matrix, folder, found), absent, tuple(failed.items()))
    summary = summarise(outcomes, seen=seen)
    files = write_page(summary, outcomes, folder, found, dict(trained), other)
    files = (*files, write_outcomes(outcomes, folder), write_rates(summary, bank, folder))
    return Taken(bank, summary, files, absent, tuple(failed.items()))


def _left_out(failed: Mapping[str, str]) -> Iterator[str]:
    """Yield which cases failed, by reason."""
    reasons: dict[str, list[str]] = {}
    for name, error in failed.items():
        words = error.strip().splitlines()[-1].removeprefix("fedvitals.errors.ConfigError: ")
        reasons.setdefault(words, []).append(name)
    for words, names in reasons.items():
        more = ", …" if len(names) > 5 else ""
        yield literal(f"failed, and left out: {len(names)} runs ({', '.join(names[:5])}{more}): {words}")


def write_rates(summary: Summary, bank: Bank, folder: Path) -> Path:
    """Write each rule's false alarms, as shipped in `diagnosis/rates.json` for docs/issues.md: copied there by hand."""
    rates = dict.fromkeys(ISSUES_BY_CODE, 0.0) | {
        row.name: round(row.figures["alarms"].value or 0.0, 3) for row in summary.rules
    }
    told = {"bank": bank.digest, "healthy_rounds": summary.counts["healthy rounds"], "per_100_rounds": rates}
    path = folder / "rates.json"
    path.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    return path


def _noting(failed: dict[str, str], report: Done) -> Done:
    def done(name: str, error: str | None) -> None:
        if error is not None:
            failed[name] = error
        report(name, error)

    return done


def usable_cores() -> int:
    """Return the number of cores that this process may use, not the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
