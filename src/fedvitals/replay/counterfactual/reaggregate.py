# SPDX-License-Identifier: Apache-2.0
"""«What if», without training: recorded rounds are aggregated again, with the change, from what clients sent then.

In the first round that is exact. From the second on clients would have trained on other weights than they did: their
recorded changes are put on top of the changed model, and how far that may be off is estimated (`drift.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torch import Tensor

from fedvitals.errors import ConfigError
from fedvitals.lab.engines.site import Site
from fedvitals.lab.federation import ServerState
from fedvitals.lab.topologies.hierarchical import Hierarchical
from fedvitals.lab.topologies.rings import Rings
from fedvitals.replay.counterfactual.change import Change, check_restores
from fedvitals.replay.player.drift import Drift
from fedvitals.replay.player.player import Player, flattened
from fedvitals.replay.player.reused_updates import (
    Answer,
    Answers,
    Reused,
    Steering,
    answers_of,
    copied,
    groups_of,
    start_of,
)
from fedvitals.replay.tape.digests import mark_of
from fedvitals.replay.tape.reader import TapeReader


@dataclass(frozen=True, slots=True)
class Turn:
    """One round, as it was recorded and as it would have been. `error`: how far the model may be off, as a distance;

    `relative`: the same, as a share of how far the change has moved the model.
    """

    round: int
    recorded: dict[str, float]
    changed: dict[str, float]
    moved: float  # distance of the changed model from the recorded one
    error: float
    relative: float


@dataclass
class WhatIf:
    run: str
    change: str
    first: int
    last: int
    turns: list[Turn] = field(default_factory=list)
    read: int = 0  # updates that were on the tape
    executed: int = 0  # updates that had to be computed again
    seconds: float = 0.0
    note: str = ""

    def differences(self, metric: str = "accuracy") -> dict[int, float]:
        """By round: how much higher the metric would have been."""
        both = [t for t in self.turns if metric in t.recorded and metric in t.changed]
        return {t.round: t.changed[metric] - t.recorded[metric] for t in both}


def reaggregate(
    player: Player,
    first: int,
    last: int,
    change: Change,
    progress: Callable[[int], None] = lambda _: None,
) -> WhatIf:
    """Rounds `first` to `last` once more, with a change; nobody trains, but where the tape has no updates any more."""
    tape = player.tape
    for number in (first, last):
        tape.entry(number)  # an error that says which rounds there are
    if last < first:
        raise ConfigError(f"The last round, {last}, lies before the first, {first}.")
    site = _changed_site(player.site, change)
    _refuse(player, change, first, last)
    began = time.perf_counter()
    found = WhatIf(tape.setting.run, change.text, first, last, note=_note(change))
    start = player.server(first)
    changed = Reused(site, player.engine(), Steering(tape, first, change), copied(start))
    changed.factor = change.client_rate
    drift = Drift(site.layout.weights)
    for number, before, answers, after in Recorded(player, first, last, start, found):
        stood = changed.server.model
        metrics = changed.play(number, answers, examined=True).metrics
        drift.add(before.model, after, stood, changed.server.model)
        kept = tape.entry(number).metrics
        recorded = {name: float("nan") if value is None else value for name, value in kept.items()}
        found.turns.append(Turn(number, recorded, metrics, drift.moved, drift.error, drift.relative))
        progress(number)
    found.seconds = time.perf_counter() - began
    return found


class Recorded:
    """The recorded path, round by round: what the server knew, what clients sent, the model that came of it."""

    def __init__(self, player: Player, first: int, last: int, server: ServerState, count: WhatIf | None = None) -> None:
        self._player, self._tape, self._first, self._last = player, player.tape, first, last
        self._server, self._count = server, WhatIf("", "", first, last) if count is None else count
        self._path = Reused(player.site, player.engine(), Steering(player.tape, first), server)
        # What the clients' engine, or a checkpoint, remembers from one round to the next is only there if all are run.
        self._whole = player.experiment.local.keep_optimizer or check_restores(player.tape, first, last)

    def __iter__(self) -> Iterator[tuple[int, ServerState, Answers, Tensor]]:
        if self._whole:
            yield from self._executed(self._first, self._last)
            return
        for number in range(self._first, self._last + 1):
            read = _on_tape(self._tape, number, self._server)
            if read is None:
                yield from self._executed(number, number)
                continue
            before = copied(self._server)
            self._path.play(number, read, examined=False)
            self._check(number)
            self._count.read += len(read)
            yield number, before, read, self._server.model

    def _executed(self, first: int, last: int) -> Iterator[tuple[int, ServerState, Answers, Tensor]]:
        before = copied(self._server)
        for played in self._player.rounds(first, last, self._server, examined=False):
            answers = answers_of(played.messages, before)
            self._count.executed += len(played.messages)
            yield played.number, before, answers, self._server.model
            before = copied(self._server)

    def _check(self, number: int) -> None:
        """What was read must give what was recorded, to the last bit."""
        recorded = self._tape.entry(number).after.get("model")
        got = mark_of(self._player.site.layout.views(self._server.model))
        if recorded is not None and recorded.digest != got.digest:
            raise ConfigError(
                f"The recorded updates of round {number} do not give the recorded model: this tape was made by "
                "another version, or on a machine that sums in another order. `fedvitals replay RUN --verify` tells."
            )


def _on_tape(tape: TapeReader, number: int, server: ServerState) -> dict[str, Answer] | None:
    """Every update that was aggregated in a round; None where one is not there any more."""
    entry, found = tape.entry(number), dict[str, Answer]()
    if entry.lost:
        return None
    for came in entry.came:
        if came.mark is None or not came.used:
            continue
        if not tape.has(came.mark.digest):
            return None
        state, start = flattened(tape.tensors(came.mark.digest)), start_of(server, came.start)
        found[came.node] = Answer(came.node, state, start, int(came.weight), came.group)
    return found


def _changed_site(site: Site, change: Change) -> Site:
    """The same data and model, under the changed experiment."""
    return Site(change.experiment(site.experiment), site.dataset, site.shards, site.module, site.layout)


def _refuse(player: Player, change: Change, first: int, last: int) -> None:
    """What cannot be known without training."""
    experiment, entry = player.experiment, player.tape.entry(first)
    groups = sorted({*groups_of(player.tape, first), *groups_of(player.tape, last)})
    change.check(experiment, groups)
    if change.no_faults and any(fault.strikes != "server" for fault in experiment.faults):
        raise ConfigError(
            "Without its faults a client would have sent something else, and nobody can know what without training: "
            "a fork does («fork no faults», fork(player, round, change, store=...))."
        )
    if not isinstance(experiment.topology, Hierarchical | Rings):
        return
    members = {group: {c.node for c in entry.came if c.group == group} for group in groups}
    for node in (*change.drop, *change.weights):
        together = next((nodes for nodes in members.values() if node in nodes), {node})
        if len(together) > 1 and not together <= set(change.drop) and node not in groups:
            raise ConfigError(
                f"{node} exchanged models with {', '.join(sorted(together - {node}))} while they trained, so what it "
                f"did is in all that they sent. Drop them all, or train again: fork(player, round, change, store=...)."
            )


def _note(change: Change) -> str:
    if change.client_rate == 1:
        return ""
    return (
        f"Clients' changes are taken times {change.client_rate:g}, as a learning rate acts in first order: no round of "
        "this is exact."
    )
