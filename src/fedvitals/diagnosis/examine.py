# SPDX-License-Identifier: Apache-2.0
"""All shipped detectors, and how they go over a run: round after round, each with no more than was known then."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from fedvitals.diagnosis.detectors import (
    aggregation,
    convergence,
    gradient,
    guards,
    labels,
    memory,
    system,
    transformed,
)
from fedvitals.diagnosis.evidence import locate
from fedvitals.diagnosis.history_cutoff import Horizon, Until
from fedvitals.errors import ConfigError, unknown
from fedvitals.protocols import Detector, History, name_of
from fedvitals.records import Finding

STANDARD = "standard"
MOST_ALARMS = 10.0
Failed = Callable[[Exception, str], None]
"""Hears of a detector that raised: the error, and which one it was."""

RULES: tuple[Detector, ...] = (
    *guards.DETECTORS,
    *convergence.DETECTORS,
    *gradient.DETECTORS,
    *aggregation.DETECTORS,
    *labels.DETECTORS,
    *transformed.DETECTORS,
    *system.DETECTORS,
    *memory.DETECTORS,
)
DETECTORS: tuple[Detector, ...] = (*RULES, *locate.DETECTORS)
"""What «standard» stands for. Together they keep to the false-alarm budget of docs/issues.md."""


def choose(detectors: str | Sequence[Detector | str], false_alarms: float = 1.0) -> tuple[Detector, ...]:
    """The detectors that a person means: «standard», a list of functions, or a list with «standard» in it.

    `false_alarms`: how many per 100 healthy rounds are allowed, over all rules together. What can be wrong only seldom,
    and is then plainly so, costs the same at any setting; the search for faulty clients takes what is left.
    """
    number = isinstance(false_alarms, int | float) and not isinstance(false_alarms, bool)
    if not number or not 0 < false_alarms <= MOST_ALARMS:
        raise ConfigError(
            f"false_alarms= is how many alarms per 100 healthy rounds you allow: above 0, up to {MOST_ALARMS:g}; "
            f"got {false_alarms!r}."
        )
    standard: tuple[Detector, ...] = DETECTORS if false_alarms == 1 else (*RULES, locate.Locator(false_alarms))
    if callable(detectors):
        raise ConfigError(
            'detectors= takes a list of functions: detectors=[my_detector], or ["standard", my_detector].'
        )
    chosen: list[Detector] = []
    for one in [detectors] if isinstance(detectors, str) else detectors:
        if callable(one):
            chosen.append(one)
        elif one == STANDARD:
            chosen += standard
        else:
            raise ConfigError(unknown("set of detectors", str(one), [STANDARD]))
    return tuple(chosen)


def examine(
    history: History,
    rounds: Iterable[int] | None = None,
    detectors: Iterable[Detector] | None = None,
    *,
    failed: Failed | None = None,
) -> list[Finding]:
    """What the detectors (all of ours, unless given) say of each of these rounds (all, unless given), in order.

    The run's id is not filled in: a history knows none. `failed` hears of a detector that raised, and the others go on;
    without it, the error is raised.
    """
    chosen = DETECTORS if detectors is None else tuple(detectors)
    examination = Examination(history, chosen, failed, finished=True)
    return [
        finding for number in (history.rounds() if rounds is None else rounds) for finding in examination.of(number)
    ]


class Examination:
    """Detectors that go over one run: they get the same view of it each round, which ends further on each time.

    `finished`: nothing is being added to the history meanwhile.
    """

    def __init__(
        self, history: History, detectors: Sequence[Detector], failed: Failed | None, *, finished: bool = False
    ) -> None:
        self._horizon = Horizon()
        self._past = Until(history, self._horizon, finished=finished)
        self._detectors, self._failed = detectors, failed

    def of(self, number: int) -> Iterator[Finding]:
        """What the detectors say of a round, from what was known by its end."""
        self._horizon.move_to(number)
        for detector in self._detectors:
            found: list[Finding] = []
            try:
                # A client may send any number. What infinities come to (∞ − ∞ is no number) is beyond no limit, so that
                # nobody is accused of it: that is meant, and no reason to warn. Medians of nothing still are.
                with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
                    found.extend(detector(self._past, number))
            except Exception as error:
                if self._failed is None:
                    raise
                self._failed(error, f"the detector '{name_of(detector)}'")
            yield from found  # what it said before it failed counts


def of_run(finding: Finding, run: str, at: float) -> Finding:
    """The finding with the run that it is about, and the time, unless the detector gave one."""
    return replace(finding, where=replace(finding.where, run=finding.where.run or run), at=finding.at or at)
