# SPDX-License-Identifier: Apache-2.0
"""A federated loop in plain PyTorch with the monitor attached: the README's snippet, and what it needs around it.

Run it with  python examples/plain_loop.py [STORE]  and then  fedvitals show digits.
"""

import copy
import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fedvitals as fv

torch.manual_seed(0)
digits = load_digits()
x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
loaders = {
    f"c{i}": DataLoader(TensorDataset(x[i::8], y[i::8]), batch_size=16, shuffle=True) for i in range(8)
}  # eight clients, every eighth digit each
global_model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
store = sys.argv[1] if len(sys.argv) > 1 else "runs.db"


def train(model, optimizer, loader):
    for inputs, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()


def average(models):
    states = [model.state_dict() for model in models]
    return {name: torch.stack([state[name] for state in states]).mean(0) for name in states[0]}


# -- the README's snippet ---------------------------------------------------------------------------------------------
monitor = fv.Monitor(store, run="digits")
for r in range(5):
    locals_ = []
    with monitor.round(r, global_model):
        for name, loader in loaders.items():
            local = copy.deepcopy(global_model)
            optimizer = torch.optim.SGD(local.parameters(), 0.1)
            with monitor.client(name, local, data=loader, loss=F.cross_entropy):
                train(local, optimizer, loader)  # your code, unchanged
            locals_.append(local)
        global_model.load_state_dict(average(locals_))
        monitor.log(accuracy=(global_model(x).argmax(1) == y).float().mean())
monitor.close()
# -- end of the snippet -----------------------------------------------------------------------------------------------
