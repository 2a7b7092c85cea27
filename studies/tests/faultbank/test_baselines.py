# SPDX-License-Identifier: Apache-2.0
"""The baselines and the plain rules, against values that were worked out by hand."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import fedvitals as fv
from fedvitals import lab
from fedvitals.diagnosis.detectors.plain_rules import PlainRuleLimits, crossed_limits, plain_rules
from fedvitals.errors import ConfigError
from fedvitals.lab.aggregators.robust import krum_order
from fedvitals.store import MemoryStore
from fedvitals_studies.faultbank.baselines.history import BY_HISTORY, cohort_scores, cohort_zscore, fixed_thresholds
from fedvitals_studies.faultbank.baselines.published import ALIGN_INS, FL_DETECTOR, FLDetector, align_ins_scores
from fedvitals_studies.faultbank.baselines.sagemaker import Accusation, sagemaker_rules
from fedvitals_studies.faultbank.baselines.updates import (
    KRUM,
    UpdateBaselines,
    accused_by,
    feddebug_accused,
    krum_scores,
)
from fedvitals_studies.faultbank.recording import ABSENT, KEPT, Recording
from support.conditions import holds_for_each

NAN, INF = float("nan"), float("inf")


def history(*, loss=(), nodes=(), layers=("one.weight", "one.bias", "two.weight"), clients=None, **families):
    """A run in which everything is 1 but what is told: `loss` by round, `clients` as {metric: {node: values by round}},
    families as {statistic: {(node, layer): value}} of every round."""
    clients = clients or {}
    rounds = max([len(loss), *(len(v) for values in clients.values() for v in values.values()), 1])
    names = [*nodes] or ["a", "b", "c", "d"]
    metrics = {}
    for metric, values in clients.items():
        metrics[metric] = np.full((rounds, len(names)), ABSENT)
        for node, line in values.items():
            metrics[metric][: len(line), names.index(node)] = line
    blocks, tables = {}, {}
    for name, told in families.items():
        family = name.replace("_", ".")
        tables[family] = layers
        blocks[family] = np.ones((rounds, len(names), len(layers), len(KEPT[family])), np.float32)
        blocks[family][..., [i for i, s in enumerate(KEPT[family]) if s in ("nans", "infs", "sparsity")]] = 0
        for statistic, values in told.items():
            for (node, layer), value in values.items():
                blocks[family][:, names.index(node), layer, KEPT[family].index(statistic)] = value
    whole = {"loss": np.array(loss, np.float32)} if len(loss) else {}
    return Recording([*range(rounds)], names, metrics, whole, blocks, tables)


def issues(accusations):
    return {(one.issue, one.node) for one in accusations}


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ((1, 1, 1, 1, 2.01), {("DIVERGENCE", None)}),
        ((1, 1, 1, 1, 2.0), set()),  # over, not at
        ((1, 1, 1, 2.5), set()),  # four rounds are needed to look back on
        ((1, 0.75, 1, 0.75, 1), {("OSCILLATION", None)}),
        ((1, 0.75, 1, 0.75, 0.8), set()),  # the last changed by less than a fifth
        ((1, 2, 4, 8, 16), {("DIVERGENCE", None), ("OSCILLATION", None)}),  # growth swings, too: so it is taught
        ((1, 1, 1, 1, NAN), {("NAN_WEIGHTS", None)}),
        ((1, 1, 1, 1, INF), {("NAN_WEIGHTS", None), ("DIVERGENCE", None)}),
    ],
)
def test_loss(loss, expected):
    assert issues(fixed_thresholds(history(loss=loss), len(loss) - 1)) == expected


def test_only_what_was_known_by_then_counts():
    told = history(loss=(1, 1, 1, 1, 1, 1, 9))
    assert [number for number in range(7) if fixed_thresholds(told, number)] == [6]


def test_without_a_global_loss_the_mean_of_the_clients_own_counts():
    told = history(clients={"loss": {"a": [1, 1, 1, 1, 1], "b": [1, 1, 1, 1, 3.5]}})
    assert issues(fixed_thresholds(told, 4)) == {("DIVERGENCE", None)}


@pytest.mark.parametrize(
    ("metric", "value", "expected"),
    [
        ("gradient.norm_max", 1001.0, "EXPLODING_GRADIENT"),
        ("gradient.norm_max", 999.0, None),
        ("gradient.change", 3.01, "EXPLODING_GRADIENT"),
        ("gradient.change", 2.99, None),
        ("gradient.nonfinite", 1.0, "NAN_GRADIENT"),
        ("weight.nonfinite", 2.0, "NAN_WEIGHTS"),
        ("loss", NAN, "NAN_GRADIENT"),
    ],
)
def test_a_clients_numbers(metric, value, expected):
    told = history(clients={metric: {"b": [value], "c": [0.5 if "nonfinite" not in metric else 0.0]}})
    assert issues(fixed_thresholds(told, 0)) == ({(expected, "b")} if expected else set())


def test_layers():
    calm = history(gradient={}, gradient_steps={}, weight={})
    assert fixed_thresholds(calm, 0) == []
    told = history(gradient={}, gradient_steps={"norm_max": {("b", 2): 101.0, ("c", 0): 9e-8, ("d", 1): 99.0}})
    found = crossed_limits(told, 0, PlainRuleLimits())
    assert issues(found) == {("EXPLODING_GRADIENT", "b"), ("VANISHING_GRADIENT", "c")}
    assert {one.layer for one in found} == {"two.weight", "one.weight"}


def test_a_layer_that_does_not_train_has_no_vanishing_gradient_but_one_of_zeros_has():
    for size, expected in ((NAN, set()), (0.0, {("VANISHING_GRADIENT", "b")})):
        told = history(gradient={"rms": {("b", 0): size}}, gradient_steps={"norm_max": {("b", 0): 0.0}})
        assert issues(fixed_thresholds(told, 0)) == expected


def test_weights_are_of_the_run():
    told = history(weight={"absmax": {("b", 2): 1001.0, ("c", 0): 5000.0}})
    (found,) = crossed_limits(told, 0, PlainRuleLimits())
    assert (found.issue, found.node, found.layer, found.number.value) == ("WEIGHT_EXPLOSION", None, "one.weight", 5000)


def test_limits_are_the_users_own():
    told = history(loss=(1, 1, 1, 1, 2.5), clients={"gradient.norm_max": {"a": [0] * 4 + [50.0]}})
    assert issues(plain_rules(loss_ratio=3.0)(told, 4)) == set()
    (found,) = plain_rules(loss_ratio=None, gradient_norm=10.0)(told, 4)
    assert (found.issue, found.where.node, found.severity) == ("EXPLODING_GRADIENT", "a", "note")
    assert found.evidence["rule"] == "plain rule"
    assert found.evidence["numbers"] == [
        {"name": "gradient.norm_max", "value": 50.0, "usual": 10.0, "score": None, "of": "limit"}
    ]
    (found,) = plain_rules()(told, 4)
    assert found.evidence["since"] == 0
    with pytest.raises(ConfigError, match="swing of plain_rules must be above 0"):
        plain_rules(swing=0.0)
    with pytest.raises(ConfigError, match="smallest, largest"):
        plain_rules(layer_norm=(1.0, 0.1))


def test_plain_rules_speak_in_a_live_run_as_on_what_it_stored():
    store = MemoryStore()
    rules = plain_rules(gradient_norm=1e-6, layer_norm=(1e-12, 1e-5), weight=1e-3, change=1e-9)
    experiment = lab.Experiment(model="mlp", clients=3, rounds=2, local=lab.Local(iterations=2))
    with fv.Monitor(None, sinks=[store], detectors=[rules]) as monitor:
        lab.run(experiment, monitor, engine="sequential", workers=1)
        live = {(f.where.round, f.issue, f.where.node) for f in monitor.findings(notes=True)}
    past = store.history(monitor.run.id)
    after = {(f.where.round, f.issue, f.where.node) for number in (0, 1) for f in rules(past, number)}
    assert {("EXPLODING_GRADIENT", f"c{i}") for i in range(3)} <= {(issue, node) for _, issue, node in after}
    assert ("WEIGHT_EXPLOSION", None) in {(issue, node) for _, issue, node in live}
    assert {one[1:] for one in live} == {one[1:] for one in after}


# -- SageMaker-like ---------------------------------------------------------------------------------------------------


def rules_broken(history, number):
    """What SageMaker's rules say, but for the one on first weights, which most healthy models break."""
    return {one for one in sagemaker_rules(history, number) if one.issue != "POOR_INITIALISATION"}


def test_sagemaker_gradients_and_tensors():
    told = history(
        gradient={"rms": {("a", 0): 9e-8}, "nans": {("b", 1): 3}, "sparsity": {("d", 2): 1.0}},
        weight={"infs": {("c", 1): 1}},
        update={"nans": {("c", 1): 1}},
    )
    assert rules_broken(told, 0) == {
        Accusation("VANISHING_GRADIENT", "a"),
        Accusation("NAN_GRADIENT", "b"),
        Accusation("NAN_WEIGHTS", "c"),
        Accusation("NAN_UPDATE", "c"),
        Accusation("VANISHING_GRADIENT", "d"),
    }


def test_sagemaker_unchanged_layer_needs_three_rounds():
    told = history(update={"l2": {("b", 1): 0.0}}, clients={"update.norm": {"a": [1.0] * 3, "b": [1.0] * 3}})
    assert rules_broken(told, 1) == set()
    assert rules_broken(told, 2) == {Accusation("FROZEN_LAYER", "b")}


def test_sagemaker_update_ratio():
    told = history(clients={"weight.update_ratio": {"a": [10.1], "b": [9.9], "c": [1e-9], "d": [1e-7]}})
    assert rules_broken(told, 0) == {Accusation("WRONG_LEARNING_RATE", "a"), Accusation("WRONG_LEARNING_RATE", "c")}


def test_sagemaker_losses():
    """Ten rounds ago 10, now 9.995: less than 0.1 % better. 9.98 is enough. Training losses keep the others quiet."""
    falling = {"loss": {"a": [20.0 - number for number in range(11)]}}
    for last, expected in ((9.995, {Accusation("PLATEAU", None)}), (9.98, set())):
        told = history(loss=(10.0, *[9.0 - 0.2 * n for n in range(9)], last), clients=falling)
        assert {one for one in rules_broken(told, 10) if one.issue == "PLATEAU"} == expected


def test_sagemaker_overfitting_and_overtraining():
    told = history(loss=(1.0, 1.12), clients={"loss": {"a": [0.95, 0.9], "b": [0.95, 1.1]}})
    assert rules_broken(told, 0) == set()  # 5 % over
    assert rules_broken(told, 1) == {Accusation("OVERFITTING", None)}  # 12 % over the mean of 1
    training = [3.0, 2.0, 1.0, 0.95, 0.94, 0.93, 0.92, 0.91]  # since the third, better by 0.09
    told = history(clients={"loss": {"a": training}})
    assert rules_broken(told, 6) == set()  # five rounds before it, the best was 2
    assert rules_broken(told, 7) == {Accusation("PLATEAU", None)}


def test_sagemaker_first_weights():
    def poor(history, number=0):
        return Accusation("POOR_INITIALISATION", None) in sagemaker_rules(history, number)

    assert not poor(history(weight={}, gradient={}))
    assert poor(history(weight={"rms": {("a", 2): 3.2}}))  # squares 10.24 to 1
    assert not poor(history(weight={"rms": {("a", 2): 3.1}}))
    assert not poor(history(weight={"rms": {("a", 1): 100.0}}))  # a bias
    assert poor(history(gradient={"rms": {("a", 0): 0.0003}}))
    assert poor(history(loss=(1, 1, 1, 1, 1, 1)), 5)
    assert not poor(history(loss=(1,) * 12), 11)  # only the first ten


# -- the cohort -------------------------------------------------------------------------------------------------------


def test_cohort_score_by_hand():
    """Norms 1, 2, 3, 4, 10: median 3, distances 2, 1, 0, 1, 7, their median 1; 0.6745 × 7 = 4.72."""
    told = history(nodes="abcde", clients={"update.norm": dict(zip("abcde", [[1], [2], [3], [4], [10]], strict=True))})
    assert cohort_scores(told, 0) == pytest.approx({"a": 1.349, "b": 0.6745, "c": 0, "d": 0.6745, "e": 4.7215})
    assert cohort_zscore(told, 0) == [Accusation("UNUSUAL_CLIENT", "e")]


def test_equal_missing_and_broken_values_say_nothing():
    told = history(clients={"update.norm": {"a": [1.0], "b": [1.0], "c": [1.0], "d": [9.0]}})
    assert cohort_zscore(told, 0) == []
    told = history(clients={"update.norm": {"a": [1.0], "b": [NAN], "c": [9.0]}})
    assert cohort_scores(told, 0) == {}


# -- the updates ------------------------------------------------------------------------------------------------------


def deltas(*values):
    return {f"c{i}": [torch.tensor([float(value)])] for i, value in enumerate(values)}


def test_krum_by_hand():
    """Five clients, one thought faulty: two nearest each. Scores 5, 2, 2, 5 and 97² + 98²; four are selected."""
    found = krum_scores(deltas(0, 1, 2, 3, 100))
    assert found == pytest.approx({"c0": 1.0, "c1": 0.4, "c2": 0.4, "c3": 1.0, "c4": (97**2 + 98**2) / 5})
    assert accused_by(KRUM, {KRUM: found}) == ["c4"]


def test_krum_leaves_out_a_quarter_and_what_is_not_finite_first():
    random = np.random.default_rng(0)
    values = {f"c{i}": [torch.tensor(random.normal(size=7))] for i in range(12)}
    values["c5"][0][2] = NAN
    found = krum_scores(values)
    accused = accused_by(KRUM, {KRUM: found})
    assert accused[0] == "c5"
    assert json.loads(json.dumps(found)) == found
    order = krum_order([v[0] for v in values.values()], 3, torch.zeros(7), 7)
    assert set(accused) == {f"c{i}" for i in order[9:]}


def test_equal_updates_are_ranked_without_dividing_by_zero():
    found = krum_scores(deltas(*[1] * 8))
    assert len(accused_by(KRUM, {KRUM: found})) == 2  # it always leaves out a quarter
    assert holds_for_each(math.isfinite(score) for score in found.values())


def test_feddebug_is_told_the_number():
    kept = {"feddebug.1": {"a": 7.0, "b": 3.0}, "feddebug.2": {"a": 9.0, "c": 8.0, "b": 3.0}}
    assert feddebug_accused(kept, 0) == []
    assert feddebug_accused(kept, 1) == ["a"]
    assert feddebug_accused(kept, 2) == ["a", "c"]
    assert feddebug_accused(kept, 3) == ["a", "c", "b"]  # as far as it was asked


def test_parts_of_a_round_are_looked_at_together():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3))
    changed = {f"c{i}": [0.05 * torch.randn_like(p) for p in model.parameters()] for i in range(8)}
    changed["c2"] = [-2 * p.detach() for p in model.parameters()]
    whole = UpdateBaselines(model, (5,), seed=4).look(3, changed, model)
    assert {"multi_krum", "feddebug.1", "feddebug.4", "differential"} <= set(whole)
    assert accused_by(KRUM, whole)[0] == "c2"
    assert feddebug_accused(whole, 1) == ["c2"]
    assert max(whole["differential"], key=lambda node: whole["differential"][node]) == "c2"
    parts = UpdateBaselines(model, (5,), seed=4, rounds_to_test=[3])
    parts.gather(3, {"c0": changed["c0"]}, model)
    other = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3))
    parts.gather(3, {node: delta for node, delta in changed.items() if node != "c0"}, other)  # the first one counts
    assert parts.close() == whole
    assert parts.close() == {}
    assert parts.look(4, changed, model) == {}
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    assert UpdateBaselines(other, (5,), seed=4).look(3, changed, flat) == whole
    assert UpdateBaselines(other, (5,), seed=4).look(3, changed, model.state_dict()) == whole


def test_every_baseline_is_silent_where_nothing_was_measured():
    nothing = replace(history(), metrics={}, whole={})
    assert [name for name, baseline in BY_HISTORY.items() if baseline(nothing, 0)] == []


# -- published detectors of attackers ---------------------------------------------------------------------------------


def test_align_ins_by_hand():
    model = torch.tensor([1.0, 1.0, 1.0, 1.0])
    updates = {node: [torch.tensor([1.0, 1.0, 1.0, 1.0 + i / 10])] for i, node in enumerate("abcd")}
    updates["e"] = [torch.tensor([-5.0, 1.0, 1.0, 1.0])]
    scores = align_ins_scores(updates, model)
    # The largest value of e has another sign than most clients': 0 against 1, of which the deviation is 0.4.
    assert scores["e"] == pytest.approx(2.5)
    assert accused_by(ALIGN_INS, {ALIGN_INS: scores}) == ["e"]
    assert align_ins_scores({**updates, "f": [torch.full((4,), NAN)]}, model)["f"] > 1


def quadratic(rounds, attack=0.0):
    """Ten clients with a quadratic loss each, of the same curvature; from round 3 c9 sends noise of that size."""
    generator = torch.Generator().manual_seed(1)
    curvature = torch.linspace(0.5, 2.0, 12)
    minima = {f"c{i}": 0.1 * torch.randn(12, generator=generator) for i in range(10)}
    model, detector = torch.ones(12), FLDetector()
    for number in range(rounds):
        updates = {node: -0.1 * curvature * (model - least) for node, least in minima.items()}
        if attack and number >= 3:
            updates["c9"] = attack * torch.randn(12, generator=generator)
        detector.add({node: [update] for node, update in updates.items()}, model)
        model = model + torch.stack([*updates.values()]).mean(0)
    return detector


def test_fl_detector_predicts_what_a_quadratic_loss_gives_and_finds_who_sends_something_else():
    assert quadratic(6, attack=0.5).scores() == {}  # too early
    detector = quadratic(16, attack=0.5)
    assert accused_by(FL_DETECTOR, {FL_DETECTOR: detector.scores()}) == ["c9"]


def test_fl_detector_needs_two_groups():
    generator = torch.Generator().manual_seed(2)
    detector = FLDetector()
    model = torch.ones(12)
    for _ in range(16):
        detector.add({f"c{i}": [torch.randn(12, generator=generator)] for i in range(20)}, model)
        model = model + 0.1 * torch.randn(12, generator=generator)
    assert accused_by(FL_DETECTOR, {FL_DETECTOR: detector.scores()}) == []


def test_baselines_with_histories_take_every_round_and_answer_in_the_chosen_ones():
    module = nn.Linear(3, 2)
    baselines = UpdateBaselines(module, (3,), rounds_to_test=(13,), histories=True)
    generator = torch.Generator().manual_seed(3)
    for number in range(14):
        assert baselines.wants(number)
        updates = {
            f"c{i}": [torch.randn(2, 3, generator=generator), torch.randn(2, generator=generator)] for i in range(4)
        }
        answer = baselines.look(number, updates, module)
        assert bool(answer) == (number == 13)
    assert {ALIGN_INS, FL_DETECTOR} <= answer.keys()
    assert not UpdateBaselines(module, (3,), rounds_to_test=(13,)).wants(1)
