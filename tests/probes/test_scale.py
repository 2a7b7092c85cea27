# SPDX-License-Identifier: Apache-2.0
"""Gradient scale: known by hand on linear maps, by exact Jacobians elsewhere."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import fedvitals as fv
from fedvitals.errors import ConfigError
from fedvitals.probes.differentiate import differentiable
from fedvitals.probes.full_gradient import full_gradient
from fedvitals.probes.nonlinearity import nonlinearity, nonlinearity_coefficient
from fedvitals.probes.presets import Planned, Preset
from fedvitals.probes.scale import MOST_OUTPUTS, estimated_squares, gradient_scale, last_weight, scale, summary
from fedvitals.probes.view import View
from fedvitals.testing import MemorySink
from support.conditions import holds_for_each
from support.models import MODELS, make, make_data, train, watched


def jacobians(model, x):
    """The slow twin: each sample's Jacobian by torch's own function, in evaluation mode."""
    model.eval()
    return torch.stack([
        torch.autograd.functional.jacobian(lambda z: model(z[None])[0], sample).reshape(-1, sample.numel())
        for sample in x
    ])  # fmt: skip


@pytest.fixture(autouse=True)
def _double():
    """Oracles in double precision."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def samples(count=6):
    return make_data(count)[0].double()


def linear(weight):
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight.data = weight
    return layer


def test_a_scaled_identity_has_known_values():
    """f = a·x in n dimensions: ‖J‖_F = a·√n, so GSC = a² and sensitivity = 1."""
    for a in (0.5, 1.0, 3.0):
        model = linear(a * torch.eye(7))
        for exact in (True, False):
            gsc, sensitivity = gradient_scale(model, torch.randn(5, 7), exact=exact)
            np.testing.assert_allclose(gsc, a * a, rtol=1e-12 if exact else 1e-9)
            np.testing.assert_allclose(sensitivity, 1, rtol=1e-12 if exact else 1e-9)


def test_a_linear_map_by_hand():
    """‖J‖_F is the weight's norm; the product of GSC and sensitivity is ‖J‖_F²/n."""
    torch.manual_seed(0)
    weight, x = torch.randn(4, 6), torch.randn(8, 6)
    gsc, sensitivity = gradient_scale(linear(weight), x, exact=True)
    expected = weight.norm() / math.sqrt(6) * (x @ weight.T).norm(dim=1) / x.norm(dim=1)
    np.testing.assert_allclose(gsc, expected, rtol=1e-12)
    np.testing.assert_allclose(gsc * sensitivity, float(weight.square().sum()) / 6, rtol=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_exact_equals_the_jacobian(name):
    """On every model, `exact` agrees with torch's own Jacobian, sample by sample."""
    model, x = make(name).double(), samples()
    with torch.no_grad():
        outputs = model.eval()(x)
    norms = jacobians(model, x).flatten(1).norm(dim=1)
    gsc, sensitivity = gradient_scale(model, x, exact=True)
    root = math.sqrt(x[0].numel())
    inputs, outputs = x.flatten(1).norm(dim=1), outputs.norm(dim=1)
    np.testing.assert_allclose(gsc, norms / root * outputs / inputs, rtol=1e-9)
    np.testing.assert_allclose(sensitivity, norms / root * inputs / outputs, rtol=1e-9)


class Tokens(nn.Module):
    """A classifier of token sequences."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(20, 8), nn.Linear(8, 5)

    def forward(self, x):
        return self.head(torch.tanh(self.table(x)).mean(1))


def test_tokens_are_followed_from_their_embedding():
    """Integer inputs: the Jacobian is by the first embedding's output."""
    torch.manual_seed(0)
    model, x = Tokens(), torch.randint(0, 20, (3, 6))
    embedded = model.table(x).detach()
    rest = lambda e: model.head(torch.tanh(e[None]).mean(1))[0]  # noqa: E731
    norms = torch.stack([torch.autograd.functional.jacobian(rest, e).flatten().norm() for e in embedded])
    gsc, _ = gradient_scale(model, x, exact=True)
    expected = norms / math.sqrt(48) * model(x).detach().norm(dim=1) / embedded.flatten(1).norm(dim=1)
    np.testing.assert_allclose(gsc, expected, rtol=1e-9)


@pytest.mark.thorough
@pytest.mark.parametrize("name", MODELS)
def test_the_estimate_is_unbiased_over_1000_draws(name):
    """The mean of ‖J‖_F² over 1,000 draws is the exact one, within four standard errors."""
    model, x = make(name).double().eval(), samples(3)
    exact = jacobians(model, x).square().sum((1, 2))
    with differentiable(model, x) as graph:
        weight = last_weight(model, graph)
        assert weight is not None
        draws = torch.stack([estimated_squares(graph, weight, seed) for seed in range(1000)])
    error = draws.std(0) / math.sqrt(1000)
    assert ((draws.mean(0) - exact).abs() <= 4 * error + 1e-12 * exact).all()


def test_deflation_makes_a_nearly_rank_one_jacobian_easy():
    """Where plain projection errs by tens of percent, the deflated one errs by less than one."""
    torch.manual_seed(1)
    strong = torch.outer(torch.randn(10), torch.randn(30))
    model = linear(strong + 0.02 * torch.randn(10, 30))
    with differentiable(model, torch.randn(200, 30)) as graph:
        exact = float(model.weight.detach().square().sum())
        deflated = estimated_squares(graph, model.weight, 0)
        plain = estimated_squares(graph, None, 0)
    assert float((deflated / exact - 1).abs().mean()) < 0.01
    assert float((plain / exact - 1).abs().mean()) > 0.3


def test_zero_and_broken_samples_are_counted_and_poison_nothing():
    """A dead network gives exactly 0; a sample that is not finite is left out of the mean."""
    dead = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3, bias=False))
    dead[0].bias.data.fill_(-1e9)
    x = torch.randn(6, 4)
    found = scale()(View(dead, data=(x, torch.zeros(6, dtype=torch.long))))
    assert found["scale.gsc"] == 0
    assert found["scale.zero_samples"] == 6
    x[2] = math.nan
    found = scale()(View(linear(torch.randn(3, 4)), data=(x, torch.zeros(6, dtype=torch.long))))
    assert found["scale.nonfinite_samples"] == 1
    assert math.isfinite(found["scale.gsc"])


def test_summary_has_mean_median_spread_and_error():
    found = summary("s", torch.tensor([1.0, 2.0, 6.0, math.inf]))
    assert (found["s"], found["s_median"]) == (3.0, 2.0)
    assert found["s_error"] == pytest.approx(found["s_spread"] / math.sqrt(3))


@pytest.mark.parametrize("output", [lambda x: {"classes": x}, lambda x: x[:, :, None], lambda x: (x, x)])
def test_an_unsupported_output_is_named(output):
    """A model that returns something else is told what is needed and what was got."""

    class Odd(nn.Module):
        def forward(self, x):
            return output(x)

    with pytest.raises(ConfigError, match="one row of outputs per sample"):
        gradient_scale(Odd(), torch.randn(2, 3))


def test_integers_without_an_embedding_are_named():
    with pytest.raises(ConfigError, match=r"no nn.Embedding"):
        gradient_scale(nn.Linear(3, 2), torch.ones(2, 3, dtype=torch.long))
    with pytest.raises(ConfigError, match="at least 1, or 'all'"):
        scale(images=0)


def test_nothing_is_left_behind():
    """Modes, `.grad`, batch-norm buffers and random streams are as they were."""
    model, x = make("cnn").double(), samples()
    model.train()
    model(x).sum().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    state, stream = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    data = (x, torch.zeros(len(x), dtype=torch.long))
    view = View(model, data=data, loss=functional.cross_entropy)
    for probe in (scale(), scale(exact=True), nonlinearity(), full_gradient):
        assert probe(view)
    assert holds_for_each(module.training for module in model.modules())
    assert holds_for_each(torch.equal(a, p.grad) for a, p in zip(gradients, model.parameters(), strict=True))
    assert holds_for_each(torch.equal(v, model.state_dict()[k]) for k, v in state.items())
    assert torch.equal(stream, torch.get_rng_state())


def test_without_data_the_last_training_batch_serves():
    """No `data`: the probe takes the last batch that the model trained on, and says so."""
    torch.set_default_dtype(torch.float32)
    monitor, sink = watched("standard")
    model = make("mlp")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with monitor.round(0, model), monitor.client("c0", model):
        train(model, optimizer, make_data(), 3)
    monitor.close()
    assert sink.value("scale.from_batch", node="c0") == 1
    assert sink.value("scale.images", node="c0") == 8
    assert not model._forward_pre_hooks


# -- nonlinearity -----------------------------------------------------------------------------------------------------


def test_nlc_of_a_linear_map_is_one():
    """Whatever its gain, shape and bias; up to the randomness of the draws."""
    torch.manual_seed(0)
    x = torch.randn(2000, 6) * torch.tensor([3.0, 1, 1, 1, 1, 0.1]) + 5
    for gain in (0.1, 10.0):
        model = nn.Linear(6, 4)
        model.weight.data *= gain
        assert nonlinearity_coefficient(model, x) == pytest.approx(1, rel=0.05)


def test_nlc_is_free_of_input_scale_and_grows_with_nonlinearity():
    """A steeper activation is less linear; scaling input and undoing it in the first layer changes nothing."""
    torch.manual_seed(0)
    x = torch.randn(1000, 5)
    values = []
    for steep in (0.01, 1.0, 10.0):
        first, second = nn.Linear(5, 64, bias=False), nn.Linear(64, 3, bias=False)
        first.weight.data = torch.randn(64, 5, generator=torch.Generator().manual_seed(1)) * steep
        second.weight.data = torch.randn(3, 64, generator=torch.Generator().manual_seed(2))
        model = nn.Sequential(first, nn.Tanh(), second)
        values.append(nonlinearity_coefficient(model, x))
        scaled = nn.Sequential(linear(first.weight.data / 7), nn.Tanh(), second)
        assert nonlinearity_coefficient(scaled, x * 7) == pytest.approx(values[-1], rel=1e-9)
    assert values[0] == pytest.approx(1, rel=0.05)
    assert values[0] < values[1] < values[2]


@pytest.mark.parametrize("name", MODELS)
def test_nlc_equals_the_jacobian_twin(name):
    """E‖J·δ‖² with the very same draws, by explicit Jacobians."""
    from fedvitals.probes.nonlinearity import _covariance_draws

    model, x = make(name).double().eval(), samples(5)
    delta = _covariance_draws(x, torch.Generator().manual_seed(3))
    pushed = torch.einsum("bkn,bn->bk", jacobians(model, x), delta.flatten(1))
    spread = model(x).detach().var(0, correction=1).sum()
    expected = math.sqrt(pushed.square().sum(1).mean() / spread)
    assert nonlinearity_coefficient(model, x, seed=3) == pytest.approx(expected, rel=1e-6)


# -- the gradient over the whole data set -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_full_gradient_equals_one_backward_pass_over_everything(name):
    """The average over all samples, per layer, signed and absolute."""
    model = make(name).double().eval()
    x, y = make_data(150)
    x = x.double()
    rows = full_gradient(View(model, data=(x, y), loss=functional.cross_entropy))["gradient.full"]
    functional.cross_entropy(model(x), y).backward()
    for row, p in zip(rows, model.parameters(), strict=True):
        assert row[1] == pytest.approx(float(p.grad.sum()), rel=1e-6, abs=1e-12)
        assert row[3] == pytest.approx(float(p.grad.abs().sum()), rel=1e-6)


def test_a_model_that_cannot_be_measured_is_asked_once():
    """A language model has a row of outputs for each token: the probe says so, and does not run the model again."""

    class Tagger(nn.Module):
        passes = 0

        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)

        def forward(self, tokens):
            Tagger.passes += 1
            return self.head(self.embedding(tokens))

    model = Tagger()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    tokens = torch.arange(40).view(4, 10) % 20
    sink = MemorySink()
    with fv.Monitor(None, sinks=[sink], machine=False, probes=[Preset("own", (Planned(scale()),), 1.0)]) as monitor:
        for number in range(4):
            with monitor.round(number), monitor.client("c0", model):
                optimizer.zero_grad()
                functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
                optimizer.step()
    assert Tagger.passes == 4 + 1
    (event,) = sink.events("probe.abstains")
    assert event.level == "info"
    assert "one row of outputs per sample" in event.message
    assert not sink.events("monitor.error")


@pytest.mark.thorough
def test_many_outputs_are_estimated_without_their_products():
    """Outputs × outputs of a large vocabulary would not fit into memory."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, MOST_OUTPUTS + 1))
    x = torch.randn(64, 6)
    with differentiable(model, x) as graph:
        assert last_weight(model, graph) is None
    estimated = gradient_scale(model, x, seed=1)[0]
    inner, outer = model[0].weight.detach(), model[2].weight.detach()
    slopes = 1 - model[:2](x).detach() ** 2  # of tanh
    frobenius = torch.stack([(outer * slope @ inner).double().norm() for slope in slopes])  # of the exact Jacobians
    expected = frobenius / 6**0.5 * model(x).detach().double().norm(dim=1) / x.double().norm(dim=1)
    assert float((estimated.square() / expected.square()).mean()) == pytest.approx(1, rel=0.5)
