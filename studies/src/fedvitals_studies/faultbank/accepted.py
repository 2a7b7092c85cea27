# SPDX-License-Identifier: Apache-2.0
"""Which issue answers which fault. Kept tight: every code that is added here makes the bank easier for everybody."""

from __future__ import annotations

import re

from fedvitals.diagnosis.issues.table import ISSUES_BY_CODE

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


def cause_is_right(cause: str, kind: str, issue: str) -> bool:
    """The kind of the fault, or the issue that it is filed under; more than that is not accepted."""
    return cause_name(cause) in {cause_name(name) for name in (kind, *accepted(kind, issue))}
