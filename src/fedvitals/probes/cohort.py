# SPDX-License-Identifier: Apache-2.0
"""A round's clients together: what their statistics add up to, per edge, cluster or ring and as a whole."""

from __future__ import annotations

import threading
from collections import defaultdict

from fedvitals.probes.results import Results
from fedvitals.probes.session import Instruments
from fedvitals.probes.updates import Update
from fedvitals.stats import FAMILIES, Array, merge

Key = tuple[str | None, str | None]  # node, group; None: the whole


class Cohort:
    """Takes in clients as they finish, from any thread; `close` gives the round."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._matrices: dict[tuple[str | None, str, tuple[int, ...]], list[Array]] = defaultdict(list)
        self._difference: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._sent: dict[str, int] = defaultdict(int)
        self._received: dict[str, int] = defaultdict(int)
        self._groups: dict[str, str | None] = {}
        self.failed = 0
        self.cost = 0.0
        self.measured_edges: set[str] = set()  # whose own model gave their weight.difference

    def __contains__(self, node: str) -> bool:
        return node in self._groups

    def add(self, node: str, group: str | None, results: Results, *, failed: bool) -> None:
        with self._lock:
            self._groups[node] = group
            self.failed += failed
            for family, matrix, step in results.matrices:
                if step is None and FAMILIES[family].merge is not None:
                    self._matrices[group, family, matrix.shape].append(matrix)
            if group is not None:
                for name, value, step in results.metrics:
                    if step is None and name.startswith("weight.difference"):
                        self._difference[group][name.endswith("absolute")] += value

    def count_traffic(self, sender: str, receiver: str, size: int) -> None:
        with self._lock:
            self._sent[sender] += size
            self._received[receiver] += size

    def close(self, kit: Instruments) -> list[tuple[Key, Results]]:
        """Everything that is known only now: cosines and duplicates, groups, the whole, traffic."""
        found = [self._of_update(update, kit) for update in kit.updates.close_round()]
        found += self._merged()
        for group, (signed, absolute) in self._difference.items():
            if group not in self.measured_edges:
                results = Results()
                results.take({"weight.difference": signed, "weight.difference_absolute": absolute})
                found.append(((group, group), results))
        for name, traffic in (("traffic.sent", self._sent), ("traffic.received", self._received)):
            for node, size in traffic.items():
                results = Results()
                results.take({name: size})
                found.append(((node, self._groups.get(node)), results))
        whole = Results()
        whole.take({"clients": len(self._groups), "clients.failed": self.failed})
        return [*found, ((None, None), whole)]

    def _of_update(self, update: Update, kit: Instruments) -> tuple[Key, Results]:
        results = Results()
        results.take(update.metrics)
        if update.alignment is not None:
            results.matrices.append(("update.alignment", update.alignment, None))
        if update.sketch is not None and not kit.preset.brief:
            results.sketch = update.sketch
        return (update.node, self._groups.get(update.node)), results

    def _merged(self) -> list[tuple[Key, Results]]:
        """client + client = edge; edge + edge = round."""
        whole: dict[tuple[str, tuple[int, ...]], list[Array]] = defaultdict(list)
        found: list[tuple[Key, Results]] = []
        for (group, family, shape), matrices in self._matrices.items():
            merged = merge(family, matrices)
            whole[family, shape].append(merged)
            if group is not None:
                results = Results()
                results.matrices.append((family, merged, None))
                found.append(((group, group), results))
        for (family, _), matrices in whole.items():
            results = Results()
            results.matrices.append((family, merge(family, matrices), None))
            found.append(((None, None), results))
        return found
