# SPDX-License-Identifier: Apache-2.0
"""Examines many recorded cases in several processes; each outcome is kept until what it depends on changes."""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import msgspec

from fedvitals import diagnosis
from fedvitals_studies.faultbank import accepted, lying, outcome, pool, privacy_levels, recording, score
from fedvitals_studies.faultbank.baselines import history, sagemaker, updates
from fedvitals_studies.faultbank.brought_detectors import sources_of
from fedvitals_studies.faultbank.cases import Case
from fedvitals_studies.faultbank.pool import Done
from fedvitals_studies.faultbank.score import Outcome
from fedvitals_studies.faultbank.workers import Ended, in_processes

# What an outcome depends on, besides the diagnosis as a whole.
MAKERS = (
    *(history, sagemaker, updates),
    *(accepted, lying, outcome, privacy_levels, score, recording),
)
Task = tuple[Case, Path, Path, str, tuple[str, ...]]


class Kept(msgspec.Struct):
    """On disk: the outcomes of one case (as it is, and with lying culprits), and the digest of what they depend on."""

    sources: str
    outcomes: list[Outcome]


@cache
def sources(brought: tuple[str, ...] = ()) -> str:
    """Return the digest of everything that influences an outcome: source files, tables that are shipped with them, and
    a user's own detectors.
    """
    folder = Path(diagnosis.__file__ or "").parent
    files = [file for file in folder.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    files += [Path(module.__file__ or "") for module in MAKERS]
    found = hashlib.blake2b(digest_size=16)
    for file in sorted(files):
        found.update(f"{file.name}\n".encode() + file.read_bytes())
    found.update(sources_of(brought))
    return found.hexdigest()


def examine_all(
    cases: Sequence[Case], runs: Path, folder: Path, workers: int, done: Done, brought: tuple[str, ...] = ()
) -> list[Outcome]:
    """Return the outcomes of all cases with runs, in their order; a failing one is reported, and left out.

    So is a run imported without its recording, unless its outcome is by these sources.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made_by = sources(brought)
    there = [case for case in cases if pool.is_there(runs, case)]
    left = [case for case in there if _kept(folder, case, made_by) is None and pool.file_of(runs, case, "npz").exists()]
    # The longest first, so that no process is left alone with one at the end.
    left.sort(key=lambda case: -case.experiment.rounds * case.experiment.clients)
    for task, error in in_processes(examine, [(case, runs, folder, made_by, brought) for case in left], workers):
        done(task[0].name, error.why if isinstance(error, Ended) else error)
    return [outcome for case in there for outcome in _kept(folder, case, made_by) or ()]


def to_examine(cases: Iterable[Case], folder: Path, brought: tuple[str, ...] = ()) -> int:
    """Return for how many of the cases the outcome is missing, or not by these sources."""
    return sum(_kept(folder, case, sources(brought)) is None for case in cases)


def read_all(cases: Iterable[Case], folder: Path) -> tuple[list[Outcome], set[str]]:
    """Return the existing outcomes, by whatever sources, and the digests of these."""
    found: list[Outcome] = []
    made_by = set()
    for case in cases:
        kept = _read(folder, case)
        if kept is not None:
            found += kept.outcomes
            made_by.add(kept.sources)
    return found, made_by


def is_examined(folder: Path, case: Case) -> bool:
    return _kept(folder, case, sources()) is not None


def file_of(folder: Path, case: Case) -> Path:
    path = pool.place(folder, case)
    return path.with_name(f"{path.name}.outcome")


def _kept(folder: Path, case: Case, made_by: str) -> list[Outcome] | None:
    kept = _read(folder, case)
    return kept.outcomes if kept is not None and kept.sources == made_by else None


def _read(folder: Path, case: Case) -> Kept | None:
    try:
        # Not JSON, which has no infinity and no NaN.
        return msgspec.msgpack.decode(file_of(folder, case).read_bytes(), type=Kept)
    except (OSError, msgspec.DecodeError):
        return None


def examine(task: Task) -> str | None:
    """Examine one case and keep the outcome. Returns what went wrong, if anything."""
    case, runs, folder, made_by, brought = task
    try:
        outcomes = _outcomes(case, runs, brought)
        draft = file_of(folder, case).with_suffix(".part")
        draft.write_bytes(msgspec.msgpack.encode(Kept(made_by, outcomes)))
        draft.replace(file_of(folder, case))
    except Exception:  # noqa: BLE001 - whatever happens in one case, the others continue
        return traceback.format_exc(limit=-4)
    return None


def _outcomes(case: Case, runs: Path, brought: tuple[str, ...]) -> list[Outcome]:
    recorded, about = pool.load(runs, case)
    twin = None
    if case.faulty and pool.is_there(runs, case.twin):
        twin = pool.load(runs, case.twin)
    found = [outcome.outcome_of(case, recorded, about, twin, brought=brought)]
    if case.setting is None and outcome.liars(found[0].faults):
        found.append(outcome.outcome_of(case, recorded, about, twin, lies=True, brought=brought))
    found += [outcome.outcome_of(case, recorded, about, twin, level=level) for level in case.levels]
    return found
