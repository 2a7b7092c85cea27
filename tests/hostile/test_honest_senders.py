# SPDX-License-Identifier: Apache-2.0
"""What honest clients send must not be refused, and must not name them: their rounds, many classes, odd names."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import fedvitals as fv
from fedvitals.probes.fit import labels_remark
from fedvitals.records import Event, Layer, LayerStats, LayerTable, Metric, Run, Span, Where, printable
from fedvitals.stats import LABEL_CLASSES
from fedvitals.testing import MemorySink
from fedvitals.transport.sender import Sender
from support.hostile_federation import (
    HERE,
    LIAR,
    OF_MODEL,
    SPAN,
    federation,
    model,
    payload,
    run,
    tables,
    update_statistics,
)


def refusals(sink):
    return [r.message for r in sink.records if isinstance(r, Event) and r.name == "telemetry.refused"]


def test_a_payload_that_names_the_open_round_is_taken():
    sink = MemorySink()
    with fv.Monitor(None, sinks=[sink], machine=False, strict=True) as monitor:
        for number in range(2):
            monitor.host.round_begin(number, model())
            told = [Metric(Where(monitor.run.id, number, "ann"), 1.0, "loss", 0.5)]
            monitor.host.absorb(payload(told, f"ann-{number}"), Sender("ann", monitor.run.id))
            monitor.host.round_end(number, model())
        monitor.flush()
    assert not refusals(sink)
    assert [r.where.round for r in sink.records if isinstance(r, Metric) and r.name == "loss"] == [0, 1]


def test_one_that_names_a_round_to_come_is_refused_and_claims_of_an_earlier_round_change_nothing():
    sink = MemorySink()
    with fv.Monitor(None, sinks=[sink], machine=False, privacy=4) as monitor:
        run = monitor.run.id
        monitor.host.round_begin(0, model())
        monitor.host.round_end(0, model())
        monitor.host.round_begin(1, model())
        early = [Metric(Where(run, 7, "liar"), 1.0, "loss", 0.5)]
        monitor.host.absorb(payload(early, "early"), Sender("liar", run))
        claim = update_statistics(OF_MODEL, where=Where(run, 0, "liar"), at=1.0)
        late = [replace(tables(OF_MODEL), id=run), claim]
        monitor.host.absorb(payload(late, "late"), Sender("liar", run))
        monitor.host.round_end(1, model())
        monitor.flush()
    assert len(refusals(sink)) == 1
    assert not [r for r in sink.records if isinstance(r, LayerStats) and r.where.node == "liar"]


def test_a_histogram_of_very_many_classes_is_cut_by_the_client_and_costs_nothing_else():
    name, text, data = labels_remark({label: 1 + label % 3 for label in range(LABEL_CLASSES + 2000)})
    assert len(data["histogram"]) == LABEL_CLASSES
    assert data["other_classes"] == 2000
    assert f"{LABEL_CLASSES + 2000:,} classes" in text
    sink = MemorySink()
    whole = {str(label): 1 for label in range(LABEL_CLASSES + 1)}
    with fv.Monitor(None, sinks=[sink], machine=False, privacy=4) as monitor:
        monitor.host.round_begin(0, model())
        where = Where(monitor.run.id, None, "ann")
        for number, histogram in enumerate((data["histogram"], whole)):
            told = [Event(where, 1.0, "info", name, text, {"histogram": histogram}), Metric(where, 1.0, "loss", 0.5)]
            monitor.host.absorb(payload(told, f"ann-{number}"), Sender("ann", monitor.run.id))
        monitor.host.round_end(0, model())
        monitor.flush()
    assert not refusals(sink)
    assert len([r for r in sink.records if isinstance(r, Metric) and r.name == "loss"]) == 2


ODD = {"joiner": "a\u200db", "no-break space": "a\u00a0b", "tab": "a\tb", "line break": "a\nb", "colour": "a\x1b[31mb"}


@pytest.mark.parametrize("kind", ODD)
def test_names_with_characters_that_cannot_be_shown_are_escaped_and_cost_nothing(kind):
    name = ODD[kind]
    shown = printable(name)
    table = LayerTable("parameter", (Layer(name, (4,), "float32"),))
    told = [
        tables(table),
        update_statistics(table, family="gradient"),
        Metric(replace(HERE, layer=name), 1.0, "user.z", 1.0),
        Metric(HERE, 1.0, f"user.{name}", 2.0),
        Span(HERE, 1.0, name, 0.001, **SPAN),
        Event(HERE, 1.0, "info", f"user.{name}", ""),
    ]
    sink = run(lambda _: told, rounds=1, privacy=4).sink
    assert not refusals(sink)
    assert shown.isprintable()
    assert {layer.name for one in sink.of(Run) for table in one.tables for layer in table.layers} >= {shown}
    assert [m.where.layer for m in sink.metrics("user.z", node=LIAR)] == [shown]
    assert [m.value for m in sink.metrics(f"user.{shown}", node=LIAR)] == [2.0]
    assert [s.name for s in sink.of(Span, node=LIAR) if s.name not in ("client", "journey")] == [shown]
    assert len(sink.events(f"user.{shown}", node=LIAR)) == 1
    assert len(sink.metrics("loss", node=LIAR)) == 1


def test_a_model_with_such_names_is_watched_by_a_worker_as_here():
    odd = nn.Sequential()
    odd.add_module("tab\tand\u200djoiner", nn.Linear(2, 2))
    with fv.Monitor(None, sinks=[sink := MemorySink()], machine=False, strict=True) as monitor:
        monitor.host.round_begin(0, odd)
        worker = monitor.host.for_worker()
        with worker.client("ann", odd):
            odd(torch.ones(1, 2)).sum().backward()
        monitor.host.absorb(worker.payload(), Sender("ann", monitor.run.id))
        monitor.host.round_end(0, odd)
        monitor.flush()
    assert not refusals(sink)
    names = {layer.name for one in sink.of(Run) for table in one.tables for layer in table.layers}
    assert "tab\\tand\\u200djoiner.weight" in names
    assert all(name.isprintable() for name in names)


MALFORMED = {
    "a layer table": (
        [tables(LayerTable("parameter", (Layer("w" * 600, (1,), "float32"),)))], "with layers that no model has",
    ),
    "a level": ([Event(HERE, 1.0, "loud", "user.x", "")], "that no client measures"),
    "a step": ([Metric(replace(HERE, step=-1), 1.0, "user.x", 1.0)], "that no client measures"),
    "layers": ([update_statistics(family="gradient")], "of layers that no layer table describes"),
}  # fmt: skip


@pytest.mark.parametrize("what", MALFORMED)
def test_what_is_malformed_is_left_out_alone_and_named(what):
    records, reason = MALFORMED[what]
    with federation(lambda _: records) as found:
        found.round(0)
    (message,) = refusals(found.sink)
    assert f"these were left out: 1 {reason}" in message
    assert len(found.sink.metrics("loss", node=LIAR)) == 1, "the rest counts"
