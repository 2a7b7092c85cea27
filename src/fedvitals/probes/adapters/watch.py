# SPDX-License-Identifier: Apache-2.0
"""The low-rank adapters of a run, round by round, at the server: what it sent, what came back, what it made of it.

A and B of a client are those of the global model plus the client's update. Nothing is measured of a client whose
update is not kept, whose layers are not known, or is not finite. A round's work is bounded by WORK multiplications:
where there are more, the adapters take turns.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from fedvitals.probes.adapters.pairs import AdapterPair, find_pairs, scale_of
from fedvitals.probes.adapters.signs import (
    AdapterSigns,
    ClientFactors,
    ClientSigns,
    Factors,
    held_rank,
    mean_weights,
    signs_of,
)
from fedvitals.probes.results import Results
from fedvitals.records import Layer, LayerTable
from fedvitals.stats import ADAPTER_COLUMNS, ADAPTER_ROWS, DIRECTIONS, Array

WORK = 2e9  # multiplications in a round; more adapters than that take turns
WEIGHED_NUMBERS = 1 << 18  # of each client, from which the weights of the mean are solved
SAMPLED = 64  # numbers of a frozen matrix, by which a change of it is noticed
SERVER = "server"


class KeptUpdate(Protocol):
    """A client's update, as `probes.updates` and `probes.numpy_updates` keep it."""

    node: str
    vector: Any

    @property
    def sizes(self) -> Sequence[int]: ...

    @property
    def finite(self) -> bool: ...


class ClientView(Protocol):
    """A client's model, as `probes.view.View` shows it."""

    model: Any
    node: str | None
    named_parameters: list[tuple[str, Any]]
    frozen: list[tuple[str, Any]]


@dataclass(frozen=True, slots=True)
class PairLayout:
    """The pairs of a model, and where A and B lie in its parameters as one vector."""

    pairs: tuple[AdapterPair, ...]
    places: Mapping[str, tuple[int, int]]  # by the name of a parameter: first and last number


@dataclass(frozen=True, slots=True)
class _Copy:
    """A and B of a global model by parameter, samples of the frozen matrices, and the scales of the pairs."""

    values: Mapping[str, Any]
    frozen: Mapping[str, Array]
    scales: Mapping[str, float | None]


class AdapterWatch:
    """`begin_round` and `end_round` take the global model, `close_round` the clients' updates."""

    def __init__(self) -> None:
        self._layouts: dict[tuple[int, ...], PairLayout] = {}  # of the models of clients, by the sizes of their layers
        self._known: set[str] = set()  # digests of tables
        self._found: dict[Any, tuple[AdapterPair, ...]] = {}  # by names and shapes
        self._scales: dict[str, float] = {}  # α/r by client, as it told
        self._first: dict[str, Factors] = {}  # of the run's first model, by pair
        self._frozen: dict[tuple[AdapterPair, ...], list[str]] = {}  # names of the matrices beside the pairs
        self._pairs: tuple[AdapterPair, ...] = ()
        self._start: _Copy | None = None
        self._new: _Copy | None = None
        self._credit, self._turn = 0.0, 0

    def pairs_of(
        self, trained: Sequence[tuple[str, Any]], frozen: Sequence[tuple[str, Any]]
    ) -> tuple[AdapterPair, ...]:
        """Return the low-rank pairs of a model, from its named parameters that train and those that do not."""
        shapes = tuple((name, tuple(p.shape)) for name, p in trained)
        key = shapes, len(frozen)
        if key not in self._found:
            self._found[key] = find_pairs(shapes, [(name, tuple(p.shape)) for name, p in frozen])
        return self._found[key]

    def note_scales(self, scales: Mapping[str, float]) -> None:
        """Set clients' own α/r, each the mean over its adapters, as they say."""
        self._scales |= {node: scale for node, scale in scales.items() if math.isfinite(scale) and scale > 0}

    def facts_of(self, view: ClientView) -> dict[str, float]:
        """Return the rank of a client's low-rank adapters and their α/r, as metrics; none where there are none."""
        pairs = self.pairs_of(view.named_parameters, view.frozen)
        scale = _mean(scale_of(view.model, pair) for pair in pairs)
        facts = {"adapter.rank": float(max(pair.rank for pair in pairs))} if pairs else {}
        if scale is not None:
            self.note_scales({view.node or "": scale})
            facts["adapter.scale"] = scale
        return facts

    def begin_round(self, model: Any, trained: Sequence[tuple[str, Any]]) -> dict[str, LayerTable]:
        """Take the global model that a round begins with; returns the table of its adapters, if it has any."""
        self._start = self._new = None
        names = {name for name, _ in trained}
        frozen = [(name, p) for name, p in model.named_parameters() if name not in names]
        self._pairs = self.pairs_of(trained, frozen)
        if not self._pairs:
            return {}
        self._start = self._copied(model, trained)
        layers = (Layer(p.name, (p.outputs, p.inputs), f"rank {p.rank}") for p in self._pairs)
        return {ADAPTER_ROWS: LayerTable(ADAPTER_ROWS, tuple(layers))}

    def end_round(self, model: Any, trained: Sequence[tuple[str, Any]]) -> None:
        """Take the global model that the round made."""
        if self._start is not None and {pair.a for pair in self._pairs} <= {name for name, _ in trained}:
            self._new = self._copied(model, trained)

    def _copied(self, model: Any, trained: Sequence[tuple[str, Any]]) -> _Copy:
        wanted = {name for pair in self._pairs for name in (pair.a, pair.b)}
        values = {name: _clone(p) for name, p in trained if name in wanted}
        if self._pairs not in self._frozen:
            self._frozen[self._pairs] = [name for name, _ in _beside(model, self._pairs, wanted)]
        frozen = {name: _sample(own) for name in self._frozen[self._pairs] if (own := _named(model, name)) is not None}
        return _Copy(values, frozen, {pair.name: scale_of(model, pair) for pair in self._pairs})

    def know(self, tables: Iterable[LayerTable]) -> None:
        """Set the shapes of the clients' layers, which an update itself does not carry."""
        for table in tables:
            if table.rows != "parameter" or table.digest in self._known:
                continue
            self._known.add(table.digest)
            shapes = [(layer.name, tuple(layer.shape)) for layer in table.layers]
            pairs = find_pairs(shapes) or self._like_global(dict(shapes))
            sizes = [math.prod(shape) for _, shape in shapes]
            ends = [*itertools.accumulate(sizes)]
            places = {name: (end - size, end) for (name, _), size, end in zip(shapes, sizes, ends, strict=True)}
            self._layouts[tuple(sizes)] = PairLayout(pairs, places)

    def _like_global(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[AdapterPair, ...]:
        """Return the global model's pairs, with the ranks that these layers have: names that tell nothing by
        themselves.
        """
        own = [
            AdapterPair(p.name, p.a, p.b, shapes[p.a][0], p.inputs, p.outputs)
            for p in self._pairs
            if p.a in shapes and p.b in shapes
        ]
        return tuple(own) if len(own) == len(self._pairs) else ()

    def close_round(self, updates: Sequence[KeptUpdate]) -> list[tuple[str, Results]]:
        """Return what is known of the adapters after the round, of the server and of each client, by node."""
        start, new, pairs = self._start, self._new, self._pairs
        self._start = self._new = None
        if start is None or new is None or any(_shapes(start, p) != _shapes(new, p) for p in pairs):
            return []
        clients = [(u, layout) for u in updates if (layout := self._usable(u)) is not None]
        if not clients:
            return []
        if all(_same(start.values[n], new.values[n]) for p in pairs for n in (p.a, p.b)):
            return []  # the aggregation has not been seen
        ratios = self._ratios([update.node for update, _ in clients], start)
        due = self._due(pairs, len(clients))
        rounds = [_round_of(pairs[place], start, new, clients, ratios) for place in due]
        weights = None if _differ(start.frozen, new.frozen) else _weights(rounds)
        signs = {
            place: signs_of(own.before, own.sent, weights, own.after, self._moving_first(pairs[place], own.before))
            for place, own in zip(due, rounds, strict=True)
        }
        return _results(len(pairs), signs, [update.node for update, _ in clients], _mean(new.scales.values()))

    def _usable(self, update: KeptUpdate) -> PairLayout | None:
        """Return where the adapters lie in a client's update; None if it does not have them all."""
        layout = self._layouts.get(tuple(update.sizes))
        if layout is None or update.vector is None or not update.finite:
            return None
        shapes = {(p.name, p.inputs, p.outputs) for p in layout.pairs}
        return layout if {(p.name, p.inputs, p.outputs) for p in self._pairs} <= shapes else None

    def _due(self, pairs: Sequence[AdapterPair], clients: int) -> list[int]:
        """Return the places of the adapters whose turn it is."""
        self._credit = min(self._credit, 0.0) + WORK
        due: list[int] = []
        for place in (place % len(pairs) for place in range(self._turn, self._turn + len(pairs))):
            if self._credit <= 0:
                break
            pair = pairs[place]
            self._credit -= float((clients + 3) * pair.rank) ** 2 * (pair.inputs + pair.outputs)
            due.append(place)
        self._turn = (due[-1] + 1) % len(pairs) if due else self._turn
        return due

    def _ratios(self, nodes: Sequence[str], start: _Copy) -> dict[str, float]:
        """Return each client's α/r over the server's; 1 where either is not known."""
        own = _mean(start.scales.values())
        return {node: self._scales[node] / own if own and node in self._scales else 1.0 for node in nodes}

    def _moving_first(self, pair: AdapterPair, before: Factors) -> Factors | None:
        """Return the factors of the run's first model; None where their product was zero."""
        first = self._first.setdefault(pair.name, before)
        return first if first.b.any() and first.a.any() and first.a.shape == before.a.shape else None


@dataclass(frozen=True, slots=True)
class _PairRound:
    """One adapter in one round: before and after the aggregation, and what the clients sent."""

    before: Factors
    after: Factors
    sent: list[ClientFactors]


def _round_of(
    pair: AdapterPair,
    start: _Copy,
    new: _Copy,
    clients: Sequence[tuple[KeptUpdate, PairLayout]],
    ratios: Mapping[str, float],
) -> _PairRound:
    before = _factors(pair, start)
    sent = [_client_factors(pair, update, layout, before, ratios[update.node]) for update, layout in clients]
    return _PairRound(before, _factors(pair, new), sent)


def _weights(rounds: Sequence[_PairRound]) -> Array | None:
    """Return the weights of the mean, by the directions that all clients have; None if it is no mean of these."""
    starts: list[Array] = []
    aggregated: list[Array] = []
    ends: list[list[Array]] = [[] for _ in rounds[0].sent]
    for own in rounds:
        shared = min(client.held for client in own.sent)
        starts += [own.before.a[:shared], own.before.b[:, :shared]]
        aggregated += [own.after.a[:shared], own.after.b[:, :shared]]
        for client, end in zip(own.sent, ends, strict=True):
            end += [client.factors.a[:shared], client.factors.b[:, :shared]]
        if sum(array.size for array in starts) > WEIGHED_NUMBERS:
            break
    return mean_weights(starts, ends, aggregated)


def _differ(start: Mapping[str, Array], new: Mapping[str, Array]) -> bool:
    """Return whether a frozen matrix has changed: then the adapters alone are not the whole of the aggregation."""
    return any(name not in new or not np.array_equal(values, new[name]) for name, values in start.items())


def _clone(values: Any) -> Any:
    return values.detach().clone() if hasattr(values, "detach") else np.array(values)


def _double(values: Any) -> Array:
    if hasattr(values, "detach"):
        values = values.detach().double().cpu().numpy()
    return np.asarray(values, np.float64)


def _same(a: Any, b: Any) -> bool:
    return bool(np.array_equal(_double(a), _double(b)))


def _shapes(copy: _Copy, pair: AdapterPair) -> list[tuple[int, ...]]:
    return [tuple(copy.values[name].shape) for name in (pair.a, pair.b)]


def _factors(pair: AdapterPair, copy: _Copy) -> Factors:
    a, b = _double(copy.values[pair.a]), _double(copy.values[pair.b])
    return Factors(b.reshape(len(b), -1), a.reshape(len(a), -1), copy.scales[pair.name] or 1.0)


def _client_factors(
    pair: AdapterPair, update: KeptUpdate, layout: PairLayout, before: Factors, ratio: float
) -> ClientFactors:
    """Return what a client sent: the global model's first directions, as many as it has, plus its update."""
    a = _sum(update.vector, layout.places[pair.a], (-1, pair.inputs), before.a)
    b = _sum(update.vector, layout.places[pair.b], (pair.outputs, -1), before.b)
    factors = Factors(b, a, before.scale * ratio)
    return ClientFactors(factors, held_rank(factors, before))


def _sum(vector: Any, place: tuple[int, int], shape: tuple[int, int], before: Array) -> Array:
    """Return a part of an update as a matrix, plus what the client was sent of it.

    Rounded to single precision unless the update is in double, so that what the client set to zero is zero here.
    """
    values = _double(vector[place[0] : place[1]]).reshape(shape)
    rows, columns = min(len(values), len(before)), min(values.shape[1], before.shape[1])
    whole = values.copy() if (rows, columns) != values.shape else values + before[:rows, :columns]
    if whole.shape != (rows, columns):
        whole[:rows, :columns] += before[:rows, :columns]
    return whole if "64" in str(vector.dtype) else whole.astype(np.float32).astype(np.float64)


def _beside(model: Any, pairs: Sequence[AdapterPair], trained: set[str]) -> list[tuple[str, Any]]:
    """Return the matrices of a module that could change with its adapters: of a product's shape, in the same module."""
    modules = {pair.name: (pair.outputs, pair.inputs) for pair in pairs}
    named = [*model.named_parameters(), *(model.named_buffers() if hasattr(model, "named_buffers") else ())]
    beside = []
    for name, values in named:
        module = name.rpartition(".")[0]
        shape = modules.get(module) or modules.get(module.rpartition(".")[0])
        if shape is not None and name not in trained and tuple(values.shape) in (shape, shape[::-1]):
            beside.append((name, values))
    return beside


def _named(model: Any, name: str) -> Any:
    """Return a parameter or buffer of a model; None of a model that has no modules, or no such tensor."""
    for part in name.split("."):
        model = getattr(model, part, None)
    return model


def _sample(values: Any) -> Array:
    flat = values.detach().reshape(-1) if hasattr(values, "detach") else np.asarray(values).reshape(-1)
    return _double(flat[:: max(1, len(flat) // SAMPLED)]).copy()


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _results(
    pairs: int,
    signs: Mapping[int, tuple[AdapterSigns, list[ClientSigns]]],
    nodes: Sequence[str],
    scale: float | None,
) -> list[tuple[str, Results]]:
    server = Results()
    rows, spectra = _empty(pairs)
    for place, (own, _) in signs.items():
        rows[place] = [getattr(own, column) for column in ADAPTER_COLUMNS]
        spectra[place] = own.spectrum
    _measured(server, rows, spectra)
    server.take(_whole(rows, scale))
    results = [(SERVER, server)]
    for i, node in enumerate(nodes):
        client = Results()
        rows, parts = _empty(pairs)
        for place, (_, clients) in signs.items():
            for column in ("rank", "norm", "change"):
                rows[place, ADAPTER_COLUMNS.index(column)] = getattr(clients[i], column)
            parts[place] = clients[i].directions
        _measured(client, rows, parts)
        changes = rows[:, ADAPTER_COLUMNS.index("change")]
        ranks = rows[:, ADAPTER_COLUMNS.index("rank")]
        client.take(
            {"update.adapter_change": math.sqrt(np.nansum(changes**2)), "update.adapter_rank": np.nanmax(ranks)}
        )
        results.append((node, client))
    return results


def _empty(pairs: int) -> tuple[Array, Array]:
    return np.full((pairs, len(ADAPTER_COLUMNS)), np.nan), np.full((pairs, DIRECTIONS), np.nan)


def _measured(results: Results, rows: Array, directions: Array) -> None:
    results.matrices += [("update.adapters", rows, None), ("update.directions", directions, None)]


def _whole(rows: Array, scale: float | None) -> dict[str, float]:
    """Return the round's metrics: means over the adapters, and the norms of all changes together."""
    columns = dict(zip(ADAPTER_COLUMNS, rows.T, strict=True))
    means = ("effective_rank", "stable_rank", "energy_above", "energy_kept")
    metrics = {f"adapter.{name}": columns[name] for name in means}
    metrics |= {"adapter.product_error": columns["error"], "adapter.product_error_by_rank": columns["error_by_rank"]}
    told = {name: float(np.nanmean(v)) for name, v in metrics.items() if not np.isnan(v).all()}
    for name in ("change", "drift"):
        told[f"adapter.{name}"] = math.sqrt(np.nansum(columns[name] ** 2))
    told["adapter.unmoved"] = float((columns["moved"] == 0).sum())
    return told if scale is None else {**told, "adapter.scale": scale}
