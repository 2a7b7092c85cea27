# SPDX-License-Identifier: Apache-2.0
"""Flower's own secure aggregation, SecAgg+ with all its stages, watched: it works as before, and hides what it hid."""

import itertools
import time

import numpy as np
import pytest
from flwr.app import Error, Message
from flwr.client.mod import secaggplus_mod

import fedvitals as fv
from fedvitals.catalog import level_of
from fedvitals.records import Finding, LayerStats, Metric, Run, Sketch, Span
from fedvitals.store import open_reader
from fedvitals.testing import MemorySink
from fedvitals.time_parts import JOURNEY, ROUND, SERVER
from support.conditions import holds_for_each
from support.flower import legacy
from support.flower.federation import node_of, sealed, watched
from support.flower.legacy import NODES
from support.flower.secure_aggregation import run

STAGES = ("setup", "share_keys", "collect_masked_vectors", "unmask")
ROUNDING = 1e-3  # of what is masked as whole numbers, at random


@pytest.mark.thorough
@pytest.mark.parametrize("on_grid", [False, True])
def test_the_sum_is_the_same_and_nothing_of_a_single_client_is_kept(on_grid, caplog):
    alone = run(secaggplus_mod)
    with watched(detectors="standard") as (monitor, sink):
        seen = run(fv.flower.client_mod(privacy=3), secaggplus_mod, monitor=monitor, on_grid=on_grid)
    assert holds_for_each(np.allclose(a, b, atol=ROUNDING) for a, b in zip(alone, seen, strict=True))
    assert "privacy level 3 is refused: with secaggplus_mod" in caplog.text
    assert [span.where.round for span in sink.of(Span, ROUND)] == [1, 2]
    single = [r for r in sink.records if not isinstance(r, Run) and r.where.node in NODES]
    assert not [r for r in single if isinstance(r, LayerStats | Sketch)]
    assert not {r.name for r in single if isinstance(r, Metric) and level_of(r) > 1}
    assert {r.where.node for r in single if isinstance(r, Span)} == NODES
    assert len([e for e in sink.events("cohort") if {*e.data["answered"]} == NODES]) == 4
    assert not sink.events("telemetry.refused")


@pytest.mark.parametrize("store", [None, "runs.db"])
def test_a_clients_time_is_that_of_all_stages(store, tmp_path, monkeypatch):
    monkeypatch.setattr(legacy.Moving, "fit", _slow_fit(legacy.Moving.fit))
    sink = MemorySink()
    path = None if store is None else tmp_path / store
    with fv.Monitor(path, sinks=[sink], machine=False, id="r") as monitor:
        run(fv.flower.client_mod(), secaggplus_mod, monitor=monitor)
    for node in NODES:
        times = [m.value for m in sink.of(Metric) if (m.name, *place(m)) == ("time.client", node, 2)]
        assert SECONDS < times[-1] < 1
        journeys = sorted((s for s in sink.of(Span, JOURNEY) if place(s) == (node, 2)), key=at)
        assert len(journeys) == len(STAGES)
        assert sum(journey.attributes["parts"]["compute"] for journey in journeys) > SECONDS
        assert all(a.at + a.seconds == pytest.approx(b.at, abs=1e-3) for a, b in itertools.pairwise(journeys))
        own = {span.parent for span in sink.of(Span, "client") if place(span) == (node, 2)}
        assert own == {journey.id for journey in journeys}
    (server,) = (span for span in sink.of(Span, SERVER) if span.where.round == 2)
    assert server.attributes["parts"]["wait"] > SECONDS
    if path is not None:
        with open_reader(path) as reader:
            times = reader.history("r").latest("time.client", 2)
        assert {node for node, seconds in times.items() if seconds > SECONDS} == NODES


SECONDS = 0.05  # of a client's training, which is in one of the stages


def place(record):
    return record.where.node, record.where.round


def at(span):
    return span.at


def _slow_fit(fit):
    def slow(self, parameters, config):
        time.sleep(SECONDS)
        return fit(self, parameters, config)

    return slow


@pytest.mark.parametrize("on_grid", [False, True])
@pytest.mark.parametrize("stage", STAGES[1:])
def test_an_aggregation_that_halts_is_a_finding(stage, on_grid):
    def fate(request, reply):
        settings = request.content.get("secaggplus_configs", {})
        lost = settings.get("stage") == stage and node_of(request) != "100"
        return sealed(Message(Error(2, "<class 'ValueError'>:<'away'>"), reply_to=request)) if lost else reply

    with watched(detectors="standard") as (monitor, sink):
        assert run(fv.flower.client_mod(), secaggplus_mod, monitor=monitor, fate=fate, on_grid=on_grid) is None
    known = not (on_grid and stage == "unmask")  # without its strategy, that it was given nothing is not seen
    findings = {finding.where.round: finding for finding in sink.of(Finding) if finding.issue == "NOTHING_AGGREGATED"}
    assert [*findings] == ([1, 2] if known else [])
    assert all(f"halted in the stage {stage}" in finding.message for finding in findings.values())
    (cohort,) = (e for e in sink.events("cohort", round=1) if e.data["phase"] == "train")
    assert (cohort.data["answered"], {*cohort.data["failed"]}) == (["100"], NODES - {"100"})
