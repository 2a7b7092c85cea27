# SPDX-License-Identifier: Apache-2.0
"""A round's clients together: what their statistics add up to, per edge, cluster or ring and as a whole."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fedvitals.probes.results import Results
from fedvitals.stats import COUNT, FAMILIES, INFS, MAX, MIN, NANS, SUM, SUM_MAGNITUDES, SUM_SQUARES, Array, merge

if TYPE_CHECKING:
    from fedvitals.probes.kits import Kit
    from fedvitals.probes.numpy_updates import ArrayUpdate
    from fedvitals.probes.updates import Update

Kind = tuple[str, tuple[int, ...], tuple[tuple[str, str], ...]]  # family, shape, layer tables
Counts = npt.NDArray[np.int64]  # [layers] of clients
Key = tuple[str | None, str | None]  # node, group; None: the whole

ROUNDING = 1e-4  # what a client's sums of an update may differ by from the server's, of the same update


class Cohort:
    """Takes in clients as they finish, from any thread; `close` gives the round."""

    def __init__(self, *, approximate_before: bool = False) -> None:
        self._approximate_before = approximate_before
        self._lock = threading.Lock()
        self._matrices: dict[Kind, dict[str | None, list[tuple[str, Array]]]] = defaultdict(lambda: defaultdict(list))
        self._difference: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._differing: dict[str, set[str]] = defaultdict(set)  # whose weights went into it
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
                    rows = FAMILIES[family].rows
                    table = ((rows, results.tables[rows]),) if rows in results.tables else ()
                    kind = (family, matrix.shape, table)
                    self._matrices[kind][group].append((node, matrix))
            if group is not None:
                for name, value, step in results.metrics:
                    if step is None and name.startswith("weight.difference"):
                        self._difference[group][name.endswith("absolute")] += value
                        self._differing[group].add(node)

    def receive(self, sent: Mapping[str, Array]) -> list[tuple[Key, Results]]:
        """What the server got: the nine sums of each client's update, to be told unless the client told the same.

        A client tells honestly of its training, and may have sent something else. What was sent is what counts.
        """
        with self._lock:
            others = self._others(sent)
            groups = [own for kind, found in self._matrices.items() if kind[0] == "update" for own in found.values()]
            told = {node for own in groups for node, _ in own}
        untold = [node for node in sent if node not in told]  # strangers, and those whose level keeps it from us
        for node in untold:
            results = _of_sums(sent[node], self._tables.get(node, {}))
            self.add(node, self._groups.get(node), results, failed=False)
        found: list[tuple[Key, Results]] = [
            ((n, self._groups[n]), _of_sums(sent[n], self._tables[n])) for n in (*untold, *others)
        ]
        for (told_of, _), results in found:
            if told_of in others:
                results.take({"update.differs": 1.0})
        return found

    def _others(self, sent: Mapping[str, Array]) -> list[str]:
        """Whose own sums of their update are of another one; what was sent is put in the place of these."""
        told = [own for kind, groups in self._matrices.items() if kind[0] == "update" for own in groups.values()]
        places: dict[tuple[int, ...], list[tuple[list[tuple[str, Array]], int, str]]] = defaultdict(list)
        for own in told:
            for i, (node, rows) in enumerate(own):
                # Of other layers than the client's it would be nothing that could be told in its place.
                if node in sent and sent[node].shape == rows.shape:
                    places[rows.shape].append((own, i, node))
        found: dict[str, None] = {}
        for same in places.values():
            alike = _alike(np.stack([own[i][1] for own, i, _ in same]), np.stack([sent[node] for _, _, node in same]))
            for index in np.flatnonzero(~alike):
                own, i, node = same[index]
                own[i] = (node, sent[node])
                found[node] = None
        return [*found]

    def clients_of(self, group: str | None) -> int:
        """How many clients have finished in a group so far."""
        return sum(own == group for own in self._groups.values())

    def count_traffic(self, sender: str, receiver: str, size: int) -> None:
        with self._lock:
            self._sent[sender] += size
            self._received[receiver] += size

    def close(self, kit: Kit, model: Any, least: int) -> list[tuple[Key, Results]]:
        """Everything that is known only now: cosines and duplicates, groups, the whole, the global model, traffic.

        `least`: the fewest clients whose sum may be told where they may not be told one by one.
        """
        found = [self._of_update(update, kit) for update in kit.updates.close_round()]
        for kind, members in self._matrices.items():
            found += _merged(kind, members, least)
        for group, (signed, absolute) in self._difference.items():
            if group not in self.measured_edges:
                results = Results(clients=len(self._differing[group]))
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
        whole.remarks += kit.remarks()
        if model is not None:
            found.append((("server", None), kit.model_results(model)))
        return [*found, ((None, None), whole)]

    def _of_update(self, update: Update | ArrayUpdate, kit: Kit) -> tuple[Key, Results]:
        results = Results(tables=self._tables.get(update.node, {}))
        results.take(update.metrics)
        if update.alignment is not None:
            results.matrices.append(("update.alignment", update.alignment, None))
        if update.peers is not None:
            results.matrices.append(("update.peers", update.peers, None))
        if update.sketch is not None and not kit.preset.brief:
            results.sketch = update.sketch
        return (update.node, self._groups.get(update.node)), results


def _of_sums(rows: Array, tables: Mapping[str, str]) -> Results:
    return Results(matrices=[("update", rows, None)], tables=tables)


def _alike(own: Array, got: Array) -> npt.NDArray[np.bool_]:
    """Whether nine sums and nine sums are of the same update; [clients, layers, 9] → [clients].

    Sums are compared by the size of what they sum: they may cancel to nearly nothing.
    """
    counts = [COUNT, NANS, INFS]
    alike: npt.NDArray[np.bool_] = (own[..., counts] == got[..., counts]).all(axis=(1, 2))
    size = own[..., SUM_MAGNITUDES]
    largest = np.abs(np.where(np.isfinite(own[..., [MIN, MAX]]), own[..., [MIN, MAX]], 0.0)).max(axis=2)
    limits = ((SUM, size), (SUM_MAGNITUDES, size), (SUM_SQUARES, own[..., SUM_SQUARES]), (MIN, largest), (MAX, largest))
    for column, limit in limits:
        alike &= np.isclose(got[..., column], own[..., column], rtol=0, atol=ROUNDING * limit).all(axis=1)
    return alike


def _merged(kind: Kind, members: Mapping[str | None, list[tuple[str, Array]]], least: int) -> list[tuple[Key, Results]]:
    """client + client = edge; edge + edge = round; each with the number of clients that it speaks for."""
    family, _, tables = kind
    sums = {group: merge(family, [matrix for _, matrix in found]) for group, found in members.items()}
    clients = speaking_for({group: contributors(found) for group, found in members.items()}, least)
    whole = merge(family, [*sums.values()])
    found = [((group, group), matrix, clients[group]) for group, matrix in sums.items() if group is not None]
    return [
        (key, Results(matrices=[(family, matrix, None)], tables=dict(tables), clients=number))
        for key, matrix, number in (*found, ((None, None), whole, clients[None]))
    ]


def contributors(found: Sequence[tuple[str, Array]]) -> Counts:
    """How many clients stand behind each layer: one that froze a layer, or gave the same twice, adds nobody to it."""
    rows: dict[str, npt.NDArray[np.bool_]] = {}
    for node, matrix in found:
        there = (np.isfinite(matrix) & (matrix != 0)).any(axis=1)
        rows[node] = rows[node] | there if node in rows else there
    return np.asarray(np.stack([*rows.values()]).sum(axis=0))


def speaking_for(groups: Mapping[str | None, Counts], least: int) -> dict[str | None, int]:
    """Of how many clients each sum tells, per group and (None) of the round, where all those of `least` are told.

    The fewest behind any of its layers. The round less the groups that are told is a sum, too: where that would leave
    fewer than `least`, the smallest of these groups counts as so few, until what is left is of enough, or of none.
    """
    counts: dict[str | None, int] = {group: _fewest(found) for group, found in groups.items() if group is not None}
    total = np.asarray(np.stack([*groups.values()]).sum(axis=0))
    told = sorted((group for group, count in counts.items() if count >= least), key=lambda group: counts[group])
    while told:
        rest = total - np.stack([groups[group] for group in told]).sum(axis=0)
        if not rest.any() or _fewest(rest) >= least:
            break
        counts[told.pop(0)] = _fewest(rest)
    return {None: _fewest(total), **counts}


def _fewest(counts: Counts) -> int:
    """The smallest count that is not zero: a layer without anybody tells of nobody."""
    return int(counts[counts > 0].min()) if counts.any() else 0
