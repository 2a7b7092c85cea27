# SPDX-License-Identifier: Apache-2.0
"""What hooks on a user's model must survive: odd tensors, compiling, copies, pickles, optimisers, threads."""

import copy
import pickle
import threading
import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data import dataloader as torch_dataloader

from fedvitals.model_hooks import named_members
from fedvitals.monitor.monitor import Monitor
from fedvitals.records import Span
from fedvitals.testing import MemorySink
from fedvitals.time_parts import parts_of
from support.conditions import holds_for_each

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


def watched(**settings):
    sink = MemorySink()
    return sink, Monitor(None, sinks=[sink], detectors=(), machine=False, **settings)


def step(model, call=None, x=X):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    (call or model)(x).sum().backward()
    optimizer.step()


class Ragged(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        return torch.stack([self.layer(row).sum() for row in x.unbind()])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_without_a_size_do_not_stop_the_training():
    """And what could not be told is reported once, not raised."""
    sink, monitor = watched()
    model = Ragged()
    nested = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)])
    with monitor, monitor.round(0, model), monitor.client("c0", model):
        step(model, x=nested)
    assert len(sink.of(Span, "client")) == 1
    assert sink.events("monitor.error")


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["model", "function", "itself", "in place"])
def test_a_model_that_is_compiled_as_one_graph_stays_one(way):
    _, monitor = watched(strict=True)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    calls = {"model": compiled, "function": torch.compile(lambda x: model(x) * 2, fullgraph=True, backend="eager")}
    if way == "in place":
        model.compile(fullgraph=True, backend="eager")
    with monitor, monitor.round(0), monitor.client("c0", compiled if way == "itself" else model):
        step(model, calls.get(way))
    torch._dynamo.reset()


def test_a_client_may_pickle_and_copy_its_model_and_the_copy_is_free_of_us():
    sink, monitor = watched(strict=True)
    model = nn.Linear(4, 2)
    with monitor, monitor.round(0), monitor.client("c0", model):
        stored, average = pickle.loads(pickle.dumps(model)), copy.deepcopy(model)
        before = len(sink.records)
        assert torch.equal(stored(X), average(X))
        assert len(sink.records) == before
        step(model)
    for one in (stored, average):
        assert holds_for_each(hook.__module__ == "fedvitals.model_hooks" for hook in one._forward_pre_hooks.values())
        assert torch.equal(one(X), copy.deepcopy(one)(X))


class Wrapper(torch.Tensor):
    """A tensor around another one, without a storage of its own."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape)

    @classmethod
    def __torch_dispatch__(cls, call, types, args=(), kwargs=None):
        raise NotImplementedError(call)


def test_what_memory_cannot_be_told_of_costs_no_client():
    sink, monitor = watched(strict=True)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.state[model.weight]["odd"] = Wrapper(torch.ones(3))
    with monitor, monitor.round(0), monitor.client("c0", model, optimizer):
        model(X).sum().backward()
        optimizer.step()
    assert len(sink.of(Span, "client")) == 1
    assert sink.value("memory.model", node="c0") == 40


def test_two_optimisers_of_one_model_are_told_apart_from_what_lies_between():
    sink, monitor = watched(strict=True)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    optimizers = [torch.optim.SGD(part.parameters(), 0.1) for part in model]
    with monitor, monitor.round(0), monitor.client("c0", model):
        for _ in range(6):
            time.sleep(0.05)
            model(X).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
    (span,) = sink.of(Span, "client")
    parts = parts_of(span)
    assert parts["optimizer"] < parts["data"]
    assert sum(parts.values()) <= span.seconds * (1 + 1e-6)


def test_a_loader_within_a_loader_is_waited_for_once():
    inner = DataLoader(TensorDataset(X), 4)

    class Outer(torch.utils.data.IterableDataset):
        def __iter__(self):
            for (x,) in inner:
                time.sleep(0.02)
                yield x

    sink, monitor = watched(strict=True)
    model = nn.Linear(4, 2)
    with monitor, monitor.round(0), monitor.client("c0", model):
        for x in DataLoader(Outer(), batch_size=None):
            step(model, x=x)
    (span,) = sink.of(Span, "client")
    assert 0.04 <= parts_of(span)["data"] < span.seconds
    assert sum(parts_of(span).values()) <= span.seconds * (1 + 1e-6)


def test_a_client_that_trains_on_another_thread_than_it_was_opened_on():
    sink, monitor = watched(strict=True)
    model = nn.Linear(4, 2)

    def train():
        for _ in range(3):
            time.sleep(0.02)
            step(model)

    list(DataLoader(TensorDataset(X), 4))
    with monitor, monitor.round(0):
        monitor.host.client_begin("c0", model)
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
        monitor.host.client_end("c0")
    (span,) = sink.of(Span, "client")
    assert min(parts_of(span).values()) >= 0
    assert 0.04 < sum(parts_of(span).values()) <= span.seconds * (1 + 1e-6)


def test_a_loader_that_somebody_else_replaces_meanwhile_stays_replaced():
    iterator, original = torch_dataloader._BaseDataLoaderIter, torch_dataloader._BaseDataLoaderIter.__next__
    _, monitor = watched(strict=True)
    try:
        with monitor, monitor.round(0), monitor.client("c0", nn.Linear(4, 2)):
            ours = iterator.__next__

            def theirs(self):
                return ours(self)

            iterator.__next__ = theirs
        assert iterator.__next__ is theirs
    finally:
        iterator.__next__ = original


def test_wrong_times_are_told_and_a_closed_run_stays_closed():
    sink, monitor = watched()
    with monitor, monitor.round(0):
        monitor.host.spent("aggregate", None)
        monitor.host.spent("aggregate", "soon")
    assert len(sink.events("monitor.error")) == 2
    unopened = Monitor(None, sinks=[sink], detectors=())
    unopened.close()
    before = threading.active_count()
    unopened.host.admit(list(sink.of(Span)))
    assert threading.active_count() == before


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit.script
def test_named_members_are_those_that_torch_names():
    """In its order, shared ones once, also of modules that stand in two places or name their tensors themselves."""

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
            self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(3, 3), self.norm), self.first])
            self.tied = nn.Linear(3, 3)
            self.tied.weight = self.first.weight
            self.empty = None
            self.register_buffer("unsaved", torch.zeros(2), persistent=False)
            self.scale = nn.Parameter(torch.ones(1))

    class Renamed(Shared):
        def named_parameters(self, *_, **__):
            yield "scale", self.scale

    for model in (Shared(), Renamed(), torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))):
        for kind in ("_parameters", "_buffers"):
            named = [*getattr(model, f"named{kind}")()]
            own = named_members(model, kind)
            assert [name for name, _ in own] == [name for name, _ in named]
            assert all(a is b or torch.equal(a, b) for (_, a), (_, b) in zip(own, named, strict=True))
