# SPDX-License-Identifier: Apache-2.0
"""Runs the rest of the factorial, piece by piece on another machine: pack, run, merge, until nothing is left."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from fedvitals.errors import ConfigError
from fedvitals_studies.reproduce import bundle
from fedvitals_studies.reproduce.conditions import SETTLING, Condition
from fedvitals_studies.reproduce.factorial import phases
from fedvitals_studies.reproduce.study import plan

ARGUMENTS = "--study factorial --together"


def runs_left(folder: Path, small: Callable[[Condition], Condition], repeats: int | None = None) -> int:
    """Return how many runs of the phases known so far are missing from a folder."""
    return sum(len(plan(folder, some, each).todo) for some, each in phases(folder, small, repeats))


def run_pieces(
    command: str,
    folder: Path,
    code: Path,
    left: Callable[[], int],
    expected: Sequence[Condition],
    arguments: str,
    tell: Callable[[str], None],
) -> None:
    """Run a shell command for one piece after the other and merge the results of each, until nothing is left.

    The command finds the pack in $PACK, the arguments of its run.py in $PIECE, and puts results into $OUT. A piece
    without results ends it with ConfigError: what is merged stays, and the same call continues.
    """
    names = {condition.name for condition in SETTLING}
    while (count := left()) > 0:
        bundle.write_done(code / bundle.DONE, folder, [c for c in expected if c.name in names])
        tell(f"{count} runs left.")
        with tempfile.TemporaryDirectory() as out:
            there = {**os.environ, "PACK": str(code.parent), "PIECE": arguments, "OUT": out}
            status = subprocess.run(command, shell=True, env=there, check=False).returncode  # noqa: S602 - the user's own
            files = sorted(Path(out).rglob("results-*.json.gz"))
            brought = bundle.merge(folder, files, expected)
        if not brought:
            raise ConfigError(f"The piece ended with exit code {status} and brought no results; {count} runs are left.")
