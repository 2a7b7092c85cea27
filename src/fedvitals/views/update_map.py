# SPDX-License-Identifier: Apache-2.0
"""Who behaves alike: a round's updates as points in a plane, and as a matrix of cosines, out of their sketches.

Only directions count: every sketch is scaled to length 1, so that the squared distance of two clients is 2 − 2·cosine,
and the plane is the one that keeps most of these distances (principal components, which on this geometry is classical
scaling). Components have no orientation of their own. All sketches are made by one projection, so that the axes of two
rounds can be compared: each round's are turned (orthogonal Procrustes) to those of an earlier round, and points move
from round to round only as far as updates do.
"""

from __future__ import annotations

import base64
import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedvitals.records import is_client, natural
from fedvitals.stats import Array
from fedvitals.store.reader import Reader

MOST_ROUNDS = 10_000  # that a slider is told of
MOST_POINTS = 5_000
MOST_SIMILAR = 300  # clients in the matrix
TRAIL = 8  # rounds behind the one that is shown
STRIDE = 4
LAYOUTS = 512  # that are remembered


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """One round in the plane."""

    names: tuple[str, ...]
    points: Array  # [clients, 2]
    axes: Array  # [256, 2]: what the plane is spanned by
    shares: tuple[float, float]  # of the clients' spread that each axis shows
    unusable: int  # sketches that are zero or not finite: they have no direction


@dataclass(frozen=True, slots=True)
class Point:
    name: str
    x: float
    y: float
    group: str | None
    severity: str | None  # of the worst case that is open


@dataclass(frozen=True, slots=True)
class Step:
    round: int
    x: float
    y: float


@dataclass(frozen=True, slots=True)
class Similarity:
    """Cosines of clients' updates, neighbours beside each other."""

    names: list[str]
    values: str  # base64 of little-endian float32, [names × names]
    total: int  # clients in the round
    chosen: str  # which of them these are


@dataclass(frozen=True, slots=True)
class UpdateMap:
    round: int | None  # None: the run has no sketches
    rounds: list[int]  # that have sketches
    points: list[Point]
    total: int
    unusable: int
    shares: list[float]
    trail: list[Step]  # of the chosen client, oldest first, the shown round last
    similarity: Similarity | None


class Layouts:
    """The layouts of rounds, remembered as long as no further sketch of the round has come. One for all requests."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, int], tuple[object, Layout | None, Layout]] = OrderedDict()
        self._lock = threading.Lock()

    def layout(self, reader: Reader, run: str, rounds: Sequence[int], at: int) -> Layout:
        """Of the round at this place among the rounds that have sketches."""
        before = _before(at)
        older = None if before is None else self.layout(reader, run, rounds, before)
        sign = _sign(reader, run, rounds[at])
        with self._lock:
            known = self._known.get((run, rounds[at]))
            if known is not None and known[0] == sign and known[1] is older:
                self._known.move_to_end((run, rounds[at]))
                return known[2]
        made = layout_of(sketches(reader, run, rounds[at]), older)
        with self._lock:
            self._known[run, rounds[at]] = sign, older, made
            while len(self._known) > LAYOUTS:
                self._known.popitem(last=False)
        return made


def _before(at: int) -> int | None:
    """Which earlier layout a layout is turned to: the one before, three times of four, else one further back.

    So no round is more than a dozen steps away from the first, however long the run is; and whoever opens round 400
    sees the same picture as who went there step by step.
    """
    if at == 0:
        return None
    step = 1
    while at % (step * STRIDE) == 0:
        step *= STRIDE
    return at - step


def rounds_with_sketches(reader: Reader, run: str) -> list[int]:
    """Ascending; the newest where there are very many."""
    found = reader.database.rows(
        "SELECT r.round FROM run_round AS r WHERE r.run = ? AND EXISTS (SELECT 1 FROM sketch AS s WHERE s.run = r.run "
        "AND s.round = r.round) ORDER BY r.round DESC LIMIT ?",
        (reader.names.number(run) or 0, MOST_ROUNDS),
    )
    return [row[0] for row in reversed(found)]


def sketches(reader: Reader, run: str, round: int) -> dict[str, Array]:  # noqa: A002 - the domain's word
    """Each client's newest sketch of a round; of one length, that of most."""
    found = reader.database.rows(
        'SELECT n.text, s."values" FROM sketch AS s JOIN symbol AS n ON n.id = s.node WHERE s.run = ? AND s.round = ? '
        "ORDER BY s.arrival",
        (reader.names.number(run) or 0, round),
    )
    newest = {node: bytes(values) for node, values in found if is_client(node) and values}
    sizes = Counter(len(values) for values in newest.values())
    usual = sizes.most_common(1)[0][0] if sizes else 0
    order = sorted((node for node in newest if len(newest[node]) == usual), key=natural)
    return {node: np.frombuffer(newest[node], "<f4").astype(np.float64) for node in order}


def _sign(reader: Reader, run: str, round_: int) -> object:
    return reader.database.rows(
        "SELECT COUNT(*), MAX(arrival) FROM sketch WHERE run = ? AND round = ?", (reader.names.number(run) or 0, round_)
    )[0]


def layout_of(vectors: Mapping[str, Array], older: Layout | None = None) -> Layout:
    """The vectors' directions in the plane, turned to an older layout's axes."""
    names, units = directions(vectors)
    centred = units - units.mean(axis=0) if len(names) else units
    axes, shares = _components(centred)
    if older is not None and older.axes.shape == axes.shape:
        axes = axes @ _turn(axes, older.axes)
        spread = np.sum((centred @ axes) ** 2, axis=0)
        total = float(np.sum(centred**2))
        shares = spread / total if total > 0 else np.zeros(2)
    points = centred @ axes
    return Layout(tuple(names), points, axes, (float(shares[0]), float(shares[1])), len(vectors) - len(names))


def directions(vectors: Mapping[str, Array]) -> tuple[list[str], Array]:
    """The vectors that have a direction, as rows of length 1: neither zero nor anything that is not finite."""
    if not vectors:
        return [], np.empty((0, 0))
    rows = np.stack([*vectors.values()])
    with np.errstate(all="ignore"):
        sizes = np.linalg.norm(rows, axis=1)
    usable = np.isfinite(sizes) & (sizes > 0)
    names = [name for name, there in zip(vectors, usable, strict=True) if there]
    return names, rows[usable] / sizes[usable, None]


def _components(centred: Array) -> tuple[Array, Array]:
    """The first two principal axes, as columns, and the share of the spread along each."""
    rows, width = centred.shape
    axes, shares = np.zeros((width, 2)), np.zeros(2)
    if rows < 2:
        return axes, shares
    # The smaller of the two products has the same components, and takes a fraction of the time.
    if rows <= width:
        powers, inner = np.linalg.eigh(centred @ centred.T)
        vectors = centred.T @ inner[:, ::-1][:, :2]
    else:
        powers, inner = np.linalg.eigh(centred.T @ centred)
        vectors = inner[:, ::-1][:, :2]
    powers = np.maximum(powers[::-1], 0.0)
    total = float(powers.sum())
    for i in range(min(2, vectors.shape[1])):
        size = float(np.linalg.norm(vectors[:, i]))
        if total > 0 and powers[i] > 1e-12 * total and size > 0:
            axis = vectors[:, i] / size
            # A sign for the first round of all: the longer tail to the right.
            axes[:, i] = axis if np.sum((centred @ axis) ** 3) >= 0 else -axis
            shares[i] = powers[i] / total
    return axes, shares


def _turn(axes: Array, to: Array) -> Array:
    """The rotation or reflection that brings these axes as near to those as they come."""
    left, _, right = np.linalg.svd(axes.T @ to)
    return np.asarray(left @ right)


def cosines(units: Array) -> Array:
    return np.clip(units @ units.T, -1.0, 1.0)


def alike_in_order(similar: Array) -> list[int]:
    """An order in which neighbours are alike: the leaves of an average-linkage tree, branches turned to fit."""
    count = len(similar)
    if count == 0:
        return []
    distance = 1.0 - np.asarray(similar, dtype=np.float64)
    np.fill_diagonal(distance, np.inf)
    leaves, far = [[i] for i in range(count)], 1.0 - np.asarray(similar, dtype=np.float64)
    for _ in range(count - 1):
        first, second = sorted(divmod(int(np.argmin(distance)), count))
        small, large = len(leaves[first]), len(leaves[second])
        joined = (small * distance[first] + large * distance[second]) / (small + large)
        leaves[first] = _facing(leaves[first], leaves[second], far)
        leaves[second] = []
        joined[first] = np.inf
        distance[first], distance[:, first] = joined, joined
        distance[second], distance[:, second] = np.inf, np.inf
    return leaves[0] if count == 1 else next(own for own in leaves if own)


def _facing(left: list[int], right: list[int], far: Array) -> list[int]:
    """Both in a row, with those ends together that are nearest to each other."""
    ways = (
        (left, right), (left, right[::-1]), (left[::-1], right), (left[::-1], right[::-1]),
    )  # fmt: skip
    best = min(ways, key=lambda way: far[way[0][-1], way[1][0]])
    return [*best[0], *best[1]]


def similarity(layout: Layout, units: Array, suspects: Sequence[str] = ()) -> Similarity:
    """The matrix of cosines, of at most 300 clients: half of them the suspects and who is least like the others.

    `units`: the directions of the layout's clients.
    """
    count, text = len(layout.names), "all clients of the round"
    chosen: npt.NDArray[np.int64] = np.arange(count)
    if count > MOST_SIMILAR:
        chosen = _representatives(layout, units, suspects)
        text = "those with findings, then those least like the others; the other half spread evenly over the rest"
    similar = cosines(units[chosen])
    order = alike_in_order(similar)
    values = np.ascontiguousarray(similar[np.ix_(order, order)], dtype="<f4")
    names = [layout.names[chosen[i]] for i in order]
    return Similarity(names, base64.b64encode(values.tobytes()).decode(), count, text)


def _representatives(layout: Layout, units: Array, suspects: Sequence[str]) -> npt.NDArray[np.int64]:
    suspected = {name: -len(suspects) + i for i, name in enumerate(suspects)}
    typical = units @ units.sum(axis=0)  # cosine to the mean direction, but for a factor
    order = sorted(range(len(layout.names)), key=lambda i: (suspected.get(layout.names[i], 0), typical[i]))
    odd, rest = order[: MOST_SIMILAR // 2], order[MOST_SIMILAR // 2 :]
    rest.sort(key=lambda i: float(np.arctan2(layout.points[i, 1], layout.points[i, 0])))
    even = np.linspace(0, len(rest) - 1, MOST_SIMILAR - len(odd)).round().astype(int)
    return np.array([*odd, *(rest[i] for i in even)], np.int64)


def update_map(
    reader: Reader,
    run: str,
    layouts: Layouts,
    *,
    round: int | None = None,  # noqa: A002
    node: str | None = None,
    severities: Mapping[str, str] | None = None,
    groups: Mapping[str, str] | None = None,
) -> UpdateMap:
    """The map of a round (the newest that has sketches up to it; without one, the newest of all).

    `node`: whose trail is told. `severities`: of each client with an open case, the worst first.
    """
    rounds, ill, grouped = rounds_with_sketches(reader, run), severities or {}, groups or {}
    if not rounds:
        return UpdateMap(None, [], [], 0, 0, [], [], None)
    at = len(rounds) - 1 if round is None else max(0, int(np.searchsorted(rounds, round, "right")) - 1)
    shown = layouts.layout(reader, run, rounds, at)
    points = [
        Point(name, float(x), float(y), grouped.get(name), ill.get(name))
        for name, (x, y) in zip(shown.names, shown.points, strict=True)
    ]
    points.sort(key=lambda point: point.name not in ill)  # were there too many, those with findings stay
    return UpdateMap(
        round=rounds[at],
        rounds=rounds,
        points=points[:MOST_POINTS],
        total=len(points),
        unusable=shown.unusable,
        shares=list(shown.shares),
        trail=[] if node is None else _trail(reader, run, layouts, rounds, at, node),
        similarity=similarity(shown, directions(sketches(reader, run, rounds[at]))[1], list(ill)),
    )


def _trail(reader: Reader, run: str, layouts: Layouts, rounds: Sequence[int], at: int, node: str) -> list[Step]:
    found = []
    for i in range(max(0, at - TRAIL), at + 1):
        layout = layouts.layout(reader, run, rounds, i)
        if node in layout.names:
            x, y = layout.points[layout.names.index(node)]
            found.append(Step(rounds[i], float(x), float(y)))
    return found
