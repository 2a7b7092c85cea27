# SPDX-License-Identifier: Apache-2.0
"""Reads metrics, layer statistics, cases and rounds of a run as columns of equal length."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from fedvitals.diagnosis.cases import Case
from fedvitals.errors import ConfigError, unknown
from fedvitals.protocols import History, Node
from fedvitals.records import LayerStats, natural
from fedvitals.store.read.metrics import values_of_everybody
from fedvitals.store.read.paging import layer_pages
from fedvitals.store.read.queries import layer_tables
from fedvitals.store.read.reader import Reader
from fedvitals.views.card import vital_sign
from fedvitals.views.cases import since_of

Wanted = Callable[[Node | None], bool]
Rounds = int | range | None


def node_filter(nodes: str | Iterable[str | None] | None, known: Sequence[Node]) -> Wanted:
    """Return a filter for nodes given by one name, several, or None (all); ConfigError for an unknown one."""
    if nodes is None:
        return lambda _: True
    wanted = {nodes} if isinstance(nodes, str) else {*nodes}
    for node in wanted:
        if node is not None and node not in known:
            raise ConfigError(unknown("node of this run", str(node), known))
    return wanted.__contains__


def _in_rounds(rounds: Rounds) -> Callable[[int], bool]:
    if rounds is None:
        return lambda _: True
    if isinstance(rounds, bool) or not isinstance(rounds, int | range):
        raise ConfigError(f"Rounds are one, such as 7, or a range, such as range(3, 10); got {rounds!r}.")
    return rounds.__contains__ if isinstance(rounds, range) else rounds.__eq__


def metric_columns(
    reader: Reader, run: str, names: Iterable[str], wanted: Wanted, rounds: Rounds
) -> dict[str, list[Any]]:
    """Return round, node, name and value: metric by metric, the federation first, then nodes, each by round."""
    inside = _in_rounds(rounds)
    columns: dict[str, list[Any]] = {"round": [], "node": [], "name": [], "value": []}
    for name in names:
        for node, by_round in values_of_everybody(reader, run, name).items():
            own = {at: number for at, number in by_round.items() if inside(at)} if wanted(node) else {}
            columns["round"] += own
            columns["value"] += own.values()
            columns["node"] += [node] * len(own)
            columns["name"] += [name] * len(own)
    return columns


def layer_columns(
    reader: Reader, run: str, family: str, statistics: Sequence[str], wanted: Wanted, rounds: Rounds
) -> dict[str, list[Any]]:
    """Return round, node, layer and one column per statistic: by round, the federation first, in the model's order."""
    names = {digest: table.names for digest, table in layer_tables(reader).items()}
    newest: dict[tuple[int, Node | None], LayerStats] = {}
    for stats in _layer_stats(reader, run, family, wanted, rounds):
        place = stats.where.round or 0, stats.where.node
        if place not in newest or stats.at >= newest[place].at:
            newest[place] = stats
    columns: dict[str, list[Any]] = {name: [] for name in ("round", "node", "layer", *statistics)}
    for (at, node), stats in sorted(newest.items(), key=lambda entry: (entry[0][0], natural(entry[0][1] or ""))):
        layers = names.get(stats.table, ())
        columns["layer"] += layers
        columns["round"] += [at] * len(layers)
        columns["node"] += [node] * len(layers)
        with np.errstate(all="ignore"):
            for statistic in statistics:
                columns[statistic] += stats.get(statistic)[: len(layers)].tolist()
    return columns


def _layer_stats(reader: Reader, run: str, family: str, wanted: Wanted, rounds: Rounds) -> Iterator[LayerStats]:
    """Yield statistics of whole client-rounds, or of the federation; not of single steps, edges or clusters."""
    inside = _in_rounds(rounds)
    for page in layer_pages(reader, run, rounds if isinstance(rounds, int) else None, [family]):
        for stats in page:
            where = stats.where
            whole = where.step is None and (where.node is not None or where.group is None)
            if whole and where.round is not None and inside(where.round) and wanted(where.node):
                yield stats


def case_columns(cases: Sequence[Case]) -> dict[str, list[Any]]:
    """Return the cases, one row each, in their order."""
    places = {key: case for case in cases for key in case.keys}
    causes = [None if case.cause is None else places.get(case.cause) for case in cases]
    return {
        "severity": [case.severity for case in cases],
        "issue": [case.issue for case in cases],
        "title": [case.issue_entry.title for case in cases],
        "node": [case.node for case in cases],
        "group": [case.newest.where.group for case in cases],
        "layer": [case.layer for case in cases],
        "since": [since_of(case) for case in cases],
        "last": [case.last for case in cases],
        "still_there": [case.still_there for case in cases],
        "confidence": [case.confidence for case in cases],
        "message": [case.newest.message for case in cases],
        "follows_from": [None if cause is None else f"{cause.issue} of {cause.place}" for cause in causes],
    }


def round_columns(history: History) -> dict[str, list[Any]]:
    """Return every round with accuracy, loss and seconds; None where one was not measured."""
    rounds = list(history.rounds())
    columns: dict[str, list[Any]] = {"round": rounds}
    for title, name in (("accuracy", "accuracy"), ("loss", "loss"), ("seconds", "time.round")):
        sign = vital_sign(history, name)
        by_round = dict(zip(sign.rounds, sign.values, strict=True))
        columns[title] = [by_round.get(at) for at in rounds]
    return columns
