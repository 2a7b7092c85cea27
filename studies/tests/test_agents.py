# SPDX-License-Identifier: Apache-2.0
"""The study of what the agents' tools suffice for: sets that share no seed, no look at findings, figures as stored."""

import ast
import inspect
import json

import pytest
import torch

from fedvitals import lab
from fedvitals.agents.tools import Tools
from fedvitals.monitor.monitor import Monitor
from fedvitals_studies.agents import planted_runs, procedure
from support.paths import ROOT

RESULT = ROOT / "studies/results/agents/result.json"


def test_sets_share_no_seed_and_hold_every_cause():
    sets = [list(planted_runs.drawn(seed)) for seed in (planted_runs.TUNING, planted_runs.JUDGED)]
    seeds = [{experiment.seed for experiment, _ in pairs} for pairs in sets]
    assert not seeds[0] & seeds[1]
    for pairs in sets:
        assert len(pairs) == 40
        causes = [truth.cause for _, truth in pairs]
        assert all(causes.count(cause) == 4 for cause in planted_runs.CAUSES)
        assert causes.count(planted_runs.HEALTHY) == 8


def test_the_procedure_calls_neither_findings_nor_sql():
    calls = [node for node in ast.walk(ast.parse(inspect.getsource(procedure))) if isinstance(node, ast.Call)]
    called = {call.args[0].value for call in calls if isinstance(call.func, ast.Name) and call.func.id == "call"}
    assert called == {"overview", "evidence"}


def test_the_answers_do_not_hold_the_truth(tmp_path):
    torch.set_num_threads(1)
    pairs = [*planted_runs.drawn(planted_runs.TUNING)]
    experiment, truth = pairs[planted_runs.CAUSES.index("learning rate too high")]
    with Monitor(tmp_path / "runs.db", run=experiment.name, seed=experiment.seed) as monitor:
        lab.run(experiment, monitor)
    tools = Tools(tmp_path / "runs.db")
    text = tools.overview(run=truth.run) + tools.evidence(run=truth.run)
    assert "wrong_learning_rate" not in text
    decision = procedure.decide(tools, truth.run)
    assert (decision.client, decision.cause) == (truth.client, truth.cause)
    assert decision.bytes < 20_000


@pytest.mark.parametrize("name", ["tuning", "judged"])
def test_stored_figures_add_up(name):
    result = json.loads(RESULT.read_text(encoding="utf-8"))[name]
    rows = result["decisions"]
    right = [row for row in rows if (row["named"], row["named_cause"]) == (row["client"], row["cause"])]
    assert (len(rows), len(right), max(row["bytes"] for row in rows)) == (40, result["right"], result["most_bytes"])
    page = (ROOT / "docs/agents.md").read_text(encoding="utf-8")
    assert f"{result['right']} of 40" in page
