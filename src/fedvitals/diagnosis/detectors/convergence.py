# SPDX-License-Identifier: Apache-2.0
"""Detectors of convergence problems: divergence, oscillation, slow progress, plateaus, overfitting, client drift.

A loss curve alone cannot tell a problem from the zigzag of a few dissimilar clients. Each rule therefore also tests the
mechanism: how far the server steps along what its clients agree on (known exactly from sums, see `server_step`),
whether a client's update undoes its own last one, and whether clients finish their own task within a round while the
global model is far from it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fedvitals.diagnosis.detectors.signals import (
    MetricCurve,
    ServerStep,
    client_median,
    layer_profile,
    loss_curve,
    server_step,
)
from fedvitals.diagnosis.evidence.transformed_updates import transformation
from fedvitals.diagnosis.finding import Number, finding
from fedvitals.protocols import Detector, History
from fedvitals.records import Finding
from fedvitals.stats import Array

# Overfitting: the same model on training samples and on held-out samples, client by client.
#
# A client's `fit.loss_before` and its `local.loss` of the round before are of the same global model. In pairs, the
# differences between clients cancel; what is left is the gap between known and unknown samples.

KNOWN = 0.92  # loss on known samples relative to unknown ones
SURE = 2.0  # standard errors of the gap, in each of two rounds
BY_HEART = 0.65  # fraction of the loss on own samples that remains after training
STEPS_PER_SAMPLE = 2.0  # each sample is then seen twice per round and sample of a batch
FEWEST = 3  # pairs
LOOK_BACK = 12  # rounds; the fit is measured when time allows


def overfitting(history: History, round_index: int) -> Iterator[Finding]:
    """OVERFITTING, from the two newest rounds in which it was measured, the last of them this one."""
    steps, samples = client_median(history, "steps", round_index), client_median(history, "samples", round_index)
    if not samples > 0 or not steps / samples >= STEPS_PER_SAMPLE:
        return
    gap = _loss_table(history, round_index)
    if gap is None or not _is_overfitted(gap):
        return
    tables = (_loss_table(history, n) for n in range(round_index - 1, max(round_index - LOOK_BACK, 0), -1))
    before = next((table for table in tables if table is not None), None)
    if before is None or not _is_overfitted(before):
        return
    known, unknown, trained = gap.mean(axis=0)
    yield finding(
        "OVERFITTING",
        round_index,
        f"Clients learn by heart: the global model has a loss of {known:.3g} on samples that it was trained with and "
        f"{unknown:.3g} on others; local training, {steps / samples:.2g} steps per sample, takes it to {trained:.2g}.",
        confidence=0.85,
        numbers=[
            Number("fit.loss_before", float(known), float(unknown), of="local.loss of the same model"),
            Number("fit.loss_after", float(trained), float(known), of="own past"),
            Number("steps per sample", steps / samples, STEPS_PER_SAMPLE, of="limit"),
        ],
    )


def _loss_table(history: History, round_index: int) -> Array | None:
    """Return [clients, 3]: loss on known samples, on unknown ones, and on the known ones after local training."""
    known, trained = history.latest("fit.loss_before", round_index), history.latest("fit.loss_after", round_index)
    unknown = history.latest("local.loss", round_index - 1)
    pairs = [(known[n], unknown[n], trained[n]) for n in known if n in unknown and n in trained]
    table = np.array(pairs, dtype=np.float64)
    return table if len(pairs) >= FEWEST and np.isfinite(table).all() else None


def _is_overfitted(gap: Array) -> bool:
    known, unknown, trained = gap.mean(axis=0)
    difference = gap[:, 1] - gap[:, 0]
    error = float(difference.std(ddof=1)) / len(gap) ** 0.5
    return bool(known < KNOWN * unknown and trained < BY_HEART * known and difference.mean() > SURE * error)


WINDOW = 6  # rounds over which a curve is judged
CERTAIN = 0.95  # R² above which one rate explains the server's step in all layers
STEADY = 1.1  # factor by which that rate may change between rounds
OVERSHOOT = 1.3  # rate above which the server goes farther than its clients
AGREED = 0.2  # cosine to a client's own previous update, above which its direction has not changed
CREEP = 0.35  # rate below which the server takes hardly any of the step
RUNAWAY = 2.0  # loss relative to the best so far ...
ABOVE_START = 1.25  # ... and to the first
LOST = 0.5  # of what was learnt: beyond this the model is being lost
RISE = 0.1  # of the loss above the best so far: enough if the server is known to overshoot
UNDONE = 0.0  # cosine to a client's own previous update, below which rounds undo each other
TURNING = 0.8  # the same, below which an overshooting server begins to show
FLAT = 0.01  # share of the loss gained over the window on a plateau
LEARNT = 0.3  # of the first loss: below this, slow progress is harmless
LONG = 12  # rounds without progress, after which that alone is worth a note
FINISHED = 0.05  # last step's gradient relative to the largest: the client's own task is done
FAR = 0.5  # of a blind guess's loss: the global task is not done


def _steady_server_steps(history: History, round_index: int, count: int) -> list[ServerStep]:
    """Return the server's steps of the newest rounds; empty unless one steady rate explains all of them.

    With server momentum every step mixes past updates differently, so no rate is steady.
    """
    rounds = range(max(1, round_index - count + 1), round_index + 1)
    steps = [server_step(history, past_round) for past_round in rounds]
    certain = [step for step in steps if step is not None and step.fit >= CERTAIN and step.rate > 0]
    if len(certain) < count or max(s.rate for s in certain) > STEADY * min(s.rate for s in certain):
        return []
    return certain


def _overshooting_steps(history: History, round_index: int, rounds: int) -> list[ServerStep]:
    rates = _steady_server_steps(history, round_index, rounds)
    return rates if rates and min(step.rate for step in rates) > OVERSHOOT else []


def _rate_numbers(rates: list[ServerStep]) -> list[Number]:
    return [Number("the server's step against the clients' mean", rates[-1].rate, 1.0, of="limit")] if rates else []


# -- divergence and oscillation ---------------------------------------------------------------------------------------


def divergence(history: History, round_index: int) -> Iterator[Finding]:
    """DIVERGENCE: a loss that is NaN, far above its best and its first value, or rising as the server overshoots."""
    losses = loss_curve(history, round_index)
    if not len(losses) or losses.rounds[-1] != round_index:
        return
    last = float(losses.values[-1])
    if not np.isfinite(last):
        what = "NaN" if np.isnan(last) else "infinite"
        yield _divergence_finding(losses, round_index, [], f"The {losses.name} is {what}.", 1.0)
        return
    past = losses.values[:-1][np.isfinite(losses.values[:-1])]
    if len(past) < 2:
        return
    best, first = float(past.min()), float(past[0])
    rates = _overshooting_steps(history, round_index, 2)
    lasting = float(losses.last(2).min()) > RUNAWAY * best and last > ABOVE_START * first
    if rates and last > (1 + RISE) * best and not _swings(losses):
        text = (
            f"The {losses.name} rises to {last:.3g} from {best:.3g}: the server goes {rates[-1].rate:.2g} times as far "
            "as its clients' mean."
        )
        yield _divergence_finding(losses, round_index, rates, text, 0.95)
    elif lasting:
        text = f"The {losses.name} has run away to {last:.3g}; its best was {best:.3g}, its first {first:.3g}."
        yield _divergence_finding(losses, round_index, rates, text, 0.9)


def _divergence_finding(
    losses: MetricCurve, round_index: int, rates: list[ServerStep], text: str, confidence: float
) -> Finding:
    finite = np.isfinite(losses.values[:-1])
    best = int(np.where(finite, losses.values[:-1], np.inf).argmin()) if finite.any() else 0
    numbers = [Number(losses.name, float(losses.values[-1]), float(losses.values[best]), of="own past")]
    since = losses.rounds[min(best + 1, len(losses) - 1)]
    severity = "critical" if _is_lost(losses) else "warning"
    return finding(
        "DIVERGENCE",
        round_index,
        text,
        confidence=confidence,
        since=since,
        severity=severity,
        numbers=numbers + _rate_numbers(rates),
    )


def _is_lost(losses: MetricCurve) -> bool:
    """Return whether the newest loss has given up at least half of what was learnt, or is not a number."""
    known = losses.values[np.isfinite(losses.values)]
    return not np.isfinite(losses.values[-1]) or bool(known[-1] - known.min() >= LOST * (known[0] - known.min()))


def oscillation(history: History, round_index: int) -> Iterator[Finding]:
    """OSCILLATION: a loss that goes up and down while rounds undo each other, or a server that begins to overshoot."""
    losses = loss_curve(history, round_index)
    measured = len(losses) > 2 and losses.rounds[-1] == round_index and bool(np.isfinite(losses.values).all())
    before, turned = (
        client_median(history, "update.cosine_previous", past_round) for past_round in (round_index - 1, round_index)
    )
    rates = _overshooting_steps(history, round_index, 3)
    swings = measured and _swings(losses)
    worse = measured and float(losses.values[-1]) > (1 + RISE) * float(losses.values[:-1].min())
    rising = measured and float(losses.values[-1]) > float(losses.values[-2])
    undone = before < UNDONE and turned < UNDONE  # False for NaN
    if undone and transformation(history, round_index) is not None:
        undone = False  # noise, or a new selection of values in each round, rather than training
    if not (rates and (swings or rising or turned < TURNING)) and not (undone and (swings or worse)):
        return
    text = f"The {losses.name} swings" if swings else "The rounds begin to undo each other"
    cause = f"; the server goes {rates[-1].rate:.2g} times as far as its clients' mean" if rates else ""
    numbers = [Number("update.cosine_previous", turned, TURNING, of="limit"), *_rate_numbers(rates)]
    if measured:
        last, usual = float(losses.values[-1]), float(np.median(losses.last(WINDOW)))
        numbers.insert(0, Number(losses.name, last, usual, of="own past"))
    yield finding(
        "OSCILLATION",
        round_index,
        f"{text}: clients' updates point {turned:.2f} (cosine) along their own last ones{cause}.",
        confidence=0.95 if swings and rates else 0.8,
        since=max(0, round_index - WINDOW + 1) if swings else max(0, round_index - 2),
        numbers=numbers,
    )


def _swings(losses: MetricCurve) -> bool:
    """Return whether the curve turns at least three times in the window, each time by a tenth of its level or more."""
    values = losses.last(WINDOW)
    if len(values) < WINDOW or not np.isfinite(values).all():
        return False
    steps = np.diff(values) / values[:-1]
    large = np.abs(steps) > RISE
    turns = (steps[1:] * steps[:-1] < 0) & large[1:] & large[:-1]
    return int(turns.sum()) >= 3


# -- slow progress and plateaus ---------------------------------------------------------------------------------------


def slow_progress(history: History, round_index: int) -> Iterator[Finding]:
    """SLOW_PROGRESS: the server takes only a small part of the step its clients agree on, with much left to learn."""
    losses, rates = loss_curve(history, round_index), _short_steps(history, round_index)
    if rates and not _is_flat(losses):
        yield _slow_finding("SLOW_PROGRESS", losses, rates, round_index)


def plateau(history: History, round_index: int) -> Iterator[Finding]:
    """PLATEAU: short server steps and nothing changes; or, as a note, many rounds without progress at a high loss."""
    losses, rates = loss_curve(history, round_index), _short_steps(history, round_index)
    if rates and _is_flat(losses):
        yield _slow_finding("PLATEAU", losses, rates, round_index)
        return
    layers = layer_profile(history, round_index)
    chance = layers.chance if layers is not None else np.nan
    values = losses.last(LONG)
    if len(values) < LONG or not np.isfinite(values).all() or values.min() < 0.9 * np.fmin(chance, losses.values[0]):
        return
    if float(values[:3].mean() - values[-3:].mean()) < FLAT * float(values[0]):
        yield finding(
            "PLATEAU",
            round_index,
            f"The {losses.name} has not moved from {values[0]:.3g} in {LONG} rounds"
            + (", about what a blind guess has." if np.isfinite(chance) else "."),
            confidence=0.5,
            since=losses.rounds[-LONG],
            severity="note",
            numbers=[Number(losses.name, float(values[-1]), float(values[0]), of="own past")],
        )


def _short_steps(history: History, round_index: int) -> list[ServerStep]:
    """Return the last server steps if all are far too short and clients keep sending the same direction; else []."""
    rates = _steady_server_steps(history, round_index, 2)
    losses = loss_curve(history, round_index).values
    much_left = not len(losses) or bool(losses[-1] > LEARNT * losses[0])
    again = client_median(history, "update.cosine_previous", round_index)
    short = bool(rates) and max(step.rate for step in rates) < CREEP
    return rates if short and much_left and again > AGREED else []


def _is_flat(losses: MetricCurve) -> bool:
    values = losses.last(WINDOW)
    return len(values) < 3 or bool(values[0] - values[-1] < FLAT * len(values) * abs(values[0]))


def _slow_finding(issue: str, losses: MetricCurve, rates: list[ServerStep], round_index: int) -> Finding:
    standing = "hardly moves" if issue == "PLATEAU" else "creeps"
    text = (
        f"Learning {standing}: the server takes {rates[-1].rate:.2g} of the step that its clients' updates average to."
    )
    numbers = _rate_numbers(rates)
    if len(losses):
        numbers.append(Number(losses.name, float(losses.values[-1]), float(losses.last(WINDOW)[0]), of="own past"))
    return finding(issue, round_index, text, confidence=0.95, since=round_index - 1, numbers=numbers)


# -- overfitting and client drift -------------------------------------------------------------------------------------


def client_drift(history: History, round_index: int) -> Iterator[Finding]:
    """CLIENT_DRIFT: clients finish their own tasks two rounds in a row, but the averaged model cannot do them."""
    losses, layers = loss_curve(history, round_index), layer_profile(history, round_index)
    if layers is None or len(losses) < 2 or losses.rounds[-1] != round_index:
        return
    finished = [_finished_share(history, past_round) for past_round in (round_index - 1, round_index)]
    far = losses.last(2).min() > FAR * layers.chance
    if not far or not max(finished) < FINISHED:  # NaN does not count as finished
        return
    moved = client_median(history, "weight.update_ratio", round_index)
    yield finding(
        "CLIENT_DRIFT",
        round_index,
        f"Clients pull apart: each ends its round with {100 * finished[-1]:.1f} % of its largest gradient, its own "
        "task done, "
        f"but together they have a {losses.name} of {losses.values[-1]:.3g}; a blind guess has {layers.chance:.3g}.",
        confidence=0.9,
        since=round_index - 1,
        numbers=[
            Number("gradient.norm_last / gradient.norm_max", finished[-1], FINISHED, of="limit"),
            Number(losses.name, float(losses.values[-1]), FAR * layers.chance, of="limit"),
            Number("weight.update_ratio", moved),
            Number("update.cosine_mean", client_median(history, "update.cosine_mean", round_index)),
        ],
    )


def _finished_share(history: History, round_index: int) -> float:
    """Return the last step's gradient over the largest, median over the clients; NaN if steps are not measured."""
    last, largest = history.latest("gradient.norm_last", round_index), history.latest("gradient.norm_max", round_index)
    ratios = [last[node] / largest[node] for node in last if largest.get(node, 0.0) > 0]
    return float(np.median(ratios)) if ratios else float("nan")


DETECTORS: tuple[Detector, ...] = (divergence, oscillation, slow_progress, plateau, overfitting, client_drift)
