# SPDX-License-Identifier: Apache-2.0
"""All issues in one table, from which `docs/issues.md` is generated.

A detector only reports an issue's code and its numbers. Symptom, causes, remedies and refutation are written once, in
the TOML files of this folder (one per family), so that every finding of an issue answers the same questions.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from fedvitals.certainty import certainty

FAMILIES = ("convergence", "client", "aggregation", "gradient", "system")
SEVERITIES = ("critical", "warning", "note")  # worst first
FOLDER = Path(__file__).parent
RATES = FOLDER / "rates.json"
"""Written by the fault bank: {"bank": digest, "healthy_rounds": number, "per_100_rounds": {code: rate}}."""


@dataclass(frozen=True, slots=True)
class Issue:
    """One kind of problem: its symptom, causes, remedies, and what would refute a finding of it."""

    code: str
    title: str
    family: str
    severity: str  # default for findings that do not set one: «note», «warning», «critical»
    symptom: str = ""
    causes: tuple[str, ...] = ()  # likeliest first
    remedies: tuple[str, ...] = ()  # in the order to try them
    refutation: str = ""  # what would prove the finding wrong
    reference: str = ""
    exact: bool = False  # an equality test: no false alarm is possible, and none is budgeted


def _issues_of(family: str) -> tuple[Issue, ...]:
    """Return the issues of a family's TOML file, in its order; its tables are named by the codes."""
    tables = tomllib.loads((FOLDER / f"{family}.toml").read_text(encoding="utf-8"))
    return tuple(msgspec.convert({**table, "code": code, "family": family}, Issue) for code, table in tables.items())


ISSUES = tuple(issue for family in FAMILIES for issue in _issues_of(family))
ISSUES_BY_CODE = {issue.code: issue for issue in ISSUES}


def how_sure(code: str, probability: float) -> str:
    """Return a probability of an issue in words; only an exact test, or a user's own rule, is called certain."""
    issue = ISSUES_BY_CODE.get(code)
    return certainty(probability, proven=issue is None or issue.exact or issue.family == "user")


def measured_rates() -> Mapping[str, float]:
    """Return each rule's false alarms per 100 healthy rounds, as measured by the fault bank; empty until it has run."""
    if not RATES.exists():
        return {}
    rates: Mapping[str, float] = json.loads(RATES.read_text(encoding="utf-8"))["per_100_rounds"]
    return rates
