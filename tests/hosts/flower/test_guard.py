# SPDX-License-Identifier: Apache-2.0
"""NaN and infinity before aggregation: Flower's open issue 7645 on plain Flower, and the three ways of the guard."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from flwr.serverapp import strategy as strategies
from flwr.serverapp.strategy import FedAvg

import fedvitals as fv
from fedvitals.errors import ConfigError
from fedvitals.hosts.flower.guard import NonFiniteUpdateError
from fedvitals.records import Finding, Span
from fedvitals.time_parts import ROUND
from support.flower.federation import (
    LAYERS,
    OLDEST,
    client_app,
    federate,
    is_round,
    node_of,
    numbers,
    training,
    watched,
    with_mod,
)

ILL = "102"


def all_nan(arrays):
    return {name: np.full_like(values, np.nan) for name, values in arrays.items()}


def one_nan(arrays):
    arrays["dense.weight"][2, 1] = np.nan
    return arrays


def one_infinite(arrays):
    arrays["head.weight"][0, 0] = -np.inf
    return arrays


def ill(spoil, node=ILL, number=2, mod=True):
    """An app in which one client's model is spoilt in one round."""

    def train(message, context):
        reply = training(message, context)
        if str(context.node_id) == node and is_round(message, number):
            arrays = {name: array.numpy().copy() for name, array in reply.content["arrays"].items()}
            reply.content["arrays"] = ArrayRecord({name: Array(values) for name, values in spoil(arrays).items()})
        return reply

    return client_app(*([fv.flower.client_mod()] if mod else []), train=train)


def finite(result):
    return all(np.isfinite(array.numpy()).all() for array in result.arrays.values())


SPOILT = [all_nan, one_nan, one_infinite]


@pytest.mark.parametrize("spoil", SPOILT)
def test_on_plain_flower_one_clients_nan_makes_the_whole_model_so_and_nobody_says_a_word(spoil, caplog):
    result, _ = federate(FedAvg(), ill(spoil, mod=False), rounds=3)
    assert not finite(result)
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


@pytest.mark.thorough
@pytest.mark.parametrize("spoil", SPOILT)
@pytest.mark.parametrize("mod", [True, False])
def test_dropped_the_round_is_that_of_the_others(spoil, mod):
    without = lambda request, reply: None if is_round(request, 2) and node_of(request) == ILL else reply  # noqa: E731
    wanted, _ = federate(FedAvg(), client_app(), rounds=3, fate=without)
    with watched(detectors="standard") as (monitor, sink):
        app = ill(spoil, mod=mod)
        result, _ = federate(FedAvg(), app, monitor, rounds=3, attach={"guard": "drop"})
    assert numbers(result.arrays) == numbers(wanted.arrays)
    (event,) = sink.events("update.left_out")
    assert (event.where.node, event.where.round, event.data["guard"]) == (ILL, 2, "drop")
    assert {(found.issue, found.where.node) for found in sink.of(Finding)} == {("NAN_UPDATE", ILL)}
    assert [span.where.round for span in sink.of(Span, ROUND)] == [1, 2, 3]


@pytest.mark.parametrize("spoil", SPOILT)
def test_told_to_fail_it_names_node_and_layer(spoil):
    layer = {all_nan: "dense.weight", one_nan: "dense.weight", one_infinite: "head.weight"}[spoil]
    with watched() as (monitor, sink):
        with pytest.raises(NonFiniteUpdateError, match=rf"Round 2: .*{layer}.*node {ILL}\."):
            federate(FedAvg(), ill(spoil), monitor, rounds=3, attach={"guard": "fail"})
        monitor.flush()
        (event,) = sink.events("update.left_out")
        assert event.where.node == ILL
    assert [span.where.round for span in sink.of(Span, ROUND)] == [1, 2]


@pytest.mark.thorough
@pytest.mark.parametrize("spoil", SPOILT)
def test_reported_the_client_is_named_and_nothing_is_changed(spoil):
    wanted, _ = federate(FedAvg(), ill(spoil, mod=False), rounds=3)
    with watched(detectors="standard") as (monitor, sink):
        result, _ = federate(FedAvg(), ill(spoil), monitor, rounds=3)
    assert numbers(result.arrays) == numbers(wanted.arrays)
    assert not finite(result)
    first = [found for found in sink.of(Finding) if found.where.round == 2]
    assert ("NAN_UPDATE", ILL) in {(found.issue, found.where.node) for found in first}
    assert {found.where.node for found in first} <= {ILL, None}  # of the model as a whole, perhaps; of nobody else
    assert not sink.events("update.left_out")


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["FedAdam", "FedMedian", "Krum", "DifferentialPrivacyServerSideFixedClipping"])
def test_the_guard_works_with_any_strategy(name):
    kind = getattr(strategies, name, None)
    if kind is None:
        pytest.skip(f"this version of Flower has no {name}")
    private = name.startswith("Diff")
    strategy = (
        kind(FedAvg(), 0.01, 1.0, 4) if private else kind(**({"num_malicious_nodes": 1} if name == "Krum" else {}))
    )
    with watched() as (monitor, sink):
        result, _ = federate(strategy, ill(all_nan), monitor, nodes=6, rounds=3, attach={"guard": "drop"})
    assert finite(result)
    assert [event.where.round for event in sink.events("update.left_out")] == [2]


@pytest.mark.skipif(OLDEST, reason="Flower 1.21 itself raises where nobody answers")
def test_all_of_them_ill_the_model_stays_what_it_was():
    def train(message, context):
        reply = training(message, context)
        reply.content["arrays"] = ArrayRecord({n: Array(np.full(s, np.nan, np.float32)) for n, s in LAYERS.items()})
        return reply

    with watched() as (monitor, sink):
        result, _ = federate(FedAvg(), client_app(train=train), monitor, attach={"guard": "drop"})
    assert not result.arrays  # nothing was aggregated: Flower's own word for it
    assert len(sink.events("update.left_out")) == 8


def test_without_us_and_with_a_healthy_client_the_guard_is_silent():
    with watched(detectors="standard") as (monitor, sink):
        result, _ = federate(FedAvg(), with_mod(), monitor, rounds=3, attach={"guard": "drop"})
    assert numbers(result.arrays) == numbers(federate(FedAvg(), client_app(), rounds=3)[0].arrays)
    assert not sink.events("update.left_out")
    assert not sink.of(Finding)


def test_another_word_is_refused():
    with watched() as (monitor, _), pytest.raises(ConfigError, match="report"):
        fv.flower.attach(FedAvg(), monitor, guard="ignore")
