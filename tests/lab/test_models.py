# SPDX-License-Identifier: Apache-2.0
"""Models: the paper's is the benchmarks' own twin, the seed decides alone, and what says stackable is."""

import msgspec
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.func import functional_call, grad, vmap

from fedvitals.errors import ConfigError
from fedvitals.lab.data.arrays import Arrays
from fedvitals.lab.data.datasets import load
from fedvitals.lab.models import catalog as models
from fedvitals.lab.streams import stream
from support.conditions import holds_for_each

GTSRB, FASHION, DIGITS, SEQUENCE, VECTOR = (3, 32, 32), (1, 28, 28), (1, 8, 8), (5, 7), (32,)
SCENARIOS = ("baseline", "exploding", "vanishing")


def seeded(model, shape=DIGITS, classes=10, seed=3, **more):
    return model.build(shape, classes, stream(seed, "model"), **more)


def weights(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def by_hand(scenario):
    """The paper's network, written down layer by layer."""
    activation = {"baseline": nn.LeakyReLU(0.3), "exploding": nn.ReLU(), "vanishing": nn.Tanh()}[scenario]
    uniform = {"exploding": (8.0, 10.0), "vanishing": (4.0, 7.0)}.get(scenario)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3), activation, nn.MaxPool2d(2), nn.Conv2d(32, 64, 3), activation, nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(2304, 43),
    )  # fmt: skip
    for layer in (model[0], model[3], model[7]):
        nn.init.zeros_(layer.bias)
        if isinstance(layer, nn.Linear) or uniform is None:
            nn.init.xavier_uniform_(layer.weight)
        else:
            nn.init.uniform_(layer.weight, *uniform)
    return model


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("pool_first", [True, False])
def test_paper_cnn_is_as_by_hand(scenario, pool_first):
    ours = seeded(models.PaperCNN(scenario, pool_first=pool_first), GTSRB, 43)
    seed = int(torch.randint(2**62, (), generator=stream(3, "model")))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        theirs = by_hand(scenario)
    assert torch.equal(weights(ours), weights(theirs))
    assert weights(ours).numel() == 118_507
    x = torch.rand(4, *GTSRB, generator=stream(0, "x"))
    assert torch.equal(ours(x), theirs(x))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_pooling_first_changes_no_gradient(scenario):
    x, y = torch.rand(8, *GTSRB, generator=stream(0, "x")), torch.arange(8)
    gradients = []
    for pool_first in (True, False):
        module = seeded(models.PaperCNN(scenario, pool_first=pool_first), GTSRB, 43)
        F.cross_entropy(module(x), y).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in module.parameters()]))
    assert torch.equal(*gradients)


@pytest.mark.parametrize(
    ("pool", "kinds", "last"),
    [
        ("max", "Conv2d MaxPool2d LeakyReLU", 2304),
        ("average", "Conv2d LeakyReLU AvgPool2d", 2304),
        ("none", "Conv2d LeakyReLU", 50_176),
    ],
)
def test_paper_cnn_pools_as_it_is_told(pool, kinds, last):
    module = seeded(models.PaperCNN(pool=pool), GTSRB, 43)
    assert [type(layer).__name__ for layer in module] == [*kinds.split() * 2, "Flatten", "Linear"]
    assert module.head.in_features == last
    assert module(torch.rand(2, *GTSRB)).shape == (2, 43)
    with pytest.raises(ConfigError, match="pool of paper_cnn"):
        models.PaperCNN(pool="middle")


@pytest.mark.parametrize(("shape", "last"), [(GTSRB, 2304), (FASHION, 1600), (DIGITS, 256)])
def test_paper_cnn_pads_only_where_nothing_would_remain(shape, last):
    module = seeded(models.PaperCNN(), shape, 10)
    assert module.head.in_features == last
    assert module.conv1.padding == ((1, 1) if shape == DIGITS else (0, 0))
    assert module(torch.zeros(2, *shape)).shape == (2, 10)


def test_slope_and_channels_are_settings():
    module = seeded(models.PaperCNN(channels=[4, 6], slope=0.1))
    assert module.activation1.negative_slope == 0.1
    assert (module.conv1.out_channels, module.conv2.out_channels) == (4, 6)
    with pytest.raises(ConfigError, match="two numbers"):
        models.PaperCNN(channels=(4,))
    with pytest.raises(ConfigError, match="baseline, exploding, vanishing"):
        models.PaperCNN("explode")


def test_sizes():
    assert weights(seeded(models.CNN())).numel() == 21_386
    assert weights(seeded(models.MLP(), VECTOR)).numel() == 2_762
    assert weights(seeded(models.Logistic(), VECTOR)).numel() == 330
    assert weights(seeded(models.Resnet18(), GTSRB)).numel() == 11_172_170


CASES = [
    (models.PaperCNN(), DIGITS, None),
    (models.PaperCNN("vanishing"), DIGITS, None),
    (models.CNN(), DIGITS, None),
    (models.MLP(), DIGITS, None),
    (models.MLP(hidden=(8, 6)), VECTOR, None),
    (models.Logistic(), SEQUENCE, None),
    (models.Resnet18(), DIGITS, None),
    (models.Resnet18(norm="batch"), DIGITS, None),
    (models.Transformer(width=16, heads=2), DIGITS, None),
    (models.Transformer(width=16, heads=2), SEQUENCE, None),
    (models.Transformer(width=16, heads=2), (6,), 20),
    (models.LSTM(hidden=8), DIGITS, None),
    (models.LSTM(hidden=8), SEQUENCE, None),
    (models.LSTM(hidden=8), (6,), 20),
    (models.GRU(hidden=8), SEQUENCE, None),
    (models.VIT(width=16, heads=2), DIGITS, None),
    (models.CNN(norm="batch"), DIGITS, None),
    (models.CNN(norm="layer"), DIGITS, None),
    (models.MLP(hidden=(8,) * 10), VECTOR, None),
    (models.Autoencoder(hidden=(8,), code=2), VECTOR, None),
]


def name_of(case):
    return f"{type(case[0]).__name__}-{case[1]}"


def samples(shape, vocabulary, *count):
    if vocabulary:
        return torch.randint(0, vocabulary, (*count, *shape), generator=stream(1, "x"))
    return torch.rand(*count, *shape, generator=stream(1, "x"))


def test_every_model_is_tried():
    """All but the GPT, which answers for each step: it has tests of its own."""
    assert {type(model) for model, _, _ in CASES} | {models.GPT} == set(models.MODELS)


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_the_generator_decides_alone(case):
    model, shape, vocabulary = case
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = weights(seeded(model, shape, vocabulary=vocabulary))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(one, weights(seeded(model, shape, vocabulary=vocabulary)))
    other = weights(seeded(model, shape, seed=4, vocabulary=vocabulary))
    assert torch.equal(one, other) == isinstance(model, models.Logistic)


@pytest.mark.thorough
@pytest.mark.parametrize("case", [case for case in CASES if case[0].stackable], ids=name_of)
def test_stackable_models_can_be_stacked(case):
    """vmap over the clients' weights gives each client's own gradient, to rounding (relative to the largest entry)."""
    model, shape, vocabulary = case
    clients = [seeded(model, shape, seed=seed, vocabulary=vocabulary) for seed in (1, 2)]
    x, y = samples(shape, vocabulary, 2, 3), torch.tensor([[0, 1, 2], [3, 4, 5]])
    stacked = {
        name: torch.stack([dict(client.named_parameters())[name].detach() for client in clients])
        for name, _ in clients[0].named_parameters()
    }
    assert not list(clients[0].buffers())

    def loss(parameters, x, y):
        return F.cross_entropy(functional_call(clients[0], parameters, (x,)), y)

    together = vmap(grad(loss))(stacked, x, y)
    for index, client in enumerate(clients):
        F.cross_entropy(client(x[index]), y[index]).backward()
        for name, parameter in client.named_parameters():
            scale = parameter.grad.abs().max().clamp_min(1e-6)
            assert (together[name][index] - parameter.grad).abs().max() <= 1e-4 * scale, name


def test_batch_norm_and_lstm_are_not_stackable():
    said = {(type(model).__name__, getattr(model, "norm", None)) for model, *_ in CASES if not model.stackable}
    assert said == {("Resnet18", "batch"), ("CNN", "batch"), ("LSTM", None), ("GRU", None)}


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_descriptions_survive_the_way_through_plain_values(case):
    model = case[0]
    assert msgspec.convert(msgspec.to_builtins(model), type(model)) == model


@pytest.mark.parametrize(
    ("model", "shape", "vocabulary", "words"),
    [
        (models.CNN(), VECTOR, None, "channels, height, width"),
        (models.CNN(), (1, 3, 3), None, "too small"),
        (models.MLP(), (6,), 20, "cannot take tokens"),
        (models.Transformer(patch=5), DIGITS, None, "do not fill"),
        (models.LSTM(), VECTOR, None, "channels, height, width"),
    ],
)
def test_what_a_model_cannot_take_is_said(model, shape, vocabulary, words):
    with pytest.raises(ConfigError, match=words):
        seeded(model, shape, vocabulary=vocabulary)


def small_net():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def test_a_users_own_model():
    digits = load("digits")
    one, two = (models.build(models.Own(small_net), digits, stream(5, "model")) for _ in range(2))
    assert torch.equal(weights(one), weights(two))
    assert one.training
    assert repr(models.Own(small_net)) == f"Own({small_net.__module__}.small_net)"
    with pytest.raises(ConfigError, match=r"must answer \[2, 10\]"):
        models.build(models.Own(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 7))), digits, stream(5, "model"))
    with pytest.raises(ConfigError, match="cannot take samples of digits"):
        models.build(models.Own(lambda: nn.Linear(3, 10)), digits, stream(5, "model"))
    with pytest.raises(ConfigError, match=r"must give a torch\.nn\.Module"):
        models.build(models.Own(lambda: "net"), digits, stream(5, "model"))


def test_trying_a_model_out_leaves_its_statistics():
    data = Arrays(torch.rand(20, 1, 8, 8), torch.arange(20) % 10)
    module = models.build(models.Resnet18(norm="batch"), load(data), stream(5, "model"))
    assert float(module.norm.running_mean.abs().max()) == 0
    assert int(module.norm.num_batches_tracked) == 0


def test_tokens_reach_the_embedding():
    data = load("synthetic")
    assert data.vocabulary is None
    tokens = load(Arrays(torch.randint(0, 9, (50, 4)), torch.arange(50) % 3))
    module = models.build(models.Transformer(width=8, heads=2), tokens, stream(1, "model"))
    assert module.embedding.num_embeddings == tokens.vocabulary <= 9


def test_flops_by_hand():
    """A dense layer: 2·in·out forward, as much for its weights' gradient, and for its input's (but in the first)."""
    mlp = seeded(models.MLP(), VECTOR)
    first, second = 2 * 32 * 64, 2 * 64 * 10
    assert models.flops(mlp, VECTOR) == 2 * first + 3 * second
    steps, features, hidden = 5, 7, 8
    lstm = seeded(models.LSTM(hidden=hidden), SEQUENCE)
    forward = 2 * steps * 4 * hidden * (features + hidden)
    assert 2 * forward <= models.flops(lstm, SEQUENCE) <= 3.2 * forward
    assert holds_for_each(p.grad is None for p in lstm.parameters())


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_flops_are_counted_for_every_model(case):
    model, shape, vocabulary = case
    module = seeded(model, shape, vocabulary=vocabulary)
    kept = {name: value.clone() for name, value in module.state_dict().items()}
    dtype = torch.int64 if vocabulary else torch.float32
    assert models.flops(module, shape, dtype) > 2 * 10
    assert module.training
    assert holds_for_each(torch.equal(kept[name], value) for name, value in module.state_dict().items())
