# SPDX-License-Identifier: Apache-2.0
"""Attackers who act together and know what the honest clients send, and how the server aggregates.

Optimal «little is enough», optimal inner product and mimic follow ByzFL (Guerraoui, Gupta, Pinot, Stephan), sybils
follow FoolsGold (Fung, Yoon, Beschastnikh 2020).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from fedvitals.lab.engines.tasks import Node, Update
from fedvitals.lab.faults.data import LabelFlip
from fedvitals.lab.faults.fault import Count, Fault, Index, ModelHistory, NotNegative, Positive
from fedvitals.lab.faults.updates import (
    change_of,
    honest_updates,
    noise_like,
    send_change,
    struck_updates,
    usable_updates,
)


class _OptimalAttack(Fault, frozen=True):
    """Base class of attacks whose factor τ is searched so that the aggregate ends farthest from the honest mean.

    The objective is ‖rule(honest, attackers) − mean(honest)‖ under the server's own rule. τ is tried at 0, 10, 30, 70,
    ..., twice as far each time for as long as this helps. Then steps of 0.8 of the last one are tried from the best τ,
    each 0.8 of the one before, until there were `evaluations` of the rule. Against a plain mean nothing ends the
    search, and τ becomes as large as `evaluations` allows.
    """

    evaluations: Count = 20
    needs_others: ClassVar[bool] = True

    def sent(self, honest: Tensor, factor: float) -> Tensor:
        """Return what the attackers send, [weights], knowing the honest changes, [n, weights]."""
        raise NotImplementedError

    def collude(
        self, updates: Sequence[Update], affected: Sequence[Node], past: ModelHistory, stream: torch.Generator
    ) -> None:
        del stream  # nothing is drawn
        honest, struck = honest_updates(updates, affected), struck_updates(updates, affected)
        if not honest or not struck:
            return
        changes = torch.stack([change_of(update, past.weights) for update in honest])
        mean = torch.stack([update.state[: past.weights] for update in honest]).mean(0)

        def damage(factor: float) -> float:
            lies = [dataclasses.replace(update) for update in struck]
            for lie in lies:
                send_change(lie, self.sent(changes, factor))
            return float((past.aggregate([*honest, *lies])[: past.weights] - mean).norm())

        sent = self.sent(changes, search_maximum(damage, self.evaluations))
        for update in struck:
            send_change(update, sent)


def search_maximum(objective: Callable[[float], float], evaluations: int) -> float:
    """Return the point from 0 upwards at which the objective was largest, after so many evaluations of it."""
    best, most, step, expanding = 0.0, objective(0.0), 10.0, True
    for _ in range(evaluations - 1):
        value = objective(best + step)
        if value > most:
            best, most = best + step, value
        else:
            expanding = False
        step *= 2.0 if expanding else 0.8
    return best


class OptimalLittleIsEnough(_OptimalAttack, frozen=True):
    """Colluding attackers who know the server's rule: all send mean + τ · deviation, with the worst τ for that rule.

    Args:
        evaluations: How often the server's rule may be tried to find τ.
    """

    issue: ClassVar[str] = "byzantine"

    def sent(self, honest: Tensor, factor: float) -> Tensor:
        deviation = honest.std(0) if len(honest) > 1 else torch.zeros_like(honest[0])
        return honest.mean(0) + factor * deviation


class OptimalInnerProduct(_OptimalAttack, frozen=True):
    """Colluding attackers who know the server's rule: all send −τ · mean, with the worst τ for that rule.

    Args:
        evaluations: How often the server's rule may be tried to find τ.
    """

    issue: ClassVar[str] = "byzantine"

    def sent(self, honest: Tensor, factor: float) -> Tensor:
        return -factor * honest.mean(0)


class Mimic(Fault, frozen=True):
    """Colluding attackers who give one honest client more weight: all of them send that client's update.

    Karimireddy, He and Jaggi 2022. The update is a correct one, but if clients' data differ, the model drifts towards
    that client's.

    Args:
        victim: The index of that client among the honest clients of the round.
    """

    victim: Index = 0
    issue: ClassVar[str] = "duplicate_update"
    needs_others: ClassVar[bool] = True

    def collude(
        self, updates: Sequence[Update], affected: Sequence[Node], past: ModelHistory, stream: torch.Generator
    ) -> None:
        del stream  # nothing is drawn
        honest = honest_updates(updates, affected)
        if honest:
            peer = honest[min(self.victim, len(honest) - 1)]
            for update in struck_updates(updates, affected):
                send_change(update, change_of(peer, past.weights))


class Sybils(LabelFlip, frozen=True):
    """One attacker with many accounts: they flip the same labels and all send nearly the same update, the mean of what
    they have learnt.

    Args:
        source: The class that is relabelled.
        target: The label that it gets.
        rate: The share of the samples of class `source` that is relabelled.
        strength: The length of what they send, as a multiple of that mean's.
        difference: The norm of the noise that each adds, as a share of the update's.
    """

    strength: Positive = 1.0
    difference: NotNegative = 0.05
    issue: ClassVar[str] = "byzantine"
    needs_others: ClassVar[bool] = True

    def collude(
        self, updates: Sequence[Update], affected: Sequence[Node], past: ModelHistory, stream: torch.Generator
    ) -> None:
        accounts = usable_updates(updates, affected)
        if not accounts:
            return
        shared = torch.stack([change_of(update, past.weights) for update in accounts]).mean(0) * self.strength
        for update in accounts:
            send_change(update, shared + noise_like(shared, self.difference * shared.norm(), stream))


FAULTS = (OptimalLittleIsEnough, OptimalInnerProduct, Mimic, Sybils)
