# SPDX-License-Identifier: Apache-2.0
"""A recorded run is computed again, and every bit is the same; where one is not, it is found."""

import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

import fedvitals as fv
from fedvitals import lab
from fedvitals.errors import ConfigError, StoreError
from fedvitals.lab.engines.site import Site
from fedvitals.replay.player import proof as proofs
from fedvitals.replay.player.player import Player
from fedvitals.replay.player.proof import verify
from fedvitals.replay.tape.reader import TapeReader, open_tape
from fedvitals.store import open_reader
from fedvitals.store.read import queries

SMALL = lab.Experiment(
    model="mlp", clients=6, rounds=7, seed=3, faults=[lab.label_noise(nodes=["c4"], rate=0.8, since=3)]
)


def recorded(folder: Path, experiment: lab.Experiment = SMALL, *, tape: fv.Tape | None = None, **how) -> TapeReader:
    cure = how.pop("cure", "suggest")
    with fv.Monitor(folder / "runs.db", host="lab", cure=cure, tape=tape or fv.Tape(every=3)) as monitor:
        lab.run(experiment, monitor, **({"workers": 1} | how))
    return open_tape(folder / "runs.db", monitor.run.id)


@pytest.fixture(scope="module")
def tape(tmp_path_factory) -> TapeReader:
    return recorded(tmp_path_factory.mktemp("small"))


@pytest.mark.thorough
def test_a_whole_run_is_proved_from_the_seed(tape):
    with Player(tape) as player:
        proof = verify(player)
    assert (proof.holds, proof.exact, proof.start) == (True, True, 0)
    assert proof.proved == [*range(7)]


def test_a_stretch_is_proved_from_the_nearest_state(tape):
    with Player(tape) as player:
        proof = verify(player, 4, 5)
    assert proof.holds
    assert proof.proved == [4, 5]
    assert 3 <= proof.start == tape.nearest(4)


def test_a_single_client_is_proved(tape):
    with Player(tape) as player:
        assert verify(player, 2, 2, node="c4").proved == [2]


@pytest.mark.thorough
def test_the_proof_computes_what_it_proves(tmp_path):
    """All that is stored of the rounds under test is taken away: nothing is missed."""
    tape = recorded(tmp_path)
    for digest in [*tape._objects]:
        tape._objects.remove(digest)
    with Player(TapeReader(tape.folder)) as player:
        assert verify(player).proved == [*range(7)]
        with pytest.raises(StoreError, match="not on the tape"):
            player.stored(3)


def test_stored_states_of_rounds_under_test_are_out_of_reach(tape):
    with tape.sealed(3, 5), pytest.raises(StoreError, match="out of reach"):
        tape.state(6)
    with tape.sealed(3, 5):
        assert tape.state(3)  # where the proof begins


@pytest.mark.thorough
@pytest.mark.parametrize("topology", ["centralized", "hierarchical"])
def test_one_bit_in_one_clients_data_is_named(tmp_path, topology):
    """In the client, the round and the step in which the sample is first trained on; where edges average, too."""
    tape = recorded(tmp_path, msgspec.structs.replace(SMALL, topology=topology))
    with Player(tape) as player:
        site, local = player.site, player.experiment.local
        mine = site.shards["c2"].train
        sample = site.dataset.x[int(mine[5])].reshape(-1)
        pixel = int(sample.argmax())
        bits = sample.view(torch.int32) if sample.dtype == torch.float32 else sample
        bits[pixel] ^= 1 << (22 if sample.dtype == torch.float32 else 3)
        steps = local.steps(len(mine))
        orders = [site.order("c2", number, steps, local.batch, len(mine)) for number in range(7)]
        number, step = next((r, int((o == 5).nonzero()[0][0])) for r, o in enumerate(orders) if bool((o == 5).any()))
        proof = verify(player)
    wrong = proof.mismatch
    assert proof.proved == [*range(number)]
    assert (wrong.round, wrong.node, wrong.what, wrong.step) == (number, "c2", "update", step)
    assert wrong.loss[0] != wrong.loss[1]
    assert wrong.layer in tape.setting.layers
    assert wrong.recorded != wrong.replayed
    said = (f"round {number}", "client c2", f"step {step}", wrong.layer, repr(wrong.recorded), repr(wrong.replayed))
    for word in said:
        assert word in str(wrong)


@pytest.mark.thorough
def test_both_values_of_the_first_element_where_the_tape_has_them(tmp_path, monkeypatch):
    """The last round's updates are whole on the tape."""
    tape = recorded(tmp_path, engine="sequential")
    ours = Site.tensors

    def flipped(self, node, number):
        x, y = ours(self, node, number)
        return (-x, y) if (node, number) == ("c1", 6) else (x, y)

    monkeypatch.setattr(Site, "tensors", flipped)
    with Player(tape) as player:
        wrong = verify(player).mismatch
    assert (wrong.round, wrong.node, wrong.step) == (6, "c1", 0)
    assert wrong.index is not None
    assert float(tape.update(6, "c1")[wrong.layer][wrong.index]) == wrong.recorded


@pytest.mark.thorough
@pytest.mark.parametrize("workers", [2, 3])
def test_the_number_of_processes_does_not_matter(tmp_path, workers):
    tape = recorded(tmp_path, msgspec.structs.replace(SMALL, model="cnn", rounds=3, clients=4, faults=()), workers=2)
    with Player(tape, workers=workers) as player:
        assert verify(player).proved == [0, 1, 2]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "change",
    [
        {"topology": "rings"},
        {"topology": "clustered"},
        {"topology": lab.Asynchronous(buffer=3), "network": lab.Network()},
        {"aggregator": "fedadam", "participation": 0.5},
        {"compression": "int8"},
        {"faults": [lab.stale_update(nodes=["c1"])]},
    ],
    ids=str,
)
def test_whatever_the_server_remembers_is_on_the_tape(tmp_path, change):
    tape = recorded(tmp_path, msgspec.structs.replace(SMALL, **change))
    with Player(tape) as player:
        assert verify(player).proved == [*range(7)]
        assert verify(player, 5, 6).proved == [5, 6]


@pytest.mark.thorough
def test_corrections_are_applied_again(tmp_path):
    ill = [lab.not_finite(nodes=["c1"], since=2), lab.sign_flip(nodes=["c3"], since=1)]
    tape = recorded(tmp_path, msgspec.structs.replace(SMALL, faults=ill, rounds=10), cure="auto")
    in_force = {action["kind"] for number in tape.rounds for action in tape.entry(number).notes["actions"]}
    assert in_force - {"checkpoint"}
    with Player(tape) as player:
        proof = verify(player)
        assert proof.holds, proof.mismatch
        assert verify(player, 8, 9).holds


@pytest.mark.thorough
def test_optimizers_that_are_kept_are_part_of_the_state(tmp_path):
    kept = lab.Local(optimizer=lab.adam(), keep_optimizer=True)
    tape = recorded(tmp_path, msgspec.structs.replace(SMALL, local=kept), engine="stacked")
    with Player(tape) as player:
        assert verify(player, 4, 5).proved == [4, 5]
    assert any(name.startswith("optimizer/") for name in tape.entry(3).state)
    with open_reader(tmp_path / "runs.db") as reader:
        (said,) = [event for event in queries.events(reader, tape.setting.run) if event.name == "tape.optimizers"]
    assert " MB" in said.message


class Dropping:
    """A model of the user's own that draws random numbers as it trains."""

    def build(self, *_):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Dropout(0.5), nn.Linear(16, 10))


@pytest.mark.thorough
@pytest.mark.parametrize("engine", ["sequential", "reuse"])
def test_layers_that_draw_draw_the_same_again(tmp_path, engine):
    own = msgspec.structs.replace(SMALL, model=lab.Own(lambda: Dropping().build()), faults=(), rounds=3)
    torch.manual_seed(time.time_ns() % 1000)  # whatever the user's own generator is at
    tape = recorded(tmp_path, own, engine=engine)
    with Player(tape, experiment=own) as player:
        assert verify(player).proved == [0, 1, 2]
    with pytest.raises(ConfigError, match="give it again"):
        Player(tape)
    with pytest.raises(ConfigError, match="digests differ"):
        Player(tape, experiment=SMALL)


def test_training_leaves_the_users_generator_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    lab.run(msgspec.structs.replace(SMALL, rounds=1, faults=()), engine="sequential")
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.thorough
def test_weights_are_the_same_with_and_without_a_tape(tmp_path):
    tape = recorded(tmp_path)
    plain = lab.run(SMALL, workers=1)
    with Player(tape) as player:
        assert torch.equal(player.stored(7).model, plain.state)


def test_another_machine_is_compared_by_a_stated_tolerance(tape, monkeypatch):
    here = proofs.machine_description()
    monkeypatch.setattr(proofs, "machine_description", lambda: here | {"capability": "NEON"})
    with Player(tape) as player:
        proof = verify(player)
    assert (proof.exact, proof.holds, proof.deviation) == (False, True, 0.0)
    assert "capability" in proof.why
    assert proof.tolerance == proofs.TOLERANCE


def test_another_machine_that_is_too_far_off(tape, monkeypatch):
    here, ours = proofs.machine_description(), Site.tensors
    monkeypatch.setattr(proofs, "machine_description", lambda: here | {"torch": "1.0"})
    monkeypatch.setattr(Site, "tensors", lambda s, n, r: (ours(s, n, r)[0] * (1 + 1e-6), ours(s, n, r)[1]))
    with Player(tape) as player:
        close = verify(player)
        assert close.holds
        assert 0 < close.deviation < proofs.TOLERANCE
        assert not verify(player, tolerance=close.deviation / 10).holds


@pytest.mark.thorough
def test_a_run_that_was_killed_has_its_finished_rounds(tmp_path):
    code = f"""
        import fedvitals as fv
        from fedvitals import lab
        e = lab.Experiment(model="mlp", clients=6, rounds=100000, seed=3)
        with fv.Monitor({str(tmp_path / "runs.db")!r}, host="lab", id="killed", tape=fv.Tape(every=3)) as monitor:
            lab.run(e, monitor, workers=1)
    """
    run = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)])
    folder = tmp_path / "runs.db.d" / "tape" / "killed"
    end = time.monotonic() + 120
    while not (folder / "rounds" / "00000007").exists():
        assert time.monotonic() < end
        assert run.poll() is None
        time.sleep(0.05)
    run.send_signal(signal.SIGKILL)
    run.wait()
    tape = TapeReader(folder)
    assert tape.rounds[:8] == [*range(8)]
    with Player(tape) as player:
        proof = verify(player, 0, 7)
        assert proof.holds
        assert verify(player, tape.rounds[-1], tape.rounds[-1]).holds


@pytest.mark.thorough
def test_a_run_that_goes_on_goes_on_on_its_tape(tmp_path):
    state, e = tmp_path / "state", msgspec.structs.replace(SMALL, rounds=5, faults=())
    with fv.Monitor(tmp_path / "runs.db", host="lab", id="two parts", tape=fv.Tape(every=3)) as monitor:
        for result in lab.rounds(e, monitor, workers=1, checkpoint=state):
            if len(result.rounds) == 2:
                break
    with fv.Monitor(tmp_path / "runs.db", host="lab", id="two parts", tape=fv.Tape(every=3)) as monitor:
        lab.run(e, monitor, workers=1, checkpoint=state, resume=True)
    tape = open_tape(tmp_path / "runs.db", "two parts")
    with Player(tape) as player:
        assert verify(player).proved == [*range(5)]
