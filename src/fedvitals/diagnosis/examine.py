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
from fedvitals.diagnosis.evidence import faulty_clients
from fedvitals.diagnosis.history_cutoff import CutoffRound, HistoryCutoff
from fedvitals.errors import ConfigError
from fedvitals.protocols import Detector, History, name_of
from fedvitals.records import Finding

STANDARD = "standard"
MOST_ALARMS = 10.0
OnDetectorFailure = Callable[[Exception, str], None]
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
DETECTORS: tuple[Detector, ...] = (*RULES, *faulty_clients.DETECTORS)
"""What «standard» stands for. Together they keep to the false-alarm budget of docs/issues.md."""


def choose_detectors(detectors: str | Sequence[Detector | str], false_alarms: float = 1.0) -> tuple[Detector, ...]:
    """Return the detectors that a user chose: «standard», functions, names of installed plug-ins, or a list of these.

    A plug-in that is not named is not imported; one that cannot be loaded fails in every round (`detectors.installed`).
    `false_alarms`: how many per 100 healthy rounds are allowed, over all rules together. What can be wrong only seldom,
    and is then plainly so, costs the same at any setting; the search for faulty clients takes what is left.
    """
    is_number = isinstance(false_alarms, int | float) and not isinstance(false_alarms, bool)
    if not is_number or not 0 < false_alarms <= MOST_ALARMS:
        raise ConfigError(
            f"false_alarms= is how many alarms per 100 healthy rounds you allow: above 0, up to {MOST_ALARMS:g}; "
            f"got {false_alarms!r}."
        )
    standard: tuple[Detector, ...] = (
        DETECTORS if false_alarms == 1 else (*RULES, faulty_clients.FaultyClientLocator(false_alarms))
    )
    if callable(detectors):
        raise ConfigError(
            'detectors= takes a list of functions: detectors=[my_detector], or ["standard", my_detector].'
        )
    chosen: list[Detector] = []
    for entry in [detectors] if isinstance(detectors, str) else detectors:
        if callable(entry):
            chosen.append(entry)
        elif entry == STANDARD:
            chosen += standard
        else:
            from fedvitals.diagnosis.detectors.installed import detectors_named  # noqa: PLC0415 - seldom needed, slow

            chosen += detectors_named(str(entry), [STANDARD])
    return tuple(chosen)


def examine(
    history: History,
    rounds: Iterable[int] | None = None,
    detectors: Iterable[Detector] | None = None,
    *,
    failed: OnDetectorFailure | None = None,
) -> list[Finding]:
    """What the detectors (all of ours, unless given) say of each of these rounds (all, unless given), in order.

    The run's id is not filled in: a history knows none. `failed` hears of a detector that raised, and the others go on;
    without it, the error is raised.
    """
    chosen = DETECTORS if detectors is None else tuple(detectors)
    examination = Examination(history, chosen, failed, finished=True)
    return [
        finding
        for round_index in (history.rounds() if rounds is None else rounds)
        for finding in examination.findings_of(round_index)
    ]


class Examination:
    """Detectors that go over one run: they get the same view of it each round, which ends further on each time.

    `finished`: nothing is being added to the history meanwhile.
    """

    def __init__(
        self,
        history: History,
        detectors: Sequence[Detector],
        failed: OnDetectorFailure | None,
        *,
        finished: bool = False,
    ) -> None:
        self._horizon = CutoffRound()
        self._past = HistoryCutoff(history, self._horizon, finished=finished)
        self._detectors, self._failed = detectors, failed

    def findings_of(self, round_index: int) -> Iterator[Finding]:
        """What the detectors say of a round, from what was known by its end."""
        self._horizon.move_to(round_index)
        for detector in self._detectors:
            findings: list[Finding] = []
            try:
                # A client may send any number. What infinities come to (∞ − ∞ is no number) is beyond no limit, so that
                # nobody is accused of it: that is meant, and no reason to warn. Medians of nothing still are.
                with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
                    findings.extend(detector(self._past, round_index))
            except Exception as error:
                if self._failed is None:
                    raise
                self._failed(error, f"the detector '{name_of(detector)}'")
            yield from findings  # what it said before it failed counts


def with_run_and_time(finding: Finding, run: str, at: float) -> Finding:
    """The finding with the run that it is about, and the time, unless the detector gave one."""
    return replace(finding, where=replace(finding.where, run=finding.where.run or run), at=finding.at or at)
