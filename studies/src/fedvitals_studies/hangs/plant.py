# SPDX-License-Identifier: Apache-2.0
"""A hang in one round of a federation, which lasts until it is released.

Kinds: `train` waits in the client's training, `data` reads from a pipe without a writer, `stopped` is a client whose
process was stopped by a signal (in a loop: one that waits for a lock that it holds), `aggregate` waits in the server's
aggregation, `evaluate` in the evaluation.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

KINDS = ("train", "data", "stopped", "aggregate", "evaluate")
HOSTS = ("loop", "processes", "flower", "nvflare")
OF_SERVER = ("aggregate",)
CLIENTS = 3
HUNG_ROUND = 8
SECONDS = {"train": 1.7, "evaluate": 0.8, "aggregate": 0.7}  # of a usual round
UNEVEN = 0.05  # standard deviation of their logarithm


@dataclass(frozen=True, slots=True)
class Plant:
    """One hang; in `folder` it notes that it hangs, and checks whether it may continue."""

    host: str
    kind: str
    folder: str
    seed: int = 0

    @property
    def client(self) -> int:
        """The number of the hanging client, counted from 0."""
        return self.seed % CLIENTS

    def write(self) -> None:
        """Write the settings for the processes of the federation."""
        Path(self.folder, "plant.json").write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: str) -> Plant:
        """Return the settings stored in the folder."""
        return cls(**json.loads(Path(folder, "plant.json").read_text(encoding="utf-8")))

    def work(self, phase: str, round_index: int, client: int | None = None) -> None:
        """Take the usual time of a phase, and hang in it if planted."""
        stream = random.Random(f"{self.seed} {phase} {round_index} {client}")  # noqa: S311 - no secret
        time.sleep(SECONDS[phase] * stream.lognormvariate(0.0, UNEVEN))
        planted = "train" if self.kind in ("data", "stopped") else self.kind
        if (planted, HUNG_ROUND) != (phase, round_index) or client not in (None, self.client):
            return
        self._note()
        if self.kind == "data":
            self._read_from_pipe()
        elif self.kind == "stopped" and self.host == "loop":
            self._wait_for_own_lock()
        elif self.kind == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            self._wait()

    def _note(self) -> None:
        hung = Path(self.folder, "hung.json")
        text = json.dumps({"at": time.time(), "process": os.getpid()})
        hung.with_suffix(".part").write_text(text, encoding="utf-8")
        hung.with_suffix(".part").rename(hung)

    def _wait(self) -> None:
        while not Path(self.folder, "go-on").exists():
            time.sleep(0.05)

    def _read_from_pipe(self) -> None:
        with Path(self.folder, "pipe").open("rb") as pipe:  # blocks until it is opened for writing
            pipe.read()

    def _wait_for_own_lock(self) -> None:
        lock = threading.Lock()
        lock.acquire()

        def release() -> None:
            self._wait()
            lock.release()

        threading.Thread(target=release, daemon=True).start()
        with lock:
            pass

    def let_go(self) -> None:
        """Release the hang; called from outside."""
        Path(self.folder, "go-on").touch()
        if self.kind == "data":
            with Path(self.folder, "pipe").open("wb"):
                pass
        elif self.kind == "stopped" and self.host != "loop":
            hung = json.loads(Path(self.folder, "hung.json").read_text(encoding="utf-8"))
            os.kill(hung["process"], signal.SIGCONT)
