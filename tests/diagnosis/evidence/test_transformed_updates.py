# SPDX-License-Identifier: Apache-2.0
"""Whether updates are mostly zeros, for all clients at once: as for one client after the other."""

from __future__ import annotations

import numpy as np
import pytest

from fedvitals.diagnosis.evidence import transformed_updates
from fedvitals.diagnosis.evidence.transformed_updates import MOSTLY_ZEROS


class Measured:
    """The part of a history that is asked for: layer statistics of one round, of clients and of the server."""

    def __init__(self, seed: int, *, same_layers: bool) -> None:
        chance, self.same_layers = np.random.default_rng(seed), same_layers
        self.nodes = {
            family: [f"c{i}" for i in range(12) if chance.random() < 0.8] for family in ("update", "gradient")
        }
        self.values = {family: chance.random((len(nodes), 5, 2)) for family, nodes in self.nodes.items()}
        for values in self.values.values():
            values[chance.random(values.shape) < 0.2] = np.nan
            values[chance.random(values.shape) < 0.2] = 0.0
        if self.nodes["update"]:
            self.values["update"][0, :, 0] = 0.0  # an update in which nothing changed

    def latest(self, name: str, round_index: int) -> dict[str, float]:
        return {f"c{i}": 1.0 for i in range(9)} if name == "update.norm" else {}

    def layers(self, family: str) -> tuple[str, ...]:
        return tuple(f"{'' if self.same_layers else family}{i}" for i in range(5))

    def across(self, family: str, statistics: tuple[str, ...], round_index: int) -> tuple[list[str], np.ndarray]:
        columns = [("l2", "sparsity").index(name) for name in statistics]
        return self.nodes[family], self.values[family][..., columns]


def one_after_the_other(history: Measured) -> dict[str, bool]:
    """The slow twin."""
    nodes, sums = history.across("update", ("l2", "sparsity"), 0)
    zeros: dict[str, np.ndarray] = {}
    if history.same_layers:
        owners, gradients = history.across("gradient", ("sparsity",), 0)
        zeros = {node: np.nan_to_num(values[:, 0]) for node, values in zip(owners, gradients, strict=True)}
    mostly = {}
    for i, node in enumerate(nodes):
        changed = sums[i, :, 0] > 0
        if node in history.latest("update.norm", 0) and changed.any():
            unexplained = np.nan_to_num(sums[i, :, 1]) - zeros.get(node, 0.0)
            mostly[node] = bool(np.median(unexplained[changed]) > MOSTLY_ZEROS)
    return mostly


@pytest.mark.parametrize("same_layers", [True, False])
def test_they_are_those_of_the_slow_twin(same_layers: bool) -> None:
    seen = set()
    for seed in range(60):
        history = Measured(seed, same_layers=same_layers)
        mostly = transformed_updates._mostly_zeros(history, 0)
        assert list(mostly.items()) == list(one_after_the_other(history).items())
        seen |= set(mostly.values())
    assert seen == {True, False}


class Sizes:
    """A history of sizes alone: what six clients trained, and what arrived, which differs for the first `differing`."""

    def __init__(self, differing: list[int]) -> None:
        self.differing = differing

    def rounds(self) -> list[int]:
        return [*range(len(self.differing))]

    def events(self, name: str) -> list[object]:
        return []

    def layers(self, family: str) -> tuple[str, ...]:
        return ()

    def across(self, family: str, statistics: tuple[str, ...], round_index: int) -> tuple[list[str], np.ndarray]:
        return [], np.empty((0, 0, len(statistics)))

    def latest(self, name: str, round_index: int) -> dict[str, float]:
        change = 1.05 if name == "update.norm" else 1.0
        known = name in ("update.norm", "weight.drift")
        return {f"c{i}": change if i < self.differing[round_index] else 1.0 for i in range(6)} if known else {}


@pytest.mark.parametrize(
    ("differing", "transformed"),
    [
        ([6] * 8 + [2] * 3, True),  # converged: it shows with two clients only
        ([6] * 2 + [2] * 3, False),  # too short to know
        ([0] * 8 + [6] * 3 + [2], False),  # not most of the rounds
        ([2] * 11, False),  # a minority, however long
    ],
)
def test_what_most_rounds_showed_still_holds(differing: list[int], transformed: bool) -> None:
    history = Sizes(differing)
    assert (transformed_updates.transformation(history, len(differing) - 1) is not None) == transformed
