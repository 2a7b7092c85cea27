# SPDX-License-Identifier: Apache-2.0
"""Attackers who act together, against ByzFL's own and by hand."""

from __future__ import annotations

import pytest
import torch

from fedvitals import lab
from fedvitals.lab.engines.tasks import Update
from fedvitals.lab.faults import table as fault_table
from fedvitals.lab.faults.colluding import search_maximum
from fedvitals.lab.federation import ServerModelHistory, ServerState
from support.lab.byzfl_parts import byzfl_modules
from support.lab.faulty_training import CLASSES, LAYOUT, Past, data, updates

WEIGHTS = LAYOUT.weights


@pytest.fixture(scope="module")
def byzfl():
    with byzfl_modules("attacks.attacks", "aggregators.aggregators") as modules:
        yield modules


def cohort(honest, attackers):
    """Honest changes [n, weights] and so many attackers, who all started from 0, in float64."""
    start = torch.zeros(honest.shape[1], dtype=torch.float64)
    changes = [*honest, *[torch.zeros_like(start)] * attackers]
    return [Update(f"c{i}", change, start, samples=10) for i, change in enumerate(changes)]


def attacked(fault, sent, past):
    fault_table.apply_collusion([fault], 0, sent, past, 7)
    return sent[-1].state


def server_with(rule, size):
    return ServerModelHistory(ServerState(torch.zeros(size, dtype=torch.float64)), size, rule)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["trimmed mean", "median", "multi-krum", "mean"])
@pytest.mark.parametrize("kind", ["optimal_little_is_enough", "optimal_inner_product"])
def test_byzfl_sends_the_same(byzfl, kind, name, seed):
    attacks, rules = byzfl
    count, attackers, size = 8, 2, 12
    honest = torch.randn(count, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.5
    ours, theirs = {
        "trimmed mean": (lab.trimmed_mean(0.2), rules.TrMean(2)),
        "median": (lab.median(), rules.Median()),
        "multi-krum": (lab.multi_krum(2, keep=7), rules.MultiKrum(3)),  # it counts a state among its own neighbours
        "mean": (lab.fedavg(), rules.Average()),
    }[name]
    nodes = [f"c{count + i}" for i in range(attackers)]
    sent = attacked(lab.KINDS[kind](nodes=nodes), cohort(honest, attackers), server_with(ours, size))
    attack = {
        "optimal_little_is_enough": attacks.Optimal_ALittleIsEnough,
        "optimal_inner_product": attacks.Optimal_InnerProductManipulation,
    }[kind]
    wanted = torch.as_tensor(attack(agg=theirs, pre_agg_list=[], f=attackers)(honest.numpy()))
    torch.testing.assert_close(sent, wanted, rtol=1e-6, atol=1e-6)


def test_mimic_is_byzfls(byzfl):
    honest = torch.randn(5, 6, dtype=torch.float64)
    for victim in (0, 3):
        sent = attacked(lab.mimic(nodes=["c5", "c6"], victim=victim), cohort(honest, 2), server_with(lab.fedavg(), 6))
        torch.testing.assert_close(sent, byzfl[0].Mimic(victim)(honest))


def test_the_search_by_hand():
    """The maximum is at 41. 10 and 30 are better, 70 is worse. Then 0.8 of the step of 40, and so on, from 30: 62 and
    55.6 are worse, 50.48 is better; from there 66.864 and 63.5872 are worse.
    """
    tried = []

    def objective(x):
        tried.append(x)
        return -abs(x - 41)

    best = search_maximum(objective, 9)
    assert tried == pytest.approx([0, 10, 30, 70, 62, 55.6, 50.48, 66.864, 63.5872])
    assert best == pytest.approx(50.48)
    assert search_maximum(lambda x: x, 4) == 70.0
    assert search_maximum(lambda x: -x, 20) == 0.0
    assert search_maximum(lambda _: float("nan"), 5) == 0.0


def send(fault, past=None, number=2):
    past = past or Past()
    was, now = updates(past), updates(past)
    fault_table.apply_collusion([fault], number, now, past, 7)
    return [{u.node: (u.state - u.start)[:WEIGHTS] for u in each} for each in (was, now)]


def test_the_servers_memory_stays_as_it_is_while_attackers_try():
    rule = lab.fedavgm()
    server = ServerState(torch.zeros(4), memory={"aggregator/momentum": torch.ones(4, dtype=torch.float64)})
    past = ServerModelHistory(server, 4, rule)
    first, second = (past.aggregate([Update("c0", torch.ones(4), server.model, 1)]) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(first, torch.full((4,), 1.9))
    assert torch.equal(server.memory["aggregator/momentum"], torch.ones(4, dtype=torch.float64))
    assert past.aggregate([]) is server.model
    assert ServerModelHistory(server, 4, lab.fedavg(0.5)).server_learning_rate == 0.5
    assert ServerModelHistory(server, 4, lab.fedavgm(learning_rate=0.3)).server_learning_rate == 0.3
    assert ServerModelHistory(server, 4, lab.median()).server_learning_rate == 1.0


def test_an_optimal_attack_does_more_harm_than_its_plain_form():
    e = {"dataset": lab.synthetic(samples=300, classes=4), "model": "logistic", "clients": 8, "rounds": 5, "seed": 1,
         "aggregator": lab.median(), "local": lab.Local(epochs=1)}  # fmt: skip
    nodes = ["c1", "c2", "c3"]
    clean, plain, best = (
        lab.run(lab.Experiment(**e, faults=faults), engine="stacked", workers=1).rounds[-1].metrics["loss"]
        for faults in ([], [lab.inner_product(nodes=nodes, strength=0.1)], [lab.optimal_inner_product(nodes=nodes)])
    )
    assert clean < plain < best


def test_sybils_flip_labels_and_send_nearly_the_same():
    fault = lab.sybils(nodes=["c1", "c3", "c4"], source=2, target=4, strength=2.0, difference=0.1)
    y = data()[1]
    assert torch.equal(fault_table.apply_data([fault], 0, "c1", *data(), CLASSES, 7)[1], torch.where(y == 2, 4, y))
    was, now = send(fault)
    shared = 2 * (was["c1"] + was["c3"] + was["c4"]) / 3
    for node in ("c1", "c3", "c4"):
        assert float((now[node] - shared).norm() / shared.norm()) == pytest.approx(0.1, rel=0.4)
    assert float(torch.cosine_similarity(now["c1"], now["c3"], 0)) > 0.95
    assert not torch.equal(now["c1"], now["c3"])
    torch.testing.assert_close(now["c0"], was["c0"])
    equal = send(lab.sybils(nodes=["c1", "c3"], difference=0.0))[1]
    assert torch.equal(equal["c1"], equal["c3"])


def test_attackers_leave_out_what_cannot_be_added_up():
    past = Past()
    sent = updates(past)
    faults = [lab.shape_mismatch(nodes=["c1"]), lab.sybils(nodes=["c1", "c2"]), lab.model_replacement(nodes=["c1"])]
    for update in sent:
        fault_table.apply_update(faults, 0, update, past, 7)
    fault_table.apply_collusion(faults, 0, sent, past, 7)
    assert len(sent[1].state) == LAYOUT.size - 1


# -- other new faults -------------------------------------------------------------------------------------------------


def test_the_same_batch_in_each_step_and_round():
    fault = lab.same_batch(nodes=["c1"])
    orders = [
        fault_table.apply_order([fault], number, node, torch.arange(12).view(3, 4), 30, 7)
        for number, node in ((0, "c1"), (5, "c1"), (0, "c2"))
    ]
    assert torch.equal(orders[0], orders[1])
    assert (orders[0] == orders[0][0]).all()
    assert len(set(orders[0][0].tolist())) == 4
    assert torch.equal(orders[2], torch.arange(12).view(3, 4))
    few = fault_table.apply_order([fault], 0, "c1", torch.zeros(3, 5, dtype=torch.int64), 2, 7)
    assert sorted(few[0].tolist()) in ([0, 0, 0, 1, 1], [0, 0, 1, 1, 1])


def test_channels_change_places():
    def swap(x):
        return fault_table.apply_data([lab.channels_swapped(nodes=["c1"])], 0, "c1", x, torch.zeros(4), CLASSES, 7)[0]

    images = torch.rand(4, 3, 5, 5)
    assert torch.equal(swap(images), images[:, [2, 1, 0]])
    vectors = torch.rand(4, 6)
    assert torch.equal(swap(vectors), vectors[:, [5, 1, 2, 3, 4, 0]])
    sequences = torch.rand(4, 7, 2)
    assert torch.equal(swap(sequences), sequences[:, :, [1, 0]])


def test_small_gradients_are_flushed_as_float16_does():
    values = torch.tensor([1.0, -2.0, 0.1, 6.2e-5, 6.0e-5, -6.0e-5, 1e-7, 0.0, 70000.0])
    fault_table.gradient_fault([lab.float16_underflow(nodes=["c1"])], 0, "c1", 7)({"w": values}, 0)
    wanted = [1.0, -2.0, 0.0999755859375, 6.198883056640625e-05, 0.0, 0.0, 0.0, 0.0, float("inf")]
    assert values.tolist() == wanted
