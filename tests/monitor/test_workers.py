# SPDX-License-Identifier: Apache-2.0
"""Clients in other processes: recorded as if they had trained here, once each, and their loss is told."""

import dataclasses
import logging
import multiprocessing
import pickle
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import numpy as np
import pytest
import torch

import fedvitals as fv
from fedvitals.errors import RecordError
from fedvitals.measurements import single_records, stamped
from fedvitals.protocols import NullObserver, Observer, WorkerObserver
from fedvitals.records import Event, LayerStats, Metric, Sketch, Span, Transfer, Where
from fedvitals.store import open_reader
from fedvitals.store.read.ask import query
from fedvitals.transport.wire.payload import decode, encode
from support.conditions import holds_for_each
from support.models import close, make, watched
from support.worker_tasks import (
    PROBES,
    STEPS,
    average,
    deadly_task,
    failing_task,
    held_task,
    hold,
    into_pipe,
    local_training,
    numpy_state,
    own_probe,
    task,
    torch_state,
)

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

NODES = ["c0", "c1", "c2", "c3"]
TIMED = ("time.", "memory.", "monitor.", "throughput.", "bottleneck.")  # differ from run to run


def by_processes(method):
    """Two children at a time, a process for each client, the observer handed over with it."""
    context = multiprocessing.get_context(method)

    def train_all(monitor, number, state):
        done = []
        for pair in (NODES[:2], NODES[2:]):
            running = []
            for node in pair:
                here, there = context.Pipe(duplex=False)
                worker = None if monitor is None else monitor.host.for_worker()
                process = context.Process(target=into_pipe, args=(there, worker, node, state))
                process.start()
                there.close()
                running.append((here, process))
            for here, process in running:
                done.append(here.recv())
                process.join()
        return done

    return train_all


def by_pool(pool):
    def train_all(monitor, number, state):
        workers = [None if monitor is None else monitor.host.for_worker() for _ in NODES]
        return [f.result() for f in [pool.submit(task, w, n, state) for w, n in zip(workers, NODES, strict=True)]]

    return train_all


def in_this_process(monitor, number, state):
    models = [(node, local_training(monitor, node, torch_state(state))) for node in NODES]
    return [(node, numpy_state(model), b"") for node, model in models]


def federate(monitor, train_all, rounds=2, updates_first=False):
    """The global state after it, of a federation whose clients train wherever `train_all` says."""
    model = make("cnn")
    for number in range(rounds):
        state = numpy_state(model)
        if monitor is None:
            done = train_all(None, number, state)
        else:
            with monitor.round(number, model):
                done = train_all(monitor, number, state)
                parameters = [name for name, _ in model.named_parameters()]
                sent = {n: [torch.as_tensor(s[p] - state[p]) for p in parameters] for n, s, _ in done}
                if updates_first:
                    monitor.updates(number, sent)
                for _, _, payload in done:
                    monitor.host.absorb(payload)
                if not updates_first:
                    monitor.updates(number, sent)
        model.load_state_dict(torch_state(average([s for _, s, _ in done])))
    return numpy_state(model)


@pytest.fixture(scope="module")
def twin():
    """The same federation without workers."""
    monitor, sink = watched(PROBES)
    with monitor:
        state = federate(monitor, in_this_process)
    return sink, state


def key(record):
    w = record.where
    return w.round, w.node, w.step, w.group, getattr(record, "name", getattr(record, "family", None))


def _by_process(record):
    """Samples of the machine and signs of life come as time goes by; what memory consists of is told once by each
    process.
    """
    name = getattr(record, "name", "")
    if isinstance(record, Transfer):
        return record.kind == "telemetry"  # which only records that come home have
    of_memory = name.startswith("memory.") and name != "memory.resident"
    return of_memory or name.startswith(("machine.", "process.", "time.critical", "monitor.alive"))


def check_like_twin(sink, twin):
    """Every metric, matrix, span, transfer and event that the twin has, once, with its value; and nothing else."""
    for kind in (Metric, LayerStats, Span, Transfer, Event, Sketch):
        names, wanted = (Counter(key(r) for r in one.of(kind) if not _by_process(r)) for one in (sink, twin))
        assert names == wanted, kind
        if kind in (Metric, LayerStats):
            assert max(names.values()) == 1
    wanted = {key(r): r for r in twin.metrics()}
    for r in sink.metrics():
        if not r.name.startswith(TIMED) and not _by_process(r):
            close(r.value, wanted[key(r)].value)
    wanted = {key(r): r for r in twin.of(LayerStats)}
    for r in sink.of(LayerStats):
        close(r.matrix, wanted[key(r)].matrix)
        assert sink.table(r.table).names == twin.table(wanted[key(r)].table).names
    spans = {s.id: s for s in sink.of(Span)}
    for span in spans.values():
        if span.parent is not None:
            inside = "edge" if span.name == "client" and span.where.group else "round"
            assert spans[span.parent].name == inside
    assert len({s.trace for s in spans.values()}) == 1


@pytest.mark.thorough
def test_processes_record_what_one_process_would(twin):
    """And the weights are bit for bit those of a federation that nobody watches."""
    monitor, sink = watched(PROBES)
    with monitor:
        state = federate(monitor, by_processes("fork"))
    check_like_twin(sink, twin[0])
    assert monitor.lost == 0
    sources = {r.source for r in sink.metrics("steps")}
    assert len(sources) == 8  # one for each process
    alone = federate(None, by_processes("fork"))
    assert holds_for_each(
        np.array_equal(state[name], alone[name]) and np.array_equal(state[name], twin[1][name]) for name in state
    )


@pytest.mark.parametrize(
    ("method", "updates_first"),
    [("fork", False), ("fork", True), pytest.param("spawn", False, marks=pytest.mark.thorough)],
)
def test_pool_records_what_one_process_would(method, updates_first, twin):
    """Whichever comes first, a client's records or its update: it counts once."""
    monitor, sink = watched(PROBES)
    with monitor, ProcessPoolExecutor(2, multiprocessing.get_context(method)) as pool:
        state = federate(monitor, by_pool(pool), updates_first=updates_first)
    check_like_twin(sink, twin[0])
    assert holds_for_each(np.array_equal(state[name], twin[1][name]) for name in state)
    assert len({r.source for r in sink.metrics("steps")}) <= 2


@pytest.mark.thorough
def test_one_observer_per_process_of_a_spawned_pool():
    """Made before the first round, so it knows neither round nor model; a task may tell the round, or not."""
    monitor, sink = watched(PROBES)
    state = numpy_state(make("cnn"))
    context = multiprocessing.get_context("spawn")
    with monitor, ProcessPoolExecutor(2, context, initializer=hold, initargs=(monitor.host.for_worker(),)) as pool:
        for number in range(2):
            with monitor.round(number):
                for node, given in (("c0", number), ("c1", None)):
                    monitor.host.expect(node)
                    monitor.host.absorb(pool.submit(held_task, node, state, given).result()[2])
    for number in range(2):
        for node in ("c0", "c1"):
            assert sink.value("steps", round=number, node=node) == STEPS
            assert sink.layers("gradient", round=number, node=node).get("count").all()
        assert sink.value("clients", round=number) == 2
    assert not sink.events("worker.lost")
    assert {s.parent for s in sink.of(Span, "client", node="c1")} == {s.id for s in sink.of(Span, "edge")}
    assert {s.parent for s in sink.of(Span, "edge")} == {s.id for s in sink.of(Span, "round")}


def test_the_store_has_every_client_once(tmp_path):
    """Payloads that are delivered twice are stored once, and count once."""
    monitor = fv.Monitor(tmp_path / "runs.db", probes=PROBES, strict=True)
    model = make("cnn")
    context = multiprocessing.get_context("fork")
    with monitor, ProcessPoolExecutor(2, context) as pool, monitor.round(0, model):
        for _, _, payload in by_pool(pool)(monitor, 0, numpy_state(model)):
            monitor.host.absorb(payload)
            monitor.host.absorb(payload)
            monitor.host.absorb(bytes(bytearray(payload)))
    with open_reader(tmp_path / "runs.db") as reader:
        for sql, wanted in (
            ("SELECT node, value FROM metrics WHERE name = 'steps' ORDER BY node", [(n, STEPS) for n in NODES]),
            (
                "SELECT node, value FROM metrics WHERE name = 'user.seed' ORDER BY node",
                [*zip(NODES, range(4), strict=True)],
            ),
            ("SELECT value FROM metrics WHERE name = 'clients'", [(4,)]),
            ("SELECT count(*) FROM transfers WHERE kind <> 'telemetry'", [(4,)]),
            ("SELECT count(*) FROM transfers WHERE kind = 'telemetry' AND bytes > 0", [(4,)]),
            ("SELECT sum(value) FROM metrics WHERE name = 'traffic.received'", [(4006,)]),
        ):
            assert query(reader, sql).rows == wanted, sql
        layers = query(reader, "SELECT node, family, layer, count(*) FROM layer_statistics GROUP BY 1, 2, 3").rows
        assert {row[0] for row in layers if row[1] == "gradient"} >= {*NODES}
        assert {row[3] for row in layers} == {1}


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["exit", "kill"])
def test_a_worker_that_dies_costs_its_own_telemetry_only(how):
    """The pool breaks; what came home before and after it is whole, and the loss is told and counted."""
    monitor, sink = watched(PROBES)
    model = make("cnn")
    state, context = numpy_state(model), multiprocessing.get_context("fork")
    with monitor, monitor.round(0, model):
        monitor.host.expect(*NODES)
        with ProcessPoolExecutor(2, context) as pool:
            for node in NODES[:2]:
                monitor.host.absorb(pool.submit(task, monitor.host.for_worker(), node, state).result()[2])
            with pytest.raises(BrokenProcessPool):
                pool.submit(deadly_task, monitor.host.for_worker(), "c2", state, how).result()
        with ProcessPoolExecutor(1, context) as pool:
            monitor.host.absorb(pool.submit(task, monitor.host.for_worker(), "c3", state).result()[2])
    for node in ("c0", "c1", "c3"):
        assert sink.value("steps", node=node) == STEPS
        assert sink.layers("gradient", node=node).get("count").all()
    assert not sink.of(Metric, node="c2")
    (event,) = sink.events("worker.lost")
    assert (event.where.node, event.where.round, event.level) == ("c2", 0, "warning")
    assert (sink.value("clients"), sink.value("clients.failed")) == (4, 1)
    assert monitor.lost == sink.value("monitor.lost") == 1


def test_a_client_that_fails_in_a_worker_is_told_as_here():
    monitor, sink = watched(PROBES)
    model = make("cnn")
    with monitor, monitor.round(0, model):
        monitor.host.expect("c0")
        monitor.host.absorb(failing_task(monitor.host.for_worker(), "c0", numpy_state(model)))
    (event,) = sink.events("client.failed")
    assert (event.where.node, event.data["exception"]) == ("c0", "ValueError")
    assert sink.value("clients.failed") == 1
    assert not sink.events("worker.lost")


def test_lost_records_but_a_known_update():
    """Its update came, its records did not: told, but it did take part."""
    monitor, sink = watched(PROBES)
    model = make("cnn")
    with monitor, monitor.round(0, model):
        monitor.host.expect("c0")
        monitor.updates(0, {"c0": [torch.ones_like(p) for p in model.parameters()]})
    assert len(sink.events("worker.lost")) == 1
    assert (sink.value("clients"), sink.value("clients.failed")) == (1, 0)
    assert sink.layers("update", node="c0").get("count").all()


@pytest.mark.parametrize("number", range(6))
def test_payloads_that_are_none_are_told_and_counted(number, caplog):
    """Never raised into the training; each cause once. With `strict` they are raised."""
    other, _ = watched(PROBES)
    with other:
        other.log(x=1)
        foreign = local_payload(other)
    monitor, sink = watched(PROBES, strict=False)
    strict, _ = watched(PROBES)
    run = monitor.run.id
    unknown_layers = LayerStats(Where(run, 0, "c0"), 0.0, "weight", np.ones((3, 9)), "unheard")
    bad = [
        b"garbage",
        "text",
        foreign,
        local_payload(monitor)[:-9],
        encode([stamped(Metric(Where(run, 0, "c0"), 0.0, "loss", 1.0), "monitor", 5)]),
        encode([stamped(unknown_layers, "worker-1", 0)]),
    ][number]
    with caplog.at_level(logging.WARNING), monitor, monitor.round(0):
        for _ in range(3):
            monitor.host.absorb(bad)
        monitor.host.absorb(b"")
    assert monitor.lost == 3
    assert len(sink.events("monitor.error")) == 1
    assert len([r for r in caplog.records if "absorb()" in r.getMessage()]) == 1
    assert not sink.metrics("loss")
    assert sink.value("clients") == 0
    if number != 2:
        with strict, pytest.raises(RecordError):
            strict.host.absorb(bad)


def local_payload(monitor):
    """Of a worker in this very process."""
    worker = monitor.host.for_worker()
    local_training(worker, "c0", make("cnn").state_dict())
    return worker.payload()


def test_a_worker_in_the_same_process():
    """Threads and `n_jobs=1` fall back to it; the worker's records stay apart from the monitor's."""
    monitor, sink = watched(PROBES)
    with monitor, monitor.round(0, make("cnn")):
        payload = local_payload(monitor)
        assert not sink.metrics("steps")
        monitor.host.absorb(payload)
    assert sink.value("steps", node="c0") == STEPS
    assert monitor.host.for_worker().payload() == b""


def test_what_a_worker_may_tell_depends_on_the_privacy_level():
    """What is forbidden is not in the bytes."""
    seen = {}
    for privacy in (0, 2, 3):
        monitor, _ = watched(PROBES, privacy=privacy)
        with monitor, monitor.round(0, make("cnn")):
            worker = monitor.host.for_worker()
            with worker.client("c0", make("cnn")):
                worker.log(canary=123456.789)
                logging.getLogger("train").warning("patient 4711")
            seen[privacy] = worker.payload()
    assert [b"canary" in seen[p] for p in (0, 2, 3)] == [False, True, True]
    assert [b"4711" in seen[p] for p in (0, 2, 3)] == [False, False, True]
    sent = [single_records(decode(seen[p])) for p in (0, 2, 3)]
    assert [any(isinstance(r, LayerStats) for r in records) for records in sent] == [False, False, True]


def test_log_lines_of_a_worker_come_home_with_their_client():
    monitor, sink = watched(PROBES)
    with monitor, monitor.round(7, make("cnn")):
        worker = monitor.host.for_worker()
        worker.client_begin("c0", make("cnn"))
        logging.getLogger("train").warning("low battery")
        worker.client_end("c0", ValueError("flat"))
        monitor.host.absorb(worker.payload())
    events = [(e.where.round, e.where.node, e.name) for e in sink.events()]
    # The monitor's own handler is in this process as well: in a child it is not.
    assert (7, "c0", "log") in events
    assert (7, "c0", "client.failed") in events


def test_own_probes_go_along_or_are_told(caplog):
    """A function of a module can be pickled; a lambda cannot, and must not stop the host that submits it."""
    monitor, _ = watched([PROBES, own_probe, (own_probe, fv.every(2)), (own_probe, fv.first(1))])
    with monitor:
        worker = pickle.loads(pickle.dumps(monitor.host.for_worker()))
        local_training(worker, "c0", make("cnn").state_dict())
        sent = single_records(decode(worker.payload()))
        found = [r for r in sent if isinstance(r, Metric) and r.name == "user.total"]
        assert [m.where.step for m in found] == [None, 0, 2, 0]
    monitor, _ = watched([PROBES, lambda view: {}], strict=False)
    with caplog.at_level(logging.WARNING), monitor:
        pickle.dumps(monitor.host.for_worker())
        monitor.host.for_worker()
    assert len(caplog.records) == 1
    assert "cannot go to a worker" in caplog.text


def test_tables_go_home_once_and_only_where_they_are_needed():
    """The parent that was given no model learns its layers from the worker."""
    monitor, sink = watched(PROBES)
    with monitor:
        for number in range(2):
            with monitor.round(number):
                worker = monitor.host.for_worker()
                local_training(worker, "c0", make("cnn").state_dict())
                payload = worker.payload()
                assert (type(decode(payload)[0]).__name__ == "Run") == (number == 0)
                monitor.host.absorb(payload)
    stats = sink.layers("gradient", node="c0", round=1)
    assert "1.weight" in sink.table(stats.table).names


def test_what_a_worker_left_out_is_counted_as_thinned_and_not_as_lost():
    monitor, sink = watched(strict=False)
    with monitor, monitor.round(0):
        told = Event(Where(monitor.run.id, 0), 0.0, "info", "worker.thinned", "", {"records": 12, "client_rounds": 3})
        monitor.host.absorb(encode([stamped(told, "worker-1", 0)]))
    assert (monitor.lost, sink.value("monitor.lost"), sink.value("monitor.thinned")) == (0, 0, 3)


def test_what_a_worker_lost_is_counted_by_the_monitor():
    monitor, sink = watched(strict=False)
    with monitor, monitor.round(0):
        told = Event(Where(monitor.run.id, 0), 0.0, "warning", "worker.lost", "", {"records": 12})
        monitor.host.absorb(encode([stamped(told, "worker-1", 0)]))
    assert monitor.lost == sink.value("monitor.lost") == 12


@pytest.mark.parametrize(
    "metric",
    [
        Span(Where("r", 0), 0.0, "round", 1e6, "a" * 32, "b" * 16),
        Span(Where("r", 0, "c0"), 0.0, "round", 1e6, "a" * 32, "b" * 16),
        Span(Where("r", 0, "server"), 0.0, "server", 1e6, "a" * 32, "b" * 16),
        Span(Where("r", 0, "c1"), 0.0, "journey", 1e6, "a" * 32, "b" * 16),
        Metric(Where("r", 0), 0.0, "time.round", 1e6),
        Metric(Where("r", 0), 0.0, "bottleneck.upload", 1.0),
    ],
    ids=lambda metric: f"{metric.name} {metric.where.node}",
)
def test_no_worker_says_what_a_round_was(metric):
    """Its length and what it was bound by are the monitor's to tell; a client's own metrics are taken."""
    monitor, sink = watched(strict=False)
    where = dataclasses.replace(metric.where, run=monitor.run.id)
    with monitor, monitor.round(0):
        monitor.host.absorb(encode([stamped(dataclasses.replace(metric, where=where), "worker-1", 0)]))
        own = Metric(Where(monitor.run.id, 0, "c0"), 0.0, "time.data", 0.5)
        monitor.host.absorb(encode([stamped(own, "worker-2", 0)]))
    assert monitor.lost == 1
    assert sink.value("time.round") < 1e6
    assert [span.seconds < 1e6 for span in sink.of(Span, "round")] == [True]
    assert sink.value("time.data", node="c0") == 0.5


def test_a_block_of_the_users_is_not_taken_for_the_round():
    monitor, sink = watched()
    worker = monitor.host.for_worker()
    with monitor, monitor.round(0):
        with worker.client("c0", make("cnn")), fv.timed("round"):
            pass
        monitor.host.absorb(worker.payload())
    assert len(sink.of(Span, "round")) == len(sink.of(Span, "own.round")) == 1
    assert monitor.lost == 0


def test_every_observer_serves_workers():
    """A host need not know whether anybody watches."""
    monitor, _ = watched(PROBES)
    with monitor:
        for observer in (NullObserver(), monitor.host):
            assert isinstance(observer, Observer)
            worker = pickle.loads(pickle.dumps(observer.for_worker()))
            assert isinstance(worker, WorkerObserver)
            observer.round_begin(0)
            worker.client_begin("c0")
            worker.client_end("c0")
            observer.absorb(worker.payload())
            observer.round_end(0)


def test_desks_of_ended_runs_are_cleared():
    """A process that works for one run after the other keeps no log handler of the old ones."""
    before = len(logging.getLogger().handlers)
    for _ in range(3):
        monitor, _ = watched(PROBES)
        with monitor:
            local_payload(monitor)
    assert len(logging.getLogger().handlers) <= before + 1


def test_a_discarded_round_expects_nobody():
    monitor, sink = watched(PROBES)
    with monitor:
        monitor.host.round_begin(0)
        monitor.host.expect("c0")
        monitor.host.discard()
        with monitor.round(1):
            pass
    assert not sink.events("worker.lost")
    assert monitor.lost == 0
