# SPDX-License-Identifier: Apache-2.0
"""Computes a client's vital signs over the rounds, those in which it deviates most from its peers first.

Its own values and its newest deviation are a few seeks each, also among a thousand clients; the cohort's band beside
them comes from `views.series`, sign by sign.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from fedvitals.diagnosis.evidence.outlier_ranking import FEWEST, robust_scores
from fedvitals.store.read import queries
from fedvitals.store.read.metrics import values_of_nodes
from fedvitals.store.read.nodes import clients_by_number
from fedvitals.store.read.reader import Reader
from fedvitals.views.series import Series, series

SIGNS = (
    "accuracy", "loss", "local.accuracy", "local.loss", "fit.loss_before", "fit.accuracy_after", "gradient.norm",
    "gradient.norm_max", "scale.gsc", "update.norm", "update.cosine_mean", "update.cosine_previous", "weight.drift",
    "weight.update_ratio", "time.client_virtual", "time.client", "traffic.sent", "traffic.received", "memory.resident",
)  # fmt: skip
OWN = 8  # metrics of the user's own
FLOOR = 0.05  # of the median: spread that peers always have, so that rounding does not become a deviation


@dataclass(frozen=True, slots=True)
class ClientSign:
    """One vital sign of a client."""

    series: Series
    value: float | None  # the newest; None: NaN or infinite
    median: float | None  # of all clients in that round
    round: int | None
    z: float | None  # robust deviations from the median; None: too few peers, or not finite
    odd: bool  # the newest value is NaN or infinite


def client_signs(
    reader: Reader, run: str, node: str, points: int = 500, first: int | None = None, last: int | None = None
) -> list[ClientSign]:
    """Return every sign that the client told, the most deviating first."""
    own = [name for name in queries.metric_names(reader, run) if name.startswith("user.")][:OWN]
    asked = _Asked(reader, run, node, clients_by_number(reader, run), points, first, last)
    signs = [sign for name in (*SIGNS, *own) if (sign := _sign(asked, name))]
    return sorted(signs, key=lambda sign: (not sign.odd, -abs(sign.z or 0.0)))


@dataclass(frozen=True, slots=True)
class _Asked:
    reader: Reader
    run: str
    node: str
    clients: Collection[int]
    points: int
    first: int | None
    last: int | None


def _sign(asked: _Asked, name: str) -> ClientSign | None:
    reader, run, node = asked.reader, asked.run, asked.node
    if reader.names.number(name) is None:
        return None
    line = series(reader, run, name, node, asked.points, asked.first, asked.last)
    rounds = [number for number, value in zip(line.last, line.values, strict=True) if value is not None]
    newest = max([*rounds[-1:], *line.odd[-1:]], default=None)
    if newest is None:
        return None
    cohort = values_of_nodes(reader, run, name, newest, asked.clients)
    value = cohort.get(reader.names.number(node) or 0, math.nan)
    middle, z = deviation(value, cohort)
    odd = newest in line.odd
    return ClientSign(line, value if math.isfinite(value) else None, middle, newest, z, odd)


def deviation(value: float, cohort: Mapping[int, float]) -> tuple[float | None, float | None]:
    """The cohort's median, and how many robust standard deviations the value lies from it (see `robust_scores`)."""
    finite = np.array([v for v in cohort.values() if math.isfinite(v)])
    if not len(finite):
        return None, None
    middle = float(np.median(finite))
    if len(finite) < FEWEST or not math.isfinite(value):
        return middle, None
    with np.errstate(divide="ignore", invalid="ignore"):
        z = float(robust_scores(finite, FLOOR * abs(middle), np.array(value)))
    # All the same, and nothing to compare it with but zero.
    return middle, z if math.isfinite(z) else 0.0 if value == middle else None
