# SPDX-License-Identifier: Apache-2.0
"""The spread of a metric over the clients of a round, for exporters where a curve for each client would be too much."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from fedvitals.records import Metric, Record, Run, is_client

SERVER = "server"
POINTS = {"min": 0.0, "p5": 0.05, "median": 0.5, "p95": 0.95, "max": 1.0}

# Nodes and names come from other machines: beyond these limits they are counted, not kept.
CLIENTS_KEPT, NAMES_KEPT, ROUNDS_KEPT = 10_000, 300, 2
NAME_CHARACTERS = 100  # of one name
ONCE_A_ROUND = "gradient."  # metrics whose `step` is where in the round their single value was measured


def all_but(*kinds: type) -> tuple[type, ...]:
    """Return the types of records that a sink for these types ignores; every sink receives runs."""
    return tuple(kind for kind in get_args(Record) if kind is not Run and kind not in kinds)


def of_the_round(metric: Metric) -> bool:
    """Whether a metric is about a whole round, not about one step or one layer."""
    where = metric.where
    return where.layer is None and (where.step is None or metric.name.startswith(ONCE_A_ROUND))


def plain(text: str, most: int = NAME_CHARACTERS) -> str:
    """Return a name from a record as short, printable text, for other tools' file formats and pages."""
    shown = "".join(c if c.isprintable() else "?" for c in text.encode("utf-8", "replace").decode())
    return shown if len(shown) <= most else shown[: most - 1] + "…"


@dataclass(frozen=True, slots=True)
class ClosedRound:
    """A round that has ended: every client's values by metric, without NaN."""

    round: int
    at: float
    values: Mapping[str, Mapping[str, float]]

    def points(self, name: str) -> dict[str, float]:
        """Return minimum, 5th percentile, median, 95th percentile and maximum, each a client's own value."""
        ordered = sorted(self.values[name].values())
        last = len(ordered) - 1
        return {point: ordered[round(share * last)] for point, share in POINTS.items()}


class ClientSpread:
    """Collects the clients' metrics of one run, and returns them round by round as rounds end.

    A round is over when its length is known (`time.round` is its last metric) or when a later one has values.
    """

    def __init__(self) -> None:
        self.left_out = 0  # values of clients or metrics beyond the limits
        self._rounds: dict[int, dict[str, dict[str, float]]] = {}
        self._ends: dict[int, float] = {}
        self._fresh: set[int] = set()
        self._last = -1  # the newest round that was returned

    def add(self, metric: Metric) -> None:
        """Add one metric. Metrics that are not about a client's whole round only advance the current round."""
        number, node = metric.where.round, metric.where.node
        if number is None or number <= self._last - ROUNDS_KEPT or not of_the_round(metric):
            return
        if node is None:
            if metric.name == "time.round" and metric.where.group is None:
                self._ends[number] = metric.at
                self._fresh.add(number)
            return
        if not is_client(node) or metric.value != metric.value:
            return
        values = self._rounds.setdefault(number, {})
        if metric.name not in values and len(values) >= NAMES_KEPT:
            self.left_out += 1
            return
        of = values.setdefault(metric.name, {})
        if node not in of and len(of) >= CLIENTS_KEPT:
            self.left_out += 1
            return
        of[node] = metric.value
        self._fresh.add(number)

    def closed(self) -> list[ClosedRound]:
        """Return the rounds that ended since the last call, oldest first."""
        newest = max(self._rounds, default=-1)
        over = sorted(n for n in self._fresh if n in self._rounds and (n in self._ends or n < newest))
        closed_rounds = [ClosedRound(n, self._ends.get(n, 0.0), self._rounds[n]) for n in over]
        self._fresh.difference_update(over)
        self._last = max([self._last, *over])
        for number in sorted(self._rounds)[:-ROUNDS_KEPT]:
            del self._rounds[number]
            self._fresh.discard(number)
            self._ends.pop(number, None)
        return closed_rounds
