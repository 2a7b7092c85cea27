# SPDX-License-Identifier: Apache-2.0
"""Tells which norms are not finite. Kernels add up the finite values alone, so the norm of NaNs is stored as 0.

Shown as 0 it would be the opposite of what happened; every view that draws or lists a norm asks here first.
"""

from __future__ import annotations

from collections.abc import Mapping

from fedvitals.diagnosis.cases import MODEL_LOST
from fedvitals.store.read.metrics import rounds_above_zero
from fedvitals.store.read.queries import newest_finding_of
from fedvitals.store.read.reader import Reader

# Norm → the count of NaN and Inf among the values that it is of.
COUNTS = {
    "gradient.norm": "gradient.nonfinite",
    "gradient.norm_max": "gradient.nonfinite",
    "gradient.norm_last": "gradient.nonfinite",
    "weight.norm": "weight.nonfinite",
    "weight.drift": "weight.nonfinite",
    "update.norm": "update.nonfinite",
}
NONE: Mapping[str, set[int]] = {}


def rounds_not_finite(reader: Reader, run: str, name: str) -> Mapping[str, set[int]]:
    """Return the rounds in which each node's metric is the norm of values some of which are NaN or infinite.

    Only a run with a finding of NaN is searched: counting is a walk over all of a metric's values.
    """
    counted = COUNTS.get(name)
    if counted is None or newest_finding_of(reader, run, MODEL_LOST) is None:
        return NONE
    return rounds_above_zero(reader, run, counted)
