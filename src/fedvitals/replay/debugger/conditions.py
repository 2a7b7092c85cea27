# SPDX-License-Identifier: Apache-2.0
"""Conditions over telemetry as sentences: «accuracy drops by 3 points», «update.norm of c7 > 5 × its median».

A condition holds in a round or not, and says with numbers why; the same on a stored and on a running run.
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
from fedvitals.replay.debugger.clauses import (
    ChangeClause,
    Clause,
    ComparisonClause,
    EventClause,
    FindingClause,
    NonfiniteClause,
    RoundClause,
)
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

LONGEST_SENTENCE = 500

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
class RoundCondition:
    """One clause, or several joined by «and», which must then hold in the same round."""

    clauses: tuple[Clause, ...]

    @property
    def text(self) -> str:
        """Return the normal form, which `parse` accepts again."""
        return " and ".join(map(str, self.clauses))

    def __str__(self) -> str:
        return self.text

    def holds(self, history: History, findings: Sequence[Finding], round_index: int) -> str | None:
        """Return what was seen, as a sentence («update.norm of c7 is 8.1, over 5 × its median 1.2»); None if it does
        not hold.
        """
        seen: list[str] = []
        for clause in self.clauses:
            words = clause.seen(history, findings, round_index)
            if words is None:
                return None
            seen.append(words)
        return "; ".join(seen)

    def check(self, history: History) -> None:
        """Raise ConfigError if it names a node or layer that a finished run does not have, so that it could never
        hold.
        """
        for clause in self.clauses:
            clause.check(history)


def parse(text: str) -> RoundCondition:
    """Return the condition that a sentence states. Raises ConfigError, with examples, if it is not understood."""
    if not isinstance(text, str) or not text.strip(" «»."):
        raise ConfigError(f"A condition is a sentence, such as {_examples()}; got {text!r}.")
    if len(text) > LONGEST_SENTENCE:
        raise ConfigError(f"A condition is one short sentence; got {len(text)} characters.")
    parts = re.split(r"\s+and\s+|\s*&&\s*", _normalised(text), flags=re.IGNORECASE)
    return RoundCondition(tuple(_clause(part, text) for part in parts))


def parse_quantity(text: str) -> Quantity:
    """Return the quantity that a text names, such as «update.norm of c7»."""
    sentence = _normalised(text)
    owned = _OWNED.fullmatch(sentence)
    if owned is not None:
        return quantity_of(owned["name"], _node_name(owned["node"]))
    sentence = re.sub(r"\b(of|in|at)\s+(?:any|each|every)(?:\s+client)?\b", r"\1 *", sentence, flags=re.IGNORECASE)
    match = _NAMED.fullmatch(sentence)
    if match is None:
        raise ConfigError(f"'{text}' names no metric. Write its name, and whose: «update.norm of c7», «accuracy».")
    layer = match["layer"] or match["alone"]
    node = match["inside"] or match["node"]
    return quantity_of(match["name"], _node_name(node), None if layer is None else layer.strip("\"'"))


def _normalised(text: str) -> str:
    return " ".join(text.replace("\N{RIGHT SINGLE QUOTATION MARK}", "'").split()).strip(" «».;")


def _node_name(word: str | None) -> str | None:
    if word is None:
        return None
    return ANY if word == "*" else word.strip("\"'")


def _clause(sentence: str, whole: str) -> Clause:
    match = _ROUND.fullmatch(sentence)
    if match is not None:
        after = sentence.lower().startswith("after")
        return RoundClause((match["sign"] or (">" if after else "=")).replace("==", "="), int(match["number"]))
    for pattern, make in (
        (_NOT_FINITE, lambda match: NonfiniteClause(_nonfinite_kind(match["what"]), _node_name(match["node"]))),
        (_FINDING, _finding_clause),
        (_EVENT, _event_clause),
        (_FAILURE, _event_clause),
        (_IS, lambda match: NonfiniteClause(_nonfinite_kind(match["what"]), quantity=parse_quantity(match["left"]))),
        (_MOVED, _change_clause),
        (_COMPARED, _comparison_clause),
    ):
        match = pattern.fullmatch(sentence)
        if match is not None:
            return make(match)
    raise ConfigError(f"'{whole}' is not a condition that is understood here. Examples: {_examples()}.")


def _nonfinite_kind(word: str) -> str:
    word = word.lower()
    if " or " in word or word.startswith("non"):
        return "NaN or infinity"
    return "NaN" if word.startswith("nan") else "infinity"


def _finding_clause(match: re.Match[str]) -> Clause:
    issue = match["issue"]
    if issue is not None:
        issue = re.sub(r"[\s-]+", "_", issue).upper()
        if issue not in ISSUES_BY_CODE:
            raise ConfigError(unknown("issue", issue, ISSUES_BY_CODE))
    severity = match["severity"]
    return FindingClause(issue, _node_name(match["node"]), None if severity is None else severity.lower())


def _event_clause(match: re.Match[str]) -> Clause:
    return EventClause(match.groupdict().get("name"), _node_name(match["node"]))


def _change_clause(match: re.Match[str]) -> Clause:
    quantity, amount = parse_quantity(match["left"]), _number(match["amount"])
    unit_word = (match["unit"] or "").lower().replace(" ", "")
    unit = "" if not unit_word else "%" if unit_word in ("%", "percent") else "points"
    if unit == "points" and not quantity.is_share:
        raise ConfigError(
            f"Points are of a share, as accuracy is one; '{quantity}' is none: give a number, or per cent."
        )
    if not unit and amount >= 1 and quantity.name.endswith("accuracy"):
        raise ConfigError(f"'{quantity}' lies between 0 and 1: write {amount:g} points, or {amount / 100:g}.")
    if amount <= 0:
        raise ConfigError(f"'{match[0]}': by how much is a number over 0; got {amount:g}.")
    rounds = None if match["rounds"] is None else int(match["rounds"])
    return ChangeClause(quantity, bool(match["up"]), amount, unit, rounds, bool(match["best"]))


def _comparison_clause(match: re.Match[str]) -> Clause:
    quantity = parse_quantity(match["left"])
    sign = next(sign for i, sign in enumerate(_SIGNS) if match[f"s{i}"] is not None)
    if match["number"] is None and match["to"] is None:
        raise ConfigError(f"'{match[0]}' compares with nothing: give a number, or «5 × its median».")
    number = 1.0 if match["number"] is None else _number(match["number"])
    to = ""
    if match["to"] is not None:
        own = (match["own"] or "").lower().replace("average", "mean")
        to = f"its {own}" if own else "the others' median"
    if match["percent"]:
        if not to and not quantity.is_share:
            raise ConfigError(f"'{quantity}' is no share: per cent of what? As in «{quantity} > 150 % of its median».")
        number /= 100
    elif not to and abs(number) > 1 and quantity.name.endswith("accuracy"):
        raise ConfigError(f"'{quantity}' lies between 0 and 1: write {number:g} %, or {number / 100:g}.")
    return ComparisonClause(quantity, sign, number, to)


def _number(text: str) -> float:
    if not math.isfinite(float(text)):
        raise ConfigError(f"{text} is more than a number can be. For what is not finite, say «loss is infinite».")
    return float(text)


def _examples() -> str:
    return ", ".join(f"«{example}»" for example in EXAMPLES)
