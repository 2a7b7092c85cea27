# SPDX-License-Identifier: Apache-2.0
"""The third held-out set and the bank of attacks are what was published, and what they are drawn by does its work."""

from collections import Counter

import pytest

from fedvitals_studies.faultbank.cases import read_bank
from fedvitals_studies.faultbank.matrix import called
from support.conditions import holds_for_each
from support.paths import ROOT

pytestmark = pytest.mark.thorough  # hundreds of experiments are described

PAGE = (ROOT / "docs" / "faultbank.md").read_text(encoding="utf-8")
THREE = "3254215c71655dcc142bf008746fbbb2"
ATTACKS = "e93e69bcbf146e87e2c23962900241ea"
DRAWN = """
name = "mine"
seed = 3

[settings]
clients = [6]
partitions = ["iid"]
participations = [1.0]
topologies = ["centralized"]
rounds = [12]
rounds_partial = [8]

[[domains]]
name = "digits-mlp"
dataset = "digits"
model = {kind = "mlp", hidden = [16]}
local = [{iterations = 8}]

[[faults]]
kind = "scaling"
cases = 1
"""
TRANSFORMED = """
transformed = 1.0
late = 1.0
strikes = 3
transformations = [{experiment = {compression = {kind = "top_k", share = 0.2, error_feedback = true}}, untold = true}]
"""
CONTROLS = """
[[controls]]
name = "new data"
group = "data that change"
runs = 2
experiment = {dataset = "digits", clients = 4, rounds = 9}
"""


def banked(folder, text):
    path = folder / "bank.toml"
    path.write_text(text, encoding="utf-8")
    return read_bank(path)


@pytest.mark.parametrize(("name", "digest"), [("held-out-three", THREE), ("attacks", ATTACKS)])
def test_the_newer_sets_are_those_whose_digests_were_published(name, digest):
    assert read_bank(name).digest == digest
    assert digest in PAGE


def test_the_third_set_has_what_the_others_lack():
    bank = read_bank("held-out-three")
    faulty = [case for case in bank.faulty if case.faulty]
    controls = [case for case in bank.faulty if not case.faulty]
    assert 500 <= len(faulty) <= 700
    assert len(bank.cases) == 2 * len(faulty) + len(controls)
    assert {case.control_group for case in controls} >= {
        "data that change", "feature skew", "long local training", "compression", "noise",
    }  # fmt: skip
    kinds = Counter(type(case.experiment.faults[0]).__name__ for case in faulty)
    assert len(kinds) >= 39
    assert min(kinds.values()) >= 10
    clients = {case.experiment.clients for case in faulty}
    assert (min(clients), max(clients)) == (2, 200)
    assert {type(case.experiment.topology).__name__ for case in faulty} == {
        "Centralized", "Clustered", "Hierarchical", "Rings", "Asynchronous",
    }  # fmt: skip
    assert {case.experiment.local.epochs for case in faulty} >= {1, 2, 3, 4, 5, 10}
    transformed = [case for case in faulty if case.transformation is not None]
    assert len(transformed) / len(faulty) == pytest.approx(1 / 3, abs=0.04)
    assert 0.1 < sum(case.untold for case in transformed) / len(transformed) < 0.5
    assert holds_for_each(case.twin.untold == case.untold and case.levels == (1, 2) for case in faulty)
    onsets = [fault.since >= case.experiment.rounds // 2 for case in faulty for fault in case.experiment.faults]
    assert sum(onsets) >= 50
    assert sum(case.experiment.faults[0].every is not None for case in faulty) >= 40


def test_culprits_take_part_often_enough_to_be_judged():
    cases = [case for case in read_bank("held-out-three").faulty if case.experiment.participation < 1]
    strikes = []
    for case in cases:
        rounds = called(case.experiment)
        for fault in case.experiment.faults:
            if fault.nodes not in ("all", ("server",)):
                strikes += [sum(map(fault.active_in_round, rounds[node])) for node in fault.nodes]
    assert len(strikes) > 50
    assert sum(count >= 6 for count in strikes) >= 0.9 * len(strikes)
    assert min(strikes) >= 2


def test_drawn_runs_may_be_transformed_begin_late_and_have_controls_beside_them(tmp_path):
    changed = DRAWN.replace("rounds_partial = [8]\n", f"rounds_partial = [8]\n{TRANSFORMED}")
    (plain,), cases = (banked(tmp_path, text).faulty for text in (DRAWN, f"{changed}{CONTROLS}"))
    case, *controls = cases
    assert (case.transformation, case.untold, case.twin.untold) == ("top_k, feedback", True, True)
    assert case.experiment.compression.share == case.twin.experiment.compression.share == 0.2
    assert 6 <= case.experiment.faults[0].since <= 9
    assert case.experiment.seed == plain.experiment.seed
    assert [(each.name, each.control_group, each.faulty) for each in controls] == [
        (f"mine/control-new data/{number:02d}", "data that change", False) for number in range(2)
    ]
    assert len({each.experiment.seed for each in controls}) == 2
