# SPDX-License-Identifier: Apache-2.0
"""A store, or the index of its log, is cut short by another program: the training goes on, and nothing is claimed."""

import os
import subprocess
import sys

import pytest

import fedvitals as fv
from fedvitals.store import open_reader

TRAINING = """
import os, sys
import fedvitals as fv

store, size = sys.argv[1], int(sys.argv[2])
monitor = fv.Monitor(store, machine=False, id="r1")
for number in range(6):
    if number == 3:
        os.truncate(store + "-shm", size)
    with monitor.round(number):
        monitor.log({"a": 1.0})
    assert monitor.flush()
monitor.close()
assert not monitor.lost
"""


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform == "win32", reason="there, a file that is mapped cannot be cut short")
@pytest.mark.parametrize("size", [0, 100, 4096])
def test_an_index_that_is_cut_short_does_not_end_the_training(size, tmp_path):
    store = tmp_path / "runs.db"
    command = [sys.executable, "-c", TRAINING, str(store), str(size)]
    training = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, check=False)
    assert training.returncode == 0, training.stderr[-2000:]
    with open_reader(store) as reader:
        assert [*reader.history("r1").rounds()] == [*range(6)]


@pytest.mark.thorough
def test_a_store_that_is_cut_off_is_not_taken_for_a_whole_one(tmp_path):
    """Its log still holds what is missing, for a while: the file alone would be all that remains in the end."""
    store = tmp_path / "runs.db"
    monitor = fv.Monitor(store, machine=False, id="r1")
    for number in range(6):
        if number == 3:
            os.truncate(store, store.stat().st_size // 2)
        with monitor.round(number):
            monitor.log({"a": 1.0})
        assert monitor.flush() == (number < 3)
    monitor.close()
    assert monitor.lost
    assert monitor.file != store
    with open_reader(monitor.file) as reader:
        assert [*reader.history("r1").rounds()][-3:] == [3, 4, 5]
