# SPDX-License-Identifier: Apache-2.0
"""Turns records into what experiment trackers draw: curves over rounds, and histograms of layers.

A curve has a tag: `accuracy` of the federation, `c7/update.norm` of a node, `layers/gradient.std/fc.weight` of a layer,
`clients/update.norm/p95` over all clients. Every tracker slows down with the number of tags, so nodes and layers are
limited: with more nodes, the spread over all of them is drawn instead.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedvitals import stats
from fedvitals.records import AnyName, LayerStats, Metric, Record, Run, is_client, node_name
from fedvitals.sinks.spread import SERVER, ClientSpread, of_the_round, plain
from fedvitals.stats import Array

NODES = 50  # with their own curves, unless the user sets another number
OTHER_NODES = 50  # servers, edges, clusters and rings
LAYERS = 200
TAGS = 20_000  # the most that a run may have: names come from other machines
TAG_CHARACTERS = 250  # MLflow's limit
CONFIG_CHARACTERS = 500

# What is drawn for a layer, by the columns of its family; ratios to other clients are for the dashboard.
DRAWN: Mapping[tuple[str, ...], tuple[str, ...]] = {
    stats.STATISTICS: ("mean", "std", "l2"),
    stats.STEP_COLUMNS: ("norm_mean", "norm_max"),
    stats.HEALTH_COLUMNS: ("dead_fraction", "saturated_fraction"),
}


@dataclass(frozen=True, slots=True)
class Point:
    """One point of a curve."""

    run: str
    tag: str
    round: int
    at: float
    value: float


@dataclass(frozen=True, slots=True, eq=False)
class Bars:
    """A histogram: `counts[i]` values lie between `edges[i]` and `edges[i + 1]`."""

    run: str
    tag: str
    round: int
    at: float
    edges: Array
    counts: Array


Drawn = Point | Bars


class _RunCurves:
    """What is known of one run: its layers, its nodes, and the tags in use."""

    def __init__(self) -> None:
        self.layers: dict[str, tuple[str, ...]] = {}
        self.nodes: set[str] = set()
        self.others: set[str] = set()
        self.crowded = False  # whether it has more clients than get curves
        self.spread = ClientSpread()
        self.tags: set[str] = set()


class Curves:
    """Turns records into points and histograms. `nodes`: how many clients get their own curves, or which ones.

    `layers_of`: nodes whose layers are drawn in addition to those of the round as a whole.
    """

    def __init__(self, nodes: int | Sequence[AnyName] = NODES, layers_of: Sequence[AnyName] = ()) -> None:
        self._named = None if isinstance(nodes, int) else frozenset(map(node_name, nodes))
        self._most = nodes if isinstance(nodes, int) else len(frozenset(nodes))
        self._layers_of = frozenset(map(node_name, layers_of))
        self._runs: dict[str, _RunCurves] = {}
        self.left_out = 0  # omitted because there were too many tags

    def of(self, records: Sequence[Record]) -> list[Drawn]:
        """Return what to draw, in the order of the records. Repeated records give the same result again."""
        drawn: list[Drawn] = []
        touched: dict[str, None] = {}
        for record in records:
            if isinstance(record, Run):
                self._known(record.id).layers |= {table.digest: table.names[:LAYERS] for table in record.tables}
            elif isinstance(record, Metric):
                touched[record.where.run] = None
                drawn += self._metric(record)
            elif isinstance(record, LayerStats):
                drawn += self._layers(record)
        for run in touched:
            drawn += self._over_clients(run)
        return [point for point in drawn if self._has_place(point)]

    def _known(self, run: str) -> _RunCurves:
        return self._runs.setdefault(run, _RunCurves())

    def _has_place(self, point: Drawn) -> bool:
        tags = self._known(point.run).tags
        if point.tag not in tags and len(tags) >= TAGS:
            self.left_out += 1
            return False
        tags.add(point.tag)
        return True

    def _metric(self, metric: Metric) -> Iterator[Point]:
        where = metric.where
        known = self._known(where.run)
        known.spread.add(metric)
        node = where.node or where.group
        if of_the_round(metric) and self._has_curves(known, node):
            tag = metric.name if node is None else f"{node}/{metric.name}"
            yield Point(where.run, plain(tag, TAG_CHARACTERS), where.round or 0, metric.at, metric.value)

    def _has_curves(self, known: _RunCurves, node: str | None) -> bool:
        if node is None:
            return True
        if not is_client(node):
            if len(known.others) < OTHER_NODES:
                known.others.add(node)
            return node in known.others
        if self._named is not None:
            known.crowded = known.crowded or node not in self._named
            return node in self._named
        if len(known.nodes) < self._most:
            known.nodes.add(node)
        known.crowded = known.crowded or node not in known.nodes
        return node in known.nodes

    def _over_clients(self, run: str) -> Iterator[Point]:
        known = self._known(run)
        for closed in known.spread.closed():
            for name in closed.values if known.crowded else ():
                for point, value in closed.points(name).items():
                    yield Point(run, plain(f"clients/{name}/{point}", TAG_CHARACTERS), closed.round, closed.at, value)

    def _layers(self, record: LayerStats) -> Iterator[Drawn]:
        where = record.where
        names = self._known(where.run).layers.get(record.table)
        wanted = where.node in (None, SERVER) or where.node in self._layers_of
        if not names or not wanted or where.step is not None:
            return
        node = where.node or where.group
        start = f"{node}/layers" if node else "layers"
        columns = stats.FAMILIES[record.family].columns
        if columns is stats.HISTOGRAM_COLUMNS:
            for name, row in zip(names, record.matrix, strict=False):
                if row.sum() > 0:
                    edges, counts = bars_of(row)
                    tag = plain(f"{start}/{record.family}/{name}", TAG_CHARACTERS)
                    yield Bars(where.run, tag, where.round or 0, record.at, edges, counts)
        for statistic in DRAWN.get(columns, ()):
            with np.errstate(all="ignore"):
                values = record.get(statistic)
            for name, value in zip(names, values, strict=False):
                tag = plain(f"{start}/{record.family}.{statistic}/{name}", TAG_CHARACTERS)
                yield Point(where.run, tag, where.round or 0, record.at, float(value))


def bars_of(row: Array) -> tuple[Array, Array]:
    """Return the edges and counts of a row of `gradient.histogram`, in ascending order, without empty ends."""
    powers = 2.0 ** (stats.LOWEST_EXPONENT + np.arange(stats.EXPONENTS + 1))
    edges = np.concatenate([-powers[::-1], powers])
    counts = np.concatenate([row[: stats.EXPONENTS][::-1], [0.0], row[stats.EXPONENTS :]])
    there = np.flatnonzero(counts)
    first, last = int(there[0]), int(there[-1]) + 1
    return edges[first : last + 1], counts[first:last]


def settings_of(run: Run) -> dict[str, str]:
    """Return the run's configuration as a flat mapping (`local.epochs` → 5); long values are cut."""
    settings: dict[str, str] = {}

    def walk(name: str, value: object) -> None:
        if isinstance(value, Mapping) and value:
            for key, inner in value.items():
                walk(f"{name}.{key}" if name else str(key), inner)
        else:
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            settings[plain(name)] = text[:CONFIG_CHARACTERS]

    walk("", dict(run.config))
    return settings


def tags_of(run: Run) -> dict[str, str]:
    """Return what identifies the run: its id, host, topology, seed and versions."""
    facts = {"run": run.id, "name": run.name, "host": run.host, "topology": run.topology, "seed": run.seed}
    versions = {f"version.{package}": version for package, version in run.versions.items()}
    return {f"fedvitals.{key}": plain(str(value)) for key, value in (facts | versions).items() if value is not None}


def link_of(run: Run, store: str | os.PathLike[str] | None) -> str:
    """Return the command that shows the run, as a link back from a tracker's page; it contains no password."""
    hidden = re.sub(r"^(\w+://[^:@/?#]*:).+(?=@)", r"\1***", os.fspath(store or ""))
    address = re.sub(r"([?&](?:ssl)?password=)[^&]+", r"\1***", hidden)
    where = f" --store '{address}'" if address else ""
    return f"fedvitals run {plain(run.id)} «{plain(run.name)}»: fedvitals show {plain(run.id)}{where}"
