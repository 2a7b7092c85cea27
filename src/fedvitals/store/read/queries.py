# SPDX-License-Identifier: Apache-2.0
"""Answers what several front ends ask about a run: its summary, metrics, layer statistics, events and records."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, TypeVar

import numpy as np

from fedvitals.errors import ConfigError, unknown
from fedvitals.protocols import Node
from fedvitals.records import Event, LayerStats, LayerTable, Run, Truth, natural
from fedvitals.stats import Array, derive
from fedvitals.store import rows
from fedvitals.store.packing import coordinates_of, entries_of, matrices, numbers_of, records_of
from fedvitals.store.read.federation_layers import whole_layers  # noqa: F401 - a question like the others, in a file of its own
from fedvitals.store.read.layers import layer_names
from fedvitals.store.read.metrics import NAMES_OF_RUN, newest_outcomes
from fedvitals.store.read.nodes import count_clients, placeholders, rounds_attended
from fedvitals.store.read.reader import Reader

R = TypeVar("R")
TELEMETRY_LOST = "telemetry.lost"  # the event with which a monitor reports how many records it lost
RoundTable = dict[Node | None, dict[str, float]]
"""Metrics by node; None is the whole federation. What was not measured has no entry, so a NaN is a measured one."""

# Without a node, only values of the whole federation, not those of one edge or cluster.
_WHOLE = 'AND (m.node IS NOT NULL OR m."group" IS NULL) '


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What a list of runs shows for one run."""

    id: str
    name: str
    host: str
    topology: str | None
    started: float
    finished: float | None
    seconds: float | None  # so far, if it is not finished
    rounds: int
    clients: int
    accuracy: float | None  # of the global model where it was measured, else the clients' mean
    loss: float | None
    events: Mapping[str, int]  # by level
    findings: int  # troubles, each counted once
    lost: int
    thinned: int  # client-rounds whose layer statistics were omitted


@dataclass(frozen=True, slots=True, eq=False)
class LayerRound:
    """The statistics of one family in one round: matrix [nodes, layers, columns]."""

    family: str
    layers: tuple[str, ...]
    nodes: tuple[Node | None, ...]
    matrix: Array

    def get(self, statistic: str) -> Array:
        """Return one statistic of every node and layer, [nodes, layers]."""
        return derive(self.family, self.matrix, statistic)


def _by_name(node: Node | None) -> tuple[Any, ...]:
    """Return the sort key: the whole first, then the nodes in natural order."""
    return (False,) if node is None else (True, *natural(node))


def list_runs(reader: Reader) -> list[RunSummary]:
    """Return a summary of every run, the newest first."""
    runs = reader.database.rows(
        "SELECT id, name, host, topology, started, finished FROM run ORDER BY started DESC, id DESC"
    )
    return [_summary(reader, row) for row in runs]


def summary_of(reader: Reader, run: str) -> RunSummary:
    """Return the summary of one run; ConfigError if there is none with that id."""
    runs = reader.database.rows(
        "SELECT r.id, r.name, r.host, r.topology, r.started, r.finished FROM run AS r "
        "JOIN symbol AS s ON s.id = r.id WHERE s.text = ?",
        (run,),
    )
    if not runs:
        raise ConfigError(unknown("run", run, [row[0] for row in reader.database.rows("SELECT id FROM runs")]))
    return _summary(reader, runs[0])


def _summary(reader: Reader, row: rows.Row) -> RunSummary:
    run, name, host, topology, started, finished = row
    ask = reader.database.rows
    ((rounds, last),) = ask("SELECT COUNT(*), MAX(last) FROM run_round WHERE run = ?", (run,))
    levels = ask("SELECT s.text, COUNT(*) FROM event AS e JOIN symbol AS s ON s.id = e.level WHERE e.run = ? "
                 "GROUP BY s.text", (run,))  # fmt: skip
    # The same trouble is found again in each round in which it persists: counted once, by the rule of
    # `diagnosis.cases`.
    ((findings,),) = ask(
        'SELECT COUNT(*) FROM (SELECT DISTINCT issue, node, layer, CASE WHEN node IS NULL THEN "group" END '
        "FROM finding WHERE run = ?) AS troubles",
        (run,),
    )
    end = finished if finished is not None else last
    identity = reader.names.texts([run])[0]
    lost, thinned = left_out(reader, identity)
    outcomes = newest_outcomes(reader, identity, ("accuracy", "loss"))
    return RunSummary(
        id=identity,
        name=name,
        host=host,
        topology=topology,
        started=math.nan if started is None else started,
        finished=finished,
        seconds=None if end is None or started is None else max(0.0, end - started),  # a clock may be set back
        rounds=rounds,
        clients=count_clients(reader, identity),
        accuracy=outcomes["accuracy"],
        loss=outcomes["loss"],
        events=dict(levels),
        findings=findings,
        lost=lost,
        thinned=thinned,
    )


# The rows for which `left_out` needs the names, the sources and the largest values. Rows of 0, one per round, are as
# good as none, and the index identifies them: sorting them by source would take memory that grows with the run.
LOSSES = (
    "FROM metric AS m JOIN symbol AS n ON n.id = m.name JOIN symbol AS s ON s.id = m.source WHERE m.run = ? "
    "AND m.node IS NULL AND m.value > 0 "
    "AND m.name IN (SELECT id FROM symbol WHERE text IN ('monitor.lost', 'monitor.thinned'))"
)


def left_out(
    reader: Reader,
    run: str,
    warnings: Sequence[Event] | None = None,
    counted: Sequence[tuple[str, str, float]] | None = None,
) -> tuple[int, int]:
    """Return how many records of a run were lost, and for how many client-rounds layer statistics were omitted, as far
    as its monitors have reported.

    These are the sums of the counts of each process that wrote the run; each counts from 0. A process reports at the
    end of each round and at its own end, if it can: an event may wait beside the store if the store itself could not be
    written. What a client reports under these names is not counted.

    `warnings`: the run's events of the name `TELEMETRY_LOST`, if they are known already; others among them are ignored.
    `counted`: the metrics' values by source, if they are known already.
    """
    if counted is None:
        counted = reader.database.rows(
            f"SELECT n.text, s.text, MAX(m.value) {LOSSES} GROUP BY n.text, s.text", (_number(reader, run),)
        )
    lost = {source: int(most or 0) for name, source, most in counted if name == "monitor.lost"}
    for event in warnings_of(reader, run, (TELEMETRY_LOST,)) if warnings is None else warnings:
        if event.name == TELEMETRY_LOST and event.where.node is None:
            lost[event.source] = max(lost.get(event.source, 0), int(event.data.get("records") or 0))
    return sum(lost.values()), sum(int(most or 0) for name, _, most in counted if name == "monitor.thinned")


def warnings_of(reader: Reader, run: str, names: Sequence[str]) -> list[Event]:
    """Return the run's events of the level «warning» with these names, the oldest first."""
    events = reader.database.rows(
        f"{rows.select(Event)} WHERE run = ? AND level = 'warning' AND name IN ({placeholders(names)}) "
        "ORDER BY at, arrival",
        (run, *names),
    )
    return rows.from_rows(Event, events)


def newest(reader: Reader, run: str, metric: str) -> float | None:
    """Return the newest value of a metric for the federation, its server or its median client."""
    return newest_outcomes(reader, run, (metric,))[metric]


def find_run(reader: Reader, text: str) -> str:
    """Return the id of the run that a user means by an id, a name (its newest run), or the beginning of an id."""
    runs = reader.database.rows(
        "SELECT s.text, r.name, r.id FROM run AS r JOIN symbol AS s ON s.id = r.id ORDER BY r.started DESC"
    )
    reader.names.learn((number, identity) for identity, _, number in runs)
    ids = [row[0] for row in runs]
    if text in ids:
        return text
    named = [identity for identity, name, _ in runs if name == text]
    if named:
        return str(named[0])
    starting = [identity for identity in ids if text and identity.startswith(text)]
    if len(starting) == 1:
        return str(starting[0])
    if starting:
        raise ConfigError(f"Several runs begin with '{text}': {', '.join(sorted(starting))}. Give more of the id.")
    raise ConfigError(unknown("run", text, {row[1] for row in runs}))


def rounds_with_findings(reader: Reader, run: str, issues: Iterable[str]) -> tuple[int, ...]:
    """Return the rounds in which the run has a finding of one of these issues, ascending."""
    numbers = [number for issue in issues if (number := reader.names.number(issue)) is not None]
    if not numbers:
        return ()
    rounds = reader.database.rows(
        "SELECT DISTINCT round FROM finding WHERE run = ? AND round IS NOT NULL "  # noqa: S608 - placeholders
        f"AND issue IN ({placeholders(numbers)}) ORDER BY round",
        (reader.names.number(run) or 0, *numbers),
    )
    return tuple(int(round_index) for (round_index,) in rounds)


def get_run(reader: Reader, run: str) -> Run:
    """Return the run as it was last written; ConfigError if there is none with that id."""
    columns = ("id", *rows.RUN_COLUMNS, "source", "sequence")
    runs = reader.database.rows(f"SELECT {', '.join(columns)} FROM runs WHERE id = ?", (run,))  # noqa: S608
    if not runs:
        raise ConfigError(unknown("run", run, [row[0] for row in reader.database.rows("SELECT id FROM runs")]))
    return rows.run_of_row(runs[0], layer_tables(reader))


def layer_tables(reader: Reader) -> dict[str, LayerTable]:
    """Return every list of layers in the store, by its digest."""
    layers = reader.database.rows(
        "SELECT digest.text, t.rows, name.text, l.shape, l.dtype FROM layer_table AS t "
        "JOIN symbol AS digest ON digest.id = t.id LEFT JOIN layer AS l ON l.layer_table = t.id "
        "LEFT JOIN symbol AS name ON name.id = l.name ORDER BY digest.text, l.position"
    )
    return {
        digest: rows.layer_table_of(kind, [row[2:] for row in same if row[2] is not None])
        for (digest, kind), same in groupby(layers, key=itemgetter(0, 1))
    }


def _number(reader: Reader, run: str) -> int:
    return reader.names.number(run) or 0


def metric_names(reader: Reader, run: str) -> list[str]:
    """Return every metric that the run has values of, sorted."""
    number = _number(reader, run)
    sql = NAMES_OF_RUN + "SELECT s.text FROM names JOIN symbol AS s ON s.id = names.name"  # noqa: S608
    return sorted(row[0] for row in reader.database.rows(sql, (number, number)))


def round_table(reader: Reader, run: str, round_index: int) -> RoundTable:
    """Return every node's newest value of every metric in that round."""
    number = _number(reader, run)
    values = reader.database.rows(
        NAMES_OF_RUN + "SELECT node.text, name.text, m.value FROM names JOIN metric AS m "  # noqa: S608
        "ON m.run = ? AND m.name = names.name AND m.round = ? JOIN symbol AS name ON name.id = m.name "
        "LEFT JOIN symbol AS node ON node.id = m.node WHERE m.layer IS NULL " + _WHOLE + "ORDER BY m.at, m.arrival",
        (number, number, number, round_index),
    )
    table: RoundTable = {}
    for node, name, value in values:
        table.setdefault(node, {})[name] = math.nan if value is None else value
    return {node: table[node] for node in sorted(table, key=_by_name)}


def newest_rounds(reader: Reader, run: str, count: int) -> dict[int, RoundTable]:
    """Return the tables of the newest rounds, the newest first."""
    rounds = reader.database.rows(
        "SELECT round FROM run_round WHERE run = ? ORDER BY round DESC LIMIT ?", (_number(reader, run), count)
    )
    return {row[0]: round_table(reader, run, row[0]) for row in rounds}


def node_history(reader: Reader, run: str, node: Node | None) -> dict[str, tuple[list[int], list[float]]]:
    """Return every metric of one node over the rounds, with its newest value in each."""
    number = _number(reader, run)
    whole, of_node = 'm.node IS NULL AND m."group" IS NULL', "m.node = (SELECT id FROM symbol WHERE text = ?)"
    values = reader.database.rows(
        # CROSS JOIN, because SQLite keeps its order: one seek for each metric and round, no walk over all nodes.
        NAMES_OF_RUN + "SELECT name.text, m.round, m.value FROM names CROSS JOIN run_round AS r CROSS JOIN metric AS m "  # noqa: S608
        "JOIN symbol AS name ON name.id = m.name WHERE r.run = ? AND m.run = r.run AND m.name = names.name "
        f"AND m.round = r.round AND {whole if node is None else of_node} AND m.layer IS NULL ORDER BY m.at, m.arrival",
        (number, number, number, *(() if node is None else (node,))),
    )
    newest: dict[str, dict[int, float]] = {}
    for name, round_, value in values:
        newest.setdefault(name, {})[round_] = math.nan if value is None else value
    return {name: (sorted(of), [of[key] for key in sorted(of)]) for name, of in sorted(newest.items())}


def layer_matrix(
    reader: Reader, run: str, family: str, statistic: str, layer: str
) -> tuple[list[int], list[Node], Array]:
    """Return one layer's statistic as [rounds × nodes]; ConfigError when the run has no such layer."""
    history = reader.history(run)
    matrix = history.matrix(family, statistic, layer)
    if not matrix[0] and layer not in history.layers(family):
        raise ConfigError(unknown(f"layer of family '{family}'", layer, history.layers(family)))
    return matrix


def layer_families(reader: Reader, run: str) -> list[str]:
    """Return the families of layer statistics that the run has, sorted."""
    sql = "SELECT DISTINCT s.text FROM layer_block AS b JOIN symbol AS s ON s.id = b.family WHERE b.run = ?"
    return sorted(row[0] for row in reader.database.rows(sql, (_number(reader, run),)))


def layer_round(reader: Reader, run: str, family: str, round_index: int, like: Node | None = None) -> LayerRound:
    """Return the newest matrices of a family in that round, of all nodes whose rows are the same as those of `like`.

    Without it, the rows are those of the newest matrix: models of several kinds may take part in a run.
    """
    blocks = reader.database.rows(
        "SELECT b.arrival, m.layer, b.layer_table, b.entries, b.coordinates, m.numbers FROM layer_block AS b "
        "JOIN layer_matrix AS m ON m.block = b.arrival WHERE b.run = ? "
        "AND b.family = (SELECT id FROM symbol WHERE text = ?) AND (b.first_round IS NULL OR "
        "(b.first_round <= ? AND b.last_round >= ?))",
        (_number(reader, run), family, round_index, round_index),
    )
    blocks.sort(key=itemgetter(0, 1))
    newest: dict[int, tuple[float, Array]] = {}
    own = None if like is None else reader.names.number(like)

    def has(row: Sequence[Any]) -> bool:
        rounds, _, nodes = coordinates_of(row[4], row[3])
        return bool(((rounds == round_index) & (nodes == own)).any())

    table = next((row[2] for row in reversed(blocks) if like is None or has(row)), None)
    for _, same in groupby((row for row in blocks if row[2] == table), key=itemgetter(0)):
        block = list(same)
        count = block[0][3]
        rounds, at, nodes = coordinates_of(block[0][4], count)
        here = np.flatnonzero(rounds == round_index)
        numbers = np.concatenate([numbers_of(family, row[5], count)[..., here] for row in block])
        for i, matrix in zip(here, matrices(family, numbers), strict=True):
            node, when = int(nodes[i]), float(at[i])
            if node not in newest or when >= newest[node][0]:
                newest[node] = (when, matrix)
    named: dict[Node | None, Array] = {
        reader.names.texts([number])[0] if number else None: matrix for number, (_, matrix) in newest.items()
    }
    order = tuple(sorted(named, key=_by_name))
    layers = layer_names(reader, table)
    return LayerRound(
        family, layers, order, np.stack([named[node] for node in order]) if order else np.empty((0, 0, 0))
    )


def events(
    reader: Reader, run: str, *, level: str | None = None, name: str | None = None, limit: int | None = None
) -> list[Event]:
    """Return the newest events, the oldest first; of one level and one name if given."""
    wanted = {column: value for column, value in (("level", level), ("name", name)) if value is not None}
    condition = "".join(f" AND {column} = ?" for column in wanted)
    fetched = reader.database.rows(
        f"{rows.select(Event)} WHERE run = ?{condition} ORDER BY at DESC, arrival DESC LIMIT ?",
        (run, *wanted.values(), 2**62 if limit is None else limit),
    )
    return rows.from_rows(Event, fetched[::-1])


def records(reader: Reader, run: str, kind: type[R]) -> Sequence[R]:
    """Return every record of one type but Run in order of arrival (layer statistics: block by block)."""
    if kind is LayerStats:
        return _layer_stats(reader, run)  # type: ignore[return-value]
    fetched = reader.database.rows(f"{rows.select(kind)} WHERE run = ? ORDER BY arrival", (run,))
    return rows.from_rows(kind, fetched)


def attendance(reader: Reader, run: str, nodes: Iterable[Node | None] | None = None) -> dict[Node | None, list[int]]:
    """Return the rounds in which each node (or these) trained or sent an update; under None, all rounds of the run."""
    if nodes is not None:
        # For few nodes, one seek per round: reading all would be a walk of seconds.
        named = {node for node in nodes if node is not None}
        return {None: reader.history(run).rounds(), **rounds_attended(reader, run, named)}
    gather, gathered = reader.database.dialect.gather.format, reader.database.dialect.gathered
    gathered_nodes = reader.database.rows(
        f"SELECT m.round, {gather('m.node')} FROM metric AS m WHERE m.run = ? AND m.name IN "  # noqa: S608
        "(SELECT id FROM symbol WHERE text IN ('steps', 'update.norm')) AND m.round IS NOT NULL AND m.node IS NOT NULL "
        "AND m.layer IS NULL GROUP BY m.round, m.name ORDER BY m.round",
        (_number(reader, run),),
    )
    took_part: dict[int, list[int]] = {}
    for number, same in groupby(gathered_nodes, key=itemgetter(0)):
        for node in sorted({int(node or 0) for _, nodes in same for node in gathered(nodes)}):
            took_part.setdefault(node, []).append(number)
    names = reader.names.texts(took_part)
    return {None: reader.history(run).rounds(), **dict(zip(names, took_part.values(), strict=True))}


def truth_of(reader: Reader, run: str) -> list[Truth]:
    """Return the faults that were planted in a run, by its id, its name, or the beginning of its id. For trials only.

    A detector is given a `History`, which has no such query.
    """
    return list(records(reader, find_run(reader, run), Truth))


def _layer_stats(reader: Reader, run: str) -> list[LayerStats]:
    blocks = reader.database.rows(
        "SELECT b.arrival, m.layer, f.text, t.text, b.entries, b.coordinates, b.details, m.numbers "
        "FROM layer_block AS b JOIN layer_matrix AS m ON m.block = b.arrival "
        "JOIN symbol AS f ON f.id = b.family JOIN symbol AS t ON t.id = b.layer_table WHERE b.run = ?",
        (_number(reader, run),),
    )
    blocks.sort(key=itemgetter(0, 1))
    stats: list[LayerStats] = []
    for _, same in groupby(blocks, key=itemgetter(0)):
        block = list(same)
        _, _, family, table, count, coordinates, details, _ = block[0]
        numbers = np.concatenate([numbers_of(family, row[7], count) for row in block])
        entries = entries_of(coordinates, details, count)
        name = lambda number: reader.names.texts([number])[0] if number else None  # noqa: E731
        stats += records_of((run, family, table), entries, numbers, name)
    return stats
