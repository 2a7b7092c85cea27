# SPDX-License-Identifier: Apache-2.0
"""Detectors for runs whose updates are transformed on the way: problems that remain visible (see `abstentions`).

Lossy compression changes every update a little, and all in about the same proportion. An update that is many times as
large as the others', and larger than its own training explains, was multiplied separately.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fedvitals.diagnosis.evidence.damage import deciding_client
from fedvitals.diagnosis.evidence.transformed_updates import FEWEST_CLIENTS, transformation
from fedvitals.diagnosis.finding import Number, finding
from fedvitals.protocols import Detector, History
from fedvitals.records import Finding, Suspect

OVERSIZED = 5.0  # times the median client's update, and times what the client's own training explains
OVERSIZED_UNTOLD = 30.0  # times the median client's, if a client reports nothing about its training


def oversized_updates(history: History, round_index: int) -> Iterator[Finding]:
    """BYZANTINE, in transformed runs only: an update far larger than the others' and than its training explains.

    In other runs, the comparison with training and the learnt evidence detect it. The ratio of the received to the
    trained update is compared with the median client's, because compression changes everyone's.
    """
    norms = {n: v for n, v in history.latest("update.norm", round_index).items() if 0 < v < np.inf}
    usual = float(np.median([*norms.values()])) if len(norms) >= FEWEST_CLIENTS else np.inf
    large = [node for node, norm in norms.items() if norm > OVERSIZED * usual]
    if not large or transformation(history, round_index) is None:
        return
    drift = history.latest("weight.drift", round_index)
    proportions = {node: norm / drift[node] for node, norm in norms.items() if 0 < drift.get(node, 0.0) < np.inf}
    usual_proportion = float(np.median([*proportions.values()])) if proportions else np.nan
    for node in large:
        if node in proportions:
            multiplied = proportions[node] > OVERSIZED * usual_proportion
        else:
            multiplied = norms[node] > OVERSIZED_UNTOLD * usual
        if multiplied:
            times = norms[node] / usual
            yield finding(
                "BYZANTINE",
                round_index,
                f"The update of {node} is {times:.3g} times as large as the median client's, and its own training does "
                "not explain that.",
                confidence=0.99,
                node=node,
                severity="critical" if node == deciding_client(history, round_index) else "warning",
                numbers=[
                    Number("update.norm", norms[node], usual),
                    Number("received against trained", proportions.get(node, np.nan), usual_proportion),
                ],
                suspects=[Suspect(node, 0.99, "a scaled update")],
            )


DETECTORS: tuple[Detector, ...] = (oversized_updates,)
