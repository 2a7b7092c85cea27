# SPDX-License-Identifier: Apache-2.0
"""Detectors of NaN and infinity, with their origin: the first client, layer and step. Exact tests without thresholds.

A NaN spreads: from a client to the members of its edge or ring at the next exchange, to the global model at the next
average, and from there to every client. Only its origin is accused, again in each round while it lasts.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from fedvitals.diagnosis.evidence.attendance import SERVER, clients_of, groups_of, newest_values
from fedvitals.diagnosis.evidence.damage import model_stayed_finite
from fedvitals.diagnosis.evidence.described_data import data_sketches
from fedvitals.diagnosis.finding import Number, finding
from fedvitals.diagnosis.history_cutoff import shared
from fedvitals.protocols import History, Node
from fedvitals.records import Finding, Suspect

FEW = 3  # clients: if more than this, and more than a quarter, become non-finite at once, the model has overflowed


@dataclass(frozen=True, slots=True)
class NonfiniteOrigin:
    """Where in a client's round the first value became non-finite."""

    layer: str | None
    step: int | None
    values: float  # non-finite values in all its gradients of the round
    steps: float  # with such values
    partly: bool  # some layers had fewer such steps, so it began within this client


def nonfinite(history: History, round_index: int) -> Iterator[Finding]:
    """NAN_GRADIENT and NAN_UPDATE for the clients where it began, NAN_WEIGHTS for the global model."""
    began = _poisoned_since(history, round_index)
    origins = _origins(history, began)
    sent = _nonfinite_values(history, began, "update")
    tainted = _nonfinite_gradients(history, began)
    senders = {node: count for node, count in sent.items() if node not in tainted}
    yield from _gradient_findings(history, round_index, began, origins)
    if began < round_index:
        yield from _gradient_findings(history, round_index, round_index, _new_origins(history, round_index, origins))
    still = _nonfinite_values(history, round_index, "update")
    for node, count in senders.items():
        if node in still:
            values = "1 value that is" if count == 1 else f"{count:.0f} values that are"
            text = f"The update of {node} has {values} NaN or infinite"
            text += "." if began == round_index else f", first in round {began}."
            number = Number("update", count, 0.0, of="limit")
            yield finding(
                "NAN_UPDATE",
                round_index,
                text,
                confidence=1.0,
                since=began,
                node=node,
                severity=_severity(history, round_index),
                numbers=[number],
            )
    yield from _weight_findings(history, round_index, began, [*origins, *senders])


def _poisoned_since(history: History, round_index: int) -> int:
    """Return the round in which the global model sent to clients became non-finite; this round if it was finite."""
    began = round_index
    rounds, counts = history.series("weight.nonfinite", SERVER)
    for place in reversed(range(bisect_right(rounds, round_index - 1))):
        if not counts[place]:
            break
        began = rounds[place]
    return began


@shared
def _nonfinite_values(history: History, round_index: int, family: str) -> dict[Node, float]:
    """Return the number of non-finite values of each client that has any.

    For updates, the server's own total supplements its sums per layer, because it needs no layer names.
    """
    nodes, counts = history.across(family, ("nans", "infs"), round_index)
    totals = np.nansum(counts, axis=(1, 2)).tolist() if nodes else []
    lost = {node: n for node, n in zip(nodes, totals, strict=True) if n > 0}
    lost = {**(history.latest("update.nonfinite", round_index) if family == "update" else {}), **lost}
    clients = set(clients_of(history, round_index))
    return {node: float(n) for node, n in lost.items() if n > 0 and node in clients}


def _origins(history: History, round_index: int) -> dict[Node, NonfiniteOrigin]:
    """Return the clients in which gradients became non-finite first.

    In a group that exchanges models, that is only the member from which they spread.
    """
    counts = _nonfinite_gradients(history, round_index)
    if not counts:
        return {}
    placed = _located_origins(history, round_index, counts)
    groups = groups_of(history, round_index)
    origins: dict[Node, NonfiniteOrigin] = {}
    for group in {groups.get(node) for node in placed}:
        members = {node: origin for node, origin in placed.items() if groups.get(node) == group}
        origins |= members if group is None else _group_origins(members)
    return {node: origins[node] for node in placed if node in origins}


@shared
def _nonfinite_gradients(history: History, round_index: int) -> dict[Node, float]:
    """Return clients with non-finite gradients, except those whose GradScaler skipped the steps by design."""
    skipped, steps = history.latest("steps.skipped", round_index), history.latest("steps", round_index)
    broken = history.latest("weight.nonfinite", round_index)
    return {
        node: count
        for node, count in history.latest("gradient.nonfinite", round_index).items()
        if count and (broken.get(node) or not 0 < 2 * skipped.get(node, 0.0) <= steps.get(node, 0.0))
    }


def _group_origins(members: Mapping[Node, NonfiniteOrigin]) -> Mapping[Node, NonfiniteOrigin]:
    """Return the origins within a group that exchanges models.

    These are the members that were partly affected, else those with most affected steps. A model that arrives broken
    breaks all layers at the same steps.
    """
    partly = {node: origin for node, origin in members.items() if origin.partly}
    if partly:
        return partly
    most = max(origin.steps for origin in members.values())
    return {node: origin for node, origin in members.items() if origin.steps == most}


def _located_origins(history: History, round_index: int, counts: Mapping[Node, float]) -> dict[Node, NonfiniteOrigin]:
    """Return layer and step of each client's first non-finite value, as far as the sums of the round show.

    Once a weight is non-finite, so are all later gradients: the affected steps are the last ones, and a layer's count
    of non-finite values gives their number.
    """
    layers = history.layers("gradient")
    nodes, sums = history.across("gradient", ("nans", "infs", "count"), round_index)
    steps = history.latest("steps", round_index)
    broken = {node for node, count in history.latest("weight.nonfinite", round_index).items() if count}
    origins = {}
    for node, values in counts.items():
        if node not in nodes or not steps.get(node):
            origins[node] = NonfiniteOrigin(None, None, values, math.nan, partly=False)
            continue
        lost = np.nan_to_num(sums[nodes.index(node)])
        with np.errstate(divide="ignore", invalid="ignore"):
            size = lost[:, 2] / steps[node]
            lasting = np.nan_to_num(np.ceil((lost[:, 0] + lost[:, 1]) / size))
        most = float(lasting.max())
        first = np.flatnonzero(lasting == most)
        everywhere = len(first) == np.count_nonzero(size)
        step = int(steps[node] - most) if node in broken and math.isfinite(steps[node] - most) else None
        layer = None if everywhere and len(first) > 1 else layers[int(first[0])]
        origins[node] = NonfiniteOrigin(layer, step, values, most, partly=not everywhere)
    return origins


def _new_origins(history: History, round_index: int, known: Iterable[Node]) -> dict[Node, NonfiniteOrigin]:
    """Return clients that received a finite model although the global one is lost, and lost it now.

    They may have received their cluster's own model, for example.
    """
    before = history.latest("fit.loss_before", round_index)
    origins = _origins(history, round_index)
    return {n: o for n, o in origins.items() if n not in known and math.isfinite(before.get(n, math.nan))}


def _gradient_findings(
    history: History, round_index: int, began: int, origins: Mapping[Node, NonfiniteOrigin]
) -> Iterator[Finding]:
    now = _nonfinite_gradients(history, round_index)
    if len(origins) > max(FEW, len(clients_of(history, began)) / 4):
        text = f"Gradients are NaN or infinite on {len(origins)} clients at once since round {began}."
        number = Number("gradient.nonfinite", float(sum(now.values())), 0.0, of="limit")
        if now:
            yield finding("NAN_GRADIENT", round_index, text, confidence=1.0, since=began, numbers=[number])
        return
    for node, origin in origins.items():
        if not now.get(node):
            continue
        place = f" of layer {origin.layer}" if origin.layer is not None else ", of all layers at once,"
        when = "" if origin.step is None else f" from step {origin.step}"
        when += " on" if began == round_index and when else "" if began == round_index else f" of round {began} on"
        text = f"Gradients{place} are NaN or infinite on {node}{when}."
        numbers = [Number("gradient.nonfinite", now[node], 0.0, of="limit")]
        sketch = data_sketches(history, round_index).newest.get(node)
        missing = 0.0 if sketch is None else sketch.scalars.get("missing", 0.0)
        if missing > 0:
            text += f" The likely origin is its data: {100 * missing:.2g} % of its inputs are NaN or infinite."
            numbers.append(Number("data.missing", missing, 0.0, of="limit"))
        yield finding(
            "NAN_GRADIENT",
            round_index,
            text,
            confidence=1.0,
            since=began,
            node=node,
            layer=origin.layer,
            step=origin.step,
            severity=_severity(history, round_index),
            numbers=numbers,
            more={"origin": {"node": node, "round": began, "layer": origin.layer, "step": origin.step}},
        )


def _severity(history: History, round_index: int) -> str:
    """Return critical for a client's NaN unless the server is known to have kept it out of the model."""
    return "warning" if model_stayed_finite(history, round_index) else "critical"


def _weight_findings(history: History, round_index: int, began: int, origins: Iterable[Node]) -> Iterator[Finding]:
    suspects = [Suspect(node, 1.0, "its numbers were lost first") for node in origins]
    known = history.latest("weight.nonfinite", round_index)
    if SERVER in known:
        if known[SERVER]:
            text = f"{known[SERVER]:.0f} weights of the global model are NaN or infinite since round {began}"
            text += f"; it began with {', '.join(s.node for s in suspects)}." if suspects else "."
            number = Number("weight.nonfinite", known[SERVER], 0.0, of="limit")
            yield _global_finding(round_index, began, text, number, suspects)
        return
    losses = [
        value for number, value in newest_values(history.series("loss", None), round_index, 1) if number == round_index
    ]
    clients = clients_of(history, round_index)
    lost = _nonfinite_values(history, round_index, "update")
    if losses and not math.isfinite(losses[0]):
        number = Number("loss", losses[0], of="limit")
        yield _global_finding(round_index, began, "The loss of the global model is NaN or infinite.", number, suspects)
    elif clients and len(lost) == len(clients):
        number = Number("update", float(sum(lost.values())), 0.0, of="limit")
        yield _global_finding(
            round_index, began, "Every update has NaN or infinity, and so has their average.", number, suspects
        )


def _global_finding(round_index: int, began: int, text: str, number: Number, suspects: list[Suspect]) -> Finding:
    return finding(
        "NAN_WEIGHTS",
        round_index,
        text,
        confidence=1.0,
        since=began,
        severity="critical",
        numbers=[number],
        suspects=suspects,
    )
