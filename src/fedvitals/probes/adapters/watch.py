# SPDX-License-Identifier: Apache-2.0
"""The low-rank adapters of a run, round by round, at the server: what it sent, what came back, and the result.

A and B of a client are those of the global model plus the client's update; a factor that does not train is the global
model's. An adapter is measured over the clients that have it. A client is not measured if its update is not kept or not
finite, or if its layers are unknown. A round's work is bounded by WORK multiplications: if more are needed, the
adapters take turns.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from fedvitals.probes.adapters.grams import (
    ClientStack,
    FactorPair,
    Grams,
    PairLayout,
    grams_of,
    local,
    rounding_of,
    stacked_clients,
    step_products,
)
from fedvitals.probes.adapters.pairs import AdapterPair, find_pairs, is_active, scale_of
from fedvitals.probes.adapters.signs import AdapterSigns, mean_weights, signs_of
from fedvitals.probes.results import Results
from fedvitals.records import Layer, LayerTable
from fedvitals.stats import ADAPTER_COLUMNS, ADAPTER_ROWS, DIRECTIONS, Array

WORK = 2e9  # multiplications in a round; more adapters than that take turns
SAMPLED = 64  # numbers of a frozen matrix, by which a change of it is noticed
ROUNDED = 3e-6  # of their size: what a mean of equal numbers changes, where frozen weights travel as well
SERVER = "server"
_COLUMN = {name: place for place, name in enumerate(ADAPTER_COLUMNS)}


class KeptUpdate(Protocol):
    """A client's update, as kept by `probes.updates` and `probes.numpy_updates`."""

    node: str
    vector: Any

    @property
    def sizes(self) -> Sequence[int]: ...

    @property
    def finite(self) -> bool: ...


class ClientView(Protocol):
    """A client's model, as `probes.view.View` presents it."""

    model: Any
    node: str | None
    named_parameters: list[tuple[str, Any]]
    frozen: list[tuple[str, Any]]


@dataclass(frozen=True, slots=True)
class _Copy:
    """A and B of a global model by parameter, samples of the frozen matrices, and the scales of the pairs."""

    values: Mapping[str, Any]
    frozen: Mapping[str, Any]
    scales: Mapping[str, float | None]
    inactive: frozenset[str]  # names of pairs that the model has but does not use, as peft allows

    def factors(self, pair: AdapterPair) -> FactorPair:
        """Return A and B of a pair as matrices."""
        a, b = local(self.values[pair.a]), local(self.values[pair.b])
        rounding = max(rounding_of(self.values[pair.a]), rounding_of(self.values[pair.b]))
        return FactorPair(a.reshape(len(a), -1), b.reshape(len(b), -1), rounding)


class AdapterWatch:
    """Measures a run's adapters: `begin_round` and `end_round` take the global model, `close_round` the updates."""

    def __init__(self) -> None:
        self._layouts: dict[tuple[int, ...], PairLayout] = {}  # of the clients' models, by the sizes of their layers
        self._known: set[str] = set()  # digests of tables
        self._found: dict[Any, tuple[AdapterPair, ...]] = {}  # by names and shapes
        self._scales: dict[str, float] = {}  # α/r by client, as reported
        self._first: dict[str, FactorPair | None] = {}  # of the run's first model, by pair; None: its product is zero
        self._frozen: dict[tuple[AdapterPair, ...], list[str]] = {}  # names of the matrices next to the pairs
        self._pairs: tuple[AdapterPair, ...] = ()
        self._start: _Copy | None = None
        self._new: _Copy | None = None
        self._credit, self._turn = 0.0, 0

    def pairs_of(
        self, trained: Sequence[tuple[str, Any]], frozen: Sequence[tuple[str, Any]]
    ) -> tuple[AdapterPair, ...]:
        """Return the low-rank pairs of a model, from its named trained and frozen parameters."""
        shapes = tuple((name, tuple(p.shape)) for name, p in trained)
        key = shapes, len(frozen)
        if key not in self._found:
            self._found[key] = find_pairs(shapes, [(name, tuple(p.shape)) for name, p in frozen])
        return self._found[key]

    def note_scales(self, scales: Mapping[str, float]) -> None:
        """Set clients' own α/r, each the mean over its adapters, as reported."""
        self._scales |= {node: scale for node, scale in scales.items() if math.isfinite(scale) and scale > 0}

    def facts_of(self, view: ClientView) -> dict[str, float]:
        """Return the rank of a client's low-rank adapters and their α/r, as metrics; empty if there are none."""
        pairs = self.pairs_of(view.named_parameters, view.frozen)
        scale = _mean(scale_of(view.model, pair) for pair in pairs)
        facts = {"adapter.rank": float(max(pair.rank for pair in pairs))} if pairs else {}
        if scale is not None:
            self.note_scales({view.node or "": scale})
            facts["adapter.scale"] = scale
        return facts

    def begin_round(
        self, model: Any, trained: Sequence[tuple[str, Any]], frozen: Sequence[tuple[str, Any]] = ()
    ) -> dict[str, LayerTable]:
        """Record the global model that a round begins with, and its named parameters.

        Returns the table of its adapters, if it has any.
        """
        self._start = self._new = None
        self._pairs = self.pairs_of(trained, frozen)
        if not self._pairs:
            return {}
        self._start = self._copied(model, trained)
        layers = (Layer(p.name, (p.outputs, p.inputs), f"rank {p.rank}") for p in self._pairs)
        return {ADAPTER_ROWS: LayerTable(ADAPTER_ROWS, tuple(layers))}

    def end_round(self, model: Any, trained: Sequence[tuple[str, Any]]) -> None:
        """Record the global model with which a round ended."""
        if self._start is not None and self._start.values.keys() & {name for name, _ in trained}:
            self._new = self._copied(model, trained)

    def _copied(self, model: Any, trained: Sequence[tuple[str, Any]]) -> _Copy:
        wanted = {name for pair in self._pairs for name in (pair.a, pair.b)}
        by_name = dict(trained)
        factors = {name: by_name[name] if name in by_name else _named(model, name) for name in wanted}
        values = {name: _clone(own) for name, own in factors.items() if own is not None}
        if self._pairs not in self._frozen:
            self._frozen[self._pairs] = [name for name, _ in _beside(model, self._pairs, wanted)]
        frozen = {name: _sample(own) for name in self._frozen[self._pairs] if (own := _named(model, name)) is not None}
        inactive = frozenset(pair.name for pair in self._pairs if not is_active(model, pair))
        return _Copy(values, frozen, {pair.name: scale_of(model, pair) for pair in self._pairs}, inactive)

    def know(self, tables: Iterable[LayerTable]) -> None:
        """Set the shapes of the clients' layers, which an update itself does not contain."""
        for table in tables:
            if table.rows != "parameter" or table.digest in self._known:
                continue
            self._known.add(table.digest)
            shapes = [(layer.name, tuple(layer.shape)) for layer in table.layers]
            pairs = find_pairs(shapes)
            pairs += self._like_global(dict(shapes), {pair.name for pair in pairs})
            sizes = [math.prod(shape) for _, shape in shapes]
            ends = [*itertools.accumulate(sizes)]
            places = {name: (end - size, end) for (name, _), size, end in zip(shapes, sizes, ends, strict=True)}
            self._layouts[tuple(sizes)] = PairLayout(pairs, places)

    def _like_global(self, shapes: Mapping[str, tuple[int, ...]], known: set[str]) -> tuple[AdapterPair, ...]:
        """Return the global model's other pairs, with the ranks that these layers have.

        These are pairs that cannot be recognised by their names alone, or of which one side is frozen.
        """
        pairs = [pair for pair in self._pairs if pair.name not in known]
        ranks = [shapes[p.a][0] if p.a in shapes else shapes[p.b][1] if p.b in shapes else None for p in pairs]
        return tuple(replace(pair, rank=rank) for pair, rank in zip(pairs, ranks, strict=True) if rank is not None)

    def close_round(self, updates: Sequence[KeptUpdate]) -> list[tuple[str, Results]]:
        """Return the metrics of the adapters after the round, for the server and each client, by node."""
        start, new, pairs = self._start, self._new, self._pairs
        self._start = self._new = None
        if start is None or new is None or any(_shapes(start, p) != _shapes(new, p) for p in pairs):
            return []
        clients = [(u, layout) for u in updates if (layout := self._usable(u)) is not None]
        if not clients:
            return []
        clients.sort(key=lambda client: id(client[1]))
        stacks = stacked_clients([(update.vector, layout) for update, layout in clients])
        unchanged = all(_same(start.values[n], new.values[n]) for p in pairs for n in (p.a, p.b))
        if unchanged and any(stack.moves(pair) for stack in stacks for pair in pairs if stack.has(pair)):
            return []  # the aggregation was not observed
        nodes = [update.node for update, _ in clients]
        ratios = [self._ratio(update.node, layout, start) for update, layout in clients]
        due = [pairs[place] for place in self._due(pairs, len(clients))]
        signs = []
        for owners, own_pairs in _by_owners(due, stacks).items():
            own = [place for stack in owners for place in stacks[stack].places]
            own_stacks, own_ratios = [stacks[stack] for stack in owners], [ratios[place] or 1.0 for place in own]
            signs += [(*part, own) for part in self._signs(own_pairs, start, new, own_stacks, own_ratios)]
        if not signs:
            return []  # those whose turn it is belong to no client
        partial = {
            node: ratio
            for (_, layout), node, ratio in zip(clients, nodes, ratios, strict=True)
            if ratio is not None and len(self._shared(layout)) < len(pairs)
        }
        owned = [len(self._shared(layout)) for _, layout in clients]
        return _results(pairs, signs, nodes, _mean(new.scales.values()), start.inactive, partial, owned)

    def _signs(
        self,
        due: Sequence[AdapterPair],
        start: _Copy,
        new: _Copy,
        stacks: Sequence[ClientStack],
        ratios: Sequence[float],
    ) -> list[tuple[list[AdapterPair], AdapterSigns]]:
        """Return the signs of adapters, computed together for equal ranks."""
        names = [pair.name for pair in due]
        before, after = [start.factors(pair) for pair in due], [new.factors(pair) for pair in due]
        first = [self._earlier(name, own) for name, own in zip(names, before, strict=True)]
        grams = grams_of(names, before, after, stacks, first)
        weights = None
        if not _differ(start.frozen, new.frozen):
            shared = [min(own.held) for own in grams]
            weights = mean_weights(*step_products(names, before, after, stacks, shared))
        alike: dict[Any, list[int]] = defaultdict(list)
        for place, (name, own) in enumerate(zip(names, grams, strict=True)):
            beginning = -1 if first[place] is not None else None if name in self._first else 0
            alike[own.ranks, own.held, beginning].append(place)
            self._first.setdefault(name, before[place] if _has_product(own) else None)
        signs = []
        for (_, _, beginning), places in alike.items():
            own_scales = [start.scales[names[place]] or 1.0 for place in places]
            new_scales = [new.scales[names[place]] or 1.0 for place in places]
            scales = np.array(
                [
                    [old, now, *(old * ratio for ratio in ratios), *([old] if beginning == -1 else [])]
                    for old, now in zip(own_scales, new_scales, strict=True)
                ]
            )
            own_signs = signs_of([grams[place] for place in places], scales, weights, first=beginning)
            signs.append(([due[place] for place in places], own_signs))
        return signs

    def _earlier(self, name: str, before: FactorPair) -> FactorPair | None:
        """Return the factors of the run's first model; None if they are this round's, or their product is zero."""
        first = self._first.get(name)
        return first if first is not None and first.a.shape == before.a.shape else None

    def _usable(self, update: KeptUpdate) -> PairLayout | None:
        """Return the positions of the adapters in a client's update; None if it has none of the server's."""
        layout = self._layouts.get(tuple(update.sizes))
        if layout is None or update.vector is None or not update.finite:
            return None
        return layout if self._shared(layout) else None

    def _shared(self, layout: PairLayout) -> list[AdapterPair]:
        """Return those of the server's adapters that a client with this layout has."""
        shapes = {(p.name, p.inputs, p.outputs) for p in layout.pairs}
        return [p for p in self._pairs if (p.name, p.inputs, p.outputs) in shapes]

    def _due(self, pairs: Sequence[AdapterPair], clients: int) -> list[int]:
        """Return the indices of the adapters whose turn it is."""
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

    def _ratio(self, node: str, layout: PairLayout, start: _Copy) -> float | None:
        """Return a client's α/r over that of the same adapters at the server; None if either is unknown."""
        own = _mean(start.scales[pair.name] for pair in self._shared(layout))
        return self._scales[node] / own if own and node in self._scales else None


def _by_owners(due: Sequence[AdapterPair], stacks: Sequence[ClientStack]) -> dict[tuple[int, ...], list[AdapterPair]]:
    """Return adapters by the stacks, as indices, whose clients have them; not those that no client has."""
    groups: dict[tuple[int, ...], list[AdapterPair]] = defaultdict(list)
    for pair in due:
        owners = tuple(place for place, stack in enumerate(stacks) if stack.has(pair))
        if owners:
            groups[owners].append(pair)
    return groups


def _has_product(grams: Grams) -> bool:
    """Return whether the global model's product before the round is certainly not zero."""
    rank = grams.ranks[0]
    return bool(np.diag(grams.left)[:rank].any() and np.diag(grams.right)[:rank].any())


def _differ(start: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Return whether a frozen matrix has changed: then the adapters alone are not the whole of the aggregation."""
    if start.keys() != new.keys():
        return True
    old, now = local(_joined(start)), local(_joined(new))
    return old.shape != now.shape or not bool(((now - old) ** 2).sum() <= ROUNDED**2 * (old**2).sum())


def _joined(samples: Mapping[str, Any]) -> Any:
    parts = [*samples.values()]
    on_device = parts and hasattr(parts[0], "detach") and parts[0].device.type != "cpu"
    return sys.modules["torch"].cat(parts) if on_device else np.concatenate([local(own) for own in parts] or [[]])


def _clone(values: Any) -> Any:
    return values.detach().clone() if hasattr(values, "detach") else np.array(values)


def _same(a: Any, b: Any) -> bool:
    own, other = local(a), local(b)
    return bool(own.shape == other.shape and (own == other).all())


def _shapes(copy: _Copy, pair: AdapterPair) -> list[tuple[int, ...]]:
    return [tuple(copy.values[name].shape) for name in (pair.a, pair.b)]


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
    """Return a parameter or buffer of a model; None if it has no modules, or no such tensor."""
    for part in name.split("."):
        model = getattr(model, part, None)
    return model


def _sample(values: Any) -> Any:
    flat = values.detach().reshape(-1) if hasattr(values, "detach") else np.asarray(values).reshape(-1)
    return _clone(flat[:: max(1, len(flat) // SAMPLED)])


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _results(
    pairs: Sequence[AdapterPair],
    signs: Sequence[tuple[Sequence[AdapterPair], AdapterSigns, Sequence[int]]],
    nodes: Sequence[str],
    scale: float | None,
    inactive: Collection[str],
    partial: Mapping[str, float],
    owned: Sequence[int],
) -> list[tuple[str, Results]]:
    """Return the round's metrics by node.

    signs: of pairs, with the indices of the clients that have them. inactive: pairs that may rest without being dead.
    partial: clients without some of the pairs, and their α/r over the server's for the pairs that they have. owned:
    the number of pairs that each client has.
    """
    place_of = {pair.name: place for place, pair in enumerate(pairs)}
    server, spectra = _empty(len(pairs))
    clients = [_empty(len(pairs)) for _ in nodes]
    for own_pairs, own, members in signs:
        places = [place_of[pair.name] for pair in own_pairs]
        for column in ADAPTER_COLUMNS:
            server[places, _COLUMN[column]] = own_pairs[0].rank if column == "rank" else getattr(own, column)
        spectra[places] = own.spectrum
        for i, member in enumerate(members):
            rows, parts = clients[member]
            rows[places, _COLUMN["rank"]] = own.held[i]
            rows[places, _COLUMN["norm"]] = own.client_norms[:, i]
            rows[places, _COLUMN["change"]] = own.client_changes[:, i]
            parts[places] = own.client_directions[:, i]
    resting = [pair.name in inactive for pair in pairs] & (server[:, _COLUMN["moved"]] == 0)
    server[resting, _COLUMN["moved"]] = np.nan
    results = [(SERVER, _measured(server, spectra, _whole(server, scale)))]
    for node, (rows, parts), count in zip(nodes, clients, owned, strict=True):
        if np.isnan(rows[:, _COLUMN["rank"]]).all():
            continue  # the turn of its adapters comes in a later round
        change = _norm_of_all(rows[:, _COLUMN["change"]], count)
        metrics = {"update.adapter_change": change, "update.adapter_rank": np.nanmax(rows[:, _COLUMN["rank"]])}
        if node in partial:
            metrics["update.adapter_scale"] = partial[node]
        results.append((node, _measured(rows, parts, metrics)))
    return results


def _norm_of_all(norms: Array, count: int) -> float:
    """Return the norm of as many changes together; those whose turn it is not are taken to be like the others."""
    known = _known(norms)
    return math.sqrt(float(known @ known) / len(known) * count) if len(known) else math.nan


def _known(values: Array) -> Array:
    """Return the values that are not NaN."""
    return np.asarray(values[~np.isnan(values)])


def _empty(pairs: int) -> tuple[Array, Array]:
    return np.full((pairs, len(ADAPTER_COLUMNS)), np.nan), np.full((pairs, DIRECTIONS), np.nan)


def _measured(rows: Array, directions: Array, metrics: Mapping[str, float]) -> Results:
    results = Results(matrices=[("update.adapters", rows, None), ("update.directions", directions, None)])
    results.take(metrics)
    return results


def _whole(rows: Array, scale: float | None) -> dict[str, float]:
    """Return the round's metrics: means over the adapters, and the norm of all changes together."""
    columns = dict(zip(ADAPTER_COLUMNS, rows.T, strict=True))
    means = ("effective_rank", "stable_rank", "energy_above", "energy_kept")
    metrics = {f"adapter.{name}": columns[name] for name in means}
    metrics |= {"adapter.product_error": columns["error"], "adapter.product_error_by_rank": columns["error_by_rank"]}
    measured = {name: float(known.sum() / len(known)) for name, v in metrics.items() if len(known := _known(v))}
    for name in ("change", "drift"):
        measured[f"adapter.{name}"] = _norm_of_all(columns[name], len(rows))
    measured["adapter.unmoved"] = float((columns["moved"] == 0).sum())
    return measured if scale is None else {**measured, "adapter.scale": scale}
