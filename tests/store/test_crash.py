# SPDX-License-Identifier: Apache-2.0
"""kill -9 at any moment: what was acknowledged is there, what is delivered again is there once, and writing goes on."""

import random
import signal
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from fedvitals.records import Event, LayerStats, Metric
from fedvitals.store import open_reader, open_store
from fedvitals.store.read import queries
from support.killed_writer import SIZE, batch
from support.paths import TESTS


def kill_and_check(seed, folder):
    path = folder / f"{seed}.db"
    writer = subprocess.Popen(
        [sys.executable, "-m", "support.killed_writer", path], cwd=TESTS, stdout=subprocess.PIPE, text=True
    )
    chance = random.Random(seed)
    acknowledged = [int(writer.stdout.readline()) for _ in range(chance.randint(1, 20))]
    time.sleep(chance.uniform(0, 0.02))  # somewhere within the next batches
    writer.send_signal(signal.SIGKILL)
    acknowledged += [int(line) for line in writer.stdout.read().splitlines(keepends=True) if line.endswith("\n")]
    writer.wait()
    writer.stdout.close()

    with open_reader(path) as reader:
        stored = sequences(reader)
    assert len(stored) == len(set(stored))
    assert set(range(1, SIZE * (acknowledged[-1] + 1) + 1)) <= set(stored)

    with open_store(path) as store:
        for number in range(acknowledged[-1] + 3):
            store.write(batch(number))
    with open_reader(path) as reader:
        assert sorted(sequences(reader)) == list(range(1, SIZE * (acknowledged[-1] + 3) + 1))
        rounds, nodes, _ = reader.history("r-1").matrix("gradient", "l2", "conv.bias")
        assert (rounds, nodes) == (list(range(acknowledged[-1] + 3)), ["c0", "c1", "c2"])
    database = sqlite3.connect(path)
    assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    database.close()
    return len(acknowledged)


def sequences(reader):
    return [record.sequence for kind in (Metric, LayerStats, Event) for record in queries.records(reader, "r-1", kind)]


@pytest.mark.thorough
def test_a_killed_writer_loses_nothing_that_it_acknowledged(tmp_path):
    with ThreadPoolExecutor(4) as pool:
        written = list(pool.map(lambda seed: kill_and_check(seed, tmp_path), range(20)))
    assert sum(written) > 100  # the kills did not all come at the beginning
