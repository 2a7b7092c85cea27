# SPDX-License-Identifier: Apache-2.0
"""Exact tests that report in the very round in which the problem occurs.

They catch what a federation silently accepts: an update of zeros, the same update from two clients, one of the wrong
shape, a claimed number of samples that does not match the data, a layer that came back unchanged. If almost all clients
show the same, it is a property of the federation (an edge whose members share one model, compressed updates), and no
client is accused.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from fedvitals.diagnosis.detectors.copies import duplicates, free_riders
from fedvitals.diagnosis.detectors.empty_rounds import no_weight, nothing_aggregated
from fedvitals.diagnosis.detectors.nonfinite import nonfinite
from fedvitals.diagnosis.evidence.attendance import clients_of, events_in, everyone_failed, rounds_until
from fedvitals.diagnosis.evidence.transformed_updates import transformation
from fedvitals.diagnosis.finding import Number, finding
from fedvitals.diagnosis.history_cutoff import shared
from fedvitals.protocols import Detector, History, Node
from fedvitals.records import Finding

MANY = 1 / 3  # of the cohort: a client in such a large group is not an exception
SPARSE = 0.6  # share of zeros above which an update is compressed, and a layer of zeros is expected
FAR_CLAIM = 3.0
MOVING = 1e-3  # share of the update that a layer has on the other clients
OLD = 10  # models ago; asynchronous aggregation is usually a few behind
LASTING = 3  # consecutive participations, for what may pass by itself
FEW_VALUES = 16  # of a bias: gradients that are whole numbers (of L1 and hinge losses) cancel out to exactly 0


def misfits(history: History, round_index: int) -> Iterator[Finding]:
    """SHAPE_OR_DTYPE_MISMATCH: updates that the aggregation rejected; an invalid weight is WRONG_SAMPLE_COUNT."""
    if everyone_failed(history, round_index):
        return  # a single case for all: NOTHING_AGGREGATED
    for event in events_in(history, round_index, "update.refused"):
        weight, node = bool(event.data.get("weight")), event.where.node
        issue = "WRONG_SAMPLE_COUNT" if weight else "SHAPE_OR_DTYPE_MISMATCH"
        why = "it claims a number of samples that is none" if weight else "its shape or type is not the model's"
        misfit = event.data.get("misfit")
        text = f"The update of {node} was refused: {why}." if misfit is None else event.message
        refused = [e.where.round for e in history.events("update.refused") if e.where.node == node]
        since = min((past_round for past_round in refused if past_round is not None), default=round_index)
        yield finding(issue, round_index, text, confidence=1.0, since=since, node=node)


def sample_counts(history: History, round_index: int) -> Iterator[Finding]:
    """WRONG_SAMPLE_COUNT: the number of samples used by the aggregation is not the size of the client's data.

    Compared with what the client's telemetry reports of its data if available, else with its first claim.
    """
    claims, sizes = history.latest("update.samples", round_index), history.latest("samples", round_index)
    if not any(claims.values()):
        return
    ratios = {node: claim / sizes[node] for node, claim in claims.items() if sizes.get(node)}
    usual = float(np.median([*ratios.values()])) if ratios else 1.0
    exact = sum(ratio == 1 for ratio in ratios.values()) > len(ratios) / 2
    for node, claim in claims.items():
        if node in ratios:
            wrong = ratios[node] != 1 if exact else not 0.5 <= ratios[node] / usual <= 2 if usual else False
            count = Number("update.samples", claim, sizes[node], of="its data")
        else:
            first = _first_claim(history, node, round_index)
            wrong = first is not None and not 1 / FAR_CLAIM <= (claim / first if first else 1.0) <= FAR_CLAIM
            count = Number("update.samples", claim, first, of="own past")
        if wrong:
            against = f"its data are {count.usual:.0f}" if node in ratios else f"its first claim was {count.usual:.0f}"
            text = f"{node} claims {claim:.0f} samples; {against}."
            confidence = 1.0 if exact and node in ratios else 0.9
            yield finding("WRONG_SAMPLE_COUNT", round_index, text, confidence=confidence, node=node, numbers=[count])


def _first_claim(history: History, node: Node, round_index: int) -> float | None:
    numbers, values = history.series("update.samples", node)
    return values[0] if numbers and numbers[0] < round_index else None


def frozen_layers(history: History, round_index: int) -> Iterator[Finding]:
    """FROZEN_LAYER: a layer whose update (or, where models are exchanged, gradient) is zero on this client alone.

    Reported at once if the rest of its module learns; if nothing in the module does, units may have died in a bad
    round, so it must last. If updates are transformed, only the gradient counts, because a small layer may be rounded
    to zero; likewise for a layer of few values, whose steps may cancel out.
    """
    accused: dict[Node, tuple[str, str]] = {}
    for family in ("update", "gradient"):
        zero = _zero_layers(history, round_index, family)
        if family == "update" and zero and transformation(history, round_index) is not None:
            continue
        for node, (layer, alone) in zero.items():
            if (alone and family == "update") or _frozen_before(history, family, round_index, node, layer):
                accused.setdefault(node, (family, layer))
    for node, (family, layer) in accused.items():
        what = "does not change" if family == "update" else "gets a gradient of zeros at every step"
        text = f"Layer {layer} {what} on {node}, unlike on the others."
        number = Number(family, 0.0, of="peers")
        yield finding("FROZEN_LAYER", round_index, text, confidence=0.98, node=node, layer=layer, numbers=[number])


def _frozen_before(history: History, family: str, round_index: int, node: Node, layer: str) -> bool:
    """Return whether the layer was frozen in the two participations before as well."""
    seen = 0
    for past_round in reversed(rounds_until(history, round_index - 1)):
        if node in clients_of(history, past_round):
            if _zero_layers(history, past_round, family).get(node, ("", False))[0] != layer:
                return False
            seen += 1
            if seen == LASTING - 1:
                return True
    return False


@shared
def _zero_layers(history: History, round_index: int, family: str) -> dict[Node, tuple[str, bool]]:
    """Return each client's first layer of zeros that few others share, and whether the rest of its module changes."""
    clients = set(clients_of(history, round_index))
    nodes, sums = history.across(family, ("l2" if family == "update" else "rms", "sparsity", "count"), round_index)
    rows = [i for i, node in enumerate(nodes) if node in clients]
    if len(rows) < 2:
        return {}
    sparsity = sums[rows, :, 1]
    empty = sums[rows, :, 0] == 0
    # Of two or three clients, only one may have it.
    frozen = empty & ~empty.all(axis=1, keepdims=True) & (empty.sum(axis=0) < max(1.5, MANY * len(rows)))
    # A layer that hardly changes anywhere may not change at all on one client, because small steps are lost in
    # rounding.
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = sums[rows, :, 0] / np.sqrt(np.nansum(sums[rows, :, 0] ** 2, axis=1, keepdims=True))
    frozen &= np.nan_to_num(np.median(np.nan_to_num(shares), axis=0)) > MOVING
    few = sums[rows, :, 2] <= FEW_VALUES
    if family == "update" and (frozen & few).any():
        frozen &= ~(few & _with_gradient(history, round_index, [nodes[i] for i in rows]))
    if not frozen.any():
        return {}
    layers = history.layers(family)
    modules = [name.rpartition(".")[0] for name in layers]
    zero_layers = {}
    for row in np.flatnonzero(frozen.any(axis=1)):
        # Over the layers that did change: in a compressed update, small layers may be all zeros by chance.
        if float(np.median(np.nan_to_num(sparsity[row, ~empty[row]]))) > SPARSE:
            continue
        first = int(np.flatnonzero(frozen[row])[0])
        same = [i for i, module in enumerate(modules) if module == modules[first] and i != first]
        zero_layers[nodes[rows[row]]] = (layers[first], bool(same) and not empty[row, same].all())
    return zero_layers


def _with_gradient(history: History, round_index: int, nodes: list[Node]) -> npt.NDArray[np.bool_]:
    """Return whether each layer of an update got a gradient on each of these clients; [clients, layers]."""
    layers, known = history.layers("update"), history.layers("gradient")
    owners, gradients = history.across("gradient", ("rms",), round_index)
    has_gradient = np.zeros((len(nodes), len(layers)), dtype=np.bool_)
    columns = [(layers.index(name), i) for i, name in enumerate(known) if name in layers]
    place = {node: i for i, node in enumerate(owners)}
    rows = [(row, place[node]) for row, node in enumerate(nodes) if node in place]
    if rows and columns:
        (here, there), (layer, column) = (np.array(pairs).T for pairs in (rows, columns))
        has_gradient[np.ix_(here, layer)] = gradients[np.ix_(there, column, [0])][..., 0] > 0
    return has_gradient


def old_updates(history: History, round_index: int) -> Iterator[Finding]:
    """STALE_UPDATE, by the base model that the host reported."""
    ages = history.latest("update.staleness", round_index)
    newest = float(np.median([*ages.values()])) if ages else 0.0
    for node, age in ages.items():
        if newest == 0 and age >= OLD:
            text = f"{node} began {age:.0f} models ago; its peers began with the newest."
            number = Number("update.staleness", age, newest)
            yield finding("STALE_UPDATE", round_index, text, confidence=0.9, node=node, numbers=[number])


DETECTORS: tuple[Detector, ...] = (
    nonfinite,
    misfits,
    no_weight,
    nothing_aggregated,
    sample_counts,
    duplicates,
    free_riders,
    frozen_layers,
    old_updates,
)
