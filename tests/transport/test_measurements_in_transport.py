# SPDX-License-Identifier: Apache-2.0
"""Measurements on the wire and at the privacy gate: as their single records, and no more."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedvitals.errors import RecordError
from fedvitals.measurements import NO_STEP, MeasuredLayers, Measurements, single_records, stamped
from fedvitals.records import LayerTable, Metric
from fedvitals.store import SqliteStore, open_reader
from fedvitals.testing import MemorySink
from fedvitals.transport.privacy import PrivacyPolicy, released
from fedvitals.transport.sink_writer import SinkWriter
from fedvitals.transport.wire.payload import LIMITS, Limits, decode, encode
from support.measured_tables import RUN, measured, same

# -- on the wire ------------------------------------------------------------------------------------------------------


@given(st.integers(0, 1000), st.integers(1, 6))
def test_it_comes_through_the_wire_as_it_was(seed, clients):
    table = measured(clients, seed)
    (read,) = decode(encode([table]))
    assert isinstance(read, Measurements)
    same(single_records([read]), single_records([table]))


def test_records_around_it_keep_their_numbers():
    table = measured()
    after = Metric(table.place(0), 6.0, "loss", 1.0, "s", 10 + len(table))
    payload = encode([RUN, table, after])
    run, read, last = decode(payload)
    assert (run.id, read.sequence, last.sequence) == ("r", 10, 10 + len(table))


def test_a_changed_byte_is_recognised():
    payload = bytearray(encode([measured()]))
    payload[-1] ^= 1
    with pytest.raises(RecordError, match="damaged"):
        decode(bytes(payload))


def test_a_table_with_more_cells_than_may_be_is_refused_on_both_sides():
    few = Limits(cells=20)
    payload = encode([measured()])
    with pytest.raises(RecordError, match="cells"):
        encode([measured()], few)
    with pytest.raises(RecordError, match="cells"):
        decode(payload, few)
    with pytest.raises(RecordError, match="records"):
        decode(payload, dataclasses.replace(LIMITS, records=5))


def test_many_tables_have_no_more_cells_than_one_may_have():
    """A cell that holds nothing takes a bit of the payload, and eight bytes or more of whoever reads it."""
    limits, tables = Limits(cells=60), [measured()] * 4
    assert [table.present.size for table in tables] == [24] * 4
    for read in (lambda few: encode(few, limits), lambda few: decode(encode(few), limits)):
        read(tables[:2])
        with pytest.raises(RecordError, match="cells"):
            read(tables)


def of_nobody(**parts):
    """Measurements that name no node, and hold no metric."""
    return Measurements("r", 2, 5.0, (), (), (), np.zeros((0, 0)), np.zeros((0, 0), np.bool_), source="s", **parts)


def first_matrix(table):
    part = table.layers[0]
    return dataclasses.replace(part, rows=(0,), matrices=part.matrices[:1])


NO_LAYERS = MeasuredLayers("gradient", LayerTable("parameter", ()).digest, None, (0, 1), np.zeros((2, 0, 9)))


def with_rows(table, rows):
    part = table.layers[0]
    return dataclasses.replace(table, layers=(dataclasses.replace(part, rows=rows),))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda table: with_rows(table, (0, 1, 2, 9)), "does not name"),
        (lambda table: dataclasses.replace(table, sketch_rows=(0, 1, 2, 9)), "does not name"),
        (lambda table: dataclasses.replace(table, groups=(None,)), "groups"),
        (lambda table: of_nobody(layers=(first_matrix(table),)), "does not name"),
        (lambda table: of_nobody(sketch_rows=(0,), sketches=table.sketches[:1]), "does not name"),
        (lambda table: dataclasses.replace(table, layers=(NO_LAYERS,)), "no layer"),
    ],
)
def test_what_does_not_fit_together_is_refused(change, words):
    with pytest.raises(RecordError, match=words):
        decode(encode([change(measured())]))


def test_payloads_of_the_version_before_are_still_read():
    payload = (Path(__file__).parents[1] / "golden" / "payload_v1.bin").read_bytes()
    assert payload[:3] == b"fv\x01"
    records = decode(payload)
    kinds = {type(record).__name__ for record in records}
    assert kinds == {
        "Run",
        "Metric",
        "LayerStats",
        "Span",
        "Transfer",
        "Event",
        "Sketch",
        "Finding",
        "Action",
        "Snapshot",
    }
    assert sum(isinstance(r, Metric) and r.where.node == "c17" for r in records) > 20


# -- the privacy gate --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", range(5))
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("stray", [False, True])
@pytest.mark.parametrize("hides", [False, True])
def test_the_gate_lets_through_what_it_lets_through_of_single_records(level, held, stray, hides):
    policy = PrivacyPolicy(level, hides=hides)
    table = measured(nodes=["server", "c1", None, "edge-1"])
    table = dataclasses.replace(table, names=("loss", "time.client", *table.names[2:]))
    single = [released(record, policy, stray=stray, held=held) for record in table.records()]
    passed = released(table, policy, stray=stray, held=held)
    left = [] if passed is None else single_records([passed])

    def identity(record):
        kind = getattr(record, "name", "") or getattr(record, "family", "")
        return type(record).__name__, record.where, kind

    assert [identity(r) for r in left] == [identity(r) for r in single if r is not None]


def with_times(table, rows=(0,)):
    """The measurements with a metric that may leave at every privacy level, of these rows only."""
    present = np.zeros((len(table.nodes), 1), np.bool_)
    present[[*rows]] = True
    return dataclasses.replace(
        table,
        names=(*table.names, "time.client"),
        values=np.hstack([table.values, present * 2.0]),
        present=np.hstack([table.present, present]),
        steps=np.hstack([table.steps, np.full_like(present, NO_STEP, np.int64)]),
    )


@pytest.mark.parametrize("level", range(3))
def test_no_name_and_no_value_passes_the_gate_beside_what_may_leave(level, tmp_path):
    table = with_times(measured(), rows=(1, 3))
    passed = released(table, PrivacyPolicy(level), stray=True)
    records = single_records([passed])
    assert {*passed.names} == {record.name for record in records}
    assert {*passed.nodes} == {record.where.node for record in records}
    assert {*passed.groups} == {record.where.group for record in records}
    assert not passed.values[~passed.present].any()
    assert (b"user.mine" in encode([passed])) == (level == 2)
    for name, batch in (("a.db", [passed]), ("b.db", records)):
        with SqliteStore(tmp_path / name) as store:
            store.write([RUN, *batch])
    assert names_in(tmp_path / "a.db") == names_in(tmp_path / "b.db")


def names_in(file):
    with open_reader(file) as reader:
        return sorted(reader.database.rows("SELECT text FROM symbol"))


def test_the_gate_keeps_rows_and_steps_together():
    table = with_times(measured(nodes=["c0", "server", None, "c3"]), rows=(3,))
    for held in (False, True):
        passed = released(table, PrivacyPolicy(0), held=held)
        single = [r for record in table.records() if (r := released(record, PrivacyPolicy(0), held=held)) is not None]
        same(single_records([passed]), [stamped(dataclasses.replace(r), "s", 10 + i) for i, r in enumerate(single)])


def test_empty_measurements_are_no_record_and_nobody_waits_for_them():
    sink = MemorySink()
    writer = SinkWriter([sink], policy=PrivacyPolicy(), spill=None, strict=True)
    writer.emit(of_nobody())
    writer.admit([of_nobody()])
    assert writer.flush(5.0)
    writer.close()
    assert not sink.records


def test_what_another_process_tells_keeps_its_numbers_where_the_gate_takes_some():
    def admitted(batch):
        sink = MemorySink()
        writer = SinkWriter([sink], policy=PrivacyPolicy(1), spill=None, strict=True)
        for telemetry in batch:
            writer.admit([telemetry])
        writer.close()
        return sink.records

    table = with_times(measured())
    same(admitted([table]), admitted(single_records([table])))
