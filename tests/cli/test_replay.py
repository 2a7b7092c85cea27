# SPDX-License-Identifier: Apache-2.0
"""`fedvitals replay`: the overview, the proof and its exit codes, scripts, and the prompt on a terminal."""

import contextlib
import os
import pty
import select
import shutil
import signal
import sys
import time

import msgspec
import pytest
from flwr.serverapp.strategy import FedAvg

import fedvitals as fv
from fedvitals.replay.tape.reader import open_tape
from fedvitals.store import open_reader
from fedvitals.store.read import queries
from support.conditions import holds_for_each
from support.flower.federation import client_app, federate
from support.recorded_run import record
from support.verbs import result, run


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return record(tmp_path_factory.mktemp("rewound"))


def test_without_a_terminal_it_says_what_can_be_replayed(store, capsys):
    code, out, _ = run(capsys, "replay", "rewound", "--store", store)
    assert code == 0
    assert "host lab, 6 rounds, tape of" in out
    assert "run again from" in out
    told = result(capsys, "replay", "rewound", "--store", store)
    assert [one["round"] for one in told["coverage"]] == [*range(6)]
    assert told["bytes"] > 0
    assert {one["how"] for one in told["coverage"]} > {"stored"}


def test_the_proof_holds(store, capsys):
    code, out, _ = run(capsys, "replay", "rewound", "--verify", "--store", store)
    assert code == 0
    assert "rounds 0–5: proved, to the last bit" in out
    told = result(capsys, "replay", "rewound", "--verify", "--rounds", "2-4", "--node", "c4", "--store", store)
    assert (told["holds"], told["proved"], told["mismatch"]) == (True, [2, 3, 4], None)
    told = result(capsys, "replay", "rewound", "--verify", "--round", "3", "--workers", "2", "--store", store)
    assert told["proved"] == [3]


def test_a_tape_that_is_not_the_run_is_told_by_exit_code_1(store, tmp_path, capsys):
    """Another weight of one client on the tape: the first round and client that differ are named."""
    shutil.copytree(store.parent, tmp_path / "copy")
    copy = tmp_path / "copy" / store.name
    with open_reader(copy) as reader:
        tape = open_tape(copy, queries.find_run(reader, "rewound"))
    entry = tape.entry(2)
    came = [msgspec.structs.replace(one, weight=one.weight + (one.node == "c1")) for one in entry.came]
    tape.journal.write(msgspec.structs.replace(entry, came=tuple(came)))
    code, out, _ = run(capsys, "replay", "rewound", "--verify", "--store", copy)
    assert code == 1
    assert "The weight differs: round 2, client c1" in out
    code, out, _ = run(capsys, "replay", "rewound", "--verify", "--store", copy, "--json")
    assert code == 1
    assert '"holds": false' in out


def test_commands_come_from_the_line_a_file_and_a_pipe(store, tmp_path, capsys, monkeypatch):
    code, out, _ = run(capsys, "replay", "rewound", "-c", "goto 2; into c4", "-c", "print loss", "--store", store)
    assert code == 0
    assert "round 2, in c4, step 0 of 12" in out
    assert "loss of c4, round 2" in out
    script = tmp_path / "look.txt"
    script.write_text("goto 3  # where c2 failed\n\nclients\nquit\nnonsense\n", encoding="utf-8")
    told = result(capsys, "replay", "rewound", "--script", script, "--store", store)
    assert [one["command"] for one in told] == ["goto 3", "clients"]
    assert any("RuntimeError" in str(row) for row in told[1]["rows"])
    code, out, _ = run(capsys, "replay", "rewound", "--round", "1", "--node", "c1", "--store", store)
    assert "round 1, in c1, step 0" in out


@pytest.mark.thorough
def test_plots_and_exports_are_files(store, tmp_path, capsys):
    picture, table = tmp_path / "loss.png", tmp_path / "updates.csv"
    line = f"plot loss c4 {picture}; print update; export {table}"
    code, _, _ = run(capsys, "replay", "rewound", "-c", line, "--store", store)
    assert code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert table.read_text().startswith("client,norm")


@pytest.mark.parametrize(
    ("arguments", "taught"),
    [
        (["rewund"], "Did you mean 'rewound'"),
        (["rewound", "-c", "where; goto x"], "`goto x`: The command is goto 12"),
        (["rewound", "--script", "/nowhere/at/all"], "cannot be read"),
        (["rewound", "--pdb"], "--pdb needs --round and --node"),
        (["rewound", "--rounds", "1-2"], "goes with --verify"),
        (["rewound", "--verify", "--rounds", "one"], "3-9"),
        (["rewound", "--verify", "--rounds", "1-99"], "It has: 0–5"),
        (["rewound", "--round", "99"], "It has: 0–5"),
        (["rewound", "--loop", "nowhere:parts", "--verify"], "no module 'nowhere'"),
    ],
)
def test_wrong_use_is_taught_with_exit_code_2(store, capsys, arguments, taught):
    code, _, error = run(capsys, "replay", *arguments, "--store", store)
    assert code == 2
    assert taught in " ".join(error.split())


def test_the_tape_of_a_flower_run_is_looked_at_and_its_aggregations_proved(tmp_path, capsys):
    """What clients sent is there; how they train is told to be elsewhere, and where."""
    store = tmp_path / "runs.db"
    with fv.Monitor(store, "flowers", tape=fv.Tape(every=1, updates=9, durable=True), machine=False) as monitor:
        federate(FedAvg(), client_app(), monitor, rounds=2)
    code, out, _ = run(capsys, "replay", "flowers", "--verify", "--store", store)
    assert code == 0
    assert out.count("The same bits") == 2
    code, out, _ = run(capsys, "replay", "flowers", "--store", store)
    assert "host flower" in out
    told = result(capsys, "replay", "flowers", "-c", "goto 2; clients; print update; print state", "--store", store)
    nodes = [row[0] for row in told[1]["rows"]]
    assert [row[0] for row in told[2]["rows"]] == nodes
    assert holds_for_each(row[1] > 0 for row in told[2]["rows"])
    code, out, _ = run(capsys, "replay", "flowers", "-c", f"diff {nodes[0]} others", "--store", store)
    assert "cosine to mean" in out
    code, _, error = run(capsys, "replay", "flowers", "-c", f"into {nodes[0]}", "--store", store)
    assert code == 2
    assert "--tape DIR" in error


@pytest.mark.thorough
def test_the_prompt_completes_repeats_teaches_and_is_left_by_ctrl_d(store, tmp_path):
    """On a terminal of its own."""
    process, terminal = pty.fork()
    if process == 0:
        os.environ |= {"XDG_STATE_HOME": str(tmp_path), "TERM": "xterm"}
        os.execv(sys.executable, [sys.executable, "-m", "fedvitals", "replay", "rewound", "--store", str(store)])
    screen = _Screen(terminal)
    assert "host lab, 6 rounds" in screen.until("(replay 0)")
    for typed, expected in (
        ("got\t 2\n", "(replay 2)"),
        ("into c4\n", "(replay 2 c4:0)"),
        ("step 2\n", "(replay 2 c4:2)"),
        ("\n", "(replay 2 c4:4)"),
        ("bogus\n", "Unknown command 'bogus'"),
        ("verify 0-2\n", "rounds 0–2: proved"),
        ("out\n", "(replay 2) "),
    ):
        os.write(terminal, typed.encode())
        screen.until(expected)
        if not expected.startswith("(replay"):
            screen.until("(replay")  # keys typed before the prompt may be lost
    os.write(terminal, b"\x04")
    assert os.waitstatus_to_exitcode(_ended(process, terminal)) == 0
    assert "into c4" in (tmp_path / "fedvitals" / "replay_history").read_text()


class _Screen:
    """What a terminal shows; text that follows the expected one is kept for the next call."""

    def __init__(self, terminal: int) -> None:
        self._terminal = terminal
        self._unread = b""

    def until(self, expected: str) -> str:
        """Read up to and including the expected text."""
        deadline = time.monotonic() + 120
        while expected.encode() not in self._unread:
            assert time.monotonic() < deadline, f"no {expected!r} in: {self._unread.decode()}"
            if select.select([self._terminal], [], [], 0.2)[0]:
                self._unread += os.read(self._terminal, 65536)
        seen, _, self._unread = self._unread.partition(expected.encode())
        return seen.decode() + expected


def _ended(process: int, terminal: int) -> int:
    """Its output has to be read for it to end."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return status
        with contextlib.suppress(OSError):  # its end of the terminal is closed
            if select.select([terminal], [], [], 0.1)[0]:
                os.read(terminal, 65536)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    pytest.fail("Ctrl-D did not end it")


@pytest.mark.parametrize("wrong", [("--node", "c99"), ("--rounds", "4-2")])
def test_what_compares_nothing_proves_nothing(store, capsys, wrong):
    code, out, told = run(capsys, "replay", "rewound", "--verify", *wrong, "--store", store)
    assert (code, out) == (2, "")
    assert "Unknown client 'c99'" in told or "lies before the first" in told


def test_a_proof_says_whose_it_is(store, capsys):
    code, out, _ = run(capsys, "replay", "rewound", "--verify", "--round", "2", "--node", "c4", "--store", store)
    assert code == 0
    assert out.startswith("updates of c4, round 2: proved, to the last bit\n  1 round (2) run again")
