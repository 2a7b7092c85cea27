# SPDX-License-Identifier: Apache-2.0
"""Faults between a client and the server: its availability, speed, messages and clock."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Annotated, ClassVar

import torch

from fedvitals.lab.engines.tasks import Update
from fedvitals.lab.faults.fault import AboveOne, Fault, ModelHistory, Positive, Share, require_within

if TYPE_CHECKING:
    from fedvitals.lab.network.virtual_clock import Journey


def _happens(rate: float, stream: torch.Generator) -> bool:
    return float(torch.rand((), generator=stream)) < rate


class DropOut(Fault, frozen=True):
    """A client that is unavailable in some rounds.

    Args:
        rate: The probability that it happens, in each of its rounds.
    """

    rate: Share = 1.0
    strength_field: ClassVar[str | None] = "rate"

    def journey(self, journey: Journey, stream: torch.Generator) -> Journey:
        return dataclasses.replace(journey, available=journey.available and not _happens(self.rate, stream))


class Straggler(Fault, frozen=True):
    """A client that computes `factor` times as long, as on a slow or busy machine.

    Args:
        factor: How many times as long the client computes.
    """

    factor: AboveOne = 10.0
    strength_field: ClassVar[str | None] = "factor"
    harmless: ClassVar[float] = 1.0

    def journey(self, journey: Journey, stream: torch.Generator) -> Journey:  # noqa: ARG002
        return dataclasses.replace(journey, compute=journey.compute * self.factor)


class Timeout(Fault, frozen=True):
    """A client whose upload takes longer, as over a stalled connection. With a deadline the update comes too late;
    without one the server waits.

    Args:
        seconds: How much longer the upload takes.
    """

    seconds: Positive = 3600.0
    strength_field: ClassVar[str | None] = "seconds"

    def journey(self, journey: Journey, stream: torch.Generator) -> Journey:  # noqa: ARG002
        return dataclasses.replace(journey, upload=journey.upload + self.seconds)


class LostMessage(Fault, frozen=True):
    """A client whose update never arrives, as after a dropped connection.

    Args:
        rate: The probability that it happens, in each of its rounds.
    """

    rate: Share = 1.0
    issue: ClassVar[str] = "communication_failure"
    strength_field: ClassVar[str | None] = "rate"

    def journey(self, journey: Journey, stream: torch.Generator) -> Journey:
        return dataclasses.replace(journey, lost=journey.lost or _happens(self.rate, stream))


class CorruptedMessage(Fault, frozen=True):
    """An update with flipped bits. A checksum reveals it, and it is not used; or, if `silent`, it goes unnoticed.

    Args:
        rate: The probability that it happens, in each of its rounds.
        silent: Whether it goes unnoticed: one bit flips in some numbers; in the exponent that may make them huge or
            NaN.
        share: The share of the numbers that is hit, if silent.
    """

    rate: Share = 1.0
    silent: bool = False
    share: Share = 0.001  # of the numbers, when it is silent
    issue: ClassVar[str] = "communication_failure"
    strength_field: ClassVar[str | None] = "rate"

    def journey(self, journey: Journey, stream: torch.Generator) -> Journey:
        if self.silent:
            return journey
        return dataclasses.replace(journey, corrupted=journey.corrupted or _happens(self.rate, stream))

    def update(self, update: Update, past: ModelHistory, stream: torch.Generator) -> None:  # noqa: ARG002
        if not self.silent or not _happens(self.rate, stream):
            return
        bits = update.state.to(torch.float32).clone().view(torch.int32)
        struck = torch.randint(len(bits), (max(1, round(self.share * len(bits))),), generator=stream).unique()
        places = torch.randint(31, (len(struck),), generator=stream, dtype=torch.int32)
        flips = (torch.ones_like(places) << places).to(bits.device)
        bits[struck.to(bits.device)] ^= flips
        update.state = bits.view(torch.float32)


class ClockSkew(Fault, frozen=True):
    """A wrong clock: the client's timestamps are late or early.

    Args:
        seconds: By how much they are late; negative: early.
    """

    seconds: Annotated[float, functools.partial(require_within, low=-1e9, high=1e9)] = 3600.0
    strength_field: ClassVar[str | None] = "seconds"

    def journey(self, journey: Journey, stream: torch.Generator) -> Journey:  # noqa: ARG002
        return dataclasses.replace(journey, clock_offset=journey.clock_offset + self.seconds)


class TelemetryLost(Fault, frozen=True):
    """A client whose updates arrive but whose telemetry is lost, as behind a firewall that only passes models."""

    drops_telemetry: ClassVar[bool] = True


FAULTS = (DropOut, Straggler, Timeout, LostMessage, CorruptedMessage, ClockSkew, TelemetryLost)
