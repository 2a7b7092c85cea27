# SPDX-License-Identifier: Apache-2.0
"""Apps of every shape give the same bits plain, with two lines and with none; and what is seen of each is true."""

import json
import math
import os
import subprocess
import sys

import pytest
import torch

import fedvitals as fv
from fedvitals.hosts.watch_settings import FLOWER, WatchSettings
from fedvitals.records import Finding, Metric
from fedvitals.store import open_reader
from fedvitals.store.read import queries
from support.flower import shaped_apps
from support.flower.federation import OLDEST, flower_run, watched
from support.flower.processes import QUIET
from support.paths import TESTS

PROGRAM = TESTS / "support" / "flower" / "shaped_apps.py"
NODES = {str(node) for node in shaped_apps.NODES}
WITHOUT_WEIGHTS = ("xgboost", "dp")  # trees are bytes; what DP hides is not measured
pytestmark = [
    pytest.mark.skipif(OLDEST, reason="Flower 1.21 has not all of these strategies"),
    pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning"),
]


def results_of_program(folder, **environment):
    settings = {**os.environ, **QUIET, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(
        [sys.executable, str(PROGRAM)], env=settings, cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.fixture(scope="module")
def plain():
    torch.set_num_threads(1)
    with flower_run():
        return {name: shaped_apps.run(name) for name in shaped_apps.SHAPES}


@pytest.mark.parametrize("name", shaped_apps.SHAPES)
def test_with_two_lines_the_result_is_the_same_and_all_clients_are_seen(name, plain):
    with watched(detectors="standard") as (monitor, sink), flower_run():
        mods = [fv.flower.client_mod()]
        result = shaped_apps.run(name, mods, lambda strategy: fv.flower.attach(strategy, monitor))
    assert result == plain[name]
    cohorts = [event.data for event in sink.events("cohort") if event.data["phase"] == "train"]
    assert [{*data["answered"]} for data in cohorts] == [NODES] * shaped_apps.ROUNDS
    assert not [event for event in sink.events() if event.name in ("telemetry.refused", "update.refused")]
    assert not [finding for finding in sink.of(Finding) if finding.severity == "critical"]
    norms = {
        metric.where.round: metric.value for metric in sink.of(Metric, "weight.norm") if metric.where.node == "server"
    }
    assert bool(norms) == (name != "xgboost")
    updates = {metric.where.node for metric in sink.of(Metric, "update.norm")}
    assert updates == (set() if name in WITHOUT_WEIGHTS else NODES)
    if name != "dp":
        assert all(math.isfinite(sink.value("loss", round=1, node=node)) for node in NODES)


@pytest.mark.thorough
def test_with_no_line_the_results_are_the_same_and_each_app_is_a_run(plain, tmp_path):
    store = tmp_path / "runs.db"
    watching = WatchSettings(store=str(store), run="shapes").variables(os.environ, FLOWER)
    results, log = results_of_program(tmp_path, **watching)
    assert results == plain
    assert "does not watch" not in log
    with open_reader(store) as reader:
        runs = queries.list_runs(reader)
        assert len(runs) == len(shaped_apps.SHAPES)
        for run in runs:
            history = reader.history(run.id)
            assert len(history.rounds()) == shaped_apps.ROUNDS
            assert not [event for event in history.events("monitor.error") if event.where.round is not None]
