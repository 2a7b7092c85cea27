# SPDX-License-Identifier: Apache-2.0
"""The learnt models that turn scores into evidence: log-odds of a client being faulty in a round.

Each is the mean of a linear model and of boosted trees, learnt on the fault bank's tuning set by
`fedvitals_studies.faultbank.fit` and stored as plain numbers in `evidence.json`. There are three: «telemetry» also
believes what clients report, «server» uses only what they sent, and «flip» is learnt on flipped classes alone.
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
MOST_COUNTED = 20  # participations, above which more of them tell nothing new


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
    """Return the features as the linear model takes them: clipped scores, their magnitudes, and the rest; unknown
    becomes 0.

    `scored`: the number of leading columns that are scores.
    """
    scores = np.clip(np.nan_to_num(feature_rows[:, :scored]) / 3, -2.5, 2.5)
    rest = np.clip(np.nan_to_num(feature_rows[:, scored:]), -5, 5)
    return np.concatenate([scores, np.abs(scores), rest], axis=1)


@dataclass(frozen=True)
class BoostedTrees:
    """Boosted trees as arrays, [trees, nodes] each: feature, threshold, children and leaf values."""

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
        """Return the sum of all trees for each row of features."""
        trees = np.arange(len(self.feature))[None]
        tree_node = np.zeros((len(feature_rows), len(self.feature)), dtype=np.int64)
        rows = np.arange(len(feature_rows))[:, None]
        while not self.leaf[trees, tree_node].all():
            values = feature_rows[rows, self.feature[trees, tree_node]]
            goes_left = np.where(
                np.isnan(values), self.missing_left[trees, tree_node], values <= self.limit[trees, tree_node]
            )
            further = np.where(goes_left, self.left[trees, tree_node], self.right[trees, tree_node])
            tree_node = np.where(self.leaf[trees, tree_node], tree_node, further)
        return np.asarray(self.value[trees, tree_node].sum(axis=1) + self.baseline)


@dataclass(frozen=True)
class EvidenceView:
    """The learnt model of one view: evidence, alarm limits, probability of a sum of evidence, and likely kinds of
    fault.
    """

    trees: BoostedTrees
    weights: Array
    offset: float
    limits: dict[str, list[tuple[float, float]]]  # by kind of cohort: (alarms per 100 healthy rounds, limit)
    certainty: tuple[Array, Array]  # sums of evidence, and the share of them that were right
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
            certainty=_certainty(document),
            kinds=tuple(document["kinds"]),
            scored=int(document["scored"]),
            **arrays,
        )

    def evidence(self, feature_rows: Array) -> Array:
        """Return the log-odds of each client being faulty in this round."""
        return 0.5 * (
            self.trees(feature_rows) + linear_features(feature_rows, self.scored) @ self.weights + self.offset
        )

    def likely(self, feature_rows: Array) -> Array:
        """Return the log-probability of each kind of fault, [clients, kinds], given that there is a fault."""
        raw = linear_features(feature_rows, self.scored) @ self.kind_weights.T + self.kind_offsets
        raw = raw - raw.max(axis=1, keepdims=True)
        return np.asarray(raw - np.log(np.exp(raw).sum(axis=1, keepdims=True)))

    def limit(self, cohort: str, alarms: float) -> float:
        """Return the sum of evidence from which to accuse, so that healthy runs raise at most `alarms` per 100
        rounds.
        """
        pairs = sorted(self.limits[cohort])
        budgets, limits = np.log([p[0] for p in pairs]), [p[1] for p in pairs]
        return float(np.interp(np.log(max(alarms, 1e-3)), budgets, limits))

    def probability(self, total: Array) -> Array:
        """Return the probability of a fault for each sum of evidence."""
        return np.asarray(np.interp(total, *self.certainty))


@dataclass(frozen=True)
class EvidenceModel:
    """The three views, and the calibration of their combined probability."""

    views: dict[str, EvidenceView]
    certainty: tuple[Array, Array]  # the surest view's probability, and the share of such clients that were faulty
    bank: str  # digest of the bank it was learnt on

    def probability(self, totals: Mapping[str, float]) -> float:
        """Return the probability that a client is faulty, by its sums of evidence; calibrated, as the surest of
        three views is overconfident.
        """
        surest = max((float(self.views[name].probability(np.array([t]))[0]) for name, t in totals.items()), default=0.0)
        return float(np.interp(surest, *self.certainty))


@functools.cache
def shipped_model() -> EvidenceModel:
    """Return the model that is shipped in `evidence.json`."""
    text = importlib.resources.files(__package__).joinpath("evidence.json").read_text(encoding="utf-8")
    document = json.loads(text)
    views = {name: EvidenceView.from_json(document["views"][name]) for name in VIEWS}
    return EvidenceModel(views, _certainty(document), document["bank"])


def _certainty(document: dict[str, Any]) -> tuple[Array, Array]:
    before, after = document["certainty"]
    return np.array(before), np.array(after)
