# SPDX-License-Identifier: Apache-2.0
"""SR-FCA: populations found, clusters merged and dissolved, late comers, and what a broken client cannot do."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch.func import functional_call

from fedvitals import lab
from fedvitals.lab.engines.engine import Engine
from fedvitals.lab.federation import Federation, ServerState
from fedvitals.lab.topologies import clustered
from fedvitals.protocols import NullObserver
from support.lab.by_hand import Watcher, experiment, groups_of, run


def planted(**changes):
    """Ten clients in two populations, which call the same things by different names; and who is in the second."""
    stream = torch.Generator().manual_seed(5)
    y = torch.randint(0, 3, (600,), generator=stream)
    x = 3 * torch.eye(3, 6)[y] + 0.5 * torch.randn(600, 6, generator=stream)
    groups = torch.arange(600) // 60
    other = groups % 2 == 1
    data = lab.Arrays(x, torch.where(other, (y + 1) % 3, y), x[:9], y[:9], groups)
    settings = {"dataset": data, "partition": "natural", "model": "logistic", "clients": 10, "rounds": 9, **changes}
    e = experiment(**settings)
    site = lab.Site.of(e)
    return e, {node for node in e.nodes if bool(other[site.shards[node].train[0]])}


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(3))
def test_sr_fca_finds_two_planted_populations(seed):
    e, second = planted(seed=seed, topology=lab.Clustered(threshold=0.4))
    watcher = Watcher()
    run(e, watcher)
    first = set(e.nodes) - second
    assert len(second) == 5
    assert groups_of(watcher)[-1] in (
        {"cluster-0": first, "cluster-1": second},
        {"cluster-0": second, "cluster-1": first},
    )


@pytest.mark.thorough
def test_each_population_gets_a_model_of_its_own():
    """Local accuracy, with the model of one's cluster, is far above what one model for both can reach."""
    e, _ = planted(topology=lab.Clustered(threshold=0.4), rounds=12)
    e = msgspec.structs.replace(e, partition=lab.Natural(), test_share=0.0)
    one = msgspec.structs.replace(e, topology=lab.Centralized())
    assert own_accuracy(e) > 0.95
    assert own_accuracy(one) < 0.7


def own_accuracy(e):
    """On each client's own samples, with the model that the topology would give it."""
    site = lab.Site.of(e)
    with Engine(site, "sequential") as engine:
        federation = Federation(site, engine, NullObserver(), ServerState(site.layout.flat(site.module)))
        for number in range(e.rounds):
            federation.round = number
            federation.server.model = e.topology.round(federation)
        given = e.topology.models(federation) if hasattr(e.topology, "models") else {}
    hits = []
    for node in e.nodes:
        x, y = site.tensors(node, 0)
        views = site.layout.views(given.get(node, federation.server.model))
        hits.append(functional_call(site.module, dict(views), (x,)).argmax(1) == y)
    return float(torch.cat(hits).double().mean())


@pytest.mark.thorough
def test_sr_fca_ends_in_one_group_under_iid_and_is_centralized_there():
    """With the paper's λ; without trimming and with equal shares, its mean is that of FedAvg."""
    e = experiment(partition="iid", dataset="digits", topology=lab.Clustered(trim=0.0), rounds=6, clients=10)
    watcher = Watcher()
    state = run(e, watcher)
    assert groups_of(watcher) == [{"cluster-0": set(e.nodes)}]
    assert not torch.equal(state, run(msgspec.structs.replace(e, topology=lab.Clustered(trim=0.3))))
    torch.testing.assert_close(state, run(msgspec.structs.replace(e, topology=lab.Centralized())), atol=1e-3, rtol=0)


def federated(e, watcher, number, clusters, models):
    """A federation in the midst of a run, with the clusters that a test wants."""
    site = lab.Site.of(e)
    server = ServerState(site.layout.flat(site.module), dict(models), {"clusters": clusters})
    federation = Federation(site, Engine(site, "sequential"), watcher, server)
    federation.round = number
    watcher.round_begin()
    return federation


def test_near_clusters_merge_and_far_ones_do_not():
    e = experiment(topology=lab.Clustered(threshold=2.0))
    model = lab.Site.of(e).layout.flat(lab.Site.of(e).module)
    clusters = {f"cluster-{i}": [f"c{j}" for j in range(3 * i, 3 * i + 3)] for i in range(3)}
    models = {"cluster-0": model, "cluster-1": model + 5.0, "cluster-2": model + 1e-3}
    for number, merged in ((3, False), (4, True)):
        watcher = Watcher()
        federation = federated(e, watcher, number, clusters, models)
        after = e.topology.round(federation)
        kept = federation.server.notes["clusters"]
        if merged:
            assert kept == {"cluster-0": [f"c{i}" for i in (0, 1, 2, 6, 7, 8)], "cluster-1": ["c3", "c4", "c5"]}
            assert [data for name, _, data in watcher.told if name == "clusters.merged"] == [
                {"clusters": ["cluster-0", "cluster-2"]}
            ]
        else:
            assert kept == clusters
        assert set(federation.server.memory) == set(kept)
        samples = {c: sum(federation.site.samples(n) for n in kept[c]) for c in kept}
        mean = sum(federation.server.memory[c] * samples[c] for c in kept) / sum(samples.values())
        torch.testing.assert_close(after, mean)


def test_small_groups_are_dissolved_into_the_nearest():
    e = experiment(topology=lab.Clustered(threshold=0.1))
    model = lab.Site.of(e).layout.flat(lab.Site.of(e).module)
    clusters = {"cluster-0": ["c0", "c1", "c2", "c3"], "cluster-1": ["c4", "c5", "c6"], "cluster-2": ["c7", "c8"]}
    models = {"cluster-0": model, "cluster-1": model + 9.0, "cluster-2": model + 6.0}
    federation = federated(e, Watcher(), 4, clusters, models)
    e.topology.round(federation)
    assert federation.server.notes["clusters"] == {
        "cluster-0": clusters["cluster-0"],
        "cluster-1": [f"c{i}" for i in range(4, 9)],
    }


def test_no_group_large_enough_is_one_group_and_told():
    e = experiment(topology=lab.Clustered(threshold=1e-6))
    watcher = Watcher()
    run(e, watcher)
    assert groups_of(watcher) == [{"cluster-0": set(e.nodes)}]
    assert "clusters.none" in {name for name, _, _ in watcher.told}


def test_late_comer_joins_the_population_it_belongs_to():
    """Half the clients are there in a round; in the end all are in the cluster of their kind."""
    e, second = planted(topology=lab.Clustered(threshold=0.45, smallest=2), participation=0.6, rounds=12)
    watcher = Watcher()
    run(e, watcher)
    assert set(map(frozenset, groups_of(watcher)[-1].values())) == {frozenset(second), frozenset(set(e.nodes) - second)}


def test_client_whose_weights_are_not_finite_moves_no_cluster():
    e, second = planted(topology=lab.Clustered(threshold=0.4), faults=[lab.NotFinite(nodes=["c0"], since=0)])
    watcher = Watcher()
    run(e, watcher)
    found = groups_of(watcher)[-1]
    assert {frozenset(nodes - {"c0"}) for nodes in found.values()} == {
        frozenset(second - {"c0"}),
        frozenset(set(e.nodes) - second - {"c0"}),
    }


def test_connected_links_by_steps_and_keeps_what_is_not_finite_alone():
    nan = float("nan")
    places = torch.tensor([0.0, 10.0, 1.0, 2.0, 11.0, nan])
    distances = (places[:, None] - places[None, :]).abs()
    assert clustered.connected_groups("abcdef", distances, 1.0) == [["a", "c", "d"], ["b", "e"], ["f"]]
    assert clustered.connected_groups("abcdef", distances, 0.5) == [["a"], ["b"], ["c"], ["d"], ["e"], ["f"]]
