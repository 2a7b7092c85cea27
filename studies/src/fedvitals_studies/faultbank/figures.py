# SPDX-License-Identifier: Apache-2.0
"""The fault bank's figures: each a function of judgements, by the name that tables and bars use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedvitals_studies.faultbank.intervals import Estimate, harmonic, median, rate, share
from fedvitals_studies.faultbank.score import Judgement, Outcome, Target

Judgements = Sequence[Judgement]


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a table: the number of runs behind it, and its figures."""

    name: str
    runs: int
    figures: Mapping[str, Estimate]


def _hits(judged: Judgements) -> list[float]:
    return [sum(target.hit for target in each.targets) for each in judged]


def _targets(judged: Judgements) -> list[float]:
    return [len(each.targets) for each in judged]


def _raised(judged: Judgements, verdict: str) -> list[float]:
    return [sum(case.verdict == verdict for case in each.raised) for each in judged]


def _all_raised(judged: Judgements) -> list[float]:
    return [t + f for t, f in zip(_raised(judged, "true"), _raised(judged, "false"), strict=True)]


def _right(judged: Judgements) -> list[float]:
    return [sum(case.right for case in each.raised) for each in judged]


def _wrong(judged: Judgements) -> list[float]:
    return [sum(case.wrong for case in each.raised) for each in judged]


def _strict_precision(judged: Judgements) -> Estimate:
    right, wrong = _right(judged), _wrong(judged)
    return share(right, [r + w for r, w in zip(right, wrong, strict=True)])


def _on_clients(each: Judgement) -> list[Target]:
    return [target for target in each.targets if target.node is not None]


def _culprits_located(judged: Judgements) -> list[float]:
    return [sum(target.is_located for target in _on_clients(each)) for each in judged]


def _clients(judged: Judgements) -> list[float]:
    return [len(_on_clients(each)) for each in judged]


def _top(judged: Judgements, places: int) -> Estimate:
    """Return the share of runs with a top-ranked culprit, among culprits that peers can reveal: not stragglers or
    crashes.
    """
    ranked = [e for e in judged if e.top is not None and any(t.fault.family != "system" for t in _on_clients(e))]
    return share([float((e.top or 0) < places) for e in ranked], [1.0] * len(ranked))


def _culprits(judged: Judgements) -> tuple[list[float], list[float], list[float]]:
    found = [float(each.culprits_found) for each in judged]
    return found, [float(each.culprits) for each in judged], [float(each.wrongly_accused) for each in judged]


def _culprit_f1(judged: Judgements) -> Estimate:
    found, culprits, wrong = _culprits(judged)
    return harmonic(found, culprits, found, wrong)


def _culprit_precision(judged: Judgements) -> Estimate:
    found, _, wrong = _culprits(judged)
    return share(found, [f + w for f, w in zip(found, wrong, strict=True)])


def _cause(judged: Judgements) -> Estimate:
    right = [sum(t.is_located and t.cause_right for t in _on_clients(each)) for each in judged]
    return share(right, _culprits_located(judged))


def _family(judged: Judgements) -> Estimate:
    right = [sum(t.is_located and t.family_right for t in _on_clients(each)) for each in judged]
    return share(right, _culprits_located(judged))


def _accused(judged: Judgements) -> Estimate:
    return rate([e.accused_client_rounds for e in judged], [e.healthy_client_rounds for e in judged], per=1)


def _clean(judged: Judgements) -> list[Judgement]:
    return [each for each in judged if each.outcome.clean]


def _faulty(judged: Judgements) -> list[Judgement]:
    return [each for each in judged if not each.outcome.clean]


def _alarms(judged: Judgements) -> Estimate:
    clean = _clean(judged)
    return rate([len(each.raised) for each in clean], [each.outcome.rounds for each in clean])


def _time(judged: Judgements) -> Estimate:
    return share([e.outcome.seconds_detectors for e in judged], [e.outcome.seconds_rounds for e in judged])


def _attack_success(judged: Judgements) -> Estimate:
    successes = [each.outcome.attack for each in judged if each.outcome.attack is not None]
    return share(successes, [1.0] * len(successes))


def _damage(judged: Judgements) -> Estimate:
    points = [each.outcome.damage for each in judged if each.outcome.damage is not None]
    return share(points, [100.0] * len(points))


FIGURES: dict[str, Callable[[Judgements], Estimate]] = {
    "f1": lambda j: harmonic(_hits(j), _targets(j), _raised(j, "true"), _raised(j, "false")),
    "precision": lambda j: share(_raised(j, "true"), _all_raised(j)),
    "strict_f1": lambda j: harmonic(_hits(j), _targets(j), _right(j), _wrong(j)),
    "strict_precision": _strict_precision,
    "recall": lambda j: share(_hits(j), _targets(j)),
    "node_f1": lambda j: harmonic(_culprits_located(j), _clients(j), _culprits(j)[0], _culprits(j)[2]),
    "node_recall": lambda j: share(_culprits_located(j), _clients(j)),
    "culprit_f1": _culprit_f1,
    "culprit_precision": _culprit_precision,
    "culprit_recall": lambda j: share(_culprits(j)[0], _culprits(j)[1]),
    "top_1": lambda j: _top(j, 1),
    "top_3": lambda j: _top(j, 3),
    "delay": lambda j: median([[target.delay for target in each.targets] for each in j]),
    "cause": _cause,
    "family": _family,
    "accused_clean": lambda j: _accused(_clean(j)),
    "accused_faulty": lambda j: _accused(_faulty(j)),
    "alarms": _alarms,
    "time": _time,
    "attack": _attack_success,
    "damage": _damage,
}


def row(name: str, judged: Judgements, figures: Iterable[str]) -> Row:
    return Row(name, len(judged), {figure: FIGURES[figure](judged) for figure in figures})


# -- which runs, which targets ----------------------------------------------------------------------------------------


def about(judged: Judgements, wanted: Callable[[Target], bool]) -> list[Judgement]:
    """Return the runs with such targets, restricted to these targets; false accusations in them stay."""
    kept = [each.only([target for target in each.targets if wanted(target)]) for each in judged]
    return [each for each in kept if each.targets]


def split(judged: Judgements, key: Callable[[Outcome], Any]) -> dict[Any, list[Judgement]]:
    """Return runs by a property, in the property's order."""
    found: dict[Any, list[Judgement]] = {}
    for each in judged:
        found.setdefault(key(each.outcome), []).append(each)
    return dict(sorted(found.items()))


GROUPS: dict[str, Callable[[Outcome], str]] = {
    "clients": lambda o: (
        f"{'10 or fewer' if o.clients <= 10 else '11 to 30' if o.clients <= 30 else 'over 30'} clients"
    ),
    "partition": lambda o: o.partition,
    "participation": lambda o: f"{100 * o.participation:.3g} % take part",
    "topology": lambda o: o.topology,
    "domain": lambda o: o.domain,
    "transformation": lambda o: o.transformation or "updates as they are",
    "control": lambda o: o.control or "no control",
}


def of_issue(judged: Judgements, issue: str) -> Row:
    """Return the row of one issue: its targets and cases in all runs; a case is only true if the issue is right."""
    hits, targets, right, wrong = [], [], [], []
    for each in judged:
        mine = [target for target in each.targets if target.fault.issue.upper() == issue]
        cases = [case for case in each.raised if case.issue == issue and case.verdict != "unjudged"]
        hits.append(float(sum(target.hit for target in mine)))
        targets.append(float(len(mine)))
        right.append(float(sum(case.right for case in cases)))
        wrong.append(float(sum(not case.right for case in cases)))
    clean = _clean(judged)
    alarms = [float(sum(case.issue == issue for case in each.raised)) for each in clean]
    return Row(
        issue,
        sum(count > 0 for count in targets),
        {
            "f1": harmonic(hits, targets, right, wrong),
            "precision": share(right, [r + w for r, w in zip(right, wrong, strict=True)]),
            "recall": share(hits, targets),
            "alarms": rate(alarms, [each.outcome.rounds for each in clean]),
        },
    )
