# SPDX-License-Identifier: Apache-2.0
"""What a new user sees first: the demo accuses the client that was given wrong labels, and nobody else."""

import json

import pytest

from support.verbs import run


@pytest.mark.thorough  # half a minute of training
def test_the_demo_accuses_the_culprit_alone(tmp_path, capsys):
    pytest.importorskip("sklearn", reason="the demo needs scikit-learn")
    path = tmp_path / "runs.db"
    assert run(capsys, "demo", "--no-ui", "--store", path)[0] == 0
    _, out, _ = run(capsys, "findings", "--store", path, "--json")
    cases = json.loads(out)["result"]["cases"]
    assert {(case["issue"], case["node"]) for case in cases if case["severity"] != "note"} == {("LABEL_NOISE", "c7")}
