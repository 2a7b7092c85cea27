# SPDX-License-Identifier: Apache-2.0
"""Clients that train in several processes: one report of the client, as if one process had trained it."""

import os
import signal
import socket
import time
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from torch import distributed, multiprocessing, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import fedvitals as fv
from fedvitals.probes import rank_watch
from fedvitals.records import Event, LayerStats
from fedvitals.testing import MemorySink
from support.waiting import wait_until

ROUNDS, STEPS, BATCH, RANKS = 3, 12, 8, 2
NAMES = (
    "gradient.norm", "gradient.norm_max", "gradient.norm_last", "update.norm", "weight.norm", "weight.drift",
    "weight.drift_init", "weight.update_ratio", "steps",
)  # fmt: skip
TOLERANCE = 1e-4


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 1), nn.Linear(1, 3))


def batch(number):
    stream = torch.Generator().manual_seed(number)
    return torch.randn(BATCH, 12, generator=stream), torch.randint(0, 3, (BATCH,), generator=stream)


def train(model, rank=0, ranks=1, *, watched=True, slow=None, end=lambda _: None, clip=None):
    """Train some rounds; each process has its share of every batch. Gives what a sink got, and the weights."""
    device = next(model.parameters()).device
    sink = MemorySink()
    monitor = fv.Monitor(None, sinks=[sink], strict=True) if watched else None
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for number in range(ROUNDS):
        if monitor is not None:
            monitor.host.round_begin(number, model)
            monitor.host.client_begin("a", model)
        for step in range(STEPS):
            x, y = (part.to(device) for part in batch(100 * number + step))
            time.sleep(0.03 if rank == slow else 0.0)
            end(step)
            optimizer.zero_grad()
            functional.cross_entropy(model(x[rank::ranks]), y[rank::ranks]).backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
        model.eval()
        with torch.no_grad():  # leaves FSDP's outermost parameters whole
            model(batch(7)[0].to(device))
        model.train()
        if monitor is not None:
            monitor.host.client_end("a")
            monitor.host.round_end(number, model)
    if monitor is not None:
        monitor.close()
    whole = [getattr(p, "full_tensor", lambda p=p: p)().detach().cpu().numpy() for p in model.parameters()]
    return summary(sink), whole


def summary(sink):
    metrics = {(r.where.round, r.name): r.value for r in sink.metrics() if r.where.node == "a"}
    matrices = {(r.where.round, r.family): r.matrix for r in sink.of(LayerStats) if r.where.node == "a"}
    return metrics, matrices, [(e.name, e.level, e.data) for e in sink.of(Event)]


def copies(device="cpu"):
    return DistributedDataParallel(network().to(device))


def shards(device="cpu"):
    model = network().to(device)
    fully_shard(model[0])
    return fully_shard(model)


def join(rank, port):
    distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)


def in_federation(rank):
    """Train shards where only the first process knows of a federation, as with NVFlare; the other has `fv.watch`."""
    sink, model = MemorySink(), shards()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    with ExitStack() as scopes:
        if rank == 0:
            monitor = scopes.enter_context(fv.Monitor(None, sinks=[sink], strict=True))
            scopes.enter_context(monitor.round(0))
            scopes.enter_context(monitor.client("a"))
        scopes.enter_context(fv.watch(model, optimizer, "never.db", sinks=[sink], steps=4))
        for step in range(STEPS):
            optimizer.zero_grad()
            x, y = batch(step)
            functional.cross_entropy(model(x[rank::RANKS]), y[rank::RANKS]).backward()
            optimizer.step()
    return summary(sink), len(sink.records)


def own_passes(rank):
    """Probes that compute through the model; the two processes are due at different clients."""
    sink, model = MemorySink(), shards()
    monitor = fv.Monitor(None, sinks=[sink], probes=[fv.probes.gradient_scale(4)], strict=True)
    with monitor, monitor.round(0, model), monitor.client("ab"[rank], model):
        model(batch(0)[0]).sum().backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
    return {m.name for m in sink.metrics()}, [e.name for e in sink.events()]


def language_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))


def texts_read(model, rank=0, ranks=1):
    """Train one round on texts; each process has its share of every batch. Gives the client's metrics."""
    sink = MemorySink()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with fv.Monitor(None, sinks=[sink], strict=True) as monitor, monitor.round(0, model), monitor.client("a", model):
        for step in range(3):
            text = torch.randint(0, 11, (BATCH, 6), generator=torch.Generator().manual_seed(step))[rank::ranks]
            optimizer.zero_grad()
            functional.cross_entropy(model(text)[:, :-1].reshape(-1, 11), text[:, 1:].reshape(-1)).backward()
            optimizer.step()
    return {record.name: record.value for record in sink.metrics(node="a")}


def compared(rank, port, queue):
    """All that healthy processes do, in one pair of them."""
    join(rank, port)
    for name, make in (("copies", copies), ("shards", shards)):
        for case, options in {"watched": {}, "plain": {"watched": False}, "clipped": {"clip": 0.05}}.items():
            queue.put((f"{name} {case}", rank, train(make(), rank, RANKS, **options)))
    queue.put(("texts", rank, texts_read(DistributedDataParallel(language_model()), rank, RANKS)))
    queue.put(("slow", rank, train(copies(), rank, RANKS, slow=1)))
    queue.put(("federation", rank, in_federation(rank)))
    queue.put(("own passes", rank, own_passes(rank)))
    queue.put(("first only", rank, train(copies(), rank, RANKS, watched=rank == 0)))
    distributed.barrier()
    distributed.destroy_process_group()


def failing(rank, port, queue):
    """The second process is killed in the middle of a round."""
    join(rank, port)
    sink = MemorySink()
    monitor = fv.Monitor(None, sinks=[sink])
    model = copies()
    try:
        with monitor.round(0, model), monitor.client("a", model):
            for step in range(STEPS):
                if rank == 1 and step == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
                x, y = batch(step)
                functional.cross_entropy(model(x), y).backward()
                torch.optim.SGD(model.parameters(), 0.1).step()
    except RuntimeError as error:
        monitor.close()
        queue.put((type(error).__name__, [(e.name, e.data) for e in sink.of(Event)]))


def waiting(rank, port, queue):
    """Others end or stop while the first waits for something else; nobody exchanges anything."""
    distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=3)
    rank_watch.BEAT, rank_watch.SILENCE = 0.1, 1.0
    sink, model = MemorySink(), copies()
    with fv.Monitor(None, sinks=[sink]) as monitor, monitor.round(0, model), monitor.client("a", model):
        functional.cross_entropy(model(batch(0)[0]), batch(0)[1]).backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
        time.sleep(0.5)
        if rank:
            os.kill(os.getpid(), signal.SIGKILL if rank == 1 else signal.SIGSTOP)
        until = time.monotonic() + 20
        while time.monotonic() < until and len(sink.events("rank.lost")) < 2:
            monitor.flush()
            time.sleep(0.1)
        queue.put([(e.level, e.where.node, e.message, e.data) for e in sink.events("rank.lost")])
    os._exit(0)


def start(target, ranks=RANKS):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=target, args=(rank, port, queue)) for rank in range(ranks)]
    for process in processes:
        process.start()
    return processes, queue


@pytest.fixture(scope="module")
def ranks():
    processes, queue = start(compared)
    collected = {}
    for _ in range(11 * RANKS):
        wait_until(lambda: not queue.empty() or any(p.exitcode for p in processes), 120, "results")
        case, rank, results = queue.get(timeout=5)
        collected[case, rank] = results
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    return collected


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["copies", "shards"])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_statistics_are_those_of_one_process(ranks, kind, clip):
    case = "watched" if clip is None else "clipped"
    check_same(train(network(), clip=clip)[0], ranks[f"{kind} {case}", 0][0], kind, clip)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["copies", "shards"])
def test_statistics_with_nccl_are_those_of_the_model_alone(kind):
    """A process with the only GPU: exchanges of several are tested above, with gloo."""
    alone, _ = train(network().cuda())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    distributed.init_process_group("nccl", f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    try:
        check_same(alone, train({"copies": copies, "shards": shards}[kind]("cuda"))[0], kind)
    finally:
        distributed.destroy_process_group()


def check_same(alone, of_ranks, kind, clip=None):
    metrics, matrices, _ = alone
    whole, layers, events = of_ranks
    losses = [key for key in metrics if key[1].startswith("train.")]
    assert losses
    for key in [*losses, *((number, name) for name in NAMES for number in range(ROUNDS))]:
        assert whole[key] == pytest.approx(metrics[key], rel=TOLERANCE), key
    families = [(number, family) for number in range(ROUNDS) for family in ("update", "weight", "gradient")]
    for key in [(0, "training.classes"), *families]:
        np.testing.assert_allclose(layers[key], matrices[key], rtol=TOLERANCE, atol=1e-5, err_msg=str(key))
    assert not [name for name, *_ in events if name.startswith(("rank.", "layers.", "monitor."))]
    if kind == "copies":
        unclipped = 1, "gradient.norm_unclipped"
        assert (unclipped in metrics) == (unclipped in whole) == (clip is not None)
        assert whole.get(unclipped, 0) == pytest.approx(metrics.get(unclipped, 0), rel=TOLERANCE)


@pytest.mark.thorough
def test_tokens_are_those_of_all_processes(ranks):
    alone, together = texts_read(language_model()), ranks["texts", 0]
    for name in ("tokens", "tokens.length", "perplexity.before", "train.loss_short"):
        assert together[name] == pytest.approx(alone[name], rel=TOLERANCE), name
    assert together["tokens"] == 3 * BATCH * 6


@pytest.mark.thorough
def test_nobody_makes_passes_of_our_own_through_shards(ranks):
    """One process alone would wait for the others, for ever: what is due is decided by each for itself."""
    for rank in range(RANKS):
        metrics, events = ranks["own passes", rank]
        assert not [name for name in metrics if name.startswith("scale.")]
        assert "probe.abstains" in events


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["copies", "shards"])
def test_watching_changes_no_bits(ranks, kind):
    for rank in range(RANKS):
        watched, plain = ranks[f"{kind} watched", rank][1], ranks[f"{kind} plain", rank][1]
        assert all(np.array_equal(a, b) for a, b in zip(watched, plain, strict=True))


@pytest.mark.thorough
def test_the_rank_that_lags_is_named(ranks):
    (_, _, events), _ = ranks["slow", 0]
    assert {data["rank"] for name, _, data in events if name == "rank.lagging"} == {1}
    for kind in ("copies", "shards"):
        assert "rank.lagging" not in [name for name, *_ in ranks[f"{kind} watched", 0][0][2]]


@pytest.mark.thorough
def test_a_process_that_is_not_watched_is_not_waited_for(ranks):
    (metrics, _, events), _ = ranks["first only", 0]
    assert metrics[1, "time.client"] < 5
    assert "rank.lost" not in [name for name, *_ in events]


@pytest.mark.thorough
def test_the_rank_that_dies_is_named():
    processes, queue = start(failing)
    _, events = queue.get(timeout=60)
    for process in processes:
        process.join(60)
    assert [data["rank"] for name, data in events if name == "rank.lost"] == [1]
    assert "client.failed" in [name for name, _ in events]


@pytest.mark.thorough
def test_ranks_that_end_or_stop_are_named_while_the_others_wait():
    processes, queue = start(waiting, 3)
    try:
        events = queue.get(timeout=90)
    finally:
        processes[2].kill()
    for process in processes:
        process.join(60)
    assert {data["rank"]: data["ended"] for _, _, _, data in events} == {1: True, 2: False}
    for level, node, message, data in events:
        assert (level, node) == ("warning", "a")
        assert str(processes[data["rank"]].pid) in message
        assert data["steps"] == 1


@pytest.mark.thorough
def test_only_the_first_process_needs_to_know_of_the_federation(ranks):
    (whole, _, events), _ = ranks["federation", 0]
    (metrics, _, _), _ = train(network())
    for name in ("update.norm", "gradient.norm", "steps"):
        assert whole[0, name] == pytest.approx(metrics[0, name], rel=TOLERANCE), name
    assert "layers.sharded" not in [name for name, *_ in events]
    assert ranks["federation", 1][1] == 0  # records
