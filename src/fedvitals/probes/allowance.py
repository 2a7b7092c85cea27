# SPDX-License-Identifier: Apache-2.0
"""What a probe that runs once per client-round may cost: a share of the training time, in turns.

Each client-round earns `percent` of its training time and spends what the probe cost. When one measurement costs more
than a round earns (a tiny model, a short round), clients take turns: the probe waits until the allowance covers it, and
then looks at whoever was looked at least.
"""

from __future__ import annotations


class Allowance:
    """`due` asks, `settle` books. With None for percent every client-round is due."""

    def __init__(self, percent: float | None) -> None:
        self.percent = percent
        self._saved = self._expected = 0.0
        self._warm = False
        self._times: dict[str | None, int] = {}  # how often each client was looked at

    def due(self, node: str | None) -> bool:
        """Whether to measure this client now; if so, it counts as looked at."""
        times = self._times.setdefault(node, 0)
        if self.percent is not None:
            turn = times * len(self._times) <= sum(self._times.values())
            if self._saved < self._expected or not turn:
                return False
        self._times[node] += 1
        return True

    def earned(self, training: float) -> float:
        return 0.0 if self.percent is None else training * self.percent / 100

    def settle(self, cost: float, training: float) -> float:
        """Book a client-round: what the probe cost (0: left out) and how long the training took; the cost that counts.

        The first measurement of a process pays for its set-up; booking it would silence the probe for many rounds.
        """
        if cost and not self._warm:
            self._warm, cost = True, 0.0
        if cost:
            self._expected = cost
        earned = self.earned(training)
        self._saved = min(self._saved + earned - cost, max(self._expected, earned))
        return cost
