# SPDX-License-Identifier: Apache-2.0
"""Which issues answer which fault. Kept strict: every code added here makes the bank easier for all methods."""

from __future__ import annotations

import re

from fedvitals.diagnosis.issues.table import ISSUES_BY_CODE
from fedvitals.lab.description import kind_of
from fedvitals.lab.faults.table import FAULTS

# By default a fault is answered only by the issue in its truth. These have exactly one more accepted answer.
ALSO: dict[str, str] = {
    "not_finite": "NAN_UPDATE",  # the same trouble, seen as the update leaves the client
    "exploding_initialisation": "POOR_INITIALISATION",  # the symptom, and its cause
    "vanishing_initialisation": "POOR_INITIALISATION",
    "server_rate_too_high": "OSCILLATION",  # which of the two comes first depends on the factor and the curvature
    "server_rate_too_low": "SLOW_PROGRESS",
}

# A trouble of the whole run although it is caused through clients: nobody of the group is a culprit.
OF_THE_WHOLE = frozenset({"group_left_behind"})

# Updates do not show who copied whom: the other one of the pair is neither a hit nor a false accusation.
PAIRED = {"duplicate": "DUPLICATE_UPDATE", "mimic": "DUPLICATE_UPDATE"}

# Families in which an alarm on a client blames the client. The others describe the state of the whole.
ACCUSING = frozenset({"client", "system"})

# What a user examines first. A backdoor is made of data, but what the server has to defend against is the update.
_KINDS_OF_FAMILIES = {
    "labels": ("label_noise", "label_flip", "missing_classes"),
    "inputs": ("input_noise", "input_scale", "channels_swapped"),
    "update": (
        *("stale_update", "free_rider", "duplicate", "sign_flip", "scaling", "gaussian", "little_is_enough"),
        *("inner_product", "wrong_sample_count", "dominant_client", "shape_mismatch", "dtype_mismatch"),
        *("optimal_little_is_enough", "optimal_inner_product", "mimic", "sybils"),
        *("backdoor", "distributed_backdoor", "edge_case_backdoor", "neurotoxin", "model_replacement"),
    ),
    "training": (
        *("wrong_learning_rate", "frozen_layer", "not_finite", "float16_underflow", "broken_batch_norm", "same_batch"),
        *("rank_collapse", "adapter_scale", "forgetting", "padding", "short_texts"),
    ),
    "system": (
        *("crash", "memory_hog", "disk_full", "drop_out", "straggler", "timeout", "lost_message"),
        *("corrupted_message", "clock_skew", "telemetry_lost"),
    ),
    "whole run": (
        *("exploding_initialisation", "vanishing_initialisation", "dead_units", "saturated_units", "overfitting"),
        *("client_drift", "server_rate_too_high", "server_rate_too_low", "zero_weight", "group_left_behind"),
    ),
}
FAMILY_OF = {kind: family for family, kinds in _KINDS_OF_FAMILIES.items() for kind in kinds}
BACKDOORS = frozenset({"backdoor", "distributed_backdoor", "edge_case_backdoor", "neurotoxin", "model_replacement"})
# What is done on purpose, as opposed to what happens to data: a client that lies about one has no reason to lie about
# the other.
ATTACKS = BACKDOORS | {
    *("free_rider", "duplicate", "sign_flip", "scaling", "gaussian", "little_is_enough", "inner_product"),
    *("optimal_little_is_enough", "optimal_inner_product", "mimic", "sybils"),
}
DATA_FAULTS = frozenset(kind for kind, family in FAMILY_OF.items() if family in ("labels", "inputs")) | {
    "group_left_behind"
}

# Other names for the same cause.
_CAUSES = {
    "FLIP": "LABEL_FLIP",
    "NOISE": "GAUSSIAN",
    "GAUSSIAN_NOISE": "GAUSSIAN",
    "STALE": "STALE_UPDATE",
    "DUPLICATE_UPDATE": "DUPLICATE",
    "NAN_SOURCE": "NOT_FINITE",
}


def accepted(kind: str, issue: str) -> frozenset[str]:
    """Return the codes that answer this fault."""
    return frozenset({issue.upper(), *([ALSO[kind]] if kind in ALSO else [])})


def accuses(issue: str) -> bool:
    """Whether an alarm of this issue on a client blames the client. An unknown code does, which is stricter."""
    known = ISSUES_BY_CODE.get(issue)
    return known is None or known.family in ACCUSING


def cause_name(words: str) -> str:
    """Return a normalised name: «label noise», `label_noise` and `LABEL_NOISE` are one cause."""
    name = re.sub(r"[^A-Z0-9]+", "_", words.upper()).strip("_")
    return _CAUSES.get(name, name)


def nature_of(kind: str) -> str:
    """Return whether a fault is an attack, a fault of data, or neither."""
    return "attacks" if kind in ATTACKS else "data faults" if kind in DATA_FAULTS else "other faults"


def family_of_cause(cause: str) -> str | None:
    """Return the family of a named cause, by a fault's kind or by an issue; None if it belongs to none."""
    name = cause_name(cause)
    for kind, family in FAMILY_OF.items():
        if cause_name(kind) == name:
            return family
    for fault in FAULTS:
        kind = kind_of(fault.__name__)
        if name in {cause_name(code) for code in accepted(kind, fault.issue)} and fault.issue != "unusual_client":
            return FAMILY_OF.get(kind)
    known = ISSUES_BY_CODE.get(name)
    if known is None or known.family == "client":
        return None
    return "system" if known.family == "system" else "whole run"


def cause_is_right(cause: str, kind: str, issue: str) -> bool:
    """Whether the cause is the kind of the fault, or the issue that it is filed under; nothing else is accepted."""
    return cause_name(cause) in {cause_name(name) for name in (kind, *accepted(kind, issue))}
