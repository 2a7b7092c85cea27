# SPDX-License-Identifier: Apache-2.0
"""`fv.watch` inside of a Flower app's own handlers: it finds the mod's scope, and writes nothing beside the run."""

import itertools
from contextlib import nullcontext

import pytest
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from torch.nn import functional

import fedvitals as fv
from fedvitals.probes.allowance import Turn
from fedvitals.probes.presets import SCALE_ROUNDS
from fedvitals.records import LayerStats, Run, Span
from support.conditions import holds_for_each
from support.flower.federation import RUNS, client_app, federate, is_round, training, watched

NODES = {"100", "101", "102", "103"}
STEPS = 6


def network():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))


def data(node):
    stream = torch.Generator().manual_seed(node)
    x = torch.randn(30, 4, generator=stream)
    return x, x[:, :3].argmax(1)


def learn(net, batch, steps=STEPS, rate=0.1):
    optimizer = torch.optim.SGD(net.parameters(), lr=rate)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = functional.cross_entropy(net(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def handler(watching):
    """A user's own `train`, with `watching(net, batch)` around its loop."""

    def train(message, context):
        net, batch = network(), data(context.node_id)
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        with watching(net, batch):
            loss = learn(net, batch)
        return reply_of(message, net, batch, loss)

    return train


def reply_of(message, net, batch, loss=1.0):
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(batch[0])})
    return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message)


def watch(net, batch):
    return fv.watch(net, data=[batch], loss=functional.cross_entropy)


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    """Where a store of its own would be, if there were one."""
    monkeypatch.chdir(tmp_path)
    yield
    assert not [*tmp_path.iterdir()]


def run(train, monitor, level=2):
    app = client_app(fv.flower.client_mod(privacy=level), train=train)
    start = ArrayRecord(network().state_dict())
    return federate(FedAvg(), app, monitor, arrays=start, run_id=next(RUNS))[0]


def test_what_is_measured_at_steps_belongs_to_the_client_of_the_round():
    with watched() as (monitor, sink):
        run(handler(watch), monitor)
    for number in (1, 2):
        assert {m.where.node for m in sink.metrics("gradient.norm", round=number) if m.where.node in NODES} == NODES
        for node in NODES:
            assert sink.value("steps", round=number, node=node) == STEPS
            assert sink.value("gradient.norm", round=number, node=node) > 0
    parts = [span.attributes["parts"] for span in sink.of(Span, "client")]
    assert len(parts) == 8
    assert holds_for_each({"forward", "backward", "optimizer"} <= {*told} for told in parts)
    assert {run.name for run in sink.of(Run)} == {"run"}


def test_whose_turn_it_is_follows_the_rounds_of_the_server():
    """Though a client's records do not say the round: nothing that happened in its process before decides."""
    with watched() as (monitor, sink):
        run(handler(watch), monitor)
    measured = {(m.where.round, m.where.node) for m in sink.metrics("scale.images")}
    nodes = itertools.product((1, 2), NODES)
    assert measured == {(number, node) for number, node in nodes if not Turn(number).lag(node, SCALE_ROUNDS)} != set()


def test_at_level_3_gradients_have_layers():
    with watched(privacy=3) as (monitor, sink):
        run(handler(watch), monitor, level=3)
    names = tuple(name for name, _ in network().named_parameters())
    for node in NODES:
        assert sink.table(sink.layers("gradient", node=node, round=2).table).names == names
    assert not [s for s in sink.of(LayerStats, "gradient") if s.where.node not in (*NODES, None)]


def test_watching_changes_no_weight():
    plain = federate(
        FedAvg(),
        client_app(train=handler(lambda *_: nullcontext())),
        arrays=ArrayRecord(network().state_dict()),
    )[0]
    with watched() as (monitor, _):
        seen = run(handler(watch), monitor)
    for name, array in plain.arrays.items():
        assert (array.numpy() == seen.arrays[name].numpy()).all()


def test_inside_of_evaluate_it_watches_nothing_and_gives_something_to_talk_to():
    talked = []

    def evaluate(message, context):
        net = network()
        with fv.watch(net) as observer:
            learn(net, data(context.node_id), steps=2)
            observer.log({"mine": 1.0})
            talked.append(context.node_id)
        return evaluation_of(message)

    def evaluation_of(message):
        metrics = MetricRecord({"eval_acc": 0.5, "num-examples": 20})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    with watched() as (monitor, sink):
        app = client_app(fv.flower.client_mod(), train=training, evaluate=evaluate)
        federate(FedAvg(), app, monitor, rounds=1, run_id=next(RUNS))
    assert sorted(talked) == [100, 101, 102, 103]
    assert not [m for m in sink.metrics("steps") if m.where.node in NODES]
    assert not [m for m in sink.metrics("gradient.norm") if m.where.node in NODES]
    assert len(sink.of(Span, "client")) == 4  # of the trainings


def test_of_two_models_the_first_is_the_clients():
    def twice(message, context):
        net, teacher, batch = network(), network(), data(context.node_id)
        with watch(net, batch):
            learn(net, batch, steps=3)
        with watch(teacher, batch):
            learn(teacher, batch, steps=9)
        return reply_of(message, net, batch)

    with watched() as (monitor, sink):
        run(twice, monitor)
    assert {m.value for m in sink.metrics("steps", round=1) if m.where.node in NODES} == {3.0}


def test_what_raises_inside_is_flowers_and_leaves_no_hook_behind():
    nets = []

    def train(message, context):
        net, batch = network(), data(context.node_id)
        nets.append(net)
        with watch(net, batch):
            learn(net, batch, steps=2)
            if context.node_id == 102 and is_round(message, 1):
                raise LookupError("boom")
        return reply_of(message, net, batch)

    with watched() as (monitor, sink):
        run(train, monitor)
    (event,) = sink.events("client.failed")
    assert (event.where.node, event.where.round, event.data["exception"]) == ("102", 1, "LookupError")
    assert sink.value("steps", node="102", round=2) == 2  # and in the next round it is watched again
    assert not [net for net in nets if any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())]


def test_numbers_of_the_users_own_belong_to_the_client():
    def train(message, context):
        net, batch = network(), data(context.node_id)
        with watch(net, batch) as observer:
            learn(net, batch, steps=1)
            observer.log({"temperature": float(context.node_id)})
            observer.event("info", "noticed", "Something.")
        return reply_of(message, net, batch)

    with watched() as (monitor, sink):
        run(train, monitor)
    told = {m.where.node: m.value for m in sink.metrics("user.temperature", round=2)}
    assert told == {node: float(node) for node in NODES}


def test_without_the_mod_watch_is_a_run_of_its_own(tmp_path):
    """As it is outside of Flower."""
    own = tmp_path / "own.db"

    def train(message, context):
        net, batch = network(), data(context.node_id)
        if context.node_id == 100:
            with fv.watch(net, store=own):
                learn(net, batch, steps=1)
        return reply_of(message, net, batch)

    app = client_app(train=train)
    federate(FedAvg(), app, arrays=ArrayRecord(network().state_dict()), rounds=1)
    assert own.exists()
    for file in tmp_path.iterdir():
        file.unlink() if file.is_file() else file.rmdir()
