# SPDX-License-Identifier: Apache-2.0
"""What `fedvitals lab` prints when a run ends: its quality in the task's own measure, its findings, and what to do."""

import json

import pytest

from fedvitals.cli import main as cli

HEALTHY = 'dataset = {kind = "tabular", name = "diabetes"}\nmodel = "mlp"\nclients = 4\nrounds = 2\n'
ILL = """dataset = "digits"
model = "mlp"
clients = 10
rounds = 5
[local]
iterations = 5
[[faults]]
kind = "not_finite"
nodes = ["c3"]
since = 2
"""


def closing(folder, text, capsys, *options):
    (folder / "e.toml").write_text(text)
    words = ["lab", str(folder / "e.toml"), "--store", str(folder / "runs.db"), "--engine", "sequential", *options]
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert not ended.value.code
    return capsys.readouterr().out


def test_findings_are_named_at_the_end(tmp_path, capsys):
    shown = closing(tmp_path, ILL, capsys)
    assert "Findings:" in shown
    assert "of c3" in shown
    assert "fedvitals replay" in shown
    assert json.loads(closing(tmp_path, ILL, capsys, "--json"))["result"]["findings"] >= 1


def test_a_task_without_accuracy_shows_its_loss_and_no_tape_promises_no_replay(tmp_path, capsys):
    shown = closing(tmp_path, HEALTHY, capsys, "--no-tape")
    assert "2 rounds, loss " in shown
    assert "Findings:" not in shown
    assert "fedvitals replay" not in shown
