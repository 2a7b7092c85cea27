# SPDX-License-Identifier: Apache-2.0
"""Moments of a regression's residuals against the residuals themselves; and that other losses are left out."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from support.models import close
from support.trained_losses import check_abstains, trained

NAMES = ("train.residual_mean", "train.residual_std", "train.residual_kurtosis")


def data(outputs=1, samples=60):
    """Inputs and targets, of which a few lie far off."""
    stream = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 6, generator=stream)
    y = x @ torch.randn(6, outputs, generator=stream) + 2 + 0.1 * torch.randn(samples, outputs, generator=stream)
    y[::17] += 40
    return x, y


def by(loss, samples, seen, passes=3, batch=8, scale=1.0):
    """Train on shuffled batches by a loss; `seen` gets the residuals of the first pass."""

    def run(model, _twin):
        optimizer = torch.optim.SGD(model.parameters(), 0.003 / scale)
        order = torch.Generator().manual_seed(1)
        loader = DataLoader(TensorDataset(*samples), batch, shuffle=True, generator=order)
        for number in range(passes):
            for x, y in loader:
                optimizer.zero_grad()
                z = model(x)
                target = y.reshape(z.shape)
                if not number:
                    seen.append((z - target).detach().double().flatten())
                loss(z, target).backward()
                optimizer.step()

    return run


def half_of_sums(z, y):
    return 0.5 * ((z - y) ** 2).flatten(1).sum(1).mean()


SQUARED = {
    "mean": (functional.mse_loss, 1.0),
    "sum": (lambda z, y: functional.mse_loss(z, y, reduction="sum"), 8.0),
    "half of sums": (half_of_sums, 1.0),
    "scaled": (lambda z, y: 65536 * functional.mse_loss(z, y), 65536.0),
    "in parts": (lambda z, y: functional.mse_loss(z, y) / 4, 0.25),
}


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("kind", SQUARED)
def test_moments_are_those_of_the_residuals(kind, outputs):
    """Whatever constant factor the loss has, and with a last batch that is smaller."""
    loss, scale = SQUARED[kind]
    samples, seen = data(outputs), []
    sink, _ = trained(nn.Linear(6, outputs), by(loss, samples, seen, scale=scale), samples)
    r = torch.cat(seen).numpy()
    wanted = (r.mean(), r.std(), ((r - r.mean()) ** 4).mean() / r.std() ** 4)
    for name, number in zip(NAMES, wanted, strict=True):
        close(sink.value(name, node="c0"), number, 1e-3)
    assert wanted[2] > 4
    assert not sink.events("probe.abstains")
    assert "train.loss_first" not in sink.names()


def test_one_number_per_sample_without_an_axis_of_outputs():
    x, y = data()
    seen = []
    model = nn.Sequential(nn.Linear(6, 1), nn.Flatten(0))
    sink, _ = trained(model, by(functional.mse_loss, (x, y[:, 0]), seen), (x, y[:, 0]))
    close(sink.value("train.residual_std", node="c0"), float(torch.cat(seen).numpy().std()), 1e-3)


def weighted(z, y):
    return (torch.linspace(0.5, 1.5, len(z))[:, None] * (z - y) ** 2).mean()


OTHERS = {
    "absolute": functional.l1_loss,
    "huber": functional.huber_loss,
    "quantile": lambda z, y: torch.maximum(0.9 * (y - z), 0.1 * (z - y)).mean(),
    "log cosh": lambda z, y: (z - y).cosh().log().mean(),
    "weighted": weighted,
    "other targets": lambda z, y: functional.mse_loss(z, y / 10),
    "mixed targets": lambda z, y: functional.mse_loss(z, 0.7 * y + 0.3 * y.flip(0)),
    "penalty": lambda z, y: functional.mse_loss(z, y) + 0.1 * z.square().mean(),
}


# A batch of one is mixed with itself, and has one weight.
CASES = [
    (kind, batch) for kind in OTHERS for batch in (1, 8, 60) if batch > 1 or kind not in ("weighted", "mixed targets")
]


@pytest.mark.parametrize(("kind", "batch"), CASES)
def test_other_losses_are_left_out_with_the_reason(kind, batch):
    samples = data()
    sink, _ = trained(nn.Linear(6, 1), by(OTHERS[kind], samples, [], batch=batch), samples)
    check_abstains(sink, "targets in `data`")


@pytest.mark.parametrize("change", ["a part of a pass", "drawn with replacement", "dropped samples"])
def test_a_pass_that_does_not_see_each_target_once_is_left_out(change):
    x, y = data()
    rows = np.random.default_rng(0).integers(0, 60, 60) if change == "drawn with replacement" else np.arange(40)
    loader = DataLoader(TensorDataset(x, y), 16, drop_last=True)
    known = loader if change == "dropped samples" else (x, y)
    sink, _ = trained(nn.Linear(6, 1), by(functional.mse_loss, (x[rows], y[rows]), [], passes=1), known)
    check_abstains(sink, "targets in `data`")
