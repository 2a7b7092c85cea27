# SPDX-License-Identifier: Apache-2.0
"""Compare the features of tables: which client has a feature in another unit, or out of the range of the others.

Only clients that describe each feature on its own are compared (tables of at most 64 columns, privacy level 3). A
feature counts as on another scale if both the distance between its quartiles and its spread within classes are: a few
large numbers raise only the second, and a client with fewer classes than the others only has a smaller first. Clients
whose labels are distributed otherwise than most are not compared.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from fedvitals.data_change import DataSketch
from fedvitals.protocols import Node
from fedvitals.stats import Array

FEWEST = 4  # clients that describe a feature
TIMES = 8.0  # the usual width, or an eighth of it
BEYOND = 8.0  # robust deviations of the logarithm of the width
LEAST = 0.1  # of that logarithm: how much healthy clients differ anyway
FAR = 10.0  # usual widths, by which a median is out of range; and as many robust deviations
MOST = 0.3  # of the clients; if more stand out, nobody does
OTHER_LABELS = 0.3  # share of a client's labels that are otherwise than all clients' together


def unlike_features(sketches: Mapping[Node, DataSketch]) -> dict[Node, dict[int, float]]:
    """Return, by client and feature, how many times the peers' width it has, where it is on another scale.

    None of a client of which more than half of the features are: then its inputs are, which their spread tells.
    """
    sizes = [own.columns.shape[1] for own in sketches.values()]
    usual = max({*sizes}, key=sizes.count, default=0)
    told = {node: own for node, own in sketches.items() if 0 < own.columns.shape[1] == usual and own.classes}
    own = _with_usual_labels(told)
    if len(own) < FEWEST:
        return {}
    low, middle, high, spreads = (np.array([sketch.columns[place] for sketch in own.values()]) for place in range(4))
    widths = high - low
    outlying = (_off_scale(widths) & _off_scale(spreads)) | _out_of_range(middle, widths, spreads)
    outlying[outlying.sum(axis=1) > outlying.shape[1] / 2] = False
    found = np.flatnonzero(outlying.any(axis=1))
    if len(found) > max(1, MOST * len(own)):
        return {}
    ratios = widths / np.maximum(np.median(widths, axis=0), 1e-30)
    nodes = [*own]
    return {
        nodes[row]: {place: float(ratios[row, place]) for place in np.flatnonzero(outlying[row]).tolist()}
        for row in found.tolist()
    }


def _with_usual_labels(sketches: Mapping[Node, DataSketch]) -> dict[Node, DataSketch]:
    """Return the clients whose labels are distributed much as those of all clients together."""
    shares = {
        node: dict(zip(own.classes, (own.counts / max(own.counts.sum(), 1.0)).tolist(), strict=True))
        for node, own in sketches.items()
    }
    labels = {label for own in shares.values() for label in own}
    usual = {label: sum(own.get(label, 0.0) for own in shares.values()) / len(shares) for label in labels}
    apart = {node: sum(abs(own.get(label, 0.0) - usual[label]) for label in labels) / 2 for node, own in shares.items()}
    return {node: own for node, own in sketches.items() if apart[node] < OTHER_LABELS}


def _off_scale(widths: Array) -> npt.NDArray[np.bool_]:
    """Return which widths, [clients, features], are far from the median one; none of features that do not vary."""
    usual = np.median(widths, axis=0)
    comparable = (widths > 0) & (usual > 0)
    logs = np.log(np.divide(widths, usual, out=np.ones_like(widths), where=comparable))
    scatter = 1.4826 * np.median(np.abs(logs), axis=0)
    return np.asarray((np.abs(logs) > np.log(TIMES)) & (np.abs(logs) > BEYOND * np.maximum(scatter, LEAST)))


def _out_of_range(middle: Array, widths: Array, spreads: Array) -> npt.NDArray[np.bool_]:
    """Return which medians, [clients, features], are far from the usual one, by whatever the clients' data scatter."""
    distances = np.abs(middle - np.median(middle, axis=0))
    reach = np.maximum(np.median(widths, axis=0), np.median(spreads, axis=0))
    reach = np.maximum(reach, 1.4826 * np.median(distances, axis=0))
    return np.asarray((distances > FAR * reach) & (reach > 0))
