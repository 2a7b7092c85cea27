# SPDX-License-Identifier: Apache-2.0
"""Detectors of faulty data, from what clients report of their own samples (`evidence.suspect_data`)."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping

import numpy as np

from fedvitals.data_change import DataChange
from fedvitals.diagnosis.detectors.aggregation import dominant_clients
from fedvitals.diagnosis.evidence.compared_data import DataDeviation
from fedvitals.diagnosis.evidence.compared_features import TIMES
from fedvitals.diagnosis.evidence.exact_relations import HARMLESS, exact_relations
from fedvitals.diagnosis.evidence.fault_kinds import ISSUE_OF, WORDS
from fedvitals.diagnosis.evidence.suspect_data import DataSuspect, examine_data
from fedvitals.diagnosis.finding import Number, finding
from fedvitals.protocols import Detector, History, Node
from fedvitals.records import Finding, Suspect

CHANGED, DEVIATES = 0.97, 0.93  # probability of a fault: by a change, and by comparison with peers
FLIP_DEVIATES = 0.85  # the same for a flipped class: 51 of 53 clients of `tune-wide` named this way have one
NAMED = 0.95  # probability that the kind of fault is the one named
# The same where only checksums show that labels changed (of masks, numbers, or several labels each), or where targets
# have nothing to do with the inputs, either of which may be wrong.
NAMED_BLINDLY = 0.7
SAME = 0.02  # relative difference of a spread, up to which a feature was moved, and not multiplied
WORSE = 1.15  # times the others' loss, above which a group is badly served


def wrong_data(history: History, round_index: int) -> Iterator[Finding]:
    """LABEL_NOISE, LABEL_FLIP, INPUT_NOISE, INPUT_SCALE, MISSING_VALUES, UNUSUAL_CLIENT (features that do not vary,
    samples that are repeated): a client whose samples differ from its peers', or changed, as such a fault explains.
    """
    relations = exact_relations(history, round_index)
    for node, suspect in examine_data(history, round_index).suspects.items():
        if node in relations and relations[node].kind not in HARMLESS:
            continue  # the alteration of its updates is known exactly, and worse
        if suspect.kind == "input_repeated" and node in {
            dominant.where.node for dominant in dominant_clients(history, round_index)
        }:
            continue  # the weight that it gains by them is worse
        compared = FLIP_DEVIATES if suspect.kind == "label_flip" else DEVIATES
        probability = compared if suspect.change is None else CHANGED
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
    """GROUP_LEFT_BEHIND: several clients whose inputs look different, and whom the global model serves worse."""
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
    change, scalars = suspect.change, suspect.sketch.scalars
    compared = "far more than before" if suspect.deviation is None else "far more than of the other clients"
    if suspect.kind == "input_missing":
        share = f"{100 * scalars['missing']:.0f} % of the inputs of {node} are NaN or infinite"
        return f"{share}, {'far more than before' if change is not None else compared}."
    if suspect.kind == "input_constant" and (change is None or change.kind == "inputs"):
        share = f"{100 * scalars['constant']:.0f} % of the features of {node}"
        return f"{share} always have the same value, {compared}: a dead sensor, or a column that nobody fills."
    if suspect.kind == "input_repeated":
        share = f"{100 * scalars['duplicates']:.0f} % of the samples of {node}"
        return f"{share} repeat others of its own, far more than of the other clients."
    if suspect.has_unrelated_targets:
        return f"What {node} is to predict has nothing to do with its inputs: {_explained_in_words(scalars)}."
    if change is not None and change.kind != "inputs":
        return f"Since round {suspect.since}, {_change_in_words(node, change)}."
    since = "" if change is None else f" This is so since round {suspect.since}."
    return f"{_deviation_in_words(node, suspect.kind, suspect.deviation)}.{since}"


def _explained_in_words(scalars: Mapping[str, float]) -> str:
    share = 100 * max(0.0, scalars["explained"])
    return f"a linear regression explains {share:.0f} % of it, and of every other client's far more"


def _features_in_words(features: Collection[int]) -> str:
    """Return "feature 2" or "features 2, 3 and 7"; they are counted from 0."""
    if len(features) == 1:
        return f"feature {next(iter(features))}"
    *first, last = map(str, sorted(features))
    return f"features {', '.join(first)} and {last}"


def _change_in_words(node: Node, change: DataChange) -> str:
    if change.kind.startswith("input"):
        return _changed_inputs_in_words(node, change)
    if change.kind == "label_flip" and change.pair is not None:
        old, new = change.pair
        moved = f"at least {100 * change.moved:.0f} % of its labels"
        return f"{node} labels samples of class {old} as {new}: {moved} changed, and its inputs are the same"
    if change.kind == "label_flip":
        return f"{node} labels one class as another, and its inputs are the same{_labels_changed(change)}"
    several = "" if math.isnan(change.moved) else ", in several classes"
    return f"{node} labels the same inputs differently{_labels_changed(change)}{several}"


def _changed_inputs_in_words(node: Node, change: DataChange) -> str:
    features, constant = change.features, change.kind == "input_constant"
    what = f"{_features_in_words(features) if features else 'some features' if constant else 'the inputs'} of {node}"
    are, have = ("is", "has") if len(features) == 1 else ("are", "have")
    if constant:
        return f"{what} always {have} the same value, and varied before"
    if change.kind == "input_noise":
        return f"{what} {are} noisier ({change.moved:.3g} times the spread before), for the same labels"
    if not features:
        return f"{what} are multiplied by {change.moved:.3g}, and its labels are the same"
    times = f"{change.moved:.3g} times the spread before" if abs(change.moved - 1) > SAME else "another mean"
    return f"{what} {are} in another unit, or out of range: {times}, the same labels"


def _labels_changed(change: DataChange) -> str:
    return "" if math.isnan(change.moved) else f": at least {100 * change.moved:.0f} % of its labels changed"


def _deviation_in_words(node: Node, kind: str, deviation: DataDeviation | None) -> str:
    if deviation is None:
        return f"The data of {node} look wrong"
    how = f"{deviation.spread_ratio:.3g} times the usual spread"
    if kind == "input_scale" and deviation.features:
        what = _features_in_words(deviation.features).capitalize()
        ratio = max(deviation.features.values(), key=lambda ratio: abs(math.log(max(ratio, 1e-30))))
        scaled = ratio > TIMES or 0 < ratio < 1 / TIMES
        far = f"{ratio:.3g} times the spread that" if scaled else "out of the range that"
        return f"{what} of {node} {'is' if len(deviation.features) == 1 else 'are'} on another scale: {far} others have"
    match kind:
        case "label_flip" if deviation.pair is not None:
            label, actual = deviation.pair
            share = f"About {100 * deviation.share:.0f} % of what {node} labels as class {label}"
            return f"{share} looks like class {actual} of the other clients"
        case "input_scale":
            return f"The inputs of {node} are on another scale: {how}"
        case "input_noise":
            return f"The inputs of {node} are noisier than the other clients': {how}, its classes lie no further apart"
    wrong = (
        "its labels" if math.isnan(deviation.rate) else f"about {100 * min(deviation.rate, 1.0):.0f} % of its labels"
    )
    return f"The classes of {node} look more alike than the other clients': {wrong} seem to be wrong"


def _numbers(suspect: DataSuspect) -> list[Number]:
    change, deviation, spread = suspect.change, suspect.deviation, suspect.sketch.spread
    if suspect.has_unrelated_targets:
        return [Number("data.explained", suspect.sketch.scalars["explained"])]
    if suspect.kind.startswith("label"):
        if change is not None:
            return [Number("labels changed, at least", change.moved, 0.0, of="own past")]
        wrong = math.nan if deviation is None else deviation.share if suspect.kind == "label_flip" else deviation.rate
        return [Number("share of wrong labels", wrong, 0.0)]
    if suspect.kind in ("input_constant", "input_missing", "input_repeated"):
        name = suspect.kind.removeprefix("input_").replace("repeated", "duplicates")
        return [Number(f"data.{name}", suspect.sketch.scalars.get(name, math.nan))]
    ratio = change.moved if change is not None else deviation.spread_ratio if deviation is not None else math.nan
    usual = spread / ratio if ratio > 0 else None
    score = None if deviation is None else deviation.spread_score
    return [Number("data.std", spread, usual, score, "peers" if change is None else "own past")]


def _causes(suspect: DataSuspect) -> list[list[object]]:
    families = {"label": ("label_noise", "label_flip"), "input": ("input_noise", "input_scale")}
    family = next(kinds for prefix, kinds in families.items() if suspect.kind.startswith(prefix))
    family = ("label_noise", "input_noise") if suspect.has_unrelated_targets else family
    others = [kind for kind in family if kind != suspect.kind]
    unknown = suspect.kind == "label_noise" and suspect.change is not None and math.isnan(suspect.change.moved)
    named = NAMED_BLINDLY if unknown or suspect.has_unrelated_targets else NAMED
    return [[suspect.kind, named], *([kind, round((1 - named) / len(others), 3)] for kind in others)]


DETECTORS: tuple[Detector, ...] = (wrong_data, group_with_other_inputs)
