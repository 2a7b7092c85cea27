# SPDX-License-Identifier: Apache-2.0
"""Which clients determined the rounds' lengths: how often, by how much, through which work, and since when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fedvitals.analysis.bottleneck import slowest_kind_of
from fedvitals.analysis.critical_path import CriticalPath, critical_path, without_warm_up
from fedvitals.analysis.timeline import RoundTime, asynchronous
from fedvitals.resources.node_spans import UNACCOUNTED

COSTLY = 0.01  # of all rounds' time: clients that cost less are only named if all are

SLOWER = 1.02  # times the others' median: below it, one of several equal clients just happens to be last


class ClientRound(NamedTuple):
    """A client's part in one round."""

    round: int
    seconds: float  # until it was done; if clients take turns, its own duration
    peers: float  # the others' median
    part: str  # the class of its work in which it was furthest behind them; «unaccounted» for a single client
    determined: bool
    saving: float  # seconds by which the round is shorter without it; 0 unless it determined the round


@dataclass(frozen=True, slots=True)
class Straggler:
    """A client that determined at least one round."""

    node: str
    rounds: int  # in which it took part
    determined: int
    seconds_lost: float  # over all these
    part: str  # the most frequent one in the rounds that it determined
    typical: float  # median of its seconds
    peers: float  # median of the others'
    history: tuple[ClientRound, ...]  # all rounds in which it took part


def stragglers(
    times: Sequence[RoundTime], *, most: int = 20, paths: Sequence[CriticalPath] | None = None
) -> list[Straggler]:
    """Return the clients that cost the most seconds first. `paths` are those of the rounds, if already known.

    A first round that was a warm-up is excluded. The list is empty if nobody is waited for, as in asynchronous
    aggregation. Clients as fast as the others are not in it, though one of several equal clients is always the last.
    """
    if asynchronous(times):
        return []
    paths = [critical_path(time) for time in times] if paths is None else paths
    _, paths = without_warm_up(times, paths)
    lost: dict[str, float] = {}
    for path in paths:
        if path.slowest is not None and path.without is not None:
            lost[path.slowest] = lost.get(path.slowest, 0.0) + max(0.0, path.seconds - path.without)
    worst = [_straggler(node, paths, lost[node]) for node in sorted(lost, key=lambda node: -lost[node])[:most]]
    return [slow for slow in worst if any(t.determined and t.seconds > SLOWER * t.peers for t in slow.history)]


def costly(slow: Sequence[Straggler], times: Sequence[RoundTime]) -> list[Straggler]:
    """Return those that cost at least a hundredth of the rounds' time."""
    least = COSTLY * sum(time.seconds for time in times)
    return [straggler for straggler in slow if straggler.seconds_lost >= least > 0]


def _straggler(node: str, paths: Sequence[CriticalPath], seconds_lost: float) -> Straggler:
    history = [turn for path in paths if (turn := _client_round(node, path)) is not None]
    mine = [turn for turn in history if turn.determined]
    return Straggler(
        node,
        len(history),
        len(mine),
        seconds_lost,
        Counter(turn.part for turn in mine).most_common(1)[0][0],
        float(np.median([turn.seconds for turn in history])),
        float(np.median([turn.peers for turn in history])),
        tuple(history),
    )


def _client_round(node: str, path: CriticalPath) -> ClientRound | None:
    shape = path.shape
    if node not in shape.nodes:
        return None
    place = shape.nodes.index(node)
    ends = shape.ends
    others = np.delete(ends, place)
    determined = path.slowest == node
    saving = max(0.0, path.seconds - path.without) if determined and path.without is not None else 0.0
    part = slowest_kind_of(shape, [node]) or UNACCOUNTED
    peers = float(np.median(others)) if len(others) else float(ends[place])
    return ClientRound(path.round, float(ends[place]), peers, part, determined, saving)
