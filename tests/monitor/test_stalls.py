# SPDX-License-Identifier: Apache-2.0
"""A round that stands still is reported while it does, with who is awaited, and its finding ends with the round."""

import multiprocessing
import os
import tempfile
import threading
import time

import pytest

import fedvitals as fv
from fedvitals.monitor import stall_watch
from fedvitals.monitor.progress import Awaited, Progress
from fedvitals.resources import stack_requests
from support import hanging_worker
from support.waiting import wait_until

USUAL = 0.1  # seconds of a round


@pytest.fixture
def brisk(monkeypatch):
    """Rounds as short as those of a test can stall."""
    monkeypatch.setattr(stall_watch, "SHORTEST", 4 * USUAL)
    monkeypatch.setattr(stall_watch, "PERIOD", USUAL / 4)


def stalls(monitor):
    return [finding for finding in monitor.findings() if finding.issue == "STALLED"]


def train_as_ever(monitor, rounds=8):
    for number in range(rounds):
        with monitor.round(number):
            with monitor.client("c1"):
                time.sleep(USUAL / 3)
            with monitor.client("c2"):
                time.sleep(USUAL / 3)
            with monitor.part("aggregate"):
                time.sleep(USUAL / 3)


def hang_until_reported(monitor):
    wait_until(lambda: stalls(monitor), 20, "a finding STALLED")


def test_a_client_that_hangs_is_named_while_it_does(tmp_path, brisk):
    with fv.Monitor(tmp_path / "runs.db", strict=True, machine=False) as monitor:
        train_as_ever(monitor)
        assert not stalls(monitor)
        with monitor.round(8), monitor.client("c1"):
            hang_until_reported(monitor)
            (finding,) = stalls(monitor)
        assert finding.where.round == 8
        assert [suspect.node for suspect in finding.suspects] == ["c1"]
        assert "c1 did not finish: began to train" in finding.message
        assert finding.evidence["phase"] == "train"
        main = finding.evidence["server_thread_MainThread"]
        assert "hang_until_reported (monitor/test_stalls.py:" in main
        assert "tmp_path" not in str(finding.evidence)  # places in the code, no values
        (case,) = [case for case in monitor.findings().cases if case.issue == "STALLED"]
        assert not case.still_there  # the round went on
        assert "stood still and went on" in case.newest.message


def test_a_server_that_hangs_in_its_own_work_is_named_with_what_it_is_at(tmp_path, brisk):
    with fv.Monitor(tmp_path / "runs.db", strict=True, machine=False) as monitor:
        train_as_ever(monitor)
        with monitor.round(8):
            with monitor.client("c1"):
                time.sleep(USUAL / 3)
            with monitor.part("aggregate"):
                hang_until_reported(monitor)
                (case,) = [case for case in monitor.findings().cases if case.issue == "STALLED"]
                assert case.still_there
                assert "No client is awaited: the server aggregates since" in case.newest.message


def test_workers_that_do_not_come_home_are_named(tmp_path, brisk):
    with fv.Monitor(tmp_path / "runs.db", strict=True, machine=False) as monitor:
        for number in range(8):
            with monitor.round(number):
                monitor.host.expect("c1", "c2")
                time.sleep(USUAL)
                for node in ("c1", "c2"):
                    worker = monitor.host.for_worker()
                    with worker.client(node):
                        pass
                    monitor.host.absorb(worker.payload())
        with monitor.round(8):
            monitor.host.expect("c1", "c2")
            worker = monitor.host.for_worker()
            with worker.client("c1"):
                pass
            monitor.host.absorb(worker.payload())
            hang_until_reported(monitor)
            (finding,) = stalls(monitor)
        assert [suspect.node for suspect in finding.suspects] == ["c2"]
        assert "c2 did not answer: asked to train" in finding.message


def test_code_of_clients_is_told_only_where_their_words_are(tmp_path, brisk):
    with fv.Monitor(tmp_path / "runs.db", strict=True, machine=False, privacy=2) as monitor:
        train_as_ever(monitor)
        with monitor.round(8), monitor.client("c1"):
            hang_until_reported(monitor)
        assert not [name for name in stalls(monitor)[0].evidence if "thread" in name]


def test_the_thread_ends_with_the_run(tmp_path):
    monitor = fv.Monitor(tmp_path / "runs.db", strict=True, machine=False)
    with monitor.round(0):
        assert [thread for thread in threading.enumerate() if thread.name == "fedvitals-watch"]
    monitor.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "fedvitals-watch"]


def test_the_first_round_and_one_that_stalled_say_nothing_of_the_usual():
    progress = Progress()
    for number, stalled in enumerate((False, False, True, True, False)):
        progress.begin_round(number)
        progress.stalled = stalled
        progress.end_round()
    assert len(progress.lengths) == 3  # of the rounds 1, 3 (as long again: the new usual) and 4


def test_a_part_that_is_under_way_is_what_the_round_is_at():
    progress = Progress()
    progress.begin_round(0)
    progress.moved("train")
    with progress.part("evaluate"):
        assert (progress.awaited(), progress.phase) == (Awaited("evaluate"), "evaluate")
    assert (progress.awaited(), progress.phase) == (None, "train")


def test_the_stack_of_a_client_in_another_process_is_told(tmp_path, brisk):
    spawn = multiprocessing.get_context("spawn")
    with fv.Monitor(tmp_path / "runs.db", strict=True, machine=False) as monitor:
        for number in range(8):
            with monitor.round(number):
                monitor.host.expect("c1")
                time.sleep(USUAL)
                worker = monitor.host.for_worker()
                with worker.client("c1"):
                    pass
                monitor.host.absorb(worker.payload())
        with monitor.round(8):
            monitor.host.expect("c1")
            go_on, payloads = spawn.Event(), spawn.Queue()
            process = spawn.Process(
                target=hanging_worker.train, args=(monitor.host.for_worker(), "c1", go_on, payloads)
            )
            process.start()
            wait_until(lambda: "hang_here (support/hanging_worker.py:" in client_stack(monitor), 40, "its stack")
            go_on.set()
            monitor.host.absorb(payloads.get(timeout=20))
            process.join()
        assert not process.exitcode
        folder = stack_requests._folder(monitor.host.for_worker().trace)
    assert not folder.exists()


def client_stack(monitor):
    newest = [case.newest for case in monitor.findings().cases if case.issue == "STALLED"]
    return newest[0].evidence.get("c1_thread_MainThread", "") if newest else ""


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="folders belong to nobody there")
def test_a_folder_that_others_may_write_to_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    requests = stack_requests.StackRequests("trace")
    folder = stack_requests._folder("trace")
    folder.mkdir(parents=True)
    folder.parent.chmod(0o777)
    requests.ask()
    assert not [*folder.iterdir()]
    folder.parent.chmod(0o700)
    (folder / "1.json").write_text('{"nodes": ["c1"], "stacks": "no stacks"}')
    assert requests.answers() == {}
    (folder / "1.json").write_text('{"nodes": ["c1"], "stacks": {"Main": "f (a.py:1)"}}')
    assert requests.answers() == {"c1": {"Main": "f (a.py:1)"}}
