# SPDX-License-Identifier: Apache-2.0
"""A program of its own: a federation of NumPy models by Flower, in a process that cannot import torch if so told.

    python flower_without_torch.py STORE absent|present|unused|late

Prints a line of JSON: what the store has of the run afterwards. In the last two modes torch could be imported, and only
the client mod runs: with an app that does without torch, or with one that imports it inside of its `train`.
"""

import importlib.abc
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))


class Absent(importlib.abc.MetaPathFinder):
    """A finder that makes torch a package that is not installed."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)


ROUNDS, NODES, SCALED, BROKEN, COPY = 6, 8, "102", "104", "105"


def ill_training(message, context):
    """What a client sends: one of them a hundred times its update, one NaN, one the same as its neighbour."""
    import numpy as np
    from flwr.app import Array, ArrayRecord

    from support.flower.federation import training

    node = str(context.node_id)
    if node == COPY:
        context.__dict__["node_id"] = int(COPY) + 1
    reply = training(message, context)
    context.__dict__["node_id"] = int(node)
    sent, got = message.content["arrays"], reply.content["arrays"]
    changed = {}
    for name, array in got.items():
        before, after = sent[name].numpy(), array.numpy().copy()
        if node == SCALED:
            after = before + np.float32(100) * (after - before)
        if node == BROKEN and name == "dense.bias":
            after[1], after[2] = np.nan, np.inf
        changed[name] = Array(after)
    reply.content["arrays"] = ArrayRecord(changed)
    return reply


def federation(store, privacy):
    from flwr.serverapp.strategy import FedMedian

    import fedvitals as fv
    from support.flower.federation import client_app, federate

    app = client_app(fv.flower.client_mod(privacy=privacy), train=ill_training)
    with fv.Monitor(store, run="arrays", machine=False) as monitor:
        federate(FedMedian(), app, monitor, nodes=NODES, rounds=ROUNDS, attach={"guard": "drop"})
        monitor.flush()


def stored(store):
    """What can be compared between two runs of the same federation."""
    from fedvitals.store import open_reader
    from fedvitals.store.read import queries
    from fedvitals.store.read.ask import query

    names = "('update.norm', 'update.cosine_mean', 'update.cosine_previous', 'update.duplicates', 'weight.norm')"
    statements = {
        "metrics": f"SELECT name, round, node, value FROM metrics WHERE name IN {names} ORDER BY name, round, node",
        "layers": "SELECT family, round, node, layer, count, mean, std, min, max, zeros, nans, infs FROM "
        "layer_statistics WHERE family IN ('update', 'weight') ORDER BY family, round, node, layer",
        "events": "SELECT DISTINCT name FROM events ORDER BY name",
        "clients": "SELECT DISTINCT node FROM spans WHERE name = 'client' ORDER BY node",
        "findings": "SELECT DISTINCT issue, node FROM findings ORDER BY issue, node",
    }
    with open_reader(store) as reader:
        run = queries.get_run(reader, queries.find_run(reader, "arrays"))
        found = {name: [[*row] for row in query(reader, sql).rows] for name, sql in statements.items()}
    return {"versions": sorted(run.versions), **found}


def late_training(message, context):
    """An app that imports torch when it trains, as many do to start faster."""
    import torch

    import fedvitals as fv
    from support.flower.federation import training

    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with fv.watch(model, optimizer):
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.ones(5, 3)).sum().backward()
            optimizer.step()
    return training(message, context)


def client_alone(*, late):
    """The names of the metrics in the telemetry of one client."""
    import fedvitals as fv
    from fedvitals.measurements import single_records
    from fedvitals.records import Metric
    from fedvitals.transport.wire.payload import decode
    from fedvitals_studies.flower.process_identity import flower_run
    from support.flower.federation import HandGrid, client_app, model, requests_for, training

    app = client_app(fv.flower.client_mod(privacy=3), train=late_training if late else training)
    assert "torch" not in sys.modules
    grid = HandGrid(app, nodes=1)
    with flower_run(grid.run_id):
        (reply,) = grid.send_and_receive(requests_for(grid, model()))
    payload = reply.content["fedvitals"]["payload"]
    return sorted({record.name for record in single_records(decode(payload)) if isinstance(record, Metric)})


def main():
    store, mode = sys.argv[1:]
    if mode == "absent":
        sys.meta_path.insert(0, Absent())
    if mode in ("unused", "late"):
        metrics = client_alone(late=mode == "late")
        sys.stdout.write(json.dumps({"metrics": metrics, "torch": "torch" in sys.modules}) + "\n")
        return
    federation(store, 3)
    sys.stdout.write(json.dumps({"torch": "torch" in sys.modules, **stored(store)}) + "\n")


if __name__ == "__main__":
    main()
