# SPDX-License-Identifier: Apache-2.0
"""Batches, outputs and losses of many kinds under the default preset: measured, or left out with the reason; no error.

Monitors here are strict: what is reported as an error would be raised.
"""

import logging
from collections import OrderedDict, namedtuple

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from support.models import make_data, watched

Heads = namedtuple("Heads", ["classes", "numbers"])  # noqa: PYI024 - as a user's model returns it


class Output(OrderedDict):
    """As Hugging Face's: a mapping whose parts are attributes, some of which are no batches."""

    def __getattr__(self, name):
        return self[name]


class Net(nn.Module):
    """Applies `shape` to its logits; takes one input, or two by name."""

    def __init__(self, shape=lambda logits: logits) -> None:
        super().__init__()
        self.body, self.shape = nn.Linear(12, 3), shape

    def forward(self, x, mask=None):
        return self.shape(self.body(x if mask is None else x * mask))


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.cells, self.head = nn.Embedding(9, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, 9)

    def forward(self, tokens):
        return self.head(self.cells(self.table(tokens))[0])


def run(model, data, loss, call):
    """Three rounds of one client; `call(model)` gives the loss of a batch."""
    monitor, sink = watched(machine=False)
    with monitor:
        for number in range(3):
            with monitor.round(number, model), monitor.client("c0", model, data=data, loss=loss):
                optimizer = torch.optim.SGD(model.parameters(), 0.1)
                for _ in range(8):
                    optimizer.zero_grad()
                    call(model).backward()
                    optimizer.step()
    return monitor, sink


X, Y = make_data(64)
MASK = torch.ones(64, 12)
KINDS = {
    "mapping": {"x": X, "labels": Y},
    "mapping of arrays": {"x": X.numpy(), "labels": Y.numpy()},
    "loader of mappings": DataLoader([{"x": x, "label": y} for x, y in zip(X, Y, strict=True)], 8),
    "two inputs by name": {"x": X, "mask": MASK, "target": Y},
    "three tensors": DataLoader([*zip(X, MASK, Y, strict=True)], 8),
    "list of mappings": [{"x": X[i : i + 8], "y": Y[i : i + 8]} for i in range(0, 64, 8)],
    "list of triples": [(X[i : i + 8], MASK[i : i + 8], Y[i : i + 8]) for i in range(0, 64, 8)],
}


@pytest.mark.parametrize("data", KINDS.values(), ids=KINDS)
def test_batches_of_every_kind_are_read(data, caplog):
    model = Net()
    _, sink = run(model, data, functional.cross_entropy, lambda m: functional.cross_entropy(m(X), Y))
    assert sink.value("samples", node="c0", round=0) == 64
    assert sink.metrics("fit.loss_before")
    assert sink.metrics("fit.accuracy_after")
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
    measured, abstained = sink.metrics("scale.gsc"), sink.events("probe.abstains")
    assert bool(measured) != bool(abstained)
    assert all("several inputs" in event.message for event in abstained)


# How many of gradient scale and training losses are measured: neither, the losses, both.
OUTPUTS = {
    "logits in a mapping": (lambda z: {"logits": z}, lambda o, y: functional.cross_entropy(o["logits"], y), 2),
    "logits as an attribute": (
        lambda z: Output(loss=z.sum(), logits=z, hidden=None),
        lambda o, y: functional.cross_entropy(o.logits, y),
        2,
    ),
    "a tuple": (lambda z: (z, z.sum(1)), lambda o, y: functional.cross_entropy(o[0], y), 1),
    "a named tuple": (
        lambda z: Heads(z, z.sum(1)),
        lambda o, y: functional.cross_entropy(o.classes, y) + o.numbers.square().mean(),
        0,
    ),
}


@pytest.mark.parametrize(("shape", "loss", "count"), OUTPUTS.values(), ids=OUTPUTS)
def test_outputs_of_every_kind_are_measured_or_left_out_with_the_reason(shape, loss, count, caplog):
    model = Net(shape)
    monitor, sink = run(model, (X, Y), loss, lambda m: loss(m(X), Y))
    assert sink.metrics("fit.loss_before")
    assert bool(sink.metrics("scale.gsc")) == (count > 1)
    assert len(sink.events("probe.abstains")) == 2 - count
    assert bool(sink.metrics("train.loss_first")) == (count > 0)
    assert not sink.events("monitor.error")
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert "not all was judged" not in str(monitor.findings())


def test_sequence_models_have_fit_and_a_stated_abstention(caplog):
    tokens = torch.arange(64 * 7).view(64, 7) % 9
    inputs, labels = tokens[:, :-1], tokens[:, 1:]

    def loss(output, y):
        return functional.cross_entropy(output.flatten(0, 1), y.flatten())

    _, sink = run(Tagger(), (inputs, labels), loss, lambda m: loss(m(inputs), labels))
    assert sink.metrics("fit.loss_after")
    (event,) = sink.events("probe.abstains")
    assert (event.level, event.data["doing"]) == ("info", "the probe 'scale'")
    assert "(16, 6, 9)" in event.message
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("data", "loss"),
    [
        ((X, Y), lambda _o, _y: 1 / 0),
        ((X, Y), lambda o, y, extra: o),
        ((X, Y), lambda _o, _y: "no number"),
        ((X[:, :3], Y), functional.cross_entropy),
        ({"x": X, "meaning": Y}, functional.cross_entropy),
        ({"pixels": X, "mask": MASK, "y": Y}, functional.cross_entropy),
        (DataLoader(X, 8), functional.cross_entropy),
        (X, functional.cross_entropy),  # inputs without labels
        (X.numpy(), functional.cross_entropy),
    ],
)
def test_what_cannot_be_applied_is_said_once_and_harms_nothing(data, loss, caplog):
    _, sink = run(Net(), data, loss, lambda m: functional.cross_entropy(m(X), Y))
    assert not sink.metrics("fit.loss_before")
    assert sink.value("update.norm", round=2, node="c0") > 0
    events = sink.events("probe.abstains")
    assert len([e for e in events if e.data["doing"] == "fit"]) == 1
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize("probes", ["standard", "deep"])
@pytest.mark.parametrize("data", [(X[:0], Y[:0]), TensorDataset(X[:0], Y[:0]), []])
def test_of_a_client_without_samples_nothing_is_measured_and_nothing_fails(data, probes):
    """As a split by labels may leave one."""
    monitor, sink = watched(machine=False, probes=probes)
    model = Net()
    with monitor:
        for number in range(2):
            with monitor.round(number, model), monitor.client("c0", model, data=data, loss=functional.cross_entropy):
                pass
    assert not sink.events("monitor.error")
    assert not sink.metrics("fit.loss_before")


def test_inputs_and_labels_of_different_lengths_are_named_with_both():
    monitor, sink = watched(machine=False, strict=False)
    wrong = {"data": (X, Y[:3]), "loss": functional.cross_entropy}
    with monitor, monitor.round(0, model := Net()), monitor.client("c0", model, **wrong):
        pass
    assert f"got {len(X)} inputs and 3 labels" in sink.events("monitor.error")[0].message
