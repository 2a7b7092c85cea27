# SPDX-License-Identifier: Apache-2.0
"""Evidence for bisection: which clients changed in recorded rounds, since when, and without whom the model would be
better.

For every client and round: length and direction of its change, its loss and its weight, all relative to the cohort; and
its harm: how much lower the new model's loss would have been without it in this round, which is exact and needs no
training. A client is compared with itself up to the round that is known to be good.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedvitals.lab.federation import ServerState
from fedvitals.replay.counterfactual.change import WhatIfChange
from fedvitals.replay.counterfactual.reaggregate import RecordedRounds
from fedvitals.replay.player.player import Player
from fedvitals.replay.player.reused_updates import ChangeObserver, RecordedUpdates, ReusingFederation, copy_of_server
from fedvitals.replay.tape.journal import RoundEntry
from fedvitals.replay.tape.retention import losses_of

FEATURES = ("length", "direction", "loss", "weight", "harm")
FLOORS = np.array((0.15, 0.1, 0.15, 0.05, 0.02))  # of a feature's usual spread
CLIP = 4.0  # spreads: beyond this, more is not more telling
TOGETHER = 2  # rounds between the beginnings of what may be one trouble
TRIED = 64  # clients of a round whose harm is computed: those that stand out most
COLUMNS = 1 << 16  # of the clients' changes at a time
WORST = math.log(1e6)  # of a loss that is not finite
Matrix = NDArray[np.float64]


@dataclass
class ClientEvidence:
    """Features of every client and round. A client without a value took no part in the round."""

    rounds: list[int]
    nodes: tuple[str, ...]
    good: int
    values: Matrix  # [rounds, nodes, features]; NaN where a client took no part

    @functools.cached_property
    def _deviations(self) -> Matrix:
        """Return the deviations from a client's values up to the good round, in spreads; [rounds, nodes, features]."""
        usual = self.values[[row for row, round_index in enumerate(self.rounds) if round_index <= self.good]]
        with np.errstate(all="ignore"), _quiet():
            middle = np.nanmedian(usual, axis=0)
            middle = np.where(np.isnan(middle), np.nanmedian(usual, axis=(0, 1)), middle)  # one that was never there
            middle = np.where(np.isnan(middle), 0.0, middle)
            spread = 1.5 * np.nanmedian(np.abs(usual - middle), axis=(0, 1))
        deviations: Matrix = np.clip((self.values - middle) / np.fmax(FLOORS, np.nan_to_num(spread)), -CLIP, CLIP)
        return deviations

    def onset(self, node: str) -> tuple[int | None, float]:
        """Return since when the client has changed, and how clearly: half the squares that this explains."""
        gains = self._gains(node)
        return self._first(gains), float(gains.max(0, initial=0.0).sum())

    def onset_of_all(self, nodes: Sequence[str]) -> int | None:
        """Return the common onset of the clients that changed first, because the cause may be the same."""
        own = {node: round_index for node in nodes if (round_index := self.onset(node)[0]) is not None}
        early = [node for node, round_index in own.items() if round_index <= min(own.values()) + TOGETHER]
        return self._first(np.sum([self._filled(node) for node in early], axis=0)) if early else None

    def _filled(self, node: str) -> Matrix:
        """Return the gains, where a client that was not asked has those of its next round: it may have changed
        before.
        """
        gains, there = self._gains(node), ~np.isnan(self.values[:, self.nodes.index(node), 0])
        for place in range(len(gains) - 2, -1, -1):
            if not there[place] and self.rounds[place] > self.good:
                gains[place] = gains[place + 1]
        return gains

    def _first(self, gains: Matrix) -> int | None:
        """Return the round from which a change explains most, over all features; of equals the last one."""
        explained = gains.sum(1)[::-1]
        return self.rounds[len(explained) - 1 - int(explained.argmax())] if explained.max(initial=0.0) > 0 else None

    def _gains(self, node: str) -> Matrix:
        """Return what a change explains that begins in a round and lasts as long as fits best; [rounds, features]."""
        place = self.nodes.index(node)
        own = np.nan_to_num(self._deviations[:, place])
        own[:, -1] = np.minimum(own[:, -1], 0)  # who does more good than before is no suspect
        there = ~np.isnan(self.values[:, place, 0])
        places = [i for i, round_index in enumerate(self.rounds) if round_index > self.good and there[i]]
        gains = np.zeros((len(self.rounds), len(FEATURES)))
        for i, first in enumerate(places):
            sums = np.cumsum(own[places[i:]], axis=0)
            explained = sums**2 / (2 * np.arange(1, len(sums) + 1)[:, None])
            explained[:-1] -= math.log(len(places) + 1)  # one that ends again has to be worth its end
            gains[first] = np.maximum(explained.max(0), 0.0)
        return gains

    def harm(self, node: str) -> float:
        """Return how much lower the log loss would be without the client, summed over the rounds since the good one."""
        later = [place for place, round_index in enumerate(self.rounds) if round_index > self.good]
        return -float(np.nansum(self.values[later, self.nodes.index(node), -1]))


def gather_evidence(player: Player, first: int, good: int, bad: int, progress: Callable[[int], None]) -> ClientEvidence:
    """Return the evidence of the recorded rounds `first` to `bad`; updates missing on the tape are computed again."""
    nodes = player.experiment.nodes
    rows, numbers = [], []
    for round_index, before, updates, after in RecordedRounds(player, first, bad, player.server(first)):
        rows.append(_round_features(player, round_index, before, updates, after))
        numbers.append(round_index)
        progress(round_index)
    return ClientEvidence(numbers, nodes, good, np.array(rows).reshape(len(numbers), len(nodes), len(FEATURES)))


def _round_features(
    player: Player, round_index: int, before: ServerState, updates: RecordedUpdates, after: Tensor
) -> Matrix:
    nodes, entry = player.experiment.nodes, player.tape.entry(round_index)
    features = np.full((len(nodes), len(FEATURES)), np.nan)
    if not updates or not bool(torch.isfinite(before.model).all()):
        return features  # from a model that is no model everybody sends the like
    weights = player.site.layout.weights
    present = [node for node in nodes if node in updates]
    changes = torch.stack([(updates[n].state - updates[n].start)[:weights] for n in present])
    rows = [nodes.index(node) for node in present]
    features[rows, 0] = _minus_median(_log(torch.linalg.vector_norm(changes, dim=1, dtype=torch.float64).numpy()))
    features[rows, 1] = _directions(changes)
    features[rows, 2] = _minus_median(np.array([_loss(entry, node) for node in present]))
    features[rows, 3] = _minus_median(_log(np.array([float(updates[node].samples) for node in present])))
    features[rows, 4] = _harms(player, round_index, before, updates, after, features[rows])
    return features


def _harms(
    player: Player, round_index: int, before: ServerState, updates: RecordedUpdates, after: Tensor, features: Matrix
) -> Matrix:
    """Return log loss without the client minus log loss with all; 0 for inconspicuous clients of a large cohort."""
    present = [node for node in player.experiment.nodes if node in updates]
    harms, whole = np.zeros(len(present)), _log_loss_of_model(player, after)
    if len(present) < 2 or player.tape.entry(round_index).goes_back:
        return harms
    apart = np.nan_to_num(np.abs(features[:, :4])).sum(1)
    for place in sorted(range(len(present)), key=lambda i: -apart[i])[:TRIED]:
        observer = ChangeObserver(player.tape, round_index, WhatIfChange(drop=(present[place],)))
        without = ReusingFederation(player.site, player.engine(), observer, copy_of_server(before))
        without.play(round_index, updates, examined=False)
        harms[place] = _log_loss_of_model(player, without.server.model) - whole
    return harms


def _log_loss_of_model(player: Player, model: Tensor) -> float:
    return log_loss(float(player.engine().evaluate(model)[0].double().mean()))


def log_loss(loss: float | None) -> float:
    """Return the logarithm of a loss, bounded so that two that are not finite can be compared."""
    if loss is None or not math.isfinite(loss):
        return WORST
    return min(WORST, math.log(max(loss, 1e-6)))


def _directions(changes: Tensor) -> Matrix:
    """Return the cosine of each change with the coordinate-wise median of all, which a few clients cannot turn."""
    products, lengths, whole = torch.zeros(len(changes)).double(), torch.zeros(len(changes)).double(), 0.0
    for part in changes.split(COLUMNS, dim=1):
        finite = torch.nan_to_num(part, 0.0, 0.0, 0.0).double()
        middle = finite.median(0).values
        products += finite @ middle
        lengths += finite.square().sum(1)
        whole += float(middle @ middle)
    cosines: Matrix = (products / (lengths * whole).sqrt().clamp(min=1e-30)).numpy()
    return cosines


def _loss(entry: RoundEntry, node: str) -> float:
    """Return the log loss of the client's first local steps: how well the received model fits its data."""
    came = entry.reply_of(node)
    losses = losses_of(came) if came is not None else np.empty(0)
    if not len(losses):
        return math.nan
    return log_loss(float(np.mean(losses[: max(1, len(losses) // 3)], dtype=np.float64)))


def _quiet() -> warnings.catch_warnings[None]:
    """Silence warnings about medians of nothing, which are NaN on purpose."""
    return warnings.catch_warnings(action="ignore", category=RuntimeWarning)


def _log(values: Matrix) -> Matrix:
    with np.errstate(all="ignore"):
        logs: Matrix = np.clip(np.nan_to_num(np.log(values), nan=WORST, posinf=WORST, neginf=-WORST), -WORST, WORST)
    return logs


def _minus_median(values: Matrix) -> Matrix:
    """Return the values minus the cohort's median."""
    with _quiet():
        differences: Matrix = values - np.nanmedian(values)
    return differences
