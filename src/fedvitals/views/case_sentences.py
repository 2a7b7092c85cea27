# SPDX-License-Identifier: Apache-2.0
"""Writes a main clause on what is wrong: «c7 has wrong labels», «c7 seems to have wrong labels».

What was measured on a client's own samples or read from its settings is stated as fact; conclusions from its losses or
updates are worded with «seems».
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from fedvitals.diagnosis.cases import Case
from fedvitals.diagnosis.issues.table import how_sure
from fedvitals.records import natural
from fedvitals.views.cause_levels import named_chance, what_looks_wrong
from fedvitals.views.labels import named, place_of

# Issue → what one client does, and what several do. «{layer}» is replaced if the case has one.
OF_CLIENTS = {
    "LABEL_NOISE": ("seems to have wrong labels", "seem to have wrong labels"),
    "LABEL_FLIP": ("seems to label one class as another", "seem to label one class as another"),
    "INPUT_NOISE": ("seems to have noisy inputs", "seem to have noisy inputs"),
    "INPUT_SCALE": ("seems to have inputs on another scale", "seem to have inputs on another scale"),
    "MISSING_VALUES": ("has inputs that are missing", "have inputs that are missing"),
    "MISSING_CLASSES": ("lacks classes that the others have", "lack classes that the others have"),
    "BYZANTINE": ("sends manipulated updates", "send manipulated updates"),
    "STALE_UPDATE": ("sends updates that start from an old model", "send updates that start from an old model"),
    "ADAPTER_SCALE_MISMATCH": ("uses another α/r than the others", "use other α/r than the rest"),
    "FREE_RIDER": ("sends updates without training", "send updates without training"),
    "DUPLICATE_UPDATE": ("sends the same update as another client", "send the same updates as other clients"),
    "WRONG_SAMPLE_COUNT": ("claims a wrong number of samples", "claim wrong numbers of samples"),
    "WRONG_LEARNING_RATE": (
        "seems to train with a learning rate of its own",
        "seem to train with learning rates of their own",
    ),
    "FROZEN_LAYER": ("does not train {layer}", "do not train {layer}"),
    "UNUSUAL_CLIENT": (
        "is unlike the other clients, the cause is unclear",
        "are unlike the other clients, the cause is unclear",
    ),
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
    "CRASH": ("crashes", "crash"),
    "OUT_OF_MEMORY": ("runs out of memory", "run out of memory"),
    "MEMORY_LEAK": ("keeps more memory from round to round", "keep more memory from round to round"),
    "DISK_FULL": ("has a full disk", "have full disks"),
    "CLOCK_SKEW": ("has a wrong clock", "have wrong clocks"),
    "TELEMETRY_LOST": ("loses its telemetry", "lose their telemetry"),
}

# The same, if it was measured on the clients' samples or read from their settings.
MEASURED_OF_CLIENTS = {
    "LABEL_NOISE": ("has wrong labels", "have wrong labels"),
    "LABEL_FLIP": ("labels one class as another", "label one class as another"),
    "INPUT_NOISE": ("has noisy inputs", "have noisy inputs"),
    "INPUT_SCALE": ("has inputs on another scale", "have inputs on another scale"),
    "WRONG_LEARNING_RATE": ("trains with a learning rate of its own", "train with learning rates of their own"),
}
MEASURED = frozenset({"data", "exact"})  # views of a finding that compare samples, settings or what was sent

# Issue → what is wrong with the run as a whole, if its title does not say so by itself.
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
# Kind of fault → how updates were manipulated.
MANIPULATIONS = {
    "sign_flip": "sign flipped",
    "scaling": "scaled",
    "gaussian": "noise",
    "little_is_enough": "hidden among the others",
    "inner_product": "mean reversed",
}
NAMED = 2  # of several culprits; the others are only counted
LONGEST = 200  # characters of a message from elsewhere


def clause(same: Sequence[Case], labels: Mapping[str, str]) -> str:
    """Return cases of one issue as one main clause, the worst first; without their beginning and confidence."""
    worst = same[0]
    layers = unique_names(case.layer for case in same)
    if worst.issue not in OF_CLIENTS and worst.issue_entry.family == "user":
        return _own_words(worst, labels)
    who = unique_names(case.node or case.group for case in same)
    suspects = unique_names(suspect.node for suspect in worst.newest.suspects)
    if not who and worst.issue == "GROUP_LEFT_BEHIND" and suspects:
        return f"The global model does not serve {joined(suspects, labels)}"
    if worst.issue == "NOTHING_AGGREGATED" and not who:
        return _no_new_model(worst)
    if worst.issue == "STALLED" and suspects and worst.still_there:
        return f"A round stands still and waits for {joined(suspects, labels)}"
    if not who or worst.issue not in OF_CLIENTS:
        words = OF_THE_RUN.get(worst.issue, worst.issue_entry.title)
        words = f"{words}, on {joined(who, labels)}" if who else words
    else:
        whole_group = worst.node is None
        subject = f"nearly all of {joined(who)}" if whole_group else joined(who, labels)
        several = len(who) > 1 or whole_group
        words = what_looks_wrong(worst, subject, several=several)
        words = words or f"{subject} {_predicates(same)[several]}{manipulation(worst)}"
    layer = f"layer{'s' * (len(layers) > 1)} {joined(layers)}" if layers else "a layer"
    if "{layer}" in words:
        return words.replace("{layer}", layer)
    return f"{words}, in {layer}" if layers else words


def _no_new_model(case: Case) -> str:
    """Return «Rounds produce no new model (8 clients fail: RuntimeError)», without what is not known."""
    failed = case.newest.evidence.get("failed")
    reasons = {shortened(suspect.reason, 40) for suspect in case.newest.suspects}
    if not isinstance(failed, int) or failed < 1:
        return "Rounds produce no new model"
    who = f"{failed} clients fail" if failed > 1 else "1 client fails"
    return f"Rounds produce no new model ({who}{f': {reasons.pop()}' if len(reasons) == 1 else ''})"


def _predicates(same: Sequence[Case]) -> tuple[str, str]:
    """Return what one client and what several do, by the issue of these cases; as measured only if all of them were."""
    issue = same[0].issue
    measured = MEASURED_OF_CLIENTS.get(issue) if all(map(_was_measured, same)) else None
    return measured or OF_CLIENTS[issue]


def _was_measured(case: Case) -> bool:
    views = case.newest.evidence.get("views")
    known = {view for view in views if isinstance(view, str)} if isinstance(views, list | tuple) else set()
    return bool(known & MEASURED)


def manipulation(case: Case) -> str:
    """Return the most probable way in which updates were manipulated, « (sign flipped?)»; empty if none is known."""
    causes = case.newest.evidence.get("causes")
    kinds = [kind for kind, _ in filter(None, map(named_chance, causes if isinstance(causes, list | tuple) else ()))]
    words = MANIPULATIONS.get(kinds[0]) if kinds and case.issue == "BYZANTINE" else None
    return f" ({words}?)" if words else ""


def joined(names: Sequence[str], labels: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return names in words: «c3», «c3 and c7», «c3, c7 and 2 more»; in natural order."""
    known = [named(name, labels) for name in sorted(names, key=natural)]
    if len(known) <= NAMED:
        return " and ".join(known)
    left = len(known) - NAMED
    return f"{', '.join(known[:NAMED])} and {left} more"


def sure(case: Case) -> str:
    """Return the confidence, «96 %»; only an exact test or a user's own rule is called certain."""
    return how_sure(case.issue, case.confidence)


def shortened(text: str, longest: int = LONGEST) -> str:
    """Return the text on one line, cut after its last whole sentence that fits; else after a word, with «…»."""
    line = " ".join(text.split())
    if len(line) <= longest:
        return line
    start = line[:longest]
    sentence = start.rfind(". ") + 1
    return start[:sentence] if 2 * sentence > longest else (start[:-1].rpartition(" ")[0] or start[:-1]) + "…"


def _own_words(case: Case, labels: Mapping[str, str]) -> str:
    """Return the clause of a user-defined issue, of which only its finding's message is known."""
    words = shortened(case.newest.message).rstrip(".") or case.issue
    return (
        words if case.place == "the whole run" or (case.node or "") in words else f"{place_of(case, labels)}: {words}"
    )


def unique_names(names: Iterable[str | None]) -> list[str]:
    """Return the names without repetition and None, in their order."""
    return list(dict.fromkeys(name for name in names if name))
