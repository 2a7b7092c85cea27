# SPDX-License-Identifier: Apache-2.0
"""Figures of detection that people read first are those of the third held-out set's page."""

import json
from pathlib import Path

import pytest

from fedvitals.diagnosis.issues.table import RATES

ROOT = Path(__file__).parents[2]
PAGE = json.loads((ROOT / "docs/faultbank/three/summary.json").read_text(encoding="utf-8"))
BARS = {bar["name"]: bar for bar in PAGE["asked"]}
ROWS = {
    "detection, 39 kinds of faults": "F1 by issue and node, wrong names counted, all targets",
    "the same, mean over kinds": "the same, mean over fault kinds",
    "false alarms per 100 healthy rounds": "alarms per 100 healthy rounds, all together",
}


@pytest.mark.parametrize(("row", "bar"), ROWS.items())
def test_the_readme_states_what_the_page_has(row, bar):
    (line,) = [line for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines() if f"| {row}" in line]
    value, low, high = (BARS[bar]["obtained"][name] for name in ("value", "low", "high"))
    assert f"{value:.2f} [{low:.2f}, {high:.2f}]" in line
    assert ("**missed**" in line) == (BARS[bar]["verdict"] == "missed")


def test_false_alarms_of_the_issues_are_those_of_the_third_set():
    rates = json.loads(RATES.read_text(encoding="utf-8"))
    assert rates["healthy_rounds"] == PAGE["counts"]["healthy rounds"]
    for rule in PAGE["rules"]:
        assert rates["per_100_rounds"][rule["name"]] == round(rule["figures"]["alarms"]["value"], 3)


def test_the_guide_for_hospitals_states_what_level_2_costs():
    share = BARS["recall at privacy level 2, as a share of level 3's"]["obtained"]["value"]
    guide = (ROOT / "docs/guide/privacy.md").read_text(encoding="utf-8")
    assert f"recall at level 2 is {100 * share:.0f} % of what it is at level 3" in guide


@pytest.mark.parametrize("path", ["README.md", "docs/compared.md"])
def test_the_comparison_with_feddebug_is_that_of_the_page(path):
    methods = {row["name"]: row["figures"]["culprit_f1"]["value"] for row in PAGE["methods"]}
    text = (ROOT / path).read_text(encoding="utf-8")
    assert f"{methods['FedDebug, count told']:.2f}" in text
    assert f"{methods['fedvitals']:.2f}" in text
