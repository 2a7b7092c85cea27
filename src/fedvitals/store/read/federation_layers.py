# SPDX-License-Identifier: Apache-2.0
"""Reads layer statistics of the federation as a whole, over all rounds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from fedvitals.errors import StoreError
from fedvitals.stats import FAMILIES, Array
from fedvitals.store.packing import NONE, Entries, Numbers, entries_of, layers_in, matrices, numbers_of
from fedvitals.store.read.layers import layer_names
from fedvitals.store.read.nodes import padded, placeholders
from fedvitals.store.read.reader import Reader

MOST = 64_000_000  # bytes of clients' numbers that are used where the whole itself was not reported
READ = 16_000_000  # bytes per statement
BLOCKS = 500  # blocks named in one statement
ATTEMPTS = 5

Layers = tuple[list[int], tuple[str, ...], Array]


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    arrival: int
    table: int
    layers: int
    count: int
    entries: Entries
    places: npt.NDArray[np.intp]  # of the wanted entries


class _ChangedError(Exception):
    """Blocks were merged while they were read."""


def whole_layers(reader: Reader, run: str, family: str) -> Layers:
    """Return rounds, layers, and each round's newest matrix [rounds, layers, columns] of the whole federation.

    If the whole was not reported (a family of ratios, a cohort too small for its sum), it is computed from the nodes'
    matrices: sums are added, ratios become their median. With many clients and rounds, only for some rounds.
    """
    number, kind = reader.names.number(run), reader.names.number(family)
    if number is None or kind is None:
        return _nothing(family)
    for _ in range(ATTEMPTS):
        with contextlib.suppress(_ChangedError):
            # If it is unknown (NULL: an older store), the whole is among the nodes.
            blocks = _blocks(reader, (number, kind), (1, None), _about_whole)
            if blocks:
                return _newest(reader, family, blocks)
            return _from_nodes(reader, family, _blocks(reader, (number, kind), (0, None), _about_nodes))
    raise StoreError(f"Run {run} was changed while it was read. Try again.")


def _nothing(family: str) -> Layers:
    return [], (), np.empty((0, 0, len(FAMILIES[family].columns)))


def _about_whole(entries: Entries) -> npt.NDArray[np.intp]:
    """Return which entries are about the whole federation in a round: not about one edge or a single step."""
    placed = (entries.rounds != NONE) & (entries.steps == NONE)
    return np.flatnonzero((entries.nodes == 0) & (entries.groups == 0) & placed)


def _about_nodes(entries: Entries) -> npt.NDArray[np.intp]:
    return np.flatnonzero((entries.nodes != 0) & (entries.rounds != NONE) & (entries.steps == NONE))


def _blocks(
    reader: Reader,
    key: tuple[int, int],
    whole: Sequence[int | None],
    choose: Callable[[Entries], npt.NDArray[np.intp]],
) -> list[_Block]:
    """Return the blocks with wanted entries, in order of arrival; all with the layers of the last."""
    rows = []
    for value in whole:
        condition = "IS NULL" if value is None else f"= {value:d}"
        rows += reader.database.rows(
            "SELECT arrival, layer_table, layers, entries, coordinates, details FROM layer_block "  # noqa: S608
            f"WHERE run = ? AND family = ? AND whole {condition}",
            key,
        )
    blocks = []
    for arrival, table, layers, count, coordinates, details in sorted(rows, key=itemgetter(0)):
        entries = entries_of(coordinates, details, count)
        places = choose(entries)
        if len(places):
            blocks.append(_Block(arrival, table, layers, count, entries, places))
    return [block for block in blocks if (block.table, block.layers) == (blocks[-1].table, blocks[-1].layers)]


def _newest(reader: Reader, family: str, blocks: Sequence[_Block]) -> Layers:
    """Return each round's newest entry: measured later or, at the same time, arrived later."""
    rounds = np.concatenate([block.entries.rounds[block.places] for block in blocks])
    at = np.concatenate([block.entries.at[block.places] for block in blocks])
    order = np.lexsort((np.arange(len(at)), at, rounds))
    newest = order[np.append(rounds[order][1:] != rounds[order][:-1], True)]
    rows = np.full(len(rounds), -1)  # the row of each entry that is one of the newest
    rows[newest] = np.arange(len(newest))
    layers = np.empty((len(newest), blocks[-1].layers, len(FAMILIES[family].columns)))
    begin = 0
    # Block by block: all at once would take three times the memory of the result, which grows with the run.
    for block, numbers in zip(blocks, _numbers(reader, family, blocks), strict=True):
        own = rows[begin : begin + len(block.places)]
        begin += len(own)
        layers[own[own >= 0]] = matrices(family, numbers[..., own >= 0])
    return rounds[newest].tolist(), layer_names(reader, blocks[-1].table), layers


def _numbers(reader: Reader, family: str, blocks: Sequence[_Block]) -> Iterator[Numbers]:
    """Yield the numbers of each block's wanted entries, [layers, columns, entries]."""
    for some in _portions(family, blocks):
        arrivals = padded([block.arrival for block in some])
        rows = reader.database.each_row(
            f"SELECT block, numbers FROM layer_matrix WHERE block IN ({placeholders(arrivals)}) "  # noqa: S608
            "ORDER BY block, layer",
            arrivals,
        )
        by_block = groupby(rows, itemgetter(0))
        for block in some:  # also in order of arrival
            arrival, same = next(by_block, (None, ()))
            mine = [row[1] for row in same] if arrival == block.arrival else []
            if sum(layers_in(family, blob, block.count) for blob in mine) != block.layers:
                raise _ChangedError
            yield np.concatenate([numbers_of(family, blob, block.count)[..., block.places] for blob in mine])


def _portions(family: str, blocks: Sequence[_Block]) -> Iterator[list[_Block]]:
    """Yield the blocks in portions of a bounded size."""
    some: list[_Block] = []
    size = 0
    for block in blocks:
        own = block.count * block.layers * len(FAMILIES[family].columns) * 4
        if some and (size + own > READ or len(some) >= BLOCKS):
            yield some
            some, size = [], 0
        some.append(block)
        size += own
    yield some


def _from_nodes(reader: Reader, family: str, blocks: Sequence[_Block]) -> Layers:
    """Compute the whole from the nodes' matrices, for as many rounds as can be read in a reasonable time."""
    if not blocks:
        return _nothing(family)
    rounds = np.unique(np.concatenate([block.entries.rounds[block.places] for block in blocks]))
    weight = sum(len(block.places) for block in blocks) * blocks[0].layers * len(FAMILIES[family].columns) * 4
    kept = rounds[::-1][:: max(1, -(-weight // MOST))][::-1]  # evenly spaced, including the newest
    thinned = []
    for block in blocks:
        places = block.places[np.isin(block.entries.rounds[block.places], kept)]
        if len(places):
            thinned.append(replace(block, places=places))
    numbers = np.concatenate([*_numbers(reader, family, thinned)], axis=2)
    owners = np.concatenate([block.entries.rounds[block.places] for block in thinned])
    joined = [_joined(family, matrices(family, numbers[..., owners == number])) for number in kept]
    return kept.tolist(), layer_names(reader, blocks[-1].table), np.stack(joined)


def _joined(family: str, stacked: Array) -> Array:
    """Combine nodes' matrices [nodes, layers, columns] into one."""
    rule = FAMILIES[family].merge
    if rule is not None:
        return rule(stacked)
    known = np.isfinite(stacked).any(axis=0)
    return np.where(known, np.nanmedian(np.where(known, stacked, 0.0), axis=0), np.nan)
