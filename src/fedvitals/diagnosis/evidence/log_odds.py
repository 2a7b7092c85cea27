# SPDX-License-Identifier: Apache-2.0
"""The learnt models that turn scores into evidence: log-odds of a client being faulty in a round.

Each is the mean of a linear model and of boosted trees, learnt on the fault bank's tuning set by
`fedvitals_studies.faultbank.fit` and stored as plain numbers in `evidence.json`. There are three: «telemetry» also
trusts what clients report, «server» uses only what they sent, and «flip» is learnt on flipped classes alone.
scikit-learn is not needed to use them.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fedvitals.diagnosis.evidence.scores import Scores
from fedvitals.diagnosis.evidence.vital_signs import ABSOLUTE, ABSOLUTE_SERVER, SERVER, VitalSigns
from fedvitals.stats import Array

VIEWS = ("telemetry", "server", "flip")
MOST_COUNTED = 20  # participations, above which more add no information


def features(scores: Scores, vitals: VitalSigns, view: str) -> Array:
    """Return the features of one view, [clients, features]; NaN where something is unknown."""
    count = np.minimum(scores.counts, MOST_COUNTED)[:, None]
    if view == "server":
        own = len(SERVER)
        parts = [scores.peers[:, :own], scores.own[:, :own], scores.lasting[:, :own]]
        return np.concatenate([*parts, vitals.absolute[:, : len(ABSOLUTE_SERVER)], count], axis=1)
    confusion = np.nan_to_num(vitals.absolute[:, ABSOLUTE.index("confusion")])
    flip = np.stack([scores.persistent, scores.rare, confusion * scores.persistent * scores.rare], axis=1)
    return np.concatenate([scores.peers, scores.own, scores.lasting, vitals.absolute, count, flip], axis=1)


def linear_features(feature_rows: Array, scored: int) -> Array:
    """Return the features as the linear model takes them: clipped scores, their magnitudes, and the rest.

    Unknown values become 0. `scored`: the number of leading columns that are scores.
    """
    scores = np.clip(np.nan_to_num(feature_rows[:, :scored]) / 3, -2.5, 2.5)
    rest = np.clip(np.nan_to_num(feature_rows[:, scored:]), -5, 5)
    return np.concatenate([scores, np.abs(scores), rest], axis=1)


@dataclass(frozen=True)
class BoostedTrees:
    """Boosted trees as arrays, [trees, nodes] each: feature, threshold, children and leaf values.

    A tree has at most 64 leaves.
    """

    feature: npt.NDArray[np.int64]
    limit: Array
    left: npt.NDArray[np.int64]
    right: npt.NDArray[np.int64]
    missing_left: npt.NDArray[np.bool_]
    value: Array
    leaf: npt.NDArray[np.bool_]
    baseline: float

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> BoostedTrees:
        """Return the trees from their JSON document."""
        kinds = {"feature": np.int64, "left": np.int64, "right": np.int64, "missing_left": np.bool_, "leaf": np.bool_}
        names = ("feature", "limit", "left", "right", "missing_left", "value", "leaf")
        arrays: dict[str, Any] = {name: np.array(document[name], dtype=kinds.get(name, np.float64)) for name in names}
        return cls(**arrays, baseline=float(document["baseline"]))

    def __call__(self, feature_rows: Array) -> Array:
        """Return the sum of all trees for each row of features.

        No tree is traversed. All nodes are evaluated at once; a node that answers «right» rules out the leaves to its
        left, and the leaf reached is the first that is not ruled out (Lucchese et al., QuickScorer, 2015).
        """
        splits = self._splits
        values = np.take(np.ascontiguousarray(feature_rows.T), splits.feature, axis=0)  # [splits, trees, rows]
        goes_right = (values > splits.limit) | (np.isnan(values) & splits.missing_right)
        ruled_out = np.bitwise_or.reduce(goes_right * splits.left_leaves, axis=0)
        reached = ~ruled_out & (ruled_out + splits.unit)  # the lowest bit that is not set
        first = np.frexp(reached.astype(np.float64))[1] - 1
        leaves = np.take_along_axis(splits.leaf_values, first, axis=1)
        return np.asarray(np.ascontiguousarray(leaves.T).sum(axis=1) + self.baseline)

    @functools.cached_property
    def _splits(self) -> _Splits:
        trees = [_leaves_below(self.leaf[tree], self.left[tree], self.right[tree]) for tree in range(len(self.feature))]
        most_leaves = max(len(leaves[0]) for leaves in trees)
        kind = next(kind for kind in (np.uint16, np.uint32, np.uint64) if most_leaves <= np.iinfo(kind).bits)
        shape = (max(1, int((~self.leaf).sum(axis=1).max())), len(trees), 1)
        feature, limit = np.zeros(shape[:2], np.int64), np.full(shape, np.inf)  # padding never answers «right»
        missing_right, left_leaves = np.zeros(shape, np.bool_), np.zeros(shape, kind)
        leaf_values = np.zeros((len(trees), most_leaves))
        for tree, below in enumerate(trees):
            leaf_values[tree, : len(below[0])] = self.value[tree, below[0]]
            splits = [node for node in below if not self.leaf[tree, node]]
            for place, node in enumerate(splits):
                feature[place, tree], limit[place, tree] = self.feature[tree, node], self.limit[tree, node]
                missing_right[place, tree] = not self.missing_left[tree, node]
                left_leaves[place, tree] = sum(1 << below[0].index(leaf) for leaf in below[int(self.left[tree, node])])
        return _Splits(feature, limit, missing_right, left_leaves, kind(1), leaf_values)


@dataclass(frozen=True, slots=True)
class _Splits:
    """The inner nodes of trees, [splits, trees, 1] each, with leaves as bits, the leftmost lowest."""

    feature: npt.NDArray[np.int64]  # [splits, trees]
    limit: Array
    missing_right: npt.NDArray[np.bool_]
    left_leaves: npt.NDArray[Any]  # ruled out if the answer is «right»
    unit: Any
    leaf_values: Array  # [trees, leaves]


def _leaves_below(
    leaf: npt.NDArray[np.bool_], left: npt.NDArray[np.int64], right: npt.NDArray[np.int64]
) -> dict[int, list[int]]:
    """Return the leaves below each node reachable from the root of a tree, from left to right; the root is node 0."""
    below: dict[int, list[int]] = {}

    def visit(node: int) -> list[int]:
        below[node] = []
        below[node] += [node] if leaf[node] else [*visit(int(left[node])), *visit(int(right[node]))]
        return below[node]

    visit(0)
    return below


@dataclass(frozen=True)
class EvidenceView:
    """The learnt model of one view.

    Evidence, alarm limits, probability of a sum of evidence, and likely kinds of fault.
    """

    trees: BoostedTrees
    weights: Array
    offset: float
    limits: dict[str, list[tuple[float, float]]]  # by kind of cohort: (alarms per 100 healthy rounds, limit)
    certainty: dict[str, tuple[Array, Array]]  # by topology: sums of evidence, and the share of them that were right
    kinds: tuple[str, ...]
    kind_weights: Array  # [kinds, features of `linear`]
    kind_offsets: Array
    scored: int

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> EvidenceView:
        """Return the view from its JSON document."""
        limits = {name: [(float(b), float(h)) for b, h in pairs] for name, pairs in document["limits"].items()}
        arrays = {name: np.array(document[name]) for name in ("weights", "kind_weights", "kind_offsets")}
        return cls(
            trees=BoostedTrees.from_json(document["trees"]),
            offset=float(document["offset"]),
            limits=limits,
            certainty={name: (np.array(at), np.array(share)) for name, (at, share) in document["certainty"].items()},
            kinds=tuple(document["kinds"]),
            scored=int(document["scored"]),
            **arrays,
        )

    def evidence(self, feature_rows: Array, linear: Array | None = None) -> Array:
        """Return the log-odds of each client being faulty in this round. `linear`: its `linear_features`, if known."""
        linear = linear_features(feature_rows, self.scored) if linear is None else linear
        return 0.5 * (self.trees(feature_rows) + linear @ self.weights + self.offset)

    def likely(self, feature_rows: Array, linear: Array | None = None) -> Array:
        """Return the log-probability of each kind of fault, [clients, kinds], given that there is a fault."""
        linear = linear_features(feature_rows, self.scored) if linear is None else linear
        raw = linear @ self.kind_weights.T + self.kind_offsets
        raw = raw - raw.max(axis=1, keepdims=True)
        return np.asarray(raw - np.log(np.exp(raw).sum(axis=1, keepdims=True)))

    def limit(self, cohort: str, alarms: float) -> float:
        """Return the sum of evidence at which to accuse, so that healthy runs raise at most `alarms` per 100 rounds."""
        pairs = sorted(self.limits[cohort])
        budgets, limits = np.log([p[0] for p in pairs]), [p[1] for p in pairs]
        return float(np.interp(np.log(max(alarms, 1e-3)), budgets, limits))

    def probability(self, total: float, *, exchanging: bool) -> float:
        """Return the probability of a fault for a sum of evidence. `exchanging`: clients pass models to each other."""
        return float(np.interp(total, *self.certainty["exchanging" if exchanging else "plain"]))


@dataclass(frozen=True)
class EvidenceModel:
    """The three views."""

    views: dict[str, EvidenceView]
    bank: str  # digest of the bank that it was learnt on

    def probability(self, totals: Mapping[str, float], *, exchanging: bool) -> float:
        """Return the probability that a client is faulty, by its sums of evidence: that of the most certain view."""
        chances = (self.views[name].probability(total, exchanging=exchanging) for name, total in totals.items())
        return max(chances, default=0.0)


@functools.cache
def shipped_model() -> EvidenceModel:
    """Return the model shipped in `evidence.json`."""
    text = importlib.resources.files(__package__).joinpath("evidence.json").read_text(encoding="utf-8")
    document = json.loads(text)
    views = {name: EvidenceView.from_json(document["views"][name]) for name in VIEWS}
    return EvidenceModel(views, document["bank"])
