# SPDX-License-Identifier: Apache-2.0
"""Names of clients are taken as their text, and rounds are counted by integers; anything else is refused clearly."""

import copy
import enum
import uuid
from pathlib import Path

import numpy as np
import pytest
import torch

import fedvitals as fv
from fedvitals.errors import ConfigError
from fedvitals.records import Event, Metric, Transfer, Where, as_round_index, node_name
from fedvitals.resources.capture import Captures
from fedvitals.sinks.curves import Curves
from fedvitals.store import MemoryStore, open_reader
from fedvitals.store.read import queries
from fedvitals.transport.sender import Sender
from support.conditions import holds_for_each
from support.models import mlp


class Site(enum.Enum):
    NORTH = "north"


class Ward(str, enum.Enum):  # noqa: UP042 - what people write
    ICU = "icu"


ID = uuid.UUID(int=7)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c7", "c7"),
        (7, "7"),
        (np.int64(7), "7"),
        (torch.tensor(7), "7"),
        (np.str_("c7"), "c7"),
        (Site.NORTH, "Site.NORTH"),
        (Ward.ICU, "icu"),
        (Path("sites/north"), "sites/north"),
        (ID, str(ID)),
        (1.5, "1.5"),
        (True, "True"),
    ],
)
def test_a_name_is_its_text(name, text):
    assert node_name(name) == text
    assert type(node_name(name)) is str


@pytest.mark.parametrize("name", [None, "", "  "])
def test_what_has_no_text_is_no_name(name):
    with pytest.raises(ConfigError, match="needs a name, for example 'c7' or 7; got"):
        node_name(name)


@pytest.mark.parametrize("number", [3, np.int64(3), np.uint8(3), torch.tensor(3)])
def test_integers_of_any_kind_are_rounds(number):
    assert as_round_index(number) == 3
    assert type(as_round_index(number)) is int


@pytest.mark.parametrize("number", ["zero", "3", 1.5, 2.0, None, -1, 1 << 60, torch.tensor([1, 2]), [0]])
def test_anything_else_is_no_round(number):
    with pytest.raises(ConfigError, match="A round's number is an integer from 0 on"):
        as_round_index(number)


def train(monitor, names, rounds, ill=None):
    """Clients by these names; the ill one sends NaN from the second round on. Gives the final weights."""
    torch.manual_seed(0)
    shared, x = mlp(), torch.randn(10, 12)
    for number in rounds:
        updates = {}
        with monitor.round(number, shared):
            for name in names:
                model = copy.deepcopy(shared)
                optimizer = torch.optim.SGD(model.parameters(), 0.1)
                with monitor.client(name, model):
                    model(x).square().mean().backward()
                    optimizer.step()
                with torch.no_grad():
                    updates[name] = [p - q for p, q in zip(model.parameters(), shared.parameters(), strict=True)]
                    if name == ill and number >= 1:
                        updates[name][0][0, 0] = torch.nan
            monitor.updates(number, updates)
            monitor.log(accuracy=0.5)
            with torch.no_grad():
                for i, parameter in enumerate(shared.parameters()):
                    parameter.add_(torch.stack([u[i] for c, u in updates.items() if c != ill]).mean(0))
    return [p.detach() for p in shared.parameters()]


@pytest.mark.thorough
@pytest.mark.parametrize("names", [list(range(5)), list(np.arange(5)), list(torch.arange(5)), list("01234")])
def test_clients_named_by_numbers_are_judged_as_those_named_by_texts(names, tmp_path):
    store = tmp_path / "runs.db"
    with fv.Monitor(store, strict=True, machine=False) as monitor:
        train(monitor, names, range(4), ill=names[2])
        found = monitor.findings()
        assert {(case.issue, case.node) for case in found.cases} >= {("NAN_UPDATE", "2")}
    assert monitor.lost == 0
    with open_reader(store) as reader:
        history = reader.history(monitor.run.id)
        assert history.nodes() == ["0", "1", "2", "3", "4", "server"]
        for number in range(4):
            assert list(history.latest("steps", number)) == ["0", "1", "2", "3", "4"]


def test_every_call_takes_names_that_are_no_texts():
    memory = MemoryStore(everything=True)
    with fv.Monitor(None, sinks=[memory], strict=True, machine=False) as monitor:
        monitor.host.round_begin(0, mlp())
        model = mlp()
        with monitor.edge(100):
            monitor.host.client_begin(1, model, group=100)
            monitor.log(loss=0.5, node=1)
            monitor.host.client_end(np.int64(1))
        monitor.host.event("info", "hello", "text", node=2)
        monitor.transfer("server", 3, 100)
        monitor.transfer(3, "server", 200)
        monitor.host.stats(4, "update", np.zeros((4, 9)))
        monitor.host.stats([5, 6], "update", np.zeros((2, 4, 9)))
        monitor.host.spent("aggregate", 0.1, Site.NORTH)
        monitor.exchange(7, 1.0, 1.1, 1.2, 1.3)
        monitor.host.span(8, "train", 0.0, 1.0, group=9)
        monitor.host.expect(1)
        assert "baggage" in monitor.host.headers(1)
        with monitor.part("evaluate", 0):
            pass
        worker = monitor.host.for_worker()
        with worker.client(1, mlp()):
            worker.log(accuracy=0.5)
        worker.transfer(1, "server", 10)
        worker.event("info", "hello", "text", node=1)
        monitor.host.absorb(worker.payload())
        monitor.host.truth({"kind": "label_noise", "nodes": [1, 2]})
        monitor.host.round_end(0)
    nodes = {record.where.node for record in memory.records(monitor.run.id, Metric)} - {None, "server"}
    assert nodes >= {"1"}
    assert holds_for_each(isinstance(node, str) for node in nodes)
    assert memory.truth_of(monitor.run.id)[0].nodes == ("1", "2")


def test_corrections_come_back_with_the_text_of_the_name():
    with fv.Monitor(None, strict=True, machine=False, cure="auto") as monitor:
        shared = mlp()
        good = [torch.ones_like(p) for p in shared.parameters()]
        bad = [torch.full_like(p, torch.nan) for p in shared.parameters()]
        with monitor.round(0, shared):
            actions = monitor.updates(0, {0: good, 1: bad, 2: good})
        assert [(action.kind, action.target) for action in actions] == [("exclude", "1")]
        with monitor.round(np.int64(1), shared):
            updates, weights = monitor.corrections().apply({0: good, 1: bad, 2: good}, {0: 5, 1: 5, 2: 7})
        assert ([*updates], weights) == ([0, 2], {0: 5, 2: 7})


def test_a_name_given_twice_in_two_ways_is_one_client():
    monitor = fv.Monitor(None, strict=True, machine=False)
    with monitor, monitor.round(0), monitor.client(7), pytest.raises(ConfigError, match="Client '7' is already open"):
        monitor.host.client_begin("7", mlp())


@pytest.mark.parametrize("number", ["zero", 1.5, None, -1])
def test_a_round_without_a_number_is_refused_before_anything_is_written(tmp_path, number):
    with fv.Monitor(tmp_path / "runs.db", strict=True, machine=False) as monitor:
        with pytest.raises(ConfigError, match="A round's number is an integer from 0 on"):
            monitor.host.round_begin(number, mlp())
        with pytest.raises(ConfigError, match="A round's number is an integer from 0 on"):
            monitor.updates(number, {})
    assert not (tmp_path / "runs.db").exists()


def test_a_refused_round_stops_no_training_and_spoils_no_other_round(tmp_path, caplog):
    """What happens in it belongs to no round; the log says why, and nobody calls the run healthy."""
    store, names = tmp_path / "runs.db", ["a", "b", "c"]
    with fv.Monitor(None, detectors=(), machine=False) as unwatched:
        expected = train(unwatched, names, [0, 1, 2, 3])
    with fv.Monitor(store, machine=False) as monitor:
        torch.manual_seed(0)
        rounds = [0, "one", 2, None]
        weights = _train_with(monitor, names, rounds)
        findings = str(monitor.findings())
    assert holds_for_each(torch.equal(a, b) for a, b in zip(expected, weights, strict=True))
    assert "A round's number is an integer from 0 on, for example monitor.round(3); got 'one'." in caplog.text
    assert "Not fully examined: opening a round failed (ConfigError)" in findings
    assert monitor.lost == 0
    with open_reader(store) as reader:
        history = reader.history(monitor.run.id)
        assert history.rounds() == [0, 2]
        assert list(history.latest("steps", 0)) == names
        ((per_round,),) = reader.database.rows(
            "SELECT MAX(n) FROM (SELECT COUNT(*) AS n FROM metrics WHERE name = 'steps' GROUP BY round, node)"
        )
        assert per_round <= 2  # those of no round
        assert queries.summary_of(reader, monitor.run.id).rounds == 2


def _train_with(monitor, names, rounds):
    class Renumbered:
        """Counts the rounds as the wrong host does, whatever number it is asked for."""

        round = staticmethod(lambda number, model: monitor.round(rounds[number], model))
        updates = staticmethod(lambda number, updates: monitor.updates(rounds[number], updates))
        client, log = monitor.client, monitor.log

    return train(Renumbered, names, range(len(rounds)))


@pytest.mark.parametrize("name", [None, ""])
def test_a_client_without_a_name_stops_no_training(name, caplog):
    with fv.Monitor(None, machine=False) as monitor, monitor.round(0, mlp()):
        with monitor.client(name, mlp()):
            pass
        monitor.host.client_end(name)
        monitor.log(loss=1.0)
    assert "needs a name" in caplog.text


def test_whoever_chooses_clients_by_name_may_use_numbers():
    assert Sender(7, "run").node == "7"
    captured = Captures(fv.Capture(rounds=(0,), nodes=(7,)))
    assert captured.begin("7", 0, mlp(), lambda *_: None) is not None
    assert captured.begin("8", 0, mlp(), lambda *_: None) is None
    drawn = Curves(nodes=[7]).of([Metric(Where("r", 0, name), 0.0, "loss", 1.0) for name in ("7", "8")])
    assert len(drawn) == len(Curves(nodes=["7"]).of([Metric(Where("r", 0, "7"), 0.0, "loss", 1.0)]))


RESERVED = ["edge-0", "cluster-1", "ring-2", "star-3", "server"]  # what fedvitals calls groups and the server
RECORDED = [f"{name} (client)" for name in RESERVED]


def test_clients_may_be_named_as_groups_and_the_server_are(tmp_path, caplog):
    store = tmp_path / "runs.db"
    with fv.Monitor(store, strict=True, machine=False) as monitor:
        train(monitor, RESERVED, range(4), ill="edge-0")
        assert ("NAN_UPDATE", RECORDED[0]) in {(case.issue, case.node) for case in monitor.findings().cases}
    assert caplog.text.count("is recorded as") == 1
    with open_reader(store) as reader:
        assert {*reader.history(monitor.run.id).nodes()} == {*RECORDED, "server"}
        assert queries.summary_of(reader, monitor.run.id).clients == len(RESERVED)


def test_every_call_knows_a_client_that_is_recorded_under_another_name():
    memory = MemoryStore(everything=True)
    with fv.Monitor(None, sinks=[memory], strict=True, machine=False, host="pipes") as monitor:
        monitor.host.round_begin(0, mlp())
        for name in RESERVED:
            monitor.host.expect(name)
            worker = monitor.host.for_worker()
            with worker.client(name, mlp()):
                worker.log({"loss": 0.5})
            monitor.exchange(name, 1.0, 1.1, 1.2, 1.3)
            monitor.host.absorb(worker.payload(), name)
            monitor.host.log_of_sender({"accuracy": 0.5}, name)
        monitor.updates(0, {name: [torch.ones(3)] for name in RESERVED})
        monitor.transfer("server", "edge-0", 100)
        monitor.log({"update.staleness": 1.0}, node="ring-2")
        monitor.host.event("warning", "update.late", "text", node="cluster-1")
        monitor.host.round_end(0)
    run = monitor.run.id
    assert "telemetry.refused" not in {event.name for event in memory.records(run, Event)}
    for name in ("loss", "accuracy", "update.norm"):
        assert {m.where.node for m in memory.records(run, Metric) if m.name == name} >= {*RECORDED}
    assert {m.where.node for m in memory.records(run, Metric) if m.name == "update.staleness"} == {RECORDED[2]}
    assert {e.where.node for e in memory.records(run, Event) if e.name == "update.late"} == {RECORDED[1]}
    assert ("server", RECORDED[0]) in {(t.sender, t.receiver) for t in memory.records(run, Transfer)}


def test_groups_and_the_server_keep_their_names():
    memory = MemoryStore(everything=True)
    with fv.Monitor(None, sinks=[memory], strict=True, machine=False) as monitor, monitor.round(0, mlp()):
        with monitor.edge("edge-0", mlp()), monitor.client("c1", mlp()):
            pass
        monitor.transfer("server", "edge-0", 100)
        monitor.log({"load": 0.5}, node="edge-0")
    run = monitor.run.id
    assert {m.where.node for m in memory.records(run, Metric) if m.name == "user.load"} == {"edge-0"}
    assert {(t.sender, t.receiver) for t in memory.records(run, Transfer)} == {("server", "edge-0")}
