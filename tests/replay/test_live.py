# SPDX-License-Identifier: Apache-2.0
"""A run that is debugged while it trains, in a process of its own: held, stepped, let go, and the same in the end."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import fedvitals as fv
from fedvitals import lab
from fedvitals.errors import BusyError, ConfigError
from fedvitals.replay.debugger import round_gate
from fedvitals.replay.debugger.breakpoints import Breakpoints, Hit
from fedvitals.replay.debugger.live_session import LiveSession
from fedvitals.replay.debugger.round_gate import GateHandle, RoundGate
from fedvitals.replay.tape.reader import open_tape, tape_folder

pytestmark = pytest.mark.thorough  # CI runs it; `scripts/test --fast` does not

ROUNDS = 6
SOON = 120.0  # seconds in which anything must have happened, on a busy machine too

# Waits after its first round until it is told that somebody is attached.
TRAINING = f"""
import sys
import fedvitals as fv
from fedvitals import lab
from fedvitals.replay.debugger import round_gate
round_gate.STALE_SECONDS = float(sys.argv[2])
experiment = lab.Experiment(
    dataset="digits", model="mlp", clients=4, rounds={ROUNDS}, faults=[lab.crash(nodes=["c1"], since=3, until=3)]
)
with fv.Monitor(sys.argv[1], run="live", host="lab", tape=fv.Tape(), id="live") as monitor:
    for result in lab.rounds(experiment, monitor, workers=1):
        if len(result.rounds) == 1:
            monitor.flush()
            print("begun", flush=True)
            sys.stdin.readline()
"""

SESSION = """
import sys, time
from fedvitals.replay.debugger.breakpoints import Breakpoints
from fedvitals.replay.debugger.live_session import LiveSession
with LiveSession(sys.argv[1], "live", Breakpoints("round 2")) as live:
    print("attached", flush=True)
    print(live.wait_for_hit(120), flush=True)
    time.sleep(600)
"""


@contextmanager
def process(code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Ended with the test, whatever happens in it."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        try:
            yield started
        finally:
            started.kill()


@contextmanager
def training(store: Path, stale: float = 10.0) -> Iterator[subprocess.Popen[str]]:
    with process(TRAINING, store, stale) as started:
        said = line_of(started)
        assert said == "begun"
        yield started


def line_of(started: subprocess.Popen[str]) -> str:
    assert started.stdout is not None
    return started.stdout.readline().strip()


def go(started: subprocess.Popen[str]) -> None:
    assert started.stdin is not None
    started.stdin.write("\n")
    started.stdin.flush()


def digests(store: Path) -> list[str]:
    tape = open_tape(store, "live")
    return [tape.entry(number).after["model"].digest for number in tape.rounds]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The weights after each round, of a run that nobody debugs."""
    store = tmp_path_factory.mktemp("live") / "runs.db"
    with training(store) as run:
        go(run)
        assert run.wait(SOON) == 0
    return digests(store)


@pytest.mark.thorough
def test_a_live_run_is_held_stepped_and_ends_with_the_same_weights(tmp_path: Path, undisturbed: list[str]) -> None:
    store, told = tmp_path / "runs.db", list[Hit]()
    points = Breakpoints("round 2", "finding CRASH", "loss > 100")
    points.watch("accuracy")
    with training(store) as run, LiveSession(store, "live", points, tell=told.append) as live:
        go(run)
        hit = live.wait_for_hit(SOON)
        assert hit is not None
        assert (hit.number, hit.round, live.paused) == (1, 2, 2)
        assert open_tape(store, "live").rounds == [0, 1, 2]  # it waits, and the tape has all before

        live.resume()
        hit = live.wait_for_hit(SOON)  # what the detectors say of a round is there when the run waits after it
        assert hit is not None
        assert (hit.number, hit.round, live.paused) == (2, 3, 3)

        live.step()
        hit = live.wait_for_hit(SOON)
        assert hit is not None
        assert (hit.number, hit.round, live.paused) == (0, 4, 4)

        live.resume()
        assert live.wait_for_hit(SOON) is None
        assert live.ended
        assert run.wait(SOON) == 0
    assert digests(store) == undisturbed
    assert len(undisturbed) == ROUNDS
    assert [hit.round for hit in told if not hit.stops] == [1, 2, 3, 4, 5]
    folder = tape_folder(store, "live")
    assert not (folder / round_gate.CLAIM_FILE).exists()
    assert not (folder / round_gate.WAITING_FILE).exists()
    with pytest.raises(ConfigError, match="has ended"):
        LiveSession(store, "live")


@pytest.mark.thorough
def test_a_session_that_is_killed_holds_nobody_up(tmp_path: Path, undisturbed: list[str]) -> None:
    store = tmp_path / "runs.db"
    with training(store, stale=3.0) as run, process(SESSION, store) as session:
        assert line_of(session) == "attached"
        go(run)
        assert line_of(session) == "Breakpoint 1, round 2: it is round 2"
        assert GateHandle(tape_folder(store, "live")).waiting() == 2
        with pytest.raises(BusyError, match=f"process {session.pid} on "), LiveSession(store, "live"):
            pass
        os.kill(session.pid, signal.SIGKILL)
        session.wait()
        assert run.wait(SOON) == 0
    assert digests(store) == undisturbed


@pytest.mark.thorough
def test_who_leaves_lets_the_run_go_on_and_another_may_take_it(tmp_path: Path, undisturbed: list[str]) -> None:
    store = tmp_path / "runs.db"
    with training(store) as run:
        with LiveSession(store, "live", Breakpoints("round 1")) as live:
            with pytest.raises(BusyError, match=f"process {os.getpid()} on "), LiveSession(store, "live"):
                pass
            go(run)
            hit = live.wait_for_hit(SOON)
            assert hit is not None
            with pytest.raises(BusyError), LiveSession(store, "live"):
                pass
            assert live.paused == 1
        assert run.wait(SOON) == 0
    assert digests(store) == undisturbed


@pytest.mark.thorough
def test_a_run_that_is_killed_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tmp_path / "runs.db"
    with training(store) as run, LiveSession(store, "live", Breakpoints("round 2")) as live:
        go(run)
        assert live.wait_for_hit(SOON) is not None
        os.kill(run.pid, signal.SIGKILL)
        run.wait()
        assert live.wait_for_hit(SOON) is None
        assert live.ended
        assert live.paused is None
    monkeypatch.setattr("fedvitals.replay.debugger.live_session.SILENT_SECONDS", 0.0)
    with pytest.raises(ConfigError, match="was broken off"):
        LiveSession(store, "live")


def looped(store: Path, begun: threading.Event, go_on: threading.Event) -> None:
    """A plain loop on a thread, which logs its accuracy after each round is closed."""
    with fv.Monitor(store, run="loop", tape=fv.Tape(), id="loop", machine=False) as monitor:
        model = torch.nn.Linear(2, 2)
        for number in range(5):
            with monitor.round(number, model):
                pass
            monitor.log(accuracy=0.9 - 0.1 * number)
            if number == 0:
                monitor.flush()
                begun.set()
                go_on.wait(SOON)


def test_what_is_logged_after_the_round_stops_after_the_next(tmp_path: Path) -> None:
    store, begun, go_on = tmp_path / "runs.db", threading.Event(), threading.Event()
    thread = threading.Thread(target=looped, args=(store, begun, go_on))
    thread.start()
    try:
        assert begun.wait(SOON)
        with LiveSession(store, "loop", Breakpoints("accuracy < 0.75")) as live:
            go_on.set()
            hit = live.wait_for_hit(SOON)
            assert hit is not None
            assert (hit.round, live.paused) == (2, 3)
            live.breakpoints.clear()
            live.resume()
            assert live.wait_for_hit(SOON) is None
            assert live.ended
    finally:
        go_on.set()
        thread.join()


def test_a_run_on_flower_is_told_of_and_never_held(tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    experiment = lab.Experiment(dataset="digits", model="mlp", clients=3, rounds=3)
    with fv.Monitor(store, run="remote", host="flower", tape=fv.Tape(), machine=False) as monitor:
        running = lab.rounds(experiment, monitor, workers=1)
        next(running)
        monitor.flush()
        with LiveSession(store, "remote", Breakpoints("round 1", "round 0")) as live:
            assert not live.holds
            for _ in running:
                pass
            assert not (tape_folder(store, monitor.run.id) / round_gate.CLAIM_FILE).exists()
            with pytest.raises(ConfigError, match="never held"):
                live.step()
            monitor.close()
            hit = live.wait_for_hit(SOON)
            assert hit is not None
            assert (hit.round, live.paused) == (1, None)  # round 0 was before anybody looked
            assert live.wait_for_hit(SOON) is None
            assert live.ended


def test_a_run_without_a_tape_is_refused(tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    with fv.Monitor(store, run="bare", machine=False) as monitor:
        with monitor.round(0):
            pass
        monitor.flush()
        with pytest.raises(ConfigError, match="has no tape"):
            LiveSession(store, "bare")


class StillHeldError(Exception):
    """The run goes on waiting."""


def patience(looks: int) -> Callable[[float], None]:
    """In place of sleeping: what is thrown when a run is still held after so many looks."""
    left = [looks]

    def sleep(_: float) -> None:
        left[0] -= 1
        if left[0] <= 0:
            raise StillHeldError

    return sleep


def test_nobody_is_waited_for_unless_a_session_is_alive(tmp_path: Path) -> None:
    door, sign = RoundGate(tmp_path), tmp_path / round_gate.CLAIM_FILE
    assert not door.asked
    GateHandle(tmp_path).claim()
    assert door.asked
    for hours in (-1, 1):  # of a session that died an hour ago; and after the clock was set back by one
        os.utime(sign, (time.time() + hours * 3600,) * 2)
        assert not door.asked
    sign.unlink()
    door.wait(3)  # it left in the meantime: there is nobody to wait for


def test_a_run_is_held_until_it_is_let_go(tmp_path: Path) -> None:
    door, handle = RoundGate(tmp_path), GateHandle(tmp_path)
    handle.claim()
    with pytest.raises(StillHeldError):
        door.wait(3, patience(5))
    handle.renew(go=2)
    with pytest.raises(StillHeldError):
        door.wait(3, patience(5))
    assert handle.waiting() is None
    handle.renew(go=3)
    door.wait(3, patience(5))


def test_while_it_waits_no_clock_that_is_set_matters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    door, handle, sign = RoundGate(tmp_path), GateHandle(tmp_path), tmp_path / round_gate.CLAIM_FILE
    monkeypatch.setattr(round_gate, "STALE_SECONDS", 1.0)
    monkeypatch.setattr(round_gate, "RENEWAL_SECONDS", 0.01)
    handle.claim()
    os.utime(sign, (time.time() + 3600,) * 2)
    door.wait(3)  # nothing is renewed: it goes on, though the sign is of the future
    looks = []

    def renewing(_: float) -> None:
        looks.append(handle.waiting())
        os.utime(sign, (1000.0 + len(looks),) * 2)  # far in the past, and alive
        time.sleep(0.06)
        if len(looks) > 20:
            handle.release()

    door.wait(4, renewing)
    assert looks == [4] * 21


def test_what_a_killed_run_or_session_left_behind_is_not_believed(tmp_path: Path) -> None:
    handle, at = GateHandle(tmp_path), tmp_path / round_gate.WAITING_FILE
    at.write_text("7", encoding="ascii")
    assert handle.waiting() == 7
    os.utime(at, (time.time() - 3600,) * 2)
    assert handle.waiting() is None
    assert handle.stands()
    RoundGate(tmp_path)  # the run goes on after a crash
    assert not handle.stands()
    at.write_bytes(b"\xff")
    assert handle.waiting() is None
    (tmp_path / round_gate.CLAIM_FILE).write_bytes(b"{")  # no orders
    handle.claim()
    assert handle.waiting() is None


def test_two_sessions_at_once(tmp_path: Path) -> None:
    first, second = GateHandle(tmp_path), GateHandle(tmp_path)
    first.claim()
    first.claim()  # its own
    with pytest.raises(BusyError, match="one does at a time"):
        second.claim()
    os.utime(tmp_path / round_gate.CLAIM_FILE, (time.time() - 3600,) * 2)  # stopped for long
    second.claim()
    with pytest.raises(BusyError):
        first.renew()
    first.release()  # not its own any more
    second.renew()
    assert RoundGate(tmp_path).asked


def test_of_a_session_whose_process_is_gone_nobody_waits_ten_seconds(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from fedvitals.replay.debugger.round_gate import GateHandle; "
        "GateHandle(pathlib.Path(sys.argv[1])).claim()"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    assert RoundGate(tmp_path).asked
    GateHandle(tmp_path).claim()


def test_a_store_that_goes_away_lets_the_run_go_on(tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    with fv.Monitor(store, run="gone", tape=fv.Tape(), machine=False) as monitor:
        with monitor.round(0, torch.nn.Linear(2, 2)):
            pass
        monitor.flush()
        with LiveSession(store, "gone", Breakpoints("round 9")) as live:
            folder = tape_folder(store, monitor.run.id)
            folder.rename(tmp_path / "elsewhere")
            with pytest.raises(OSError, match="debugger"):
                live.wait_for_hit(SOON)
            (tmp_path / "elsewhere").rename(folder)
        assert live.error is not None
