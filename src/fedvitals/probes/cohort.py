# SPDX-License-Identifier: Apache-2.0
"""A round's clients together: what their statistics add up to, per edge, cluster or ring and as a whole."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from fedvitals.catalog import level_of_family
from fedvitals.probes.results import Results
from fedvitals.probes.session import Instruments
from fedvitals.probes.updates import Update
from fedvitals.probes.view import View
from fedvitals.probes.weights import weights
from fedvitals.stats import FAMILIES, Array, merge

LEAST_CLIENTS = 10  # whose sum may be told at privacy levels 1 and 2

Kind = tuple[str, tuple[int, ...], tuple[tuple[str, str], ...]]  # family, shape, layer tables
Key = tuple[str | None, str | None]  # node, group; None: the whole


class Cohort:
    """Takes in clients as they finish, from any thread; `close` gives the round."""

    def __init__(self, *, approximate_before: bool = False) -> None:
        self._approximate_before = approximate_before
        self._lock = threading.Lock()
        self._matrices: dict[tuple[str | None, Kind], list[Array]] = defaultdict(list)
        self._difference: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._sent: dict[str, int] = defaultdict(int)
        self._received: dict[str, int] = defaultdict(int)
        self._groups: dict[str, str | None] = {}
        self._tables: dict[str, Mapping[str, str]] = {}
        self.failed = 0
        self.cost = 0.0
        self.measured_edges: set[str] = set()  # whose own model gave their weight.difference

    def __contains__(self, node: str) -> bool:
        return node in self._groups

    def add(self, node: str, group: str | None, results: Results, *, failed: bool) -> None:
        with self._lock:
            self._groups[node] = group
            self._tables[node] = results.tables
            self.failed += failed
            for family, matrix, step in results.matrices:
                if step is None and FAMILIES[family].merge is not None:
                    kind = (family, matrix.shape, tuple(results.tables.items()))
                    self._matrices[group, kind].append(matrix)
            if group is not None:
                for name, value, step in results.metrics:
                    if step is None and name.startswith("weight.difference"):
                        self._difference[group][name.endswith("absolute")] += value

    def count_traffic(self, sender: str, receiver: str, size: int) -> None:
        with self._lock:
            self._sent[sender] += size
            self._received[receiver] += size

    def close(self, kit: Instruments, model: nn.Module | None, privacy: int) -> list[tuple[Key, Results]]:
        """Everything that is known only now: cosines and duplicates, groups, the whole, the global model, traffic."""
        found = [self._of_update(update, kit) for update in kit.updates.close_round()]
        found += self._merged(privacy)
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
        if kit.updates.approximate and not self._approximate_before:
            text = "Updates exceed update_memory: cosines are estimated from sketches, standard error 0.06."
            whole.remarks.append(("updates.approximate", text, {}))
        if model is not None:
            found.append((("server", None), _of_model(View(model))))
        return [*found, ((None, None), whole)]

    def _of_update(self, update: Update, kit: Instruments) -> tuple[Key, Results]:
        results = Results(tables=self._tables.get(update.node, {}))
        results.take(update.metrics)
        if update.alignment is not None:
            results.matrices.append(("update.alignment", update.alignment, None))
        if update.sketch is not None and not kit.preset.brief:
            results.sketch = update.sketch
        return (update.node, self._groups.get(update.node)), results

    def _merged(self, privacy: int) -> list[tuple[Key, Results]]:
        """client + client = edge; edge + edge = round. A sum over few clients would tell about each of them."""
        whole: dict[Kind, list[Array]] = defaultdict(list)
        found: list[tuple[Key, Results]] = []
        for (group, kind), matrices in self._matrices.items():
            merged = merge(kind[0], matrices)
            whole[kind].append(merged)
            if group is not None:
                found.append(((group, group), _of_kind(kind, merged)))
        enough = privacy >= 1 and len(self._groups) >= LEAST_CLIENTS
        for kind, matrices in whole.items():
            if enough or privacy >= level_of_family(kind[0]):
                found.append(((None, None), _of_kind(kind, merge(kind[0], matrices))))
        return found


def _of_kind(kind: Kind, matrix: Array) -> Results:
    return Results(matrices=[(kind[0], matrix, None)], tables=dict(kind[2]))


def _of_model(view: View) -> Results:
    """The global model's own statistics."""
    results = Results()
    for name, value in weights(view).items():
        if name in FAMILIES:
            results.matrices.append((name, np.asarray(torch.as_tensor(value).cpu()), None))
        else:
            results.take({name: value})
    return results
