# SPDX-License-Identifier: Apache-2.0
"""The factorial's cells in several processes on one GPU, each with its own cells, so that none is run twice."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from fedvitals_studies.packs.gpu_sharing import shared
from fedvitals_studies.reproduce.conditions import READINGS, TOPOLOGIES


def shares() -> dict[str, tuple[str, ...]]:
    """The cells of each process, by a name for its folder: one topology, with pooling or without."""
    return {
        f"{'pool' if pool else 'nopool'}-{topology}": tuple(
            reading.condition_of(f"initial-{topology}-*")
            for reading in READINGS
            if reading.pool == pool and not reading.epochs
        )
        for topology in TOPOLOGIES
        for pool in (True, False)
    }


def run_shares(script: str, arguments: Sequence[str], out: Path) -> int:
    """Run `script` once for each share with these arguments; return the highest exit code.

    Each process has a folder of its own under `out`.
    """
    with shared() as by_service:
        print(f"{len(shares())} processes, {'by MPS' if by_service else 'in turns'}", flush=True)  # noqa: T201
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        processes = [
            subprocess.Popen(  # noqa: S603 - our own words
                [sys.executable, script, *arguments, "--out", str(out / name), *_named(patterns)], env=environment
            )
            for name, patterns in shares().items()
        ]
        return max(process.wait() for process in processes)


def _named(patterns: Sequence[str]) -> list[str]:
    return [word for pattern in patterns for word in ("--only", pattern)]
