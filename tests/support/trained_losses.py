# SPDX-License-Identifier: Apache-2.0
"""Clients whose training losses are measured, and a twin that knows their labels."""

import numpy as np
import torch
from torch.nn import functional

from fedvitals.probes.fit import confusion
from fedvitals.probes.presets import Preset
from support.models import CLASSES, batches, close, make_data, watched

LOSSES = Preset("losses", (), fit_percent=0, training_losses=1)


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


def forward_only(model):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in batches(make_data(), 3):
        optimizer.zero_grad()
        functional.cross_entropy(model.forward(x), y).backward()
        optimizer.step()
