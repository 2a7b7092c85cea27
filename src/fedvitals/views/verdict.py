# SPDX-License-Identifier: Apache-2.0
"""Writes the verdict on a run: one sentence with what is wrong, since when, and how sure that is.

It is based on stored findings only. Muted cases are left out; acknowledged ones are still included. Conclusions from
losses or updates are worded with «seems»; what was measured is stated as fact.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Literal

from fedvitals.diagnosis.abstentions import Examined
from fedvitals.diagnosis.cases import Case, harm_rank, is_trouble, severity_rank
from fedvitals.diagnosis.evidence.faulty_clients import LEARNT
from fedvitals.diagnosis.evidence.scores import FEWEST
from fedvitals.diagnosis.gaps import incomplete, no_all_clear
from fedvitals.plain_json import finite
from fedvitals.plural import counted
from fedvitals.records import Action, Run
from fedvitals.store.marks import Mark
from fedvitals.store.read import queries
from fedvitals.store.read.metrics import newest_outcomes, values_in_rounds
from fedvitals.store.read.reader import Reader
from fedvitals.views.card import detectors_of, setting_of
from fedvitals.views.case_sentences import clause, joined, manipulation, shortened, sure, unique_names
from fedvitals.views.cases import actions_about, case_key, cases_of, culprits, key_text, since_of
from fedvitals.views.cause_levels import CauseLevel, levels_of
from fedvitals.views.gaps import examination_of
from fedvitals.views.labels import labels_of, named
from fedvitals.views.metric_titles import in_words
from fedvitals.views.model_damage import ORIGINS, damage_by
from fedvitals.views.outline import Outline, outline_of
from fedvitals.views.units import number, percent
from fedvitals.views.waiting import Waiting, waiting_in

__all__ = ["Facts", "State", "Verdict", "case_key", "facts_in_short", "facts_of", "judge", "verdict_of"]

State = Literal["ill", "watch", "healthy", "warming", "unjudged"]
WARM = 3  # rounds before which clients cannot be told apart
ALARMS = 1.0  # per 100 healthy rounds, for a run that does not state its limit
FALLEN = 0.05  # loss of accuracy from which it is mentioned for a run whose model is not lost
LOOK_BACK = 20  # rounds in which clients' numbers of samples are searched
SLOW = ("STRAGGLER", "TIMEOUT")  # issues whose verdict includes how long rounds waited
HELPED = ("applied", "trial", "undone")  # outcomes of an action that are worth reporting
WORDS: Mapping[State, str] = {
    "ill": "Problem",
    "watch": "Watch",
    "healthy": "OK",
    "warming": "Too early",
    "unjudged": "Not judged",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """The summary shown first for a run."""

    state: State
    headline: str
    detail: str
    since: int | None = None
    confidence: float | None = None
    node: str | None = None
    layer: str | None = None
    issue: str | None = None
    key: str | None = None  # of the worst case
    severity: str | None = None  # of the worst case
    levels: tuple[CauseLevel, ...] = ()  # of the worst case: something is wrong, of which family, the exact cause
    why: str = ""  # what was seen, in a sentence: the message of the worst case's newest finding
    next_step: str = ""  # what to do first

    @property
    def word(self) -> str:
        """Return the state in a word: «Problem», «OK»."""
        return WORDS[self.state]

    @property
    def sentence(self) -> str:
        """Return the state and the headline: «Problem: c7 has wrong labels, since round 4 (97 %)»."""
        return f"{self.word}: {self.headline.removeprefix('Healthy. ')}"


@dataclass(frozen=True, slots=True)
class Facts:
    """What a verdict needs besides the cases."""

    rounds: int
    clients: int
    detectors: int
    false_alarms: float = ALARMS  # allowed per 100 healthy rounds
    accuracy: float | None = None
    loss: float | None = None
    accuracies: Sequence[tuple[int, float]] = ()  # of the federation, by round
    finished: bool = False
    muted: frozenset[str] = frozenset()  # keys of cases
    acknowledged: frozenset[str] = frozenset()
    samples: Mapping[str, float] = field(default_factory=dict)  # of each client, as last reported
    actions: Sequence[Action] = ()
    labels: Mapping[str, str] = field(default_factory=dict)  # of nodes; see `views.labels`
    # For whom rounds waited; only read if a client is reported as slow
    waiting: Waiting = field(default_factory=Waiting)
    gaps: tuple[str, ...] = ()  # why it was not fully examined; see `diagnosis.gaps`
    examined: Examined | None = None  # what was examined; None: not recorded


def verdict_of(reader: Reader, run: str) -> Verdict:
    """Read the verdict on a run, by its id."""
    outline = outline_of(reader, run)
    cases = cases_of(reader, run, rounds=outline.rounds)
    return judge(cases, facts_of(reader, run, outline, cases))


def judge(cases: Sequence[Case], facts: Facts) -> Verdict:
    """Return the verdict. Ill: a current warning or worse. Watch: troubles that are over, or nearly so.

    Damage to the model comes first, then who causes it, then another trouble; the rest is counted. Notes are omitted;
    they are shown on request. Consequences of another case are covered by that case.
    """
    counted = [case for case in _roots(cases, facts) if case_key(case) not in facts.muted]
    now = [case for case in counted if case.still_there or damage_by(case, cases)]
    ill = [case for case in now if _is_serious_now(case)]
    over = [case for case in counted if case not in now]
    faded = [case for case in now if not _is_serious_now(case)]
    if ill:
        ruined = [case for case in ill if damage_by(case, cases)]
        return _of_lost_model(ruined, ill, cases, facts) if ruined else _of_cases("ill", "", ill, cases, facts)
    if facts.detectors and not facts.rounds and not facts.finished:
        return Verdict("warming", "Waiting for round 0.", "")
    if (not facts.detectors and not cases) or (facts.gaps and not faded and not over):
        why = no_all_clear(facts.gaps) if facts.detectors else "Not judged: no detector looked at this run."
        return Verdict("unjudged", why, _how_it_stands(facts))
    if facts.rounds < WARM:
        return Verdict("warming", _too_early(facts), _how_it_stands(facts))
    if faded or over:
        return _of_cases("watch", "" if facts.gaps else "Nothing serious now. ", faded or over, cases, facts)
    detail = _sentences(_how_it_stands(facts), _blind_spots(facts), _expected_alarms(facts))
    return Verdict("healthy", _healthy(cases, facts), detail)


def _roots(cases: Sequence[Case], facts: Facts) -> list[Case]:
    """Return the troubles that follow from no other, or from a muted one."""
    return [case for case in cases if is_trouble(case) and (case.cause is None or key_text(case.cause) in facts.muted)]


def _is_serious_now(case: Case) -> bool:
    """Whether the newest finding is serious: a suspicion that has faded does not make the run ill."""
    return severity_rank(case.newest.severity) < severity_rank("note")


# -- the sentence -----------------------------------------------------------------------------------------------------


def _of_cases(state: State, opening: str, chosen: Sequence[Case], cases: Sequence[Case], facts: Facts) -> Verdict:
    same = _worst_of(chosen)
    worst, since = same[0], _since(same)
    sentence = f"{opening}{_in_which_rounds(same, since)}{clause(same, facts.labels)}"
    if since is not None and worst.still_there and f"since round {since}" not in sentence:
        sentence += f", since round {since}"
    headline = f"{sentence[:1].upper() + sentence[1:] if worst.node is None else sentence} ({_certainty(same, facts)})"
    stands = (_accuracy_lost(facts, since, least=FALLEN) if state == "ill" else "") or _how_it_stands(facts)
    return _verdict(state, headline, _detail(stands, same, same, cases, facts), worst, since)


def _of_lost_model(ruined: Sequence[Case], ill: Sequence[Case], cases: Sequence[Case], facts: Facts) -> Verdict:
    """Return a verdict such as «The model was lost in round 6: NaN from c5. c2 also crashes since round 4.»"""
    same = _worst_of(ruined, [case for case in ill if case.issue in ORIGINS])
    worst, since, damage = same[0], _since(same), damage_by(same[0], cases)
    who = joined(unique_names(name for case in same for name in culprits(case)), facts.labels)
    origin = (
        ORIGINS[worst.issue].format(who=who, how=manipulation(worst))
        if worst.issue in ORIGINS
        else clause(same, facts.labels)
    )
    if damage is not None and since is not None and since != damage.since:
        origin += f" since round {since}"
    certainty = _certainty(same, facts)
    origin += "" if certainty == "100 %" else f" ({certainty})"
    others = [case for case in ill if case not in same]
    next_worst = _worst_of(others) if others else []
    headline = f"{damage}: {origin}.{f' {_also(next_worst, facts.labels)}.' if next_worst else ''}"
    stands = _accuracy_lost(facts, None if damage is None else damage.since) or _how_it_stands(facts)
    detail = _detail(stands, same, [*same, *next_worst], cases, facts)
    verdict = _verdict("ill", headline, detail, worst, since)
    if damage is None or damage.since is None or not who:
        return verdict
    model = f"Go back to the model from before round {damage.since}" if damage.since > 0 else "Start again"
    return replace(verdict, next_step=f"{model} and leave {who} out; nothing trained since can be used.")


def _worst_of(chosen: Sequence[Case], alike: Sequence[Case] | None = None) -> list[Case]:
    """Return the worst case, followed by those of `alike` (default: all chosen) that its sentence can name as well."""
    worst = min(chosen, key=lambda case: (severity_rank(case.newest.severity), *harm_rank(case)))
    same = (case for case in (chosen if alike is None else alike) if _said_as(case) == _said_as(worst))
    return [worst, *(case for case in same if case is not worst and _alike(case, worst))]


def _said_as(case: Case) -> str:
    """Return what cases of one sentence share: the issue, or how they ruin the model («NaN from»)."""
    return ORIGINS[case.issue] if case.issue in ("NAN_UPDATE", "NAN_GRADIENT") else case.issue


def _since(same: Sequence[Case]) -> int | None:
    return min((begin for case in same if (begin := since_of(case)) is not None), default=None)


def _also(same: Sequence[Case], labels: Mapping[str, str]) -> str:
    """Return a sentence such as «c2 also crashes since round 4»."""
    words, since = clause(same, labels), _since(same)
    who = joined(unique_names(case.node for case in same), labels)
    words = f"{who} also{words[len(who) :]}" if who and words.startswith(f"{who} ") else f"Also: {words}"
    return words if since is None or f"since round {since}" in words else f"{words} since round {since}"


def _certainty(same: Sequence[Case], facts: Facts) -> str:
    certainty = ("up to " if len({round(case.confidence, 2) for case in same}) > 1 else "") + sure(same[0])
    acknowledged = all(case_key(case) in facts.acknowledged for case in same)
    return f"{certainty}, acknowledged" if acknowledged else certainty


def _detail(stands: str, same: Sequence[Case], named_cases: Sequence[Case], cases: Sequence[Case], facts: Facts) -> str:
    """Return what follows the headline: quality of the model, distribution of data, actions, other troubles."""
    return _sentences(
        stands,
        _how_long_it_was_waited_for(same, facts) or _share_of_data(same, facts),
        _what_was_done(same, facts),
        _others(named_cases, cases, facts),
        incomplete(facts.gaps).rstrip(".") if facts.gaps else "",
    )


def _verdict(state: State, headline: str, detail: str, worst: Case, since: int | None) -> Verdict:
    why = shortened(worst.newest.message)
    begins, _, rest = why.partition(": ")
    if rest and headline.startswith(begins):  # the headline has said it
        why = rest[:1].upper() + rest[1:]
    remedies = worst.issue_entry.remedies
    return Verdict(
        state,
        headline,
        detail,
        since=since,
        confidence=worst.confidence,
        node=worst.node,
        layer=worst.layer,
        issue=worst.issue,
        key=case_key(worst),
        severity=worst.severity,
        levels=levels_of(worst),
        why="" if why.rstrip(".") in headline else why,
        next_step=in_words(remedies[0]) if remedies and state == "ill" else "",
    )


def _alike(case: Case, worst: Case) -> bool:
    """Whether both fit into one sentence: both about nodes, both about groups, or both about the run."""
    return (case.node is None, case.group is None) == (worst.node is None, worst.group is None)


def _in_which_rounds(same: Sequence[Case], since: int | None) -> str:
    """Return the rounds in which a past trouble was seen."""
    last = max((case.last for case in same if case.last is not None), default=None)
    if same[0].still_there or since is None or last is None:
        return ""
    return f"Seen in round {last}: " if since == last else f"Seen in rounds {since} to {last}: "


def _healthy(cases: Sequence[Case], facts: Facts) -> str:
    muted = sum(is_trouble(case) and case_key(case) in facts.muted for case in cases)
    left_out = f" ({muted} muted)" if muted else ""
    about = f"{counted(facts.rounds, 'round')}, {counted(facts.clients, 'client')}"
    judged = "; all judged" if facts.examined is not None and facts.examined.client_rounds else ""
    return f"Healthy. {about}: no finding{left_out}{judged}."


def _expected_alarms(facts: Facts) -> str:
    looked = "" if facts.examined is None else f"{number(facts.examined.client_rounds)} client-rounds looked at; "
    text = (
        f"{looked}{number(facts.false_alarms * facts.rounds / 100)} false alarms are to be expected in so many rounds"
    )
    return text[:1].upper() + text[1:]


def _too_early(facts: Facts) -> str:
    if facts.finished:
        return f"Too short to judge: {counted(facts.rounds, 'round')}."
    so_far = counted(facts.rounds, "round")
    return f"Too early to judge: {so_far} so far; clients can be compared from {WARM} rounds on."


# -- below the headline ----------------------------------------------------------------------------------------------


def _how_it_stands(facts: Facts) -> str:
    if facts.accuracy is not None:
        return f"Accuracy {percent(facts.accuracy)}"
    return "" if facts.loss is None else f"Loss {number(facts.loss)}"


def _accuracy_lost(facts: Facts, since: int | None, least: float = 0.0) -> str:
    """Return «Accuracy fell from 52 % to 12.3 %»: the best before a round and now; empty if it rose or fell by less."""
    before = [accuracy for round_index, accuracy in facts.accuracies if since is not None and round_index < since]
    best = max((accuracy for accuracy in before if math.isfinite(accuracy)), default=None)
    if best is None or facts.accuracy is None or facts.accuracy >= best or best - facts.accuracy < least:
        return ""
    return f"Accuracy fell from {percent(best)} to {percent(facts.accuracy)}"


def _blind_spots(facts: Facts) -> str:
    """Return what could not have been detected in such a run, and is not ruled out by «healthy»."""
    if facts.clients < FEWEST:
        return f"With fewer than {FEWEST} clients nobody can be compared with the others"
    if facts.accuracy is not None and facts.accuracy < LEARNT:
        return f"Wrong labels cannot be seen before the model has an accuracy of {percent(LEARNT)}"
    return ""


def _share_of_data(same: Sequence[Case], facts: Facts) -> str:
    names = {name for case in same for name in culprits(case)}
    whole = sum(facts.samples.values())
    own = sum(value for node, value in facts.samples.items() if node in names)
    if not whole or not own:
        return ""
    held = "holds" if len(names) == 1 else "hold"
    who = named(next(iter(names)), facts.labels) if len(names) == 1 else "Clients under suspicion"
    share = "under 1 %" if own < 0.01 * whole else f"{100 * own / whole:.0f} %"
    return f"{who} {held} {share} of the data"


def _how_long_it_was_waited_for(same: Sequence[Case], facts: Facts) -> str:
    if same[0].issue not in SLOW:
        return ""
    return facts.waiting.for_clients({name for case in same for name in culprits(case)}, facts.labels)


def _what_was_done(same: Sequence[Case], facts: Facts) -> str:
    """Return an action's own report; how the run would have continued without it is unknown."""
    done = [action for case in same for action in actions_about(case, facts.actions) if action.status in HELPED]
    if not done:
        return ""
    newest = max(done, key=lambda action: action.at)
    words = {"applied": "in force", "trial": "on trial", "undone": "undone"}[newest.status]
    target = f" of {named(newest.target, facts.labels)}" if newest.target else ""
    when = "" if newest.where.round is None else f" since round {newest.where.round}"
    why = shortened(str(newest.arguments.get("why", ""))).rstrip(".") if newest.status != "trial" else ""
    return f"{newest.kind.replace('_', ' ').capitalize()}{target} {words}{when}{': ' + why if why else ''}"


def _others(same: Sequence[Case], cases: Sequence[Case], facts: Facts) -> str:
    rest = [case for case in _roots(cases, facts) if case not in same]
    muted = sum(case_key(case) in facts.muted for case in rest)
    others = [case for case in rest if case_key(case) not in facts.muted]
    serious = sum(case.still_there and _is_serious_now(case) for case in others)
    over = sum(not case.still_there for case in others)
    parts = [counted(serious, "other finding")] if serious else []
    below = sum(is_trouble(case) for case in cases) - len(_roots(cases, facts))
    parts += [counted(below, "consequence")] if below else []
    parts += [f"{over} resolved"] if over else []
    parts += [f"{muted} muted"] if muted else []
    return ", ".join(parts)


def _sentences(*parts: str) -> str:
    return " ".join(f"{part}." for part in parts if part)


# -- from the store ---------------------------------------------------------------------------------------------------


def facts_of(reader: Reader, run: str, outline: Outline | None = None, cases: Sequence[Case] | None = None) -> Facts:
    """Read what a verdict needs to know of a run.

    `outline`: if it is known already. `cases`: those to be judged, if they are known: if there are none, neither
    samples nor actions are read, which are only mentioned with cases.
    """
    known = outline or outline_of(reader, run)
    clients = known.clients
    outcomes = newest_outcomes(reader, run, ("accuracy", "loss"), known.outcomes)
    return replace(
        facts_in_short(reader, known.settings, len(known.rounds), len(clients), known.marks),
        accuracy=finite(outcomes["accuracy"]),
        loss=finite(outcomes["loss"]),
        accuracies=_accuracies(known),
        samples={} if cases == [] else _samples(reader, run, known.rounds, clients),
        actions=[] if cases == [] else queries.records(reader, run, Action),
        labels=labels_of(reader, run),
        waiting=waiting_in(reader, run) if any(case.issue in SLOW for case in cases or ()) else Waiting(),
    )


def _accuracies(outline: Outline) -> list[tuple[int, float]]:
    measured = outline.outcomes.get(("accuracy", None)) or outline.outcomes.get(("accuracy", "server"))
    return list(zip(*measured, strict=True)) if measured else []


def facts_in_short(reader: Reader, run: Run, rounds: int, clients: int, marks: Sequence[Mark]) -> Facts:
    """Read what determines the state and the headline; the detail is omitted, for which a list has no room."""
    examination = examination_of(reader, run.id, clients=clients)
    return Facts(
        rounds=rounds,
        clients=clients,
        detectors=detectors_of(run),
        false_alarms=_allowed(run),
        finished=run.finished is not None,
        muted=frozenset(mark.target for mark in marks if mark.kind == "muted"),
        acknowledged=frozenset(mark.target for mark in marks if mark.kind == "acknowledged"),
        gaps=examination.gaps,
        examined=examination.examined,
    )


def _samples(reader: Reader, run: str, rounds: Sequence[int], clients: Sequence[str]) -> dict[str, float]:
    """Return each client's number of samples; none unless all are known, since shares would be wrong."""
    names = ("samples", "update.samples")
    known: dict[str, float] = {}
    newest, looked = rounds[-LOOK_BACK:][::-1], 0
    while looked < len(newest) and len(known) < len(clients):
        # Usually the newest round has all; if not, several more are read at once.
        part = newest[looked : 4 * looked + 1]
        values = values_in_rounds(reader, run, names, part)
        for round_index, name in product(part, names):
            known = {**values.get((name, round_index), {}), **known}
            if name == names[-1] and len(known) >= len(clients):
                break
        looked += len(part)
    known = {node: known[node] for node in clients if math.isfinite(known.get(node, math.nan))}
    return known if len(known) == len(clients) else {}


def _allowed(run: Run) -> float:
    """Return how many false alarms per 100 healthy rounds the run's monitor allows."""
    allowed = setting_of(run, "false_alarms", ALARMS)
    return float(allowed) if isinstance(allowed, int | float) else ALARMS
