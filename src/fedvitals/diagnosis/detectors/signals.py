# SPDX-License-Identifier: Apache-2.0
"""Dimensionless quantities that the detectors of convergence and gradients read from a single run's history.

Norms of gradients mean nothing by themselves, since they grow with the model. What is compared here has no unit: how
much the loss would change if a layer were twice as large, the fraction of units that never move, how much of the
clients' common step the server takes. No round after the examined one is used, so that a stored run gives the same
answers as a live one.
"""

from __future__ import annotations

import itertools
import math
import weakref
from bisect import bisect_right
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedvitals.diagnosis.evidence.update_mismatch import clients_with_trained_updates
from fedvitals.diagnosis.history_cutoff import shared
from fedvitals.protocols import History, Node
from fedvitals.stats import Array

SERVER = "server"
REFERENCE_WIDTH = 64.0  # units of a layer, up to which no correction is made
NEXT_TO_NOTHING = 1e-6  # of the layer with most
LOSSES = ("loss", "local.loss")  # of the round: on the test set, and on the clients' own tests
ACCURACIES = ("accuracy", "local.accuracy")
PLAUSIBLE_LOSS = 2.0  # times a blind guess's cross-entropy: more, and it may be another kind of loss
LONGEST_BIAS_GRADIENT = 2.0**0.5 * 1.01  # of mean cross-entropy, with room for rounding
LONGEST_GAP = 256  # rounds that are kept although a curve no longer has them
ELSEWHERE = 0.01  # of the length of a client's change: from the sums of its layers, rounding gives up to 1e-5
SCALED_BY = 3  # rounds by which a loss of another scale has shown itself


@dataclass(frozen=True, slots=True)
class MetricCurve:
    """One value per round, up to the examined round."""

    name: str
    rounds: tuple[int, ...]
    values: Array

    def __len__(self) -> int:
        return len(self.rounds)

    def last(self, count: int) -> Array:
        """Return the newest `count` values."""
        return self.values[-count:]


def metric_curve(history: History, name: str, round_index: int) -> MetricCurve:
    """Return a metric's values up to and including a round."""
    rounds, values = history.series(name, None)
    count = bisect_right(rounds, round_index)
    return MetricCurve(name, tuple(rounds[:count]), np.array(values[:count], dtype=np.float64))


@shared
def loss_curve(history: History, round_index: int) -> MetricCurve:
    """Return the global model's loss, all values from one source; empty where nobody measures it.

    The test loss, or the loss on the clients' own tests where these are evaluated more often.
    """
    central, averaged = (metric_curve(history, name, round_index) for name in LOSSES)
    return averaged if len(averaged) > len(central) else _of_one_source(history, central, averaged)


def _of_one_source(history: History, losses: MetricCurve, averaged: MetricCurve) -> MetricCurve:
    """Return the values that have the same source as the newest one.

    A host may evaluate only occasionally itself, and otherwise average its clients' evaluations; runs recorded earlier
    hold both under one name. A value within the range of the clients' own losses is taken for their average, unless
    that average has a name of its own in the same round.
    """
    mixed = CLIENT_LOSS_RANGES.contain(history, losses, set(averaged.rounds))
    kept = np.flatnonzero(mixed == mixed[-1]) if len(mixed) else np.arange(0)
    return MetricCurve(losses.name, tuple(losses.rounds[i] for i in kept), losses.values[kept])


class ClientLossRanges:
    """The range of the clients' own losses in each round, cached by history so that a long run is not read again
    every round.
    """

    def __init__(self) -> None:
        self._ranges: weakref.WeakKeyDictionary[History, dict[int, tuple[float, float]]] = weakref.WeakKeyDictionary()

    def known_rounds(self, history: History) -> Collection[int]:
        """Return the rounds of a history whose range is kept."""
        return self._ranges.get(history, {}).keys()

    def contain(self, history: History, losses: MetricCurve, left_out: Collection[int]) -> npt.NDArray[np.bool_]:
        """Return for each round whether its loss can be an average of its clients' losses; False where no client
        reports its own, and for the rounds to leave out.
        """
        ranges = self._ranges.setdefault(history, {})
        if len(ranges) > len(losses) + LONGEST_GAP:  # rounds that the history no longer shows
            ranges = self._ranges[history] = {n: ranges[n] for n in losses.rounds if n in ranges}
        for round_index in losses.rounds:
            if round_index not in ranges and round_index not in left_out:
                own = [value for value in history.latest("local.loss", round_index).values() if math.isfinite(value)]
                room = 1e-5 * max(map(abs, own), default=0.0)
                ranges[round_index] = (min(own) - room, max(own) + room) if own else (np.inf, -np.inf)
        nowhere = (np.inf, -np.inf)
        limits = np.array([nowhere if n in left_out else ranges[n] for n in losses.rounds]).reshape(-1, 2)
        return np.asarray((limits[:, 0] <= losses.values) & (losses.values <= limits[:, 1]))


CLIENT_LOSS_RANGES = ClientLossRanges()


@shared
def training_clients(history: History, round_index: int) -> list[Node]:
    """Return the clients that trained in this round, without the server and edges, which have statistics of their
    own.
    """
    return [
        *dict.fromkeys([*history.latest("gradient.norm", round_index), *history.latest("update.norm", round_index)])
    ]


def client_values(history: History, name: str, round_index: int) -> Array:
    """Return a metric's values of all clients in a round."""
    return np.array(
        [value for node, value in history.latest(name, round_index).items() if node != SERVER], dtype=np.float64
    )


def client_median(history: History, name: str, round_index: int) -> float:
    """Return a metric's median over the clients; NaN where nobody reports it."""
    return _client_median(history, round_index, name)


@shared
def _client_median(history: History, round_index: int, name: str) -> float:
    values = client_values(history, name, round_index)
    values = values[~np.isnan(values)]
    return float(np.median(values)) if len(values) else float("nan")


def rows_of_nodes(
    history: History, family: str, statistics: tuple[str, ...], round_index: int, nodes: list[Node]
) -> Array:
    """Return [nodes, layers, statistics] for those of the nodes that have them."""
    measured, values = history.across(family, statistics, round_index)
    kept = set(nodes)
    return values[[i for i, node in enumerate(measured) if node in kept]]


def quiet_quantile(values: Array, share: float) -> Array:
    """Return the quantile over the first axis, ignoring NaN; NaN where nothing is. Much faster than NumPy's own."""
    if not len(values):
        return np.full(values.shape[1:], np.nan)
    ordered = np.sort(values, axis=0)  # NaN come last
    there = np.count_nonzero(~np.isnan(values), axis=0)
    place = np.floor(share * np.maximum(there - 1, 0) + 0.5).astype(np.int64)
    return np.asarray(np.take_along_axis(ordered, place[None], axis=0)[0])


# -- layers -----------------------------------------------------------------------------------------------------------


def bias_of(weight: str) -> str:
    """Return the name of the bias that belongs to a weight."""
    head, dot, last = weight.rpartition(".")
    return f"{head}{dot}{last.replace('weight', 'bias')}"


def matrix_layers(names: tuple[str, ...], counts: Array) -> list[int]:
    """Return the indices of the weights of dense, convolutional and recurrent layers.

    Shapes are not reported, but a norm's weight has as many values as its bias.
    """
    size = dict(zip(names, counts, strict=True))
    return [
        place
        for place, name in enumerate(names)
        if "weight" in name.rpartition(".")[2] and not size[name] <= size.get(bias_of(name), 1)
    ]


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """The weight layers of a round, first to last, each by the median over the clients."""

    names: tuple[str, ...]  # of weight matrices
    # ‖gradient‖·‖weights‖, corrected for width: nats of loss for a change of all the layer's weights by their own size.
    elasticity: Array
    zero: npt.NDArray[np.bool_]  # the gradient is exactly 0 on most clients
    chance: float  # loss of a model that knows nothing and says so, in nats: log(classes); NaN where that is unknown

    @property
    def pressure(self) -> Array:
        """Return the elasticity relative to the loss of a blind guess; NaN where that is unknown."""
        return self.elasticity / self.chance

    @property
    def top(self) -> float:
        """Return the largest pressure of any layer."""
        return float(np.nanmax(self.pressure, initial=0.0))

    @property
    def cut_off(self) -> bool:
        """Return whether at least half of the layers get (almost) no gradient compared with the others."""
        return float(np.mean(self.elasticity <= NEXT_TO_NOTHING * np.nanmax(self.elasticity, initial=0.0))) >= 0.5


@shared
def layer_profile(history: History, round_index: int) -> LayerProfile | None:
    """Return the profile of a round; None where layers are not measured (`light`), or nobody trained."""
    names, medians = history.layers("gradient"), _layer_medians(history, round_index)
    if medians is None:
        return None
    counts, rms, typical = medians
    places = matrix_layers(names, counts)
    if not places:
        return None
    elasticity = typical * rms * counts * _width_correction(names, counts)
    bias = bias_of(names[places[-1]])
    last = names.index(bias) if bias in names and bias != names[places[-1]] else None
    classes = int(counts[last]) if last is not None and np.isfinite(counts[last]) else 0
    known = last is not None and _mean_entropy(history, round_index, last)
    chance = chance_level(history, round_index, classes) if known else np.nan
    return LayerProfile(tuple(names[i] for i in places), elasticity[places], typical[places] == 0, chance)


@shared
def _layer_medians(history: History, round_index: int) -> tuple[Array, Array, Array] | None:
    """Return of each layer its number of values and the root mean squares of its weights and gradients, by the median
    client; None where these are not measured, or nobody trained.
    """
    nodes, names = training_clients(history, round_index), history.layers("gradient")
    if not nodes or not names or names != history.layers("weight"):
        return None
    gradients = rows_of_nodes(history, "gradient", ("rms", "nans", "infs"), round_index, nodes)
    weights = rows_of_nodes(history, "weight", ("rms", "count"), round_index, nodes)
    if not len(gradients) or not len(weights):
        return None
    medians = quiet_quantile(weights, 0.5)
    rms, nans, infs = np.moveaxis(gradients, -1, 0)
    typical = np.where((rms == 0) & (nans + infs > 0), np.nan, rms)  # zeros beside NaN are no small gradient
    return medians[..., 1], medians[..., 0], quiet_quantile(typical, 0.5)


def _mean_entropy(history: History, round_index: int, last: int) -> bool:
    """Return whether gradients have the scale of cross-entropy averaged over a batch, as far as the last bias shows.

    Its gradient is then mean(softmax − one-hot), which is never longer than √2. A sum over the batch, or another loss,
    soon gives longer ones; the first rounds suffice to know the scale.
    """
    rounds = history.rounds()
    for past_round in {*rounds[: min(SCALED_BY, bisect_right(rounds, round_index))], round_index}:
        longest = _longest_gradients(history, past_round)
        if longest is not None and longest[last] > LONGEST_BIAS_GRADIENT:
            return False
    return True


@shared
def _longest_gradients(history: History, round_index: int) -> Array | None:
    """Return the median client's longest gradient of a step in each layer; None where steps are not measured."""
    _, largest = history.across("gradient.steps", ("norm_max",), round_index)
    return quiet_quantile(largest[:, :, 0], 0.5) if len(largest) else None


def chance_level(history: History, round_index: int, classes: int) -> float:
    """Return the cross-entropy of a blind guess among so many classes; NaN where the task may be another one.

    Only integer labels show that the loss is of classes: clients that counted them, or measured their accuracy. An
    accuracy that the host logs says less, since the loss may be a sum with other tasks: then the loss itself must have
    been near that of a guess, or below.
    """
    if classes < 2:
        return float("nan")
    chance = float(np.log(classes))
    counted = any((event.where.round or 0) <= round_index for event in history.events("labels"))
    rounds = history.rounds()
    rounds = rounds[: bisect_right(rounds, round_index)]
    if counted or any(history.latest("fit.accuracy_before", past_round) for past_round in {*rounds[:3], *rounds[-3:]}):
        return chance
    accuracies = any(len(metric_curve(history, name, round_index)) for name in ACCURACIES)
    losses = loss_curve(history, round_index).values
    plausible = bool((losses[np.isfinite(losses)] <= PLAUSIBLE_LOSS * chance).any())
    return chance if accuracies and plausible else float("nan")


def _width_correction(names: tuple[str, ...], counts: Array) -> Array:
    """Return factors that undo the growth of ‖gradient‖·‖weights‖ with √units: the more units, the less the two are
    aligned.

    The number of units is that of the biases; without any, a square matrix is assumed. Narrow layers are left as they
    are.
    """
    size = dict(zip(names, counts, strict=True))
    units = np.array([size[b] if (b := bias_of(name)) in size else size[name] ** 0.5 for name in names])
    return np.asarray(np.sqrt(np.minimum(1.0, REFERENCE_WIDTH / np.maximum(units, 1.0))))


@dataclass(frozen=True, slots=True)
class StillUnits:
    """The units of one layer that did not move in a whole round, on nearly every client."""

    layer: str  # its weights
    share: float
    onward: float  # share of the next layer's weights that did not move; NaN without a next layer


@shared
def still_units(history: History, round_index: int) -> list[StillUnits]:
    """Return the still units of every layer with a bias except the last: units that pass nothing get no bias gradient.

    The first decile over the clients is used, because inputs that one client never uses may occur on another. The
    gradient must be 0 too, since compression leaves out most of an update. Layers without any gradient are frozen, and
    are left out.
    """
    nodes, names = training_clients(history, round_index), history.layers("update")
    if not nodes or not names or names != history.layers("gradient"):
        return []
    rows = rows_of_nodes(history, "update", ("sparsity", "count"), round_index, nodes)
    gradients = rows_of_nodes(history, "gradient", ("sparsity",), round_index, nodes)
    if not len(rows) or not len(gradients):
        return []
    counts = quiet_quantile(rows[..., 1], 0.5)
    unmoved = np.minimum(quiet_quantile(rows[..., 0], 0.1), quiet_quantile(gradients[..., 0], 0.1))  # NaN: unknown
    places = matrix_layers(names, counts)
    still = []
    for place, following in itertools.pairwise(places):
        bias = bias_of(names[place])
        if bias in names and bias != names[place] and np.isfinite(unmoved[[names.index(bias), following]]).all():
            still.append(StillUnits(names[place], float(unmoved[names.index(bias)]), float(unmoved[following])))
    return still


# -- the server -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ServerStep:
    """How far the server went along the step that its clients agree on: 1 for plain averaging."""

    rate: float
    fit: float  # R²: how well one rate explains all layers


@shared
def server_step(history: History, round_index: int) -> ServerStep | None:
    """Return the server's step, from sums alone: of each layer's weights before and after, and of the clients' changes.

    The sum of a layer is linear, so a server that takes `rate` times the mean update shows that rate in every layer.
    None where it cannot be known: the first round, `light`, a gap in the rounds, or clients that start from models of
    their own.
    """
    names = history.layers("weight")
    if not names or names != history.layers("update"):
        return None
    before, after = (_server_sums(history, past_round) for past_round in (round_index - 1, round_index))
    nodes, changes = history.across("update", ("sum", "count", "nans", "infs"), round_index)
    trained = set(training_clients(history, round_index))
    # A server that survives an update with NaN has left it out.
    whole = (changes[:, :, 2:] == 0).all(axis=(1, 2))
    kept = [i for i, node in enumerate(nodes) if node in trained and whole[i]]
    if before is None or after is None or not kept or _start_elsewhere(history, round_index, before):
        return None
    weights = _sample_counts(history, round_index, [nodes[i] for i in kept])
    sizes = np.sqrt(np.maximum(changes[kept[0], :, 1], 1.0))
    mean = (weights[:, None] * changes[kept, :, 0]).sum(axis=0) / weights.sum() / sizes
    moved = (after - before) / sizes
    usable = np.isfinite(mean) & np.isfinite(moved)
    mean, moved = mean[usable], moved[usable]
    squares, both = float(mean @ mean), float(mean @ moved)
    if len(mean) < 3 or squares == 0 or not np.any(moved):
        return None
    return ServerStep(both / squares, both**2 / (squares * float(moved @ moved)))


def _start_elsewhere(history: History, round_index: int, server: Array) -> bool:
    """Return whether most clients started from another model than the server's, by the sums of a third of their layers.

    So they do where each continues the model of the one before. Only clients that sent what they trained show it. The
    sums of a classifier's last layer are always the same, since its gradients cancel out over the classes.
    """
    nodes, changes = history.across("update", ("sum", "l2"), round_index)
    holders, weights = history.across("weight", ("sum",), round_index)
    rows = {node: row for row, node in enumerate(holders)}
    honest = clients_with_trained_updates(history, round_index)
    places = [(row, rows[node]) for row, node in enumerate(nodes) if node in rows and node in honest]
    if not places:
        return False
    changed, held = (list(part) for part in zip(*places, strict=True))
    apart = np.abs(weights[held, :, 0] - changes[changed, :, 0] - server) > ELSEWHERE * changes[changed, :, 1]
    return bool((apart.mean(axis=1) >= 1 / 3).mean() > 1 / 2)


def _server_sums(history: History, round_index: int) -> Array | None:
    nodes, values = history.across("weight", ("sum",), round_index)
    return values[nodes.index(SERVER), :, 0] if SERVER in nodes else None


def _sample_counts(history: History, round_index: int, nodes: list[Node]) -> Array:
    """Return each client's weight in the average; all equal where any client's count is unknown."""
    for name in ("update.samples", "samples"):
        claims = history.latest(name, round_index)
        counts = np.array([claims.get(node, np.nan) for node in nodes])
        if np.isfinite(counts).all() and (counts > 0).all():
            return counts
    return np.ones(len(nodes))
