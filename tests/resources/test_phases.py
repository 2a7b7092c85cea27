# SPDX-License-Identifier: Apache-2.0
"""What a client's time went to: phases that are planted by sleeping, and training that knows nothing of it."""

import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - its usual name
from torch.utils.data import DataLoader, Dataset
from torch.utils.data import dataloader as torch_dataloader

from fedvitals.monitor.monitor import Monitor
from fedvitals.records import Span
from fedvitals.resources import phases
from fedvitals.testing import MemorySink
from fedvitals.time_parts import parts_of

NAP = 0.08  # far longer than the work of so small a model, and than a busy machine keeps it from a processor


class Slow(nn.Module):
    def __init__(self, forward=0.0, backward=0.0):
        super().__init__()
        self.layer, self.seconds = nn.Linear(4, 3), forward
        if backward:
            self.layer.weight.register_hook(lambda gradient: time.sleep(backward))

    def forward(self, x):
        time.sleep(self.seconds)
        return self.layer(x)


class Sleepy(torch.optim.SGD):
    def step(self, closure=None):
        time.sleep(NAP)
        return super().step(closure)


class Images(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        time.sleep(NAP / 4)
        return torch.ones(4), 0


def batches(_model):
    for _ in range(3):
        time.sleep(NAP)
        yield torch.ones(4, 4), torch.zeros(4, dtype=torch.long)


def loader(_model):
    return DataLoader(Images(), 4)


def train(model, source, make=torch.optim.SGD, accumulate=1, between=0.0):
    optimizer = make(model.parameters(), 0.1)
    for step, (x, y) in enumerate(source, 1):
        F.cross_entropy(model(x), y).backward()
        if step % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(between)


def parts_when(training, model, **settings):
    sink = MemorySink()
    monitor = Monitor(None, sinks=[sink], detectors=(), strict=True, **settings)
    with monitor, monitor.round(0, model), monitor.client("c0", model):
        training(model)
    (span,) = sink.of(Span, "client")
    return span, parts_of(span), sink


fast = [(torch.ones(4, 4), torch.zeros(4, dtype=torch.long))] * 2


@pytest.mark.parametrize(
    ("part", "model", "source", "make"),
    [
        ("forward", Slow(forward=NAP), lambda _: fast, torch.optim.SGD),
        ("backward", Slow(backward=NAP), lambda _: fast, torch.optim.SGD),
        ("optimizer", Slow(), lambda _: fast, Sleepy),
        ("data", Slow(), batches, torch.optim.SGD),
        ("data", Slow(), loader, torch.optim.SGD),
    ],
)
def test_a_planted_phase_is_the_longest_and_all_parts_fit_into_the_whole(part, model, source, make):
    span, parts, sink = parts_when(lambda m: train(m, source(m), make), model)
    own = {name: seconds for name, seconds in parts.items() if name != "measure"}  # much, around so little training
    assert max(own, key=own.get) == part
    assert 1.9 * NAP <= parts[part] <= sum(parts.values()) <= span.seconds * (1 + 1e-6)
    assert (span.attributes["batch"], span.attributes["folded"]) == (4, True)
    if make is not Sleepy:  # which torch takes for two optimisers, and so for twice the steps
        assert span.attributes["samples"] in (8, 12)
    (throughput,) = [m.value for m in sink.metrics() if m.name == "throughput.samples"]
    assert 0 < throughput < span.attributes["samples"] / (2 * NAP)


def test_clients_take_turns_where_looking_would_cost_too_much_and_are_then_divided_as_before(monkeypatch):
    monkeypatch.setattr(phases, "LOOKING", 1.0)  # seconds: more than so little training takes on any machine
    sink, model = MemorySink(), Slow()
    with Monitor(None, sinks=[sink], detectors=(), strict=True) as monitor:
        for number in range(6):
            with monitor.round(number, model), monitor.client("c0", model):
                train(model, fast)
        known = monitor._run.clients._clocks._known["c0"]
    assert known.every > 1
    last = sink.of(Span, "client")[-1]
    parts = parts_of(last)
    assert {"forward", "backward", "optimizer", "measure"} <= parts.keys()
    assert sum(parts.values()) <= last.seconds * (1 + 1e-6)
    assert parts["forward"] / parts["backward"] == pytest.approx(
        known.shares["forward"] / known.shares["backward"], rel=0.02
    )
    assert last.attributes["samples"] == 8


@pytest.mark.thorough
def test_long_steps_are_looked_into_in_every_round():
    sink, model = MemorySink(), Slow(forward=NAP)
    with Monitor(None, sinks=[sink], detectors=(), strict=True) as monitor:
        for number in range(3):
            model.seconds = NAP / 4 * (number + 1)
            with monitor.round(number, model), monitor.client("c0", model):
                train(model, fast * 4)
    seen = [(parts_of(span)["forward"], span.seconds) for span in sink.of(Span, "client")]
    assert len(seen) == 3
    for number, (forward, whole) in enumerate(seen, 1):  # a busy machine may take longer than it is asked to
        assert 0.8 * number * 8 * NAP / 4 <= forward <= whole


@pytest.mark.thorough
def test_what_a_loop_does_besides_is_not_taken_for_loading_where_a_loader_is_known():
    span, parts, _ = parts_when(lambda m: train(m, loader(m), between=6 * NAP), Slow())
    assert parts["data"] < 6 * NAP
    assert span.seconds - sum(parts.values()) > 5 * NAP  # unaccounted for: it is the user's own


def test_loading_between_the_batches_of_one_step_is_loading():
    _, parts, _ = parts_when(lambda m: train(m, loader(m), accumulate=2), Slow())
    assert parts["data"] >= 2 * NAP > parts["backward"]


def test_clients_that_take_turns_on_one_thread_wait_for_each_other():
    sink, models = MemorySink(), {"c0": Slow(), "c1": Slow(forward=NAP)}
    with Monitor(None, sinks=[sink], detectors=(), strict=True) as monitor, monitor.round(0):
        optimizers = {node: torch.optim.SGD(model.parameters(), 0.1) for node, model in models.items()}
        for node, model in models.items():
            monitor.host.client_begin(node, model)
        for _ in range(3):
            for node, model in models.items():
                model(torch.ones(2, 4)).sum().backward()
                optimizers[node].step()
        for node in models:
            monitor.host.client_end(node)
    parts = {span.where.node: parts_of(span) for span in sink.of(Span, "client")}
    assert parts["c0"]["wait"] >= 2 * NAP
    assert parts["c1"]["forward"] >= 3 * NAP
    assert parts["c0"].get("data", 0) < NAP


def test_a_closure_and_a_model_that_is_never_called_as_a_whole():
    def closure(model):
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

        def again():
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4)).square().sum()
            loss.backward()
            return loss

        optimizer.step(again)

    span, parts, _ = parts_when(closure, Slow(forward=NAP))
    assert parts["forward"] >= NAP
    assert sum(parts.values()) <= span.seconds

    def inner(model):
        time.sleep(NAP)
        model.layer(torch.ones(2, 4)).sum().backward()
        torch.optim.SGD(model.parameters(), 0.1).step()

    _, parts, _ = parts_when(inner, Slow())
    assert parts["compute"] >= NAP


def test_nothing_is_left_behind_and_nothing_is_told_when_profiling_is_off():
    original = torch_dataloader._BaseDataLoaderIter.__next__
    model = Slow()
    parts_when(lambda m: train(m, loader(m)), model)
    assert torch_dataloader._BaseDataLoaderIter.__next__ is original
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    span, parts, sink = parts_when(lambda m: train(m, fast), Slow(), profile=False)
    assert (parts, span.attributes) == ({}, {"failed": False})
    assert not sink.of(Span, "server")


def test_a_loader_that_fails_fails_as_without_us():
    class Broken(Images):
        def __getitem__(self, index):
            raise OSError("no such image")

    with pytest.raises(OSError, match="no such image"):
        parts_when(lambda m: train(m, DataLoader(Broken(), 4)), Slow())
    assert not hasattr(torch_dataloader._BaseDataLoaderIter.__next__, "original")
