# SPDX-License-Identifier: Apache-2.0
"""A user's own sink needs no more than write(records); what else it has is used. Nothing else is probed by name."""

import ast

import pytest

import fedvitals as fv
from fedvitals.protocols import RecordWriter, Sink
from fedvitals.records import Metric, Run, Span
from fedvitals.transport.sink_adapter import SinkAdapter, as_sink
from support.paths import ROOT


class Plain:
    def __init__(self):
        self.records = []

    def write(self, records):
        self.records += records


class Rich(Plain):
    name = "rich"
    ignores = (Span,)

    def __init__(self):
        super().__init__()
        self.prepared, self.closed = [], 0

    def prepare(self, folder=None, families=None):
        self.prepared.append((folder, families))

    def close(self):
        self.closed += 1


class Whole(Sink):
    def write(self, records, /):
        pass


def test_a_plain_object_gets_the_defaults_of_a_sink():
    plain = Plain()
    assert isinstance(plain, RecordWriter)
    assert not isinstance(plain, Sink)
    sink = as_sink(plain)
    assert isinstance(sink, SinkAdapter)
    assert (sink.name, sink.ignores) == ("Plain", ())
    sink.prepare(None, {})
    sink.write([1, 2])
    sink.close()
    assert plain.records == [1, 2]


@pytest.mark.parametrize("ignores", [Metric, [Metric], Metric | Span, (Metric,)])
def test_a_sink_may_name_what_it_ignores_in_any_way(ignores):
    sink = Plain()
    sink.ignores = ignores
    with fv.Monitor(None, sinks=[sink], machine=False, strict=True) as monitor:
        monitor.log({"loss": 1.0})
    assert {type(record) for record in sink.records} >= {Run}
    assert not [record for record in sink.records if isinstance(record, Metric)]


def test_what_a_sink_has_is_used():
    whole = Whole()
    assert as_sink(whole) is whole
    assert (whole.name, whole.ignores) == ("", ())

    class Partly(Plain):
        name = "partly"
        closed = 0

        def close(self):
            self.closed += 1

    partly = Partly()
    sink = as_sink(partly)
    assert (sink.name, sink.ignores) == ("partly", ())
    sink.close()
    assert partly.closed == 1


def test_a_monitor_serves_sinks_of_both_kinds(tmp_path):
    plain, rich = Plain(), Rich()
    with fv.Monitor(tmp_path / "runs.db", sinks=[plain, rich], machine=False) as monitor:
        with monitor.round(0):
            monitor.log(loss=1.0)
        assert monitor.flush()
    for sink in (plain, rich):
        assert any(isinstance(record, Run) for record in sink.records)
        assert any(isinstance(record, Metric) and record.name == "loss" for record in sink.records)
    assert any(isinstance(record, Span) for record in plain.records)
    assert not any(isinstance(record, Span) for record in rich.records)
    ((folder, families),) = rich.prepared
    assert folder.name == "runs.db.d"
    assert families["NAN_UPDATE"]
    assert rich.closed == 1


@pytest.mark.thorough
def test_no_sink_probe_detector_or_observer_is_asked_for_attributes_by_name():
    kinds, found = ("sink", "probe", "detector", "observer"), []
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("hasattr", "getattr"):
                asked = ast.unparse(node.args[0]).rpartition(".")[2].strip("_")
                if any(kind in asked for kind in kinds):
                    found.append(f"{path}:{node.lineno}")
    assert found == []
