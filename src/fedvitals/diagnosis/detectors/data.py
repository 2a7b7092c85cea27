# SPDX-License-Identifier: Apache-2.0
"""Detectors of wrong data, from what clients tell of their own samples (`evidence.data_suspects`)."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from fedvitals.diagnosis.evidence.data_suspects import DataSuspect, examine_data
from fedvitals.diagnosis.evidence.fault_kinds import ISSUE_OF, WORDS
from fedvitals.diagnosis.finding import Number, finding
from fedvitals.protocols import Detector, History, Node
from fedvitals.records import Finding, Suspect

CHANGED, DEVIATES = 0.97, 0.93  # probability of a fault: by what changed, and by comparison with peers
NAMED = 0.95  # that the kind of fault is the one named
WORSE = 1.15  # times the others' loss, from which a group is badly served


def wrong_data(history: History, round_index: int) -> Iterator[Finding]:
    """LABEL_NOISE, LABEL_FLIP, INPUT_NOISE, INPUT_SCALE: a client whose samples are unlike those of its peers, or were
    changed, in a way that such a fault explains.
    """
    for node, suspect in examine_data(history, round_index).suspects.items():
        probability = DEVIATES if suspect.change is None else CHANGED
        yield finding(
            ISSUE_OF[suspect.kind],
            round_index,
            _in_words(node, suspect),
            confidence=probability,
            since=suspect.since,
            node=node,
            severity="warning",
            numbers=_numbers(suspect),
            suspects=[Suspect(node, probability, WORDS[suspect.kind])],
            more={"verdict": "faulty", "causes": _causes(suspect), "views": ["data"]},
        )


def group_with_other_inputs(history: History, round_index: int) -> Iterator[Finding]:
    """GROUP_LEFT_BEHIND: several clients whose inputs look otherwise, and whom the global model serves worse."""
    group = examine_data(history, round_index).group
    losses = history.latest("fit.loss_before", round_index)
    theirs = [losses[node] for node in group if math.isfinite(losses.get(node, math.nan))]
    others = [loss for node, loss in losses.items() if node not in group and math.isfinite(loss)]
    if not theirs or not others or np.median(theirs) < WORSE * np.median(others):
        return
    loss = Number("fit.loss_before", float(np.median(theirs)), float(np.median(others)))
    names = ", ".join(group[:8]) + (" and others" if len(group) > 8 else "")
    yield finding(
        "GROUP_LEFT_BEHIND",
        round_index,
        f"The inputs of {names} look unlike those of the other clients, whatever their class, and the global model "
        f"serves them worse: loss {loss.value:.2f} on their samples, {loss.usual:.2f} on the others'.",
        confidence=0.9,
        numbers=[loss],
        suspects=[Suspect(node, 1.0, "badly served") for node in group],
    )


def _in_words(node: Node, suspect: DataSuspect) -> str:
    change, deviation = suspect.change, suspect.deviation
    when = f"Since round {suspect.since}, "
    if change is not None and suspect.kind == "label_flip" and change.pair is not None:
        old, new = change.pair
        return (
            f"{when}{node} labels samples of class {old} as {new}: {change.moved:.0%} of its labels changed from one to "
            "the other, and its inputs are the same."
        )
    if change is not None and suspect.kind == "label_noise":
        return f"{when}{node} has other labels for the same inputs; they do not move from one class to another only."
    if change is not None and suspect.kind == "input_scale":
        return f"{when}the inputs of {node} are multiplied by {change.moved:.3g}; its labels are the same."
    if change is not None and suspect.kind == "input_noise":
        return f"{when}the inputs of {node} are noisier: its labels are the same, their spread is {change.moved:.3g} times."
    if deviation is None:
        return f"The data of {node} look wrong."
    if suspect.kind == "label_flip" and deviation.pair is not None:
        label, actual = deviation.pair
        return (
            f"About {deviation.share:.0%} of what {node} labels as class {label} looks like class {actual} of the other "
            "clients."
        )
    if suspect.kind == "label_noise":
        rate = min(deviation.rate, 1.0)
        known = f"about {rate:.0%} of its labels seem to be wrong" if rate == rate else "its labels seem to be wrong"  # noqa: PLR0124
        return f"The classes of {node} look more alike than those of the other clients: {known}."
    how = f"{deviation.spread_ratio:.3g} times the usual spread"
    if suspect.kind == "input_scale":
        return f"The inputs of {node} are on another scale: {how}."
    return f"The inputs of {node} are noisier than those of the other clients: {how}, and its classes lie no further apart."


def _numbers(suspect: DataSuspect) -> list[Number]:
    deviation, spread = suspect.deviation, suspect.sketch.spread
    numbers = []
    if suspect.kind.startswith("input") and spread == spread:  # noqa: PLR0124
        ratio = suspect.change.moved if suspect.change is not None else deviation.spread_ratio if deviation else math.nan
        usual = spread / ratio if ratio and ratio == ratio else None  # noqa: PLR0124
        of = "peers" if suspect.change is None else "own past"
        numbers.append(Number("data.std", spread, usual, None if deviation is None else deviation.spread_score, of))
    if suspect.kind.startswith("label") and suspect.change is not None:
        numbers.append(Number("labels changed", suspect.change.moved, 0.0, of="own past"))
    elif suspect.kind.startswith("label") and deviation is not None:
        wrong = deviation.share if suspect.kind == "label_flip" else deviation.rate
        numbers.append(Number("share of wrong labels", wrong, 0.0))
    return numbers


def _causes(suspect: DataSuspect) -> list[list[object]]:
    others = {"label": ("label_noise", "label_flip"), "input": ("input_noise", "input_scale")}
    family = next(kinds for prefix, kinds in others.items() if suspect.kind.startswith(prefix))
    return [[suspect.kind, NAMED], *([kind, round(1 - NAMED, 2)] for kind in family if kind != suspect.kind)]


DETECTORS: tuple[Detector, ...] = (wrong_data, group_with_other_inputs)
