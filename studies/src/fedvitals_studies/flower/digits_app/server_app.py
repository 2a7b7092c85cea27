# SPDX-License-Identifier: Apache-2.0
"""The server: FedAvg over the clients' weights, tested after each round; it can write a diary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from flwr.app import ArrayRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from . import task
from .diary import Diary

WARM_UP_SECONDS = 180.0

app = ServerApp()


class InOrder(FedAvg):
    """FedAvg that adds in the order of the partitions: sums of floats depend on it, and replies come in any order."""

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        return super().aggregate_train(server_round, sorted(replies, key=_partition))

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        return super().aggregate_evaluate(server_round, sorted(replies, key=_partition))


def _partition(reply: Message) -> int:
    partition: Any = -1 if reply.has_error() else reply.content.metric_records["metrics"]["partition"]
    return int(partition)


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    warm_up(grid, config)
    diary = Diary(config)
    strategy = averaging(config)
    result = strategy.start(grid, **rounds(config), evaluate_fn=diary.evaluate)
    diary.write(result.arrays)


def averaging(config: Mapping[str, Any]) -> FedAvg:
    share, awaited = float(config["fraction-train"]), int(config["min-nodes"])
    return InOrder(
        fraction_train=share,
        fraction_evaluate=float(config["fraction-evaluate"]),
        # If all are asked: Flower takes the share of the connected clients before it waits for the others.
        min_train_nodes=awaited if share == 1 else 2,
        min_available_nodes=awaited,
    )


def rounds(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `start` besides the grid."""
    model = task.new_model(str(config["model"]), int(config["seed"]))
    return {
        "initial_arrays": ArrayRecord(model.state_dict()),
        "num_rounds": int(config["num-server-rounds"]),
        "timeout": float(config["round-timeout"]),
    }


def warm_up(grid: Grid, config: Mapping[str, Any]) -> None:
    """Start the clients' processes: importing torch in round 1 would take longer than a short deadline."""
    if config["warm-up"]:
        asked = [Message(RecordDict({}), node, MessageType.QUERY) for node in grid.get_node_ids()]
        grid.send_and_receive(asked, timeout=WARM_UP_SECONDS)
