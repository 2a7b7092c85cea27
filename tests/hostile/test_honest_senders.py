# SPDX-License-Identifier: Apache-2.0
"""What honest clients send must not be refused, and must not name them: payloads made in a round, many classes."""

from dataclasses import replace

import fedvitals as fv
from fedvitals.probes.fit import labels_remark
from fedvitals.records import Event, LayerStats, Metric, Where
from fedvitals.stats import LABEL_CLASSES
from fedvitals.testing import MemorySink
from fedvitals.transport.sender import Sender
from support.hostile_federation import OF_MODEL, model, payload, tables, update_statistics


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
