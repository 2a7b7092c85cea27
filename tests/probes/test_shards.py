# SPDX-License-Identifier: Apache-2.0
"""Sharded parameters (DTensor): each process measures its shards, and the first one reports the whole."""

import socket

import numpy as np
import pytest
import torch
from torch import distributed, multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fedvitals as fv
from fedvitals.records import Event, LayerStats
from fedvitals.testing import MemorySink

NAMES = ("update.norm", "weight.norm", "weight.drift", "weight.update_ratio", "weight.drift_init", "gradient.norm")


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 9), nn.Linear(9, 3))


def gradient(parameter, step):
    stream = torch.Generator().manual_seed(step)
    return torch.randn(parameter.shape, generator=stream)


def train(model, place):
    """A run's metrics of its last round, its layer statistics, and its events; `place` makes a gradient's tensor."""
    sink = MemorySink()
    with fv.Monitor(None, sinks=[sink], strict=True, profile=False) as monitor:
        for number in range(2):
            with monitor.round(number, model), monitor.client("a", model):
                optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=False)
                for step in range(3):
                    for parameter in model.parameters():
                        parameter.grad = place(parameter, gradient(parameter, step))
                    optimizer.step()
    metrics = {r.name: r.value for r in sink.metrics() if r.where.node == "a" and r.where.round == 1}
    matrices = {r.family: r.matrix for r in sink.of(LayerStats) if r.where.node == "a" and r.where.round == 1}
    return metrics, matrices, [r.name for r in sink.of(Event)]


def process(rank, port, watched, queue):
    distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    mesh, model = init_device_mesh("cpu", (2,)), network()
    kinds = [[Shard(0)], [Replicate()], [Shard(1)], [Shard(0)]]
    for (name, parameter), kind in zip([*model.named_parameters()], kinds, strict=True):
        module, _, own = name.partition(".")
        setattr(model[int(module)], own, nn.Parameter(distribute_tensor(parameter.detach(), mesh, kind)))

    def place(parameter, gradient):
        if len(watched) > 1:
            distributed.barrier()  # a backward pass would exchange something
        (kind,) = parameter.placements
        own = gradient if kind.is_replicate() else gradient.chunk(2, kind.dim)[rank].contiguous()
        return DTensor.from_local(own, mesh, [kind], run_check=False, shape=gradient.shape, stride=gradient.stride())

    queue.put((rank, train(model, place) if rank in watched else None))
    distributed.barrier()
    distributed.destroy_process_group()


def run_processes(watched):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=process, args=(rank, port, watched, queue)) for rank in range(2)]
    for child in processes:
        child.start()
    found = dict(queue.get(timeout=120) for _ in processes)
    for child in processes:
        child.join(60)
    assert [child.exitcode for child in processes] == [0, 0]
    return found


@pytest.mark.thorough
def test_the_first_process_reports_the_sums_of_all_shards():
    metrics, matrices, _ = train(network(), lambda _, g: g)
    found = run_processes({0, 1})
    whole, layers, events = found[0]
    for name in NAMES:
        assert whole[name] == pytest.approx(metrics[name], rel=1e-5), name
    for family in ("update", "weight", "gradient"):
        np.testing.assert_allclose(layers[family], matrices[family], rtol=1e-5, atol=1e-6)
    assert "layers.sharded" not in events
    part = found[1][1]["update"]
    assert part[1, 0] == 0  # a copy, which the first process counts
    assert part[0, 0] == 12 * 4


@pytest.mark.thorough
def test_a_process_that_is_not_watched_is_not_waited_for_long():
    found = run_processes({0})
    whole, layers, events = found[0]
    assert events.count("layers.sharded") == 2  # in each round
    assert layers["update"][0, 0] == 12 * 5
    assert whole["update.norm"] > 0
