# SPDX-License-Identifier: Apache-2.0
"""Computes maps of a round's updates from their sketches: points in a plane, and a matrix of cosines.

Only directions count: every sketch is scaled to length 1, so that the squared distance of two clients is 2 − 2·cosine,
and the plane is the one that keeps most of these distances (principal components, which on this geometry is classical
scaling). All sketches of a run use one projection, so that rounds can share one plane: that of some rounds combined,
spread over the run. In it points move from round to round only as updates do, and a trail is a path. The plane of a
single round shows more of that round; it is aligned (orthogonal Procrustes) with the run's, so that it does not flip.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from fedvitals.records import is_client, natural
from fedvitals.stats import Array
from fedvitals.store.read import sketches as read_sketches
from fedvitals.store.read.reader import Reader
from fedvitals.views.memo import Remembered

MOST_ROUNDS = 10_000  # listed for a slider
MOST_POINTS = 5_000
MOST_SIMILAR = 300  # clients in the matrix
TRAIL = 8  # previous rounds
POOLED = 16  # rounds that define a run's plane
LAYOUTS, PLANES = 512, 16  # the most that are cached
Kind = Literal["run", "round"]


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """One round in the plane."""

    names: tuple[str, ...]
    points: Array  # [clients, 2]
    axes: Array  # [256, 2]: the vectors that span the plane
    shares: tuple[float, float]  # share of the clients' spread that each axis shows
    unusable: int  # sketches that are zero or not finite: they have no direction


@dataclass(frozen=True, slots=True)
class Point:
    """One client's update on the map."""

    name: str
    x: float
    y: float
    group: str | None
    severity: str | None  # of the worst case that is open


@dataclass(frozen=True, slots=True)
class Step:
    """The position of a client's update in one round."""

    round: int
    x: float
    y: float


@dataclass(frozen=True, slots=True)
class Similarity:
    """Cosines of clients' updates, with similar clients next to each other."""

    names: list[str]
    values: str  # base64 of little-endian float32, [names × names]
    total: int  # clients in the round
    chosen: str  # which of them were selected


@dataclass(frozen=True, slots=True)
class UpdateMap:
    """The map of a round."""

    round: int | None  # None: the run has no sketches
    rounds: list[int]  # with sketches
    points: list[Point]
    total: int
    unusable: int
    shares: list[float]
    trail: list[Step]  # of the selected client, oldest first, ending with the shown round
    similarity: Similarity | None


class Layouts:
    """Planes of runs and layouts of rounds, cached until another sketch arrives. Shared by all requests."""

    def __init__(self) -> None:
        self._known = Remembered[tuple[str, Kind, int], Layout](LAYOUTS)
        self._planes = Remembered[str, Array](PLANES)

    def _plane(self, reader: Reader, run: str, rounds: Sequence[int]) -> tuple[int, Array]:
        """Return the axes shared by all rounds of a run, [256, 2]; before them, a value that changes with them."""
        chosen = pooled_rounds(rounds)
        # Only their hash: each cached layout contains it.
        sign = hash(tuple((number, read_sketches.sketch_count(reader, run, number)) for number in chosen))

        def axes() -> Array:
            return plane_of([directions(sketches(reader, run, number))[1] for number in chosen])

        return sign, self._planes.get(run, sign, axes)

    def layout(self, reader: Reader, run: str, rounds: Sequence[int], at: int, kind: Kind = "run") -> Layout:
        """Return the layout of the round at this index among the rounds that have sketches."""
        number, (sign, plane) = rounds[at], self._plane(reader, run, rounds)
        own = read_sketches.sketch_count(reader, run, number), sign
        return self._known.get((run, kind, number), own, lambda: layout_of(sketches(reader, run, number), plane, kind))


def pooled_rounds(rounds: Sequence[int]) -> Sequence[int]:
    """Return some rounds, spread over all. As a run grows, one is added now and then, and the others mostly stay."""
    step = 1
    while len(rounds) > step * POOLED:
        step *= 2
    return rounds[::step]


def rounds_with_sketches(reader: Reader, run: str) -> list[int]:
    """Return the rounds, ascending, with sketches of the run's newest version; only the newest of very many."""
    return read_sketches.rounds_with_sketches(reader, run, MOST_ROUNDS)


def sketches(reader: Reader, run: str, round_index: int) -> dict[str, Array]:
    """Return each client's newest sketch of a round, all of the most frequent length."""
    stored = read_sketches.sketches_of_round(reader, run, round_index)
    newest = {node: values for node, values in stored.items() if is_client(node)}
    sizes = Counter(len(values) for values in newest.values())
    usual = sizes.most_common(1)[0][0] if sizes else 0
    order = sorted((node for node in newest if len(newest[node]) == usual), key=natural)
    return {node: np.frombuffer(newest[node], "<f4").astype(np.float64) for node in order}


def layout_of(vectors: Mapping[str, Array], plane: Array | None = None, kind: Kind = "round") -> Layout:
    """Return the vectors' directions in the plane; for kind «round», in their own plane, aligned with that one."""
    names, units = directions(vectors)
    centred = units - units.mean(axis=0) if len(names) else units
    fits = plane is not None and plane.shape[0] == centred.shape[1]
    if plane is not None and fits and kind == "run":
        axes = plane
    else:
        axes = _components([centred])
        if plane is not None and fits:
            axes = axes @ _turn(axes, plane)
    points, total = centred @ axes, float(np.sum(centred**2))
    shares = np.sum(points**2, axis=0) / total if total > 0 else np.zeros(2)
    return Layout(tuple(names), points, axes, (float(shares[0]), float(shares[1])), len(vectors) - len(names))


def plane_of(rounds: Sequence[Array]) -> Array:
    """Return the axes along which clients differ most from their round's mean, over some rounds of directions."""
    widths = Counter(units.shape[1] for units in rounds if len(units) > 1)
    usual = widths.most_common(1)[0][0] if widths else 0
    return _components([units - units.mean(axis=0) for units in rounds if len(units) > 1 and units.shape[1] == usual])


def directions(vectors: Mapping[str, Array]) -> tuple[list[str], Array]:
    """Return the vectors that have a direction as rows of length 1: not zero, and finite."""
    if not vectors:
        return [], np.empty((0, 0))
    rows = np.stack([*vectors.values()])
    with np.errstate(all="ignore"):
        sizes = np.linalg.norm(rows, axis=1)
    usable = np.isfinite(sizes) & (sizes > 0)
    names = [name for name, there in zip(vectors, usable, strict=True) if there]
    return names, rows[usable] / sizes[usable, None]


def _components(parts: Sequence[Array]) -> Array:
    """Return the first two principal axes of centred rows, as columns; zeros if there is no spread to show."""
    width = parts[0].shape[1] if parts else 0
    axes = np.zeros((width, 2))
    if sum(len(part) for part in parts) < 2:
        return axes
    if len(parts) == 1 and len(parts[0]) <= width:
        # The smaller of the two products has the same components, in a fraction of the time.
        powers, inner = np.linalg.eigh(parts[0] @ parts[0].T)
        vectors = parts[0].T @ inner
    else:
        products = np.zeros((width, width))
        for part in parts:  # one at a time: all at once would take half a megabyte per round
            products += part.T @ part
        powers, vectors = np.linalg.eigh(products)
    powers, vectors = np.maximum(powers[::-1], 0.0), vectors[:, ::-1]
    for i in range(min(2, vectors.shape[1])):
        size = float(np.linalg.norm(vectors[:, i]))
        if powers[i] > 1e-12 * powers.sum() and size > 0:
            axis = vectors[:, i] / size
            # The sign of a component is arbitrary: the longer tail is to the right.
            axes[:, i] = axis if sum(np.sum((part @ axis) ** 3) for part in parts) >= 0 else -axis
    return axes


def _turn(axes: Array, to: Array) -> Array:
    """Return the rotation or reflection that brings these axes as close as possible to those."""
    left, _, right = np.linalg.svd(axes.T @ to)
    return np.asarray(left @ right)


def cosines(units: Array) -> Array:
    """Return the cosine of each pair of directions."""
    return np.clip(units @ units.T, -1.0, 1.0)


def alike_in_order(similar: Array) -> list[int]:
    """Return an order in which neighbours are similar: the leaves of an average-linkage tree, branches flipped."""
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
    """Join both in a row, with the ends together that are closest to each other."""
    ways = (
        (left, right), (left, right[::-1]), (left[::-1], right), (left[::-1], right[::-1]),
    )  # fmt: skip
    best = min(ways, key=lambda way: far[way[0][-1], way[1][0]])
    return [*best[0], *best[1]]


def similarity(layout: Layout, units: Array, suspects: Sequence[str] = ()) -> Similarity:
    """Return the matrix of cosines, of at most 300 clients: half of them the suspects and the least typical ones.

    `units`: the directions of the layout's clients.
    """
    count, text = len(layout.names), "all clients of the round"
    chosen: npt.NDArray[np.int64] = np.arange(count)
    if count > MOST_SIMILAR:
        chosen = _representatives(layout, units, suspects)
        text = "with findings, least like the others, and every few of the rest"
    similar = cosines(units[chosen])
    order = alike_in_order(similar)
    values = np.ascontiguousarray(similar[np.ix_(order, order)], dtype="<f4")
    names = [layout.names[chosen[i]] for i in order]
    return Similarity(names, base64.b64encode(values.tobytes()).decode(), count, text)


def _representatives(layout: Layout, units: Array, suspects: Sequence[str]) -> npt.NDArray[np.int64]:
    suspected = {name: -len(suspects) + i for i, name in enumerate(suspects)}
    typical = units @ units.sum(axis=0)  # cosine to the mean direction, up to a factor
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
    round_index: int | None = None,
    node: str | None = None,
    kind: Kind = "run",
    severities: Mapping[str, str] | None = None,
    groups: Mapping[str, str] | None = None,
) -> UpdateMap:
    """Return the map of a round: the newest with sketches up to it; without one, the newest of all.

    `node`: the client whose trail is shown; `kind`: in the run's plane, or in the round's own. `severities`: of each
    client with an open case, the worst first.
    """
    rounds, ill, grouped = rounds_with_sketches(reader, run), severities or {}, groups or {}
    if not rounds:
        return UpdateMap(None, [], [], 0, 0, [], [], None)
    at = len(rounds) - 1 if round_index is None else max(0, int(np.searchsorted(rounds, round_index, "right")) - 1)
    shown = layouts.layout(reader, run, rounds, at, kind)
    points = [
        Point(name, float(x), float(y), grouped.get(name), ill.get(name))
        for name, (x, y) in zip(shown.names, shown.points, strict=True)
    ]
    points.sort(key=lambda point: point.name not in ill)  # if there are too many, those with findings are kept
    return UpdateMap(
        round=rounds[at],
        rounds=rounds,
        points=points[:MOST_POINTS],
        total=len(points),
        unusable=shown.unusable,
        shares=list(shown.shares),
        trail=[] if node is None else _trail(reader, run, layouts, rounds, at, node, kind),
        similarity=similarity(shown, directions(sketches(reader, run, rounds[at]))[1], list(ill)),
    )


def _trail(
    reader: Reader, run: str, layouts: Layouts, rounds: Sequence[int], at: int, node: str, kind: Kind
) -> list[Step]:
    """Return its earlier positions; not in a plane of the round's own, which earlier rounds do not share."""
    steps = []
    for i in range(max(0, at - TRAIL) if kind == "run" else at, at + 1):
        layout = layouts.layout(reader, run, rounds, i, kind)
        if node in layout.names:
            x, y = layout.points[layout.names.index(node)]
            steps.append(Step(rounds[i], float(x), float(y)))
    return steps
