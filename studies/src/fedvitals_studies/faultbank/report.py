# SPDX-License-Identifier: Apache-2.0
"""Computes figures from outcomes: everything on the fault bank's page, as machine-readable numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from fedvitals.errors import ConfigError, unknown
from fedvitals_studies.faultbank import strict
from fedvitals_studies.faultbank.asked import LYING, asked_bars, attackers_by_method, looks
from fedvitals_studies.faultbank.bars import Bar, bars, size_bars
from fedvitals_studies.faultbank.figures import FIGURES, GROUPS, Judgements, Row, about, of_issue, row, split
from fedvitals_studies.faultbank.intervals import Bin, Estimate, calibration, share
from fedvitals_studies.faultbank.score import WITHIN, Judgement, Outcome, Target, judge

OURS = "fedvitals"
LABEL_FAULTS = ("label_noise", "label_flip")
HALF = 0.5  # of its domain's best: a model that has learnt this much counts as trained
ABSOLUTE = 0.7  # the stricter definition, for comparison
LATER_GROUPS = ("transformation", "control")  # of which older banks only have one
LONGEST = 12  # participations in a delay curve
DAMAGE = (
    ("none: under 0.5 points", 0.5),
    ("weak: 0.5 to 1", 1.0),
    ("medium: 1 to 5", 5.0),
    ("strong: over 5", math.inf),
)

METHOD_FIGURES = (
    *("f1", "precision", "recall", "node_f1", "culprit_f1", "culprit_precision", "culprit_recall"),
    *("top_1", "top_3", "delay", "accused_clean", "accused_faulty", "alarms", "cause"),
)
KIND_FIGURES = ("f1", "precision", "recall", "node_recall", "top_1", "top_3", "delay", "cause", "accused_faulty")
GROUP_FIGURES = ("f1", "culprit_f1", "top_1", "delay", "accused_clean", "accused_faulty", "alarms")
ATTACK_FIGURES = ("attack", "damage", "recall", "node_recall", "delay")
TARGET_FIGURES = ("recall", "node_recall", "top_1", "top_3", "delay", "culprit_f1")


@dataclass(frozen=True, slots=True)
class Confusion:
    """How often a culprit with a fault (row) was found and given a cause (column)."""

    kinds: Sequence[str]
    causes: Sequence[str]
    counts: Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Curve:
    """The share of targets found by the first, second, ... participation after the onset."""

    label: str
    targets: int
    shares: Sequence[float]


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of all outcomes. Infinite numbers are delays of what more than half missed."""

    banks: Sequence[str]
    ours: str
    counts: Mapping[str, int]
    bars: Sequence[Bar]
    size: Sequence[Bar]
    methods: Sequence[Row]
    kinds: Sequence[Row]
    issues: Sequence[Row]
    groups: Mapping[str, Sequence[Row]]
    rules: Sequence[Row]
    labels: Mapping[str, Sequence[Row]]  # label faults by whether the model had trained, by damage, by strength
    damage: Sequence[Row]
    strengths: Sequence[Row]
    lying: Sequence[Row]
    views: Sequence[Row]
    confusion: Confusion
    delays: Mapping[str, Sequence[Curve]]
    calibration: Estimate
    reliability: Sequence[Bin]
    time: Estimate  # of the detectors, as a share of the bank's rounds, which are far smaller than real ones
    unjudged: int  # cases about the whole run in a faulty run: neither right nor wrong
    attacks: Sequence[Row] = ()  # backdoors, with their measured success
    asked: Sequence[Bar] = ()  # the bars of the issue «Find what is ill»
    strict: Sequence[Row] = ()  # by issue and node, with wrong names counted: all runs, and parts of them
    strict_kinds: Sequence[Row] = ()
    alarm_groups: Mapping[str, Sequence[Row]] = field(default_factory=dict)
    levels: Sequence[Row] = ()  # the same runs at lower privacy levels
    liars: Sequence[Row] = ()  # lying culprits: attackers, and those without a reason to lie
    attackers: Sequence[Row] = ()  # for the bank of attacks, by method
    looks: Mapping[str, Sequence[Bar]] = field(default_factory=dict)  # the bars, by whether runs were examined before

    def as_facts(self) -> dict[str, Any]:
        """Return the facts for JSON, with the verdicts."""
        facts = asdict(self)
        for name in ("bars", "size", "asked"):
            _add_verdicts(facts[name], getattr(self, name))
        for name, own in self.looks.items():
            _add_verdicts(facts["looks"][name], own)
        return facts


def _add_verdicts(facts: Sequence[dict[str, Any]], own: Sequence[Bar]) -> None:
    for entry, bar in zip(facts, own, strict=True):
        entry["verdict"], entry["certain"] = bar.verdict, bar.certain


def summarise(outcomes: Sequence[Outcome], ours: str = OURS, seen: Collection[str] = ()) -> Summary:
    """Return all figures of all methods on these runs; the detailed tables are of the method `ours`.

    A run with lying culprits is a variant of another run: it only counts where lies are the question. The same holds
    for a run examined at a lower privacy level. `seen`: cases that were examined before.
    """
    names = sorted({method for outcome in outcomes for method in outcome.methods})
    if ours not in names:
        known = f" {unknown('method', ours, names)}" if names else ""
        raise ConfigError(f"There is no outcome of the method '{ours}' to report on.{known} Run the bank first.")
    everything = {
        name: [judge(o, name) for o in outcomes if name in o.methods] for name in dict.fromkeys((ours, *names))
    }
    by_method = {name: [each for each in judged if each.outcome.plain] for name, judged in everything.items()}
    outcomes, judged = [outcome for outcome in outcomes if outcome.plain], by_method[ours]
    lied = [each for each in everything[ours] if each.outcome.lying]
    at_levels = [each for each in everything[ours] if each.outcome.level is not None]
    trained = _trained(outcomes, lambda best: HALF * best)
    kinds = _by_kind(judged)
    groups = {
        name: [row(g, each, GROUP_FIGURES) for g, each in split(judged, key).items()] for name, key in GROUPS.items()
    }
    groups = {name: rows for name, rows in groups.items() if len(rows) > 1 or name not in LATER_GROUPS}
    strict_kinds, alarm_groups = strict.by_kind(judged), strict.alarms_by_group(judged)
    error, reliability = calibration([outcome.probabilities for outcome in outcomes])
    return Summary(
        banks=sorted({outcome.bank for outcome in outcomes}),
        ours=ours,
        counts=_counts(outcomes, judged),
        bars=bars(judged, lied, groups, kinds, error, trained),
        size=size_bars(outcomes),
        methods=[row(name, each, METHOD_FIGURES) for name, each in by_method.items()],
        kinds=kinds,
        issues=[of_issue(judged, issue) for issue in _issues(judged)],
        groups=groups,
        rules=_rules(judged),
        labels=_labels(outcomes, judged),
        damage=_by(judged, lambda _, each: damage_class(each.outcome.damage)),
        strengths=_by(judged, lambda target, _: _strength(target)),
        lying=_lying(everything),
        views=_views(judged),
        confusion=_confusion(judged),
        delays=_delays(by_method, ours),
        calibration=error,
        reliability=reliability,
        time=FIGURES["time"](judged),
        attacks=_attacks(judged),
        asked=asked_bars(judged, lied, at_levels, alarm_groups, strict_kinds),
        strict=strict.parts(judged),
        strict_kinds=strict_kinds,
        alarm_groups=alarm_groups,
        levels=strict.by_level(judged, at_levels),
        liars=strict.liars_by_nature(lied),
        attackers=attackers_by_method(by_method),
        looks=looks(judged, lied, at_levels, seen),
        unjudged=sum(case.verdict == "unjudged" for each in judged for case in each.raised),
    )


def damage_class(points: float | None) -> str:
    """Return the class of a strength, measured by its damage."""
    if points is None or math.isnan(points):
        return "not measured"
    return next(name for name, below in DAMAGE if points < below or math.isinf(below))


def _counts(outcomes: Sequence[Outcome], judged: Judgements) -> dict[str, int]:
    clean = [outcome for outcome in outcomes if outcome.clean]
    return {
        "runs": len(outcomes),
        "faulty runs": len(outcomes) - len(clean),
        "clean runs": len(clean),
        "fault kinds": len({fault.kind for outcome in outcomes for fault in outcome.faults}),
        "targets": sum(len(each.targets) for each in judged),
        "rounds": sum(outcome.rounds for outcome in outcomes),
        "healthy rounds": sum(outcome.rounds for outcome in clean),
        "domains": len({outcome.domain for outcome in outcomes}),
    }


def _trained(outcomes: Sequence[Outcome], limit: Callable[[float], float]) -> Callable[[Judgement, Target], bool]:
    """Return whether the model had learnt enough, five rounds after the onset, for wrong labels to be visible."""
    best: dict[str, float] = {}
    for outcome in outcomes:
        reached = max((value for value in outcome.accuracy if math.isfinite(value)), default=0.0)
        best[outcome.domain] = max(best.get(outcome.domain, 0.0), reached)

    def trained(each: Judgement, target: Target) -> bool:
        accuracy = each.outcome.accuracy
        if not accuracy:
            return False
        return accuracy[min(target.fault.since + WITHIN, len(accuracy) - 1)] >= limit(best[each.outcome.domain])

    return trained


def _by_kind(judged: Judgements) -> list[Row]:
    kinds = sorted({target.fault.kind for each in judged for target in each.targets})
    return [row(kind, about(judged, lambda t, kind=kind: t.fault.kind == kind), KIND_FIGURES) for kind in kinds]  # type: ignore[misc]


def _attacks(judged: Judgements) -> list[Row]:
    """Return runs with a backdoor, by the kinds of their faults."""
    opened = [each for each in judged if each.outcome.attack is not None]
    kinds = split(opened, lambda outcome: " and ".join(dict.fromkeys(fault.kind for fault in outcome.faults)))
    return [row(kind, each, ATTACK_FIGURES) for kind, each in kinds.items()]


def _issues(judged: Judgements) -> list[str]:
    """Return the issues that should have been named, and those that were."""
    wanted = {target.fault.issue.upper() for each in judged for target in each.targets}
    return sorted(wanted | {case.issue for each in judged for case in each.raised})


def _rules(judged: Judgements) -> list[Row]:
    """Return each issue's own false alarms, the noisiest first; those that never fired are omitted."""
    clean = [each for each in judged if each.outcome.clean]
    found = Counter(case.issue for each in clean for case in each.raised)
    return [
        Row(issue, len(clean), {"alarms": of_issue(clean, issue).figures["alarms"]}) for issue, _ in found.most_common()
    ]


def _by(judged: Judgements, key: Callable[[Target, Judgement], str | None]) -> list[Row]:
    """Return targets by one of their properties; None leaves one out."""
    found: dict[str, list[Judgement]] = {}
    for each in judged:
        parts: dict[str, list[Target]] = {}
        for target in each.targets:
            name = key(target, each)
            if name is not None:
                parts.setdefault(name, []).append(target)
        for name, targets in parts.items():
            found.setdefault(name, []).append(each.only(targets))
    return [row(name, found[name], TARGET_FIGURES) for name in sorted(found, key=_order)]


def _order(name: str) -> tuple[int, str]:
    """Return the sort key: damage classes by size, everything else by name."""
    classes = [words for words, _ in DAMAGE]
    return next((place for place, words in enumerate(classes) if name.endswith(words)), -1), name


def _strength(target: Target) -> str | None:
    strength = target.fault.strength
    return None if strength is None else f"{target.fault.kind} {strength:g}"


def _labels(outcomes: Sequence[Outcome], judged: Judgements) -> dict[str, list[Row]]:
    """Return label faults by whether the global model had learnt enough to reveal them, by two definitions."""
    half = _trained(outcomes, lambda best: HALF * best)
    absolute = _trained(outcomes, lambda _: ABSOLUTE)

    def split_by(word: Callable[[Target, Judgement], str | None]) -> list[Row]:
        def named(target: Target, each: Judgement) -> str | None:
            found = word(target, each) if target.fault.kind in LABEL_FAULTS else None
            return None if found is None else f"{target.fault.kind}, {found}"

        return _by(judged, named)

    def words(trained: Callable[[Judgement, Target], bool]) -> Callable[[Target, Judgement], str]:
        return lambda target, each: "trained" if trained(each, target) else "not trained"

    def affected(target: Target, _: Judgement) -> str | None:
        part = target.fault.affected
        return None if part is None else "15 % of samples or more" if part >= 0.15 else "under 15 % of samples"

    return {
        f"whether the model had trained: {HALF:g} of the domain's best accuracy, five rounds after the onset": split_by(
            words(half)
        ),
        f"whether the model had trained: accuracy {ABSOLUTE:g}, five rounds after the onset": split_by(words(absolute)),
        "damage at the end, points of accuracy": split_by(lambda _, each: damage_class(each.outcome.damage)),
        "strength": split_by(lambda t, _: None if t.fault.strength is None else f"{t.fault.strength:g}"),
        "samples affected": split_by(affected),
    }


def _lying(by_method: Mapping[str, Judgements]) -> list[Row]:
    """Return the same cases as they are and with lies: what a client gains by lying."""
    found = []
    for method, judged in by_method.items():
        lied = {each.outcome.case.removesuffix(LYING) for each in judged if each.outcome.lying}
        faulty = [
            each
            for each in judged
            if each.culprits and each.outcome.level is None and each.outcome.case.removesuffix(LYING) in lied
        ]
        for word, lies in (("honest", False), ("lying", True)):
            runs = [each for each in faulty if each.outcome.lying == lies]
            if runs:
                found.append(
                    row(f"{method}, {word}", runs, ("culprit_f1", "culprit_precision", "culprit_recall", "recall"))
                )
    return found


def _views(judged: Judgements) -> list[Row]:
    """Return the views behind the alarms that hit first."""
    views = sorted({target.view for each in judged for target in each.targets if target.hit and target.view})
    rows = []
    for view in views:
        hits = [float(sum(t.hit and t.view is not None for t in each.targets)) for each in judged]
        mine = [float(sum(t.hit and t.view == view for t in each.targets)) for each in judged]
        rows.append(Row(view, len(judged), {"share": share(mine, hits)}))
    return rows


def _confusion(judged: Judgements) -> Confusion:
    found: Counter[tuple[str, str]] = Counter()
    for each in judged:
        for target in each.targets:
            if target.is_located and target.cause is not None:
                found[target.fault.kind, target.cause] += 1
    kinds = sorted({kind for kind, _ in found})
    causes = sorted({cause for _, cause in found})
    return Confusion(kinds, causes, [[found[kind, cause] for cause in causes] for kind in kinds])


def _delays(by_method: Mapping[str, Judgements], ours: str) -> dict[str, list[Curve]]:
    """Return curves by family of fault, with the right issue; by method, the right node with any issue."""
    families = sorted({t.fault.family for each in by_method[ours] for t in each.targets})
    targets = [target for each in by_method[ours] for target in each.targets]
    return {
        "right issue and node, by family of fault": [
            _curve(family, [t.delay for t in targets if t.fault.family == family]) for family in families
        ],
        "right client, whatever the issue, by method": [
            _curve(name, [t.located for each in judged for t in each.targets if t.node is not None])
            for name, judged in by_method.items()
        ],
    }


def _curve(label: str, delays: Sequence[float]) -> Curve:
    shares = [sum(delay <= at for delay in delays) / len(delays) for at in range(LONGEST)] if delays else []
    return Curve(label, len(delays), shares)
