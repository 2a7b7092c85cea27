# SPDX-License-Identifier: Apache-2.0
"""Whether the clients of a round train such different classes that comparing their updates says nothing about faults.

Where most clients have one class each, those that share it send nearly the same, and those that do not pull apart: one
without a partner, or a pair among single ones, is as unlike its peers as an attacker is. Both signs are medians of what
the server sees, so that a minority of clients cannot bring them about.
"""

from __future__ import annotations

import math
from statistics import median

from fedvitals.diagnosis.evidence.equal_updates import peer_statistic
from fedvitals.diagnosis.evidence.label_counts import label_counts
from fedvitals.diagnosis.evidence.vital_signs import head_index
from fedvitals.diagnosis.history_cutoff import shared
from fedvitals.protocols import History

# Effective number of the head's rows that an update moves: 1.2 to 2.3 if it is trained on one of 43 to 4 classes, 4.4
# on two of ten. In 95 % of the rounds of `tune-wide` and `healthy-tune` with Dirichlet 0.1, the most skewed labels that
# the evidence was learnt on, the median client's is 3.9 or more.
FEWEST_MOVED, FEWEST_SHARE = 3.5, 0.6  # and as a share of all rows
# Most clients have a near twin, and yet the usual client has no direction in common with all others.
TWINS, APART = 0.8, 0.3


@shared
def trains_different_classes(history: History, round_index: int) -> bool:
    """Return whether most clients of a round train hardly more than one class, or are twins among strangers."""
    statistics = (peer_statistic(history, round_index, name) for name in ("class_entropy", "nearest", "cosine"))
    entropy, nearest, cosine = (median(values.values()) if values else math.nan for values in statistics)
    classes = _classes(history, round_index)
    few = classes > 1 and entropy * math.log(classes) < math.log(min(FEWEST_MOVED, FEWEST_SHARE * classes))
    return few or (nearest > TWINS and cosine < APART)


def _classes(history: History, round_index: int) -> float:
    """Return the number of the head's outputs: the length of its bias, else the number of labels reported."""
    layers = history.layers("update")
    bias = head_index(layers) + 1
    nodes, counts = history.across("update", ("count",), round_index)
    if nodes and bias < len(layers) and "bias" in layers[bias]:
        return float(median(counts[:, bias, 0].tolist()))
    return label_counts(history, round_index).classes
