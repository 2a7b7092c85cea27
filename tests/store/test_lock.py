# SPDX-License-Identifier: Apache-2.0
"""Something else in the place of a store's lock file: it is left alone, nobody waits for it, and the records wait."""

import os

import pytest

import fedvitals as fv
from fedvitals.store.lock import note_of, writer_of
from fedvitals.transport.spill import waiting_runs


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["symbolic link", "hard link", "moved file"])
@pytest.mark.parametrize("running", [True, False])
def test_a_foreign_file_in_the_place_of_the_lock_is_not_written(kind, running, tmp_path):
    """The lock file is written when it is taken: whatever has its name keeps its content, and nothing is claimed."""
    store, foreign, content = tmp_path / "runs.db", tmp_path / "thesis.txt", "years of work\n" * 100
    foreign.write_text(content)
    lock = store.with_name("runs.db.lock")
    monitor = fv.Monitor(store, machine=False)
    if running:
        with monitor.round(0):
            monitor.log({"a": 1.0})
        assert monitor.flush()
        lock.unlink()
    if kind == "symbolic link":
        lock.symlink_to(foreign)
    elif kind == "hard link":
        lock.hardlink_to(foreign)
    else:
        foreign.rename(lock)
    with monitor.round(1):
        monitor.log({"a": 1.0})
    assert not monitor.flush()
    monitor.close()
    assert not monitor.lost
    assert waiting_runs(tmp_path / "runs.db.d") == {monitor.run.id}
    assert (lock if kind == "moved file" else foreign).read_text() == content


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["runs.db", "runs.db.lock"])
def test_a_pipe_in_the_place_of_a_file_keeps_nobody_waiting(name, tmp_path):
    os.mkfifo(tmp_path / name)
    monitor = fv.Monitor(tmp_path / "runs.db", machine=False)
    with monitor.round(0):
        monitor.log({"a": 1.0})
    assert not monitor.flush()
    monitor.close()
    assert not monitor.lost
    assert waiting_runs(tmp_path / "runs.db.d") == {monitor.run.id}
    assert writer_of(tmp_path / "runs.db") is None
    assert note_of(tmp_path / "runs.db") is None
