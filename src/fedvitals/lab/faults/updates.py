# SPDX-License-Identifier: Apache-2.0
"""Faults of the update that a client sends: by accident, by free riding, or by an attack.

An update is the trained state minus the state it was trained from. Faults change the weights only: a mirrored variance
in the buffers would be negative and reveal the fault. `update.state` is replaced, never modified.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedvitals.lab.description import require
from fedvitals.lab.engines.tasks import Node, Update
from fedvitals.lab.faults.fault import (
    Count,
    Fault,
    ModelHistory,
    NotNegative,
    Positive,
    RunFault,
    require_within,
)


def change_of(update: Update, weights: int) -> Tensor:
    """Return what the client has learnt: its trained weights minus those it started from."""
    return update.state[:weights] - update.start[:weights]


def send_change(update: Update, change: Tensor) -> None:
    """Make the client send this change instead of its own."""
    weights = len(change)
    update.state = torch.cat((update.start[:weights] + change, update.state[weights:]))


def noise_like(like: Tensor, norm: Tensor | float, stream: torch.Generator) -> Tensor:
    """Return Gaussian noise of about this norm, drawn on the CPU so that it is the same on every device."""
    drawn = torch.randn(like.shape, generator=stream, dtype=like.dtype).to(like.device)
    return drawn * (norm / math.sqrt(max(len(like), 1)))


class StaleUpdate(Fault, frozen=True):
    """A client that missed the last rounds: it adds what it learns to the server's model of `rounds` rounds ago.

    What it learns is learnt from the current model: training on the old one would need a second training or kept
    updates, and a resumed run has neither. To the server both look the same: a model that pulls back towards an earlier
    one.

    Args:
        rounds: The age of that model in rounds.
    """

    rounds: Count = 3

    @property
    def history_rounds(self) -> int:
        return self.rounds

    def update(self, update: Update, past: ModelHistory, stream: torch.Generator) -> None:  # noqa: ARG002
        # In the first rounds of a run it has what everybody began with.
        models = (past.model(rounds_ago) for rounds_ago in range(self.rounds, 0, -1))
        old = next((model for model in models if model is not None), None)
        if old is not None:
            base = old[: past.weights]
            update.state = torch.cat((base + change_of(update, past.weights), update.state[past.weights :]))


class FreeRider(Fault, frozen=True):
    """A client that wants the model without training: it repeats the server's last step, with a little noise.

    In the first round there is no step to repeat, and it returns the model unchanged.

    Args:
        noise: The norm of the noise, as a share of the step's.
    """

    noise: NotNegative = 0.05  # of the step's norm

    @property
    def history_rounds(self) -> int:
        return 1

    def update(self, update: Update, past: ModelHistory, stream: torch.Generator) -> None:
        now, before = past.model(0), past.model(1)
        if now is None or before is None:
            update.state = update.start.clone()
            return
        step = now[: past.weights] - before[: past.weights]
        noise = noise_like(step, self.noise * step.norm(), stream)
        update.state = torch.cat((update.start[: past.weights] + step + noise, update.start[past.weights :]))


class SignFlip(Fault, frozen=True):
    """An attacker: the update with its sign reversed.

    Args:
        strength: The length of what it sends, as a multiple of the update's.
    """

    strength: Positive = 1.0
    issue: ClassVar[str] = "byzantine"
    strength_field: ClassVar[str | None] = "strength"

    def update(self, update: Update, past: ModelHistory, stream: torch.Generator) -> None:  # noqa: ARG002
        send_change(update, change_of(update, past.weights) * -self.strength)


class Scaling(Fault, frozen=True):
    """A scaled update: from an attacker who wants more influence, or a client that sends a sum instead of a mean.

    Args:
        factor: The number that the update is multiplied by.
    """

    factor: NotNegative = 10.0
    issue: ClassVar[str] = "byzantine"
    strength_field: ClassVar[str | None] = "factor"
    harmless: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.factor != 1, "factor of scaling", self.factor, "another number than 1, which changes nothing")

    def update(self, update: Update, past: ModelHistory, stream: torch.Generator) -> None:  # noqa: ARG002
        send_change(update, change_of(update, past.weights) * self.factor)


class Gaussian(Fault, frozen=True):
    """An attacker that knows nothing: it sends noise instead of its update, or adds noise to it.

    Args:
        strength: The noise's norm, as a multiple of the update's.
        add: Whether it is added to the update.
    """

    strength: Positive = 2.0
    add: bool = False
    issue: ClassVar[str] = "byzantine"
    strength_field: ClassVar[str | None] = "strength"

    def update(self, update: Update, past: ModelHistory, stream: torch.Generator) -> None:
        change = change_of(update, past.weights)
        noise = noise_like(change, self.strength * change.norm(), stream)
        send_change(update, change + noise if self.add else noise)


class WrongSampleCount(Fault, frozen=True):
    """A client that reports `factor` times as many samples as it has, and so gets another weight in the mean.

    Args:
        factor: The number of samples that it claims, as a multiple of what it has.
    """

    factor: NotNegative = 20.0
    strength_field: ClassVar[str | None] = "factor"
    harmless: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.factor != 1, "factor of wrong_sample_count", self.factor, "another number than 1")

    def update(self, update: Update, past: ModelHistory, stream: torch.Generator) -> None:  # noqa: ARG002
        update.samples = round(update.samples * self.factor)


class ZeroWeight(RunFault, frozen=True):
    """Every client reports no samples, as if the data set was not mounted, so that nothing can be averaged."""

    issue: ClassVar[str] = "zero_total_weight"

    def update(self, update: Update, past: ModelHistory, stream: torch.Generator) -> None:  # noqa: ARG002
        update.samples = 0


class ShapeMismatch(Fault, frozen=True):
    """A client with another version of the model: its update is too short.

    Args:
        missing: How many numbers are missing.
    """

    missing: Count = 1
    issue: ClassVar[str] = "shape_or_dtype_mismatch"
    applied_last: ClassVar[bool] = True

    def update(self, update: Update, past: ModelHistory, stream: torch.Generator) -> None:  # noqa: ARG002
        update.state = update.state[: max(0, len(update.state) - self.missing)].clone()


class DtypeMismatch(Fault, frozen=True):
    """A client that trains in another precision and sends its numbers in it.

    Args:
        dtype: The precision.
    """

    dtype: Literal["float64", "float16", "bfloat16"] = "float64"
    issue: ClassVar[str] = "shape_or_dtype_mismatch"
    applied_last: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        known = ("float64", "float16", "bfloat16")
        require(self.dtype in known, "dtype of dtype_mismatch", self.dtype, f"one of {', '.join(known)}")

    def update(self, update: Update, past: ModelHistory, stream: torch.Generator) -> None:  # noqa: ARG002
        update.state = update.state.to(getattr(torch, self.dtype))


# -- who knows what the others send -----------------------------------------------------------------------------------


def honest_updates(updates: Sequence[Update], affected: Sequence[Node]) -> list[Update]:
    """Return the updates of unaffected clients that can be copied or averaged."""
    return usable_updates(updates, [update.node for update in updates if update.node not in affected])


def usable_updates(updates: Sequence[Update], nodes: Sequence[Node]) -> list[Update]:
    """Return the updates of these nodes that can be copied or averaged."""
    return [
        update
        for update in struck_updates(updates, nodes)
        if (update.state.shape, update.state.dtype) == (update.start.shape, update.start.dtype)
    ]


def struck_updates(updates: Sequence[Update], affected: Sequence[Node]) -> list[Update]:
    """Return the updates of these nodes, without those of clients that failed."""
    return [update for update in updates if update.node in affected and update.error is None]


class Duplicate(Fault, frozen=True):
    """A client that copies: it sends a peer's update, with a little noise.

    Args:
        of: The peer; None: a random one in each round.
        noise: The norm of the noise, as a share of the update's.
    """

    of: str | None = None
    noise: NotNegative = 0.0  # of the update's norm
    issue: ClassVar[str] = "duplicate_update"
    needs_others: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.of not in self.nodes, "peer (of) of duplicate", self.of, "another node than those that copy")

    def collude(
        self, updates: Sequence[Update], affected: Sequence[Node], past: ModelHistory, stream: torch.Generator
    ) -> None:
        honest = [update for update in honest_updates(updates, affected) if self.of in (None, update.node)]
        for update in struck_updates(updates, affected) if honest else ():
            peer = honest[int(torch.randint(len(honest), (), generator=stream))]
            if peer.start is update.start or torch.equal(peer.start, update.start):
                update.state = peer.state.clone()  # to the last bit, which a sum would not be
            else:
                send_change(update, change_of(peer, past.weights))
            if self.noise:
                change = change_of(update, past.weights)
                send_change(update, change + noise_like(change, self.noise * change.norm(), stream))


class LittleIsEnough(Fault, frozen=True):
    """Colluding attackers: all send the mean minus some standard deviations, within the usual range.

    «A little is enough», Baruch, Baruch and Goldberg 2019.

    Args:
        deviations: The number of standard deviations; None: by the paper's formula for the number of attackers and
            clients, such that a majority is still closer to them than to the mean. For few attackers that is 0, which
            does no harm.
    """

    deviations: float | None = None
    issue: ClassVar[str] = "byzantine"
    needs_others: ClassVar[bool] = True
    strength_field: ClassVar[str | None] = "deviations"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.deviations is not None:
            require_within(self, "deviations", 0, above=True)

    def collude(
        self, updates: Sequence[Update], affected: Sequence[Node], past: ModelHistory, stream: torch.Generator
    ) -> None:
        del stream  # nothing is drawn
        honest, struck = honest_updates(updates, affected), struck_updates(updates, affected)
        if not honest or not struck:
            return
        changes = torch.stack([change_of(update, past.weights) for update in honest])
        deviations = self._deviations(len(honest) + len(struck), len(struck))
        sent = changes.mean(0) - deviations * changes.std(0, correction=0)
        for update in struck:
            send_change(update, sent)

    def _deviations(self, clients: int, attackers: int) -> float:
        if self.deviations is not None:
            return self.deviations
        supporters = clients // 2 + 1 - attackers
        share = (clients - attackers - supporters) / (clients - attackers)
        return max(0.0, NormalDist().inv_cdf(min(max(share, 1e-6), 1 - 1e-6)))


class InnerProduct(Fault, frozen=True):
    """Colluding attackers: all send the mean of the honest updates with reversed sign.

    «Fall of empires», Xie, Koyejo and Gupta 2019: it makes the inner product of the aggregate with the true mean
    negative.

    Args:
        strength: The length of what they send, as a multiple of that mean's.
    """

    strength: Positive = 0.5
    issue: ClassVar[str] = "byzantine"
    needs_others: ClassVar[bool] = True
    strength_field: ClassVar[str | None] = "strength"

    def collude(
        self, updates: Sequence[Update], affected: Sequence[Node], past: ModelHistory, stream: torch.Generator
    ) -> None:
        del stream  # nothing is drawn
        honest = honest_updates(updates, affected)
        if honest:
            mean = torch.stack([change_of(update, past.weights) for update in honest]).mean(0)
            for update in struck_updates(updates, affected):
                send_change(update, mean * -self.strength)


FAULTS = (
    *(StaleUpdate, FreeRider, Duplicate, SignFlip, Scaling, Gaussian, LittleIsEnough, InnerProduct),
    *(WrongSampleCount, ZeroWeight, ShapeMismatch, DtypeMismatch),
)
