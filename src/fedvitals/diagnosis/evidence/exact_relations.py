# SPDX-License-Identifier: Apache-2.0
"""Exact relations of an update that is not what its client trained: negated, multiplied, old, or trained by nobody.

These are equalities, not similarities: they hold up to rounding or not at all, need neither peers nor a past, and
identify the fault. So they come before all learnt evidence. They use what the client itself reports of its training; if
a client reports nothing, or lies, only an old update, or the negated sum of the others', is recognised.

What the whole federation shows is how it works (weighted updates, the other sign convention, compression), and says
nothing about one client: a relation only counts if at most half of the comparable clients have it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedvitals.diagnosis.evidence.attendance import clients_of, median_of_others, rounds_until
from fedvitals.diagnosis.evidence.equal_updates import COPY, equal_updates, nearly_equal_updates, peer_statistic
from fedvitals.diagnosis.evidence.suspect_data import examine_data
from fedvitals.diagnosis.evidence.transformed_updates import MOSTLY_ZEROS, most_differ, transformation
from fedvitals.diagnosis.evidence.update_mismatch import (
    MISMATCH_LIMIT,
    clients_with_altered_updates,
    clients_with_trained_updates,
    update_mismatches,
)
from fedvitals.diagnosis.history_cutoff import shared
from fedvitals.protocols import History, Node
from fedvitals.stats import Array

SAME = 1e-5  # relative difference of two numbers of the same update, at a store's precision
SAME_DIRECTION = 1 - 1e-6
SMOOTH = 0.99
SAME_LENGTH = 2e-3  # of the norms of two updates clipped to the same length
SAME_FACTOR = 0.01
NEARLY_ONE = 0.05  # rounding to a few bits changes an update's length by less than this
ROUNDS_BACK = 10  # in which a resent update is searched for
FAR = 3.0  # times the usual difference made by a transformation
CROWD = 3  # clients that send the same update
CROWD_ROUNDS = 20  # over which a crowd that takes part only in parts is assembled
FEWEST_OTHERS = 2  # other clients, whose updates show what happens to all on their way
# Cosine to the sum of the others' directions, below which an update is that sum negated. Of 13,982 healthy rounds
# of four clients or more in `tune-wide` and `healthy-tune`, the lowest is -0.89.
OPPOSED, FEWEST_OPPOSED = -0.95, 4
BALANCED = -0.5  # the same for the median of the others, below which all updates together cancel out, as at an optimum
SERVER = "server"

Kind = Literal["negated", "scaled", "shrunk", "clipped", "sparsified", "stale", "repeated", "colluding", "opposed"]
HARMLESS: frozenset[Kind] = frozenset({"clipped", "sparsified"})
"""What honest clients do to their updates: not by itself a fault."""


@dataclass(frozen=True, slots=True)
class ExactRelation:
    """The relation of a client's update: `factor` times what it trained, or that of `rounds` ago, or of `others`."""

    kind: Kind
    factor: float = 1.0
    rounds: int = 0
    others: tuple[Node, ...] = ()
    nearly: bool = False  # equal except for a little noise


@shared
def exact_relations(history: History, round_index: int) -> dict[Node, ExactRelation]:
    """Return the relation of each client whose update is known to differ from what it trained."""
    relations = _colluding(history, round_index)
    factors = history.latest("update.factor", round_index)
    ages = history.latest("update.base_age", round_index)
    own_relations: dict[Node, ExactRelation] = {}
    for node, distance in update_mismatches(history, round_index).items():
        if distance <= MISMATCH_LIMIT or node in relations:
            continue
        if abs(factors.get(node, 1.0) - 1) > NEARLY_ONE:
            own_relations[node] = _multiplied(history, round_index, node, factors[node])
        elif node in ages:
            own_relations[node] = ExactRelation("stale", rounds=int(ages[node]))
        elif (relation := _sparsified(history, round_index, node)) is not None:
            own_relations[node] = relation
    few = _of_few(history, round_index, own_relations)
    return (
        _opposed(history, round_index) | relations | few | _repeated(history, round_index, {*relations, *own_relations})
    )


def _of_few(history: History, round_index: int, relations: dict[Node, ExactRelation]) -> dict[Node, ExactRelation]:
    """Return the relations that at most half of the comparable clients have; a single client has none to compare.

    If updates are transformed on their way, shorter ones are explained by that.
    """
    compared = len(update_mismatches(history, round_index))
    signs = {node: relation.factor < 0 for node, relation in relations.items()}
    few = {sign for sign in (True, False) if 2 * sum(own == sign for own in signs.values()) <= compared}
    meant = {*HARMLESS, "shrunk"} if transformation(history, round_index) is not None else ()
    return {node: relation for node, relation in relations.items() if signs[node] in few and relation.kind not in meant}


def _multiplied(history: History, round_index: int, node: Node, factor: float) -> ExactRelation:
    """Return what a factor means.

    A factor below 1 that gives updates of one length is clipping; a constant factor is not.
    """
    if factor < 0:
        return ExactRelation("negated", factor)
    if factor > 1:
        return ExactRelation("scaled", factor)
    norms = history.latest("update.norm", round_index)
    factors = history.latest("update.factor", round_index)
    lengths = [norms[other] for other, k in factors.items() if other != node and 0 < k < 1 and other in norms]
    for past_round in reversed(rounds_until(history, round_index - 1)):
        before = history.latest("update.factor", past_round).get(node)
        if before is not None:
            if abs(before / factor - 1) <= SAME_FACTOR and not _same_length(history, past_round, round_index, node):
                return ExactRelation("shrunk", factor)
            lengths.append(history.latest("update.norm", past_round).get(node, 0.0))
            break
    clipped = not lengths or any(abs(length - norms[node]) <= SAME_LENGTH * norms[node] for length in lengths)
    # A single one cannot be told from clipping, and a short update does no harm.
    return ExactRelation("clipped" if clipped else "shrunk", factor)


def _same_length(history: History, first: int, second: int, node: Node) -> bool:
    norms = [history.latest("update.norm", round_index).get(node, 0.0) for round_index in (first, second)]
    return abs(norms[0] - norms[1]) <= SAME_LENGTH * norms[1]


def _sparsified(history: History, round_index: int, node: Node) -> ExactRelation | None:
    """Return the relation if the update is the trained one with most values set to 0, and is no longer; else None."""
    drift = history.latest("weight.drift", round_index).get(node, 0.0)
    shorter = history.latest("update.norm", round_index).get(node, np.inf) <= drift * (1 + MISMATCH_LIMIT)
    zeros, untrained = (_zero_shares(history, round_index, family).get(node, 0.0) for family in ("update", "gradient"))
    return ExactRelation("sparsified") if shorter and zeros - untrained > MOSTLY_ZEROS * (1 - untrained) else None


@shared
def _zero_shares(history: History, round_index: int, family: str) -> dict[Node, float]:
    """Return the share of zeros among all values of each client's update or gradients."""
    nodes, values = history.across(family, ("sparsity", "count"), round_index)
    sparsity, counts = np.nan_to_num(values[..., 0]), np.nan_to_num(values[..., 1])
    totals = counts.sum(axis=1)
    shares = np.divide((sparsity * counts).sum(axis=1), totals, out=np.zeros(len(nodes)), where=totals > 0)
    return dict(zip(nodes, shares.tolist(), strict=True))


def _opposed(history: History, round_index: int) -> dict[Node, ExactRelation]:
    """Return the clients whose update is the negated sum of the others' directions.

    At an optimum this holds for all clients, since the updates cancel out. Inverted labels of two classes train exactly
    that: clients with wrong labels are left out, and so are clients whose telemetry says, layer by layer, that they
    trained it, because then their data are judged. Nobody trains it on labels and inputs like those of the others.
    """
    cosines = peer_statistic(history, round_index, "cosine")
    opposed = [node for node, cosine in cosines.items() if cosine <= OPPOSED]
    few = len(cosines) >= FEWEST_OPPOSED and 2 * len(opposed) <= len(cosines)
    others = [cosine for node, cosine in cosines.items() if node not in opposed]
    if not opposed or not few or np.median(others) <= BALANCED:
        return {}
    data, differs = examine_data(history, round_index), history.latest("update.differs", round_index)
    trained = {node for node in opposed if differs.get(node, 1.0) <= MISMATCH_LIMIT} - data.usual
    return {node: ExactRelation("opposed") for node in opposed if node not in trained and node not in data.suspects}


def _colluding(history: History, round_index: int) -> dict[Node, ExactRelation]:
    """Return the clients that sent the same update, trained by none of them.

    All of them must report that they trained something else; if one reports nothing, the others may be copies of it. A
    crowd suffices by itself if none of it is known to have trained what it sent, because copies have one original. If
    only some take part, a crowd may show itself pair by pair, over the rounds.
    """
    transformed = transformation(history, round_index) is not None
    altered = set() if transformed else clients_with_altered_updates(history, round_index)
    most = len(clients_of(history, round_index)) / 2
    together = equal_updates(history, round_index)
    differing = {node for nodes in together for node in untrained_among(history, round_index, nodes)}
    trained = clients_with_trained_updates(history, round_index)
    equal = [
        nodes
        for nodes in together
        if differing.issuperset(nodes)
        or (trained.isdisjoint(nodes) and (len(nodes) >= CROWD or _have_third(history, round_index, nodes)))
    ]
    near = [nodes for nodes in nearly_equal_updates(history, round_index) if altered and altered.issuperset(nodes)]
    relations: dict[Node, ExactRelation] = {}
    accomplices = [_with_accomplices(history, round_index, near)] if near else []
    for nodes, nearly in [*((nodes, False) for nodes in equal), *((nodes, True) for nodes in accomplices)]:
        for node in nodes if len(nodes) <= most else ():
            others = tuple(other for other in nodes if other != node)
            relations.setdefault(node, ExactRelation("colluding", others=others, nearly=nearly))
    return relations


def _have_third(history: History, round_index: int, pair: Collection[Node]) -> bool:
    """Return whether both of a pair have sent the same as a third client in earlier rounds.

    Then none of the three is the original of the other two.
    """
    partners: dict[Node, set[Node]] = {node: set() for node in pair}
    for past_round in rounds_until(history, round_index - 1, CROWD_ROUNDS):
        for nodes in equal_updates(history, past_round):
            for node in partners.keys() & {*nodes}:
                partners[node] |= {*nodes} - {*pair}
    return bool(set.intersection(*partners.values()))


def untrained_among(history: History, round_index: int, nodes: Collection[Node]) -> set[Node]:
    """Return those of some clients with equal updates whose update is not what they trained.

    If updates are transformed on their way, it must differ far more than any other client's, or be no multiple of what
    was trained while most others' are, as after clipping.
    """
    mismatches = update_mismatches(history, round_index)
    limit = MISMATCH_LIMIT
    if transformation(history, round_index) is not None:
        others = {node: distance for node, distance in mismatches.items() if node not in nodes}
        if len(others) < FEWEST_OTHERS:
            return set()
        factors = history.latest("update.factor", round_index)
        multiples = {node for node, factor in factors.items() if abs(factor - 1) > NEARLY_ONE}
        if 2 * len(multiples & others.keys()) > len(others):
            return {node for node in nodes if node in mismatches and node not in multiples}
        limit = max(*others.values(), FAR * float(np.median([*others.values()])), MISMATCH_LIMIT)
    return {node for node in nodes if mismatches.get(node, 0.0) > limit}


def _with_accomplices(history: History, round_index: int, near: Sequence[tuple[Node, ...]]) -> tuple[Node, ...]:
    """Return all clients of these groups, and those whose nearest peer can only be one of them.

    The nearest peer of a client has a peer that is at least as near. If all clients with such a peer sent something
    other than they trained, the client has not copied from anyone who trained.
    """
    nearest, altered = (
        peer_statistic(history, round_index, "nearest"),
        clients_with_altered_updates(history, round_index),
    )
    colluding = {node for nodes in near for node in nodes}
    ranked = sorted((node for node in nearest if nearest[node] > COPY), key=lambda node: -nearest[node])
    for node in ranked:
        if node not in altered:
            break
        colluding.add(node)
    return tuple(node for node in nearest if node in colluding)


def _repeated(history: History, round_index: int, known: Collection[Node]) -> dict[Node, ExactRelation]:
    """Return the clients that resent one of their own earlier updates: norms and sums of all layers are equal.

    If layers are not measured, only the previous update can be recognised, by its direction. Left out if the client
    trained what it sent, or if the same training gives the same update: all clients' hardly change, as with full
    batches and small steps, or the server's model has not moved. Coarse values also repeat themselves.
    """
    trained = clients_with_trained_updates(history, round_index)
    norms, cosines = (history.latest(name, round_index) for name in ("update.norm", "update.cosine_previous"))
    open_nodes = [node for node, norm in norms.items() if norm > 0 and node not in trained and node not in known]
    relations: dict[Node, ExactRelation] = {}
    now = _layer_sums(history, round_index) if open_nodes else {}
    for past_round in reversed(rounds_until(history, round_index - 1, ROUNDS_BACK)) if open_nodes else ():
        before = history.latest("update.norm", past_round)
        same = [node for node in open_nodes if abs(before.get(node, 0.0) - norms[node]) <= SAME * norms[node]]
        then = _layer_sums(history, past_round) if same else {}
        for node in same if not _model_unmoved(history, past_round, round_index) else ():
            if node in now and node in then:
                again = np.allclose(now[node], then[node], rtol=SAME, atol=SAME * norms[node])
            else:
                again = cosines.get(node, 0.0) > SAME_DIRECTION
            if again:
                relations[node] = ExactRelation("repeated", rounds=round_index - past_round)
        # Without layers, only the previous update can be compared.
        open_nodes = [n for n in open_nodes if n not in relations and (n in now or n not in before)]
    usual = median_of_others(cosines, relations)
    few = 2 * len(relations) <= len(clients_of(history, round_index)) and (usual is None or usual < SMOOTH)
    return relations if relations and few and not most_differ(history, round_index) else {}


@shared
def _layer_sums(history: History, round_index: int) -> dict[Node, Array]:
    nodes, values = history.across("update", ("l2", "sum"), round_index)
    return dict(zip(nodes, values, strict=True))


def _model_unmoved(history: History, first: int, second: int) -> bool:
    """Return whether the clients of two rounds got the same global model, as far as its sums show."""
    sums = []
    for round_index in (first - 1, second - 1):
        nodes, values = history.across("weight", ("sum",), round_index)
        if SERVER not in nodes:
            return False
        sums.append(values[nodes.index(SERVER)])
    return bool(np.array_equal(*sums))


def harmless_alterations(history: History, round_index: int) -> set[Node]:
    """Return the clients whose update is what they trained, clipped or sparsified by themselves."""
    return {node for node, relation in exact_relations(history, round_index).items() if relation.kind in HARMLESS}
