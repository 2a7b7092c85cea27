# SPDX-License-Identifier: Apache-2.0
"""One model without a federation: windows of steps are told as rounds."""

import pytest
import torch
from torch.nn import functional

import fedvitals as fv
from fedvitals.errors import ConfigError
from fedvitals.records import Run
from fedvitals.scope import current
from fedvitals.testing import MemorySink
from support.conditions import holds_for_each
from support.hooks import hooks_left
from support.models import MODELS, Catcher, close, make, make_data, train


def watch(model, optimizer=None, **settings):
    sink = MemorySink()
    return fv.watch(model, optimizer, None, sinks=[sink], strict=True, **settings), sink


@pytest.mark.parametrize("name", MODELS)
def test_windows_become_rounds(name):
    """25 steps in windows of 10 are three rounds of the node «model», each with its own gradients."""
    model = make(name)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watching, sink = watch(model, optimizer, steps=10, data=make_data(), loss=functional.cross_entropy)
    caught = Catcher(model)
    with watching:
        train(model, optimizer, make_data(), 25, caught)
    assert [m.value for m in sink.metrics("steps", node="model")] == [10, 10, 5]
    assert [m.where.round for m in sink.metrics("time.round")] == [0, 1, 2]
    norms = caught.norms()
    for number in range(3):
        close(sink.value("gradient.norm", round=number, node="model"), norms[10 * number : 10 * number + 10].mean())
    assert sink.metrics("fit.loss_before", round=0)
    assert sink.of(Run)[-1].finished
    assert not hooks_left(model, optimizer)
    assert current.get() is None


def test_optimiser_is_found():
    """Without an optimiser the model's own is found, and those of other models are not counted."""
    model, other = make("mlp"), make("mlp", 1)
    watching, sink = watch(model, steps=3)
    with watching:
        train(other, torch.optim.SGD(other.parameters(), 0.1), make_data(), 4)
        train(model, torch.optim.SGD(model.parameters(), 0.1), make_data(), 5)
    assert [m.value for m in sink.metrics("steps")] == [3, 2]


def test_log_and_exceptions():
    """What is logged belongs to the open window; an exception is told and goes on."""
    model = make("mlp")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watching, sink = watch(model, optimizer, steps=2)
    with pytest.raises(ZeroDivisionError), watching as monitor:  # noqa: PT012
        train(model, optimizer, make_data(), 3)
        monitor.log(loss=0.25)
        raise ZeroDivisionError
    assert sink.value("loss", node="model", round=1) == 0.25
    assert [e.where.round for e in sink.events("client.failed")] == [1]
    assert not hooks_left(model, optimizer)


def test_steps_must_be_at_least_one():
    """A wrong number is refused at once, with words."""
    with pytest.raises(ConfigError, match="at least 1"), fv.watch(make("mlp"), steps=0):
        pass


def test_training_is_not_changed():
    """Weights are bit for bit the same with and without."""
    weights = []
    for on in (False, True):
        model = make("transformer")
        optimizer = torch.optim.Adam(model.parameters())
        watching, _ = watch(model, optimizer, steps=4, probes="deep", data=make_data(), loss=functional.cross_entropy)
        torch.manual_seed(1)
        if on:
            with watching:
                train(model, optimizer, make_data(), 10)
        else:
            train(model, optimizer, make_data(), 10)
        weights.append([p.detach().clone() for p in model.parameters()])
    assert holds_for_each(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_no_empty_round_after_the_last_full_window():
    """Steps that fill their windows exactly leave no round in which nothing happened."""
    model = make("mlp")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watching, sink = watch(model, optimizer, steps=4)
    with watching:
        train(model, optimizer, make_data(), 8)
    assert [m.where.round for m in sink.metrics("time.round")] == [0, 1]
    assert not sink.metrics("update.zero")
    assert not hooks_left(model, optimizer)
    assert current.get() is None
