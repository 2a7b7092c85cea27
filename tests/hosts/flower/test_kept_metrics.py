# SPDX-License-Identifier: Apache-2.0
"""What an app measures itself is kept: averages of training, lists, the first evaluation, names of other libraries."""

from importlib.metadata import version

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg

import fedvitals as fv
from fedvitals.hosts.metric_names import LISTED, numbers_of, with_known_names
from fedvitals.records import Metric, Run
from support.flower import federation
from support.flower.federation import client_app, evaluation, federate, model, training, watched, with_mod


def test_averages_of_train_metrics_are_kept():
    with watched() as (monitor, sink):
        reached, _ = federate(FedAvg(), with_mod(), monitor)
    average = reached.train_metrics_clientapp[2]["train_loss"]
    assert sink.value("user.train_loss", round=2, node=None) == pytest.approx(average)


def test_lists_are_kept_number_by_number():
    def evaluate(message, context):
        reply = evaluation(message, context)
        metrics = {**reply.content["metrics"], "recalls": [0.25, 0.75], "curve": [0.5] * (LISTED + 1)}
        return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)

    with watched() as (monitor, sink):
        federate(FedAvg(), client_app(fv.flower.client_mod(), evaluate=evaluate), monitor)
    assert sink.value("user.evaluate.recalls.1", round=2, node="101") == 0.75
    assert sink.value("user.recalls.1", round=2, node=None) == pytest.approx(0.75)
    assert sink.value("user.curve.length", round=2, node=None) == LISTED + 1
    assert sink.value("user.curve.mean", round=2, node=None) == pytest.approx(0.5)


def test_only_numbers_are_metrics():
    assert numbers_of({"a": 1, "b": "x", "c": [], "d": ["x"], "e": b"1", "f": [1, 2.5]}) == {
        "a": 1,
        "f.0": 1,
        "f.1": 2.5,
    }


def test_the_evaluation_of_the_first_model_is_kept():
    scores = lambda number, _: MetricRecord({"accuracy": 0.1 + 0.1 * number, "f1": 0.2 * number})  # noqa: E731
    with watched(detectors="standard") as (monitor, sink):
        federate(FedAvg(), with_mod(), monitor, evaluate_fn=scores)
    assert sink.value("initial.accuracy", round=1, node=None) == pytest.approx(0.1)
    assert sink.value("user.initial.f1", round=1, node=None) == 0.0
    accuracies = {m.where.round: m.value for m in sink.of(Metric, "accuracy") if m.where.node is None}
    assert accuracies == {1: pytest.approx(0.2), 2: pytest.approx(0.3)}


@pytest.mark.parametrize("name", ["logloss", "eval_logloss", "validation-mlogloss", "test_log_loss"])
def test_log_losses_are_losses(name):
    assert with_known_names({name: 0.5, "auc": 0.9}) == {"loss": 0.5, "auc": 0.9}
    assert with_known_names({name: 0.5, "loss": 0.1}) == {name: 0.5, "loss": 0.1}


def test_flowers_version_and_the_apps_name_are_kept(monkeypatch):
    monkeypatch.setattr(federation.HandGrid, "fab_id", "@flwrlabs/quickstart", raising=False)
    monkeypatch.setattr(federation.HandGrid, "fab_version", "1.2.0", raising=False)
    with watched() as (monitor, sink):
        federate(FedAvg(), with_mod(), monitor, rounds=1)
    config = sink.of(Run)[-1].config["flower"]
    assert (config["flwr"], config["strategy"]) == (version("flwr"), "FedAvg")
    assert (config["app"], config["app_version"]) == ("@flwrlabs/quickstart", "1.2.0")


def test_the_weights_of_a_model_of_bytes_are_unknown_and_not_0():
    class Trees(FedAvg):
        def aggregate_train(self, server_round, replies):
            return next(iter(replies)).content["arrays"], None

    def train(message, context):
        trees = ArrayRecord({"0": Array(np.frombuffer(b'{"trees": %d}' % context.node_id, np.uint8))})
        return Message(RecordDict({**training(message, context).content, "arrays": trees}), reply_to=message)

    app = client_app(fv.flower.client_mod(), train=train, evaluate=lambda message, context: _scored(message))
    with watched(detectors="standard") as (monitor, sink):
        federate(Trees(), app, monitor, rounds=3, arrays=ArrayRecord({"0": Array(np.frombuffer(b"{}", np.uint8))}))
    assert not [m for m in sink.of(Metric) if m.name.startswith("weight.")]
    assert [m.where.round for m in sink.metrics("time.round")] == [1, 2, 3]
    with watched() as (monitor, sink):
        federate(FedAvg(), with_mod(), monitor, rounds=1, arrays=model())
    assert sink.value("weight.norm", round=1, node="server") > 0


def _scored(message):
    return Message(RecordDict({"metrics": MetricRecord({"eval_auc": 0.5, "num-examples": 3})}), reply_to=message)
