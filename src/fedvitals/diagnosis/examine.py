# SPDX-License-Identifier: Apache-2.0
"""The shipped detectors, and how they run on a history round by round, each seeing only what was known by then."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from fedvitals.diagnosis.detectors import (
    adapters,
    against_cohort,
    aggregation,
    changed_clients,
    convergence,
    data,
    exact,
    few_clients,
    gradient,
    gradient_scale,
    guards,
    input_profiles,
    labels,
    language,
    learning_rate,
    memory_leaks,
    oversized_updates,
    stalls,
    system,
    transformed,
)
from fedvitals.diagnosis.evidence import faulty_clients
from fedvitals.diagnosis.history_cutoff import CutoffRound, HistoryCutoff
from fedvitals.diagnosis.whole_run import WholeRunCauses
from fedvitals.errors import ConfigError
from fedvitals.protocols import Detector, History, name_of
from fedvitals.records import Finding

STANDARD = "standard"
MOST_ALARMS = 10.0
OnDetectorFailure = Callable[[Exception, str], None]
"""Called with the error of a detector that raised, and the detector's name."""

RULES: tuple[Detector, ...] = (
    *guards.DETECTORS,
    *exact.DETECTORS,
    *few_clients.DETECTORS,
    *convergence.DETECTORS,
    *gradient.DETECTORS,
    *gradient_scale.DETECTORS,
    *aggregation.DETECTORS,
    *adapters.DETECTORS,
    *language.DETECTORS,
    *labels.DETECTORS,
    *data.DETECTORS,
    *learning_rate.DETECTORS,
    *transformed.DETECTORS,
    *system.DETECTORS,
    *memory_leaks.DETECTORS,
    *stalls.DETECTORS,
)
BESIDE_EVIDENCE: tuple[Detector, ...] = (
    *changed_clients.DETECTORS,
    *against_cohort.DETECTORS,
    *oversized_updates.DETECTORS,
    *input_profiles.DETECTORS,
)
DETECTORS: tuple[Detector, ...] = (*RULES, *faulty_clients.DETECTORS, *BESIDE_EVIDENCE)
"""The detectors of «standard». Together they keep within the false-alarm budget of docs/issues.md."""


def choose_detectors(detectors: str | Sequence[Detector | str], false_alarms: float = 1.0) -> tuple[Detector, ...]:
    """Return the detectors that a user chose: «standard», functions, names of installed plug-ins, or a list of these.

    A plug-in that is not named is not imported; one that cannot be loaded fails in every round (`detectors.installed`).
    `false_alarms` is the number of alarms allowed per 100 healthy rounds, over all rules together. Exact rules have the
    same cost at any setting; the search for faulty clients gets the rest of the budget.
    """
    is_number = isinstance(false_alarms, int | float) and not isinstance(false_alarms, bool)
    if not is_number or not 0 < false_alarms <= MOST_ALARMS:
        raise ConfigError(
            f"false_alarms= is how many alarms per 100 healthy rounds you allow: above 0, up to {MOST_ALARMS:g}; "
            f"got {false_alarms!r}."
        )
    standard: tuple[Detector, ...] = (
        DETECTORS if false_alarms == 1 else (*RULES, faulty_clients.FaultyClientLocator(false_alarms), *BESIDE_EVIDENCE)
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


def compares_clients(detectors: Iterable[Detector]) -> bool:
    """Return whether one of the detectors compares clients by all their signs, like «standard»."""
    return any(isinstance(detector, faulty_clients.FaultyClientLocator) for detector in detectors)


def examine(
    history: History,
    rounds: Iterable[int] | None = None,
    detectors: Iterable[Detector] | None = None,
    *,
    failed: OnDetectorFailure | None = None,
) -> list[Finding]:
    """Return the findings of the given rounds (default: all) by the given detectors (default: the shipped ones).

    They are in order, and have no run id, because a history has none. `failed` is called with the error of a detector
    that raised, and the others continue; without it, the error is raised.
    """
    chosen = DETECTORS if detectors is None else tuple(detectors)
    examination = DetectorExamination(history, chosen, failed, finished=True)
    return [
        finding
        for round_index in (history.rounds() if rounds is None else rounds)
        for finding in examination.findings_of(round_index)
    ]


class DetectorExamination:
    """Runs detectors over one run, with the same view of its history, which ends one round later each time.

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
        self.history = HistoryCutoff(history, self._horizon, finished=finished)  # as detectors see it
        self._detectors, self._failed = detectors, failed
        self._whole_run = WholeRunCauses()

    def findings_of(self, round_index: int) -> Iterator[Finding]:
        """Yield what the detectors report for a round, given what was known by its end."""
        self._horizon.move_to(round_index)
        for detector in self._detectors:
            findings: list[Finding] = []
            try:
                # A client may send any number. Arithmetic on infinities gives NaN (∞ − ∞), which exceeds no limit, so
                # no client is accused of it. That is intended and needs no warning; a median of nothing still warns.
                with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
                    findings.extend(detector(self.history, round_index))
            except Exception as error:
                if self._failed is None:
                    raise
                self._failed(error, f"the detector '{name_of(detector)}'")
            for finding in findings:  # findings reported before a failure count
                if not isinstance(finding, Finding) or not self._whole_run.explain(finding, round_index):
                    yield finding


def with_run_and_time(finding: Finding, run: str, at: float) -> Finding:
    """Return the finding with its run's id filled in, and the time unless the detector set one."""
    return replace(finding, where=replace(finding.where, run=finding.where.run or run), at=finding.at or at)
