# SPDX-License-Identifier: Apache-2.0
"""Results of many nodes as columns, for clients measured together, as `Results` are for one of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fedvitals.measurements import NO_STEP, MeasuredLayers, Measurements
from fedvitals.probes.results import Key, TableOf, sketch_version
from fedvitals.stats import FAMILIES, Array

Rows = slice | npt.NDArray[np.intp]  # indices of nodes
EVERY = slice(None)
Remark = tuple[str, str, Mapping[str, Any]]  # name, message, data


@dataclass(slots=True)
class _Column:
    values: Array
    present: npt.NDArray[np.bool_]
    steps: npt.NDArray[np.int64] | None = None  # NO_STEP for a value without one; None: no value has one


@dataclass(slots=True)
class _Matrices:
    family: str
    tables: Mapping[str, str]  # as in `Results`
    rows: npt.NDArray[np.intp]
    values: Array  # [rows, layers, columns]
    step: int | None


class NodeColumns:
    """Metrics, matrices, remarks and sketches of many nodes, each with its group."""

    def __init__(self, keys: Sequence[Key]) -> None:
        self.keys = keys
        self.remarks: list[tuple[int, Remark]] = []  # with the row of the node
        self._columns: dict[str, list[_Column]] = {}
        self._matrices: list[_Matrices] = []
        self._sketches: list[tuple[int, Any]] = []

    def put(self, name: str, values: Any, rows: Rows = EVERY, steps: int | npt.NDArray[np.int64] | None = None) -> None:
        """Add a metric of the nodes in these rows: an array, or one number for all.

        Earlier values of a node under that name stay, in another column.
        """
        if isinstance(rows, np.ndarray) and not len(rows):
            return
        columns = self._columns.setdefault(name, [])
        column = next((known for known in columns if not known.present[rows].any()), None)
        if column is None:
            count = len(self.keys)
            column = _Column(np.zeros(count), np.zeros(count, np.bool_))
            columns.append(column)
        column.values[rows], column.present[rows] = values, True
        if steps is not None:
            if column.steps is None:
                column.steps = np.full(len(self.keys), NO_STEP, np.int64)
            column.steps[rows] = steps

    def put_matrices(
        self,
        family: str,
        matrices: Array,
        rows: Rows = EVERY,
        step: int | None = None,
        *,
        tables: Mapping[str, str] | None = None,
    ) -> None:
        """Add matrices of one family, [rows, layers, columns]."""
        indices = np.arange(len(self.keys))[rows]
        if len(indices) and matrices.shape[1]:
            self._matrices.append(_Matrices(family, tables or {}, indices, matrices, step))

    def put_sketch(self, row: int, sketch: Any) -> None:
        """Add the sketch of a node's update."""
        self._sketches.append((row, sketch))

    def values_of(self, name: str) -> dict[int, float]:
        """Return the first value of a metric by row."""
        values: dict[int, float] = {}
        for column in reversed(self._columns.get(name, ())):
            rows = np.flatnonzero(column.present)
            values |= zip(rows.tolist(), column.values[rows].tolist(), strict=True)
        return values

    def layer_counts(self) -> set[tuple[str, int]]:
        """Return the families of the matrices, each with its number of rows."""
        return {(part.family, part.values.shape[1]) for part in self._matrices}

    def use_tables(self, tables: Mapping[str, str]) -> None:
        """Set the layer tables of all matrices, as in `Results`."""
        for part in self._matrices:
            part.tables = tables

    def measurements(
        self, run: str, round_index: int | None, at: float, table_of: TableOf, without: Collection[int] = ()
    ) -> Measurements:
        """Return everything except the nodes in the rows `without`. Matrices without a layer table are left out."""
        named = [(name, column) for name, columns in self._columns.items() for column in columns]
        count = len(self.keys)
        kept = np.ones(count, np.bool_)
        kept[[*without]] = False
        values = np.stack([c.values for _, c in named], axis=1) if named else np.zeros((count, 0))
        present = np.stack([c.present for _, c in named], axis=1) if named else np.zeros((count, 0), np.bool_)
        steps = None
        if any(column.steps is not None for _, column in named):
            none = np.full(count, NO_STEP, np.int64)
            steps = np.stack([none if c.steps is None else c.steps for _, c in named], axis=1)
        sketches = [(row, sketch) for row, sketch in self._sketches if kept[row]]
        nodes, groups = zip(*self.keys, strict=True) if self.keys else ((), ())
        measured = Measurements(
            *(run, round_index, at, nodes, groups, tuple(name for name, _ in named), values),
            *(present & kept[:, None] if without else present, steps),
            layers=self._layers(table_of, kept),
            sketch_rows=tuple(row for row, _ in sketches),
            sketches=np.stack([np.asarray(sketch, np.float64) for _, sketch in sketches]) if sketches else None,
            sketch_version=sketch_version() if sketches else 1,
        )
        return measured.without_absent() if without else measured

    def _layers(self, table_of: TableOf, kept: npt.NDArray[np.bool_]) -> tuple[MeasuredLayers, ...]:
        """Return the matrices of one family, layer table and step as one array, in the order of the nodes."""
        alike: dict[tuple[Any, ...], list[_Matrices]] = {}
        for part in self._matrices:
            layers = part.values.shape[1]
            table = table_of(part.tables, FAMILIES[part.family].rows, layers)
            if table is not None:
                alike.setdefault((part.family, table, part.step, layers), []).append(part)
        layers_of_families = []
        for (family, table, step, _), parts in alike.items():
            rows = np.concatenate([part.rows for part in parts])
            values = parts[0].values if len(parts) == 1 else np.concatenate([part.values for part in parts])
            if len(parts) > 1 or not kept.all():
                order = np.argsort(rows, kind="stable")
                order = order[kept[rows[order]]]
                rows, values = rows[order], values[order]
            if len(rows):
                layers_of_families.append(MeasuredLayers(family, table, step, tuple(rows.tolist()), values))
        return tuple(layers_of_families)

    def of_row(self, row: int) -> NodeColumns:
        """Return the results of one node."""
        own = NodeColumns([self.keys[row]])
        own.remarks = [(0, remark) for place, remark in self.remarks if place == row]
        for name, columns in self._columns.items():
            for column in columns:
                if column.present[row]:
                    steps = None if column.steps is None else column.steps[row : row + 1]
                    own.put(name, column.values[row], steps=steps)
        for part in self._matrices:
            own.put_matrices(
                part.family,
                part.values[part.rows == row],
                slice(0, int(row in part.rows)),
                part.step,
                tables=part.tables,
            )
        for place, sketch in self._sketches:
            if place == row:
                own.put_sketch(0, sketch)
        return own
