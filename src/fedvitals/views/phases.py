# SPDX-License-Identifier: Apache-2.0
"""Computes what the rounds' time and bytes went to, from the metrics that the monitor stored as each round ended.

The exact parts of one round come from its Spans (see `views.round`); over hundreds of rounds and thousands of clients
they would be half a million records, and these sums say the same in a dozen numbers a round.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fedvitals.stats import Array
from fedvitals.store.read.metrics import EMPTY_SERIES, series_arrays
from fedvitals.store.read.reader import Reader
from fedvitals.views.cohort import Whole
from fedvitals.views.matrix import round_sums
from fedvitals.views.series import Numbers, between, bucket_of, json_numbers, stretches

# As they follow each other in a round; the words of the profile, and of `bottleneck.*`.
PARTS = {
    "download": "download",
    "data": "data_loading",
    "compute": "compute",
    "upload": "upload",
    "aggregate": "aggregation",
    "server": "server",
}
REST = "wait"  # what nobody worked in on the critical path
UNTOLD = "not told apart"


@dataclass(frozen=True, slots=True)
class Part:
    """Seconds of one part of the rounds."""

    name: str
    values: Numbers  # seconds, of the slowest round of each bucket


@dataclass(frozen=True, slots=True)
class Phases:
    """What the rounds' time and bytes went to."""

    clock: str  # «real», or «virtual» where the lab's clock tells
    rounds: list[int]  # of each bucket, the slowest round
    first: list[int]  # the first round of the bucket
    last: list[int]
    parts: list[Part]
    sent: Numbers  # bytes that the clients sent in these rounds
    received: Numbers
    total: int  # rounds that were timed


def phases(reader: Reader, run: str, points: int, first: int | None = None, last: int | None = None) -> Phases:
    """Seconds by part of each round; of a bucket of rounds, those of its slowest, so that no slow round is hidden."""
    names = ["time.round_virtual", "time.round", *(f"bottleneck.{stored}" for stored in PARTS.values())]
    known = {name: series for (name, _), series in series_arrays(reader, run, names, (None,)).items()}
    clock = "virtual" if "time.round_virtual" in known else "real"
    rounds, seconds = known.get("time.round_virtual") or known.get("time.round", EMPTY_SERIES)
    cut = between(rounds, first, last)
    rounds, lengths = rounds[cut], seconds[cut]
    chosen, begins, ends = _slowest(rounds, lengths, points)
    numbers = rounds[chosen]
    lengths = np.nan_to_num(lengths[chosen], nan=0.0, posinf=0.0, neginf=0.0)
    parts, measured = {}, np.zeros(len(chosen), dtype=bool)
    for part, stored in PARTS.items():
        of_rounds, shares = known.get(f"bottleneck.{stored}", EMPTY_SERIES)
        _, here, there = np.intersect1d(numbers, of_rounds, return_indices=True)
        measured[here] = True
        own = np.zeros(len(chosen))
        own[here] = np.nan_to_num(shares[there]) * lengths[here]
        if own.any():
            parts[part] = own
    rest = np.maximum(lengths - sum(parts.values(), np.zeros(len(chosen))), 0.0)
    parts[REST], parts[UNTOLD] = np.where(measured, rest, 0.0), np.where(measured, 0.0, rest)
    return Phases(
        clock=clock,
        rounds=numbers.tolist(),
        first=begins,
        last=ends,
        parts=[Part(part, json_numbers(values)) for part, values in parts.items() if values.any()],
        sent=_sums(reader, run, "traffic.sent", numbers.tolist()),
        received=_sums(reader, run, "traffic.received", numbers.tolist()),
        total=len(rounds),
    )


def _slowest(rounds: Whole, lengths: Array, points: int) -> tuple[list[int], list[int], list[int]]:
    """Of each bucket: where its slowest round stands, its first and its last round."""
    spans = stretches(bucket_of(rounds, points))
    filled = np.nan_to_num(lengths, nan=-1.0)
    chosen = [begin + int(np.argmax(filled[begin:end])) for begin, end in spans]
    return chosen, [int(rounds[begin]) for begin, _ in spans], [int(rounds[end - 1]) for _, end in spans]


def _sums(reader: Reader, run: str, name: str, rounds: list[int]) -> Numbers:
    """The clients' sum in each of these rounds; None where none was told."""
    known = round_sums(reader, run, name)
    return json_numbers([known.get(number, math.nan) for number in rounds])
