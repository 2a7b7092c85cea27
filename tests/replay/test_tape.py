# SPDX-License-Identifier: Apache-2.0
"""What the tape keeps, what it lets go, and that nothing of it reaches the training."""

import io
import subprocess
import sys
import textwrap

import msgspec
import numpy as np
import pytest
import safetensors.torch
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st

import fedvitals as fv
from fedvitals import lab
from fedvitals.errors import ConfigError, StoreError
from fedvitals.protocols import Message
from fedvitals.records import Finding, Run, Suspect, Where
from fedvitals.replay.tape import gradients
from fedvitals.replay.tape.digests import digest_of, first_difference, state_digest_of
from fedvitals.replay.tape.journal import RoundEntry, RoundJournal
from fedvitals.replay.tape.objects import StateFiles, pack, unpack
from fedvitals.replay.tape.reader import TapeReader, open_tape
from fedvitals.replay.tape.tape import byte_count
from fedvitals.schedule import first
from fedvitals.store import open_reader
from fedvitals.store.read import queries
from fedvitals.store.read.ask import query

KINDS = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
RUN = Run(id="r", name="r", host="torch")


def some(seed: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return drawn.mul(10).to(dtype)


@given(
    st.lists(st.tuples(st.sampled_from(KINDS), st.lists(st.integers(0, 4), max_size=3), st.integers(0, 99)), max_size=5)
)
def test_every_bit_and_the_order_come_back(parts):
    tensors = {f"b{99 - i}": some(seed, dtype, tuple(shape)) for i, (dtype, shape, seed) in enumerate(parts)}
    back = unpack(io.BytesIO(pack(tensors)), 1 << 20)
    assert [*back] == [*tensors]
    assert [(t.dtype, t.shape) for t in back.values()] == [(t.dtype, t.shape) for t in tensors.values()]
    assert digest_of(back) == digest_of(tensors)


def test_bits_that_compare_equal_have_another_digest():
    zero, minus = {"w": torch.zeros(3)}, {"w": -torch.zeros(3)}
    assert digest_of(zero) != digest_of(minus)
    assert first_difference(zero, minus).index == (0,)
    nan = {"w": torch.full((2,), torch.nan)}
    assert first_difference(nan, {"w": torch.full((2,), torch.nan)}) is None


def test_a_name_a_type_or_a_shape_makes_another_state():
    values = torch.arange(4, dtype=torch.float32)
    seen = [{"w": values}, {"v": values}, {"w": values.view(2, 2)}, {"w": values.view(torch.int32)}]
    assert len({digest_of(tensors) for tensors in seen}) == len(seen)


def test_what_is_there_already_is_not_written_again(tmp_path):
    objects, tensors = StateFiles(tmp_path), {"w": some(1, torch.float32, (50,))}
    digest = digest_of(tensors)
    assert objects.put(digest, tensors) > 0
    assert objects.put(digest, tensors) == 0
    assert StateFiles(tmp_path).bytes == objects.bytes == objects.size(digest)


def test_a_damaged_state_is_told(tmp_path):
    objects, tensors = StateFiles(tmp_path), {"w": some(1, torch.float32, (50,))}
    digest = digest_of(tensors)
    objects.put(digest, tensors)
    (file,) = tmp_path.glob("??/*")
    file.write_bytes(pack({"w": some(2, torch.float32, (50,))}))
    with pytest.raises(StoreError, match="damaged"):
        objects.get(digest)
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(StoreError, match="cannot be read"):
        objects.get(digest)
    file.write_bytes(b"\x04" + zstandard.ZstdCompressor().compress(safetensors.torch.save({"w": torch.ones(3)})[:20]))
    with pytest.raises(StoreError, match="cannot be read"):
        objects.get(digest)


@pytest.mark.parametrize("name", ["../../etc/passwd", "", "A" * 32, "0" * 31, "0" * 31 + "/"])
def test_names_that_are_no_digests_are_refused(tmp_path, name):
    with pytest.raises(StoreError, match="no name of a state"):
        StateFiles(tmp_path).get(name)


@pytest.mark.parametrize("content", [b"", b"nonsense", zstandard.ZstdCompressor().compress(b'{"round": "x"}')])
def test_a_damaged_round_is_told(tmp_path, content):
    journal = RoundJournal(tmp_path)
    journal.write(RoundEntry(3, {}))
    (tmp_path / "rounds" / "00000003").write_bytes(content)
    with pytest.raises(StoreError, match="Round 3 on the tape cannot be read"):
        journal.read(3)


@pytest.mark.parametrize(
    ("text", "bytes_"), [(5, 5), ("2 GB", 2 * 10**9), ("1.5kb", 1500), ("7", 7), ("30 MB", 3 * 10**7)]
)
def test_sizes_as_people_write_them(text, bytes_):
    assert byte_count(text, "budget") == bytes_


@pytest.mark.parametrize("size", [0, -1, "", "GB", "many", "-3 MB", None, True, float("nan")])
def test_sizes_that_are_none(size):
    with pytest.raises(ConfigError, match="number of bytes"):
        byte_count(size, "budget")


@pytest.mark.parametrize("how", [{"every": 0}, {"updates": -1}, {"budget": "much"}])
def test_settings_that_cannot_be_meant(how):
    with pytest.raises(ConfigError):
        fv.Tape(**how)


def test_a_monitor_takes_tapes_only():
    with pytest.raises(ConfigError, match=r"fv.Tape\(budget"):
        fv.Monitor(None, tape=True)


# -- what is kept -----------------------------------------------------------------------------------------------------


def drive(tape, rounds, clients=4, size=200, findings=None):
    """A host that hands over states and updates, without any training."""
    told = []
    for number in range(rounds):
        state = {"model": {"w": some(number, torch.float32, (size,))}}
        tape.begin(number, state, {})
        tape.messages(
            number,
            [
                Message(f"c{i}", {"w": some(5000 + 1000 * number + i, torch.float32, (size,))}, 5.0)
                for i in range(clients)
            ],
        )
        tape.end(number, {"model": {"w": some(number + 1, torch.float32, (size,))}}, {}, {"loss": 1.0 / (number + 1)})
        for finding in (findings or {}).get(number, ()):
            tape.write([finding])
        tape.flush()
        told.append(TapeReader(tape.folder).bytes)
    return told


def opened(tmp_path, **how):
    tape, told = fv.Tape(**how), []
    tape.open(tmp_path, RUN, lambda *event: told.append(event))
    tape.describe({})
    return tape, told


def finding_on(number, node):
    return Finding(Where("r", number), 0.0, "BYZANTINE", "critical", 0.9, "It lies.", suspects=(Suspect(node, 1.0),))


def test_states_every_few_rounds_the_last_one_and_the_last_updates(tmp_path):
    tape, _ = opened(tmp_path, every=4, updates=2)
    drive(tape, 10)
    tape.close()
    reader = TapeReader(tape.folder)
    assert [c.round for c in reader.coverage() if c.stored] == [0, 4, 8, 9]
    assert reader.has_state(10)
    assert [c.updates for c in reader.coverage()] == [0] * 8 + [4, 4]
    assert torch.equal(reader.update(9, "c2")["w"], some(14002, torch.float32, (200,)))
    assert reader.nearest(6) == 4


def test_around_a_finding_states_and_the_suspects_updates_are_kept(tmp_path):
    tape, _ = opened(tmp_path, every=50, updates=1)
    drive(tape, 12, findings={5: [finding_on(5, "c2")]})
    tape.close()
    reader = TapeReader(tape.folder)
    stored = [c.round for c in reader.coverage() if c.stored]
    assert {4, 5, 6} <= set(stored)
    assert reader.update(5, "c2") is not None
    assert reader.update(6, "c2") is not None
    assert reader.update(5, "c1") is None


def test_durable_updates_are_there_at_once_and_go_in_time(tmp_path):
    tape, _ = opened(tmp_path, updates=2, durable=True)
    drive(tape, 6, findings={2: [finding_on(2, "c1")]})
    reader = TapeReader(tape.folder)  # it is still being written
    assert [c.updates for c in reader.coverage()] == [0, 1, 4, 1, 4, 4]
    tape.close()


def test_a_full_tape_thins_itself_oldest_healthy_rounds_first(tmp_path):
    tape, told = opened(tmp_path, every=1, updates=1, durable=True, budget=16000)
    sizes = drive(tape, 30, findings={3: [finding_on(3, "c0")]})
    tape.close()
    reader = TapeReader(tape.folder)
    assert reader._objects.bytes <= 16000
    assert max(sizes) < 16000 + 30 * 2000  # entries are small, and not part of it
    stored = [c.round for c in reader.coverage() if c.stored]
    assert {2, 3, 4} & set(stored)
    assert stored[-3:] == [27, 28, 29]
    assert 10 not in stored
    assert [c.how for c in reader.coverage() if c.round == 10] != ["stored"]
    assert "tape.thinned" in {name for _, name, _ in told}


def test_what_waits_to_be_written_is_bounded(tmp_path):
    """A tape that cannot follow loses messages and says so; nobody waits."""
    tape, _ = opened(tmp_path, memory=50_000_000)
    large = {"model": {"w": torch.zeros(10_000_000)}}  # takes a while
    tape.begin(0, large, {})
    for node in ("c0", "c1", "c2"):
        tape.messages(0, [Message(node, large["model"], 1.0)])
    tape.end(0, large, {}, {})
    tape.close()
    entry = TapeReader(tape.folder).entry(0)
    assert entry.lost > 0
    assert entry.lost + len(entry.came) == 3
    assert tape.lost >= entry.lost


@pytest.mark.thorough
def test_a_tape_that_cannot_write_leaves_the_training_alone(tmp_path):
    """A real limit of the system: files above 20 kB cannot be written."""
    code = f"""
        import sys
        sys.dont_write_bytecode = True  # else a module's would be cut, too
        import resource
        import fedvitals as fv
        from fedvitals import lab
        plain = lab.run(lab.Experiment(model="cnn", clients=3, rounds=3), workers=1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
        tape = fv.Tape(every=1, folder={str(tmp_path)!r})
        with fv.Monitor(None, host="lab", tape=tape) as monitor:
            taped = lab.run(lab.Experiment(model="cnn", clients=3, rounds=3), monitor, workers=1)
        print((plain.state == taped.state).all().item(), sorted(p.name for p in tape.folder.glob("rounds/*")))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True, timeout=120
    )
    assert "True ['00000000', '00000001', '00000002']" in done.stdout
    (folder,) = tmp_path.iterdir()
    assert not [*folder.glob("objects/*/*")]


def test_a_folder_that_cannot_be_made_costs_the_tape_alone(tmp_path):
    (tmp_path / "tape").write_text("in the way")
    with fv.Monitor(tmp_path / "runs.db", host="lab", tape=fv.Tape(folder=tmp_path / "tape")) as monitor:
        result = lab.run(lab.Experiment(model="mlp", clients=3, rounds=2), monitor, workers=1)
    assert len(result.rounds) == 2
    with open_reader(tmp_path / "runs.db") as reader:
        assert queries.list_runs(reader)[0].rounds == 2
        assert [e for e in queries.events(reader, monitor.run.id) if e.name in ("tape.failed", "monitor.error")]


def test_the_store_lists_what_is_kept(tmp_path):
    with fv.Monitor(tmp_path / "runs.db", host="lab", tape=fv.Tape(every=2)) as monitor:
        lab.run(lab.Experiment(model="mlp", clients=3, rounds=4), monitor, workers=1)
    tape = open_tape(tmp_path / "runs.db", monitor.run.id)
    with open_reader(tmp_path / "runs.db") as reader:
        rows = query(reader, "SELECT round, kind, digest FROM snapshots ORDER BY round, node").rows
    models = {row[0]: row[2] for row in rows if row[1] == "global"}
    assert {0, 2} <= set(models) <= set(tape.rounds)  # the state after the last round is listed as that round
    assert models[2] == tape.entry(2).state["model"].digest
    assert sum(row[1] == "update" for row in rows) == 3


def test_losses_weights_and_failures_are_in_the_journal(tmp_path):
    e = lab.Experiment(model="mlp", clients=4, rounds=3, faults=[lab.crash(nodes=["c1"], since=1)])
    with fv.Monitor(tmp_path / "runs.db", host="lab", tape=fv.Tape()) as monitor:
        result = lab.run(e, monitor, workers=1)
    entry = open_tape(tmp_path / "runs.db", monitor.run.id).entry(1)
    assert [came.node for came in entry.came] == ["c0", "c1", "c2", "c3"]
    assert (entry.reply_of("c1").mark, entry.reply_of("c1").used) == (None, False)
    assert entry.reply_of("c1").error
    recorded = np.frombuffer(entry.reply_of("c0").losses, "<f4")
    assert recorded.tobytes() == result.rounds[1].losses["c0"].numpy().tobytes()
    assert entry.reply_of("c0").weight > 0
    assert entry.metrics["accuracy"] == pytest.approx(result.rounds[1].metrics["accuracy"])


# -- gradients ---------------------------------------------------------------------------------------------------------


def watched(tmp_path, privacy):
    tape = fv.Tape()
    probes = ["light", tape.gradients(["c1"], rounds=2, steps=first(2))]
    e = lab.Experiment(model="mlp", clients=3, rounds=4)
    with fv.Monitor(tmp_path / "runs.db", host="lab", privacy=privacy, probes=probes, tape=tape) as monitor:
        lab.run(e, monitor, engine="sequential", workers=1)
    return open_tape(tmp_path / "runs.db", monitor.run.id), monitor


def test_gradients_of_chosen_clients_on_a_schedule(tmp_path):
    tape, _ = watched(tmp_path, 4)
    kept = [(one.round, one.node, one.step) for one in gradients.recorded_gradients(tape.folder)]
    assert kept == [(0, "c1", 0), (0, "c1", 1), (2, "c1", 0), (2, "c1", 1)]
    tensors = gradients.read_gradient(tape.folder, 2, "c1", 1)
    assert tuple(tensors) == tape.setting.layers
    assert float(tensors["head.weight"].abs().sum()) > 0
    assert gradients.read_gradient(tape.folder, 1, "c1", 0) is None


def test_gradients_need_privacy_level_four(tmp_path):
    tape, monitor = watched(tmp_path, 3)
    assert gradients.recorded_gradients(tape.folder) == []
    with open_reader(tmp_path / "runs.db") as reader:
        said = [event for event in queries.events(reader, monitor.run.id) if event.name == "tape.gradients"]
    assert "privacy=4" in said[0].message


def test_marks_of_what_is_not_finite_can_be_written(tmp_path):
    journal = RoundJournal(tmp_path)
    journal.write(RoundEntry(0, {"model": state_digest_of({"w": torch.tensor([torch.inf])})}, metrics={"loss": None}))
    assert journal.read(0).state["model"].norms == (None,)
    assert msgspec.json.encode(journal.read(0))
