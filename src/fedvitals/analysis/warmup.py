# SPDX-License-Identifier: Apache-2.0
"""Detect a first round that took long because everything started in it: imports, workers, caches.

It happens once and says nothing about the rounds that follow: they are judged without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from fedvitals.analysis.critical_path import CriticalPath
from fedvitals.analysis.timeline import WAITING, RoundTime
from fedvitals.resources.node_spans import UNACCOUNTED

FEWEST = 3  # rounds: of two, nobody says which one is usual
LONGER = 1.5  # times the others' median
BEGINNING = ("compute", "data loading", WAITING, UNACCOUNTED)  # what is slow at first; a slow link stays slow


class WarmUp(NamedTuple):
    """A warm-up round and the seconds that it took beyond the others' median."""

    round: int
    seconds: float
    extra: float  # beyond the others' median


def warm_up(times: Sequence[RoundTime], paths: Sequence[CriticalPath]) -> WarmUp | None:
    """Return the first round if it was a warm-up, else None; never on the virtual clock, where nothing has to be
    started.
    """
    timed = [(time, path) for time, path in zip(times, paths, strict=True) if time.seconds > 0]
    if len(timed) < FEWEST or timed[0][0].clock == "virtual":
        return None
    (first, path), *others = timed
    extra = first.seconds - median(time.seconds for time, _ in others)
    if first.seconds <= LONGER * (first.seconds - extra):
        return None
    usual = {
        kind: median(path_of_other.shares.get(kind, 0.0) * path_of_other.seconds for _, path_of_other in others)
        for kind in path.shares
    }
    beginning = sum(path.shares[kind] * path.seconds - usual[kind] for kind in path.shares if kind in BEGINNING)
    return WarmUp(first.round, first.seconds, extra) if beginning > 0.5 * extra else None


def without_warm_up(
    times: Sequence[RoundTime], paths: Sequence[CriticalPath]
) -> tuple[list[RoundTime], list[CriticalPath]]:
    """Return the rounds and their paths without a warm-up."""
    first = warm_up(times, paths)
    kept = [(t, p) for t, p in zip(times, paths, strict=True) if first is None or t.round != first.round]
    return [time for time, _ in kept], [path for _, path in kept]
