# SPDX-License-Identifier: Apache-2.0
"""Compares a client's layers with the median client's, round by round.

The statistics of a thousand clients and fifty layers are two megabytes per round. So the newest rounds are read, as
many as fit into a budget, and the answer says how many.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fedvitals.diagnosis.medians import column_medians
from fedvitals.errors import ConfigError, unknown
from fedvitals.stats import (
    FAMILIES,
    GROUP_ROWS,
    HISTOGRAM_COLUMNS,
    STATISTICS,
    STEP_COLUMNS,
    Array,
    derive,
    statistics_of,
)
from fedvitals.store.packing import NONE, Part, entries_of, matrices, newest, numbers_of
from fedvitals.store.read import queries
from fedvitals.store.read.layers import blocks_newest_first, layer_names, read_block
from fedvitals.store.read.nodes import clients_by_number
from fedvitals.store.read.reader import Reader
from fedvitals.views.cohort import matrix_of
from fedvitals.views.grid import Grid, make_grid
from fedvitals.views.memo import remembered

BUDGET = 24_000_000  # bytes of statistics that are read
MOST_ROUNDS = 400
# Positive sizes are compared by their ratio, on a scale where twice and half are equally far from equality.
RATIOS = {"sum_squares", "sum_magnitudes", "std", "l2", "rms", "absmax", "mean_magnitude", "norm_sum", "norm_max",
          "norm_last", "norm_mean", "change_max"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ClientLayers:
    """A client's layers compared with the median client's."""

    family: str
    statistic: str
    families: list[str]
    statistics: list[str]
    how: str  # «log2 ratio» or «difference»
    grid: Grid | None  # None: there are no data of this client
    rounds: int  # number of rounds shown
    older: bool  # whether there are older ones, which are too much to read
    clients: int  # the largest number of clients behind one round's median


def comparable(family: str) -> list[str]:
    """Return the statistics of a family by which a client can be compared."""
    if FAMILIES[family].columns is STATISTICS:
        return ["rms", "l2", "std", "absmax", "mean_magnitude", "mean", "sparsity"]
    if FAMILIES[family].columns is STEP_COLUMNS:
        return ["norm_mean", "norm_max", "norm_last", "change_max"]
    return [name for name in statistics_of(family) if name != "units"]


def families_of(reader: Reader, run: str) -> list[str]:
    """Return the run's families of layer statistics, those about updates and gradients first."""
    order = ("update", "gradient", "gradient.steps", "update.alignment")
    measured = queries.layer_families(reader, run)
    known = [name for name in measured if name in FAMILIES and _is_of_layers(name)]
    return sorted(known, key=lambda name: (order.index(name) if name in order else len(order), name))


def _is_of_layers(family: str) -> bool:
    return FAMILIES[family].columns is not HISTOGRAM_COLUMNS and FAMILIES[family].rows not in GROUP_ROWS


def client_layers(
    reader: Reader,
    run: str,
    node: str,
    family: str | None = None,
    statistic: str | None = None,
    first: int | None = None,
    last: int | None = None,
    budget: int = BUDGET,
) -> ClientLayers:
    """Read how a client's layers differ; ConfigError for an unknown family or statistic."""
    families = families_of(reader, run)
    if family is not None and family not in families:
        raise ConfigError(unknown("family of layer statistics", family, families))
    if not families:
        return ClientLayers("", "", [], [], "", None, 0, False, 0)
    chosen = family or families[0]
    known = comparable(chosen)
    if statistic is not None and statistic not in known:
        raise ConfigError(unknown(f"statistic of family '{chosen}'", statistic, known))
    measure = statistic or known[0]
    how = "log2 ratio" if measure in RATIOS else "difference"
    layers, by_round, older = _read(reader, run, chosen, measure, (first, last), budget)
    mine = reader.names.number(node) or 0
    rounds = [number for number in sorted(by_round) if mine in by_round[number][0]][-MOST_ROUNDS:]
    most = max((len(by_round[number][0]) for number in rounds), default=0)
    grid = None
    if rounds:
        values = np.stack([_against(by_round[number], mine, how) for number in rounds], axis=1)
        title = f"{chosen} {measure} against the median client"
        compared = matrix_of(layers, rounds, values, np.ones(values.shape, bool))
        unit = "log₂" if how == "log2 ratio" else ""
        grid = make_grid(compared, sort="given", columns=MOST_ROUNDS, unit=unit, title=title)
    return ClientLayers(chosen, measure, families, known, how, grid, len(rounds), older, most)


Read = dict[int, tuple[list[int], Array]]
"""Round → the nodes' numbers, and their statistic as [nodes × layers]."""


def _read(
    reader: Reader, run: str, family: str, statistic: str, span: tuple[int | None, int | None], budget: int
) -> tuple[Sequence[str], Read, bool]:
    """Return layer names, the statistics read, and whether more are left."""
    blocks = blocks_newest_first(reader, run, family)
    if not blocks:
        return (), {}, False
    table = blocks[0].table
    low, high = -np.inf if span[0] is None else span[0], np.inf if span[1] is None else span[1]
    wanted: list[tuple[int, int]] = []
    left = budget
    for block in blocks:
        if block.table != table or block.last_round < low or block.first_round > high:
            continue
        left -= block.cells * len(FAMILIES[family].columns) * 4
        if left < 0 and wanted:
            break
        wanted.append((block.arrival, block.cells))
    names = layer_names(reader, table)
    # For all clients at once: a user who looks at one is likely to look at the next.
    key, arrivals = (run, family, statistic, *span), [arrival for arrival, _ in wanted]

    def newest_rounds() -> Read:
        clients = [*clients_by_number(reader, run)]
        by_round = _by_round(_enough(_parts(reader, family, statistic, arrivals, clients), clients, low, high))
        return _shown({n: statistics for n, statistics in by_round.items() if low <= n <= high})

    return names, remembered(reader, "layers", key, wanted, newest_rounds), left < 0


def _shown(by_round: Read) -> Read:
    """Return the rounds that the page of any node shows. The others are not cached: a run may have any number."""
    rounds_of: Counter[int] = Counter()
    shown: Read = {}
    for number in sorted(by_round, reverse=True):
        nodes = by_round[number][0]
        if any(rounds_of[node] < MOST_ROUNDS for node in nodes):
            shown[number] = by_round[number]
        rounds_of.update(nodes)
    return shown


def _enough(parts: Iterable[Part], clients: Sequence[int], low: float, high: float) -> list[Part]:
    """Return as many parts, given newest first, as fill the pages of all clients; in order of arrival.

    A page has MOST_ROUNDS rounds between `low` and `high`; while a client has fewer, all parts are taken.
    """
    rounds_of: Counter[int] = Counter()
    taken: list[Part] = []
    for part in parts:
        taken.append(part)
        within = (part[0] >= low) & (part[0] <= high)
        rounds_of.update(np.unique(np.stack([part[0], part[2]])[:, within], axis=1)[1].tolist())
        if all(rounds_of[client] >= MOST_ROUNDS for client in clients):
            break
    return taken[::-1]


def _by_round(parts: Sequence[Part]) -> Read:
    by_round: Read = {}
    if parts:
        rounds, _, nodes, values = newest(parts)
        for number in np.unique(rounds).tolist():
            here = np.flatnonzero(rounds == number)
            place = {int(nodes[i]): i for i in here}  # for a node that reported twice, the newer
            by_round[number] = [*place], values[[*place.values()]]
    return by_round


def _parts(
    reader: Reader, family: str, statistic: str, arrivals: Sequence[int], clients: Sequence[int]
) -> Iterator[Part]:
    """Yield from each block what is about a client and its whole round, not a single step: [entries × layers]."""
    for arrival in arrivals:
        block = read_block(reader, arrival)
        if block is None:
            continue  # merged with others in the meantime: the next request finds it there
        count, coordinates, details, blobs = block
        entries = entries_of(coordinates, details, count)
        keep = np.flatnonzero(np.isin(entries.nodes, clients) & (entries.steps == NONE))
        numbers = np.concatenate([numbers_of(family, blob, count) for blob in blobs])[..., keep]
        with np.errstate(all="ignore"):
            values = derive(family, matrices(family, numbers), statistic)
        yield entries.rounds[keep], entries.at[keep], entries.nodes[keep], values


def _against(cohort: tuple[list[int], Array], mine: int, how: str) -> Array:
    """Return a client's layers in one round, compared with the median of all."""
    nodes, values = cohort
    own, middle = values[nodes.index(mine)], medians(values)
    if how == "difference":
        return np.asarray(own - middle)
    with np.errstate(all="ignore"):
        # If all are zero, nobody differs.
        return np.where(own == middle, 0.0, np.log2(own / middle))


def medians(values: Array) -> Array:
    """Return the median of the finite values in each column; NaN if there is none."""
    return column_medians(np.where(np.isfinite(values), values, np.nan))
