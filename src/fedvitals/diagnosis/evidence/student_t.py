# SPDX-License-Identifier: Apache-2.0
"""Student's t as a normal score, without scipy: an approximation that is monotone and good to a few hundredths."""

from __future__ import annotations

import numpy as np

from fedvitals.stats import Array


def normal_scores(t: Array, freedom: int) -> Array:
    """Return the normal score with the same tail probability as `t` with this many degrees of freedom.

    Wallace's approximation (1959): z = ±√(f · ln(1 + t²/f)) · (8f + 1) / (8f + 3). The error is below 0.05 up to a
    score of 4 from three degrees of freedom on; a test compares it with numerical integration.
    """
    size = np.sqrt(freedom * np.log1p(t**2 / freedom)) * (8 * freedom + 1) / (8 * freedom + 3)
    return np.asarray(np.sign(t) * size)
