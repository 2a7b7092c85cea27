# SPDX-License-Identifier: Apache-2.0
"""Kills trainers, stores' servers and Flower runs at random moments; counts acknowledged rounds, and those lost.

A round is acknowledged when `flush` has returned True; for Flower, when a reader of the store has seen it complete.
After every kill the rounds must exist exactly once; the trainer is restarted with the same run and must continue.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from fedvitals.store.upkeep.doctor import examine
from fedvitals_studies.kills.trainer import missing_from_tape, missing_records, read, train
from fedvitals_studies.postgres_server import PostgresServer

PATIENCE = 120.0  # seconds that a trainer may need for a round on a busy machine
LONGEST_DELAY = 0.03  # seconds between the last awaited acknowledgement and the kill: a few rounds
ROUNDS_BEFORE = 12  # acknowledged at most before a kill
READERS = 10

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["fedvitals_studies.kills.preloaded"])


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill: how many rounds were acknowledged before it, and what was missing afterwards."""

    kind: str
    seed: int
    acknowledged: int
    lost: tuple[str, ...] = ()


class Trainer:
    """A trainer in a separate process."""

    def __init__(self, store: str, run: str, *, tape: bool = False, rounds: range | None = None) -> None:
        self.store, self.run, self._tape = store, run, tape
        self.acknowledged: list[int] = []
        self._pipe, own = _CONTEXT.Pipe(duplex=False)
        self.process: BaseProcess = _CONTEXT.Process(target=train, args=(store, run, tape, rounds, own), daemon=True)
        self.process.start()
        own.close()  # so that the pipe ends with the process

    def wait_for(self, count: int) -> None:
        """Wait until `count` more rounds are acknowledged."""
        for _ in range(count):
            if not self._pipe.poll(PATIENCE):
                raise TimeoutError(f"No round was written in {PATIENCE:.0f} s by the trainer of {self.store}.")
            self.acknowledged.append(self._pipe.recv())

    def kill(self) -> None:
        """Kill -9, and read the acknowledgements that are still in the pipe."""
        self.process.kill()
        self.process.join()
        _drain(self._pipe, self.acknowledged)

    def end(self) -> None:
        """Wait for a trainer with a number of rounds."""
        self.process.join(PATIENCE)
        _drain(self._pipe, self.acknowledged)

    def missing(self) -> list[str]:
        """Return the acknowledged rounds that are lost."""
        lost = missing_records(self.store, self.run, self.acknowledged)
        return lost + (missing_from_tape(self.store, self.run, self.acknowledged) if self._tape else [])


def _drain(pipe: Connection, numbers: list[int]) -> None:
    with contextlib.suppress(EOFError, OSError):
        while True:
            numbers.append(pipe.recv())


def kill_trainer(seed: int, folder: Path) -> Kill:
    """Kill a trainer that writes to a file."""
    return _kill_trainers("trainer", seed, str(folder / f"{seed}.db"))


def kill_trainer_with_tape(seed: int, folder: Path) -> Kill:
    """Kill a trainer that also records a tape."""
    return _kill_trainers("trainer with a tape", seed, str(folder / f"tape-{seed}.db"), tape=True)


def kill_trainer_with_readers(seed: int, folder: Path) -> Kill:
    """Kill a trainer while ten readers read its file."""
    return _kill_trainers("trainer with ten readers", seed, str(folder / f"read-{seed}.db"), readers=READERS)


def kill_trainers_of_postgres(seed: int, server: PostgresServer) -> Kill:
    """Kill two trainers that write to one PostgreSQL database, one after the other, while ten readers read."""
    return _kill_trainers("two trainers, PostgreSQL", seed, server.database(), trainers=2, readers=READERS)


def _kill_trainers(
    kind: str, seed: int, store: str, *, tape: bool = False, trainers: int = 1, readers: int = 0
) -> Kill:
    chance = random.Random(f"{kind} {seed}")  # noqa: S311 - no secrets here
    training = [Trainer(store, f"run-{number}", tape=tape) for number in range(trainers)]
    with _reading(store, "run-0", readers):
        for trainer in training:
            trainer.wait_for(chance.randint(1, ROUNDS_BEFORE))
        for trainer in training:
            time.sleep(chance.uniform(0, LONGEST_DELAY))
            trainer.kill()
    lost = [text for trainer in training for text in trainer.missing()]
    lost += problems(store)
    # Some of the earlier ones may have been written without being acknowledged
    first = training[0].acknowledged[-1] + 3
    again = Trainer(store, "run-0", rounds=range(first, first + 2))
    again.end()
    rounds = [*training[0].acknowledged, first, first + 1]
    lost += [f"after it went on: {text}" for text in missing_records(store, "run-0", rounds)]
    return Kill(kind, seed, sum(len(trainer.acknowledged) for trainer in training), tuple(lost))


@contextlib.contextmanager
def _reading(store: str, run: str, count: int) -> Iterator[None]:
    readers = [_CONTEXT.Process(target=read, args=(store, run, number), daemon=True) for number in range(count)]
    for reader in readers:
        reader.start()
    try:
        yield
    finally:
        for reader in readers:
            reader.kill()
            reader.join()


def problems(store: str) -> list[str]:
    """Return what the doctor finds wrong with a file whose writer was killed."""
    if "://" in store:
        return []
    return [f"doctor: {sign.text}" for sign in examine(Path(store)) if sign.state == "trouble"]


def kill_server(seed: int, server: PostgresServer) -> Kill:
    """Kill PostgreSQL itself while two trainers write and ten readers read, and restart it."""
    kind = "PostgreSQL server"
    chance = random.Random(f"{kind} {seed}")  # noqa: S311 - no secrets here
    store = server.database()
    training = [Trainer(store, f"run-{number}") for number in range(2)]
    with _reading(store, "run-0", READERS):
        for trainer in training:
            trainer.wait_for(chance.randint(1, ROUNDS_BEFORE))
        time.sleep(chance.uniform(0, LONGEST_DELAY))
        server.kill()
        time.sleep(chance.uniform(0, 1.0))
        server.start()
        for trainer in training:
            trainer.wait_for(2)  # both continue
            trainer.kill()
    lost = [text for trainer in training for text in trainer.missing()]
    return Kill(kind, seed, sum(len(trainer.acknowledged) for trainer in training), tuple(lost))


def fill_disk(seed: int, folder: Path) -> Kill:
    """Fill PostgreSQL's disk for a while, and kill its trainer after there is room again.

    `folder` is a separate file system with little room.
    """
    kind = "PostgreSQL, disk full"
    server = PostgresServer(folder)
    server.start()
    try:
        trainer = Trainer(server.database(), "run-0")
        trainer.wait_for(2)
        ballast = folder / "ballast"
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))
        time.sleep(1.0)
        ballast.unlink()
        trainer.wait_for(2)
        trainer.kill()
        return Kill(kind, seed, len(trainer.acknowledged), tuple(trainer.missing()))
    finally:
        server.stop()


@contextlib.contextmanager
def small_disk(megabytes: int) -> Iterator[Path]:
    """Yield a folder on a separate file system of this size; needs the right to mount one."""
    with tempfile.TemporaryDirectory(prefix="fv-pg-") as name:
        options = ["-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", name]
        subprocess.run(["mount", *options], check=True, capture_output=True)  # noqa: S603, S607
        try:
            yield Path(name)
        finally:
            subprocess.run(["umount", "-l", name], check=True)  # noqa: S603, S607
