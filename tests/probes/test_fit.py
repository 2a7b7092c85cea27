# SPDX-License-Identifier: Apache-2.0
"""Fit against plain evaluation; what may be given as data; and that nobody notices that it was read."""

import logging
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from fedvitals.probes.allowance import Turn
from fedvitals.probes.fit import FEWEST, MOST, Fit, confusion
from fedvitals.probes.samples import read, size, spread_indices
from fedvitals.probes.view import View, evaluation_without_gradients
from support.conditions import holds_for_each
from support.models import MODELS, close, make, make_data, train, watched


class Augmented(Dataset):
    """Draws from all three global random streams at each read."""

    def __init__(self, data=None):
        self.x, self.y = data or make_data()

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        noise = torch.randn(12) + np.random.rand() + random.random()  # noqa: NPY002
        return self.x[i] + 0.01 * noise, self.y[i]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(*make_data(), strict=True))


def streams():
    return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())  # noqa: NPY002


def fit_of(model, data, loss=functional.cross_entropy, **settings):
    """One client-round with little training; returns the sink and what it was trained on."""
    monitor, sink = watched("deep", **settings)
    with monitor, monitor.round(0), monitor.client("c0", model, data=data, loss=loss):
        train(model, torch.optim.SGD(model.parameters(), 0.1), make_data(), 3)
    return sink


@pytest.mark.parametrize("name", MODELS)
def test_values_of_the_received_and_the_trained_model(name):
    """Loss and accuracy before and after on the same samples, and the loss's ninth decile, in evaluation mode."""
    x, y = make_data(48)
    before = make(name).eval()
    model = make(name)
    sink = fit_of(model, (x, y))
    with torch.no_grad():
        old, new = before(x), model.eval()(x)
    losses = functional.cross_entropy(old, y, reduction="none").double()
    wanted = {
        "fit.samples": 48,
        "samples": 48,
        "fit.loss_before": losses.mean(),
        "fit.loss_p90": losses.sort().values[43],
        "fit.loss_after": functional.cross_entropy(new, y),
        "fit.accuracy_before": (old.argmax(1) == y).double().mean(),
        "fit.accuracy_after": (new.argmax(1) == y).double().mean(),
        "loss": functional.cross_entropy(new, y),
    }
    for metric, value in wanted.items():
        close(sink.value(metric, node="c0"), float(value), 1e-4)


def test_confusion_against_a_matrix():
    """How far errors gather in one pair of classes, by the formula, from a whole confusion matrix."""
    stream = torch.Generator().manual_seed(0)
    for _ in range(20):
        y, guess = torch.randint(0, 4, (2, 30), generator=stream)
        matrix = np.zeros((4, 4))
        for a, b in zip(y.tolist(), guess.tolist(), strict=True):
            matrix[a, b] += 1
        off = np.maximum(matrix - np.diag(np.diag(matrix)) - 1, 0)
        shares = off / (matrix.sum(1) + 2)[:, None]
        found, pair = confusion(y.tolist(), guess.tolist())
        assert found == pytest.approx(shares.max())
        assert pair == np.unravel_index(shares.argmax(), shares.shape)
    assert confusion([0, 1, 2], [0, 1, 2]) == (0, None)
    assert confusion([0, 1, 2], [0, 2, 1]) == (0, None)


def test_confused_pair_and_confident_errors():
    """A model that takes every 2 for a 0, and is sure of it; with its labels mended, nobody is confused."""
    x, y = torch.eye(3).repeat(8, 1), torch.tensor([0, 1, 2] * 8)
    model = nn.Linear(3, 3, bias=False)
    with torch.no_grad():
        model.weight.copy_(5 * torch.tensor([[1.0, 0, 1], [0, 1, 0], [0, 0, 0]]))
        model.weight[:, 0] *= 0.1  # right, and in doubt
    found, _ = Fit(None).before(View(model, data=(x, y), loss=functional.cross_entropy))
    assert (found["fit.confused_label"], found["fit.confused_guess"]) == (2, 0)
    assert found["fit.confusion"] == pytest.approx(7 / 10)
    assert found["fit.confident_wrong"] == pytest.approx(1 / 3)
    found, _ = Fit(None).before(View(model, data=(x, y.where(y < 2, 0)), loss=functional.cross_entropy))
    assert not {"fit.confused_label", "fit.confused_guess"} & found.keys()
    assert found["fit.confident_wrong"] == 0
    found, _ = Fit(None).before(View(model, data=(0.1 * x, (y + 1) % 3), loss=functional.cross_entropy))
    assert found["fit.accuracy_before"] < 0.5
    assert found["fit.confident_wrong"] == 0  # wrong, and in doubt


@pytest.mark.thorough
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("loss", ["module", "function", "lambda", "keywords", "smoothed"])
def test_losses_of_any_shape(name, loss):
    """An nn loss, a function, a lambda, one that swallows keywords, one with settings: the same per-sample mean."""
    kinds = {
        "module": nn.CrossEntropyLoss(),
        "function": functional.cross_entropy,
        "lambda": lambda output, y: functional.cross_entropy(output, y),  # noqa: PLW0108
        "keywords": lambda output, y, **_: functional.cross_entropy(output, y),
        "smoothed": nn.CrossEntropyLoss(label_smoothing=0.1),
    }
    x, y = make_data(48)
    sink = fit_of(make(name), (x, y), kinds[loss])
    with torch.no_grad():
        wanted = kinds[loss](make(name).eval()(x), y)
    close(sink.value("fit.loss_before", node="c0"), float(wanted), 1e-4)
    assert sink.value("fit.loss_p90", node="c0") > float(wanted)
    assert getattr(kinds["module"], "reduction") == "mean"  # noqa: B009


def test_regression_has_no_accuracy():
    """Targets that are not classes give losses only."""
    model = nn.Linear(12, 1)
    x, _ = make_data()
    monitor, sink = watched("deep")
    y = x.sum(1, keepdim=True)
    with monitor, monitor.round(0), monitor.client("c0", model, data=(x, y), loss=nn.MSELoss()):
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    assert sink.value("fit.loss_after", node="c0") < sink.value("fit.loss_before", node="c0")
    assert not {"fit.accuracy_before", "fit.confusion", "label.entropy"} & sink.names()
    assert not sink.events("labels")


def test_data_of_every_kind():
    """A pair, a data set, a loader, a list of batches: the same samples give the same numbers."""
    x, y = make_data(48)
    pairs = list(zip(x.split(10), y.split(10), strict=True))
    kinds = [(x, y), [x, y], TensorDataset(x, y), DataLoader(TensorDataset(x, y), 7, shuffle=True), pairs, tuple(pairs)]
    for data in kinds:
        assert size(data) == 48
        found = read(data, [0, 9, 10, 47])
        assert torch.equal(found[0], x[[0, 9, 10, 47]])
        assert torch.equal(found[1], y[[0, 9, 10, 47]])
    values = {fit_of(make("mlp"), data).value("fit.loss_before", node="c0") for data in kinds}
    assert max(values) - min(values) < 1e-6


def test_reading_leaves_every_random_stream_alone():
    """A shuffling loader's generator and torch's, numpy's and Python's streams stand where they stood."""
    generator = torch.Generator().manual_seed(5)
    loader = DataLoader(Augmented(), 8, shuffle=True, generator=generator)
    for data in (loader, Augmented()):
        view = View(make("mlp"), data=data, loss=functional.cross_entropy)
        before = generator.get_state().tolist(), streams()
        found, batch = Fit(None).before(view)
        Fit(None).after(view, batch)
        assert found["fit.samples"] == 48
        assert (generator.get_state().tolist(), streams()) == before


@pytest.mark.parametrize(
    "data", [iter([make_data()]), (pair for pair in [make_data()]), Stream(), DataLoader(Stream())]
)
def test_what_can_only_be_iterated_is_refused(data, caplog):
    """A one-shot iterator or a stream is not touched: no fit, one Event, and training goes on.

    An iterator is a mistake, which the log warns of; a stream is not.
    """
    monitor, sink = watched(strict=False)
    with monitor, caplog.at_level(logging.WARNING):
        for number in range(2):
            model = make("mlp")
            with monitor.round(number), monitor.client("c0", model, data=data, loss=functional.cross_entropy):
                train(model, torch.optim.SGD(model.parameters(), 0.1), make_data(), 2)
    assert not any(name.startswith("fit.") for name in sink.names())
    assert sink.value("steps", round=1, node="c0") == 2
    mistake = not isinstance(data, Stream | DataLoader)
    assert len(sink.events("monitor.error")) == len([r for r in caplog.records if "fit" in r.message]) == mistake
    assert len(sink.events("probe.abstains")) == (not mistake)


def test_modes_come_back_as_they_were():
    """A model in mixed modes (a frozen batch norm) has them again; its buffers are untouched."""
    model = make("cnn")
    model.train()
    model[2].eval()
    buffers = [b.clone() for b in model.buffers()]
    view = View(model, data=make_data(), loss=functional.cross_entropy)
    Fit(None).before(view)
    assert [m.training for m in model] == [True, True, False, True, True, True, True]
    assert holds_for_each(torch.equal(a, b) for a, b in zip(model.buffers(), buffers, strict=True))


def test_a_models_own_train_method_is_not_called():
    """Some models do more on `train()` and `eval()` (merging low-rank weights, say): that would change training."""

    class Merging(nn.Linear):
        def train(self, mode=True):
            if not mode:
                self.weight.data *= 2
            return super().train(mode)

    model = nn.Sequential(Merging(12, 3), nn.Dropout())
    weight = model[0].weight.clone()
    with evaluation_without_gradients(model):
        assert not any(m.training for m in model.modules())
    assert holds_for_each(m.training for m in model.modules())
    assert torch.equal(model[0].weight, weight)


def test_a_model_that_works_on_its_input_in_place():
    """What the first pass does to the samples is not seen by the second."""
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(12, 3))
    x, y = make_data()
    kept = x.clone()
    view = View(model, data=(x, y), loss=functional.cross_entropy)
    found, batch = Fit(None).before(view)
    assert Fit(None).after(view, batch)["fit.loss_after"] == found["fit.loss_before"]
    assert torch.equal(batch[0], kept)
    assert torch.equal(x, kept)


@pytest.mark.parametrize(("privacy", "allowed"), [(1, False), (2, False), (3, True)])
def test_labels_only_where_privacy_allows(privacy, allowed):
    """The label histogram and its entropy leave a client from level 3 on, once, not each round."""
    monitor, sink = watched(privacy=privacy)
    x, y = make_data()
    with monitor:
        for number in range(2):
            with monitor.round(number), monitor.client("c0", make("mlp"), data=(x, y), loss=functional.cross_entropy):
                pass
    events = sink.events("labels")
    assert len(events) == len(sink.metrics("label.entropy")) == allowed
    if allowed:
        shares = np.bincount(y.numpy()) / len(y)
        assert events[0].data["histogram"] == {str(i): int((y == i).sum()) for i in range(3)}
        close(sink.value("label.entropy"), -(shares * np.log(shares)).sum())


def test_budget_decides_how_many_samples():
    """After short rounds the fewest, in some rounds none; after long ones 64."""
    view = View(make("mlp"), node="c0", data=make_data(100), loss=functional.cross_entropy)

    def counts(steps):
        measured = (Fit(1.0).before(view, Turn(number, steps))[0] for number in range(16))
        return [metrics.get("fit.samples", 0) for metrics in measured]

    assert {*counts(10)} == {0, FEWEST}
    assert {*counts(10_000)} == {MOST}
    assert {*counts(100)} == {FEWEST}


def test_other_samples_each_round():
    """Over the rounds the few samples walk through all of them, evenly spread each time."""
    seen = set()
    for number in range(40):
        places = spread_indices(100, 8, number * 8)
        assert len(set(places)) == 8
        seen.update(places)
    assert len(seen) == 100
    assert spread_indices(3, 8, 0) == [0, 1, 2]
    assert spread_indices(0, 8, 5) == []


class TwoHeads(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.classes, self.size = kind, nn.Linear(12, 3), nn.Linear(12, 1)

    def forward(self, x):
        heads = {"classes": self.classes(x), "size": self.size(x)}
        return heads if self.kind is dict else tuple(heads.values())


@pytest.mark.parametrize("kind", [tuple, dict])
def test_a_model_with_two_heads_is_evaluated_sample_by_sample(kind):
    """The loss is called with one sample's part of each head; an accuracy is not known."""

    def loss(outputs, y):
        classes, heights = outputs.values() if kind is dict else outputs
        return functional.cross_entropy(classes, y) + heights.square().mean()

    model, (x, y) = TwoHeads(kind), make_data()
    view = View(model, node="c0", round_index=0, data=(x, y), loss=loss)
    found, _ = Fit(None).before(view)
    with torch.no_grad():
        close(found["fit.loss_before"], float(loss(model(x), y)))
    assert "fit.accuracy_before" not in found
