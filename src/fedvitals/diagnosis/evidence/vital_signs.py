# SPDX-License-Identifier: Apache-2.0
"""A client's vital signs in one round: the numbers by which clients are compared, from the server and from telemetry.

What the server sees of an update cannot be falsified by a client; what the client reports about its own training can.
The two are kept apart throughout, so that lying gains nothing. A missing sign is NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fedvitals.diagnosis.evidence.attendance import clients_of
from fedvitals.diagnosis.evidence.exact_relations import harmless_alterations
from fedvitals.diagnosis.evidence.label_counts import label_counts
from fedvitals.diagnosis.evidence.transformed_updates import most_differ
from fedvitals.diagnosis.evidence.update_mismatch import MISMATCH_LIMIT, update_mismatches
from fedvitals.protocols import History, Node
from fedvitals.stats import PEER_COLUMNS, Array

SERVER = (
    *("norm", "share_first", "share_head", "cosine", "cosine_first", "cosine_head", "previous", "step", "back"),
    *("nearest", "signs", "classes", "classes_min", "class_entropy", "bias", "spread"),
)
TELEMETRY = (
    *("loss_before", "loss_after", "loss_p90", "accuracy_before", "accuracy_after", "confident_wrong", "confusion"),
    *("gain", "gradient", "gradient_last", "gradient_ratio", "gradient_first", "rate", "samples_per_step"),
)
SIGNS = (*SERVER, *TELEMETRY)
FIT = TELEMETRY[: TELEMETRY.index("gradient")]  # of the client's own samples, by extra passes, and so measured in turns
# Least spread among peers: keeps rounding from turning into scores in a cohort of near-equal values.
FLOOR = {
    **dict.fromkeys(SIGNS, 0.05),
    **dict.fromkeys(("norm", "rate", "loss_before", "loss_after", "loss_p90", "gradient", "gradient_last"), 0.12),
    **dict.fromkeys(("nearest", "gain", "share_first", "share_head"), 0.1),
    "spread": 0.01,
}
_EXCHANGED = 0.999  # cosine of updates that were averaged with each other before being sent


@dataclass(frozen=True, slots=True)
class VitalSigns:
    """One round's signs, [clients, SIGNS], and the quantities they are corrected for."""

    nodes: list[Node]
    values: Array
    size: Array  # log of the client's claimed number of samples
    diversity: Array  # entropy of its labels; NaN if not reported
    absolute: Array  # [clients, ABSOLUTE]: signs that are meaningful without peers
    pairs: Array  # [clients, 2]: the classes confused most, label and guess; NaN if there are none


ABSOLUTE_SERVER = ("step", "nearest", "back", "cosine", "signs", "previous", "classes", "size", "cohort")
ABSOLUTE = (*ABSOLUTE_SERVER, "confusion", "accuracy", "diversity", "told")


def _log(values: Array, offset: float = 0.0) -> Array:
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(values + offset)
    return np.where(np.isfinite(logs), logs, np.nan)


def _median(values: Array) -> float:
    return float(np.nanmedian(values)) if np.isfinite(values).any() else np.nan


def _artanh(cosines: Array) -> Array:
    """Return cosines on an unbounded scale, which separates values near 1 or −1 as well as those near 0."""
    return np.arctanh(np.clip(cosines, -0.9995, 0.9995))


_LOSS, _SHARE = 0.05, 1e-3  # added before a logarithm, so that it is defined at 0
_OFFSET = {
    **dict.fromkeys(("loss_before", "loss_after", "loss_p90"), _LOSS),
    **dict.fromkeys(("share_first", "share_head"), _SHARE),
}
_COSINES = ("cosine", "cosine_first", "cosine_head", "previous", "step", "back", "classes", "classes_min", "bias")
_AS_THEY_ARE = ("signs", "class_entropy", "accuracy_before", "accuracy_after")


def as_measured(sign: str, compared: float | None) -> float | None:
    """Return a sign's measured value from the transformed one used for comparison.

    For a difference of logarithms this is the ratio. Names that are not signs are returned unchanged.
    """
    if compared is None or not np.isfinite(compared) or sign not in SIGNS or sign in _AS_THEY_ARE:
        return compared
    if sign in _COSINES:
        return float(np.tanh(compared))
    if sign == "nearest":
        return float(1 - np.exp(-min(max(compared, -1.0), 700.0)))
    if sign in ("confident_wrong", "confusion"):
        return float(compared**2)
    measured = float(np.exp(min(compared, 700.0))) - _OFFSET.get(sign, 0.0)
    return max(0.0, measured)


def vital_signs_of(history: History, round_index: int) -> VitalSigns:
    """Return the signs of every client that sent an update or trained in this round."""
    nodes = list(history.latest("update.norm", round_index)) or clients_of(history, round_index)

    def metric(name: str) -> Array:
        measured = history.latest(name, round_index)
        return np.array([measured.get(node, np.nan) for node in nodes], dtype=np.float64)

    signs = _update_signs(history, round_index, nodes, metric) | _training_signs(history, round_index, nodes, metric)
    claimed, counted = metric("update.samples"), metric("samples")
    size = _log(np.where(np.isfinite(claimed), claimed, counted), 1.0)
    labels = label_counts(history, round_index)
    # If most clients differ, the transport alters updates, and the distance says nothing about a single client.
    # The evidence was learnt on updates that differ clearly or not at all; an update that was only rounded counts as
    # equal.
    mismatches = {} if most_differ(history, round_index) else update_mismatches(history, round_index)
    equal = harmless_alterations(history, round_index)  # not a sign of a fault
    mismatches = {
        node: distance if distance > MISMATCH_LIMIT and node not in equal else 0.0
        for node, distance in mismatches.items()
    }
    diversity = np.array([labels.entropy(node) for node in nodes])
    alone = signs | {
        "size": size - _median(size),
        "cohort": np.full(len(nodes), np.log(max(len(nodes), 1))),
        "accuracy": np.full(len(nodes), _median(signs["accuracy_before"])),
        "diversity": diversity - _median(diversity),
        "told": np.array([mismatches.get(node, np.nan) for node in nodes]),
    }
    absolute = np.stack([alone[name] for name in ABSOLUTE], axis=1) if nodes else np.empty((0, len(ABSOLUTE)))
    values = np.stack([signs[name] for name in SIGNS], axis=1) if nodes else np.empty((0, len(SIGNS)))
    pairs = np.stack([metric("fit.confused_label"), metric("fit.confused_guess")], axis=1)
    return VitalSigns(nodes, values, size, diversity, absolute, pairs)


def _update_signs(
    history: History, round_index: int, nodes: list[Node], metric: Callable[[str], Array]
) -> dict[str, Array]:
    """Return the signs that the server sees."""
    columns = _aligned(history, "update.peers", PEER_COLUMNS, round_index, nodes)[:, 0]
    peers = {name: columns[:, i] for i, name in enumerate(PEER_COLUMNS)}
    nearest = peers["nearest"]
    if len(nodes) and np.nanmedian(np.where(np.isnan(nearest), -1.0, nearest)) > _EXCHANGED:
        nearest = np.full(len(nodes), np.nan)  # members of an averaging edge send the same, which is not a copy
    shares = _aligned(history, "update.alignment", ("share",), round_index, nodes)[:, :, 0]
    head = head_index(history.layers("update.alignment"))
    return {
        "norm": _log(metric("update.norm")),
        "share_first": _log(shares[:, 0], _SHARE),
        "share_head": _log(shares[:, head], _SHARE),
        "cosine": _artanh(peers["cosine"]),
        "cosine_first": _artanh(peers["first"]),
        "cosine_head": _artanh(peers["head"]),
        "previous": _artanh(metric("update.cosine_previous")),
        "step": _artanh(peers["step"]),
        "back": _artanh(peers["back"]),
        "nearest": -np.log(np.clip(1 - nearest, 1e-4, 2.0)),
        "signs": peers["signs"],
        "classes": _artanh(peers["classes"]),
        "classes_min": _artanh(peers["classes_min"]),
        "class_entropy": peers["class_entropy"],
        "bias": _artanh(peers["bias"]),
        "spread": _log(peers["spread"]),
    }


def _training_signs(
    history: History, round_index: int, nodes: list[Node], metric: Callable[[str], Array]
) -> dict[str, Array]:
    """Return the signs that the client reports."""
    before, after = _log(metric("fit.loss_before"), _LOSS), _log(metric("fit.loss_after"), _LOSS)
    gradient, last = _log(metric("gradient.norm")), _log(metric("gradient.norm_last"))
    steps, samples = metric("steps"), metric("samples")
    sizes = _aligned(history, "gradient", ("rms",), round_index, nodes)[:, :, 0]
    head = head_index(history.layers("gradient"))
    return {
        "loss_before": before,
        "loss_after": after,
        "loss_p90": _log(metric("fit.loss_p90"), _LOSS),
        "accuracy_before": metric("fit.accuracy_before"),
        "accuracy_after": metric("fit.accuracy_after"),
        "confident_wrong": np.sqrt(metric("fit.confident_wrong")),
        "confusion": np.sqrt(metric("fit.confusion")),
        "gain": before - after,
        "gradient": gradient,
        "gradient_last": last,
        "gradient_ratio": last - gradient,
        "gradient_first": _log(sizes[:, 0]) - _log(sizes[:, head]),
        "rate": _log(metric("update.norm")) - gradient - _log(steps, 1.0),
        "samples_per_step": _log(samples, 1.0) - _log(steps, 1.0),
    }


def _aligned(history: History, family: str, statistics: tuple[str, ...], round_index: int, nodes: list[Node]) -> Array:
    """Return [nodes, layers, statistics] in the order of `nodes`.

    Has at least one layer; NaN if nothing was measured.
    """
    measured, values = history.across(family, statistics, round_index)
    layers = max(1, values.shape[1] if len(measured) else len(history.layers(family)))
    aligned = np.full((len(nodes), layers, len(statistics)), np.nan)
    place = {node: i for i, node in enumerate(measured)}
    known = [(i, place[node]) for i, node in enumerate(nodes) if node in place]
    if known:
        here, there = zip(*known, strict=True)
        aligned[list(here)] = values[list(there)]
    return aligned


def head_index(layers: tuple[str, ...]) -> int:
    """Return the index of the last weight, that of the classifier."""
    weights = [i for i, name in enumerate(layers) if "weight" in name.rsplit(".", 1)[-1]]
    return weights[-1] if weights else max(0, len(layers) - 1)
