# SPDX-License-Identifier: Apache-2.0
"""The data type of one issue. The issues themselves are in the other modules of this folder, collected by `table`."""

from __future__ import annotations

from dataclasses import dataclass

FAMILIES = ("convergence", "client", "aggregation", "gradient", "system")
SEVERITIES = ("critical", "warning", "note")  # the worst first


@dataclass(frozen=True, slots=True)
class Issue:
    """What is known of one kind of problem: its symptom, causes, remedies, and what would refute a finding of it."""

    code: str
    title: str
    family: str
    severity: str  # of a finding that does not say its own: «note», «warning», «critical»
    symptom: str = ""
    causes: tuple[str, ...] = ()  # the likeliest first
    remedies: tuple[str, ...] = ()  # the first to try first
    refutation: str = ""  # what would prove the finding wrong
    reference: str = ""
    exact: bool = False  # an equality test: no false alarm is possible, and none is budgeted
