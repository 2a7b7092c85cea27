# SPDX-License-Identifier: Apache-2.0
"""Clipping: the statistics are of what the optimiser uses; the norm before is told apart, if there was one."""

import pytest
import torch
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from support.models import MODELS, Catcher, batches, close, make, make_data, train, watched

LIMIT = 0.05


def by_norm(parameters):
    clip_grad_norm_(parameters, LIMIT)


def by_value(parameters):
    clip_grad_value_(parameters, LIMIT / 10)


def by_hand(parameters):
    for p in parameters:
        p.grad.mul_(LIMIT / max(float(p.grad.norm()), LIMIT))


WAYS = {"norm": by_norm, "value": by_value, "hand": by_hand}


@pytest.mark.thorough
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_clipped_values_and_unclipped_norm(name, way):
    """From the second step on (the first raises suspicion) the norm before clipping is known, and is the largest."""
    model = make(name)
    parameters = list(model.parameters())
    monitor, sink = watched("deep")
    clipped, raw = Catcher(model), Catcher(model)

    def clip(step):
        raw()
        WAYS[way](parameters)
        clipped()

    with monitor, monitor.round(0), monitor.client("c0", model):
        train(model, torch.optim.SGD(parameters, 0.1), make_data(), 6, clip)
    for step in range(6):
        close(sink.layers("gradient", node="c0", step=step).matrix, clipped.rows(step))
    close(sink.value("gradient.norm_unclipped", node="c0"), raw.norms()[1:].max())


def test_known_clipping_is_seen_from_the_first_step():
    """Once a run has seen clipping, later client-rounds miss no step."""
    monitor, sink = watched()
    wanted = []
    with monitor:
        for number in range(2):
            model = make("mlp", number)
            parameters, raw = list(model.parameters()), Catcher(model)
            with monitor.round(number), monitor.client("c0", model):
                optimizer = torch.optim.SGD(parameters, 0.1)
                for x, y in batches(make_data(), 3):
                    optimizer.zero_grad()
                    functional.cross_entropy(model(x), y).backward()
                    raw()
                    clip_grad_norm_(parameters, LIMIT)
                    optimizer.step()
            wanted.append(raw.norms())
    close(sink.value("gradient.norm_unclipped", round=0), wanted[0][1:].max())
    close(sink.value("gradient.norm_unclipped", round=1), wanted[1].max())


def test_clipping_in_the_users_own_step_hook():
    """A hook of the user's on the optimiser clips before we look: the clipped value is what is recorded."""
    model = make("mlp")
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, 0.1)
    clipped, raw = Catcher(model), Catcher(model)

    def hook(*_):
        raw()
        clip_grad_norm_(parameters, LIMIT)
        clipped()

    optimizer.register_step_pre_hook(hook)
    monitor, sink = watched("deep")
    with monitor, monitor.round(0), monitor.client("c0", model, optimizer):
        train(model, optimizer, make_data(), 4)
    for step in range(4):
        close(sink.layers("gradient", node="c0", step=step).matrix, clipped.rows(step))
    close(sink.value("gradient.norm_unclipped"), raw.norms()[1:].max())


def test_clipping_of_accumulated_gradients():
    """The norm before clipping is that of the accumulated gradient, not of its last part."""
    model = make("mlp")
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, 0.1)
    monitor, sink = watched()
    raw = Catcher(model)
    with monitor, monitor.round(0), monitor.client("c0", model):
        for i, (x, y) in enumerate(batches(make_data(), 8)):
            functional.cross_entropy(model(x), y).backward()
            if i % 2:
                raw()
                clip_grad_norm_(parameters, LIMIT)
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
    close(sink.value("gradient.norm_unclipped"), raw.norms()[1:].max())


@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulation_is_not_mistaken_for_clipping(set_to_none):
    """Adding up gradients in place raises the same suspicion, and is cleared: nothing is reported, no hook stays."""
    model = make("mlp")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor, sink = watched()
    with monitor, monitor.round(0), monitor.client("c0", model):
        for i, (x, y) in enumerate(batches(make_data(), 12)):
            functional.cross_entropy(model(x), y).backward()
            if i % 2:
                optimizer.step()
                optimizer.zero_grad(set_to_none=set_to_none)
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert not sink.metrics("gradient.norm_unclipped")


def test_clipping_is_seen_when_the_first_parameter_is_unused():
    """In a later round, too, when the model's first parameter takes part in no backward pass."""
    monitor, sink = watched()
    with monitor:
        for number in range(2):
            model = torch.nn.ModuleDict({"unused": torch.nn.Linear(2, 2), "net": make("mlp")})
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            with monitor.round(number), monitor.client("c0", model):
                for x, y in batches(make_data(), 4):
                    optimizer.zero_grad()
                    functional.cross_entropy(model["net"](x), y).backward()
                    clip_grad_norm_(model.parameters(), LIMIT)
                    optimizer.step()
    assert sink.value("gradient.norm_unclipped", round=0) > LIMIT
    assert sink.value("gradient.norm_unclipped", round=1) > LIMIT


def test_clipping_under_a_gradient_scaler():
    """`unscale_`, then clipping: the unclipped norm is that of the true gradients, not of the scaled ones."""
    model = make("mlp")
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024)
    monitor, sink = watched("deep")
    raw, clipped = Catcher(model), Catcher(model)
    with monitor, monitor.round(0), monitor.client("c0", model):
        for x, y in batches(make_data(), 4):
            optimizer.zero_grad()
            scaler.scale(functional.cross_entropy(model(x), y)).backward()
            scaler.unscale_(optimizer)
            raw()
            clip_grad_norm_(parameters, LIMIT)
            clipped()
            scaler.step(optimizer)
            scaler.update()
    close(sink.layers("gradient", node="c0", step=3).matrix, clipped.rows(3))
    close(sink.value("gradient.norm_unclipped"), raw.norms()[1:].max())


def test_scaler_alone_is_not_clipping():
    """Unscaling changes gradients in place, but is no clipping."""
    model = make("mlp")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024)
    monitor, sink = watched()
    with monitor, monitor.round(0), monitor.client("c0", model):
        for x, y in batches(make_data(), 6):
            optimizer.zero_grad()
            scaler.scale(functional.cross_entropy(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
    assert not sink.metrics("gradient.norm_unclipped")
