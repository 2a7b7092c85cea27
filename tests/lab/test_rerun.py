# SPDX-License-Identifier: Apache-2.0
"""`fedvitals profile` with --try and --devices: what only the lab can say. And what docs/profile.md shows, run."""

import json
import multiprocessing
import re
import time
from types import SimpleNamespace

import pytest
import torch

import fedvitals as fv
from fedvitals import lab
from fedvitals.analysis.remedies import Remedy
from fedvitals.cli.main import main
from fedvitals.cli.profile import lab as profile_lab
from fedvitals.lab.rerun import RemedyTrial
from fedvitals.records import Metric, Run, Where
from fedvitals.testing import MemorySink
from support.conditions import holds_for_each
from support.paths import ROOT
from support.timed_run import begin, stored

DOCS = ROOT / "docs" / "profile.md"
GB = 1e9


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as done:
        main(["profile", *map(str, arguments)])
    captured = capsys.readouterr()
    return done.value.code, captured.out, captured.err


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    """A run of the lab that is upload-bound, kept as `fedvitals lab` keeps it."""
    path = tmp_path_factory.mktemp("tried") / "runs.db"
    network = lab.Network(links="3g", devices="laptop", spread=0.3)
    local = lab.Local(epochs=2, optimizer=lab.adam(0.01))
    small = {"dataset": "digits", "model": "cnn", "clients": 5, "rounds": 3, "seed": 3}
    experiment = lab.Experiment(local=local, network=network, **small)
    told = {"host": "lab", "config": {"experiment": experiment.to_toml()}, "machine": False, "detectors": ()}
    with fv.Monitor(path, "slow", probes="light", strict=True, **told) as monitor:
        lab.run(experiment, monitor)
    return path


# -- --try ------------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_remedies_are_run_and_what_costs_accuracy_is_marked(slow, capsys, monkeypatch):
    """The first two by time: the one that sends a sixteenth learns next to nothing, and comes last, however quick."""
    monkeypatch.setenv("COLUMNS", "140")
    code, out, err = run(capsys, "slow", "--try", "2", "--store", slow)
    assert code == 0
    assert err.count("running: ") == 3, "as it is, and two remedies"
    table = out[out.index("Tried in the lab") :]
    kept, costly = (line for line in table.splitlines() if " → " in line)
    assert "Quantise updates to 8 bits" in kept
    assert "!" not in kept
    assert "1/16 of the bytes" in costly
    assert re.search(r"\d\d\.\d % → \d\d\.\d % !", costly)
    code, out, _ = run(capsys, "slow", "--try", "1", "--json", "--store", slow)
    (tried,) = json.loads(out)["result"]["tried"]
    assert tried["measured"] < tried["before"]
    assert tried["gain_error"] < 0.15
    assert tried["accuracy_cost"] == pytest.approx(tried["accuracy_before"] - tried["accuracy_after"])


def test_what_keeps_the_accuracy_comes_first(monkeypatch):
    """In the order of their rounds, but what costs accuracy last; unknown accuracy costs nothing that is known."""

    def tried(seconds, after):
        remedy = Remedy({}, f"{seconds}", "", 10.0, seconds, 10.0 - seconds, 0.5, "", "", {})
        return RemedyTrial(remedy, {}, 10.0, seconds, seconds, 0.78, after)

    found = [tried(1.0, 0.14), tried(4.0, 0.77), tried(3.0, 0.74), tried(2.0, None)]
    monkeypatch.setattr("fedvitals.lab.rerun.try_remedies", lambda *_, **__: found)
    experiment = lab.Experiment(dataset="digits", model="mlp", clients=4, network=lab.Network(links="4g"))
    told = Run("r", "r", "lab", config={"experiment": experiment.to_toml()})
    profile = SimpleNamespace(run=told, clock="virtual", clocks=("virtual",), remedies=())
    assert [one.measured for one in profile_lab.try_out(profile, 3)] == [2.0, 3.0, 4.0, 1.0]


def test_only_the_lab_can_run_it_again(tmp_path, capsys):
    """Not a host's run, not one on the real clock, not one whose experiment nobody kept."""
    path = tmp_path / "runs.db"
    with fv.Monitor(path, "plain", machine=False, strict=True) as monitor, monitor.round(0):
        pass
    code, _, err = run(capsys, "plain", "--try", "--store", path)
    assert code == 2
    assert "Only lab runs can be tried again: this one's host is torch" in err
    told = begin("r1", "unkept")
    told.round({"c0": (1.0, 1.0, 1.0), "c1": (1.0, 1.0, 5.0)})
    told.rounds = 0
    told.round({"c0": (0.0, 1.0, 0.0)}, clock="real")
    kept = stored(tmp_path / "unkept.db", told)
    for arguments, words in (([], "keeps no experiment"), (["--clock", "real"], "Leave out --clock real")):
        code, _, err = run(capsys, "unkept", *arguments, "--try", "--store", kept)
        assert code == 2
        assert words in err


# -- --devices --------------------------------------------------------------------------------------------------------


@pytest.fixture
def large(tmp_path):
    """c1 takes 10 GB, 8 of them activations of 64 samples."""
    told = begin("r1", "large")
    told.round({"c0": (1.0, 1.0, 1.0), "c1": (1.0, 1.0, 1.0)})
    shares = {"model": 0.5 * GB, "gradients": 0.5 * GB, "optimizer": GB, "activations": 8 * GB}
    for node, scale in (("c0", 0.1), ("c1", 1.0)):
        for name, value in {**shares, "tensors": sum(shares.values())}.items():
            told.add(Metric(Where("r1", 0, node), told.at, f"memory.{name}", scale * value))
        told.add(Metric(Where("r1", 0, node), told.at, "memory.batch", 64.0))
    return stored(tmp_path / "runs.db", told)


def test_devices_tell_what_fits_and_what_would(large, capsys):
    """A laptop holds 10 GB. A phone has 3 GiB, nine tenths of them to be filled: 0.9 GB for activations, 7 samples."""
    code, out, _ = run(capsys, "large", "--devices", "--json", "--store", large)
    assert code == 0
    rows = {row["device"]: row for row in json.loads(out)["result"]["devices"]}
    assert {name: row["fits"] for name, row in rows.items()} == {"server": True, "laptop": True, "phone": False}
    assert rows["phone"]["peak_bytes"] == 10 * GB
    ways = {one["kind"]: one for one in rows["phone"]["remedies"]}
    assert ways["batch"]["value"] == 7
    assert set(ways) == {"batch", "prune"}, "16 bits leave 5.5 GB, 8 bits 4.1"
    assert holds_for_each(one["bytes"] <= 0.9 * 3 * 2**30 for one in ways.values())
    code, out, _ = run(capsys, "large", "--devices", "--store", large)
    assert code == 0
    text = " ".join(out[out.index("Devices") :].split())
    assert "c1 takes 10 GB at its predicted peak, batches of 64" in text
    assert "phone 3.22 GB does not fit a batch of 7 in place of 64" in text


def test_the_report_says_where_to_ask(large, tmp_path, capsys):
    """Where shares are known, --devices; without them it is told that nothing was measured."""
    code, out, _ = run(capsys, "large", "--store", large)
    assert code == 0
    assert "--devices" in out
    told = begin("r1", "bare")
    told.round({"c0": (1.0, 1.0, 1.0)})
    bare = stored(tmp_path / "bare.db", told)
    _, out, _ = run(capsys, "bare", "--store", bare)
    assert "--devices" not in out
    code, _, err = run(capsys, "bare", "--devices", "--store", bare)
    assert code == 2
    assert "no memory.tensors was measured" in err


# -- docs/profile.md --------------------------------------------------------------------------------------------------


def snippet(words):
    """The one block of code in which these words stand."""
    (found,) = [one for one in re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL) if words in one]
    return found


def train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(16, 8)).square().sum().backward()
        optimizer.step()


def client(line, worker):
    """Another process, whose clock is an hour ahead."""
    ahead = SimpleNamespace(time=lambda: time.time() + 3600)
    names = {"time": ahead, "model": torch.nn.Linear(8, 2), "train": train, "worker": worker}
    exec(snippet("def answer"), names)
    while (message := line.recv()) is not None:
        line.send(names["answer"](message))


def test_the_exchange_of_the_docs_over_a_pipe():
    """The ways and the training of a client elsewhere are in the round; that its clock is wrong is known and told."""
    sink = MemorySink()
    ours, theirs = multiprocessing.get_context("fork").Pipe()
    with fv.Monitor(None, sinks=[sink], machine=False, strict=True) as monitor:
        other = multiprocessing.get_context("fork").Process(target=client, args=(theirs, monitor.host.for_worker()))
        other.start()

        def ask(_node, message):
            ours.send(message)
            return ours.recv()

        names = {"time": time, "monitor": monitor, "model": torch.nn.Linear(8, 2), "ask": ask}
        for number in range(2):
            exec(snippet("monitor.exchange"), names | {"number": number})
        ours.send(None)
        other.join()
    spans = {(span.name, span.where.round): span for span in sink.records if type(span).__name__ == "Span"}
    way, own, whole = spans["journey", 1], spans["client", 1], spans["round", 1]
    assert way.where.node == own.where.node == "c7"
    assert (own.parent, way.parent) == (way.id, whole.id)
    assert min(way.attributes["parts"].values()) >= 0
    assert {"download", "compute", "upload"} <= set(way.attributes["parts"])
    assert sum(way.attributes["parts"].values()) <= whole.seconds + 1e-3
    assert "aggregate" in spans["server", 1].attributes["parts"]
    assert way.attributes["clock_offset"] == pytest.approx(3600, abs=way.attributes["clock_error"])
    assert sink.value("time.clock_error", node="c7", round=1) == pytest.approx(3600, abs=1)


@pytest.mark.parametrize("probes", ["light", "standard"])
def test_light_probes_tell_no_phases(probes):
    """As the docs say: memory, yes; what the time of a step went to, no."""
    sink = MemorySink()
    model = torch.nn.Linear(8, 2)
    watched = fv.Monitor(None, probes=probes, sinks=[sink], machine=False, strict=True)
    with watched as monitor, monitor.round(0, model), monitor.client("c0", model):
        train(model)
    (own,) = [one for one in sink.records if type(one).__name__ == "Span" and one.name == "client"]
    assert ("forward" in own.attributes.get("parts", {})) == (probes == "standard")
    assert sink.value("memory.model", node="c0") == 72


def test_the_monitor_of_the_docs_takes_these_arguments(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monitor = eval(snippet("capture=fv.Capture").partition("=")[2], {"fv": fv})
    monitor.close()
