# SPDX-License-Identifier: Apache-2.0
"""Trainers that train one model in two processes: one run, with one client, as if one process had trained it."""

import os
import socket

import pytest
import torch
from torch import distributed, multiprocessing
from torch.nn import functional

import fedvitals as fv
from fedvitals.store import open_reader
from fedvitals.store.read.queries import list_runs
from fedvitals.testing import MemorySink

pytest.importorskip("transformers")
pytest.importorskip("lightning")
accelerate = pytest.importorskip("accelerate")

from support.small_trainers import BATCH, Classifier, fit, language_model, samples, tune

RANKS, STEPS = 2, 3
pytestmark = pytest.mark.thorough


def process(rank, port, folder, queue):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_PORT": str(port)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": str(RANKS), "ACCELERATE_USE_CPU": "true"}
    os.chdir(folder)
    watched = MemorySink()
    callback = fv.huggingface.Callback("tuned.db", sinks=[watched], run="tuned")
    tune(folder, [callback], max_steps=STEPS, per_device_train_batch_size=BATCH // RANKS, ddp_backend="gloo")
    monitor = fv.Monitor("fitted.db", sinks=[watched], run="fitted")
    fit([fv.lightning.Callback(monitor)], strategy="ddp", devices=RANKS, max_epochs=1)
    monitor.close()
    accelerator = accelerate.Accelerator(cpu=True)
    net = Classifier().net
    model, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1), samples())
    with fv.watch(model, optimizer, "looped.db", sinks=[watched], run="looped"):
        for batch in loader:
            optimizer.zero_grad()
            accelerator.backward(functional.cross_entropy(model(batch["x"]), batch["y"]))
            optimizer.step()
    queue.put((rank, watched.records))
    distributed.barrier()
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tmp_path_factory.mktemp("ranks")
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=process, args=(rank, port, str(folder), queue)) for rank in range(RANKS)]
    for child in processes:
        child.start()
    records = dict(queue.get(timeout=180) for _ in processes)
    for child in processes:
        child.join(60)
    assert [child.exitcode for child in processes] == [0, 0]
    return folder, records


def test_the_first_process_reports_and_the_others_say_nothing(results):
    folder, records = results
    assert records[1] == []
    assert sorted(path.name for path in folder.glob("*.db")) == ["fitted.db", "looped.db", "tuned.db"]
    for name in ("tuned", "fitted", "looped"):
        with open_reader(folder / f"{name}.db") as reader:
            assert [run.name for run in list_runs(reader)] == [name]


def test_statistics_are_those_of_one_process(results, tmp_path):
    sink, alone = MemorySink(), MemorySink()
    sink.write(results[1][0])
    tune(tmp_path, [fv.huggingface.Callback(None, sinks=[alone], strict=True)], language_model(), max_steps=STEPS)
    run = next(m.where.run for m in sink.metrics("steps"))
    together = {m.name: m.value for m in sink.metrics() if m.where.node == "model" and m.where.run == run}
    for name in ("steps", "gradient.norm", "update.norm", "weight.norm", "loss", "train.loss_first", "train.accuracy"):
        assert together[name] == pytest.approx(alone.value(name, node="model"), rel=1e-4), name
