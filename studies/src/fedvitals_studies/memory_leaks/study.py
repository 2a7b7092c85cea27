# SPDX-License-Identifier: Apache-2.0
"""Runs planted leaks until a process exceeds the memory limit, and is killed for it.

The study plays the kernel's role: a container's limit would need privileges that not everybody has. The training is
told the limit (`memory.limit`), and a process that exceeds it is killed with SIGKILL within some hundredths of a
second.

A leak is predicted if a finding with a forecast existed two rounds or more before the last complete round. The quality
of the forecasts is the number of intervals that contained the round in which memory ran out.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from fedvitals.records import Finding
from fedvitals.store import open_reader
from fedvitals.store.read import queries
from fedvitals_studies.memory_leaks.leaking import LIMIT

LEAKS = {  # kind → megabytes per round, and the limit in megabytes
    "every client": (25, 900),
    "one client": (25, 900),
    "tensors": (40, 1100),
    "outputs": (30, 1000),
    "aggregate": (30, 900),
    "evaluate": (20, 800),
    "growing evaluation": (25, 1100),
    "history": (60, 1300),
    "process": (30, 900),
    "slow": (10, 700),
}
MOST_SECONDS = 420.0
HEALTHY_LIMIT, HEALTHY_RUNS = 750, 3  # megabytes; a healthy federation needs 600


@dataclass(frozen=True, slots=True)
class Foretold:
    """The result of one leak; rounds are those of the first forecast and the last that was completed."""

    kind: str
    foretold: bool
    first: int | None
    last: int
    ahead: int | None
    message: str = ""
    forecasts: int = 0  # in all rounds
    held: int = 0  # those whose interval contains the round in which memory ran out


def run_leak(kind: str, folder: Path, seed: int) -> Foretold:
    """Run one leak to its end, and judge it."""
    megabytes, limit = LEAKS[kind]
    store = folder / f"{kind}.db"
    where = "history" if kind == "slow" else kind
    command = [sys.executable, "-m", "fedvitals_studies.memory_leaks.leaking", str(store), where, str(megabytes)]
    with (folder / "log.txt").open("ab") as log, (folder / f"{kind}.rounds").open("w+", encoding="ascii") as rounds:
        training = subprocess.Popen(  # noqa: S603 - our own module
            [*command, str(seed)], stdout=rounds, stderr=log, env={**os.environ, LIMIT: str(limit << 20)}
        )
        deadline = time.monotonic() + MOST_SECONDS
        while training.poll() is None and time.monotonic() < deadline:
            _kill_the_largest(training.pid, limit << 20)
            time.sleep(0.02)
        training.kill()
        training.wait()
        rounds.seek(0)
        lines = rounds.read().split()
    return judge(kind, store, int(lines[-1]) if lines else -1)


def _kill_the_largest(training: int, limit: int) -> None:
    """Kill the process that exceeds the limit, as the kernel does, and with it the training, which cannot continue."""
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(training)
        family = [parent, *parent.children(recursive=True)]
        if any(process.memory_info().rss > limit for process in family):
            for process in family:
                process.kill()


def run_healthy(folder: Path, seed: int) -> dict[str, int]:
    """Run a federation that does not leak, in little more memory than it needs. Returns its rounds and findings."""
    store = folder / f"healthy-{seed}.db"
    command = [sys.executable, "-m", "fedvitals_studies.memory_leaks.leaking", str(store), "none", "0", str(seed)]
    with (folder / "log.txt").open("ab") as log:
        environment = {**os.environ, LIMIT: str(HEALTHY_LIMIT << 20)}
        subprocess.run(command, stdout=log, stderr=log, env=environment, check=True)  # noqa: S603 - ourselves
    with open_reader(store) as reader:
        run = queries.list_runs(reader)[0].id
        findings = [finding for finding in queries.records(reader, run, Finding) if finding.issue == "MEMORY_LEAK"]
        return {"rounds": len(reader.history(run).rounds()), "false": len(findings)}


def judge(kind: str, store: Path, last: int) -> Foretold:
    """Compare the forecasts in a store with the last complete round."""
    with open_reader(store) as reader:
        run = queries.list_runs(reader)[0].id
        findings = [finding for finding in queries.records(reader, run, Finding) if finding.issue == "MEMORY_LEAK"]
    forecasts = [finding for finding in findings if "forecast" in finding.evidence]
    if not forecasts:
        return Foretold(kind, foretold=False, first=None, last=last, ahead=None)
    first = forecasts[0].where.round or 0
    held = sum(_holds(finding, last) for finding in forecasts)
    ahead = last - first
    return Foretold(kind, ahead >= 2, first, last, ahead, forecasts[0].message, len(forecasts), held)


def _holds(finding: Finding, last: int) -> bool:
    told: Any = finding.evidence["forecast"]
    left = last - (finding.where.round or 0)
    return told["least"] - 1 <= left and (told["most"] is None or left <= told["most"] + 1)
