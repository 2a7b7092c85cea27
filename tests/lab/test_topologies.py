# SPDX-License-Identifier: Apache-2.0
"""The lab's topologies against loops written by hand, and what all of them promise.

Hand-written loops sum in another order than the engines, so they agree to float32 rounding: within 2e-6 here, where
weights are of order 1. Where two topologies must be the same thing, they are compared bit for bit.
"""

from __future__ import annotations

import importlib.util
import itertools

import msgspec
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch.func import functional_call

from fedvitals import lab
from fedvitals.errors import ConfigError
from fedvitals.lab import streams
from fedvitals.lab.engines.engine import Engine
from fedvitals.lab.federation import Federation, ServerState
from fedvitals.lab.topologies import asynchronous, hierarchical, rings
from fedvitals.protocols import NullObserver
from fedvitals.testing import check_topology
from support.conditions import holds_for_each
from support.lab.by_hand import RATE, STEPS, Watcher, experiment, groups_of, run
from support.paths import ROOT

pytestmark = pytest.mark.thorough  # seconds of training, or of other processes

TOLERANCE = {"atol": 2e-6, "rtol": 0}


# -- loops written by hand --------------------------------------------------------------------------------------------


def gradient(site, state, x, y):
    """Of the mean loss at a flat state, by autograd on the whole vector."""
    flat = state.clone().requires_grad_()
    F.cross_entropy(functional_call(site.module, dict(site.layout.views(flat)), (x,)), y).backward()
    return flat.grad


def batches(site, node, number):
    x, y = site.tensors(node, number)
    return [(x[rows], y[rows]) for rows in site.order(node, number, STEPS, 8, len(y))]


def by_samples(site, states):
    """The mean of states by node, weighted by the nodes' samples."""
    total = sum(site.samples(node) for node in states)
    return sum(state.double() * site.samples(node) for node, state in states.items()).div(total).float()


def sgd(site, node, number, state):
    for x, y in batches(site, node, number):
        state = state - RATE * gradient(site, state, x, y)
    return state


def test_centralized_is_the_mean_of_what_all_trained():
    e = experiment()
    site = lab.Site.of(e)
    model = site.layout.flat(site.module)
    for number in range(e.rounds):
        model = by_samples(site, {node: sgd(site, node, number, model) for node in e.nodes})
    torch.testing.assert_close(run(e), model, **TOLERANCE)


def test_averaging_at_the_edge_each_iteration_is_one_step_on_its_mean_gradient():
    """With plain SGD from a common start: mean(w − η·g_i) = w − η·mean(g_i), in every iteration."""
    e = experiment(topology=lab.Hierarchical(edges=2))
    site = lab.Site.of(e)
    edges = hierarchical.assign_to_edges(site.labels, 2)
    model = site.layout.flat(site.module)
    for number in range(e.rounds):
        at_edges = {}
        for edge, members in edges.items():
            state = model
            for step in range(STEPS):
                gradients = {n: gradient(site, state, *batches(site, n, number)[step]) for n in members}
                state = state - RATE * by_samples(site, gradients)
            at_edges[edge] = state
        weights = {edge: sum(site.samples(n) for n in members) for edge, members in edges.items()}
        model = sum(at_edges[e_] * weights[e_] for e_ in edges) / sum(weights.values())
    torch.testing.assert_close(run(e), model, **TOLERANCE)


def test_edges_are_of_equal_size_and_each_resembles_the_whole():
    """Clients that hold one class each are dealt out one by one: every edge gets all classes."""
    labels = {f"c{i}": torch.eye(5, dtype=torch.int64)[i // 4] * 30 for i in range(20)}
    for members in hierarchical.assign_to_edges(labels, 4).values():
        assert torch.equal(sum(labels[node] for node in members), torch.full((5,), 30))
    assert sorted(node for members in hierarchical.assign_to_edges(labels, 3).values() for node in members) == sorted(
        labels
    )


def test_ring_trains_each_model_at_one_member_after_the_other():
    """The model that is with a member at the end began as many places before it as there were passings."""
    e = experiment(topology=lab.Rings(rings=3))
    site = lab.Site.of(e)
    circles = rings.build_rings(site.labels, 3, streams.stream(e.seed, "rings"))
    assert sum(map(len, circles.values())) == e.clients
    model = site.layout.flat(site.module)
    for number in range(e.rounds):
        ends = {}
        for members in circles.values():
            for place, node in enumerate(members):
                state = model
                for step in range(STEPS):
                    at = members[(place - (STEPS - 1) + step) % len(members)]
                    state = state - RATE * gradient(site, state, *batches(site, at, number)[step])
                ends[node] = state
        model = by_samples(site, ends)
    torch.testing.assert_close(run(e), model, **TOLERANCE)


def test_a_ring_of_stars_goes_on_with_the_mean_of_the_star_before():
    e = experiment(topology=lab.RingStars(stars=3))
    site = lab.Site.of(e)
    stars = [*hierarchical.assign_to_edges(site.labels, 3).values()]
    assert [*site.groups.values()] == stars
    model = site.layout.flat(site.module)
    for number in range(e.rounds):
        for members in stars:
            model = by_samples(site, {node: sgd(site, node, number, model) for node in members})
    torch.testing.assert_close(run(e), model, **TOLERANCE)


def test_a_plain_ring_trains_one_model_at_one_client_after_the_other():
    e = experiment(topology=lab.Ring())
    site = lab.Site.of(e)
    ((_, order),) = site.groups.items()
    assert sorted(order) == sorted(e.nodes)
    model = site.layout.flat(site.module)
    for number in range(e.rounds):
        for node in order:
            model = sgd(site, node, number, model)
    torch.testing.assert_close(run(e), model, **TOLERANCE)


def test_one_star_is_centralized_bit_for_bit():
    e = experiment(topology=lab.RingStars(stars=1))
    assert torch.equal(run(e), run(msgspec.structs.replace(e, topology=lab.Centralized())))


@pytest.mark.parametrize("topology", [lab.Rings(rings=3), lab.RingStars(stars=3)])
def test_rings_have_similar_members_and_a_ring_of_stars_has_stars_that_resemble_the_whole(topology):
    """The two ways round, since what is trained one after the other must be alike: clients there, stars here."""
    labels = {f"c{i}": torch.eye(3)[i % 3] * 30 for i in range(9)}
    groups = topology.fixed_groups(experiment(), labels)
    classes = [len({int(labels[node].argmax()) for node in members}) for members in groups.values()]
    if isinstance(topology, lab.RingStars):
        assert min(classes) >= 2  # the largest first, each to where it fits best: not the best of all divisions
    else:
        assert sum(classes) <= 5  # three runs of one class each, cut at two random places


@pytest.mark.parametrize("optimizer", [lab.SGD(), lab.Adam()])
def test_rings_of_length_one_are_centralized_bit_for_bit(optimizer):
    e = experiment(topology=lab.Rings(rings=9), local=lab.Local(iterations=STEPS, batch=8, optimizer=optimizer))
    centralized = msgspec.structs.replace(e, topology=lab.Centralized())
    assert torch.equal(run(e), run(centralized))


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
def test_an_exchange_every_few_batches_lets_members_train_alone_between(engine):
    """Never within a round: hierarchical is then the mean of all, and a ring passes nothing on."""
    alone = lab.run(experiment(), None, engine=engine).state
    for topology in (lab.Hierarchical(edges=2, every=STEPS), lab.Rings(rings=3, every=STEPS)):
        torch.testing.assert_close(
            lab.run(experiment(topology=topology), None, engine=engine).state, alone, **TOLERANCE
        )
    e = experiment(topology=lab.Rings(rings=3, every=2))
    site = lab.Site.of(e)
    model = site.layout.flat(site.module)
    for number in range(e.rounds):
        ends = {}
        for members in site.groups.values():
            for place, node in enumerate(members):
                state = model
                for step in range(STEPS):
                    at = members[(place - (STEPS - 1) // 2 + step // 2) % len(members)]
                    state = state - RATE * gradient(site, state, *batches(site, at, number)[step])
                ends[node] = state
        model = by_samples(site, ends)
    torch.testing.assert_close(lab.run(e, None, engine=engine).state, model, **TOLERANCE)


# -- FedBuff ----------------------------------------------------------------------------------------------------------

SLOW = lab.Network(links="fibre", devices="phone", overrides={"c1": ["3g"]})


def test_buffer_of_everybody_is_centralized_bit_for_bit():
    """Nobody is late when all are waited for; only the virtual clock knows how long that took."""
    e = experiment(topology=lab.Asynchronous(buffer=9), network=lab.Network(jitter=0.5), rounds=3)
    assert torch.equal(run(e), run(msgspec.structs.replace(e, topology=lab.Centralized())))


def test_late_update_counts_less_and_is_put_on_the_present_model():
    """Two clients, one of them on a 3G link, a buffer of one: followed by hand, model by model."""
    e = experiment(clients=2, topology=lab.Asynchronous(buffer=1), network=SLOW, partition="iid", rounds=400)
    site, watcher = lab.Site.of(e), Watcher()
    model, began, late_ones = site.layout.flat(site.module), {}, []
    for number, result in enumerate(lab.rounds(e, watcher, engine="sequential")):
        began |= {node: (number, model) for node in e.nodes if node not in began}
        (node,) = watcher.trained[number]
        version, start = began.pop(node)
        model = model + (sgd(site, node, number, start) - start) / (1 + number - version) ** 0.5
        torch.testing.assert_close(result.state, model, **TOLERANCE)
        model = result.state
        assert (node, {"update.staleness": number - version}) in watcher.logged
        if node == "c1":
            late_ones.append(number - version)
            break
    assert late_ones[0] > 5


def test_virtual_clock_goes_from_landing_to_landing():
    e = experiment(topology=lab.Asynchronous(buffer=3, concurrency=5), network=lab.Network(jitter=0.8), rounds=6)
    watcher = Watcher()
    run(e, watcher)
    whole = [(began, seconds) for _, name, began, seconds, *_ in watcher.spans if name == "round"]
    assert len(whole) == 6
    for (began, seconds), (following, _) in itertools.pairwise(whole):
        assert seconds > 0
        assert began + seconds == pytest.approx(following, abs=1e-9)
    ways = [(began, seconds, told["parts"]) for _, name, began, seconds, _, told in watcher.spans if name == "journey"]
    assert len(ways) == 18
    for began, seconds, parts in ways:  # from when it was asked to the end of the round in which it landed
        assert sum(parts.values()) == seconds
        assert began + seconds in [start + length for start, length in whole]
    assert holds_for_each(len(set(nodes)) == 3 for nodes in watcher.trained)


def test_models_in_flight_are_kept_and_no_others():
    e = experiment(topology=lab.Asynchronous(buffer=2, concurrency=6), network=lab.Network(jitter=1.0), rounds=5)
    site = lab.Site.of(e)
    with Engine(site, "sequential") as engine:
        federation = Federation(site, engine, NullObserver(), ServerState(site.layout.flat(site.module)))
        for number in range(5):
            federation.round = number
            federation.server.model = e.topology.round(federation)
            flights = federation.server.notes["flights"]
            assert set(federation.server.memory) == {asynchronous.version_key(flight["began"]) for flight in flights}
            assert len(flights) == 5  # a place is filled at each landing but the last


def test_late_updates_leave_running_variances_positive():
    e = lab.Experiment(
        dataset="digits", model=lab.CNN(channels=(4, 4), norm="batch"), clients=8, rounds=6,
        local=lab.Local(iterations=8, optimizer=lab.sgd(0.1)),
        topology=lab.Asynchronous(buffer=4, concurrency=8), network=lab.Network(jitter=1.0),
    )  # fmt: skip
    site = lab.Site.of(e)
    with Engine(site, "sequential") as engine:
        federation = Federation(site, engine, NullObserver(), ServerState(site.layout.flat(site.module)))
        for number in range(6):
            federation.round = number
            federation.server.model = e.topology.round(federation)
            variances = [v for name, v in site.layout.views(federation.server.model).items() if "running_var" in name]
            assert variances
            assert all(bool((v > 0).all()) for v in variances)


@pytest.mark.parametrize("fault", [lab.LostMessage(nodes=["c2"]), lab.DropOut(nodes=["c2"]), lab.Timeout(nodes=["c2"])])
def test_client_that_never_arrives_does_not_hold_up_the_others(fault):
    e = experiment(topology=lab.Asynchronous(buffer=8), network=lab.Network(deadline_seconds=60.0), faults=[fault])
    watcher = Watcher()
    run(e, watcher)
    assert [sorted(nodes) for nodes in watcher.trained] == [sorted(set(e.nodes) - {"c2"})] * 2


# -- what they tell ---------------------------------------------------------------------------------------------------


def test_bytes_of_a_round_are_those_computed_by_hand():
    """Of a model of s bytes, n clients, k iterations: 2ns at the server, 2nks at the edges, (k − 1)s at each ringer."""
    e = experiment(clients=9, rounds=1)
    size = 4 * lab.Site.of(e).layout.size
    circles = rings.build_rings(lab.Site.of(e).labels, 3, streams.stream(e.seed, "rings"))
    ringers = sum(len(members) for members in circles.values() if len(members) > 1)
    expected = {
        lab.Centralized(): (18 * size, 0),
        lab.Clustered(): (18 * size, 0),
        lab.Hierarchical(edges=3): (6 * size, 2 * 9 * STEPS * size),
        lab.Rings(rings=3): (18 * size, ringers * (STEPS - 1) * size),
    }
    expected[lab.Asynchronous(buffer=4)] = (8 * size, 0)
    for topology, (at_server, elsewhere) in expected.items():
        network = lab.Network() if isinstance(topology, lab.Asynchronous) else None
        watcher = Watcher()
        run(msgspec.structs.replace(e, topology=topology, network=network), watcher)
        assert watcher.bytes_of(0, lambda *ends: "server" in ends) == at_server, topology
        assert watcher.bytes_of(0, lambda *ends: "server" not in ends) == elsewhere, topology


@pytest.mark.parametrize("topology", [lab.Centralized(), lab.Clustered(), lab.Rings(rings=9)])
def test_model_goes_out_before_the_update_comes_back(topology):
    watcher = Watcher()
    e = experiment(topology=topology)
    run(e, watcher)
    assert len(watcher.transfers) == e.rounds
    for transfers in watcher.transfers:
        for node in e.nodes:
            own = [(sender, receiver, kind) for sender, receiver, _, kind in transfers if node in (sender, receiver)]
            assert own == [("server", node, "model"), (node, "server", "update")]
    if isinstance(topology, lab.Centralized):
        assert [receiver for sender, receiver, _, _ in watcher.transfers[0] if sender == "server"] == [*e.nodes]


def test_edge_sends_to_the_server_after_it_has_heard_from_all_its_clients():
    watcher = Watcher()
    e = experiment(topology=lab.Hierarchical(edges=3))
    run(e, watcher)
    edges = hierarchical.assign_to_edges(lab.Site.of(e).labels, 3)
    assert groups_of(watcher) == [{edge: set(nodes) for edge, nodes in edges.items()}]  # told once: it never changes
    for transfers in watcher.transfers:
        ends = [(sender, receiver) for sender, receiver, *_ in transfers]
        for edge, members in edges.items():
            assert holds_for_each(ends.index((edge, "server")) > ends.index((node, edge)) for node in members)


def test_ring_passes_models_only_to_the_next():
    watcher = Watcher()
    e = experiment(topology=lab.Rings(rings=2))
    run(e, watcher)
    circles = rings.build_rings(lab.Site.of(e).labels, 2, streams.stream(e.seed, "rings"))
    following = {(c[i], c[(i + 1) % len(c)]) for c in circles.values() for i in range(len(c)) if len(c) > 1}
    passed = {(sender, receiver) for sender, receiver, *_ in watcher.transfers[0] if "server" not in (sender, receiver)}
    assert passed == following


# -- what all of them promise -----------------------------------------------------------------------------------------

SHIPPED = [
    lab.Centralized(),
    lab.Clustered(),
    lab.Clustered(threshold=0.05, smallest=2, every=1),
    lab.Hierarchical(),
    lab.Rings(),
    lab.RingStars(stars=2),
    lab.Ring(),
    lab.Asynchronous(),
    lab.Asynchronous(buffer=3, concurrency=7, exponent=1.0),
]


def gossip():
    """The user's own topology of the examples."""
    path = ROOT / "examples" / "gossip.py"
    specification = importlib.util.spec_from_file_location("gossip", path)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module.Gossip()


@pytest.mark.parametrize("topology", [*SHIPPED, gossip()], ids=repr)
def test_topology_holds_its_contract(topology):
    check_topology(topology)


@pytest.mark.parametrize("topology", SHIPPED, ids=repr)
def test_resumed_run_is_the_same_bit_for_bit_wherever_it_stopped(topology, tmp_path):
    """With momentum at the server, half of the clients, and a fault that looks back: all that can be forgotten."""
    rule = lab.FedAvg() if isinstance(topology, lab.Clustered) else lab.FedAvgM()
    e = experiment(
        topology=topology, clients=12, rounds=6, participation=0.5, aggregator=rule, network=lab.Network(spread=1.0),
        faults=[lab.StaleUpdate(nodes=["c1"])],
    )  # fmt: skip
    whole = run(e)
    for stop in (1, 5):
        folder = tmp_path / str(stop)
        for result in lab.rounds(e, engine="sequential", checkpoint=folder):
            if len(result.rounds) == stop:
                break
        told = Watcher()
        assert torch.equal(run(e, told, checkpoint=folder, resume=True), whole)
        assert len(told.trained) == 6 - stop


@pytest.mark.parametrize("topology", SHIPPED, ids=repr)
def test_engines_and_seeds(topology):
    """The engines agree to rounding; another seed is another run."""
    e = experiment(topology=topology, clients=12, network=lab.Network(spread=1.0))
    state = run(e)
    for engine in ("reuse", "stacked"):
        torch.testing.assert_close(lab.run(e, engine=engine, workers=1).state, state, atol=1e-5, rtol=0)
    assert not torch.equal(run(msgspec.structs.replace(e, seed=4)), state)


class Forgetful:
    """A topology whose faults the check must name, one at a time."""

    def __init__(self, how):
        self.how, self.calls = how, 0

    def check(self, experiment):
        pass

    def round(self, federation):
        self.calls += 1
        everybody = self.how == "everybody"
        nodes = federation.experiment.nodes if everybody else federation.cohort()
        tasks = [lab.Task(federation.round, (node,), federation.server.model) for node in nodes]
        if self.how == "silent":
            federation.observer = NullObserver()
        model = federation.aggregate(federation.train(tasks))
        answers = {
            "short": model[:-1],
            "not finite": model / 0,
            "nothing learnt": federation.server.model,
            "chance": model + 1e-3 * self.calls,
        }
        return answers.get(self.how, model)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("short", "did not come to its end"),
        ("not finite", "not finite"),
        ("nothing learnt", "nothing was learnt"),
        ("chance", "other weights the second time"),
        ("silent", "nobody trained|no transfer"),
        ("everybody", "use cohort"),
    ],
)
def test_check_says_what_is_wrong_with_a_topology(how, message):
    with pytest.raises(AssertionError, match=message):
        check_topology(Forgetful(how))


def test_settings_that_cannot_be_are_refused_with_what_can():
    refused = [
        ({"topology": lab.Asynchronous(buffer=2)}, "needs a network"),
        ({"topology": lab.Asynchronous(), "network": lab.Network()}, "at most the number of clients, 9"),
        ({"topology": lab.Clustered(), "aggregator": lab.Median()}, "own trimmed mean"),
        ({"topology": lab.Hierarchical(edges=10)}, "number of edges cannot be 10"),
        ({"topology": lab.Rings(rings=10)}, "number of rings cannot be 10"),
    ]
    for settings, said in refused:
        with pytest.raises(ConfigError, match=said):
            experiment(**settings)
    for make in (
        lambda: lab.Clustered(threshold=0),
        lambda: lab.Clustered(trim=0.5),
        lambda: lab.Clustered(smallest=0),
        lambda: lab.Asynchronous(buffer=0),
        lambda: lab.Asynchronous(exponent=-1),
    ):
        with pytest.raises(ConfigError, match="cannot be"):
            make()


@pytest.mark.parametrize("fault", [lab.shape_mismatch, lab.dtype_mismatch])
@pytest.mark.parametrize("topology", [lab.Centralized(), lab.Hierarchical(edges=2), lab.Rings(2)], ids=repr)
def test_an_update_that_does_not_fit_is_refused_in_every_topology(topology, fault):
    from fedvitals.monitor.monitor import Monitor
    from fedvitals.testing import MemorySink

    small = {"dataset": lab.synthetic(samples=200), "model": "mlp", "clients": 6, "rounds": 2, "topology": topology}
    sink = MemorySink()
    with Monitor(None, sinks=[sink], strict=True) as monitor:
        ill = lab.run(lab.Experiment(**small, faults=[fault(nodes=["c1"])]), monitor, engine="sequential")
    healthy = lab.run(lab.Experiment(**small), engine="sequential")
    refused = [r for r in sink.records if type(r).__name__ == "Event" and r.name == "update.refused"]
    assert {r.where.node for r in refused} == {"c1"}
    assert not torch.equal(ill.state, healthy.state)
    assert torch.isfinite(ill.state).all()


class Careless:
    """Keeps states that are valid only until the next is taken."""

    def check(self, experiment):
        pass

    def round(self, federation):
        tasks = [lab.Task(federation.round, (n,), federation.server.model) for n in federation.cohort()]
        updates = list(federation.train(tasks))
        return sum(u.state for u in updates) / len(updates) if updates else federation.server.model


def test_check_topology_finds_states_that_were_not_cloned():
    with pytest.raises(AssertionError, match="clone what you keep"):
        check_topology(Careless())
    with pytest.raises(AssertionError, match="an object with"):
        check_topology(Careless)
