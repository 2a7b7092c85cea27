# SPDX-License-Identifier: Apache-2.0
"""Apps of Flower's older API, NumPyClient and flwr.server.strategy: seen as others are, and the same bitwise."""

import numpy as np
import pytest
from flwr.app import Context, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import Parameters, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg

import fedvitals as fv
from fedvitals.parts import JOURNEY, ROUND
from fedvitals.records import Finding, LayerStats, Run, Span
from flower_by_hand import LAYERS, RUNS, HandGrid, flower_run, node_of, target, told, watched

NAMES = [*LAYERS]
NODES = {"100", "101", "102", "103"}


class Moving(NumPyClient):
    """Goes a part of the way to a target of its own."""

    def __init__(self, node, ill=None):
        self.node, self.ill = node, ill

    def fit(self, parameters, config):
        if self.ill == "raises" and config["round"] == 2:
            raise LookupError("not to be told")
        learnt = [a + np.float32(0.3) * (target(self.node, str(i), a.shape) - a) for i, a in enumerate(parameters)]
        if self.ill == "nan" and config["round"] == 2:
            learnt[1][0] = np.nan
        return learnt, 20 + self.node % 5, {"train_loss": float(np.abs(learnt[0]).mean())}

    def evaluate(self, parameters, config):
        return float(np.abs(parameters[0]).mean()), 20, {"accuracy": 0.5}


def client_app(*mods, ill=None):
    def client_fn(context):
        return Moving(context.node_id, ill if context.node_id == 102 else None).to_client()

    return ClientApp(client_fn=client_fn, mods=[*mods])


class Ordered(FedAvg):
    """Replies come in the order in which threads end: sorted, sums are the same each time."""

    def __init__(self, **more):
        first = [np.random.default_rng(i).normal(size=s).astype(np.float32) for i, s in enumerate(LAYERS.values())]
        super().__init__(
            initial_parameters=ndarrays_to_parameters(first),
            on_fit_config_fn=lambda number: {"round": number},
            evaluate_fn=lambda number, arrays, _: (float(np.abs(arrays[0]).sum()), {"accuracy": 0.1 * number}),
            **more,
        )
        self.models, self.replies = [], []

    def aggregate_fit(self, server_round, results, failures):
        results = sorted(results, key=lambda pair: pair[0].node_id)
        self.replies.append([(p.node_id, r.num_examples, r.metrics, r.parameters.tensors) for p, r in results])
        found = super().aggregate_fit(server_round, results, failures)
        self.models.append(None if found[0] is None else found[0].tensors)
        return found


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
    sent = [sorted((node_of(m), told(m.content)) for m in one.requests) for one in (plain_grid, grid)]
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
