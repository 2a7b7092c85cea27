# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: INP001 - a script
"""Flower's simulation on Ray, two actors of one CPU each; the message API, FedAvg, nobody evaluates.

The script imports itself, so that Ray finds the client's code by its name and does not send this file's globals, the
data among them, along with every task: each actor opens the work once.
"""

import functools
import os
import sys
import tempfile
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch.utils.data import DataLoader, TensorDataset
from work import Clock, Work, answer, arguments, commands, train

ACTORS = 2
FOLDER = "FEDVITALS_BENCH_WORK"  # in the environment, which Ray's processes inherit

client_app, server_app = ClientApp(), ServerApp()


@functools.cache
def opened() -> Work:
    """This process's own."""
    return Work(Path(os.environ[FOLDER]))


@client_app.train()
def local_training(message: Message, context: Context) -> Message:
    work = opened()
    client = int(context.node_config["partition-id"])
    number = int(message.content["config"]["server-round"]) - 1
    model = work.model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    data = TensorDataset(*work.client(client))
    loader = DataLoader(data, batch_sampler=work.order(number, client).tolist())
    loss = train(model, loader, work.optimizer(model.parameters()))
    told = MetricRecord({"loss": loss, "num-examples": len(data), "threads": torch.get_num_threads()})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": told})
    return Message(content=content, reply_to=message)


@server_app.main()
def serve(grid: Grid, _: Context) -> None:
    work = opened()
    model = work.model()
    strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=work.clients)
    arrays, number = ArrayRecord(model.state_dict()), 0
    answer(ready=True)
    for command in commands():
        if command == "test":
            model.load_state_dict(arrays.to_torch_state_dict())
            answer(accuracy=work.accuracy(model))
            continue
        clock, number = Clock(), number + 1
        # As `strategy.start` does it.
        messages = strategy.configure_train(number, arrays, ConfigRecord(), grid)
        replies = [*grid.send_and_receive(messages=messages, timeout=600)]
        failed = [reply.error.reason for reply in replies if reply.has_error()]
        if failed or len(replies) < work.clients:
            answer(failed=f"{len(replies) - len(failed)} of {work.clients} clients answered; {failed[:1]}")
            return
        losses = [float(reply.content["metrics"]["loss"]) for reply in replies]
        arrays, _told = strategy.aggregate_train(number, replies)
        clock.tell(work.steps, losses)


def main() -> None:
    given = arguments()
    os.environ |= {
        FOLDER: str(given.folder),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    sys.path.insert(0, str(Path(__file__).parent))
    import flower_peer  # noqa: PLC0415 - under its name, not as __main__

    torch.set_num_threads(given.threads)
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as scratch:
        run_simulation(
            flower_peer.server_app,
            flower_peer.client_app,
            num_supernodes=Work(given.folder).clients,
            backend_config={
                "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
                "init_args": {"num_cpus": ACTORS, "log_to_driver": False, "_temp_dir": scratch},
            },
        )


if __name__ == "__main__":
    main()
