# SPDX-License-Identifier: Apache-2.0
"""The bench of profiling looks at what it says, and can say that a bar is missed."""

import pytest

from fedvitals.analysis.timeline import timeline
from fedvitals.records import Span, Where
from fedvitals_studies.bench.profile import bars as bench_profile
from fedvitals_studies.bench.profile.exporters import outage, scraping
from fedvitals_studies.bench.profile.sums import TOPOLOGIES, in_the_lab, row
from fedvitals_studies.bottlenecks import planted as bottlenecks
from fedvitals_studies.bottlenecks.lab import planted


def spans(parts, seconds=2.0):
    whole = Span(Where("r", 0), 10.0, "round", seconds, "t", "a")
    server = Span(Where("r", 0, "server"), 10.0, "server", seconds, "t", "b", "a", {"parts": parts, "folded": True})
    return timeline([whole, server])


def test_what_no_part_explains_is_counted_as_missed():
    assert row("x", "real", spans({"wait": 1.5, "aggregate": 0.5}))["missed_percent"] == pytest.approx(0)
    assert row("x", "real", spans({"wait": 1.0, "aggregate": 0.5}))["missed_percent"] == pytest.approx(25)


@pytest.mark.thorough
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_on_the_virtual_clock_nothing_is_missed(name, tmp_path):
    times = [time for time in in_the_lab(TOPOLOGIES[name], tmp_path / "runs.db", 2) if time.clock == "virtual"]
    found = row(name, "virtual", times)
    assert found["rounds"] == 2
    assert found["nodes"] >= 8
    assert found["worst_node_percent"] == pytest.approx(0, abs=0.01)


@pytest.mark.parametrize(("low", "high", "verdict"), [(-0.5, 0.5, "met"), (0.5, 1.5, "open"), (1.2, 2.0, "missed")])
def test_an_interval_on_both_sides_of_the_bar_settles_nothing(monkeypatch, low, high, verdict):
    found = {"overhead_percent": (low + high) / 2, "low": low, "high": high}
    monkeypatch.setattr(bench_profile, "overhead", lambda _pairs: found)
    assert bench_profile._overhead(1, lambda _: None)["verdict"] == verdict


def test_a_wrong_name_misses_the_bar():
    (said,) = bottlenecks.in_the_lab([planted("upload-bound", 0.75)], most=0)
    assert bench_profile._named("x", [said])["verdict"] == "met"
    other = bottlenecks.PlantedVerdict(planted("compute-bound", 0.75), said.verdict, said.times, said.remedies)
    missed = bench_profile._named("x", [said, other])
    assert (missed["verdict"], missed["value"]) == ("missed", 50.0)


@pytest.mark.thorough
def test_the_page_of_many_clients_has_every_metric_and_few_series():
    few, many = scraping(20, scrapes=1), scraping(300, scrapes=1)
    assert 0 < many["series"] <= bench_profile.BAR_SERIES
    assert many["series"] < few["series"] * 300 / 20


@pytest.mark.thorough
def test_an_outage_loses_nothing_and_changes_nothing():
    found = outage(0.6)
    assert found["records_arrived"] > found["rounds"]
    assert (found["rounds_missing"], found["rounds_twice"], found["records_lost"]) == (0, 0, 0)
    assert found["weights_equal"]
