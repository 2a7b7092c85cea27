# SPDX-License-Identifier: Apache-2.0
"""Which inputs of the first dense layer a client's updates change, compared with its peers over the rounds.

A trained-in trigger changes the weights of the inputs that it covers, in every round, and no other client's updates do.
So a client's profile, the share of the layer's squared change at each input, differs strongly from the median client's
at few inputs; and clients that train the same trigger differ from the others in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedvitals.stats import Array

ALIKE, APART = "update.inputs_alike", "update.inputs_apart"
FEWEST_CLIENTS = 4  # below this a median says nothing about a client
FEWEST_INPUTS = 32  # with fewer, two profiles are alike by chance
MOST_INPUTS = 4096  # beyond this, neighbouring inputs are combined
NUMBERS_AT_ONCE = 1 << 21  # for all clients' profiles; with many clients, more neighbours are combined
KEPT = 0.8  # share of a client's past carried over to the next participation
OUTSTANDING = 0.01  # share of the inputs furthest above the median client's
STILL = 0.01  # of the median client's change of the layer, below which a client does not change it


class InputProfiles:
    """The profiles of a run's clients, averaged over their rounds; `compare` adds a round."""

    def __init__(self) -> None:
        self._width = 0
        self._past: dict[
            str, tuple[Array, Array, float]
        ] = {}  # sums of directions and of differences, and their weight

    def compare(self, nodes: Sequence[str], squares: Array) -> dict[str, dict[str, float]]:
        """Return the metrics of each client of a round; none for clients that hardly change the layer.

        `squares` is [clients, inputs]: for each input, the sum of the squared changes of its weights.
        """
        totals = squares.sum(axis=1)
        moving = np.flatnonzero((totals > STILL * np.median(totals)) & np.isfinite(totals)) if len(nodes) else ()
        if len(moving) < FEWEST_CLIENTS or squares.shape[1] < FEWEST_INPUTS:
            return {}
        shares = _binned(squares[moving] / totals[moving, None])
        if shares.shape[1] != self._width:
            self._width, self._past = shares.shape[1], {}
        logs = np.log(shares + 1 / self._width)
        differences = logs - np.median(logs, axis=0)
        names = [nodes[int(i)] for i in moving]
        for name, own, direction in zip(names, differences, _directions(differences), strict=True):
            directions, sums, weight = self._past.pop(name, (np.zeros(1), np.zeros(1), 0.0))
            self._past[name] = KEPT * directions + direction, KEPT * sums + own, KEPT * weight + 1
        self._forget(len(names))
        past = [self._past[name] for name in names]
        directions = _directions(np.stack([own for own, _, _ in past]))
        cosines = directions @ directions.T
        np.fill_diagonal(cosines, -1.0)
        means = np.stack([own / weight for _, own, weight in past])
        above = max(2, int(OUTSTANDING * self._width))
        apart = np.partition(means, -above, axis=1)[:, -above:].mean(axis=1)
        alike = cosines.max(axis=1)
        return {name: {ALIKE: float(a), APART: float(b)} for name, a, b in zip(names, alike, apart, strict=True)}

    def _forget(self, clients: int) -> None:
        """Drop the clients absent longest, beyond the memory limit."""
        for name in [*self._past][: max(0, len(self._past) - max(clients, NUMBERS_AT_ONCE // self._width))]:
            del self._past[name]


def _binned(shares: Array) -> Array:
    """Return [clients, at most `MOST_INPUTS`], with neighbouring inputs summed if there are more."""
    clients, inputs = shares.shape
    most = max(FEWEST_INPUTS, min(MOST_INPUTS, NUMBERS_AT_ONCE // clients))
    together = -(-inputs // most)
    padded = np.pad(shares, ((0, 0), (0, -inputs % together)))
    return np.asarray(padded.reshape(clients, -1, together).sum(axis=2))


def _directions(rows: Array) -> Array:
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(np.divide(rows, norms, out=np.zeros_like(rows), where=norms > 0))
