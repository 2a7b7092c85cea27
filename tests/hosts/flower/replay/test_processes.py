# SPDX-License-Identifier: Apache-2.0
"""Replay on a deployment of real processes, of an app without a line of ours: the server's part, and a client's."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedvitals.hosts.watch_settings import FLOWER, WatchSettings
from support.flower.processes import QUIET, deployed
from support.flower.records import SLOW, runs_of

pytestmark = pytest.mark.flower

PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "replayedapp"
version = "1.0.0"
dependencies = []
[tool.flwr.app]
publisher = "someone"
[tool.flwr.app.components]
serverapp = "replayedapp.server_app:app"
clientapp = "replayedapp.client_app:app"
[tool.flwr.app.config]
eta = 0.1
"""
CLIENT = """
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message, context):
    rounds = 1 + context.state.get("seen", ConfigRecord({"rounds": 0}))["rounds"]
    context.state["seen"] = ConfigRecord({"rounds": rounds})
    model = torch.nn.Linear(8, 2)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), 0.1 / rounds)
    for _ in range(5):
        optimizer.zero_grad()
        loss = (model(torch.randn(16, 8)) - context.node_config["partition-id"]).square().mean()
        loss.backward()
        optimizer.step()
    metrics = MetricRecord({"num-examples": 16, "loss": float(loss.detach())})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)
"""
SERVER = """
import torch
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAdam

app = ServerApp()


@app.main()
def main(grid, context):
    strategy = FedAdam(eta=context.run_config["eta"], fraction_evaluate=0.0, min_available_nodes=2)
    strategy.start(grid, ArrayRecord(torch.nn.Linear(8, 2).state_dict()), num_rounds=2, timeout=120)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two rounds on a SuperLink and two SuperNodes; the folder of it all, the run, and a node's id."""
    folder = tmp_path_factory.mktemp("replay")
    package = folder / "app" / "replayedapp"
    package.mkdir(parents=True)
    (folder / "app" / "pyproject.toml").write_text(PYPROJECT)
    for name, text in {"__init__": "", "client_app": CLIENT, "server_app": SERVER}.items():
        (package / f"{name}.py").write_text(text)
    told = WatchSettings(store=str(folder / "runs.db"), tape=str(folder / "site")).variables(os.environ, FLOWER)
    with deployed(folder, **told) as federation:
        nodes = federation.add_nodes(2)
        running = federation.submit(folder / "app", eta=0.05)
        assert running.wait(SLOW) == 0, running.log()[-3000:]
        node = nodes[1].identity
    (ours,) = runs_of(folder / "runs.db")
    return folder, ours, node


def fedvitals(folder: Path, *words: object, typed: str = "") -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "fedvitals", *map(str, words)],
        input=typed, capture_output=True, text=True, timeout=SLOW, check=False, cwd=folder, env={**os.environ, **QUIET},
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_the_aggregation_of_a_round_is_computed_again_at_the_server(run):
    folder, ours, _ = run
    words = ["replay", ours, "--store", folder / "runs.db"]
    code, out = fedvitals(folder, *words, "--verify", "--round", 2)
    assert code == 0, out
    assert "The same bits: round 2, FedAdam, 2 replies." in out
    code, out = fedvitals(folder, *words, "--round", 2, "--app", folder / "app")
    assert code == 0, out
    assert "The same bits" in out


def test_a_client_is_run_again_at_its_site_with_proof(run):
    folder, ours, node = run
    code, out = fedvitals(
        folder,
        "replay",
        ours,
        "--round",
        2,
        "--node",
        node,
        "--tape",
        folder / "site",
        "--app",
        folder / "app",
        "--verify",
        "--json",
    )
    assert code == 0, out
    found = json.loads(out[out.index("{") :])["result"]
    assert found["holds"] is True
    assert found["node"] == node


def test_a_client_is_run_again_under_pdb(run):
    folder, ours, node = run
    words = ["replay", ours, "--round", 2, "--node", node, "--tape", folder / "site", "--app", folder / "app", "--pdb"]
    code, out = fedvitals(folder, *words, typed="p message.metadata\nn\np rounds\nc\n")
    assert code == 0, out
    assert "-> rounds = 1 + context.state" in out
    assert "(Pdb) 2" in out  # its memory of the round before
    assert "The same bits" in out


def test_other_code_gives_other_bits_and_the_place_is_named(run, tmp_path):
    folder, ours, node = run
    package = tmp_path / "replayedapp"
    package.mkdir()
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    (package / "__init__.py").write_text("")
    (package / "client_app.py").write_text(CLIENT.replace("0.1 / rounds", "0.1001 / rounds"))
    words = ["replay", ours, "--round", 2, "--node", node, "--tape", folder / "site", "--app", tmp_path, "--verify"]
    code, out = fedvitals(folder, *words)
    assert code == 1, out
    assert "layer weight. Element [0, 0]: recorded" in out
