# SPDX-License-Identifier: Apache-2.0
"""Find where a replayed round first departs from its recording: client, local step, layer and values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fedvitals.replay.tape.digests import StateDigest, TensorDifference
from fedvitals.replay.tape.journal import ClientReply, RoundEntry
from fedvitals.replay.tape.retention import losses_of


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first difference. `step`: of the client's local training, as far as its losses show."""

    round: int
    what: str  # «state before», «cohort», «update», «weight», «state after», «metric»
    node: str | None = None
    step: int | None = None
    layer: str | None = None
    recorded: float | str | None = None
    replayed: float | str | None = None
    index: tuple[int, ...] | None = None  # of the element whose values these are; None: they are norms, or losses
    loss: tuple[float, float] | None = None  # of that step, recorded and replayed

    def at(self, place: TensorDifference) -> Mismatch:
        """Return the mismatch with the first element that differs."""
        return replace(self, layer=place.tensor, index=place.index, recorded=place.recorded, replayed=place.replayed)

    def __str__(self) -> str:
        where = [f"round {self.round}"]
        where += [f"client {self.node}"] if self.node is not None else []
        where += [f"local step {self.step}"] if self.step is not None else []
        where += [f"layer {self.layer}"] if self.layer is not None else []
        text = f"The {self.what} differs: {', '.join(where)}."
        if self.loss is not None:
            text += f" Loss of that step: recorded {self.loss[0]!r}, replayed {self.loss[1]!r}."
        if self.recorded is not None or self.replayed is not None:
            what = "Value" if self.index is None else f"Element {list(self.index)}"
            if self.layer is not None and self.index is None:
                what = "Norm of the layer"
            text += f" {what}: recorded {self.recorded!r}, replayed {self.replayed!r}."
        return text


def first_mismatch(recorded: RoundEntry, replayed: RoundEntry, layers: Sequence[str]) -> Mismatch | None:
    """Return the first difference between a recorded and a replayed round; None if all digests, and so all bits, are
    equal.
    """
    round_index = recorded.round
    before = _state_mismatch(round_index, "state before", recorded.state, replayed.state, layers)
    if before is not None:
        return before
    asked, again = [came.node for came in recorded.came], [came.node for came in replayed.came]
    if asked != again:
        return Mismatch(round_index, "cohort", recorded=" ".join(asked), replayed=" ".join(again))
    return (
        _first_update_mismatch(round_index, recorded.came, replayed.came, layers)
        or _state_mismatch(round_index, "state after", recorded.after, replayed.after, layers)
        or _metric_mismatch(recorded, replayed)
    )


def _first_update_mismatch(
    round_index: int, recorded: Sequence[ClientReply], replayed: Sequence[ClientReply], layers: Sequence[str]
) -> Mismatch | None:
    """Return the mismatch of the client that differs first: where groups exchange models, it affects others."""
    mismatches: list[tuple[float, int, Mismatch]] = []
    for place, (before, after) in enumerate(zip(recorded, replayed, strict=True)):
        if not _same_reply(before, after):
            step = _first_differing_step(before, after)
            mismatch = _update_mismatch(round_index, before, after, layers)
            mismatches.append((math.inf if step is None else step, place, mismatch))
    return min(mismatches, key=lambda entry: entry[:2])[2] if mismatches else None


def _same_reply(before: ClientReply, after: ClientReply) -> bool:
    """Return whether two replies have the same bits; norms are only for people."""
    first, second = (
        (reply.mark and reply.mark.digest, reply.weight, reply.used, reply.losses, reply.error)
        for reply in (before, after)
    )
    return first == second


def _update_mismatch(round_index: int, before: ClientReply, after: ClientReply, layers: Sequence[str]) -> Mismatch:
    step, loss = _first_differing_step(before, after), None
    if step is not None and step < min(len(losses_of(before)), len(losses_of(after))):
        loss = float(losses_of(before)[step]), float(losses_of(after)[step])
    if before.mark is None or after.mark is None or before.mark.digest == after.mark.digest:
        outcomes = [_outcome(reply) for reply in (before, after)]
        what = "weight" if outcomes[0] == outcomes[1] and before.weight != after.weight else "update"
        values = [before.weight, after.weight] if what == "weight" else outcomes
        return Mismatch(round_index, what, before.node, step, None, values[0], values[1], loss=loss)
    layer, was, now = _first_differing_layer(before.mark, after.mark, layers)
    return Mismatch(round_index, "update", before.node, step, layer, was, now, loss=loss)


def _outcome(came: ClientReply) -> str:
    if came.error is not None:
        return came.error
    return ("an update" if came.mark is not None else "nothing") + ("" if came.used else ", left out")


def _first_differing_step(before: ClientReply, after: ClientReply) -> int | None:
    """Return the first local step whose loss has different bits; None if there is none."""
    old, new = (losses_of(reply).view(np.uint32) for reply in (before, after))
    shared = min(len(old), len(new))
    apart = np.flatnonzero(old[:shared] != new[:shared])
    if len(apart):
        return int(apart[0])
    return shared if len(old) != len(new) else None


def _state_mismatch(
    round_index: int,
    what: str,
    recorded: dict[str, StateDigest],
    replayed: dict[str, StateDigest],
    layers: Sequence[str],
) -> Mismatch | None:
    for name in dict.fromkeys((*recorded, *replayed)):
        before, after = recorded.get(name), replayed.get(name)
        if before is None or after is None:
            there = ["there" if digest is not None else "not there" for digest in (before, after)]
            return Mismatch(round_index, f"{what} ({name})", recorded=there[0], replayed=there[1])
        if before.digest != after.digest:
            layer, was, now = _first_differing_layer(before, after, layers)
            shown = what if name == "model" else f"{what} ({name})"
            return Mismatch(round_index, shown, None, None, layer, was, now)
    return None


def _first_differing_layer(
    before: StateDigest, after: StateDigest, layers: Sequence[str]
) -> tuple[str | None, float | None, float | None]:
    for place, (old, new) in enumerate(zip(before.layers, after.layers, strict=False)):
        if old != new:
            name = layers[place] if len(before.layers) <= len(layers) else f"tensor {place}"
            return name, before.norms[place], after.norms[place]
    return None, None, None


def _metric_mismatch(recorded: RoundEntry, replayed: RoundEntry) -> Mismatch | None:
    for name, value in recorded.metrics.items():
        if name in replayed.metrics and replayed.metrics[name] != value:
            return Mismatch(recorded.round, f"metric {name}", recorded=value, replayed=replayed.metrics[name])
    return None


def deviation(recorded: RoundEntry, replayed: RoundEntry) -> float:
    """Return the largest difference of a layer's norm in any state or update of the round, relative to the whole
    state's norm.

    Relative to the layer's own norm, a bias near 0 would decide.
    """
    pairs = [(came.mark, other.mark) for came, other in zip(recorded.came, replayed.came, strict=False)]
    pairs += [(recorded.state.get(name), digest) for name, digest in replayed.state.items()]
    pairs += [(recorded.after.get(name), digest) for name, digest in replayed.after.items()]
    worst = 0.0
    for before, after in pairs:
        if before is None or after is None:
            worst = worst if before is after else float("inf")
            continue
        whole = math.hypot(*(norm for norm in before.norms if norm is not None)) or 1.0
        for old, new in zip(before.norms, after.norms, strict=False):
            if old is None or new is None:
                worst = worst if old is new else float("inf")
            else:
                worst = max(worst, abs(old - new) / whole)
    return worst
