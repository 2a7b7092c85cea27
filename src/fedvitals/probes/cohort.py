# SPDX-License-Identifier: Apache-2.0
"""All clients of a round: their merged statistics, per edge, cluster or ring and overall."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fedvitals.measurements import MeasuredLayers, Measurements
from fedvitals.probes.attempts import Attempt, unguarded
from fedvitals.probes.node_columns import NodeColumns
from fedvitals.probes.results import Results
from fedvitals.probes.trained_relation import distance_if_negated, factor_between, rounds_behind, sum_distances
from fedvitals.records import LayerStats, Span
from fedvitals.stats import COUNT, FAMILIES, INFS, NANS, Array, merge

if TYPE_CHECKING:
    from fedvitals.probes.backends import AnyInstruments
    from fedvitals.probes.numpy_updates import ArrayUpdate
    from fedvitals.probes.updates import ClientUpdate

Kind = tuple[str, tuple[int, ...], tuple[tuple[str, str], ...]]  # family, shape, layer tables
Part = tuple[list[str], Array]  # clients, and their measurements: [clients, layers, columns]
Counts = npt.NDArray[np.int64]  # [layers] of clients
Key = tuple[str | None, str | None]  # node, group; None: the whole

# Where a client's statistics were computed: in this process, in one of our own worker processes, or by a sender that is
# only trusted with its own numbers.
HERE, WORKER, SENDER = "here", "worker", "sender"
COST = "monitor.cost"
COUNTS = [COUNT, NANS, INFS]
ROUNDING = 1e-4  # allowed difference between a client's sums of an update and the server's


class Cohort:
    """Collects clients as they finish, from any thread; `close` returns the round's results."""

    def __init__(self, *, approximate_before: bool = False) -> None:
        self._approximate_before = approximate_before
        self._lock = threading.Lock()
        self._matrices: dict[Kind, dict[str | None, list[Part]]] = defaultdict(lambda: defaultdict(list))
        self._difference: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._differing: dict[str, set[str]] = defaultdict(set)  # clients whose weights contributed
        self._totals: dict[str, list[float]] = defaultdict(lambda: [math.nan, math.nan])  # of one client's weights
        self._sent: dict[str, int] = defaultdict(int)
        self._received: dict[str, int] = defaultdict(int)
        self._groups: dict[str, str | None] = {}
        self._tables: dict[str, Mapping[str, str]] = {}  # that name the layers of the server's own numbers of a client
        self._elsewhere: set[str] = set()  # clients whose statistics were transmitted
        self.failed = 0
        self.cost = 0.0
        self.measured_edges: set[str] = set()  # those whose own model provided weight.difference

    def __contains__(self, node: str) -> bool:
        return node in self._groups

    def add(self, node: str, group: str | None, results: Results, *, failed: bool, origin: str = HERE) -> None:
        """Add a client that has finished. `origin` is where its statistics were computed."""
        with self._lock:
            self._finish(node, group, failed=failed, origin=origin)
            # A sender's names of layers apply to its own numbers, and never to the server's.
            self._tables[node] = {} if origin == SENDER else results.tables
            for family, matrix, step in results.matrices:
                if step is None and FAMILIES[family].merge is not None:
                    table = results.tables.get(FAMILIES[family].rows)
                    self._matrices[_kind(family, matrix, table)][group].append(([node], matrix[None]))
            for name, value, step in results.metrics:
                if step is None:
                    self._add_difference(node, group, name, value)

    def _finish(self, node: str, group: str | None, *, failed: bool, origin: str) -> None:
        self._groups[node] = group
        if origin != HERE:
            self._elsewhere.add(node)
        self.failed += failed

    def _add_difference(self, node: str, group: str | None, name: str, difference: float) -> None:
        if name.startswith("weight.difference"):
            self._totals[node][name.endswith("absolute")] = difference
            if group is not None:
                self._difference[group][name.endswith("absolute")] += difference
                self._differing[group].add(node)

    def add_measured(self, spans: Mapping[str, Span], blocks: Sequence[Measurements], *, origin: str = HERE) -> None:
        """Add clients of our own that have finished, by their Spans, with everything that was measured of them."""
        with self._lock:
            for node, span in spans.items():
                self._finish(node, span.where.group, failed=bool(span.attributes.get("failed")), origin=origin)
                self._tables[node] = {}
            for measured in blocks:
                self._add_block(spans, measured)

    def _add_block(self, spans: Mapping[str, Span], measured: Measurements) -> None:
        nodes = [node or "" for node in measured.nodes]
        for part in measured.layers:
            places_by_group: dict[str | None, list[int]] = defaultdict(list)
            for place, row in enumerate(part.rows):
                if nodes[row] in spans:
                    places_by_group[spans[nodes[row]].where.group].append(place)
            for group, places in places_by_group.items():
                self._add_part(part, [nodes[part.rows[place]] for place in places], places, group)
        for name, rows, values, steps in measured.columns(_is_summed):
            for row, value, step in zip(rows, values, steps, strict=True):
                span = spans.get(nodes[row])
                if span is not None and name == COST:
                    self.cost += value
                elif span is not None and step is None:
                    self._add_difference(nodes[row], span.where.group, name, value)

    def _add_part(self, part: MeasuredLayers, nodes: list[str], places: list[int], group: str | None) -> None:
        """Add the matrices at these indices, which belong to the nodes."""
        family = FAMILIES[part.family]
        for node in nodes:
            if self._tables[node].get(family.rows) != part.table:
                self._tables[node] = {**self._tables[node], family.rows: part.table}
        if part.step is None and family.merge is not None:
            matrices = part.matrices if len(nodes) == len(part.rows) else part.matrices[places]
            self._matrices[_kind(part.family, part.matrices[0], part.table)][group].append((nodes, matrices))

    def receive(
        self,
        sent: Mapping[str, Array],
        claims: Mapping[str, Sequence[LayerStats]] | None = None,
        steps_back: Callable[[Sequence[int]], Mapping[int, Array]] | None = None,
    ) -> list[tuple[Key, Results]]:
        """Return the server's measurements of the received updates where they disagree with the clients' own sums.

        `sent` holds the nine sums per layer of each client's update, `claims` what senders report of theirs. A client
        may report its training honestly and send something else. What was sent counts; a client's own sums are only
        kept if they are a single record that agrees. `steps_back` returns, for layers of these sizes, the sums of
        earlier global models minus the current one, by rounds ago.
        """
        claims = claims or {}
        with self._lock:
            differing = self._replace_others(sent)
            agreeing = self._agreeing(sent)
        # Unknown clients, those whose privacy level withholds it, senders, and those that reported other layers.
        unreported = [node for node in sent if node not in agreeing and node not in differing]
        results_by_key: list[tuple[Key, Results]] = []
        for node in (*unreported, *differing):
            results = Results(matrices=[("update", sent[node], None)], tables=self._tables.get(node, {}))
            own = [*self._own_updates(node), *(claim.matrix for claim in claims.get(node, ()))]
            if node not in differing:
                self.add(node, self._groups.get(node), replace(results), failed=False)
            trained = differing.get(node, own)
            distance = max(_contradiction(trained, sent[node]), _contradiction(own, sent[node]))
            if distance > ROUNDING or not any(rows.shape == sent[node].shape for rows in own):
                results.take({"update.differs": distance} if own and not math.isnan(distance) else {})
                results.take(_relation(trained, sent[node], steps_back) if distance > ROUNDING else {})
            negated = None if own else distance_if_negated(self._totals[node], sent[node])
            results.take({} if negated is None else {"update.differs": negated, "update.factor": -1.0})
            results_by_key.append(((node, self._groups.get(node)), results))
        return results_by_key

    def _own_updates(self, node: str) -> list[Array]:
        """Return the sums of a client's update measured where it trained, in this process or in one of our workers."""
        return [rows[nodes.index(node)] for nodes, rows in self._update_parts() if node in nodes]

    def _update_parts(self) -> list[Part]:
        groups = [own for kind, groups in self._matrices.items() if kind[0] == "update" for own in groups.values()]
        return [part for own in groups for part in own]

    def _agreeing(self, sent: Mapping[str, Array]) -> set[str]:
        """Return the clients whose own sums agree, after those of other updates have been replaced."""
        shapes: dict[str, list[tuple[int, ...]]] = defaultdict(list)
        for nodes, rows in self._update_parts():
            for node in nodes:
                shapes[node].append(rows.shape[1:])
        return {
            node
            for node, own in shapes.items()
            # For a client in this process, all are measured here. A transmitted record may be anything, and come
            # several times.
            if node in sent and sent[node].shape in own and (node not in self._elsewhere or len(own) == 1)
        }

    def _replace_others(self, sent: Mapping[str, Array]) -> dict[str, list[Array]]:
        """Replace own sums that belong to another update than the one sent; returns these, by client."""
        differing: dict[str, list[Array]] = defaultdict(list)
        groups = [own for kind, groups in self._matrices.items() if kind[0] == "update" for own in groups.values()]
        for parts in groups:
            for i, (nodes, rows) in enumerate(parts):
                # Sums of other layers than the client's could not be reported in its place.
                places = [p for p, node in enumerate(nodes) if node in sent and sent[node].shape == rows.shape[1:]]
                if not places:
                    continue
                received = np.stack([sent[nodes[place]] for place in places])
                distances = _distances(rows if len(places) == len(nodes) else rows[places], received)
                other = np.flatnonzero(distances > ROUNDING)
                if len(other):
                    replaced = rows.copy()
                    replaced[np.array(places)[other]] = received[other]
                    parts[i] = nodes, replaced
                for place in (places[j] for j in other.tolist()):
                    differing[nodes[place]].append(rows[place])
        return differing

    def clients_of(self, group: str | None) -> int:
        """Return how many clients of a group have finished so far."""
        return sum(own == group for own in self._groups.values())

    def count_traffic(self, senders: Sequence[str], receivers: Sequence[str], sizes: Sequence[int]) -> None:
        """Add messages, in bytes."""
        with self._lock:
            for sender, receiver, size in zip(senders, receivers, sizes, strict=True):
                self._sent[sender] += size
                self._received[receiver] += size

    def close(
        self,
        instruments: AnyInstruments,
        model_results: Callable[[], Results] | None,
        least: int,
        attempt: Attempt = unguarded,
    ) -> tuple[list[NodeColumns], list[tuple[Key, Results]]]:
        """Return everything that is only known now: cosines, duplicates, groups, the whole, the global model, traffic.

        `model_results` returns the measurements of the global model. `least` is the smallest number of clients whose
        sum may be reported where they may not be reported individually. `attempt` runs each step separately, so that a
        failing one affects nothing else.
        """
        results: list[tuple[Key, Results]] = []

        def step(doing: str, work: Callable[[], list[tuple[Key, Results]]], node: str | None = None) -> None:
            results.extend(attempt(doing, work, node) or ())

        updates = instruments.updates.close_round(attempt)
        try:
            columns = [self._of_updates(updates, instruments)]
        except Exception:  # noqa: BLE001 - because of somebody: each by itself, so that it costs nobody else
            each = [(update.node, partial(self._of_updates, [update], instruments)) for update in updates]
            columns = [own for node, work in each if (own := attempt("measuring an update", work, node)) is not None]
        traffic = attempt("adding up traffic", self._of_traffic, None)
        columns += () if traffic is None else (traffic,)
        for kind, members in self._by_members():
            step(f"adding up '{kind[0]}'", partial(_merge_groups, kind, members, least))
        step("adding up groups", self._of_groups)
        step("counting clients", partial(self._of_whole, instruments))
        step("measuring adapters", lambda: self._of_adapters(updates, instruments))
        if model_results is not None:
            step("measuring the global model", lambda: [(("server", None), model_results())])
        return columns, results

    def _of_adapters(
        self, updates: Sequence[ClientUpdate | ArrayUpdate], instruments: AnyInstruments
    ) -> list[tuple[Key, Results]]:
        measured = instruments.adapters.close_round(updates)
        return [((node, self._groups.get(node)), results) for node, results in measured]

    def _by_members(self) -> list[tuple[Kind, Mapping[str | None, list[Part]]]]:
        """Return what is to be merged, by family; within a family, the layers that most clients have come last.

        A history takes a family's layer names from the newest table.
        """
        families = {family: i for i, family in enumerate(dict.fromkeys(kind[0] for kind in self._matrices))}
        return sorted(
            self._matrices.items(),
            key=lambda entry: (families[entry[0][0]], sum(len(nodes) for own in entry[1].values() for nodes, _ in own)),
        )

    def _of_groups(self) -> list[tuple[Key, Results]]:
        results_by_key: list[tuple[Key, Results]] = []
        for group, (signed, absolute) in self._difference.items():
            if group not in self.measured_edges:
                results = Results(clients=len(self._differing[group]))
                results.take({"weight.difference": signed, "weight.difference_absolute": absolute})
                results_by_key.append(((group, group), results))
        return results_by_key

    def _of_traffic(self) -> NodeColumns:
        nodes = {node: row for row, node in enumerate(dict.fromkeys((*self._sent, *self._received)))}
        columns = NodeColumns([(node, self._groups.get(node)) for node in nodes])
        for name, traffic in (("traffic.sent", self._sent), ("traffic.received", self._received)):
            columns.put(name, [*traffic.values()], np.array([nodes[node] for node in traffic], np.intp))
        return columns

    def _of_whole(self, instruments: AnyInstruments) -> list[tuple[Key, Results]]:
        whole = Results()
        whole.take({"clients": len(self._groups), "clients.failed": self.failed})
        if instruments.updates.approximate and not self._approximate_before:
            text = "Updates exceed update_memory: cosines are estimated from sketches, standard error 0.06."
            whole.remarks.append(("updates.approximate", text, {}))
        whole.remarks += instruments.remarks()
        return [((None, None), whole)]

    def _of_updates(self, updates: Sequence[ClientUpdate | ArrayUpdate], instruments: AnyInstruments) -> NodeColumns:
        columns = NodeColumns([(update.node, self._groups.get(update.node)) for update in updates])
        for name in dict.fromkeys(name for update in updates for name in update.metrics):
            rows = [row for row, update in enumerate(updates) if name in update.metrics]
            columns.put(name, [float(updates[row].metrics[name]) for row in rows], np.array(rows))
        for family in ("update.alignment", "update.peers"):
            alike: dict[tuple[Any, ...], list[tuple[int, Array]]] = defaultdict(list)  # by layers and their table
            for row, update in enumerate(updates):
                matrix = update.alignment if family == "update.alignment" else update.peers
                if matrix is not None:
                    tables = self._tables.get(update.node, {})
                    alike[len(matrix), *tables.items()].append((row, matrix))
            for (_, *tables_of_rows), own in alike.items():
                matrices, places = np.stack([matrix for _, matrix in own]), np.array([row for row, _ in own])
                columns.put_matrices(family, matrices, places, tables=dict(tables_of_rows))
        if not instruments.preset.brief:
            for row, update in enumerate(updates):
                if update.sketch is not None:
                    columns.put_sketch(row, update.sketch)
        return columns


def _kind(family: str, matrix: Array, table: str | None) -> Kind:
    return family, matrix.shape, () if table is None else ((FAMILIES[family].rows, table),)


def _is_summed(name: str) -> bool:
    return name == COST or name.startswith("weight.difference")


def _contradiction(own_sums: Sequence[Array], sent: Array) -> float:
    """Return how much a client's own sums differ from those of the update that it sent; 0 if it has none.

    NaN if its layers are not among those that were sent, so that nothing can be compared.
    """
    distances = []
    for own in own_sums:
        there = _same_layers(own, sent)
        distances.append(float(_distances(own[None], sent[there][None])[0]) if there is not None else math.nan)
    known = [distance for distance in distances if not math.isnan(distance)]
    return max(known) if known else math.nan if distances else 0.0


def _relation(
    own_sums: Sequence[Array], sent: Array, steps_back: Callable[[Sequence[int]], Mapping[int, Array]] | None
) -> dict[str, float]:
    """Return the exact relation of an update to what its client trained, as metrics; empty if there is none."""
    for trained in own_sums:
        there = _same_layers(trained, sent)
        # Clients may report anything; sums of other or invalid values are no multiple of what arrived.
        if there is None or not np.array_equal(trained[:, COUNTS], sent[there][:, COUNTS]):
            continue
        if float(_distances(trained[None], sent[there][None])[0]) <= ROUNDING:
            continue
        if (factor := factor_between(trained, sent[there])) is not None:
            return {"update.factor": factor}
        back = {} if steps_back is None else steps_back(trained[:, COUNT].astype(int).tolist())
        if (rounds := rounds_behind(trained, sent[there], back)) is not None:
            return {"update.base_age": float(rounds)}
    return {}


def _same_layers(own: Array, sent: Array) -> list[int] | None:
    """Return the indices of a client's layers among those that were sent; None if they are not all there, in order.

    The update may contain more: running statistics of batch norm, or frozen layers. A layer is recognised by equal
    sums, else by its number of values.
    """
    if len(own) == len(sent):
        return [*range(len(own))]
    places: list[int] = []
    for row in own:
        following = np.arange(places[-1] + 1 if places else 0, len(sent))
        fitting = following[sent[following, COUNT] == row[COUNT]]
        if not len(fitting):
            return None
        equal = fitting[_distances(np.broadcast_to(row, (len(fitting), 1, len(row))), sent[fitting, None]) <= ROUNDING]
        places.append(int((equal if len(equal) else fitting)[0]))
    return places


def agreeing_claims(claims: Sequence[LayerStats], sent: Array) -> list[LayerStats]:
    """Return the claimed sums that match the update that was sent."""
    return [
        claim
        for claim in claims
        if claim.matrix.shape == sent.shape and float(_distances(claim.matrix[None], sent[None])[0]) <= ROUNDING
    ]


def _distances(own: Array, got: Array) -> Array:
    """Return the largest relative difference of any layer (`sum_distances`); [clients, layers, 9] → [clients]."""
    return np.asarray(sum_distances(own, got).max(axis=1, initial=0.0))


def _merge_groups(kind: Kind, members: Mapping[str | None, list[Part]], least: int) -> list[tuple[Key, Results]]:
    """Merge clients into edges and edges into the round, each with the number of clients it represents."""
    family, _, tables = kind
    with np.errstate(all="ignore"):  # clients may report infinity
        sums = {group: merge(family, np.concatenate([own for _, own in parts])) for group, parts in members.items()}
        whole = merge(family, [*sums.values()])
    clients = clients_per_sum({group: clients_per_layer(parts) for group, parts in members.items()}, least)
    matrices = [((group, group), matrix, clients[group]) for group, matrix in sums.items() if group is not None]
    return [
        (key, Results(matrices=[(family, matrix, None)], tables=dict(tables), clients=number))
        for key, matrix, number in (*matrices, ((None, None), whole, clients[None]))
    ]


def clients_per_layer(parts: Sequence[Part]) -> Counts:
    """Return how many clients contribute to each layer.

    One that froze a layer, or reported twice, does not count for it.
    """
    stacked = np.concatenate([matrices for _, matrices in parts])
    there = (np.isfinite(stacked) & (stacked != 0)).any(axis=2)
    nodes: dict[str, int] = {}
    rows = [nodes.setdefault(node, len(nodes)) for own, _ in parts for node in own]
    if len(nodes) < len(rows):
        once = np.zeros((len(nodes), there.shape[1]), np.bool_)
        np.logical_or.at(once, rows, there)
        there = once
    return np.asarray(there.sum(axis=0))


def clients_per_sum(groups: Mapping[str | None, Counts], least: int) -> dict[str | None, int]:
    """Return how many clients each sum represents, per group and (None) for the round.

    Assumes that all sums over at least `least` clients are shown. The number is the smallest behind any of its layers.
    The round minus the shown groups is also a sum: if that would leave fewer than `least`, the smallest of these groups
    counts as that few, until enough or nothing is left.
    """
    counts: dict[str | None, int] = {
        group: _smallest_count(per_layer) for group, per_layer in groups.items() if group is not None
    }
    total = np.asarray(np.stack([*groups.values()]).sum(axis=0))
    shown = sorted((group for group, count in counts.items() if count >= least), key=lambda group: counts[group])
    while shown:
        rest = total - np.stack([groups[group] for group in shown]).sum(axis=0)
        if not rest.any() or _smallest_count(rest) >= least:
            break
        counts[shown.pop(0)] = _smallest_count(rest)
    return {None: _smallest_count(total), **counts}


def _smallest_count(counts: Counts) -> int:
    """Return the smallest count above zero, since a layer without clients represents none."""
    return int(counts[counts > 0].min()) if counts.any() else 0
