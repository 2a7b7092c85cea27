# SPDX-License-Identifier: Apache-2.0
"""Gathers what the open round needs from the records of clients that trained elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeGuard

from fedvitals.measurements import Measurements, Telemetry
from fedvitals.probes.results import Results
from fedvitals.protocols import Node
from fedvitals.records import LayerStats, Metric
from fedvitals.stats import FAMILIES


def first_values(single: Mapping[Node, Results], name: str) -> dict[Node, float]:
    """Return the first metric of a name, by client."""
    return {
        node: next(value for own, value, _ in results.metrics if own == name)
        for node, results in single.items()
        if any(own == name for own, _, _ in results.metrics)
    }


def column_values(blocks: Sequence[Measurements], name: str) -> dict[Node, float]:
    """Return the first metric of a name in measurements, by client."""
    values: dict[Node, float] = {}
    for block in reversed(blocks):
        for _, rows, own, _ in [*block.columns(name.__eq__)][::-1]:
            values |= {block.nodes[row] or "": value for row, value in zip(rows, own, strict=True)}
    return values


def gather(results: Results, record: Metric | LayerStats) -> None:
    """Add a single record of a client to its results: a matrix, or a metric that the round needs."""
    if isinstance(record, Metric):
        results.metrics.append((record.name, record.value, record.where.step))
    else:
        results.matrices.append((record.family, record.matrix, record.where.step))
        results.tables = {**results.tables, FAMILIES[record.family].rows: record.table}


def gather_rows(results_by_node: Mapping[Node, Results], measured: Measurements) -> None:
    """Add the records that the round needs from measurements of several clients to the results of each."""
    own = [results_by_node.get(node or "") for node in measured.nodes]
    for name, rows, values, steps in measured.columns(_is_needed_metric):
        for row, value, step in zip(rows, values, steps, strict=True):
            results = own[row]
            if results is not None:
                results.metrics.append((name, value, step))
    for part in measured.layers:
        kind = FAMILIES[part.family].rows
        for row, matrix in zip(part.rows, part.matrices, strict=True):
            results = own[row]
            if results is not None:
                results.matrices.append((part.family, matrix, part.step))
                if results.tables.get(kind) != part.table:
                    results.tables = {**results.tables, kind: part.table}


def is_needed(record: Telemetry) -> TypeGuard[Metric | LayerStats]:
    """Return whether a round needs a client\'s record: a matrix, or one of its metrics."""
    return isinstance(record, LayerStats) or (isinstance(record, Metric) and _is_needed_metric(record.name))


def _is_needed_metric(name: str) -> bool:
    """Whether the round needs this metric of a client, here or in `Cohort.add`."""
    return name in ("adapter.scale", "steps", "gradient.norm", "monitor.cost") or name.startswith("weight.difference")
