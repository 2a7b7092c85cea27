# SPDX-License-Identifier: Apache-2.0
"""Convolutions as products with patches, against `torch.func`."""

import pytest
import torch
from torch import nn

from fedvitals.lab.stacked import plans
from fedvitals.lab.stacked.plans import MappedPlan, UnfoldedPlan

CLIENTS, SAMPLES = 3, 4


def network(padding=0, stride=1, pool=None):
    convolutions = [nn.Conv2d(2, 4, 3, stride, padding), nn.LeakyReLU(0.3), nn.Conv2d(4, 5, (3, 2), 1, padding)]
    layers = [*convolutions, nn.Tanh(), *([pool] if pool else []), nn.Flatten(), nn.LazyLinear(6)]
    module = nn.Sequential(*layers)
    module(torch.zeros(1, 2, 10, 9))
    return module


def gradients_by(plan, module, x, y):
    weights = {
        n: p.detach() * torch.tensor([0.9, 1.0, 1.2]).view(-1, *[1] * p.dim()) for n, p in module.named_parameters()
    }
    into = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    losses, outputs = plan.gradients(weights, into, x, y)
    return {"losses": losses, "outputs": outputs, **into}


@pytest.mark.parametrize("settings", [{}, {"padding": 1}, {"padding": 1, "stride": 2}, {"pool": nn.AvgPool2d(2)}])
@pytest.mark.parametrize("largest", [plans.LARGEST_PATCHES, 0])
def test_products_with_patches_are_the_convolutions(settings, largest, monkeypatch):
    monkeypatch.setattr(plans, "LARGEST_PATCHES", largest)  # 0: computed as grouped convolutions
    torch.manual_seed(0)
    module = network(**settings)
    x, y = torch.rand(CLIENTS, SAMPLES, 2, 10, 9), torch.randint(0, 6, (CLIENTS, SAMPLES))
    found = gradients_by(UnfoldedPlan.of(module, "float32"), module, x, y)
    for name, expected in gradients_by(MappedPlan(module), module, x, y).items():
        torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(2, 4, 3, groups=2),
        nn.Conv2d(2, 4, 3, dilation=2),
        nn.Conv2d(2, 4, 3, padding="same"),
        nn.GroupNorm(1, 2),
    ],
)
def test_other_networks_are_left_to_other_plans(layer):
    module = nn.Sequential(
        layer, nn.Conv2d(layer.out_channels if hasattr(layer, "out_channels") else 2, 3, 3), nn.Flatten()
    )
    assert UnfoldedPlan.of(module, "float32") is None
