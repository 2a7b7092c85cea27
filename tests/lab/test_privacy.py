# SPDX-License-Identifier: Apache-2.0
"""Differential privacy against values by hand, the statistics of its noise, and ε against other computations of it."""

from __future__ import annotations

import builtins
import math

import msgspec
import pytest
import torch

from fedvitals import lab
from fedvitals.errors import ConfigError, MissingExtraError
from fedvitals.lab.engines.tasks import Update
from fedvitals.lab.privacy import NOTE, Accountant, CentralDP, ClientDP, accountant_of, sampling_rate
from support.lab.by_hand import Watcher, experiment, run


def update(node, change, start=None):
    start = torch.zeros(len(change)) if start is None else start
    return Update(node, start + torch.tensor(change), start, 30)


# -- clipping and noise -----------------------------------------------------------------------------------------------


def test_clip_by_hand():
    """A change of (3, 4) has the norm 5: clipped to 1 it is (0.6, 0.8); one of norm 0.5 stays."""
    start = torch.tensor([1.0, 1.0, 9.0])  # the last one is a buffer
    sent = update("c0", [3.0, 4.0, 5.0], start)
    ClientDP(clip=1.0, noise=0.0).protect(sent, 2, torch.Generator())
    torch.testing.assert_close(sent.state, torch.tensor([1.6, 1.8, 14.0]))
    small = update("c0", [0.3, 0.4])
    ClientDP(clip=1.0, noise=0.0).protect(small, 2, torch.Generator())
    assert small.state.tolist() == torch.tensor([0.3, 0.4]).tolist()


def test_server_takes_the_mean_of_clipped_changes_each_counting_the_same():
    updates = [update("c0", [3.0, 4.0]), update("c1", [0.0, 0.5])]
    protected = [*CentralDP(clip=1.0, noise=0.0).protect(updates, torch.zeros(2), 2, torch.Generator())]
    assert [one.samples for one in protected] == [1, 1]
    torch.testing.assert_close(sum(one.state for one in protected) / 2, torch.tensor([0.3, 0.65]))


@pytest.mark.parametrize(("privacy", "deviation"), [(ClientDP(2.0, 0.7), 1.4), (CentralDP(2.0, 0.7), 1.4 / 4)])
def test_noise_has_its_deviation_and_no_direction(privacy, deviation):
    """Of 40,000 values: the mean of four clients whose change is 0, or the message of one."""
    size, stream = 40_000, torch.Generator().manual_seed(1)
    if isinstance(privacy, ClientDP):
        sent = update("c0", [0.0] * size)
        privacy.protect(sent, size, stream)
        noise = sent.state
    else:
        updates = [update(f"c{i}", [0.0] * size) for i in range(4)]
        noise = sum(one.state for one in privacy.protect(updates, torch.zeros(size), size, stream)) / 4
    assert float(noise.std()) == pytest.approx(deviation, rel=4 / math.sqrt(2 * size))  # four standard errors
    assert abs(float(noise.mean())) < 4 * deviation / math.sqrt(size)
    assert float((noise.abs() < deviation).double().mean()) == pytest.approx(0.6827, abs=0.01)  # it is Gaussian


def test_client_noise_is_its_own_in_every_round_and_for_every_client():
    pytest.importorskip("opacus")
    e = experiment(privacy=ClientDP(clip=1e-6, noise=1e6, delta=1e-5), rounds=2, clients=3, local=lab.Local(1))
    first, second = [result.state.clone() for result in lab.rounds(e, engine="sequential")]
    noise = second - first
    assert abs(float(torch.corrcoef(torch.stack([noise, first]))[0, 1])) < 0.2
    # The mean of three noises of deviation 1, weighted by samples: between 1/√3 and 1.
    assert 0.5 < float(noise.std()) < 1


def test_clipping_alone_is_a_loop_by_hand():
    """With noise = 0: each client's change is scaled, then averaged with equal weights."""
    plain = experiment(rounds=1)
    limit = 0.05
    server = lab.Site.of(plain)
    start = server.layout.flat(server.module)

    changes = {}

    class Shown(Watcher):
        def updates(self, _round, updates):
            changes.update({node: change.vector.clone() for node, change in updates.items()})
            return ()

    run(plain, Shown())
    clipped = [change * min(1.0, limit / float(change.norm())) for change in changes.values()]
    assert len(clipped) == 9
    expected = start + torch.stack(clipped).double().mean(0).float()
    got = run(msgspec.structs.replace(plain, privacy=CentralDP(clip=limit, noise=0.0)))
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=0)


# -- ε ----------------------------------------------------------------------------------------------------------------


def epsilon_by_hand(noise, rate, uses, delta):
    """Rényi divergence of the sampled Gaussian at whole orders (Mironov et al. 2019, eq. 30), and its conversion
    (Balle et al. 2020, theorem 21).
    """
    best = math.inf
    for order in range(2, 200):
        terms = (
            math.log(math.comb(order, k))
            + (order - k) * (math.log1p(-rate) if rate < 1 else (0.0 if k == order else -math.inf))
            + k * math.log(rate)
            + (k * k - k) / (2 * noise**2)
            for k in range(order + 1)
            if rate < 1 or k == order
        )
        logs = [*terms]
        top = max(logs)
        divergence = uses * (top + math.log(math.fsum(math.exp(one - top) for one in logs))) / (order - 1)
        spent = divergence + math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1)
        best = min(best, spent)
    return best


@pytest.mark.parametrize(
    ("noise", "rate", "uses", "google"),
    [(1.0, 0.1, 50, 5.88543), (1.1, 0.01, 1000, 1.71177), (2.0, 1.0, 10, 8.07941), (0.8, 0.3, 5, 8.57831)],
)
def test_epsilon_is_that_of_other_computations(noise, rate, uses, google):
    """`google`: dp_accounting 0.6.0, RdpAccountant with its own orders. By hand only whole orders are tried, so that
    value may be larger by a little.
    """
    pytest.importorskip("opacus")
    got = Accountant(noise, rate, 1e-5).epsilon(uses)
    assert got == pytest.approx(google, rel=0.001)
    by_hand = epsilon_by_hand(noise, rate, uses, 1e-5)
    assert got <= by_hand + 1e-9
    assert got == pytest.approx(by_hand, rel=0.03)


def test_epsilon_is_told_every_round_and_grows():
    pytest.importorskip("opacus")
    e = experiment(privacy=CentralDP(noise=1.0), participation=0.5, rounds=3)
    watcher = Watcher()
    result = lab.run(e, watcher, engine="sequential")
    spent = [one.metrics["privacy.epsilon"] for one in result.rounds]
    assert sampling_rate(e) == 4 / 9
    assert spent == [Accountant(1.0, 4 / 9, 1e-5).epsilon(uses) for uses in (1, 2, 3)]
    assert spent == sorted(spent)
    assert not [name for _, values in watcher.logged for name in values if name == "privacy.epsilon"]


def test_each_client_spends_only_when_it_sends():
    pytest.importorskip("opacus")
    e = experiment(privacy=ClientDP(noise=2.0), participation=0.5, rounds=3)
    watcher = Watcher()
    result = lab.run(e, watcher, engine="sequential")
    sent = [node for nodes in watcher.trained for node in nodes]
    accountant = Accountant(2.0, 1.0, 1e-5)
    last = {node: values["privacy.epsilon"] for node, values in watcher.logged if "privacy.epsilon" in values}
    assert last == {node: accountant.epsilon(sent.count(node)) for node in sent}
    assert result.rounds[-1].metrics["privacy.epsilon"] == max(last.values())


def test_asynchronous_clients_are_not_drawn_for_a_round():
    e = experiment(topology=lab.Asynchronous(buffer=3), network=lab.Network(), privacy=CentralDP(), participation=0.5)
    assert sampling_rate(e) == 1


def test_noise_of_a_secure_sum_is_that_of_all_who_must_be_left():
    pytest.importorskip("opacus")
    e = experiment(privacy=ClientDP(noise=0.5), secure_aggregation=lab.SecureAggregation(threshold=4 / 9))
    assert accountant_of(e).epsilon(2) == Accountant(1.0, 1.0, 1e-5).epsilon(2)


def test_without_the_library_the_run_does_not_begin(monkeypatch):
    real = builtins.__import__

    def without(name, *rest, **more):
        if name.startswith("opacus"):
            raise ModuleNotFoundError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtraError, match=r"opacus.*fedvitals\[privacy\]"):
        run(experiment(privacy=CentralDP()))
    assert run(experiment(privacy=CentralDP(noise=0.0), rounds=1)).isfinite().all()


# -- what it goes together with ---------------------------------------------------------------------------------------


def test_a_malicious_client_does_not_clip_itself_and_the_server_does():
    liar = {"faults": [lab.scaling(nodes=["c1"], factor=1e4)], "rounds": 1}
    at_server = run(experiment(**liar, privacy=CentralDP(clip=0.1, noise=0.0)))
    on_clients = run(experiment(**liar, privacy=ClientDP(clip=0.1, noise=0.0)))
    healthy = run(experiment(rounds=1))
    assert float((at_server - healthy).norm()) < 0.5
    assert float((on_clients - healthy).norm()) > 10


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"privacy": "client_dp", "topology": "rings"}, "client_dp does not protect the topology rings"),
        (
            {"privacy": "central_dp", "topology": "hierarchical"},
            "central_dp does not protect the topology hierarchical",
        ),
        ({"privacy": "central_dp", "topology": "clustered"}, "Possible: centralized, asynchronous"),
        ({"privacy": "central_dp", "aggregator": "median"}, "aggregator median needs more. Possible: fedavg"),
        ({"privacy": {"kind": "central_dp", "clip": 0}}, "clip of central_dp cannot be 0"),
        ({"privacy": {"kind": "client_dp", "noise": -1.0}}, "noise of client_dp cannot be"),
        ({"privacy": {"kind": "client_dp", "delta": 1.0}}, "delta of client_dp cannot be 1.0"),
        ({"privacy": lab.fedavg()}, "privacy is FedAvg. Known: central_dp, client_dp"),
    ],
)
def test_what_makes_no_sense_is_refused(changes, says):
    with pytest.raises(ConfigError) as refused:
        experiment(**changes)
    assert says in str(refused.value)


def test_running_statistics_would_leave_clients_without_noise():
    e = lab.Experiment(model=lab.resnet18(norm="batch"), privacy=ClientDP(), clients=2)
    with pytest.raises(ConfigError, match="running statistics"):
        lab.run(e)


def test_what_was_spent_is_not_undone_by_going_back(tmp_path):
    """The count of messages is part of the saved state, and stays when a correction restores an older model."""
    pytest.importorskip("opacus")
    from fedvitals.lab.corrections import KEPT_NOTES

    assert NOTE in KEPT_NOTES
    e = experiment(privacy=ClientDP(noise=1.0), participation=0.5, rounds=3)
    whole = lab.run(e, engine="sequential")
    for stopped in lab.rounds(e, engine="sequential", checkpoint=tmp_path):
        if len(stopped.rounds) == 2:
            break
    resumed = lab.run(e, engine="sequential", checkpoint=tmp_path, resume=True)
    assert torch.equal(resumed.state, whole.state)
    assert [one.metrics for one in resumed.rounds] == [one.metrics for one in whole.rounds]
