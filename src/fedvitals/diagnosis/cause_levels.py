# SPDX-License-Identifier: Apache-2.0
"""What is known of a faulty client on three levels: that it is faulty, the family of the fault, and the exact cause.

Each level has its own probability. Exact relations, settings and data name causes reliably. The learnt evidence is far
more often right that a client is faulty than about the cause: of 176 accusations by it alone in `tune-wide`, with
honest and with lying clients, 31 % had the right cause and 38 % the right family; of those with a certain cause, 41 and
46 %.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fedvitals.diagnosis.evidence.fault_kinds import FAMILY_OF

LEARNT = frozenset({"telemetry", "server", "flip"})  # views
CAUSE_RIGHT, FAMILY_RIGHT = 0.41, 0.46  # when the learnt evidence is certain of the cause


def cause_levels(probability: float, causes: Sequence[Sequence[Any]], views: Collection[str]) -> Mapping[str, Any]:
    """Return {"wrong": p, "family": [name, p], "cause": [kind, p]} for a fault of this probability and these chances
    of its causes, [kind, chance] each; `views`: what accused the client.
    """
    learnt = bool(LEARNT & {*views})
    chances = [(kind, float(chance)) for kind, chance in causes]
    families: dict[str, float] = {}
    for kind, chance in chances:
        family = FAMILY_OF.get(kind, "client")
        families[family] = families.get(family, 0.0) + chance
    kind, chance = chances[0]
    family = FAMILY_OF.get(kind, "client")
    in_family, exact = min(1.0, families[family]), min(1.0, chance)
    if learnt:
        in_family, exact = FAMILY_RIGHT * in_family, CAUSE_RIGHT * exact
    return {
        "wrong": round(probability, 3),
        "family": [family, round(probability * in_family, 3)],
        "cause": [kind, round(probability * exact, 3)],
    }
