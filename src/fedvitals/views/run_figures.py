# SPDX-License-Identifier: Apache-2.0
"""Computes the numbers by which runs are compared: learning, time, memory, bytes, findings."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from fedvitals.analysis.traffic import TELEMETRY, AccuracyMilestone, Flow, RoundTraffic, Traffic, accuracy_milestones
from fedvitals.catalog import LAYER_PAIRS
from fedvitals.diagnosis.cases import Case
from fedvitals.records import Run, is_client
from fedvitals.store.read import queries
from fedvitals.store.read.metrics import ValuesByRound, values_of_everybody
from fedvitals.store.read.nodes import count_trained_clients
from fedvitals.store.read.reader import Reader
from fedvitals.store.read.transfers import flows_by_round
from fedvitals.views.card import detectors_of
from fedvitals.views.cases import cases_of
from fedvitals.views.gaps import gaps_of
from fedvitals.views.machine import growth
from fedvitals.views.verdict import verdict_of

# The largest value reported by a node or the whole, in this order of preference.
PEAKS = ("memory.peak", "memory.resident")


@dataclass(frozen=True, slots=True)
class Figures:
    """The numbers of one run."""

    run: Run
    rounds: int
    clients: int
    accuracy: ValuesByRound
    loss: ValuesByRound
    seconds: ValuesByRound  # of each round
    virtual_seconds: ValuesByRound  # empty without a virtual clock
    peak_bytes: float | None  # the largest memory of any node
    growth_bytes: float | None  # of the resident memory, from the first round to the last; of the worst node
    norms: Mapping[str, ValuesByRound]  # of each client's update
    gsc: ValuesByRound  # median over the clients
    layer_pairs: Mapping[str, ValuesByRound]  # likewise between two layers selected by the user, by «upper/lower»
    traffic: Traffic
    reached: tuple[AccuracyMilestone, ...]
    cases: tuple[Case, ...]
    verdict: str  # in a sentence
    judged: bool  # whether detectors examined all of it; if not, an absence of findings means nothing


def figures_of(reader: Reader, run: str) -> Figures:
    """Read the numbers of a run, by its id."""
    described, cases, history = queries.get_run(reader, run), tuple(cases_of(reader, run)), reader.history(run)
    traffic = traffic_sums(reader, run)
    accuracy, loss = (federation(reader, run, name) for name in ("accuracy", "loss"))
    seconds, virtual = (federation(reader, run, name) for name in ("time.round", "time.round_virtual"))
    norms = values_of_everybody(reader, run, "update.norm")
    spent = {sent.round: sent.bytes for sent in traffic.rounds if sent.bytes}
    return Figures(
        run=described,
        rounds=len(history.rounds()),
        clients=count_trained_clients(reader, run),
        accuracy=accuracy,
        loss=loss,
        seconds=seconds,
        virtual_seconds=virtual,
        peak_bytes=_peak(reader, run),
        growth_bytes=(growth(values_of_everybody(reader, run, PEAKS[-1])) or (None,))[0],
        norms={node: by_round for node, by_round in norms.items() if node is not None and is_client(node)},
        gsc=federation(reader, run, "scale.gsc"),
        layer_pairs={
            name.removeprefix(LAYER_PAIRS): federation(reader, run, name)
            for name in queries.metric_names(reader, run)
            if name.startswith(LAYER_PAIRS)
        },
        traffic=traffic,
        reached=accuracy_milestones(accuracy, seconds=seconds, virtual_seconds=virtual, bytes=spent),
        cases=cases,
        verdict=verdict_of(reader, run).sentence,
        judged=bool(cases) or (detectors_of(described) > 0 and not gaps_of(reader, run)),
    )


def federation(reader: Reader, run: str, name: str) -> ValuesByRound:
    """Return the federation's own values, else the server's, else each round's median client; see `newest`."""
    for node in (None, "server"):
        rounds, values = reader.history(run).series(name, node)
        if rounds:
            return dict(zip(rounds, values, strict=True))
    known = values_of_everybody(reader, run, name)
    by_round: dict[int, list[float]] = {}
    for node, values_of_node in known.items():
        for number, value in values_of_node.items() if is_client(node) else ():
            by_round.setdefault(number, []).append(value)
    middle = {number: [v for v in values if math.isfinite(v)] for number, values in sorted(by_round.items())}
    # A round without a finite client value is shown as such, not omitted.
    return {number: median(values) if values else math.nan for number, values in middle.items()}


def _peak(reader: Reader, run: str) -> float | None:
    for name in PEAKS:
        peaks = [highest(by_round) for by_round in values_of_everybody(reader, run, name).values()]
        known = [peak for peak in peaks if peak is not None]
        if known:
            return max(known)
    return None


def last(by_round: ValuesByRound) -> float | None:
    """Return the newest value; None if there is none."""
    return next(reversed(by_round.values()), None) if by_round else None


def highest(by_round: Mapping[int, float]) -> float | None:
    """Return the largest finite value; None if there is none."""
    return max((v for v in by_round.values() if math.isfinite(v)), default=None)


def mean(values: Sequence[float]) -> float | None:
    """Return the mean of the finite values; None if there are none."""
    finite = [v for v in values if math.isfinite(v)]
    return math.fsum(finite) / len(finite) if finite else None


# Reads a run's traffic by round, summed by the database.
#
# The same sums as `analysis.traffic.traffic_of` computes from the messages; without clients, layers and times.


def traffic_sums(reader: Reader, run: str) -> Traffic:
    """Read the traffic of a run by round; without clients, layers and times."""
    # Up, down, between, telemetry, each by round.
    books: tuple[dict[int, list[list[float]]], ...] = ({}, {}, {}, {})
    once: Counter[int] = Counter()
    for when, telemetry, sends, receives, *flow in flows_by_round(reader, run, TELEMETRY):
        where = [3] if telemetry else [i for i, there in enumerate((sends, receives)) if there] or [2]
        place = -1 if when is None else int(when)
        once[place] += 0 if telemetry else int(flow[0] or 0)
        for i in where:
            books[i].setdefault(place, []).append([*(float(amount or 0) for amount in flow), 0.0, 0.0])
    rounds = sorted({number for book in books for number in book})
    by_round = [[Flow.of(book.get(number, ())) for book in books] for number in rounds]
    up, down, between, telemetry = (Flow.of(flow for own in book.values() for flow in own) for book in books)
    traffic = tuple(
        RoundTraffic(number, sent, received, others, own.bytes, None, {}, once[number])
        for number, (sent, received, others, own) in zip(rounds, by_round, strict=True)
    )
    return Traffic(up, down, between, telemetry.bytes, None, (), traffic, ())
