# SPDX-License-Identifier: Apache-2.0
"""Computes heat maps over the rounds: a sign of all clients, a statistic of all layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from fedvitals.catalog import CATALOG
from fedvitals.errors import ConfigError, unknown
from fedvitals.records import natural
from fedvitals.stats import FAMILIES, statistics_of
from fedvitals.store.read.layer_history import layer_history
from fedvitals.store.read.reader import Reader
from fedvitals.views.cases import failures_by_client
from fedvitals.views.clients import open_and_past_cases
from fedvitals.views.cohort import Matrix, matrix_of
from fedvitals.views.grid import Grid, make_grid
from fedvitals.views.matrix import metric_matrix
from fedvitals.views.shown_statistics import measured_layers, shown_statistic

Sort = Literal["worst", "name", "value"]


def client_grid(
    reader: Reader,
    run: str,
    sign: str,
    *,
    sort: Sort = "worst",
    offset: int = 0,
    limit: int = 1000,
    columns: int = 500,
    first: int | None = None,
    last: int | None = None,
) -> Grid:
    """Return a sign of the clients. «Worst»: those in trouble now, then formerly, then by distance from the others."""
    matrix = metric_matrix(reader, run, sign)
    known = CATALOG.get(sign)
    return make_grid(
        matrix,
        rows=ordered(matrix.take(None, first, last), sort, in_trouble(reader, run) if sort == "worst" else ()),
        sort="given",
        offset=offset,
        limit=limit,
        first=first,
        last=last,
        columns=columns,
        failed={(node, when) for node, own in failures_by_client(reader, run).items() for _, when in own},
        unit=known.unit if known else "",
        title=known.meaning if known else sign,
    )


def ordered(matrix: Matrix, sort: Sort, leading: Sequence[str] = ()) -> list[str]:
    """Return the rows' names; for «value», the largest mean first."""
    if sort == "name":
        return sorted(matrix.nodes, key=natural)
    if sort == "worst":
        own = set(matrix.nodes)
        lead = [node for node in leading if node in own]
        rest = set(lead)
        return [*lead, *(matrix.nodes[i] for i in matrix.worst_first() if matrix.nodes[i] not in rest)]
    finite = np.isfinite(matrix.values)
    counts = finite.sum(axis=1)
    means = np.where(finite, matrix.values, 0).sum(axis=1, dtype=float) / np.maximum(counts, 1)
    return [matrix.nodes[i] for i in np.argsort(-np.where(counts > 0, means, -np.inf), kind="stable")]


def in_trouble(reader: Reader, run: str) -> list[str]:
    """Return clients by their worst case that is not muted: open cases first, then those that are over."""
    open_now, past = open_and_past_cases(reader, run)
    return list(dict.fromkeys([*open_now, *past]))


def layer_grid(
    reader: Reader,
    run: str,
    family: str,
    statistic: str,
    *,
    first: int | None = None,
    last: int | None = None,
    columns: int = 500,
) -> Grid:
    """Return one statistic of the federation's layers, in the order of the model."""
    if family not in FAMILIES:
        raise ConfigError(unknown("family", family, FAMILIES))
    if statistic not in statistics_of(family):
        raise ConfigError(unknown(f"statistic of family '{family}'", statistic, statistics_of(family)))
    known = layer_history(reader, run, family)
    layers, rounds = known.layers, known.rounds
    values = shown_statistic(family, known.matrix, statistic).T if rounds else np.empty((len(layers), 0))
    measured = measured_layers(family, known.matrix) if rounds else None
    del known  # frees nine numbers per layer and round before the grid is built
    return make_grid(
        matrix_of(layers, rounds, values, None if measured is None else measured.T),
        rows=list(layers),
        sort="given",
        first=first,
        last=last,
        columns=columns,
        title=f"{family} {statistic}",
    )
