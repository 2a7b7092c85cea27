# SPDX-License-Identifier: Apache-2.0
"""The monitor's scopes: what belongs where, what happens when something fails, and what is left after."""

import contextlib
import logging
import threading
import time

import pytest
import torch
from torch.nn import functional

import fedvitals as fv
from fedvitals.catalog import CATALOG
from fedvitals.errors import ConfigError
from fedvitals.records import Event, Finding, LayerStats, Metric, Run, Sketch, Span, Where
from fedvitals.scope import current
from fedvitals.stats import SUM
from fedvitals.testing import MemorySink, check_detector, check_probe, check_sink, tiny_run
from support.conditions import holds_for_each
from support.hooks import hooks_left
from support.models import Catcher, close, make, make_data, train, watched
from support.waiting import PATIENCE


def client_round(monitor, name="c0", steps=2, model=None, **more):
    model = model or make("mlp")
    with monitor.client(name, model, **more):
        train(model, torch.optim.SGD(model.parameters(), 0.1), make_data(), steps)
    return model


def test_exception_in_a_client_is_told_and_goes_on():
    """The exception becomes an Event with its type, scopes close, hooks go, and the user gets the very exception."""
    monitor, sink = watched("deep")
    model, error = make("cnn"), ValueError("out of patience")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ValueError, match="patience") as caught, monitor, monitor.round(0):  # noqa: PT012, SIM117
        with monitor.client("c0", model):
            train(model, optimizer, make_data(), 2)
            raise error
    assert caught.value is error
    assert current.get() is None
    assert not hooks_left(model, optimizer)
    (event,) = sink.events("client.failed")
    assert (event.where.node, event.level, event.data["exception"]) == ("c0", "error", "ValueError")
    assert "test_monitor.py" in event.data["traceback"]
    assert sink.events("round.failed")[0].where.node is None
    assert sink.value("clients.failed") == 1
    assert sink.value("steps", node="c0") == 2
    assert sink.metrics("time.round", round=0)
    assert sink.of(Run)[-1].finished is not None


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_leaving_by_other_ways(kind):
    """Ctrl-C and the like close scopes, too."""
    monitor, sink = watched()
    with contextlib.suppress(kind), monitor, monitor.round(0), monitor.edge("edge-0"), monitor.client("c0"):
        raise kind
    assert current.get() is None
    failed = ["client.failed", "edge.failed", "round.failed"]
    assert [e.name for e in sink.events()] == (failed if kind is SystemExit else ["interrupted"])


def test_log_belongs_where_it_is_said():
    """Inside a client to it, inside a round to the round, after a round to that round; names under `user.*`."""
    monitor, sink = watched()
    with monitor:
        for number in range(2):
            with monitor.round(number):
                with monitor.client("c0"):
                    monitor.log(loss=1.0 + number, mine=3)
                monitor.log({"server/lr": 0.1})
            monitor.log(accuracy=0.5 + number)
    assert sink.value("loss", node="c0", round=1) == 2
    assert sink.value("user.mine", node="c0", round=0) == 3
    assert sink.value("user.server/lr", node=None, round=1) == 0.1
    assert sink.value("accuracy", node=None, round=0) == 0.5
    assert sink.value("accuracy", node=None, round=1) == 1.5


def test_logged_loss_wins_over_measured_fit():
    """`loss` is what the user logged; a client that logged none has its fit after training."""
    monitor, sink = watched("deep")
    with monitor, monitor.round(0):
        for name in ("c0", "c1"):
            with monitor.client(name, make("mlp"), data=make_data(), loss=functional.cross_entropy):
                if name == "c0":
                    monitor.log(loss=42)
    assert sink.value("loss", node="c0") == 42
    assert sink.value("loss", node="c1") == sink.value("fit.loss_after", node="c1")


@pytest.mark.thorough
@pytest.mark.parametrize("clients", [2, 8])
def test_threads_never_mix(clients):
    """Clients that train at once, each on a thread of its own: each record is of its own client's training."""
    monitor, sink = watched("deep")
    caught, barrier = {}, threading.Barrier(clients)

    def work(name, seed):
        model = make("mlp", 7)
        with torch.no_grad():
            model[0].bias += seed
        caught[name] = Catcher(model)
        barrier.wait(PATIENCE)
        with monitor.client(name, model):
            monitor.log(seed=seed)
            logging.getLogger("train").warning("line of %d", seed)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            train(model, optimizer, make_data(seed=seed), 30, caught[name])

    with monitor, monitor.round(4):
        threads = [threading.Thread(target=work, args=(f"c{i}", i)) for i in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for i in range(clients):
        assert sink.value("steps", node=f"c{i}", round=4) == 30
        assert sink.value("user.seed", node=f"c{i}", round=4) == i
        assert [e.where.node for e in sink.events("log") if e.message == f"line of {i}"] == [f"c{i}"]
        norms = caught[f"c{i}"].norms()
        close(sink.value("gradient.norm", node=f"c{i}"), norms.mean())
        close(sink.value("gradient.norm_max", node=f"c{i}"), norms.max())
        close(sink.layers("gradient", node=f"c{i}").matrix, caught[f"c{i}"].merged())
    assert sink.value("clients", round=4) == clients
    assert not hooks_left()


def test_spans_nest_as_the_nodes_do():
    """Server, edge, client: each span's parent is the one around it, in one trace."""
    monitor, sink = watched()
    with monitor, monitor.round(0), monitor.edge("edge-0"), monitor.client("c0"), fv.timed("load"):
        pass
    spans = {span.name: span for span in sink.of(Span)}
    assert spans["round"].parent is None
    assert spans["edge"].parent == spans["round"].id
    assert spans["client"].parent == spans["edge"].id
    assert spans["load"].parent == spans["client"].id
    assert len({span.trace for span in spans.values()}) == 1
    assert (spans["client"].where.node, spans["client"].where.group) == ("c0", "edge-0")


def test_own_probes():
    """A function runs once a client-round, a pair (function, schedule) at its steps; both land under `user.*`."""

    def total(view):
        return {"total": sum(p.detach().sum() for p in view.parameters)}

    def now(view):
        return {"now": view.step}

    monitor, sink = watched(["light", total, (now, fv.every(2))])
    with monitor, monitor.round(0):
        model = client_round(monitor, steps=5)
    close(sink.value("user.total", node="c0", step=None), sum(float(p.detach().sum()) for p in model.parameters()))
    assert [(m.where.step, m.value) for m in sink.metrics("user.now")] == [(0, 0), (2, 2), (4, 4)]


@pytest.mark.parametrize(
    "result", [{"weight": torch.ones(3, 2)}, {"weight": torch.ones(4)}, {"unheard": torch.ones(4, 9)}]
)
def test_own_probe_with_a_wrong_array_harms_nobody_else(result):
    """An array of no known family or shape is refused with words; all other records are there."""
    monitor, sink = watched(["standard", lambda _view: result], strict=False)
    with monitor, monitor.round(0):
        client_round(monitor)
    assert len(sink.events("monitor.error")) == 1
    assert sink.layers("gradient", node="c0").get("count").all()
    assert sink.value("clients") == 1


@pytest.mark.parametrize("when", [None, fv.every(1)])
def test_failing_probe_is_told_once(when, caplog):
    """A probe that raises is reported once, training goes on; with `strict` it is raised."""

    def broken(_view):
        raise RuntimeError("a probe of the user's own")

    probes = ["standard", broken if when is None else (broken, when)]
    monitor, sink = watched(probes, strict=False)
    with monitor, caplog.at_level(logging.WARNING):
        for number in range(3):
            with monitor.round(number):
                client_round(monitor)
    assert len(sink.events("monitor.error")) == len(caplog.records) == 1
    assert sink.value("steps", round=2, node="c0") == 2
    monitor, _ = watched(probes)
    with pytest.raises(RuntimeError, match="user's own"), monitor, monitor.round(0):
        client_round(monitor)


@pytest.mark.thorough
def test_failing_sink_does_not_stop_the_others(caplog):
    """A sink that raises is told once and counted at the end; training and the other sink go on."""

    class Broken:
        def write(self, records):
            raise OSError("no space left")

    sink = MemorySink()
    monitor = fv.Monitor(None, sinks=[Broken(), sink])
    with caplog.at_level(logging.WARNING), monitor, monitor.round(0):
        client_round(monitor)
    assert sink.value("steps", node="c0") == 2
    assert monitor.lost > 0
    assert len([r for r in caplog.records if "no space left" in r.getMessage()]) == 1
    monitor = fv.Monitor(None, sinks=[Broken()], strict=True)
    with pytest.raises(OSError, match="no space"), monitor:
        monitor.log(x=1)


def test_same_name_twice_at_once():
    """The second is refused with words and unwatched; the first is watched to its own end."""
    monitor, sink = watched(strict=False)
    with monitor, monitor.round(0), monitor.client("c0", make("mlp")):
        client_round(monitor, "c0", 3)
        monitor.log(still=1)
        assert current.get().node == "c0"
    assert "already open" in sink.events("monitor.error")[0].message
    assert sink.value("user.still", node="c0") == 1
    assert sink.value("steps", node="c0") == 0
    assert current.get() is None
    strict, _ = watched()
    with pytest.raises(ConfigError, match="already open"), strict, strict.client("c0"), strict.client("c0"):
        pass


def test_round_that_was_not_closed():
    """Beginning another round closes it, with a warning."""
    monitor, sink = watched()
    with monitor:
        monitor.host.round_begin(0)
        monitor.host.round_begin(1)
        monitor.host.round_end(1)
    assert [e.name for e in sink.events()] == ["round.unclosed"]
    assert [m.where.round for m in sink.metrics("time.round")] == [0, 1]
    assert current.get() is None


def test_close_closes_everything_once():
    """Scopes that are still open are ended; a second close does nothing; nothing opens again after."""
    monitor, sink = watched()
    model = make("mlp")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor.host.round_begin(0)
    monitor.host.client_begin("c0", model)
    train(model, optimizer, make_data(), 2)
    monitor.close()
    monitor.close()
    assert sink.closed == 1
    assert sink.value("steps", node="c0") == 2
    assert not hooks_left(model, optimizer)
    unused, other = watched()
    unused.close()
    unused.log(x=1)
    assert other.records == []


def test_every_run_record_says_when_it_started():
    """From the first on: a run that is killed later is still dated."""
    sink = MemorySink()
    tiny_run(sinks=[sink], strict=True)
    runs = sink.of(Run)
    assert holds_for_each(run.started > 0 and run.versions for run in runs)
    assert runs[-1].finished >= runs[-1].started
    assert {table.rows for table in runs[-1].tables} == {"class", "model", "parameter"}


def test_log_lines_of_two_monitors_stay_apart():
    """A line that is written inside one run's scope is not told by another run's monitor."""
    (one, first), (two, second) = watched(), watched()
    with one, two:
        two.log(x=1)
        with one.round(0), one.client("c0"):
            logging.getLogger("train").warning("low battery")
    assert [(e.where.node, e.message) for e in first.events("log")] == [("c0", "low battery")]
    assert not second.events("log")


def test_findings():
    """Without detectors the answer says so; with one, it is asked after each round, live."""
    monitor, _ = watched(detectors=())
    with monitor, monitor.round(0):
        pass
    assert "no detector is installed" in str(monitor.findings())

    def still(history, number):
        for node, norm in history.latest("update.norm", number).items():
            if norm == 0:
                run = monitor.run.id
                yield Finding(Where(run, number, node), 0.0, "still", "warning", 0.9, f"{node} does not move")

    monitor, sink = watched(detectors=[still])
    with monitor:
        for number in range(2):
            with monitor.round(number):
                client_round(monitor)
                with monitor.client("idle", make("mlp")):
                    pass
        found = monitor.findings()
    assert [(f.where.round, f.where.node) for f in found] == [(0, "idle"), (1, "idle")]
    assert "idle does not move" in str(found)
    assert len(sink.of(Finding)) == 2


@pytest.mark.thorough
@pytest.mark.parametrize("probes", ["light", "standard", "deep"])
def test_every_name_is_in_the_catalogue(probes):
    """Whatever a preset emits is documented."""
    sink = MemorySink()
    tiny_run(sinks=[sink], probes=probes, strict=True)
    assert sink.names() <= set(CATALOG)
    assert {"update.norm", "update.cosine_mean", "clients", "time.round", "monitor.cost"} <= sink.names()


def test_transfers_add_up():
    """Bytes are told as they go, and summed per node at the round's end."""
    monitor, sink = watched()
    with monitor, monitor.round(0):
        for _ in range(2):
            monitor.transfer("server", "c0", 100, raw_bytes=400, kind="model")
            monitor.transfer("c0", "server", 30)
    assert sink.value("traffic.received", node="c0") == 200
    assert sink.value("traffic.sent", node="c0") == 60
    assert sink.value("traffic.received", node="server") == 60


def test_statistics_that_the_host_computed():
    """`stats` takes a matrix of the layers announced last, and the round sums it up."""
    monitor, sink = watched()
    rows = torch.ones(4, 9).numpy()
    with monitor, monitor.round(0, make("mlp")):
        monitor.host.stats("c0", "gradient", rows)
        monitor.host.stats("c1", "gradient", rows)
    assert sink.layers("gradient", node="c1").matrix.tolist() == rows.tolist()
    assert sink.layers("gradient", node=None).matrix[:, SUM].tolist() == [2] * 4


def test_public_checks_hold_for_our_own():
    """The contract checks accept what we ship, and refuse what breaks the contract."""
    check_sink(MemorySink)
    check_detector(lambda history, number: [])
    with pytest.raises(AssertionError, match="no family"):
        check_probe(lambda view: {"mine": torch.ones(4, 2)})
    with pytest.raises(AssertionError, match="random stream"):
        check_probe(lambda view: {"mine": torch.rand(())})
    with pytest.raises(AssertionError, match="not pure"):
        check_detector(lambda h, n: [Finding(Where("", n), time.time_ns(), "x", "note", 1, "x")] if h.rounds() else [])
    with pytest.raises(AssertionError, match="refused"):
        check_sink(type("Bad", (), {"write": lambda self, records: records[5]}))


def test_kinds_of_records():
    """A whole tiny run has each kind that a plain loop can give."""
    sink = MemorySink()
    tiny_run(sinks=[sink], strict=True)
    assert {type(r) for r in sink.records} >= {Run, Metric, LayerStats, Span, Event, Sketch}
    keys = [(r.source, r.sequence) for r in sink.records if not isinstance(r, Run)]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [({"sinks": ["prometheus"]}, "method write"), ({"sinks": "prometheus"}, "got 'p'"), ({"capture": 3}, "fv.Capture")],
)
def test_what_is_no_sink_and_no_capture_is_refused_before_anything_is_lost(wrong, words):
    with pytest.raises(ConfigError, match=words):
        fv.Monitor(None, **wrong)
