# SPDX-License-Identifier: Apache-2.0
"""A run records that its process lives, and one whose process was killed has died for everybody who reads the store."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner

import fedvitals as fv
from fedvitals.cli.main import app
from fedvitals.monitor import stall_watch
from fedvitals.store import open_reader
from fedvitals.store.read.runs import span_of_rounds
from fedvitals.views.status import DIED, run_states, status_of
from support.waiting import wait_until

TRAINING = """
import sys, time
import fedvitals as fv
monitor = fv.Monitor(sys.argv[1], run="killed", machine=False)
for number in range(2):
    with monitor.round(number), monitor.client("c1"):
        pass
monitor.flush()
print("trained", flush=True)
time.sleep(600)
"""


def states(store, later=0.0):
    with open_reader(store) as reader:
        (run,) = listed = run_states(reader, time.time() + later)
        assert status_of(reader, run, now=time.time() + later).state == listed[run]
        return listed[run]


def test_a_process_that_was_killed_has_died(tmp_path):
    store = tmp_path / "runs.db"
    command = [sys.executable, "-c", TRAINING, str(store)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as training:
        assert training.stdout.readline() == "trained\n"
        assert (states(store), states(store, later=1000.0)) == ("running", "silent")  # it is there
        os.kill(training.pid, signal.SIGKILL)
        training.wait()
    assert (states(store), states(store, later=DIED + 5)) == ("running", "died")


def test_the_list_of_runs_and_the_card_say_that_a_run_has_died(tmp_path, monkeypatch):
    store = tmp_path / "runs.db"
    with subprocess.Popen([sys.executable, "-c", TRAINING, str(store)], stdout=subprocess.PIPE, text=True) as training:
        training.stdout.readline()
        training.kill()
    monkeypatch.setattr("fedvitals.views.status.DIED", -1.0)  # as if it were a minute later
    runs = CliRunner().invoke(app, ["runs", "--store", str(store)])
    assert "died" in runs.output
    (row,) = json.loads(CliRunner().invoke(app, ["runs", "--store", str(store), "--json"]).output)["result"]
    assert row["state"] == "died"
    assert "died, begun" in CliRunner().invoke(app, ["show", row["id"], "--store", str(store)]).output


def test_a_run_that_lives_says_so_before_its_first_round_and_in_a_long_one(tmp_path, monkeypatch):
    monkeypatch.setattr(stall_watch, "BEAT", 0.1)
    monkeypatch.setattr(stall_watch, "PERIOD", 0.05)
    store = tmp_path / "runs.db"

    def heard():
        monitor.flush()
        with open_reader(store) as reader:
            return span_of_rounds(reader, monitor.run.id).last_record or 0.0

    with fv.Monitor(store, strict=True, machine=False) as monitor:
        monitor.host.event("info", "user.loading", "Loading data.")
        wait_until(heard, 20, "a sign of life before the first round")
        with monitor.round(0):
            began = time.time()
            wait_until(lambda: heard() > began, 20, "a sign of life in the round")
    assert heard() > began


@pytest.mark.parametrize("state", ["running", "died"])
def test_a_machine_that_is_elsewhere_goes_by_the_last_sign_of_life(tmp_path, state):
    """It sees no lock, but the times of the records."""
    with fv.Monitor(tmp_path / "runs.db", machine=False) as monitor, monitor.round(0):
        monitor.flush()
        with open_reader(tmp_path / "runs.db") as reader:
            later = 0.0 if state == "running" else DIED + 5
            assert status_of(reader, monitor.run.id, now=time.time() + later).state == state
