# SPDX-License-Identifier: Apache-2.0
"""What the README and the examples show works as shown."""

import re
import subprocess
import sys

import pytest

import fedvitals
from fedvitals.records import Finding
from fedvitals.store import open_reader
from fedvitals.store.read import queries
from support.paths import ROOT


def test_the_readmes_snippet_is_the_example():
    """Every line of the README's Python snippet stands in examples/plain_loop.py, in order."""
    snippet = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    example = (ROOT / "examples" / "plain_loop.py").read_text()
    body = snippet.split("\n", 2)[2].strip()  # after the import
    assert body.replace('"runs.db"', "store") in example


def test_the_readmes_recipe_for_workers_is_the_example():
    (recipe,) = re.findall(r"```py\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert recipe in (ROOT / "examples" / "worker_processes.py").read_text()


@pytest.mark.thorough
def test_the_recipe_for_workers_runs(tmp_path):
    """Every client of every round has its training, its update and how that compares with the others'."""
    pytest.importorskip("sklearn", reason="the example's data ship inside scikit-learn")
    store = tmp_path / "runs.db"
    subprocess.run([sys.executable, ROOT / "examples" / "worker_processes.py", store], check=True, cwd=tmp_path)
    with open_reader(store) as reader:
        run = queries.find_run(reader, "pool")
        history = reader.history(run)
        assert history.rounds() == [0, 1, 2]
        for name in ("gradient.norm", "update.norm", "update.cosine_mean"):
            assert all(len(history.latest(name, number)) == 6 for number in range(3))
        assert not queries.events(reader, run, level="warning")


@pytest.mark.thorough
def test_the_plain_loop_runs(tmp_path):
    """The example trains, and the store has every client's vital signs in every round."""
    pytest.importorskip("sklearn", reason="the example's data ship inside scikit-learn")
    store = tmp_path / "runs.db"
    subprocess.run([sys.executable, ROOT / "examples" / "plain_loop.py", store], check=True, cwd=tmp_path)
    with open_reader(store) as reader:
        run = queries.find_run(reader, "digits")
        history = reader.history(run)
        assert history.rounds() == list(range(5))
        for number in range(5):
            assert len(history.latest("gradient.norm", number)) == 8
            assert len(history.latest("update.cosine_mean", number)) == 8
        _, nodes, values = history.matrix("gradient", "l2", "0.weight")
        assert [node for node in nodes if node] == [f"c{i}" for i in range(8)]
        assert (values[:, [i for i, node in enumerate(nodes) if node]] > 0).all()
        assert history.series("accuracy", None)[1][-1] > 0.8


@pytest.mark.thorough
def test_the_readmes_lab_snippet_runs(tmp_path, capsys):
    """The README's snippet of the lab simulates a federation and prints its accuracy and findings."""
    snippets = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (snippet,) = [text for text in snippets if "lab.Experiment(" in text]
    short = snippet.replace("rounds=15", "rounds=2").replace("since=5", "since=1")
    short = short.replace('"runs.db"', repr(str(tmp_path / "runs.db")))
    names = {"fv": fedvitals}
    exec(short, names)
    assert len(names["result"].rounds) == 2
    assert len(capsys.readouterr().out.splitlines()) >= 2  # its accuracy, and its findings


def test_the_sinks_of_the_exporters_page_can_be_given_to_a_monitor(tmp_path):
    (snippet,) = re.findall(r"```py\n(.*?)```", (ROOT / "docs" / "exporters.md").read_text(), re.DOTALL)
    for name in ("google.protobuf", "prometheus_client"):
        pytest.importorskip(name)
    snippet = snippet.replace('"runs.db"', repr(str(tmp_path / "runs.db"))).replace(
        "Prometheus()", "Prometheus(port=0)"
    )
    names = {"fv": fedvitals}
    exec(snippet.replace('"alerts.toml"', repr(str(ROOT / "examples/alerts.toml"))), names)
    with names["monitor"] as monitor:
        assert len(monitor._run.outputs._sinks) == 3


@pytest.mark.thorough
def test_the_federated_lora_sees_a_rank_collapse_and_its_cure(tmp_path):
    for package in ("transformers", "peft"):
        pytest.importorskip(package, reason="the example needs transformers and peft")
    example = [sys.executable, ROOT / "examples" / "federated_lora.py", "--rounds", "2", "--pretraining", "5"]
    subprocess.run(example, check=True, cwd=tmp_path)
    with open_reader(tmp_path / "lora.db") as reader:
        padded, cured = (
            {finding.issue for finding in queries.records(reader, queries.find_run(reader, name), Finding)}
            for name in ("padded with zeros", "each direction over those who have it")
        )
        kept = reader.history(queries.find_run(reader, "padded with zeros")).latest("adapter.energy_kept", 1)
    assert padded == {"RANK_COLLAPSE"}
    assert cured == set()
    assert kept["server"] < 0.1
