# SPDX-License-Identifier: Apache-2.0
"""The bench of replay measures what it says, on sizes that take moments, and can say that a bar is missed."""

import gc
import math
import shutil
from types import SimpleNamespace

import pytest

from fedvitals.cli.main import main
from fedvitals.replay.tape.journal import RoundJournal
from fedvitals.replay.tape.reader import TapeReader
from fedvitals_studies.bench.replay import bars as bench
from fedvitals_studies.bench.replay import bisect as bisecting
from fedvitals_studies.bench.replay import cost
from fedvitals_studies.bench.replay import proof as proving
from fedvitals_studies.bench.replay import tape as taping
from support.conditions import holds_for_each

SAY = lambda _: None  # noqa: E731


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return taping.recorded(tmp_path_factory.mktemp("tape"), quick=True, tell=SAY)


# -- whether it is exact ----------------------------------------------------------------------------------------------


def test_runs_are_of_each_topology_model_and_seed():
    runs = proving.runs()
    assert len({run.name for run in runs}) == len(runs) == 4 * 3 * 3
    assert {type(run.topology).__name__.lower() for run in runs} == {*proving.TOPOLOGIES}
    assert len({type(run.model) for run in runs}) == 3
    assert any(run.faults for run in runs)
    assert any(run.participation < 1 for run in runs)
    assert any(not run.faults and run.participation == 1 for run in runs)


@pytest.mark.thorough
def test_every_round_is_proved_from_the_seed(tmp_path):
    one = proving.run_of("rings", "mlp", 2, 3)
    [found] = proving.proved([one], tmp_path, SAY)
    assert (found["rounds"], found["exact"], found["mismatch"]) == (3, 3, None)


def test_a_round_that_differs_misses_the_bar(monkeypatch, tmp_path):
    found = {"rounds": 3, "exact": 2, "seconds": 1.0, "mismatch": "The update differs: round 2."}
    monkeypatch.setattr(bench, "proved", lambda *_: [found])
    row = bench._verified(tmp_path, True, SAY)
    assert row["verdict"] == "missed"
    assert "The update differs" in row["measured"]


# -- what it costs ----------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_three_runs_side_by_side_cost_what_they_do(tmp_path):
    gc.collect()
    experiment = cost.WORKLOADS["mlp"].experiment(clients=4, iterations=1)
    with cost.arms_of(experiment, tmp_path, 1) as arms:
        for arm in arms.values():
            arm.measure(2)
        taped = RoundJournal(arms["tape"].tape.folder).rounds()
        found = cost.compared(arms)
    assert taped == [0, 1]  # whole, when its cost was told
    assert arms["every model"].tape.saved == 2 * 4
    saved = [*arms["every model"].tape.folder.glob("*.pt")]
    assert sorted(file.name for file in saved) == sorted(f"{r}-c{i}.pt" for r in range(2) for i in range(4))
    for arm in arms.values():
        assert arm.costs["cpu"][0] > 0
        assert 0 < arm.costs["own"][0] < arm.costs["wall"][0]
    assert arms["none"].costs["thread"] == [0.0]
    assert found["thread_seconds"] > 0
    assert found["aggregation_seconds"] == arms["none"].costs["own"][0]


def test_ratios_are_of_the_same_turns():
    seconds = {"none": [1.0, 2.0, 4.0, 1.0], "tape": [1.1, 2.2, 4.4, 1.1], "every model": [1.5, 1.5]}  # turns 0 and 3
    arms = {name: SimpleNamespace(costs=dict.fromkeys((*cost.COSTS, "thread"), own)) for name, own in seconds.items()}
    found = cost.compared(arms)
    assert found["tape"]["wall"]["overhead_percent"] == pytest.approx(10)
    assert found["every model"]["own"]["overhead_percent"] == pytest.approx(50)


@pytest.mark.parametrize(("low", "high", "verdict"), [(-0.5, 0.5, "met"), (0.5, 9.0, "open"), (8.5, 9.5, "missed")])
def test_an_interval_on_both_sides_of_a_bar_settles_nothing(monkeypatch, tmp_path, low, high, verdict):
    ratio = {"overhead_percent": (low + high) / 2, "low": low, "high": high}
    parts = ("round_seconds", "round_cpu_seconds", "aggregation_seconds", "aggregation_cpu_seconds", "thread_percent")
    seconds = dict.fromkeys(parts, 1.0)
    ratios = dict.fromkeys(cost.COSTS, ratio)
    found = {"tape": ratios, "every model": ratios, "pairs": 9, **seconds}
    monkeypatch.setattr(bench, "measured", lambda *_, **__: found)
    assert {row["verdict"] for row in bench._recording("mlp", tmp_path, True, SAY)} == {verdict}


# -- what it keeps, and how soon it is anywhere -----------------------------------------------------------------------


@pytest.mark.thorough
def test_the_tape_is_weighed_with_all_its_files(run):
    found = taping.size_of(run)
    assert found["complete"]
    assert found["updates_again"] == 10 * 8
    assert found["whole_bytes"] == 80 * found["model_bytes"] > 80 * 21_386 * 4
    assert found["bytes"] > run.tape.bytes  # what says how the run was set up counts, too


def test_a_tape_whose_beginning_is_gone_is_not_complete(run, tmp_path):
    folder = tmp_path / "tape"
    shutil.copytree(run.tape.folder, folder)
    for file in (folder / "objects").rglob("*"):
        if file.is_file() and file.name not in {came.mark.digest for came in run.tape.entry(7).came}:
            file.unlink()
    assert taping.size_of(taping.Recorded(run.experiment, TapeReader(folder)))["complete"]  # from the seed
    (folder / "rounds" / "00000000").unlink()
    assert not taping.size_of(taping.Recorded(run.experiment, TapeReader(folder)))["complete"]


@pytest.mark.thorough
def test_jumps_run_few_rounds_again_and_are_exact(run):
    found = taping.jumps(run, 8, SAY)["jumps"]
    assert sorted(one["round"] for one in found) == run.tape.rounds
    assert holds_for_each(one["exact"] for one in found)
    assert {one["round"]: one["rerun"] for one in found}[4] == 4
    assert max(one["rerun"] for one in found) < taping.EVERY
    assert holds_for_each(0 <= one["beside"] <= one["seconds"] for one in found)


def test_a_jump_that_is_not_exact_misses_the_bar(monkeypatch, run, tmp_path):
    jumped = {"opening": 0.1, "jumps": [{"round": 3, "seconds": 1.0, "beside": 0.1, "rerun": 3, "exact": False}]}
    monkeypatch.setattr(bench, "recorded", lambda *_, **__: run)
    monkeypatch.setattr(bench, "jumps", lambda *_: jumped)
    [row] = bench._taped(tmp_path, ["jump"], True, SAY)
    assert row["verdict"] == "missed"


# -- whom it convicts -------------------------------------------------------------------------------------------------


def test_cases_differ_and_can_be_run():
    cases = bisecting.planted()
    assert [case.seed for case in cases] == [*range(100, 120)]
    assert {len(case.nodes) for case in cases} == {1, 2}
    assert len({case.fault for case in cases}) == len(bisecting.FAULTS)
    assert len({case.model for case in cases}) == 3
    for case in cases:
        experiment = case.experiment()
        assert case.most < 2 * math.log2(case.rounds) + case.clients
        assert experiment.faults[0].since == case.since
        assert case.good < case.since < case.bad < case.rounds
        assert experiment.faults[0].nodes == case.nodes
        assert not case.twin().faults


def test_a_case_is_visible_and_its_twin_is_well(tmp_path):
    case = bisecting.Case(7, "sign_flip", "logistic", 4, 5, 2, ("c1",))
    run, worse = bisecting.recorded(case, tmp_path / "runs.db")
    assert bisecting.visible(worse)
    assert not bisecting.visible({"accuracy": 0.05, "loss": 1.2})
    assert run


def test_wrong_culprits_and_too_many_reruns_miss_the_bars(monkeypatch, tmp_path):
    right = {"case": "a", "right": True, "reruns": 5, "most": 10.0}
    wrong = {"case": "b", "right": False, "reruns": 12, "most": 10.0}
    monkeypatch.setattr(bench, "tried", lambda *_: [right, wrong])
    assert [row["verdict"] for row in bench._bisected(tmp_path, True, SAY)] == ["missed", "missed"]
    monkeypatch.setattr(bench, "tried", lambda *_: [right])
    assert [row["verdict"] for row in bench._bisected(tmp_path, True, SAY)] == ["met", "met"]


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command_knows_its_parts(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "replay", "--only", "faults"])
    assert "`bench replay` has no bar 'faults'" in capsys.readouterr().err
    from fedvitals_studies.verbs.bench import BARS

    assert BARS["replay"] == bench.PARTS
