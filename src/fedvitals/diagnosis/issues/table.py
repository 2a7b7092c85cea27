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

__all__ = ["FAMILIES", "ISSUES", "ISSUES_BY_CODE", "RATES", "SEVERITIES", "Issue", "markdown", "measured_rates"]

ISSUES: tuple[Issue, ...] = (*CONVERGENCE, *CLIENT, *AGGREGATION, *GRADIENT, *SYSTEM)
ISSUES_BY_CODE = {issue.code: issue for issue in ISSUES}

RATES = Path(__file__).with_name("rates.json")
"""Written by the fault bank: {"bank": digest, "healthy_rounds": number, "per_100_rounds": {code: rate}}."""


_ABOUT = """\
What fedvitals can find in a training. A finding names one of these codes, says where, since when, how sure and on which
numbers; `fedvitals findings RUN` prints it with the causes, the remedies and what would prove it wrong, as they stand
here. `fedvitals check RUN` looks again at a stored run.

*False alarms* are cases raised per 100 healthy rounds of the fault bank's held-out runs. *Exact* issues are equality
tests: what they say has happened, and there is nothing to be unsure of."""


def measured_rates() -> Mapping[str, float]:
    """Return each rule's false alarms per 100 healthy rounds, as measured by the fault bank; empty before it has
    run.
    """
    if not RATES.exists():
        return {}
    rates: Mapping[str, float] = json.loads(RATES.read_text(encoding="utf-8"))["per_100_rounds"]
    return rates


def markdown() -> str:
    """Return the page docs/issues.md."""
    rates = measured_rates()
    lines = [
        "# Issues",
        "",
        "Generated from `src/fedvitals/diagnosis/issues_*.py` by `scripts/docs`; do not edit.",
        "",
        _ABOUT,
        "",
        "| code | what | family | severity | false alarms per 100 healthy rounds |",
        "| --- | --- | --- | --- | --- |",
    ]
    for issue in ISSUES:
        link = f"[`{issue.code}`](#{issue.code.lower()})"
        lines.append(f"| {link} | {issue.title} | {issue.family} | {issue.severity} | {_rate(issue, rates)} |")
    for family in FAMILIES:
        lines += ["", f"## {family.capitalize()}"]
        for issue in ISSUES:
            if issue.family == family:
                lines += ["", *_section(issue)]
    return "\n".join([*lines, ""])


def _rate(issue: Issue, rates: Mapping[str, float]) -> str:
    rate = f"{rates[issue.code]:.2f}" if issue.code in rates else "not measured"
    return f"{rate} (exact)" if issue.exact else rate


def _section(issue: Issue) -> list[str]:
    lines = [f"### {issue.code}", "", f"**{issue.title}.** {issue.symptom}", "", "Likely causes, the likeliest first:"]
    lines += ["", *(f"{place}. {cause}" for place, cause in enumerate(issue.causes, 1))]
    lines += ["", "What to do:", "", *(f"{place}. {remedy}" for place, remedy in enumerate(issue.remedies, 1))]
    return [*lines, "", f"Proved wrong by: {issue.refutation}", "", f"Reference: {issue.reference}"]
