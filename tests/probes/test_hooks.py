# SPDX-License-Identifier: Apache-2.0
"""The traps: scalers, closures, several optimisers, optimisers that appear late, threads; and no hook left after."""

import gc
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import optimizer as torch_optimizer

from fedvitals.probes.hooks import StepHooks
from fedvitals.stats import INFS, NANS
from support.hooks import hooks_left
from support.models import MODELS, Catcher, batches, close, make, make_data, train, watched
from support.waiting import PATIENCE

SCALE = 1024.0


def test_hooks_that_are_left_are_seen_and_those_of_torch_are_not():
    assert hooks_left() == []
    hooks = StepHooks([], lambda *_: None)
    assert hooks_left() == ["global 1", "step", "unscale_"]
    hooks.remove()


@pytest.fixture(autouse=True)
def nothing_left():
    """Whatever a test here does, torch is afterwards as it was."""
    original = torch.amp.GradScaler.step, torch.amp.GradScaler.unscale_
    yield
    assert not hooks_left()
    assert (torch.amp.GradScaler.step, torch.amp.GradScaler.unscale_) == original


def scaled_steps(model, optimizer, scaler, steps, poisoned=(), dtype=None):
    """Train under a scaler; returns the true gradients of each step."""
    caught = Catcher(model)
    for step, (x, y) in enumerate(batches(make_data(), steps)):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            loss = functional.cross_entropy(model(x).float(), y)
        scaler.scale(loss).backward()
        if step in poisoned:
            next(model.parameters()).grad.view(-1)[0] = float("inf")
        caught(scale=scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
    return caught


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_scaler_gives_unscaled_values(name, fused, dtype):
    """Under a GradScaler the recorded gradients are the true ones, also where a fused optimiser holds them scaled."""
    model = make(name)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, fused=fused)
    monitor, sink = watched("deep")
    with monitor, monitor.round(0), monitor.client("c0", model):
        caught = scaled_steps(model, optimizer, torch.amp.GradScaler("cpu", init_scale=SCALE), 4, dtype=dtype)
    for step in range(4):
        close(sink.layers("gradient", node="c0", step=step).matrix, caught.rows(step), 1e-4)
    close(sink.value("gradient.norm_max", node="c0"), caught.norms().max(), 1e-4)
    assert not hooks_left(model, optimizer)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("probes", ["standard", "deep"])
def test_step_that_the_scaler_skips_is_seen(fused, probes):
    """The Inf that makes a scaler leave a step out is counted, and so is the step; the others are as usual."""
    model = make("mlp")
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=1000)
    monitor, sink = watched(probes)
    with monitor, monitor.round(0), monitor.client("c0", model):
        caught = scaled_steps(model, optimizer, scaler, 5, poisoned=(0, 3))
    assert sink.value("steps", node="c0") == 5
    assert sink.value("steps.skipped", node="c0") == 2
    assert sink.value("gradient.nonfinite", node="c0") == 2
    found = sink.layers("gradient", node="c0").matrix
    assert found[:, INFS].sum() == 2
    assert found[:, NANS].sum() == 0
    close(found, caught.merged(), 1e-4)


def test_disabled_scaler():
    """A scaler that is switched off changes nothing."""
    model = make("mlp")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor, sink = watched("deep")
    with monitor, monitor.round(0), monitor.client("c0", model):
        caught = scaled_steps(model, optimizer, torch.amp.GradScaler("cpu", enabled=False), 3)
    close(sink.layers("gradient", node="c0").matrix, caught.merged())
    assert not sink.metrics("steps.skipped")


def test_several_optimisers_each_see_their_own_part():
    """Two optimisers of one model: a step is both of their parts, whole and per layer."""
    model = make("mlp")
    first, second = torch.optim.SGD(model[0].parameters(), 0.1), torch.optim.Adam(model[2].parameters(), 1e-2)
    monitor, sink = watched("deep")
    caught = Catcher(model)
    with monitor, monitor.round(0), monitor.client("c0", model, first):
        for x, y in batches(make_data(), 5):
            model.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            caught()
            first.step()
            second.step()
    assert sink.value("steps", node="c0") == 5
    close(sink.layers("gradient", node="c0").matrix, caught.merged())
    close(sink.value("gradient.norm", node="c0"), caught.norms().mean())
    assert sink.layers("gradient.steps", node="c0").get("steps").tolist() == [5] * 4
    assert len(sink.metrics("weight.difference", node="c0")) == 6, "one a step, and one for the client-round"
    assert not hooks_left(model, first, second)


def test_light_counts_steps_of_several_optimisers_once():
    """Two optimisers that step together make one step, also where nothing but the number of steps is wanted."""
    model = make("mlp")
    optimizers = [torch.optim.SGD(model[i].parameters(), 0.1) for i in (0, 2)]
    monitor, sink = watched("light")
    with monitor, monitor.round(0), monitor.client("c0", model):
        for _ in range(3):
            for optimizer in optimizers:
                optimizer.step()
    assert sink.value("steps", node="c0") == 3


def test_lbfgs_is_measured_inside_its_closure():
    """LBFGS has no gradient when its step begins: each evaluation of the closure is measured."""
    model = make("mlp")
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    monitor, sink = watched("deep")
    caught = Catcher(model)
    with monitor, monitor.round(0), monitor.client("c0", model):
        for x, y in batches(make_data(), 2):

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = functional.cross_entropy(model(x), y)
                loss.backward()
                caught()
                return loss

            optimizer.step(closure)
    assert len(caught.steps) > 2
    for step in range(len(caught.steps)):
        close(sink.layers("gradient", node="c0", step=step).matrix, caught.rows(step))
    assert not hooks_left(model, optimizer)


@pytest.mark.parametrize("keyword", [False, True])
def test_closure_of_a_plain_optimiser(keyword):
    """SGD with a closure, given by position or by keyword: once a step, and the loss comes back to the user."""
    model = make("mlp")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor, sink = watched("deep")
    caught, calls = Catcher(model), []
    with monitor, monitor.round(0), monitor.client("c0", model):
        for x, y in batches(make_data(), 4):

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = functional.cross_entropy(model(x), y)
                loss.backward()
                caught()
                calls.append(loss)
                return loss

            loss = optimizer.step(closure=closure) if keyword else optimizer.step(closure)
            assert loss is calls[-1]
    assert sink.value("steps", node="c0") == len(calls) == 4
    close(sink.layers("gradient", node="c0").matrix, caught.merged())


@pytest.mark.parametrize("where", ["inside", "outside", "passed"])
def test_optimiser_is_found(where):
    """Made inside the scope, made before and not passed, or passed: the optimiser is found by its parameters."""
    model = make("mlp")
    outside = torch.optim.SGD(model.parameters(), 0.1)
    monitor, sink = watched()
    caught = Catcher(model)
    with monitor, monitor.round(0), monitor.client("c0", model, outside if where == "passed" else None):
        optimizer = torch.optim.SGD(model.parameters(), 0.1) if where == "inside" else outside
        train(model, optimizer, make_data(), 3, caught)
        other = nn.Linear(2, 2)
        other(torch.ones(1, 2)).sum().backward()
        torch.optim.SGD(other.parameters(), 0.1).step()
    assert sink.value("steps", node="c0") == 3
    close(sink.layers("gradient", node="c0").matrix, caught.merged())


def test_optimiser_that_takes_in_more_parameters():
    """A parameter group that is added in the midst of training (unfreezing) is measured from then on."""
    model = make("mlp")
    optimizer = torch.optim.SGD(model[2].parameters(), 0.1)
    monitor, sink = watched()
    with monitor, monitor.round(0), monitor.client("c0", model):
        train(model, optimizer, make_data(), 2)
        optimizer.add_param_group({"params": list(model[0].parameters())})
        train(model, optimizer, make_data(), 3)
    assert sink.layers("gradient.steps", node="c0").get("steps").tolist() == [3, 3, 5, 5]


def test_schedule_of_the_users_that_fails_leaves_no_hook():
    """When opening a client fails on our side, training goes on unwatched and nothing hangs on to it."""

    def broken(_moment):
        raise RuntimeError("a schedule of the user's own")

    def probe(_view):
        return {}

    probe.prepare = lambda view, charge: dict
    monitor, sink = watched(["standard", (probe, broken)], strict=False)
    model = make("mlp")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with monitor, monitor.round(0), monitor.client("c0", model):
        train(model, optimizer, make_data(), 2)
    assert not hooks_left(model, optimizer)
    assert sink.events("monitor.error")


@pytest.mark.parametrize("probes", ["light", "standard"])
def test_scopes_on_threads_never_break_each_others_steps(probes):
    """A scope that closes while another thread is in the midst of a step: torch walks its hooks undisturbed.

    Torch has one table of hooks for all optimisers, and fails in the user's `step` if it shrinks meanwhile.
    """
    monitor, sink = watched(probes)
    inside, go_on, failures = threading.Event(), threading.Event(), []

    def pause(*_):
        inside.set()
        go_on.wait(PATIENCE)

    def stepping():
        model = make("mlp")
        try:
            with monitor.client("c0", model):
                train(model, torch.optim.SGD(model.parameters(), 0.1), make_data(), 1)
        except RuntimeError as error:
            failures.append(error)

    thread = threading.Thread(target=stepping)
    handle = torch_optimizer.register_optimizer_step_pre_hook(pause)
    with monitor, monitor.round(0), monitor.client("c1", make("mlp")):
        thread.start()
        inside.wait(PATIENCE)
        with monitor.client("c2", make("mlp")):
            pass
        go_on.set()
        thread.join()
    handle.remove()
    assert not failures
    assert sink.value("steps", node="c0") == 1
    assert sink.value("steps", node="c1") == 0


def test_scaler_of_another_thread_is_not_ours():
    """`unscale_` of one client's optimiser says nothing about the gradients of another's."""
    monitor, sink = watched("standard")
    one, other = make("mlp"), make("mlp", 1)
    optimizer = torch.optim.SGD(one.parameters(), 0.1)
    foreign = torch.optim.SGD(other.parameters(), 0.1)
    raw = Catcher(one)
    with monitor, monitor.round(0), monitor.client("c0", one):
        for x, y in batches(make_data(), 3):
            optimizer.zero_grad()
            functional.cross_entropy(one(x), y).backward()
            raw()
            nn.utils.clip_grad_norm_(one.parameters(), 0.01)
            scaled_steps(other, foreign, torch.amp.GradScaler("cpu"), 1)
            optimizer.step()
    close(sink.value("gradient.norm_unclipped", node="c0"), raw.norms()[1:].max())
    assert sink.value("steps", node="c0") == 3


@pytest.mark.thorough
@pytest.mark.parametrize("probes", ["light", "standard", "deep"])
def test_models_and_optimisers_die_with_their_scope_and_not_with_the_garbage_collector(probes):
    """No cycle of ours holds them: a round of large models would otherwise wait in memory for a collection."""
    monitor, _ = watched(probes)
    left = []
    gc.collect()
    gc.disable()
    try:
        with monitor:
            for number in range(2):
                with monitor.round(number, make("mlp")):
                    model = make("mlp")
                    optimizer = torch.optim.SGD(model.parameters(), 0.1)
                    with monitor.client("c0", model, optimizer, data=make_data(), loss=functional.cross_entropy):
                        train(model, optimizer, make_data(), 3)
                    left += [weakref.ref(model), weakref.ref(optimizer), weakref.ref(model[0].weight.grad)]
                del model, optimizer
            assert [reference() for reference in left] == [None] * 6
    finally:
        gc.enable()
