# SPDX-License-Identifier: Apache-2.0
"""Many cases in several processes, each finished one on disk: what was interrupted goes on where it stopped."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from fedvitals.errors import ConfigError
from fedvitals.trials.faultbank_cases import Case
from fedvitals.trials.faultbank_run import About, watch
from fedvitals.trials.recording import Recording

Done = Callable[[str, str | None], None]
"""Told of each case when it is over: its name, and what went wrong if it did."""


def place(folder: Path, case: Case) -> Path:
    """Where a case is kept: by what it is, so that a changed bank does not find the old one's runs."""
    mark = hashlib.blake2b(f"{case.name}{case.flips_largest}{case.experiment.to_toml()}".encode(), digest_size=8)
    return folder / f"{case.name.replace('/', '.')}-{mark.hexdigest()}"


def _file(folder: Path, case: Case, kind: str) -> Path:
    path = place(folder, case)
    return path.with_name(f"{path.name}.{kind}")


def is_there(folder: Path, case: Case) -> bool:
    return _file(folder, case, "json").exists()


def load(folder: Path, case: Case) -> tuple[Recording, About]:
    try:
        about = msgspec.json.decode(_file(folder, case, "json").read_bytes(), type=About)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"The case {case.name} has not been run, or its file is broken: {error}.") from error
    return Recording.load(_file(folder, case, "npz")), about


def watch_all(cases: Sequence[Case], folder: Path, data: Path | None, workers: int, done: Done) -> None:
    """Run whatever is not there yet. A case that fails is told, and the others go on."""
    folder.mkdir(parents=True, exist_ok=True)
    left = [case for case in cases if not is_there(folder, case)]
    # The longest first, so that no process is left alone with one at the end.
    left.sort(key=lambda case: -case.experiment.rounds * case.experiment.clients * case.experiment.participation)
    tasks = ((case, folder, data) for case in left)
    if workers <= 1:
        _tell(map(_one, tasks), done)
        return
    with multiprocessing.get_context("spawn").Pool(workers, initializer=_quiet) as pool:
        _tell(pool.imap_unordered(_one, tasks), done)


def _tell(results: Iterable[tuple[str, str | None]], done: Done) -> None:
    for name, error in results:
        done(name, error)


def _quiet() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"


def _one(task: tuple[Case, Path, Path | None]) -> tuple[str, str | None]:
    case, folder, data = task
    try:
        watched = watch(case, data)
        watched.recording.save(_file(folder, case, "npz"))
        draft = _file(folder, case, "draft")
        draft.write_bytes(msgspec.json.encode(watched.about))
        draft.replace(_file(folder, case, "json"))  # last: it says that all is there
    except Exception:  # noqa: BLE001 - whatever one case does, the others go on
        return case.name, traceback.format_exc(limit=4)
    return case.name, None
