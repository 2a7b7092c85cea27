# SPDX-License-Identifier: Apache-2.0
"""What is left out of a payload that would be too large: details by the stated order, single numbers last."""

import numpy as np
import pytest

import fedvitals as fv
from fedvitals.measurements import single_records
from fedvitals.records import Event, Layer, LayerStats, LayerTable, Metric, Run, Where
from fedvitals.stats import FAMILIES
from fedvitals.transport.payload_buffer import PayloadBuffer
from fedvitals.transport.privacy import PrivacyPolicy
from fedvitals.transport.wire.payload import LIMITS, decode

HERE = Where("r", 0, "c0")
STREAM = np.random.default_rng(0)
TABLE = LayerTable("parameter", tuple(Layer(f"blocks.{i}.weight", (4,), "float32") for i in range(100)))
SMALL = LayerTable("module", tuple(Layer(f"head.{i}", (4,), "float32") for i in range(10)))


def statistics(family, table, step=None):
    columns = len(FAMILIES[family].columns)
    matrix = STREAM.normal(size=(len(table.layers), columns))
    return LayerStats(Where("r", 0, "c0", step), 0.0, family, matrix, table.digest)


@pytest.fixture
def buffer():
    buffer = PayloadBuffer(PrivacyPolicy(level=4))
    buffer.emit(Run(fv.Monitor(None).run.id, "r", tables=(TABLE, SMALL)))
    buffer.emit(Metric(HERE, 0.0, "gradient.norm", 1.0))
    for step in range(4):
        buffer.emit(statistics("gradient", TABLE, step))
    for record in (statistics("weight", TABLE), statistics("activation", SMALL)):
        buffer.emit(record)
    for i in range(30):
        buffer.emit(Metric(HERE, 0.0, f"user.number{i}", i / 7))
    buffer.emit(Metric(Where("r", 0, "c0", 3), 0.0, "gradient.norm_max", 2.0))
    buffer.emit(Event(HERE, 0.0, "info", "user.remark", "kept"))
    return buffer


def left(buffer, most):
    payload = buffer.take(most)
    assert len(payload) <= most
    records = single_records(decode(payload))
    events = {r.name: r.data for r in records if isinstance(r, Event)}
    families = {r.family for r in records if isinstance(r, LayerStats)}
    tables = {table.rows for r in records if isinstance(r, Run) for table in r.tables}
    return [r.name for r in records if isinstance(r, Metric)], families, tables, events


def test_the_largest_kind_of_details_goes_first(buffer):
    names, families, tables, events = left(buffer, 9_000)
    assert families == {"weight", "activation"}
    assert tables == {"parameter", "module"}
    assert len(names) == 32
    assert events["worker.thinned"] == {"records": 4, "client_rounds": 1, "left_out": ["gradient of single steps"]}
    assert "worker.lost" not in events
    assert buffer.lost == 0


def test_a_table_goes_with_the_last_statistics_that_it_describes_and_comes_again(buffer):
    names, families, tables, events = left(buffer, 4_000)
    assert (families, tables, len(names)) == ({"activation"}, {"module"}, 32)
    assert events["worker.thinned"]["left_out"] == ["gradient of single steps", "weight"]
    assert events["user.remark"] == {}
    buffer.emit(statistics("weight", TABLE))
    _, families, tables, events = left(buffer, 20_000)
    assert (families, tables, events) == ({"weight"}, {"parameter"}, {})


def test_single_numbers_go_only_when_no_details_are_left(buffer):
    names, families, tables, events = left(buffer, 500)
    assert not families
    assert not tables
    assert 0 < len(names) < 32
    assert events["worker.thinned"]["records"] == 6
    assert events["worker.lost"]["records"] == buffer.lost > 0


def test_numbers_of_many_steps_go_before_the_numbers_of_a_round():
    buffer = PayloadBuffer(PrivacyPolicy(level=4))
    buffer.emit(Run("r", "r"))
    for step in range(2_000):
        buffer.emit(Metric(Where("r", 0, "c0", step), 0.0, "loss", float(STREAM.normal())))
    buffer.emit(Metric(HERE, 0.0, "gradient.norm", 1.0))
    buffer.emit(Metric(Where("r", 0, "c0", 3), 0.0, "gradient.norm_max", 2.0))
    names, _, _, events = left(buffer, 2_000)
    assert names == ["gradient.norm", "gradient.norm_max"]
    assert events == {"worker.thinned": {"records": 2_000, "client_rounds": 1, "left_out": ["single steps"]}}


def test_a_payload_buffer_that_grows_too_large_is_thinned_and_says_so():
    """Single steps go first; whole client-rounds and errors stay as long as they can."""
    buffer = PayloadBuffer(PrivacyPolicy())
    buffer.emit(fv.Monitor(None).run)
    for step in range(3000):
        matrix = np.ones((100, 9))
        buffer.emit(LayerStats(Where("r", 0, "c0", step), 0.0, "gradient", matrix, "t"))
    buffer.emit(Metric(Where("r", 0, "c0"), 0.0, "loss", 1.0))
    buffer.emit(Event(Where("r", 0, "c0"), 0.0, "error", "log", "kept"))
    payload = buffer.take()
    assert len(payload) <= LIMITS.bytes
    found = decode(payload)
    assert [getattr(r, "name", None) for r in found] == ["loss", "log", "worker.thinned"]
    left_out = ["gradient of single steps"]
    assert found[-1].data == {"records": 3000, "client_rounds": 1, "left_out": left_out}
    assert [r.sequence for r in found] == [0, 1, 2]
    assert buffer.lost == 0
    assert buffer.take() == b""
