# SPDX-License-Identifier: Apache-2.0
"""The rules of Amazon SageMaker Debugger with their documented defaults, as far as a federation's history allows.

Implemented here from the public documentation of the rules (see «List of Debugger built-in rules» there), not run by
SageMaker. A «step» of a rule is a round, its «training loss» the mean of the clients' own, its «validation loss» the
global model's. If a rule needs something that is not stored, the closest available is used, as its function notes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fedvitals.protocols import History, Node
from fedvitals.stats import Array


class Accusation(NamedTuple):
    issue: str
    node: Node | None  # None: the run as a whole


def sagemaker_rules(history: History, round_index: int) -> list[Accusation]:
    """Return the rules' accusations in this round, each once."""
    return list(dict.fromkeys(found for rule in RULES for found in rule(history, round_index)))


def vanishing_gradient(history: History, round_index: int) -> Iterator[Accusation]:
    """VanishingGradient: the mean magnitude of a layer's gradient is under 1e-7 (here: its root mean square)."""
    nodes, values = _across(history, "gradient", "rms", round_index)
    for node in _any(nodes, values < 1e-7):
        yield Accusation("VANISHING_GRADIENT", node)


def exploding_tensor(history: History, round_index: int) -> Iterator[Accusation]:
    """ExplodingTensor: any value is NaN or infinite; its default knows no other limit."""
    for family, issue in (("gradient", "NAN_GRADIENT"), ("weight", "NAN_WEIGHTS"), ("update", "NAN_UPDATE")):
        for kind in ("nans", "infs"):
            nodes, values = _across(history, family, kind, round_index)
            for node in _any(nodes, values > 0):
                yield Accusation(issue, node)
    for node, value in history.latest("loss", round_index).items():
        if not np.isfinite(value):
            yield Accusation("NAN_GRADIENT", node)
    value = _until(history, round_index).get(round_index, 0.0)
    if not np.isfinite(value):
        yield Accusation("NAN_WEIGHTS", None)


def all_zero(history: History, round_index: int) -> Iterator[Accusation]:
    """AllZero: every value of a layer's gradient is 0."""
    nodes, values = _across(history, "gradient", "sparsity", round_index)
    for node in _any(nodes, values >= 1.0):
        yield Accusation("VANISHING_GRADIENT", node)


def unchanged_tensor(history: History, round_index: int) -> Iterator[Accusation]:
    """UnchangedTensor: a layer is the same in three steps (here: unmoved in the client's last three rounds)."""
    here = set(history.latest("update.norm", round_index))
    still: set[Node] = set()
    for layer in history.layers("update"):
        rounds, nodes, values = history.matrix("update", "l2", layer)
        kept = values[: sum(number <= round_index for number in rounds)]
        for column, node in enumerate(nodes):
            own = kept[:, column][~np.isnan(kept[:, column])][-3:]
            if node in here and len(own) == 3 and (own <= 1e-8).all():
                still.add(node)
    yield from (Accusation("FROZEN_LAYER", node) for node in sorted(still))


def weight_update_ratio(history: History, round_index: int) -> Iterator[Accusation]:
    """WeightUpdateRatio: over 10 or under 1e-8 (here: of all weights together)."""
    for node, value in history.latest("weight.update_ratio", round_index).items():
        if value > 10 or value < 1e-8:
            yield Accusation("WRONG_LEARNING_RATE", node)


def poor_weight_initialization(history: History, round_index: int) -> Iterator[Accusation]:
    """PoorWeightInitialization, in the first ten steps: variances of layers' weights differ more than tenfold, or a
    layer's gradients lie within 0.001 (5th to 95th percentile), or the loss has not fallen for five steps.

    Here: variance as mean square, biases aside; percentiles as of a normal distribution, 3.29 root mean squares.
    """
    if round_index >= 10:
        return
    nodes, weights = _across(history, "weight", "rms", round_index)
    matrices = [i for i, name in enumerate(history.layers("weight")) if not name.endswith("bias")]
    squares = weights[:, matrices] ** 2
    with np.errstate(divide="ignore", invalid="ignore"):
        uneven = bool(len(nodes) and len(matrices) > 1 and (squares.max(1) / squares.min(1) > 10).any())
    _, gradients = _across(history, "gradient", "rms", round_index)
    narrow = bool((3.29 * gradients < 0.001).any())
    losses = [*_until(history, round_index).values()]
    stuck = len(losses) > 5 and min(losses[-5:]) >= losses[-6]
    if uneven or narrow or stuck:
        yield Accusation("POOR_INITIALISATION", None)


def loss_not_decreasing(history: History, round_index: int) -> Iterator[Accusation]:
    """LossNotDecreasing: against ten steps ago, at every tenth, it has not fallen by 0.1 %."""
    losses = _until(history, round_index)
    if (
        round_index % 10 == 0
        and round_index - 10 in losses
        and round_index in losses
        and losses[round_index] > 0.999 * losses[round_index - 10]
    ):
        yield Accusation("PLATEAU", None)


def overfit(history: History, round_index: int) -> Iterator[Accusation]:
    """Overfit: (validation − training) / training loss is over 0.1; patience 1."""
    validation, training = _until(history, round_index), _training(history, round_index)
    if round_index not in validation or round_index not in training or training[round_index] <= 0:
        return
    if (validation[round_index] - training[round_index]) / training[round_index] > 0.1:
        yield Accusation("OVERFITTING", None)


def overtraining(history: History, round_index: int) -> Iterator[Accusation]:
    """Overtraining: the training loss has not improved by 0.1 for 5 steps, or the validation loss for 10."""
    for losses, patience in ((_training(history, round_index), 5), (_until(history, round_index), 10)):
        values = [*losses.values()]
        if len(values) > patience and min(values[:-patience]) - min(values[-patience:]) < 0.1:
            yield Accusation("PLATEAU", None)


def dead_relu(history: History, round_index: int) -> Iterator[Accusation]:
    """DeadRelu: over half of a layer's units are silent in 99 % of the samples (here: in all)."""
    nodes, values = _across(history, "activation.health", "dead_fraction", round_index)
    for node in _any(nodes, values > 0.5):
        yield Accusation("DEAD_UNITS", node)


def saturated_activation(history: History, round_index: int) -> Iterator[Accusation]:
    """SaturatedActivation: over half of a layer's units are at their limits."""
    nodes, values = _across(history, "activation.health", "saturated_fraction", round_index)
    for node in _any(nodes, values > 0.5):
        yield Accusation("SATURATED_UNITS", node)


RULES: tuple[Callable[[History, int], Iterator[Accusation]], ...] = (
    vanishing_gradient,
    exploding_tensor,
    all_zero,
    unchanged_tensor,
    weight_update_ratio,
    poor_weight_initialization,
    loss_not_decreasing,
    overfit,
    overtraining,
    dead_relu,
    saturated_activation,
)


def _across(history: History, family: str, statistic: str, round_index: int) -> tuple[list[Node], Array]:
    """Return [nodes × layers] of one statistic; empty if the family was not measured."""
    if not history.layers(family):
        return [], np.empty((0, 0))
    nodes, values = history.across(family, (statistic,), round_index)
    return nodes, values[..., 0]


def _any(nodes: list[Node], wrong: npt.NDArray[np.bool_]) -> list[Node]:
    """Return the nodes with a layer for which it is true; NaN never is."""
    return [node for node, rows in zip(nodes, wrong, strict=True) if rows.any()]


def _until(history: History, round_index: int) -> dict[int, float]:
    """Return the global model's loss by round."""
    rounds, values = history.series("loss", None)
    return {number: value for number, value in zip(rounds, values, strict=True) if number <= round_index}


def _training(history: History, round_index: int) -> dict[int, float]:
    """Return the mean of the clients' losses by round."""
    found = {number: history.latest("loss", number) for number in history.rounds() if number <= round_index}
    return {number: float(np.mean([*values.values()])) for number, values in found.items() if values}
