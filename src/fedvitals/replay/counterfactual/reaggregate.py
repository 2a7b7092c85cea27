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
from fedvitals.replay.player.drift import DriftEstimate
from fedvitals.replay.player.player import Player, flattened
from fedvitals.replay.player.reused_updates import (
    ChangeObserver,
    RecordedUpdate,
    RecordedUpdates,
    ReusingFederation,
    copy_of_server,
    groups_of_round,
    recorded_updates_of,
    start_tensor,
)
from fedvitals.replay.tape.digests import state_digest_of
from fedvitals.replay.tape.reader import TapeReader


@dataclass(frozen=True, slots=True)
class WhatIfRound:
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
    turns: list[WhatIfRound] = field(default_factory=list)
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
    for round_index in (first, last):
        tape.entry(round_index)  # an error that says which rounds there are
    if last < first:
        raise ConfigError(f"The last round, {last}, lies before the first, {first}.")
    site = _changed_site(player.site, change)
    _refuse_unknowable(player, change, first, last)
    began = time.perf_counter()
    result = WhatIf(tape.setting.run, change.text, first, last, note=_note(change))
    start = player.server(first)
    changed = ReusingFederation(site, player.engine(), ChangeObserver(tape, first, change), copy_of_server(start))
    changed.factor = change.client_rate
    drift = DriftEstimate(site.layout.weights)
    for round_index, before, answers, after in RecordedRounds(player, first, last, start, result):
        stood = changed.server.model
        metrics = changed.play(round_index, answers, examined=True).metrics
        drift.add(before.model, after, stood, changed.server.model)
        kept = tape.entry(round_index).metrics
        recorded = {name: float("nan") if value is None else value for name, value in kept.items()}
        result.turns.append(WhatIfRound(round_index, recorded, metrics, drift.moved, drift.error, drift.relative))
        progress(round_index)
    result.seconds = time.perf_counter() - began
    return result


class RecordedRounds:
    """The recorded path, round by round: what the server knew, what clients sent, the model that came of it."""

    def __init__(self, player: Player, first: int, last: int, server: ServerState, count: WhatIf | None = None) -> None:
        self._player, self._tape, self._first, self._last = player, player.tape, first, last
        self._server, self._count = server, WhatIf("", "", first, last) if count is None else count
        self._path = ReusingFederation(player.site, player.engine(), ChangeObserver(player.tape, first), server)
        # What the clients' engine, or a checkpoint, remembers from one round to the next is only there if all are run.
        self._whole = player.experiment.local.keep_optimizer or check_restores(player.tape, first, last)

    def __iter__(self) -> Iterator[tuple[int, ServerState, RecordedUpdates, Tensor]]:
        if self._whole:
            yield from self._executed(self._first, self._last)
            return
        for round_index in range(self._first, self._last + 1):
            read = _updates_on_tape(self._tape, round_index, self._server)
            if read is None:
                yield from self._executed(round_index, round_index)
                continue
            before = copy_of_server(self._server)
            self._path.play(round_index, read, examined=False)
            self._check(round_index)
            self._count.read += len(read)
            yield round_index, before, read, self._server.model

    def _executed(self, first: int, last: int) -> Iterator[tuple[int, ServerState, RecordedUpdates, Tensor]]:
        before = copy_of_server(self._server)
        for played in self._player.rounds(first, last, self._server, examined=False):
            answers = recorded_updates_of(played.messages, before)
            self._count.executed += len(played.messages)
            yield played.number, before, answers, self._server.model
            before = copy_of_server(self._server)

    def _check(self, round_index: int) -> None:
        """What was read must give what was recorded, to the last bit."""
        recorded = self._tape.entry(round_index).after.get("model")
        got = state_digest_of(self._player.site.layout.views(self._server.model))
        if recorded is not None and recorded.digest != got.digest:
            raise ConfigError(
                f"The recorded updates of round {round_index} do not give the recorded model: this tape was made by "
                "another version, or on a machine that sums in another order. `fedvitals replay RUN --verify` tells."
            )


def _updates_on_tape(tape: TapeReader, round_index: int, server: ServerState) -> dict[str, RecordedUpdate] | None:
    """Every update that was aggregated in a round; None where one is not there any more."""
    entry, updates = tape.entry(round_index), dict[str, RecordedUpdate]()
    if entry.lost:
        return None
    for came in entry.came:
        if came.mark is None or not came.used:
            continue
        if not tape.has(came.mark.digest):
            return None
        state, start = flattened(tape.tensors(came.mark.digest)), start_tensor(server, came.start)
        updates[came.node] = RecordedUpdate(came.node, state, start, int(came.weight), came.group)
    return updates


def _changed_site(site: Site, change: Change) -> Site:
    """The same data and model, under the changed experiment."""
    return Site(change.experiment(site.experiment), site.dataset, site.shards, site.module, site.layout)


def _refuse_unknowable(player: Player, change: Change, first: int, last: int) -> None:
    """What cannot be known without training."""
    experiment, entry = player.experiment, player.tape.entry(first)
    groups = sorted({*groups_of_round(player.tape, first), *groups_of_round(player.tape, last)})
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
