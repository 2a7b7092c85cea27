# SPDX-License-Identifier: Apache-2.0
"""Computes how the values of one layer's gradient were distributed, round by round.

If histograms were stored (one bin for each sign and power of two), the shape is known. Otherwise it is not invented:
only mean, standard deviation, smallest and largest are shown.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from fedvitals.plain_json import finite
from fedvitals.protocols import Node
from fedvitals.stats import EXPONENTS, LOWEST_EXPONENT, Array, derive
from fedvitals.store.read.layer_history import layer_history
from fedvitals.store.read.reader import Reader
from fedvitals.views.layers import chosen_rounds
from fedvitals.views.series import Numbers, json_numbers

RIDGES = 12
WORTH = 0.002  # share of a round's values from which a size has its own bin


@dataclass(frozen=True, slots=True)
class Ridge:
    """The distribution in one round."""

    round: int
    heights: Numbers  # share of the values in each bin
    zeros: float | None  # share of exact zeros, which are in no bin


@dataclass(frozen=True, slots=True)
class Spread:
    """What is known of a distribution without its shape."""

    rounds: tuple[int, ...]
    mean: Numbers
    below: Numbers  # mean − standard deviation
    above: Numbers
    smallest: Numbers
    largest: Numbers


@dataclass(frozen=True, slots=True)
class Distribution:
    """The distribution of a layer's gradient over the rounds."""

    run: str
    layer: str
    node: str | None
    layers: tuple[str, ...]
    measured: bool  # whether the shape is known
    note: str
    bins: tuple[float, ...]  # positions on the axis: negative values left, small ones towards the middle
    labels: tuple[str, ...]  # of the bins: «−2⁻³»
    ridges: tuple[Ridge, ...]
    spread: Spread | None
    rounds: int  # measured, of which some are shown


def distribution(
    reader: Reader, run: str, layer: str | None = None, node: Node | None = None, selected: int | None = None
) -> Distribution:
    """Return the distribution of a layer's gradient (without a name, of the first); `note` says why it is empty."""
    sums = layer_history(reader, run, "gradient", node)
    chosen = layer or next(iter(sums.layers), "")
    nothing = Distribution(run, chosen, node, sums.layers, False, "", (), (), (), None, 0)
    if not sums.rounds:
        why = "No gradient of a layer was stored here: they need privacy level 3, and probes from «standard» up."
        return replace(nothing, note=why)
    if chosen not in sums.layers:
        return replace(nothing, note=f"'{chosen}' has no gradient of its own: it is none of the parameters.")
    place = sums.layers.index(chosen)
    histograms = layer_history(reader, run, "gradient.histogram", node)
    if not histograms.rounds or chosen not in histograms.layers:
        note = 'Shape not measured: mean ± standard deviation, smallest and largest. Monitor(probes="deep") has it.'
        known = _spread(sums.rounds, sums.matrix[:, place])
        return replace(nothing, note=note, spread=known, rounds=len(sums.rounds))
    sparsity = derive("gradient", sums.matrix, "sparsity")[:, place].tolist()
    zeros = dict(zip(sums.rounds, sparsity, strict=True))
    counts = histograms.matrix[:, histograms.layers.index(chosen)]
    wanted = chosen_rounds(histograms.rounds, selected, RIDGES)
    shares = _shares(counts[[histograms.rounds.index(number) for number in wanted]])
    low, high = _ends(shares)
    bins, heights = _joined(shares, low, high)
    ridges = tuple(
        Ridge(number, json_numbers(row), finite(zeros.get(number))) for number, row in zip(wanted, heights, strict=True)
    )
    note = f"One bin for each sign and power of two; smaller than {_label(low)} is in the innermost, zeros are in none."
    names = tuple(_label(abs(place) + low - 1, place < 0) for place in bins)
    return Distribution(
        run, chosen, node, sums.layers, True, note, tuple(map(float, bins)), names, ridges, None, len(histograms.rounds)
    )


def _shares(counts: Array) -> Array:
    """Return [rounds, signs, sizes] as shares of each round's values; the negative ones first."""
    whole = counts.sum(axis=1, keepdims=True)
    return (counts / np.where(whole > 0, whole, 1.0)).reshape(len(counts), 2, EXPONENTS)


def _ends(shares: Array) -> tuple[int, int]:
    """Return the smallest size with its own bin, and the largest that occurs."""
    used = np.flatnonzero(shares.sum(axis=(0, 1)))
    worth = np.flatnonzero(shares.max(axis=(0, 1)) >= WORTH)
    return (int(worth[0]), int(used[-1])) if len(worth) else (0, EXPONENTS - 1)


def _joined(shares: Array, low: int, high: int) -> tuple[list[int], Array]:
    """Return sizes from the most negative to the most positive, as positions …, −2, −1, 1, 2, …"""
    kept = shares[..., low : high + 1].copy()
    kept[..., 0] += shares[..., :low].sum(axis=-1)
    sizes = range(1, high - low + 2)
    return [*(-place for place in reversed(sizes)), *sizes], np.concatenate([kept[:, 0, ::-1], kept[:, 1]], axis=1)


_UP = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def _label(place: int, negative: bool = False) -> str:
    return f"{'−' if negative else ''}2{str(LOWEST_EXPONENT + place).translate(_UP)}"


def _spread(rounds: tuple[int, ...], sums: Array) -> Spread:
    mean, std = derive("gradient", sums, "mean"), derive("gradient", sums, "std")
    smallest, largest = derive("gradient", sums, "min"), derive("gradient", sums, "max")
    return Spread(
        rounds,
        json_numbers(mean),
        json_numbers(mean - std),
        json_numbers(mean + std),
        json_numbers(smallest),
        json_numbers(largest),
    )
