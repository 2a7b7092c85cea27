# SPDX-License-Identifier: Apache-2.0
"""Writes the verdict on a run: one sentence with what is wrong, since when, and how sure that is.

It is built from stored findings and nothing else. What muted cases say is left out; acknowledged ones are still there.
Of what is concluded from likeness, the words say «like»; of what was counted or compared, they say what is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from types import MappingProxyType
from typing import Literal

from fedvitals.diagnosis.abstentions import Examined
from fedvitals.diagnosis.cases import Case, is_trouble, severity_rank
from fedvitals.diagnosis.evidence.faulty_clients import LEARNT
from fedvitals.diagnosis.evidence.scores import FEWEST
from fedvitals.diagnosis.gaps import incomplete, no_all_clear
from fedvitals.plain_json import finite
from fedvitals.records import Action, Run, natural
from fedvitals.store.marks import Mark
from fedvitals.store.read import queries
from fedvitals.store.read.metrics import newest_outcomes, values_in_rounds
from fedvitals.store.read.reader import Reader
from fedvitals.views.card import detectors_of, setting_of
from fedvitals.views.cases import actions_about, case_key, cases_of, culprits, key_text, since_of
from fedvitals.views.cause_levels import CauseLevel, levels_of, what_looks_wrong
from fedvitals.views.gaps import examination_of
from fedvitals.views.labels import labels_of, named, place_of
from fedvitals.views.outline import Outline, outline_of

__all__ = ["Facts", "State", "Verdict", "case_key", "facts_in_short", "facts_of", "judge", "verdict_of"]

State = Literal["ill", "watch", "healthy", "warming", "unjudged"]
WARM = 3  # rounds, before which nobody can be told from the others
ALARMS = 1.0  # per 100 healthy rounds, of a run that does not say what it allows
LOOK_BACK = 20  # rounds in which clients' numbers of samples are looked for
HELPED = ("applied", "trial", "undone")  # what an action has come to, of which there is something to tell


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is said of a run first."""

    state: State
    headline: str
    detail: str
    since: int | None = None
    confidence: float | None = None
    node: str | None = None
    layer: str | None = None
    issue: str | None = None
    key: str | None = None  # of the worst case
    levels: tuple[CauseLevel, ...] = ()  # of the worst case: something is wrong, of which family, the exact cause


@dataclass(frozen=True, slots=True)
class Facts:
    """What a verdict needs to know beside the cases."""

    rounds: int
    clients: int
    detectors: int
    false_alarms: float = ALARMS  # allowed per 100 healthy rounds
    accuracy: float | None = None
    loss: float | None = None
    finished: bool = False
    muted: frozenset[str] = frozenset()  # keys of cases
    acknowledged: frozenset[str] = frozenset()
    samples: Mapping[str, float] = field(default_factory=dict)  # of each client, as last told
    actions: Sequence[Action] = ()
    labels: Mapping[str, str] = field(default_factory=dict)  # of nodes; see `views.labels`
    gaps: tuple[str, ...] = ()  # why it was not fully examined; see `diagnosis.gaps`
    examined: Examined | None = None  # what was looked at; None: not recorded


def verdict_of(reader: Reader, run: str) -> Verdict:
    """Read the verdict on a run, by its id."""
    outline = outline_of(reader, run)
    cases = cases_of(reader, run, rounds=outline.rounds)
    return judge(cases, facts_of(reader, run, outline, cases))


def judge(cases: Sequence[Case], facts: Facts) -> Verdict:
    """Ill: a warning or worse that is there now. Watch: troubles that are over, or that are hardly any more.

    Of notes nothing is told; they are shown on request. What follows from another case speaks through that one.
    """
    counted = [case for case in _roots(cases, facts) if case_key(case) not in facts.muted]
    now = [case for case in counted if case.still_there]
    ill = [case for case in now if _is_serious_now(case)]
    over = [case for case in counted if not case.still_there]
    faded = [case for case in now if not _is_serious_now(case)]
    if ill:
        return _of_cases("ill", "", ill, cases, facts)
    if (not facts.detectors and not cases) or (facts.gaps and not faded and not over):
        why = no_all_clear(facts.gaps) if facts.detectors else "Not judged: no detector looked at this run."
        return Verdict("unjudged", why, _how_it_stands(facts))
    if facts.rounds < WARM:
        return Verdict("warming", _too_early(facts), _how_it_stands(facts))
    if faded:
        return _of_cases("watch", "" if facts.gaps else "Nothing serious now. ", faded, cases, facts)
    if over:
        return _of_cases("watch", "" if facts.gaps else "Nothing serious now. ", over, cases, facts)
    return Verdict("healthy", _healthy(cases, facts), _sentences(_how_it_stands(facts), _blind_spots(facts)))


def _roots(cases: Sequence[Case], facts: Facts) -> list[Case]:
    """Return the troubles that follow from no other, or from one that was muted."""
    return [case for case in cases if is_trouble(case) and (case.cause is None or key_text(case.cause) in facts.muted)]


def _is_serious_now(case: Case) -> bool:
    """By its newest finding: who was suspected once and is hardly any more does not make the run ill."""
    return severity_rank(case.newest.severity) < severity_rank("note")


# -- the sentence -----------------------------------------------------------------------------------------------------


def _of_cases(state: State, opening: str, chosen: Sequence[Case], cases: Sequence[Case], facts: Facts) -> Verdict:
    worst = min(chosen, key=lambda case: (severity_rank(case.newest.severity), -case.confidence))
    others = [case for case in chosen if case.issue == worst.issue and case is not worst]
    same = [worst, *(case for case in others if _alike(case, worst))]
    beginnings = [begin for case in same if (begin := since_of(case)) is not None]
    since = min(beginnings, default=None)
    sentence = f"{opening}{_in_which_rounds(same, since)}{clause(same, facts.labels)}"
    if since is not None and worst.still_there and f"since round {since}" not in sentence:
        sentence += f", since round {since}"
    certainty = ("up to " if len({round(case.confidence, 2) for case in same}) > 1 else "") + sure(worst)
    if all(case_key(case) in facts.acknowledged for case in same):
        certainty += ", acknowledged"
    return Verdict(
        state,
        f"{sentence[:1].upper() + sentence[1:] if worst.node is None else sentence} ({certainty})",
        _sentences(
            _how_it_stands(facts),
            _share_of_data(same, facts),
            _what_was_done(same, facts),
            _others(same, cases, facts),
            incomplete(facts.gaps).rstrip(".") if facts.gaps else "",
        ),
        since=since,
        confidence=worst.confidence,
        node=worst.node,
        layer=worst.layer,
        issue=worst.issue,
        key=case_key(worst),
        levels=levels_of(worst),
    )


def _alike(case: Case, worst: Case) -> bool:
    """Whether both fit into one sentence: both of nodes, both of groups, or both of the run."""
    return (case.node is None, case.group is None) == (worst.node is None, worst.group is None)


def _in_which_rounds(same: Sequence[Case], since: int | None) -> str:
    """Of what is over, the rounds in which it was."""
    last = max((case.last for case in same if case.last is not None), default=None)
    if same[0].still_there or since is None or last is None:
        return ""
    return f"Seen in round {last}: " if since == last else f"Seen in rounds {since} to {last}: "


def _healthy(cases: Sequence[Case], facts: Facts) -> str:
    muted = sum(is_trouble(case) and case_key(case) in facts.muted for case in cases)
    left_out = f" ({muted} muted)" if muted else ""
    expected = facts.false_alarms * facts.rounds / 100
    about = f"{_counted(facts.rounds, 'round')}, {_counted(facts.clients, 'client')}"
    if facts.examined is not None and facts.examined.client_rounds:
        about = str(facts.examined)
    return f"Healthy. {about[:1].upper()}{about[1:]}; no finding{left_out}, expected false alarms {expected:.2g}."


def _too_early(facts: Facts) -> str:
    if facts.finished:
        return f"Too short to judge: {_counted(facts.rounds, 'round')}."
    so_far = f"{_counted(facts.rounds, 'round')} so far" if facts.rounds else "no round is complete"
    return f"Too early to judge: {so_far}; clients can be compared from {WARM} rounds on."


# -- what goes with it ------------------------------------------------------------------------------------------------


def _how_it_stands(facts: Facts) -> str:
    if facts.accuracy is not None:
        return f"Accuracy {facts.accuracy:.3g}"
    return "" if facts.loss is None else f"Loss {facts.loss:.3g}"


def _blind_spots(facts: Facts) -> str:
    """What nobody could have seen in such a run, and «healthy» does not deny."""
    if facts.clients < FEWEST:
        return f"With fewer than {FEWEST} clients nobody can be compared with the others"
    if facts.accuracy is not None and facts.accuracy < LEARNT:
        return f"Wrong labels cannot be seen before the model has an accuracy of {LEARNT}"
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


def _what_was_done(same: Sequence[Case], facts: Facts) -> str:
    """Only what an action says of itself: nobody knows how the run would have gone without."""
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
    counted = [case for case in rest if case_key(case) not in facts.muted]
    serious = sum(case.still_there and _is_serious_now(case) for case in counted)
    over = sum(not case.still_there for case in counted)
    parts = [_counted(serious, "other finding")] if serious else []
    below = sum(is_trouble(case) for case in cases) - len(_roots(cases, facts))
    parts += [_counted(below, "consequence")] if below else []
    parts += [f"{over} over"] if over else []
    parts += [f"{muted} muted"] if muted else []
    return ", ".join(parts)


def _sentences(*parts: str) -> str:
    return " ".join(f"{part}." for part in parts if part)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


# -- from the store ---------------------------------------------------------------------------------------------------


def facts_of(reader: Reader, run: str, outline: Outline | None = None, cases: Sequence[Case] | None = None) -> Facts:
    """Read what a verdict needs to know of a run.

    `outline`: if it is known already. `cases`: those that are to be judged, if they are known: without any, neither
    samples nor actions are read, which are told of cases only.
    """
    known = outline or outline_of(reader, run)
    clients = known.clients
    outcomes = newest_outcomes(reader, run, ("accuracy", "loss"), known.outcomes)
    return replace(
        facts_in_short(reader, known.settings, len(known.rounds), len(clients), known.marks),
        accuracy=finite(outcomes["accuracy"]),
        loss=finite(outcomes["loss"]),
        samples={} if cases == [] else _samples(reader, run, known.rounds, clients),
        actions=[] if cases == [] else queries.records(reader, run, Action),
        labels=labels_of(reader, run),
    )


def facts_in_short(reader: Reader, run: Run, rounds: int, clients: int, marks: Sequence[Mark]) -> Facts:
    """What decides the state and the headline; the rest is for the detail, for which a list has no room."""
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
    """How many each client has; nothing unless all are known from the newest rounds, since shares would be wrong."""
    names = ("samples", "update.samples")
    known: dict[str, float] = {}
    newest, looked = rounds[-LOOK_BACK:][::-1], 0
    while looked < len(newest) and len(known) < len(clients):
        # As a rule the newest round has all; if it has not, more rounds are asked for at once.
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
    """How many false alarms per 100 healthy rounds the run's monitor was set to."""
    allowed = setting_of(run, "false_alarms", ALARMS)
    return float(allowed) if isinstance(allowed, int | float) else ALARMS


# Issue → what one client does, and what several do. «{layer}» is filled in where the case has one.
OF_CLIENTS = {
    "LABEL_NOISE": ("sends updates like a client with wrong labels", "send updates like clients with wrong labels"),
    "LABEL_FLIP": (
        "behaves as if one class were labelled as another",
        "behave as if one class were labelled as another",
    ),
    "INPUT_NOISE": ("sends updates like a client with noisy inputs", "send updates like clients with noisy inputs"),
    "INPUT_SCALE": (
        "behaves as if its inputs were on another scale",
        "behave as if their inputs were on another scale",
    ),
    "MISSING_CLASSES": ("lacks classes that the others have", "lack classes that the others have"),
    "BYZANTINE": ("sends updates that training does not give", "send updates that training does not give"),
    "STALE_UPDATE": ("sends updates that start from an old model", "send updates that start from an old model"),
    "FREE_RIDER": ("sends updates without training", "send updates without training"),
    "DUPLICATE_UPDATE": ("sends the same update as another client", "send the same updates as other clients"),
    "WRONG_SAMPLE_COUNT": ("claims a wrong number of samples", "claim wrong numbers of samples"),
    "WRONG_LEARNING_RATE": (
        "trains as if with a learning rate of its own",
        "train as if with learning rates of their own",
    ),
    "FROZEN_LAYER": ("does not train {layer}", "do not train {layer}"),
    "UNUSUAL_CLIENT": ("is unlike its peers, the cause is unclear", "are unlike their peers, the cause is unclear"),
    "NAN_WEIGHTS": ("has weights that are NaN or infinite", "have weights that are NaN or infinite"),
    "NAN_UPDATE": ("sends updates that are NaN or infinite", "send updates that are NaN or infinite"),
    "NAN_GRADIENT": ("has gradients that are NaN or infinite", "have gradients that are NaN or infinite"),
    "WEIGHT_EXPLOSION": ("has weights that grow without bound", "have weights that grow without bound"),
    "GROUP_LEFT_BEHIND": ("is badly served by the global model", "are badly served by the global model"),
    "DOMINANT_CLIENT": ("decides the average nearly alone", "decide the average nearly alone"),
    "BATCH_NORM_STATISTICS": ("has broken running statistics", "have broken running statistics"),
    "SHAPE_OR_DTYPE_MISMATCH": ("sends updates that do not fit the model", "send updates that do not fit the model"),
    "EXPLODING_GRADIENT": ("has gradients that explode", "have gradients that explode"),
    "VANISHING_GRADIENT": ("has gradients that vanish", "have gradients that vanish"),
    "COMMUNICATION_FAILURE": ("loses its messages on the way", "lose their messages on the way"),
    "TIMEOUT": ("misses the deadline", "miss the deadline"),
    "STRAGGLER": ("is far slower than the others", "are far slower than the others"),
    "DROP_OUT": ("has left", "have left"),
    "CRASH": ("fails with an error", "fail with an error"),
    "OUT_OF_MEMORY": ("runs out of memory", "run out of memory"),
    "MEMORY_LEAK": ("keeps more memory from round to round", "keep more memory from round to round"),
    "DISK_FULL": ("has a full disk", "have full disks"),
    "CLOCK_SKEW": ("has a wrong clock", "have wrong clocks"),
    "TELEMETRY_LOST": ("loses its telemetry", "lose their telemetry"),
}

# Issue → what is wrong with the run as a whole, where its title does not say so by itself.
OF_THE_RUN = {
    "NAN_WEIGHTS": "The global weights are NaN or infinite",
    "GROUP_LEFT_BEHIND": "The global model does not serve some clients",
    "BATCH_NORM_STATISTICS": "The running statistics of the global model are broken",
    "DROP_OUT": "Most clients are not connected",
    "CRASH": "Rounds fail with an error",
    "OUT_OF_MEMORY": "The server runs out of memory",
    "DISK_FULL": "The server's disk is full",
    "STALLED": "A round stands still",
}
NAMED = 2  # of several culprits; the others are counted
LONGEST = 200  # characters of a message that somebody else wrote


def clause(same: Sequence[Case], labels: Mapping[str, str]) -> str:
    """Cases of one issue as one main clause, the worst first; without since-when and how-sure."""
    worst = same[0]
    layers = _unique(case.layer for case in same)
    if worst.issue not in OF_CLIENTS and worst.issue_entry.family == "user":
        return _own_words(worst, labels)
    who = _unique(case.node or case.group for case in same)
    suspects = _unique(suspect.node for suspect in worst.newest.suspects)
    if not who and worst.issue == "GROUP_LEFT_BEHIND" and suspects:
        return f"The global model does not serve {joined(suspects, labels)}"
    if worst.issue == "STALLED" and suspects and worst.still_there:
        return f"A round stands still and waits for {joined(suspects, labels)}"
    if not who or worst.issue not in OF_CLIENTS:
        words = OF_THE_RUN.get(worst.issue, worst.issue_entry.title)
        words = f"{words}, on {joined(who, labels)}" if who else words
    else:
        whole_group = worst.node is None
        subject = f"nearly all of {joined(who)}" if whole_group else joined(who, labels)
        several = len(who) > 1 or whole_group
        words = what_looks_wrong(worst, subject, several=several) or f"{subject} {OF_CLIENTS[worst.issue][several]}"
    layer = f"layer{'s' * (len(layers) > 1)} {joined(layers)}" if layers else "a layer"
    if "{layer}" in words:
        return words.replace("{layer}", layer)
    return f"{words}, in {layer}" if layers else words


def joined(names: Sequence[str], labels: Mapping[str, str] = MappingProxyType({})) -> str:
    """«c3», «c3 and c7», «c3, c7 and 2 more»; in the order of their names."""
    known = [named(name, labels) for name in sorted(names, key=natural)]
    if len(known) <= NAMED:
        return " and ".join(known)
    left = len(known) - NAMED
    return f"{', '.join(known[:NAMED])} and {left} more"


def sure(case: Case) -> str:
    """«96 %»; only what an exact test says, or a user's own rule, is called certain."""
    certain = case.issue_entry.exact or case.issue_entry.family == "user"
    if case.confidence >= 0.995 and not (certain and case.confidence == 1):
        return "over 99 %"
    return f"{100 * case.confidence:.0f} %"


def shortened(text: str, longest: int = LONGEST) -> str:
    """On one line, and no longer than a sentence may be."""
    line = " ".join(text.split())
    return line if len(line) <= longest else line[: longest - 1].rstrip() + "…"


def _own_words(case: Case, labels: Mapping[str, str]) -> str:
    """Of a user's own issue nothing is known but what its finding says."""
    words = shortened(case.newest.message).rstrip(".") or case.issue
    return (
        words if case.place == "the whole run" or (case.node or "") in words else f"{place_of(case, labels)}: {words}"
    )


def _unique(names: Iterable[str | None]) -> list[str]:
    return list(dict.fromkeys(name for name in names if name))
