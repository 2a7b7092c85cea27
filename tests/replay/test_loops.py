# SPDX-License-Identifier: Apache-2.0
"""Plain loops on a tape: the monitor feeds it, the loop stays what it was, and two functions run it again."""

import copy
import random
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import fedvitals as fv
from fedvitals.errors import ConfigError, StoreError
from fedvitals.loop_tape import TensorCopies, random_states, set_random_states
from fedvitals.protocols import Replayable
from fedvitals.replay.debugger.commands import Interpreter
from fedvitals.replay.player.loop_player import LoopPlayer, load_loop, loop_player
from fedvitals.replay.player.proof import verify
from fedvitals.replay.tape.digests import state_digest_of
from fedvitals.replay.tape.journal import RoundJournal
from fedvitals.replay.tape.reader import open_tape
from fedvitals.store import open_reader
from support.conditions import holds_for_each
from support.paths import ROOT
from support.replayed_loop import NODES, ROUNDS, Loop, net
from support.verbs import result, run


def by_hand(states, counts):
    total = sum(counts)
    return {
        name: sum(state[name] * (n / total) for state, n in zip(states, counts, strict=True)).to(states[0][name].dtype)
        for name in states[0]
    }


def run_loop(store, tape=None, average=by_hand, outside=False, rounds=ROUNDS):
    """The loop as a user writes it. Gives its last model, and the monitor."""
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(3)
    loop, model = Loop(), net()
    with fv.Monitor(store, run="loop", tape=tape, detectors=(), strict=True, machine=False) as monitor:
        for r in range(rounds):
            states = []
            with monitor.round(r, model):
                for node in NODES:
                    local = copy.deepcopy(model)
                    with monitor.client(node, local, data=loop.data[node], loss=functional.cross_entropy):
                        loop.train(node, local, r, lambda loss: monitor.log(loss=loss))
                    states.append(local.state_dict())
                mean = average(states, [len(data) for data in loop.data.values()])
                if not outside:
                    model.load_state_dict(mean)
                monitor.log(accuracy=0.5 + r / 100)
            if outside:
                model.load_state_dict(mean)
    return model, monitor


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    store = tmp_path_factory.mktemp("loop") / "runs.db"
    model, monitor = run_loop(store, fv.Tape())
    return SimpleNamespace(store=store, run=monitor.run.id, model=model, after=random_states())


@pytest.fixture
def tape(recorded):
    return open_tape(recorded.store, recorded.run)


def test_a_loop_is_the_same_to_the_last_bit_with_a_tape_and_without(recorded, tmp_path):
    model, _ = run_loop(tmp_path / "runs.db")
    assert random_states() == recorded.after  # torch's, NumPy's and Python's generators
    for name, tensor in recorded.model.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name


def test_the_tape_has_what_the_loop_did(tape, recorded):
    assert tape.rounds == list(range(ROUNDS))
    assert tape.setting.host == "torch"
    assert tape.setting.description["kind"] == "loop"
    assert list(tape.setting.layers) == [*recorded.model.state_dict()]
    entry = tape.entry(2)
    assert [came.node for came in entry.came] == [*NODES]
    assert [came.weight for came in entry.came] == [30, 28, 26]
    assert [len(came.losses) // 4 for came in entry.came] == [3, 3, 3]
    assert entry.metrics == {"accuracy": 0.52}
    assert entry.after["model"] == tape.entry(3).state["model"]
    with open_reader(recorded.store) as reader:
        assert reader.history(recorded.run).rounds() == tape.rounds  # the state after the last is no round
    last = tape.state(ROUNDS)["model"]
    assert holds_for_each(torch.equal(last[name], tensor) for name, tensor in recorded.model.state_dict().items())


def test_all_rounds_are_proved_and_the_average_is_named(tape):
    with LoopPlayer(tape, Loop().restore, Loop().train) as player:
        proof = verify(player)
    assert proof.holds, proof.mismatch
    assert (proof.exact, proof.proved) == (True, list(range(ROUNDS)))
    assert player.averaged == "by samples, shares added up"
    assert proof.begun == "the state stored before round 0"
    assert player.averaged in proof.remark


def test_one_client_of_one_round_is_proved_without_the_others(tape):
    trained = []

    def train(node, model, number):
        trained.append((number, node))
        return Loop().train(node, model, number)

    proof = verify(LoopPlayer(tape, Loop().restore, train), 1, 1, node="c1")
    assert proof.holds, proof.mismatch
    assert trained == [(0, "c0"), (0, "c1"), (0, "c2"), (1, "c1")]  # from the stored state of round 0
    with pytest.raises(ConfigError, match=r"'c9' took no part in round 1\. It had: c0, c1, c2"):
        verify(LoopPlayer(tape, Loop().restore, train), 1, 1, node="c9")


def test_one_flipped_bit_in_one_clients_data_is_named(tape):
    loop = Loop()
    inputs = loop.data["c2"].tensors[0]
    inputs.view(torch.int32)[4, 7] ^= 1 << 22
    proof = verify(LoopPlayer(tape, loop.restore, loop.train))
    assert not proof.holds
    assert (proof.mismatch.round, proof.mismatch.node, proof.mismatch.what) == (0, "c2", "update")
    assert proof.mismatch.step is not None
    assert proof.mismatch.loss[0] != proof.mismatch.loss[1]
    assert proof.mismatch.layer == "0.weight"


def test_losses_are_left_alone_where_nobody_computes_them(tape):
    player = LoopPlayer(tape, Loop().restore, lambda node, model, r: Loop().train(node, model, r)[0])
    assert verify(player, 0, 1).holds


def test_a_replay_leaves_the_callers_generators_and_threads_alone(tape):
    before, threads = random_states(), torch.get_num_threads()
    played = LoopPlayer(tape, Loop().restore, Loop().train).round(3)
    assert [message.node for message in played.messages] == [*NODES]
    assert (random_states(), torch.get_num_threads()) == (before, threads)


def test_a_round_is_reached_from_the_nearest_state(tape):
    player = LoopPlayer(tape, Loop().restore, Loop().train)
    standing = player.server(3)
    assert standing.number == 3
    assert player.start(3) == 0
    assert player.round(3).entry().state == tape.entry(3).state


def median(states, _):
    return {
        name: torch.stack([state[name] for state in states]).median(0).values.to(states[0][name].dtype)
        for name in states[0]
    }


def test_an_aggregation_of_ones_own_is_asked_for_and_taken(tmp_path):
    store = tmp_path / "runs.db"
    _, monitor = run_loop(store, fv.Tape(), median, rounds=3)
    tape = open_tape(store, monitor.run.id)
    with pytest.raises(ConfigError, match=r"no average of them gives its state .*aggregate\(state, updates, weights\)"):
        verify(LoopPlayer(tape, Loop().restore, Loop().train))
    assert verify(LoopPlayer(tape, Loop().restore, Loop().train), 0, 0, node="c0").holds  # which needs none

    def aggregate(state, updates, weights):
        assert weights == {"c0": 30, "c1": 28, "c2": 26}
        assert state.keys() == updates["c0"].keys()
        return median([*updates.values()], None)

    player = LoopPlayer(tape, Loop().restore, Loop().train, aggregate)
    assert verify(player).holds
    assert player.averaged is None
    wrong = verify(LoopPlayer(tape, Loop().restore, Loop().train, lambda state, *_: state))
    assert (wrong.mismatch.round, wrong.mismatch.what) == (0, "state after")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "aggregate", [None, lambda _, updates, weights: by_hand([*updates.values()], [*weights.values()])]
)
def test_a_loop_may_aggregate_after_its_round(tmp_path, aggregate):
    store = tmp_path / "runs.db"
    _, monitor = run_loop(store, fv.Tape(), outside=True, rounds=3)
    proof = verify(LoopPlayer(open_tape(store, monitor.run.id), Loop().restore, Loop().train, aggregate))
    assert proof.holds, proof.mismatch
    assert proof.proved == [0, 1, 2]


def test_a_client_that_fails_is_on_the_tape_and_fails_again(tmp_path):
    """Also where its exception ends the round: that is the one to look into."""
    store, loop, model = tmp_path / "runs.db", Loop(), net()
    loop.data["c1"] = TensorDataset(torch.full((8, 12), torch.inf), torch.full((8,), 7))
    monitor = fv.Monitor(store, tape=fv.Tape(), strict=True, machine=False)

    def one_round():
        with monitor.round(4, model):
            for node in ("c0", "c1"):
                with monitor.client(node, local := copy.deepcopy(model)):
                    loop.train(node, local, 4)

    with pytest.raises(IndexError), monitor:
        one_round()
    tape = open_tape(store, monitor.run.id)
    entry = tape.entry(4)
    assert [(came.node, came.used, came.mark is None) for came in entry.came] == [
        ("c0", True, False),
        ("c1", False, True),
    ]
    assert entry.came[1].error.startswith("IndexError: Target 7")
    assert entry.after_notes["failed"] == entry.came[1].error
    assert verify(LoopPlayer(tape, loop.restore, loop.train)).holds
    healthy = verify(LoopPlayer(tape, Loop().restore, Loop().train))
    assert (healthy.mismatch.node, healthy.mismatch.replayed) == ("c1", "an update, left out")
    with pytest.raises(ZeroDivisionError):  # of a client that did not fail, it is the function's own mistake
        verify(LoopPlayer(tape, loop.restore, lambda *_: 1 / 0), 4, 4, node="c0")


def test_updates_that_the_host_hands_over_are_kept_as_differences(tmp_path):
    store, model = tmp_path / "runs.db", nn.Linear(4, 2)
    with fv.Monitor(store, tape=fv.Tape(), strict=True, machine=False) as monitor:
        monitor.host.round_begin(1, model)
        steps = {node: [torch.full_like(p, 0.25 * (i + 1)) for p in model.parameters()] for i, node in enumerate("ab")}
        monitor.updates(1, steps)
        with torch.no_grad():
            for place, parameter in enumerate(model.parameters()):
                parameter.add_(torch.stack([step[place] for step in steps.values()]).mean(0))
        monitor.host.round_end(1, model)
    tape = open_tape(store, monitor.run.id)
    assert [came.node for came in tape.entry(1).came] == ["a", "b"]
    assert torch.equal(tape.update(1, "b")["weight"], torch.full((2, 4), 0.5))

    def train(node, state, _):
        return {name: torch.full_like(tensor, 0.25 if node == "a" else 0.5) for name, tensor in state.items()}

    assert verify(LoopPlayer(tape, lambda _, tensors, __: tensors, train)).holds


def test_what_a_loop_changes_in_place_right_after_handing_it_over_stays_on_the_tape_as_it_was(tmp_path):
    """Over many rounds, so that memory is reused while the tape's thread still reads other copies."""
    store, model, rounds = tmp_path / "runs.db", nn.Linear(40, 20), 12
    sent, models = {}, {}
    steps = {node: [torch.empty_like(p) for p in model.parameters()] for node in "abc"}
    tape = fv.Tape(every=1, updates=rounds)
    with fv.Monitor(store, tape=tape, strict=True, machine=False, detectors=()) as monitor, torch.no_grad():
        for r in range(rounds):
            models[r] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            monitor.host.round_begin(r, model)
            for node, step in steps.items():
                for piece in step:
                    piece.copy_(torch.randn_like(piece))
                sent[r, node] = [piece.clone() for piece in step]
            monitor.updates(r, steps)
            for step in steps.values():
                for piece, parameter in zip(step, model.parameters(), strict=True):
                    parameter.add_(piece)
                    piece.fill_(torch.nan)
            monitor.host.round_end(r, model)
    kept = open_tape(store, monitor.run.id)
    for (r, node), step in sent.items():
        update = kept.update(r, node)
        assert all(torch.equal(a, b) for a, b in zip(update.values(), step, strict=True)), (r, node)
    for r, expected in models.items():
        assert state_digest_of(expected) == kept.entry(r).state["model"]


def test_memory_of_copies_is_reused_once_they_are_let_go_and_never_before():
    copies, tensors = TensorCopies(), {"w": torch.randn(5, 3).T, "n": torch.tensor(4)}
    first, second = copies(tensors), copies(tensors)
    places = {copy["w"].data_ptr() for copy in (first, second)}
    assert len(places) == 2
    tensors["w"].zero_()
    assert first["w"].any()
    del first
    third = copies(tensors)
    assert third["w"].data_ptr() in places - {second["w"].data_ptr()}
    assert not third["w"].any()
    assert second["w"].any()
    assert copies({"w": torch.ones(3, 5)})["w"].all()


def test_memory_of_copies_made_in_inference_mode_is_reused_outside_of_it():
    copies = TensorCopies()
    with torch.inference_mode():
        place = copies({"w": torch.ones(3)})["w"].data_ptr()
    copy = copies({"w": torch.zeros(3)})
    assert copy["w"].data_ptr() == place
    assert not copy["w"].any()


def test_a_loop_without_a_global_model_is_told_that_it_cannot_be_replayed(tmp_path):
    store = tmp_path / "runs.db"
    with fv.Monitor(store, tape=fv.Tape(), strict=True, machine=False) as monitor:
        for r in range(2):
            with monitor.round(r), monitor.client("c0", nn.Linear(2, 2)):
                pass
    with pytest.raises(StoreError, match="has no tape"):
        open_tape(store, monitor.run.id)
    with open_reader(store) as reader:
        told = reader.history(monitor.run.id).events("tape.no_model")
    assert [event.message for event in told] == [
        "Round 0 has no global model, so it cannot be replayed: monitor.round(0, model)."
    ]


def test_generators_are_put_back_and_what_is_no_state_is_refused():
    before = random_states()
    drawn = torch.rand(3), np.random.rand(3), random.random(), np.random.randn()  # noqa: NPY002
    set_random_states(before)
    again = torch.rand(3), np.random.rand(3), random.random(), np.random.randn()  # noqa: NPY002
    assert torch.equal(drawn[0], again[0])
    assert (drawn[1] == again[1]).all()
    assert drawn[2:] == again[2:]
    far = {**before, "numpy": [before["numpy"][0], 10**6, 0, 0.0]}
    for wrong in (
        {},
        {**before, "torch": "AAAA"},
        {**before, "torch": "%"},
        {**before, "python": [3, "AAAA", None]},
        far,
    ):
        with pytest.raises(StoreError, match="random generators on the tape cannot be read"):
            set_random_states(wrong)


def test_what_the_command_line_names_is_loaded_and_looked_at(tmp_path, monkeypatch, tape):
    (tmp_path / "my_loop.py").write_text(
        "from support.replayed_loop import Loop\n"
        "loop = Loop()\nrestore, train = loop.restore, loop.train\n"
        "def made():\n    return Loop()\n"
        "class Half:\n    restore = None\n    def train(self): ...\n"
        "half = Half()\n"
    )
    (tmp_path / "my_broken_loop.py").write_text("import no_such_module_at_all\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for text in ("my_loop", "my_loop:loop", "my_loop:made"):
        assert isinstance(load_loop(text), Replayable)
    assert verify(loop_player(tape, "my_loop:loop"), 0, 0).holds
    for text, said in (
        ("no_such_loop:x", "no module 'no_such_loop'"),
        ("my_loop:nothing", "'my_loop' has no 'nothing'"),
        ("my_loop:half", "has no function restore"),
        (":x", "takes module:name"),
    ):
        with pytest.raises(ConfigError, match=said):
            load_loop(text)
    with pytest.raises(ModuleNotFoundError, match="no_such_module_at_all"):  # the user's own mistake, with its place
        load_loop("my_broken_loop")


@pytest.mark.parametrize("command", ["whatif drop c2", "fork drop c2", "bisect 1 3"])
def test_what_a_plain_loop_cannot_do_is_told(recorded, command):
    with fv.open_replay(recorded.run, recorded.store, loop=Loop()) as session:
        with pytest.raises(ConfigError, match="Of a plain loop only its own training can be run again"):
            Interpreter(session).do(command)
        assert session.verify(0, 0).holds


def test_a_session_looks_into_a_plain_loop(recorded):
    with fv.open_replay(recorded.run, recorded.store, loop=Loop()) as session:
        session.goto(3)
        assert len(session.clients().rows) == len(NODES)
        assert {row[0] for row in session.show("update c1").rows} >= {"0.weight", "4.bias"}
        assert session.diff("c1", "others").rows


def test_wrong_answers_of_train_are_told(tape):
    with pytest.raises(ConfigError, match=r"train\('c0', state, 0\) must give the client's state.*got NoneType"):
        verify(LoopPlayer(tape, Loop().restore, lambda *_: None))


def test_a_run_of_the_lab_is_no_loop(tmp_path):
    from fedvitals import lab

    store = tmp_path / "runs.db"
    experiment = lab.Experiment(dataset="digits", model="mlp", clients=2, rounds=1)
    with fv.Monitor(store, tape=fv.Tape(), strict=True, machine=False) as monitor:  # which takes it for a loop
        lab.run(experiment, monitor, workers=1)
    tape = open_tape(store, monitor.run.id)
    assert len(tape.entry(0).came) == 2  # once each: the lab feeds its tape itself
    with fv.open_replay(monitor.run.id, store) as session:
        assert session.verify().holds
    with pytest.raises(ConfigError, match="of host 'lab', not a plain loop"):
        LoopPlayer(tape, Loop().restore, Loop().train)


@pytest.mark.thorough
def test_the_example_is_recorded_and_proved_on_the_command_line(tmp_path, monkeypatch, capsys):
    """As its own text says: the same functions train the loop and run it again."""
    pytest.importorskip("sklearn", reason="the example's data ship inside scikit-learn")
    example, store = ROOT / "examples" / "replay_loop.py", tmp_path / "runs.db"
    subprocess.run([sys.executable, example, store], check=True, cwd=tmp_path, capture_output=True)
    monkeypatch.chdir(example.parent)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for more in ((), ("--round", "4", "--node", "c2")):
        proof = result(capsys, "replay", "loop", "--verify", *more, "--loop", "replay_loop", "--store", store)
        assert (proof["holds"], proof["exact"]) == (True, True)
        assert proof["proved"] == ([4] if more else [0, 1, 2, 3, 4, 5])
    replay_loop = sys.modules["replay_loop"]
    replay_loop.data["c2"].tensors[0].view(torch.int32)[100, 20] ^= 1 << 22
    code, out, _ = run(capsys, "replay", "loop", "--verify", "--loop", "replay_loop", "--store", store)
    assert code == 1
    assert "The update differs: round 0, client c2, layer 0.weight." in out


def test_a_flush_waits_for_the_tape(tmp_path, monkeypatch):
    write, slow = RoundJournal.write, threading.Event()

    def write_slowly(journal, entry):
        slow.wait(0.3)
        write(journal, entry)

    monkeypatch.setattr(RoundJournal, "write", write_slowly)
    with fv.Monitor(tmp_path / "runs.db", tape=fv.Tape(), strict=True, machine=False) as monitor:
        with monitor.round(0, net()):
            pass
        assert monitor.flush()
        assert open_tape(tmp_path / "runs.db", monitor.run.id).rounds == [0]
