# SPDX-License-Identifier: Apache-2.0
"""The bank on a machine that is lent for minutes: what a pack's run.py calls (`gpu_pack`).

A case and its twin are one task: trained, then examined, by the same process, while others train. So at any moment the
finished pairs are complete, and the recordings, which are too large to transfer, need not leave.

    python code/run.py --device cuda --minutes 6 --out OUT
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedvitals
from fedvitals.lab.data import datasets
from fedvitals.lab.data.sources import search_folders
from fedvitals.lab.engines.devices import why_no_cuda
from fedvitals_studies.faultbank import bundle
from fedvitals_studies.faultbank.cases import Bank, Case, read_bank
from fedvitals_studies.faultbank.examine import examine, is_examined, sources
from fedvitals_studies.faultbank.outcome_lines import read_cases
from fedvitals_studies.faultbank.pool import Training, file_of, is_there, load_about, longest_first, refused, train
from fedvitals_studies.faultbank.workers import Ended, in_processes
from fedvitals_studies.packs.commit import commit
from fedvitals_studies.packs.gpu_sharing import shared

BANK = "bank.toml"  # beside run.py
CALLS = "calls.json"  # in the work folder
TOLD = 20  # lines of progress in total
ON_CPU = ("MLP", "Logistic")  # models that train on the CPU with the device «mixed»


@dataclass(frozen=True, slots=True)
class Pair:
    """A case and its twin, or all cases that share one, and where everything is stored."""

    cases: tuple[Case, ...]
    work: Path
    device: str
    sources: str


def train_and_examine(pair: Pair) -> dict[str, str]:
    """Return what went wrong, by case."""
    failed = {}
    runs, outcomes = pair.work / bundle.RUNS, pair.work / bundle.OUTCOMES
    unseen = any(not is_examined(outcomes, case) for case in pair.cases)
    for case in pair.cases:
        # Cases imported from a bundle have no recording, and examining one of a pair needs both.
        if not is_there(runs, case) or (unseen and not file_of(runs, case, "npz").exists()):
            error = train(Training(case, runs, None, pair.device))
            if error is not None:
                failed[case.name] = error
    for case in pair.cases:
        if is_there(runs, case) and not is_examined(outcomes, case):
            error = examine((case, runs, outcomes, pair.sources, ()))
            if error is not None:
                failed[case.name] = error
    return failed


def pairs_of(bank: Bank, work: Path, device: str, sample: int | None = None, seen: Collection[str] = ()) -> list[Pair]:
    """Return the remaining work, the longest first; or a sample of it, from the longest to the shortest. Pairs with a
    case in `seen` come last.
    """
    runs, outcomes = work / bundle.RUNS, work / bundle.OUTCOMES
    found = []
    sharing: dict[str, list[Case]] = {}
    for one in longest_first(bank.faulty):
        sharing.setdefault(one.twin.name if one.faulty else one.name, []).append(one)
    for ones in sharing.values():
        cases = replace(bank, faulty=tuple(ones)).cases
        if not all(is_there(runs, case) and is_examined(outcomes, case) for case in cases):
            found.append(Pair(cases, work, _device_for(cases[0], device), sources()))
    found.sort(key=lambda pair: any(case.name in seen for case in pair.cases))
    if sample is None or sample >= len(found):
        return found
    return [found[int(place)] for place in np.linspace(0, len(found) - 1, sample)]


def _device_for(case: Case, device: str) -> str:
    """Return where a case trains: with «mixed», perceptrons and linear models on the CPU, which finishes them in the
    time that a GPU needs for their many small steps.
    """
    if device != "mixed":
        return device
    return "cpu" if type(case.experiment.model).__name__ in ON_CPU else "cuda"


def main(arguments: Sequence[str]) -> int:
    asked = _parser().parse_args(arguments)
    began = time.monotonic()
    if asked.device != "cpu" and not torch.cuda.is_available():
        _say(f"There is no GPU here: {why_no_cuda()}. Say --device cpu, or take another machine.")
        return 2
    bank = read_bank(asked.bank)
    work = Path(asked.work)
    for name in (bundle.RUNS, bundle.OUTCOMES):
        (work / name).mkdir(parents=True, exist_ok=True)
    calls = _earlier(bank, work, [Path(file) for file in asked.have])
    _load(bank)
    seen = read_cases(Path(asked.seen)) if asked.seen else ()
    pairs = pairs_of(bank, work, asked.device, asked.sample, seen)
    _say(f"{bank.name}: {len(pairs)} pairs to do, {asked.workers} processes, on {asked.device}")
    failed: dict[str, str] = {}
    with shared(asked.mps and asked.device != "cpu") as together:
        seconds = None if asked.minutes is None else 60 * asked.minutes - (time.monotonic() - began)
        if asked.mps:
            _say(f"GPU shared by MPS: {together}")
        _work(pairs, asked.workers, seconds, failed)
    calls.append(_facts(asked, time.monotonic() - began, together))
    (work / CALLS).write_text(json.dumps(calls), encoding="utf-8")
    files = bundle.write(bank, work, Path(asked.out), calls, failed)
    _report(bank, work, failed, files)
    _say(f"this call: {calls[-1]}")
    return int(not all(refused(error) for error in failed.values()))


def _parser() -> argparse.ArgumentParser:
    here = Path(fedvitals.__file__).parent.parent
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser = argparse.ArgumentParser(prog="run.py", description="Train and examine a fault bank's cases here.")
    parser.add_argument("--bank", default=here / BANK, help="name or file; default: the one that was packed")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu", "mixed"))
    parser.add_argument("--workers", type=int, default=min(16, cores), help="processes that share the GPU")
    parser.add_argument("--minutes", type=float, default=None, help="stop in time; what is done is kept")
    parser.add_argument("--sample", type=int, default=None, help="so many pairs only: to see what one takes")
    parser.add_argument("--mps", action="store_true", help="let processes use the GPU at the same time, if that works")
    parser.add_argument(
        "--have", nargs="*", default=(), metavar="FILE", help="bundles of earlier calls: not done again"
    )
    parser.add_argument("--seen", default=None, metavar="FILE", help="outcomes.jsonl[.gz]: runs to be done last")
    parser.add_argument("--work", default=here.parent / "work", help="where runs are kept between calls")
    parser.add_argument("--out", default=os.environ.get("OUT", "out"), help="where the bundles go")
    return parser


def _earlier(bank: Bank, work: Path, files: Sequence[Path]) -> list[Any]:
    """Return what is known of earlier calls: on this machine, and from imported bundles."""
    own = work / CALLS
    calls: list[Any] = json.loads(own.read_text(encoding="utf-8")) if own.exists() else []
    if files:
        merged = bundle.merge(bank, files, work)
        calls += [call for call in merged.calls if call not in calls]
        _say(f"from earlier calls: {merged.cases} runs")
    return calls


def _load(bank: Bank) -> None:
    """Load each data set once here, so that the processes find it decoded and do not all decode it."""
    for described in {repr(case.experiment.dataset): case.experiment.dataset for case in bank.faulty}.values():
        if hasattr(described, "find"):
            described.find(search_folders(None))  # reports what is missing before anything is started
            datasets.load(described)


def _work(pairs: Sequence[Pair], workers: int, seconds: float | None, failed: dict[str, str]) -> None:
    began = time.monotonic()
    for done, (pair, result) in enumerate(in_processes(train_and_examine, pairs, workers, seconds), 1):
        failed |= {pair.cases[0].name: result.why} if isinstance(result, Ended) else result
        if done == 1 or done == len(pairs) or done % max(1, len(pairs) // TOLD) == 0:
            passed = time.monotonic() - began
            _say(f"{done} of {len(pairs)} pairs, {passed:.0f} s, {len(failed)} failed")


def _facts(asked: argparse.Namespace, seconds: float, together: bool) -> dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name() if asked.device != "cpu" else "cpu",
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "commit": commit(),
        "processes": asked.workers,
        "mps": together,
        "seconds": round(seconds, 1),
    }


def _report(bank: Bank, work: Path, failed: dict[str, str], files: Sequence[Path]) -> None:
    """Write what a second call, or an investigation of failures, needs."""
    by_domain: dict[str, list[float]] = {}
    on_cpu = there = 0
    for case in bank.cases:
        if is_there(work / bundle.RUNS, case):
            about = load_about(work / bundle.RUNS, case)
            by_domain.setdefault(f"{about.domain} on {about.device}", []).append(about.seconds)
            on_cpu += about.device == "cpu"
            there += 1
    for name, seconds in sorted(by_domain.items()):
        _say(f"{name}: {len(seconds)} runs, {np.mean(seconds):.2f} s each, longest {max(seconds):.1f} s")
    for name, error in [*failed.items()][:12]:
        _say(f"FAILED {name}: {error.strip().splitlines()[-1][:300]}")
    for error in [error for error in dict.fromkeys(failed.values()) if not refused(error)][:2]:
        _say(error)
    _say(f"{there} of {len(bank.cases)} runs done, {on_cpu} of them on the CPU, {len(failed)} failed")
    for file in files:
        _say(f"{file.name}: {file.stat().st_size} bytes")


def _say(text: str) -> None:
    """Write immediately: progress on a machine paid by the second should be visible at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
