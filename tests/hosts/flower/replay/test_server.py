# SPDX-License-Identifier: Apache-2.0
"""The tape of a Flower server: nothing is changed by it, and each aggregation gives the same bits a second time."""

import random

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Error, Message
from flwr.client.mod import secaggplus_mod
from flwr.serverapp import strategy as strategies
from flwr.serverapp.strategy import FedAvg

import fedvitals as fv
from fedvitals.errors import ConfigError, StoreError
from fedvitals.hosts.flower.rerun.client import replay_aggregation
from fedvitals.replay.tape.reader import open_tape
from fedvitals.testing import MemorySink
from support.flower.federation import (
    HandGrid,
    client_app,
    federate,
    flower_run,
    is_round,
    keys_and_bytes,
    model,
    node_of,
    numbers,
    requests_for,
    training,
    with_mod,
)
from support.flower.secure_aggregation import run as secure
from support.flower.strategies import recording

pytestmark = pytest.mark.thorough  # CI runs it; `scripts/test --fast` does not

SETTINGS = {
    "FedAvg": {},
    "FedAvgM": {"server_momentum": 0.5, "server_learning_rate": 0.7},
    "FedAdam": {"eta": 0.05},
    "FedYogi": {},
    "FedAdagrad": {},
    "FedMedian": {},
    "FedTrimmedAvg": {"beta": 0.2},
    "MultiKrum": {"num_malicious_nodes": 1, "num_nodes_to_select": 3},
    "QFedAvg": {"client_learning_rate": 0.1, "train_loss_key": "train_loss"},
}
KINDS = [name for name in SETTINGS if hasattr(strategies, name)]


def strategy_of(kind):
    return getattr(strategies, kind)(**SETTINGS[kind])


def recorded(folder, strategy, app=None, *, rounds=3, tape=None, attach=None, sinks=(), **more):
    """A run with a tape that keeps all; its reader, and what the strategy gave."""
    tape = tape or {"every": 1, "updates": 9, "durable": True}
    store = folder / "runs.db"
    with fv.Monitor(store, tape=fv.Tape(**tape), machine=False, detectors=(), sinks=[*sinks]) as monitor:
        result, grid = federate(strategy, app or client_app(), monitor, rounds=rounds, attach=attach or {}, **more)
        run = monitor.run.id
    return open_tape(store, run), result, grid


@pytest.mark.parametrize("kind", KINDS)
def test_an_aggregation_is_computed_again_to_the_last_bit(tmp_path, kind):
    tape, result, _ = recorded(tmp_path, strategy_of(kind))
    for number in (1, 2, 3):
        found = replay_aggregation(tape, number)  # made again by its name
        assert found.holds, str(found)
        assert (found.replies, found.strategy, found.start, found.notes) == (4, kind, number, [])
    assert {name: t.numpy().tobytes() for name, t in found.arrays.items()} == numbers(result.arrays)
    own = replay_aggregation(tape, 2, strategy_of(kind))  # the user's own object
    assert own.holds, str(own)


@pytest.mark.parametrize("kind", ["FedAvg", "FedAdam"])
def test_a_tape_changes_nothing(tmp_path, kind):
    """Requests, replies as the strategy gets them, models and metrics, and where the generators stand."""
    seen = []
    for tape in (None, fv.Tape(updates=3, durable=True)):
        strategy = recording(getattr(strategies, kind))(**SETTINGS[kind])
        with fv.Monitor(tmp_path / f"{tape is None}.db", tape=tape, machine=False, detectors=()) as monitor:
            result, grid = federate(strategy, with_mod(), monitor, rounds=3)
        numpy_stood = np.random.get_state()[1].tobytes()  # noqa: NPY002
        stood = random.getstate(), numpy_stood, torch.get_rng_state().numpy().tobytes()
        requests = [(r.metadata.dst_node_id, keys_and_bytes(r.content)) for r in grid.requests]
        metrics = {number: dict(record) for number, record in result.train_metrics_clientapp.items()}
        seen.append((strategy.seen, requests, numbers(result.arrays), metrics, stood))
    assert seen[0] == seen[1]


class Nudged(FedAvg):
    """One number in one array is moved by the least that there is."""

    def aggregate_train(self, server_round, replies):
        arrays, metrics = super().aggregate_train(server_round, replies)
        values = arrays["dense.bias"].numpy().copy()
        values[2] = np.nextafter(values[2], np.float32(np.inf))
        arrays["dense.bias"] = Array(values)
        return arrays, metrics


def test_the_first_number_that_differs_is_named_with_both_values(tmp_path):
    tape, _, _ = recorded(tmp_path, FedAvg())
    wrong = replay_aggregation(tape, 2, Nudged()).mismatch
    assert (wrong.layer, wrong.index, wrong.round) == ("dense.bias", (2,), 2)
    assert wrong.replayed == float(np.nextafter(np.float32(wrong.recorded), np.float32(np.inf)))
    assert "dense.bias" in str(wrong)
    assert repr(wrong.recorded) in str(wrong)


def test_who_fails_or_is_late_is_on_the_tape_and_the_rest_aggregates_as_it_did(tmp_path):
    def fate(request, reply):
        if is_round(request, 2) and node_of(request) == "101":
            return Message(Error(2, "<class 'RuntimeError'>:<'cannot read /data/patients'>"), reply_to=request)
        return None if is_round(request, 2) and node_of(request) == "102" else reply

    tape, _, _ = recorded(tmp_path, FedAvg(), fate=fate)
    came = {one.node: one for one in tape.entry(2).came}
    assert (came["101"].error, came["101"].used, came["101"].mark) == ("RuntimeError", False, None)
    assert (came["102"].error, came["102"].used) == ("no answer in time", False)
    assert came["103"].used
    assert came["103"].weight == 23
    assert b"patients" not in b"".join(path.read_bytes() for path in tape.folder.rglob("*") if path.is_file())
    found = replay_aggregation(tape, 2)
    assert found.holds, str(found)
    assert found.replies == 3  # one of them an error, as then


def test_nobody_answers_and_that_is_the_same_again(tmp_path):
    tape, _, _ = recorded(tmp_path, FedAvg(), fate=lambda request, reply: None if is_round(request, 2) else reply)
    found = replay_aggregation(tape, 2)
    assert found.holds, str(found)
    assert found.arrays == {}
    assert tape.entry(2).after["model"] == tape.entry(3).state["model"]


def test_what_the_guard_left_out_is_kept_and_left_out_again(tmp_path):
    def train(message, context):
        reply = training(message, context)
        if context.node_id == 101:
            reply.content["arrays"]["dense.bias"] = Array(np.full(4, np.nan, np.float32))
        return reply

    tape, _, _ = recorded(tmp_path, FedAvg(), client_app(train=train), attach={"guard": "drop"})
    ill = tape.entry(1).reply_of("101")
    assert not ill.used
    assert "NaN" in ill.notes["left_out"]
    assert torch.isnan(tape.update(1, "101")["dense.bias"]).all()
    assert replay_aggregation(tape, 1).holds


def test_a_fleet_in_which_some_have_the_mod_and_some_have_not(tmp_path):
    plain, ours = client_app(), with_mod()
    tape, _, _ = recorded(tmp_path, strategy_of("FedAdam"), lambda m, c: (ours if c.node_id % 2 else plain)(m, c))
    assert "fedvitals" not in tape.entry(1).reply_of("101").notes["content"]
    assert all(replay_aggregation(tape, number).holds for number in (1, 2, 3))


def test_where_a_state_was_not_kept_the_strategy_comes_to_it_by_aggregating(tmp_path):
    tape, _, _ = recorded(tmp_path, strategy_of("FedAdam"))
    kept = {mark.digest for mark in tape.entry(1).state.values()}
    for mark in {mark for number in (2, 3) for mark in tape.entry(number).state.values()}:
        if mark.digest not in kept:
            (tape.folder / "objects" / mark.digest[:2] / mark.digest).unlink()
    tape = open_tape(tmp_path / "runs.db", tape.setting.run)
    found = replay_aggregation(tape, 3)
    assert found.holds, str(found)
    assert found.start == 1


def test_an_update_that_is_not_kept_any_more_is_told_with_what_would_keep_it(tmp_path):
    tape, _, _ = recorded(tmp_path, FedAvg(), rounds=4, tape={"updates": 2, "durable": True})
    assert replay_aggregation(tape, 4).holds
    with pytest.raises(StoreError, match=r"Round 1: the updates of .* are not on the tape .* updates=N"):
        replay_aggregation(tape, 1)


class Drifting(FedAvg):
    """A strategy as people write it: it remembers things of all kinds, and draws random numbers."""

    def __init__(self):
        super().__init__()
        self.rounds, self.history, self.seen = 0, [], {}
        self.past, self.scale, self.names = [np.zeros(3)], np.float32(0.1), ("a", 2)
        self.speed, self.log = torch.zeros(3), object()

    def aggregate_train(self, server_round, replies):
        replies = [*replies]
        arrays, metrics = super().aggregate_train(server_round, replies)
        self.rounds += 1
        self.history.append(float("nan") if self.rounds == 1 else self.rounds / 3)
        self.seen.update({reply.metadata.src_node_id: self.rounds for reply in replies})
        self.past = [*self.past, np.random.normal(size=3)]  # noqa: NPY002
        self.speed += torch.randn(3)
        moved = {}
        for name, array in arrays.items():
            kick = self.past[-1].sum() + random.random() + float(self.speed.sum()) + self.rounds + len(self.past)
            moved[name] = Array((array.numpy() + self.scale * np.float32(kick)).astype(np.float32))
        return ArrayRecord(moved), metrics


def test_a_strategy_of_ones_own_is_what_it_was_with_its_memory_and_its_random_numbers(tmp_path):
    tape, _, _ = recorded(tmp_path, Drifting(), rounds=4)
    before = random.getstate(), torch.get_rng_state().numpy().tobytes()
    strategy = Drifting()
    for number in (3, 1, 4, 2):
        found = replay_aggregation(tape, number, strategy)
        assert found.holds, str(found)
        assert found.notes == ["Not restored, because they are no numbers: log."]
    assert (random.getstate(), torch.get_rng_state().numpy().tobytes()) == before
    assert strategy.names == ("a", 2)
    assert strategy.seen == dict.fromkeys((100, 101, 102, 103), 2)
    with pytest.raises(ConfigError, match=r"test_server.Drifting, .*--app DIR.*--strategy"):
        replay_aggregation(tape, 3)


def test_where_clients_are_hidden_nothing_of_a_single_one_is_kept_and_it_is_said(tmp_path):
    sink, kind = MemorySink(), "DifferentialPrivacyServerSideFixedClipping"
    wrapped = getattr(strategies, kind)(FedAvg(), noise_multiplier=0.1, clipping_norm=1.0, num_sampled_clients=4)
    tape, _, _ = recorded(tmp_path, wrapped, sinks=[sink])
    for number in tape.rounds:
        entry = tape.entry(number)
        assert {(one.mark, one.weight, *one.notes) for one in entry.came} == {(None, 0.0, "id", "hidden")}
        assert "model" in entry.state
    assert tape.has_state(1)
    (event,) = sink.events("tape.hidden")
    assert kind in event.message
    with pytest.raises(ConfigError, match="no client's update"):
        replay_aggregation(tape, 2)


@pytest.mark.parametrize("on_grid", [False, True])
def test_secure_aggregation_leaves_global_states_on_the_tape_and_no_client(tmp_path, on_grid):
    with fv.Monitor(tmp_path / "runs.db", tape=fv.Tape(updates=3, durable=True), machine=False) as monitor:
        secure(secaggplus_mod, monitor=monitor, on_grid=on_grid)
    tape = open_tape(tmp_path / "runs.db", monitor.run.id)
    came = [one for number in tape.rounds for one in tape.entry(number).came]
    assert came
    assert {(one.mark, one.weight) for one in came} == {(None, 0.0)}
    assert not any("content" in one.notes or "request" in one.notes for one in came)
    assert tape.setting.description["hidden"] == "secure aggregation"


def test_a_loop_of_ones_own_has_its_models_and_updates_on_the_tape(tmp_path):
    with fv.Monitor(tmp_path / "runs.db", tape=fv.Tape(every=1, updates=9, durable=True), machine=False) as monitor:
        grid = HandGrid(client_app())
        fv.flower.attach(grid, monitor)
        with flower_run():
            arrays = model()
            for _ in range(3):
                arrays = next(iter(grid.send_and_receive(requests_for(grid, arrays)))).content["arrays"]
    tape = open_tape(tmp_path / "runs.db", monitor.run.id)
    assert tape.rounds == [1, 2, 3]
    sent = tape.update(1, "100")
    assert {name: t.numpy().tobytes() for name, t in tape.state(2)["model"].items()} == {
        name: t.numpy().tobytes() for name, t in sent.items()
    }
    assert replay_aggregation(tape, 2, FedAvg()).mismatch is not None  # it never was a FedAvg
    with pytest.raises(ConfigError, match="a loop of its own"):
        replay_aggregation(tape, 2)


def test_what_each_was_asked_with_is_known_by_its_digest(tmp_path):
    tape, _, _ = recorded(tmp_path, FedAvg())
    first, second = (tape.entry(number) for number in (1, 2))
    assert len({one.notes["request"] for one in first.came}) == 1
    assert first.came[0].notes["request"] != second.came[0].notes["request"]  # another round, another config
    assert second.after_notes["request"]["config"]["values"] == {"server-round": 2}
    assert second.after_notes["request"]["arrays"]["state"] == "model"


def test_damaged_files_of_a_tape_are_told(tmp_path):
    tape, _, _ = recorded(tmp_path, FedAvg())
    digest = tape.entry(2).came[0].mark.digest
    file = tape.folder / "objects" / digest[:2] / digest
    whole = file.read_bytes()
    file.write_bytes(whole[:-7])
    with pytest.raises(StoreError, match="cannot be read"):
        replay_aggregation(tape, 2)
    other = tape.entry(2).came[1].mark.digest
    file.write_bytes((tape.folder / "objects" / other[:2] / other).read_bytes())
    with pytest.raises(StoreError, match="another digest"):
        replay_aggregation(tape, 2)
    assert replay_aggregation(tape, 3).holds


def test_a_tape_that_cannot_be_written_costs_the_run_nothing(tmp_path):
    (tmp_path / "in the way").write_text("a file")
    plain, _ = federate(FedAvg(), client_app(), rounds=3)
    settings = {"tape": fv.Tape(folder=tmp_path / "in the way"), "machine": False, "detectors": ()}
    with fv.Monitor(tmp_path / "runs.db", **settings) as monitor:
        result, _ = federate(FedAvg(), client_app(), monitor, rounds=3)
    assert numbers(result.arrays) == numbers(plain.arrays)
