# SPDX-License-Identifier: Apache-2.0
"""A federation in Flower's simulation, whose clients wait instead of training."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

import fedvitals as fv
from fedvitals_studies.hangs.plant import CLIENTS, HUNG_ROUND, Plant

FOLDER = "HANGS_FOLDER"  # the variable with the folder of the settings

client_app = ClientApp(mods=[fv.flower.client_mod(privacy=3, tracebacks=True)])
server_app = ServerApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Wait as a training would, and return the model unchanged."""
    _work("train", message, context)
    metrics = MetricRecord({"num-examples": 10, "loss": 1.0})
    content = RecordDict({"arrays": message.content.array_records["arrays"], "metrics": metrics})
    return Message(content=content, reply_to=message)


@client_app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Wait as an evaluation would."""
    _work("evaluate", message, context)
    return Message(content=RecordDict({"metrics": MetricRecord({"num-examples": 10, "loss": 1.0})}), reply_to=message)


def _work(phase: str, message: Message, context: Context) -> None:
    plant = Plant.read(os.environ[FOLDER])
    round_index = int(str(message.content.config_records["config"]["server-round"]))
    plant.work(phase, round_index, int(context.node_config["partition-id"]))


class Averaging(FedAvg):
    """FedAvg whose aggregation takes a while."""

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        Plant.read(os.environ[FOLDER]).work("aggregate", server_round)
        return super().aggregate_train(server_round, replies)


@server_app.main()
def main(grid: Grid, context: Context) -> None:  # noqa: ARG001 - Flower's signature
    """Train under a monitor."""
    monitor = fv.Monitor(Path(os.environ[FOLDER], "runs.db"), privacy=3, tracebacks=True)
    strategy = fv.flower.attach(
        Averaging(min_train_nodes=CLIENTS, min_evaluate_nodes=CLIENTS, min_available_nodes=CLIENTS), monitor
    )
    model = ArrayRecord({"weight": _array()})
    strategy.start(grid, model, num_rounds=HUNG_ROUND + 1)
    monitor.close()


def _array() -> Any:
    from flwr.app import Array  # noqa: PLC0415 - beside its only use

    return Array(np.zeros(4, np.float32))


def simulate(folder: str) -> None:
    """Run the federation. Its parts are imported by name: those of `__main__` would be copied to the actors."""
    from fedvitals_studies.hangs import flower_app  # noqa: PLC0415, PLW0406 - see above

    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    os.environ |= {FOLDER: folder, "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", **quiet}
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as scratch:
        resources: Any = {
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": CLIENTS, "log_to_driver": False, "_temp_dir": scratch},
        }
        run_simulation(flower_app.server_app, flower_app.client_app, CLIENTS, backend_config=resources)


if __name__ == "__main__":
    simulate(sys.argv[1])
