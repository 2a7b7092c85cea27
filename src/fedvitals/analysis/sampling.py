# SPDX-License-Identifier: Apache-2.0
"""Random cohorts of recorded clients with their recorded times, for what-if questions."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np

from fedvitals.analysis.round_shape import RoundShape, Seconds

DRAWS = 400  # of a cohort: the mean's standard error is a twentieth of the spread
CELLS = 2_000_000  # draws times clients, at most: 16 MB
LANDINGS = 20_000  # of clients, simulated for an asynchronous run: half a second
REPEATS = 10  # of a short simulation
CLIENTS = 500  # simulated at a time; with more, this many represent all


def expected_longest(each: Seconds, count: int) -> float:
    """Return the exact mean of the largest of `count` values drawn without replacement.

    Σ_j x_(j) · C(j−1, count−1) / C(n, count) over the values in order.
    """
    ordered = np.sort(each)
    n = len(ordered)
    count = min(max(count, 1), n)
    whole = _log_choose(n, count)
    chances = [math.exp(_log_choose(j - 1, count - 1) - whole) for j in range(count, n + 1)]
    return float(np.dot(ordered[count - 1 :], chances))


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


class ClientPool:
    """All recorded clients with their times, each equally likely. The same seed draws the same cohorts.

    Times exclude the wait for the server to send to others, which depends on who else is asked.
    """

    def __init__(self, shapes: Sequence[RoundShape], seed: int) -> None:
        times: dict[str, list[float]] = {}
        for shape in shapes:
            for node, seconds in zip(shape.nodes, (shape.ends - shape.line).tolist(), strict=True):
                times.setdefault(node, []).append(seconds)
        self.nodes = tuple(times)
        self.times = [np.array(own) for own in times.values()]
        self.cohort = int(np.median([len(shape.nodes) for shape in shapes]))
        self.sending = float(np.median([shape.line.max() / max(1, len(shape.nodes) - 1) for shape in shapes]))
        self.seed = seed

    def mean_time_of_nth(self, needed: int, asked: int) -> float:
        """Return the mean time until `needed` of `asked` clients are done."""
        chance = np.random.default_rng([self.seed, needed, asked])
        clients = len(self.nodes)
        draws = max(20, min(DRAWS, CELLS // clients))
        # As `chance.choice` does it, but three times as fast. [draws, clients]
        drawn = np.stack([own[chance.integers(len(own), size=draws)] for own in self.times], axis=1)
        drawn = chance.permuted(drawn, axis=1)[:, :asked]
        drawn = drawn + self.sending * np.arange(drawn.shape[1])
        needed = min(needed, drawn.shape[1])
        return float(np.partition(drawn, needed - 1, axis=1)[:, needed - 1].mean())


def buffered_round_seconds(pool: ClientPool, buffer: int, aggregations: int, pause: float) -> float:
    """Return an asynchronous server's mean seconds between two aggregations, over `aggregations` from the start.

    As many clients train at a time as a round has. When one finishes, a random one that is neither training nor in the
    buffer starts. `pause` is the server's time for an aggregation.
    """
    share = min(1.0, CLIENTS / pool.cohort)
    places, most = max(1, round(pool.cohort * share)), max(1, round(buffer * share))
    chance = np.random.default_rng(pool.seed)
    repeats = max(1, min(REPEATS, LANDINGS // max(1, aggregations * most)))
    means = []
    for _ in range(repeats):
        chosen = chance.permutation(len(pool.nodes))[: max(places, round(len(pool.nodes) * share))]
        times = [pool.times[i] for i in chosen]
        followed = min(aggregations, max(1, LANDINGS // most))
        means.append(_simulate(times, places, most, followed, pause, chance) / followed)
    return max(float(np.mean(means)), buffer * pool.sending)


def _simulate(
    times: Sequence[Seconds], places: int, most: int, aggregations: int, pause: float, chance: np.random.Generator
) -> float:
    """Return the time at which the last of the aggregations is over."""
    drawn_from = [own.tolist() for own in times]
    under_way: list[tuple[float, int]] = []
    busy: set[int] = set()
    clock = 0.0
    for _ in range(aggregations):
        order = chance.permutation(len(times)).tolist()
        landed: set[int] = set()
        while len(landed) < most:
            while order and len(under_way) < places:
                client = order.pop()
                if client not in busy and client not in landed:
                    own = drawn_from[client]  # as `chance.choice` does it, but ten times as fast
                    heapq.heappush(under_way, (clock + own[chance.integers(len(own))], client))
                    busy.add(client)
            if not under_way:
                break
            clock, client = heapq.heappop(under_way)
            busy.discard(client)
            landed.add(client)
        clock += pause
    return clock
