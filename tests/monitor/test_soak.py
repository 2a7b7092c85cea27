# SPDX-License-Identifier: Apache-2.0
"""Memory stays flat and the file grows evenly, however long a training lasts. Each in a process of its own."""

import json
import subprocess
import sys

import pytest


def soaked(*arguments):
    command = [sys.executable, "-m", "fedvitals", "bench", "soak", "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {row["what"]: row["value"] for row in json.loads(done.stdout)["result"]["soak"]}


@pytest.mark.thorough
def test_memory_stays_flat():
    found = soaked("--quick")
    assert found["growth"] <= 5
    assert found["records lost"] == 0


@pytest.mark.slow
def test_memory_stays_flat_for_a_hundred_thousand_rounds():
    found = soaked()
    assert found["rounds"] == 100_000
    assert found["growth"] <= 5
    assert found["difference"] <= 10
    assert found["records lost"] == 0
