# SPDX-License-Identifier: Apache-2.0
"""Where the bytes of a training are: seen against every storage that torch makes; and nothing that it changes."""

import copy
import mmap

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import fedvitals as fv
from fedvitals.resources.memory import heap_bytes, kernel_kills, limit_bytes, peak_bytes, resident_bytes
from fedvitals.resources.tensors import Activations, saved_bytes, shares, storage_bytes
from fedvitals.testing import MemorySink
from fedvitals_studies.bench.memory import LiveStorages, seen_and_known, torch_transformer
from fedvitals_studies.bench.workloads import paper_cnn
from support.conditions import holds_for_each
from support.hooks import hooks_left
from support.models import make, make_data

BACKWARD = torch.autograd.backward


@pytest.fixture(autouse=True)
def nothing_left_in_torch():
    yield
    assert torch.autograd.backward is BACKWARD


def small_resnet():
    """Residual blocks with batch norm, whose buffers and in-place activations are what trips a count."""

    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
                nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
            )  # fmt: skip

        def forward(self, x):
            return functional.relu(x + self.body(x), inplace=True)

    layers = nn.Conv2d(3, 16, 3, padding=1), *(Block(16) for _ in range(3)), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(16, 10))


IMAGES = (torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,)))
TOKENS = (torch.randint(0, 1000, (4, 64)), torch.randint(0, 10, (4,)))


@pytest.mark.parametrize(
    ("model", "data"),
    [(paper_cnn, IMAGES), (small_resnet, IMAGES), (torch_transformer, TOKENS)],
    ids=["cnn", "resnet", "transformer"],
)
@pytest.mark.parametrize("adam", [True, False], ids=["adam", "sgd"])
def test_at_least_99_percent_of_what_lives_is_seen_and_nothing_twice(model, data, adam):
    torch.manual_seed(0)
    module = model()
    parameters = module.parameters()
    optimizer = torch.optim.Adam(parameters) if adam else torch.optim.SGD(parameters, 0.1, momentum=0.9)
    row = seen_and_known(module, optimizer, *data)
    assert 99.0 <= row["seen_percent"] <= 101.0
    # The sum of the shares predicts the largest that ever lived, within a fifth.
    assert 0.8 <= row["seen_bytes"] / row["peak_bytes"] <= 1.25


def test_the_other_count_agrees_with_torch_s_own_profiler():
    """Of a forward pass: what the profiler says was allocated and not freed is what our oracle says lives."""
    model, (x, y) = paper_cnn(), IMAGES
    functional.cross_entropy(model(x), y)  # what is allocated once, by libraries
    with torch.profiler.profile(profile_memory=True) as profiler:
        loss = functional.cross_entropy(model(x), y)
    told = sum(event.self_cpu_memory_usage for event in profiler.key_averages())
    del loss
    with LiveStorages([*model.parameters(), x, y]) as live:
        before = live.bytes()
        loss = functional.cross_entropy(model(x), y)
        known = live.bytes() - before
    seen = saved_bytes([loss], set())
    assert told == pytest.approx(known, rel=0.01)
    assert seen is not None
    assert seen > known / 2


def test_tied_weights_views_and_sparse_gradients_count_once():
    tied = nn.Sequential(nn.Embedding(50, 8, sparse=True), nn.Flatten(), nn.Linear(24, 50))
    tied.again = tied[0]
    tied[0](torch.tensor([[1, 2, 3]])).sum().backward()
    found = shares(tied, [])
    assert found["model"] == 4 * (50 * 8 + 24 * 50 + 50)
    assert found["gradients"] == 3 * 8 * 4 + 3 * 8  # three rows of float32, and their indices
    whole = torch.zeros(100)
    seen = set()
    assert storage_bytes([whole[:10], whole[5:], whole], seen) == 400
    assert storage_bytes([whole.view(10, 10)], seen) == 0


def test_gradients_that_are_gone_after_the_step_are_counted_as_they_will_be_again():
    model = make("mlp")
    optimizer = torch.optim.Adam(model.parameters())
    x, y = make_data()
    functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    there = shares(model, [optimizer])
    optimizer.zero_grad()
    assert shares(model, [optimizer]) == there
    assert there["optimizer"] == 2 * there["model"] + 4 * 4  # two moments, and a step for each of four tensors


def test_what_is_checkpointed_is_not_counted_and_not_computed_again():
    calls = []

    def block(x):
        calls.append(1)
        return torch.tanh(x @ weight).exp()

    weight = torch.randn(64, 64, requires_grad=True)
    x = torch.randn(32, 64, requires_grad=True)
    kept = saved_bytes([block(x)], set())
    held = saved_bytes([checkpoint(block, x, use_reentrant=False)], set())
    assert len(calls) == 2
    assert kept is not None
    assert held is not None
    assert held < kept


def federation(make_optimizer, monitor=None):
    torch.manual_seed(3)
    model = make("transformer", 3)
    x, y = make_data(40)
    for number in range(2):
        if monitor:
            monitor.host.round_begin(number, model)
        for name in ("a", "b"):
            local = copy.deepcopy(model)
            optimizer = make_optimizer(local.parameters())
            if monitor:
                monitor.host.client_begin(name, local)
            for start in range(0, 40, 8):
                optimizer.zero_grad()
                functional.cross_entropy(local(x[start : start + 8]), y[start : start + 8]).backward()
                optimizer.step()
            if monitor:
                monitor.host.client_end(name)
                assert not hooks_left(local, optimizer)
        model.load_state_dict(local.state_dict())
        if monitor:
            monitor.host.round_end(number, model)
    return [*model.state_dict().values(), torch.get_rng_state()]


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, 1e-2),
}


@pytest.mark.thorough
@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("probes", ["light", "standard"])
def test_weights_are_the_same_to_the_last_bit(make_optimizer, probes):
    bare = federation(make_optimizer)
    sink = MemorySink()
    with fv.Monitor(None, sinks=[sink], probes=probes, strict=True) as monitor:
        watched = federation(make_optimizer, monitor)
    assert holds_for_each(torch.equal(a, b) for a, b in zip(bare, watched, strict=True))
    told = {r.name: r.value for r in sink.records if getattr(r, "name", "").startswith("memory.") and r.where.node}
    model = make("transformer")
    size = sum(4 * p.numel() for p in model.parameters())
    assert told["memory.model"] == told["memory.gradients"] == size
    assert told["memory.optimizer"] >= size
    assert told["memory.batch"] == 8
    assert told["memory.activations"] > 0
    assert told["memory.telemetry"] >= size
    parts = ("model", "buffers", "gradients", "optimizer", "activations", "telemetry")
    assert told["memory.tensors"] == sum(told[f"memory.{part}"] for part in parts)
    assert told["memory.limit"] > told["memory.resident"] > told["memory.tensors"]


def test_shares_are_told_once_and_again_when_they_change():
    sink = MemorySink()
    model = make("mlp")
    x, y = make_data(40)
    with fv.Monitor(None, sinks=[sink], strict=True) as monitor:
        for number in range(6):
            with monitor.round(number, model), monitor.client("a", model):
                batch = 8 if number < 4 else 20
                functional.cross_entropy(model(x[:batch].clone()), y[:batch].clone()).backward()
                torch.optim.SGD(model.parameters(), 0.1).step()
    told = [(r.where.round, r.value) for r in sink.records if getattr(r, "name", "") == "memory.batch"]
    assert told == [(0, 8.0), (4, 20.0)]
    active = [r.value for r in sink.records if getattr(r, "name", "") == "memory.activations"]
    assert active[1] == pytest.approx(active[0] * 20 / 8, rel=0.02)


def test_only_a_client_alone_in_its_process_is_said_to_have_grown():
    sink = MemorySink()
    with fv.Monitor(None, sinks=[sink], strict=True) as monitor, monitor.round(0):
        monitor.host.client_begin("a", make("mlp"))
        monitor.host.client_begin("b", make("mlp"))
        monitor.host.client_end("b")
        monitor.host.client_end("a")
        with monitor.client("c", make("mlp")):
            pass
    assert {r.where.node for r in sink.records if getattr(r, "name", "") == "memory.growth"} == {"c"}


def test_the_backward_watch_goes_however_the_step_ends():
    model = make("mlp")
    known = Activations()
    watch = known.watch(model, 0)
    model(make_data()[0])
    assert torch.autograd.backward is not BACKWARD
    alone = watch.bytes  # of the model: a loss never came
    watch.remove()
    assert torch.autograd.backward is BACKWARD
    assert alone
    again = known.watch(model, 0)
    model(make_data()[0])
    assert torch.autograd.backward is BACKWARD  # the shape is known
    assert (again.batch, again.bytes) == (48, alone)
    again.remove()


def test_the_system_tells():
    before, heap = resident_bytes(), heap_bytes()
    held = torch.ones(4_000_000)
    with mmap.mmap(-1, 16 << 20) as fresh:  # the tensor may be given what others have freed
        fresh.write(b"x" * (16 << 20))
        after = resident_bytes()
    assert before is not None
    assert after is not None
    assert after - before > 8e6
    if heap is not None:
        assert heap_bytes() - heap > 15e6
    assert peak_bytes() > 8e6
    assert limit_bytes() > after
    assert kernel_kills() is None or kernel_kills() >= 0
    assert held.numel()


@pytest.mark.gpu
def test_the_peak_on_a_gpu_is_the_client_s_own():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.zeros(1 << 26, device="cuda")  # an earlier peak of 256 MB, which is nobody's
    sink = MemorySink()
    model = make("mlp").cuda()
    x, y = (t.cuda() for t in make_data())
    with fv.Monitor(None, sinks=[sink], strict=True) as monitor, monitor.round(0, model), monitor.client("a", model):
        functional.cross_entropy(model(x), y).backward()
        torch.optim.Adam(model.parameters()).step()
    told = {r.name: r.value for r in sink.records if getattr(r, "name", "").startswith("memory.") and r.where.node}
    assert 0 < told["memory.cuda_allocated"] < 1 << 28  # with what cuBLAS takes for itself, up to 70 MB
    assert told["memory.cuda_reserved"] >= told["memory.cuda_allocated"]
    assert told["memory.limit"] == torch.cuda.get_device_properties(0).total_memory
