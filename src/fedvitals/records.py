# SPDX-License-Identifier: Apache-2.0
"""The vocabulary of fedvitals: what can be said about a run. Immutable, and free of torch.

Every record says *where* (run, round, node, step, layer, group; None means «the whole») and *when* (`at`, seconds
since the epoch). `source` and `sequence` make it unique: delivered twice, it is stored once.
"""

from __future__ import annotations

import functools
import hashlib
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedvitals import html_display as html
from fedvitals.certainty import certainty
from fedvitals.errors import ConfigError, RecordError
from fedvitals.stats import FAMILIES, Array, derive, group_names, merge

Json = Mapping[str, Any]
AnyName = object
"""A node's name as a host gives it: a text, or anything that has one (an integer, an enum's member, a path, a UUID)."""
LONGEST_RUN_ID = 200
MOST_ROUNDS = 1 << 53  # beyond this, JSON and JavaScript have no exact integers
EARLIER_SCALES = "scale.earlier"  # an event: the gradient scale of earlier runs of the same model


@dataclass(frozen=True, slots=True)
class Where:
    """Where in a federation a record belongs. None stands for all: without a node, it is the whole federation.

    Args:
        run: The run's id.
        round: The round.
        node: «server», «edge-2» or «c7».
        step: The local step.
        layer: The layer's name.
        group: The edge, cluster or ring that the node is in.
    """

    run: str
    round: int | None = None
    node: str | None = None
    step: int | None = None
    layer: str | None = None
    group: str | None = None


def node_name(name: AnyName) -> str:
    """Return a node's name as text: 7, numpy.int64(7) and "7" are the same node.

    ConfigError for None and for names without any text.
    """
    if isinstance(name, str):
        text = str.__str__(name)  # for an enum member that is a string, its value rather than its label
    elif isinstance(name, bool):
        text = str(name)
    else:
        try:
            text = str(operator.index(name))  # type: ignore[arg-type]
        except TypeError:
            text = "" if name is None else str(name)
    if not text.strip():
        raise ConfigError(f"A client, edge or group needs a name, for example 'c7' or 7; got {name!r}.")
    return text


def group_name(group: AnyName | None) -> str | None:
    """Return a group's name as text; None, for a client without a group, stays None."""
    return None if group is None else node_name(group)


def check_run_id(run: str) -> str:
    """Return the id for a new run; ConfigError unless it can be the name of a folder and part of a URL."""
    if 0 < len(run) <= LONGEST_RUN_ID and run.isprintable() and not set(run) & set("/\\") and run not in (".", ".."):
        return run
    raise ConfigError(
        f"{run[:60]!r} cannot be the id of a run: it names folders and addresses. Use 1 to {LONGEST_RUN_ID} visible "
        "characters without / and \\, or leave the id out. `run=` takes any name."
    )


def as_round_index(number: object) -> int:
    """Return a round's number as an int; ConfigError unless it is an integer (NumPy and torch included) from 0."""
    try:
        index = operator.index(number)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        index = -1
    if not 0 <= index < MOST_ROUNDS:
        raise ConfigError(
            f"A round's number is an integer from 0 on, for example monitor.round(3); got {number!r}. "
            "What happens in this one is recorded in no round. Count them: for number, ... in enumerate(...)."
        )
    return index


_DIGITS = re.compile(r"([0-9]+)")
_GROUP = re.compile(
    r"(edge|cluster|ring|star)-[0-9]+"
)  # how a topology names its groups; people may name clients «edge-box-1»


def is_client(node: str | None) -> bool:
    """Return whether the node trains: it is not the server, an edge, cluster or ring."""
    return node is not None and node != "server" and ("-" not in node or _GROUP.fullmatch(node) is None)


def client_name(name: AnyName) -> str:
    """Return a client's name as text; the name of a group or the server, such as «edge-3», becomes «edge-3 (client)».

    Everything that reads a run tells clients from groups and the server by their names.
    """
    text = node_name(name)
    return text if is_client(text) else f"{text} (client)"


@functools.lru_cache(maxsize=1 << 16)  # pages repeatedly sort the names of a thousand clients
def natural(name: str) -> tuple[object, ...]:
    """Return a sort key by which c2 comes before c10."""
    parts: list[object] = list(_DIGITS.split(name))
    # Length, then text: numeric order, for any number of digits.
    parts[1::2] = [(len(digits), digits) for digits in (str(part).lstrip("0") for part in parts[1::2])]
    return (*parts, name)


def printable(text: str) -> str:
    """Return a name with each character that cannot be shown (tab, no-break space, joiner) escaped, as in `\\u200d`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


@dataclass(frozen=True, slots=True)
class Layer:
    """One row of a layer table: a parameter, a buffer or a module's output. Its name and type are `printable`."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        # Checked here rather than where names are shown, because both ends must compute the same digest of a table.
        if not (self.name.isprintable() and self.dtype.isprintable()):
            object.__setattr__(self, "name", printable(self.name))
            object.__setattr__(self, "dtype", printable(self.dtype))


@dataclass(frozen=True, slots=True)
class LayerTable:
    """The layers that the rows of a LayerStats matrix represent, identified by its digest."""

    rows: str  # "parameter", "buffer", "module", "model" (one row, for all weights together) or one of GROUP_ROWS
    layers: tuple[Layer, ...]
    digest: str = ""
    names: tuple[str, ...] = field(init=False, repr=False, compare=False)  # of the layers, in order

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(layer.name for layer in self.layers))
        text = repr((self.rows, [(layer.name, layer.shape, layer.dtype) for layer in self.layers]))
        object.__setattr__(self, "digest", hashlib.blake2b(text.encode(), digest_size=8).hexdigest())


@functools.lru_cache(maxsize=16)
def group_table(rows: str, count: int) -> LayerTable:
    """Return the table of a family whose rows are classes, named by their numbers, or bands of ids or of lengths."""
    return LayerTable(rows, tuple(Layer(name, (), "") for name in group_names(rows, count)))


@dataclass(frozen=True, slots=True)
class Run:
    """One training, from its first event to its last. Written again (same id) when something about it changes."""

    id: str
    name: str
    host: str = "torch"  # «torch», «lab», «flower»
    topology: str | None = None
    config: Json = field(default_factory=dict)
    seed: int | None = None
    started: float = 0.0
    finished: float | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    tables: tuple[LayerTable, ...] = ()
    source: str = ""
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class Metric:
    """One scalar, with a name from `catalog`. NaN and infinity are legal values.

    Args:
        where: The run, round and node that it belongs to.
        at: Seconds since the epoch.
        name: A name of docs/metrics.md, or «user.» and a name of yours.
        value: The number.
        source: Which process reported it; filled in by the monitor.
        sequence: Its number among the records of that process; filled in by the monitor.
    """

    where: Where
    at: float
    name: str
    value: float
    source: str = ""
    sequence: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class LayerStats:
    """A matrix [layers × columns] of one family (see `stats.FAMILIES`); mergeable by `+`."""

    where: Where
    at: float
    family: str
    matrix: Array
    table: str  # digest of the LayerTable whose layers the rows are
    source: str = ""
    sequence: int = 0

    def __post_init__(self) -> None:
        family = FAMILIES.get(self.family)
        if family is None:
            raise RecordError(f"Unknown family '{self.family}'. Known: {', '.join(FAMILIES)}.")
        if self.matrix.ndim != 2 or self.matrix.shape[1] != len(family.columns):
            wanted = f"[layers, {len(family.columns)}]"
            raise RecordError(f"LayerStats of family '{self.family}' need shape {wanted}, got {self.matrix.shape}.")

    def __add__(self, other: LayerStats) -> LayerStats:
        """Return both merged, at the coordinates they share: where they differ, the sum is about «the whole»."""
        if (self.family, self.table) != (other.family, other.table):
            raise RecordError(
                f"Cannot merge '{self.family}' of layer table {self.table} with '{other.family}' of {other.table}: "
                "only statistics of the same family and the same layers add up."
            )
        here, there = self.where, other.where
        if here.run != there.run:
            raise RecordError(f"Cannot merge statistics of run '{here.run}' with those of run '{there.run}'.")
        where = Where(
            here.run,
            *(
                getattr(here, name) if getattr(here, name) == getattr(there, name) else None
                for name in ("round", "node", "step", "layer", "group")
            ),
        )
        both = merge(self.family, [self.matrix, other.matrix])
        return LayerStats(where, max(self.at, other.at), self.family, both, self.table)

    def get(self, statistic: str) -> Array:
        """Return one statistic of every layer: «mean», «std», «l2», «absmax», «mean_magnitude», «sparsity», ..."""
        return derive(self.family, self.matrix, statistic)


@dataclass(frozen=True, slots=True)
class Span:
    """How long something took. The ids are those of W3C trace context, so that traces join across systems."""

    where: Where
    at: float  # when it began
    name: str
    seconds: float
    trace: str
    id: str
    parent: str | None = None
    attributes: Json = field(default_factory=dict)
    source: str = ""
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class Transfer:
    """Bytes sent from one node to another; raw_bytes is their size before compression."""

    where: Where
    at: float
    sender: str
    receiver: str
    bytes: int
    raw_bytes: int
    seconds: float | None = None
    kind: str = "update"  # «model», «update», «telemetry»
    source: str = ""
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened: a log line, a drop-out, an exception, records lost.

    Args:
        where: The run, round and node that it belongs to.
        at: Seconds since the epoch.
        level: «debug», «info», «warning», «error» or «critical».
        name: What kind of event it is, such as «client.failed».
        message: One sentence for people.
        data: More about it, as plain JSON values.
        source: Which process reported it; filled in by the monitor.
        sequence: Its number among the records of that process; filled in by the monitor.
    """

    where: Where
    at: float
    level: str  # «debug», «info», «warning», «error», «critical»
    name: str
    message: str
    data: Json = field(default_factory=dict)
    source: str = ""
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class Sketch:
    """A random projection of an update, which preserves angles and distances between updates at any model size."""

    where: Where
    at: float
    values: tuple[float, ...]
    digest: str = ""  # of the update itself: equal digests are equal updates
    version: int = 1  # of the projection: sketches of different versions cannot be compared
    source: str = ""
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class Suspect:
    """A node that a finding accuses: how strongly (`score`), and why."""

    node: str
    score: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a detector concludes: the issue, its confidence, the evidence, and the suspects.

    Args:
        where: The run, round, node and layer that it is about; a detector leaves `run` empty.
        at: Seconds since the epoch; a detector leaves it 0, and the monitor fills it in.
        issue: The code of the issue, such as LABEL_NOISE (docs/issues.md).
        severity: «note», «warning» or «critical».
        confidence: How sure it is, from 0 to 1.
        message: One sentence for people.
        evidence: The numbers behind it, as plain JSON values.
        suspects: The nodes that it names, each with a score and a reason.
        source: Which process reported it; filled in by the monitor.
        sequence: Its number among the records of that process; filled in by the monitor.
    """

    where: Where
    at: float
    issue: str
    severity: str  # «note», «warning», «critical»
    confidence: float
    message: str
    evidence: Json = field(default_factory=dict)
    suspects: tuple[Suspect, ...] = ()
    source: str = ""
    sequence: int = 0

    def _repr_html_(self) -> str:
        place = ", ".join(
            part for part in (self.where.node or "the whole run", self.where.group, self.where.layer) if part
        )
        titles = ("severity", "where", "round", "what", "sure", "suspects")
        suspects = ", ".join(suspect.node for suspect in self.suspects)
        what = f"{self.issue}: {self.message}"
        cells = self.severity, place, self.where.round, what, certainty(self.confidence), suspects
        return html.display(html.table(titles, [cells]))


@dataclass(frozen=True, slots=True)
class Action:
    """What a correction proposes, and its outcome. Only the host applies it."""

    where: Where
    at: float
    finding: str
    kind: str
    target: str | None
    arguments: Json = field(default_factory=dict)
    status: str = "suggested"  # «suggested», «trial», «applied», «undone», «refused»
    source: str = ""
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A tensor state on the replay tape, identified by its content."""

    where: Where
    at: float
    kind: str  # «global», «update», «optimizer», «rng»
    digest: str
    bytes: int
    source: str = ""
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class Truth:
    """A fault planted by a lab, for trials to compare findings with. No detector sees it."""

    where: Where  # the run; the round and node of the fault are in `nodes`, `since` and `until`
    at: float
    kind: str  # «label_noise», «sign_flip», ...
    nodes: tuple[str, ...] = ()
    since: int = 0
    until: int | None = None  # its last round; None: to the end
    data: Json = field(default_factory=dict)  # family, issue, strength
    source: str = ""
    sequence: int = 0


FAILURES: Mapping[str, str] = {
    "client.dropped_out": "it was asked and was not there",
    "client.failed": "its training ended with an error",
    "update.lost": "its update was lost or unreadable on the way",
    "update.late": "its update was still under way when the round was closed",
    "update.refused": "its update could not be used",
    "worker.lost": "its measurements did not arrive",
}
"""Events about a client that was asked and did not deliver everything: the one list for all that count failures."""

Record = Run | Metric | LayerStats | Span | Transfer | Event | Sketch | Finding | Action | Snapshot | Truth
