# SPDX-License-Identifier: Apache-2.0
"""`fedvitals check`: the detectors say of a stored run what they said while it trained."""

import json
import subprocess
import sys

import pytest
import torch

import fedvitals as fv
from fedvitals import lab
from fedvitals.diagnosis import examine as examining
from fedvitals.diagnosis.compare import compare_findings
from fedvitals.diagnosis.examine import DETECTORS, examine
from fedvitals.diagnosis.finding import Number, finding
from fedvitals.records import Finding
from fedvitals.store import open_reader
from fedvitals.store.read import queries
from support.verbs import run

pytestmark = pytest.mark.thorough  # seconds of training, or of other processes

SETTINGS = {
    "clean": {},
    "nan": {"faults": [lab.NotFinite(nodes=["c1"], since=2, layer=0)]},
    "some": {"participation": 0.5, "faults": [lab.FrozenLayer(nodes=["c0", "c3"], layer=0)]},
    "crash": {"faults": [lab.Crash(nodes=["c2"], since=1), lab.Duplicate(nodes=["c4"], since=1)]},
    "edges": {"topology": lab.Hierarchical(edges=2), "faults": [lab.WrongSampleCount(nodes=["c5"], since=2)]},
    "network": {"network": lab.Network(), "faults": [lab.Straggler(nodes=["c6"], since=1), lab.DropOut(nodes=["c1"])]},
    "exploding": {"faults": [lab.ExplodingInitialisation()]},
}


def watch(store, name, settings, detectors="standard"):
    """A small run of the lab, and what was found while it trained."""
    torch.manual_seed(0)
    local = lab.Local(iterations=3, batch=8)
    experiment = lab.Experiment(
        dataset=lab.Synthetic(samples=400, features=12, classes=3),
        clients=8,
        rounds=7,
        local=local,
        model=lab.MLP(),
        **settings,
    )
    with fv.Monitor(store, name, detectors=detectors, strict=True) as monitor:
        lab.run(experiment, monitor, engine="sequential")
        return monitor.run.id, list(monitor.findings(notes=True))


def every_question(history, number):
    """A detector that asks everything of a history, and says what it heard: whatever differs shows."""
    heard = [history.rounds(), history.nodes(), history.layers("update")]
    heard += [sorted(history.latest(name, number).items()) for name in ("update.norm", "fit.loss_before", "samples")]
    heard += [history.series(name, node) for name in ("loss", "accuracy", "update.norm") for node in (None, "c1", "c7")]
    layer = history.layers("gradient")[0]
    rounds, nodes, values = history.matrix("gradient", "l2", layer)
    heard += [rounds, nodes, values.tolist()]
    for ask in (number, number + 1):
        nodes, values = history.across("update", ("l2", "absmax"), ask)
        heard += [nodes, values.tolist()]
    heard += [sorted((e.name, e.message, e.where.node or "") for e in history.events() if e.where.round is not None)]
    yield finding(
        "UNUSUAL_CLIENT", number, str(heard), confidence=0.5, node="c1", severity="note",
        numbers=[Number("loss", float("inf"), float("nan"))], more={"heard": tuple(str(h) for h in heard)},
    )  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_live_and_later_are_twins(name, tmp_path):
    """Every finding, in every word and number, out of memory as out of the store; nothing depends on later rounds."""
    detectors = (*DETECTORS, every_question)
    run, live = watch(tmp_path / "runs.db", name, SETTINGS[name], detectors)
    with open_reader(tmp_path / "runs.db") as reader:
        stored = queries.records(reader, run, Finding)
        later = examine(reader.history(run), detectors=detectors)
    for one in (live, stored):
        found = compare_findings(one, later)
        assert not found, [(f.where, f.issue, f.message) for f in (*found.only_now, *found.only_stored, *found.changed)]
        assert found.same == len(later) >= 7


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("check") / "runs.db"
    watch(path, "nan", SETTINGS["nan"])
    watch(path, "clean", SETTINGS["clean"])
    watch(path, "unjudged", SETTINGS["nan"], detectors=())
    return path


def test_a_sick_run_is_one_and_nothing_differs(store, capsys):
    code, out, _ = run(capsys, "check", "nan", "--store", store)
    assert code == 1
    assert f"by {len(DETECTORS)} detectors" in out
    assert "NAN_GRADIENT" in out
    assert "Nothing differs from" in out
    told = json.loads(run(capsys, "check", "nan", "--json", "--store", store)[1])["result"]
    assert {"run", "detectors", "cases", "hidden_notes", "difference", "failed", "examined", "not_judged"} == set(told)
    assert told["difference"]["only_now"] == told["difference"]["only_stored"] == []
    assert any(case["issue"] == "NAN_GRADIENT" and case["node"] == "c1" for case in told["cases"])


def test_a_healthy_run_is_zero(store, capsys):
    code, out, _ = run(capsys, "check", "clean", "--store", store)
    assert code == 0
    assert "0 findings, 0 still there" in out
    assert "Nothing differs from the store, which has 0 records" in out
    assert run(capsys, "findings", "clean", "--store", store)[0] == 0


def test_a_run_that_nobody_judged_is_judged_now_and_not_changed(store, capsys):
    code, out, _ = run(capsys, "check", "unjudged", "--store", store)
    assert code == 1
    assert "only now" in out
    assert run(capsys, "findings", "unjudged", "--store", store)[0] == 1  # still nobody has looked at it


def test_what_was_said_then_and_is_not_said_now(store, capsys, monkeypatch):
    """Other detectors, other findings; one that fails is named, and the rest still counts."""

    def broken(history, number):
        raise ValueError("no")

    monkeypatch.setattr(examining, "DETECTORS", (broken,))
    code, out, err = run(capsys, "check", "nan", "--store", store)
    assert code == 1  # no all-clear
    assert "only stored" in out
    assert "No findings, but not fully examined: the detector 'broken' failed (ValueError)." in out
    assert err.count("the detector 'broken' failed: ValueError('no')") == 1


def test_wrong_use_is_two(store, capsys):
    assert run(capsys, "check", "nothing", "--store", store)[0] == 2
    assert run(capsys, "check")[0] == 2


def test_no_torch_is_needed_to_look_again(store):
    """A laptop without torch can check what a cluster stored."""
    code = (
        "import sys\nfrom fedvitals.cli.main import app\n"
        f"app.main(['check', 'nan', '--store', {str(store)!r}], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules, 'torch was loaded'"
    )
    subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
