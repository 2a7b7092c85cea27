# SPDX-License-Identifier: Apache-2.0
"""Apps of Flower's older API, NumPyClient and flwr.server.strategy: seen as others are, and the same bitwise."""

import numpy as np
import pytest
from flwr.app import Context, Error, Message, RecordDict
from flwr.common import Parameters, parameters_to_ndarrays
from flwr.server import ServerApp, ServerAppComponents, ServerConfig

import fedvitals as fv
from fedvitals.records import Finding, LayerStats, Run, Span
from fedvitals.time_parts import JOURNEY, ROUND
from support.flower.federation import LAYERS, RUNS, HandGrid, flower_run, keys_and_bytes, node_of, sealed, watched
from support.flower.legacy import NODES, Ordered, client_app

NAMES = [*LAYERS]


def run(app, monitor=None, *, rounds=3, fate=None, strategy=None, **attach):
    """A whole ServerApp; its strategy and its grid."""
    strategy = strategy or Ordered()
    if monitor is not None:
        assert fv.flower.attach(strategy, monitor, **attach) is strategy
    grid = HandGrid(app, fate=fate, run_id=next(RUNS))
    config = ServerConfig(num_rounds=rounds)
    server = ServerApp(server_fn=lambda _: ServerAppComponents(strategy=strategy, config=config))
    with flower_run(grid.run_id):
        server(grid, Context(run_id=grid.run_id, node_id=1, node_config={}, state=RecordDict(), run_config={}))
    return strategy, grid


def test_a_watched_run_is_the_same_to_the_last_bit():
    alone, plain_grid = run(client_app())
    with watched() as (monitor, sink):
        seen, grid = run(client_app(fv.flower.client_mod()), monitor)
    assert seen.models == alone.models
    assert seen.replies == alone.replies
    sent = [sorted((node_of(m), keys_and_bytes(m.content)) for m in one.requests) for one in (plain_grid, grid)]
    assert sent[0] == sent[1]
    assert [span.where.round for span in sink.of(Span, ROUND)] == [1, 2, 3]
    assert not sink.events("telemetry.refused")


def test_clients_rounds_and_metrics_are_seen():
    with watched() as (monitor, sink):
        run(client_app(fv.flower.client_mod()), monitor, rounds=2)
    assert {(s.where.node, s.where.round) for s in sink.of(Span, "client")} == {(n, r) for n in NODES for r in (1, 2)}
    journeys = {span.id for span in sink.of(Span, JOURNEY)}
    assert {span.parent for span in sink.of(Span, "client")} == journeys
    assert sink.value("accuracy", round=2, node=None) == pytest.approx(0.2)  # of the server itself
    assert sink.value("local.loss", round=2, node=None) > 0  # of its clients
    assert sink.value("update.samples", round=2, node="101") == 21
    assert sink.value("loss", round=2, node="101") > 0
    (cohort,) = (e for e in sink.events("cohort", round=2) if e.data["phase"] == "train")
    assert {*cohort.data["answered"]} == NODES


def test_a_round_that_nobody_survives_is_said():
    def fate(request, reply):
        config = request.content.config_records.get("fitins.config", {})
        return sealed(Message(Error(2, "not there"), reply_to=request)) if config.get("round") == 2 else reply

    with watched() as (monitor, sink):
        run(client_app(fv.flower.client_mod()), monitor, fate=fate)
    assert [e.where.round for e in sink.events("aggregation.failed")] == [2]


@pytest.mark.parametrize("layers", [None, NAMES])
def test_layers_have_the_names_that_the_user_gives(layers):
    mod = fv.flower.client_mod(privacy=3, layers=layers)
    with watched(privacy=3) as (monitor, sink):
        run(client_app(mod), monitor, rounds=1, layers=layers)
    stats = sink.of(LayerStats, "update", node="101")
    assert [sink.table(s.table).names for s in stats] == [tuple(layers or ("0", "1", "2"))]
    tables = {table.names for found in sink.of(Run) for table in found.tables if table.rows == "parameter"}
    assert tables == {tuple(layers or ("0", "1", "2"))}


def test_a_list_of_names_that_does_not_fit_is_told_and_costs_nothing():
    alone, _ = run(client_app(), rounds=2)
    with watched(ours_may_fail=True) as (monitor, sink):
        seen, _ = run(client_app(), monitor, rounds=2, layers=["one"])
    assert seen.models == alone.models
    assert any("1 names" in e.message and "3 arrays" in e.message for e in sink.events("monitor.error"))


def test_who_fails_and_who_does_not_answer_is_named():
    def fate(request, reply):
        lost = node_of(request) == "103" and request.content["fitins.config"]["round"] == 3 if _fits(request) else False
        return None if lost else reply

    alone, _ = run(client_app(ill="raises"), fate=fate)
    with watched() as (monitor, sink):
        seen, _ = run(client_app(fv.flower.client_mod(), ill="raises"), monitor, fate=fate)
    assert seen.models == alone.models
    (failed,) = sink.events("client.failed")
    assert (failed.where.node, failed.where.round, failed.data["exception"]) == ("102", 2, "LookupError")
    (late,) = sink.events("update.late")
    assert (late.where.node, late.where.round) == ("103", 3)


def _fits(request):
    return "fitins.config" in request.content


def test_nan_is_seen_and_can_be_dropped():
    with watched(detectors="standard") as (monitor, sink):
        spoilt, _ = run(client_app(fv.flower.client_mod(), ill="nan"), monitor)
    assert not _finite(spoilt)
    assert ("NAN_UPDATE", "102") in {(f.issue, f.where.node) for f in sink.of(Finding, round=2)}
    with watched() as (monitor, sink):
        cured, _ = run(client_app(fv.flower.client_mod(), ill="nan"), monitor, guard="drop")
    assert _finite(cured)
    assert [node for node, *_ in cured.replies[1]] == [100, 101, 103]
    assert [(e.where.node, e.where.round) for e in sink.events("update.left_out")] == [("102", 2)]


def _finite(strategy):
    last = Parameters(strategy.models[-1], "numpy.ndarray")
    return all(np.isfinite(array).all() for array in parameters_to_ndarrays(last))
