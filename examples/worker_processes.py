# SPDX-License-Identifier: Apache-2.0
"""A federated loop whose clients train in worker processes, with the monitor attached: the README's recipe.

Run it with  python examples/worker_processes.py [STORE]  and then  fedvitals show pool.
"""

import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fedvitals as fv

digits = load_digits()
x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
loaders = {f"c{i}": DataLoader(TensorDataset(x[i::6], y[i::6]), batch_size=16, shuffle=True) for i in range(6)}


def build(state=None):
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    if state is not None:
        model.load_state_dict({name: torch.from_numpy(array) for name, array in state.items()})
    return model


def arrays(model):
    return {name: tensor.numpy().copy() for name, tensor in model.state_dict().items()}


# -- the README's recipe ----------------------------------------------------------------------------------------------
def task(worker, name, state):  # in a worker process
    model = build(state)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with worker.client(name, model, data=loaders[name], loss=F.cross_entropy):
        for inputs, labels in loaders[name]:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    update = {key: after - state[key] for key, after in arrays(model).items()}
    return name, update, worker.payload()  # the update, and the measurements


def federated_round(monitor, pool, r, global_model):  # in the parent process
    with monitor.round(r, global_model):
        monitor.host.expect(*loaders)  # clients that do not reply are reported
        state, worker = arrays(global_model), monitor.host.for_worker()
        replies = [job.result() for job in [pool.submit(task, worker, name, state) for name in loaders]]
        for _, _, payload in replies:
            monitor.host.absorb(payload)
        monitor.updates(r, {name: update for name, update, _ in replies})
        mean = {key: sum(update[key] for _, update, _ in replies) / len(replies) for key in state}
        global_model.load_state_dict({key: torch.from_numpy(state[key] + mean[key]) for key in state})
        monitor.log(accuracy=(global_model(x).argmax(1) == y).float().mean())


# -- end of the recipe ------------------------------------------------------------------------------------------------

if __name__ == "__main__":
    torch.manual_seed(0)
    store = sys.argv[1] if len(sys.argv) > 1 else "runs.db"
    shared = build()
    with fv.Monitor(store, run="pool") as monitor, ProcessPoolExecutor(2, get_context("spawn")) as pool:
        for number in range(3):
            federated_round(monitor, pool, number, shared)
