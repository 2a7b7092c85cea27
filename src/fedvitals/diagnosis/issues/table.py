# SPDX-License-Identifier: Apache-2.0
"""All issues in one table, from which `docs/issues.md` is generated.

A detector reports only an issue's code and its numbers. Symptom, causes, remedies and what would refute it are written
once, in the modules of this folder, so that every finding of an issue answers the same questions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from fedvitals.diagnosis.issues.aggregation import AGGREGATION
from fedvitals.diagnosis.issues.client import CLIENT
from fedvitals.diagnosis.issues.convergence import CONVERGENCE
from fedvitals.diagnosis.issues.gradient import GRADIENT
from fedvitals.diagnosis.issues.issue import FAMILIES, SEVERITIES, Issue
from fedvitals.diagnosis.issues.system import SYSTEM

__all__ = ["FAMILIES", "ISSUES", "ISSUES_BY_CODE", "RATES", "SEVERITIES", "Issue", "measured_rates"]

ISSUES: tuple[Issue, ...] = (*CONVERGENCE, *CLIENT, *AGGREGATION, *GRADIENT, *SYSTEM)
ISSUES_BY_CODE = {issue.code: issue for issue in ISSUES}

RATES = Path(__file__).with_name("rates.json")
"""Written by the fault bank: {"bank": digest, "healthy_rounds": number, "per_100_rounds": {code: rate}}."""


def measured_rates() -> Mapping[str, float]:
    """Return each rule's false alarms per 100 healthy rounds, as measured by the fault bank; empty before it has
    run.
    """
    if not RATES.exists():
        return {}
    rates: Mapping[str, float] = json.loads(RATES.read_text(encoding="utf-8"))["per_100_rounds"]
    return rates
