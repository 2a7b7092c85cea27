# SPDX-License-Identifier: Apache-2.0
"""A look at single operators: of the chosen steps alone, ranked, and without a trace in the training."""

import copy

import pytest
import torch
from torch.nn import functional

import fedvitals as fv
from fedvitals.errors import ConfigError
from fedvitals.resources.capture import MOST_STEPS, Capture
from fedvitals.testing import MemorySink
from support.conditions import holds_for_each
from support.hooks import hooks_left
from support.models import make, make_data

STEPS = 6


def train(monitor=None, fail_at=None):
    torch.manual_seed(5)
    model = make("cnn", 5)
    x, y = make_data(24)
    for number in range(3):
        if monitor:
            monitor.host.round_begin(number, model)
        for name in ("a", "b"):
            local = copy.deepcopy(model)
            optimizer = torch.optim.Adam(local.parameters(), 1e-2)
            if monitor:
                monitor.host.client_begin(name, local)
            for _ in range(STEPS if fail_at is None else fail_at):
                optimizer.zero_grad()
                functional.cross_entropy(local(x), y).backward()
                optimizer.step()
                with torch.no_grad():
                    local(x)  # an evaluation in between is no step
            if monitor:
                monitor.host.client_end(name, None if fail_at is None else ValueError("stopped"))
                assert not hooks_left(local, optimizer)
        model.load_state_dict(local.state_dict())
        if monitor:
            monitor.host.round_end(number, model)
    return [*model.state_dict().values(), torch.get_rng_state()]


def recorded(sink):
    return [r for r in sink.records if getattr(r, "name", "") == "profile.operators"]


@pytest.mark.thorough
def test_the_chosen_steps_are_recorded_and_the_weights_are_the_same():
    bare = train()
    sink = MemorySink()
    capture = Capture(rounds=(1,), nodes=("b",), steps=(2, 4))
    with fv.Monitor(None, sinks=[sink], capture=capture, strict=True) as monitor:
        watched = train(monitor)
    assert holds_for_each(torch.equal(a, b) for a, b in zip(bare, watched, strict=True))
    (event,) = recorded(sink)
    assert (event.where.round, event.where.node) == (1, "b")
    assert event.data["steps"] == [2, 4]
    operators = {row["name"]: row for row in event.data["operators"]}
    assert len(operators) <= 20
    assert operators["aten::convolution_backward"]["calls"] == 2  # one layer, two steps
    assert any(row["bytes"] > 0 for row in operators.values())
    times = [row["seconds"] + row["device_seconds"] for row in event.data["operators"]]
    assert times == sorted(times, reverse=True)


@pytest.mark.thorough
def test_a_client_that_ends_early_has_what_there_was():
    sink = MemorySink()
    with fv.Monitor(None, sinks=[sink], capture=Capture(rounds=(0,), steps=(1, 5)), strict=True) as monitor:
        train(monitor, fail_at=3)
    assert [(event.where.node, event.data["steps"]) for event in recorded(sink)] == [("a", [1, 3]), ("b", [1, 3])]


@pytest.mark.thorough
def test_nothing_is_told_of_steps_that_never_came_and_a_second_profiler_is_no_harm():
    sink = MemorySink()
    with fv.Monitor(None, sinks=[sink], capture=Capture(rounds=(0,), steps=(50, 55)), strict=True) as monitor:
        train(monitor)
    assert not recorded(sink)
    bare = train()
    again = fv.Monitor(None, sinks=[sink], capture=Capture(rounds=(0,), steps=(1, 3)))
    with again as monitor, torch.profiler.profile():
        watched = train(monitor)
    assert holds_for_each(torch.equal(a, b) for a, b in zip(bare, watched, strict=True))


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"steps": (3, 3)}, "1 to 20 steps"),
        ({"steps": (0, MOST_STEPS + 1)}, "1 to 20 steps"),
        ({"steps": (-1, 2)}, "from 0 on"),
        ({"rounds": ()}, "at least one"),
        ({"rounds": tuple(range(50))}, "at most 20"),
        ({"rounds": ("1",)}, "from 0 on"),
    ],
)
def test_a_whole_run_is_refused(wrong, why):
    with pytest.raises(ConfigError, match=why):
        Capture(**wrong)
