# SPDX-License-Identifier: Apache-2.0
"""An honest client that reaches a limit is told which one, and is not accused of breaking a rule."""

from dataclasses import replace

import pytest

from fedvitals.measurements import stamped
from fedvitals.records import Event, Finding, Layer, LayerTable, Metric, Span
from fedvitals.transport.sender import Sender
from fedvitals.transport.sender_limits import MESSAGE_SOURCES, OTHER_NAMES
from fedvitals.transport.wire.payload import encode
from support.hostile_federation import HERE, LIAR, SPAN, THERE, federation, run, tables, update_statistics

LIMITS = {
    "names of metrics": (
        [Metric(HERE, 1.0, f"user.x{i}", 1.0) for i in range(300)],
        "100 with new metric names beyond the 200 that one client may bring, e.g. 'user.x200'.",
    ),
    "names of spans": (
        [Span(HERE, 1.0, f"epoch{i}", 0.1, **SPAN) for i in range(250)],
        "50 with new names of layers, spans or events beyond the 200 that one client may bring, e.g. 'epoch200'.",
    ),
    "events": (
        [Event(HERE, 1.0, "info", "user.slow", "") for _ in range(250)],
        "50 beyond the 200 events of a round, e.g. 'user.slow'.",
    ),
    "long names": (
        [Metric(HERE, 1.0, "user." + "x" * 200, 1.0)],
        f"1 with metric names of more than 200 characters, e.g. 'user.{'x' * 75}'.",
    ),
}


@pytest.mark.parametrize("what", LIMITS)
def test_a_limit_on_amounts_is_named_and_no_accusation(what):
    records, words = LIMITS[what]
    sink = run(lambda _: records, rounds=1).sink
    (event,) = sink.events("telemetry.refused")
    assert (event.where.node, event.level) == (LIAR, "info")
    assert event.message == f"Of {len(records) + 5} records of '{LIAR}', these were left out: {words}"
    (finding,) = sink.of(Finding, "TELEMETRY_LOST")
    assert (finding.where.node, finding.severity) == (LIAR, "note")
    assert "names the limit" in finding.message
    assert "user." not in finding.message, "no words of a client in a finding"


def test_what_breaks_a_rule_stays_a_warning_and_is_counted_apart():
    bad = [Metric(HERE, 1.0, "samples", float("inf")), Metric(HERE, 1.0, "steps", 3.0)]
    sink = run(lambda _: [*LIMITS["names of metrics"][0], *bad], rounds=1).sink
    (event,) = sink.events("telemetry.refused")
    assert (event.level, event.data["left_out"]) == ("warning", 102)
    assert "1 with numbers that a training measures once, told again in the same message, e.g. 'steps'" in event.message
    assert "1 with counts or times that cannot be, e.g. 'samples'" in event.message
    assert "100 with new metric names" in event.message
    (finding,) = sink.of(Finding, "TELEMETRY_LOST")
    assert finding.severity == "warning"


def test_an_example_is_not_shown_where_the_privacy_level_keeps_its_record():
    with federation(lambda _: LIMITS["names of metrics"][0], privacy=0) as found:
        found.round(0)
    (event,) = found.sink.events("telemetry.refused")
    assert "100 with new metric names beyond the 200" in event.message
    assert "user.x" not in event.message


def test_messages_that_are_only_counted_are_told_as_mildly():
    with federation(lambda _: []) as found:
        found.monitor.host.round_begin(0, found.model)
        for i in range(6):
            many = [Metric(HERE, 1.0, f"user.{i}.{j}", 1.0) for j in range(201)]
            payload = encode([stamped(record, f"s{i}", j) for j, record in enumerate(many)])
            found.monitor.host.absorb(payload, Sender(LIAR, THERE))
        found.monitor.host.round_end(0, found.model)
    events = found.sink.events("telemetry.refused")
    assert [event.level for event in events] == ["info"] * 4
    assert events[-1].data == {"messages": 3}
    assert {f.severity for f in found.sink.of(Finding, "TELEMETRY_LOST")} == {"note"}


def test_the_ranks_of_one_client_may_send_one_message():
    with federation(lambda _: []) as found:
        found.monitor.host.round_begin(0, found.model)
        ranks = [
            stamped(Metric(HERE, 1.0, "user.rank", float(rank)), f"worker-{rank}", 0) for rank in range(MESSAGE_SOURCES)
        ]
        found.monitor.host.absorb(encode(ranks), Sender(LIAR, THERE))
        found.monitor.host.round_end(0, found.model)
    assert MESSAGE_SOURCES == 64
    assert len(found.sink.metrics("user.rank", node=LIAR)) == 64
    assert not found.refusals()


def of_layers(names):
    return [Metric(replace(HERE, layer=name), 1.0, "user.z", 1.0) for name in names]


def test_a_layers_name_may_be_as_long_as_in_a_table():
    found = run(lambda _: of_layers(["l" * 512]), rounds=1)
    assert not found.refusals()
    found = run(lambda _: of_layers(["l" * 513]), rounds=1)
    (event,) = found.sink.events("telemetry.refused")
    assert "of more than 512 characters" in event.message


def test_names_of_layers_that_a_table_has_are_not_counted():
    names = [f"blocks.{i}.weight" for i in range(2 * OTHER_NAMES)]
    table = LayerTable("parameter", tuple(Layer(name, (4,), "float32") for name in names))
    described = [tables(table), update_statistics(table, family="gradient")]
    found = run(lambda _: [*described, *of_layers(names), *of_layers(["another"])], rounds=2, privacy=4)
    assert not found.refusals()
    assert len(found.sink.metrics("user.z", node=LIAR)) == 2 * (len(names) + 1)
