# SPDX-License-Identifier: Apache-2.0
"""The clauses of a condition. Each says in numbers what it saw in a round, or None if it does not hold."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Protocol

from fedvitals.diagnosis.issues.table import how_sure
from fedvitals.protocols import History
from fedvitals.records import FAILURES, Finding
from fedvitals.replay.debugger.quantities import ANY, PastValues, Quantity, Reading, finite_values, quoted

OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
    "=": operator.eq,
    "!=": operator.ne,
}
SIGN_WORDS = {">": "over", "<": "under", ">=": "at least", "<=": "at most", "=": "just", "!=": "not"}
TENSORS = ("gradient", "weight", "update", "activation", "buffer")  # families that count NaN and infinite values
SCALARS = (*("loss", "accuracy", "fit.loss_before", "fit.loss_after"),
           *("gradient.norm", "gradient.norm_max", "update.norm", "weight.norm"))  # fmt: skip
COUNTS = ("gradient.nonfinite", "weight.nonfinite")  # where the privacy level keeps the layers' own back


class Clause(Protocol):
    """One clause of a condition."""

    def seen(self, history: History, findings: Sequence[Finding], round_index: int) -> str | None: ...

    def check(self, history: History) -> None:
        """Raise ConfigError if a finished run has nothing of the name that the clause uses."""
        ...


@dataclass(frozen=True, slots=True)
class ComparisonClause:
    """A comparison with a number or a multiple of a median: «update.norm of c7 > 5 × its median», «accuracy < 0.5»."""

    quantity: Quantity
    sign: str
    number: float
    to: str = ""  # «its median», «its mean», «the others' median»: of which `number` is a multiple

    def __str__(self) -> str:
        right = f"{self.number:.12g} × {self.to}" if self.to else f"{self.number:.12g}"
        return f"{self.quantity} {self.sign} {right}"

    def check(self, history: History) -> None:
        self.quantity.check(history)

    def seen(self, history: History, _: Sequence[Finding], round_index: int) -> str | None:
        for reading in self.quantity.readings(history, round_index):
            base = self._base(history, reading, round_index)
            if base is None or not OPERATORS[self.sign](reading.value, self.number * base):
                continue
            right = f"{self.number:g} × {self.to} {base:.4g}" if self.to else f"{self.number:g}"
            return f"{reading.label} is {reading.value:.4g}, {SIGN_WORDS[self.sign]} {right}"
        return None

    def _base(self, history: History, reading: Reading, round_index: int) -> float | None:
        if not self.to:
            return 1.0
        if self.to == "the others' median":
            others = Quantity(self.quantity.name, ANY, self.quantity.layer).readings(history, round_index)
            values = [r.value for r in others if r.node != reading.node and math.isfinite(r.value)]
            return median(values) if values else None
        values = finite_values(reading.past())
        if not values:
            return None
        return median(values) if self.to == "its median" else fmean(values)


@dataclass(frozen=True, slots=True)
class ChangeClause:
    """A change of a value: «accuracy drops by 3 points», «loss rises by 20 % in 5 rounds»; from the last or the best
    value.
    """

    quantity: Quantity
    up: bool
    amount: float
    unit: str = ""  # «points», «%», or none: of its own
    rounds: int | None = None  # within how many; None: since it was last measured
    from_best: bool = False  # of all earlier rounds

    def __str__(self) -> str:
        unit = f" {self.unit}" if self.unit else ""
        span = "" if self.rounds is None else f" in {self.rounds} rounds"
        best = " from its best" if self.from_best else ""
        return f"{self.quantity} {'rises' if self.up else 'drops'} by {self.amount:.12g}{unit}{span}{best}"

    def check(self, history: History) -> None:
        self.quantity.check(history)

    def seen(self, history: History, _: Sequence[Finding], round_index: int) -> str | None:
        for reading in self.quantity.readings(history, round_index):
            earlier = self._earlier(reading.past(), round_index)
            if earlier is None:
                continue
            before, value = earlier
            moved = self._moved(value, reading.value)
            if moved >= self.amount * (1 - 1e-9):  # 0.53 − 0.5 is a bit less than 0.03
                unit = f" {self.unit}" if self.unit else ""
                word = "rises" if self.up else "drops"
                to = f"from {value:.4g} in round {before} to {reading.value:.4g}"
                return f"{reading.label} {word} by {moved:.3g}{unit}, {to}"
        return None

    def _earlier(self, past: PastValues, round_index: int) -> tuple[int, float] | None:
        """Return round and value of the comparison: the lowest or highest of several; None if there is none."""
        if self.rounds is not None:
            past = [entry for entry in past if entry[0] >= round_index - self.rounds]
        past = [entry for entry in past if math.isfinite(entry[1])]
        if self.rounds is None and not self.from_best:
            past = past[-1:]
        if not past:
            return None
        return min(past, key=lambda entry: entry[1]) if self.up else max(past, key=lambda entry: entry[1])

    def _moved(self, before: float, now: float) -> float:
        by = now - before if self.up else before - now
        if self.unit == "points":
            return by * 100
        if self.unit == "%":
            return by / abs(before) * 100 if before else math.inf if by > 0 else 0.0
        return by


@dataclass(frozen=True, slots=True)
class NonfiniteClause:
    """NaN or infinity in losses, norms and measured tensors: «any NaN», «NaN in c7», «loss is NaN»."""

    what: str  # «NaN», «infinity», «NaN or infinity»
    node: str | None = None
    quantity: Quantity | None = None

    def __str__(self) -> str:
        if self.quantity is not None:
            return f"{self.quantity} is {self.what}"
        return f"{self.what} in {quoted(self.node)}" if self.node else f"any {self.what}"

    def check(self, history: History) -> None:
        (self.quantity or Quantity("loss", self.node)).check(history)

    def seen(self, history: History, _: Sequence[Finding], round_index: int) -> str | None:
        if self.quantity is not None:
            odd = (r for r in self.quantity.readings(history, round_index) if self._is(r.value))
            return next((f"{reading.label} is {reading.value}" for reading in odd), None)
        return self._in_tensors(history, round_index) or self._in_scalars(history, round_index)

    def _is(self, value: float) -> bool:
        return ("NaN" in self.what and math.isnan(value)) or ("infinity" in self.what and math.isinf(value))

    def _in_tensors(self, history: History, round_index: int) -> str | None:
        columns = [name for name, word in (("nans", "NaN"), ("infs", "infinity")) if word in self.what]
        for family in TENSORS:
            nodes, values = history.across(family, columns, round_index)
            for place, node in enumerate(nodes):
                if self.node not in (None, node):
                    continue
                for row, layer in enumerate(history.layers(family)):
                    count = sum(float(v) for v in values[place, row] if v > 0)
                    if count:
                        return f"{family} of {layer} in {node} has {self.what}: {count:g} values"
        return None

    def _in_scalars(self, history: History, round_index: int) -> str | None:
        for name in SCALARS:
            wanted = [Quantity(name, self.node)] if self.node else [Quantity(name), Quantity(name, ANY)]
            for quantity in wanted:
                for reading in quantity.readings(history, round_index):
                    if self._is(reading.value):
                        return f"{reading.label} is {reading.value}"
        for name in () if history.layers("gradient") else COUNTS:
            for reading in Quantity(name, self.node or ANY).readings(history, round_index):
                if reading.value > 0:
                    return f"{reading.label} is {reading.value:g} (values that are NaN or infinity)"
        return None


@dataclass(frozen=True, slots=True)
class FindingClause:
    """A finding: «finding BYZANTINE of c7», «critical finding», «any finding»."""

    issue: str | None = None
    node: str | None = None
    severity: str | None = None

    def __str__(self) -> str:
        if self.severity:
            first = f"{self.severity} finding"
        else:
            first = f"finding {self.issue}" if self.issue else "any finding"
        return first + (f" of {quoted(self.node)}" if self.node else "")

    def check(self, history: History) -> None:
        Quantity("loss", self.node).check(history)

    def seen(self, history: History, findings: Sequence[Finding], round_index: int) -> str | None:  # noqa: ARG002
        for finding in findings:
            if finding.where.round == round_index and self._is(finding):
                node = finding.where.node or next((s.node for s in finding.suspects), None)
                what = f"finding {finding.issue}" + (f" of {node}" if node else "")
                return f"{what} ({finding.severity}, {how_sure(finding.issue, finding.confidence)}): {finding.message}"
        return None

    def _is(self, finding: Finding) -> bool:
        if self.issue not in (None, finding.issue) or self.severity not in (None, finding.severity):
            return False
        return self.node is None or self.node in (finding.where.node, *(s.node for s in finding.suspects))


@dataclass(frozen=True, slots=True)
class EventClause:
    """An event: «event client.failed of c7», «any failure», which is whatever keeps a client's reply from arriving."""

    name: str | None = None
    node: str | None = None

    def __str__(self) -> str:
        what = f"event {self.name}" if self.name else "any failure"
        return what + (f" of {quoted(self.node)}" if self.node else "")

    def check(self, history: History) -> None:
        Quantity("loss", self.node).check(history)

    def seen(self, history: History, _: Sequence[Finding], round_index: int) -> str | None:
        for name in FAILURES if self.name is None else (self.name,):
            for event in history.events(name, round_index):
                if event.where.round == round_index and self.node in (None, event.where.node):
                    about = f" of {event.where.node}" if event.where.node else ""
                    return f"event {event.name}{about} ({event.level}): {event.message}"
        return None


@dataclass(frozen=True, slots=True)
class RoundClause:
    """A round: «round 12», «round > 3»."""

    sign: str
    number: int

    def __str__(self) -> str:
        return f"round {self.number}" if self.sign == "=" else f"round {self.sign} {self.number}"

    def check(self, history: History) -> None:
        """Accept any round, because it may still come."""

    def seen(self, history: History, _: Sequence[Finding], round_index: int) -> str | None:  # noqa: ARG002
        return f"it is round {round_index}" if OPERATORS[self.sign](round_index, self.number) else None
