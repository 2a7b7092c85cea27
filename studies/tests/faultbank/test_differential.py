# SPDX-License-Identifier: Apache-2.0
"""Differential testing of client models: the published votes against brute force; a verdict that may be «nobody»."""

from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn

from fedvitals.errors import ConfigError
from fedvitals_studies.faultbank.baselines.differential import (
    differential_scores,
    differential_votes,
    disagreement,
    elimination_order,
    healthy_limit,
    random_answers,
    robust_scores,
    score_answers,
    states_of,
    votes_of,
)
from support.conditions import holds_for_each


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(flat=nn.Flatten(), one=nn.Linear(6, 32), relu=nn.ReLU(), two=nn.Linear(32, 4)))


def cohort(model, clients, culprits=(), size=0.05, seed=1):
    """Clients that moved a little at random; culprits turned their first layer around."""
    generator = torch.Generator().manual_seed(seed)
    deltas = {}
    for i in range(clients):
        delta = [size * torch.randn(p.shape, generator=generator) for p in model.parameters()]
        if i in culprits:
            delta[0] = -2 * model.one.weight.detach() + delta[0]
        deltas[f"c{i}"] = delta
    return states_of(model, deltas)


def answers(*clients):
    """Of one input: [clients, 1, neurons]."""
    return torch.tensor(clients, dtype=torch.float32)[:, None]


def test_the_one_without_whom_most_neurons_are_common_is_accused_first():
    """Without c: a, b share three neurons; without b: two; without a: one. Then of a and b, a alone has more."""
    order = elimination_order(answers([1, 1, 1, 1], [1, 1, 1, 0], [0, 0, 1, 1]), 2)
    assert order.tolist() == [[2, 1]]


@pytest.mark.parametrize("seed", range(20))
def test_as_counting_every_leave_one_out_set_would(seed):
    random = np.random.default_rng(seed)
    given = random.random((6, 3, 40)) < 0.8
    order = elimination_order(torch.tensor(given * 1.0), 3, seed=seed)
    for question in range(3):
        left = [*range(6)]
        for accused in order[question].tolist():
            common = {i: given[[j for j in left if j != i], question].all(0).sum() for i in left}
            assert common[accused] == max(common.values())
            left.remove(accused)


def test_what_is_not_above_the_threshold_is_silent_and_so_is_nan():
    nan = float("nan")
    assert elimination_order(answers([1, 1], [1, 1], [1, 0.003]), 1).tolist() == [[2]]
    assert elimination_order(answers([1, 1], [nan, nan], [1, 1]), 1).tolist() == [[1]]
    assert elimination_order(answers([1, 0.5], [1, 0.5], [1, 0.1]), 1, threshold=0.2).tolist() == [[2]]


def test_ties_are_drawn_by_lot():
    same = torch.ones(4, 200, 3)
    assert set(elimination_order(same, 1)[:, 0].tolist()) == {0, 1, 2, 3}


def test_votes_for_any_number_come_from_one_order():
    order = torch.tensor([[2, 0], [2, 1], [1, 2]])
    assert votes_of("abc", order, 1) == {"a": 0, "b": 1, "c": 2}
    assert votes_of("abc", order, 2) == {"a": 1, "b": 2, "c": 3}


def test_answers_are_those_of_the_clients_models_and_nothing_is_disturbed():
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Dropout(0.5), nn.Linear(5, 2)).train()
    torch.manual_seed(3)
    before, random = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    states = states_of(model, {"a": [torch.zeros_like(p) for p in model.parameters()],
                               "b": [torch.ones_like(p) for p in model.parameters()]})  # fmt: skip
    found = random_answers(model, states, (3,), inputs=4, seed=5)
    assert torch.equal(torch.get_rng_state(), random)
    assert model.training
    assert holds_for_each(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert not any(layer._forward_hooks for layer in model.modules())
    x = (2 * torch.rand(4, 3, generator=torch.Generator().manual_seed(5)) - 1) * 2**0.5  # bound: the root of 6/3
    with torch.no_grad():
        for one, shift in zip(found, (0, 1), strict=True):
            for parameter in model.parameters():
                parameter.add_(shift)
            hidden = model[0](x)
            outside = model[3](hidden.relu())
            assert torch.allclose(one, torch.cat([hidden, outside], 1).relu(), atol=1e-6)


def test_a_client_that_turned_a_layer_around_gets_the_votes():
    model = small_model()
    votes = differential_votes(model, cohort(model, 10, {3}), (6,), seed=2)
    assert sum(votes.values()) == 10
    assert votes["c3"] >= 9
    votes = differential_votes(model, cohort(model, 10, {3, 7}), (6,), seed=2, culprits=2)
    assert sum(votes.values()) == 20
    # Culprits who are silent together hide each other: the weakness that the repaired test does not have.
    assert set(sorted(votes, key=lambda node: -votes[node])[:2]) == {"c3", "c7"}


def test_the_repaired_test_counts_the_culprits_itself_and_may_find_none():
    model = small_model()
    assert differential_scores(model, cohort(model, 12), (6,)).accused == ()
    assert differential_scores(model, cohort(model, 12, {3}), (6,)).accused == ("c3",)
    assert set(differential_scores(model, cohort(model, 20, {3, 7}), (6,)).accused) == {"c3", "c7"}


def test_healthy_cohorts_are_left_in_peace():
    model = small_model()
    alarms = sum(bool(differential_scores(model, cohort(model, 10, seed=s), (6,), seed=s).accused) for s in range(60))
    assert alarms <= 3  # at one in a hundred; four or more of sixty have a chance of 0.003


def test_disagreement_by_hand():
    """The odd one out is alone twice, counted fully; for the other two, the others are divided: one half to the 4th."""
    found = disagreement(answers([1, 0], [1, 0], [0, 1]))
    assert found.tolist() == [1.125, 1.125, 3.0]


def test_standing_out_is_against_the_others():
    found = robust_scores(np.array([0.0, 1.0, 2.0, 10.0]))
    assert found[3] == pytest.approx(9 / 1.4826)  # others: median 1, distances 1, 0, 1
    assert found[0] == pytest.approx(-2 / 1.4826)  # others 1, 2, 10: median 2, distances 1, 0, 8


def test_where_all_answer_alike_one_neuron_accuses_nobody():
    given = np.ones((10, 1, 50))
    given[4, 0, 0] = 0
    assert score_answers([f"c{i}" for i in range(10)], torch.tensor(given)).accused == ()


def test_the_limit_holds_its_rate_and_is_higher_for_few_clients():
    random = np.random.default_rng(7)
    for clients in (5, 10, 30):
        limit = healthy_limit(clients, 0.05)
        share = (robust_scores(random.standard_normal((2000, clients))).max(-1) > limit).mean()
        assert 0.025 < share < 0.085
    assert healthy_limit(5, 0.01) > healthy_limit(10, 0.01) > healthy_limit(30, 0.01)
    assert healthy_limit(10, 0.01) > healthy_limit(10, 0.1)


def test_broken_models_stand_out_and_too_few_clients_do_not():
    model = small_model()
    states = cohort(model, 10)
    states["c4"] = torch.full_like(states["c4"], float("nan"))
    assert differential_scores(model, states, (6,)).accused == ("c4",)
    assert differential_votes(model, states, (6,))["c4"] == 10
    few = {node: states[node] for node in ("c3", "c4", "c5")}
    assert differential_scores(model, few, (6,)).accused == ()


def test_tokens_batch_norm_and_recurrence_are_understood():
    class Last(nn.Module):
        def forward(self, x):
            return x[0][:, -1]

    words = nn.Sequential(nn.Embedding(7, 4), nn.LSTM(4, 5, batch_first=True), Last(), nn.Linear(5, 2))
    images = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))
    for model, shape, neurons in ((words, (6,), 6 * 5 + 2), (images, (1, 4, 4), 2 * 4 + 3)):
        deltas = {f"c{i}": [torch.full_like(p, 0.01 * i) for p in model.parameters()] for i in range(4)}
        assert random_answers(model, states_of(model, deltas), shape, inputs=2).shape == (4, 2, neurons)


def test_what_cannot_be_done_is_said():
    with pytest.raises(ConfigError, match="no dense, convolutional or recurrent layer"):
        differential_votes(nn.Sequential(nn.LayerNorm(3)), {"a": torch.zeros(6), "b": torch.zeros(6)}, (3,))
    with pytest.raises(ConfigError, match="between 0 and 1"):
        healthy_limit(10, 1.0)
