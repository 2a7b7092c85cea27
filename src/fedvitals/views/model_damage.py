# SPDX-License-Identifier: Apache-2.0
"""Finds the case that ruins the global model, since when, and how to say so: «The model was lost in round 6: NaN from
c5».
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedvitals.diagnosis.cases import LOST, Case
from fedvitals.diagnosis.evidence.attendance import SERVER
from fedvitals.views.cases import culprits, since_of

# Issue of a client or group → what it sent.
ORIGINS = {
    "NAN_UPDATE": "NaN from {who}",
    "NAN_GRADIENT": "NaN from {who}",
    "NAN_WEIGHTS": "NaN from {who}",
    "BYZANTINE": "manipulated updates{how} from {who}",
    "WRONG_LEARNING_RATE": "the learning rate of {who}",
    "WEIGHT_EXPLOSION": "exploding weights of {who}",
    "EXPLODING_GRADIENT": "exploding gradients of {who}",
    "SHAPE_OR_DTYPE_MISMATCH": "updates from {who} that do not fit the model",
}


@dataclass(frozen=True, slots=True)
class Damage:
    """What a case does to the global model."""

    lost: bool  # its weights are NaN or infinite; otherwise it diverges
    since: int | None  # the first round in which that was visible

    def __str__(self) -> str:
        when = "" if self.since is None else f" {'in' if self.lost else 'since'} round {self.since}"
        return f"The model {'was lost' if self.lost else 'diverges'}{when}"


def damage_by(case: Case, cases: Sequence[Case]) -> Damage | None:
    """Return how a client's or group's case ruins the model now, by the critical cases of the run that follow from it.

    Returns None for a case of the run itself, and if the model has recovered.
    """
    if not culprits(case) or _of_run(case):
        return None
    shown = [c for c in consequences(case, cases) if _of_run(c) and c.severity == "critical" and c.issue in LOST]
    if not any(c.still_there for c in shown):
        return None
    lost = [c for c in shown if c.issue == "NAN_WEIGHTS"]
    return Damage(bool(lost), min((since for c in lost or shown if (since := since_of(c)) is not None), default=None))


def consequences(case: Case, cases: Sequence[Case]) -> list[Case]:
    """Return the cases that follow from a case, directly or through others."""
    direct = [other for other in cases if other.cause is not None and other.cause == case.key]
    return [each for other in direct for each in (other, *consequences(other, cases))]


def _of_run(case: Case) -> bool:
    return case.node in (None, SERVER) and case.group is None
