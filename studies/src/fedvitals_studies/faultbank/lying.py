# SPDX-License-Identifier: Apache-2.0
"""A recording in which some clients lie: what they report of themselves is what everybody reports.

It needs no training, since only the reports change. What the server computes from the updates that it holds stays as it
is. The lie is consistent with what was sent, since a client knows the size of its update and its own count. It is still
a naive lie, by a client that knows what is usual: no update or report is shaped against the detectors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from fedvitals.protocols import Node
from fedvitals_studies.faultbank.recording import ABSENT, Recording, Small, rounded

CLAIMED = "update.samples"  # the client's weight in the aggregation
# The size of the update, and how far training moved, as reported by the client
SENT, MOVED = "update.norm", "weight.drift"
# Comparisons of what was sent with what the client says it trained
COMPARED = ("update.differs", "update.factor", "update.base_age")
COUNTED = "samples"  # the number of samples that the client says it trained on


def from_update(name: str) -> bool:
    """Whether the server computes it from the update itself; for metrics and families."""
    return name.partition(".")[0] == "update"


def lying(recording: Recording, liars: Mapping[Node, int]) -> Recording:
    """Return the run with the liars' own reports replaced, from a round on, by the median over the other clients.

    Their sample count is the one that they claim, for consistency. What they did not report stays unreported; they do
    not report their labels.
    """
    never = max(recording.numbers, default=0) + 1
    since = np.array([liars.get(name, never) for name in recording.names])
    guilty = np.array(recording.numbers)[:, None] >= since[None]
    heard = {name: table for name, table in recording.metrics.items() if name not in COMPARED}
    metrics = {name: table if from_update(name) else _usual(table, guilty) for name, table in heard.items()}
    if COUNTED in metrics and CLAIMED in metrics:
        claimed = guilty & (metrics[COUNTED] != ABSENT) & (metrics[CLAIMED] != ABSENT)
        metrics[COUNTED] = np.where(claimed, metrics[CLAIMED], metrics[COUNTED])
    if MOVED in metrics and SENT in metrics:  # otherwise its own reports would reveal it
        known = guilty & (metrics[MOVED] != ABSENT) & (metrics[SENT] != ABSENT)
        metrics[MOVED] = np.where(known, metrics[SENT], metrics[MOVED])
    families = {
        name: block if from_update(name) else _usual(block, guilty) for name, block in recording.families.items()
    }
    told = [e for e in recording.told if e.name not in ("labels", "data") or e.where.node not in liars]
    return replace(recording, metrics=metrics, families=families, told=told)


def _usual(table: Small, guilty: npt.NDArray[np.bool_]) -> Small:
    """Return [rounds, nodes, ...] with the guilty ones' values replaced by the median of the others' finite ones."""
    told = np.where((table == ABSENT) | ~np.isfinite(table), np.nan, table)
    told = np.where(guilty.reshape(*guilty.shape, *(1,) * (table.ndim - 2)), np.nan, told)
    middle = np.full((len(table), 1, *table.shape[2:]), np.nan)
    known = ~np.isnan(told).all(axis=1)
    ordered = np.moveaxis(told, 1, -1)
    middle[:, 0][known] = np.nanmedian(ordered[known], axis=-1)
    # No other client has reported it: there is nothing to imitate, and the client leaves it out.
    lie = np.where(np.isnan(middle), ABSENT, rounded(middle))
    struck = guilty.reshape(*guilty.shape, *(1,) * (table.ndim - 2)) & (table != ABSENT)
    return np.where(struck, lie, table).astype(np.float32)
