# SPDX-License-Identifier: Apache-2.0
"""Computes where a client's time went, round by round, and how long the median client took.

Spans are found by round, not by node: of many clients, the newest rounds are read, and the answer says how many.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from fedvitals.analysis.timeline import NodeTime, main_clock, timeline
from fedvitals.store.read.metrics import values_of_nodes
from fedvitals.store.read.nodes import clients_by_number
from fedvitals.store.read.reader import Reader
from fedvitals.store.read.spans import spans_of_node
from fedvitals.time_parts import REST
from fedvitals.views.profile import ORDER
from fedvitals.views.series import Numbers, json_numbers

SPANS = 30_000  # that are looked at, of all nodes
FEWEST_ROUNDS = 10
MOST_ROUNDS = 400
LENGTH = {"real": "time.client", "virtual": "time.client_virtual"}


@dataclass(frozen=True, slots=True)
class TimePart:
    """One part of a client's time over the rounds."""

    name: str
    values: Numbers  # seconds
    waiting: bool  # the client itself does nothing in it


@dataclass(frozen=True, slots=True)
class ClientTimes:
    """Where a client's time went."""

    clock: str
    rounds: list[int]
    parts: list[TimePart]  # in the order of a round
    own: Numbers  # seconds that the client took, without waiting
    median: Numbers  # of all clients
    failed: list[int]  # rounds
    of: int  # rounds that the run has


def client_times(
    reader: Reader, run: str, node: str, first: int | None = None, last: int | None = None, most: int = SPANS
) -> ClientTimes:
    """Read where a client's time went in the newest rounds, or in those from `first` to `last`."""
    every = reader.history(run).rounds()
    wanted = [r for r in every if (first is None or r >= first) and (last is None or r <= last)]
    clients = clients_by_number(reader, run)
    wanted = wanted[-min(MOST_ROUNDS, max(FEWEST_ROUNDS, most // max(1, len(clients)))) :]
    times = timeline(spans_of_node(reader, run, node, wanted[0], wanted[-1])) if wanted else []
    clock = main_clock(times) if times else "real"
    own: dict[int, NodeTime] = {
        time.round: time.nodes[node] for time in times if time.clock == clock and node in time.nodes
    }
    rounds = sorted(own)
    names = {part for times_of_round in own.values() for part, seconds in times_of_round.parts.items() if seconds > 0}
    order = sorted(names, key=lambda part: ORDER.index(part) if part in ORDER else len(ORDER))
    return ClientTimes(
        clock=clock,
        rounds=rounds,
        parts=[
            TimePart(part, json_numbers([own[r].parts.get(part, 0.0) for r in rounds]), part in REST) for part in order
        ],
        own=json_numbers([sum(s for part, s in own[r].parts.items() if part not in REST) for r in rounds]),
        median=json_numbers([_median(reader, run, LENGTH[clock], number, clients) for number in rounds]),
        failed=[number for number in rounds if own[number].failed],
        of=len(every),
    )


def _median(reader: Reader, run: str, name: str, number: int, clients: Collection[int]) -> float:
    finite = [v for v in values_of_nodes(reader, run, name, number, clients).values() if math.isfinite(v)]
    return float(np.median(finite)) if finite else math.nan
