# SPDX-License-Identifier: Apache-2.0
"""SuperNodes that die, stay away and come back, under their own id or another; and rounds that nobody survives."""

import random

import pytest
from flwr.app import Error, Message
from flwr.serverapp.strategy import FedAvg

import fedvitals as fv
from fedvitals.diagnosis.examine import examine
from fedvitals.records import Finding
from fedvitals.store import open_reader
from fedvitals.store.read import queries
from support.flower.federation import (
    OLDEST,
    HandGrid,
    client_app,
    evaluation,
    flower_run,
    model,
    node_of,
    numbers,
    requests_for,
    sealed,
    training,
    watched,
    with_mod,
)

ROUNDS = 12
STANDARD = {"detectors": "standard"}


class Leaving(FedAvg):
    """Before some rounds, nodes go from the grid or come to it: {round: function of the grid's list of nodes}."""

    def __init__(self, grid, moves, **settings):
        super().__init__(min_available_nodes=2, min_train_nodes=2, min_evaluate_nodes=2, **settings)
        self.grid, self.moves = grid, moves

    def configure_train(self, server_round, *args, **more):
        self.moves.get(server_round, lambda _: None)(self.grid.nodes)
        return super().configure_train(server_round, *args, **more)


def dying(grid, last):
    """A fate: from a round on, node 101 does not answer in training, and in evaluation it is unavailable."""

    def fate(request, reply):
        if node_of(request) != "101" or request.content["config"]["server-round"] != last:
            return reply
        if request.metadata.message_type == "train":
            return None
        return sealed(Message(Error(5, "Error: Node Unavailable"), reply_to=request))

    grid.fate = fate


def run(grid, moves, monitor=None, *, rounds=ROUNDS, **settings):
    strategy = Leaving(grid, moves, **settings)
    if monitor is not None:
        strategy = fv.flower.attach(strategy, monitor)
    random.seed(0)  # by which Flower draws its cohorts
    with flower_run(grid.run_id):
        return strategy.start(grid, model(), num_rounds=rounds)


def troubles(sink, severity="warning"):
    rounds = {}
    for finding in sink.of(Finding):
        if finding.severity == severity and finding.issue in ("DROP_OUT", "TIMEOUT", "CRASH", "NOTHING_AGGREGATED"):
            rounds.setdefault((finding.issue, finding.where.node), []).append(finding.where.round)
    return rounds


@pytest.mark.parametrize("nodes", [3, 4, 8])
@pytest.mark.parametrize("last", [1, 2, 3, 6])
def test_a_node_that_dies_is_found_at_once_and_not_forgotten(nodes, last):
    with watched(**STANDARD) as (monitor, sink):
        grid = HandGrid(with_mod(), nodes)
        dying(grid, last)
        run(grid, {last + 1: lambda listed: listed.remove(101)}, monitor)
    assert troubles(sink) == {("DROP_OUT", "101"): [*range(last, ROUNDS + 1)]}


def test_a_node_that_is_back_is_reported_no_more():
    with watched(**STANDARD) as (monitor, sink):
        grid = HandGrid(with_mod())
        dying(grid, 3)
        run(grid, {4: lambda listed: listed.remove(101), 7: lambda listed: listed.append(101)}, monitor)
    assert troubles(sink) == {("DROP_OUT", "101"): [3, 4, 5, 6]}
    assert [(e.where.node, e.where.round) for e in sink.events("client.connected")] == [("101", 7)]


@pytest.mark.parametrize("config", [{"partition-id": 1}, {"name": "north"}])
def test_a_node_that_is_back_under_a_new_id_is_joined_to_its_partition_or_name(config):
    with watched(**STANDARD) as (monitor, sink):
        grid = HandGrid(with_mod())
        grid.node_configs = {101: config, 999: config}
        dying(grid, 3)
        run(grid, {4: lambda listed: listed.remove(101), 7: lambda listed: listed.append(999)}, monitor)
    assert troubles(sink) == {("DROP_OUT", "101"): [3, 4, 5, 6]}
    assert troubles(sink, "note")["DROP_OUT", "101"] == [7]
    assert "north" not in "".join(map(str, sink.records))


def test_a_node_that_is_gone_from_the_list_is_found_though_few_are_asked_and_training_is_the_same():
    moves = {3: lambda listed: listed.remove(101)}
    alone = run(HandGrid(client_app(), 8), moves, fraction_train=0.25)
    with watched(**STANDARD) as (monitor, sink):
        seen = run(HandGrid(with_mod(), 8), moves, monitor, fraction_train=0.25)
    assert numbers(seen.arrays) == numbers(alone.arrays)
    assert [(e.where.node, e.where.round) for e in sink.events("client.disconnected")] == [("101", 3)]
    assert troubles(sink) == {("DROP_OUT", "101"): [*range(3, ROUNDS + 1)]}


def test_the_list_of_nodes_and_the_model_are_as_without_us():
    moves = {3: lambda listed: listed.remove(101), 5: lambda listed: listed.append(101)}
    alone = run(HandGrid(client_app()), moves)
    with watched() as (monitor, _):
        grid = HandGrid(with_mod())
        seen = run(grid, moves, monitor)
    assert numbers(seen.arrays) == numbers(alone.arrays)
    assert "get_node_ids" not in vars(grid)  # the hook is off again


def test_while_the_strategy_waits_for_a_dead_node_it_is_told_which_one():
    """Flower's default is two nodes, and that both are there: the round would never end."""
    with watched() as (monitor, sink):
        grid = HandGrid(with_mod(), 2)
        told = []
        list_nodes = grid.get_node_ids

        def get_node_ids():
            monitor.flush()
            told.extend(sink.events("client.disconnected"))
            if told and 101 not in grid.nodes:
                grid.nodes.append(101)
            return list_nodes()

        grid.get_node_ids = get_node_ids
        run(grid, {2: lambda listed: listed.remove(101)}, monitor, rounds=2)
    assert grid.get_node_ids is get_node_ids  # the app's own is back
    assert {(e.where.node, e.where.round) for e in told} == {("101", 2)}
    assert [(e.where.node, e.where.round) for e in sink.events("client.connected")] == [("101", 2)]


def test_what_is_found_live_is_found_again_in_the_store(tmp_path):
    store = tmp_path / "runs.db"
    with fv.Monitor(store, machine=False) as monitor:
        grid = HandGrid(with_mod())
        dying(grid, 2)
        run(grid, {3: lambda listed: listed.remove(101), 6: lambda listed: listed.append(101)}, monitor, rounds=8)
    with open_reader(store) as reader:
        live = queries.records(reader, monitor.run.id, Finding)
        again = examine(reader.history(monitor.run.id))
    told = [[(f.issue, f.where.node, f.where.round, f.message) for f in findings] for findings in (live, again)]
    assert told[0] == told[1]
    assert [f.where.round for f in again if f.issue == "DROP_OUT"] == [2, 3, 4, 5]


def test_in_a_loop_of_ones_own_a_node_is_gone_from_the_round_on_in_which_it_is_not_listed():
    with watched() as (monitor, sink), flower_run():
        grid = fv.flower.attach(HandGrid(with_mod()), monitor)
        for number in range(1, 5):
            if number == 3:
                grid.nodes.remove(101)
            grid.pull_messages(grid.push_messages(requests_for(grid, model())))
    assert [(e.where.node, e.where.round) for e in sink.events("client.disconnected")] == [("101", 3)]


# -- nobody is left ---------------------------------------------------------------------------------------------------


def failing_from(number, phase):
    def handler(inner):
        def handle(message, context):
            if message.metadata.message_type == phase and message.content["config"]["server-round"] >= number:
                raise LookupError("patient 4711")
            return inner(message, context)

        return handle

    return client_app(fv.flower.client_mod(), train=handler(training), evaluate=handler(evaluation))


@pytest.mark.skipif(OLDEST, reason="Flower 1.21 itself raises where nobody answers")
def test_a_training_in_which_all_fail_is_one_case():
    with watched(**STANDARD) as (monitor, sink):
        run(HandGrid(failing_from(3, "train")), {}, monitor, rounds=6)
    assert troubles(sink) == {("NOTHING_AGGREGATED", None): [3, 4]}
    assert troubles(sink, "critical") == {("NOTHING_AGGREGATED", None): [5, 6]}
    first = next(f for f in sink.of(Finding) if f.issue == "NOTHING_AGGREGATED")
    reason = "because all 4 clients failed: LookupError. The model stays as it was."
    assert first.message == f"Nothing was aggregated in round 3, {reason}"
    assert [e.where.round for e in sink.events("aggregation.failed")] == [3, 4, 5, 6]


def test_an_evaluation_in_which_all_fail_is_one_case():
    with watched(**STANDARD) as (monitor, sink):
        run(HandGrid(failing_from(3, "evaluate")), {}, monitor, rounds=4)
    assert {f.where.node for f in sink.of(Finding) if f.issue == "CRASH"} == {None}
    assert not sink.events("aggregation.failed")
