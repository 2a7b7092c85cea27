# SPDX-License-Identifier: Apache-2.0
"""GSC between any two layers, against Jacobians computed entry by entry; and GSC in every round at `standard`."""

import math

import pytest
import torch
from torch import nn

import fedvitals as fv
from fedvitals import lab
from fedvitals.errors import ConfigError
from fedvitals.probes.layer_scale import layer_scale
from fedvitals.probes.scale import gradient_scale


def network(width=12):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 9), nn.ReLU(), nn.Linear(9, 4))


@pytest.mark.parametrize(("upper", "lower"), [("2", "0"), ("4", "1"), ("output", "3"), ("3", "input"), ("2", "2")])
def test_between_two_layers_it_is_the_papers_equation(upper, lower):
    model, x = network(), torch.randn(5, 6)
    places = {"input": 0, "output": 5} | {str(i): i + 1 for i in range(5)}
    above, below = places[upper], places[lower]
    expected = []
    for sample in x:
        bottom = model[:below](sample) if below else sample
        top = model[below:above](bottom)
        jacobian = torch.autograd.functional.jacobian(model[below:above], bottom)
        expected.append(jacobian.norm() / math.sqrt(bottom.numel()) * top.norm() / bottom.norm())
    found = layer_scale(model, x, upper, lower)
    torch.testing.assert_close(found, torch.stack(expected).detach().double(), rtol=1e-5, atol=0)


def test_from_input_to_output_it_is_the_gradient_scale_and_the_model_is_left_alone():
    model, x = network(), torch.randn(7, 6)
    model.train()
    found = layer_scale(model, x)
    torch.testing.assert_close(found, gradient_scale(model, x, exact=True)[0], rtol=1e-6, atol=0)
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_many_activations_are_projected_without_bias():
    model, x = network(width=400), torch.randn(3, 6)
    exact = torch.stack(
        [torch.autograd.functional.jacobian(model[:1], sample).norm() / math.sqrt(6) for sample in x]
    ) * (model[0](x).norm(dim=1) / x.norm(dim=1))
    found = layer_scale(model, x, "0", projections=400)
    torch.testing.assert_close(found, exact.detach().double(), rtol=0.1, atol=0)
    again = layer_scale(model, x, "0", projections=400)
    assert torch.equal(found, again)


def test_a_layer_that_is_not_there_is_named_and_one_that_does_not_matter_has_no_number():
    with pytest.raises(ConfigError, match="Unknown layer 'conv1'"):
        layer_scale(network(), torch.randn(2, 6), "conv1")
    assert layer_scale(network(), torch.randn(2, 6), "0", "2").isnan().all()  # the wrong way round


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
@pytest.mark.parametrize("clients", [2, 5])
def test_at_standard_every_round_of_a_small_model_has_its_gradient_scale(tmp_path, engine, clients):
    local = lab.Local(iterations=2, batch=8)
    experiment = lab.Experiment(dataset="digits", model="mlp", clients=clients, rounds=9, seed=7, local=local)
    with fv.Monitor(tmp_path / "runs.db", run="small") as monitor:
        lab.run(experiment, monitor, engine=engine)
    with fv.open(tmp_path / "runs.db") as store:
        frame = store["small"].metrics("scale.gsc")
    assert set(frame["round"]) == set(range(9))
