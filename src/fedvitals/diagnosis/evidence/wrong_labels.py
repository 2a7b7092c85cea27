# SPDX-License-Identifier: Apache-2.0
"""Tell wrong labels from faults of the inputs, by how many of a client's samples the received model gets right.

A model that is wrong about noisy inputs still gets as many right as a blind guess does. A model that is right about the
inputs agrees with wrong labels less often than that.
"""

from __future__ import annotations

import numpy as np

LEAST_NOISE = 0.3  # share of wrong labels, from which on they are compared
_STEPS = 400


def wrong_label_odds(right: float, total: float, usual: float, chance: float) -> float:
    """Return how much likelier it is under wrong labels than under a fault of the inputs that `right` of `total`
    samples are classified right.

    `usual`: the accuracy on the peers' samples. `chance`: that of a blind guess. Under wrong labels, of an unknown
    share from `LEAST_NOISE` to 1, the accuracy is that share below the usual one; under a fault of the inputs it lies
    anywhere between chance and usual. 1 where nothing is known.
    """
    if total <= 0 or not 0 < chance < usual * (1 - LEAST_NOISE):
        return 1.0
    labels = np.linspace(0.005, usual * (1 - LEAST_NOISE), _STEPS)
    inputs = np.linspace(chance, usual, _STEPS)
    first, second = (right * np.log(p) + (total - right) * np.log1p(-np.minimum(p, 0.999)) for p in (labels, inputs))
    largest = max(first.max(), second.max())
    return float(np.exp(first - largest).mean() / max(np.exp(second - largest).mean(), 1e-12))
