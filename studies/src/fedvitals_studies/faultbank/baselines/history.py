# SPDX-License-Identifier: Apache-2.0
"""Baselines that need what detectors see, and nothing more: what tutorials, SageMaker Debugger and a z-score would say.

Implemented here, to be compared with on the same cases. Each is a function of a history and a round, that names the
issue and the client (None: the run as a whole).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from fedvitals.diagnosis.detectors.plain_rules import PlainRuleLimits, crossed_limits
from fedvitals.protocols import History, Node
from fedvitals_studies.faultbank.baselines.sagemaker import Accusation, sagemaker_rules

Baseline = Callable[[History, int], Sequence[Accusation]]

CUT = 3.5  # Iglewicz and Hoaglin's, as textbooks have it
FEWEST = 3  # clients, under which there is no median to speak of
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
    """The limits that tutorials teach, as the plain rules have them by default."""
    return [Accusation(found.issue, found.node) for found in crossed_limits(history, round_index, PlainRuleLimits())]


def cohort_scores(history: History, round_index: int) -> dict[Node, float]:
    """Each client's largest modified z-score over the vital signs: 0.6745 · |x − median| / MAD.

    A vital sign that more than half of the clients have alike (MAD = 0) says nothing. NaN and Inf are left out.
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
    """Whoever is past 3.5 in any vital sign of the round."""
    scores = cohort_scores(history, round_index)
    worst_first = sorted(scores, key=lambda node: -scores[node])
    return [Accusation("UNUSUAL_CLIENT", node) for node in worst_first if scores[node] > CUT]


BY_HISTORY: Mapping[str, Baseline] = {
    "fixed thresholds": fixed_thresholds,
    "sagemaker-like": sagemaker_rules,
    "cohort z-score": cohort_zscore,
}
