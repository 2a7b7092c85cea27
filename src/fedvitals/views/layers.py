# SPDX-License-Identifier: Apache-2.0
"""Computes the page of a run's layers: statistics through the depth of the model and over the rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedvitals.catalog import CATALOG, LAYER_PAIRS
from fedvitals.errors import ConfigError, unknown
from fedvitals.protocols import Node
from fedvitals.stats import Array, derive
from fedvitals.store.read import queries
from fedvitals.store.read.earlier_runs import earlier_runs
from fedvitals.store.read.layer_history import LayerHistory, layer_history
from fedvitals.store.read.reader import Reader
from fedvitals.views.cohort import matrix_of
from fedvitals.views.grid import Grid, make_grid
from fedvitals.views.series import Numbers, between, json_numbers
from fedvitals.views.shown_statistics import shown_statistic
from fedvitals.views.units import number as size

FAMILIES = ("gradient", "gradient.full", "update", "weight", "activation")
WORDS = {  # statistics that the page offers: their meaning, and how they are drawn
    "rms": ("root mean square: size per value, whatever the layer's size", "log"),
    "l2": ("L2 norm: grows with the layer's size, and with steps and clients that are summed", "log"),
    "mean_magnitude": ("mean magnitude", "log"),
    "mean": ("mean, with its sign", "signed"),
    "std": ("standard deviation", "log"),
    "absmax": ("largest magnitude", "log"),
    "sparsity": ("share of exact zeros", "share"),
    "nans": ("NaN values", "count"),
    "infs": ("infinite values", "count"),
}
NODES = 500  # names in the selection
LINES = 12  # rounds in the depth profile
AVERAGES = 8  # layers drawn as lines; more become a heat map
EARLIER_RUNS = 3
SCALES = ("scale.gsc", "scale.sensitivity", "nonlinearity.nlc")
HEALTH = {"dead_fraction": "dead units", "saturated_fraction": "saturated units"}


@dataclass(frozen=True, slots=True)
class StatisticKnown:
    """A statistic that can be shown."""

    name: str
    meaning: str
    scale: str  # «log», «signed», «share», «count»


@dataclass(frozen=True, slots=True)
class LayerKnown:
    """A layer of the model."""

    name: str
    shape: tuple[int, ...]
    values: int
    weight: bool  # of two or more dimensions: the gradient flows through it


@dataclass(frozen=True, slots=True)
class ProfileLine:
    """One round's statistic through the depth of the model."""

    round: int
    values: Numbers


@dataclass(frozen=True, slots=True)
class DepthProfile:
    """One line per round, one value per layer, the first layer first."""

    layers: tuple[str, ...]
    lines: tuple[ProfileLine, ...]
    rounds: int  # total, of which some are shown


@dataclass(frozen=True, slots=True)
class Average:
    """The mean gradient of one layer over the rounds."""

    layer: str
    mean: Numbers  # signed
    magnitude: Numbers


@dataclass(frozen=True, slots=True)
class Averages:
    """The average gradient of each layer over the rounds, as in the paper, which does not say whether it is signed."""

    rounds: tuple[int, ...]
    layers: tuple[Average, ...]
    total: int  # number of layers, of which some are shown


@dataclass(frozen=True, slots=True)
class UnitHealth:
    """Dead or saturated units by layer and round."""

    name: str
    title: str
    grid: Grid


@dataclass(frozen=True, slots=True)
class ScaleKnown:
    """A measure of the gradient's scale, and whether the run has it."""

    name: str
    meaning: str
    formula: str
    measured: bool
    needs: str


@dataclass(frozen=True, slots=True)
class EarlierScale:
    """The gradient scale of an earlier run of the same model: the clients' median in each round."""

    run: str
    name: str
    rounds: tuple[int, ...]
    values: Numbers


@dataclass(frozen=True, slots=True)
class LayersPage:
    """Everything that the layers' page shows."""

    run: str
    node: str | None  # None: the federation
    family: str
    statistic: str
    headline: str  # the gradient flow in words
    nodes: tuple[str, ...]  # that can be selected, the first few
    families: tuple[str, ...]  # that the run has
    statistics: tuple[StatisticKnown, ...]
    layers: tuple[LayerKnown, ...]
    weights_only: bool  # whether the profile omits biases and norms
    profile: DepthProfile
    grid: Grid
    averages: Averages | None
    health: tuple[UnitHealth, ...]
    scales: tuple[ScaleKnown, ...]
    earlier_scales: tuple[EarlierScale, ...]  # GSC of the last runs of the same model, for comparison
    total_rounds: int
    thinned: bool  # whether some rounds were skipped
    missing: tuple[str, ...]  # what was not measured, and how to get it


def layers_page(
    reader: Reader,
    run: str,
    *,
    family: str = "gradient",
    statistic: str = "rms",
    node: Node | None = None,
    selected: int | None = None,
    every_layer: bool = False,
    first: int | None = None,
    last: int | None = None,
    columns: int = 400,
) -> LayersPage:
    """Return the page of a run's layers; `selected`: a round that the profile must show."""
    known = queries.layer_families(reader, run)
    offered = tuple(name for name in FAMILIES if name in known)
    if statistic not in WORDS:
        raise ConfigError(unknown("statistic", statistic, WORDS))
    if family not in FAMILIES:
        raise ConfigError(unknown("family of layer statistics", family, FAMILIES))
    nodes = reader.history(run).nodes()
    if node is not None and node not in nodes:
        raise ConfigError(unknown("node", node, nodes))
    history = layer_history(reader, run, family, node)
    described = _described(reader, run, history.layers)
    values = (
        shown_statistic(family, history.matrix, statistic)
        if len(history.rounds)
        else np.empty((0, len(history.layers)))
    )
    gradient = history if family == "gradient" else layer_history(reader, run, "gradient", node)
    weights = [i for i, layer in enumerate(described) if layer.weight]
    profiled = list(range(len(described))) if every_layer or not weights else weights
    return LayersPage(
        run=run,
        node=node,
        family=family,
        statistic=statistic,
        headline=flow_in_words(gradient, _described(reader, run, gradient.layers), selected),
        nodes=tuple(nodes[:NODES]),
        families=offered,
        statistics=tuple(StatisticKnown(name, *words) for name, words in WORDS.items()),
        layers=described,
        weights_only=len(profiled) < len(described),
        profile=_profile(history, values, profiled, selected, first, last),
        grid=grid_of(history, values, f"{family}, {statistic}", first, last, columns),
        averages=averages(gradient, _described(reader, run, gradient.layers), first, last),
        health=_health(reader, run, node, first, last, columns) if "activation.health" in known else (),
        scales=_scales(set(queries.metric_names(reader, run))),
        earlier_scales=_earlier_scales(reader, run),
        total_rounds=history.total,
        thinned=history.thinned,
        missing=tuple(_missing(known, family, history)),
    )


def flow_in_words(history: LayerHistory, layers: Sequence[LayerKnown], selected: int | None = None) -> str:
    """Describe the gradient in the newest round, or in the selected one, without judging it."""
    weights = [i for i, layer in enumerate(layers) if layer.weight]
    if not history.rounds or not weights:
        return "No gradient of a layer was stored: there is nothing to say about its flow."
    number = selected if selected in history.rounds else history.rounds[-1]
    matrix = history.matrix[history.rounds.index(number), weights]
    names = [history.layers[i] for i in weights]
    broken = derive(history.family, matrix, "nans") + derive(history.family, matrix, "infs") > 0
    if broken.any():
        return f"In round {number} the gradient is not finite in {_some(names, broken.tolist())}."
    sizes = derive(history.family, matrix, "rms")
    if (sizes == 0).any():
        return f"In round {number} the gradient does not reach {_some(names, (sizes == 0).tolist())}: it is exactly 0."
    low, high = int(np.nanargmin(sizes)), int(np.nanargmax(sizes))
    sentence = f"In round {number} the gradient (root mean square) is {size(sizes[0])} in {names[0]}, the first weight"
    if len(names) > 1:
        sentence += f", and {size(sizes[-1])} in {names[-1]}, the last"
    if len(names) > 2 and sizes[low] > 0:
        sentence += f"; largest in {names[high]}, {size(sizes[high] / sizes[low])} times the smallest, in {names[low]}"
    return f"{sentence}."


def _some(names: Sequence[str], which: Sequence[bool]) -> str:
    chosen = [name for name, yes in zip(names, which, strict=True) if yes]
    more = f" and {len(chosen) - 3} more" if len(chosen) > 3 else ""
    return f"{len(chosen)} of {len(names)} weights ({', '.join(chosen[:3])}{more})"


def _described(reader: Reader, run: str, layers: Sequence[str]) -> tuple[LayerKnown, ...]:
    """Return the layers with their shapes, in the order of the model."""
    shapes = {layer.name: layer.shape for table in queries.get_run(reader, run).tables for layer in table.layers}
    return tuple(
        LayerKnown(name, shape := shapes.get(name, ()), int(np.prod(shape)), len(shape) >= 2) for name in layers
    )


def chosen_rounds(rounds: Sequence[int], selected: int | None, most: int = LINES) -> list[int]:
    """Choose at most `most` rounds, evenly spaced: always the first, the last and the selected one."""
    if len(rounds) <= most:
        return list(rounds)
    places = {round(i * (len(rounds) - 1) / (most - 1)) for i in range(most)}
    chosen = {rounds[place] for place in places}
    if selected is not None and selected in set(rounds) and selected not in chosen:
        inner = sorted(chosen)[1:-1]
        chosen.remove(min(inner, key=lambda n: abs(n - selected)))
        chosen.add(selected)
    return sorted(chosen)


def _profile(
    history: LayerHistory,
    values: Array,
    layers: Sequence[int],
    selected: int | None,
    first: int | None,
    last: int | None,
) -> DepthProfile:
    inside = [n for n in history.rounds if (first is None or n >= first) and (last is None or n <= last)]
    place = {n: i for i, n in enumerate(history.rounds)}
    lines = tuple(ProfileLine(n, json_numbers(values[place[n], list(layers)])) for n in chosen_rounds(inside, selected))
    return DepthProfile(tuple(history.layers[i] for i in layers), lines, len(inside))


def grid_of(
    history: LayerHistory,
    values: Array,
    title: str,
    first: int | None = None,
    last: int | None = None,
    columns: int = 400,
) -> Grid:
    """Return layers × rounds, in the order of the model."""
    there = np.ones(values.T.shape, bool) if values.size else None
    matrix = matrix_of(history.layers, history.rounds, values.T, there)
    return make_grid(
        matrix, rows=list(history.layers), sort="given", first=first, last=last, columns=columns, title=title
    )


def averages(
    history: LayerHistory, layers: Sequence[LayerKnown], first: int | None = None, last: int | None = None
) -> Averages | None:
    """Return signed mean and mean magnitude of the weights' gradients, for a few layers from the first to the last."""
    weights = [i for i, layer in enumerate(layers) if layer.weight]
    inside = between(history.rounds, first, last)
    if not weights or not history.rounds[inside]:
        return None
    few = chosen_rounds(weights, None, AVERAGES)
    part = history.matrix[inside]  # a view: a copy would take the same memory again
    mean, magnitude = (derive(history.family, part, name) for name in ("mean", "mean_magnitude"))
    return Averages(
        history.rounds[inside],
        tuple(Average(history.layers[i], json_numbers(mean[:, i]), json_numbers(magnitude[:, i])) for i in few),
        len(weights),
    )


def _health(
    reader: Reader, run: str, node: Node | None, first: int | None, last: int | None, columns: int
) -> tuple[UnitHealth, ...]:
    history = layer_history(reader, run, "activation.health", node)
    grids = []
    for statistic, title in HEALTH.items() if history.rounds else ():
        values = derive(history.family, history.matrix, statistic)
        grids.append(UnitHealth(statistic, title, grid_of(history, values, title, first, last, columns)))
    return tuple(grids)


def _scales(measured: set[str]) -> tuple[ScaleKnown, ...]:
    scales = []
    for name in SCALES:
        measure = CATALOG[name]
        scales.append(ScaleKnown(name, measure.meaning, measure.formula, name in measured, measure.needs))
    for name in sorted(measured):
        if name.startswith(LAYER_PAIRS):
            upper, _, lower = name.removeprefix(LAYER_PAIRS).partition("/")
            formula = f"(1/√n)·‖J‖_F·‖{upper}‖ / ‖{lower}‖"
            scales.append(ScaleKnown(name, f"gradient scale of {upper}/{lower}", formula, True, ""))
    return tuple(scales)


def _earlier_scales(reader: Reader, run: str) -> tuple[EarlierScale, ...]:
    runs = earlier_runs(reader, queries.get_run(reader, run), SCALES[0], EARLIER_RUNS)
    return tuple(EarlierScale(e.id, e.name, tuple(e.levels), json_numbers([*e.levels.values()])) for e in runs)


def _missing(known: Sequence[str], family: str, history: LayerHistory) -> list[str]:
    """Return sentences on missing data, so that an empty place is not mistaken for a healthy one."""
    sentences = []
    if not history.rounds:
        sentences.append(
            f"Nothing of the family '{family}' was stored here. "
            'Monitor(probes="standard") measures gradients, updates and weights of layers, from privacy level 3 on.'
        )
    if "activation.health" not in known:
        sentences.append(
            'Dead and saturated units were not measured: Monitor(probes="deep") does, and activations with them.'
        )
    if "gradient.histogram" not in known:
        sentences.append('The shape of the gradients\' distribution was not measured: Monitor(probes="deep") does.')
    return sentences
