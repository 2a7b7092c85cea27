# SPDX-License-Identifier: Apache-2.0
"""The time budget of a probe that runs once per client-round: a share of the training time, with clients taking turns.

Each client-round earns `percent` of its training time and spends what the probe cost. If one measurement costs more
than a round earns (a tiny model, a short round), the probe waits until the allowance covers it, and then measures the
client that was measured least often.
"""

from __future__ import annotations


class Allowance:
    """A time budget: `due` asks whether to measure, `settle` records costs. With None for percent every client-round
    is due.
    """

    def __init__(self, percent: float | None) -> None:
        self.percent = percent
        self._saved = self._expected = 0.0
        self._warm = False
        self._times: dict[str | None, int] = {}  # how often each client was looked at

    def due(self, node: str | None) -> bool:
        """Return whether to measure this client now; if so, it counts as measured."""
        times = self._times.setdefault(node, 0)
        if self.percent is not None:
            turn = times * len(self._times) <= sum(self._times.values())
            if self._saved < self._expected or not turn:
                return False
        self._times[node] += 1
        return True

    def earned(self, training: float) -> float:
        """Return the seconds that a client-round's training earns."""
        return 0.0 if self.percent is None else training * self.percent / 100

    def settle(self, cost: float, training: float) -> float:
        """Record a client-round: the probe's cost (0 if it did not run) and the training time; returns the cost that
        counts.

        The first measurement of a process includes its set-up; counting it would silence the probe for many rounds.
        """
        if cost and not self._warm:
            self._warm, cost = True, 0.0
        if cost:
            self._expected = cost
        earned = self.earned(training)
        self._saved = min(self._saved + earned - cost, max(self._expected, earned))
        return cost
