# SPDX-License-Identifier: Apache-2.0
"""A tape goes with its run, whoever deletes it; one whose run is gone is found; one that is being written stays."""

import os
import subprocess
import sys
import time

import pytest
from torch import nn

import fedvitals as fv
from fedvitals.cli.screen import size as size_shown
from fedvitals.errors import BusyError, StoreError
from fedvitals.store import open_reader
from fedvitals.store.read import queries
from fedvitals.store.tapes import lost_tapes, tape_bytes, tape_folder, tapes
from fedvitals.store.upkeep import retention
from support.verbs import result, run


def record(store, name, rounds=2):
    """A run with a tape; its id."""
    with fv.Monitor(store, name, tape=fv.Tape(), strict=True, machine=False) as monitor:
        train(monitor, rounds)
    return monitor.run.id


def train(monitor, rounds=2):
    model = nn.Linear(40, 20)
    for r in range(rounds):
        with monitor.round(r, model), monitor.client("c0", model):
            nn.init.uniform_(model.weight)


def files(folder):
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


@pytest.fixture
def store(tmp_path):
    return tmp_path / "runs.db"


def test_a_run_that_is_deleted_takes_its_tape_along(store, capsys):
    first, second = record(store, "first"), record(store, "second")
    other = files(tape_folder(store, second))
    assert other > 3000
    assert tapes(store) == {one: files(tape_folder(store, one)) for one in sorted([first, second])}
    code, out, _ = run(capsys, "runs", "delete", "first", "--yes", "--store", store)
    assert code == 0
    assert "and a tape of" in out
    assert not tape_folder(store, first).exists()
    assert [*tapes(store)] == [second]
    cleared = result(capsys, "runs", "delete", second, "--yes", "--store", store)
    assert [(gone["what"], gone["tape_bytes"]) for gone in cleared["removed"]] == [("run", other)]
    assert tapes(store) == {}


@pytest.mark.thorough
def test_thinning_a_store_leaves_tapes_until_their_runs_go(store, monkeypatch):
    old, new = record(store, "old", 40), record(store, "new")
    monkeypatch.setattr(retention, "SMALLEST", 0)
    cleared = retention.thin(store, 10**9)
    cleared = retention.thin(store, cleared.bytes_after - 1)
    assert [gone.what for gone in cleared.removed] == ["detail"]
    assert {*tapes(store)} == {old, new}
    cleared = retention.thin(store, 1)
    gone = {one.run: one.tape_bytes for one in cleared.removed if one.what == "run"}
    assert min(gone[old], gone[new]) > 3000
    assert tapes(store) == {}


@pytest.mark.thorough
def test_a_run_that_is_being_written_keeps_its_tape(store):
    """The store's lock is between processes."""
    with fv.Monitor(store, "live", tape=fv.Tape(), strict=True, machine=False) as monitor:
        train(monitor)
        assert monitor.flush()
        command = [sys.executable, "-m", "fedvitals", "runs", "delete", monitor.run.id, "--yes", "--store", store]
        refused = subprocess.run(command, capture_output=True, text=True, check=False)
        assert refused.returncode == 2
        assert "writ" in refused.stderr
        assert (tape_folder(store, monitor.run.id) / "tape.json").exists()
    assert tape_bytes(store, monitor.run.id) > 3000


def test_a_tape_whose_run_is_gone_is_found_and_can_be_removed(store, capsys):
    kept, lost = record(store, "kept"), record(store, "lost")
    aside = tape_folder(store, lost).rename(store.with_name("aside"))
    retention.delete(store, [lost])
    aside.rename(tape_folder(store, lost))
    signs = [sign for sign in result(capsys, "doctor", store)["store"] if sign["what"] == "tapes"]
    assert [sign["state"] for sign in signs] == ["fine", "note"]
    assert f"`fedvitals runs delete {lost}`" in signs[1]["text"]
    with pytest.raises(BusyError, match="written a moment ago"):  # a run that has just begun is not in the store yet
        retention.delete(store, [lost])
    assert lost_tapes(store, [kept]) == {lost: files(tape_folder(store, lost))}
    hour = time.time() - 3600
    for path in (tape_folder(store, lost), *tape_folder(store, lost).rglob("*")):
        os.utime(path, (hour, hour))
    code, out, _ = run(capsys, "runs", "delete", lost, "--yes", "--store", store)
    assert code == 0
    assert f"{lost}: the tape of a run that is gone, deleted" in out
    assert [*tapes(store)] == [kept]
    signs = [sign for sign in result(capsys, "doctor", store)["store"] if sign["what"] == "tapes"]
    assert [sign["state"] for sign in signs] == ["fine"]


def test_sizes_of_tapes_are_told_where_runs_are(store, capsys):
    bare = fv.Monitor(store, "bare", strict=True, machine=False)
    with bare:
        train(bare)
    _, out, _ = run(capsys, "runs", "--store", store)
    assert "tape" not in out
    taped = record(store, "taped")
    size = files(tape_folder(store, taped))
    told = {one["name"]: one["tape_bytes"] for one in result(capsys, "runs", "--store", store)}
    assert told == {"bare": 0, "taped": size}
    _, out, _ = run(capsys, "runs", "--store", store)
    assert f"1 run is on tape, {size_shown(size)}; the newest:  fedvitals replay {taped}" in out
    assert result(capsys, "show", "taped", "--store", store)["tape_bytes"] == size
    _, out, _ = run(capsys, "show", "taped", "--store", store)
    assert f"`fedvitals replay {taped}`" in out
    _, out, _ = run(capsys, "show", "bare", "--store", store)
    assert "replay" not in out


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["..", ".", "", "../aside", "a/b", "/etc", "a\0b"])
def test_whatever_a_run_is_called_nothing_else_is_removed(store, name):
    record(store, "mine")
    aside = store.parent / "aside"
    aside.mkdir()
    (aside / "file").write_text("kept")
    with pytest.raises(StoreError, match="no name of a folder"):
        tape_folder(store, name)
    before = tapes(store)
    assert tape_bytes(store, name) == 0
    assert retention.delete(store, [name]).removed == ()
    assert (aside / "file").read_text() == "kept"
    assert tapes(store) == before


def test_a_link_is_not_followed(store):
    mine = record(store, "mine")
    aside = store.parent / "aside"
    aside.mkdir()
    (aside / "file").write_text("kept")
    tape_folder(store, "link").symlink_to(aside)
    assert [*tapes(store)] == [mine]
    assert retention.delete(store, ["link"]).removed == ()
    assert (aside / "file").exists()


@pytest.mark.thorough
def test_the_dashboard_tells_of_a_tape_and_removes_it(store):
    from starlette import testclient

    from fedvitals.dashboard.app import create_app

    mine = record(store, "mine")
    size = files(tape_folder(store, mine))
    with testclient.TestClient(create_app(store, token="right"), base_url="http://127.0.0.1") as client:
        assert client.get(f"/api/runs/{mine}/contents").json()["tape_bytes"] == size
        gone = client.delete(f"/api/runs/{mine}", headers={"X-Fedvitals": "1", "Authorization": "Bearer right"})
        assert gone.json()["tape_bytes"] == size
    assert tapes(store) == {}
    with open_reader(store) as reader:
        assert queries.list_runs(reader) == []
