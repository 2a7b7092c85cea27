# SPDX-License-Identifier: Apache-2.0
"""What training losses are not measured of: each is left out with the reason, once."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from support.models import batches, flat, make, make_data, watched
from support.trained_losses import LOSSES, OTHERS, Twin, check, check_abstains, forward_only, mixed, plain, trained


@pytest.mark.parametrize("kind", OTHERS)
def test_other_losses_are_left_out_with_the_reason(kind):
    sink, _ = trained(make("mlp"), plain(OTHERS[kind]), rounds=3)
    check_abstains(sink, "cross-entropy", "soft, mixed or smoothed")


def test_two_classes():
    """Every gradient that adds up to 0 looks like a label's there: the weights of samples tell them apart."""
    x, y = make_data(64)
    data = (x, y.clamp(max=1))
    for loss in (functional.cross_entropy, lambda z, y: functional.cross_entropy(z, y, torch.tensor([0.2, 1.0]))):
        sink, twin = trained(nn.Linear(12, 2), plain(loss, steps=8, data=data))
        check(sink, twin, classes=2)
    for loss in (mixed, OTHERS["label smoothing"], OTHERS["squared error"]):
        sink, _ = trained(nn.Linear(12, 2), plain(loss, steps=8, data=data))
        check_abstains(sink)


@pytest.mark.parametrize("outputs", [1, 4])
def test_regression_is_left_out(outputs):
    def loss(z, _y):
        return functional.mse_loss(z, torch.ones_like(z))

    sink, _ = trained(nn.Linear(12, outputs), plain(loss))
    check_abstains(sink, "regression")


@pytest.mark.parametrize("batch", [1, 2, 8])
@pytest.mark.parametrize("loss", [functional.mse_loss, functional.l1_loss, functional.huber_loss])
def test_regression_of_one_number_is_not_taken_for_two_classes(loss, batch):
    x, _ = make_data(64)
    targets = x @ torch.linspace(-1, 1, 12)[:, None] + 0.3

    def run(model, _twin):
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for places in torch.arange(64).split(batch):
            optimizer.zero_grad()
            loss(model(x[places]), targets[places]).backward()
            optimizer.step()

    sink, _ = trained(nn.Linear(12, 1), run)
    check_abstains(sink, "regression")


@pytest.mark.parametrize("kind", ["label smoothing", "soft labels", "several labels"])
def test_two_classes_in_batches_of_one(kind):
    """No other row has the same weight then, so that of the other batches is what tells them apart."""
    x, y = make_data(64)
    data = (x, y.clamp(max=1))

    def run(loss):
        def steps(model, twin):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for place in torch.arange(64).split(1):
                optimizer.zero_grad()
                logits = model(data[0][place])
                twin.see(logits, data[1][place])
                loss(logits, data[1][place]).backward()
                optimizer.step()

        return steps

    check_abstains(trained(nn.Linear(12, 2), run(OTHERS[kind]))[0])
    sink, twin = trained(nn.Linear(12, 2), run(functional.cross_entropy))
    check(sink, twin, classes=2)


class Wrapped(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.net, self.shape = make("mlp"), shape

    def forward(self, x):
        return self.shape(self.net(x))


SHAPES = {
    "tuple": lambda z: (z, z.sum(1)),
    "(8,)": lambda z: z[:, 0],
    "(8, 3, 2, 2)": lambda z: z[:, :, None, None].expand(-1, -1, 2, 2),
}


@pytest.mark.parametrize("word", SHAPES)
def test_outputs_that_are_no_logits(word):
    def run(model, _twin):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x, _ in batches(make_data(), 3):
            outputs = model(x)
            (outputs[0] if isinstance(outputs, tuple) else outputs).square().mean().backward()
            optimizer.step()

    sink, _ = trained(Wrapped(SHAPES[word]), run, rounds=2)
    check_abstains(sink, "regression")


def test_compiled_models_are_measured_or_left_out():
    wanted = make("mlp")
    plain()(wanted, Twin())
    model = make("mlp")
    compiled = torch.compile(model, backend="eager")
    sink, _ = trained(model, lambda _, twin: plain()(compiled, twin))
    assert bool(sink.events("probe.abstains")) != bool(sink.metrics("train.loss_first", node="c0"))
    assert torch.equal(flat(model), flat(wanted))
    model = make("mlp")
    model.compile(backend="eager")
    sink, _ = trained(model, plain())
    check_abstains(sink, "compiled")


def test_a_model_that_is_not_called_is_said_to_be_unseen():
    sink, _ = trained(make("mlp"), lambda model, _twin: forward_only(model))
    check_abstains(sink, "no forward and backward pass")


def test_nested_calls_and_changes_in_place_are_left_out():
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(12, 12)

        def forward(self, x, depth=0):
            return self.net(x) if depth else self(self.net(x).tanh(), 1)[:, :3]

    sink, _ = trained(Nested(), plain())
    check_abstains(sink)
    sink, _ = trained(make("mlp"), plain(lambda z, y: functional.cross_entropy(z.mul_(2), y)))
    check_abstains(sink, "in place")


def test_differentiation_by_torch_func_is_left_alone():
    model, (x, y) = make("mlp"), make_data()

    def run(model, _twin):
        def loss(parameters):
            return functional.cross_entropy(torch.func.functional_call(model, parameters, (x,)), y)

        torch.func.grad(loss)(dict(model.named_parameters()))
        forward_only(model)

    sink, _ = trained(model, run)
    check_abstains(sink, "torch.func")


def test_an_abstention_is_told_once_and_lasts():
    """For that client alone: its neighbour is measured."""
    monitor, sink = watched(LOSSES)
    with monitor:
        for number in range(3):
            with monitor.round(number):
                for node, loss in (("c0", OTHERS["mixup"]), ("c1", functional.cross_entropy)):
                    model = make("mlp")
                    with monitor.client(node, model):
                        plain(loss)(model, Twin())
    assert len(sink.events("probe.abstains")) == 1
    assert {m.where.node for m in sink.metrics("train.loss_first")} == {"c1"}
    assert len(sink.metrics("train.loss_first")) == 3
