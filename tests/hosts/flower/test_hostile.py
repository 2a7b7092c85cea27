# SPDX-License-Identifier: Apache-2.0
"""The attacks of `test_hostile_senders` through Flower's own messages: replies of one node whose telemetry lies."""

import math
import time
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg

from fedvitals.hosts import flower
from fedvitals.hosts.flower import replies
from fedvitals.hosts.flower.server_rounds import ServerRounds
from fedvitals.measurements import stamped
from fedvitals.records import Event, Finding, Layer, LayerStats, LayerTable, Metric, Run, Where
from fedvitals.stats import COUNT, NANS, SUM_MAGNITUDES, SUM_SQUARES, empty_sums
from fedvitals.transport.sender_limits import METRIC_NAMES
from fedvitals.transport.wire.payload import decode, encode
from support.flower.federation import (
    LAYERS,
    client_app,
    federate,
    is_round,
    node_of,
    numbers,
    rewritten,
    training,
    watched,
    with_mod,
)

LIAR, VICTIM, NODES = "101", "103", ("100", "101", "102", "103", "104", "105")
ROUNDS = 4
HERE = Where("flower-7", None, LIAR)
ONE_LAYER = LayerTable("parameter", (Layer("dense.weight", (6, 4), "float32"),))
ALL_LAYERS = LayerTable("parameter", tuple(Layer(name, shape, "float32") for name, shape in LAYERS.items()))
ABSURD = LayerTable("parameter", (Layer("w", (2**62, 2**62), "float32"),))


def update_statistics(table=ONE_LAYER, *, nans=0.0, where=HERE, at=0.0):
    rows = empty_sums(len(table.layers))
    rows[:, COUNT] = [math.prod(layer.shape) for layer in table.layers]
    rows[:, NANS], rows[:, SUM_SQUARES], rows[:, SUM_MAGNITUDES] = nans, 0.01, 0.3
    return LayerStats(where, time.time() + at, "update", rows, table.digest)


def tables(*brought):
    return Run("flower-7", "flower", tables=brought)


def adding(*lies):
    """Telemetry as it was measured, with lies beside it."""

    def change(record):
        own = decode(record["payload"])
        source = f"lies-{own[-1].source}-{own[-1].sequence}"  # another one in each round, or they would count as old
        more = [stamped(replace(lie), source, i) for i, lie in enumerate(lies)]
        return ConfigRecord({**record, "payload": encode([*own, *more])})

    return change


def nan_app(*nodes, spoil=None):
    """An app in which some clients send a model that is not finite, from round 2 on."""

    def train(message, context):
        reply = training(message, context)
        if str(context.node_id) in nodes and not is_round(message, 1):
            arrays = {name: array.numpy() for name, array in reply.content["arrays"].items()}
            spoilt = (spoil or all_nan)(arrays)
            reply.content["arrays"] = ArrayRecord({name: Array(values) for name, values in spoilt.items()})
        return reply

    return client_app(flower.client_mod(), train=train)


def all_nan(arrays):
    return {name: np.full_like(values, np.nan) for name, values in arrays.items()}


def attacked(*lies, app=None, **settings):
    """A run in which the liar's telemetry has these records in it; what must hold in any case is checked."""
    settings = {"detectors": "standard", **settings}
    fate = rewritten(adding(*lies), node=LIAR) if lies else None
    attach = {"attach": {"guard": "drop"}}  # or the model of all would be lost, and clients begin with NaN
    with watched(**settings) as (monitor, sink):
        federate(FedAvg(), app or with_mod(), monitor, nodes=len(NODES), rounds=ROUNDS, fate=fate, **attach)
    assert [m.where.round for m in sink.metrics("time.round")] == [1, 2, 3, 4]
    for node in {*NODES} - {LIAR}:
        assert [m.where.round for m in sink.metrics("loss", node=node)] == [1, 2, 3, 4]
        assert [m.where.round for m in sink.metrics("time.client", node=node)] == [1, 2, 3, 4]
        assert [m.where.round for m in sink.metrics("update.norm", node=node)] == [1, 2, 3, 4]
        assert not sink.events("telemetry.refused", node=node)
    assert {r.where.group for r in sink.records if not isinstance(r, Run)} == {None}
    return sink


def accused(sink, issue="NAN_UPDATE"):
    return {(f.where.node, f.where.round) for f in sink.of(Finding, issue) if f.severity != "note"}


def check_innocent(sink, *guilty):
    assert {f.where.node for f in sink.of(Finding)} <= {None, LIAR, *guilty}


def since_round_2(node):
    return {(node, number) for number in (2, 3, 4)}


def test_an_absurd_shape_blinds_nobody():
    sink = attacked(tables(ABSURD), app=nan_app(VICTIM))
    assert accused(sink) == since_round_2(VICTIM)
    assert {e.where.node for e in sink.events("telemetry.refused")} == {LIAR}
    assert {f.where.node for f in sink.of(Finding, "TELEMETRY_LOST")} == {LIAR}
    check_innocent(sink, VICTIM)


def test_nan_in_the_name_of_another_accuses_nobody():
    there = replace(HERE, group=VICTIM)
    sink = attacked(tables(ONE_LAYER), update_statistics(nans=24.0, where=there), update_statistics(at=0.001))
    assert not accused(sink)
    check_innocent(sink)


HIDING = {
    "statistics of other layers": [tables(ONE_LAYER), update_statistics()],
    "statistics of the same layers": [tables(ALL_LAYERS), update_statistics(ALL_LAYERS)],
    "statistics of the future": [tables(ONE_LAYER), update_statistics(at=1e9)],
    "true ones and others": [
        tables(ONE_LAYER, ALL_LAYERS),
        *(update_statistics(ALL_LAYERS, nans=24.0), update_statistics(), update_statistics()),
    ],
    "metrics": [Metric(HERE, time.time() + 1e9, name, 0.0) for name in ("update.nonfinite", "update.norm")],
    "in another's name": [tables(ONE_LAYER), update_statistics(nans=24.0, where=replace(HERE, group=VICTIM))],
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("privacy", [2, 3])
@pytest.mark.parametrize("name", HIDING)
def test_whatever_it_tells_a_client_that_sends_nan_is_found(name, privacy):
    sink = attacked(*HIDING[name], app=nan_app(LIAR), privacy=privacy)
    assert accused(sink) == since_round_2(LIAR)
    check_innocent(sink)


def longer(arrays):
    return {**all_nan(arrays), "more": np.full(3, np.nan, np.float32)}


def shorter(arrays):
    return {"dense.bias": np.full(4, np.nan, np.float32)}


def doubled(arrays):
    return {name: np.full(values.shape, np.nan, np.float64) for name, values in arrays.items()}


@pytest.mark.thorough
@pytest.mark.parametrize("spoil", [longer, shorter, doubled])
def test_nan_in_arrays_of_another_kind_is_found_as_well(spoil):
    """Layers that the server has no names for."""
    sink = attacked(app=nan_app(LIAR, spoil=spoil))
    assert accused(sink, "NAN_UPDATE" if spoil is doubled else "SHAPE_OR_DTYPE_MISMATCH") == since_round_2(LIAR)
    assert spoil is doubled or all("values are NaN" in event.message for event in sink.events("update.refused"))
    check_innocent(sink)


def test_layer_tables_of_one_client_cost_no_other():
    many = [LayerTable("parameter", (Layer(f"w{i}", (1,), "float32"),)) for i in range(998)]
    sink = attacked(tables(*many), app=nan_app(VICTIM), privacy=3)
    assert accused(sink) == since_round_2(VICTIM)
    assert {e.where.node for e in sink.events("telemetry.refused")} == {LIAR}
    check_innocent(sink, VICTIM)


@pytest.mark.parametrize(
    "lie",
    [
        Event(HERE, 1.0, "warning", "initialisation", "Layers fade."),
        Metric(HERE, 1.0, "time.round", 1.0),
        Metric(replace(HERE, node=VICTIM), 1.0, "update.nonfinite", 24.0),
    ],
    ids=["first weights", "a round's end", "another's number"],
)
def test_what_is_the_servers_to_tell_is_refused(lie):
    sink = attacked(lie, app=nan_app(VICTIM))
    assert accused(sink) == since_round_2(VICTIM)
    assert {(e.where.node, e.where.round) for e in sink.events("telemetry.refused")} == {
        (LIAR, number) for number in range(1, ROUNDS + 1)
    }


def test_a_reply_that_cannot_be_read_names_its_sender_and_costs_nobody_else():
    """Bytes that are no array."""
    fate = lambda request, reply: _broken(reply) if node_of(request) == LIAR else reply  # noqa: E731
    # Flower itself cannot aggregate it.
    with watched(detectors="standard") as (monitor, sink), suppress(Exception):
        federate(FedAvg(), with_mod(), monitor, nodes=len(NODES), rounds=2, fate=fate)
    assert {e.where.node for e in sink.events("update.refused")} == {LIAR}
    assert {m.where.node for m in sink.metrics("update.norm", round=1)} == {*NODES} - {LIAR}
    assert 1 in {m.where.round for m in sink.metrics("time.round")}


def _broken(reply):
    if "arrays" in reply.content:
        wrong = Array(dtype="object", shape=(3,), stype="numpy.ndarray", data=b"no array at all")
        reply.content["arrays"] = ArrayRecord(dict.fromkeys(LAYERS, wrong))
    return reply


def test_the_model_is_the_same_whatever_a_client_tells():
    plain, _ = federate(FedAvg(), client_app(), nodes=len(NODES), rounds=2)
    lies = (tables(ONE_LAYER), update_statistics(), Metric(HERE, math.nan, "loss", math.inf))
    with watched() as (monitor, _):
        fate = rewritten(adding(*lies), node=LIAR)
        result, _ = federate(FedAvg(), with_mod(), monitor, nodes=len(NODES), rounds=2, fate=fate)
    assert numbers(result.arrays) == numbers(plain.arrays)


def test_metrics_in_replies_have_a_quota_for_each_client():
    """Where no strategy refuses names that differ, as in a loop of the user's own and in the older API."""
    with watched() as (monitor, sink):
        journal = ServerRounds(monitor)
        journal.begin(1)
        for node, told in (
            ("101", {f"m{i}": 1.0 for i in range(5_000)}),
            ("102", {"mine": 2.0}),
            ("101", {"loss": 3.0}),
        ):
            reply = SimpleNamespace(content=RecordDict({"metrics": MetricRecord(told)}))
            replies._log_metrics(journal, SimpleNamespace(node=node, phase="train"), reply)
        journal.end()
    assert len(sink.metrics(node="101")) == METRIC_NAMES + 1
    assert [m.value for m in sink.metrics("loss", node="101")] == [3.0]
    assert [m.value for m in sink.metrics("user.mine", node="102")] == [2.0]
    assert [e.where.node for e in sink.events("telemetry.refused")] == ["101"]
