# SPDX-License-Identifier: Apache-2.0
"""A sink in memory, for tests that look at single records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from fedvitals.protocols import Sink
from fedvitals.records import Event, LayerStats, LayerTable, Metric, Record, Run

Kind = TypeVar("Kind", bound=Record)


class MemorySink(Sink):
    """A sink for tests: keeps every record in the list `records`, and finds them by name and place.

        sink.value("loss", node="c1", round=2)

    `closed` counts the calls of `close`.
    """

    name = "memory"

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.closed = 0

    def write(self, records: Sequence[Record], /) -> None:
        """Keep the records.

        Args:
            records: The records that the monitor has produced since the last call.
        """
        self.records += records

    def close(self) -> None:
        """Count that the monitor has closed the sink."""
        self.closed += 1

    def of(self, kind: type[Kind], name: str | None = None, **where: Any) -> list[Kind]:
        """Return the records of a type, in order of arrival.

        Args:
            kind: The type, such as `fv.Metric` or `fv.Event`.
            name: The name of metrics, events and spans, the family of layer statistics, or the issue of findings; None:
                any.
            where: Coordinates that must match, such as `node="c1"` and `round=2`.
        """
        records: list[Kind] = []
        for record in self.records:
            if not isinstance(record, kind):
                continue
            own = getattr(record, "name", getattr(record, "family", getattr(record, "issue", None)))
            place = getattr(record, "where", None)
            if name in (None, own) and all(getattr(place, key) == value for key, value in where.items()):
                records.append(record)
        return records

    def metrics(self, name: str | None = None, **where: Any) -> list[Metric]:
        """Return the metrics, in order of arrival.

        Args:
            name: The metric's name; None: any.
            where: Coordinates that must match, such as `node="c1"` and `round=2`.
        """
        return self.of(Metric, name, **where)

    def value(self, name: str, **where: Any) -> float:
        """Return the value of the one metric with that name there.

        Args:
            name: The metric's name.
            where: Coordinates that must match, such as `node="c1"` and `round=2`.

        Returns:
            Its value.

        Raises:
            AssertionError: There is no such metric, or more than one; the message lists what there is.
        """
        return _only(self.metrics(name, **where), name, where).value

    def layers(self, family: str, **where: Any) -> LayerStats:
        """Return the one record of layer statistics of that family there.

        Args:
            family: The family, such as «gradient».
            where: Coordinates that must match; without `step`, the record that is merged over the steps.

        Returns:
            The record, whose `matrix` is [layers, columns].

        Raises:
            AssertionError: There is no such record, or more than one; the message lists what there is.
        """
        where.setdefault("step", None)
        return _only(self.of(LayerStats, family, **where), family, where)

    def events(self, name: str | None = None, **where: Any) -> list[Event]:
        """Return the events, in order of arrival.

        Args:
            name: The event's name, such as «client.failed»; None: any.
            where: Coordinates that must match, such as `node="c1"` and `round=2`.
        """
        return self.of(Event, name, **where)

    def names(self) -> set[str]:
        """Return the names of all metrics that have arrived."""
        return {metric.name for metric in self.metrics()}

    def table(self, digest: str) -> LayerTable:
        """Return the names and shapes of the layers that a record of layer statistics refers to.

        Args:
            digest: The `table` of that record.
        """
        tables = [table for run in self.of(Run) for table in run.tables if table.digest == digest]
        if not tables:
            raise AssertionError(f"No run record describes the layer table {digest}.")
        return tables[-1]


def _only(records: list[Kind], name: str, where: Mapping[str, Any]) -> Kind:
    if len(records) != 1:
        found = f"found {len(records)}: {records[:3]}"
        raise AssertionError(f"Wanted one record '{name}' at {dict(where)}, {found}")
    return records[0]
