# SPDX-License-Identifier: Apache-2.0
"""Aggregation: values by hand, the laws of a mean, what liars cannot do, and ByzFL's word where it has one.

Tolerances: averages are summed in float64, so the order of clients moves a float32 result by its last bit at most
(2e-7 of the largest value); the holding rules sort by node first and do not move at all.
"""

from __future__ import annotations

import itertools
import math
from typing import Union

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedvitals.errors import ConfigError
from fedvitals.lab.aggregators.averages import (
    AVERAGING,
    AggregationError,
    Aggregator,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedYogi,
    weighted_mean,
)
from fedvitals.lab.aggregators.robust import ROBUST, GeometricMedian, Krum, Median, MultiKrum, NormClipping, TrimmedMean
from support.lab.byzfl_parts import byzfl_modules

RULES: list[Aggregator] = [
    FedAvg(),
    FedAvg(server_learning_rate=0.5),
    FedAvgM(),
    FedAdam(),
    FedYogi(),
    TrimmedMean(0.2),
    Median(),
    Krum(faulty=1),
    MultiKrum(faulty=1),
    MultiKrum(faulty=1, keep=2),
    GeometricMedian(),
    NormClipping(),
    NormClipping(norm=1.0),
]
IDENTITIES = [FedAvg(), FedAvgM(), TrimmedMean(0.3), Median(), GeometricMedian(), NormClipping()]


def name(rule) -> str:
    return repr(rule)


def aggregate(rule, states, samples=None, server=None, memory=None, weights=None, nodes=None):
    states = torch.as_tensor(states, dtype=torch.float32)
    server = torch.zeros(states.shape[1]) if server is None else torch.as_tensor(server, dtype=torch.float32)
    samples = [1.0] * len(states) if samples is None else samples
    nodes = [f"c{row}" for row in range(len(states))] if nodes is None else nodes
    running = rule.begin(server, {} if memory is None else memory, len(server) if weights is None else weights)
    passing = torch.empty_like(server)
    for state, weight, node in zip(states, samples, nodes, strict=True):
        passing.copy_(state)  # as an engine does: a state is valid only until the next
        running.add(passing, weight, node)
    return running.finish()


@st.composite
def cohorts(draw, least=5, most=9, finite=True):
    """States of a few clients, [n, 4], with samples."""
    count = draw(st.integers(least, most))
    numbers = st.floats(-1e3, 1e3, width=32, allow_subnormal=False)
    if not finite:
        numbers |= st.sampled_from([math.nan, math.inf, -math.inf, 3e38])
    rows = draw(hnp.arrays(np.float32, (count, 4), elements=numbers))
    samples = draw(hnp.arrays(np.int64, count, elements=st.integers(1, 1000)))
    return torch.from_numpy(rows), samples.tolist()


# By hand.


def test_fedavg_is_the_mean_weighted_by_samples():
    assert aggregate(FedAvg(), [[1, 2], [4, 8]], [1, 2]).tolist() == [3, 6]


def test_a_server_learning_rate_goes_part_of_the_way_and_leaves_buffers_to_the_mean():
    new = aggregate(FedAvg(server_learning_rate=0.5), [[1, 2], [3, 4]], server=[4, 10], weights=1)
    assert new.tolist() == [3, 3]  # 4 + (2 − 4) / 2, and the mean


def test_fedavgm_keeps_its_momentum_from_round_to_round():
    memory = {}
    rule = FedAvgM(momentum=0.5)
    assert aggregate(rule, [[1, 7]], server=[0, 0], memory=memory, weights=1).tolist() == [1, 7]
    assert aggregate(rule, [[2, 9]], server=[1, 7], memory=memory, weights=1).tolist() == [2.5, 9]  # v = 0.5·1 + 1
    assert memory["momentum"].tolist() == [1.5]


@pytest.mark.parametrize(("rule", "second"), [(FedAdam, 0.99e-6 + 0.01 * 4), (FedYogi, 1e-6 + 0.01 * 4)])
def test_adaptive_rules_take_the_papers_step(rule, second):
    memory = {}
    new = aggregate(rule(learning_rate=0.1), [[2, 5], [2, 7]], server=[0, 0], memory=memory, weights=1)
    assert memory["momentum"].item() == pytest.approx(0.2)
    assert memory["second_moment"].item() == pytest.approx(second, rel=1e-12)
    assert new.tolist() == pytest.approx([0.1 * 0.2 / (math.sqrt(second) + 1e-3), 6], rel=1e-6)


def test_fedyogi_comes_down_slowly_where_fedadam_forgets():
    first, second = {}, {}
    for rule, memory in ((FedAdam(), first), (FedYogi(), second)):
        aggregate(rule, [[10]], server=[0], memory=memory)
        aggregate(rule, [[0.1]], server=[0], memory=memory)
    assert first["second_moment"].item() == pytest.approx(0.99 * (1 + 0.99e-6) + 0.01 * 0.01, rel=1e-6)
    assert second["second_moment"].item() == pytest.approx(1 + 1e-6 - 0.01 * 0.01, rel=1e-6)


def test_trimmed_mean_cuts_the_fraction_at_each_end():
    states = [[float(value)] for value in (100, 1, 2, 3, 4, 5, 6, 7, 8, -100)]
    assert aggregate(TrimmedMean(0.1), states).tolist() == [4.5]
    squares = np.arange(100.0)[:, None] ** 2  # 29 are cut at each end, though 0.29 × 100 is below 29
    assert aggregate(TrimmedMean(0.29), squares).tolist() == pytest.approx([np.mean(squares[29:71])])
    assert aggregate(TrimmedMean(0.1), [[0], [3], [9]]).tolist() == [4]  # three are too few to cut one


def test_median_of_odd_and_even():
    assert aggregate(Median(), [[1], [50], [3]]).tolist() == [3]
    assert aggregate(Median(), [[1], [50], [3], [4]]).tolist() == [3.5]


def test_krum_takes_the_state_with_the_nearest_neighbours():
    states = [[0.0], [1], [3], [50], [60]]  # two neighbours each: squared 10, 5, 13, …
    assert aggregate(Krum(faulty=1), states).tolist() == [1]
    assert aggregate(MultiKrum(faulty=1, keep=3), states).tolist() == pytest.approx([4 / 3])
    assert aggregate(MultiKrum(faulty=1), states).tolist() == [13.5]  # the best four


def test_a_tie_of_krum_goes_by_the_nodes_name_not_by_arrival():
    states = torch.tensor([[0.0], [1.0], [9.0]])  # the first two are each other's only neighbour
    for order in itertools.permutations(range(3)):
        assert aggregate(Krum(faulty=0), states[list(order)], nodes=[f"c{row}" for row in order]).tolist() == [0]


def test_krum_measures_by_trained_weights_and_takes_the_buffers_along():
    states = [[0.0, 500], [1, -500], [3, 9], [50, 9], [60, 9]]
    assert aggregate(Krum(faulty=1), states, weights=1).tolist() == [1, -500]


def test_geometric_median_of_a_triangle_is_its_fermat_point():
    third = 2 * math.pi / 3
    corners = [[math.cos(k * third) * r, math.sin(k * third) * r] for k, r in enumerate((1, 2, 5))]
    assert aggregate(GeometricMedian(), corners).tolist() == pytest.approx([0, 0], abs=1e-5)


def test_geometric_median_stays_with_the_majority():
    states = [[1.0, 1], [1, 1], [1, 1], [1e6, -1e6], [-3e30, 3e30]]
    assert aggregate(GeometricMedian(), states).tolist() == pytest.approx([1, 1], abs=1e-4)


def test_norm_clipping_cuts_what_is_longer_than_the_bound():
    states = [[3, 4], [0.3, 0.4]]
    assert aggregate(NormClipping(norm=1), states).tolist() == pytest.approx([0.45, 0.6])
    assert aggregate(NormClipping(), [*states, [0, 30]]).tolist() == pytest.approx([1.1, (4 + 0.4 + 5) / 3])
    assert NormClipping().keeps_all_states
    assert not NormClipping(norm=1).keeps_all_states


# Laws.


@pytest.mark.thorough
@pytest.mark.parametrize("rule", RULES, ids=name)
@settings(max_examples=30)  # of each rule
@given(cohort=cohorts(), shuffled=st.randoms(use_true_random=False))
def test_the_order_of_clients_does_not_matter(rule, cohort, shuffled):
    states, samples = cohort
    order = list(range(len(states)))
    shuffled.shuffle(order)
    first = aggregate(rule, states, samples)
    second = aggregate(rule, states[order], [samples[row] for row in order], nodes=[f"c{row}" for row in order])
    tolerance = 0 if rule.keeps_all_states else 2e-7 * float(states.abs().max())
    if isinstance(rule, FedAdam | FedYogi):
        tolerance = 2e-7  # steps of 0.01, but Δ / √Δ² near 0 magnifies the last bit of a float64
    torch.testing.assert_close(first, second, rtol=2e-7 if tolerance else 0, atol=tolerance)


@pytest.mark.thorough
@pytest.mark.parametrize("rule", IDENTITIES, ids=name)
@settings(max_examples=30)  # of each rule
@given(cohort=cohorts(1, 1, finite=False), server=st.floats(-1e3, 1e3, width=32))
def test_one_client_is_the_identity(rule, cohort, server):
    states, samples = cohort
    if isinstance(rule, NormClipping):  # which cuts what is not finite
        states = states.nan_to_num(1.0, 2.0, 3.0)
    if isinstance(rule, FedAvgM):  # which rounds: server + (state − server)
        server = 0.0
    new = aggregate(rule, states, samples, server=[server] * 4)
    torch.testing.assert_close(new, states[0], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("rule", [rule for rule in RULES if not isinstance(rule, Krum | MultiKrum)], ids=name)
@settings(max_examples=30)  # of each rule
@given(cohort=cohorts())
def test_clients_that_agree_with_the_server_change_nothing(rule, cohort):
    states, samples = cohort
    same = states[:1].expand(len(states), -1)
    new = aggregate(rule, same, samples, server=states[0])
    torch.testing.assert_close(new, states[0], rtol=2e-7, atol=0)


@given(cohort=cohorts(), learning_rate=st.sampled_from([1.0, 0.3]))
def test_a_mean_lies_within_its_values(cohort, learning_rate):
    states, samples = cohort
    new = aggregate(FedAvg(server_learning_rate=learning_rate), states, samples, server=states[0])
    assert (new >= states.min(0).values - 1e-4).all()
    assert (new <= states.max(0).values + 1e-4).all()


@given(cohort=cohorts())
def test_the_plain_function_is_fedavg_bit_for_bit(cohort):
    states, samples = cohort
    assert torch.equal(weighted_mean(states, torch.tensor(samples)), aggregate(FedAvg(), states, samples))


@given(cohort=cohorts(8, 9), lies=st.lists(st.sampled_from([math.nan, math.inf, -math.inf, 1e30, -1e30]), max_size=2))
def test_trimmed_mean_median_and_krum_ignore_what_they_are_made_for(cohort, lies):
    """Two liars among eleven: the result stays between the honest clients' values, coordinate by coordinate."""
    honest, _ = cohort
    states = torch.cat([honest, *(torch.full((1, 4), lie) for lie in lies)])
    low, high = honest.min(0).values, honest.max(0).values
    slack = 2e-6 * honest.abs().max()
    for rule in (TrimmedMean(0.25), Median(), Krum(faulty=2), MultiKrum(faulty=2), GeometricMedian(), NormClipping()):
        new = aggregate(rule, states, server=honest.mean(0))
        if isinstance(rule, GeometricMedian | NormClipping):  # these bound the pull of a liar, they do not exclude it
            spread = float((honest - honest.mean(0)).norm(dim=1).max())
            assert (new - honest.mean(0)).norm() <= 4 * spread + slack + 1e-6  # the smoothing
        else:
            assert (new >= low - slack).all(), rule
            assert (new <= high + slack).all(), rule


@pytest.mark.thorough
@pytest.mark.parametrize("rule", RULES, ids=name)
@settings(max_examples=30)  # of each rule
@given(cohort=cohorts(5, 7, finite=False))
def test_what_is_not_finite_never_crashes(rule, cohort):
    assert aggregate(rule, *cohort).shape == (4,)


@pytest.mark.parametrize("rule", RULES, ids=name)
def test_nan_everywhere_is_passed_on_or_cut_to_the_server(rule):
    new = aggregate(rule, torch.full((5, 2), math.nan), server=[1, 2])
    if isinstance(rule, NormClipping):
        assert new.tolist() == [1, 2]
    else:
        assert new.isnan().all()


def test_nan_of_one_client_passes_an_average_but_no_robust_rule():
    states = torch.randn(7, 3, generator=torch.Generator().manual_seed(1))
    states[4, 1] = math.nan
    assert aggregate(FedAvg(), states).isnan().tolist() == [False, True, False]
    for rule in (TrimmedMean(0.2), Median(), Krum(faulty=1), MultiKrum(faulty=1), GeometricMedian(), NormClipping()):
        assert aggregate(rule, states).isfinite().all(), rule


# Refusals.


@pytest.mark.parametrize("rule", RULES, ids=name)
def test_no_weight_is_an_error_and_never_nan(rule):
    with pytest.raises(AggregationError, match="total weight of 5 updates is 0"):
        aggregate(rule, torch.ones(5, 2), [0] * 5)
    with pytest.raises(AggregationError, match="no update was added"):
        rule.begin(torch.zeros(3), {}, 3).finish()


@pytest.mark.thorough
@pytest.mark.parametrize("rule", RULES, ids=name)
@settings(max_examples=30)  # of each rule
@given(cohort=cohorts())
def test_a_client_without_samples_is_left_out_even_if_it_sends_nan(rule, cohort):
    states, samples = cohort
    more = torch.cat([states, torch.full((1, 4), math.nan)])
    assert torch.equal(aggregate(rule, more, [*samples, 0]), aggregate(rule, states, samples))


@pytest.mark.parametrize("rule", RULES, ids=name)
def test_what_does_not_fit_is_named(rule):
    running = rule.begin(torch.zeros(3), {}, 3)
    with pytest.raises(AggregationError, match=r"update of c7 .* got \[4\] of torch.float32, expected \[3\]"):
        running.add(torch.zeros(4), 1, "c7")
    with pytest.raises(AggregationError, match=r"update of c8 .* torch.float64, expected \[3\] of torch.float32"):
        running.add(torch.zeros(3, dtype=torch.float64), 1, "c8")
    for weight in (-1, math.nan, math.inf):
        with pytest.raises(AggregationError, match="weight of c9 cannot be"):
            running.add(torch.zeros(3), weight, "c9")


def test_krum_says_how_many_clients_it_needs():
    with pytest.raises(AggregationError, match=r"2·2 \+ 3 = 7 updates or more, but got 5.*lower `faulty` to 1"):
        aggregate(Krum(faulty=2), torch.ones(5, 2))
    with pytest.raises(AggregationError, match="3 updates or more, but got 1"):
        aggregate(MultiKrum(faulty=0), torch.ones(1, 2))
    with pytest.raises(AggregationError, match="cannot keep 9 of 5"):
        aggregate(MultiKrum(faulty=1, keep=9), torch.ones(5, 2))


def test_a_memory_of_another_model_is_refused():
    with pytest.raises(AggregationError, match=r"'momentum' has the shape \[7\], but the model has 3"):
        FedAvgM().begin(torch.zeros(3), {"momentum": torch.zeros(7)}, 3)


@pytest.mark.parametrize("states", [torch.ones(3), torch.ones(0, 2), torch.ones(2, 2)])
def test_the_plain_mean_refuses_what_has_none(states):
    with pytest.raises(AggregationError):
        weighted_mean(states, torch.zeros(len(states)))
    with pytest.raises(AggregationError):
        aggregate(TrimmedMean(), torch.ones(0, 2))


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: FedAvg(server_learning_rate=0), "server_learning_rate of fedavg"),
        (lambda: FedAvgM(momentum=1), "momentum of fedavgm"),
        (lambda: FedYogi(tau=-1), "tau of fedyogi"),
        (lambda: FedAdam(beta2=math.nan), "beta2 of fedadam"),
        (lambda: TrimmedMean(0.5), "fraction of trimmed_mean"),
        (lambda: Krum(faulty=-1), "faulty of krum"),
        (lambda: MultiKrum(faulty=1, keep=0), "keep of multi_krum"),
        (lambda: GeometricMedian(iterations=0), "iterations of geometric_median"),
        (lambda: NormClipping(norm=math.inf), "norm of norm_clipping"),
    ],
)
def test_impossible_settings_are_refused_when_they_are_made(make, what):
    with pytest.raises(ConfigError, match=what):
        make()


@pytest.mark.parametrize("rule", RULES, ids=name)
def test_a_rule_survives_being_written_down(rule):
    text = msgspec.json.encode(rule)
    assert msgspec.json.decode(text, type=Union[(*AVERAGING, *ROBUST)]) == rule


@pytest.mark.parametrize("rule", [FedAvgM(), FedAdam(), FedYogi()], ids=name)
def test_a_saved_memory_goes_on_bit_for_bit(rule, tmp_path):
    save = pytest.importorskip("safetensors.torch")
    states = torch.randn(6, 5, generator=torch.Generator().manual_seed(2))
    through, resumed = {}, {}
    aggregate(rule, states[:3], memory=through)
    aggregate(rule, states[:3], memory=resumed)
    save.save_file(resumed, tmp_path / "memory.safetensors")
    resumed = save.load_file(tmp_path / "memory.safetensors")
    assert torch.equal(aggregate(rule, states[3:], memory=through), aggregate(rule, states[3:], memory=resumed))


@pytest.fixture(scope="module")
def byzfl():
    with byzfl_modules("aggregators.aggregators") as (aggregators,):
        yield aggregators


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("count", "faulty"), [(8, 1), (11, 2), (30, 6)])
def test_byzfl_agrees(byzfl, seed, count, faulty):
    draws = np.random.default_rng(seed)
    states = draws.normal(size=(count, 5000)).astype(np.float32)
    states[:faulty] += 5
    wide = states.astype(np.float64)
    # ByzFL's Krum counts n − f − 1 neighbours, the paper n − f − 2: with one faulty client more they are the same.
    expected = {
        TrimmedMean(faulty / count): byzfl.TrMean(faulty)(wide),
        Median(): byzfl.Median()(wide),
        Krum(faulty): byzfl.Krum(faulty + 1)(wide),
        MultiKrum(faulty, keep=count - faulty - 1): byzfl.MultiKrum(faulty + 1)(wide),
        GeometricMedian(): byzfl.GeometricMedian(nu=1e-6, T=200)(wide),
    }
    for rule, theirs in expected.items():
        tolerance = 2e-5 if isinstance(rule, GeometricMedian) else 1e-6  # where the iterations are ended
        np.testing.assert_allclose(aggregate(rule, states).numpy(), theirs, rtol=0, atol=tolerance, err_msg=repr(rule))
