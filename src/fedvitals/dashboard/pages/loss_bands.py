# SPDX-License-Identifier: Apache-2.0
"""A client's training losses by class, or by bands of tokens and of lengths, beside the other clients' medians."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fedvitals.diagnosis.medians import finite_median
from fedvitals.plain_json import finite
from fedvitals.records import is_client
from fedvitals.stats import FAMILIES
from fedvitals.store.read.metrics import newest_of_node
from fedvitals.store.read.queries import layer_round
from fedvitals.store.read.reader import Reader

MOST = 12  # classes shown: those whose losses are highest over the others'
BANDS = {
    "training.classes": "class",
    "training.tokens": "number of the token in the vocabulary",
    "training.lengths": "number of targets in the text",
}


@dataclass(frozen=True, slots=True)
class LossBand:
    """The losses of one class, or band of targets."""

    name: str
    count: int  # targets, or texts
    loss: float | None  # mean, nats
    right: float | None  # share
    median: float | None  # of the other clients' losses


@dataclass(frozen=True, slots=True)
class LossBands:
    """The bands of a family that have targets of the client."""

    family: str
    title: str
    counted: str  # «samples» or «texts»
    round: int
    bands: list[LossBand]
    total: int  # bands, of which MOST are shown


def loss_bands(reader: Reader, run: str, node: str) -> list[LossBands]:
    """Read the losses by bands in the newest round in which the client's training losses were measured."""
    known = [family for family in BANDS if reader.names.number(family) is not None]
    newest = newest_of_node(reader, run, "train.loss_first", node) if known else None
    return [own for family in known if newest is not None and (own := _of_family(reader, run, node, family, newest[0]))]


def _of_family(reader: Reader, run: str, node: str, family: str, round_index: int) -> LossBands | None:
    measured = layer_round(reader, run, family, round_index, like=node)
    if node not in measured.nodes:
        return None
    mine = measured.nodes.index(node)
    others = [i for i, name in enumerate(measured.nodes) if name is not None and is_client(name) and i != mine]
    losses, right = measured.get("loss_mean"), measured.get("accuracy")
    counted = "texts" if "texts" in FAMILIES[family].columns else "samples"
    counts = measured.get(counted)[mine]
    bands = [
        LossBand(
            measured.layers[row],
            int(counts[row]),
            finite(float(losses[mine, row])),
            finite(float(right[mine, row])),
            finite(finite_median(losses[others, row])),
        )
        for row in np.flatnonzero(np.isfinite(counts) & (counts > 0)).tolist()
    ]
    kept = sorted(bands, key=_excess, reverse=True)[:MOST]
    shown = [band for band in bands if band in kept]
    return LossBands(family, BANDS[family], counted, round_index, shown, len(bands)) if bands else None


def _excess(band: LossBand) -> float:
    """Return how far a band's loss is above the other clients' median."""
    return -math.inf if band.loss is None or band.median is None else band.loss - band.median
