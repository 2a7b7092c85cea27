# SPDX-License-Identifier: Apache-2.0
"""Estimates by how much another machine's clock is ahead, with bounds, from the four times of each exchange.

    server   sent ─────────────────────────────── returned
    client          received ──────── replied

No message arrives before it is sent, so each exchange bounds the offset θ of the client's clock,

    replied − returned ≤ θ ≤ received − sent,

and all exchanges together bound it by the narrowest (NTP's minimum filter, as an interval). Within the bounds no
duration is negative, whatever θ is assumed. The estimate is 0 where that is possible: two machines that keep time by
NTP differ by less than a slow upload from a fast download, which the middle (NTP's own choice) would mistake for an
offset. Where 0 is impossible, the middle is used.

Clocks drift: bounds widen with the time since they were measured. A client whose clock runs fast may seem to have
worked longer than it was away; then θ moved from one bound to the other in that time, and lies between them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fedvitals.errors import RecordError

LATEST = 4.1e9  # seconds since the epoch: until the year 2099
DRIFT = 100e-6  # seconds per second that a bad quartz deviates
# Seconds beyond drift by which a client may seem to have worked longer than it was away: NTP corrects clocks
SLACK = 1.0


@dataclass(frozen=True, slots=True)
class Offset:
    """The client's clock less the server's lies in [low, high] seconds."""

    low: float = -math.inf
    high: float = math.inf
    at: float = 0.0  # when it was measured, by the server's clock

    @property
    def seconds(self) -> float:
        """The estimate of the offset."""
        if self.low <= 0 <= self.high or math.isinf(self.high - self.low):
            return min(max(0.0, self.low), self.high)
        return (self.low + self.high) / 2

    @property
    def error(self) -> float:
        """The largest possible error of the estimate."""
        return max(self.high - self.seconds, self.seconds - self.low)

    @property
    def beyond_doubt(self) -> float:
        """The smallest possible error of the client's clock, with its sign; 0 if it may be right."""
        return self.low if self.low > 0 else min(self.high, 0.0)

    def learn(self, sent: float, received: float, replied: float, returned: float) -> Offset:
        """Return the offset after one more exchange. If it contradicts all before, the clock was set: begin again."""
        _check(sent, received, replied, returned)
        low, high = sorted((replied - returned, received - sent))
        wider = DRIFT * abs(returned - self.at)
        both = replace(self, low=max(low, self.low - wider), high=min(high, self.high + wider), at=returned)
        return both if both.low <= both.high else Offset(low, high, returned)


def why_impossible(sent: float, received: float, replied: float, returned: float) -> str | None:
    """Return why the client's two times are impossible, given the server's; None if they are possible.

    An honest client can report impossible times if its clock was set while it worked.
    """
    worked, away = replied - received, returned - sent
    if worked < 0:
        return f"by its own clock it replied {-worked:.3f} s before it received the message"
    if worked > away + DRIFT * away + SLACK:
        return f"by its own clock it worked for {worked:.3f} s, and it was away for {away:.3f} s"
    return None


def worked_interval(sent: float, received: float, replied: float, returned: float) -> tuple[float, float]:
    """Return when a client worked, within what the server saw; all of that if the client's times are impossible."""
    if why_impossible(sent, received, replied, returned) is not None:
        return sent, returned
    seconds = min(replied - received, returned - sent)
    began = min(max(received, sent), returned - seconds)
    return began, began + seconds


def _check(sent: float, received: float, replied: float, returned: float) -> None:
    times = (sent, received, replied, returned)
    if not all(isinstance(t, int | float) and math.isfinite(t) for t in times):
        raise RecordError(f"The four times of an exchange are seconds since the epoch; got {times}.")
    if not all(0 <= t <= LATEST for t in times):
        raise RecordError(f"The four times of an exchange lie between 1970 and 2099; got {times}.")
    if returned < sent:
        raise RecordError(f"An exchange ended before it began, by the server's clock: {times}.")
    why = why_impossible(*times)
    if why is not None:
        raise RecordError(f"The times of an exchange cannot be, {times}: {why}.")
