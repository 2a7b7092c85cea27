# SPDX-License-Identifier: Apache-2.0
"""Measurement results before they become records: names and numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fedvitals.measurements import NO_STEP, MeasuredLayers, Measurements
from fedvitals.stats import FAMILIES, Array

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True)
class Results:
    """Metrics (name, value, step), matrices (family, values, step), remarks (name, message, data).

    `clients` is the number of clients that the results sum over, or None. `tables` gives, for «parameter», «buffer»,
    «module» and «model», the layer table that rows of matrices belong to.
    """

    metrics: list[tuple[str, float, int | None]] = field(default_factory=list)
    matrices: list[tuple[str, Array, int | None]] = field(default_factory=list)
    remarks: list[tuple[str, str, Mapping[str, Any]]] = field(default_factory=list)
    sketch: Tensor | None = None
    clients: int | None = None
    tables: Mapping[str, str] = field(default_factory=dict)

    def take(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Add metrics, optionally of one step."""
        self.metrics += [(name, float(value), step) for name, value in metrics.items()]


Key = tuple[str | None, str | None]  # a node and its group
TableOf = Callable[[Mapping[str, str], str, int], str | None]
"""From the tables of `Results`, the kind of rows and the number of layers to the digest of a layer table."""


def measurements_of(
    run: str, round_index: int | None, at: float, rows: Sequence[tuple[Key, Results]], table_of: TableOf
) -> Measurements:
    """Return the results of many nodes, each with its group, as one table. Matrices without a layer table are left out.

    Rows of the same node and group are combined into one.
    """
    places: dict[Key, int] = {}
    for key, _ in rows:
        places.setdefault(key, len(places))
    names, values, present, steps = _columns([(places[key], results) for key, results in rows], len(places))
    sketches = [(places[key], results.sketch) for key, results in rows if results.sketch is not None]
    nodes, groups = zip(*places, strict=True) if places else ((), ())
    return Measurements(
        *(run, round_index, at, nodes, groups, names, values, present, steps),
        layers=_layers([(places[key], results) for key, results in rows], table_of),
        sketch_rows=tuple(row for row, _ in sketches),
        sketches=np.stack([np.asarray(sketch, np.float64) for _, sketch in sketches]) if sketches else None,
        sketch_version=sketch_version() if sketches else 1,
    )


def metric_of_nodes(
    run: str, round_index: int | None, at: float, name: str, values: Mapping[Key, float]
) -> Measurements:
    """Return one metric of many nodes, each with its group, as measurements."""
    nodes, groups = zip(*values, strict=True)
    column = np.fromiter(values.values(), np.float64)[:, None]
    return Measurements(run, round_index, at, nodes, groups, (name,), column, np.ones(column.shape, np.bool_))


def sketch_version() -> int:
    """Return the version of the current sketches."""
    from fedvitals.kernels.sketch_hash import VERSION  # noqa: PLC0415 - its package imports torch

    return VERSION


def _columns(
    rows: Sequence[tuple[int, Results]], count: int
) -> tuple[tuple[str, ...], Array, npt.NDArray[np.bool_], npt.NDArray[np.int64] | None]:
    """Return names, values, presence and steps; a name that a row has more than once gets further columns."""
    metrics: dict[int, list[tuple[str, float, int | None]]] = {}
    for row, results in rows:
        metrics[row] = [*metrics[row], *results.metrics] if row in metrics else results.metrics
    alike: dict[tuple[str, ...], list[tuple[int, tuple[float, ...], tuple[int | None, ...]]]] = {}  # by names, in order
    for row, own in metrics.items():
        if own:
            names, values, steps = zip(*own, strict=True)
            alike.setdefault(names, []).append((row, values, steps))
    columns: dict[tuple[str, int], int] = {}  # name, and its index among the row's metrics of that name
    own_columns: list[list[int]] = []
    for names in alike:
        seen: Counter[str] = Counter()
        own_columns.append([])
        for name in names:
            own_columns[-1].append(columns.setdefault((name, seen[name]), len(columns)))
            seen[name] += 1
    table = np.zeros((count, len(columns)))
    present = np.zeros(table.shape, np.bool_)
    stepped: npt.NDArray[np.int64] | None = None
    for places_of_row, cells in zip(own_columns, alike.values(), strict=True):
        own_rows, values_of_rows, steps_of_rows = zip(*cells, strict=True)
        places = np.ix_(own_rows, places_of_row)
        table[places], present[places] = values_of_rows, True
        if any(step is not None for steps in steps_of_rows for step in steps):
            stepped = np.full(table.shape, NO_STEP, np.int64) if stepped is None else stepped
            stepped[places] = [[NO_STEP if step is None else step for step in steps] for steps in steps_of_rows]
    return tuple(name for name, _ in columns), table, present, stepped


def _layers(rows: Sequence[tuple[int, Results]], table_of: TableOf) -> tuple[MeasuredLayers, ...]:
    """Return the matrices of one family, layer table and step as one array, in the order of their first."""
    parts: dict[tuple[str, str, int | None, tuple[int, ...]], tuple[list[int], list[Array]]] = {}
    for row, results in rows:
        for family, matrix, step in results.matrices:
            table = table_of(results.tables, FAMILIES[family].rows, len(matrix))
            if table is not None and len(matrix):
                own_rows, matrices = parts.setdefault((family, table, step, matrix.shape), ([], []))
                own_rows.append(row)
                matrices.append(matrix)
    return tuple(
        MeasuredLayers(family, table, step, tuple(own_rows), np.stack(matrices))
        for (family, table, step, _), (own_rows, matrices) in parts.items()
    )
