# SPDX-License-Identifier: Apache-2.0
"""Detectors of gradient problems: exploding or vanishing gradients, dead or saturated units, poor initialisation.

No limit here is a norm, since norms depend on the model. The measure is the *pressure* of a layer, ‖gradient‖·‖weights‖
relative to the loss of a blind guess: how many times over the loss would change if the layer changed by its own size.
It is about 0.04 to 3 when training begins, whatever the width, depth and number of classes, even summed over steps and
clients. No healthy run of the fault bank's `tune` half came near the limits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from fedvitals.diagnosis.detectors.signals import (
    ACCURACIES,
    LayerProfile,
    StillUnits,
    client_median,
    layer_profile,
    loss_curve,
    metric_curve,
    quiet_quantile,
    rows_of_nodes,
    still_units,
    training_clients,
)
from fedvitals.diagnosis.evidence.label_counts import label_counts
from fedvitals.diagnosis.evidence.update_mismatch import COHORT_WIDE_SHARE
from fedvitals.diagnosis.finding import Number, finding
from fedvitals.protocols import Detector, History
from fedvitals.records import Event, Finding

FIRST_ROUNDS = 3  # rounds in which pressure still reflects the initial weights
HINDERED = 10  # rounds after which harmful initial weights are more than a remark
EXPLODING_START = 25.0  # pressure in the first rounds; healthy runs had up to 15, in a wide head behind a layer norm,
# and planted explosions 140 and more
EXPLODING_LATER = 30.0  # and this many times ...
GROWTH = 5.0  # ... its own usual value; in healthy runs up to 6, as they become confident
FADED = 0.022  # pressure below which nothing is learnt; narrow deep networks that learn begin with 0.044, weights that
# are a tenth of what they should be give 0.012
FADED_AFTER_REMARK = 0.5  # the same in the first rounds, if the initial weights were seen to be too small
BROKEN_PROFILE = 5e-4  # of the layer with the highest pressure
REACHED = 0.02  # the same for the layers before: gradients that get past a layer have not vanished on their way back
UNLEARNT = 0.8  # of the blind guess's loss: below this, small gradients are the aim of training
GUESSED = 0.1  # of accuracy above a blind guess: above this, something has been learnt
STILL_UNITS = 0.45  # still units of narrow plain layers reach 0.44; in attention, a third of the biases (the keys')
SURELY_STILL = 0.7  # deep plain networks begin with up to 0.62 in their last layers, and some still learn: a note
PASSED_ON = 0.75  # a dead unit passes nothing on, so its weights in the next layer do not change either
JUMP = 8.0  # largest step norm relative to the client's own usual one
JUMPED = 0.15  # share of the clients
PAST = 5  # rounds of the client's own past
INITIALISATION = "initialisation"  # the monitor's remark about the first weights
ZERO_START = "initialisation.zero"  # the remark about weights that begin at 0 on purpose
ALL_ZERO = "all values equal 0:"


def exploding(history: History, round_index: int) -> Iterator[Finding]:
    """EXPLODING_GRADIENT: pressure beyond any healthy start or far beyond the past, or a client whose norm jumps."""
    layers = layer_profile(history, round_index)
    if layers is not None and np.isfinite(layers.pressure).any():
        since = _exploded_since(history, round_index, layers)
        if since is not None:
            severity = "critical" if _unlearnt(history, round_index, layers.chance) else "warning"
            yield _exploding(layers, round_index, since, severity, _scale_in_words(history, round_index))
            return
    yield from _jump_findings(history, round_index)


def _exploded_since(history: History, round_index: int, layers: LayerProfile) -> int | None:
    """Return the round of the explosion while it lasts (huge gradients, or a model they destroyed); else None."""
    top = layers.top
    dead = top < FADED and _unlearnt(history, round_index, layers.chance)
    if top <= EXPLODING_START and not dead:
        return None
    start = _first_exploded_round(history, round_index)
    if start is not None:
        return start
    past = [*_pressures(history, range(round_index - PAST, round_index), round_index - 1).values()]
    grown = len(past) >= 2 and top > EXPLODING_LATER and top > GROWTH * float(np.median(past))
    return round_index if grown else None


def _first_exploded_round(history: History, round_index: int) -> int | None:
    """Return the first of the initial rounds that exploded."""
    start = _pressures(history, range(FIRST_ROUNDS), round_index)
    return next((past_round for past_round, value in start.items() if value > EXPLODING_START), None)


def _pressures(history: History, rounds: range, last: int) -> dict[int, float]:
    profiles = {round_index: layer_profile(history, round_index) for round_index in rounds if 0 <= round_index <= last}
    # If only the last layer gets a gradient, that one may be large: the case is a vanishing gradient.
    return {round_index: 0.0 if p.cut_off else p.top for round_index, p in profiles.items() if p is not None}


def _scale_in_words(history: History, round_index: int) -> str:
    """Return a sentence with the clients' gradient scale of this round; empty if no client measured it."""
    scale = client_median(history, "scale.gsc", round_index)
    return f" The gradient scale (GSC) is {scale:.2g}." if np.isfinite(scale) else ""


def _exploding(layers: LayerProfile, round_index: int, since: int, severity: str, scale: str) -> Finding:
    pressure = layers.pressure
    place = int(np.nanargmax(pressure))
    top = float(pressure[place])
    message = (
        f"The gradients exploded in round {since}, and the model died of it: they are zero now, and nothing is learnt."
        if top < EXPLODING_START
        else f"Gradients explode: changing '{layers.names[place]}' by its own size would change the loss by {top:.3g} "
        f"times that of a blind guess ({layers.chance:.2f} nats); about 1 is usual when training begins.{scale}"
    )
    return finding(
        "EXPLODING_GRADIENT",
        round_index,
        message,
        confidence=0.99 if top > 3 * EXPLODING_START else 0.9,
        since=since,
        layer=layers.names[place],
        severity=severity,  # less severe if training gets over it by itself
        numbers=_pressure_numbers(layers),
    )


def _pressure_numbers(layers: LayerProfile) -> list[Number]:
    """Return the pressure of the layers from first to last; of a deep network, only of every few layers."""
    pressure, every = layers.pressure, -(-len(layers.names) // 12)
    return [
        Number(f"pressure of {layers.names[i]}", float(pressure[i]), 1.0, of="first rounds")
        for i in range(0, len(layers.names), every)
    ]


def _jump_findings(history: History, round_index: int) -> Iterator[Finding]:
    """Report clients whose steps suddenly become many times as large as ever before within a round, and stay so.

    If weights are exchanged at each step, one client's jump reaches its whole edge. The last step must be larger than
    usual as well, because the next step corrects a single large batch.
    """
    largest, last = history.latest("gradient.norm_max", round_index), history.latest("gradient.norm_last", round_index)
    past = [
        history.latest("gradient.norm_max", past_round) for past_round in range(max(0, round_index - PAST), round_index)
    ]
    everybody = [value for earlier in past for value in earlier.values() if math.isfinite(value)]
    if sum(bool(earlier) for earlier in past) < 2 or not everybody:
        return
    usual = float(np.median(everybody))
    ratios = {}
    for node, value in largest.items():
        if usual > 0 and not value / usual > JUMP:
            continue  # the client's own usual norm is as high
        own = max([usual, *(earlier[node] for earlier in past if math.isfinite(earlier.get(node, math.nan)))])
        if own > 0 and math.isfinite(value):
            ratios[node] = min(value, last.get(node, value) * JUMP) / own
    jumped = {node: ratio for node, ratio in ratios.items() if ratio > JUMP}
    if len(jumped) < 2 or len(jumped) < JUMPED * len(largest) or not _loss_rose(history, round_index):
        return
    worst = max(jumped, key=lambda node: jumped[node])
    yield finding(
        "EXPLODING_GRADIENT",
        round_index,
        f"The gradients of {len(jumped)} of {len(largest)} clients jump inside the round: their largest step is up to "
        f"{jumped[worst]:.3g} times what it was in their own rounds before.",
        confidence=0.9,
        severity="critical",
        numbers=[
            Number("gradient.norm_max", largest[node], largest[node] / ratio, of="own past")
            for node, ratio in sorted(jumped.items(), key=lambda pair: -pair[1])[:8]
        ],
        more={"clients": sorted(jumped)},
    )


def _loss_rose(history: History, round_index: int) -> bool:
    """Return whether the loss has risen; True if nobody measures it."""
    losses = loss_curve(history, round_index).values
    before = losses[:-1][~np.isnan(losses[:-1])]
    return not len(before) or not np.isfinite(losses[-1]) or bool(losses[-1] > 1.02 * before.min())


# -- vanishing --------------------------------------------------------------------------------------------------------


def vanishing(history: History, round_index: int) -> Iterator[Finding]:
    """VANISHING_GRADIENT: no pressure anywhere, or none on some layers, while nothing has been learnt.

    Not reported for matrices that begin at 0 on purpose: an adapter's gradients are tiny until it has grown. Nor for a
    layer behind others whose gradients are usual, like the queries and keys of attention, which is uniform at first.
    """
    layers = layer_profile(history, round_index)
    if layers is None or not np.isfinite(layers.pressure).any() or not _unlearnt(history, round_index, layers.chance):
        return
    if _remarks(history)[1]:
        return
    pressure, top, place = layers.pressure, layers.top, int(np.nanargmin(layers.elasticity))
    if (top > EXPLODING_START and not layers.cut_off) or _first_exploded_round(history, round_index) is not None:
        return  # the aftermath of an explosion is reported with it
    remarks = [event for event in _remarks(history)[0] if "fade" in event.message]
    remarked = round_index < FIRST_ROUNDS and 2 * len(remarks) >= len(layers.names)
    faded = top < (FADED_AFTER_REMARK if remarked else FADED)
    nothing = bool(layers.zero.any())
    reached = float(np.nanmax(pressure[:place], initial=0.0)) > REACHED * top
    broken = float(pressure[place]) < BROKEN_PROFILE * top and not reached and _broken_before(history, round_index)
    if not (faded or nothing or broken):
        return
    if nothing:
        what = f"{int(layers.zero.sum())} of {len(layers.names)} layers get no gradient at all"
    elif faded:
        what = f"no layer has a gradient that matters: the largest has {top:.2g} of a blind guess's loss"
    else:
        what = f"'{layers.names[place]}' gets {float(pressure[place]) / top:.1g} of the gradient of others"
    yield finding(
        "VANISHING_GRADIENT",
        round_index,
        f"Gradients vanish: {what}, for its size, while the loss is still that of a model that has learnt nothing.",
        confidence=0.99 if nothing else 0.9,
        layer=layers.names[int(np.argmax(layers.zero)) if nothing else place],
        numbers=[
            *_pressure_numbers(layers),
            Number("scale.zero_samples", client_median(history, "scale.zero_samples", round_index), 0.0, of="limit"),
        ],
    )


def _broken_before(history: History, round_index: int) -> bool:
    """Return whether the profile was broken in the previous round too; True in the first round."""
    layers = layer_profile(history, round_index - 1) if round_index > 0 else None
    known = np.empty(0) if layers is None else layers.elasticity[~np.isnan(layers.elasticity)]
    return not len(known) or bool(known.min() < BROKEN_PROFILE * known.max())


def _unlearnt(history: History, round_index: int, chance: float) -> bool:
    """Return whether nothing has been learnt: by the test loss, the loss on the clients' samples, or the accuracy.

    The first of these that is measured decides; False if none is. A loss that is not a number counts as the worst.
    """
    losses = loss_curve(history, round_index).values
    if len(losses):
        return bool(np.isnan(losses[-1]) or losses[-1] > UNLEARNT * chance)
    level = client_median(history, "fit.loss_before", round_index)
    if np.isfinite(level):
        return bool(level > UNLEARNT * chance)
    accuracies = [metric_curve(history, name, round_index).values[-1:] for name in ACCURACIES]
    newest = next((float(values[0]) for values in accuracies if len(values)), np.nan)
    return bool(newest < np.exp(-chance) + GUESSED)


# -- units ------------------------------------------------------------------------------------------------------------


def dead_units(history: History, round_index: int) -> Iterator[Finding]:
    """DEAD_UNITS: units that output nothing on nearly every client."""
    yield from _units(history, round_index, "DEAD_UNITS")


def saturated_units(history: History, round_index: int) -> Iterator[Finding]:
    """SATURATED_UNITS: units that output a constant on nearly every client."""
    yield from _units(history, round_index, "SATURATED_UNITS")


def _units(history: History, round_index: int, issue: str) -> Iterator[Finding]:
    """Report units whose bias no client has changed in this round or the one before.

    Dead and saturated units look alike from their gradients, since neither passes one. Their outputs differ: a
    saturated unit still passes its constant to the next layer, whose weights change.
    """
    still_before = {still.layer: still.share for still in still_units(history, round_index - 1)}
    still_layers = []
    for still in still_units(history, round_index):
        before = still_before.get(still.layer, 0.0)
        if min(still.share, before) >= STILL_UNITS and _issue_of_still_units(still) == issue:
            still_layers.append((still, before))
    if still_layers:
        # One finding for all layers, because the problem is often passed on: the first certain layer, or the first.
        chosen = next((pair for pair in still_layers if min(pair[0].share, pair[1]) >= SURELY_STILL), still_layers[0])
        yield _unit_finding(issue, round_index, *chosen, {still.layer: still.share for still, _ in still_layers})
    yield from _measured_units(history, round_index, issue)


def _issue_of_still_units(still: StillUnits) -> str | None:
    if still.onward >= PASSED_ON * still.share:
        return "DEAD_UNITS"
    # A whole layer that does not change is not a matter of units: it is frozen, or its gradient has vanished.
    return "SATURATED_UNITS" if still.share < 1 else None


def _unit_finding(issue: str, round_index: int, still: StillUnits, before: float, layers: dict[str, float]) -> Finding:
    what = "answer nothing" if issue == "DEAD_UNITS" else "are stuck at a constant"
    others = f" {len(layers) - 1} more layers have as many." if len(layers) > 1 else ""
    return finding(
        issue,
        round_index,
        f"{100 * still.share:.0f} % of the units of '{still.layer}' {what}: on nearly every client their biases did "
        f"not move in two rounds.{others}",
        confidence=0.9,
        since=round_index - 1,
        layer=still.layer,
        severity=None if min(still.share, before) >= SURELY_STILL else "note",
        numbers=[
            Number("share of units without gradient", still.share, SURELY_STILL, of="limit"),
            Number("the same, a round before", before, SURELY_STILL, of="limit"),
            Number("share of the next layer's weights that stand still", still.onward),
        ],
        more={"layers": layers},
    )


def _measured_units(history: History, round_index: int, issue: str) -> Iterator[Finding]:
    """Report dead or saturated units from the activations themselves, if they are measured (`deep`)."""
    names, nodes = history.layers("activation.health"), training_clients(history, round_index)
    if not names or not nodes:
        return
    statistic = "dead_fraction" if issue == "DEAD_UNITS" else "saturated_fraction"
    rows = rows_of_nodes(history, "activation.health", (statistic,), round_index, nodes)[..., 0]
    if len(rows) <= COHORT_WIDE_SHARE * len(nodes):  # a few clients that report their units say nothing about all
        return
    shares = quiet_quantile(rows, 0.1)
    idle = {name: float(share) for name, share in zip(names, shares, strict=True) if share >= STILL_UNITS}
    if idle:
        name = next((name for name, share in idle.items() if share >= SURELY_STILL), next(iter(idle)))
        yield finding(
            issue,
            round_index,
            f"{100 * idle[name]:.0f} % of the outputs of '{name}' are {statistic.partition('_')[0]} on nearly "
            "every client.",
            confidence=0.9,
            layer=name,
            severity=None if idle[name] >= SURELY_STILL else "note",
            numbers=[Number(f"activation.health {statistic}", idle[name], SURELY_STILL, of="limit")],
            more={"layers": idle},
        )


# -- initialisation ---------------------------------------------------------------------------------------------------


def poor_initialisation(history: History, round_index: int) -> Iterator[Finding]:
    """POOR_INITIALISATION: the monitor's remarks about the initial weights, until training has overcome them."""
    remarks = _remarks(history)[0]
    names = history.layers("weight")
    if not remarks or (names and len([n for n in names if "weight" in n]) < 2):
        return  # a single layer may begin at 0: nothing to compare yet
    loss, first = loss_curve(history, round_index).values, remarks[0].where.round or 0
    chance = _blind_guess_loss(history, round_index)
    if round_index - first >= FIRST_ROUNDS and len(loss) and loss[-1] < UNLEARNT * np.fmin(chance, loss[0]):
        return
    # A poor start that training may still overcome is only a remark, unless all weights are far too small, which no
    # scheme intends. It is a problem after enough rounds, if training is known to have learnt nothing: the first loss
    # is measured after a round that may have learnt everything.
    everywhere = remarks[0].data.get("everywhere") is True
    hindered = round_index - first >= HINDERED and len(loss) > 0 and bool(np.isfinite(chance))
    text = "All weights begin far too small" if everywhere else "The first weights hinder learning"
    yield finding(
        "POOR_INITIALISATION",
        round_index,
        f"{text}: {remarks[0].message}" + (f" And {len(remarks) - 1} more layers." if remarks[1:] else ""),
        confidence=0.9,
        since=first,
        severity=None if hindered or everywhere else "note",
        layer=remarks[0].data.get("layer"),
        numbers=[Number("layers with a remark", len(remarks), 0, of="limit")],
        more={"remarks": [event.message for event in remarks[:8]]},
    )


def _blind_guess_loss(history: History, round_index: int) -> float:
    """Return the loss of a blind guess, from the clients' label counts if layers are not measured; NaN if unknown."""
    layers = layer_profile(history, round_index)
    if layers is not None:
        return layers.chance
    classes = label_counts(history, round_index).classes
    return float(np.log(classes)) if classes > 1 else float("nan")


def _remarks(history: History) -> tuple[list[Event], list[Event]]:
    """Return the remarks about a poor start, and those about matrices that begin at 0 on purpose.

    Older runs have one remark per all-zero matrix: intended, unless more than half of the model is zero.
    """
    remarks, meant = [*history.events(INITIALISATION)], [*history.events(ZERO_START)]
    zero = [event for event in remarks if ALL_ZERO in event.message]
    matrices = [name for name in history.layers("weight") if "bias" not in name.rpartition(".")[2]]
    if zero and 2 * len(zero) <= len(matrices):
        return [event for event in remarks if event not in zero], [*meant, *zero]
    return remarks, meant


DETECTORS: tuple[Detector, ...] = (exploding, vanishing, dead_units, saturated_units, poor_initialisation)
