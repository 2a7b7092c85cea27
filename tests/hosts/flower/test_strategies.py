# SPDX-License-Identifier: Apache-2.0
"""Every strategy of Flower, and loops of one's own: watched or not, the same messages, metrics and models, bitwise."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord
from flwr.clientapp import mod as mods
from flwr.serverapp import strategy as strategies
from flwr.serverapp.strategy import FedAvg

import fedvitals as fv
from fedvitals.records import Span
from fedvitals.time_parts import ROUND
from support.conditions import holds_for_each
from support.flower.federation import (
    HandGrid,
    client_app,
    federate,
    flower_run,
    keys_and_bytes,
    model,
    numbers,
    requests_for,
    training,
    watched,
    with_mod,
)
from support.flower.strategies import recording

PLAIN = {
    "FedAvg": {},
    "FedAvgM": {"server_momentum": 0.5},
    "FedAdam": {},
    "FedYogi": {},
    "FedAdagrad": {},
    "FedProx": {"proximal_mu": 0.1},
    "FedMedian": {},
    "FedTrimmedAvg": {"beta": 0.2},
    "Krum": {"num_malicious_nodes": 1},
    "MultiKrum": {"num_malicious_nodes": 1, "num_nodes_to_select": 3},
    "Bulyan": {"num_malicious_nodes": 1},
    "QFedAvg": {"client_learning_rate": 0.1, "train_loss_key": "train_loss"},
}
PRIVATE = {
    "DifferentialPrivacyServerSideFixedClipping": {"clipping_norm": 1.0},
    "DifferentialPrivacyServerSideAdaptiveClipping": {},
    "DifferentialPrivacyClientSideFixedClipping": {"clipping_norm": 1.0},
    "DifferentialPrivacyClientSideAdaptiveClipping": {},
}


class Saving(FedAvg):
    """As people write it who keep the best model: a `start` of their own."""

    def start(self, grid, initial_arrays, num_rounds=3, timeout=3600, evaluate_fn=None, **_):
        arrays, config = initial_arrays, ConfigRecord()
        self.saved = []
        result = strategies.Result()
        for number in range(1, num_rounds + 1):
            asked = self.configure_train(number, arrays, config, grid)
            arrays, metrics = self.aggregate_train(number, grid.send_and_receive(asked, timeout=timeout))
            self.saved.append(numbers(arrays))
            result.train_metrics_clientapp[number] = metrics
            asked = self.configure_evaluate(number, arrays, config, grid)
            metrics = self.aggregate_evaluate(number, grid.send_and_receive(asked, timeout=timeout))
            result.evaluate_metrics_clientapp[number] = metrics
        result.arrays = arrays
        return result


def strategy_of(name):
    if name == "Saving":
        return recording(Saving)()
    kind = getattr(strategies, name, None)
    if kind is None:
        pytest.skip(f"this version of Flower has no {name}")
    if name in PRIVATE:
        return recording(kind)(FedAvg(), noise_multiplier=0.3, num_sampled_clients=8, **PRIVATE[name])
    return recording(kind)(**PLAIN[name])


def mods_of(name):
    if "ClientSide" not in name:
        return []
    return [mods.adaptiveclipping_mod if "Adaptive" in name else mods.fixedclipping_mod]


def facts(result, grid, strategy):
    """All that a user could compare."""
    requests = sorted(
        (m.metadata.message_type, m.metadata.dst_node_id, keys_and_bytes(m.content)) for m in grid.requests
    )
    return {
        "arrays": numbers(result.arrays),
        "train": {n: dict(m) for n, m in result.train_metrics_clientapp.items()},
        "evaluate": {n: dict(m) for n, m in result.evaluate_metrics_clientapp.items()},
        "server": {n: dict(m) for n, m in result.evaluate_metrics_serverapp.items()},
        "requests": requests,
        "replies": strategy.seen,
        "saved": getattr(strategy, "saved", None),
    }


def evaluate(number, arrays):
    return MetricRecord({"accuracy": float(arrays["dense.bias"].numpy().sum()) + number})


@pytest.mark.thorough
@pytest.mark.parametrize("name", [*PLAIN, *PRIVATE, "Saving"])
def test_a_watched_run_is_the_same_to_the_last_bit(name):
    plain = strategy_of(name)  # first: it may skip
    alone = facts(
        *federate(plain, client_app(train_mods=mods_of(name)), nodes=8, rounds=3, evaluate_fn=evaluate), plain
    )
    with watched() as (monitor, sink):
        own = strategy_of(name)
        app = client_app(fv.flower.client_mod(), train_mods=mods_of(name))
        seen = facts(*federate(own, app, monitor, nodes=8, rounds=3, evaluate_fn=evaluate), own)
    assert [len(replies) for replies in alone["replies"]] == [8] * 6  # nothing failed: there is something to compare
    for part, wanted in alone.items():
        assert seen[part] == wanted, part
    assert [span.where.round for span in sink.of(Span, ROUND)] == [1, 2, 3]
    assert not sink.events("telemetry.refused")
    assert len(sink.of(Span, "client")) == 24  # what rode along did come home


def test_attach_gives_back_the_very_object_and_nothing_stays_on_the_grid():
    strategy = FedAvg()
    with watched() as (monitor, _):
        assert fv.flower.attach(strategy, monitor) is strategy
        assert type(strategy) is FedAvg
        _, grid = federate(strategy, with_mod())
    assert not {"push_messages", "pull_messages", "send_and_receive", "_fedvitals"} & vars(grid).keys()


def test_metrics_of_server_and_clients_are_those_of_the_round():
    with watched() as (monitor, sink):
        result, _ = federate(FedAvg(), with_mod(), monitor, rounds=2, evaluate_fn=evaluate)
    for number in (1, 2):
        assert sink.value("accuracy", round=number, node=None) == result.evaluate_metrics_serverapp[number]["accuracy"]
        assert sink.value("loss", round=number, node="101") > 0
        assert sink.value("update.samples", round=number, node="101") == 21
        assert sink.value("local.accuracy", round=number, node="102") > 0


def test_two_evaluations_are_two_series():
    """The clients' average has a name of its own where the server evaluates at times; round 0 is nobody's round."""

    def at_times(number, _):
        return MetricRecord({"accuracy": 0.5, "f1": 0.25}) if number in (0, 2) else None

    with watched() as (monitor, sink):
        federate(FedAvg(), with_mod(), monitor, rounds=3, evaluate_fn=at_times)
    told = {m.where.round: m.value for m in sink.metrics("accuracy") if m.where.node is None}
    assert told == {2: 0.5}
    assert {m.where.round for m in sink.metrics("user.f1") if m.where.node is None} == {2}
    averaged = {m.where.round: m.value for m in sink.metrics("local.accuracy") if m.where.node is None}
    assert {*averaged} == {1, 2, 3}
    with watched() as (monitor, sink):
        federate(FedAvg(), with_mod(), monitor, rounds=3)
    assert {m.where.round: m.value for m in sink.metrics("accuracy") if m.where.node is None} == averaged


@pytest.mark.parametrize("ours_first", [True, False])
def test_flowers_own_mods_that_count_bytes_work_beside_ours(ours_first):
    """They fail where a record has an empty value, so ours has none."""
    theirs = [mods.message_size_mod, mods.arrays_size_mod]
    chain = [fv.flower.client_mod(), *theirs] if ours_first else [*theirs, fv.flower.client_mod()]
    with watched() as (monitor, sink):
        result, _ = federate(FedAvg(), client_app(*chain), monitor)
    assert numbers(result.arrays) == numbers(federate(FedAvg(), client_app())[0].arrays)
    assert not sink.events("client.failed")
    assert len(sink.of(Span, "client")) == 8


def test_a_setting_that_is_empty_is_no_trouble():
    """Flower itself cannot say how many bytes it has."""
    config = ConfigRecord({"note": "", "layers": [], "key": b""})
    strategy = recording(FedAvg)()
    with watched() as (monitor, sink):
        federate(strategy, with_mod(), monitor, train_config=config)
    assert holds_for_each(keys == ["arrays", "metrics"] for replies in strategy.seen[::2] for *_, (keys, _) in replies)
    assert len(sink.of(Span, "client")) == 8


# -- loops of one's own -----------------------------------------------------------------------------------------------


def mean_of(replies):
    replies = sorted(replies, key=lambda reply: reply.metadata.src_node_id)
    names = replies[0].content["arrays"]
    return ArrayRecord({n: Array(np.mean([r.content["arrays"][n].numpy() for r in replies], 0)) for n in names})


def by_one_call(grid, arrays):
    return [*grid.send_and_receive(requests_for(grid, arrays))]


def by_push_and_pull(grid, arrays):
    ids, replies = {*grid.push_messages(requests_for(grid, arrays))}, []
    while ids:
        some = [*ids][:3]  # as a poll that finds not all of them
        replies += grid.pull_messages(some)
        ids -= {reply.metadata.reply_to_message_id for reply in replies}
    return replies


@pytest.mark.parametrize("way", [by_one_call, by_push_and_pull])
def test_a_loop_of_ones_own_is_counted_in_rounds_and_stays_the_same(way):
    def loop(monitor=None):
        grid, arrays, seen = HandGrid(with_mod() if monitor else client_app()), model(), []
        if monitor:
            assert fv.flower.attach(grid, monitor) is grid
        with flower_run():
            for _ in range(3):
                replies = way(grid, arrays)
                seen.append(sorted((r.metadata.src_node_id, keys_and_bytes(r.content)) for r in replies))
                arrays = mean_of(replies)
        return numbers(arrays), seen, sorted(keys_and_bytes(m.content) for m in grid.requests)

    with watched() as (monitor, sink):
        own = loop(monitor)
    assert own == loop()
    assert [span.where.round for span in sink.of(Span, ROUND)] == [1, 2, 3]
    for number in (1, 2, 3):
        (event,) = sink.events("cohort", round=number)
        assert sorted(event.data["answered"]) == ["100", "101", "102", "103"]
        assert {span.where.node for span in sink.of(Span, "client", round=number)} == {*event.data["answered"]}


def test_the_round_that_a_message_names_is_the_round():
    with watched() as (monitor, sink), flower_run():
        grid = fv.flower.attach(HandGrid(with_mod()), monitor)
        for number in (5, 9):
            asked = requests_for(grid, model())
            for message in asked:
                message.content["config"]["server-round"] = number
            grid.send_and_receive(asked)
    assert [span.where.round for span in sink.of(Span, ROUND)] == [5, 9]


def test_a_model_of_whole_numbers_alone_is_no_trouble():
    """As trees are, which FedXgbBagging sends as bytes."""
    trees = ArrayRecord({"0": Array(np.arange(40, dtype=np.uint8))})

    def train(message, context):
        reply = training(message, context)
        reply.content["arrays"] = ArrayRecord({"0": message.content["arrays"]["0"]})
        return reply

    def aggregate(_, replies):
        return next(iter(replies)).content["arrays"], None

    for way in ("report", "drop"):
        strategy = FedAvg()
        strategy.aggregate_train = aggregate
        app = client_app(fv.flower.client_mod(privacy=3), train=train)
        with watched(privacy=3) as (monitor, sink):
            result, _ = federate(strategy, app, monitor, arrays=trees, attach={"guard": way})
        assert numbers(result.arrays) == numbers(trees)
        assert len(sink.of(Span, "client")) == 8
