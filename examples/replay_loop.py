# SPDX-License-Identifier: Apache-2.0
"""A plain federated loop that can be replayed: recorded on a tape, and run again by the same two functions.

Run it with  python examples/replay_loop.py [STORE]  and then, in the folder of this file,

    fedvitals replay loop --verify --loop replay_loop
    fedvitals replay loop --verify --round 4 --node c2 --loop replay_loop
    fedvitals replay loop --round 4 --node c2 --pdb --loop replay_loop
"""

import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fedvitals as fv

digits = load_digits()
x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
data = {f"c{i}": TensorDataset(x[i::4], y[i::4]) for i in range(4)}  # four clients, every fourth digit each


def net():
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10))


def restore(_round, tensors, _notes):
    """The global model as it was before a round: a copy of it for each client that trains."""
    model = net()
    model.load_state_dict(tensors)
    return model


def train(node, model, _round):
    """One client's local training; what it sends. Shuffling and dropout draw from torch's generator."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for inputs, labels in DataLoader(data[node], batch_size=32, shuffle=True):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    return model.state_dict()


def aggregate(state, updates, weights):
    """The next global state: the mean of what came, by samples."""
    total = sum(weights.values())
    return {name: sum(updates[node][name] * (weights[node] / total) for node in updates) for name in state}


def main(store="runs.db"):
    torch.manual_seed(0)
    torch.set_num_threads(1)  # tensors this small are done before a second thread wakes; noted on the tape
    model = net()
    weights = {node: float(len(own)) for node, own in data.items()}
    with fv.Monitor(store, run="loop", tape=fv.Tape()) as monitor:
        for r in range(6):
            updates = {}
            with monitor.round(r, model):
                for node, own in data.items():
                    local = restore(r, model.state_dict(), {})
                    with monitor.client(node, local, data=own, loss=F.cross_entropy):
                        updates[node] = train(node, local, r)
                model.load_state_dict(aggregate(model.state_dict(), updates, weights))
                accuracy = (model.eval()(x).argmax(1) == y).float().mean()
                model.train()
                monitor.log(accuracy=accuracy)
            print(f"round {r}: accuracy {accuracy:.3f}")  # noqa: T201
    return monitor.run.id


if __name__ == "__main__":
    main(*sys.argv[1:])
