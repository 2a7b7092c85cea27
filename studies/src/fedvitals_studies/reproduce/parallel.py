# SPDX-License-Identifier: Apache-2.0
"""Runs a phase of the factorial in several processes on one GPU, each with its own cells, so that none is run twice.

A run without pooling takes 45 to 75 s when eight share an H200, and 65 to 140 s where every iteration is measured; one
with pooling 6 to 8 s, and 25 to 50 s. The remaining work is redistributed in each piece by its expected seconds, so
that all end at about the same time.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from fedvitals_studies.packs.gpu_sharing import shared
from fedvitals_studies.reproduce.conditions import Condition
from fedvitals_studies.reproduce.study import Job

PROCESSES = 8
ROUNDS = 25
SECONDS = {(True, False): 8.0, (True, True): 35.0, (False, False): 60.0, (False, True): 110.0}
"""Of a run of 25 rounds when eight share an H200, by whether it pools and whether every iteration is measured."""


def seconds_of(condition: Condition) -> float:
    """Return the expected seconds of a run when eight share the GPU."""
    usual = SECONDS[condition.pool != "none", condition.every_iteration]
    return usual * condition.batches * condition.rounds / ROUNDS


def shares(todo: Sequence[Job]) -> dict[str, tuple[str, ...]]:
    """Return the cells of each process, by a name for its folder: the longest first, each to the least loaded."""
    left: dict[str, float] = {}
    for job in todo:
        left[job.condition.name] = left.get(job.condition.name, 0.0) + seconds_of(job.condition)
    cells: list[list[str]] = [[] for _ in range(min(PROCESSES, len(left)))]
    busy = [0.0] * len(cells)
    for name in sorted(left, key=lambda name: -left[name]):
        least = busy.index(min(busy))
        cells[least].append(name)
        busy[least] += left[name]
    return {f"share-{place}": tuple(names) for place, names in enumerate(cells)}


def run_shares(script: str, arguments: Sequence[str], out: Path, todo: Sequence[Job]) -> int:
    """Run `script` once for each share of the remaining work with these arguments. Returns the highest exit code.

    Each process has its own folder under `out`.
    """
    dealt = shares(todo)
    with shared() as by_service:
        print(f"{len(dealt)} processes, {'by MPS' if by_service else 'in turns'}", flush=True)  # noqa: T201
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        processes = [
            subprocess.Popen(  # noqa: S603 - our own words
                [sys.executable, script, *arguments, "--out", str(out / name), *_named(cells)], env=environment
            )
            for name, cells in dealt.items()
        ]
        return max(process.wait() for process in processes)


def _named(cells: Sequence[str]) -> list[str]:
    return [word for cell in cells for word in ("--only", cell)]
