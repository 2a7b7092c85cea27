# SPDX-License-Identifier: Apache-2.0
"""GSC between any two layers, against Jacobians computed entry by entry; and runs compared by it."""

import math

import pytest
import torch
from torch import nn

import fedvitals as fv
from fedvitals import lab
from fedvitals.errors import ConfigError
from fedvitals.probes.layer_scale import layer_scale
from fedvitals.probes.scale import gradient_scale
from fedvitals.store import open_reader
from fedvitals.store.read.queries import find_run
from fedvitals.views.comparison.runs import compare
from fedvitals.views.layers import layers_page
from support.verbs import run


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


def test_two_runs_are_compared_by_a_layer_pair_that_was_asked_for(tmp_path, capsys):
    """It is recorded as a metric, and shown by `compare`, its page and the page of the layers beside earlier runs."""
    store = tmp_path / "runs.db"
    for name, scenario in (("sound", "baseline"), ("ill", "exploding")):
        experiment = lab.Experiment(
            dataset="digits", model=lab.paper_cnn(scenario=scenario, channels=(4, 4)), clients=2, rounds=2, seed=1,
            local=lab.Local(iterations=1, batch=4),
        )  # fmt: skip
        probes = ["standard", fv.probes.layer_pair_scale("head", "conv1")]
        with fv.Monitor(store, run=name, probes=probes) as monitor:
            lab.run(experiment, monitor, engine="sequential")
    with open_reader(store) as reader:
        comparison = compare(reader, ["sound", "ill"])
        page = layers_page(reader, find_run(reader, "ill"))
    sound, ill = comparison.layer_pairs["head/conv1"]
    assert sound.keys() == ill.keys() == {0, 1}
    assert ill[0] > 1e3 * sound[0] > 0
    assert "user.gsc.head/conv1" in {scale.name for scale in page.scales if scale.measured}
    (earlier,) = page.earlier_scales
    assert earlier.name == "sound"
    assert earlier.rounds == (0, 1)
    _, shown, _ = run(capsys, "compare", "sound", "ill", "--store", store)
    assert "GSC of head/conv1, median over the clients" in shown
