# SPDX-License-Identifier: Apache-2.0
"""The client: trains the model that it is sent on digits that stay here."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

import fedvitals as fv
from quickstart import task

# fedvitals, the first line: this client measures, and its numbers ride home with its replies.
app = ClientApp(mods=[fv.flower.client_mod()])


@app.train()
def train(message: Message, context: Context):
    config = context.run_config
    model, x, y = received_model(message), *own_samples(context)
    loss = task.train(model, x, y, config["local-epochs"], config["batch-size"], config["learning-rate"])
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(y)})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context):
    model, x, y = received_model(message), *own_samples(context)
    loss, accuracy = task.evaluate(model, x, y)
    metrics = MetricRecord({"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(y)})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


def received_model(message: Message):
    model = task.new_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    return model


def own_samples(context: Context):
    partition, partitions = context.node_config["partition-id"], context.node_config["num-partitions"]
    x, y = task.load_partition(partition, partitions)
    if partition == context.run_config["ill-partition"]:
        y = y[torch.randperm(len(y), generator=torch.Generator().manual_seed(1))]  # somebody has mixed up its labels
    return x, y
