# SPDX-License-Identifier: Apache-2.0
"""Runs many cases in several processes, saving each finished one: an interrupted run continues where it stopped."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import multiprocessing
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from fedvitals.errors import ConfigError
from fedvitals.lab.data import datasets
from fedvitals_studies.faultbank.cases import Case
from fedvitals_studies.faultbank.recording import Recording
from fedvitals_studies.faultbank.run import About, watch
from fedvitals_studies.faultbank.workers import Ended, in_processes

MOST_KEPT = 3 << 30  # bytes of a GPU that one of many processes keeps between two cases

Done = Callable[[str, str | None], None]
"""Told of each case when it is over: its name, and what went wrong if it did."""


def place(folder: Path, case: Case) -> Path:
    """Return where a case is stored: by its content, so that a changed bank does not find the old one's runs."""
    mark = hashlib.blake2b(f"{case.name}{case.flips_largest}{case.text}".encode(), digest_size=8)
    return folder / f"{case.name.replace('/', '.')}-{mark.hexdigest()}"


def file_of(folder: Path, case: Case, kind: str) -> Path:
    path = place(folder, case)
    return path.with_name(f"{path.name}.{kind}")


def is_there(folder: Path, case: Case) -> bool:
    return file_of(folder, case, "json").exists()


def load(folder: Path, case: Case) -> tuple[Recording, About]:
    about = load_about(folder, case)
    return Recording.load(file_of(folder, case, "npz")), about


def load_about(folder: Path, case: Case) -> About:
    try:
        return msgspec.json.decode(file_of(folder, case, "json").read_bytes(), type=About)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"The case {case.name} has not been run, or its file is broken: {error}.") from error


def watch_all(
    cases: Sequence[Case],
    folder: Path,
    data: Path | None,
    workers: int,
    done: Done,
    device: str = "cpu",
    seconds: float | None = None,
) -> None:
    """Run what is missing. A case that fails is reported, and the others continue; ends after `seconds`."""
    folder.mkdir(parents=True, exist_ok=True)
    tasks = [Training(case, folder, data, device) for case in longest_first(cases) if not is_there(folder, case)]
    for task, error in in_processes(train, tasks, workers, seconds):
        done(task.case.name, error.why if isinstance(error, Ended) else error)


def longest_first(cases: Sequence[Case]) -> list[Case]:
    """Return the cases, longest first, so that no process is left alone with one; twins stay together."""
    return sorted(cases, key=lambda c: -c.experiment.rounds * c.experiment.clients * c.experiment.participation)


@dataclass(frozen=True, slots=True)
class Training:
    case: Case
    folder: Path
    data: Path | None
    device: str = "cpu"


def train(task: Training) -> str | None:
    """Run one case and save it. Returns what went wrong, if anything."""
    case, folder = task.case, task.folder
    if multiprocessing.parent_process() is not None:
        datasets.remember()  # one of our processes has many cases, and there are three data sets
    try:
        watched = watch(case, task.data, task.device)
        watched.recording.save(file_of(folder, case, "npz"))
        draft = file_of(folder, case, "draft")
        draft.write_bytes(msgspec.json.encode(watched.about))
        draft.replace(file_of(folder, case, "json"))  # last: it marks the case as complete
    except Exception:  # noqa: BLE001 - whatever happens in one case, the others continue
        return traceback.format_exc(limit=4)
    finally:
        _tidy(task.device)
    return None


def refused(error: str) -> bool:
    """Whether a case failed because the lab cannot run such an experiment anywhere."""
    return error.strip().splitlines()[-1].startswith(f"{ConfigError.__module__}.{ConfigError.__qualname__}")


def _tidy(device: str) -> None:
    """Return the GPU memory that a case left, if it is much: others use the GPU, too."""
    if device != "cpu" and torch.cuda.is_initialized() and torch.cuda.memory_reserved() > MOST_KEPT:
        gc.collect()
        with contextlib.suppress(RuntimeError):  # a lost GPU is reported by the case
            torch.cuda.empty_cache()
