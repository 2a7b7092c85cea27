# SPDX-License-Identifier: Apache-2.0
"""When to measure: plain functions from a moment to yes or no.

`last()` is not a test on a step, since nobody knows which step will be the last: it marks a probe to be run once, when
the client's scope closes.
"""

from __future__ import annotations

from functools import partial

from fedvitals.errors import ConfigError
from fedvitals.protocols import Moment, Schedule


def always(_moment: Moment) -> bool:
    """Measure at every step."""
    return True


def last() -> Schedule:
    """A schedule: once per client-round, when its scope closes.

    Returns:
        The schedule, for `(probe, schedule)` in a monitor's list of probes.
    """
    return at_exit


def at_exit(_moment: Moment) -> bool:
    """The schedule that `last()` returns: at no step, but at the end of the scope."""
    return False


def every(n: int) -> Schedule:
    """A schedule: steps 0, n, 2n, ... of each client-round.

    Args:
        n: Steps between two measurements.

    Returns:
        The schedule, for `(probe, schedule)` in a monitor's list of probes.
    """
    if n < 1:
        raise ConfigError(f"every(n) needs n of at least 1, got {n}.")
    return partial(_every, n)  # not a lambda, because schedules are sent to worker processes


def first(n: int) -> Schedule:
    """A schedule: the first n steps of each client-round.

    Args:
        n: The number of steps.

    Returns:
        The schedule, for `(probe, schedule)` in a monitor's list of probes.
    """
    if n < 1:
        raise ConfigError(f"first(n) needs n of at least 1, got {n}.")
    return partial(_first, n)


def _every(n: int, moment: Moment) -> bool:
    return moment.step % n == 0


def _first(n: int, moment: Moment) -> bool:
    return moment.step < n


class budget:  # noqa: N801 - reads as its siblings every() and first()
    """A schedule: measure as often as fits into a share of the training time, in percent.

    Works like an allowance: each step earns `percent` of its own length, a measurement spends what it really cost.
    It measures when the allowance covers what the last measurement cost, so a slow probe is thinned out and a change
    of the step time is followed at once. Savings are capped at the cost of one measurement, or at what 10 ms of
    training earn if that is more: no burst after a quiet stretch. `asked` and `granted` count the steps so far and
    those measured.

    Args:
        percent: The share of the training time that measurements may take.
    """

    BURST_SECONDS = 0.01

    def __init__(self, percent: float) -> None:
        if not 0 < percent <= 100:
            raise ConfigError(f"budget(percent) needs a share of training time in (0, 100], got {percent}.")
        self.percent = percent
        self.asked = self.granted = 0
        self._allowance = 0.0
        self._spent = 0.0
        self._expected = 0.0

    def __call__(self, moment: Moment) -> bool:
        if moment.cost_so_far < self._spent:
            self._spent = 0.0  # a new run, whose costs start from zero
        cost = moment.cost_so_far - self._spent
        if cost > 0:
            self._spent, self._expected = moment.cost_so_far, cost
            self._allowance -= cost
        # The length of the step includes our own cost, which must not earn an allowance.
        earned = max(0.0, moment.seconds_of_step - max(0.0, cost)) * self.percent / 100
        cap = max(self._expected, self.BURST_SECONDS * self.percent / 100)
        self._allowance = min(self._allowance + earned, cap)
        self.asked += 1
        granted = self._allowance >= self._expected
        self.granted += granted
        return granted
