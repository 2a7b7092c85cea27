# SPDX-License-Identifier: Apache-2.0
"""A lab experiment as a Flower app: the same weights to the last bit, whatever fails on a node is told by name."""

import dataclasses
import functools

import msgspec
import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict

from fedvitals import lab
from fedvitals.errors import ConfigError, RecordError
from fedvitals.hosts.flower.lab import messages
from fedvitals.hosts.flower.lab.app import LabAppSettings, client_app, main, server_app
from fedvitals.hosts.flower.lab.engine import FlowerEngine
from fedvitals.hosts.flower.lab.observer import read_watcher, write_watcher
from fedvitals.lab.engines.site import Site
from fedvitals.lab.engines.tasks import Task
from fedvitals.measurements import single_records
from fedvitals.monitor.monitor import Monitor
from fedvitals.monitor.workers import WorkerObserver
from fedvitals.protocols import NullObserver
from fedvitals.records import Run
from fedvitals.store import open_reader
from fedvitals.testing import MemorySink
from fedvitals.transport.wire.payload import decode, encode
from fedvitals_studies.flower.process_identity import flower_run
from support.conditions import holds_for_each
from support.flower.grid import InProcessGrid

LOCAL = lab.Local(iterations=3, batch=8, optimizer=lab.adam(), clip=lab.Clip())
NODES = (900, 30, 4000)
BUDGETED = ("time.", "monitor.", "memory.", "fit.", "scale.", "loss")  # measured as far as there is time for it


def experiment(**changes):
    small = {
        "dataset": lab.synthetic(samples=160),
        "model": "mlp",
        "clients": 5,
        "rounds": 2,
        "local": LOCAL,
        "seed": 3,
    }
    return lab.Experiment(**{**small, **changes})


@pytest.fixture(autouse=True)
def a_run():
    with flower_run():
        yield


def through(e, grid, observer=None, **more):
    return lab.run(e, observer, engine=functools.partial(FlowerEngine, grid=grid, **more))


def same(e, observer=None, **more):
    found = through(e, InProcessGrid(client_app, NODES), observer, **more)
    assert torch.equal(found.state, lab.run(e, engine="sequential").state)
    return found


CASES = {
    "centralized": {},
    "part of the clients": {"participation": 0.6, "partition": lab.quantity_skew()},
    "edges that average": {"topology": lab.Hierarchical(edges=2)},
    "rings": {"topology": "rings"},
    "clusters": {"topology": "clustered"},
    "asynchronous": {
        "topology": lab.Asynchronous(buffer=3),
        "network": lab.Network(links={"4g": 0.5, "3g": 0.5}, devices="phone"),
    },
    "epochs": {"local": lab.Local(epochs=1, batch=8), "partition": lab.quantity_skew()},
    "ill": {
        "faults": [
            lab.label_noise(nodes=["c1"], rate=0.8),
            lab.sign_flip(nodes=["c2"], since=1),
            lab.wrong_learning_rate(nodes=["c3"]),
            lab.stale_update(nodes=["c4"], since=1),
        ]
    },
    "set up badly": {"faults": [lab.client_drift(iterations=4)]},  # which is no longer the same when applied twice
    "robust, compressed": {"aggregator": lab.trimmed_mean(0.2), "compression": "int8"},
}


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
def test_the_same_weights_as_in_one_process(case):
    same(experiment(**CASES[case]))


@pytest.mark.thorough
def test_watched_and_images():
    sink = MemorySink()
    e = experiment(dataset="digits", model="cnn", clients=4)
    with Monitor(None, sinks=[sink], strict=True) as monitor:
        result = same(e, monitor)
        monitor.flush()
    assert result.engine == "flower"
    clients = {r.where.node for r in sink.records if type(r).__name__ == "Span" and r.name == "client"}
    assert clients == set(e.nodes)
    assert not [r for r in sink.records if type(r).__name__ == "Event" and r.level in ("warning", "error")]


def test_what_is_recorded_is_what_one_process_records():
    def recorded(engine):
        sink = MemorySink()
        with Monitor(None, sinks=[sink], strict=True, machine=False) as monitor:
            lab.run(experiment(rounds=1), monitor, engine=engine)
        metrics = {(r.name, r.where.node) for r in sink.records if type(r).__name__ == "Metric"}
        layers = [r for r in sink.records if type(r).__name__ == "LayerStats"]
        gradients = {(r.family, r.where.node): r.matrix for r in layers if r.family == "gradient"}
        return {name for name in metrics if not name[0].startswith(BUDGETED)}, gradients

    there, gradients = recorded(functools.partial(FlowerEngine, grid=InProcessGrid(client_app, NODES)))
    here, expected = recorded("sequential")
    assert there == here
    assert gradients.keys() == expected.keys()
    for key, matrix in gradients.items():
        np.testing.assert_allclose(matrix, expected[key], rtol=1e-4, err_msg=str(key))


def test_one_message_for_each_node_and_clients_by_sorted_ids():
    grid = InProcessGrid(client_app, NODES)
    through(experiment(rounds=1), grid)
    asked = {m.metadata.dst_node_id: [t.nodes for t in messages.read_request(m.content).tasks] for m in grid.asked}
    assert asked == {30: [("c0",), ("c3",)], 900: [("c1",), ("c4",)], 4000: [("c2",)]}
    assert [len(m.content.array_records) for m in grid.asked] == [1, 1, 1]
    assert holds_for_each(
        len(record) == 1 for m in grid.asked for record in m.content.array_records.values()
    )  # one start


# -- what goes wrong --------------------------------------------------------------------------------------------------


def failures(change, e=None, **more):
    """Who failed in round 0, and what was said of it, where answers of the node 900 (of c1 and c4) are changed."""
    sink = MemorySink()
    grid = InProcessGrid(client_app, NODES, lambda node, reply: change(reply) if node == 900 else reply)
    with Monitor(None, sinks=[sink], strict=False) as monitor:
        result = through(e or experiment(rounds=1), grid, monitor, **more)
    assert len(result.rounds) == (e or experiment(rounds=1)).rounds
    events = [r for r in sink.records if type(r).__name__ == "Event"]
    return {r.where.node: r.message for r in events if r.name == "client.failed"}, events


def test_a_node_that_does_not_answer():
    told, _ = failures(lambda reply: None, timeout=0.1)
    assert set(told) == {"c1", "c4"}
    assert "SuperNode 900 did not answer within 0 s" in told["c1"]


def asked_in(grid, rounds):
    by_round = [[m.metadata.dst_node_id for m in grid.asked if m.metadata.group_id == str(n)] for n in range(rounds)]
    return [sorted(nodes) for nodes in by_round]


def test_who_owes_an_answer_is_left_in_peace_until_it_comes():
    held = []

    def late(node, reply):
        if node == 900 and not held:
            held.append(reply)
            return None
        if node == 4000 and grid.asked[-1].metadata.group_id == "1":
            grid.late(held[0])
        return reply

    grid = InProcessGrid(client_app, NODES, late)
    through(experiment(rounds=4), grid, timeout=0.1)
    assert asked_in(grid, 4) == [[30, 900, 4000], [30, 4000], [30, 900, 4000], [30, 900, 4000]]


def test_all_that_owe_are_asked_again():
    grid = InProcessGrid(client_app, NODES, lambda *_: None)
    result = through(experiment(rounds=2), grid, timeout=0.05)
    assert asked_in(grid, 2) == [[30, 900, 4000], [30, 900, 4000]]
    site = Site.of(experiment())
    assert torch.equal(result.state, site.layout.flat(site.module))  # nobody has trained, and it went on


def test_a_node_that_fails_is_told_with_its_words():
    def fails(message, context):
        if context.node_id == 900:
            raise FileNotFoundError("no data here")
        return client_app(message, context)

    sink = MemorySink()
    with Monitor(None, sinks=[sink]) as monitor:
        result = through(experiment(rounds=1), InProcessGrid(fails, NODES), monitor)
    assert len(result.rounds) == 1
    told = {r.where.node: r.message for r in sink.records if type(r).__name__ == "Event" and r.name == "client.failed"}
    assert set(told) == {"c1", "c4"}
    assert "SuperNode 900 failed (code 2)" in told["c4"]
    assert "no data here" in told["c4"]


def test_a_client_that_crashes_fails_alone():
    e = experiment(rounds=1, faults=[lab.crash(nodes=["c1"])])
    same(e)
    told, _ = failures(lambda reply: reply, e)
    assert set(told) == {"c1"}


def answered(reply, arrays=None, **changes):
    config = {**reply.content[messages.KEY], **changes}
    config = {key: value for key, value in config.items() if value is not None}
    states = reply.content[f"{messages.KEY}.states"] if arrays is None else ArrayRecord(arrays)
    content = RecordDict({messages.KEY: ConfigRecord(config), f"{messages.KEY}.states": states})
    return Message(content=content, reply_to=_asked(reply))


def _asked(reply):
    """A message to which the same reply could be one."""
    request = Message(content=RecordDict({}), dst_node_id=reply.metadata.src_node_id, message_type="train")
    request.metadata.__dict__["_message_id"] = reply.metadata.reply_to_message_id
    return request


def states(rows=2, size=None, dtype=torch.float32):
    size = Site.of(experiment()).layout.size if size is None else size
    return {"states": Array(torch.zeros(rows, size, dtype=dtype).numpy()), "losses": Array(torch.zeros(6).numpy())}


LIES = {
    "nothing": lambda reply: Message(content=RecordDict({}), reply_to=_asked(reply)),
    "another version": functools.partial(answered, version=99),
    "no version": functools.partial(answered, version=None),
    "no JSON": functools.partial(answered, updates="{"),
    "no updates": functools.partial(answered, updates="[]"),
    "unknown fields": functools.partial(answered, updates='[{"node": "c1", "evil": 1}]'),
    "other clients": lambda reply: answered(
        reply, updates=reply.content[messages.KEY]["updates"].replace('"c1"', '"c0"')
    ),
    "fewer than no steps": lambda reply: answered(
        reply, updates=reply.content[messages.KEY]["updates"].replace('"steps":3', '"steps":-3')
    ),
    "no payload": functools.partial(answered, payload=None),
    "payload of text": functools.partial(answered, payload="text"),
    "too few states": lambda reply: answered(reply, states(rows=1)),
    "states of another size": lambda reply: answered(reply, states(size=7)),
    "far too many": lambda reply: answered(reply, states(rows=3000)),
    "doubles": lambda reply: answered(reply, states(dtype=torch.float64)),
    "no losses": lambda reply: answered(reply, {"states": states()["states"]}),
    "no array": lambda reply: answered(
        reply, {**states(), "states": Array("float32", (2, 3), "numpy.ndarray", b"\x93NUMPY not at all")}
    ),
    "an array of objects": lambda reply: answered(
        reply, {**states(), "states": Array("float32", (2, 3), "pickle", b"cos\nsystem\n(S'true'\ntR.")}
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("lie", LIES)
def test_an_answer_that_lies_costs_only_its_own_clients(lie):
    told, _ = failures(LIES[lie])
    assert set(told) == {"c1", "c4"}, told
    assert "The answer of the SuperNode 900 cannot be used" in told["c1"]


def test_telemetry_of_others_is_refused_and_the_round_goes_on():
    stolen = {}

    def steal(node, reply):
        payload = reply.content[messages.KEY]["payload"]
        stolen.setdefault(node, payload)
        return answered(reply, payload=stolen[30]) if node == 900 else reply

    sink = MemorySink()
    grid = InProcessGrid(client_app, NODES, steal)
    with Monitor(None, sinks=[sink]) as monitor:
        result = through(experiment(rounds=1), grid, monitor)
    assert torch.equal(result.state, lab.run(experiment(rounds=1), engine="sequential").state)
    refused = [r for r in sink.records if type(r).__name__ == "Event" and r.name == "telemetry.refused"]
    assert {r.where.node for r in refused} == {"c1", "c4"}
    lost = [r for r in sink.records if type(r).__name__ == "Event" and r.name == "worker.lost"]
    assert {r.where.node for r in lost} == {"c1", "c4"}


def test_telemetry_that_moves_a_client_to_another_group_is_refused():
    def move(node, reply):
        sent = single_records(decode(reply.content[messages.KEY]["payload"]))
        moved = [r if isinstance(r, Run) else dataclasses.replace(r, where=in_group(r.where, "c0")) for r in sent]
        return answered(reply, payload=encode(moved)) if node == 900 else reply

    def in_group(where, group):
        return dataclasses.replace(where, group=group if where.node == "c1" else where.group)

    sink = MemorySink()
    with Monitor(None, sinks=[sink]) as monitor:
        through(experiment(rounds=1), InProcessGrid(client_app, NODES, move), monitor)
    assert {event.where.node for event in sink.events("telemetry.refused")} == {"c1", "c4"}
    assert {r.where.group for r in sink.records if not isinstance(r, Run)} == {None}


def test_garbage_in_the_place_of_telemetry_is_counted():
    told, events = failures(functools.partial(answered, payload=b"garbage"))
    assert not told
    assert {e.where.node for e in events if e.name == "worker.lost"} == {"c1", "c4"}


def test_too_few_nodes():
    words = []
    grid = InProcessGrid(client_app, [1])
    with pytest.raises(ConfigError, match=r"Waited 0 s for 3 SuperNodes, and 1 are connected.*--workers"):
        through(experiment(), grid, nodes=3, patience=0.0, say=words.append)
    assert words == ["waiting for 3 SuperNodes, 1 connected"]


def test_a_node_that_is_gone_leaves_its_clients_to_the_others():
    e = experiment(rounds=2)
    grid = InProcessGrid(client_app, NODES)
    engine = functools.partial(FlowerEngine, grid=grid, nodes=3)
    last = None
    for result in lab.rounds(e, engine=engine):
        last, grid.nodes = result, [30]
    assert torch.equal(last.state, lab.run(e, engine="sequential").state)


# -- what is refused --------------------------------------------------------------------------------------------------


def test_what_cannot_go_to_other_machines_is_refused_before_anything_runs():
    grid = InProcessGrid(client_app, NODES)
    own = lab.Own(lambda: torch.nn.Linear(32, 10))
    with pytest.raises(ConfigError, match="your own object"):
        through(experiment(model=own), grid)
    with pytest.raises(ConfigError, match="keep_optimizer"):
        through(experiment(local=lab.Local(iterations=2, keep_optimizer=True)), grid)
    with pytest.raises(ConfigError, match="use another engine"):
        through(experiment(aggregator="feddyn"), grid)
    with (
        Monitor(None, probes=["standard", lambda view: {"user.x": 1.0}]) as monitor,
        pytest.raises(ConfigError, match="Probes of your own"),
    ):
        through(experiment(), grid, monitor)
    assert not grid.asked


def test_an_exchange_of_your_own():
    site = Site.of(experiment())
    task = Task(0, ("c0", "c1"), site.layout.flat(site.module), exchange=lambda states, samples: states)
    with FlowerEngine(site, InProcessGrid(client_app, NODES)) as engine, pytest.raises(ConfigError, match="exchange"):
        next(engine.train([task], NullObserver()))


def test_a_name_alone_is_not_enough():
    with pytest.raises(ConfigError, match=r"fedvitals lab EXPERIMENT\.toml --engine flower"):
        lab.run(experiment(), engine="flower")


def test_the_observer_travels_whole():
    with Monitor(None, run="there and back", probes="light", privacy=2) as monitor:
        monitor.host.round_begin(4, torch.nn.Linear(3, 2))
        sent = monitor.host.for_worker()
        found = read_watcher(*write_watcher(sent))
        assert isinstance(found, WorkerObserver)
        for field in dataclasses.fields(WorkerObserver):
            if field.name not in ("preset", "monitor_process"):
                assert getattr(found, field.name) == getattr(sent, field.name), field.name
        assert found.preset.name == "light"
        assert found.monitor_process is None  # it means nothing on another machine
        assert found.initial is not None
        monitor.host.discard()
    for text in ("{}", "null", '{"run": 1}', "x"):
        with pytest.raises(RecordError, match="cannot be read"):
            read_watcher(text, b"")
    with pytest.raises(RecordError, match="bytes"):
        read_watcher(write_watcher(sent)[0], b"123")


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("tasks", "[]]", "cannot be read"),
        ("tasks", 7, "type str"),
        ("experiment", None, "type str"),
        ("version", 2, "same fedvitals"),
        ("initial", "x", "type bytes"),
    ],
)
def test_clients_check_what_they_are_asked(field, value, words):
    site = Site.of(experiment())
    start = site.layout.flat(site.module)
    task = Task(0, ("c0",), start)
    content = messages.write_request([task], experiment().to_toml(), NullObserver(), messages.arrays_by_state([start]))
    assert messages.read_request(content).tasks[0].nodes == ("c0",)
    if value is None:
        del content[messages.KEY][field]
    else:
        content[messages.KEY][field] = value
    with pytest.raises(RecordError, match=words):
        messages.read_request(content)


def test_clients_refuse_what_does_not_fit_to_the_experiment():
    grid = InProcessGrid(client_app, [1])
    for task in (Task(0, ("c9",), torch.zeros(10)), Task(0, ("c0",), torch.zeros(3))):
        content = messages.write_request(
            [task], experiment().to_toml(), NullObserver(), messages.arrays_by_state([task.start])
        )
        (name,) = grid.push_messages([Message(content=content, dst_node_id=1, message_type="train")])
        (reply,) = grid.pull_messages([name])
        assert "does not fit the experiment" in reply.error.reason


# -- the whole app ----------------------------------------------------------------------------------------------------


def context(**settings):
    told = msgspec.to_builtins(LabAppSettings(**settings))
    return Context(run_id=7, node_id=1, node_config={}, state=RecordDict(), run_config=told)


@pytest.mark.thorough
def test_the_server_app_writes_the_store_and_can_go_on(tmp_path, caplog):
    e, store, folder = experiment(rounds=4), tmp_path / "runs.db", tmp_path / "state"
    grid = InProcessGrid(client_app, NODES)
    short = msgspec.structs.replace(e, rounds=4)
    told = {"experiment": short.to_toml(), "store": str(store), "run": "lab-1", "checkpoint": str(folder), "nodes": 3}
    stop = InProcessGrid(client_app, NODES)
    stop.get_node_ids = lambda: (_ for _ in ()).throw(KeyboardInterrupt) if len(stop.asked) >= 6 else NODES
    with pytest.raises(KeyboardInterrupt):
        server_app(grid=stop, context=context(**told))
    server_app(grid=grid, context=context(**told, resume=True))
    with open_reader(store) as reader:
        assert reader.history("lab-1").rounds() == [0, 1, 2, 3]
        accuracy = reader.history("lab-1").series("accuracy", None)[1]
    wanted = [r.metrics["accuracy"] for r in lab.run(e, engine="sequential").rounds]
    assert accuracy == wanted


def test_the_server_app_answers_wrong_settings(monkeypatch):
    monkeypatch.delenv("FEDVITALS_STORE", raising=False)
    grid = InProcessGrid(client_app, NODES)
    with pytest.raises(ConfigError, match="FEDVITALS_STORE"):
        main(grid, context(experiment=experiment().to_toml()))
    wrong = Context(run_id=7, node_id=1, node_config={}, state=RecordDict(), run_config={"experimnt": ""})
    with pytest.raises(ConfigError, match="cannot be read"):
        main(grid, wrong)
