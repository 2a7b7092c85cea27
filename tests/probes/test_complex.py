# SPDX-License-Identifier: Apache-2.0
"""Complex parameters: both parts count."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from support.models import watched


class Filter(nn.Module):
    """A learnt filter in the frequency domain, with a real layer beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.2 * torch.randn(12, 3, dtype=torch.cfloat))
        self.bias = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return (torch.fft.fft(x) @ self.weight).abs() + self.bias


def norm(tensors):
    return float(sum(t.detach().abs().double().square().sum() for t in tensors)) ** 0.5


def run(break_client=None):
    torch.manual_seed(0)
    x, y = torch.randn(32, 12), torch.randint(0, 3, (32,))
    shared, expected = Filter(), {}
    monitor, sink = watched()
    with monitor, monitor.round(0, shared):
        for place, node in enumerate("abcde"):
            model = copy.deepcopy(shared)
            optimizer = torch.optim.SGD(model.parameters(), 0.05)
            with monitor.client(node, model):
                own = slice(6 * place, 6 * place + 6)
                functional.cross_entropy(model(x[own]), y[own]).backward()
                expected[node] = {"gradient.norm": norm(p.grad for p in model.parameters())}
                optimizer.step()
                if node == break_client:
                    with torch.no_grad():
                        torch.view_as_real(model.weight)[0, 0, 1] = float("nan")
            pairs = zip(model.parameters(), shared.parameters(), strict=True)
            expected[node] |= {
                "update.norm": norm(p - q for p, q in pairs),
                "weight.norm": norm(model.parameters()),
            }
    return monitor, sink, expected


def test_norms_of_complex_models_have_both_parts():
    _, sink, expected = run()
    for node, metrics in expected.items():
        for name, value in metrics.items():
            assert sink.value(name, node=node) == pytest.approx(value, rel=1e-5)


def test_nan_in_the_imaginary_part_is_found():
    monitor, sink, _ = run("b")
    assert sink.value("update.nonfinite", node="b") == 1
    assert ("NAN_UPDATE", "b") in [(f.issue, f.where.node) for f in monitor.findings()]


def test_complex_updates_that_the_host_hands_over_have_both_parts():
    monitor, sink = watched()
    sent = {name: [torch.tensor([3 + 4j, 0j]), torch.ones(2)] for name in "ab"}
    with monitor, monitor.round(0):
        monitor.updates(0, sent)
    assert sink.value("update.norm", node="a") == pytest.approx(27**0.5)
