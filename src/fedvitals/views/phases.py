# SPDX-License-Identifier: Apache-2.0
"""Computes where the rounds' time and bytes went, from the metrics that the monitor stored as each round ended.

The exact parts of one round come from its Spans (see `views.round`); for hundreds of rounds and thousands of clients
they would be half a million records, and these sums say the same in a dozen numbers per round.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fedvitals.stats import Array
from fedvitals.store.read.metrics import EMPTY_SERIES, series_arrays
from fedvitals.store.read.reader import Reader
from fedvitals.views.cohort import Whole
from fedvitals.views.round_sums import round_sums
from fedvitals.views.series import Numbers, between, bucket_of, json_numbers, stretches

# In the order of a round; the names used in the profile, and in `bottleneck.*`.
PARTS = {
    "download": "download",
    "data": "data_loading",
    "compute": "compute",
    "upload": "upload",
    "aggregate": "aggregation",
    "server": "server",
}
REST = "unaccounted"  # time on the critical path in which nobody is known to have worked, as in `analysis`
UNTOLD = "not told apart"


@dataclass(frozen=True, slots=True)
class Part:
    """Seconds of one part of the rounds."""

    name: str
    values: Numbers  # seconds, for the slowest round of each bucket


@dataclass(frozen=True, slots=True)
class Phases:
    """Where the rounds' time and bytes went."""

    clock: str  # «real», or «virtual» if the lab's clock applies
    rounds: list[int]  # the slowest round of each bucket
    first: list[int]  # the first round of the bucket
    last: list[int]
    parts: list[Part]
    sent: Numbers  # bytes that the clients sent in these rounds
    received: Numbers
    total: int  # number of timed rounds


def phases(reader: Reader, run: str, points: int, first: int | None = None, last: int | None = None) -> Phases:
    """Return seconds by part of each round; for a bucket, those of its slowest round, so that none is hidden."""
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
    """Return for each bucket the index of its slowest round, its first and its last round."""
    spans = stretches(bucket_of(rounds, points))
    filled = np.nan_to_num(lengths, nan=-1.0)
    chosen = [begin + int(np.argmax(filled[begin:end])) for begin, end in spans]
    return chosen, [int(rounds[begin]) for begin, _ in spans], [int(rounds[end - 1]) for _, end in spans]


def _sums(reader: Reader, run: str, name: str, rounds: list[int]) -> Numbers:
    """Return the clients' sum in each of these rounds; None if none reported."""
    known = round_sums(reader, run, name)
    return json_numbers([known.get(number, math.nan) for number in rounds])
