# SPDX-License-Identifier: Apache-2.0
"""Each issue of convergence on the fault that fires it, and silence on its healthy twin."""

import copy
import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from fedvitals import Monitor, lab
from fedvitals.diagnosis.detectors.convergence import (
    DETECTORS,
    client_drift,
    divergence,
    oscillation,
    overfitting,
    plateau,
)
from fedvitals.diagnosis.detectors.signals import server_step
from fedvitals.store import MemoryStore
from support.healthy.loops import blobs, train
from support.histories import findings_of, history_of, lab_history

pytestmark = pytest.mark.thorough  # seconds of training, or of other processes

MLP = {"model": lab.MLP(hidden=(32,)), "rounds": 6, "local": lab.Local(iterations=10, optimizer=lab.SGD(0.1))}


def issues(history, rounds=6):
    return {found.issue for number in range(rounds) for found in findings_of(DETECTORS, history, number)}


@pytest.mark.parametrize(
    ("fault", "learning_rate", "expected"),
    [
        (lab.server_rate_too_high(factor=8.0), 0.1, {"DIVERGENCE", "OSCILLATION"}),
        (lab.server_rate_too_low(factor=0.02), 0.1, {"PLATEAU"}),
        (lab.server_rate_too_low(factor=0.3), 1.0, {"SLOW_PROGRESS"}),
        (lab.client_drift(classes=2, iterations=100), 0.1, {"CLIENT_DRIFT"}),
    ],
)
def test_fault_fires(fault, learning_rate, expected):
    local = lab.Local(iterations=10, optimizer=lab.SGD(learning_rate))
    found = issues(lab_history(**{**MLP, "local": local}, faults=[fault]))
    assert found & {*expected, "PLATEAU", "CLIENT_DRIFT"} == expected


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"partition": lab.dirichlet(0.1), "participation": 0.5, "clients": 12},
        {"aggregator": lab.fedavgm()},  # momentum: the server's steps have no steady rate
        {"aggregator": lab.fedadam()},
        {"compression": lab.top_k(0.1)},
    ],
)
def test_healthy_training_is_silent(changes):
    assert issues(lab_history(**{**MLP, **changes})) == set()


@pytest.mark.parametrize("factor", [0.05, 3.0])
def test_the_servers_rate_is_read_from_sums(factor):
    fault = lab.server_rate_too_high if factor > 1 else lab.server_rate_too_low
    history = lab_history(**MLP, partition=lab.dirichlet(0.3), faults=[fault(factor=factor, since=2)])
    assert server_step(history, 0) is None
    assert server_step(history, 1).rate == pytest.approx(1, rel=0.01)
    assert server_step(history, 3).rate == pytest.approx(factor, rel=0.01)
    assert server_step(history, 3).fit > 0.999


def test_a_left_out_update_is_no_part_of_the_common_step():
    """Where a server averages all updates but one with NaN, it takes exactly the step of the others."""
    torch.manual_seed(0)
    store, (x, y) = MemoryStore(), blobs(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    with Monitor(None, sinks=[store], machine=False, detectors=()) as monitor:
        for number in range(3):
            trained = []
            with monitor.round(number, model):
                for i in range(3):
                    local = copy.deepcopy(model)
                    with monitor.client(f"c{i}", local, data=(x[i::3], y[i::3]), loss=cross_entropy):
                        train(local, x[i::3], y[i::3], cross_entropy, torch.optim.SGD(local.parameters(), 0.05))
                        if i == 0:
                            torch.nn.init.constant_(local[2].bias, math.nan)
                    trained.append(local.state_dict())
                model.load_state_dict(
                    {name: torch.stack([own[name] for own in trained[1:]]).mean(0) for name in trained[1]}
                )
    history = store.history(monitor.run.id)
    assert server_step(history, 2).rate == pytest.approx(1, rel=0.01)


def test_clients_that_continue_each_others_models_have_no_common_step():
    """The server then moves by the sum of the updates, not by their mean: nothing overshoots, and nothing is undone."""
    torch.manual_seed(0)
    store, (x, y) = MemoryStore(), blobs(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    with Monitor(None, sinks=[store], machine=False, detectors=()) as monitor:
        for number in range(6):
            with monitor.round(number, model):
                for i in range(5):
                    optimizer = torch.optim.SGD(model.parameters(), 0.02)
                    with monitor.client(f"c{i}", model, data=(x[i::5], y[i::5]), loss=cross_entropy):
                        train(model, x[i::5], y[i::5], cross_entropy, optimizer)
                monitor.log(loss=cross_entropy(model(x), y).item())
    history = store.history(monitor.run.id)
    assert issues(history) == set()
    assert [server_step(history, number) for number in range(6)] == [None] * 6


def test_a_round_is_judged_without_those_after_it():
    fault = lab.server_rate_too_high(factor=8.0)
    whole = lab_history(**MLP, faults=[fault])
    beginning = lab_history(**{**MLP, "rounds": 4}, faults=[fault])

    def messages_of(history):
        found = findings_of(DETECTORS, history, 3)
        return sorted((f.issue, f.message, f.evidence["since"]) for f in found)

    assert messages_of(whole)
    assert messages_of(whole) == messages_of(beginning)


def test_loss_that_is_no_number_or_runs_away():
    (found,) = divergence(history_of({("loss", None): [2.0, 1.0, math.nan]}), 2)
    assert (found.confidence, found.evidence["since"]) == (1.0, 2)
    away = history_of({("loss", None): [2.0, 1.0, 0.9, 4.0, 9.0, 0.8]})
    assert not list(divergence(away, 3))  # one bad round comes back by itself
    (found,) = divergence(away, 4)
    assert found.evidence["since"] == 3
    assert not list(divergence(away, 5))
    (found,) = divergence(history_of({("local.loss", None): [2.0, 1.0, 0.9, 4.0, 9.0]}), 4)
    assert found.evidence["numbers"][0]["name"] == "local.loss"


def test_rounds_that_undo_each_other():
    def history(cosine):
        losses = [1.0, 0.7, 1.0, 0.7, 1.0, 0.7, 1.0]
        return history_of(
            {("loss", None): losses} | {("update.cosine_previous", f"c{i}"): [None, *[cosine] * 6] for i in range(4)}
        )

    (found,) = oscillation(history(-0.5), 6)
    assert "swings" in found.message
    assert not list(oscillation(history(0.6), 6))  # few, unlike clients zigzag without undoing anything


def test_standing_still_is_a_note_after_many_rounds():
    def history(slope):
        return history_of({("loss", None): [2.3 - slope * number for number in range(14)]})

    assert not list(plateau(history(0.0), 10))
    (found,) = plateau(history(0.0), 13)
    assert found.severity == "note"
    assert not list(plateau(history(0.02), 13))


def test_learning_by_heart():
    def history(known, steps):
        metrics = {("steps", f"c{i}"): [steps] * 4 for i in range(8)}
        for i in range(8):
            node, jitter = f"c{i}", 1 + 0.05 * (i % 3)
            metrics |= {
                ("samples", node): [16] * 4,
                ("local.loss", node): [1.0 * jitter] * 4,
                ("fit.loss_before", node): [known * jitter] * 4,
                ("fit.loss_after", node): [0.02] * 4,
            }
        return history_of(metrics)

    (found,) = overfitting(history(0.4, 50), 2)
    assert found.evidence["numbers"][0]["value"] == pytest.approx(0.4, rel=0.1)
    assert not list(overfitting(history(0.4, 50), 1))  # twice at least
    assert not list(overfitting(history(0.4, 10), 2))  # few steps: the gap has another cause
    assert not list(overfitting(history(0.98, 50), 2))


def test_missing_numbers_are_no_trouble():
    assert issues(history_of({("accuracy", None): [0.1] * 6})) == set()
    assert issues(history_of({("gradient.norm", "c0"): [1.0] * 6})) == set()
    assert not list(client_drift(history_of({("loss", None): [2.3, 2.3]}), 1))
    assert issues(lab_history(**MLP, probes="light")) == set()


def two_sources(central, clients, every=3, rounds=24, named=False):
    """`loss` as an older Flower run has it: the server's own value at times, else the average of its clients'.

    `named`: as of today, where the average has a name of its own.
    """
    losses = [central(n) if n % every == 0 else None if named else clients(n) for n in range(rounds)]
    values = {("local.loss", f"c{i}"): [clients(n) + 0.01 * (i - 1) for n in range(rounds)] for i in range(3)}
    if named:
        values["local.loss", None] = [clients(n) for n in range(rounds)]
    return history_of(values | {("loss", None): losses})


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize(("server_loss", "client_loss"), [(0.4, 1.0), (1.2, 0.4)])
def test_two_sources_of_a_loss_are_never_compared_with_each_other(named, server_loss, client_loss):
    history = two_sources(lambda n: server_loss * 0.97**n, lambda n: client_loss * 0.97**n, named=named)
    assert issues(history, rounds=24) == set()


@pytest.mark.parametrize("named", [True, False])
def test_a_divergence_is_seen_in_either_of_two_sources(named):
    history = two_sources(lambda n: 0.4 * 1.1**n, lambda n: 1.0 * 1.1**n, named=named)
    assert "DIVERGENCE" in issues(history, rounds=24)
