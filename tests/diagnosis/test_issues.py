# SPDX-License-Identifier: Apache-2.0
"""The table of issues: complete, well formed, what the faults of the lab are called by, and what the page shows."""

import json
import re

import pytest

from documentation.pages import issues_page
from fedvitals.diagnosis.finding import Number, finding
from fedvitals.diagnosis.issues import table as issues
from fedvitals.diagnosis.issues.table import FAMILIES, ISSUES, ISSUES_BY_CODE, SEVERITIES
from support.paths import ROOT


def test_codes_are_unique_and_the_families_are_those_of_the_taxonomy():
    assert len(ISSUES_BY_CODE) == len(ISSUES)
    assert {issue.family for issue in ISSUES} == set(FAMILIES)
    wanted = ("DIVERGENCE", "OSCILLATION", "NAN_GRADIENT", "EXPLODING_GRADIENT", "VANISHING_GRADIENT", "NAN_WEIGHTS")
    assert set(wanted) <= set(ISSUES_BY_CODE)


@pytest.mark.parametrize("issue", ISSUES, ids=lambda issue: issue.code)
def test_every_issue_answers_every_question(issue):
    """Sentences, not words: the table is what a person reads when something is wrong."""
    assert re.fullmatch("[A-Z]+(_[A-Z]+)*", issue.code)
    assert issue.severity in SEVERITIES
    assert len(issue.causes) >= 3
    assert len(issue.remedies) >= 3
    assert issue.reference
    assert not issue.title.endswith(".")
    for text in (issue.symptom, issue.refutation, *issue.causes, *issue.remedies):
        assert text.endswith("."), text
        assert "  " not in text, text
        assert len(text.split()) >= 3, text


def test_every_fault_of_the_lab_is_an_issue():
    """What the bank compares findings with must be a code that a finding can have."""
    faults = pytest.importorskip("fedvitals.lab.faults.table", reason="the lab needs torch").FAULTS
    assert faults
    for fault in faults:
        assert fault.issue.upper() in ISSUES_BY_CODE, fault
        assert fault.issue == fault.issue.lower()


def test_the_page_is_up_to_date():
    page = ROOT / "docs" / "issues.md"
    assert page.read_text(encoding="utf-8") == issues_page(), "write it again with scripts/docs"


def test_measured_rates_stand_beside_the_issues(tmp_path, monkeypatch):
    monkeypatch.setattr(issues, "RATES", tmp_path / "rates.json")
    assert issues_page().count("| not measured") == len(ISSUES)
    told = {"bank": "1234", "healthy_rounds": 5000, "per_100_rounds": {"DIVERGENCE": 0.04, "NAN_UPDATE": 0.0}}
    issues.RATES.write_text(json.dumps(told), encoding="utf-8")
    page = issues_page()
    assert "| The loss runs away | convergence | critical | 0.04 |" in page
    assert "| critical | 0.00 (exact) |" in page
    assert page.count("| not measured") == len(ISSUES) - 2


def test_a_finding_is_built_from_the_table_and_is_the_same_twice():
    """The same history must give the same finding, so it bears no time of its own."""
    made = [
        finding("LABEL_NOISE", 7, "c1 is ill", confidence=1.5, node="c1", since=5, numbers=[Number("loss", 2.0, 1.0)])
        for _ in range(2)
    ]
    assert made[0] == made[1]
    assert (made[0].severity, made[0].confidence, made[0].evidence["since"]) == ("warning", 1.0, 5)
    assert made[0].evidence["numbers"] == [{"name": "loss", "value": 2.0, "usual": 1.0, "score": None, "of": "peers"}]
