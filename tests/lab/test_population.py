# SPDX-License-Identifier: Apache-2.0
"""Populations that change: who is asked when, new data, seasons, very few clients and very many."""

from __future__ import annotations

import math
import re

import msgspec
import pytest
import torch

import fedvitals as fv
from fedvitals import lab
from fedvitals.errors import ConfigError
from fedvitals.lab import stacked, streams
from fedvitals.lab.data.partition import shard_tensors
from fedvitals.lab.engines.engine import _largest_cohort
from fedvitals.lab.engines.executor import EvaluationJob
from fedvitals.lab.experiment import AGGREGATORS, TOPOLOGIES
from fedvitals.lab.population import apportion
from fedvitals.lab.stacked.samples import StackSamples
from fedvitals.protocols import NullObserver

NETWORK = lab.Network(links="4g", jitter=0.3)
SYNTHETIC = lab.synthetic(samples=300, features=6, classes=3)
TROUBLE = ("client.dropped_out", "client.failed", "update.lost", "update.late", "aggregation.failed")


class Listener(NullObserver):
    """Notes who is expected in each round, whose local tests are told, and all events."""

    def __init__(self):
        self.expected, self.tested, self.events = [], [], []

    def round_begin(self, round_index, model):
        self.expected.append([])
        self.tested.append([])

    def expect(self, *nodes):
        self.expected[-1] += nodes

    def log(self, metrics, *, node=None, **_):
        if "local.loss" in metrics and node is not None:
            self.tested[-1].append(node)

    def event(self, level, name, message, *, node=None, data=None):
        self.events.append((len(self.expected) - 1, name, node))


def experiment(**settings):
    usual = {
        "dataset": SYNTHETIC,
        "model": lab.mlp(hidden=(5,)),
        "clients": 8,
        "rounds": 6,
        "local": lab.Local(iterations=2, batch=4),
    }
    return lab.Experiment(**usual | settings)


def topologies():
    for topology in (
        lab.Centralized(),
        lab.Clustered(threshold=0.05, smallest=1, every=2),
        lab.Hierarchical(edges=3),
        lab.Rings(rings=2),
        lab.Asynchronous(buffer=2, concurrency=3),
    ):
        network = {"network": NETWORK} if isinstance(topology, lab.Asynchronous) else {}
        yield pytest.param({"topology": topology} | network, id=type(topology).__name__)


MOVES = lab.Population(joins={"c3": 2, "c5": 4}, leaves={"c4": 3, "c5": 1})
PRESENT = {  # by hand
    0: {"c0", "c1", "c2", "c4", "c5", "c6", "c7"},
    1: {"c0", "c1", "c2", "c4", "c6", "c7"},
    2: {"c0", "c1", "c2", "c3", "c4", "c6", "c7"},
    3: {"c0", "c1", "c2", "c3", "c6", "c7"},
    4: {"c0", "c1", "c2", "c3", "c5", "c6", "c7"},
    5: {"c0", "c1", "c2", "c3", "c5", "c6", "c7"},
}


def test_who_is_present_by_hand():
    e = experiment(population=MOVES)
    assert {number: set(e.members(number)) for number in range(6)} == PRESENT
    assert e.members(0) == ("c0", "c1", "c2", "c4", "c5", "c6", "c7")
    assert e.fewest_members == 6


@pytest.mark.parametrize(("participation", "over"), [(1.0, 1.0), (0.5, 1.0), (0.4, 1.5)])
def test_cohort_is_that_of_a_slow_twin(participation, over):
    network = lab.Network(over_selection=over) if over > 1 else None
    e = experiment(population=MOVES, participation=participation, network=network, seed=5)
    listener = Listener()
    for result in lab.rounds(e, listener, engine="sequential"):
        number = result.rounds[-1].number
        there = [f"c{index}" for index in range(8) if f"c{index}" in PRESENT[number]]
        needed = round(len(there) * participation)
        asked = min(len(there), math.ceil(needed * over - 1e-9))
        lot = torch.randperm(len(there), generator=streams.stream(5, "cohort", number)).tolist()
        cohort = {there[place] for place in lot[:asked]}
        assert set(listener.expected[-1]) <= cohort
        assert len(listener.expected[-1]) == needed


@pytest.mark.parametrize("settings", [*topologies()])
def test_nobody_is_asked_before_it_joins_or_after_it_left_and_nobody_is_missed(settings):
    e, listener = experiment(population=MOVES, **settings), Listener()
    result = lab.run(e, listener, engine="sequential")
    for number, nodes in enumerate(listener.expected):
        assert set(nodes) <= PRESENT[number]
        assert set(listener.tested[number]) == PRESENT[number]
    assert [event for event in listener.events if event[1] in TROUBLE] == []
    moves = [event for event in listener.events if event[1] in ("client.joined", "client.left")]
    assert moves == [(1, "client.left", "c5"), (2, "client.joined", "c3"), (3, "client.left", "c4"),
                     (4, "client.joined", "c5")]  # fmt: skip
    asked = set().union(*listener.expected[4:])
    assert "c4" not in asked
    if "network" not in settings:
        assert {"c3", "c5"} <= asked
    assert torch.equal(result.state, lab.run(e, engine="sequential").state)


ALL_CHANGES = lab.Population(
    joins={"c3": 2},
    leaves={"c4": 3},
    changes=[lab.new_data(nodes=["c1", "c2"], since=2, alpha=0.2), lab.season(period=3, brightness=0.4, labels=0.9)],
)


@pytest.mark.parametrize("settings", [*topologies()])
def test_bits_do_not_depend_on_processes_interruptions_or_who_watches(settings, tmp_path):
    # Rings of clients with unequal steps are the one case in which the engines differ: a stack goes on passing models.
    steps = {"iterations": 2} if isinstance(settings["topology"], lab.Rings) else {"epochs": 1}
    e = experiment(population=ALL_CHANGES, participation=0.7, local=lab.Local(batch=4, **steps), **settings)
    once = lab.run(e, engine="stacked", workers=1).state
    assert torch.equal(once, lab.run(e, Listener(), engine="stacked", workers=2).state)
    for result in lab.rounds(e, engine="stacked", workers=1, checkpoint=tmp_path):
        if result.rounds[-1].number == 3:
            break
    assert torch.equal(once, lab.run(e, engine="stacked", workers=1, checkpoint=tmp_path, resume=True).state)
    torch.testing.assert_close(once, lab.run(e, engine="sequential").state, atol=1e-4, rtol=0)


def site_of(*changes, **settings):
    return lab.Site.of(experiment(population=lab.Population(changes=changes), **settings))


def same(a, b):
    return torch.equal(a.train, b.train) and torch.equal(a.test, b.test) and a.brightness == b.brightness


@pytest.mark.parametrize("partition", [lab.iid(), lab.dirichlet(0.5), lab.classes_per_client(1), lab.permuted_labels()])
def test_new_data_are_other_samples_of_the_same_mix_from_their_round_on(partition):
    plain = lab.Site.of(experiment(partition=partition))
    site = site_of(lab.new_data(nodes=["c2", "c6"], since=3), partition=partition)
    for number in range(6):
        for node in site.shards:
            unchanged = number < 3 or node not in ("c2", "c6")
            assert same(site.shard(node, number), plain.shards[node]) == unchanged
            assert torch.equal(site.tensors(node, number)[0], plain.tensors(node, number)[0]) == unchanged
    everybody = {
        part: {i for s in plain.shards.values() for i in getattr(s, part).tolist()} for part in ("train", "test")
    }
    y = site.dataset.y
    for node in ("c2", "c6"):
        before, after = site.shard(node, 0), site.shard(node, 3)
        assert same(after, site.shard(node, 5))
        assert y[after.train].bincount(minlength=3).tolist() == y[before.train].bincount(minlength=3).tolist()
        assert set(after.train.tolist()) <= everybody["train"]  # so nobody trains on anybody's local test
        assert set(after.test.tolist()) <= everybody["test"]
        assert len(after.train.unique()) == len(after.train)
        if not isinstance(partition, lab.ClassesPerClient):  # where few others have its class, some stay its own
            assert not set(after.train.tolist()) & set(before.train.tolist())


def test_new_data_of_another_mix_and_size():
    site = site_of(
        lab.new_data(nodes=["c2"], since=1, alpha=0.05, factor=0.5), lab.new_data(nodes=["c3"], since=1, factor=2)
    )
    before, moved = site.shard("c2", 0), site.shard("c2", 1)
    counts = site.dataset.y[moved.train].bincount(minlength=3)
    assert len(moved.train) == round(len(before.train) / 2)
    assert counts.max() >= 0.9 * len(moved.train)  # a small α: nearly one class
    assert site.dataset.y[moved.test].bincount(minlength=3).argmax() == counts.argmax()  # the local test follows
    assert len(site.shard("c3", 1).train) == 2 * len(site.shard("c3", 0).train)
    assert site.samples("c3", 1) == len(site.tensors("c3", 1)[1])


def test_new_data_have_no_class_that_nobody_has():
    x, y = torch.rand(60, 4), torch.tensor([0, 4] * 30)
    for seed in range(8):
        site = site_of(lab.new_data(since=1, alpha=1e-4), dataset=lab.Arrays(x, y), clients=3, seed=seed)
        assert min(site.samples(node, 1) for node in site.shards) >= 1


def test_apportion_by_hand():
    there = torch.tensor([10, 10, 10])
    assert apportion(torch.tensor([2.0, 1.0, 1.0]), 8, there) == [4, 2, 2]
    assert apportion(torch.tensor([1.0, 1.0, 1.0]), 4, there) == [2, 1, 1]
    assert apportion(torch.tensor([5.0, 3.0, 2.0]), 5, there) == [3, 1, 1]  # exactly 2.5, 1.5, 1: the first of equals
    assert apportion(torch.tensor([1.0, 0.0, 0.0]), 30, there) == [10, 0, 0]  # as many as there are
    assert apportion(torch.tensor([1.0, 1.0, 0.0]), 4, torch.tensor([0, 9, 9])) == [0, 4, 0]
    assert apportion(torch.tensor([1.0, 0.0, 0.0]), 4, torch.tensor([0, 9, 9])) == [0, 0, 0]


def test_season_by_hand():
    """Three classes and a period of three: each class has its round, in which the others are at their fewest."""
    site = site_of(lab.season(nodes=["c0"], period=3, brightness=0.5, labels=0.8), partition=lab.iid())
    dealt = site.shards["c0"]
    y = site.dataset.y
    whole = y[dealt.train].bincount(minlength=3)
    low = (1 - 0.8 / 2) / 1.8  # the cosine of a third of the circle is -1/2
    for number in range(6):
        shard = site.shard("c0", number)
        shares = torch.full((3,), low, dtype=torch.float64)
        shares[number % 3] = 1.0
        assert y[shard.train].bincount(minlength=3).tolist() == (whole * shares).round().long().tolist()
        assert shard.brightness == pytest.approx(1 + 0.5 * [0, 0.75**0.5, -(0.75**0.5)][number % 3])
        assert set(shard.train.tolist()) <= set(dealt.train.tolist())
        assert same(shard, site.shard("c0", number + 3))
        assert same(site.shard("c1", number), site.shards["c1"])
    empty = site_of(lab.season(period=2, labels=1.0), partition=lab.classes_per_client(1), clients=3)
    assert min(empty.samples(node, number) for node in empty.shards for number in range(2)) >= 1


class PretendedDevice:
    """Stands for a GPU: what is moved there stays where it is."""

    type = "cuda"


@pytest.mark.parametrize("partition", [lab.iid(), lab.permuted_labels()])
@pytest.mark.parametrize("device", [torch.device("cpu"), PretendedDevice()], ids=["cpu", "pretended"])
def test_stacks_hold_what_each_client_has_in_its_round(device, partition, monkeypatch):
    move = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda x, *to, **more: x if to[:1] == (device,) else move(x, *to, **more))
    monkeypatch.setattr(stacked.samples, "resident", lambda dataset, _: dataset)
    faults = [lab.label_noise(nodes=["c1"], since=1, until=2)]
    site = lab.Site.of(experiment(population=ALL_CHANGES, faults=faults, partition=partition))
    samples = StackSamples(site, device)
    for number in (0, 1, 2, 3, 4, 5, 2, 0):  # a round's samples are kept until they change
        x, y, firsts, counts = samples.training(site.experiment.nodes, number)
        for node, first, count in zip(site.shards, firsts.tolist(), counts.tolist(), strict=True):
            own_x, own_y = site.tensors(node, number)
            assert torch.equal(x[first : first + count], own_x)
            assert torch.equal(y[first : first + count], own_y)
        tests = [shard_tensors(site.dataset, site.shard(node, number), "test") for node in site.shards]
        tested = samples.evaluation(EvaluationJob(torch.empty(0), None, site.experiment.nodes, number))
        assert torch.equal(tested[0], torch.cat([own_x for own_x, _ in tests]))
        assert torch.equal(tested[1], torch.cat([own_y for _, own_y in tests]))


def test_changes_are_announced():
    changes = [lab.new_data(nodes=["c1", "c3"], since=1), lab.new_data(since=2), lab.season(labels=0.5)]
    listener = Listener()
    lab.run(experiment(rounds=3, population=lab.Population(joins={"c3": 2}, changes=changes)), listener, workers=1)
    told = [event for event in listener.events if event[1] in ("data.new", "season")]
    assert told == [(0, "season", None), (1, "data.new", "c1"), (2, "data.new", None)]  # c3 is not there yet


def test_local_tests_of_the_cohort_only():
    listener = Listener()
    e = experiment(participation=0.25, evaluation=lab.Evaluation(local="cohort"), rounds=3)
    result = lab.run(e, listener, engine="stacked", workers=1)
    assert listener.tested == listener.expected
    assert "local.accuracy" in result.rounds[-1].metrics
    everybody = lab.run(experiment(participation=0.25, rounds=3), engine="stacked", workers=1)
    assert torch.equal(result.state, everybody.state)


def test_toml_holds_a_population():
    text = """
    clients = 8
    [population]
    joins = {c3 = 2}
    leaves = {c4 = 3}
    [[population.changes]]
    kind = "new_data"
    nodes = ["c1", "c2"]
    since = 2
    alpha = 0.2
    [[population.changes]]
    kind = "season"
    period = 3
    brightness = 0.4
    labels = 0.9
    """
    e = lab.read(text)
    assert e.population == ALL_CHANGES
    assert lab.read(e.to_toml()) == e
    assert e.digest() != lab.Experiment(clients=8).digest()


@pytest.mark.parametrize(
    ("population", "words"),
    [
        (lambda: lab.Population(joins={"c3": 0}), "all begin in round 0"),
        (lambda: lab.Population(joins={"c3": 2}, leaves={"c3": 2}), "another than"),
        (lambda: lab.Population(joins={"c9": 2}), "no client 'c9'.*c0 to c7"),
        (lambda: lab.Population(leaves={"c1": 6}), "up to 5"),
        (lambda: lab.Population(leaves={f"c{i}": 1 + i % 3 for i in range(8)}), "empty in some round"),
        (lambda: lab.Population(changes=[lab.new_data(nodes=["x"], since=1)]), "no client 'x'"),
        (lambda: lab.Population(changes=[lab.new_data(nodes="c1", since=1)]), 'or "all"'),
        (lambda: lab.Population(changes=[lab.new_data(nodes=[], since=1)]), "at least one name"),
        (lambda: lab.Population(changes=[lab.new_data(since=0)]), "1 or more"),
        (lambda: lab.Population(changes=[lab.new_data(since=6)]), "up to 5"),
        (lambda: lab.Population(changes=[lab.new_data(since=1, alpha=0)]), "above 0"),
        (lambda: lab.Population(changes=[lab.new_data(since=1, factor=0)]), "above 0"),
        (lambda: lab.Population(changes=[lab.season()]), "one of them"),
        (lambda: lab.Population(changes=[lab.season(labels=2)]), "from 0 to 1"),
        (lambda: lab.Population(changes=[lab.season(labels=1, period=1)]), "2 rounds"),
        (lambda: {"changes": [{"kind": "winter"}]}, "Unknown kind of changes 'winter'.*season"),
        (lambda: {"changes": [{"since": 3}]}, "needs a kind"),
        (lambda: {"changes": "season"}, "cannot be read"),
        (lambda: {"join": {"c3": 2}}, "Did you mean 'joins'"),
        (lambda: "growing", r"lab.Population\(...\)"),
    ],
)  # fmt: skip
def test_impossible_populations_are_refused(population, words):
    with pytest.raises(ConfigError, match=words):
        experiment(population=population())


def test_what_leavers_make_impossible_is_refused():
    leaving = lab.Population(leaves={f"c{index}": 2 for index in range(5)})
    with pytest.raises(ConfigError, match="3 come together"):
        experiment(aggregator=lab.krum(faulty=1), population=leaving)
    with pytest.raises(ConfigError, match="number of clients, 3"):
        experiment(topology=lab.Asynchronous(buffer=4), network=NETWORK, population=leaving)
    tokens = lab.synthetic(samples=100, sequence=3, vocabulary=9)
    with pytest.raises(ConfigError, match="tokens"):
        lab.Site.of(experiment(dataset=tokens, population=lab.Population(changes=[lab.season(brightness=0.2)])))
    one_class = lab.new_data(nodes=["c0"], since=3, alpha=1e-3)
    label = int(site_of(one_class).tensors("c0", 3)[1][0])
    fault = lab.missing_classes(nodes=["c0"], missing=[label])
    e = experiment(faults=[fault], population=lab.Population(changes=[one_class]))
    with pytest.raises(ConfigError, match="no sample left"):  # in round 3: told before the first
        next(lab.rounds(e, engine="sequential"))


@pytest.mark.parametrize("clients", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_handful_of_clients_learn_or_are_refused_with_the_reason(topology, clients):
    """Every topology with every aggregator: who is accepted never fails to aggregate."""
    ran, refusals = 0, []
    for kind in AGGREGATORS:
        aggregator = kind(faulty=1) if "faulty" in kind.__struct_fields__ else kind()
        listener = Listener()
        network = NETWORK if topology is lab.Asynchronous else None
        try:
            e = experiment(
                clients=clients, rounds=2, topology=topology(), aggregator=aggregator, network=network, test_share=0
            )
        except ConfigError as error:
            refusals.append(str(error))
            continue
        result = lab.run(e, listener, engine="sequential")
        ran += 1
        assert result.state.isfinite().all()
        assert [event for event in listener.events if event[1] in TROUBLE] == []
    assert [
        words for words in refusals if not re.search("needs at least|must be|would have no|is for clients that", words)
    ] == []
    few = min(2, clients)
    settings = {lab.Hierarchical: {"edges": few}, lab.Asynchronous: {"buffer": few}, lab.RingStars: {"stars": few}}
    smaller = topology(**settings.get(topology, {}))  # with edges, a buffer and stars that suit them, all do
    e = experiment(clients=clients, rounds=1, topology=smaller, network=NETWORK, test_share=0)
    assert lab.run(e, engine="sequential").state.isfinite().all()
    assert ran or topology in settings


def test_memory_for_states_follows_the_cohort_not_the_clients():
    many = {"dataset": lab.synthetic(samples=20_000), "clients": 10_000}
    assert _largest_cohort(lab.Experiment(participation=0.01, **many)) == 100
    assert _largest_cohort(lab.Experiment(participation=0.001, **many)) == 64
    over = lab.Network(over_selection=1.3)
    assert _largest_cohort(lab.Experiment(participation=0.01, network=over, **many)) == 130
    assert _largest_cohort(experiment()) == 8


def test_a_client_that_leaves_as_planned_is_no_drop_out(tmp_path):
    e = lab.Experiment(
        model="mlp", clients=8, rounds=9, seed=3, local=lab.Local(iterations=3), evaluation=lab.Evaluation(local=False)
    )
    planned = msgspec.structs.replace(e, population=lab.Population(leaves={"c4": 4}))
    issues = {}
    for name, each in (("left", planned), ("whole", e)):
        with fv.Monitor(tmp_path / f"{name}.db") as monitor:
            lab.run(each, monitor, engine="stacked", workers=1)
            issues[name] = {(finding.issue, finding.where.node) for finding in monitor.findings()}
    assert ("DROP_OUT", "c4") not in issues["left"]
    assert issues["left"] == issues["whole"]
