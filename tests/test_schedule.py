# SPDX-License-Identifier: Apache-2.0
"""When to measure: the plain rules, and the budget under a simulated clock."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from fedvitals import schedule
from fedvitals.errors import ConfigError
from fedvitals.protocols import Moment
from fedvitals.schedule import always, budget, every, first, last


def at(step: int) -> Moment:
    return Moment(0, "c1", step, 0.01, 0.0)


def chosen(rule, steps: int = 10) -> list[int]:
    return [step for step in range(steps) if rule(at(step))]


def test_every_first_always_and_last():
    assert chosen(every(3)) == [0, 3, 6, 9]
    assert chosen(first(2)) == [0, 1]
    assert chosen(always) == list(range(10))
    assert chosen(last()) == []
    assert last() is schedule.at_exit  # how a host recognises a probe that runs when the scope closes


@pytest.mark.parametrize("rule", [every, first])
def test_counts_below_one_are_refused(rule):
    with pytest.raises(ConfigError, match=rf"{rule.__name__}\(n\) needs n of at least 1, got 0"):
        rule(0)


@pytest.mark.parametrize("percent", [0, -1, 100.5, float("nan")])
def test_a_budget_must_be_a_share(percent):
    with pytest.raises(ConfigError, match=rf"in \(0, 100\], got {percent}"):
        budget(percent)


def simulate(rule, training, cost) -> np.ndarray:
    """What measuring cost at each step, as a monitor would tell the rule; `training` and `cost` are seconds a step."""
    spent, step_before = 0.0, 0.0
    costs = np.zeros(len(training))
    for step, seconds in enumerate(training):
        if rule(Moment(0, "c1", step, step_before, spent)):
            costs[step] = cost[step]
        spent += costs[step]
        step_before = seconds + costs[step]
    return costs


def assert_within_budget(percent, training, costs, window: int = 200) -> None:
    """No window may cost more than its share, but for one measurement: it cannot be cut in pieces."""
    started = int(np.flatnonzero(costs)[0]) + 1  # the first measurement is unavoidable: nobody knows its cost before
    spent = np.concatenate([[0.0], np.cumsum(costs[started:])])
    trained = np.concatenate([[0.0], np.cumsum(training[started:])])
    share = percent / 100 * 1.05
    for begin in range(len(spent) - window):
        end = begin + window
        allowed = share * (trained[end] - trained[begin]) + costs[started + begin : started + end].max()
        assert spent[end] - spent[begin] <= allowed
    assert spent[-1] <= share * trained[-1]


@pytest.mark.parametrize("percent", [0.5, 1.0, 5.0, 100.0])
def test_a_probe_ten_times_slower_than_the_step_is_thinned_out(percent):
    training, cost = np.full(20_000, 0.01), np.full(20_000, 0.1)
    rule = budget(percent)
    costs = simulate(rule, training, cost)
    assert_within_budget(percent, training, costs)
    # Nor may it be stingy: at least four fifths of the budget are used.
    assert costs.sum() >= 0.8 * percent / 100 * training.sum()
    assert (rule.asked, rule.granted) == (20_000, np.count_nonzero(costs))


@pytest.mark.parametrize("pattern", [(1.0, 10.0), (1.0, 0.1), (1.0, 10.0, 0.1, 1.0)], ids=["up", "down", "both"])
def test_the_budget_follows_a_step_time_that_changes_tenfold(pattern):
    training = np.repeat([0.01 * factor for factor in pattern], 5000)
    costs = simulate(budget(1.0), training, np.full(len(training), 0.001))
    assert_within_budget(1.0, training, costs)
    by_phase = [phase.sum() for phase in np.split(costs, len(pattern))]
    for phase, factor in zip(by_phase, pattern, strict=True):
        assert phase >= 0.8 * 0.01 * 5000 * 0.01 * factor


def test_the_budget_holds_for_costs_and_steps_that_scatter():
    random = np.random.default_rng(1)
    training = random.lognormal(np.log(0.01), 1.0, 20_000)
    cost = random.lognormal(np.log(0.002), 0.5, 20_000)
    assert_within_budget(2.0, training, simulate(budget(2.0), training, cost))


def test_a_cheap_probe_always_measures():
    training, cost = np.full(2000, 0.01), np.full(2000, 0.00005)
    costs = simulate(budget(1.0), training, cost)
    assert np.count_nonzero(costs[:1]) == 1
    assert np.count_nonzero(costs[3:]) == len(costs) - 3


def test_no_burst_follows_a_long_quiet_stretch():
    training = np.concatenate([np.full(1000, 0.01), [3600.0], np.full(1000, 0.01)])
    costs = simulate(budget(1.0), training, np.full(len(training), 0.01))
    assert np.count_nonzero(costs[1001:1101]) <= 3


def test_a_schedule_used_for_a_second_run_counts_its_costs_from_nothing():
    rule = budget(1.0)
    training, cost = np.full(10_000, 0.01), np.full(10_000, 0.01)
    for _ in range(2):
        costs = simulate(rule, training, cost)
        assert 0 < np.count_nonzero(costs) <= 105


def test_probes_with_a_budget_each_do_not_share_it():
    one, other = budget(1.0), budget(1.0)
    for rule, step in itertools.product((one, other), range(3)):
        rule(at(step))
    assert (one.asked, other.asked) == (3, 3)
