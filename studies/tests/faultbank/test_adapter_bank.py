# SPDX-License-Identifier: Apache-2.0
"""The bank of adapters: the same federations each time, run by the command, judged beside their bars."""

import json

import pytest

from fedvitals.cli.main import main
from fedvitals.diagnosis.issues.table import ISSUES_BY_CODE
from fedvitals.errors import ConfigError
from fedvitals_studies.adapters.federation import ISSUES
from fedvitals_studies.faultbank.cases import read_bank

DIGEST = "98fe6a59dec9afb1670065968bbc056d"
SMALL = """
name = "small"
[[federations]]
faults = ["scale_mismatch"]
first_seed = 7000
planted = 1
healthy = 0
"""


def run(command):
    with pytest.raises(SystemExit) as ended:
        main(command)
    return ended.value.code


def test_it_is_the_bank_whose_digest_was_published():
    bank = read_bank("adapters")
    assert bank.digest == DIGEST
    planted = {fault for own in bank.federations for _, fault in own.runs()} - {None}
    assert planted == {*ISSUES}
    assert {*ISSUES.values()} <= {*ISSUES_BY_CODE}


@pytest.mark.thorough
def test_a_planted_fault_is_run_and_judged(tmp_path, capsys):
    """A second call runs nothing again."""
    file = tmp_path / "small.toml"
    file.write_text(SMALL, encoding="utf-8")
    command = ["faultbank", "--bank", str(file), "--out", str(tmp_path / "out"), "--json"]
    assert run(command) == 0
    facts = json.loads(capsys.readouterr().out)["result"]
    assert facts["counts"] == {"faulty runs": 1, "clean runs": 0, "healthy rounds": 0}
    (bar,) = facts["bars"]
    assert (bar["bar"], bar["obtained"], bar["verdict"]) == ("ADAPTER_SCALE_MISMATCH within 3 rounds", 1.0, "met")
    lines = (tmp_path / "out" / "runs.jsonl").read_text(encoding="utf-8")
    assert run(command) == 0
    assert (tmp_path / "out" / "runs.jsonl").read_text(encoding="utf-8") == lines


def test_federations_that_cannot_be_run(tmp_path):
    file = tmp_path / "small.toml"
    file.write_text(SMALL.replace("scale_mismatch", "rank_colapse"), encoding="utf-8")
    with pytest.raises(ConfigError, match="no such fault of adapters: rank_colapse"):
        read_bank(file)
