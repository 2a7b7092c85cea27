# SPDX-License-Identifier: Apache-2.0
"""Reads values of metrics: of one round, of one node, of all nodes; several metrics in one statement where it helps.

The arguments `run` and `name` are texts unless stated otherwise. A NULL in the store is a NaN that was measured; what
was not measured has no row.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from fedvitals.protocols import Node
from fedvitals.records import Metric, is_client, natural
from fedvitals.store import rows
from fedvitals.store.read.nodes import padded, placeholders
from fedvitals.store.read.reader import Reader

# The names of a run's metrics, by one seek each: DISTINCT would walk over every value of the run.
NAMES_OF_RUN = (
    "WITH RECURSIVE names(name) AS (SELECT MIN(name) FROM metric WHERE run = ? UNION ALL "
    "SELECT (SELECT MIN(m.name) FROM metric AS m WHERE m.run = ? AND m.name > names.name) "
    "FROM names WHERE names.name IS NOT NULL) "
)
_OF_NODE = "m.round IS NOT NULL AND m.node IS NOT NULL AND m.layer IS NULL"  # about a node as a whole in a round
_WALK = f"FROM metric AS m WHERE m.run = ? AND m.name = ? AND {_OF_NODE} AND m.arrival <= ?"
# The plus keeps the planner from using the index on runs.
_NEWS = f"FROM metric AS m WHERE m.arrival > ? AND m.arrival <= ? AND +m.run = ? AND {_OF_NODE}"

ValuesByRound = dict[int, float]
"""Values of one metric by round, in the order of the rounds."""
SeriesByNode = dict[tuple[str, Node | None], tuple[list[int], list[float]]]
"""By metric and node (None: the federation itself), the rounds ascending and the newest value in each."""
SeriesArrays = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]
"""The same of one metric and node, as arrays."""
EMPTY_SERIES: SeriesArrays = (np.empty(0, np.int64), np.empty(0))


def _measured(number: float | None) -> float:
    return math.nan if number is None else number


# -- which metrics there are -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MeasuredNames:
    """The sorted names of the metrics that a run has values of."""

    names: list[str]
    of_clients: list[str]  # those with values of clients


def measured_names(reader: Reader, run: str, nodes: Mapping[int, str]) -> MeasuredNames:
    """Return the metrics of a run, and which of them its clients report.

    `nodes`: the run's nodes by number, see `nodes.nodes_by_number`.
    """
    number = reader.names.number(run) or 0
    others = [place for place, name in nodes.items() if not is_client(name)]
    condition = f"AND m.node NOT IN ({placeholders(others)}) " if others else ""
    metrics = reader.database.rows(
        # Nodes are adjacent in the index, so that the first client is found after as few rows as there are servers.
        NAMES_OF_RUN + "SELECT s.id, s.text, EXISTS (SELECT 1 FROM metric AS m WHERE m.run = ? "  # noqa: S608 - placeholders
        f"AND m.name = names.name AND {_OF_NODE} {condition}) FROM names JOIN symbol AS s ON s.id = names.name",
        (number, number, number, *others),
    )
    reader.names.learn((symbol, name) for symbol, name, _ in metrics)
    ordered = sorted((name, of_clients) for _, name, of_clients in metrics)
    return MeasuredNames([name for name, _ in ordered], [name for name, of_clients in ordered if of_clients])


def has_metric(reader: Reader, run: str, name: str) -> bool:
    """Whether the run has any value of the metric."""
    sql = "SELECT 1 FROM metric WHERE run = ? AND name = ? LIMIT 1"
    return bool(reader.database.rows(sql, (reader.names.number(run), reader.names.number(name))))


def count_nodes_that_told(
    reader: Reader, run: str, names: Collection[str], rounds: Collection[int]
) -> dict[str, list[int]]:
    """Count for each metric the values that nodes reported in each of these rounds, in the order of the rounds."""
    counts: dict[tuple[str, int], int] = {}
    if names and rounds:
        counted = reader.database.rows(
            "SELECT s.text, m.round, COUNT(*) FROM symbol AS s CROSS JOIN metric AS m WHERE "  # noqa: S608 - placeholders
            f"s.text IN ({placeholders(names)}) AND m.run = ? AND m.name = s.id AND m.round IN "
            f"({placeholders(rounds)}) AND m.node IS NOT NULL AND m.layer IS NULL GROUP BY s.text, m.round",
            (*names, reader.names.number(run) or 0, *rounds),
        )
        counts = {(name, round_index): count for name, round_index, count in counted}
    return {name: [counts.get((name, round_index), 0) for round_index in rounds] for name in names}


def count_client_rounds(reader: Reader, run: str, names: Collection[str]) -> dict[str, int]:
    """Count, for each metric, in how many client-rounds it was measured: values of nodes for whole rounds."""
    counted = reader.database.rows(
        "SELECT s.text, COUNT(*) FROM symbol AS s CROSS JOIN metric AS m WHERE "  # noqa: S608 - placeholders
        f"s.text IN ({placeholders(names)}) AND m.run = ? AND m.name = s.id AND m.node IS NOT NULL "
        "AND m.layer IS NULL AND m.step IS NULL GROUP BY s.text",
        (*names, reader.names.number(run) or 0),
    )
    return {name: int(count) for name, count in counted}


# -- values of one round -----------------------------------------------------------------------------------------------


def values_in_round(reader: Reader, run: str, name: str, round_index: int) -> list[tuple[int, float]]:
    """Return the nodes that reported a metric in one round, by number, with their values, the newest last."""
    values = reader.database.rows(
        "SELECT node, value FROM metric WHERE run = ? AND name = ? AND round = ? AND node IS NOT NULL "
        "AND layer IS NULL ORDER BY at, arrival",
        (reader.names.number(run) or 0, reader.names.number(name) or 0, round_index),
    )
    return [(node, _measured(number)) for node, number in values]


def values_of_nodes(reader: Reader, run: str, name: str, round_index: int, nodes: Collection[int]) -> dict[int, float]:
    """Return the values reported by these nodes (by number) in one round; unlike `values_in_round`, unsorted."""
    values = reader.database.rows(
        "SELECT node, value FROM metric WHERE run = ? AND name = ? AND round = ? AND node IS NOT NULL "
        "AND layer IS NULL",
        (reader.names.number(run) or 0, reader.names.number(name) or 0, round_index),
    )
    return {node: _measured(number) for node, number in values if node in nodes}


def values_in_rounds(
    reader: Reader, run: str, names: Collection[str], rounds: Collection[int]
) -> dict[tuple[str, int], dict[Node, float]]:
    """Return by metric and round each node's newest value, for several metrics and rounds in one statement."""
    values: dict[tuple[str, int], dict[Node, float]] = {}
    if not names or not rounds:
        return values
    fetched = reader.database.rows(
        "SELECT name.text, m.round, node.text, m.value FROM symbol AS name CROSS JOIN metric AS m "  # noqa: S608 - placeholders
        f"JOIN symbol AS node ON node.id = m.node WHERE name.text IN ({placeholders(names)}) AND m.run = ? "
        f"AND m.name = name.id AND m.round IN ({placeholders(rounds)}) AND m.layer IS NULL ORDER BY m.at, m.arrival",
        (*names, reader.names.number(run) or 0, *rounds),
    )
    for name, round_index, node, number in fetched:
        values.setdefault((name, round_index), {})[node] = _measured(number)
    return values


def newest_values_of_clients(reader: Reader, run: str, names: Collection[str]) -> dict[str, list[float]]:
    """Return, for each metric, the clients' values in the last round that has any value of it."""
    number = reader.names.number(run) or 0
    values = reader.database.rows(
        "SELECT name.text, node.text, m.value FROM symbol AS name CROSS JOIN metric AS m "  # noqa: S608 - placeholders
        f"JOIN symbol AS node ON node.id = m.node WHERE name.text IN ({placeholders(names)}) AND m.run = ? "
        "AND m.name = name.id AND m.round = (SELECT MAX(n.round) FROM metric AS n WHERE n.run = ? "
        "AND n.name = name.id) AND m.layer IS NULL ORDER BY m.at, m.arrival",
        (*names, number, number),
    )
    newest: dict[str, dict[str, float]] = {}
    for name, node, value in values:
        newest.setdefault(name, {})[node] = _measured(value)
    return {name: [value for node, value in own.items() if is_client(node)] for name, own in newest.items()}


def newest_outcomes(
    reader: Reader, run: str, names: Collection[str], series: SeriesByNode | None = None
) -> dict[str, float | None]:
    """Return for each metric the newest value of the federation, else of its server, else the clients' median.

    The single definition of the current outcome: NaN if that round has no finite value, None if nothing was reported.
    `series`: the values of the federation and its server, if they are already known.
    """
    known = series_of(reader, run, names, (None, "server")) if series is None else series
    newest: dict[str, float | None] = {}
    for name in names:
        whole = known.get((name, None)) or known.get((name, "server"))
        newest[name] = whole[1][-1] if whole else None
    untold = [name for name in names if newest[name] is None]
    for name, values in (newest_values_of_clients(reader, run, untold) if untold else {}).items():
        finite = [value for value in values if math.isfinite(value)]
        newest[name] = median(finite) if finite else math.nan if values else None
    return newest


def value_of_federation(reader: Reader, run: str, name: str, round_index: int) -> float | None:
    """Return the newest value for the federation as a whole in one round; None if there is none, or for NaN."""
    values = reader.database.rows(
        "SELECT m.value FROM metric AS m WHERE m.run = ? AND m.name = ? AND m.round = ? AND m.node IS NULL "
        'AND m."group" IS NULL AND m.layer IS NULL ORDER BY m.at DESC, m.arrival DESC LIMIT 1',
        (reader.names.number(run) or 0, reader.names.number(name), round_index),
    )
    return values[0][0] if values else None


def newest_round_of(reader: Reader, run: str, name: str) -> int | None:
    """Return the last round in which a metric was reported for the federation as a whole; None if it never was."""
    rounds = reader.database.rows(
        "SELECT m.round FROM metric AS m WHERE m.run = ? AND m.name = ? AND m.round IS NOT NULL AND m.node IS NULL "
        "ORDER BY m.round DESC LIMIT 1",
        (reader.names.number(run) or 0, reader.names.number(name)),
    )
    return rounds[0][0] if rounds else None


# -- values over the rounds --------------------------------------------------------------------------------------------


def newest_of_node(reader: Reader, run: str, name: str, node: str) -> tuple[int, float | None] | None:
    """Return the last round in which a node reported a metric, and the value; None if it never did."""
    metric = reader.names.number(name)
    values = [] if metric is None else reader.database.rows(
        # Backwards round by round, one seek each; CROSS JOIN keeps that order.
        "SELECT r.round, m.value FROM run_round AS r CROSS JOIN metric AS m WHERE r.run = ? AND m.run = r.run "
        "AND m.name = ? AND m.round = r.round AND m.node = ? AND m.layer IS NULL "
        "ORDER BY r.round DESC, m.at DESC LIMIT 1",
        (reader.names.number(run) or 0, metric, reader.names.number(node)),
    )  # fmt: skip
    return values[0] if values else None


def series_of(reader: Reader, run: str, names: Collection[str], nodes: Iterable[Node | None]) -> SeriesByNode:
    """Return several metrics of several nodes over the rounds, as `History.series` has each, in one statement.

    Metrics that were never reported are omitted.
    """
    arrays = series_arrays(reader, run, names, nodes)
    return {key: (rounds.tolist(), values.tolist()) for key, (rounds, values) in arrays.items()}


def series_arrays(
    reader: Reader, run: str, names: Collection[str], nodes: Iterable[Node | None]
) -> dict[tuple[str, Node | None], SeriesArrays]:
    """Return the same as arrays, which take a fifth of the memory: for pages that show a few points of many rounds."""
    wanted = list(dict.fromkeys(nodes))
    others = [node for node in wanted if node is not None]
    # Without a node, only values of the whole federation, not those of one edge or cluster.
    places = ['m.node IS NULL AND m."group" IS NULL'] if None in wanted else []
    if others:
        places.append(f"m.node IN (SELECT id FROM symbol WHERE text IN ({placeholders(others)}))")  # noqa: S608 - placeholders
    number = reader.names.number(run) or 0
    statements = [
        # One seek for each metric and round; without `run_round` it would be a walk over all nodes. CROSS JOIN, because
        # SQLite keeps its order and would otherwise choose the walk.
        "SELECT name.text, m.node, m.round, m.arrival, m.value, m.at "  # noqa: S608 - placeholders
        "FROM symbol AS name CROSS JOIN run_round AS r CROSS JOIN metric AS m "
        f"WHERE name.text IN ({placeholders(names)}) AND r.run = ? AND m.run = r.run AND m.name = name.id "
        f"AND m.round = r.round AND {place} AND m.layer IS NULL"
        for place in places
    ]
    parameters: list[Any] = []
    for place in places:
        parameters += [*names, number, *(others if "?" in place else ())]
    if not names or not wanted:
        return {}
    columns: dict[tuple[str, int | None], _SeriesColumns] = {}
    key: tuple[str, int | None] | None = None
    own = _SeriesColumns()
    rows_found = reader.database.each_row(" UNION ALL ".join(statements), parameters)
    for name, node, round_index, arrival, value, at in rows_found:
        if (name, node) != key:
            key = name, node
            own = columns.setdefault(key, _SeriesColumns())
        own.whole.extend((round_index, arrival))
        own.real.extend((math.nan if value is None else value, -math.inf if at is None else at))
    known = sorted({node for _, node in columns if node is not None})
    node_names: dict[int | None, Node | None] = {None: None, **dict(zip(known, reader.names.texts(known), strict=True))}
    return {(name, node_names[node]): columns.pop((name, node)).newest_by_round() for name, node in [*columns]}


class _SeriesColumns:
    """A node's values of a metric, as columns: for a long run, rows would take ten times as much memory."""

    def __init__(self) -> None:
        self.whole = array("q")  # round and arrival of each
        self.real = array("d")  # value and time of each

    def newest_by_round(self) -> SeriesArrays:
        """Return the rounds, ascending, and the newest value of each."""
        rounds, arrivals = np.frombuffer(self.whole, np.int64).reshape(-1, 2).T
        values, at = np.frombuffer(self.real).reshape(-1, 2).T
        order = np.lexsort((arrivals, at, rounds))
        order = order[np.append(np.diff(rounds[order]) > 0, True)]  # the last of each round
        return rounds[order], values[order]


def values_of_everybody(reader: Reader, run: str, name: str) -> dict[Node | None, ValuesByRound]:
    """Return a metric's newest values by node and round: the federation as a whole (None) first, nodes by name."""
    fetched = reader.database.rows(
        "SELECT m.node, m.round, m.value FROM metric AS m "
        "WHERE m.run = (SELECT id FROM symbol WHERE text = ?) AND m.name = (SELECT id FROM symbol WHERE text = ?) "
        "AND m.round IS NOT NULL AND m.layer IS NULL "
        # Without a node, only values of the whole federation, not those of one edge or cluster.
        'AND (m.node IS NOT NULL OR m."group" IS NULL) ORDER BY m.round, m.at, m.arrival',
        (run, name),
    )
    by_number: dict[int | None, ValuesByRound] = {}
    for place, round_index, number in fetched:
        by_number.setdefault(place, {})[round_index] = _measured(number)
    by_node: dict[Node | None, ValuesByRound] = {
        None if place is None else reader.names.texts([place])[0]: values for place, values in by_number.items()
    }
    order = sorted((node for node in by_node if node is not None), key=natural)
    return {node: by_node[node] for node in ([None] if None in by_node else []) + order}


def metrics_of_names(reader: Reader, run: str, names: Sequence[str]) -> list[Metric]:
    """Return the run's metrics of these names as records, in order of arrival."""
    metrics = reader.database.rows(
        f"{rows.select(Metric)} WHERE run = ? AND name IN ({placeholders(names)}) ORDER BY arrival", (run, *names)
    )
    return rows.from_rows(Metric, metrics)


def rounds_above_zero(reader: Reader, run: str, name: str, rounds_asked: Collection[int]) -> dict[Node, set[int]]:
    """Return for each node those of the given rounds in which it reported a value above zero."""
    cells = [
        (node, round_index)
        for round_index in rounds_asked
        for node, value in values_in_round(reader, run, name, round_index)
        if value > 0
    ]
    nodes = sorted({node for node, _ in cells})
    names = dict(zip(nodes, reader.names.texts(nodes), strict=True))
    rounds: dict[Node, set[int]] = {}
    for node, round_index in cells:
        rounds.setdefault(names[node], set()).add(round_index)
    return rounds


# -- one metric of all nodes, as `views.matrix` remembers it. Runs, names and nodes are numbers here. ------------------


def newest_metric_arrival(reader: Reader, run: int, known: int) -> int:
    """Return the arrival up to which the run can be read now without missing rows that appear later."""
    if not reader.database.dialect.shared:
        return int(reader.database.rows("SELECT COALESCE(MAX(arrival), 0) FROM metric")[0][0])
    # Several processes may write at once, and a number of one may become visible before smaller ones of another. Those
    # of one run become visible in order.
    ((newest,),) = reader.database.rows(
        "SELECT MAX(m.arrival) FROM metric AS m WHERE m.arrival > ? AND +m.run = ?", (known, run)
    )
    return known if newest is None else int(newest)


def gathered_by_round(reader: Reader, run: int, name: int, up_to: int) -> Iterator[tuple[Any, ...]]:
    """Yield a row for each round with the nodes and their values, to be read by `Dialect.gathered`.

    Combined inside the database, half a million values take half the time, most of it without Python's lock, so that
    other requests are answered in the meantime.
    """
    gather = reader.database.dialect.gather.format
    return reader.database.each_row(
        f"SELECT m.round, {gather('m.node')}, {gather('m.value')} {_WALK} GROUP BY m.round ORDER BY m.round",
        (run, name, up_to),
    )


def newest_values(
    reader: Reader, run: int, name: int, up_to: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Return rounds and nodes [values × 2] and the values: each node's newest value in each round.

    Row by row into arrays: a loss for every step means many rows for each value that is kept.
    """
    places, values = array("q"), array("d")
    before: tuple[int, int] | None = None
    for round_index, node, value in reader.database.each_row(
        f"SELECT m.round, m.node, m.value {_WALK} ORDER BY m.round, m.node, m.at, m.arrival", (run, name, up_to)
    ):
        if (round_index, node) == before:
            values[-1] = _measured(value)
        else:
            before = round_index, node
            places.extend(before)
            values.append(_measured(value))
    return np.array(places, np.int64).reshape(-1, 2), np.array(values)


def newest_in_cell(reader: Reader, run: int, name: int, node: int, round_index: int, up_to: int) -> float:
    """Return the newest value of one node in one round; NaN if there is none."""
    values = reader.database.rows(
        f"SELECT m.value {_WALK} AND m.round = ? AND m.node = ? ORDER BY m.at DESC, m.arrival DESC LIMIT 1",
        (run, name, up_to, round_index, node),
    )
    return float("nan") if not values or values[0][0] is None else float(values[0][0])


def values_between(reader: Reader, run: int, names: Sequence[int], after: int, up_to: int) -> list[tuple[Any, ...]]:
    """Return name, round, node and value of what arrived for these metrics after `after`."""
    wanted = padded(names)
    sql = f"SELECT m.name, m.round, m.node, m.value {_NEWS} AND m.name IN ({placeholders(wanted)})"
    return reader.database.rows(sql, (after, up_to, run, *wanted))


def sums_by_round(
    reader: Reader, run: int, name: int, without: Collection[int]
) -> list[tuple[int, float | None, int, int]]:
    """Sum a metric by round over all nodes but `without`: round, sum, number of values, number of nodes."""
    among = placeholders(without) or "-1"
    return reader.database.rows(
        "SELECT m.round, SUM(m.value), COUNT(*), COUNT(DISTINCT m.node) FROM metric AS m "  # noqa: S608 - our own words
        f"WHERE m.run = ? AND m.name = ? AND {_OF_NODE} AND m.node NOT IN ({among}) GROUP BY m.round ORDER BY m.round",
        (run, name, *without),
    )
