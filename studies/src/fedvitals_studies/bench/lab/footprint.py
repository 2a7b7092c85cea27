# SPDX-License-Identifier: Apache-2.0
"""How quickly the lab starts, and how much memory it takes: fresh processes, observed from outside."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Self

import numpy as np

from fedvitals_studies.bench.lab.peers import PeerError, Process, ours
from fedvitals_studies.bench.lab.work import Data, Subject

FIRST_ROUND = """
import json, sys, tempfile, time
import torch
began = time.perf_counter()
from fedvitals import lab
from fedvitals.monitor.host import HostObserver
from fedvitals.monitor.monitor import Monitor
imported = time.perf_counter() - began

class First(HostObserver):
    def round_begin(self, *_):
        print(json.dumps({"seconds": time.perf_counter() - began, "imports": imported}))
        raise SystemExit

if sys.argv[1] == "digits":
    experiment, data = lab.Experiment(), None
else:
    from fedvitals_studies.bench.lab.work import Subject
    model, clients, data = sys.argv[1], int(sys.argv[2]), sys.argv[3] or None
    experiment = Subject(model, clients).experiment(data)
with tempfile.TemporaryDirectory() as folder, Monitor(folder + "/runs.db") as monitor:
    lab.run(experiment, First(monitor.host.monitored), data=data, engine=sys.argv[4])
"""

BETWEEN_LOOKS = 0.05  # seconds


def seconds_to_first_round(kind: str, clients: int, processes: int, data: Data = None, engine: str = "auto") -> Any:
    """Return the time from the end of `import torch` to the monitor's first round, and the imports' part of it."""
    found = []
    for _ in range(processes):
        command = [sys.executable, "-c", FIRST_ROUND, kind, str(clients), str(data or ""), engine]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own interpreter
        if not done.stdout.startswith("{"):
            raise PeerError(f"The first round never began: {(done.stderr.strip().splitlines() or ['no word'])[-1]}")
        found.append(json.loads(done.stdout.splitlines()[0]))
    return {name: np.array([each[name] for each in found]) for name in ("seconds", "imports")}


def peak_bytes(clients: int, data: Data = None, **options: Any) -> int:
    """Return the peak memory of the lab and its workers in two short rounds of the paper's network.

    Proportional: memory shared by several processes counts once.
    """
    arm = ours(Subject("cnn", clients, iterations=2), data, **options)
    with Process(arm) as process, _Watch(process.pid) as watch:
        process.ask("round")
        process.ask("round")
    return watch.peak


def has_proportional_memory() -> bool:
    return Path("/proc/self/smaps_rollup").exists()


class _Watch:
    """Polls a process and its descendants, and keeps the peak."""

    def __init__(self, pid: int) -> None:
        self.peak = 0
        self._pid, self._over = pid, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(BETWEEN_LOOKS):
            self.peak = max(self.peak, sum(_proportional(pid) for pid in _family(self._pid)))


def _family(pid: int) -> list[int]:
    """Return the process and its descendants."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            # The name is in brackets and may contain anything; the parent is the second word after it.
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return found


def _proportional(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0
