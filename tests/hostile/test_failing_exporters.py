# SPDX-License-Identifier: Apache-2.0
"""A sink that fails costs its own records. The run is not called incomplete while its store has them all."""

import pytest

import fedvitals as fv
from fedvitals.errors import RecordError
from fedvitals.records import Event, Finding
from fedvitals.sinks.otel.sink import OpenTelemetry
from fedvitals.store import open_reader
from fedvitals.store.read import queries
from fedvitals.views.gaps import gaps_of

ROUNDS = 3


class Refusing:
    """An exporter whose receiver takes nothing, and says so of each record."""

    def write(self, records):
        raise RecordError("not here")


@pytest.mark.parametrize("exporter", [Refusing(), OpenTelemetry("http://127.0.0.1:9")], ids=["refuses", "is not there"])
def test_an_exporter_that_is_down_is_no_loss_of_the_store(tmp_path, exporter):
    store = tmp_path / "runs.db"
    monitor = fv.Monitor(store, sinks=[exporter], machine=False)
    with monitor:
        for number in range(ROUNDS):
            with monitor.round(number):
                for i in range(50):
                    monitor.log({f"value.{i % 5}": float(i)})
            monitor.flush(5)
    assert monitor.lost > 0, "by the exporter"
    with open_reader(store) as reader:
        run = monitor.run.id
        assert queries.left_out(reader, run) == (0, 0)
        sink = type(exporter).__name__.lower()
        assert gaps_of(reader, run) == (
            "no client has completed a round",
            f"the sink '{sink}' has lost {monitor.lost} records",
        )
        assert not list(queries.records(reader, run, Finding))
        events = [event for event in queries.records(reader, run, Event) if event.name == "sink.lost"]
        assert {event.data["sink"] for event in events} == {type(exporter).__name__.lower()}
        assert events[-1].data["records"] == monitor.lost
        assert list(reader.history(run).rounds()) == [*range(ROUNDS)]
