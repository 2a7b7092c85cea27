# SPDX-License-Identifier: Apache-2.0
"""Conditions over telemetry, as a person says them: «accuracy drops by 3 points», «update.norm of c7 > 5 × its median».

They hold in a round or not, and say with numbers why: the same on a stored run and on one that is still running.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from fedvitals.diagnosis.issues.table import ISSUES_BY_CODE, SEVERITIES
from fedvitals.errors import ConfigError, unknown
from fedvitals.protocols import History
from fedvitals.records import Finding
from fedvitals.replay.debugger.clauses import AtRound, Clause, Compared, Found, Happened, Moved, NotFinite
from fedvitals.replay.debugger.quantities import ANY, Quantity, quantity_of

EXAMPLES = (
    "any NaN",
    "NaN in c7",
    "update.norm of c7 > 5 × its median",
    "update.norm of layer conv1 in c7 > 3",
    "accuracy < 0.5",
    "accuracy drops by 3 points",
    "loss rises by 20 %",
    "finding BYZANTINE of c7",
    "event client.failed",
    "round 12",
)

LONGEST = 500

_NODE = r"""(?:"[^"]+"|'[^']+'|[^\s<>=≤≥!"']+)"""
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?"
_WHAT = r"nans?\s+or\s+inf\w*|nans?|infs?|infinity|infinite|non-?finite"
_OF = rf"(?:\s+(?:in|of|at|from|by|about)\s+(?P<node>{_NODE}))?"
_NAMED = re.compile(
    rf"(?:the\s+)?(?P<name>[a-z_][\w.]*(?:\s+[a-z_]\w*)??)(?:\s+of(?:\s+the)?(?:\s+layer)?\s+(?P<layer>{_NODE})"
    rf"\s+(?:in|at|of)\s+(?P<inside>{_NODE})|\s+of\s+layer\s+(?P<alone>{_NODE})|\s+(?:of|in|at)\s+(?P<node>{_NODE}))?",
    re.IGNORECASE,
)
_OWNED = re.compile(rf"(?P<node>{_NODE})'s\s+(?P<name>[a-z_][\w. ]*)", re.IGNORECASE)
_ROUND = re.compile(
    r"(?:(?:at|in|after)\s+)?round\s*(?:number\s*)?(?P<sign>[<>]=?|==?|!=)?\s*(?P<number>\d+)", re.IGNORECASE
)
_NOT_FINITE = re.compile(
    rf"(?:any|a|an|some)?\s*(?P<what>{_WHAT})(?:\s+values?)?(?:\s+anywhere)?{_OF}",
    re.IGNORECASE,
)
_IS = re.compile(rf"(?P<left>.+?)\s+(?:is|becomes|==?)\s+(?:an?\s+)?(?P<what>{_WHAT})", re.IGNORECASE)
_FINDING = re.compile(
    rf"(?:(?:any|a|the)\s+)?(?:(?P<severity>{'|'.join(SEVERITIES)})\s+)?findings?"
    rf"(?:\s+(?!(?:in|of|at|from|by|about)\s)(?P<issue>[\w-]+(?:\s(?!(?:in|of|at|from|by|about)\s)[\w-]+)*))?{_OF}",
    re.IGNORECASE,
)
_EVENT = re.compile(rf"(?:(?:any|an|the)\s+)?event\s+(?P<name>[\w.-]+){_OF}", re.IGNORECASE)
_FAILURE = re.compile(rf"(?:(?:any|a)\s+)?failures?{_OF}", re.IGNORECASE)
_UP, _DOWN = r"rises?|grows?|increases?|climbs?|jumps?", r"drops?|falls?|decreases?|sinks?|shrinks?"
_MOVED = re.compile(
    rf"(?P<left>.+?)\s+(?:(?P<up>{_UP})|(?:{_DOWN}))\s+(?:by\s+)?(?:more\s+than\s+)?(?P<amount>{_NUMBER})\s*"
    r"(?P<unit>%|per\s?cent|percentage\s+points?|%-points?|points?|pp)?"
    r"(?:\s+(?:in|within|over)\s+(?P<rounds>\d+)\s+rounds?)?(?P<best>\s+(?:from|below|above|under|over)\s+its\s+best)?",
    re.IGNORECASE,
)
_SIGNS = {
    ">=": r">=|≥|=>|(?:is\s+)?at\s+least",
    "<=": r"<=|≤|=<|(?:is\s+)?at\s+most",
    "!=": r"!=|≠|<>|is\s+not",
    ">": r">|(?:is\s+|gets\s+|goes\s+|rises\s+)?(?:over|above|greater\s+than|more\s+than|larger\s+than)|exceeds",
    "<": r"<|(?:is\s+|gets\s+|goes\s+|falls\s+|drops\s+)?(?:under|below|less\s+than|smaller\s+than)",
    "=": r"==?|equals|is",
}
_ITS = r"its\s+(?:own\s+)?(?P<own>median|mean|average)|(?:the\s+)?(?:cohort|others?|peers?|clients?)(?:'s?|s)?\s+median"
_COMPARED = re.compile(
    r"(?P<left>.+?)\s*(?:" + "|".join(f"(?P<s{i}>{words})" for i, words in enumerate(_SIGNS.values())) + r")\s*"
    rf"(?:(?P<number>{_NUMBER})\s*(?P<percent>%|per\s?cent)?)?\s*(?:(?:×|x|\*|times|of)?\s*(?P<to>{_ITS}))?",
    re.IGNORECASE,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Condition:
    """One sentence, or several joined by «and», which must then hold in the same round."""

    clauses: tuple[Clause, ...]

    @property
    def text(self) -> str:
        """In a normal form, which `parse` takes again."""
        return " and ".join(map(str, self.clauses))

    def __str__(self) -> str:
        return self.text

    def holds(self, history: History, findings: Sequence[Finding], round_index: int) -> str | None:
        """None, or a sentence that says what was seen: «update.norm of c7 is 8.1, over 5 × its median 1.2»."""
        seen: list[str] = []
        for clause in self.clauses:
            said = clause.seen(history, findings, round_index)
            if said is None:
                return None
            seen.append(said)
        return "; ".join(seen)

    def check(self, history: History) -> None:
        """ConfigError where it names a node or layer that a finished run does not have: it could never hold."""
        for clause in self.clauses:
            clause.check(history)


def parse(text: str) -> Condition:
    """The condition that a sentence says; ConfigError, with examples, for what is none."""
    if not isinstance(text, str) or not text.strip(" «»."):
        raise ConfigError(f"A condition is a sentence, such as {_examples()}; got {text!r}.")
    if len(text) > LONGEST:
        raise ConfigError(f"A condition is one short sentence; got {len(text)} characters.")
    parts = re.split(r"\s+and\s+|\s*&&\s*", _plain(text), flags=re.IGNORECASE)
    return Condition(tuple(_clause(part, text) for part in parts))


def parse_quantity(text: str) -> Quantity:
    """A number by its name, «update.norm of c7»: what can be compared, and what can be watched."""
    said = _plain(text)
    owned = _OWNED.fullmatch(said)
    if owned is not None:
        return quantity_of(owned["name"], _node(owned["node"]))
    said = re.sub(r"\b(of|in|at)\s+(?:any|each|every)(?:\s+client)?\b", r"\1 *", said, flags=re.IGNORECASE)
    found = _NAMED.fullmatch(said)
    if found is None:
        raise ConfigError(f"'{text}' names no metric. Write its name, and whose: «update.norm of c7», «accuracy».")
    layer = found["layer"] or found["alone"]
    node = found["inside"] or found["node"]
    return quantity_of(found["name"], _node(node), None if layer is None else layer.strip("\"'"))


def _plain(text: str) -> str:
    return " ".join(text.replace("\N{RIGHT SINGLE QUOTATION MARK}", "'").split()).strip(" «».;")


def _node(said: str | None) -> str | None:
    if said is None:
        return None
    return ANY if said == "*" else said.strip("\"'")


def _clause(said: str, whole: str) -> Clause:
    found = _ROUND.fullmatch(said)
    if found is not None:
        after = said.lower().startswith("after")
        return AtRound((found["sign"] or (">" if after else "=")).replace("==", "="), int(found["number"]))
    for pattern, make in ((_NOT_FINITE, _not_finite), (_FINDING, _found), (_EVENT, _event), (_FAILURE, _event)):
        found = pattern.fullmatch(said)
        if found is not None:
            return make(found)
    for pattern, make in ((_IS, _is), (_MOVED, _moved), (_COMPARED, _compared)):
        found = pattern.fullmatch(said)
        if found is not None:
            return make(found)
    raise ConfigError(f"'{whole}' is no condition that is understood here. Examples: {_examples()}.")


def _not_finite(found: re.Match[str]) -> Clause:
    return NotFinite(_kind(found["what"]), _node(found["node"]))


def _is(found: re.Match[str]) -> Clause:
    return NotFinite(_kind(found["what"]), quantity=parse_quantity(found["left"]))


def _kind(said: str) -> str:
    said = said.lower()
    if " or " in said or said.startswith("non"):
        return "NaN or infinity"
    return "NaN" if said.startswith("nan") else "infinity"


def _found(found: re.Match[str]) -> Clause:
    issue = found["issue"]
    if issue is not None:
        issue = re.sub(r"[\s-]+", "_", issue).upper()
        if issue not in ISSUES_BY_CODE:
            raise ConfigError(unknown("issue", issue, ISSUES_BY_CODE))
    severity = found["severity"]
    return Found(issue, _node(found["node"]), None if severity is None else severity.lower())


def _event(found: re.Match[str]) -> Clause:
    return Happened(found.groupdict().get("name"), _node(found["node"]))


def _moved(found: re.Match[str]) -> Clause:
    quantity, amount = parse_quantity(found["left"]), _number(found["amount"])
    said = (found["unit"] or "").lower().replace(" ", "")
    unit = "" if not said else "%" if said in ("%", "percent") else "points"
    if unit == "points" and not quantity.is_share:
        raise ConfigError(
            f"Points are of a share, as accuracy is one; '{quantity}' is none: give a number, or per cent."
        )
    if not unit and amount >= 1 and quantity.name.endswith("accuracy"):
        raise ConfigError(f"'{quantity}' lies between 0 and 1: write {amount:g} points, or {amount / 100:g}.")
    if amount <= 0:
        raise ConfigError(f"'{found[0]}': by how much is a number over 0; got {amount:g}.")
    rounds = None if found["rounds"] is None else int(found["rounds"])
    return Moved(quantity, bool(found["up"]), amount, unit, rounds, bool(found["best"]))


def _compared(found: re.Match[str]) -> Clause:
    quantity = parse_quantity(found["left"])
    sign = next(sign for i, sign in enumerate(_SIGNS) if found[f"s{i}"] is not None)
    if found["number"] is None and found["to"] is None:
        raise ConfigError(f"'{found[0]}' compares with nothing: give a number, or «5 × its median».")
    number = 1.0 if found["number"] is None else _number(found["number"])
    to = ""
    if found["to"] is not None:
        own = (found["own"] or "").lower().replace("average", "mean")
        to = f"its {own}" if own else "the cohort's median"
    if found["percent"]:
        if not to and not quantity.is_share:
            raise ConfigError(f"'{quantity}' is no share: per cent of what? As in «{quantity} > 150 % of its median».")
        number /= 100
    elif not to and abs(number) > 1 and quantity.name.endswith("accuracy"):
        raise ConfigError(f"'{quantity}' lies between 0 and 1: write {number:g} %, or {number / 100:g}.")
    return Compared(quantity, sign, number, to)


def _number(said: str) -> float:
    if not math.isfinite(float(said)):
        raise ConfigError(f"{said} is more than a number can be. For what is not finite, say «loss is infinite».")
    return float(said)


def _examples() -> str:
    return ", ".join(f"«{example}»" for example in EXAMPLES)
