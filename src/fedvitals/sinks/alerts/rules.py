# SPDX-License-Identifier: Apache-2.0
"""Parses alert rules such as «update.norm > 5 × own median for 3 rounds» and «finding NAN_UPDATE».

    METRIC > LIMIT                      accuracy < 0.8, memory.resident > 8 GB, time.round > 30 s
    METRIC > FACTOR × own median        against the node's own earlier rounds
    METRIC > FACTOR × cohort median     against all nodes in the same round
    METRIC drops by STEP [within N rounds]      or: rises by
    finding [ISSUE] [in FAMILY] [severity >= warning] [confidence >= 0.9]

each optionally followed by «for N rounds» if it must last. Anything else is refused, with a suggestion of what was
probably meant.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NoReturn

from fedvitals.catalog import CATALOG, unit_of
from fedvitals.errors import ConfigError, unknown

SEVERITIES = ("note", "warning", "critical")  # the worst last
MOST_ROUNDS = 1000  # the largest number in «for» and «within»: keeps memory small
WINDOW = 50  # earlier rounds behind «own median»
NAME_LENGTH = 200

UNITS: Mapping[str, Mapping[str, float]] = {
    "bytes": {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30},
    "seconds": {"s": 1, "ms": 1e-3, "min": 60, "h": 3600},
    "share": {"%": 0.01},
}
"""How a limit may be written, by the metric's unit in the catalogue."""

_COMPARISONS = {">": ">", ">=": ">=", "<": "<", "<=": "<=", "≥": ">=", "≤": "<="}
_TIMES = ("x", "×", "*")
_TOKEN = re.compile(
    r"\s*(?:(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)|(?P<mark>>=|<=|[<>≥≤×*%])|(?P<word>[^\W\d][\w./:-]*))"
)
_FORMS = (
    "'accuracy < 0.8 for 5 rounds', 'memory.resident > 8 GB', 'update.norm > 5 × own median for 3 rounds', "
    "'update.norm > 4 × cohort median', 'accuracy drops by 0.03' or 'finding NAN_UPDATE'"
)


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on one metric of one node. By `against`, `number` is the limit, the factor or the step."""

    metric: str
    comparison: str  # «>», «>=», «<», «<=»; for a change «drops» or «rises»
    number: float
    unit: str = ""  # as written; "" means the catalogue's
    against: str = "limit"  # «limit», «own», «cohort», «before»
    within: int = 1  # rounds back over which a change is measured
    rounds: int = 1  # in a row, of those that the node took part in

    @property
    def limit(self) -> float:
        """The number, in the metric's own unit."""
        return self.number * UNITS.get(unit_of(self.metric), {}).get(self.unit, 1.0)

    def __str__(self) -> str:
        number = _number_text(self.number)
        if self.against == "limit":
            text = f"{self.metric} {self.comparison} {number}{_spaced(self.unit)}"
        elif self.against == "before":
            text = f"{self.metric} {self.comparison} by {number}{_spaced(self.unit)}"
            text += f" within {self.within} rounds" if self.within > 1 else ""
        else:
            text = f"{self.metric} {self.comparison} {number} × {self.against} median"
        return text + _lasting(self.rounds)


@dataclass(frozen=True, slots=True)
class FindingCondition:
    """A condition on findings: an issue, a family, a minimum severity or confidence. Empty: all findings."""

    issue: str | None = None
    family: str | None = None
    severity: str | None = None
    confidence: float = 0.0
    rounds: int = 1  # in which the case was seen

    def __str__(self) -> str:
        text = "finding"
        text += f" {self.issue}" if self.issue else ""
        text += f" in {self.family}" if self.family else ""
        text += f" severity >= {self.severity}" if self.severity else ""
        text += f" confidence >= {_number_text(self.confidence)}" if self.confidence else ""
        return text + _lasting(self.rounds)


@dataclass(frozen=True, slots=True)
class Gap:
    """The minimum distance between two alerts of one rule at one place."""

    number: float
    unit: str = "rounds"  # or «s», «min», «h»

    @property
    def seconds(self) -> float | None:
        """The gap in seconds; None if it is counted in rounds."""
        return None if self.unit == "rounds" else self.number * UNITS["seconds"][self.unit]

    def __str__(self) -> str:
        return f"{_number_text(self.number)} {self.unit}"


@dataclass(frozen=True, slots=True)
class Rule:
    """A condition, the severity of its alerts, and the channels that receive them."""

    when: Condition | FindingCondition
    name: str = ""  # for people; by default the rule's text
    severity: str = ""  # by default the finding's own, for a metric «warning»
    node: str | None = None  # a name or a pattern like «c*»; «whole» is the federation; None: all
    gap: Gap = Gap(5)
    resolved: bool = True  # whether its end is reported
    channels: tuple[str, ...] = ()  # by name; none: all

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or str(self.when))


def rule(text: str, **settings: Any) -> Rule:
    """Parse a rule from text.

    Args:
        text: Such as «accuracy < 0.8 for 5 rounds» or «finding in client» (docs/alerts.md).
        settings: `name`, `severity`, `node`, `gap` («10 min», «5 rounds»), `resolved`, `channels`.

    Returns:
        The rule, for `fv.Alerts(rules=[...])`.

    Raises:
        ConfigError: The text is not a rule, with what was expected instead.
    """
    known = {field.name for field in fields(Rule)} - {"when"}
    for name in settings:
        if name not in known:
            raise ConfigError(unknown("setting of an alert rule", name, {"when", *known}))
    new_rule = replace(
        Rule(parse(text)), **{name: _setting(name, value) for name, value in settings.items() if value != ""}
    )
    if new_rule.severity and new_rule.severity not in SEVERITIES:
        raise ConfigError(unknown("severity", new_rule.severity, SEVERITIES))
    return new_rule


def _setting(name: str, value: Any) -> Any:
    match name, value:
        case "gap", str():
            return gap_of(value)
        case "gap", Gap():
            return value
        case "channels", [*names] if all(isinstance(name_, str) for name_ in names):
            return tuple(names)
        case "resolved", bool():
            return value
        case "name" | "severity" | "node", str() if value.isprintable() and len(value) <= NAME_LENGTH:
            return value
        case "node", None:
            return value
    wanted = {"gap": "a text like '10 min' or '5 rounds'", "channels": "a list of names", "resolved": "true or false"}
    kind = wanted.get(name, f"one line of at most {NAME_LENGTH} characters")
    raise ConfigError(f"The setting '{name}' of an alert rule is {kind}, got {value!r}.")


def gap_of(text: str) -> Gap:
    """Parse a gap such as «5 rounds», «30 s», «10 min» or «1 h»."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(rounds?|s|min|h)\s*", text)
    if not match:
        raise ConfigError(f"A gap is written '5 rounds', '30 s', '10 min' or '1 h', got '{text}'.")
    return Gap(float(match[1]), "rounds" if match[2].startswith("round") else match[2])


def parse(text: str) -> Condition | FindingCondition:
    """Parse a rule's text. The ConfigError says what is wrong and how to write it."""
    if not isinstance(text, str):
        raise ConfigError(f"An alert rule is a text, got {type(text).__name__}. Write for example {_FORMS}.")
    line = _Line(text)
    condition: Condition | FindingCondition = _finding(line) if line.peek() == "finding" else _metric(line)
    condition = replace(condition, rounds=_rounds(line, "for"))
    line.end()
    return condition


class _Line:
    """The words of a rule, consumed one after the other."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._words: list[str] = []
        place = 0
        if len(text) > NAME_LENGTH:
            raise ConfigError(f"An alert rule has at most {NAME_LENGTH} characters, got {len(text)}.")
        while text[place:].strip():
            match = _TOKEN.match(text, place)
            if not match:
                self.refuse(f"'{text[place:].strip()[:20]}' is neither a word, a number nor a comparison")
            self._words.append(match[0].strip())
            place = match.end()
        self._next = 0

    def peek(self) -> str:
        return self._words[self._next] if self._next < len(self._words) else ""

    def take(self) -> str:
        word = self.peek()
        self._next += 1
        return word

    def expect(self, *wanted: str) -> str:
        word = self.take()
        if word not in wanted:
            got = f"'{word}'" if word else "the end"
            self.refuse(f"{' or '.join(map(repr, wanted))} was expected, got {got}")
        return word

    def number(self, what: str) -> float:
        word = self.take()
        try:
            value = float(word)
        except ValueError:
            self.refuse(f"{what} is a number, got '{word}'" if word else f"{what} is missing")
        if not math.isfinite(value):
            self.refuse(f"{what} is a finite number, got '{word}'")
        return value

    def end(self) -> None:
        if self.peek():
            self.refuse(f"nothing more was expected from '{self.peek()}' on")

    def refuse(self, why: str) -> NoReturn:
        raise ConfigError(
            f"The alert rule '{self.text[:NAME_LENGTH]}' cannot be read: {why}. Write for example {_FORMS}."
        )


def _metric(line: _Line) -> Condition:
    metric = line.take()
    if not re.fullmatch(r"[^\W\d][\w./:-]*", metric):
        line.refuse("it begins with the name of a metric, or with 'finding'")
    _check_metric(metric)
    word = line.take()
    if word in ("drops", "rises"):
        line.expect("by")
        number = line.number("the step")
        if number <= 0:
            line.refuse(f"a step is above 0, got {_number_text(number)}")
        unit = _unit(line, metric, number)
        return Condition(metric, word, number, unit, "before", _rounds(line, "within"))
    if word not in _COMPARISONS:
        line.refuse(f"after the metric comes >, >=, <, <=, 'drops' or 'rises', got '{word}'" if word else
                    "after the metric comes a comparison")  # fmt: skip
    number = line.number("what comes after the comparison")
    if line.peek() in _TIMES:
        line.take()
        if number <= 0:
            line.refuse(f"a factor is above 0, got {_number_text(number)}")
        whose = line.expect("own", "cohort")
        line.expect("median")
        return Condition(metric, _COMPARISONS[word], number, "", whose)
    unit = _unit(line, metric, number)
    return Condition(metric, _COMPARISONS[word], number, unit)


def _check_metric(metric: str) -> None:
    if metric in CATALOG or metric.startswith("user."):
        return
    close = difflib.get_close_matches(metric, CATALOG, n=3)
    hint = f"Did you mean {' or '.join(repr(name) for name in close)}? " if close else ""
    own = f"one that you log yourself is 'user.{metric}'"
    raise ConfigError(f"Unknown metric '{metric}'. {hint}All are in docs/metrics.md; {own}.")


def _unit(line: _Line, metric: str, number: float) -> str:
    """Return the unit after a number, "" if there is none; an implausible unit is refused."""
    measured = unit_of(metric)
    allowed = UNITS.get(measured, {})
    word = line.peek()
    if word and word not in ("for", "within"):
        line.take()
        if word not in allowed:
            know = f"write {', '.join(allowed)}, or no unit" if allowed else "write no unit"
            line.refuse(f"'{word}' is no unit of {metric}, which is in {measured or 'its own unit'}: {know}")
        return word
    if measured == "bytes" and 0 < abs(number) < 1024:
        line.refuse(f"{metric} is in bytes, and {_number_text(number)} of them cannot be meant: write '{number:g} GB'")
    if measured == "share" and abs(number) > 1:
        line.refuse(f"{metric} is a share between 0 and 1: write '{number:g} %' or {number / 100:g}")
    return ""


def _finding(line: _Line) -> FindingCondition:
    line.take()
    condition = FindingCondition()
    if re.fullmatch(r"[A-Z][A-Z0-9_]*", line.peek()):
        condition = replace(condition, issue=line.take())
    if line.peek() == "in":
        line.take()
        family = line.take()
        if not re.fullmatch(r"[a-z][a-z_]*", family):
            line.refuse("after 'in' comes a family, such as client, system or gradient")
        condition = replace(condition, family=family)
    if line.peek() == "severity":
        line.take()
        line.expect(">=", "≥")
        condition = replace(condition, severity=line.expect(*SEVERITIES))
    if line.peek() == "confidence":
        line.take()
        line.expect(">=", "≥")
        confidence = line.number("a confidence")
        if not 0 <= confidence <= 1:
            line.refuse(f"a confidence is between 0 and 1, got {_number_text(confidence)}")
        condition = replace(condition, confidence=confidence)
    return condition


def _rounds(line: _Line, word: str) -> int:
    """Return the number in «for 3 rounds»; 1 without it."""
    if line.peek() != word:
        return 1
    line.take()
    number = line.number(f"the number of rounds after '{word}'")
    if not number.is_integer() or not 1 <= number <= MOST_ROUNDS:
        line.refuse(f"'{word}' takes 1 to {MOST_ROUNDS} whole rounds, got {_number_text(number)}")
    line.expect("rounds", "round")
    return int(number)


def unknown_names(rules: Sequence[Rule], families: Mapping[str, str]) -> list[str]:
    """Return a remark for each rule on an issue or family that no shipped detector has; a user's may have it."""
    remarks = []
    for rule_ in rules:
        if isinstance(rule_.when, FindingCondition):
            if rule_.when.issue and rule_.when.issue not in families:
                close = difflib.get_close_matches(rule_.when.issue, families, n=1)
                hint = f" Did you mean '{close[0]}'?" if close else ""
                remarks.append(f"Rule '{rule_.name}': no shipped detector finds '{rule_.when.issue}'.{hint}")
            if rule_.when.family and rule_.when.family not in families.values():
                remarks.append(f"Rule '{rule_.name}': {unknown('family', rule_.when.family, set(families.values()))}")
    return remarks


def _number_text(number: float) -> str:
    """Return the shortest text that reads back as the same number."""
    value = float(number)
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)


def _spaced(unit: str) -> str:
    return f" {unit}" if unit else ""


def _lasting(rounds: int) -> str:
    return f" for {rounds} rounds" if rounds > 1 else ""
