# SPDX-License-Identifier: Apache-2.0
"""Detectors of problems of low-rank adapters, from what the server measures of them (`probes.adapters.watch`).

Each abstains if what it judges is unknown: if the aggregation is not a weighted mean, or a client does not report α/r.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

import numpy as np

from fedvitals.diagnosis.evidence.attendance import SERVER, newest_values, rounds_until
from fedvitals.diagnosis.finding import Number, finding
from fedvitals.protocols import Detector, History, Node
from fedvitals.records import Finding, Suspect
from fedvitals.stats import Array

KEPT = 0.5  # of the energy above the smallest rank; a mean over the clients that have these directions keeps nearly all
BIASED, BIASED_ROUNDS = 0.5, 2  # relative error of the aggregated product against the mean of products; rounds in a row
SAME_SCALE = 0.01  # relative difference of two α/r that are intended to be equal
DEAD_ROUNDS = 2
MOST_TURNS = 8  # rounds in which each of many adapters is measured once: with more, nothing is said
SHOWN = 3  # clients or layers named in one sentence


def rank_collapse(history: History, round_index: int) -> Iterator[Finding]:
    """RANK_COLLAPSE: the directions that only clients of a higher rank have are averaged away.

    Clients' products are larger than they enter the server's model if their α/r is: that is another problem.
    """
    kept = _of_server(history, "adapter.energy_kept", round_index)
    scales = [scale for scale, _ in _scale_groups(history, round_index)]
    own = _of_server(history, "adapter.scale", round_index)
    if kept is None or kept >= KEPT * (min(1.0, own / max(scales)) ** 2 if own is not None and scales else 1.0):
        return
    ranks = history.latest("update.adapter_rank", round_index)
    smallest, largest = min(ranks.values(), default=0), max(ranks.values(), default=0)
    if smallest == largest:  # only the server's adapters have these directions in this round
        largest = _server_column(history, "rank", round_index)[1].max(initial=largest)
    above = _of_server(history, "adapter.energy_above", round_index) or 0.0
    holders = sum(rank > smallest for rank in ranks.values())
    owners = f"{holders or 'none'} of the round's {len(ranks)} clients {'has' if holders <= 1 else 'have'}"
    text = (
        f"The adapters' directions above {smallest:.0f} (up to {largest:.0f}), which {owners}, keep {100 * kept:.1f} % "
        f"of their energy in the average; they hold {100 * above:.1f} % of the aggregated adapters."
    )
    yield finding(
        "RANK_COLLAPSE",
        round_index,
        text,
        confidence=0.97,
        since=_since(history, "adapter.energy_kept", round_index, lambda value: value < KEPT),
        numbers=[
            Number("adapter.energy_kept", kept, 1.0, of="limit"),
            Number("adapter.energy_above", above),
            *_past_number(history, "adapter.effective_rank", round_index),
        ],
        more={"ranks": {node: int(rank) for node, rank in sorted(ranks.items())[:50]}},
    )


def aggregation_bias(history: History, round_index: int) -> Iterator[Finding]:
    """ADAPTER_AGGREGATION_BIAS: the product of the averaged factors is far from the average of the products.

    With different ranks, agreement with either of the two averages is enough. Abstains if different α/r explain it.
    """
    if _scale_groups(history, round_index):
        return
    rounds = rounds_until(history, round_index, BIASED_ROUNDS)
    errors = [_product_error(history, past_round) for past_round in rounds]
    known = [error for error in errors if error is not None]
    if len(known) < BIASED_ROUNDS or min(known) < BIASED:
        return
    layer, worst = _worst_layer(history, round_index)
    text = (
        f"B times A of the averaged adapters differs by {100 * known[-1]:.0f} % from the average of the "
        "clients' B times A"
        f"{f', most in {layer} ({100 * worst:.0f} %)' if layer else ''}."
    )
    yield finding(
        "ADAPTER_AGGREGATION_BIAS",
        round_index,
        text,
        confidence=0.95,
        since=rounds[0],
        numbers=[Number("adapter.product_error", known[-1], BIASED, of="limit")],
    )


def scale_mismatch(history: History, round_index: int) -> Iterator[Finding]:
    """ADAPTER_SCALE_MISMATCH: clients, or the clients and the server, use different α/r."""
    groups = _scale_groups(history, round_index)
    if not groups:
        return
    (common, usual), *others = groups
    odd = [node for _, nodes in others for node in nodes]
    shown = "; ".join(f"{scale:.3g} on {_words(nodes)}" for scale, nodes in others[:SHOWN])
    text = f"The adapters' α/r differs: {shown}; {common:.3g} on {_words(usual)}."
    since = round_index
    for past_round in reversed(rounds_until(history, round_index - 1)):
        if not _scale_groups(history, past_round):
            break
        since = past_round
    clients = [node for node in odd if node != SERVER]
    yield finding(
        "ADAPTER_SCALE_MISMATCH",
        round_index,
        text,
        confidence=0.99,
        since=since,
        node=clients[0] if len(clients) == 1 and len(usual) > 1 else None,
        numbers=[Number("adapter.scale", others[0][0], common)],
        suspects=[Suspect(node, 0.9, "another α/r") for node in clients] if len(usual) > len(odd) else (),
    )


def dead_adapter(history: History, round_index: int) -> Iterator[Finding]:
    """DEAD_ADAPTER: adapters that no client has changed in several rounds, while others change, or clients train.

    Where there are too many to measure in each round, the last rounds in which an adapter was measured count.
    """
    # By adapter, the newest first: round, whether unmoved.
    rested: dict[str, list[tuple[int, bool]]] = defaultdict(list)
    for past_round in reversed(rounds_until(history, round_index, DEAD_ROUNDS * MOST_TURNS)):
        layers, moved = _server_column(history, "moved", past_round)
        for name, count in zip(layers, moved.tolist(), strict=True):
            if not np.isnan(count):
                rested[name].append((past_round, count == 0))
        if all(len(rested[name]) >= DEAD_ROUNDS for name in layers):
            break
    newest = {name: own[:DEAD_ROUNDS] for name, own in rested.items() if len(own) >= DEAD_ROUNDS}
    names = sorted(name for name, own in newest.items() if all(unmoved for _, unmoved in own))
    still = [all(own[turn][1] for own in newest.values()) for turn in range(DEAD_ROUNDS)]
    if any(still) and not (all(still) and _trained(history, round_index)):
        return  # nothing changes, for a while or because nobody trains: that is another problem
    if names:
        since = min(newest[name][-1][0] for name in names)
        shown = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
        text = f"{len(names)} adapters have not moved on any client in {DEAD_ROUNDS} rounds: {shown}."
        if len(names) == 1:
            text = f"The adapter {shown} has not moved on any client in {DEAD_ROUNDS} rounds."
        text += " The clients train, but no adapter changes." if all(still) else ""
        number = Number("adapter.unmoved", float(len(names)), 0.0, of="limit")
        yield finding("DEAD_ADAPTER", round_index, text, confidence=1.0, since=since, layer=names[0], numbers=[number])


def _trained(history: History, round_index: int) -> bool:
    """Return whether clients made steps in the last rounds, as far as they tell."""
    rounds = rounds_until(history, round_index, DEAD_ROUNDS)
    return all(any(steps > 0 for steps in history.latest("steps", own).values()) for own in rounds)


def _product_error(history: History, round_index: int) -> float | None:
    """Return the smaller of the errors against the two averages; None if there is none."""
    names = ("adapter.product_error", "adapter.product_error_by_rank")
    known = [value for name in names if (value := _of_server(history, name, round_index)) is not None]
    return min(known) if known else None


def _scale_groups(history: History, round_index: int) -> list[tuple[float, list[Node]]]:
    """Return the different α/r of a round, each with its nodes, the most common first; empty if all are equal.

    A client that adapts only some layers has another mean over its adapters, even if each layer's α/r is the server's.
    """
    scales = {node: value for node, value in history.latest("adapter.scale", round_index).items() if value > 0}
    of_server = scales.get(SERVER)
    for node, relative in history.latest("update.adapter_scale", round_index).items():
        if of_server is not None and node in scales and abs(relative - 1) <= SAME_SCALE:
            scales[node] = of_server
    groups: list[tuple[float, list[Node]]] = []
    for node, scale in sorted(scales.items(), key=lambda entry: entry[1]):
        if groups and scale <= groups[-1][0] * (1 + SAME_SCALE):
            groups[-1][1].append(node)
        else:
            groups.append((scale, [node]))
    sizes = Counter({place: len(nodes) for place, (_, nodes) in enumerate(groups)})
    return [groups[place] for place, _ in sizes.most_common()] if len(groups) > 1 else []


def _words(nodes: list[Node]) -> str:
    if len(nodes) <= SHOWN:
        return ", ".join("the server's model" if node == SERVER else node for node in nodes)
    return f"{len(nodes) - 1} clients and the server's model" if SERVER in nodes else f"{len(nodes)} clients"


def _of_server(history: History, name: str, round_index: int) -> float | None:
    value = history.latest(name, round_index).get(SERVER)
    return None if value is None or np.isnan(value) else value


def _past_number(history: History, name: str, round_index: int) -> list[Number]:
    """Return a metric of the server, with its first value as the usual one."""
    values = newest_values(history.series(name, SERVER), round_index, 1000)
    return [Number(name, values[-1][1], values[0][1], of="first rounds")] if values else []


def _since(history: History, name: str, round_index: int, holds: Callable[[float], bool]) -> int:
    """Return the first round of the unbroken stretch, up to this one, in which a metric of the server `holds`."""
    since = round_index
    for past_round, value in reversed(newest_values(history.series(name, SERVER), round_index, 1000)):
        if not holds(value):
            break
        since = past_round
    return since


def _server_column(history: History, column: str, round_index: int) -> tuple[tuple[str, ...], Array]:
    """Return the adapters' names and one of the server's columns of them; empty if they are not measured."""
    layers = history.layers("update.adapters")
    nodes, values = history.across("update.adapters", (column,), round_index) if layers else ([], np.zeros((0, 0, 1)))
    if SERVER not in nodes:
        return (), np.zeros(0)
    return layers, np.asarray(values[nodes.index(SERVER), :, 0])


def _worst_layer(history: History, round_index: int) -> tuple[str | None, float]:
    layers, errors = _server_column(history, "error", round_index)
    if not len(errors) or np.isnan(errors).all():
        return None, 0.0
    return layers[int(np.nanargmax(errors))], float(np.nanmax(errors))


DETECTORS: tuple[Detector, ...] = (rank_collapse, aggregation_bias, scale_mismatch, dead_adapter)
