# SPDX-License-Identifier: Apache-2.0
"""A recording in which some clients lie: what they tell of themselves is what everybody tells.

No training is needed for it, since nothing of it changes: only what is heard. What the server computes from the updates
that it holds stays as it is. The lie fits what was sent, since a client knows the size of its update and its own count.
It is still a naive one, of a client that knows what is usual: nobody has shaped an update or a report against us.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from fedvitals.protocols import Node
from fedvitals_studies.faultbank.recording import ABSENT, Recording, Small, rounded

CLAIMED = "update.samples"  # what the aggregation weighs the client by
SENT, MOVED = "update.norm", "weight.drift"  # how far the update goes, and how far training went, by its own word
COMPARED = ("update.differs", "update.factor", "update.base_age")  # what was sent with what the client says it trained
COUNTED = "samples"  # what the client says that it has trained on


def from_update(name: str) -> bool:
    """Whether the server has it from the update itself; of metrics and of families."""
    return name.partition(".")[0] == "update"


def lying(recording: Recording, liars: Mapping[Node, int]) -> Recording:
    """The same run with the liars' own words replaced, from a round on: by the round's median over the other clients.

    Their sample count is the one that they claim, so that it fits. Where they said nothing, they go on saying nothing;
    which labels they have they keep to themselves.
    """
    never = max(recording.numbers, default=0) + 1
    since = np.array([liars.get(name, never) for name in recording.names])
    guilty = np.array(recording.numbers)[:, None] >= since[None]
    heard = {name: table for name, table in recording.metrics.items() if name not in COMPARED}
    metrics = {name: table if from_update(name) else _usual(table, guilty) for name, table in heard.items()}
    if COUNTED in metrics and CLAIMED in metrics:
        claimed = guilty & (metrics[COUNTED] != ABSENT) & (metrics[CLAIMED] != ABSENT)
        metrics[COUNTED] = np.where(claimed, metrics[CLAIMED], metrics[COUNTED])
    if MOVED in metrics and SENT in metrics:  # or it would be caught by its own words
        known = guilty & (metrics[MOVED] != ABSENT) & (metrics[SENT] != ABSENT)
        metrics[MOVED] = np.where(known, metrics[SENT], metrics[MOVED])
    families = {
        name: block if from_update(name) else _usual(block, guilty) for name, block in recording.families.items()
    }
    told = [e for e in recording.told if e.name not in ("labels", "data") or e.where.node not in liars]
    return replace(recording, metrics=metrics, families=families, told=told)


def _usual(table: Small, guilty: npt.NDArray[np.bool_]) -> Small:
    """[rounds, nodes, ...] with the guilty ones' values replaced by the median of the others' finite ones."""
    told = np.where((table == ABSENT) | ~np.isfinite(table), np.nan, table)
    told = np.where(guilty.reshape(*guilty.shape, *(1,) * (table.ndim - 2)), np.nan, told)
    middle = np.full((len(table), 1, *table.shape[2:]), np.nan)
    known = ~np.isnan(told).all(axis=1)
    ordered = np.moveaxis(told, 1, -1)
    middle[:, 0][known] = np.nanmedian(ordered[known], axis=-1)
    # Nobody else has said it: there is nothing to hide behind, and the client leaves it out.
    lie = np.where(np.isnan(middle), ABSENT, rounded(middle))
    struck = guilty.reshape(*guilty.shape, *(1,) * (table.ndim - 2)) & (table != ABSENT)
    return np.where(struck, lie, table).astype(np.float32)
