# SPDX-License-Identifier: Apache-2.0
"""Compression, error feedback, privacy and secure aggregation in whole federations: what is announced, what they
combine with, and that every bit comes again.
"""

from __future__ import annotations

import itertools

import msgspec
import pytest
import torch

from fedvitals import lab
from fedvitals.errors import ConfigError
from fedvitals.lab.aggregators.votes import MajorityVote
from fedvitals.lab.engines.engine import Engine
from fedvitals.lab.federation import Federation, ServerState
from fedvitals.protocols import NullObserver
from support.lab.by_hand import Watcher, experiment, run

SLOW = lab.Network(links="fibre", devices="phone", overrides={"c1": ["3g"], "c2": ["3g"]})

KINDS = {
    "sign": {"compression": lab.sign(error_feedback=True)},
    "top_k": {"compression": lab.top_k(0.05, error_feedback=True)},
    "client_dp": {"privacy": lab.client_dp(clip=0.5, noise=0.1)},
    "central_dp": {"privacy": lab.central_dp(clip=0.5, noise=0.1)},
    "private and compressed": {"privacy": lab.client_dp(noise=0.1), "compression": lab.int8(error_feedback=True)},
    "secure": {"secure_aggregation": lab.SecureAggregation()},
    "private and secure": {"secure_aggregation": lab.SecureAggregation(), "privacy": lab.client_dp(noise=0.1)},
}


class Server(Watcher):
    """Keeps the changes that the server was sent, by round."""

    def __init__(self):
        super().__init__()
        self.changes = []

    def round_begin(self, *more, **rest):
        super().round_begin(*more, **rest)
        self.changes.append({})

    def for_worker(self):
        return NullObserver()

    def updates(self, round_index, updates):
        self.changes[-1] |= {node: change.vector.clone() for node, change in updates.items()}
        return ()


def needs_accountant(kind):
    if "dp" in kind or "private" in kind:
        pytest.importorskip("opacus")


@pytest.mark.parametrize("kind", KINDS)
def test_bits_are_the_same_with_any_workers_watched_or_not_and_after_a_break(kind, tmp_path):
    needs_accountant(kind)
    e = experiment(**KINDS[kind], rounds=3, participation=0.7)
    alone = lab.run(e, engine="reuse", workers=1).state
    assert torch.equal(lab.run(e, Server(), engine="reuse", workers=2).state, alone)
    for result in lab.rounds(e, engine="reuse", workers=1, checkpoint=tmp_path):
        if len(result.rounds) == 2:
            break
    assert torch.equal(lab.run(e, workers=1, checkpoint=tmp_path, resume=True).state, alone)
    assert not torch.equal(lab.run(experiment(rounds=3, participation=0.7), engine="reuse", workers=1).state, alone)


@pytest.mark.parametrize("kind", KINDS)
def test_stacked_clients_agree(kind):
    needs_accountant(kind)
    e = experiment(**KINDS[kind], rounds=1)
    stacked, plain = (lab.run(e, engine=name, workers=1).state for name in ("stacked", "sequential"))
    differ = (stacked - plain).abs() > 1e-5
    assert float(differ.double().mean()) < 0.01  # rounding may change a sign, or which values are the largest


@pytest.mark.parametrize("kind", KINDS)
def test_the_monitor_is_told_what_is_in_force(kind):
    needs_accountant(kind)
    watcher = Server()
    run(experiment(**KINDS[kind], rounds=1), watcher)
    ((_, node, data),) = [event for event in watcher.told if event[0] == "updates.transformed"]
    assert node is None
    assert data == {part: msgspec.to_builtins(settings) for part, settings in KINDS[kind].items()}


@pytest.mark.parametrize("changes", [{}, {"compression": "plain"}])
def test_nothing_is_told_where_nothing_is_changed(changes):
    watcher = Server()
    run(experiment(**changes, rounds=1), watcher)
    assert watcher.told == []


@pytest.mark.parametrize("compression", [lab.sign(error_feedback=True), lab.top_k(0.02, error_feedback=True)])
def test_over_rounds_the_server_gets_all_that_a_client_trained(compression):
    """One client, so that its next start is what arrived: at the end, model + residual is the sum of its trainings.

    The trainings are computed by hand from each round's start, without compression.
    """
    e = experiment(clients=1, partition="iid", rounds=5, compression=compression)
    site = lab.Site.of(e)
    first = site.layout.flat(site.module)
    trained, model = torch.zeros(len(first)), first
    with Engine(site, "sequential") as engine:
        server = ServerState(first.clone())
        federation = Federation(site, engine, NullObserver(), server)
        for federation.round in range(e.rounds):
            (update,) = itertools.chain.from_iterable(
                engine.train([lab.Task(federation.round, ("c0",), model)], NullObserver())
            )
            trained = trained + (update.state - model)
            model = server.model = e.topology.round(federation).clone()
    torch.testing.assert_close(model - first + server.memory["residual/c0"], trained, atol=1e-5, rtol=0)


@pytest.mark.parametrize("exponent", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("kind", ["none", "sign", "client_dp", "private and compressed"])
def test_a_buffer_of_late_updates_by_hand(kind, exponent):
    """model + Σ nᵢ·Δᵢ / (1 + τᵢ)^exponent / Σ nᵢ, with the changes that the server was sent; those on 3G come late."""
    needs_accountant(kind)
    topology = lab.Asynchronous(buffer=2, exponent=exponent)
    e = experiment(clients=4, topology=topology, network=SLOW, rounds=60, **KINDS.get(kind, {}))
    watcher, site, stale = Server(), lab.Site.of(e), []
    model = site.layout.flat(site.module)
    for result in lab.rounds(e, watcher, engine="sequential"):
        changes, logged = watcher.changes[-1], watcher.logged
        watcher.logged = []
        late = {node: values["update.staleness"] for node, values in logged if "update.staleness" in values}
        assert late.keys() == changes.keys()
        total = sum(site.samples(node) for node in changes)
        parts = (site.samples(node) * changes[node] / (1 + late[node]) ** exponent for node in changes)
        torch.testing.assert_close(result.state, model + sum(parts) / total, atol=2e-6, rtol=1e-5)
        stale += late.values()
        model = result.state.clone()
    assert max(stale) >= 3


def test_central_noise_on_a_buffer_is_that_of_its_mean():
    """By hand as above, but clipped and with equal weights: what is left is noise of noise · clip / buffer."""
    pytest.importorskip("opacus")
    clip, noise, exponent = 0.3, 0.5, 0.5
    e = experiment(
        clients=4,
        topology=lab.Asynchronous(buffer=2, exponent=exponent),
        network=SLOW,
        rounds=20,
        privacy=lab.central_dp(clip=clip, noise=noise),
    )
    watcher, site, left = Server(), lab.Site.of(e), []
    model = site.layout.flat(site.module)
    for result in lab.rounds(e, watcher, engine="sequential"):
        late = {node: values["update.staleness"] for node, values in watcher.logged if "update.staleness" in values}
        discounted = [c / (1 + late[node]) ** exponent for node, c in watcher.changes[-1].items()]
        mean = sum(c * min(1.0, clip / float(c.norm())) for c in discounted) / 2
        left.append(result.state - model - mean)
        watcher.logged, model = [], result.state.clone()
    noises = torch.cat(left)
    assert float(noises.std()) == pytest.approx(noise * clip / 2, rel=4 / (2 * len(noises)) ** 0.5)


# -- majority vote ----------------------------------------------------------------------------------------------------


def test_majority_vote_by_hand():
    server = torch.tensor([1.0, 1.0, 1.0, 1.0, 10.0])  # the last one is a buffer
    votes = MajorityVote(learning_rate=0.5).begin(server, {}, 4)
    for change, weight in (([3, -1, 2, 0, 2], 100.0), ([-1, -1, 0, 0, 4], 1.0), ([-9, 4, -2, 0, 6], 1.0)):
        votes.add(server + torch.tensor(change, dtype=torch.float32), weight, "c")
    votes.add(server + 100, 0.0, "of no weight")
    assert votes.finish().tolist() == [0.5, 0.5, 1.0, 1.0, 14.0]


@pytest.mark.parametrize("compression", [None, lab.sign()])
def test_majority_vote_learns(compression):
    e = experiment(aggregator=MajorityVote(learning_rate=0.02), compression=compression, rounds=15)
    assert lab.run(e, engine="sequential").accuracy > 0.8


@pytest.mark.parametrize("aggregator", ["scaffold", "feddyn"])
def test_noise_on_clients_does_not_go_with_rules_that_learn_more_than_the_update(aggregator):
    with pytest.raises(ConfigError, match="learns more of a client than its update"):
        lab.Experiment(aggregator=aggregator, privacy=lab.client_dp(noise=1.0))
