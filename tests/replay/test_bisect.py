# SPDX-License-Identifier: Apache-2.0
"""Bisect: the culprits of a planted fault, by true re-runs, and how many it took."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import fedvitals as fv
from fedvitals import lab
from fedvitals.cli.main import app
from fedvitals.errors import ConfigError
from fedvitals.replay.counterfactual.bisect import bisect
from fedvitals.replay.counterfactual.evidence import FEATURES, ClientEvidence
from fedvitals.replay.debugger.conditions import parse
from fedvitals.replay.player.player import Player
from fedvitals.replay.tape.reader import open_tape


def record(folder: Path, fault: object, **fields: object) -> tuple[str, Player]:
    settings = {"clients": 6, "rounds": 8, "seed": 31, "model": "mlp", **fields}
    store = str(folder / "runs.db")
    with fv.Monitor(store, run="ill", host="lab", tape=fv.Tape()) as monitor:
        lab.run(lab.Experiment(dataset="digits", faults=[fault], **settings), monitor, workers=1)
    return store, Player(open_tape(store, monitor.run.id))


@pytest.fixture(scope="module")
def ill(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Player]:
    return record(tmp_path_factory.mktemp("ill"), lab.sign_flip(nodes=["c1", "c4"], strength=6.0, since=4))


def test_culprits_and_their_first_round_are_found_in_few_re_runs(ill: tuple[str, Player]) -> None:
    heard: list[str] = []
    found = bisect(ill[1], 2, 7, progress=heard.append)
    assert found.clients == ("c1", "c4")
    assert found.round == 4
    assert found.onsets == {"c1": 4, "c4": 4}
    assert found.reruns <= found.allowed
    assert found.reruns == 1 + len({(frozenset(one.without), one.first) for one in found.tries})
    assert sum(text.startswith("re-run") for text in heard) == found.reruns
    assert "Since round 4: c1, c4" in str(found)


@pytest.mark.thorough
def test_a_condition_decides_what_is_restored(ill: tuple[str, Player]) -> None:
    easy = bisect(ill[1], 2, 7, until=parse("accuracy >= 0.0"))
    assert len(easy.clients) == 1  # any one is enough
    never = bisect(ill[1], 2, 7, until=parse("accuracy >= 0.999"))
    assert never.clients == ()
    assert never.round is None
    assert "No set of clients" in str(never)
    assert (never.unusual["c1"], never.unusual["c4"]) == (4, 4)


def test_rounds_that_cannot_be_meant_are_refused(ill: tuple[str, Player]) -> None:
    with pytest.raises(ConfigError, match="comes before the bad one"):
        bisect(ill[1], 5, 5)
    with pytest.raises(ConfigError, match="one of loss, accuracy"):
        bisect(ill[1], 2, 5, metric="f1")


def test_a_feature_that_drifts_early_does_not_date_what_all_show_later() -> None:
    values = np.zeros((12, 3, len(FEATURES)))
    values[8:, 1, :3] = 1.0, -1.0, 1.0  # from round 8 on c1 is longer, points elsewhere and has another loss
    values[5:8, 1, 1] = -0.3  # its direction has moved a little since round 5
    found = ClientEvidence(list(range(12)), ("c0", "c1", "c2"), 3, values)
    assert found._gains("c1")[:, 1].argmax() == 5  # by its direction alone
    assert found.onset("c1")[0] == found.onset_of_all(["c1"]) == 8
    assert found.onset("c0") == (None, 0.0)


@pytest.mark.thorough
def test_a_round_whose_model_was_not_tested_is_refused(tmp_path: Path) -> None:
    fault = lab.sign_flip(nodes=["c1"], strength=6.0, since=3)
    _, player = record(tmp_path, fault, clients=3, rounds=6, evaluation=lab.Evaluation(every=2))
    tested = [number for number in player.tape.rounds if "loss" in player.tape.entry(number).metrics]
    assert len(tested) < 6
    with pytest.raises(ConfigError, match="was not tested"):
        bisect(player, next(number for number in range(5) if number not in tested), 5)
    assert bisect(player, tested[0], tested[-1]).clients == ("c1",)


@pytest.mark.thorough
def test_where_the_server_is_ill_no_client_is_accused(tmp_path: Path) -> None:
    _, player = record(tmp_path, lab.server_rate_too_high(factor=40.0, since=4))
    assert bisect(player, 3, 7).clients == ()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("fault", "fields"),
    [
        (lab.not_finite(nodes=["c2"], since=5), {}),
        (lab.scaling(nodes=["c0", "c5"], factor=60.0, since=4), {}),
        (lab.wrong_learning_rate(nodes=["c3"], factor=100.0, since=4), {"partition": lab.dirichlet(1.0)}),
        (lab.sign_flip(nodes=["c3"], strength=8.0, since=5), {"topology": lab.Hierarchical(edges=2)}),
        (lab.inner_product(nodes=["c1", "c2"], strength=8.0, since=4), {"topology": "rings"}),
    ],
)
def test_other_faults_and_topologies(tmp_path: Path, fault: lab.Experiment, fields: dict[str, object]) -> None:
    _, player = record(tmp_path, fault, **fields)
    found = bisect(player, 3, 7)
    assert (found.clients, found.round) == (fault.nodes, fault.since)
    assert found.reruns <= found.allowed


@pytest.mark.thorough
def test_the_command_tells_each_try_and_its_answer(ill: tuple[str, Player]) -> None:
    store, player = ill
    asked = ["bisect", player.tape.setting.run, "--good", "2", "--bad", "7", "--store", store]
    said = CliRunner().invoke(app, asked, standalone_mode=False)
    assert said.exception is None
    assert "Since round 4: c1, c4" in said.output.replace("\n", " ")
    assert "re-run 2: without" in said.stderr
    told = CliRunner().invoke(app, [*asked, "--json", "--metric", "accuracy"], standalone_mode=False)
    found = json.loads(told.stdout)["result"]
    assert (found["clients"], found["round"], found["metric"]) == (["c1", "c4"], 4, "accuracy")
