# SPDX-License-Identifier: Apache-2.0
"""What is known of a faulty client on three levels, each with its probability, in words as precise as is justified.

The probabilities are those of `diagnosis.cause_levels`. The exact cause is only named if its probability is above 50 %;
else the family, else the client's data or the client itself, with the two most probable families.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedvitals.certainty import certainty
from fedvitals.diagnosis.cases import Case
from fedvitals.diagnosis.evidence.fault_kinds import FAMILY_OF, WORDS

LIKELY = 0.5  # probability from which a family or a cause is named
# Family → its name in a sentence, and whether that is a plural.
FAMILIES = {"labels": ("labels", True), "inputs": ("inputs", True), "update": ("updates", True)}
FAMILIES |= {"training": ("training", False)}
DATA = frozenset({"labels", "inputs"})


@dataclass(frozen=True, slots=True)
class CauseLevel:
    """One of the three levels: its statement, and the probability of it."""

    words: str
    probability: float


def levels_of(case: Case) -> tuple[CauseLevel, ...]:
    """Return «something is wrong», the family and the exact cause of a case's newest finding; empty if it has none."""
    levels = case.newest.evidence.get("levels")
    if not isinstance(levels, Mapping):
        return ()
    wrong, family, cause = levels.get("wrong"), named_chance(levels.get("family")), named_chance(levels.get("cause"))
    if not isinstance(wrong, int | float) or family is None or cause is None:
        return ()
    return (
        CauseLevel("something is wrong", float(wrong)),
        CauseLevel(f"with its {FAMILIES.get(family[0], (family[0], False))[0]}", family[1]),
        CauseLevel(WORDS.get(cause[0], cause[0]), cause[1]),
    )


def levels_in_words(case: Case) -> str:
    """Return the levels in one line: «something is wrong 95 %, with its labels 44 %, random wrong labels 39 %»."""
    return ", ".join(f"{level.words} {certainty(level.probability)}" for level in levels_of(case))


def what_looks_wrong(case: Case, who: str | None = None, *, several: bool = False) -> str:
    """Return what looks wrong with a client if its exact cause is below 50 %, else an empty text.

    `who`: the subject, as in «c7's labels look wrong»; None: «its labels look wrong». `several`: it names more than
    one.
    """
    levels = levels_of(case)
    if not levels or levels[2].probability >= LIKELY:
        return ""
    first, second = (*_families(case), None, None)[:2]
    if first is None:
        return ""
    name, plural = FAMILIES.get(first, (first, False))
    if levels[1].probability >= LIKELY:
        return f"{_of(name, who, several=several)} {'look' if plural else 'looks'} wrong"
    likelier = f"({name} likelier than {FAMILIES.get(second, (second, False))[0]})" if second else f"(likeliest {name})"
    if second is not None and {first, second} <= DATA:
        return f"{_of('data', who, several=several)} looks wrong {likelier}"
    return f"something is wrong {likelier}" if who is None else f"something is wrong with {who} {likelier}"


def _of(name: str, who: str | None, *, several: bool) -> str:
    if who is None:
        return f"its {name}"
    return f"the {name} of {who}" if several else f"{who}'s {name}"


def _families(case: Case) -> list[str]:
    """Return the families of the possible causes, the most probable first."""
    chances: dict[str, float] = {}
    causes = case.newest.evidence.get("causes")
    for kind, chance in filter(None, map(named_chance, causes if isinstance(causes, list | tuple) else ())):
        family = FAMILY_OF.get(kind)
        if family is not None:
            chances[family] = chances.get(family, 0.0) + chance
    return sorted((family for family in chances if chances[family] > 0), key=lambda family: -chances[family])


def named_chance(pair: Any) -> tuple[str, float] | None:
    """Return a name with its probability; None if a third-party detector has stored something else."""
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        return None
    name, chance = pair
    return (name, float(chance)) if isinstance(name, str) and isinstance(chance, int | float) else None
