# SPDX-License-Identifier: Apache-2.0
"""Reads one family's layer statistics over the rounds, of the federation or of one node: [rounds × layers × columns].

Blocks hold all clients of some rounds. If a run has too many blocks to read interactively, only every n-th is read,
always including the first and the last; the result contains the total number of rounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import numpy as np

from fedvitals.protocols import Node
from fedvitals.stats import FAMILIES, Array
from fedvitals.store.packing import NONE, entries_of, matrices, numbers_of
from fedvitals.store.read.federation_layers import whole_layers
from fedvitals.store.read.layers import layer_names
from fedvitals.store.read.nodes import padded, placeholders
from fedvitals.store.read.reader import Reader

BYTES = 120_000_000  # of numbers that are read: about half a second
AT_ONCE = 100  # blocks in one statement


@dataclass(frozen=True, slots=True, eq=False)
class LayerHistory:
    """Layer statistics of one family, round by round."""

    family: str
    layers: tuple[str, ...]
    rounds: tuple[int, ...]  # ascending; only those that were read
    matrix: Array  # [rounds, layers, columns]
    total: int  # rounds from the first to the last block, read or not; an upper bound if some were skipped
    thinned: bool


def layer_history(
    reader: Reader, run: str, family: str, node: Node | None = None, *, most: int = BYTES
) -> LayerHistory:
    """Read the newest matrix of each round, without those of single steps, for the layers of the newest table.

    The federation as a whole is read as by `whole_layers`: if it was not reported, it is computed from the nodes.
    """
    if node is None:
        return _of_the_whole(reader, run, family)
    columns = len(FAMILIES[family].columns)
    number = reader.names.number(run) or 0
    blocks = reader.database.rows(
        "SELECT arrival, layer_table, layers * entries, first_round, last_round FROM layer_block WHERE run = ? "
        "AND family = (SELECT id FROM symbol WHERE text = ?) AND first_round IS NOT NULL "
        "AND (whole IS NULL OR whole = 0) ORDER BY first_round, arrival",
        (number, family),
    )
    symbol = reader.names.number(node)
    if not blocks or symbol is None:
        return LayerHistory(family, (), (), np.empty((0, 0, columns)), 0, False)
    table = max(blocks)[1]
    blocks = [block for block in blocks if block[1] == table]
    kept = _thinned(blocks, most // (4 * columns))
    layers = layer_names(reader, table)
    newest: dict[int, tuple[float, Array]] = {}
    for start in range(0, len(kept), AT_ONCE):
        _read(reader, family, [block[0] for block in kept[start : start + AT_ONCE]], symbol, newest)
    rounds = tuple(sorted(newest))
    matrix = np.stack([newest[n][1] for n in rounds]) if rounds else np.empty((0, len(layers), columns))
    thinned = len(kept) < len(blocks)
    total = _covered([(block[3], block[4]) for block in blocks]) if thinned else len(rounds)
    return LayerHistory(family, layers, rounds, matrix, total, thinned)


def _of_the_whole(reader: Reader, run: str, family: str) -> LayerHistory:
    rounds, layers, matrix = whole_layers(reader, run, family)
    blocks = reader.database.rows(
        "SELECT first_round, last_round, whole FROM layer_block WHERE run = ? "
        "AND family = (SELECT id FROM symbol WHERE text = ?) AND first_round IS NOT NULL ORDER BY first_round",
        (reader.names.number(run) or 0, family),
    )
    # What was reported of the whole is read completely; only what must be computed from nodes may be too much.
    put_together = bool(blocks) and not any(whole for *_, whole in blocks)
    total = _covered([(first, last) for first, last, _ in blocks]) if put_together else 0
    total = max(total, len(rounds))
    return LayerHistory(family, layers, tuple(rounds), matrix, total, total > len(rounds))


def _covered(spans: list[tuple[int, int]]) -> int:
    """Return how many rounds are in at least one of these spans, which are ordered by their first round."""
    total, until = 0, spans[0][0] - 1
    for first, last in spans:
        total += max(0, last - max(first - 1, until))
        until = max(until, last)
    return total


def _thinned(blocks: list[tuple[int, ...]], most: int) -> list[tuple[int, ...]]:
    """Return whole rounds, evenly spaced, with at most `most` numbers in total; the first and the last are included."""
    by_round = [list(same) for _, same in groupby(blocks, key=itemgetter(3))]
    size = sum(block[2] for block in blocks)
    step = max(1, math.ceil(size / max(1, most)))
    chosen = [*by_round[:-1:step], by_round[-1]]
    return [block for same in chosen for block in same]


def _read(
    reader: Reader, family: str, arrivals: list[int], symbol: int, newest: dict[int, tuple[float, Array]]
) -> None:
    wanted = padded(arrivals)
    rows = reader.database.rows(
        "SELECT b.arrival, m.layer, b.entries, b.coordinates, b.details, m.numbers FROM layer_block AS b "  # noqa: S608
        f"JOIN layer_matrix AS m ON m.block = b.arrival WHERE b.arrival IN ({placeholders(wanted)})",
        wanted,
    )
    rows.sort(key=itemgetter(0, 1))
    for _, same in groupby(rows, key=itemgetter(0)):
        block = list(same)
        count = block[0][2]
        entries = entries_of(block[0][3], block[0][4], count)
        mine = (entries.nodes == symbol) & (entries.steps == NONE) & (entries.rounds != NONE)
        here = np.flatnonzero(mine)
        if not len(here):
            continue
        numbers = np.concatenate([numbers_of(family, row[5], count)[..., here] for row in block])
        for place, matrix in zip(here, matrices(family, numbers), strict=True):
            at, when = int(entries.rounds[place]), float(entries.at[place])
            if at not in newest or when >= newest[at][0]:
                newest[at] = (when, matrix)
