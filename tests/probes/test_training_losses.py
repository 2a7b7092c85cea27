# SPDX-License-Identifier: Apache-2.0
"""Training losses by class against the labels themselves, what the probe abstains from, and that nobody notices it."""

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
from fedvitals.probes.class_losses import ClassSums, ClassTotals, judge_gradients, judge_labels, last_quota, pass_masks
from fedvitals.probes.fit import confusion
from fedvitals.probes.presets import Preset, preset
from fedvitals.stats import CLASS_COLUMNS, derive
from fedvitals.testing import MemorySink
from support.models import CLASSES, MODELS, batches, close, flat, make, make_data, train, watched

LOSSES = Preset("losses", (), fit_percent=0, training_losses=True)


class Twin:
    """What a client trained on, step by step: logits and labels."""

    def __init__(self):
        self.logits, self.labels = [], []

    def see(self, logits, y):
        self.logits.append(logits.detach().double().flatten(0, -2).clone())
        self.labels.append(y.flatten().clone())

    def table(self, samples=None, classes=CLASSES):
        z, y = torch.cat(self.logits)[:samples], torch.cat(self.labels)[:samples]
        z, y = z[y >= 0], y[y >= 0]
        losses, guesses = functional.cross_entropy(z, y, reduction="none"), z.argmax(1)
        rows = []
        for label in range(classes):
            own = losses[y == label]
            right = int(((y == label) & (guesses == label)).sum())
            rows.append([len(own), float(own.sum()), float((own**2).sum()), right, int((guesses == label).sum())])
        return np.array(rows), float(losses.mean()), y.tolist(), guesses.tolist()


def trained(model, step, data=None, probes=LOSSES, rounds=1, **settings):
    """The sink of a client whose steps are those of `step(model, twin)`, and the twin."""
    monitor, sink = watched(probes, **settings)
    twin = Twin()
    with monitor:
        for number in range(rounds):
            with monitor.round(number), monitor.client("c0", model, data=data):
                step(model, twin)
    return sink, twin


def plain(loss=functional.cross_entropy, steps=6, data=None, optimizer=lambda p: torch.optim.SGD(p, 0.1)):
    """Steps on batches of eight by a loss."""

    def run(model, twin):
        own = optimizer(model.parameters())
        for x, y in batches(data or make_data(), steps):
            own.zero_grad()
            logits = model(x)
            twin.see(logits, y)
            loss(logits, y).backward()
            own.step()

    return run


def check(sink, twin, samples=None, tolerance=1e-5, classes=CLASSES):
    """The table, the mean loss, the accuracy and the confused pair are those of the labels."""
    table, loss, labels, guesses = twin.table(samples, classes)
    found = sink.layers("training.classes", node="c0")
    np.testing.assert_allclose(found.matrix, table, rtol=tolerance, atol=tolerance)
    assert sink.table(found.table).names == tuple(map(str, range(classes)))
    close(sink.value("train.loss_first", node="c0"), loss, tolerance)
    close(sink.value("train.accuracy", node="c0"), np.mean(np.array(labels) == guesses))
    share, pair = confusion(labels, guesses)
    close(sink.value("train.confusion", node="c0"), share)
    if pair is not None:
        assert (sink.value("train.confused_label", node="c0"), sink.value("train.confused_guess", node="c0")) == pair
    assert not sink.events("probe.abstains")


def check_abstains(sink, *words):
    """One event says why, and nothing is told."""
    (event,) = sink.events("probe.abstains")
    assert (event.level, event.data["doing"]) == ("info", "training losses")
    for word in words:
        assert word in event.message
    assert not [name for name in sink.names() if name.startswith("train.")]
    assert not [r for r in sink.records if getattr(r, "family", "") == "training.classes"]
    assert not sink.events("monitor.error")


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


def test_dropped_samples_are_no_part_of_a_pass():
    data = make_data(44)
    loader = DataLoader(TensorDataset(*data), 8, drop_last=True)
    sink, twin = trained(make("mlp"), plain(data=(data[0][:40], data[1][:40]), steps=12), loader)
    check(sink, twin, 40)


def test_which_samples_are_of_which_pass():
    places = np.arange(100)
    first, last = pass_masks(places, 40, last_quota(40), 100)
    assert np.flatnonzero(first).tolist() == [*range(40)]
    assert np.flatnonzero(last).tolist() == [*range(64, 80)]  # of the last 40, those at the end of a pass
    _, last = pass_masks(places, 40, last_quota(40), 80)
    assert np.flatnonzero(last).tolist() == [*range(64, 80)]
    assert not pass_masks(places[:20], 40, last_quota(40), 20)[1].any()


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


def mixed(z, y):
    return 0.7 * functional.cross_entropy(z, y) + 0.3 * functional.cross_entropy(z, y.flip(0))


def one_hot(z, y):
    return functional.one_hot(y, z.shape[1]).to(z.dtype)


OTHERS = {
    "label smoothing": lambda z, y: functional.cross_entropy(z, y, label_smoothing=0.1),
    "mixup": mixed,
    "soft labels": lambda z, y: functional.cross_entropy(z, (one_hot(z, y) * 4).softmax(1)),
    "squared error": lambda z, y: functional.mse_loss(z, one_hot(z, y)),
    "several labels": lambda z, y: functional.binary_cross_entropy_with_logits(z, one_hot(z, y)),
    "hinge": functional.multi_margin_loss,
    "temperature": lambda z, y: functional.cross_entropy(z / 3, y),
    "penalty": lambda z, y: functional.cross_entropy(z, y) + 0.1 * z.square().mean(),
    "nothing": lambda z, y: 0 * z.sum() + z.square().mean(),
}


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
    check_abstains(sink, "(8, 1)" if outputs == 1 else "regression")


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
    check_abstains(sink, word)


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


def test_a_model_that_is_sure_and_one_that_is_lost():
    """Rounding leaves nothing of the label's own entry where the model is sure; what is not finite is left out."""
    logits = torch.tensor([[90.0, 0, 0], [0, 40, 0], [0, 0, 17.5], [30, 0, 29], [torch.nan, 0, 0], [0, torch.inf, 0]])
    y = torch.tensor([0, 1, 2, 2, 0, 1])
    rows = logits.clone().requires_grad_()
    functional.cross_entropy(rows, y).backward()
    judged = judge_gradients(logits, rows.grad)
    assert judged.counted.tolist() == [True] * 4 + [False] * 2
    assert judged.labels[:4].tolist() == [0, 1, 2, 2]
    assert not judged.odd.any()
    wanted = functional.cross_entropy(logits[:4].double(), y[:4], reduction="none")
    np.testing.assert_allclose(judged.losses[:4], wanted, atol=1e-6)


def test_labels_and_gradients_tell_the_same():
    stream = torch.Generator().manual_seed(0)
    for scale in (0.1, 1.0, 10.0, 100.0):
        logits, y = scale * torch.randn(200, 7, generator=stream), torch.randint(0, 7, (200,), generator=stream)
        rows = logits.clone().requires_grad_()
        functional.cross_entropy(rows, y).backward()
        sums = []
        for judged in (judge_gradients(logits, rows.grad), judge_labels(logits, y)):
            assert judged.counted.all()
            assert judged.labels.tolist() == y.tolist()
            totals = ClassTotals(7, logits.device)
            totals.add_first(judged)
            sums.append(ClassSums(totals, totals.numbers.numpy()).table)
        np.testing.assert_allclose(sums[0], sums[1], rtol=1e-6)


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


def forward_only(model):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in batches(make_data(), 3):
        optimizer.zero_grad()
        functional.cross_entropy(model.forward(x), y).backward()
        optimizer.step()


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
    assert measured.results(measured.numbers.numpy())[1][:, 0].sum() == 48
    assert not losses._waiting
    assert not model._forward_hooks


@pytest.mark.parametrize("place", ["_batch_size", "_rows", "judge_gradients"])
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


def test_presets():
    assert [preset(name).training_losses for name in ("light", "standard", "deep")] == [False, True, True]
    sink, _ = trained(make("mlp"), plain(), probes="light")
    assert not [name for name in sink.names() if name.startswith(("train.", "batch."))]


# -- from there to whoever reads it -----------------------------------------------------------------------------------


def federation(monitor, through_worker=False, rounds=2):
    for number in range(rounds):
        with monitor.round(number):
            for seed in range(3):
                model, observer = make("mlp"), monitor.host.for_worker() if through_worker else monitor
                with observer.client(f"c{seed}", model, data=make_data(seed=seed)):
                    train(model, torch.optim.SGD(model.parameters(), 0.1), make_data(seed=seed), 12)
                if through_worker:
                    monitor.host.absorb(observer.payload())


def test_workers_and_the_store_tell_the_same(tmp_path):
    """Directly, through a worker's payload, from memory and from the file; and merged over the round."""
    direct, sink = watched("standard")
    with direct:
        federation(direct)
    worker, away = watched("standard")
    with worker:
        federation(worker, through_worker=True)
    with fv.Monitor(tmp_path / "runs.db", strict=True, detectors=[]) as monitor:
        federation(monitor)
        run = monitor.run.id
    with fv.store.open_reader(tmp_path / "runs.db") as reader:
        history = reader.history(run)
        assert history.layers("training.classes") == ("0", "1", "2")
        for number in range(2):
            nodes, columns = history.across("training.classes", CLASS_COLUMNS, number)
            assert [node for node in nodes if node != "server"] == ["c0", "c1", "c2"]
            for node, matrix in zip(nodes, columns, strict=True):
                wanted = sink.layers("training.classes", node=node, round=number).matrix
                np.testing.assert_allclose(matrix, wanted, rtol=1e-6)
                np.testing.assert_allclose(
                    away.layers("training.classes", node=node, round=number).matrix, wanted, 1e-6
                )
            whole = sink.layers("training.classes", node=None, round=number).matrix
            np.testing.assert_allclose(whole, columns.sum(0), rtol=1e-5)
    table = sink.layers("training.classes", node="c0", round=0).matrix
    np.testing.assert_allclose(derive("training.classes", table, "loss_mean"), table[:, 1] / table[:, 0])
    np.testing.assert_allclose(derive("training.classes", table, "accuracy"), table[:, 3] / table[:, 0])
    assert (derive("training.classes", table, "loss_std") > 0).all()


@pytest.mark.parametrize("privacy", [1, 2, 3])
def test_privacy_levels(privacy):
    """The table and the confused pair need level 3, the means level 2; a sum over a cohort passes at level 1."""
    sink = MemorySink()
    with fv.Monitor(None, sinks=[sink], privacy=privacy, cohort=3, strict=True) as monitor:
        federation(monitor)
    families = {r.where.node for r in sink.records if getattr(r, "family", "") == "training.classes"}
    assert families == ({None, "c0", "c1", "c2"} if privacy == 3 else {None})
    assert bool(sink.metrics("train.loss_first", node="c0")) == (privacy >= 2)
    assert bool(sink.metrics("optimizer.learning_rate", node="c0")) == (privacy >= 2)
    assert bool(sink.metrics("train.confused_label", node="c0")) == (privacy >= 3)


def test_settings_of_the_optimiser_are_those_of_the_first_step():
    model = make("mlp")
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def run(model, _twin):
        for x, y in batches(make_data(), 3):
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            schedule.step()

    for probes in ("light", "standard"):
        optimizer.param_groups[0]["lr"] = 0.1
        sink, _ = trained(model, run, probes=probes)
        names = ("learning_rate", "momentum", "weight_decay")
        assert [sink.value(f"optimizer.{name}", node="c0") for name in names] == [0.1, 0.9, 0.01]
    sink, _ = trained(model, plain(optimizer=lambda p: torch.optim.Adam(p, torch.tensor(0.25))))
    assert sink.value("optimizer.learning_rate", node="c0") == 0.25
    assert sink.value("optimizer.momentum", node="c0") == pytest.approx(0.9)
