# SPDX-License-Identifier: Apache-2.0
"""Verdicts on the paper's claims: `claims.toml` defines the criteria, the results decide.

The criteria are data, not code: a call of a named function on named series, compared with two thresholds. Anything not
measured on the whole GTSRB with 100 clients and the paper's rounds is a rehearsal and gets other words. A claim whose
checks could only pass, or only fail, is «not testable»: by construction, or because what it is about did not occur.
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedvitals.errors import ConfigError, unknown
from fedvitals_studies.reproduce.conditions import BY_NAME
from fedvitals_studies.reproduce.results import PER_ITERATION, SERIES, Results, objections
from fedvitals_studies.reproduce.yardsticks import YARDSTICKS, Floats

FILE = Path(__file__).with_name("claims.toml")
WORDS = {
    "reproduced": "reproduced",
    "partly": "partly",
    "not": "not reproduced",
    "not testable": "not testable",
    "not run": "not run",
}
REHEARSED = {
    "reproduced": "would be reproduced",
    "partly": "would be partly",
    "not": "would not be reproduced",
    "not testable": "not testable",
    "not run": "not run",
}
SIDES = ("at least", "at most")


@dataclass(frozen=True, slots=True)
class Check:
    """One number and the two thresholds it is compared with."""

    value: Any  # ["function", argument, ...]
    side: str
    reproduced: float
    partly: float
    across: bool = False

    @property
    def series(self) -> tuple[tuple[str, str, str | None], ...]:
        """Return (condition, series, part) of every series that it reads."""
        return tuple(dict.fromkeys(_series_in(self.value)))

    @property
    def words(self) -> str:
        return _worded(self.value)

    @property
    def short(self) -> str:
        """Return the check for a table: conditions without their study, without series, at most a line."""
        text = _worded(self.value, short=True)
        return text if len(text) <= 90 else f"{self.value[0]}(…)"

    def judge(self, number: float) -> str:
        if math.isnan(number):
            return "not"
        beyond = number.__ge__ if self.side == "at least" else number.__le__
        return "reproduced" if beyond(self.reproduced) else "partly" if beyond(self.partly) else "not"


@dataclass(frozen=True, slots=True)
class Need:
    """What must occur in some repeat, so that a claim's checks can pass and can fail."""

    check: Check  # both thresholds are the limit
    reason: str  # why the claim cannot be tested if the limit is not reached


@dataclass(frozen=True, slots=True)
class OtherSeries:
    """Other series on which the same checks are made: their verdict is reported, but does not count."""

    words: str
    renamed: tuple[tuple[str, str], ...]  # (series, other series): a part of the name is replaced

    def of(self, value: Any) -> Any:
        """Return the same call on the other series."""
        if isinstance(value, list):
            return [value[0], *(self.of(argument) for argument in value[1:])]
        if isinstance(value, str):
            for old, new in self.renamed:
                value = value.replace(f" / {old}", f" / {new}").replace(f"iteration.{old}", f"iteration.{new}")
        return value


@dataclass(frozen=True, slots=True)
class Claim:
    id: str
    figures: tuple[int, ...]
    says: str
    why: str
    checks: tuple[Check, ...]
    reading: str = ""
    rereads: str = ""  # the claim of which this is another reading, if its words differ
    needs: tuple[Need, ...] = ()
    untestable: str = ""  # why no result could decide it
    beside: OtherSeries | None = None

    @property
    def conditions(self) -> tuple[str, ...]:
        checks = (*self.checks, *(need.check for need in self.needs))
        return tuple(dict.fromkeys(condition for check in checks for condition, _, _ in check.series))

    @property
    def on_other_series(self) -> Claim | None:
        """Return the claim as it is judged on the other series, if it names any."""
        if self.beside is None:
            return None
        checks = (dataclasses.replace(check, value=self.beside.of(check.value)) for check in self.checks)
        return dataclasses.replace(self, checks=tuple(checks), needs=(), untestable="", beside=None)


@dataclass(frozen=True, slots=True)
class Choice:
    """Something that the paper does not specify."""

    what: str
    ours: str
    other: str
    condition: str | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """A check with its results: one number per repeat, or one across them."""

    check: Check
    numbers: tuple[float, ...]
    repeats: tuple[int, ...]
    verdict: str
    lacking: str = ""  # why there is no number


@dataclass(frozen=True, slots=True)
class Verdict:
    claim: Claim
    verdict: str  # reproduced, partly, not, not testable, not run
    measured: tuple[Measured, ...]
    objections: tuple[str, ...]  # why it is no reproduction, whatever the numbers
    untested: str = ""  # why it cannot be tested
    beside: Verdict | None = None  # for the same checks on the other series

    @property
    def word(self) -> str:
        return (REHEARSED if self.objections else WORDS)[self.verdict]

    @property
    def lacking(self) -> str:
        """What has not been run or measured, in words."""
        return "; ".join(dict.fromkeys(each.lacking for each in self.measured if each.lacking))

    @property
    def repeats(self) -> int:
        """The smallest number of repeats behind its numbers; 0 if one of them is missing."""
        return min(len(each.repeats) if each.numbers else 0 for each in self.measured)


def read(path: Path = FILE) -> tuple[tuple[Claim, ...], tuple[Choice, ...]]:
    """Return the claims and the choices of a file; an unknown name in it is refused."""
    content = tomllib.loads(path.read_text(encoding="utf-8"))
    claims = tuple(_claim(entry) for entry in content.get("claim", ()))
    choices = tuple(Choice(**entry) for entry in content.get("choice", ()))
    for choice in choices:
        if choice.condition is not None and choice.condition not in BY_NAME:
            raise ConfigError(f"The choice '{choice.what}': {unknown('condition', choice.condition, BY_NAME)}")
    ids = [claim.id for claim in claims]
    for claim in claims:
        if claim.rereads and claim.rereads not in ids:
            raise ConfigError(f"The claim '{claim.id}' rereads: {unknown('claim', claim.rereads, ids)}")
    if len(set(ids)) < len(ids):
        raise ConfigError(f"{path} has two claims of the same id among {', '.join(ids)}.")
    return claims, choices


def _claim(entry: dict[str, Any]) -> Claim:
    name = f"The claim '{entry.get('id', '?')}'"
    try:
        checks = tuple(
            Check(each["value"], each["is"], each["reproduced"], each["partly"], each.get("across", False))
            for each in entry["check"]
        )
        needs = tuple(
            Need(Check(each["value"], each["is"], each["limit"], each["limit"]), each["reason"])
            for each in entry.get("needs", ())
        )
        claim = Claim(
            entry["id"], tuple(entry["figures"]), entry["says"], entry["why"], checks, entry.get("reading", ""),
            entry.get("rereads", ""), needs, entry.get("untestable", ""), _beside(entry.get("beside")),
        )  # fmt: skip
    except KeyError as error:
        raise ConfigError(f"{name} lacks {error}.") from None
    other = claim.on_other_series
    for check in (*checks, *(need.check for need in needs), *(other.checks if other is not None else ())):
        if check.side not in SIDES:
            raise ConfigError(f"{name}: {unknown('comparison', check.side, SIDES)}")
        if (check.partly > check.reproduced) == (check.side == "at least") and check.partly != check.reproduced:
            raise ConfigError(f"{name}: partly ({check.partly}) must be easier to reach than {check.reproduced}.")
        for what, got, known in _names_in(check.value):
            if got not in known:
                raise ConfigError(f"{name}: {unknown(what, got, known)}")
    return claim


def _beside(entry: dict[str, str] | None) -> OtherSeries | None:
    if entry is None:
        return None
    return OtherSeries(entry["words"], tuple((old, new) for old, new in entry.items() if old != "words"))


def _parts(reference: str) -> tuple[str, str, str | None]:
    parts = [part.strip() for part in reference.split(" / ")]
    if len(parts) not in {2, 3}:
        raise ConfigError(f"'{reference}' names no series: write 'condition / series' or 'condition / series / part'.")
    return parts[0], parts[1], parts[2] if len(parts) == 3 else None


def _series_in(value: Any) -> Iterator[tuple[str, str, str | None]]:
    if isinstance(value, str):
        yield _parts(value)
    elif isinstance(value, list):
        for argument in value[1:]:
            yield from _series_in(argument)


def _names_in(value: Any) -> Iterator[tuple[str, str, Iterable[str]]]:
    """Yield (what, name, known names) for everything that a call names."""
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        raise ConfigError(f'{value!r} is no call: write ["function", argument, ...].')
    yield "function", value[0], YARDSTICKS
    for argument in value[1:]:
        if isinstance(argument, str):
            condition, name, _ = _parts(argument)
            yield "condition", condition, BY_NAME
            yield "series", name, SERIES
        elif isinstance(argument, list):
            yield from _names_in(argument)


def _worded(value: Any, *, short: bool = False) -> str:
    if isinstance(value, list):
        return f"{value[0]}({', '.join(_worded(argument, short=short) for argument in value[1:])})"
    if short and isinstance(value, str):
        condition, name, part = _parts(value)
        layer = f" {part}" if part and "gradient" in name else ""
        return condition.partition("-")[2] + layer
    return str(value)


def verdicts(results: Results, path: Path = FILE) -> list[Verdict]:
    """Return the verdicts on all claims, in the file's order."""
    return [verdict_of(claim, results) for claim in read(path)[0]]


def verdict_of(claim: Claim, results: Results) -> Verdict:
    """Return the verdict on one claim."""
    measured = tuple(_measured(check, results) for check in claim.checks)
    needed = [(need, _measured(need.check, results)) for need in claim.needs]
    found = {each.verdict for each in measured}
    reasons = [claim.untestable] if claim.untestable else []
    reasons += [need.reason for need, each in needed if each.numbers and each.verdict == "not"]
    untested = "; ".join(reasons)
    if claim.untestable:
        overall = "not testable"
    elif "not run" in found | {each.verdict for _, each in needed}:
        overall = "not run"
    elif untested:
        overall = "not testable"
    elif len(found) == 1:
        overall = found.pop()
    else:
        overall = "partly"
    used = [result for condition in claim.conditions for result in results.of(condition)]
    other = claim.on_other_series
    beside = None if other is None else verdict_of(other, results)
    return Verdict(claim, overall, measured, tuple(objections(used)), untested, beside)


def _measured(check: Check, results: Results) -> Measured:
    for condition, name, part in check.series:
        if condition not in results:
            return Measured(check, (), (), "not run", f"{condition} has not been run")
        if not results.has(condition, name, part):
            label = name if part is None else f"{name} / {part}"
            return Measured(check, (), (), "not run", f"{condition} has no {label}")
    shared = set.intersection(*(set(results.repeats(*series)) for series in check.series))
    repeats = tuple(sorted(shared))
    if not repeats or (check.across and len(repeats) < 2):
        return Measured(check, (), repeats, "not run", f"it needs {'two repeats' if check.across else 'one repeat'}")
    with np.errstate(all="ignore"):
        groups = [repeats] if check.across else [(repeat,) for repeat in repeats]
        numbers = tuple(_number(check.value, results, group) for group in groups)
    found = {check.judge(number) for number in numbers}
    return Measured(check, numbers, repeats, found.pop() if len(found) == 1 else "partly")


def _number(value: Any, results: Results, repeats: tuple[int, ...]) -> float:
    function = YARDSTICKS[value[0]]
    return float(function(*(_argument(argument, results, repeats) for argument in value[1:])))


def _argument(argument: Any, results: Results, repeats: tuple[int, ...]) -> float | Floats:
    if isinstance(argument, list):
        return _number(argument, results, repeats)
    if not isinstance(argument, str):
        return float(argument)
    condition, name, part = _parts(argument)
    arrays = [results.array(condition, name, part, repeat) for repeat in repeats]
    if name in PER_ITERATION:
        rounds = results.of(condition)[0]["rounds"]
        arrays = [array.reshape(*array.shape[:-1], rounds, -1) for array in arrays]
    return np.stack(arrays) if len(repeats) > 1 else arrays[0]
