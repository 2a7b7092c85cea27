# SPDX-License-Identifier: Apache-2.0
"""Replies that break an aggregation: the client is named before the strategy dies of it, or its reply is left out."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, MetricRecord, RecordDict
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.serverapp.exception import InconsistentMessageReplies
from flwr.serverapp.strategy import FedAvg

import fedvitals as fv
from fedvitals.hosts.flower.guard import MalformedReplyError
from fedvitals.records import Finding
from support.flower import legacy
from support.flower.federation import (
    OLDEST,
    RUNS,
    HandGrid,
    client_app,
    federate,
    flower_run,
    is_round,
    model,
    node_of,
    numbers,
    requests_for,
    watched,
    with_mod,
)

ILL = "101"


def other_shape(content):
    content["arrays"]["dense.weight"] = Array(np.zeros((3, 3), np.float32))


def garbage(content):
    content["arrays"]["dense.weight"] = Array(
        dtype="float32", shape=(6, 4), stype="numpy.ndarray", data=b"\x93NUMPY garbage"
    )


def other_layers(content):
    content["arrays"] = ArrayRecord({f"{name}.old": array for name, array in content["arrays"].items()})


def a_layer_less(content):
    content["arrays"] = ArrayRecord(dict([*content["arrays"].items()][1:]))


def no_model(content):
    del content["arrays"]


def whole_numbers(content):
    content["arrays"]["dense.weight"] = Array(np.zeros((6, 4), np.int64))


def no_metrics(content):
    del content["metrics"]


def other_metrics(content):
    content["metrics"] = MetricRecord({"score": 1.0})


ARRAYS = {
    other_shape: "dense.weight has shape (3, 3), where shape (6, 4) is usual",
    garbage: "dense.weight cannot be read",
    other_layers: "it lacks dense.bias, dense.weight, head.weight",
    a_layer_less: "it lacks dense.weight",
    no_model: "it holds no model",
}
METRICS = {
    no_metrics: "it lacks metrics/num-examples, metrics/train_loss",
    other_metrics: "it lacks metrics/num-examples, metrics/train_loss",
}
SPOILT = {**ARRAYS, **METRICS}


def spoilt(spoil, phase="train"):
    """The fate of a federation in which one client's second reply is spoilt."""

    def fate(request, reply):
        if node_of(request) == ILL and is_round(request, 2, phase):
            spoil(reply.content)
        return reply

    return fate


def findings(sink):
    return {(finding.issue, finding.where.node) for finding in sink.of(Finding)}


@pytest.mark.parametrize("spoil", SPOILT)
def test_the_client_is_named_before_the_strategy_dies_of_its_reply(spoil):
    with watched(detectors="standard") as (monitor, sink):
        with pytest.raises((ValueError, InconsistentMessageReplies)) as died:
            federate(FedAvg(), with_mod(), monitor, rounds=3, fate=spoilt(spoil))
        monitor.flush()
        (refused,) = sink.events("update.refused")
        (failed,) = sink.events("round.failed")
    assert (refused.where.node, refused.where.round, refused.data["misfit"]) == (ILL, 2, SPOILT[spoil])
    assert refused.at <= failed.at
    # The server's own exception, at its own site, in its own words.
    assert str(died.value).strip() in failed.message
    assert findings(sink) == {("SHAPE_OR_DTYPE_MISMATCH", ILL), ("CRASH", None)}


@pytest.mark.skipif(OLDEST, reason="Flower 1.21 validates otherwise")
@pytest.mark.parametrize("spoil", [*SPOILT, whole_numbers])
def test_left_out_the_round_is_that_of_the_others(spoil):
    lost = lambda request, reply: None if node_of(request) == ILL and is_round(request, 2) else reply  # noqa: E731
    wanted, _ = federate(FedAvg(), client_app(), rounds=3, fate=lost)
    with watched(detectors="standard") as (monitor, sink):
        fate = spoilt(spoil)
        reached, _ = federate(FedAvg(), with_mod(), monitor, rounds=3, fate=fate, attach={"guard": "drop"})
    assert numbers(reached.arrays) == numbers(wanted.arrays)
    assert [(event.where.node, event.where.round) for event in sink.events("update.refused")] == [(ILL, 2)]
    assert findings(sink) == {("SHAPE_OR_DTYPE_MISMATCH", ILL)}


@pytest.mark.parametrize("spoil", [other_shape, garbage])
def test_told_to_fail_it_names_client_and_layer(spoil):
    with watched() as (monitor, _), pytest.raises(MalformedReplyError, match=rf"Round 2: .*{ILL}: dense.weight"):
        federate(FedAvg(), with_mod(), monitor, rounds=3, fate=spoilt(spoil), attach={"guard": "fail"})


@pytest.mark.parametrize("guard", ["report", "drop"])
def test_an_evaluation_that_does_not_fit_is_named_or_left_out(guard):
    fate = spoilt(other_metrics, "evaluate")
    with watched() as (monitor, sink):
        if guard == "report":
            with pytest.raises(Exception, match="MetricRecords"):
                federate(FedAvg(), with_mod(), monitor, rounds=2, fate=fate)
        else:
            federate(FedAvg(), with_mod(), monitor, rounds=2, fate=fate, attach={"guard": guard})
    (refused,) = sink.events("update.refused")
    assert (refused.where.node, refused.data["phase"]) == (ILL, "evaluate")


@pytest.mark.parametrize("wait", [True, False])
def test_in_a_loop_of_ones_own_it_is_left_out_of_the_replies(wait):
    rounds = iter((1, 2))

    def fate(request, reply):
        if node_of(request) == ILL:
            other_shape(reply.content)
        return reply

    with watched() as (monitor, sink), flower_run():
        grid = HandGrid(with_mod(), fate=fate)
        fv.flower.attach(grid, monitor, guard="drop")
        for _ in rounds:
            asked = requests_for(grid, model())
            answers = grid.send_and_receive(asked) if wait else grid.pull_messages(grid.push_messages(asked))
            assert [reply.has_error() for reply in answers] == [False, True, False, False]
    assert [event.where.round for event in sink.events("update.refused")] == [1, 2]


def run_legacy(monitor, guard):
    def fate(request, reply):
        if node_of(request) == ILL and "fitres.parameters" in reply.content:
            reply.content["fitres.parameters"]["0"] = Array(np.zeros((3, 3), np.float32))
        return reply

    strategy = fv.flower.attach(legacy.Ordered(accept_failures=True), monitor, guard=guard)
    grid = HandGrid(legacy.client_app(fv.flower.client_mod()), fate=fate, run_id=next(RUNS))
    config = ServerConfig(num_rounds=2)
    server = ServerApp(server_fn=lambda _: ServerAppComponents(strategy=strategy, config=config))
    with flower_run(grid.run_id):
        server(grid, Context(run_id=grid.run_id, node_id=1, node_config={}, state=RecordDict(), run_config={}))
    return strategy


def test_the_older_api_is_guarded_alike():
    with watched(detectors="standard") as (monitor, sink), pytest.raises(ValueError, match="broadcast"):
        run_legacy(monitor, "report")
    assert ("SHAPE_OR_DTYPE_MISMATCH", ILL) in findings(sink)
    with watched(detectors="standard") as (monitor, sink):
        strategy = run_legacy(monitor, "drop")
    assert [[node for node, *_ in replies] for replies in strategy.replies] == [[100, 102, 103]] * 2
    assert findings(sink) == {("SHAPE_OR_DTYPE_MISMATCH", ILL)}


# -- nobody is accused of what the app does -------------------------------------------------------------------------


def adapters_only(content):
    content["arrays"] = ArrayRecord({"head.weight": content["arrays"]["head.weight"]})


def bytes_of_any_length(content):
    trees = np.zeros(10 + len(content["metrics"]) + id(content) % 7, np.uint8)
    content["arrays"] = ArrayRecord({"0": Array(trees)})


def half_precision(content):
    halves = {name: Array(array.numpy().astype(np.float16)) for name, array in content["arrays"].items()}
    content["arrays"] = ArrayRecord(halves)


@pytest.mark.parametrize("change", [adapters_only, bytes_of_any_length])
def test_replies_that_all_differ_from_the_request_fit(change):
    class Anything(FedAvg):
        def aggregate_train(self, server_round, replies):
            self.seen = [reply.has_error() for reply in replies]
            return None, None

    strategy = Anything()
    with watched() as (monitor, sink):
        fate = lambda request, reply: change(reply.content) or reply if is_round(request, 1) else reply  # noqa: E731
        federate(strategy, with_mod(), monitor, rounds=1, fate=fate, attach={"guard": "drop"}, evaluate_fn=None)
    assert not any(strategy.seen)
    assert not sink.events("update.refused")


def test_one_client_that_compresses_fits():
    with watched(detectors="standard") as (monitor, sink):
        federate(FedAvg(), with_mod(), monitor, rounds=3, fate=spoilt(half_precision), attach={"guard": "drop"})
    assert not sink.events("update.refused")


def test_clients_of_other_ranks_that_answer_what_they_were_sent_fit():
    with watched() as (monitor, sink), flower_run():
        grid = HandGrid(with_mod())
        fv.flower.attach(grid, monitor, guard="drop")
        asked = requests_for(grid, model())
        for rank, request in enumerate(asked, 1):
            request.content["arrays"] = ArrayRecord({"lora_A": Array(np.ones((rank, 4), np.float32))})
        assert not any(reply.has_error() for reply in grid.send_and_receive(asked))
    assert not sink.events("update.refused")
