# SPDX-License-Identifier: Apache-2.0
"""A tape from somebody else: none of its code is run, and none of its files can fill the memory."""

import contextlib
import json
import os
import struct
from pathlib import Path

import pytest
import torch
import zstandard

import fedvitals as fv
from fedvitals.cli.main import main
from fedvitals.errors import ConfigError, StoreError
from fedvitals.hosts.flower.rerun.client import rerun_client
from fedvitals.hosts.flower.tape.entries import ClientTapeFolder, ReceivedMessage
from fedvitals.replay.debugger.round_gate import CLAIM_FILE, WAITING_FILE, GateHandle
from fedvitals.replay.tape import gradients, unpack_limits
from fedvitals.replay.tape.digests import digest_of, state_digest_of
from fedvitals.replay.tape.journal import RoundEntry, RoundJournal, TapeSettings
from fedvitals.replay.tape.objects import StateFiles
from fedvitals.replay.tape.reader import TapeReader

MILLION = 10**6


def exit_code(words):
    with pytest.raises(SystemExit) as end:
        main([str(word) for word in words])
    return int(end.value.code or 0)


# -- code -------------------------------------------------------------------------------------------------------------

APP = """
[tool.flwr.app.components]
clientapp = "{module}:app"
serverapp = "{module}:app"
"""
HOSTILE = """
from pathlib import Path
from flwr.clientapp import ClientApp
Path({marker!r}).write_text("code of the tape ran")
app = ClientApp()
"""
METADATA = {
    "run_id": 1, "message_id": "m", "src_node_id": 1, "dst_node_id": 4711, "reply_to_message_id": "", "group_id": "1",
    "created_at": 0.0, "ttl": 3600.0, "message_type": "train",
}  # fmt: skip


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    """The folder of a tape that names an app inside of itself; `ran` would be written by the code of that app."""
    folder, code = tmp_path / "site", tmp_path / "site" / ".cache"
    code.mkdir(parents=True)
    (code / "pyproject.toml").write_text(APP.format(module="hostile_app_of_a_tape"))
    (code / "hostile_app_of_a_tape.py").write_text(HOSTILE.format(marker=str(tmp_path / "ran")))
    monkeypatch.chdir(tmp_path)
    return folder


def write_message(folder, app, **changes):
    context = {"run_id": 1, "node_id": 4711, "node_config": {}, "run_config": {}}
    fields = {"run": "flower-1", "node": "4711", "round": 1, "phase": "train", "at": 0.0, "metadata": METADATA}
    fields |= {"content": {}, "state": {}, "context": context, "rng": {}, "threads": 1, "machine": {}, "app": app}
    ClientTapeFolder(folder).write(ReceivedMessage(**{**fields, **changes}))


@pytest.mark.parametrize("more", [[], ["--pdb"], ["--verify"], ["--json"]], ids=str)
@pytest.mark.parametrize("named", ["absolute", "relative", "dotted", "link"])
def test_the_app_that_a_tape_names_is_shown_and_not_run(hostile, tmp_path, capsys, more, named):
    code = {
        "absolute": hostile / ".cache",
        "relative": Path("site/.cache"),
        "dotted": Path("site/flower-1/../.cache"),
        "link": tmp_path / "link",
    }[named]
    (tmp_path / "link").symlink_to(hostile / ".cache")
    write_message(hostile, str(code))
    words = ["replay", "flower-1", "--round", 1, "--node", "4711", "--tape", hostile]
    assert exit_code([*words, *more]) == 2
    answer = capsys.readouterr().err
    assert f"This tape says its app is in {code}." in answer
    assert "part of the tape itself" in answer
    assert "Nothing was run" in answer
    assert f"--round 1 --node 4711 --tape {hostile} --app {code}" in answer
    assert not (tmp_path / "ran").exists()


def test_the_current_folder_is_no_app_unless_it_is_named(hostile, tmp_path, monkeypatch, capsys):
    write_message(hostile, None)
    monkeypatch.chdir(hostile / ".cache")
    assert exit_code(["replay", "flower-1", "--round", 1, "--node", "4711", "--tape", hostile]) == 2
    assert "does not say where its app is" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


def test_in_python_the_app_has_to_be_named_too(hostile, tmp_path):
    write_message(hostile, str(hostile / ".cache"))
    for debugger in (False, True):
        with pytest.raises(ConfigError, match="Nothing was run"):
            rerun_client(hostile, 1, "4711", run="flower-1", debugger=debugger)
    assert not (tmp_path / "ran").exists()


def test_what_a_tape_says_of_its_app_moves_no_cursor_and_quotes_itself(hostile, capsys):
    write_message(hostile, "\x1b[2J/app; rm -rf ~", run="flower-1", node="4711")
    assert exit_code(["replay", "flower-1", "--round", 1, "--node", "4711", "--tape", hostile]) == 2
    answer = capsys.readouterr().err
    assert "\x1b" not in answer
    assert "--app '?[2J/app; rm -rf ~'" in answer


# -- sizes ------------------------------------------------------------------------------------------------------------


def packed_zeros(head: bytes, count: int, tail: bytes = b"", **settings) -> bytes:
    """A zstd frame of `head`, then `count` zeros, then `tail`; made without holding them."""
    stream = zstandard.ZstdCompressor(level=3, **settings).compressobj(size=len(head) + count + len(tail))
    parts = [stream.compress(head)]
    parts += [stream.compress(bytes(min(MILLION, count - at))) for at in range(0, count, MILLION)]
    return b"".join((*parts, stream.compress(tail), stream.flush()))


def header(count: int) -> bytes:
    written = json.dumps({"w": {"dtype": "F32", "shape": [count // 4], "data_offsets": [0, count]}}).encode()
    return struct.pack("<Q", len(written)) + written


def tape_with(folder: Path, states: dict[str, dict[str, torch.Tensor]], rounds: int = 1) -> TapeReader:
    """A tape of a plain loop whose rounds all begin with these states."""
    journal, objects = RoundJournal(folder), StateFiles(folder / "objects")
    journal.set(TapeSettings(run=folder.name, name=folder.name, host="torch", description={"kind": "loop"}))
    marks = {}
    for name, tensors in states.items():
        marks[name] = state_digest_of(tensors)
        objects.put(marks[name].digest, tensors)
    for number in range(rounds):
        journal.write(RoundEntry(number, marks))
    return TapeReader(folder)


FEW = {"w": torch.arange(5.0)}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (lambda: packed_zeros(header(600 * MILLION), 600 * MILLION), "would unpack to 600,0"),
        (lambda: packed_zeros(header(20), 600 * MILLION), "does not hold as many bytes as its header says"),
        (lambda: packed_zeros(b"", 600 * MILLION), "cannot be read"),
        (lambda: packed_zeros(struct.pack("<Q", 600 * MILLION), 600 * MILLION), "its header is missing, or has more"),
        (lambda: packed_zeros(header(20), 600 * MILLION, write_content_size=False), "does not hold as many"),
        (lambda: packed_zeros(header(2**70), 20), "would unpack to"),
        (lambda: packed_zeros(header(-4), 20), "cannot be read"),
        (lambda: packed_zeros(struct.pack("<Q", 9 * MILLION) + b'{"w":' + b"[" * (9 * MILLION), 0), "values, where"),
    ],
    ids=["declared", "hidden", "zeros", "header", "no content size", "shape", "negative", "nested header"],
)
def test_a_state_that_would_fill_the_memory_is_refused_and_named(tmp_path, content, reason):
    tape = tape_with(tmp_path, {"model": FEW, "memory/m": {"w": torch.ones(3)}})
    file = tmp_path / "objects" / digest_of(FEW)[:2] / digest_of(FEW)
    file.write_bytes(b"\x04" + content())
    assert file.stat().st_size < 200_000
    with pytest.raises(StoreError, match=reason) as refused:
        tape.tensors(digest_of(FEW))
    assert str(file) in str(refused.value)
    assert tape.tensors(digest_of({"w": torch.ones(3)}))["w"].tolist() == [1, 1, 1]


def test_a_large_state_of_zeros_is_read_beside_others_of_its_size_or_when_allowed(tmp_path, monkeypatch):
    monkeypatch.setattr(unpack_limits, "SMALL_STATE", 10_000)
    monkeypatch.setattr(unpack_limits, "SMALL_ROUND", 10_000)
    zeros, drawn = {"w": torch.zeros(100_000)}, {"w": torch.randn(100_000)}
    alone = tape_with(tmp_path / "alone", {"model": zeros})
    with pytest.raises(StoreError, match="FEDVITALS_LARGEST_STATE"):
        alone.state(0)
    monkeypatch.setenv("FEDVITALS_LARGEST_STATE", "1 MB")
    assert not alone.state(0)["model"]["w"].any()
    monkeypatch.setenv("FEDVITALS_LARGEST_STATE", "much")
    with pytest.raises(ConfigError, match="FEDVITALS_LARGEST_STATE is a number of bytes"):
        alone.state(0)
    monkeypatch.delenv("FEDVITALS_LARGEST_STATE")
    both = tape_with(tmp_path / "both", {"model": drawn, "memory/m": zeros, "memory/v": zeros})
    state = both.state(0)
    assert digest_of(state["model"]) == digest_of(drawn)
    assert state["memory/m"] is state["memory/v"]


def test_many_states_of_one_round_are_bounded_together(tmp_path, monkeypatch):
    monkeypatch.setattr("fedvitals.replay.tape.reader.SMALL_ROUND", 10 * MILLION)
    monkeypatch.setattr(unpack_limits, "SMALL_ROUND", 10 * MILLION)
    zeros = {"w": torch.zeros(MILLION)}
    tape = tape_with(tmp_path, {f"memory/{number}": zeros for number in range(3)})
    with pytest.raises(StoreError, match="state of round 0 cannot be read: it would unpack to 12,000,000"):
        tape.state(0)


def entry_text(extra: str) -> bytes:
    return ('{"round": 1, "state": {}, "notes": {"x": ' + extra + "}}").encode()


@pytest.mark.thorough
@pytest.mark.parametrize(
    "text",
    [
        lambda: entry_text("[" + "[]," * (20 * MILLION) + "0]"),
        lambda: entry_text("[" + "0," * (30 * MILLION) + "0]"),
        lambda: entry_text('"' + "x" * (70 * MILLION) + '"'),
        lambda: entry_text("[" * 100_000 + "]" * 100_000),
    ],
    ids=["lists", "numbers", "text", "nested"],
)
def test_a_round_that_would_fill_the_memory_is_named_and_the_others_are_read(tmp_path, capsys, text):
    with fv.Monitor(tmp_path / "runs.db", run="loop", machine=False, tape=fv.Tape(every=1), id="loop1") as monitor:
        for number in range(3):
            with monitor.round(number, torch.nn.Linear(2, 1)):
                pass
    file = tmp_path / "runs.db.d" / "tape" / "loop1" / "rounds" / "00000001"
    file.write_bytes(zstandard.ZstdCompressor(level=3).compress(text()))
    assert file.stat().st_size < 100_000
    journal = RoundJournal(file.parent.parent)
    with pytest.raises(StoreError, match="Round 1 on the tape cannot be read") as refused:
        journal.read(1)
    assert str(file) in str(refused.value)
    assert exit_code(["replay", "loop", "--store", tmp_path / "runs.db"]) == 0
    shown = capsys.readouterr().out
    assert "Round 1 on the tape cannot be read" in shown
    assert TapeReader(file.parent.parent).state(2)["model"]["weight"].shape == (1, 2)


def test_a_message_that_would_fill_the_memory_is_named(tmp_path):
    write_message(tmp_path, None)
    (file,) = tmp_path.glob("*/4711/*")
    file.write_bytes(zstandard.ZstdCompressor().compress(entry_text("[" + "[]," * (15 * MILLION) + "0]")))
    with pytest.raises(StoreError, match="cannot be read: it holds about 30000") as refused:
        ClientTapeFolder(tmp_path).read("flower-1", "4711", 1, "train")
    assert str(file) in str(refused.value)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
@pytest.mark.parametrize("kind", ["pipe", "device", "loop of links", "folder"])
def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path, kind):
    tape = tape_with(tmp_path, {"model": FEW}, rounds=2)
    for file in (tmp_path / "objects" / digest_of(FEW)[:2] / digest_of(FEW), tmp_path / "rounds" / "00000001"):
        file.unlink()
        if kind == "pipe":
            os.mkfifo(file)
        elif kind == "folder":
            file.mkdir()
        else:
            file.symlink_to("/dev/zero" if kind == "device" else file)
    with pytest.raises(StoreError, match="cannot be read"):
        tape.tensors(digest_of(FEW))
    with pytest.raises(StoreError, match="Round 1 on the tape cannot be read"):
        tape.entry(1)
    again = TapeReader(tmp_path)
    assert [covered.how for covered in again.coverage()] == ["digests only", "cannot be read"]


def test_a_setting_of_too_many_values_is_refused(tmp_path):
    tape_with(tmp_path, {})
    (tmp_path / "tape.json").write_text('{"told": {"x": [' + "[]," * MILLION + "0]}}")
    with pytest.raises(StoreError, match=r"tape.json cannot be read: it holds about"):
        TapeReader(tmp_path)


def test_holding_a_run_writes_through_no_link_in_its_tape(tmp_path):
    precious, folder = tmp_path / "precious", tmp_path / "tape"
    folder.mkdir()
    precious.write_text("mine")
    for name in (f"{CLAIM_FILE}.partial", f"{CLAIM_FILE}.lock", CLAIM_FILE):
        (folder / name).symlink_to(precious)
    with contextlib.suppress(OSError):
        GateHandle(folder).claim()
    assert precious.read_text() == "mine"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_notes_that_are_pipes_are_not_waited_for(tmp_path):
    (tmp_path / gradients.FOLDER).mkdir()
    for file in (tmp_path / CLAIM_FILE, tmp_path / WAITING_FILE, tmp_path / gradients.FOLDER / "a.json"):
        os.mkfifo(file)
    handle = GateHandle(tmp_path)
    assert handle.waiting() is None
    assert gradients.recorded_gradients(tmp_path) == []
    handle.claim()
    handle.release()


def test_links_do_not_raise_the_limit_on_unpacking(tmp_path):
    """The limit follows from what a tape takes on disk: links take nothing, wherever they lead."""
    large, names = tmp_path / "large", [f"ab{i:030x}" for i in range(100)]
    large.write_bytes(os.urandom(5 << 20))
    (tmp_path / "states" / "ab").mkdir(parents=True)
    before = StateFiles(tmp_path / "states").limit_together()
    for name in names:
        (tmp_path / "states" / "ab" / name).symlink_to(large)
    (tmp_path / "states" / "cd").mkdir()
    (tmp_path / "states" / "cd" / f"cd{0:030x}").write_bytes(large.read_bytes())
    for i in range(10, 99):
        (tmp_path / "states" / str(i)).symlink_to(tmp_path / "states" / "cd")
    assert StateFiles(tmp_path / "states").limit_together() == before
