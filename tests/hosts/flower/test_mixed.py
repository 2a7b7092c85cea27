# SPDX-License-Identifier: Apache-2.0
"""Fleets in which some have fedvitals and some do not, and who is who: nodes, spans and runs keep their identity."""

from importlib.metadata import version

import pytest
from flwr.app import Message
from flwr.serverapp.strategy import FedAvg

import fedvitals as fv
from fedvitals.errors import ConfigError
from fedvitals.hosts.flower.reply_envelope import KEY
from fedvitals.records import Run, Span, Transfer
from fedvitals.time_parts import JOURNEY, ROUND
from support.flower.federation import (
    FIRST,
    HandGrid,
    client_app,
    federate,
    flower_run,
    keys_and_bytes,
    model,
    numbers,
    requests_for,
    watched,
    with_mod,
)

NODES = ["100", "101", "102", "103"]


class Seeing(FedAvg):
    """Writes down what it is handed."""

    def aggregate_train(self, server_round, replies):
        replies = [*replies]
        self.__dict__.setdefault("seen", []).append(
            [(r.metadata.src_node_id, keys_and_bytes(r.content)) for r in replies]
        )
        return super().aggregate_train(server_round, replies)


def run_with(app, *, attached):
    strategy = Seeing()
    with watched() as (monitor, sink):
        result, _ = federate(strategy, app, monitor if attached else None)
    return numbers(result.arrays), {n: dict(m) for n, m in result.train_metrics_clientapp.items()}, strategy, sink


@pytest.mark.parametrize("mod", [False, True])
@pytest.mark.parametrize("attached", [False, True])
def test_all_four_combinations_give_the_same_model_and_metrics(mod, attached):
    plain_model, plain_metrics, plain, _ = run_with(client_app(), attached=False)
    model, metrics, strategy, sink = run_with(with_mod() if mod else client_app(), attached=attached)
    assert (model, metrics) == (plain_model, plain_metrics)
    rides_along = [KEY in content[0] for replies in strategy.seen for _, content in replies]
    assert set(rides_along) == {mod and not attached}  # an unwatched strategy gets one record more, and leaves it alone
    if not rides_along[0]:
        assert strategy.seen == plain.seen
    assert len(sink.of(Span, ROUND)) == (2 if attached else 0)
    assert len(sink.of(Span, "client")) == (8 if attached and mod else 0)
    assert len(sink.of(Span, JOURNEY)) == (8 if attached else 0)  # of a client without the mod, too


def test_a_fleet_in_which_only_some_have_the_mod():
    ours, plain = with_mod(), client_app()

    def app(message, context):
        return (ours if context.node_id % 2 else plain)(message, context)

    with watched() as (monitor, sink):
        result, _ = federate(FedAvg(), app, monitor)
    assert numbers(result.arrays) == numbers(federate(FedAvg(), plain)[0].arrays)
    assert {span.where.node for span in sink.of(Span, "client")} == {"101", "103"}
    assert {span.where.node for span in sink.of(Span, JOURNEY)} == {*NODES}
    assert {m.where.node for m in sink.metrics("update.norm") if m.where.node in NODES} == {*NODES}  # by the server
    assert not sink.events("telemetry.refused")


# -- identity ---------------------------------------------------------------------------------------------------------


def test_every_clients_span_is_the_child_of_its_journey_and_that_of_its_round():
    with watched() as (monitor, sink):
        federate(FedAvg(), with_mod(), monitor, rounds=3)
    rounds = {span.id: span for span in sink.of(Span, ROUND)}
    journeys = {span.id: span for span in sink.of(Span, JOURNEY)}
    clients = sink.of(Span, "client")
    assert (len(rounds), len(journeys), len(clients)) == (3, 12, 12)
    for client in clients:
        way = journeys.pop(client.parent)
        assert (way.where.node, way.where.round) == (client.where.node, client.where.round)
        assert rounds[way.parent].where.round == way.where.round
        assert client.trace == way.trace == rounds[way.parent].trace
        assert way.at <= client.at
        assert client.at + client.seconds <= way.at + way.seconds + 1e-6
    assert not journeys


def test_nodes_are_called_by_flowers_ids_however_large():
    class Wide(HandGrid):
        """Ids as a SuperLink gives them: 64 bits."""

        def __init__(self, app, **more):
            super().__init__(app, 3, **more)
            self.nodes = [2**63 - 25, 2**63 + 11, 17]
            self._states = dict.fromkeys(self.nodes, self._states[FIRST])

    with watched() as (monitor, sink), flower_run():
        grid = Wide(client_app(fv.flower.client_mod()))
        fv.flower.attach(FedAvg(min_available_nodes=3), monitor).start(grid, model(), num_rounds=1)
    names = {str(node) for node in grid.nodes}
    assert {span.where.node for span in sink.of(Span, "client")} == names
    assert {t.receiver for t in sink.of(Transfer) if t.sender == "server"} == names


def test_bytes_are_those_of_the_messages():
    sizes = {}

    def fate(request, reply):
        node, ours = str(request.metadata.dst_node_id), reply.content[KEY]
        down, up = (sum(r.count_bytes() for r in m.content.values()) for m in (request, reply))
        sizes[node] = {"model": down, "update": up - ours.count_bytes(), "telemetry": len(ours["payload"])}
        return reply

    with watched() as (monitor, sink), flower_run():
        grid = fv.flower.attach(HandGrid(with_mod(), fate=fate), monitor)
        grid.send_and_receive(requests_for(grid, model()))
    assert sizes.keys() == {str(node) for node in grid.get_node_ids()}
    for node, wanted in sizes.items():
        own = [t for t in sink.of(Transfer) if node in (t.sender, t.receiver)]
        assert {t.kind: t.bytes for t in own} == wanted
        assert len(own) == 3


def test_the_partition_is_told_where_there_is_one():
    with watched() as (monitor, sink):
        federate(FedAvg(), with_mod(), monitor, rounds=1)
    assert {e.where.node: e.data["partition"] for e in sink.events("client.partition")} == {
        node: i for i, node in enumerate(NODES)
    }


def test_the_run_says_whose_it_is():
    with watched() as (monitor, sink):
        federate(FedAvg(), with_mod(), monitor, rounds=1, run_id=4242)
    run = sink.of(Run)[-1]
    assert run.host == "flower"
    assert run.config["flower"] == {"strategy": "FedAvg", "run": "4242", "flwr": version("flwr")}
    assert run.config["fedvitals"]["privacy"] == 2
    assert run.config["fedvitals"]["tracebacks"] is False


def test_two_runs_have_two_traces_and_keep_apart():
    with watched() as (first, one), watched() as (second, two):
        federate(FedAvg(), with_mod(), first, rounds=1, run_id=11)
        federate(FedAvg(), with_mod(), second, rounds=1, run_id=12)
    traces = [{span.trace for span in sink.of(Span)} for sink in (one, two)]
    assert [len(found) for found in traces] == [1, 1]
    assert traces[0] != traces[1]
    assert all(len(sink.of(Span, "client")) == 4 and not sink.events("telemetry.refused") for sink in (one, two))


# -- attached once ----------------------------------------------------------------------------------------------------


def test_attaching_twice_is_attaching_once():
    with watched() as (monitor, sink):
        strategy = fv.flower.attach(fv.flower.attach(FedAvg(), monitor), monitor)
        federate(strategy, with_mod(), monitor)
    assert len(sink.events("cohort")) == 4
    assert len(sink.of(Span, JOURNEY)) == 8


def test_a_strategy_and_its_grid_are_not_attached_both():
    """All would be told twice."""
    with watched() as (monitor, _):
        fv.flower.attach(HandGrid(with_mod()), monitor)
        with pytest.raises(ConfigError, match="attached already"):
            fv.flower.attach(FedAvg(), monitor)


def test_two_monitors_on_one_strategy_are_refused():
    with watched() as (first, _), watched() as (second, _):
        strategy = fv.flower.attach(FedAvg(), first)
        with pytest.raises(ConfigError, match="another monitor already"):
            fv.flower.attach(strategy, second)


def test_a_monitor_that_watches_something_else_is_refused_at_once():
    with watched() as (monitor, _):
        with monitor.round(0):
            monitor.log(loss=1.0)
        with pytest.raises(ConfigError, match="make a new one"):
            fv.flower.attach(FedAvg(), monitor)


@pytest.mark.parametrize("what", [object(), FedAvg, "strategy", client_app()], ids=["object", "class", "text", "app"])
def test_what_cannot_be_attached_is_said(what):
    with watched() as (monitor, _), pytest.raises(ConfigError, match="takes a strategy"):
        fv.flower.attach(what, monitor)


def test_a_store_instead_of_a_monitor_is_said():
    with pytest.raises(ConfigError, match=r"takes a fv\.Monitor"):
        fv.flower.attach(FedAvg(), "runs.db")


def test_one_strategy_may_run_twice():
    with watched() as (monitor, sink):
        strategy = fv.flower.attach(FedAvg(), monitor)
        for _ in range(2):
            federate(strategy, with_mod(), rounds=2)
    assert [span.where.round for span in sink.of(Span, ROUND)] == [1, 2, 1, 2]
    assert len(sink.of(Span, "client")) == 16


def test_what_the_mod_cannot_do_costs_no_reply(caplog):
    """A handler of the user's own that gives back something odd gets what Flower makes of it, not what we do."""

    def train(message, context):
        return Message(message.content, reply_to=message)  # the very content that it was sent

    app = client_app(fv.flower.client_mod(privacy=3), train=train)
    with watched(privacy=3) as (monitor, sink), flower_run():
        grid = fv.flower.attach(HandGrid(app), monitor)
        replies = grid.send_and_receive(requests_for(grid, model()))
    assert [[*reply.content] for reply in replies] == [["arrays", "config"]] * 4
    assert "failed in" not in caplog.text
    assert len(sink.of(Span, "client")) == 4
