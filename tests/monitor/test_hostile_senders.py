# SPDX-License-Identifier: Apache-2.0
"""One client that lies in its telemetry: it costs its own numbers and is named; nobody else is accused or goes missing.

The server is that of a deployment: it knows who sent a payload, and holds the updates. `flower/test_hostile` does the
same with Flower's own messages.
"""

import math
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

import fedvitals as fv
from fedvitals.kernels import sums
from fedvitals.measurements import stamped
from fedvitals.records import (
    Action,
    Event,
    Finding,
    Layer,
    LayerStats,
    LayerTable,
    Metric,
    Run,
    Sketch,
    Snapshot,
    Span,
    Transfer,
    Where,
)
from fedvitals.store import open_reader
from fedvitals.testing import MemorySink
from fedvitals.transport.sender import Sender
from fedvitals.transport.wire.payload import encode
from support.conditions import holds_for_each
from support.hostile_federation import (
    HERE,
    HONEST,
    LIAR,
    OF_MODEL,
    ONE_LAYER,
    ROUNDS,
    SPAN,
    THERE,
    federation,
    measured,
    model,
    payload,
    run,
    tables,
    update_statistics,
)

ILL = [("bob", number) for number in range(2, ROUNDS)]  # when another client really sends NaN
NAN_LIAR = [(LIAR, number) for number in range(2, ROUNDS)]


# -- layer tables -----------------------------------------------------------------------------------------------------


def table_of(*shapes, rows="parameter"):
    return LayerTable(rows, tuple(Layer(f"w{i}", shape, "float32") for i, shape in enumerate(shapes)))


IMPOSSIBLE = {
    "a product beyond 64 bits": table_of((2**62, 2**62)),
    "a product beyond every float": table_of((2**62,) * 30),
    "one size beyond all models": table_of((2**49,)),
    "a size beyond all models beside none": table_of((2**62, 0)),
    "a sum beyond all models": table_of(*[(2**47,)] * 40),
    "too many dimensions": table_of((1,) * 65),
    "a name that no layer has": LayerTable("parameter", (Layer("w" * 600, (1,), "float32"),)),
    "a type that no layer has": LayerTable("parameter", (Layer("w", (1,), "f" * 600),)),
    "too many layers": LayerTable("parameter", (Layer("w", (), "float32"),) * 100_001),
    "rows of no kind": table_of((3,), rows="anything"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_a_layer_table_that_no_model_has_blinds_nobody(name):
    found = run(lambda number: [tables(IMPOSSIBLE[name])] if number == 1 else [], ill=("bob",))
    assert found.refusals() == [(LIAR, 1)]
    assert found.nan_updates() == ILL
    lost = found.sink.of(Finding, "TELEMETRY_LOST")
    assert [(f.where.node, f.where.round) for f in lost] == [(LIAR, 1)]
    assert not [one for one in found.sink.of(Run) if IMPOSSIBLE[name] in one.tables]


def test_without_a_sender_the_error_names_the_clients_of_the_payload(caplog):
    sink = MemorySink()
    with fv.Monitor(None, sinks=[sink], machine=False) as monitor, monitor.round(0, model()):
        where = Where(monitor.run.id, 0, "c7")
        brought = Run(monitor.run.id, "", tables=(IMPOSSIBLE["a product beyond 64 bits"],))
        monitor.host.absorb(payload([brought, Metric(where, 1.0, "loss", 1.0)], "worker-1"))
    assert "Its records are of c7." in caplog.text
    assert len(sink.metrics("time.round")) == 1
    assert not sink.metrics("loss", node="c7")


@pytest.mark.thorough
def test_layer_tables_are_counted_per_sender():
    """998 kinds of models of one client, before all others' own."""
    own = (table_of((8, 8), (8,)), table_of((3,), rows="module"))
    many = [LayerTable("parameter", (Layer(f"L{i}", (1,), "float32"),)) for i in range(998)]
    found = run(lambda _: [tables(*many)], first=True, brings=lambda _: [tables(*own)])
    assert found.refusals() == [(LIAR, number) for number in range(ROUNDS)]
    assert set(own) <= set(found.sink.of(Run)[-1].tables)


def test_a_sender_that_brings_a_few_tables_at_a_time_is_stopped_too():
    def lies(number):
        return [tables(*(LayerTable("parameter", (Layer(f"{number}-{i}", (1,), "float32"),)) for i in range(20)))]

    found = run(lies, first=True, brings=lambda node: [tables(table_of((len(node), 8)))])
    assert found.refusals() == [(LIAR, number) for number in range(2, ROUNDS)]
    assert len(found.sink.of(Run)[-1].tables) < 60


def test_what_the_server_measures_stands_under_its_own_layers():
    """A table of as many layers as the model has, with other names and shapes."""
    strange = LayerTable("parameter", tuple(Layer(f"x{i}", (n,), "float32") for i, n in enumerate((64, 8, 24, 3))))
    plain = run(lambda _: [])
    found = run(lambda _: [tables(strange), update_statistics(strange)])
    for node in (LIAR, *HONEST):
        for family in ("update", "update.alignment", "update.peers"):
            pairs = zip(*(one.sink.of(LayerStats, family, node=node) for one in (found, plain)), strict=True)
            for told, wanted in pairs:
                assert told.table == wanted.table
                np.testing.assert_array_equal(told.matrix, wanted.matrix)
    assert {stats.table for stats in found.sink.of(LayerStats, "update")} == {OF_MODEL.digest}
    assert {m.where.node for m in found.sink.metrics("update.differs")} == {LIAR}


@pytest.mark.parametrize("first", [True, False])
def test_nobody_renames_the_layers_of_all(first, tmp_path):
    """At level 3 clients tell of their gradients. The liar's table comes last, or first, and in every round."""
    honest = lambda node: [  # noqa: E731
        tables(OF_MODEL), update_statistics(OF_MODEL, where=Where(THERE, None, node), family="gradient")
    ]  # fmt: skip
    lies = lambda _: [tables(ONE_LAYER), update_statistics(family="gradient")]  # noqa: E731
    store = tmp_path / "runs.db"
    found = run(lies, brings=honest, first=first, privacy=3, store=store)
    with open_reader(store) as reader:
        history = reader.history(found.monitor.run.id)
        assert history.layers("gradient") == OF_MODEL.names
        nodes, counts = history.across("gradient", ("count",), ROUNDS - 1)
    told = dict(zip(nodes, counts[..., 0].tolist(), strict=True))
    assert [told[node] for node in HONEST] == [[64.0, 8.0, 24.0, 3.0]] * len(HONEST)


def test_one_clients_units_are_not_those_of_the_run():
    """At level 3, where nobody else tells of activations."""
    units = LayerTable("module", (Layer("1", (8,), "ReLU"),))
    dead = lambda _: [tables(units), LayerStats(HERE, time.time(), "activation.health", np.ones((1, 4)), units.digest)]  # noqa: E731
    found = run(dead, privacy=3)
    assert not [f for f in found.sink.of(Finding) if f.issue in ("DEAD_UNITS", "SATURATED_UNITS")]


# -- in another's name ------------------------------------------------------------------------------------------------


def test_what_a_client_says_of_its_group_is_ignored():
    """A group's sums are told as those of a node of that name: this one is another client's."""
    there = replace(HERE, group="bob")
    spoofed = [
        Metric(there, time.time(), "weight.difference", 6.66e30),
        Metric(there, time.time(), "weight.difference_absolute", 6.66e30),
        Event(there, time.time(), "error", "client.failed", "It was bob.", {"exception": "ValueError"}),
        Sketch(there, time.time(), (1.0,) * 256, "feed"),
        Span(there, time.time(), "client", 0.001, **SPAN, attributes={"failed": True}),
        tables(ONE_LAYER),
        update_statistics(nans=64.0, where=there),
    ]
    found = run(lambda _: spoofed)
    assert not found.nan_updates()
    assert not found.sink.metrics("weight.difference", node="bob")
    assert len(found.sink.of(LayerStats, "update", node="bob")) == ROUNDS


def test_a_group_that_the_host_knows_is_kept():
    sink = MemorySink()
    with fv.Monitor(None, sinks=[sink], machine=False, strict=True) as monitor, monitor.round(0, model()):
        own = payload([Metric(replace(HERE, group="edge-9"), time.time(), "loss", 1.0)], "there")
        monitor.host.absorb(own, Sender(LIAR, THERE, group="edge-1"))
    assert [(m.where.node, m.where.group) for m in sink.metrics("loss")] == [(LIAR, "edge-1")]


NOT_THEIRS = {
    "a finding": Finding(HERE, 1.0, "NAN_UPDATE", "critical", 1.0, "It is bob."),
    "an action": Action(HERE, 1.0, "NAN_UPDATE bob", "exclude", "bob"),
    "a snapshot": Snapshot(HERE, 1.0, "update", "feed", 10),
    "bytes": Transfer(HERE, 1.0, "bob", "server", 10**12, 10**12),
    "another's metric": Metric(replace(HERE, node="bob"), 1.0, "loss", 9.0),
    "the first weights": Event(HERE, 1.0, "warning", "initialisation", "All models are stolen."),
    "weights that begin at 0": Event(HERE, 1.0, "info", "initialisation.zero", "", {"layers": ["0.weight"]}),
    "groups": Event(HERE, 1.0, "info", "groups", "", {"edge-0": ["bob"]}),
    "that another was refused": Event(HERE, 1.0, "warning", "telemetry.refused", "It is bob."),
    "that a round is over": Metric(HERE, 1.0, "time.round", 1.0),
    "a trace that fills the store": Span(HERE, 1.0, "step", 0.1, trace="t" * 1024, id="0" * 16),
    "an id that fills the store": Span(HERE, 1.0, "step", 0.1, trace="0" * 32, id="i" * 1024),
    "a parent that fills the store": Span(HERE, 1.0, "step", 0.1, trace="0" * 32, id="0" * 16, parent="p" * 1024),
    "a sketch whose id fills the store": Sketch(HERE, 1.0, (1.0,), "d" * 1024),
}


@pytest.mark.parametrize("name", NOT_THEIRS)
def test_what_is_the_servers_to_tell_is_refused(name):
    found = run(lambda number: [NOT_THEIRS[name]] if number == 1 else [], ill=("bob",))
    assert found.refusals() == [(LIAR, 1)]
    assert found.nan_updates() == ILL


@pytest.mark.parametrize("name", ["a finding", "an action", "a snapshot", "that a round is over"])
def test_nor_do_our_own_workers_tell_it(name):
    sink = MemorySink()
    with fv.Monitor(None, sinks=[sink], machine=False) as monitor:
        with monitor.round(0, model()):
            record = NOT_THEIRS[name]
            monitor.host.absorb(payload([replace(record, where=replace(record.where, run=monitor.run.id))], "worker-1"))
        assert monitor.lost == 1
    assert not [r for r in sink.records if r.source == "worker-1"]
    assert [m.where.node for m in sink.metrics("time.round")] == [None]


# -- what a client says of its update, beside what the server got -----------------------------------------------------

SAME_SHAPE = (tables(OF_MODEL), update_statistics(OF_MODEL))
HIDING = {
    "of other layers": lambda _: [tables(ONE_LAYER), update_statistics()],
    "of the same layers": lambda _: [*SAME_SHAPE],
    "of both": lambda _: [*SAME_SHAPE, tables(ONE_LAYER), update_statistics()],
    "of other layers, twice": lambda _: [tables(ONE_LAYER), update_statistics(), update_statistics()],
    "true ones, then others": lambda _: [
        tables(OF_MODEL, ONE_LAYER), update_statistics(OF_MODEL, nans=1.0), update_statistics(at=time.time() + 60)
    ],
    "from the future": lambda _: [tables(ONE_LAYER), update_statistics(at=time.time() + 1e9)],
    "at no time": lambda _: [tables(ONE_LAYER), update_statistics(at=math.nan)],
    "of no layer": lambda _: [tables(LayerTable("parameter", ())), update_statistics(LayerTable("parameter", ()))],
    "that they are finite": lambda _: [
        Metric(HERE, time.time() + 1e9, "update.nonfinite", 0.0), Metric(HERE, time.time() + 1e9, "update.norm", 0.1)
    ],
    "of steps": lambda _: [tables(ONE_LAYER), update_statistics(where=replace(HERE, step=3))],
    "that are no numbers": lambda _: [
        tables(OF_MODEL), replace(update_statistics(OF_MODEL), matrix=np.full((4, 9), math.nan))
    ],
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("profile", [True, False])
@pytest.mark.parametrize("name", HIDING)
def test_whatever_it_tells_of_its_update_a_client_that_sends_nan_is_found(name, profile):
    found = run(HIDING[name], ill=(LIAR,), profile=profile)
    assert found.nan_updates() == NAN_LIAR
    assert not found.refusals()
    assert {stats.table for stats in found.sink.of(LayerStats, "update", node=LIAR)} == {OF_MODEL.digest}
    assert len(found.sink.of(LayerStats, "update", node=LIAR)) == ROUNDS


@pytest.mark.thorough
@pytest.mark.parametrize("lost", [5.0, math.nan, math.inf, -1.0, 1e308, 1.0])
@pytest.mark.parametrize("skipped", [0.0, 1.0, math.nan])
def test_whatever_it_tells_of_its_gradients_it_is_accused_itself(lost, skipped):
    """Of an update that is not finite, or of gradients that were not before it: of one of the two, in each round."""
    told = {"gradient.nonfinite": lost, "steps.skipped": skipped, "steps": 10.0, "weight.nonfinite": lost}
    found = run(lambda _: [Metric(HERE, time.time(), name, value) for name, value in told.items()], ill=(LIAR,))
    accused = [f for f in found.sink.of(Finding) if f.issue.startswith("NAN_")]
    assert {(f.where.node, f.where.round) for f in accused} >= set(NAN_LIAR)


def test_a_client_that_lies_of_its_own_nan_accuses_nobody():
    found = run(lambda _: [tables(ONE_LAYER), update_statistics(nans=64.0)])
    assert not found.nan_updates()


def test_a_payload_of_our_own_worker_does_not_hide_what_was_sent_either():
    """Without a sender, as from a pool: statistics of other layers, and later ones, beside an update full of NaN."""
    sink = MemorySink()
    with fv.Monitor(None, sinks=[sink], machine=False) as monitor:
        for number in range(3):
            network = model()
            monitor.host.round_begin(number, network)
            for node in ("c0", "c1", "c2"):
                where = Where(monitor.run.id, number, node)
                later = time.time() + 1e6
                span = Span(where, time.time(), "client", 0.001, **SPAN, attributes={"failed": False})
                told = [Run(monitor.run.id, "", tables=(ONE_LAYER, OF_MODEL)), span, Metric(where, 1.0, "steps", 3.0)]
                told += [update_statistics(where=where), update_statistics(where=where, at=later)]
                monitor.host.absorb(payload(told, f"worker-{node}-{number}"))
                value = math.nan if node == "c1" and number == 2 else 0.01
                monitor.updates(number, {node: [torch.full_like(p, value) for p in network.parameters()]})
            monitor.host.round_end(number, network, {"loss": 1.0})
    critical = [(f.where.node, f.where.round) for f in sink.of(Finding, "NAN_UPDATE")]
    assert critical == [("c1", 2)]


def test_where_the_server_has_no_update_the_clients_own_word_stands():
    sink = MemorySink()
    with fv.Monitor(None, sinks=[sink], machine=False, strict=True) as monitor, monitor.round(0, model()):
        own = [*measured(LIAR, 0), tables(OF_MODEL), update_statistics(OF_MODEL, nans=2.0)]
        monitor.host.absorb(payload(own, "there"), Sender(LIAR, THERE))
    assert sink.layers("update", node=LIAR, round=0).get("nans").tolist() == [2.0] * 4


def test_where_the_server_has_no_names_for_layers_a_client_that_agrees_gives_them():
    """A host that shows updates and no model."""
    sink, update = MemorySink(), [torch.full((8, 8), 0.5)]
    true = np.asarray(torch.as_tensor(sums(update)))
    with fv.Monitor(None, sinks=[sink], machine=False, strict=True) as monitor, monitor.round(0):
        for node in ("ann", LIAR):
            where = Where(THERE, None, node)
            own = replace(update_statistics(where=where), matrix=true * 2 if node == LIAR else true)
            monitor.host.absorb(payload([*measured(node, 0), tables(ONE_LAYER), own], node), Sender(node, THERE))
            monitor.host.updates(0, {node: update})
    assert len(sink.of(LayerStats, "update", node="ann")) == 1
    assert not sink.of(LayerStats, "update", node=LIAR)
    assert {m.where.node for m in sink.metrics("update.differs")} == {LIAR}


# -- what is shared ---------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_flood_of_records_pushes_out_nobodys():
    """More than the sinks' queues hold, of which the store is one."""
    flood = [Metric(HERE, 1.0, "user.x", 1.0) for _ in range(45_000)]
    flood += [Event(HERE, 1.0, "warning", "user.warning", "") for _ in range(3_000)]
    found = run(lambda number: flood if number == 1 else [], rounds=2)
    assert not found.sink.metrics("user.x")
    assert [m.where.round for m in found.sink.metrics("loss", node=LIAR)] == [0]
    assert found.refusals() == [(LIAR, 1)]


def test_names_of_metrics_are_counted_per_sender():
    """Exporters take a few hundred names in all."""
    many = [Metric(HERE, 1.0, f"user.{i}", 1.0) for i in range(2_000)]
    honest = lambda node: [Metric(Where(THERE, None, node), 1.0, f"user.of-{node}", 1.0)]  # noqa: E731
    found = run(lambda _: many, first=True, rounds=3, brings=honest)
    assert len({m.name for m in found.sink.metrics(node=LIAR) if m.name.startswith("user.")}) == 200
    for node in HONEST:
        assert len(found.sink.metrics(f"user.of-{node}", node=node)) == 3


@pytest.mark.thorough
def test_a_sender_with_many_sources_lets_no_other_be_counted_twice():
    with federation(lambda _: []) as found:
        found.monitor.host.round_begin(0, found.model)
        own = payload(measured("ann", 0), "ann-0")
        found.monitor.host.absorb(own, Sender("ann", THERE))
        for first in range(0, 1_000, 4):
            many = [stamped(Metric(HERE, 1.0, "loss", 1.0), f"source-{first + i}", 0) for i in range(4)]
            found.monitor.host.absorb(encode(many), Sender(LIAR, THERE))
        found.monitor.host.absorb(own, Sender("ann", THERE))
        found.monitor.host.round_end(0, found.model)
    assert len(found.sink.metrics("loss", node="ann")) == 1


def test_what_a_client_claims_to_have_lost_or_cost_is_bounded_and_in_our_words():
    lies = [Event(HERE, 1.0, "warning", "worker.lost", "Ask bob!", {"records": 2**39}),
            Metric(HERE, 1.0, "monitor.cost", 1e6)]  # fmt: skip
    found = run(lambda number: lies if number == 1 else [])
    assert found.monitor.lost == 0
    assert max(m.value for m in found.sink.metrics("monitor.cost", node=None)) < 100
    lost = found.sink.of(Finding, "TELEMETRY_LOST")
    assert [(f.where.node, f.message) for f in lost] == [
        (LIAR, "liar reports that 5,000 or more of its records found no room in its messages.")
    ]


@pytest.mark.thorough
def test_one_message_is_one_training_on_a_clock_that_is_real():
    """The liar says that it trained often, and by a virtual clock, which would be the whole run's."""
    about = {"clock": "virtual", "failed": False}
    often = [Span(HERE, 1.0, "client", math.nan, "0" * 32, f"{i:016x}", attributes=about) for i in range(2000)]
    found = run(lambda _: often)
    spans = found.sink.of(Span, "client", node=LIAR)
    assert len(spans) == ROUNDS
    assert not [span for span in spans if "clock" in span.attributes or not span.seconds >= 0]
    telemetry = [t for t in found.sink.of(Transfer, node=LIAR) if t.kind == "telemetry"]
    assert len(telemetry) == ROUNDS


def test_impossible_counts_are_left_out_and_no_detector_fails():
    names = ("steps", "samples", "memory.limit", "memory.peak", "memory.activations", "memory.batch", "time.client")
    values = (math.nan, math.inf, -math.inf, 1e308)
    lies = [Metric(HERE, 1.0, name, values[i % 4]) for i, name in enumerate(names * 4)]
    lies += [Event(HERE, 1.0, "error", "client.failed", "out of memory", {"exception": "OutOfMemoryError"})]
    lies += [Metric(HERE, 1.0, "gradient.nonfinite", 5.0), Metric(HERE, 1.0, "weight.nonfinite", 5.0)]
    lies += [Metric(HERE, 1.0, "steps", 1e17), Metric(HERE, 1.0, "adapter.scale", 1e300)]
    found = run(lambda _: lies, privacy=3, ill=("bob",))
    assert found.nan_updates() == ILL
    assert holds_for_each(math.isfinite(m.value) for m in found.sink.metrics("steps"))
    assert not found.sink.metrics("adapter.scale")


def test_one_client_whose_errors_all_differ_silences_nobody_elses():
    sink = MemorySink()
    with fv.Monitor(None, sinks=[sink], machine=False) as monitor:
        for node in ("c0", "c1"):
            with monitor.client(node):
                for i in range(150 if node == "c0" else 1):
                    monitor.log({"x": f"{node} {i}"})
    told = [event.where.node for event in sink.events("monitor.error")]
    assert told.count("c0") == 10
    assert told.count("c1") == 1
