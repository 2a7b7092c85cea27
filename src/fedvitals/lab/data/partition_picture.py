# SPDX-License-Identifier: Apache-2.0
"""A partition as a heat map for the terminal: a row for each client, a column for each class."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedvitals.lab.data.datasets import Dataset
from fedvitals.lab.data.partition import Shard, label_counts

SHADES = "·░▒▓█"
LINES = 50  # more rows than this are folded: neighbours are drawn as one


def partition_heat_map(shards: Sequence[Shard], dataset: Dataset, width: int = 100) -> str:
    """Return a heat map of clients × classes, training and test together, with each client's number of samples.

    Clients are placed side by side where the width allows it, and neighbours are summed where there are too many of
    them. A dot means none; the shades are quarters of the largest number.
    """
    counts = label_counts(shards, dataset.labels, dataset.classes)
    names, per_row = [f"c{index}" for index in range(len(shards))], 1
    while True:
        rows = _rows(names, counts)
        columns = max(1, (width + 3) // (len(rows[0]) + 3))
        lines = -(-len(rows) // columns)
        if lines <= LINES:
            break
        per_row *= 2
        firsts = range(0, len(shards), per_row)
        names = [f"c{first}-{min(first + per_row, len(shards)) - 1}" for first in firsts]
        counts = torch.stack([pair.sum(0) for pair in torch.split(counts, 2)])  # an odd last row stays alone
    side_by_side = [" │ ".join(rows[line::lines]).rstrip() for line in range(lines)]
    who = "one client" if per_row == 1 else f"{per_row} clients"
    title = f"{len(shards)} clients, {int(counts.sum())} samples of {dataset.name}; a row is {who}, a column a class"
    largest = int(counts.max())
    legend = [f"{shade} ≤ {-(-largest * number // 4)}" for number, shade in enumerate(SHADES) if number]
    return "\n".join([title, "  ".join([f"{SHADES[0]} none", *legend]), *side_by_side])


def _rows(names: Sequence[str], counts: torch.Tensor) -> list[str]:
    # Rounded up: the smallest share that is not none is seen.
    shades = -(-counts * 4 // counts.max().clamp_min(1))
    name_width, number_width = max(map(len, names)), len(str(int(counts.sum(1).max())))
    return [
        f"{name:<{name_width}} {''.join(SHADES[shade] for shade in row)} {total:>{number_width}}"
        for name, row, total in zip(names, shades.tolist(), counts.sum(1).tolist(), strict=True)
    ]
