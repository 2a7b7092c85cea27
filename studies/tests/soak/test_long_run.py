# SPDX-License-Identifier: Apache-2.0
"""`scripts/soak`: how it judges, and a few seconds of it with real processes."""

import json
import subprocess
import sys

import psutil
import pytest

from fedvitals_studies.soak.study import Sample, Soak, growth, judged, rows

CONSTANT = [100] * 360


def verdicts(trainer=CONSTANT, descriptors=CONSTANT, sockets=CONSTANT, **more):
    """Of half an hour in which a trainer takes so many megabytes and descriptors, a sample every five seconds."""
    samples = []
    for number, (size, files, ends) in enumerate(zip(trainer, descriptors, sockets, strict=True)):
        samples.append(Sample("trainer", 5.0 * number, round(1e6 * size), round(5e5 * size), files, 4, ends))
        samples.append(Sample("server", 5.0 * number, 10**8, 10**8, 20, 8, 9))
    nothing = {"rounds": 10, "lost": 0, "stored": 10, "store_bytes": 1, "log_bytes": 1, "browser": False}
    nothing |= {"requests": 1, "events": 1, "failures": ()}
    table = rows(Soak(30.0, tuple(samples), **(nothing | more)))
    assert [row["verdict"] for row in table if row["what"].startswith("server")] == ["met"] * 4
    return {row["what"] for row in table if row["verdict"] == "missed"}


def test_what_fills_within_the_first_third_is_no_growth():
    assert verdicts([50 + min(number, 110) / 110 * 50 for number in range(360)]) == set()


def test_memory_that_grows_by_more_than_two_percent_is_told():
    assert verdicts([100 + number / 240 for number in range(360)]) == set()
    assert verdicts([100 + number / 50 for number in range(360)]) == {"trainer: memory"}


def test_neither_a_peak_nor_a_dip_is_growth():
    sizes = [100 + 50 * (number % 10 == 0) - 20 * (number % 17 == 0) for number in range(360)]
    assert verdicts(sizes) == set()


def test_growth_is_that_of_the_last_two_thirds():
    samples = [Sample("trainer", float(number), 1000 + 10 * number, 1, 1, 1, 1) for number in range(301)]
    own = judged(samples, "trainer")
    assert (own[0].seconds, len(own)) == (100.0, 201)
    by_medians, by_slope = growth(own)
    assert by_slope == pytest.approx(100 * 2000 / 2160, rel=0.01)
    assert by_medians == pytest.approx(100 * 1680 / 2160, rel=0.01)


def test_descriptors_that_stay_open_are_told():
    assert verdicts(descriptors=[10 + number // 100 for number in range(360)]) == {"trainer: descriptors"}
    assert verdicts(descriptors=[10 + (number % 7 == 0) for number in range(360)]) == set()


def test_sockets_that_stay_open_are_told_and_those_that_come_and_go_are_not():
    assert verdicts(sockets=[10 + number // 100 for number in range(360)]) == {"trainer: sockets"}
    assert verdicts(sockets=[10 + number % 7 for number in range(360)]) == set()
    assert verdicts(sockets=[10 + number // 90 * (number % 7) for number in range(360)]) == set()


def test_losses_and_failures_are_told():
    missed = verdicts(lost=1, stored=9, failures=("the live stream ended",))
    assert missed == {
        "records lost",
        "rounds trained; of these, not in the store",
        "dashboard, polled; no Chromium on this machine",
    }


@pytest.mark.thorough
def test_a_few_seconds_of_it():
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    command = [sys.executable, "-m", "fedvitals_studies.soak", "0.1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr  # after so short a time, memory still grows
    result = json.loads(done.stdout)["result"]
    by_name = {row["what"].partition(",")[0]: row for row in result["rows"]}
    for name in ("records lost", "rounds trained; of these", "dashboard"):
        assert by_name[name]["verdict"] == "met", by_name[name]
    assert result["rounds"] == result["stored"] >= 1
    assert result["requests"] >= 5
    assert {sample["process"] for sample in result["samples"]} == {"trainer", "server"}
    assert all(sample["resident"] > sample["anonymous"] > 0 for sample in result["samples"])
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
