# SPDX-License-Identifier: Apache-2.0
"""Words the clauses of a verdict: «c7 sends updates like a client with wrong labels», «the loss runs away».

Of what is concluded from likeness, the words say «like»; of what was counted or compared, they say what is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from fedvitals.diagnosis.cases import Case
from fedvitals.records import natural
from fedvitals.views.labels import named, place_of

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
    "CRASH": "Rounds fail with an error",
    "OUT_OF_MEMORY": "The server runs out of memory",
    "DISK_FULL": "The server's disk is full",
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
    if not who or worst.issue not in OF_CLIENTS:
        words = OF_THE_RUN.get(worst.issue, worst.issue_entry.title)
        words = f"{words}, on {joined(who, labels)}" if who else words
    else:
        whole_group = worst.node is None
        subject = f"nearly all of {joined(who)}" if whole_group else joined(who, labels)
        words = f"{subject} {OF_CLIENTS[worst.issue][len(who) > 1 or whole_group]}"
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
