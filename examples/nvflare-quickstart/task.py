# SPDX-License-Identifier: Apache-2.0
"""What is learned, and how: nothing in here knows of NVFlare."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fedvitals as fv

TEST_SAMPLES = 297  # of 1,797; the sites share the rest


class DigitsModel(nn.Module):
    """A small network for digits of 8 x 8 pixels."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, x):
        return self.layers(x)


def load_samples():
    """All digits, always in the same random order: 8 x 8 pixels between 0 and 1, and what they show."""
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return torch.tensor(pixels, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]


def load_test():
    x, y = load_samples()
    return x[:TEST_SAMPLES], y[:TEST_SAMPLES]


def load_share(share, shares):
    """One site's own digits."""
    x, y = load_samples()
    return x[TEST_SAMPLES + share :: shares], y[TEST_SAMPLES + share :: shares]


def train(model, x, y, epochs=2, batch_size=32, learning_rate=0.05):
    """Give the mean loss of the last epoch, and the number of steps."""
    loader = DataLoader(TensorDataset(x, y), batch_size, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), learning_rate, momentum=0.9)

    # fedvitals, the second line, if you like: what happens inside of the training, step by step.
    with fv.watch(model, optimizer, data=loader, loss=F.cross_entropy):
        for _ in range(epochs):
            total = 0.0
            for inputs, labels in loader:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(inputs), labels)
                loss.backward()
                optimizer.step()
                total += loss.item()
    return total / len(loader), epochs * len(loader)


@torch.no_grad()
def accuracy(model, x, y):
    """Give the share of digits that the model recognises."""
    return (model(x).argmax(1) == y).float().mean().item()
