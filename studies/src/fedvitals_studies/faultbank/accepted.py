# SPDX-License-Identifier: Apache-2.0
"""Which issue answers which fault. Kept tight: every code that is added here makes the bank easier for everybody."""

from __future__ import annotations

import re

from fedvitals.diagnosis.issues.table import ISSUES_BY_CODE
from fedvitals.lab.description import kind_of
from fedvitals.lab.faults.table import FAULTS

# By default a fault is answered by the issue in its truth alone. These have a second answer, and no more than that.
ALSO: dict[str, str] = {
    "not_finite": "NAN_UPDATE",  # the same trouble, seen on the way out of the client
    "exploding_initialisation": "POOR_INITIALISATION",  # what is seen, and what it comes from
    "vanishing_initialisation": "POOR_INITIALISATION",
    "server_rate_too_high": "OSCILLATION",  # which of the two comes first depends on the factor and the curvature
    "server_rate_too_low": "SLOW_PROGRESS",
}

# One trouble of the whole run although it is made through clients: nobody of the group is a culprit.
OF_THE_WHOLE = frozenset({"group_left_behind"})

# Who copied whom cannot be seen from updates: the other one of the pair is neither a hit nor a false accusation.
PAIRED = {"duplicate": "DUPLICATE_UPDATE", "mimic": "DUPLICATE_UPDATE"}

# What an alarm on a client says about the client itself. The other families describe the state that the whole is in.
ACCUSING = frozenset({"client", "system"})

# What a user looks into first. A backdoor is made of data, but what the server has to defend against is the update.
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
# What somebody does on purpose, and what happens to somebody's data: who lies about the one has no reason to lie about
# the other.
ATTACKS = BACKDOORS | {
    *("free_rider", "duplicate", "sign_flip", "scaling", "gaussian", "little_is_enough", "inner_product"),
    *("optimal_little_is_enough", "optimal_inner_product", "mimic", "sybils"),
}
DATA_FAULTS = frozenset(kind for kind, family in FAMILY_OF.items() if family in ("labels", "inputs")) | {
    "group_left_behind"
}

# Other words for the same cause.
_CAUSES = {
    "FLIP": "LABEL_FLIP",
    "NOISE": "GAUSSIAN",
    "GAUSSIAN_NOISE": "GAUSSIAN",
    "STALE": "STALE_UPDATE",
    "DUPLICATE_UPDATE": "DUPLICATE",
    "NAN_SOURCE": "NOT_FINITE",
}


def accepted(kind: str, issue: str) -> frozenset[str]:
    """The codes that answer this fault."""
    return frozenset({issue.upper(), *([ALSO[kind]] if kind in ALSO else [])})


def accuses(issue: str) -> bool:
    """Whether an alarm of this issue on a client blames the client. An unknown code does: the harder reading."""
    known = ISSUES_BY_CODE.get(issue)
    return known is None or known.family in ACCUSING


def cause_name(words: str) -> str:
    """«label noise», `label_noise` and `LABEL_NOISE` are one cause."""
    name = re.sub(r"[^A-Z0-9]+", "_", words.upper()).strip("_")
    return _CAUSES.get(name, name)


def nature_of(kind: str) -> str:
    """Return whether a fault is an attack, a fault of data, or neither."""
    return "attacks" if kind in ATTACKS else "data faults" if kind in DATA_FAULTS else "other faults"


def family_of_cause(cause: str) -> str | None:
    """Return the family of a cause that was named, by a fault's kind or by an issue; None: it belongs to none."""
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
    """The kind of the fault, or the issue that it is filed under; more than that is not accepted."""
    return cause_name(cause) in {cause_name(name) for name in (kind, *accepted(kind, issue))}
