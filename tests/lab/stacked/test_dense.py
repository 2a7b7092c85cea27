# SPDX-License-Identifier: Apache-2.0
"""Dense chains by hand, against autograd."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn import functional

from fedvitals.lab.stacked.dense import DensePlan

CHAINS = {
    "logistic": nn.Sequential(nn.Flatten(), nn.Linear(12, 5)),
    "relu": nn.Sequential(nn.Linear(12, 7), nn.ReLU(), nn.Linear(7, 5)),
    "tanh, deep": nn.Sequential(nn.Linear(12, 7), nn.Tanh(), nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 5)),
    "two layers in a row": nn.Sequential(nn.Linear(12, 7), nn.Linear(7, 5)),
}


@pytest.mark.parametrize("name", CHAINS)
def test_by_hand_is_as_by_autograd(name):
    module = CHAINS[name]
    stream = torch.Generator().manual_seed(1)
    weights = {n: torch.randn(3, *p.shape, generator=stream) for n, p in module.named_parameters()}
    x, y = torch.randn(3, 9, 12, generator=stream), torch.randint(0, 5, (3, 9), generator=stream)

    def loss(own, inputs, labels):
        return functional.cross_entropy(functional_call(module, own, (inputs,)), labels)

    expected, losses = vmap(grad_and_value(loss))(weights, x, y)
    into = {n: torch.empty_like(w) for n, w in weights.items()}
    found, _ = DensePlan.of(module).gradients(weights, into, x, y)
    torch.testing.assert_close(found, losses, rtol=1e-5, atol=1e-6)
    for n, gradient in expected.items():
        torch.testing.assert_close(into[n], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "module",
    [
        nn.Linear(3, 2),
        nn.Sequential(nn.Linear(3, 2), nn.ReLU()),
        nn.Sequential(nn.Linear(3, 2, bias=False)),
        nn.Sequential(nn.Linear(3, 2), nn.Dropout(), nn.Linear(2, 2)),
        nn.Sequential(nn.Conv2d(1, 1, 1), nn.Flatten(), nn.Linear(4, 2)),
        nn.Sequential(nn.Linear(3, 3), nn.Flatten(), nn.Linear(3, 2)),
    ],
    ids=["no chain", "ends in an activation", "no bias", "dropout", "convolution", "flattened later"],
)
def test_anything_else_is_left_to_autograd(module):
    assert DensePlan.of(module) is None
