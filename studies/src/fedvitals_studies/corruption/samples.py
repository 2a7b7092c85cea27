# SPDX-License-Identifier: Apache-2.0
"""The intact folders to be damaged: a store at rest with a tape and a spill file, and one whose writer was killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from fedvitals import Monitor, Tape, lab
from fedvitals.records import Event, Where
from fedvitals.store import open_reader, open_store, spill_folder
from fedvitals.store.marks import set_mark
from fedvitals.store.read import queries
from fedvitals.transport.spill import Spill

_KILLED = """
import os, signal, sys
from fedvitals.records import Metric, Run, Where
from fedvitals.store import open_store
store = open_store(sys.argv[1])
values = [Metric(Where("late", r, f"c{c}"), 100.0 + r, "train.loss", 1 / (1 + r + c), "s", 8 * r + c)
          for r in range(40) for c in range(8)]
store.write([Run("late", "late", started=100.0)])
for first in range(0, len(values), 20):
    store.write(values[first : first + 20])
os.kill(os.getpid(), signal.SIGKILL)
"""


def make_samples(folder: Path) -> dict[str, Path]:
    """Create the intact folders; by name: «rest» and «killed»."""
    rest, killed = folder / "rest", folder / "killed"
    for place in (rest, killed):
        place.mkdir(parents=True)
    _train(rest / "runs.db")
    shutil.copyfile(rest / "runs.db", killed / "runs.db")
    code = subprocess.run([sys.executable, "-c", _KILLED, killed / "runs.db"], check=False).returncode  # noqa: S603
    if code != -signal.SIGKILL:
        raise RuntimeError(f"The writer that was to be killed ended with {code}.")
    _spill(rest / "runs.db")
    return {"rest": rest, "killed": killed}


def _train(store: Path) -> None:
    experiment = lab.Experiment(
        dataset="digits", model="mlp", clients=6, rounds=8, seed=3, local=lab.Local(iterations=3),
        faults=(lab.label_noise(nodes=["c4"]),),
    )  # fmt: skip
    monitor = Monitor(store, run="sample", machine=False, tape=Tape(every=1))
    lab.run(experiment, monitor)
    monitor.close()
    with open_reader(store) as reader:
        run = queries.find_run(reader, "sample")
    set_mark(store, run, "tag", "baseline")
    with open_store(store) as sink:
        where = Where(run, 1)
        sink.write([Event(where, 1.0, "warning", "note", f"event {i}", {"i": i}, "sample", i) for i in range(20)])


def _spill(store: Path) -> None:
    """Leave a file of records, as a process does whose store could not be written."""
    spill = Spill(spill_folder(os.fspath(store)), "store")
    for i in range(30):
        spill.append(Event(Where("spilled", i), float(i), "error", "waits", f"spilled {i}", {"i": i}, "spill", i))
    spill.close(keep=True)
