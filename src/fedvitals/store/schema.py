# SPDX-License-Identifier: Apache-2.0
"""Declares the tables of a store: names, types, meanings, and the schema version that introduced them.

`ddl` generates SQL and docs/schema.md from this. To change the schema: add a table or column with `since=` the next
version, raise VERSION, and add whatever must happen to old rows to MIGRATIONS.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

VERSION = 5

# Plain SQL that runs after the new tables and columns of a version have been created.
MIGRATIONS: Mapping[int, tuple[str, ...]] = {}


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    name: str
    type: str  # a key of `Dialect.types`; "symbol" is the number of a name in the table `symbol`
    meaning: str
    null: bool = False
    since: int = 1
    default: int | None = None  # of rows written by an older version


@dataclass(frozen=True, slots=True)
class Table:
    """A table of the store."""

    name: str
    meaning: str
    columns: tuple[Column, ...]
    key: tuple[str, ...] = ()
    indexes: tuple[tuple[str, ...], ...] = ()
    view: str = ""  # the same table with names instead of numbers, for users
    since: int = 1
    later: tuple[tuple[int, tuple[str, ...]], ...] = ()  # indexes introduced in a later version than the table


def _where(meaning: str) -> tuple[Column, ...]:
    return (
        Column("arrival", "key", "Order of arrival in this store."),
        Column("run", "symbol", "Id of the run."),
        Column("round", "integer", "Round; NULL: the whole run.", null=True),
        Column("node", "symbol", "Server, edge or client; NULL: the whole federation.", null=True),
        Column("step", "integer", "Optimiser step inside the client-round; NULL: all of them.", null=True),
        Column("layer", "symbol", "Layer; NULL: the whole model.", null=True),
        Column("group", "symbol", "Edge, cluster or ring that the node is in.", null=True),
        # Reals are always nullable, because SQLite stores NaN as NULL.
        Column("at", "real", f"When {meaning}, in seconds since the epoch.", null=True),
    )


_IDENTITY = (
    Column("source", "symbol", "What made the record; with `sequence` and `run`, its identity."),
    Column("sequence", "integer", "Running number of the record within its source."),
)


def _records(
    name: str,
    view: str,
    meaning: str,
    *columns: Column,
    at: str = "it was made",
    index: str = "",
    since: int = 1,
) -> Table:
    """Return the table of a record type: coordinates, its own columns, identity, and last the columns added later."""
    own = [column for column in columns if column.since <= since]
    later = [column for column in columns if column.since > since]
    return Table(
        name=name,
        meaning=meaning,
        columns=(*_where(at), *own, *_IDENTITY, *later),
        indexes=(tuple(index.split()),) if index else (("run", "round"),),
        view=view,
        since=since,
    )


TABLES: tuple[Table, ...] = (
    Table(
        "symbol",
        "Every name (run, node, layer, metric), stored once. The other tables hold its number.",
        (Column("id", "integer", "The number, counting from 1."), Column("text", "text", "The name.")),
        key=("id",),
        indexes=(("text",),),
    ),
    Table(
        "run",
        "One training, from its first event to its last.",
        (
            Column("id", "symbol", "Id of the run."),
            Column("name", "text", "Name given by the user; several runs may share it."),
            Column("host", "text", "What runs the training: torch, lab, flower."),
            Column("topology", "text", "Shape of the federation, if the host knows it.", null=True),
            Column("config", "json", "Settings of the training."),
            Column("seed", "integer", "Seed of the training, if there is one.", null=True),
            Column("started", "real", "Start of the run, in seconds since the epoch.", null=True),
            Column("finished", "real", "End of the run; NULL: still running, or killed.", null=True),
            Column("versions", "json", "Versions of the packages in use."),
            Column("tables", "json", "Digests of the layer tables (`layers`)."),
            *_IDENTITY,
        ),
        key=("id",),
        view="runs",
    ),
    _records(
        "metric",
        "metrics",
        "One scalar per row; docs/metrics.md says what the names mean.",
        Column("name", "symbol", "Name of the metric."),
        Column("value", "real", "The value; NULL stands for NaN (an absent metric has no row).", null=True),
        at="it was measured",
        # Covering, and in order of arrival within each name: one round, one node's history and one metric over all
        # nodes are all short walks, and it costs a tenth of the insert rate (node before round costs two thirds).
        index="run name round node at value layer",
    ),
    _records(
        "event",
        "events",
        "Something that happened: a log line, a drop-out, an exception, records lost.",
        Column("level", "symbol", "debug, info, warning, error or critical."),
        Column("name", "symbol", "Kind of event."),
        Column("message", "text", "One sentence for people."),
        Column("data", "json", "Details."),
        at="it happened",
        index="run level",
    ),
    _records(
        "span",
        "spans",
        "How long something took; the ids are those of W3C trace context.",
        Column("name", "symbol", "What was timed."),
        Column("seconds", "real", "Its duration.", null=True),
        Column("trace", "text", "Trace id."),
        Column("id", "text", "Span id."),
        Column("parent", "text", "Span id of the span around it.", null=True),
        Column("attributes", "json", "Details."),
        at="it began",
    ),
    _records(
        "transfer",
        "transfers",
        "Bytes that went from one node to another.",
        Column("sender", "symbol", "Node that sent."),
        Column("receiver", "symbol", "Node that received."),
        Column("bytes", "integer", "Bytes on the wire."),
        Column("raw_bytes", "integer", "Their size before compression."),
        Column("seconds", "real", "How long it took, if known.", null=True),
        Column("kind", "symbol", "model, update or telemetry."),
        at="it happened",
    ),
    _records(
        "sketch",
        "sketches",
        "A random projection of an update that preserves angles and distances approximately.",
        Column("values", "blob", "The numbers, float32, little endian."),
        Column("digest", "text", "Digest of the update itself: equal digests are equal updates."),
        Column("version", "integer", "Version of the projection: only equal versions compare.", since=4, default=1),
    ),
    _records(
        "finding",
        "findings",
        "What a detector reports.",
        Column("issue", "symbol", "Code of the issue."),
        Column("severity", "symbol", "note, warning or critical."),
        Column("confidence", "real", "Confidence, from 0 to 1.", null=True),
        Column("message", "text", "One sentence for people."),
        Column("evidence", "json", "The numbers behind it."),
        Column("suspects", "json", 'Who is suspected: `[{"node", "score", "reason"}, ...]`.'),
    ),
    _records(
        "action",
        "actions",
        "What a correction proposes, and what became of it.",
        Column("finding", "text", "The finding that it responds to."),
        Column("kind", "symbol", "What to do."),
        Column("target", "symbol", "Node or layer that it applies to.", null=True),
        Column("arguments", "json", "Arguments of the action."),
        Column("status", "symbol", "suggested, trial, applied, undone or refused."),
    ),
    _records(
        "snapshot",
        "snapshots",
        "A tensor state on the replay tape, identified by its content.",
        Column("kind", "symbol", "global, update, optimizer or rng."),
        Column("digest", "text", "Digest of the content."),
        Column("bytes", "integer", "Its size."),
    ),
    Table(
        "layer_table",
        "Lists of layers that statistics refer to; stored once for all runs that share them.",
        (
            Column("id", "symbol", "Digest of the list."),
            Column("rows", "text", "What the layers are: parameter, buffer or module."),
        ),
        key=("id",),
    ),
    Table(
        "layer",
        "The layers of each list, first to last.",
        (
            Column("layer_table", "symbol", "Digest of the list."),
            Column("position", "integer", "Position in the list, from 0."),
            Column("name", "symbol", "Name of the layer."),
            Column("shape", "json", "Shape of the tensor."),
            Column("dtype", "text", "Type of its elements."),
        ),
        key=("layer_table", "position"),
        indexes=(("layer_table", "name"),),
        view="layers",
    ),
    Table(
        "layer_block",
        "Layer statistics, packed: which matrices (the *entries*) one block of numbers holds. One block "
        "arrives per batch and round; older rounds are compacted into larger blocks, which changes no query result.",
        (
            Column("arrival", "key", "Order of arrival in this store."),
            Column("run", "symbol", "Id of the run."),
            Column("family", "symbol", "What the columns mean (docs/metrics.md, «Families»)."),
            Column("layer_table", "symbol", "Digest of the list of layers."),
            Column("layers", "integer", "How many layers."),
            Column("entries", "integer", "How many matrices."),
            Column("first_round", "integer", "Smallest round among them; NULL: an entry has no round.", null=True),
            Column("last_round", "integer", "Largest round among them; NULL: an entry has no round.", null=True),
            Column(
                "coordinates",
                "blob",
                "Of each entry: round int64, at float64, node int32 (three arrays); since version 5, then a CRC-32.",
            ),
            Column(
                "details",
                "blob",
                "Step, sequence int64; layer, group, source int32 (five arrays); since version 5, then a CRC-32.",
            ),
            Column(
                "whole",
                "integer",
                "1: every entry is about the whole federation, 0: each is about a node; NULL: both, or not known.",
                null=True,
                since=3,
            ),
        ),
        indexes=(("run", "family", "first_round"),),
        # Reading the column itself, stored behind the blobs, would be slow.
        later=((3, ("run", "family", "whole")),),
    ),
    Table(
        "layer_matrix",
        "The numbers of a block, float32, [layers, columns, entries].",
        (
            Column("block", "integer", "`arrival` of the block."),
            Column("layer", "integer", "Position of the layer; -1: all layers in one row (not yet compacted)."),
            Column(
                "numbers",
                "blob",
                "The numbers; the nine sums as `fedvitals.stats.pack` makes them. Since version 5, a CRC-32 follows.",
            ),
        ),
        key=("block", "layer"),
    ),
    Table(
        "run_round",
        "Rounds that have a record, with the time of the first and of the last one.",
        (
            Column("run", "symbol", "Id of the run."),
            Column("round", "integer", "The round."),
            Column("first", "real", "Smallest `at` of its records.", null=True),
            Column("last", "real", "Largest `at` of its records.", null=True),
        ),
        key=("run", "round"),
    ),
    Table(
        "run_node",
        "Nodes that have a record.",
        (Column("run", "symbol", "Id of the run."), Column("node", "symbol", "The node.")),
        key=("run", "node"),
    ),
    Table(
        "delivered",
        "Which records of a source are stored, as closed intervals of their sequence: delivered twice, stored once.",
        (
            Column("run", "symbol", "Id of the run."),
            Column("source", "symbol", "Who made the records."),
            Column("first", "integer", "First sequence of the interval."),
            Column("last", "integer", "Last sequence of the interval."),
        ),
        key=("run", "source", "first"),
    ),
    _records(
        "truth",
        "truths",
        "Faults that a lab injected on purpose, for trials that compare findings with them. No detector sees them.",
        Column("kind", "symbol", "Which fault."),
        Column("nodes", "json", "Names of the affected nodes."),
        Column("since", "integer", "First round."),
        Column("until", "integer", "Last round; NULL: to the end of the run.", null=True),
        Column("data", "json", "Family, issue and strength."),
        index="run",
        since=2,
    ),
    Table(
        "mark",
        "What people note about a run: tags, and findings that they have acknowledged or muted.",
        (
            Column("run", "symbol", "Id of the run."),
            Column("kind", "text", "tag, acknowledged or muted."),
            Column("target", "text", "The tag, or the key of the case in the dashboard."),
            Column("value", "text", "A comment, such as why it was muted."),
            Column("at", "real", "When it was set, in seconds since the epoch.", null=True),
        ),
        key=("run", "kind", "target"),
        view="marks",
        since=3,
    ),
)

TABLE = {table.name: table for table in TABLES}

# The statistics that the view `layer_statistics` shows for each family with the nine sums.
LAYER_STATISTICS = (
    "count",
    "mean",
    "std",
    "l2",
    "min",
    "max",
    "absmax",
    "mean_magnitude",
    "sparsity",
    "zeros",
    "nans",
    "infs",
)
