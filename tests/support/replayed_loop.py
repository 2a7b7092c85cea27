# SPDX-License-Identifier: Apache-2.0
"""A plain loop over three clients with everything that is hard to repeat."""

import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

ROUNDS, NODES = 7, ("c0", "c1", "c2")


def net():
    return nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))


class Loop:
    """A federation of three in one process, and all that is hard to repeat: shuffling, dropout, three generators."""

    def __init__(self):
        made = torch.Generator().manual_seed(5)
        x, y = torch.randn(90, 12, generator=made), torch.randint(0, 3, (90,), generator=made)
        self.data = {node: TensorDataset(x[i::3][: 30 - 2 * i], y[i::3][: 30 - 2 * i]) for i, node in enumerate(NODES)}

    def restore(self, _, tensors, notes):
        assert "random" in notes
        model = net()
        model.load_state_dict(tensors)
        return model

    def train(self, node, model, _, log=lambda _: None):
        rate = 0.05 * random.uniform(0.9, 1.1) * np.random.uniform(0.9, 1.1)  # noqa: NPY002
        optimizer, losses = torch.optim.SGD(model.parameters(), rate, momentum=0.9), []
        for inputs, labels in DataLoader(self.data[node], batch_size=8, shuffle=True, drop_last=True):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            log(loss)
            losses.append(loss.item())
        return model.state_dict(), losses
