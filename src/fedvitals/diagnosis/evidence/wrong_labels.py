# SPDX-License-Identifier: Apache-2.0
"""Distinguish wrong labels from faulty inputs, by how many of a client's samples the received model gets right.

On noisy inputs, a model is still right at least as often as a blind guess. A model that is right about the inputs
agrees with wrong labels less often than that.
"""

from __future__ import annotations

import numpy as np

LEAST_NOISE = 0.3  # share of wrong labels from which they are considered
_STEPS = 400


def wrong_label_odds(right: float, total: float, usual: float, chance: float) -> float:
    """Return how much likelier `right` of `total` correct samples are under wrong labels than under faulty inputs.

    `usual`: the accuracy on the peers' samples. `chance`: that of a blind guess. Under wrong labels, of an unknown
    share from `LEAST_NOISE` to 1, the accuracy is lower than usual by that share; under a fault of the inputs it lies
    anywhere between chance and usual. Returns 1 if nothing is known.
    """
    if total <= 0 or not 0 < chance < usual * (1 - LEAST_NOISE):
        return 1.0
    labels = np.linspace(0.005, usual * (1 - LEAST_NOISE), _STEPS)
    inputs = np.linspace(chance, usual, _STEPS)
    first, second = (right * np.log(p) + (total - right) * np.log1p(-np.minimum(p, 0.999)) for p in (labels, inputs))
    largest = max(first.max(), second.max())
    return float(np.exp(first - largest).mean() / max(np.exp(second - largest).mean(), 1e-12))
