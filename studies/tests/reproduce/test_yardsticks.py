# SPDX-License-Identifier: Apache-2.0
"""The yardsticks by hand, and that each criterion of `claims.toml` can be met and can be missed."""

import dataclasses

import numpy as np
import pytest

from fedvitals_studies.reproduce import yardsticks
from fedvitals_studies.reproduce.claims import read, verdicts
from fedvitals_studies.reproduce.conditions import BY_NAME, CONDITIONS, TOPOLOGIES
from fedvitals_studies.reproduce.results import KNOWN_GTSRB, Results
from support import invented_results as invented


def real(wanted, repeat=0):
    """An invented result that claims to be of the real data set."""
    return {**invented.measure(wanted, repeat), "dataset": "gtsrb", "digest": KNOWN_GTSRB[0]}


# -- the yardsticks, by hand -------------------------------------------------------------------------------------------


def test_yardsticks_of_a_curve():
    curve = np.array([0.1, 0.5, 0.4, 0.8, 0.8])
    assert yardsticks.final(curve) == pytest.approx(2 / 3)
    assert yardsticks.largest_fall(curve) == pytest.approx(0.1)
    assert yardsticks.mean_fall(curve) == pytest.approx(0.1 / 4)
    assert yardsticks.falls(curve, 0.05) == 1
    assert yardsticks.share_under(curve, 0.45) == pytest.approx(0.4)
    assert yardsticks.peak(np.array([np.nan, 3.0, 1.0])) == 3
    assert np.isnan(yardsticks.peak(np.array([np.nan])))
    assert yardsticks.crossings(np.array([1.0, -1, 1]), np.zeros(3)) == 2


def test_yardsticks_of_two_curves_on_a_log_axis():
    low, high = np.array([0.1, 1.0]), np.array([100.0, 1000.0])
    assert yardsticks.gap(high, low) == pytest.approx(2)
    assert yardsticks.gap(low, high) == pytest.approx(-4)
    assert yardsticks.gap(low, np.zeros(2)) == np.inf
    assert yardsticks.gap(np.zeros(2), low) == -np.inf
    assert yardsticks.orders_apart(high, low) == pytest.approx(3)
    assert yardsticks.unevenness(np.array([1.0, 10, 100])) == pytest.approx(0)
    assert yardsticks.ratio(1, 0) == np.inf


def test_yardsticks_of_iterations():
    """Two edges, five rounds of three iterations: one edge rises by 2 in round 3, and the next round starts lower."""
    loss, starts = np.ones((2, 5, 3)), np.ones((2, 5))
    assert yardsticks.rise(loss, starts) == 0
    assert np.isnan(yardsticks.healed(loss, starts, 0.5))
    loss[1, 3] = (1, 2, 3)
    assert yardsticks.rise(loss, starts) == 2
    assert yardsticks.healed(loss, starts, 0.5) == 1
    assert yardsticks.healed(loss, np.where(np.arange(5) == 4, 4.0, starts), 0.5) == 0
    difference = np.ones((2, 5, 3))
    assert yardsticks.together(loss, starts, difference, 0.5) == 0
    difference[1, 3, 2] = -2
    assert yardsticks.together(loss, starts, difference, 0.5) == 1
    assert yardsticks.burst(difference) == 2
    saw = np.tile([1.0, 2.0, 3.0], (4, 1))
    assert yardsticks.seam(saw) == 2
    assert yardsticks.falls_at_seam(saw) == 1


def test_a_rise_is_in_nats_whatever_the_level_and_counts_from_where_the_round_starts():
    level = np.array([4.0, 2.0, 1.0, 0.5])[None, :, None] * np.ones((1, 4, 3))
    starts = level[..., 0]
    assert yardsticks.rise(level, starts) == 0  # a ratio of losses would grow as they fall
    assert yardsticks.rise(level + np.array([0.0, 0.3, 0.1]), starts) == pytest.approx(0.3)
    assert yardsticks.rise(level + 0.3, starts) == pytest.approx(0.3)  # by the first iteration
    falling = level - np.array([0.1, 0.2, 0.3])
    assert yardsticks.rise(falling, starts) == 0


def test_scenarios_are_compared_in_the_same_round():
    grows = np.array([1.0, 10.0, 100.0])
    assert yardsticks.gap(10 * grows, grows) == pytest.approx(-1)  # the first of one with the last of the other
    assert yardsticks.gap_by_round(10 * grows, grows) == pytest.approx(1)
    assert yardsticks.gap_by_round(grows, np.zeros(3)) == np.inf
    assert yardsticks.gap_by_round(np.zeros(3), np.zeros(3)) == -np.inf
    assert yardsticks.gap_by_round(np.array([np.nan, 10, 2]), np.array([1.0, 1, np.nan])) == pytest.approx(1)


def test_yardsticks_across_repeats():
    runs = np.array([[0.5, 0.4, 0.6], [0.5, 0.5, 0.4]])
    assert yardsticks.alone(runs, 0.05) == 1
    assert yardsticks.runs_apart(runs) == pytest.approx(0.1)


def test_without_what_a_claim_is_about_it_cannot_be_tested():
    """Clipping cannot take away jumps, or falls, that are not there without it."""
    arms = [f"initial-{topology}-{arm}" for topology in TOPOLOGIES for arm in ("unclipped", "clipped")]
    runs = [real(BY_NAME[name], repeat) for name in arms for repeat in range(2)]
    for run in runs:
        rounds = np.linspace(0.1, 0.9, run["rounds"])
        run["series"] = {**run["series"], "aggregated.accuracy": rounds.tolist()}
        for name in ("start.test_loss", "iteration.test_loss", "iteration.difference_absolute"):
            if name in run["series"]:
                run["series"][name] = {edge: [1.0] * len(values) for edge, values in run["series"][name].items()}
    found = {verdict.claim.id: verdict for verdict in verdicts(Results(runs))}
    assert {claim for claim in found if found[claim].verdict == "not testable"} == {
        *("1.4", "1.7", "1.8", "1.9", "2.1", "2.2", "2.3", "2.4", "5.3", "5.7")
    }
    assert found["1.6"].verdict == "not"  # that there are jumps is the claim
    assert "no edge's loss rises by 0.2 nats" in found["2.1"].untested
    assert found["2.3"].untested.count("hardly falls") == 4
    assert found["2.3"].beside.verdict != "not run"  # on the server's test set, with the numbers that it has


SHORT = [dataclasses.replace(c, rounds=8, iterations=6) for c in CONDITIONS if c.paper]


def random_world(seed):
    """Results of all the paper's conditions with curves of all kinds and sizes; the repeats alike, or each its own."""
    rng = np.random.default_rng(seed)

    def curve(points, sizes):
        size, steps = rng.choice(sizes), np.arange(points) / points
        kinds = [
            lambda: np.zeros(points), lambda: np.full(points, size), lambda: size * np.exp(-3 * steps),
            lambda: size * (1 - np.exp(-9 * steps)), lambda: size * rng.normal(0, 1, points),
            lambda: size * (1 + 0.5 * np.sign(np.sin(7 * steps * rng.uniform(1, 9)))),
            lambda: size * (1 + 3 * (np.arange(points) % 6) / 6),
            lambda: size * np.where(np.arange(points) == rng.integers(points), 10.0, 1.0),
        ]  # fmt: skip
        return kinds[rng.integers(len(kinds))]()

    runs = []
    for condition in SHORT:
        calm, near, alike = rng.random(3) < 0.5  # losses of edges do not move; layers of one size; repeats are equal
        first = None
        for repeat in range(2):
            run = real(condition, repeat)
            for name, values in run["series"].items():
                sizes = [0.03, 0.3, 0.75, 0.96] if "accuracy" in name else [1.0] if near else 10.0 ** np.arange(-9, 4)
                clip = (lambda v: np.clip(v, 0, 1)) if "accuracy" in name else np.abs if "magni" in name else np.array
                if calm and "test_loss" in name:
                    drawn = {key: [1.0] * len(part) for key, part in values.items()}
                elif isinstance(values, dict):
                    drawn = {key: clip(curve(len(part), sizes)).tolist() for key, part in values.items()}
                else:
                    drawn = clip(curve(len(values), sizes)).tolist()
                run["series"][name] = drawn
            run["series"]["groups"] = [float(rng.integers(1, 4))] * condition.rounds
            first = first or run["series"]
            runs.append({**run, "series": first} if alike else run)
    return Results(runs)


@pytest.mark.thorough
def test_every_check_of_a_testable_claim_can_pass_and_can_fail():
    seen = {}
    as_the_paper = Results([real(condition, repeat) for condition in SHORT for repeat in range(2)])
    jumping = [real(condition, repeat) for condition in SHORT for repeat in range(2)]
    for run in jumping:  # signed as absolute: the losses of edges and their weights jump together
        if "iteration.difference" in run["series"]:
            run["series"]["iteration.difference"] = run["series"]["iteration.difference_absolute"]
    for world in (as_the_paper, Results(jumping), *map(random_world, range(60))):
        for verdict in verdicts(world):
            for place, each in enumerate(verdict.measured):
                seen.setdefault((verdict.claim.id, place), set()).add(each.verdict)
            seen.setdefault((verdict.claim.id, "claim"), set()).add(verdict.verdict)
    claims, _ = read()
    testable = {claim.id for claim in claims if not claim.untestable}
    for (claim, place), words in seen.items():
        if claim in testable and place != "claim":
            assert "reproduced" in words, (claim, place)
            assert "not" in words, (claim, place)
    for claim in (c for c in claims if c.needs):
        assert "not testable" in seen[claim.id, "claim"], claim.id
        assert seen[claim.id, "claim"] > {"not testable"}, claim.id


def test_the_heads_signed_mean_is_0_by_construction():
    """The identity that the page states: softmax cross-entropy's gradients of the logits sum to 0 over the classes."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    head = torch.nn.Linear(7, 5).double()
    loss = torch.nn.functional.cross_entropy(head(torch.randn(16, 7).double()), torch.randint(0, 5, (16,)))
    loss.backward()
    assert head.weight.grad.abs().mean() > 1e-2
    assert head.weight.grad.mean().abs() < 1e-16
    assert head.weight.grad.sum(0).abs().max() < 1e-15
