# SPDX-License-Identifier: Apache-2.0
"""Compare the data that clients describe (`probes.data_sketch`) with their peers' and with their own earlier data.

All comparisons are of means by class, in units of the spread within classes. The best explanation is chosen by
log-likelihood ratios under normal errors, each with one free parameter:

- *flip*: a share of the samples that a client labels c belong to one other class;
- *noise*: a share of the samples of every label is a mixture of all the client's samples;
- *excess*: how much there is to explain at all.

Healthy clients also differ beyond what their numbers of samples explain. How much is estimated from the run itself (τ²,
from the middle of all clients' deviations) and allowed for. Nothing here is learnt.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from fedvitals.data_change import DataSketch
from fedvitals.diagnosis.evidence.compared_features import unlike_features
from fedvitals.protocols import Node
from fedvitals.stats import Array

FEWEST_CLIENTS = 3  # described clients needed before one can stand out: two others agree
FEWEST_IN_POOL = 8  # samples of a class, from at least two peers, needed for a comparison
RESOLVED = 0.4  # share of wrong labels for which detectability is computed
PRIOR = 10  # prior weight, in samples, of the usual width of a class
MOST_WEIGHT = 4.0  # times the usual number of samples of a class
RIDGE = 0.03  # of its variance, added to every direction
SHRINKAGE = 4  # cells per dimension, the weight of equal directions
LIKELY_FLIP = 6.0  # log-likelihood ratio
OUTLYING = 12.0  # log-likelihood ratio from which a client is left out of its peers' pool
SHIFT_LIMIT = 60.0  # log-likelihood ratio above which inputs differ, whatever the labels
SHIFT_OF_OTHERS = 3.0  # times that of the usual client, added to that limit
FAR = 5.0  # mean squared deviation of such inputs, from which they would hide the deviations of others
MOST_OUTLYING = 0.3  # of all clients, but at least one
LEAST_SPREAD = 0.03  # of the logarithm of inputs' standard deviations: variation among healthy clients
FEW_CLIENTS = 4  # below this number of clients the spread counts twice, as it is hardly known
UNUSUAL_SPREAD = 4.5  # deviations of that logarithm, above which a client is left out of the pool


@dataclass(frozen=True, slots=True)
class DataDeviation:
    """How far one client's data deviate from what is expected."""

    noise: float  # log-likelihood ratio
    rate: float  # estimated share of wrong labels
    mixed: float  # log-likelihood ratio of wrong labels whose share may differ by class
    flip: float  # log-likelihood ratio
    pair: tuple[int, int] | None  # label, and the true class of its samples
    share: float  # of the label's samples
    flipped: float  # number of such samples, and their share of all that the client described
    flipped_share: float
    pairs: int  # class pairs in which a flip was searched for, over all clients
    flips: int  # labels for which a flip is a likely explanation
    usual_flip: float  # value of `flip` that a quarter of the other clients exceed
    excess: float
    usual_excess: float  # the median of the other clients'
    wider: float  # variance within its classes over the usual one; NaN if unknown
    cells: int  # classes compared
    spread_score: float  # deviations of the logarithm of the inputs' standard deviation
    spread_ratio: float  # that standard deviation over the expected one
    slope: float  # how far apart its classes lie, over the peers'; NaN with fewer than two
    resolved: float  # the log-likelihood ratio that 40 % of wrong labels would have
    features: Mapping[int, float] = field(default_factory=dict)  # of a table, on another scale: times the peers' spread


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
    """Return how far each client's data are from those of its peers; empty if there are too few to tell."""
    comparable = _same_kind(sketches)
    if len(comparable) < FEWEST_CLIENTS:
        return {}
    features = unlike_features(comparable)
    deviations = _compared(comparable)
    return {node: replace(own, features=features.get(node, {})) for node, own in deviations.items()}


def _compared(comparable: Mapping[Node, DataSketch]) -> dict[Node, DataDeviation]:
    """Return the deviations of clients whose data can be compared.

    Computed again without the clients that stood out most as peers: first those whose inputs are so far from all others
    that these would seem alike, then those whose labels look wrong.
    """
    scores, ratios = spread_scores(comparable)
    unusual = {node for node, score in scores.items() if abs(score) > UNUSUAL_SPREAD}
    cells = _cells(comparable, unusual)
    if cells is None:  # only scalars may leave the clients
        nothing = (0.0, math.nan, 0.0, 0.0, None, 0.0, 0.0, 0.0, 0, 0, 0.0, 0.0, 0.0, math.nan, 0)
        return {node: DataDeviation(*nothing, scores[node], ratios[node], math.nan, 0.0) for node in comparable}
    most = max(1, int(MOST_OUTLYING * len(cells.nodes)))
    compared = _rewhitened(cells, unusual)
    first = _deviations(compared, unusual, scores, ratios)
    evidence = {node: own.excess if _is_far(own, cells.means.shape[2]) else 0.0 for node, own in first.items()}
    far = _most_outlying(evidence, unusual, most)
    if far:
        unusual |= far
        compared = _rewhitened(cells, unusual)
        first = _deviations(compared, unusual, scores, ratios)
    worst = _most_outlying({node: max(own.noise, own.flip) for node, own in first.items()}, unusual, most)
    return _deviations(compared, unusual | worst, scores, ratios) if worst else first


def has_other_inputs(deviation: DataDeviation) -> bool:
    """Return whether a client's inputs differ from its peers', whatever their labels."""
    limit = SHIFT_LIMIT + SHIFT_OF_OTHERS * max(0.0, deviation.usual_excess)
    return deviation.excess > limit and deviation.cells > 1


def _is_far(deviation: DataDeviation, dimensions: int) -> bool:
    squares = 2 * deviation.excess / max(deviation.cells, 1) + dimensions
    return has_other_inputs(deviation) and squares > FAR * dimensions


def _most_outlying(evidence: Mapping[Node, float], unusual: Collection[Node], most: int) -> set[Node]:
    """Return the clients with most evidence, so that at most `most` are outside their peers' pool."""
    outlying = [node for node in evidence if node not in unusual and evidence[node] > OUTLYING]
    return {*sorted(outlying, key=lambda node: -evidence[node])[: max(0, most - len(unusual))]}


def _same_kind(sketches: Mapping[Node, DataSketch]) -> dict[Node, DataSketch]:
    """Return the sketches with the most common number of dimensions, and with labels if most have them."""
    kinds = [(sketch.means.shape[1], sketch.labelled) for sketch in sketches.values()]
    usual = max(set(kinds), key=kinds.count, default=None)
    return {node: own for (node, own), kind in zip(sketches.items(), kinds, strict=True) if kind == usual}


def spread_scores(sketches: Mapping[Node, DataSketch]) -> tuple[dict[Node, float], dict[Node, float]]:
    """Return how unusual the standard deviation of each client's inputs is, and its ratio to the median.

    In robust deviations of its logarithm.
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
    """Return all sketches with means in units of the usual spread within classes; None if that is unknown."""
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
    return _Cells([*sketches], labels, counts, means, _widths(sketches, unusual, column, counts), wider)


def _widths(
    sketches: Mapping[Node, DataSketch], unusual: Collection[Node], column: Mapping[int, int], counts: Array
) -> Array:
    """Return the width of each class, as its variance over that of the usual class, from all usual clients."""
    squares, freedom = np.zeros(len(column)), np.zeros(len(column))
    weights = _weights(counts)
    for row, (node, own) in enumerate(sketches.items()):
        places = [column[label] for label in own.classes]
        if places and node not in unusual:
            samples = np.minimum(own.counts, weights[row, places] / own.distinct) - 1
            squares[places] += samples * own.spreads
            freedom[places] += samples
    usual = squares.sum() / max(freedom.sum(), 1)
    # A prior of a few samples of the usual width keeps classes with few samples near it.
    return np.asarray((squares + PRIOR * usual) / np.maximum((freedom + PRIOR) * usual, 1e-30))


def _whitening(sketches: Collection[DataSketch]) -> Array | None:
    """Return the matrix that gives projections unit covariance within classes, estimated from the usual clients."""
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
    """Return the cells with means in units of the differences between healthy clients in each direction, if known.

    Frames of one video, or pictures of one camera, differ from others more in some directions than in others.
    """
    inside = np.array([node not in outside for node in cells.nodes])
    _, differences, sampling, compared, _ = _differences(cells, inside)
    used = compared & inside[:, None]
    if not used.any():
        return cells
    scaled = differences[used] / np.sqrt(sampling[used] + _scatter(differences, sampling, used))[:, None]
    dimensions = scaled.shape[1]
    # Each cell's weight is capped at the usual one, because outlying clients are among them.
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
    """Return the peers' means, how far each client's own lie from them, and the sampling variance of that.

    Also which classes can be compared, and for which the peers' mean is known at all. All by client and class.
    """
    pooled = _weights(cells.counts) * inside[:, None]
    totals, holders = pooled.sum(axis=0), (pooled > 0).sum(axis=0)
    sums = (cells.means * pooled[:, :, None]).sum(axis=0)
    others = totals - pooled  # [clients, classes]: samples of the peers
    compared = (cells.counts > 0) & (others >= FEWEST_IN_POOL) & (holders - (pooled > 0) >= 2)
    known = (others >= FEWEST_IN_POOL) & (holders - (pooled > 0) >= 1)
    centres = (sums - cells.means * pooled[:, :, None]) / np.maximum(others, 1)[:, :, None]
    differences = np.where(compared[:, :, None], cells.means - centres, 0.0)
    sampling = cells.widths * (1 / np.maximum(cells.counts, 1) + 1 / np.maximum(others, 1))
    return centres, differences, sampling, compared, known


def _deviations(
    cells: _Cells, outside: Collection[Node], scores: Mapping[Node, float], ratios: Mapping[Node, float]
) -> dict[Node, DataDeviation]:
    """Return the deviations, with these clients excluded from all peers."""
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
    """Return how far apart a client's classes lie, over the peers'.

    A camera of higher contrast increases it, and a noisy one does not change it.
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
    """Return each client's share of wrong labels, its squared standard error, and what labels wrong by class explain.

    NaN if unknown. Wrong labels move the means of a client's classes by their share towards those of its other samples;
    with few samples of a class, the share may differ by class. A shift common to all classes, as of a brighter camera,
    is subtracted first.
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
        # A camera of lower contrast brings all classes closer to each other, and the inputs scatter less.
        shares = np.clip((towards * moved).sum(axis=1) / np.maximum(lengths, 1e-9), 1 - contrast[row], 1.0)
        left, usual = moved - shares[:, None] * towards, moved - (1 - contrast[row]) * towards
        mixed[row] = float(((usual**2 - left**2).sum(axis=1) * weights).sum()) / 2
        length = float((lengths * weights).sum())
        if length > 0:
            rates[row] = float((towards * moved * weights[:, None]).sum()) / length
            errors[row] = 1 / length
    return 1 - (1 - rates) / contrast, errors / contrast**2, mixed


def _noise_scores(rates: Array, errors: Array, inside: npt.NDArray[np.bool_]) -> tuple[Array, Array]:
    """Return the log-likelihood ratio that a client has more wrong labels than usual here, [clients].

    Also its value for a share of `RESOLVED`.
    """
    peers = inside & np.isfinite(rates)
    if peers.sum() < FEWEST_CLIENTS - 1:  # not counting the client itself
        return np.zeros(len(rates)), np.zeros(len(rates))
    usual = float(np.median(rates[peers]))
    spread = 1.4826 * float(np.median(np.abs(rates[peers] - usual)))
    scatter = max(0.0, spread**2 - float(np.median(errors[peers])))
    above = np.maximum(np.nan_to_num(rates - max(0.0, usual)), 0.0)
    variances = np.nan_to_num(errors + scatter, nan=np.inf)
    return above**2 / variances / 2, RESOLVED**2 / variances / 2


def _weights(counts: Array) -> Array:
    """Return the weights of clients in their peers' pool: their samples, capped at a few times the usual number.

    So no client decides alone, by what it has or claims to have.
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
    """Return the best explanation by one label of which a share of the samples belong to one other class.

    This is the log-likelihood ratio, the two classes and the share; and the number of labels with such an explanation.
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
