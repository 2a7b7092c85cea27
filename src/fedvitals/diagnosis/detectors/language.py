# SPDX-License-Identifier: Apache-2.0
"""Detectors for language models: forgetting, texts of very different lengths, and sudden jumps of the loss."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from fedvitals.diagnosis.detectors.signals import client_median, loss_curve, metric_curve
from fedvitals.diagnosis.evidence.attendance import SERVER, rounds_until
from fedvitals.diagnosis.finding import Number, finding
from fedvitals.protocols import Detector, History
from fedvitals.records import Finding, Suspect
from fedvitals.stats import Array

FORGOTTEN, FORGOTTEN_ROUNDS = 0.05, 2  # above the lowest held-back loss so far; consecutive rounds
FORGOTTEN_AT_ONCE = 0.1  # enough in a single round
LENGTHS = 4.0  # times the median length, or a fraction of it
FEW_CLIENTS = 4
CUT = 0.5  # share of texts as long as the widest batch, above which texts are probably truncated
EMPTY = 0.75  # share of padding, above which most of the work is wasted
SPIKE, SPIKE_DEVIATIONS, SPIKE_ROUNDS = 0.04, 8.0, 5  # above the usual loss; robust deviations; rounds before


def forgetting(history: History, round_index: int) -> Iterator[Finding]:
    """FORGETTING: the loss on texts that no client trains on rises by more than the clients gain meanwhile.

    The model before the first round counts where it was measured, and where it is known what the clients gained since.
    """
    curve = metric_curve(history, "held_back.loss", round_index)
    initial = metric_curve(history, "initial.held_back.loss", round_index).values[-1:]
    if not len(curve) or curve.rounds[-1] != round_index or not np.isfinite([*initial, *curve.values]).all():
        return
    for rounds, values in (
        ((*curve.rounds,), curve.values),
        ((None,) * len(initial) + curve.rounds, np.append(initial, curve.values)),
    ):
        lowest = _risen_since(values)
        if lowest is None:
            continue
        base, newest, since = float(values[lowest]), float(values[-1]), rounds[lowest]
        gain = _gain_since_start(history, round_index) if since is None else _measured_gain(history, since, round_index)
        if (gain is None and since is None) or (gain is not None and gain >= newest - base):
            continue
        when = "before the first round" if since is None else f"round {since}"
        text = f"The loss on held-back texts rose from {base:.3f} ({when}) to {newest:.3f}"
        text += "." if gain is None else f"; the clients' own changed by {-gain:+.3f} meanwhile."
        begin = next(r for r, v in zip(rounds[lowest + 1 :], values[lowest + 1 :], strict=True) if v > base)
        numbers = [Number("held_back.loss", newest, base, of="own past")]
        yield finding("FORGETTING", round_index, text, confidence=0.95, since=begin, numbers=numbers)
        return


def _risen_since(values: Array) -> int | None:
    """Return the index of the lowest of these losses if they have risen enough since; None if not."""
    lowest, newest = int(np.argmin(values)), values[-FORGOTTEN_ROUNDS:]
    base = float(values[lowest])
    lasting = newest.min() >= (1 + FORGOTTEN) * base and lowest < len(values) - FORGOTTEN_ROUNDS
    risen = lasting or newest[-1] >= (1 + FORGOTTEN_AT_ONCE) * base
    return lowest if len(values) > FORGOTTEN_ROUNDS and base > 0 and risen else None


def _measured_gain(history: History, since: int, round_index: int) -> float | None:
    """Return by how much the loss on the clients' texts fell since a round; None if it is not measured."""
    curve = loss_curve(history, round_index)
    values = dict(zip(curve.rounds, curve.values.tolist(), strict=True))
    return values[since] - values[round_index] if since in values and round_index in values else None


def _gain_since_start(history: History, round_index: int) -> float | None:
    """Return by how much the loss on the clients' texts fell since before the first round; None if it is not known.

    Where the first model's loss is not measured, the perplexities of clients in both rounds tell.
    """
    initial, curve = metric_curve(history, "initial.loss", round_index).values, loss_curve(history, round_index)
    if len(initial) and len(curve) and curve.rounds[-1] == round_index:
        return float(initial[-1] - curve.values[-1])
    first = history.rounds()[0]
    then, now = (history.latest("perplexity.before", own) for own in (first, round_index))
    falls = [math.log(then[node] / now[node]) for node in then.keys() & now.keys() if then[node] > 0 < now[node]]
    return float(np.median(falls)) if falls and first < round_index else None


def length_imbalance(history: History, round_index: int) -> Iterator[Finding]:
    """LENGTH_IMBALANCE: clients whose texts are far longer or shorter than the others', or mostly cut or padded."""
    lengths = {node: value for node, value in history.latest("tokens.length", round_index).items() if value > 0}
    if len(lengths) < FEW_CLIENTS:
        return
    median = float(np.median([*lengths.values()]))
    odd = [node for node, length in lengths.items() if not median / LENGTHS < length < median * LENGTHS]
    if not odd or len(odd) > len(lengths) / 2:
        return
    full, padding = (history.latest(f"tokens.{name}", round_index) for name in ("full", "padding"))
    cut = [node for node in odd if full.get(node, 0.0) >= CUT and padding.get(node, 0.0) > 0]
    empty = [node for node in odd if padding.get(node, 0.0) >= EMPTY]
    odd.sort(key=lambda node: -abs(np.log(lengths[node] / median)))
    text = f"Texts of {', '.join(odd[:3])}{' and others' if len(odd) > 3 else ''} have {lengths[odd[0]]:.0f} tokens on "
    text += f"average; the median client's have {median:.0f}."
    text += (
        f" {100 * full[cut[0]]:.0f} % of {cut[0]}'s end where the batch does, and are probably cut off." if cut else ""
    )
    text += f" {100 * padding[empty[0]]:.0f} % of {empty[0]}'s batches is padding." if empty else ""
    yield finding(
        "LENGTH_IMBALANCE",
        round_index,
        text,
        confidence=0.95,
        severity="warning" if cut or empty else "note",
        numbers=[Number("tokens.length", lengths[odd[0]], median)],
        suspects=[Suspect(node, 0.5, "texts of another length") for node in odd],
    )


def loss_spike(history: History, round_index: int) -> Iterator[Finding]:
    """LOSS_SPIKE: the loss of a language model jumps in one round, far beyond its usual changes."""
    if not any(node != SERVER for node in history.latest("tokens", round_index)):
        return
    curve = loss_curve(history, round_index)
    values = [*zip(curve.rounds, curve.values.tolist(), strict=True)]
    name = curve.name
    if len(values) <= SPIKE_ROUNDS or values[-1][0] != round_index:
        name = "fit.loss_before"
        rounds = rounds_until(history, round_index)
        values = [(r, v) for r in rounds if not np.isnan(v := client_median(history, name, r))]
    if len(values) <= SPIKE_ROUNDS or values[-1][0] != round_index:
        return
    before = np.array([value for _, value in values[-SPIKE_ROUNDS - 1 : -1]])
    now, usual = values[-1][1], float(np.median(before))
    spread = max(1.4826 * float(np.median(np.abs(np.diff(before)))), 0.005 * usual)
    score = (now - float(before[-1])) / spread if np.isfinite(now) else np.inf
    if usual > 0 and now > (1 + SPIKE) * max(usual, float(before[-1])) and score > SPIKE_DEVIATIONS:
        text = f"The loss jumped from {before[-1]:.3f} to {now:.3f} in one round, {score:.0f} times its usual change."
        number = Number(name, now, float(before[-1]), float(score), of="own past")
        yield finding("LOSS_SPIKE", round_index, text, confidence=0.95, numbers=[number])


DETECTORS: tuple[Detector, ...] = (forgetting, length_imbalance, loss_spike)
