# SPDX-License-Identifier: Apache-2.0
"""Measures how far each client's signs are from those of the other clients in the same rounds.

A sign is a metric of clients, or a column of the family `update.peers` (how an update compares to the others of its
round). A score is the distance from the round's median in robust standard deviations (`robust_scores`), not a verdict.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fedvitals.catalog import CATALOG
from fedvitals.diagnosis.evidence.outlier_ranking import FEWEST, robust_scores
from fedvitals.diagnosis.medians import finite_median
from fedvitals.records import is_client
from fedvitals.stats import FAMILIES, Array
from fedvitals.store.read import queries
from fedvitals.store.read.reader import Reader
from fedvitals.views.cohort import Floats, Matrix, matrix_of
from fedvitals.views.matrix import metric_matrix

PEERS = "update.peers"
FLOOR = 0.05  # relative to the median, absolute for shares and cosines: spread that peers always have
FAR = 3.5  # robust standard deviations from which a value counts as far
LARGEST = 1_000.0  # larger scores are cut to this value
SYSTEM = ("time.", "traffic.", "memory.", "throughput.")  # signs of machines and links rather than of training
# About the shared machine or fedvitals itself; and class numbers, which are names and not quantities.
LEFT_OUT = ("monitor.", "machine.", "bottleneck.", "time.part", "examined.", "memory.growth")
CLASSES = ("confused_guess", "confused_label")


@dataclass(frozen=True, slots=True)
class ComparedSign:
    """A sign of all clients over the rounds."""

    name: str
    unit: str
    matrix: Matrix  # [clients, rounds]
    scores: Array  # as the matrix; NaN where there are too few clients or no finite value


@dataclass(frozen=True, slots=True)
class Deviation:
    """How far a client's sign is from its peers'."""

    client: str
    sign: str
    score: float  # the median over the rounds since `since`; without it, over all rounds
    far_rounds: int  # rounds beyond `FAR`
    compared_rounds: int  # rounds with a score
    since: int | None  # the round from which most are beyond `FAR`; None if there is none
    newest: float
    usual: float  # the other clients' median in the same round
    not_finite: int  # values that were NaN or infinite
    not_finite_since: int | None  # the first round with such a value: later ones may come from the global model


def signs_of(reader: Reader, run: str, name: str | None = None) -> Iterator[ComparedSign]:
    """Yield the signs that the run's clients have, or the one of that name."""
    names = queries.metric_names(reader, run) if name is None else [name]
    for metric in names:
        if (
            metric.startswith(LEFT_OUT)
            or metric.endswith(CLASSES)
            or (CATALOG.get(metric) is None and not metric.startswith("user."))
        ):
            continue
        matrix = metric_matrix(reader, run, metric)
        if matrix.nodes and matrix.rounds:
            unit = CATALOG[metric].unit if metric in CATALOG else "1"
            yield ComparedSign(metric, unit, matrix, _scores(matrix.values, is_bounded=unit in ("share", "cosine")))
    if name is None or name.startswith(f"{PEERS}."):
        yield from _peers(reader, run, name)


def _peers(reader: Reader, run: str, name: str | None) -> Iterator[ComparedSign]:
    history = reader.history(run)
    layers = history.layers(PEERS)
    columns = FAMILIES[PEERS].columns if name is None else [name.removeprefix(f"{PEERS}.")]
    for column in columns if layers else ():
        rounds, nodes, values = history.matrix(PEERS, column, layers[0])
        clients = [i for i, node in enumerate(nodes) if is_client(node)]
        matrix = matrix_of([nodes[i] for i in clients], rounds, values[:, clients].T)
        yield ComparedSign(f"{PEERS}.{column}", "cosine", matrix, _scores(matrix.values, is_bounded=True))


def _scores(values: Array | Floats, *, is_bounded: bool) -> Array:
    scores = np.full(values.shape, np.nan)
    for i in range(values.shape[1]):
        column = np.where(np.isfinite(values[:, i]), values[:, i], np.nan).astype(np.float64)
        known = np.isfinite(column)
        if known.sum() < FEWEST:
            continue
        middle = float(np.nanmedian(column))
        floor = FLOOR if is_bounded else FLOOR * (abs(middle) or float(np.nanmax(np.abs(column))))
        if floor == 0 and (column[known] == middle).all():
            scores[known, i] = 0.0
            continue
        with np.errstate(divide="ignore", invalid="ignore"):
            scores[:, i] = np.clip(robust_scores(column, floor), -LARGEST, LARGEST)
    return scores


def deviation_of(sign: ComparedSign, client: str) -> Deviation | None:
    """Return how far the client is from its peers in this sign; None if it has no value."""
    row = sign.matrix.row(client)
    if row is None:
        return None
    values, scores, rounds = sign.matrix.values[row].astype(np.float64), sign.scores[row], sign.matrix.rounds
    there = np.flatnonzero(sign.matrix.there[row])
    if not len(there):
        return None
    odd = there[~np.isfinite(values[there])]
    known = np.flatnonzero(np.isfinite(scores))
    start = _start(scores[known])
    counted = scores[known[start:]] if start is not None else scores[known]
    newest = there[-1]
    others = np.delete(sign.matrix.values[:, newest], row)
    return Deviation(
        client=client,
        sign=sign.name,
        score=float(np.median(counted)) if len(counted) else 0.0,
        far_rounds=int((np.abs(scores[known]) > FAR).sum()),
        compared_rounds=len(known),
        since=None if start is None else int(rounds[known[start]]),
        newest=float(values[newest]),
        usual=finite_median(others),
        not_finite=len(odd),
        not_finite_since=int(rounds[odd[0]]) if len(odd) else None,
    )


def _start(scores: Array) -> int | None:
    """Return the first index from which at least two thirds of the scores are far, and two or more of them."""
    far = np.abs(scores) > FAR
    for i in np.flatnonzero(far):
        if far[i:].sum() >= max(2, 2 * len(far[i:]) / 3):
            return int(i)
    return None


def strongest(reader: Reader, run: str, clients: Sequence[str] | None = None) -> list[Deviation]:
    """Return the deviations of these clients, or of all: values that are not finite first, in order of occurrence; then
    lasting ones, the largest first; then the others.
    """
    deviations: list[Deviation] = []
    for sign in signs_of(reader, run):
        for client in sign.matrix.nodes if clients is None else clients:
            deviation = deviation_of(sign, client)
            if deviation is not None:
                deviations.append(deviation)
    return sorted(deviations, key=order)


def order(deviation: Deviation) -> tuple[float, bool, float]:
    """Return the sort key of deviations."""
    came = float("inf") if deviation.not_finite_since is None else deviation.not_finite_since
    return came, deviation.since is None, -abs(deviation.score)
