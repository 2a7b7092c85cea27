# SPDX-License-Identifier: Apache-2.0
"""A run in numbers: what it learnt, how long it took, what it held and sent, what was found. For a comparison."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from fedvitals.analysis.traffic import AccuracyMilestone, Traffic, accuracy_milestones
from fedvitals.diagnosis.cases import Case
from fedvitals.records import Run, is_client
from fedvitals.store.read import queries
from fedvitals.store.read.reader import Reader
from fedvitals.views.card import detectors_of
from fedvitals.views.cases import cases_of
from fedvitals.views.gaps import gaps_of
from fedvitals.views.machine import growth
from fedvitals.views.metric_history import Course, courses
from fedvitals.views.traffic_sums import traffic_sums

# The largest that a node or the whole has told of itself, in this order of preference.
PEAKS = ("memory.peak", "memory.resident")


@dataclass(frozen=True, slots=True)
class Figures:
    run: Run
    rounds: int
    clients: int
    accuracy: Course
    loss: Course
    seconds: Course  # of each round
    virtual_seconds: Course  # empty without a virtual clock
    peak_bytes: float | None  # the largest memory of any node
    growth_bytes: float | None  # of the resident memory, from the first round to the last; the worst node's
    norms: Mapping[str, Course]  # of each client's update
    gsc: Course  # median over the clients
    traffic: Traffic
    reached: tuple[AccuracyMilestone, ...]
    cases: tuple[Case, ...]
    judged: bool  # whether detectors looked at all of it; if not, no findings mean nothing


def figures_of(reader: Reader, run: str) -> Figures:
    described, found, history = queries.get_run(reader, run), tuple(cases_of(reader, run)), reader.history(run)
    traffic = traffic_sums(reader, run)
    accuracy, loss = (federation(reader, run, name) for name in ("accuracy", "loss"))
    seconds, virtual = (federation(reader, run, name) for name in ("time.round", "time.round_virtual"))
    norms = courses(reader, run, "update.norm")
    spent = {one.round: one.bytes for one in traffic.rounds if one.bytes}
    return Figures(
        run=described,
        rounds=len(history.rounds()),
        clients=_trained(reader, run),
        accuracy=accuracy,
        loss=loss,
        seconds=seconds,
        virtual_seconds=virtual,
        peak_bytes=_peak(reader, run),
        growth_bytes=(growth(courses(reader, run, PEAKS[-1])) or (None,))[0],
        norms={node: course for node, course in norms.items() if node is not None and is_client(node)},
        gsc=federation(reader, run, "scale.gsc"),
        traffic=traffic,
        reached=accuracy_milestones(accuracy, seconds=seconds, virtual_seconds=virtual, bytes=spent),
        cases=found,
        judged=bool(found) or (detectors_of(described) > 0 and not gaps_of(reader, run)),
    )


def federation(reader: Reader, run: str, name: str) -> Course:
    """The federation's own values, else the server's, else each round's median over the clients; see `newest`."""
    for node in (None, "server"):
        rounds, values = reader.history(run).series(name, node)
        if rounds:
            return dict(zip(rounds, values, strict=True))
    known = courses(reader, run, name)
    by_round: dict[int, list[float]] = {}
    for who, course in known.items():
        for number, value in course.items() if is_client(who) else ():
            by_round.setdefault(number, []).append(value)
    middle = {number: [v for v in values if math.isfinite(v)] for number, values in sorted(by_round.items())}
    # A round in which no client has a finite value is shown as such, not left out.
    return {number: median(values) if values else math.nan for number, values in middle.items()}


def _trained(reader: Reader, run: str) -> int:
    """Clients that trained or sent an update in any round."""
    found = reader.database.rows(
        "SELECT s.text FROM run_node AS n JOIN symbol AS s ON s.id = n.node WHERE n.run = ? AND EXISTS ("
        "SELECT 1 FROM run_round AS r CROSS JOIN metric AS m WHERE r.run = n.run AND m.run = r.run "
        "AND m.round = r.round AND m.node = n.node AND m.layer IS NULL "
        "AND m.name IN (SELECT id FROM symbol WHERE text IN ('steps', 'update.norm')))",
        (reader.names.number(run) or 0,),
    )
    return sum(is_client(name) for (name,) in found)


def _peak(reader: Reader, run: str) -> float | None:
    for name in PEAKS:
        values = [v for course in courses(reader, run, name).values() for v in course.values() if math.isfinite(v)]
        if values:
            return max(values)
    return None


def last(course: Course) -> float | None:
    return next(reversed(course.values()), None) if course else None


def highest(course: Mapping[int, float]) -> float | None:
    return max((v for v in course.values() if math.isfinite(v)), default=None)


def mean(values: Sequence[float]) -> float | None:
    finite = [v for v in values if math.isfinite(v)]
    return math.fsum(finite) / len(finite) if finite else None
