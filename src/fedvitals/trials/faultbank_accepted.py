# SPDX-License-Identifier: Apache-2.0
"""Which issue answers which fault. Kept tight: every code that is added here makes the bank easier for everybody."""

from __future__ import annotations

import re

from fedvitals.diagnosis.issues import ISSUES_BY_CODE

# A fault whose kind is not here (a bank from outside may have its own) is answered by the issue in its truth alone.
ACCEPTED: dict[str, frozenset[str]] = {
    kind: frozenset(codes.split())
    for kind, codes in {
        "label_noise": "LABEL_NOISE",
        "label_flip": "LABEL_FLIP",
        "missing_classes": "MISSING_CLASSES",
        "input_noise": "INPUT_NOISE",
        "input_scale": "INPUT_SCALE",
        "group_left_behind": "GROUP_LEFT_BEHIND",
        "dominant_client": "DOMINANT_CLIENT",
        "wrong_learning_rate": "WRONG_LEARNING_RATE",
        "frozen_layer": "FROZEN_LAYER",
        # The same trouble seen on the way out of the client or, with its step, on the way in.
        "not_finite": "NAN_GRADIENT NAN_UPDATE",
        "broken_batch_norm": "BATCH_NORM_STATISTICS",
        "crash": "CRASH",
        "memory_hog": "OUT_OF_MEMORY",
        "disk_full": "DISK_FULL",
        # What is seen, and what it comes from.
        "exploding_initialisation": "EXPLODING_GRADIENT POOR_INITIALISATION",
        "vanishing_initialisation": "VANISHING_GRADIENT POOR_INITIALISATION",
        "dead_units": "DEAD_UNITS",
        "saturated_units": "SATURATED_UNITS",
        "stale_update": "STALE_UPDATE",
        "free_rider": "FREE_RIDER",
        "duplicate": "DUPLICATE_UPDATE",
        "sign_flip": "BYZANTINE",
        "scaling": "BYZANTINE",
        "gaussian": "BYZANTINE",
        "little_is_enough": "BYZANTINE",
        "inner_product": "BYZANTINE",
        "wrong_sample_count": "WRONG_SAMPLE_COUNT",
        "zero_weight": "ZERO_TOTAL_WEIGHT",
        "shape_mismatch": "SHAPE_OR_DTYPE_MISMATCH",
        "dtype_mismatch": "SHAPE_OR_DTYPE_MISMATCH",
        "drop_out": "DROP_OUT",
        "straggler": "STRAGGLER",
        "timeout": "TIMEOUT",
        "lost_message": "COMMUNICATION_FAILURE",
        "corrupted_message": "COMMUNICATION_FAILURE",
        "clock_skew": "CLOCK_SKEW",
        "telemetry_lost": "TELEMETRY_LOST",
        "overfitting": "OVERFITTING",
        "client_drift": "CLIENT_DRIFT",
        # Which of the two comes first depends on the factor and the curvature.
        "server_rate_too_high": "DIVERGENCE OSCILLATION",
        "server_rate_too_low": "PLATEAU SLOW_PROGRESS",
    }.items()
}

# One trouble of the whole run although it is made through clients: nobody of the group is a culprit.
OF_THE_WHOLE = frozenset({"group_left_behind"})

# Who copied whom cannot be seen from updates: the other one of the pair is neither a hit nor a false accusation.
PAIRED = {"duplicate": "DUPLICATE_UPDATE"}

# What an alarm on a client says about the client itself. The other families describe the state that the whole is in.
ACCUSING = frozenset({"client", "system"})

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
    return ACCEPTED.get(kind, frozenset({issue.upper()}))


def accuses(issue: str) -> bool:
    """Whether an alarm of this issue on a client blames the client. An unknown code does: the harder reading."""
    known = ISSUES_BY_CODE.get(issue)
    return known is None or known.family in ACCUSING


def cause_name(words: str) -> str:
    """«label noise», `label_noise` and `LABEL_NOISE` are one cause."""
    name = re.sub(r"[^A-Z0-9]+", "_", words.upper()).strip("_")
    return _CAUSES.get(name, name)


def cause_is_right(cause: str, kind: str, issue: str) -> bool:
    """The kind of the fault, or the issue that it is filed under; more than that is not accepted."""
    return cause_name(cause) in {cause_name(kind), cause_name(issue)} | {
        cause_name(code) for code in ACCEPTED.get(kind, ())
    }
