# SPDX-License-Identifier: Apache-2.0
"""The server: averages what the clients have learned, and tests it."""

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

import fedvitals as fv
from quickstart import task

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context):
    # fedvitals, the second line: everything that happens is kept in runs.db.
    strategy = fv.flower.attach(FedAvg(), fv.Monitor("runs.db", run="digits"))

    torch.manual_seed(0)
    initial, rounds = ArrayRecord(task.new_model().state_dict()), context.run_config["num-server-rounds"]
    strategy.start(grid, initial, rounds, evaluate_fn=central_evaluate)


def central_evaluate(_round: int, arrays: ArrayRecord):
    model = task.new_model()
    model.load_state_dict(arrays.to_torch_state_dict())
    loss, accuracy = task.evaluate(model, *task.load_test())
    return MetricRecord({"loss": loss, "accuracy": accuracy})
