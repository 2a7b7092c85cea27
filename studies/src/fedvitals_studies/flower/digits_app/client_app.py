# SPDX-License-Identifier: Apache-2.0
"""The client: trains on its partition, evaluates there, and fails when the run's configuration says so."""

from __future__ import annotations

from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from . import faults, task

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    config, partition, number = context.run_config, *_who_and_when(message, context)
    fault = faults.fault_of(config, partition, number)
    faults.before(fault, config)
    model, x, y = _prepared(message, context, fault)
    loader = task.batches(x, y, int(config["batch-size"]), _seed(context) + number)
    steps = int(config["local-steps"]) or int(config["local-epochs"]) * len(loader)
    loss = task.train(model, loader, steps, float(config["learning-rate"]), lambda: faults.halfway(fault))
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(y), "partition": partition})
    arrays = ArrayRecord(faults.weights(fault, model.state_dict()))
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    partition, number = _who_and_when(message, context)
    model, x, y = _prepared(message, context, faults.fault_of(context.run_config, partition, number))
    loss, accuracy = task.evaluate(model, x, y)
    told: Any = {"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(y), "partition": partition}
    return Message(RecordDict({"metrics": MetricRecord(told)}), reply_to=message)


@app.query()
def warm_up(message: Message, context: Context) -> Message:
    """Load everything that training needs."""
    model, (x, y) = task.new_model("cnn", 0), _samples(context)
    task.train(model, task.batches(x, y, 16, 0), 2, 0.1)
    return Message(RecordDict({}), reply_to=message)


def _who_and_when(message: Message, context: Context) -> tuple[int, int]:
    """Return the client's partition and the round."""
    number: Any = message.content.config_records["config"]["server-round"]
    return int(context.node_config["partition-id"]), int(number)


def _prepared(message: Message, context: Context, fault: str) -> tuple[nn.Module, Tensor, Tensor]:
    """Return the model as the server sent it, and the client's samples."""
    torch.set_num_threads(1)  # a client has one core; and multithreaded sums could differ from run to run
    model = task.new_model(str(context.run_config["model"]), 0)
    model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    x, y = _samples(context)
    return model, x, faults.labels(fault, y, _seed(context))


def _seed(context: Context) -> int:
    """Return the seed of the run and the partition; a round is added to it."""
    return 1_000_000 * int(context.run_config["seed"]) + 1000 * int(context.node_config["partition-id"])


def _samples(context: Context) -> tuple[Tensor, Tensor]:
    own = context.node_config
    return task.samples_of(int(own["partition-id"]), int(own["num-partitions"]), int(context.run_config["seed"]))
