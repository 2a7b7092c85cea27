# SPDX-License-Identifier: Apache-2.0
"""Summarises a model's layers for an agent: how gradients, updates and weights changed, overall or for a client."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fedvitals.diagnosis.medians import finite_median
from fedvitals.errors import ConfigError, unknown
from fedvitals.stats import Array
from fedvitals.store.read.reader import Reader

SHOWN = (("gradient", "rms"), ("update", "rms"), ("weight", "rms"))
NEWEST = 5  # rounds that count as the newest


def layer_summary(reader: Reader, run: str, client: str | None) -> dict[str, Any]:
    """Return a row for each layer: the size in the first and in the newest rounds, and how many values are not finite.

    With a client, a row has its newest size as a multiple of the median client's instead.
    """
    rows: dict[str, dict[str, Any]] = {}
    for family, statistic in SHOWN:
        for layer in reader.history(run).layers(family):
            rounds, nodes, values = reader.history(run).matrix(family, statistic, layer)
            if not len(rounds):
                continue
            row = rows.setdefault(layer, {"layer": layer})
            if client is None:
                typical = _medians(values)
                row[family] = [finite_median(typical[:NEWEST]), finite_median(typical[-NEWEST:])]
            elif client in nodes:
                place = list(nodes).index(client)
                others = _medians(np.delete(values, place, axis=1))[-NEWEST:]
                own = values[-NEWEST:, place]
                usual = finite_median(others)
                row[family] = finite_median(own) / usual if usual else float("nan")
            if family == "gradient":
                row["not_finite"] = int(sum(_count(reader, run, layer, name, client) for name in ("nans", "infs")))
    meaning = (
        "[first rounds, newest rounds], root mean square of the median client"
        if client is None
        else "newest rounds, as a multiple of the median client's"
    )
    return {"meaning": meaning, "layers": list(rows.values())}


def layer_table(
    reader: Reader, run: str, layer: str, client: str | None, chosen: Callable[[Sequence[int]], list[int]]
) -> dict[str, Any]:
    """Return the values of one layer over the rounds: the median client's and, with a client, its own."""
    known = {name for family, _ in SHOWN for name in reader.history(run).layers(family)}
    if layer not in known:
        raise ConfigError(unknown("layer", layer, sorted(known)[:50]))
    series = []
    for family, statistic in (*SHOWN, ("gradient", "nans"), ("gradient", "infs")):
        if layer not in reader.history(run).layers(family):
            continue
        rounds, nodes, values = reader.history(run).matrix(family, statistic, layer)
        picked = chosen(rounds)
        places = [list(rounds).index(number) for number in picked]
        row: dict[str, Any] = {"family": family, "statistic": statistic, "rounds": picked}
        if client is not None and client in nodes:
            own = list(nodes).index(client)
            row["client"] = values[places, own].tolist()
            values = np.delete(values, own, axis=1)
        row["median_client"] = _medians(values)[places].tolist()
        series.append(row)
    return {"layer": layer, "series": series}


def _medians(values: Array) -> Array:
    return np.array([finite_median(row) for row in values])


def _count(reader: Reader, run: str, layer: str, statistic: str, client: str | None) -> float:
    _, nodes, values = reader.history(run).matrix("gradient", statistic, layer)
    if client is not None:
        values = values[:, [i for i, node in enumerate(nodes) if node == client]]
    return float(np.nansum(values))
