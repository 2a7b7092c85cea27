# SPDX-License-Identifier: Apache-2.0
"""Plain threshold rules, one number and one limit each; off unless requested.

They use neither peers nor the run's own past, so a limit that fits one training raises false alarms in the next. They
are outside the false-alarm budget, and only report notes. `Monitor(detectors=["standard", plain_rules()])`, with limits
of your own, is for users who know what their training must never do. The fault bank compares them, with these limits,
with the detectors that need none.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from fedvitals.diagnosis.finding import Number, finding
from fedvitals.errors import ConfigError
from fedvitals.protocols import Detector, History, Node
from fedvitals.records import Finding

ROUNDS_BACK = 4  # the loss is compared with four rounds ago, or over four changes in five rounds


@dataclass(frozen=True, slots=True)
class PlainRuleLimits:
    """The limits of the plain rules; None switches a rule off. NaN and infinity always exceed."""

    loss_ratio: float | None = 2.0  # loss now over the loss four rounds ago
    swing: float | None = 0.2  # relative change of the loss, in each of the last four rounds
    gradient_norm: float | None = 1000.0  # largest of a client, all layers
    layer_norm: tuple[float, float] | None = (1e-7, 100.0)  # smallest and largest of one layer
    change: float | None = 3.0  # of the gradient's norm from one step to the next, against the former
    weight: float | None = 1000.0  # largest magnitude

    def __post_init__(self) -> None:
        low, high = self.layer_norm if self.layer_norm is not None else (1.0, 2.0)
        named = {name: getattr(self, name) for name in ("loss_ratio", "swing", "gradient_norm", "change", "weight")}
        named |= {"layer_norm (smallest)": low, "layer_norm (largest)": high}
        for name, limit in named.items():
            if limit is not None and not limit > 0:
                raise ConfigError(f"{name} of plain_rules must be above 0, or None to leave it out; got {limit}.")
        if low >= high:
            raise ConfigError(f"layer_norm of plain_rules is (smallest, largest); got ({low}, {high}).")


@dataclass(frozen=True, slots=True)
class CrossedLimit:
    """One limit that one number crossed."""

    issue: str
    node: Node | None
    message: str
    number: Number
    layer: str | None = None
    since: int | None = None
    certain: bool = False  # NaN or Inf leave no doubt


def plain_rules(
    *,
    loss_ratio: float | None = 2.0,
    swing: float | None = 0.2,
    gradient_norm: float | None = 1000.0,
    layer_norm: tuple[float, float] | None = (1e-7, 100.0),
    change: float | None = 3.0,
    weight: float | None = 1000.0,
) -> Detector:
    """Return a detector with these limits, for `Monitor(detectors=["standard", plain_rules()])`.

    None disables a rule.
    """
    limits = PlainRuleLimits(loss_ratio, swing, gradient_norm, layer_norm, change, weight)

    def plain(history: History, round_index: int) -> Iterable[Finding]:
        return [
            finding(
                crossing.issue,
                round_index,
                crossing.message,
                confidence=1.0 if crossing.certain else 0.5,  # how sure a bare limit makes is unknown
                since=crossing.since,
                node=crossing.node,
                layer=crossing.layer,
                severity="note",
                numbers=(crossing.number,),
                more={"rule": "plain rule"},
            )
            for crossing in crossed_limits(history, round_index, limits)
        ]

    return plain


def crossed_limits(history: History, round_index: int, limits: PlainRuleLimits) -> list[CrossedLimit]:
    """Return the limits crossed in this round; only the first per issue and client."""
    first: dict[tuple[str, Node | None], CrossedLimit] = {}
    rules = (
        *_loss(history, round_index, limits),
        *_not_finite(history, round_index),
        *_gradients(history, round_index, limits),
        *_layers(history, round_index, limits),
        *_weights(history, round_index, limits),
    )
    for crossing in rules:
        first.setdefault((crossing.issue, crossing.node), crossing)
    return list(first.values())


def losses_up_to(history: History, round_index: int) -> tuple[list[int], list[float]]:
    """Return rounds and losses of the global model up to this round; without logged ones, the mean of the clients'."""
    rounds, values = history.series("loss", None)
    if not rounds:
        client_losses = [
            (past_round, history.latest("loss", past_round))
            for past_round in history.rounds()
            if past_round <= round_index
        ]
        rounds = [past_round for past_round, losses in client_losses if losses]
        values = [float(np.mean([*losses.values()])) for _, losses in client_losses if losses]
    kept = sum(past_round <= round_index for past_round in rounds)
    return rounds[:kept], values[:kept]


def _loss(history: History, round_index: int, limits: PlainRuleLimits) -> Iterator[CrossedLimit]:
    rounds, values = losses_up_to(history, round_index)
    if not rounds or rounds[-1] != round_index or len(values) <= ROUNDS_BACK:
        return
    before, *_, now = window = values[-ROUNDS_BACK - 1 :]
    since = rounds[-ROUNDS_BACK - 1]
    if limits.loss_ratio is not None and now > limits.loss_ratio * before:
        message = f"The loss is {now:.3g}: more than {limits.loss_ratio:g} times the {before:.3g} of round {since}."
        yield CrossedLimit("DIVERGENCE", None, message, _limit("loss", now, limits.loss_ratio * before), since=since)
    if limits.swing is not None:
        changes = [abs(b - a) / abs(a) if a else math.inf for a, b in itertools.pairwise(window)]
        if all(change > limits.swing for change in changes):
            message = f"Each of the last {ROUNDS_BACK} rounds changed the loss by more than {100 * limits.swing:.0f} %."
            yield CrossedLimit("OSCILLATION", None, message, _limit("loss", min(changes), limits.swing), since=since)


def _not_finite(history: History, round_index: int) -> Iterator[CrossedLimit]:
    rounds, values = history.series("loss", None)
    if round_index in rounds and not math.isfinite(value := values[rounds.index(round_index)]):
        yield CrossedLimit(
            "NAN_WEIGHTS",
            None,
            f"The loss is {'NaN' if math.isnan(value) else 'infinite'}.",
            _limit("loss", value),
            certain=True,
        )
    for node, value in history.latest("loss", round_index).items():
        if not math.isfinite(value):
            message = f"The loss of {node} is {value}."
            yield CrossedLimit("NAN_GRADIENT", node, message, _limit("loss", value), certain=True)
    for issue, metric, what in (
        ("NAN_GRADIENT", "gradient.nonfinite", "gradients"),
        ("NAN_WEIGHTS", "weight.nonfinite", "weights"),
    ):
        for node, count in history.latest(metric, round_index).items():
            if count > 0:
                message = f"{count:.0f} values in the {what} of {node} are NaN or Inf."
                yield CrossedLimit(issue, node, message, _limit(metric, count, 0.0), certain=True)


def _gradients(history: History, round_index: int, limits: PlainRuleLimits) -> Iterator[CrossedLimit]:
    for metric, limit, what in (
        ("gradient.norm_max", limits.gradient_norm, "largest gradient norm"),
        ("gradient.change", limits.change, "largest change of the gradient norm from step to step"),
    ):
        for node, value in history.latest(metric, round_index).items():
            if limit is not None and value > limit:
                message = f"The {what} of {node} is {value:.3g}, over {limit:g}."
                yield CrossedLimit("EXPLODING_GRADIENT", node, message, _limit(metric, value, limit))


def _layers(history: History, round_index: int, limits: PlainRuleLimits) -> Iterator[CrossedLimit]:
    names = history.layers("gradient.steps")
    if limits.layer_norm is None or not names or names != history.layers("gradient"):
        return
    nodes, steps = history.across("gradient.steps", ("norm_max",), round_index)
    measured, sizes = history.across("gradient", ("rms",), round_index)
    low, high = limits.layer_norm
    for node, norms in zip(nodes, steps[:, :, 0], strict=True):
        if node not in measured:
            continue
        # A layer that does not train has no gradient, rather than a gradient of 0.
        trained = np.isfinite(sizes[measured.index(node), :, 0]) & np.isfinite(norms)
        for issue, wrong, worst in (
            ("EXPLODING_GRADIENT", trained & (norms > high), np.argmax(np.where(trained, norms, -math.inf))),
            ("VANISHING_GRADIENT", trained & (norms < low), np.argmin(np.where(trained, norms, math.inf))),
        ):
            if wrong.any():
                limit, value = high if issue == "EXPLODING_GRADIENT" else low, float(norms[worst])
                side = "over" if value > limit else "under"
                message = f"The gradient norm of {names[worst]} on {node} is {value:.3g}, {side} {limit:g}."
                yield CrossedLimit(issue, node, message, _limit("gradient.steps", value, limit), names[worst])


def _weights(history: History, round_index: int, limits: PlainRuleLimits) -> Iterator[CrossedLimit]:
    """Check the weights of all clients together, because they start from the same weights."""
    names = history.layers("weight")
    if limits.weight is None or not names:
        return
    nodes, values = history.across("weight", ("absmax",), round_index)
    largest = np.where(np.isfinite(values[..., 0]), values[..., 0], -math.inf)
    if largest.size and (value := float(largest.max())) > limits.weight:
        node, layer = np.unravel_index(int(largest.argmax()), largest.shape)
        message = f"The largest weight is {value:.3g}, over {limits.weight:g}: in {names[layer]}, on {nodes[node]}."
        yield CrossedLimit("WEIGHT_EXPLOSION", None, message, _limit("weight", value, limits.weight), names[layer])


def _limit(name: str, value: float, limit: float | None = None) -> Number:
    return Number(name, float(value), limit, of="limit")
