# SPDX-License-Identifier: Apache-2.0
"""Runs the lab and its peers side by side, each in its own process and environment, and compares them round by round.

The peers' scripts are in `studies/peers` of the source tree. Their requirements are installed on request, each in a
separate environment, with the torch that runs here.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Self

import torch

from fedvitals.errors import FedvitalsError
from fedvitals_studies.bench.lab.work import Data, Subject

Tell = Callable[[str], None]

SCRIPTS = Path(__file__).resolve().parents[4] / "peers"
ENVIRONMENTS = {"flower": ("flwr[simulation]==1.41.0", "ray"), "pfl": ("pfl[pytorch]==0.6.0", "pfl")}
"""What is installed, and the module that must be there for it to count as installed."""

START_SECONDS, ROUND_SECONDS = 180, 900  # after which a process is assumed to hang
LOSS_TOLERANCE, ACCURACY_TOLERANCE = 1e-3, 0.01  # relative, and absolute: after one round from the same start


class PeerError(FedvitalsError):
    """A process of the benchmark failed; the message names it, and includes its last output."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One side of a comparison: a command that answers as `studies/peers/work.py` specifies; or why there is none."""

    name: str
    command: tuple[str, ...] = ()
    missing: str = ""
    block: str = "round"  # the request of each pass
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Outcome:
    """The results of an arm."""

    arm: Arm
    start_up: float = 0.0  # seconds until the first round was done, which is not timed
    speeds: list[float] = field(default_factory=list)  # client-steps per second in each pass
    loss: float = float("nan")  # of the last mini-batch, mean over the clients, in the first round
    accuracy: float = float("nan")  # on the test set, after it
    engine: str = ""
    failed: str = ""


def default_folder() -> Path:
    """Return the folder for environments if the user names none."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedvitals-bench"


def environment(name: str, folder: Path, *, install: bool, tell: Tell) -> Path | str:
    """Return the environment's Python, or why there is none; `install` creates it."""
    if not (SCRIPTS / "work.py").exists():
        return "needs the source tree: studies/peers was not found"
    package, module = ENVIRONMENTS[name]
    python = folder / name / "bin" / "python"
    if _works(python, module):
        return python
    if not install:
        return f"not installed: no {package} in {folder / name}; --peers installs it"
    version = torch.__version__.partition("+")[0]
    tell(f"installing {package} and torch {version} into {folder / name}: some minutes, and about 1 GB")
    steps = (
        [sys.executable, "-m", "venv", str(folder / name)],
        [str(python), "-m", "pip", "install", "--quiet", f"torch=={version}"],  # first, or a newer one is installed
        [str(python), "-m", "pip", "install", "--quiet", package],
    )
    for command in steps:
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own command
        if done.returncode:
            return f"could not be installed: {_last(done.stderr)}"
    return python if _works(python, module) else f"not installed: {package} cannot be imported in {folder / name}"


def _works(python: Path, module: str) -> bool:
    code = f"import importlib.util as u, sys; sys.exit(not (u.find_spec({module!r}) and u.find_spec('torch')))"
    if not python.exists():
        return False
    return subprocess.run([str(python), "-c", code], capture_output=True, check=False).returncode == 0  # noqa: S603


def ours(subject: Subject, data: Data, *, block: str = "round", **options: object) -> Arm:
    """Return the lab's arm, monitored unless `watch` says otherwise."""
    module = "fedvitals_studies.bench.lab.ours"
    command = [sys.executable, "-m", module, subject.model]
    chosen = {"clients": subject.clients, "iterations": subject.iterations, "data": data, **options}
    for name, value in chosen.items():
        command += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
    return Arm("fedvitals", tuple(command), block=block)


def peer(name: str, script: str, python: Path | str, work: Path, threads: int = 1) -> Arm:
    """Return an arm with a script of `studies/peers`; `python` is its interpreter, or why there is none."""
    if isinstance(python, str):
        return Arm(name, missing=python)
    command = (str(python), str(SCRIPTS / script), str(work), "--threads", str(threads))
    return Arm(name, command, environment={"PYTHONWARNINGS": "ignore"})


class Process:
    """A running arm: requests and answers are lines; answers begin with «@»."""

    def __init__(self, arm: Arm) -> None:
        self.arm = arm
        self._words: IO[str] = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(  # noqa: S603 - our own command
            arm.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
            text=True,
            env={**os.environ, **arm.environment},
            start_new_session=True,  # so that all processes that it starts can be ended with it
        )
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        try:
            self.answer(START_SECONDS)
        except PeerError:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, command: str, timeout: float = ROUND_SECONDS) -> dict[str, Any]:
        assert self._process.stdin is not None  # noqa: S101 - opened above
        with contextlib.suppress(BrokenPipeError):  # it died: there will be no answer
            self._process.stdin.write(command + "\n")
            self._process.stdin.flush()
        return self.answer(timeout)

    def answer(self, timeout: float) -> dict[str, Any]:
        try:
            found = self._answers.get(timeout=timeout)
        except queue.Empty:
            raise PeerError(f"{self.arm.name} gave no answer in {timeout:.0f} s.") from None
        if found is None:
            raise PeerError(f"{self.arm.name} ended: {self._last_words()}")
        if "failed" in found:
            raise PeerError(f"{self.arm.name} failed: {found['failed']}")
        return found

    def close(self) -> None:
        assert self._process.stdin is not None  # noqa: S101
        with contextlib.suppress(OSError):
            self._process.stdin.write("quit\n")
            self._process.stdin.flush()
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # its own process group
            self._process.wait()
        self._listener.join(5)  # bounded: a process that it started may still hold the pipe
        self._words.close()

    def _listen(self) -> None:
        assert self._process.stdout is not None  # noqa: S101
        for line in self._process.stdout:
            if line.startswith("@"):
                self._answers.put(json.loads(line[1:]))
        self._process.stdout.close()
        self._answers.put(None)

    def _last_words(self) -> str:
        self._words.seek(0)
        return _last(self._words.read())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "without a word"


def interleaved(arms: Sequence[Arm], passes: int, tell: Tell) -> dict[str, Outcome]:
    """Run every arm's rounds in turn, rotating the order; all of them stay started, and wait while another works."""
    outcomes = {arm.name: Outcome(arm, failed=arm.missing) for arm in arms}
    with contextlib.ExitStack() as stack:
        running: dict[str, Process] = {}
        for outcome in [o for o in outcomes.values() if not o.failed]:
            tell(f"{outcome.arm.name}: starting, and one round to warm up")
            with _failure_noted(outcome):
                running[outcome.arm.name] = _begin(outcome, stack)
        for turn in range(passes):
            names = [name for name in running if not outcomes[name].failed]
            tell(f"pass {turn + 1} of {passes}: {', '.join(names)}")
            for name in names[turn % len(names) :] + names[: turn % len(names)] if names else ():
                with _failure_noted(outcomes[name]):
                    found = running[name].ask(outcomes[name].arm.block)
                    outcomes[name].speeds.append(found["steps"] / found["seconds"])
    return outcomes


def _begin(outcome: Outcome, stack: contextlib.ExitStack) -> Process:
    began = time.perf_counter()
    process = Process(outcome.arm)
    stack.callback(process.close)
    outcome.loss = process.ask("round")["loss"]
    outcome.start_up = time.perf_counter() - began
    tested = process.ask("test")
    outcome.accuracy, outcome.engine = tested["accuracy"], tested.get("engine", "")
    process.ask(outcome.arm.block)  # the second one is representative
    return process


@contextlib.contextmanager
def _failure_noted(outcome: Outcome) -> Any:
    """Record a peer's failure instead of ending the benchmark."""
    try:
        yield
    except PeerError as error:
        outcome.failed = f"failed: {error}"


def differs(ours: Outcome, other: Outcome) -> str:
    """Return in what the two did different work; empty if they did the same."""
    loss = abs(ours.loss - other.loss) / abs(other.loss)
    if not loss <= LOSS_TOLERANCE:
        return f"losses differ by {loss:.2g} of them: {ours.loss:.6g} and {other.loss:.6g}"
    if not abs(ours.accuracy - other.accuracy) <= ACCURACY_TOLERANCE:
        return f"accuracies differ: {ours.accuracy:.4f} and {other.accuracy:.4f}"
    return ""
