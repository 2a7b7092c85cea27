# SPDX-License-Identifier: Apache-2.0
"""The bank's figures by issue and node: a wrong name on the right client counts against precision.

And their components: attacks and faults of data separately, runs with transformed updates separately, fault kinds one
by one, alarms by group with exact limits, and the same runs at lower privacy levels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from fedvitals_studies.faultbank.accepted import FAMILY_OF, nature_of
from fedvitals_studies.faultbank.figures import FIGURES, GROUPS, Judgements, Row, about, row, split
from fedvitals_studies.faultbank.intervals import NOTHING, Estimate, Floats, of_sums, poisson_rate
from fedvitals_studies.faultbank.score import Judgement, Outcome

CLEAN = "/clean"  # at the end of a twin's name
FULL_LEVEL = 3  # at which the bank is recorded
STRICT_FIGURES = ("strict_f1", "strict_precision", "f1", "precision", "recall", "node_recall", "cause", "family")
STRICT_KIND_FIGURES = ("strict_f1", "strict_precision", "recall", "top_1", "cause", "family")
LEVEL_FIGURES = ("strict_f1", "strict_precision", "recall", "node_recall", "alarms")
LIAR_FIGURES = ("culprit_f1", "culprit_precision", "culprit_recall", "recall")
ALARM_GROUPS: Mapping[str, Callable[[Outcome], str]] = GROUPS


def parts(judged: Judgements) -> list[Row]:
    """Return all runs combined, then attacks, faults of data and others, families, and runs with transformed updates.

    Clean runs are in the first row and in the last two; the others only include the twins of the faulty runs.
    """
    rows = [row("all runs", judged, STRICT_FIGURES)]
    natures = {name: _with_twins(judged, _of_nature(name)) for name in ("attacks", "data faults", "other faults")}
    families = {f"family: {name}": _with_twins(judged, _of_family(name)) for name in dict.fromkeys(FAMILY_OF.values())}
    rows += [row(name, runs, STRICT_FIGURES) for name, runs in {**natures, **families}.items() if runs]
    for name, transformed in (("updates as they are", False), ("transformed updates", True)):
        runs = [each for each in judged if (each.outcome.transformation is not None) == transformed]
        if runs and len(runs) < len(judged):
            rows.append(row(name, runs, STRICT_FIGURES))
    return rows


def by_kind(judged: Judgements) -> list[Row]:
    """Return each fault kind with its clean twins."""
    kinds = sorted({target.fault.kind for each in judged for target in each.targets})
    return [row(kind, _with_twins(judged, _of_kind(kind)), STRICT_KIND_FIGURES) for kind in kinds]


def macro_f1(judged: Judgements) -> Estimate:
    """Return the mean over fault kinds of F1 by issue and node, each kind on its own runs and their clean twins."""
    kinds = sorted({target.fault.kind for each in judged for target in each.targets})
    if not kinds:
        return NOTHING
    place = {kind: index for index, kind in enumerate(kinds)}
    of_case = {each.outcome.case: {target.fault.kind for target in each.targets} for each in judged}
    sums = np.zeros((len(judged), len(kinds), 4))
    for index, each in enumerate(judged):
        for kind in of_case.get(each.outcome.case.removesuffix(CLEAN), set()):
            mine = [target for target in each.targets if target.fault.kind == kind]
            right, wrong = sum(case.right for case in each.raised), sum(case.wrong for case in each.raised)
            sums[index, place[kind]] = sum(target.hit for target in mine), len(mine), right, wrong

    def mean(totals: Floats) -> Floats:
        shaped = totals.reshape(*totals.shape[:-1], len(kinds), 4)
        hits, targets, right, wrong = np.moveaxis(shaped, -1, 0)
        recall = hits / targets
        precision = np.where(right + wrong > 0, right / np.maximum(right + wrong, 1), 0.0)
        both = recall + precision
        f1 = np.where(both > 0, 2 * recall * precision / np.where(both > 0, both, 1), recall * 0)
        # A bootstrap sample may contain no run of a kind: the mean is over the kinds that it contains.
        known = ~np.isnan(f1)
        return np.asarray(np.where(known, f1, 0.0).sum(axis=-1) / np.maximum(known.sum(axis=-1), 1))

    return of_sums(sums.reshape(len(judged), -1), mean, float(len(kinds)))


def alarms_by_group(judged: Judgements) -> dict[str, list[Row]]:
    """Return alarms in clean runs by every group, with the exact limits of a Poisson rate."""
    clean = [each for each in judged if each.outcome.clean]
    return {
        name: [Row(str(group), len(runs), {"alarms": _alarm_rate(runs)}) for group, runs in split(clean, key).items()]
        for name, key in ALARM_GROUPS.items()
    }


def by_level(plain: Judgements, at_levels: Judgements) -> list[Row]:
    """Return the runs that were examined at several privacy levels, by level; the last is the unmodified recording."""
    rows = []
    for level, runs in split(at_levels, lambda outcome: outcome.level).items():
        rows.append(row(f"level {level}", runs, LEVEL_FIGURES))
    if rows:
        cases = {each.outcome.case for each in at_levels}
        whole = [each for each in plain if each.outcome.case in cases]
        rows.append(row(f"level {FULL_LEVEL}", whole, LEVEL_FIGURES))
    return rows


def recall_beside_full(plain: Judgements, at_levels: Judgements, level: int) -> Estimate:
    """Return the recall at a privacy level as a share of that of the same runs at level 3."""
    lower = {each.outcome.case: each for each in at_levels if each.outcome.level == level and each.targets}
    pairs = [(lower[each.outcome.case], each) for each in plain if each.outcome.case in lower]
    hits = [[sum(target.hit for target in each.targets) for each in pair] for pair in pairs]
    if not hits:
        return NOTHING
    return of_sums(hits, lambda sums: sums[..., 0] / sums[..., 1], float(sum(len(full.targets) for _, full in pairs)))


def liars_by_nature(lied: Judgements) -> list[Row]:
    """Return rows on lying culprits, attackers separate from those without a reason to lie."""
    rows = [row("all", lied, LIAR_FIGURES)] if lied else []
    for name in ("attacks", "data faults", "other faults"):
        runs = about(lied, lambda target, name=name: nature_of(target.fault.kind) == name)  # type: ignore[misc]
        if runs:
            rows.append(row(name, runs, LIAR_FIGURES))
    return rows


def _alarm_rate(clean: Sequence[Judgement]) -> Estimate:
    return poisson_rate(sum(len(each.raised) for each in clean), sum(each.outcome.rounds for each in clean))


def pooled_alarms(judged: Judgements) -> Estimate:
    """Return the alarms per 100 rounds of all clean runs; the interval is by runs."""
    return FIGURES["alarms"](judged)


def _with_twins(judged: Judgements, wanted: Callable[[str], bool]) -> list[Judgement]:
    """Return the runs with such a fault, seen for these targets only, and their clean twins."""
    faulty = about(judged, lambda target: wanted(target.fault.kind))
    cases = {f"{each.outcome.case}{CLEAN}" for each in faulty}
    return [*faulty, *(each for each in judged if each.outcome.case in cases)]


def _of_nature(name: str) -> Callable[[str], bool]:
    return lambda kind: nature_of(kind) == name


def _of_family(name: str) -> Callable[[str], bool]:
    return lambda kind: FAMILY_OF.get(kind) == name


def _of_kind(name: str) -> Callable[[str], bool]:
    return lambda kind: kind == name
