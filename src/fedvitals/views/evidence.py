# SPDX-License-Identifier: Apache-2.0
"""Computes the plots behind a case: the suspects over their cohort, with the limit if one is known."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedvitals.diagnosis.cases import Case, key_of
from fedvitals.records import Finding, is_client
from fedvitals.store.read import queries
from fedvitals.store.read.reader import Reader
from fedvitals.views.cases import culprits, number_of
from fedvitals.views.cohort import EMPTY, Matrix, matrix_of
from fedvitals.views.evidence_signs import Sign, last_resorts, meaning_of, named_signs, telling_signs, title_of, unit_of
from fedvitals.views.matrix import metric_matrix
from fedvitals.views.series import Band, Series, band, bucketed

MOST_PLOTS = 3
MOST_LINES = 4  # suspects; more would be unreadable
POINTS = 600
FEWEST_PEERS = 3
LOG_FROM = 50.0  # times the smallest value, from which a linear axis would hide the small ones
OWN, USUAL = "evidence of the finding", "a typical sign of this issue"
RESORT = "nothing nearer to it was measured"
ENOUGH = 2  # plots from which nothing is added to what the finding names


@dataclass(frozen=True, slots=True)
class Threshold:
    """The limit that a finding was compared with."""

    value: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """One sign: suspects as lines over the band of their cohort."""

    id: str
    title: str
    unit: str
    meaning: str
    scale: str  # «linear», «log», or «log0» for magnitudes with zeros
    metric: str | None = None  # whose raw records can be requested
    layer: str | None = None
    why: str  # why this one is shown
    lines: list[Series]
    band: Band | None = None
    threshold: Threshold | None = None


@dataclass(frozen=True, slots=True)
class Evidence:
    """The plots behind a case, and the rounds in which it was found."""

    plots: list[Plot]
    seen: list[int]  # the rounds in which it was found
    confidences: list[float]  # in these rounds
    since: int | None


def evidence_of(reader: Reader, run: str, case: Case, points: int = POINTS) -> Evidence:
    """Plot the signs that the finding names; then, while there is room, those that show the issue best."""
    plots: dict[str, Plot] = {}
    for sign, row in named_signs(case):
        plot = _plot(reader, run, case, sign, points)
        if plot is not None and len(plots) < MOST_PLOTS:
            plots.setdefault(plot.id, replace(plot, threshold=_threshold(sign, row), why=OWN))
    for sign in telling_signs(case):
        if len(plots) < ENOUGH and (plot := _plot(reader, run, case, sign, points)) is not None:
            plots.setdefault(plot.id, plot)
    for sign in last_resorts(case):
        if not plots and (plot := _plot(reader, run, case, sign, points)) is not None:
            plots[plot.id] = replace(plot, why=RESORT)
    summed = _summed_evidence(reader, run, case, points)
    shown = [*plots.values(), *([summed] if summed is not None else [])]
    return Evidence(shown, list(case.rounds), list(case.confidences), case.since)


def _plot(reader: Reader, run: str, case: Case, sign: Sign, points: int) -> Plot | None:
    """Return the plot of a sign; None if no data of it was kept."""
    layer = _layer(reader, run, case, sign)
    if sign.statistic and layer is None:
        return None
    if sign.events:
        matrix, lines = EMPTY, _counted(reader, run, case, sign, points)
    else:
        matrix, own = _measured(reader, run, sign, layer)
        lines = _lines(case, sign, layer, matrix, own, points)
        lines += _other_layers(reader, run, case, sign, layer, points) if lines else []
    cohort = _peers(sign, case, matrix, points)
    if not lines and cohort is None:
        return None
    return Plot(
        id=sign.id,
        title=title_of(sign, layer),
        unit=unit_of(sign),
        meaning=meaning_of(sign),
        scale=_scale(lines, cohort),
        metric=None if sign.statistic or sign.events else sign.name,
        layer=layer if sign.layer != "only" else None,
        why=USUAL,
        lines=lines,
        band=cohort,
    )


def _peers(sign: Sign, case: Case, matrix: Matrix, points: int) -> Band | None:
    """Return the cohort without the suspects: in a small one, a suspect would widen the band it is compared with."""
    suspects = {*culprits(case), *(suspect.node for suspect in case.newest.suspects)}
    others = [i for i, node in enumerate(matrix.nodes) if node not in suspects]
    seen = matrix.take(others) if FEWEST_PEERS <= len(others) < len(matrix.nodes) else matrix
    return band(sign.name, seen, points) if len(seen.nodes) > 1 and seen.rounds else None


def _layer(reader: Reader, run: str, case: Case, sign: Sign) -> str | None:
    if not sign.statistic:
        return None
    names = reader.history(run).layers(sign.name)
    if not names:
        return None
    if sign.layer in ("first", "only"):
        return names[0]
    if sign.layer == "head":
        weights = [name for name in names if "weight" in name.rsplit(".", 1)[-1]]
        return (weights or list(names))[-1]
    wanted = case.layer if sign.layer == "case" else sign.layer
    return wanted if wanted in names else names[0] if wanted is None else None


Own = Mapping[str | None, tuple[Sequence[int], Sequence[float]]]
"""The values over the rounds of nodes that are not clients; None is the federation."""


def _measured(reader: Reader, run: str, sign: Sign, layer: str | None) -> tuple[Matrix, Own]:
    """Return the clients' values, and those of the whole."""
    history = reader.history(run)
    if layer is None:
        wholes = {who: history.series(sign.name, who) for who in (None, "server")}
        return metric_matrix(reader, run, sign.name), {who: values for who, values in wholes.items() if values[0]}
    rounds, nodes, values = history.matrix(sign.name, sign.statistic, layer)
    clients = [i for i, node in enumerate(nodes) if is_client(node)]
    whole: dict[str | None, tuple[Sequence[int], Sequence[float]]] = {
        node: _course(rounds, values[:, i]) for i, node in enumerate(nodes) if node == "server"
    }
    return matrix_of([nodes[i] for i in clients], rounds, values[:, clients].T), whole


def _course(rounds: Sequence[int], values: Any) -> tuple[list[int], list[float]]:
    known = [(number, float(value)) for number, value in zip(rounds, values, strict=True) if not math.isnan(value)]
    return [number for number, _ in known], [value for _, value in known]


def _lines(case: Case, sign: Sign, layer: str | None, matrix: Matrix, own: Own, points: int) -> list[Series]:
    """Return the suspects' lines, the surest first; for the run as a whole its own, else the median client's."""
    lines = []
    for node in culprits(case)[:MOST_LINES]:
        rounds, values = own.get(node) or matrix[node]
        if rounds:
            lines.append(_series(sign, node, node, rounds, values, points))
    if lines or is_client(case.node):
        return lines
    for who, name in ((None, "global model"), ("server", "server")):
        if who in own:
            return [_series(sign, None, name, *own[who], points)]
    middle = matrix.band() if matrix.rounds else None
    if middle is None:
        return []
    name = layer if layer is not None and sign.layer != "only" else "median client"
    return [_series(sign, None, name, *_course(middle.rounds, middle.median), points)]


def _other_layers(reader: Reader, run: str, case: Case, sign: Sign, layer: str | None, points: int) -> list[Series]:
    """Return the median client's lines of the first and last layer, to compare a trouble of one layer with."""
    if layer is None or sign.layer == "only" or case.layer is None or case.node is not None:
        return []
    names = reader.history(run).layers(sign.name)
    lines = []
    for name in dict.fromkeys((names[0], names[-1])):
        if name != layer:
            middle = _measured(reader, run, sign, name)[0].band()
            lines.append(_series(sign, None, name, *_course(middle.rounds, middle.median), points))
    return lines


def _series(
    sign: Sign, node: str | None, of: str, rounds: Sequence[int], values: Sequence[float], points: int
) -> Series:
    series = bucketed(sign.name, node, of, rounds, np.asarray(values, dtype=float), points)
    return replace(series, unit=unit_of(sign), meaning=meaning_of(sign))


def _counted(reader: Reader, run: str, case: Case, sign: Sign, points: int) -> list[Series]:
    """Return how often it happened in each round, for the node that the case is about."""
    history = reader.history(run)
    events = [event for name in sign.events for event in history.events(name)]
    mine = [event.where.round for event in events if case.node in (None, event.where.node)]
    if not any(number is not None for number in mine):
        return []
    rounds = history.rounds()
    counts = [float(mine.count(number)) for number in rounds]
    return [_series(sign, case.node, case.node or "all nodes", rounds, counts, points)]


def _scale(lines: Sequence[Series], cohort: Band | None) -> str:
    values = [v for line in lines for v in (*line.low, *line.high) if v is not None]
    if cohort is not None:
        values += [v for side in (cohort.min, cohort.max) for v in side if v is not None]
    positive = [v for v in values if v > 0]
    if not positive or min(values) < 0 or max(positive) < LOG_FROM * min(positive):
        return "linear"
    return "log0" if len(positive) < len(values) else "log"


def _threshold(sign: Sign, row: Mapping[str, object]) -> Threshold | None:
    """Return the limit that the finding was judged by, if it is a limit of the sign itself."""
    limit = number_of(row.get("usual"))
    if limit is None or not math.isfinite(limit) or row.get("of") != "limit" or str(row.get("name")) != sign.name:
        return None
    return Threshold(limit, "limit")


def _summed_evidence(reader: Reader, run: str, case: Case, points: int) -> Plot | None:
    """Return the sum of evidence against a client, round by round, with the limit from which it is accused."""
    key = (case.issue, case.node, case.group, case.layer)
    sums: dict[str, dict[int, float]] = {}
    limits: dict[str, float] = {}
    for finding in queries.records(reader, run, Finding):
        evidence, number = finding.evidence, finding.where.round
        totals, stated = evidence.get("evidence"), evidence.get("limit")
        if key_of(finding) != key or number is None or not isinstance(totals, Mapping):
            continue
        for view, total in totals.items():
            if (value := number_of(total)) is not None:
                sums.setdefault(str(view), {})[number] = value
        if isinstance(stated, Mapping):
            limits |= {str(view): value for view, limit in stated.items() if (value := number_of(limit)) is not None}
    lines = [
        bucketed(
            "evidence", case.node, f"by {view}", sorted(values), np.array([values[n] for n in sorted(values)]), points
        )
        for view, values in sums.items()
    ]
    if not lines:
        return None
    view = max(sums, key=lambda name: max(sums[name].values()) - limits.get(name, 0.0))
    return Plot(
        id="evidence",
        title=f"sum of evidence against {case.node or case.group or 'it'}",
        unit="log-odds",
        meaning="How much likelier its numbers are if something is wrong with it, summed over its rounds.",
        scale="linear",
        why="from which sum on it is accused",
        lines=lines,
        threshold=Threshold(limits[view], f"limit ({view})") if view in limits else None,
    )
