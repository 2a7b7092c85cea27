# SPDX-License-Identifier: Apache-2.0
"""Where a round that was run again first departs from its recording: who, in which step and layer, by what."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedvitals.replay.tape.digests import Mark
from fedvitals.replay.tape.journal import Came, Entry
from fedvitals.replay.tape.retention import losses_of


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first thing that differs. `step`: of the client's local training, as far as its losses tell."""

    round: int
    what: str  # «state before», «cohort», «update», «weight», «state after», «metric»
    node: str | None = None
    step: int | None = None
    layer: str | None = None
    recorded: float | str | None = None
    replayed: float | str | None = None
    index: tuple[int, ...] | None = None  # of the element whose values these are; None: they are norms, or losses
    loss: tuple[float, float] | None = None  # of that step, recorded and replayed

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


def first_mismatch(recorded: Entry, replayed: Entry, layers: Sequence[str]) -> Mismatch | None:
    """None: all digests are equal, so all bits are."""
    number = recorded.round
    before = _states(number, "state before", recorded.state, replayed.state, layers)
    if before is not None:
        return before
    asked, again = [came.node for came in recorded.came], [came.node for came in replayed.came]
    if asked != again:
        return Mismatch(number, "cohort", recorded=" ".join(asked), replayed=" ".join(again))
    return (
        _updates(number, recorded.came, replayed.came, layers)
        or _states(number, "state after", recorded.after, replayed.after, layers)
        or _metrics(recorded, replayed)
    )


def _updates(number: int, recorded: Sequence[Came], replayed: Sequence[Came], layers: Sequence[str]) -> Mismatch | None:
    """Of the clients that differ, the one that does so first: where groups exchange, it takes others along."""
    found: list[tuple[float, int, Mismatch]] = []
    for place, (before, after) in enumerate(zip(recorded, replayed, strict=True)):
        if _same(before, after):
            continue
        found.append((*_when(place, before, after), _update(number, before, after, layers)))
    return min(found, key=lambda one: one[:2])[2] if found else None


def _same(before: Came, after: Came) -> bool:
    """Norms are for people; bits are in the digests."""
    marks = [None if one.mark is None else one.mark.digest for one in (before, after)]
    told = [(one.weight, one.used, one.losses, one.error) for one in (before, after)]
    return marks[0] == marks[1] and told[0] == told[1]


def _when(place: int, before: Came, after: Came) -> tuple[float, int]:
    step = _step(before, after)
    return (float("inf") if step is None else step), place


def _update(number: int, before: Came, after: Came, layers: Sequence[str]) -> Mismatch:
    step, loss = _step(before, after), None
    if step is not None and step < min(len(losses_of(before)), len(losses_of(after))):
        loss = float(losses_of(before)[step]), float(losses_of(after)[step])
    if before.mark is None or after.mark is None or before.mark.digest == after.mark.digest:
        said = [_outcome(one) for one in (before, after)]
        what = "weight" if said[0] == said[1] and before.weight != after.weight else "update"
        values = [before.weight, after.weight] if what == "weight" else said
        return Mismatch(number, what, before.node, step, None, values[0], values[1], loss=loss)
    layer, was, now = _layer(before.mark, after.mark, layers)
    return Mismatch(number, "update", before.node, step, layer, was, now, loss=loss)


def _outcome(came: Came) -> str:
    if came.error is not None:
        return came.error
    return ("an update" if came.mark is not None else "nothing") + ("" if came.used else ", left out")


def _step(before: Came, after: Came) -> int | None:
    """The first local step whose loss has other bits."""
    old, new = (losses_of(one).view(np.uint32) for one in (before, after))
    shared = min(len(old), len(new))
    apart = np.flatnonzero(old[:shared] != new[:shared])
    if len(apart):
        return int(apart[0])
    return shared if len(old) != len(new) else None


def _states(
    number: int, what: str, recorded: dict[str, Mark], replayed: dict[str, Mark], layers: Sequence[str]
) -> Mismatch | None:
    for name in dict.fromkeys((*recorded, *replayed)):
        before, after = recorded.get(name), replayed.get(name)
        if before is None or after is None:
            there = ["there" if one is not None else "not there" for one in (before, after)]
            return Mismatch(number, f"{what} ({name})", recorded=there[0], replayed=there[1])
        if before.digest != after.digest:
            layer, was, now = _layer(before, after, layers)
            shown = what if name == "model" else f"{what} ({name})"
            return Mismatch(number, shown, None, None, layer, was, now)
    return None


def _layer(before: Mark, after: Mark, layers: Sequence[str]) -> tuple[str | None, float | None, float | None]:
    for place, (old, new) in enumerate(zip(before.layers, after.layers, strict=False)):
        if old != new:
            name = layers[place] if len(before.layers) <= len(layers) else f"tensor {place}"
            return name, before.norms[place], after.norms[place]
    return None, None, None


def _metrics(recorded: Entry, replayed: Entry) -> Mismatch | None:
    for name, value in recorded.metrics.items():
        if name in replayed.metrics and replayed.metrics[name] != value:
            return Mismatch(recorded.round, f"metric {name}", recorded=value, replayed=replayed.metrics[name])
    return None


def deviation(recorded: Entry, replayed: Entry) -> float:
    """The largest difference of a layer's norm in any state or update of the round, relative to the whole state's.

    Relative to the layer's own, a bias that is nearly 0 would decide.
    """
    pairs: list[tuple[Mark | None, Mark | None]] = [(recorded.state.get(k), m) for k, m in replayed.state.items()]
    pairs += [(recorded.after.get(k), m) for k, m in replayed.after.items()]
    pairs += [(came.mark, other.mark) for came, other in zip(recorded.came, replayed.came, strict=False)]
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
