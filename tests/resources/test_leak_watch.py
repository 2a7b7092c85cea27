# SPDX-License-Identifier: Apache-2.0
"""Which tensors pile up is told from weak references: nothing is kept alive, changed, or taken from other threads."""

import ast
import gc
import io
import mmap
import threading
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import cross_entropy

import fedvitals as fv
from fedvitals.resources import leaks, seen_tensors
from fedvitals.resources.client_memory import ClientMemory
from fedvitals.resources.seen_tensors import ClientTensors, SeenTensors
from fedvitals.testing import MemorySink
from support.conditions import holds_for_each
from support.hooks import hooks_left
from support.models import make, make_data

SOURCE = Path(fv.__file__).parent
GROWTH = 16 << 20  # bytes a round


def censuses(train, rounds=14, model=lambda: make("mlp"), clients=2, resident=lambda r: (500 << 20) + r * GROWTH):
    """The events of clients that train in a process with this resident memory. `train`: is called with a model."""
    memory, events = ClientMemory(), []
    for number in range(rounds):
        for client in range(clients):
            local = model()
            opened = memory.begin(local, list(local.parameters()), f"c{client}", number)
            train(local)
            memory.end(opened, f"c{client}", number, (), lambda: 0, failed=False)
            assert not hooks_left(local)
            event = memory.grown(number, resident(number))
            events += [] if event is None else [event]
    return events


def loss_of(model):
    x, y = make_data()
    return cross_entropy(model(x), y)


def keep_losses(kept):
    return lambda model: kept.append(loss_of(model))


def keep_freed_losses(kept):
    def train(model):
        kept.append(loss_of(model))
        kept[-1].backward()

    return train


def keep_inputs(kept):
    def train(model):
        kept.append(make_data()[0])
        model(kept[-1])

    return train


def keep_gradients(kept):
    def train(model):
        loss_of(model).backward()
        kept.append(model[0].weight.grad)

    return train


@pytest.mark.parametrize(
    ("keep", "kind", "shape", "graph"),
    [
        (keep_losses, "output", [48, 3], True),
        (keep_freed_losses, "output", [48, 3], True),
        (lambda kept: lambda model: kept.append(model(make_data()[0]).detach().numpy()), "output", [48, 3], False),
        (lambda kept: lambda model: kept.append(model(make_data()[0])[:, :1]), "output", [48, 3], True),
        (keep_inputs, "input", [48, 12], False),
        (lambda kept: lambda model: kept.append(model.state_dict()), "parameter", [10, 12], False),
        (keep_gradients, "gradient", [10, 12], False),
    ],
    ids=["losses", "losses after backward", "arrays of outputs", "views", "inputs", "models", "gradients"],
)
def test_what_the_user_keeps_is_named(keep, kind, shape, graph, monkeypatch):
    monkeypatch.setattr(leaks, "SMALL", 0)  # the tensors of these tests are small
    first, second = censuses(keep([]))
    rows = [row for row in second[1]["groups"] if (row["kind"], row["shape"], row["graph"]) == (kind, shape, graph)]
    assert [(row["more"], row["type"], row["exact"]) for row in rows] == [(12, "float32", True)]
    assert second[1]["groups"][0]["graph"] == graph
    named = (
        f"{'the graphs of 6' if graph else '6'} {kind}s of shape {shape} (float32) from these rounds are still alive"
    )
    assert first[0] == f"Memory grew by 48.0 MiB from round 6 to 9; {named}."


def test_a_graph_is_measured_until_it_is_freed():
    """What a kept loss holds for a backward pass: the hidden layer, 48 x 10 of four bytes, and nothing after one."""
    for keep, held in ((keep_losses, 48 * 10 * 4), (keep_freed_losses, 0)):
        *_, (_, data) = censuses(keep([]))
        assert data["groups"][0]["held_bytes"] == held


def test_growth_outside_of_what_was_seen_is_reported_as_such():
    reports = censuses(lambda model: loss_of(model).backward())
    assert reports
    for words, data in reports:
        assert data["groups"] == []
        assert "the growth is outside of what it sees" in words


def test_what_lives_long_is_no_pile():
    """Clients that keep their model from round to round, a data set in memory, and the outputs of the last round."""
    models, data, last = [make("mlp") for _ in range(2)], make_data()[0], []

    def train(model):
        last.append(model(data[:8]))
        del last[:-2]

    turns = iter(range(1000))
    events = censuses(train, model=lambda: models[next(turns) % 2])
    assert [event["groups"] for _, event in events] == [[], []]


def test_many_forward_passes_are_thinned_and_counted_about(monkeypatch):
    monkeypatch.setattr(leaks, "SMALL", 0)
    kept, x = [], make_data()[0]
    with torch.no_grad():
        events = censuses(lambda model: kept.extend(model(x) for _ in range(100)), clients=1)
    (row,) = events[-1][1]["groups"]
    assert row["more"] == pytest.approx(600, rel=0.25)
    assert not row["exact"]
    assert "about" in events[0][0]


@pytest.mark.thorough
def test_records_are_bounded():
    seen, kept = SeenTensors(), []
    model = nn.Identity()
    for number in range(400):
        sights = ClientTensors(seen, model, (), number)
        kept += [model(torch.ones(1)) for _ in range(seen_tensors.MOST_FORWARDS - 1)]
        sights.close()
        assert len(seen) <= 2 * seen_tensors.MOST_RECORDS
    seen.forget_expired()
    assert len(seen) <= seen_tensors.MOST_RECORDS
    (pile,) = seen.alive(-1, 400).values()
    assert pile.count == pytest.approx(len(kept), rel=0.1)
    kept.clear()
    seen.forget_expired()
    assert len(seen) == 0


def test_nothing_is_kept_alive():
    seen, model = SeenTensors(), make("mlp")
    sights = ClientTensors(seen, model, list(model.parameters()), 1, measure_graph=True)
    x = make_data()[0]
    output = model(x)
    sights.close()
    assert len(seen) > 0
    objects = [weakref.ref(thing) for thing in (model, output, x, model[0].weight)]
    storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in (output, x, model[0].weight)]
    nodes = [weakref.ref(output.grad_fn.metadata[seen_tensors.MARK])]
    del model, output, x
    assert [reference() for reference in objects + nodes] == [None] * 5
    assert holds_for_each(storage.expired() for storage in storages)
    assert seen.alive(0, 1) == {}


@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer"])
def test_training_is_the_same_with_the_hooks(name):
    """The same bits, the same version counters, the same number of saved tensors, and a model that can be saved."""

    def train(watched):
        model = make(name)
        optimizer = torch.optim.Adam(model.parameters())
        x, y = make_data()
        sights = (
            ClientTensors(SeenTensors(), model, list(model.parameters()), 1, measure_graph=True) if watched else None
        )
        saved, trace = [], []
        for _ in range(3):
            with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
                output = model(x)
            cross_entropy(output, y).backward()
            optimizer.step()
            trace.append((output._version, x._version, *(p._version for p in model.parameters())))
        torch.save(model, io.BytesIO())
        if sights is not None:
            sights.close()
        return saved, trace, [p.detach().clone() for p in model.parameters()]

    plain, watched = train(False), train(True)
    assert plain[:2] == watched[:2]
    assert holds_for_each(torch.equal(a, b) for a, b in zip(plain[2], watched[2], strict=True))


def test_a_suspicion_ends_when_the_process_levels_off(monkeypatch):
    """And begins again when it grows again. Models are hooked in between only, and then in fewer and fewer rounds."""
    monkeypatch.setattr(leaks, "SMALL", 0)
    hooked, kept = [], []

    def train(model):
        hooked.append(bool(model._forward_hooks))
        kept.append(model(make_data()[0]))

    def resident(number):
        return 500 + 20 * (number >= 5) + 16 * max(0, number - 39) << 20

    events = censuses(train, 90, clients=1, resident=resident)
    assert [event["since"] for _, event in events] == [41] * 4
    rounds = [number for number, is_hooked in enumerate(hooked) if is_hooked]
    assert rounds[:28] == [*range(7, 28), *range(42, 49)]
    assert [number - 41 for number in rounds[28:]] == [8, 10, 12, 16, 20, 24, 32, 40, 48]
    assert [event["groups"][0]["more"] for _, event in events] == pytest.approx([3, 6, 12, 24], abs=1)


def test_clients_of_whom_nothing_is_seen():
    """As those that train as one batch: there is no model to hook."""
    memory = ClientMemory()
    events = [memory.grown(number, (500 << 20) + number * GROWTH) for number in range(14)]
    words, data = events[10]
    assert (data["groups"], data["rounds_seen"]) == ([], 0)
    assert words.endswith("fedvitals saw no tensors in these rounds.")


class Odd(nn.Module):
    """Answers with something else each time."""

    def __init__(self, answer):
        super().__init__()
        self.answer, self.layer = answer, nn.Linear(12, 3)

    def forward(self, x, **_):
        return self.answer(self.layer(x))


class Own(torch.Tensor):
    """A tensor of the user's own kind."""


@pytest.mark.parametrize(
    "answer",
    [
        lambda y: None,
        lambda y: {"logits": y, "loss": [y.sum(), 3.0]},
        lambda y: y.to_sparse(),
        lambda y: y.as_subclass(Own),
        lambda y: torch.empty(3, device="meta"),
        torch.func.vmap(lambda row: row * 2),
        lambda y: object(),
    ],
    ids=["nothing", "nested", "sparse", "subclass", "meta", "vmap", "object"],
)
def test_odd_outputs_stop_nobody(answer):
    censuses(lambda model: model(make_data()[0], mask=torch.ones(3)), model=lambda: Odd(answer))
    inside = lambda model: torch.func.vmap(model)(make_data()[0])  # noqa: E731 - tensors without a storage
    censuses(inside, model=lambda: Odd(lambda y: y))


def test_clients_on_several_threads():
    memory, failures, kept = ClientMemory(), [], []

    def work(name):
        try:
            for number in range(14):
                model = make("mlp")
                opened = memory.begin(model, list(model.parameters()), name, number)
                kept.extend(loss_of(model) for _ in range(20))
                memory.end(opened, name, number, (), lambda: 0, failed=False)
                memory.grown(number, (500 << 20) + number * GROWTH)
        except Exception as error:  # noqa: BLE001 - told below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(f"c{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@pytest.mark.thorough
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_a_thread_that_builds_tuples_is_left_alone():
    """`tuple(generator)` fails with SystemError if anybody else holds the tuple meanwhile."""
    stop, errors, tuples = threading.Event(), [], []

    def build():
        while not stop.is_set():
            try:
                tuples.append(len(tuple(i for i in range(30000))))
            except SystemError as error:
                errors.append(error)

    thread = threading.Thread(target=build)
    thread.start()
    try:
        for _ in range(3):
            assert len(grow_for_real()) >= 2
    finally:
        stop.set()
        thread.join()
    assert errors == []
    assert tuples


def grow_for_real(rounds=16, growth=6 << 20):
    """The censuses of a monitored process that grows: by pages that the allocator cannot take from elsewhere."""
    sink, pages, kept = MemorySink(), [], []
    with fv.Monitor(None, sinks=[sink], strict=True, machine=False) as monitor:
        for number in range(rounds):
            pages.append(mmap.mmap(-1, growth))
            pages[-1].write(b"x" * growth)
            with monitor.round(number):
                model = make("mlp")
                with monitor.client("c0", model):
                    kept.append(loss_of(model))
    for page in pages:
        page.close()
    return [record for record in sink.records if getattr(record, "name", "") == "memory.census"]


@pytest.mark.thorough
def test_nobody_enumerates_the_heap_and_only_own_processes_collect_garbage():
    """Of `gc`, a user's process sees only its counters being read.

    Commands, the dashboard's server and the lab (as it captures a CUDA graph) own their process.
    """
    used = {}
    for file in sorted(SOURCE.rglob("*.py")):
        for name in names_of_gc(ast.parse(file.read_text(encoding="utf-8"))):
            used.setdefault(name, set()).add(file.relative_to(SOURCE).as_posix())
    assert used.pop("get_stats") == {"resources/leaks.py"}
    users = [path for path in set().union(*used.values()) if not path.startswith("cli/")]
    assert set(users) <= {"kernels/cuda/graphs.py", "dashboard/server.py", "dashboard/warming.py"}
    assert used.keys() <= {"collect", "disable", "enable", "isenabled", "freeze", "set_threshold"}


def names_of_gc(tree):
    """What a module uses of gc, however it imports it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert all(alias.asname is None for alias in node.names if alias.name == "gc")
        if isinstance(node, ast.ImportFrom) and node.module == "gc":
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "gc":
            yield node.attr


def test_looks_start_no_collection():
    before = [stage["collections"] for stage in gc.get_stats()][-1]
    gc.disable()
    try:
        assert censuses(lambda model: loss_of(model).backward())
        assert gc.get_stats()[-1]["collections"] == before
    finally:
        gc.enable()
