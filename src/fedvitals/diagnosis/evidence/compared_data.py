# SPDX-License-Identifier: Apache-2.0
"""Compare what clients tell of their data (`probes.data_sketch`) with their peers, and with their own earlier data.

All comparisons are of means by class, in units of the spread within classes. Which explanation fits best is asked by
log-likelihood ratios under normal errors, each with one free parameter:

- *flip*: the samples that a client labels c are, to a share, of one other class;
- *noise*: the samples of every label are, to a share, a mixture of all the client's samples;
- *excess*: how much there is to explain at all.

Healthy clients differ, too, beyond what the number of their samples explains. How much is estimated from the run
itself (τ², from the middle of all clients' deviations) and allowed for. Nothing here is learnt.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from fedvitals.data_change import DataSketch
from fedvitals.protocols import Node
from fedvitals.stats import Array

FEWEST_CLIENTS = 3  # that have described their data, from which one of them can stand out: two others agree
FEWEST_IN_POOL = 8  # samples of a class that the peers have, and at least of two peers, to compare with
RESOLVED = 0.4  # share of wrong labels, for which it is told how clearly they would be seen
PRIOR = 10  # samples, as which the usual width of a class counts
MOST_WEIGHT = 4.0  # times the usual number of samples of a class
RIDGE = 0.03  # of its variance, added to every direction
SHRINKAGE = 4  # cells per dimension, as many as count for directions being alike
LIKELY_FLIP = 6.0  # log-likelihood ratio
OUTLYING = 12.0  # log-likelihood ratio from which a client is left out of its peers' pool
MOST_OUTLYING = 0.3  # of all clients, and at least one
LEAST_SPREAD = 0.03  # of the logarithm of inputs' standard deviations, that healthy clients have
FEW_CLIENTS = 4  # of fewer than so many, twice as much: what is usual among them is hardly known
UNUSUAL_SPREAD = 4.5  # deviations of that logarithm, from which a client is left out of the pool


@dataclass(frozen=True, slots=True)
class DataDeviation:
    """How far one client's data are from what is expected."""

    noise: float  # log-likelihood ratio
    rate: float  # estimated share of wrong labels
    mixed: float  # what wrong labels explain, if their share may differ by class; as a log-likelihood ratio
    flip: float  # log-likelihood ratio
    pair: tuple[int, int] | None  # label, and the class that its samples are of
    share: float  # of the label's samples
    flipped: float  # that many samples, and as a share of all that the client described
    flipped_share: float
    pairs: int  # of classes in which a flip was looked for, of all clients
    flips: int  # labels for which a flip is a likely explanation
    usual_flip: float  # `flip` that a quarter of the other clients exceed
    excess: float
    usual_excess: float  # the median of the other clients'
    wider: float  # variance within its classes over the usual one; NaN where it is not known
    cells: int  # classes that were compared
    spread_score: float  # deviations of the logarithm of the inputs' standard deviation
    spread_ratio: float  # that standard deviation over the expected one
    slope: float  # how far its classes lie apart, over the peers'; NaN where fewer than two are compared
    resolved: float  # the log-likelihood ratio that 40 % of wrong labels would have


@dataclass(frozen=True, slots=True)
class _Cells:
    """All clients' sketches in arrays: counts [clients, classes] and whitened means [clients, classes, dimensions]."""

    nodes: list[Node]
    labels: list[int]
    counts: Array
    means: Array
    widths: Array  # [classes]: variance within a class over that within the usual one
    wider: Array  # [clients]: variance within a client's classes over that of the usual client


def compare_data(sketches: Mapping[Node, DataSketch]) -> dict[Node, DataDeviation]:
    """Return how far each client's data are from those of its peers; empty where they are too few to tell.

    Twice: the second time those that stood out the most are no peers.
    """
    comparable = _same_kind(sketches)
    if len(comparable) < FEWEST_CLIENTS:
        return {}
    scores, ratios = spread_scores(comparable)
    unusual = {node for node, score in scores.items() if abs(score) > UNUSUAL_SPREAD}
    cells = _cells(comparable, unusual)
    if cells is None:  # scalars are all that may leave the clients
        nothing = (0.0, math.nan, 0.0, 0.0, None, 0.0, 0.0, 0.0, 0, 0, 0.0, 0.0, 0.0, math.nan, 0)
        return {node: DataDeviation(*nothing, scores[node], ratios[node], math.nan, 0.0) for node in comparable}
    cells = _rewhitened(cells, unusual)
    first = _deviations(cells, unusual, scores, ratios)
    evidence = {node: max(own.noise, own.flip) for node, own in first.items() if node not in unusual}
    most = max(0, max(1, int(MOST_OUTLYING * len(first))) - len(unusual))
    worst = [node for node in sorted(evidence, key=lambda node: -evidence[node]) if evidence[node] > OUTLYING][:most]
    return _deviations(cells, unusual | {*worst}, scores, ratios) if worst else first


def _same_kind(sketches: Mapping[Node, DataSketch]) -> dict[Node, DataSketch]:
    """Return the sketches of as many dimensions as most have, and with labels where most have them."""
    kinds = [(sketch.means.shape[1], sketch.labelled) for sketch in sketches.values()]
    usual = max(set(kinds), key=kinds.count, default=None)
    return {node: own for (node, own), kind in zip(sketches.items(), kinds, strict=True) if kind == usual}


def spread_scores(sketches: Mapping[Node, DataSketch]) -> tuple[dict[Node, float], dict[Node, float]]:
    """Return how unusual the standard deviation of each client's inputs is among all, in robust deviations of its
    logarithm, and its ratio to the median.
    """
    logs = np.array([math.log(s.spread) if 0 < s.spread < math.inf else np.nan for s in sketches.values()])
    if np.isfinite(logs).sum() < FEWEST_CLIENTS:
        nothing = dict.fromkeys(sketches, 0.0)
        return nothing, dict.fromkeys(sketches, 1.0)
    distances = logs - np.nanmedian(logs)
    errors = np.array([min(max(own.scalars.get("std_error", 0.0), 0.0), 10.0) for own in sketches.values()])
    least = LEAST_SPREAD * (1 if len(logs) >= FEW_CLIENTS else 2)
    scale = np.hypot(math.hypot(1.4826 * float(np.nanmedian(np.abs(distances))), least), errors)
    scores = np.nan_to_num(distances / scale)
    ratios = np.exp(np.clip(np.nan_to_num(distances), -700, 700))
    return dict(zip(sketches, scores.tolist(), strict=True)), dict(zip(sketches, ratios.tolist(), strict=True))


def _cells(sketches: Mapping[Node, DataSketch], unusual: Collection[Node]) -> _Cells | None:
    """Return all sketches with means in units of the usual spread within classes; None where that is not known."""
    whitening = _whitening([own for node, own in sketches.items() if node not in unusual])
    if whitening is None:
        return None
    labels = sorted({label for own in sketches.values() for label in own.classes})
    column = {label: place for place, label in enumerate(labels)}
    dimensions = len(whitening)
    counts, means = np.zeros((len(sketches), len(labels))), np.zeros((len(sketches), len(labels), dimensions))
    for row, own in enumerate(sketches.values()):
        places = [column[label] for label in own.classes]
        if places:
            counts[row, places], means[row, places] = own.counts * own.distinct, own.means @ whitening
    traces = np.array([own.variance for own in sketches.values()])
    wider = traces / max(float(np.median(traces)), 1e-30)
    return _Cells([*sketches], labels, counts, means, _widths(sketches, unusual, column), wider)


def _widths(sketches: Mapping[Node, DataSketch], unusual: Collection[Node], column: Mapping[int, int]) -> Array:
    """Return how wide each class is, as variance over that of the usual class, from all usual clients."""
    squares, freedom = np.zeros(len(column)), np.zeros(len(column))
    for node, own in sketches.items():
        places = [column[label] for label in own.classes]
        if places and node not in unusual:
            squares[places] += (own.counts - 1) * own.spreads
            freedom[places] += own.counts - 1
    usual = squares.sum() / max(freedom.sum(), 1)
    # As if each class had been seen a little with the usual width: of few samples, little is known.
    return np.asarray((squares + PRIOR * usual) / np.maximum((freedom + PRIOR) * usual, 1e-30))


def _whitening(sketches: Collection[DataSketch]) -> Array | None:
    """Return the matrix that gives projections unit covariance within classes, from the usual clients."""
    traces = np.array([own.variance for own in sketches])
    usable = np.isfinite(traces) & (traces > 0)
    if not usable.any():
        return None
    middle = np.median(traces[usable])
    kept = [own for own, trace, use in zip(sketches, traces, usable, strict=True) if use and trace <= 4 * middle]
    weights = np.minimum([own.freedom for own in kept], 4 * np.median([own.freedom for own in kept]))
    covariance = np.average([own.covariance for own in kept], axis=0, weights=np.maximum(weights, 1))
    variances = np.diagonal(covariance)
    covariance = covariance + np.diag(RIDGE * np.maximum(variances, 1e-6 * variances.max()))
    try:
        return np.linalg.cholesky(np.linalg.inv(covariance))
    except np.linalg.LinAlgError:
        return None


def _rewhitened(cells: _Cells, outside: Collection[Node]) -> _Cells:
    """Return the cells with means in units of what healthy clients differ by in each direction, as far as that is
    known: frames of one video, or one camera's pictures, differ from others more in some directions than in others.
    """
    inside = np.array([node not in outside for node in cells.nodes])
    _, differences, sampling, compared, _ = _differences(cells, inside)
    used = compared & inside[:, None]
    if not used.any():
        return cells
    scaled = differences[used] / np.sqrt(sampling[used] + _scatter(differences, sampling, used))[:, None]
    dimensions = scaled.shape[1]
    # No cell counts more than the usual one: those of a client that stands out are among them.
    lengths = (scaled**2).sum(axis=1)
    scaled *= np.minimum(1.0, np.sqrt(np.median(lengths) / np.maximum(lengths, 1e-30)))[:, None]
    covariance = scaled.T @ scaled
    covariance *= dimensions / max(float(np.trace(covariance)), 1e-30)
    known = len(scaled) / (len(scaled) + SHRINKAGE * dimensions)
    turned = np.linalg.cholesky(np.linalg.inv(known * covariance + (1 - known) * np.eye(dimensions)))
    return replace(cells, means=cells.means @ turned)


def _differences(
    cells: _Cells, inside: npt.NDArray[np.bool_]
) -> tuple[Array, Array, Array, npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Return the means of each client's peers, how far its own lie from them and the variance of that by sampling;
    which classes can be compared, and of which the peers' mean is known at all. All by client and class.
    """
    pooled = _weights(cells.counts) * inside[:, None]
    totals, holders = pooled.sum(axis=0), (pooled > 0).sum(axis=0)
    sums = (cells.means * pooled[:, :, None]).sum(axis=0)
    others = totals - pooled  # [clients, classes]: samples that the peers have
    compared = (cells.counts > 0) & (others >= FEWEST_IN_POOL) & (holders - (pooled > 0) >= 2)
    known = (others >= FEWEST_IN_POOL) & (holders - (pooled > 0) >= 1)
    centres = (sums - cells.means * pooled[:, :, None]) / np.maximum(others, 1)[:, :, None]
    differences = np.where(compared[:, :, None], cells.means - centres, 0.0)
    sampling = cells.widths * (1 / np.maximum(cells.counts, 1) + 1 / np.maximum(others, 1))
    return centres, differences, sampling, compared, known


def _deviations(
    cells: _Cells, outside: Collection[Node], scores: Mapping[Node, float], ratios: Mapping[Node, float]
) -> dict[Node, DataDeviation]:
    """Return the deviations, with these clients left out of everybody's peers."""
    inside = np.array([node not in outside for node in cells.nodes])
    centres, differences, sampling, compared, known = _differences(cells, inside)
    scatter = _scatter(differences, sampling, compared & inside[:, None])
    variances = sampling + scatter
    contrast = np.array([min(1.0, max(ratios[node], 1e-3)) for node in cells.nodes])
    rates, errors, mixed = _noise_rates(cells, centres, differences, variances, compared, contrast)
    noise, resolved = _noise_scores(rates, errors, inside)
    squares = (differences**2).sum(axis=2) / variances
    flips = [
        _best_flip(centres[row], differences[row], variances[row], squares[row], compared[row], known[row])
        for row in range(len(cells.nodes))
    ]
    gains = np.array([own[0] for own in flips])
    pairs = int((compared.sum(axis=1) * (known.sum(axis=1) - 1)).clip(min=0).sum())
    excesses = np.where(compared, squares - cells.means.shape[2], 0.0).sum(axis=1) / 2
    deviations = {}
    for row, node in enumerate(cells.nodes):
        flip, place, share, likely = flips[row]
        pair = None if place is None else (cells.labels[place[0]], cells.labels[place[1]])
        usual = float(np.quantile(np.delete(gains, row), 0.75))
        flipped = 0.0 if place is None else share * float(cells.counts[row, place[0]])
        of_all = flipped / max(float(cells.counts[row].sum()), 1.0)
        usual_excess = float(np.median(np.delete(excesses, row)))
        deviations[node] = DataDeviation(
            *(float(noise[row]), float(rates[row]), float(mixed[row]), flip, pair, share),
            *(flipped, of_all, pairs, likely, usual),
            *(float(excesses[row]), usual_excess, float(cells.wider[row]), int(compared[row].sum())),
            *(scores[node], ratios[node], _slope(cells, centres, compared, row), float(resolved[row])),
        )
    return deviations


def _slope(cells: _Cells, centres: Array, compared: npt.NDArray[np.bool_], row: int) -> float:
    """Return how far a client's classes lie apart over how far the peers' do: more with a camera of more contrast, and
    as far as theirs with a noisy one.
    """
    own = compared[row]
    if own.sum() < 2:
        return math.nan
    weights = cells.counts[row, own][:, None]
    theirs = centres[row, own] - np.average(centres[row, own], axis=0, weights=weights[:, 0])
    return float((cells.means[row, own] * theirs * weights).sum() / max(float((theirs**2 * weights).sum()), 1e-30))


def _noise_rates(
    cells: _Cells,
    centres: Array,
    differences: Array,
    variances: Array,
    compared: npt.NDArray[np.bool_],
    contrast: Array,
) -> tuple[Array, Array, Array]:
    """Return each client's share of wrong labels and the square of its standard error, NaN where it is not known; and
    what such labels explain if each class may have a share of its own, as where a client has few samples of a class.

    The means of its classes lie, by that share, nearer to those of its other samples. A shift that all classes have in
    common, as of a brighter camera, is taken off first.
    """
    rates, errors = np.full(len(cells.nodes), np.nan), np.full(len(cells.nodes), np.nan)
    mixed = np.zeros(len(cells.nodes))
    sums = cells.means * cells.counts[:, :, None]
    for row in np.flatnonzero(compared.sum(axis=1) > 1).tolist():
        own = compared[row]
        rest = cells.counts[row].sum() - cells.counts[row, own]
        mixture = (sums[row].sum(axis=0) - sums[row, own]) / np.maximum(rest, 1)[:, None]
        weights = 1 / variances[row, own]
        towards, moved = mixture - centres[row, own], differences[row, own]
        towards = towards - np.average(towards, axis=0, weights=weights)
        moved = moved - np.average(moved, axis=0, weights=weights)
        lengths = (towards**2).sum(axis=1)
        # Where a camera has less contrast, all classes lie nearer to each other, and the inputs scatter less.
        shares = np.clip((towards * moved).sum(axis=1) / np.maximum(lengths, 1e-9), 1 - contrast[row], 1.0)
        left, usual = moved - shares[:, None] * towards, moved - (1 - contrast[row]) * towards
        mixed[row] = float(((usual**2 - left**2).sum(axis=1) * weights).sum()) / 2
        length = float((lengths * weights).sum())
        if length > 0:
            rates[row] = float((towards * moved * weights[:, None]).sum()) / length
            errors[row] = 1 / length
    return 1 - (1 - rates) / contrast, errors / contrast**2, mixed


def _noise_scores(rates: Array, errors: Array, inside: npt.NDArray[np.bool_]) -> tuple[Array, Array]:
    """Return the log-likelihood ratio that a client has more wrong labels than is usual here, [clients], and what it
    would be for `RESOLVED` of them.
    """
    peers = inside & np.isfinite(rates)
    if peers.sum() < FEWEST_CLIENTS - 1:  # besides the client itself
        return np.zeros(len(rates)), np.zeros(len(rates))
    usual = float(np.median(rates[peers]))
    spread = 1.4826 * float(np.median(np.abs(rates[peers] - usual)))
    scatter = max(0.0, spread**2 - float(np.median(errors[peers])))
    above = np.maximum(np.nan_to_num(rates - max(0.0, usual)), 0.0)
    variances = np.nan_to_num(errors + scatter, nan=np.inf)
    return above**2 / variances / 2, RESOLVED**2 / variances / 2


def _weights(counts: Array) -> Array:
    """Return the weights of clients in their peers' pool: samples, of one client at most a few times the usual number,
    so that nobody decides alone, by what it has or claims to have.
    """
    usual = np.array([np.median(own[own > 0]) if (own > 0).any() else 0.0 for own in counts.T])
    return np.minimum(counts, MOST_WEIGHT * usual)


def _scatter(differences: Array, sampling: Array, used: npt.NDArray[np.bool_]) -> float:
    """Return τ²: how far healthy clients' means differ beyond sampling, per direction; from the middle of all."""
    if not used.any():
        return 0.0
    beyond = (differences**2).mean(axis=2)[used] - sampling[used]
    return max(0.0, float(np.median(beyond)))


def _best_flip(
    centres: Array,
    differences: Array,
    variances: Array,
    squares: Array,
    compared: npt.NDArray[np.bool_],
    known: npt.NDArray[np.bool_],
) -> tuple[float, tuple[int, int] | None, float, int]:
    """Return the best explanation by one label whose samples are, to a share, of one other class: log-likelihood ratio,
    the two classes, the share; and for how many labels there is such an explanation.
    """
    best: tuple[float, tuple[int, int] | None, float] = (0.0, None, 0.0)
    likely = 0
    for label in np.flatnonzero(compared).tolist():
        directions = np.where(known[:, None], centres - centres[label], 0.0)
        lengths = (directions**2).sum(axis=1)
        shares = np.clip(directions @ differences[label] / np.maximum(lengths, 1e-9), 0.0, 1.0)
        left = ((differences[label] - shares[:, None] * directions) ** 2).sum(axis=1) / variances[label]
        gains = (squares[label] - left) / 2
        gains[label] = 0.0
        other = int(gains.argmax())
        likely += int(gains[other] > LIKELY_FLIP)
        if gains[other] > best[0]:
            best = float(gains[other]), (label, other), float(shares[other])
    return *best, likely
