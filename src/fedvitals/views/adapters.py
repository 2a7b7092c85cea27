# SPDX-License-Identifier: Apache-2.0
"""The low-rank adapters of a run: ranks and spectrum over the rounds, errors, and who contributes which directions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fedvitals.errors import ConfigError, unknown
from fedvitals.records import is_client
from fedvitals.stats import ADAPTER_COLUMNS, DIRECTIONS, FAMILIES, Array
from fedvitals.store.read.layer_history import layer_history
from fedvitals.store.read.reader import Reader
from fedvitals.views.cohort import matrix_of
from fedvitals.views.grid import Grid, make_grid
from fedvitals.views.heat import client_grid
from fedvitals.views.layers import grid_of
from fedvitals.views.unmeasured import what_trains

SERVER = "server"
ERRORS = {
    "adapter.product_error": "against the mean of products",
    "adapter.product_error_by_rank": "each direction over those who have it",
}
RANKS = {"adapter.effective_rank": "effective rank", "adapter.stable_rank": "stable rank"}
ENERGIES = {"adapter.energy_above": "energy above the smallest rank", "adapter.energy_kept": "of that, kept"}
MOVES = {"adapter.change": "in the round", "adapter.drift": "since the run's start"}
HELD_BACK = {"held_back.loss": "of the new global model"}
LANGUAGE = (
    "perplexity.before", "perplexity.after", "tokens.length", "tokens.padding", "throughput.tokens",
    "model.flops_utilisation", "adapter.scale",
)  # fmt: skip
LEAST_SHARE = 1e-3  # share of the energy below which a direction is attributed to no client
CLIENTS = 60  # rows of the heat maps


@dataclass(frozen=True, slots=True)
class AdapterCurve:
    """One metric of the server's adapters over the rounds."""

    name: str
    words: str
    rounds: tuple[int, ...]
    values: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class AdaptersPage:
    """What is known of a run's adapters; `layers` is empty if it has none."""

    layers: tuple[str, ...]
    layer: str | None  # for spectrum and contributions; None: the mean over all
    round: int | None  # of the contributions
    effective_rank: Grid | None  # layers × rounds
    spectrum: Grid | None  # directions in use × rounds: shares of the energy
    beyond: bool  # whether adapters have directions behind these, which are not recorded
    contributions: Grid | None  # clients × directions, whose numbers are the columns
    errors: tuple[AdapterCurve, ...]
    ranks: tuple[AdapterCurve, ...]
    energies: tuple[AdapterCurve, ...]
    moves: tuple[AdapterCurve, ...]  # of the merged weights
    held_back: tuple[AdapterCurve, ...]  # loss on held-out texts
    clients: Mapping[str, Grid]  # by sign (see LANGUAGE), clients × rounds
    trained: str | None  # a sentence on what trains of the model; None: all of it, or unknown


def adapters_page(
    reader: Reader, run: str, layer: str | None = None, selected: int | None = None, columns: int = 400
) -> AdaptersPage:
    """Return the page of a run's adapters. `selected`: the round whose contributions are shown; None: the newest."""
    measured = layer_history(reader, run, "update.adapters", SERVER)
    spectra = layer_history(reader, run, "update.directions", SERVER)
    if layer is not None and layer not in measured.layers:
        raise ConfigError(unknown("adapter", layer, measured.layers))
    rounds = spectra.rounds
    shown = (selected if selected in rounds else rounds[-1]) if rounds else None
    ranks = measured.matrix[:, :, ADAPTER_COLUMNS.index("effective_rank")]
    place = _place(measured.layers, layer)
    used = _directions_in_use(spectra.matrix[:, place]) if rounds else 0
    return AdaptersPage(
        measured.layers,
        layer,
        shown,
        grid_of(measured, ranks, "effective rank", columns=columns) if measured.rounds else None,
        _spectrum(spectra.matrix[:, place], rounds, used, columns) if rounds else None,
        used == DIRECTIONS and bool((measured.matrix[:, place, ADAPTER_COLUMNS.index("rank")] > DIRECTIONS).any()),
        None if shown is None else _contributions(reader, run, shown, place, used),
        _curves(reader, run, ERRORS),
        _curves(reader, run, RANKS),
        _curves(reader, run, ENERGIES),
        _curves(reader, run, MOVES),
        _curves(reader, run, HELD_BACK, None),
        {name: grid for name in LANGUAGE if (grid := client_grid(reader, run, name, limit=CLIENTS)).rows},
        what_trains(reader, run),
    )


def _place(layers: tuple[str, ...], layer: str | None) -> slice:
    if layer is None:
        return slice(None)
    place = layers.index(layer)
    return slice(place, place + 1)


def _directions_in_use(shares: Array) -> int:
    """Return how many of the first directions hold energy in some round; of rank 4, the other twelve hold none."""
    with_energy = np.flatnonzero((shares >= LEAST_SHARE).reshape(-1, DIRECTIONS).any(axis=0))
    return int(with_energy[-1]) + 1 if len(with_energy) else 1


def _spectrum(shares: Array, rounds: tuple[int, ...], used: int, columns: int) -> Grid:
    names = [f"{k + 1}" for k in range(used)]
    values = _mean(shares, axis=1).T[:used]
    matrix = matrix_of(names, rounds, values, np.isfinite(values))
    return make_grid(matrix, rows=names, sort="given", columns=columns, unit="share", title="share of the energy")


def _contributions(reader: Reader, run: str, round_index: int, place: slice, used: int) -> Grid | None:
    """Return each client's share of the first directions, averaged over the chosen adapters."""
    names = FAMILIES["update.directions"].columns
    nodes, values = reader.history(run).across("update.directions", names, round_index)
    rows = [i for i, node in enumerate(nodes) if is_client(node) and node != SERVER]
    if not rows:
        return None
    parts = _mean(values[rows][:, place], axis=1)
    shares = _mean(values[nodes.index(SERVER), place], axis=0) if SERVER in nodes else np.ones(DIRECTIONS)
    parts[:, ~(shares >= LEAST_SHARE)] = np.nan  # a share of nothing is undefined
    clients = [nodes[i] for i in rows]
    parts = parts[:, :used]
    matrix = matrix_of(clients, range(1, used + 1), parts, np.isfinite(parts))
    return make_grid(matrix, rows=clients[:CLIENTS], sort="given", unit="share", title="part in each direction")


def _mean(values: Array, axis: int) -> Array:
    """Return the mean of the finite values; NaN if there are none."""
    known = np.isfinite(values)
    counts = known.sum(axis=axis)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.where(counts > 0, np.where(known, values, 0.0).sum(axis=axis) / counts, np.nan))


def _curves(reader: Reader, run: str, names: Mapping[str, str], node: str | None = SERVER) -> tuple[AdapterCurve, ...]:
    history = reader.history(run)
    curves = []
    for name, words in names.items():
        rounds, values = history.series(name, node)
        if rounds:
            finite = tuple(value if np.isfinite(value) else None for value in values)
            curves.append(AdapterCurve(name, words, tuple(rounds), finite))
    return tuple(curves)
