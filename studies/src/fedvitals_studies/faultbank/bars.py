# SPDX-License-Identifier: Apache-2.0
"""The bars that the bank is measured by, each with the figure obtained and a verdict computed from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fedvitals_studies.faultbank.figures import FIGURES, Row, about
from fedvitals_studies.faultbank.intervals import NOTHING, Estimate, share
from fedvitals_studies.faultbank.score import Judgement, Outcome, Target

Judgements = Sequence[Judgement]
Trained = Callable[[Judgement, Target], bool]

EARLY = 3  # the last round by which the paper's scenarios have to be distinguished
SCENARIOS = {"exploding_initialisation": "EXPLODING_GRADIENT", "vanishing_initialisation": "VANISHING_GRADIENT"}
FEW = 5  # culprits found of a kind, below which its share of right causes is too uncertain for a bar of its own


@dataclass(frozen=True, slots=True)
class Bar:
    """What was required, and the figure obtained."""

    name: str
    limit: float
    at_least: bool
    obtained: Estimate
    unit: str = ""  # «%»: a share, shown times 100
    note: str = ""

    @property
    def verdict(self) -> str:
        """Return the verdict on the figure; the interval may show that other runs of the same kind would decide
        otherwise.
        """
        if self.obtained.value is None:
            return "not measured"
        return "met" if self._reached(self.obtained.value) else "missed"

    @property
    def certain(self) -> bool:
        """Whether the whole interval is on the same side of the bar as the figure."""
        ends = [end for end in (self.obtained.low, self.obtained.high) if end is not None]
        return (
            self.obtained.value is not None and len({self._reached(end) for end in (self.obtained.value, *ends)}) == 1
        )

    def _reached(self, value: float) -> bool:
        return value >= self.limit - 1e-9 if self.at_least else value <= self.limit + 1e-9


def bars(
    judged: Judgements,
    lied: Judgements,
    groups: Mapping[str, Sequence[Row]],
    kinds: Sequence[Row],
    error: Estimate,
    trained: Trained,
) -> tuple[Bar, ...]:
    """Return all bars. `lied`: runs with lies; `groups`, `kinds`: rows by group, by fault kind; `error`: of
    calibration.

    The time of the detectors is no bar here: the bank's rounds are so small that it would never be met. See `bench`.
    """
    return (
        Bar(
            "detection F1, all fault kinds, right issue and node, clean runs included",
            0.93,
            True,
            FIGURES["f1"](judged),
        ),
        Bar("median delay, rounds of the run or participations of the client", 2, False, FIGURES["delay"](judged)),
        Bar("alarms per 100 healthy rounds, all rules together", 1.0, False, FIGURES["alarms"](judged)),
        _worst("the same in the worst group", 1.5, groups, ("alarms",)),
        _accused(groups, kinds),
        *_label_bars(judged, trained),
        _several(judged),
        *_flip_bars(judged, trained),
        _lying(lied),
        Bar("cause named rightly among the culprits found", 0.90, True, FIGURES["cause"](judged), "%"),
        _worst_cause(kinds),
        Bar("expected calibration error of the stated probabilities", 0.05, False, error),
        *_scenario_bars(judged),
    )


def size_bars(outcomes: Sequence[Outcome]) -> tuple[Bar, ...]:
    """Whether the bank is large enough for its figures to mean something."""
    faulty = [outcome for outcome in outcomes if not outcome.clean]
    clean = [outcome for outcome in outcomes if outcome.clean]
    kinds = {fault.kind for outcome in faulty for fault in outcome.faults}
    cases = [sum(any(fault.kind == kind for fault in o.faults) for o in faulty) for kind in kinds]
    return tuple(
        Bar(name, limit, True, Estimate(float(count), None, None, float(count)))
        for name, limit, count in (
            ("fault kinds", 25, len(kinds)),
            ("cases of the rarest fault kind", 10, min(cases, default=0)),
            ("faulty runs", 400, len(faulty)),
            ("clean runs", 400, len(clean)),
            ("healthy rounds", 5000, sum(outcome.rounds for outcome in clean)),
        )
    )


def _worst(name: str, limit: float, groups: Mapping[str, Sequence[Row]], figures: Sequence[str]) -> Bar:
    """Return the largest figure of any group; every group counts, however small."""
    found = [
        (row.figures[figure], f"{row.name} ({row.figures[figure].count:.0f} {_UNITS[figure]})")
        for rows in groups.values()
        for row in rows
        for figure in figures
        if figure in row.figures and row.figures[figure].measured
    ]
    if not found:
        return Bar(name, limit, False, NOTHING)
    worst, where = max(found, key=lambda entry: entry[0].value or 0.0)
    return Bar(name, limit, False, worst, note=f"worst: {where}")


_UNITS = {
    "alarms": "healthy rounds",
    "accused_clean": "client-rounds of clean runs",
    "accused_faulty": "client-rounds of faulty runs",
}


def _accused(groups: Mapping[str, Sequence[Row]], kinds: Sequence[Row]) -> Bar:
    """Return the bar over every group, clean and faulty runs separately, and the runs of every fault kind."""
    name = "healthy clients accused, worst group or fault kind, share of client-rounds"
    everything = {**groups, "beside": [Row(f"beside {row.name}", row.runs, row.figures) for row in kinds]}
    found = _worst(name, 0.01, everything, ("accused_clean", "accused_faulty"))
    return Bar(name, 0.01, False, found.obtained, "%", found.note)


def _has_single_culprit(each: Judgement, kind: str) -> bool:
    """Whether the run has only one culprit, with this fault."""
    faults = each.outcome.faults
    return len(faults) == 1 and faults[0].kind == kind and len(faults[0].nodes) == 1


def _where_trained(judged: Judgements, trained: Trained) -> list[Judgement]:
    return [each for each in judged if all(trained(each, target) for target in each.targets)]


def _label_bars(judged: Judgements, trained: Trained) -> tuple[Bar, ...]:
    noisy = _where_trained([each for each in judged if _has_single_culprit(each, "label_noise")], trained)

    def bar(words: str, limit: float, low: float, high: float, partition: str | None) -> Bar:
        runs = [
            each
            for each in noisy
            if low <= (each.outcome.faults[0].strength or 0.0) <= high
            and (partition is None or each.outcome.partition == partition)
        ]
        note = f"{len(runs)} runs in which the model had trained, rates {low:g} to {high:g}"
        return Bar(f"one client with {words}, top-1", limit, True, FIGURES["top_1"](runs), "%", note)

    return (
        bar("label noise 1.0, IID", 1.0, 0.9, 1.0, "iid"),
        bar("label noise 1.0, Dirichlet 0.3", 0.95, 0.9, 1.0, "dirichlet 0.3"),
        bar("label noise 0.4, all partitions", 0.90, 0.3, 0.5, None),
    )


def _several(judged: Judgements) -> Bar:
    runs = [each for each in judged if 30 <= each.outcome.clients <= 50 and 2 <= each.culprits <= 7]
    note = f"{len(runs)} runs; culprits, whatever the issue"
    return Bar("2 to 7 faulty of 30 to 50, all faults, F1", 0.95, True, FIGURES["culprit_f1"](runs), note=note)


def _flip_bars(judged: Judgements, trained: Trained) -> tuple[Bar, ...]:
    flipped = [
        each
        for each in judged
        if _has_single_culprit(each, "label_flip") and (each.outcome.faults[0].affected or 0.0) >= 0.15
    ]
    runs = _where_trained(flipped, trained)
    note = f"{len(runs)} runs in which the model had trained"
    words = "one class flipped, 15 % of samples or more"
    return (
        Bar(f"{words}, top-1", 0.80, True, FIGURES["top_1"](runs), "%", note),
        Bar(f"{words}, recall within the budget", 0.60, True, FIGURES["recall"](runs), "%", note),
    )


def _lying(runs: Judgements) -> Bar:
    note = f"{len(runs)} runs; culprits, whatever the issue"
    return Bar("culprits that lie in their telemetry, F1", 0.88, True, FIGURES["culprit_f1"](runs), note=note)


def _worst_cause(kinds: Sequence[Row]) -> Bar:
    name = "cause named rightly, worst fault kind"
    found = [row for row in kinds if row.figures["cause"].measured and row.figures["cause"].count >= FEW]
    if not found:
        return Bar(name, 0.75, True, NOTHING, "%")
    worst = min(found, key=lambda row: row.figures["cause"].value or 0.0)
    few = len([row for row in kinds if row.figures["cause"].measured]) - len(found)
    note = f"worst: {worst.name}" + (f"; {few} kinds with fewer than {FEW} culprits found left out" if few else "")
    return Bar(name, 0.75, True, worst.figures["cause"], "%", note)


def _scenario_bars(judged: Judgements) -> tuple[Bar, ...]:
    """Return the bars on exploding, vanishing and converging runs, from what is known in round 3 of each run alone."""
    ill = about(judged, lambda target: target.fault.kind in SCENARIOS)
    clean = [each for each in judged if each.outcome.clean]
    told = [float(_named_early(each) == {SCENARIOS[each.targets[0].fault.kind]}) for each in ill]
    wrong = [float(bool(_named_early(each))) for each in clean] if ill else []
    return (
        Bar("exploding and vanishing told apart by round 3", 0.99, True, share(told, [1.0] * len(told)), "%"),
        Bar("clean runs called either of them by round 3", 0.0, False, share(wrong, [1.0] * len(wrong)), "%"),
    )


def _named_early(each: Judgement) -> set[str]:
    return {case.issue for case in each.raised if case.issue in SCENARIOS.values() and case.rounds[0] <= EARLY}
