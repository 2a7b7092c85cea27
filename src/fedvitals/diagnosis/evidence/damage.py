# SPDX-License-Identifier: Apache-2.0
"""The effect of a faulty client on the global model. A finding is only critical if it is certain and the model is being
lost.
"""

from __future__ import annotations

import math

from fedvitals.diagnosis.evidence.attendance import SERVER
from fedvitals.diagnosis.history_cutoff import shared
from fedvitals.protocols import History, Node

DECIDES = 0.5  # share of the sizes of all weighted updates, above which one client decides the direction of the model


@shared
def deciding_client(history: History, round_index: int) -> Node | None:
    """Return the client whose update, times its number of samples, is larger than all the others' together.

    None if there is none, or if fewer than three updates were seen.
    """
    norms = history.latest("update.norm", round_index)
    samples = history.latest("update.samples", round_index)
    weights = {n: norm * samples.get(n, 1.0 if not samples else 0.0) for n, norm in norms.items()}
    weights = {node: weight for node, weight in weights.items() if 0 <= weight < math.inf}
    largest = max(weights, key=lambda node: weights[node], default=None)
    if largest is None or len(weights) < 3 or not weights[largest] > DECIDES * sum(weights.values()):
        return None
    return largest


def model_stayed_finite(history: History, round_index: int) -> bool:
    """Return whether the global model is known to have no NaN or infinity after a round."""
    counts = history.latest("weight.nonfinite", round_index)
    return SERVER in counts and not counts[SERVER]
