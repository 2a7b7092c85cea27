# SPDX-License-Identifier: Apache-2.0
"""What leaves a client, how many bytes it may be, and what federations that hide their clients keep hidden."""

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, MetricRecord
from flwr.client import mod as mods
from flwr.serverapp import strategy as strategies
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg

import fedvitals as fv
from fedvitals.catalog import level_of
from fedvitals.errors import ConfigError
from fedvitals.hosts.flower.reply_envelope import KEY
from fedvitals.hosts.telemetry_budget import REPLY_SHARE, SMALLEST_BUDGET, telemetry_budget
from fedvitals.measurements import single_records
from fedvitals.records import Event, Finding, LayerStats, Metric, Run, Sketch, Span
from fedvitals.transport.sender_limits import MESSAGE_BYTES
from fedvitals.transport.wire.payload import decode
from support.conditions import holds_for_each
from support.flower.federation import LAYERS, RUNS, client_app, federate, is_round, model, node_of, training, watched

SECRET = "patient 4711"
NODES = ("100", "101", "102", "103")


def letters(app, strategy=None, monitor=None, **more):
    """What the clients wrote home in a round of training: records, and bytes of telemetry and of the rest."""
    sent = []

    def fate(request, reply):
        if is_round(request, 1) and reply.has_content():
            ours = reply.content[KEY]
            rest = sum(record.count_bytes() for key, record in reply.content.items() if key != KEY)
            sent.append((single_records(decode(ours["payload"])), ours.count_bytes(), rest))
        return reply

    federate(strategy or FedAvg(), app, monitor, rounds=1, fate=fate, run_id=next(RUNS), **more)
    assert sent
    return sent


def kinds(records):
    return {type(record) for record in records}


# -- levels -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [0, 1, 2, None])
def test_below_level_3_no_layer_and_no_word_leaves_a_client(level):
    for records, *_ in letters(client_app(fv.flower.client_mod(privacy=level))):
        assert kinds(records) <= {Run, Span, Event, Metric}
        assert not [r for r in records if isinstance(r, Run) and r.tables]
        most = 2 if level is None else level
        assert holds_for_each(level_of(r) <= most for r in records if isinstance(r, Metric))
        assert [r for r in records if isinstance(r, Span)]


def test_at_level_3_a_client_tells_of_its_layers_what_the_server_would_have_computed():
    app = client_app(fv.flower.client_mod(privacy=3))
    for records, *_ in letters(app):
        (stats,) = (r for r in records if isinstance(r, LayerStats))
        (table,) = (t for r in records if isinstance(r, Run) for t in r.tables)
        assert (stats.family, table.names) == ("update", tuple(LAYERS))
    with watched(privacy=3) as (told_by_client, one), watched(privacy=3) as (by_server, two):
        federate(FedAvg(), app, told_by_client, rounds=1)
        federate(FedAvg(), client_app(), by_server, rounds=1)
    for node in NODES:
        mine, theirs = (sink.layers("update", node=node, round=1) for sink in (one, two))
        assert np.allclose(mine.matrix, theirs.matrix, rtol=1e-5, equal_nan=True)


def test_a_level_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="level from 0 to 4"):
        fv.flower.client_mod(privacy=7)


# -- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_for_a_large_model_telemetry_is_less_than_a_hundredth_at_level_3():
    shapes = {f"block.{i}.weight": (160, 160) for i in range(50)}  # 1.28 M parameters
    large = ArrayRecord({name: Array(np.zeros(shape, np.float32)) for name, shape in shapes.items()})
    app = client_app(fv.flower.client_mod(privacy=3))
    sent = letters(app, arrays=large)
    for records, ours, rest in sent:
        assert LayerStats in kinds(records)
        assert rest > 4 * 1.2e6
        assert ours <= 0.01 * rest
    assert len(sent) == 4


def chatty(message, context):
    """A client that logs far more than anybody reads."""
    net = torch.nn.Linear(2, 1)
    with fv.watch(net) as observer:
        for step in range(4000):
            observer.log({f"thing.{np.random.default_rng(step).bytes(8).hex()}": 1.0 / (step + 3)})
        observer.event("error", "important", "It matters.")
    return training(message, context)


@pytest.mark.thorough
def test_what_finds_no_room_is_left_out_and_said_and_what_matters_stays():
    with watched() as (monitor, sink):
        sent = letters(client_app(fv.flower.client_mod(), train=chatty), monitor=monitor)
    for records, ours, rest in sent:
        assert ours <= telemetry_budget(rest) + 100  # and the names of a few fields
        assert telemetry_budget(rest) == SMALLEST_BUDGET
        assert "important" in {r.name for r in records if isinstance(r, Event)}
    assert {e.where.node for e in sink.events("user.important")} == {*NODES}
    assert sum(e.data["records"] for e in sink.events("worker.lost")) > 1000


def test_the_room_is_stated():
    assert telemetry_budget(0) == telemetry_budget(1000) == SMALLEST_BUDGET
    assert telemetry_budget(10_000_000) == int(REPLY_SHARE * 10_000_000)
    assert telemetry_budget(10**12) == MESSAGE_BYTES


# -- federations that hide their clients ------------------------------------------------------------------------------


def local_dp():
    return mods.LocalDpMod(clipping_norm=1.0, sensitivity=1.0, epsilon=10.0, delta=1e-5)


@pytest.mark.parametrize("ours_first", [True, False])
@pytest.mark.parametrize("name", ["fixedclipping_mod", "secaggplus_mod", "LocalDpMod"])
def test_with_a_protecting_mod_in_the_chain_levels_above_1_are_refused_and_it_is_said(name, ours_first, caplog):
    found = []

    def passing(message, context, call_next):
        """Called as the protecting mod is; what it does to arrays is not the point here."""
        found.append(name)
        return call_next(message, context)

    passing.__name__ = name
    ours = fv.flower.client_mod(privacy=3)
    chain = [ours, passing] if ours_first else [passing, ours]
    for records, *_ in letters(client_app(*chain)):
        assert LayerStats not in kinds(records)
        assert holds_for_each(level_of(r) <= 1 for r in records if isinstance(r, Metric))
    assert found
    refusals = [r.getMessage() for r in caplog.records if "privacy level 3 is refused" in r.getMessage()]
    assert len(refusals) == 1
    assert name in refusals[0]


def test_flowers_own_mods_are_known_by_the_names_they_have():
    for name in ("secagg_mod", "secaggplus_mod", "fixedclipping_mod", "adaptiveclipping_mod"):
        assert getattr(mods, name).__name__ == name
    assert type(local_dp()).__name__ == "LocalDpMod"


@pytest.mark.parametrize("ours_first", [True, False])
def test_so_it_is_with_flowers_own_clipping(ours_first, caplog):
    from flwr.clientapp.mod import fixedclipping_mod

    ours = fv.flower.client_mod(privacy=3)
    chain = [ours, fixedclipping_mod] if ours_first else [fixedclipping_mod, ours]
    wrapper = strategies.DifferentialPrivacyClientSideFixedClipping(FedAvg(fraction_evaluate=0.0), 0.1, 1.0, 4)
    sent = letters(client_app(*chain), wrapper)
    assert len(sent) == 4
    assert not [records for records, *_ in sent if LayerStats in kinds(records)]
    assert "privacy level 3 is refused" in caplog.text


def test_a_chosen_level_that_is_low_enough_is_no_matter_for_words(caplog):
    def secaggplus_mod(message, context, call_next):
        return call_next(message, context)

    letters(client_app(fv.flower.client_mod(privacy=1), secaggplus_mod))
    assert "refused" not in caplog.text


def test_a_private_strategy_and_a_curious_monitor_do_not_go_together():
    with fv.Monitor(None, privacy=3) as monitor, pytest.raises(ConfigError, match="hides them"):
        fv.flower.attach(DifferentialPrivacyServerSideFixedClipping(FedAvg(), 0.1, 1.0, 4), monitor)


def test_of_a_private_federation_nothing_of_a_single_client_is_kept():
    """Even where a client says more than it should."""
    strategy = DifferentialPrivacyServerSideFixedClipping(FedAvg(), 0.1, 1.0, 4)
    with watched(detectors="standard") as (monitor, sink):
        federate(strategy, client_app(fv.flower.client_mod(privacy=3)), monitor, rounds=2)
    assert monitor.run.config["fedvitals"]["privacy"] == 1
    single = [r for r in sink.records if not isinstance(r, Run) and r.where.node in NODES]
    assert not [r for r in single if isinstance(r, LayerStats | Sketch | Finding)]
    assert not {r.name for r in single if isinstance(r, Metric) and level_of(r) > 1}
    assert {r.where.node for r in single if isinstance(r, Span)} == {*NODES}  # when, and how long
    assert not sink.of(LayerStats, "update")  # four are too few for a sum to hide them


def test_the_rest_of_a_private_federation_is_told():
    strategy = DifferentialPrivacyServerSideFixedClipping(FedAvg(), 0.1, 1.0, 4)
    with watched() as (monitor, sink):
        told = {"evaluate_fn": lambda number, _: MetricRecord({"accuracy": 0.1 * number})}
        federate(strategy, client_app(fv.flower.client_mod()), monitor, rounds=2, **told)
    assert sink.value("accuracy", round=2, node=None) == pytest.approx(0.2)
    assert sink.value("weight.norm", round=2, node="server") > 0
    assert sink.layers("weight", round=2, node="server").get("l2").all()


# -- tracebacks -------------------------------------------------------------------------------------------------------


def raising(message, context):
    if context.node_id == 101:
        raise LookupError(SECRET)
    return training(message, context)


@pytest.mark.parametrize(
    ("client", "server", "seen"),
    [
        ({"tracebacks": True}, {"privacy": 3, "tracebacks": True}, True),
        ({"tracebacks": True}, {"privacy": 3}, False),
        ({"tracebacks": True}, {}, False),
        ({}, {"privacy": 3, "tracebacks": True}, False),
        ({}, {}, False),
    ],
)
def test_a_traceback_is_kept_only_if_both_sides_want_it(client, server, seen):
    with watched(**server) as (monitor, sink):
        federate(FedAvg(), client_app(fv.flower.client_mod(**client), train=raising), monitor, rounds=1)
    (event,) = sink.events("client.failed")
    assert (event.where.node, event.data["exception"]) == ("101", "LookupError")
    trace = event.data.get("traceback", "")
    assert (SECRET in trace, "in raising" in trace) == (seen, seen)
    if not server:
        assert SECRET not in event.message


def test_where_clients_are_hidden_no_traceback_leaves_them():
    def secaggplus_mod(message, context, call_next):
        return call_next(message, context)

    app = client_app(fv.flower.client_mod(tracebacks=True), secaggplus_mod, train=raising)
    with watched(privacy=3, tracebacks=True) as (monitor, sink):
        federate(FedAvg(), app, monitor, rounds=1, run_id=next(RUNS))
    (event,) = sink.events("client.failed")
    assert "traceback" not in event.data


def test_with_tracebacks_flower_still_sees_its_own_words_first():
    reasons = []

    def fate(request, reply):
        reasons.extend([reply.error.reason] if node_of(request) == "101" and reply.has_error() else [])
        return reply

    for tracebacks in (True, False):
        app = client_app(fv.flower.client_mod(tracebacks=tracebacks), train=raising)
        federate(FedAvg(), app, rounds=1, fate=fate, arrays=model())
    long, short = reasons
    assert long.splitlines()[0] == short == f"<class 'LookupError'>:<'{SECRET}'>"
