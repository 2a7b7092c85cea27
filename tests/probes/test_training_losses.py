# SPDX-License-Identifier: Apache-2.0
"""Training losses by class against the labels themselves, and that nobody notices how they are measured."""

import copy
import gc
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import fedvitals as fv
from fedvitals.probes import training_losses
from fedvitals.probes.class_losses import last_quota, pass_masks
from fedvitals.probes.presets import preset
from support.models import MODELS, batches, close, flat, make, make_data
from support.trained_losses import LOSSES, Twin, check, plain, trained


@pytest.mark.parametrize("name", MODELS)
def test_labels_are_exact(name):
    """Without data and loss; all steps count, and there is no last pass."""
    sink, twin = trained(make(name), plain())
    check(sink, twin)
    assert "train.loss_last" not in sink.names()
    assert sink.value("batch.size", node="c0") == 8


@pytest.mark.parametrize("kind", ["pair", "loader"])
def test_each_sample_counts_once(kind):
    """Of five passes the first goes into the table, and the end of the last into `train.loss_last`."""
    data = make_data(44)
    loader = DataLoader(TensorDataset(*data), 8)
    passed = data if kind == "pair" else loader

    def run(model, twin):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(5):
            for x, y in loader:
                optimizer.zero_grad()
                logits = model(x)
                twin.see(logits, y)
                functional.cross_entropy(logits, y).backward()
                optimizer.step()

    sink, twin = trained(make("mlp"), run, passed)
    check(sink, twin, 44)
    z, y = torch.cat(twin.logits)[-last_quota(44) :], torch.cat(twin.labels)[-last_quota(44) :]
    close(sink.value("train.loss_last", node="c0"), float(functional.cross_entropy(z, y)), 1e-5)
    assert sink.layers("training.classes", node="c0").matrix[:, 0].sum() == 44


def test_a_pass_that_ends_in_the_midst_of_a_batch():
    """What is of the end of the last pass is kept although its batch began before."""
    x, y = make_data(29)
    order = torch.cat([torch.randperm(29, generator=torch.Generator().manual_seed(i)) for i in range(4)])

    def run(model, twin):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for rows in order[:112].split(16):
            optimizer.zero_grad()
            logits = model(x[rows])
            twin.see(logits, y[rows])
            functional.cross_entropy(logits, y[rows]).backward()
            optimizer.step()

    sink, twin = trained(make("mlp"), run, (x, y))
    check(sink, twin, 29)
    _, last = pass_masks(np.arange(112), 29, last_quota(29), 112)
    z, labels = torch.cat(twin.logits)[last], torch.cat(twin.labels)[last]
    close(sink.value("train.loss_last", node="c0"), float(functional.cross_entropy(z, labels)), 1e-5)
    assert len(labels) == last_quota(29) == 16


def test_dropped_samples_are_no_part_of_a_pass():
    data = make_data(44)
    loader = DataLoader(TensorDataset(*data), 8, drop_last=True)
    sink, twin = trained(make("mlp"), plain(data=(data[0][:40], data[1][:40]), steps=12), loader)
    check(sink, twin, 40)


def focal(logs):
    return (-((1 - logs.exp()) ** 2) * logs).mean()


CROSS_ENTROPIES = {
    "sum": lambda z, y: functional.cross_entropy(z, y, reduction="sum"),
    "class weights": lambda z, y: functional.cross_entropy(z, y, torch.tensor([0.2, 1.0, 5.0])),
    "scaled": lambda z, y: 65536 * functional.cross_entropy(z, y),
    "small": lambda z, y: functional.cross_entropy(z, y) / 1e4,
    "log-probabilities": lambda z, y: functional.nll_loss(z.log_softmax(1), y),
    "focal": lambda z, y: focal(z.log_softmax(1).gather(1, y[:, None])),
}


@pytest.mark.parametrize("kind", CROSS_ENTROPIES)
def test_cross_entropies_of_all_kinds(kind):
    sink, twin = trained(make("mlp"), plain(CROSS_ENTROPIES[kind]))
    check(sink, twin)


def test_a_model_that_ends_in_log_probabilities():
    for loss in (functional.nll_loss, functional.cross_entropy):
        model = nn.Sequential(make("mlp"), nn.LogSoftmax(1))
        sink, twin = trained(model, plain(loss))
        check(sink, twin)


def test_logits_by_name():
    """As Hugging Face's models answer, called with inputs by name; the loss may be computed inside of the model."""

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = make("mlp")

        def forward(self, *, inputs, labels):
            logits = self.net(inputs)
            return {"loss": functional.cross_entropy(logits, labels), "logits": logits}

    def run(model, twin):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x, y in batches(make_data(), 6):
            optimizer.zero_grad()
            outputs = model(inputs=x, labels=y)
            twin.see(outputs["logits"], y)
            outputs["loss"].backward()
            optimizer.step()

    sink, twin = trained(Named(), run)
    check(sink, twin)
    assert sink.value("batch.size", node="c0") == 8


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("kind", ["logit", "flat logit", "weighted", "sigmoid"])
def test_one_output_for_two_classes(kind, batch):
    """The logit of the second class, or its probability; with a weight of positive samples, too."""
    x, y = make_data(64)
    y = y.clamp(max=1)
    weight = torch.tensor(3.0) if kind == "weighted" else None
    ends = {"flat logit": nn.Flatten(0), "sigmoid": nn.Sigmoid()}
    model = nn.Sequential(nn.Linear(12, 1), ends.get(kind, nn.Identity()))

    def run(model, twin):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for places in torch.arange(64).split(batch):
            optimizer.zero_grad()
            outputs = model(x[places])
            logits = (outputs.logit() if kind == "sigmoid" else outputs).reshape(-1, 1)
            twin.see(torch.cat([torch.zeros_like(logits), logits], 1), y[places])
            targets = y[places].reshape(outputs.shape).float()
            if kind == "sigmoid":
                functional.binary_cross_entropy(outputs, targets).backward()
            else:
                functional.binary_cross_entropy_with_logits(outputs, targets, pos_weight=weight).backward()
            optimizer.step()

    sink, twin = trained(model, run, (x, y))
    check(sink, twin, 64, classes=2, tolerance=1e-4)
    assert sink.value("batch.size", node="c0") == batch


def test_pixels_have_their_classes_along_the_second_axis():
    """As torch's cross-entropy takes them; one row per pixel."""
    stream = torch.Generator().manual_seed(0)
    images, labels = torch.randn(12, 2, 4, 5, generator=stream), torch.randint(0, 3, (12, 4, 5), generator=stream)

    def run(model, twin):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x, y in zip(images.split(4), labels.split(4), strict=True):
            optimizer.zero_grad()
            logits = model(x)
            twin.see(logits.movedim(1, -1), y)
            functional.cross_entropy(logits, y).backward()
            optimizer.step()

    sink, twin = trained(nn.Conv2d(2, 3, 1), run, (images, labels))
    check(sink, twin, 240)


@pytest.mark.parametrize("answer", [lambda z: (z, z.tanh()), lambda z: {"scores": z}, lambda z: (z.mean(), z)])
def test_logits_among_other_outputs(answer):
    class Several(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = make("mlp")

        def forward(self, x):
            return answer(self.net(x))

    def run(model, twin):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x, y in batches(make_data(), 6):
            optimizer.zero_grad()
            outputs = model(x)
            parts = outputs.values() if isinstance(outputs, dict) else outputs
            logits = next(part for part in parts if part.dim() > 1)
            twin.see(logits, y)
            functional.cross_entropy(logits, y).backward()
            optimizer.step()

    sink, twin = trained(Several(), run)
    check(sink, twin)


def by_sam(model, x, y, see):
    """Sharpness-aware: a step aside, and the gradient of there."""
    logits = model(x)
    see(logits, y)
    functional.cross_entropy(logits, y).backward()
    aside = [0.5 * p.grad for p in model.parameters()]
    torch._foreach_add_([p.data for p in model.parameters()], aside)
    model.zero_grad()
    functional.cross_entropy(model(x), y).backward()
    torch._foreach_sub_([p.data for p in model.parameters()], aside)


def by_two_passes(model, x, y, see):
    """As R-Drop does."""
    logits = [model(x), model(x)]
    see(logits[0], y)
    sum(functional.cross_entropy(z, y) for z in logits).backward()


def by_three_steps(model, x, y, see):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number in range(3):
        logits = model(x)
        if not number:
            see(logits, y)
        optimizer.zero_grad()
        functional.cross_entropy(logits, y).backward()
        optimizer.step()


@pytest.mark.parametrize("look", [by_sam, by_two_passes, by_three_steps])
def test_a_batch_that_is_looked_at_again_counts_once(look):
    """Each sample of the first pass counts as the training found it first, and the passes keep their ends."""
    data = make_data(44)

    def run(model, twin):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(5):
            for x, y in DataLoader(TensorDataset(*data), 8):
                optimizer.zero_grad()
                look(model, x, y, twin.see)
                optimizer.step()

    sink, twin = trained(make("mlp"), run, data)
    check(sink, twin, 44)
    z, y = torch.cat(twin.logits)[-last_quota(44) :], torch.cat(twin.labels)[-last_quota(44) :]
    close(sink.value("train.loss_last", node="c0"), float(functional.cross_entropy(z, y)), 1e-5)


def test_a_closure_that_is_called_again_counts_once():
    data = make_data(48)

    def run(model, twin):
        optimizer = torch.optim.LBFGS(model.parameters(), 0.5, max_iter=4)
        for x, y in zip(data[0].split(8), data[1].split(8), strict=True):
            seen = []

            def closure(x=x, y=y, seen=seen):
                optimizer.zero_grad()
                logits = model(x)
                if not seen:
                    seen.append(twin.see(logits, y))
                loss = functional.cross_entropy(logits, y)
                loss.backward()
                return loss

            optimizer.step(closure)

    sink, twin = trained(make("mlp"), run, data)
    check(sink, twin, 48)


def test_passes_over_all_data_at_once_are_passes():
    data = make_data(32)

    def run(model, twin):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(4):
            optimizer.zero_grad()
            logits = model(data[0])
            twin.see(logits, data[1])
            functional.cross_entropy(logits, data[1]).backward()
            optimizer.step()

    sink, twin = trained(make("mlp"), run, data)
    check(sink, twin, 32)
    z, y = torch.cat(twin.logits)[-16:], torch.cat(twin.labels)[-16:]
    close(sink.value("train.loss_last", node="c0"), float(functional.cross_entropy(z, y)), 1e-5)


class Tagger(nn.Module):
    def __init__(self, vocabulary=9):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, 8), nn.Linear(8, vocabulary)

    def forward(self, tokens):
        return self.head(self.embed(tokens))


@pytest.mark.parametrize("flattened", [False, True])
def test_tokens_and_padding(flattened):
    """One row per token; padding, which has no gradient, does not count; a pass is counted in sequences."""
    stream = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 9, (12, 5), generator=stream)
    labels = tokens.roll(-1, 1).masked_fill(torch.rand(12, 5, generator=stream) < 0.3, -100)
    model = Tagger()
    if flattened:
        model = nn.Sequential(model, nn.Flatten(0, 1))

    def run(model, twin):
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        for _ in range(3):
            for x, y in zip(tokens.split(4), labels.split(4), strict=True):
                optimizer.zero_grad()
                logits = model(x)
                twin.see(logits, y)
                functional.cross_entropy(logits.reshape(-1, 9), y.flatten()).backward()
                optimizer.step()

    sink, twin = trained(model, run, (tokens, labels))
    check(sink, twin, 60, classes=9)
    assert sink.value("batch.size", node="c0") == 4


def test_many_classes_have_metrics_and_no_table():
    x, y = make_data(64)
    data = (x, y * 50)
    sink, twin = trained(nn.Linear(12, 150), plain(data=data))
    _, loss, labels, guesses = twin.table(classes=1)
    close(sink.value("train.loss_first", node="c0"), loss, 1e-5)
    close(sink.value("train.accuracy", node="c0"), np.mean(np.array(labels) == guesses))
    assert "train.confusion" not in sink.names()
    assert not [r for r in sink.records if getattr(r, "family", "") == "training.classes"]


def test_large_outputs_are_looked_at_in_part(monkeypatch):
    """Evenly spread rows of an output that is too large; and what waits is evaluated before there is too much."""
    monkeypatch.setattr(training_losses, "MOST_NUMBERS", 12)  # four rows of three
    monkeypatch.setattr(training_losses, "MOST_WAITING", 24)
    sink, twin = trained(make("mlp"), plain(steps=12), make_data(48))
    twin.logits, twin.labels = [z[::2] for z in twin.logits], [y[::2] for y in twin.labels]
    check(sink, twin, 24)
    assert sink.value("train.loss_last", node="c0") > 0


@pytest.mark.parametrize("limit", [24, 100, 1000])
def test_it_does_not_matter_when_outputs_are_evaluated(monkeypatch, limit):
    wanted, twin = trained(make("mlp"), plain(steps=20), make_data(48))
    monkeypatch.setattr(training_losses, "MOST_WAITING", limit)
    sink, twin = trained(make("mlp"), plain(steps=20), make_data(48))
    check(sink, twin, 48)
    close(sink.value("train.loss_last", node="c0"), wanted.value("train.loss_last", node="c0"), 1e-6)


def test_accumulated_gradients_and_several_forward_passes_before_one_backward():
    def run(model, twin):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x, y in batches(make_data(), 6):
            optimizer.zero_grad()
            losses = []
            for own_x, own_y in zip(x.chunk(2), y.chunk(2), strict=True):
                logits = model(own_x)
                twin.see(logits, own_y)
                losses.append(functional.cross_entropy(logits, own_y) / 2)
            sum(losses).backward()
            optimizer.step()

    sink, twin = trained(make("mlp"), run, make_data(48))
    check(sink, twin, 48)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    """Under autocast, with a GradScaler where it is needed; losses are those of the rounded logits."""

    def run(model, twin):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)
        for x, y in batches(make_data(), 6):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype):
                logits = model(x)
                loss = functional.cross_entropy(logits, y)
            assert logits.dtype is dtype
            twin.see(logits, y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    sink, twin = trained(make("mlp"), run)
    check(sink, twin, tolerance=1e-4)


def test_evaluation_inside_the_scope_is_ignored():
    """In evaluation mode, without gradients, or without a backward pass."""
    x, _ = make_data()

    def run(model, twin):
        plain()(model, twin)
        model.eval()(x)
        model.train()
        with torch.no_grad():
            model(x)
        model(x)
        plain(steps=3)(model, twin)
        for _ in range(100):
            model(x)

    sink, twin = trained(make("mlp"), run)
    check(sink, twin)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_models(reentrant):
    def run(model, twin):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x, y in batches(make_data(), 6):
            optimizer.zero_grad()
            logits = checkpoint(model, x.requires_grad_(reentrant), use_reentrant=reentrant)
            twin.see(logits, y)
            functional.cross_entropy(logits, y).backward()
            optimizer.step()

    sink, twin = trained(make("mlp"), run)
    check(sink, twin)


@pytest.mark.parametrize("probes", ["standard", "deep", LOSSES])
def test_nothing_stays_behind(probes):
    """No hook, no output, and weights to the last bit."""
    model, twin, plainly = make("cnn"), Twin(), make("cnn")
    refs = []

    def run(model, twin):
        def loss(z, y):
            refs.append(weakref.ref(z))
            return functional.cross_entropy(z, y)

        plain(loss, steps=8)(model, twin)

    trained(model, run, make_data(48), probes)
    plain(steps=8)(plainly, twin)
    assert torch.equal(flat(model), flat(plainly))
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    gc.collect()
    assert not [ref for ref in refs if ref() is not None]
    copy.deepcopy(model)


def test_outputs_are_kept_while_the_training_lasts_and_no_longer():
    """At most as many as wait; a forward pass whose graph the user keeps is not held by us."""
    model, (x, y) = make("mlp"), make_data(48)
    losses = training_losses.TrainingLosses(fv.probes.View(model, data=(x, y)), lambda error: pytest.fail(str(error)))
    optimizer, kept = torch.optim.SGD(model.parameters(), 0.1), []
    for own_x, own_y in batches((x, y), 60):
        kept.append(model(own_x).sum())
        functional.cross_entropy(model(own_x), own_y).backward()
        losses.step()
        optimizer.step()
    assert len(losses._awaited) == 0
    measured = losses.stop(60)
    assert measured.results(measured.numbers.numpy())[1]["training.classes"][:, 0].sum() == 48
    assert not losses._waiting
    assert not model._forward_hooks


@pytest.mark.parametrize("place", ["batch_size", "first_tensor", "rows_of", "judge_gradients"])
def test_our_own_errors_do_not_reach_the_training(monkeypatch, place):
    def fail(*_arguments, **_named):
        raise RuntimeError("ours")

    wanted, model = make("mlp"), make("mlp")
    plain()(wanted, Twin())
    monkeypatch.setattr(training_losses, place, fail)
    sink, _ = trained(model, plain(), strict=False)
    assert sink.events("monitor.error")
    assert torch.equal(flat(model), flat(wanted))
    assert not [name for name in sink.names() if name.startswith("train.")]


def test_presets():
    presets = [preset(name) for name in ("light", "standard", "deep")]
    measured = [[own.measures_losses(number) for number in (None, 0, 1, 8)] for own in presets]
    assert measured == [[False] * 4, [True, True, False, True], [True] * 4]
    sink, _ = trained(make("mlp"), plain(), probes="light")
    assert not [name for name in sink.names() if name.startswith(("train.", "batch."))]
