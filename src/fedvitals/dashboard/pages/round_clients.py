# SPDX-License-Identifier: Apache-2.0
"""Computes which clients answered in a round and how, and compares one of them with the others, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from fedvitals.dashboard.pages.layer_deviation import medians
from fedvitals.diagnosis.medians import finite_median
from fedvitals.plain_json import finite
from fedvitals.records import natural
from fedvitals.stats import Array
from fedvitals.store.read import queries
from fedvitals.store.read.reader import Reader
from fedvitals.views.matrix import rounds_not_finite

if TYPE_CHECKING:
    from fedvitals.dashboard.pages.what_if import Updates
    from fedvitals.replay.tape.journal import ClientReply, RoundEntry

WORDS = 500  # characters of a failure's reason
POINTS = 400  # of a client's local losses
LAYERS = 2000
MEASURED = "of updates, as the monitor measured them"
TAKEN = "of updates, from the tape"
SENT = "of whole models as they were sent: the tape has digests and norms of these only"


@dataclass(frozen=True, slots=True)
class CameRow:
    """One client's part in the round."""

    node: str
    state: str  # «used», «left out», «failed»
    why: str
    group: str | None
    weight: float
    share: float | None  # of all weight that was used
    norm: float | None
    ratio: float | None  # to the median client's
    steps: int
    first_loss: float | None
    last_loss: float | None
    digest: str | None
    whole: bool
    layers: tuple[float | None, ...]  # log₂ of the ratio to the median client, by layer


@dataclass(frozen=True, slots=True)
class LayerDiff:
    """A client's update of one layer compared with the others'."""

    name: str
    norm: float | None
    median: float | None
    ratio: float | None
    cosine: float | None  # to the mean of all used updates


@dataclass(frozen=True, slots=True)
class ClientDiff:
    """A client compared with its cohort in this round. `there`: False if it did not answer."""

    node: str
    there: bool
    row: CameRow | None
    norms: str  # what the norms are of
    clients: int  # behind the median
    layers: tuple[LayerDiff, ...]
    cosine: float | None
    cosines: str  # compared to what, or why there are none
    losses: tuple[float | None, ...]
    every: int  # one in this many local steps is shown


@dataclass(frozen=True)
class Norms:
    """Norms by client and layer, [clients, layers], and their source."""

    of: str
    layers: tuple[str, ...]
    nodes: Mapping[str, int]
    values: Array
    totals: Mapping[str, float] = field(default_factory=dict)

    def median(self) -> float | None:
        return finite(finite_median(self.totals.values()))


def norms_of(reader: Reader, run: str, entry: RoundEntry, names: Sequence[str], updates: Updates | None) -> Norms:
    """Return the monitor's measured norms of the updates; else the updates' norms; else those of the models sent."""
    measured = queries.layer_round(reader, run, "update", entry.round)
    there = {came.node for came in entry.came if came.mark is not None}
    nodes = [node for node in measured.nodes if node in there]
    if nodes and measured.layers:
        rows = [measured.nodes.index(node) for node in nodes]
        values = np.asarray(measured.get("l2"), float)[rows][:, :LAYERS]
        norms = reader.history(run).latest("update.norm", entry.round)
        lost = rounds_not_finite(reader, run, "update.norm")
        totals = {
            node: math.nan if entry.round in lost.get(node, ()) else norms[node] for node in nodes if node in norms
        }
        return Norms(MEASURED, measured.layers[:LAYERS], _places(nodes), values, totals or _totals(nodes, values))
    if updates is not None:
        pieces = updates.deltas().split(updates.sizes, dim=1)
        values = np.stack([piece.double().norm(dim=1).numpy() for piece in pieces], axis=1)
        return Norms(TAKEN, updates.names, _places(updates.nodes), values, _totals(updates.nodes, values))
    came = [reply for reply in entry.came if reply.mark is not None]
    layers = tuple(names[:LAYERS])
    values = np.full((len(came), len(layers)), np.nan)
    for row, reply in enumerate(came):
        sizes = reply.mark.norms[: len(layers)] if reply.mark is not None else ()
        values[row, : len(sizes)] = [math.nan if size is None else size for size in sizes]
    sent = [reply.node for reply in came]
    return Norms(SENT, layers, _places(sent), values, _totals(sent, values))


def _places(nodes: Sequence[str]) -> dict[str, int]:
    return {node: row for row, node in enumerate(nodes)}


def _totals(nodes: Sequence[str], values: Array) -> dict[str, float]:
    return dict(zip(nodes, np.sqrt((values**2).sum(axis=1)).tolist(), strict=True))


def cohort_of(entry: RoundEntry, norms: Norms, whole: Any, sort: str, suspects: Collection[str] = ()) -> list[CameRow]:
    """Return all rows of a round, in order; `whole(digest)`: whether that is on the tape."""
    total = sum(came.weight for came in entry.came if came.mark is not None and came.used)
    middle, usual = norms.median(), medians(norms.values) if len(norms.nodes) else np.empty(0)
    rows = [_row(came, norms, (middle, usual, total), whole) for came in entry.came]
    rows.sort(key=_key(sort.removeprefix("-")), reverse=sort.startswith("-"))
    return sorted(rows, key=lambda row: row.node not in suspects) if sort == "trouble" else rows


def _key(sort: str) -> Any:
    def down(value: float | None) -> float:
        return math.inf if value is None or not math.isfinite(value) else -value

    rank = {"failed": 0, "left out": 1, "used": 2}
    return {
        "name": lambda row: natural(row.node),
        "weight": lambda row: (down(row.weight), natural(row.node)),
        "norm": lambda row: (down(row.norm), natural(row.node)),
        "first": lambda row: (down(row.first_loss), natural(row.node)),
        "last": lambda row: (down(row.last_loss), natural(row.node)),
    }.get(sort, lambda row: (rank[row.state], down(_oddness(row)), natural(row.node)))


def _oddness(row: CameRow) -> float | None:
    """Return how far its norm is from the median client's, in either direction; non-finite ones come first."""
    if row.norm is None or not math.isfinite(row.norm):
        return 1e9
    return abs(math.log2(row.ratio)) if row.ratio else 0.0


def _row(came: ClientReply, norms: Norms, usual: tuple[float | None, Array, float], whole: Any) -> CameRow:
    middle, medians_, total = usual
    state = "failed" if came.mark is None else "used" if came.used else "left out"
    losses = losses_of(came)
    norm = norms.totals.get(came.node)
    place = norms.nodes.get(came.node)
    with np.errstate(all="ignore"):
        ratios = () if place is None else np.log2(norms.values[place] / medians_).tolist()
    return CameRow(
        came.node[:WORDS],
        state,
        (came.error or {"failed": "Nothing came.", "left out": "It was shut out."}.get(state, ""))[:WORDS],
        came.group,
        came.weight,
        came.weight / total if state == "used" and total > 0 else None,
        norm,
        norm / middle if norm is not None and middle else None,
        len(losses),
        float(losses[0]) if len(losses) else None,
        float(losses[-1]) if len(losses) else None,
        None if came.mark is None else came.mark.digest,
        came.mark is not None and whole(came.mark.digest),
        tuple(value if math.isfinite(value) else None for value in ratios),
    )


def losses_of(came: ClientReply) -> Array:
    """Return the losses of each local step; empty if the bytes are not a whole number of floats."""
    usable = came.mark is not None and len(came.losses) % 4 == 0
    return np.frombuffer(came.losses, "<f4") if usable else np.empty(0, "<f4")


def client_diff(
    entry: RoundEntry, node: str, norms: Norms, rows: Sequence[CameRow], updates: Updates | str
) -> ClientDiff:
    """Compare a client with its cohort; `updates`: all complete ones, or why they are unavailable."""
    came = entry.reply_of(node)
    row = next((other for other in rows if other.node == node), None)
    cosines, whole, words = _cosines(updates, node)
    place = norms.nodes.get(node)
    layers = []
    if place is not None:
        usual = medians(norms.values)
        for i, name in enumerate(norms.layers):
            mine, middle = float(norms.values[place, i]), float(usual[i])
            ratio = mine / middle if middle else None
            layers.append(LayerDiff(name, mine, middle, ratio, cosines.get(name)))
    losses = np.empty(0, np.float32) if came is None else losses_of(came)
    every = max(1, math.ceil(len(losses) / POINTS))
    return ClientDiff(
        node, came is not None, row, norms.of, len(norms.nodes), tuple(layers), whole, words,
        tuple(float(loss) for loss in losses[::every]), every,
    )  # fmt: skip


def _cosines(updates: Updates | str, node: str) -> tuple[dict[str, float | None], float | None, str]:
    """Return the cosines to the weighted mean of all used updates: by layer, and of the whole."""
    if isinstance(updates, str):
        return {}, None, f"Directions cannot be compared: {updates}"
    if node not in updates.nodes:
        return {}, None, "Directions cannot be compared: its update was not used."
    import torch  # noqa: PLC0415 - an extra

    deltas = updates.deltas().double()
    weights = torch.tensor(updates.weights, dtype=torch.float64)
    mean = (deltas * (weights / weights.sum())[:, None]).sum(0) if float(weights.sum()) else deltas.mean(0)
    mine = deltas[updates.nodes.index(node)]
    pieces = zip(updates.names, mine.split(updates.sizes), mean.split(updates.sizes), strict=True)
    cosines = {name: _cosine(piece, piece_of_mean) for name, piece, piece_of_mean in pieces}
    return cosines, _cosine(mine, mean), f"to the mean of all {len(updates.nodes)} updates, which are on the tape"


def _cosine(first: Any, second: Any) -> float | None:
    lengths = float(first.norm()) * float(second.norm())
    return float(first @ second) / lengths if lengths else None
