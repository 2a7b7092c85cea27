# SPDX-License-Identifier: Apache-2.0
"""Whole runs: seeds, saving and going on, the command line, and what the observer hears of the network."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from fedvitals import lab
from fedvitals.cli.main import app
from fedvitals.errors import ConfigError
from fedvitals.monitor.monitor import Monitor
from fedvitals.store import open_reader
from fedvitals.store.read import queries
from fedvitals.testing import MemorySink
from support.conditions import holds_for_each
from support.paths import ROOT

EXAMPLES = sorted((ROOT / "examples" / "experiments").glob("*.toml"))
SMALL = {"dataset": lab.synthetic(samples=200), "model": "mlp", "clients": 5, "local": lab.Local(iterations=3)}


def experiment(**changes):
    return lab.Experiment(**{**SMALL, "rounds": 4, "seed": 3, **changes})


def test_same_seed_same_weights_another_seed_others():
    states = [lab.run(experiment(seed=seed), engine="sequential").state for seed in (3, 3, 4)]
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])


def test_losses_of_local_batches_are_kept_of_the_newest_rounds(monkeypatch):
    monkeypatch.setattr(sys.modules["fedvitals.lab.run"], "ROUNDS_WITH_LOSSES", 2)  # `lab.run` is the function
    result = lab.run(experiment(), engine="sequential")
    assert [bool(r.losses) for r in result.rounds] == [False, False, True, True]


RESUMED = {
    "centralized": {},
    "momentum at the server": {"aggregator": lab.fedavgm()},
    "adam at the server": {"aggregator": lab.fedadam()},
    "clusters": {"topology": lab.Clustered(smallest=1)},
    "asynchronous": {"topology": lab.Asynchronous(buffer=2), "network": lab.Network(spread=0.5)},
    "faults that remember": {"faults": [lab.stale_update(nodes=["c1"], since=1), lab.gaussian(nodes=["c2"])]},
    "network": {"network": lab.Network(links="4g", jitter=0.5, availability=0.7)},
    "compression": {"compression": lab.top_k(0.2)},
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", RESUMED)
@pytest.mark.parametrize("stop", [1, 3])
def test_resumed_is_as_if_never_stopped(name, stop, tmp_path):
    e = experiment(**RESUMED[name])
    whole = lab.run(e, engine="sequential")
    for result in lab.rounds(e, engine="sequential", checkpoint=tmp_path):
        if len(result.rounds) == stop:
            break
    again = lab.run(e, engine="sequential", checkpoint=tmp_path, resume=True)
    assert torch.equal(again.state, whole.state)
    assert [r.metrics for r in again.rounds] == [r.metrics for r in whole.rounds]


def test_a_finished_run_resumed_is_the_same(tmp_path):
    whole = lab.run(experiment(), engine="sequential", checkpoint=tmp_path)
    assert torch.equal(lab.run(experiment(), engine="sequential", checkpoint=tmp_path, resume=True).state, whole.state)


def test_the_state_of_another_experiment_is_refused(tmp_path):
    lab.run(experiment(), engine="sequential", checkpoint=tmp_path)
    with pytest.raises(ConfigError, match="another experiment"):
        lab.run(experiment(seed=9), engine="sequential", checkpoint=tmp_path, resume=True)


def test_a_fault_that_names_what_is_not_there_is_refused_before_anything_runs():
    for fault, says in (
        (lab.sign_flip(nodes=["c7"]), "no node 'c7'"),
        (lab.sign_flip(nodes=["c1"], since=10), "round 10"),
        (lab.frozen_layer(nodes=["c1"], layer="dense7.weight"), "dense1.weight"),
    ):
        sink = MemorySink()
        with pytest.raises(ConfigError, match=says), Monitor(None, sinks=[sink]) as monitor:
            lab.run(experiment(faults=[fault]), monitor, engine="sequential")
        assert not [r for r in sink.records if getattr(getattr(r, "where", None), "round", None) is not None]


def watched(e):
    sink = MemorySink()
    with Monitor(None, sinks=[sink], strict=True) as monitor:
        result = lab.run(e, monitor, engine="sequential")
    return result, sink.records


def test_who_comes_after_the_deadline_is_told_and_left_out():
    slow = lab.Network(links="fibre", overrides={"c3": "lora"}, deadline_seconds=5.0)
    _, records = watched(experiment(network=slow, rounds=1))
    late = [r for r in records if type(r).__name__ == "Event" and r.name == "update.late"]
    assert [r.where.node for r in late] == ["c3"]
    sent = {r.sender for r in records if type(r).__name__ == "Transfer"}
    assert "c3" not in sent


def test_what_a_client_claims_and_how_long_it_was_under_way():
    """The samples by which the aggregation weighs an update, and the whole journey on the virtual clock."""
    e = experiment(
        network=lab.Network(spread=0.5), faults=(lab.wrong_sample_count(nodes=("c1",), factor=10.0),), rounds=1
    )
    _, records = watched(e)

    def by_node(name):
        return {r.where.node: r.value for r in records if type(r).__name__ == "Metric" and r.name == name}

    own, claimed, seconds = by_node("samples"), by_node("update.samples"), by_node("time.client_virtual")
    assert claimed == {node: own[node] * (10 if node == "c1" else 1) for node in e.nodes}
    ways = {r.where.node: r.attributes["parts"] for r in records if type(r).__name__ == "Span" and r.name == "journey"}
    for node in e.nodes:
        assert seconds[node] == sum(ways[node][part] for part in ("download", "compute", "upload"))
        assert by_node("time.download")[node] == ways[node]["download"]


def test_over_selection_asks_more_and_takes_the_first():
    e = experiment(network=lab.Network(over_selection=2.0, spread=1.0), participation=0.4, rounds=1)
    _, records = watched(e)
    senders = {r.sender for r in records if type(r).__name__ == "Transfer"} - {"server"}
    late = {r.where.node for r in records if type(r).__name__ == "Event" and r.name == "update.late"}
    assert (len(senders), len(late)) == (2, 2)


def test_compression_is_seen_in_bytes_and_in_weights():
    plain, packed = experiment(rounds=1), experiment(rounds=1, compression=lab.int8())
    (before, _), (after, records) = watched(plain), watched(packed)
    sent = [r for r in records if type(r).__name__ == "Transfer" and r.kind == "update"]
    assert holds_for_each(r.bytes < 0.35 * r.raw_bytes for r in sent)
    assert not torch.equal(before.state, after.state)
    torch.testing.assert_close(before.state, after.state, atol=5e-3, rtol=0)


def test_truth_is_recorded_and_history_does_not_see_it(tmp_path):
    store = tmp_path / "runs.db"
    e = experiment(faults=[lab.sign_flip(nodes=["c1"], since=1)], rounds=2)
    with Monitor(store, run="ill") as monitor:
        lab.run(e, monitor, engine="sequential")
    history = open_reader(store).history(monitor.run.id)
    assert "sign_flip" not in repr([history.events(), history.nodes(), history.rounds()])


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_ready_made_experiments_are_read_and_round_trip(path):
    text = path.read_text()
    assert lab.read(lab.read(text).to_toml()) == lab.read(text)


@pytest.mark.thorough
@pytest.mark.parametrize("path", [p for p in EXAMPLES if p.stem != "paper"], ids=lambda path: path.stem)
def test_ready_made_experiments_run(path, tmp_path, monkeypatch):
    store = str(tmp_path / "runs.db")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    small = {"lora": ["model.pretraining.steps=2", "local.iterations=1", "dataset.package_bytes=5000"]}
    changes = [word for change in ("rounds=6", *small.get(path.stem, ())) for word in ("--set", change)]
    done = CliRunner().invoke(app, ["lab", str(path), *changes, "--store", store, "--json"])
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)["result"]
    assert said["rounds"] == 6
    assert said["metrics"]["loss"] > 0
    assert open_reader(store).history(said["run"]).rounds() == [0, 1, 2, 3, 4, 5]
    assert not [*tmp_path.rglob("state.safetensors")]


def write(
    tmp_path, text='dataset = "synthetic"\nmodel = "mlp"\nclients = 4\nrounds = 20000\n[local]\niterations = 20\n'
):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return str(path)


def test_the_command_line_answers_wrong_use(tmp_path):
    path, store = write(tmp_path), ["--store", str(tmp_path / "runs.db")]
    for arguments, says in (
        (["--set", "clients"], "NAME=VALUE"),
        (["--set", "clints=5"], "Did you mean 'clients'"),
        (["--engine", "fast"], "Unknown engine"),
        (["--precision", "half"], "'half' is not one of 'float32', 'tf32', 'bfloat16'"),
        (["--precision", "tf32"], "The precision 'tf32' is for CUDA"),
        (["--device", "gpu"], "An NVIDIA GPU is 'cuda'"),
        (["--resume"], "nothing to resume"),
    ):
        done = CliRunner().invoke(app, ["lab", path, *arguments, *store])
        assert done.exit_code == 2 or isinstance(done.exception, ConfigError)
        assert says in done.output + str(done.exception)
    assert not [*tmp_path.glob("runs.db*")]  # a run that never began leaves nothing behind


def test_a_run_can_be_named_and_is_told_where_to_look(tmp_path):
    path, store = write(tmp_path), str(tmp_path / "runs.db")
    done = CliRunner().invoke(app, ["lab", path, "--set", "rounds=1", "--run", "first", "--store", store])
    assert done.exit_code == 0, done.output
    with open_reader(store) as reader:
        (found,) = queries.list_runs(reader)
    assert found.name == "first"
    for verb in ("findings", "ui", "show", "profile", "report"):
        assert f"fedvitals {verb} {found.id} --store {store}" in done.output


def test_the_plan_shows_who_holds_what_and_trains_nothing(tmp_path):
    path, store = write(tmp_path), tmp_path / "runs.db"
    done = CliRunner().invoke(app, ["lab", path, "--plan", "--store", str(store)])
    assert done.exit_code == 0, done.output
    assert 'kind = "mlp"' in done.output
    assert "c3" in done.output
    assert not store.exists()


@pytest.mark.thorough
def test_ctrl_c_leaves_a_run_that_goes_on_bit_for_bit(tmp_path):
    path, store = write(tmp_path), str(tmp_path / "runs.db")
    program = "from fedvitals.cli.main import main; main()"
    how = ["--store", store, "--workers", "2", "--engine", "reuse"]
    command = [sys.executable, "-c", program, "lab", path, *how]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    # A shell that starts us in the background has SIGINT ignored, which children inherit.
    usual = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, **usual) as started:
        for line in started.stderr:
            if line.startswith("round 5/"):
                started.send_signal(signal.SIGINT)
                break
        rest = started.stderr.read()
    assert started.returncode == 130
    assert "add --resume" in rest
    state = next(Path(f"{store}.d").rglob("state.safetensors"))
    assert state.exists()
    rounds = int(rest.split("Stopped after ")[1].split(" of")[0])
    assert 5 <= rounds < 20000
    # The same experiment with few rounds more would be another one; so go on for a moment, and compare the states.
    with subprocess.Popen([*command, "--resume"], stderr=subprocess.PIPE, text=True, env=environment, **usual) as again:
        lines = [next(again.stderr) for _ in range(3)]
        again.send_signal(signal.SIGINT)
        told = again.stderr.read()
    assert again.returncode == 130
    assert f"round {rounds + 1}/20000" in lines[0]
    reached = int(told.split("Stopped after ")[1].split(" of")[0])
    from safetensors.torch import load_file

    resumed = load_file(state)["model"]
    for result in lab.rounds(lab.read(Path(path).read_text(), {"name": "mine"}), engine="reuse", workers=2):
        if len(result.rounds) == reached:
            break
    assert torch.equal(result.state, resumed)
    listed = json.loads(CliRunner().invoke(app, ["runs", "--store", store, "--json"]).stdout)["result"]
    assert len(listed) == 1
