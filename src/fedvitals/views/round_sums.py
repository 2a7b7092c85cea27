# SPDX-License-Identifier: Apache-2.0
"""Sums a metric over all clients, round by round: in the database, unless all of its values are in memory anyway."""

from __future__ import annotations

import numpy as np

from fedvitals.records import is_client
from fedvitals.store.read import metrics
from fedvitals.store.read.nodes import nodes_by_number
from fedvitals.store.read.reader import Reader
from fedvitals.views.matrix import SEEKS, is_held, metric_matrix
from fedvitals.views.memo import remembered


def round_sums(reader: Reader, run: str, name: str) -> dict[int, float]:
    """Return all clients' values of a metric summed by round, without NaN."""
    sums = None
    if not is_held(reader, run, name):
        # Where several processes write, a newer row does not mean that all older ones have been seen.
        sign = object() if reader.database.dialect.shared else metrics.newest_metric_arrival(reader, 0, 0)
        sums = remembered(reader, "round sums", (run, name), sign, lambda: _added_up(reader, run, name))
    if sums is None:
        matrix = metric_matrix(reader, run, name)
        totals = np.sum(matrix.values, axis=0, dtype=float, where=~np.isnan(matrix.values))  # without a copy of them
        sums = dict(zip(matrix.rounds, totals.tolist(), strict=True))
    return sums


def _added_up(reader: Reader, run: str, name: str) -> dict[int, float] | None:
    """Return the sums; None if a client reported twice in one round, since only the newer value counts."""
    number, metric = reader.names.number(run), reader.names.number(name)
    if number is None or metric is None:
        return {}
    others = [node for node, text in nodes_by_number(reader, run).items() if not is_client(text)]
    if len(others) > SEEKS:
        return None
    sums = metrics.sums_by_round(reader, number, metric, others)
    if any(values != clients for _, _, values, clients in sums):
        return None
    return {round_index: 0.0 if total is None else float(total) for round_index, total, _, _ in sums}
