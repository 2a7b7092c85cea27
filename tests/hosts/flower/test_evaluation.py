# SPDX-License-Identifier: Apache-2.0
"""The clients' evaluation is a phase like training: who was slow, failed or late in it is named."""

import time

import pytest
from flwr.app import MetricRecord
from flwr.serverapp.strategy import FedAvg

import fedvitals as fv
from fedvitals.diagnosis.detectors.system import REAL_SECONDS
from fedvitals.records import Finding, Metric, Span
from support.flower.federation import client_app, evaluation, federate, node_of, watched, with_mod

SLOW = "101"
NODES = {str(100 + i) for i in range(5)}


def slow_evaluation(message, context):
    if str(context.node_id) == SLOW:
        time.sleep(1.2 * REAL_SECONDS)
    return evaluation(message, context)


def test_who_evaluates_slowly_is_a_straggler():
    app = client_app(fv.flower.client_mod(), evaluate=slow_evaluation)
    with watched(detectors="standard") as (monitor, sink):
        federate(FedAvg(), app, monitor, nodes=5, rounds=3)
    (straggler,) = {(f.where.node, f.message.partition(" takes ")[0]) for f in sink.of(Finding, "STRAGGLER")}
    assert straggler[0] == SLOW
    assert all("same evaluation" in finding.message for finding in sink.of(Finding, "STRAGGLER"))
    seconds = {m.where.node: m.value for m in sink.of(Metric, "time.client_evaluate") if m.where.round == 3}
    assert seconds.keys() == NODES
    assert seconds[SLOW] > REAL_SECONDS > max(seconds[node] for node in NODES - {SLOW})
    spans = {span.where.node: span for span in sink.of(Span, "evaluate") if span.where.round == 3}
    assert spans[SLOW].seconds == pytest.approx(seconds[SLOW])
    (whole,) = (span for span in sink.of(Span, "round") if span.where.round == 3)
    assert all(whole.at <= span.at <= whole.at + whole.seconds for span in spans.values())


def test_who_fails_in_evaluation_is_named_with_the_phase():
    def failing(message, context):
        if str(context.node_id) == SLOW:
            raise LookupError("no data")
        return evaluation(message, context)

    app = client_app(fv.flower.client_mod(), evaluate=failing)
    with watched(detectors="standard") as (monitor, sink):
        federate(FedAvg(), app, monitor, nodes=5, rounds=2)
    messages = {finding.message for finding in sink.of(Finding, "CRASH") if finding.where.node == SLOW}
    assert "101 failed when asked to evaluate with LookupError." in messages
    (cohort,) = (e for e in sink.events("cohort", round=2) if e.data["phase"] == "evaluate")
    assert cohort.data["failed"] == [SLOW]


def test_who_is_late_in_every_evaluation_has_a_timeout():
    lost = lambda request, reply: (  # noqa: E731
        None if node_of(request) == SLOW and request.metadata.message_type == "evaluate" else reply
    )
    with watched(detectors="standard") as (monitor, sink):
        federate(FedAvg(), with_mod(), monitor, nodes=5, rounds=8, fate=lost)
    assert {finding.where.node for finding in sink.of(Finding, "TIMEOUT")} == {SLOW}


def test_forgetting_is_found_by_the_held_back_loss_that_the_server_measures():
    """Flower's server has no model, so its `evaluate_fn` measures it, and gives it this name."""
    losses = [3.0, 2.9, 2.8, 2.8, 3.3, 3.5]
    measured = lambda number, _: MetricRecord({"loss": 3.0 - number / 100, "held_back.loss": losses[number]})  # noqa: E731
    with watched(detectors="standard") as (monitor, sink):
        federate(FedAvg(), with_mod(), monitor, rounds=5, evaluate_fn=measured)
    assert [sink.value("held_back.loss", round=number) for number in range(1, 6)] == losses[1:]
    assert [finding.where.round for finding in sink.of(Finding, "FORGETTING")] == [4, 5]
