# SPDX-License-Identifier: Apache-2.0
"""Baselines that only need what detectors see: the rules of tutorials and SageMaker Debugger, and a z-score.

Implemented here, for comparison on the same cases. Each is a function of a history and a round that names the issue and
the client (None: the run as a whole).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from fedvitals.diagnosis.detectors.plain_rules import PlainRuleLimits, crossed_limits
from fedvitals.protocols import History, Node
from fedvitals_studies.faultbank.baselines.sagemaker import Accusation, sagemaker_rules

Baseline = Callable[[History, int], Sequence[Accusation]]

CUT = 3.5  # Iglewicz and Hoaglin's, as textbooks have it
FEWEST = 3  # clients, below which a median is meaningless
VITALS = (
    "update.norm",
    "update.cosine_mean",
    "update.cosine_previous",
    "fit.loss_before",
    "fit.loss_after",
    "fit.accuracy_after",
    "fit.loss_p90",
    "gradient.norm",
    "gradient.norm_max",
    "samples",
)


def fixed_thresholds(history: History, round_index: int) -> list[Accusation]:
    """Return the accusations by the limits in tutorials, which are the plain rules' defaults."""
    return [Accusation(found.issue, found.node) for found in crossed_limits(history, round_index, PlainRuleLimits())]


def cohort_scores(history: History, round_index: int) -> dict[Node, float]:
    """Return each client's largest modified z-score over the vital signs: 0.6745 · |x − median| / MAD.

    A vital sign that is equal for more than half of the clients (MAD = 0) is ignored. NaN and Inf are excluded.
    """
    worst: dict[Node, float] = {}
    for vital in VITALS:
        found = {node: value for node, value in history.latest(vital, round_index).items() if np.isfinite(value)}
        if len(found) < FEWEST:
            continue
        values = np.array([*found.values()])
        distance = np.abs(values - np.median(values))
        spread = float(np.median(distance))
        if spread > 0:
            for node, score in zip(found, 0.6745 * distance / spread, strict=True):
                worst[node] = max(worst.get(node, 0.0), float(score))
    return worst


def cohort_zscore(history: History, round_index: int) -> list[Accusation]:
    """Return the clients beyond 3.5 in any vital sign of the round."""
    scores = cohort_scores(history, round_index)
    worst_first = sorted(scores, key=lambda node: -scores[node])
    return [Accusation("UNUSUAL_CLIENT", node) for node in worst_first if scores[node] > CUT]


BY_HISTORY: Mapping[str, Baseline] = {
    "fixed thresholds": fixed_thresholds,
    "sagemaker-like": sagemaker_rules,
    "cohort z-score": cohort_zscore,
}
