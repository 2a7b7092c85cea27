# SPDX-License-Identifier: Apache-2.0
"""Flower apps as people write them, none of which knows fedvitals (but one), run in this process on a grid of its own.

`python plain_apps.py [name of an app]...` prints what came out of each, as JSON: the same, watched or not.
"""

import json
import random
import sys
import types
import warnings
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.server import ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg as LegacyFedAvg
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

sys.path.insert(0, str(Path(__file__).parents[2]))  # this file is also run as a program

from fedvitals_studies.flower.process_identity import flower_run
from support.flower.grid import InProcessGrid

NODES = (11, 12, 13)


def counting_mod(message, context, call_next):
    counting_mod.calls += 1
    return call_next(message, context)


counting_mod.calls = 0
client = ClientApp(mods=[counting_mod])


@client.train()
def train(message: Message, context: Context) -> Message:
    data = np.random.default_rng(context.node_id).normal(size=(32, 4))
    weights = message.content["arrays"]["w"].numpy()
    error = data @ weights - data.sum(axis=1)
    weights = weights - 0.1 * data.T @ error / len(data)
    metrics = MetricRecord({"num-examples": 32, "loss": float((error**2).mean())})
    return Message(RecordDict({"arrays": ArrayRecord({"w": Array(weights)}), "metrics": metrics}), reply_to=message)


@client.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    return Message(RecordDict({"metrics": MetricRecord({"num-examples": 32, "seen": 1.0})}), reply_to=message)


@client.query()
def query(message: Message, context: Context) -> Message:
    return Message(RecordDict({"metrics": MetricRecord({"there": 1})}), reply_to=message)


class Legacy(NumPyClient):
    newest: list[float]

    def get_parameters(self, config):
        return [np.zeros(3)]

    def fit(self, parameters, config):
        return [parameters[0] + 1.0], 8, {"loss": 0.5}

    def evaluate(self, parameters, config):
        Legacy.newest = parameters[0].tolist()
        return float(parameters[0].sum()), 8, {}


def initial() -> ArrayRecord:
    return ArrayRecord({"w": Array(np.zeros(4))})


def ask(grid, kind: str, arrays: ArrayRecord, number: int) -> list[Message]:
    content = RecordDict({"arrays": arrays, "config": ConfigRecord({"server-round": number})})
    return [*grid.send_and_receive([Message(content, node, kind) for node in grid.get_node_ids()], timeout=9)]


def by_hand(grid, rounds: int, arrays: ArrayRecord) -> ArrayRecord:
    for number in range(1, rounds + 1):
        replies = ask(grid, "train", arrays, number)
        arrays = ArrayRecord({"w": Array(np.mean([r.content["arrays"]["w"].numpy() for r in replies], axis=0))})
    return arrays


class OwnStart(FedAvg):
    """Has a loop of its own, as those have who save models between rounds."""

    def start(self, grid, initial_arrays, num_rounds=3, **_):
        arrays = initial_arrays
        for number in range(1, num_rounds + 1):
            replies = grid.send_and_receive(self.configure_train(number, arrays, ConfigRecord(), grid), timeout=9)
            arrays, _ = self.aggregate_train(number, replies)
        return types.SimpleNamespace(arrays=arrays)


def strategy(grid, context):
    return FedAvg(min_available_nodes=3).start(grid, initial(), num_rounds=2).arrays


def own_start(grid, context):
    return OwnStart(min_available_nodes=3).start(grid, initial(), num_rounds=2).arrays


def loop(grid, context):
    return by_hand(grid, 3, initial())


def asks_first(grid, context):
    assert len(ask(grid, "query", initial(), 0)) == 3
    return FedAvg(min_available_nodes=3).start(grid, initial(), num_rounds=1).arrays


def twice(grid, context):
    first = FedAvg(min_available_nodes=3).start(grid, by_hand(grid, 1, initial()), num_rounds=1).arrays
    return FedAvg(min_available_nodes=3).start(grid, first, num_rounds=2).arrays


def attached(grid, context):
    import fedvitals as fv

    with fv.Monitor("runs.db", run="own", machine=False) as monitor:
        fedavg = fv.flower.attach(FedAvg(min_available_nodes=3), monitor)
        return fedavg.start(grid, initial(), num_rounds=1).arrays


def raises(grid, context):
    by_hand(grid, 1, initial())
    raise ZeroDivisionError("on purpose")


def legacy(context):
    return ServerAppComponents(strategy=LegacyFedAvg(min_available_clients=3), config=ServerConfig(num_rounds=2))


MAINS = (strategy, own_start, loop, asks_first, twice, attached, raises)


class Grid(InProcessGrid):
    run = types.SimpleNamespace(run_id=7)


def result_of(main, number: int) -> object:
    """What a ServerApp with this main gives."""
    random.seed(number)  # by which strategies choose clients, and their order
    came: dict[str, ArrayRecord] = {}
    app = ServerApp()
    app.main()(lambda grid, context: came.update(arrays=main(grid, context)))
    context = Context(number, 0, {}, RecordDict(), {"rounds": 2})
    try:
        app(Grid(client, NODES), context)
    except ZeroDivisionError as error:
        return str(error)
    return came["arrays"]["w"].numpy().tolist()


def result_of_legacy(number: int) -> object:
    app, numpy_client = ServerApp(server_fn=legacy), ClientApp(client_fn=lambda context: Legacy().to_client())
    app(Grid(numpy_client, NODES), Context(number, 0, {}, RecordDict(), {}))
    return Legacy.newest


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    wanted = sys.argv[1:]
    found = {}
    with flower_run():
        for number, main in enumerate(MAINS, 1):
            if not wanted or main.__name__ in wanted:
                found[main.__name__] = result_of(main, number)
        if not wanted or "legacy" in wanted:
            found["legacy"] = result_of_legacy(len(MAINS) + 1)
    mods = [getattr(mod, "__name__", "?") for mod in client._mods]
    sys.stdout.write(json.dumps({"results": found, "mods": mods, "counted": counting_mod.calls}) + "\n")
