# SPDX-License-Identifier: Apache-2.0
"""The bars of the issue «Find what is ill», each with the figure obtained on a bank.

The banks of attacks are only measured by the bars on backdoors and ByzFL's attacks, and the other banks by the others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from fedvitals_studies.faultbank.accepted import BACKDOORS
from fedvitals_studies.faultbank.bars import FEW, Bar
from fedvitals_studies.faultbank.figures import FIGURES, Judgements, Row, about, row
from fedvitals_studies.faultbank.intervals import NOTHING, Estimate
from fedvitals_studies.faultbank.score import Judgement, Target
from fedvitals_studies.faultbank.strict import alarms_by_group, by_kind, macro_f1, pooled_alarms, recall_beside_full

BANKS_OF_ATTACKS = ("attacks", "tune-attacks")
LYING = "/lying"  # at the end of a case's name: the same case with lying culprits
ATTACKER_FIGURES = ("culprit_f1", "culprit_precision", "culprit_recall", "accused_faulty", "top_1")
FLIPPED = 0.15  # of a client's samples, at least, for a flipped class to be expected to be found
NOISY = 0.4  # of a client's labels
SUCCESSFUL = 0.5  # of the triggered samples, for a backdoor to be one
BACKDOOR_PARTITION = "dirichlet 0.5"


def asked_bars(
    judged: Judgements,
    lied: Judgements,
    at_levels: Judgements,
    alarms: Mapping[str, Sequence[Row]],
    kinds: Sequence[Row],
) -> tuple[Bar, ...]:
    """Return all bars. `lied`: runs with lies; `at_levels`: at lower privacy levels; `alarms`, `kinds`: rows of
    `strict`.
    """
    apart = [each for each in judged if each.outcome.bank in BANKS_OF_ATTACKS]
    if apart:
        judged, lied, at_levels, alarms, kinds = [], [], [], {}, []
    return (
        Bar("F1 by issue and node, wrong names counted, all targets", 0.87, True, FIGURES["strict_f1"](judged)),
        Bar("the same, mean over fault kinds", 0.85, True, macro_f1(judged)),
        *_flip_bars(judged),
        _recall_bar("input noise", judged, lambda target: target.fault.kind == "input_noise"),
        _recall_bar("input scale", judged, lambda target: target.fault.kind == "input_scale"),
        _recall_bar(f"label noise of {NOISY:g} or more", judged, _is_noisy),
        Bar("alarms per 100 healthy rounds, all together", 0.7, False, pooled_alarms(judged)),
        _loudest_group(alarms),
        Bar("cause right, of the culprits found", 0.90, True, FIGURES["cause"](judged), "%"),
        _worst_kind(kinds),
        Bar("family of the cause right", 0.97, True, FIGURES["family"](judged), "%"),
        Bar(
            "culprits that lie in their telemetry, F1",
            0.85,
            True,
            FIGURES["culprit_f1"](lied),
            note="culprits, whatever the issue",
        ),
        Bar("recall at privacy level 2, as a share of level 3's", 0.8, True, recall_beside_full(judged, at_levels, 2)),
        *_attack_bars(apart),
    )


def _recall_bar(name: str, judged: Judgements, wanted: Callable[[Target], bool]) -> Bar:
    return Bar(f"recall, {name}", 0.85, True, FIGURES["recall"](about(judged, wanted)), "%")


def _is_noisy(target: Target) -> bool:
    return target.fault.kind == "label_noise" and (target.fault.affected or 0.0) >= NOISY


def _flip_bars(judged: Judgements) -> tuple[Bar, ...]:
    runs = about(judged, lambda t: t.fault.kind == "label_flip" and (t.fault.affected or 0.0) >= FLIPPED)
    words = f"one class flipped, {100 * FLIPPED:g} % of the client's samples or more"
    return (
        Bar(f"{words}, top-1", 0.85, True, FIGURES["top_1"](runs), "%"),
        Bar(f"{words}, recall", 0.65, True, FIGURES["recall"](runs), "%"),
    )


def _loudest_group(alarms: Mapping[str, Sequence[Row]]) -> Bar:
    name = "the same in the worst group, lower 95 % limit"
    rows = [(f"{group}: {own.name}", own.figures["alarms"]) for group, rows in alarms.items() for own in rows]
    measured = [(words, rate.low, rate.count) for words, rate in rows if rate.low is not None]
    if not measured:
        return Bar(name, 1.0, False, NOTHING)
    words, low, rounds = max(measured, key=lambda entry: entry[1])
    return Bar(
        name, 1.0, False, Estimate(low, None, None, rounds), note=f"worst: {words} ({rounds:.0f} healthy rounds)"
    )


def _worst_kind(kinds: Sequence[Row]) -> Bar:
    name = "cause right, worst fault kind"
    found = [own for own in kinds if own.figures["cause"].measured and own.figures["cause"].count >= FEW]
    if not found:
        return Bar(name, 0.75, True, NOTHING, "%")
    worst = min(found, key=lambda own: own.figures["cause"].value or 0.0)
    note = f"worst: {worst.name}; kinds with fewer than {FEW} culprits found left out"
    return Bar(name, 0.75, True, worst.figures["cause"], "%", note)


def looks(judged: Judgements, lied: Judgements, at_levels: Judgements, seen: Collection[str]) -> dict[str, list[Bar]]:
    """Return the bars for runs that were never examined before, and for those that were (`seen`: their cases)."""
    found = {}
    for name, is_seen in (("first look", False), ("second look", True)):
        own, own_lied, own_levels = (
            [each for each in runs if (each.outcome.case.removesuffix(LYING) in seen) == is_seen]
            for runs in (judged, lied, at_levels)
        )
        if seen and own:
            found[f"{name}, {len(own)} runs"] = [
                *asked_bars(own, own_lied, own_levels, alarms_by_group(own), by_kind(own))
            ]
    return found


def attackers_by_method(by_method: Mapping[str, Judgements]) -> list[Row]:
    """Return rows on the bank of attacks: successful backdoors, and ByzFL's attacks with the clean runs, by each method
    that was tried on them.
    """
    rows = []
    for words, wanted in (("backdoors that succeed", _is_open), ("ByzFL's attacks", _is_byzantine)):
        for method, judged in by_method.items():
            runs = [each for each in judged if each.outcome.bank in BANKS_OF_ATTACKS and wanted(each)]
            if any(each.targets for each in runs):
                rows.append(row(f"{words}: {method}", runs, ATTACKER_FIGURES))
    return rows


def _attack_bars(judged: Judgements) -> tuple[Bar, ...]:
    doors = [each for each in judged if _is_open(each)]
    note = f"{len(doors)} runs, {BACKDOOR_PARTITION}; attackers accused at any time, whatever the issue"
    words = f"backdoors that succeed in {100 * SUCCESSFUL:g} % or more"
    byzantine = [each for each in judged if _is_byzantine(each)]
    return (
        Bar(f"{words}: attackers found", 0.90, True, FIGURES["culprit_recall"](doors), "%", note),
        Bar(f"{words}: benign client-rounds accused", 0.01, False, FIGURES["accused_faulty"](doors), "%"),
        Bar(
            "ByzFL's attacks, untuned, F1 by issue and node",
            0.85,
            True,
            FIGURES["strict_f1"](byzantine if any(each.targets for each in byzantine) else []),
            note="wrong names counted; with the clean runs of the bank",
        ),
    )


def _has_backdoor(each: Judgement) -> bool:
    return any(fault.kind in BACKDOORS for fault in each.outcome.faults)


def _is_byzantine(each: Judgement) -> bool:
    return not _has_backdoor(each)


def _is_open(each: Judgement) -> bool:
    success = each.outcome.attack
    return (
        _has_backdoor(each)
        and success is not None
        and success >= SUCCESSFUL
        and (each.outcome.partition == BACKDOOR_PARTITION)
    )
