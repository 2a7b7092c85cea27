# SPDX-License-Identifier: Apache-2.0
"""Pictures open on the signs that the finding rests on, and a live run never changes what a person looks at."""

from dataclasses import replace

import pytest

from fedvitals.records import Metric, Where
from fedvitals.store import open_reader
from fedvitals.views.overview import overview
from support.dashboard_server import needs_browser, ready, serve
from support.overview_run import RUN, finding, of_round, stamp, written

NODES = [f"c{i}" for i in range(6)]
CHOSEN = "[data-band='clients'] .field-label:has-text('show') select"


def free_rider(number=11):
    return finding("c2", since=10, number=number, issue="FREE_RIDER")


def test_the_heat_maps_open_on_what_the_finding_rests_on(tmp_path):
    """Without a finding on the plainest sign; with one on its own: a client's on a metric, a layer's on a statistic."""
    path = written(tmp_path / "runs.db")
    with open_reader(path) as reader:
        plain = overview(reader, RUN)
    assert (plain.sign, plain.family) == ("loss", None)
    stamp([free_rider(9)], path)
    with open_reader(path) as reader:
        assert overview(reader, RUN).sign == "update.norm"
    layered = finding(None, issue="VANISHING_GRADIENT", severity="critical")
    layered = replace(layered, where=replace(layered.where, layer="head.weight"), suspects=())
    stamp([layered], path)
    with open_reader(path) as reader:
        found = overview(reader, RUN)
    assert (found.family, found.statistic) == ("gradient", "rms")


def test_a_sign_measured_in_turns_does_not_open_the_heat_map(tmp_path):
    """Half of its cells would be empty, mostly those of the client in question; the finding's own sign always opens."""
    places = [(Where(RUN, number, f"c{at}"), at) for number in range(10) for at in range(6)]
    turns = [Metric(where, 1.0, "fit.loss_before", 2.0) for where, at in places if (where.round + at) % 2]
    every = [Metric(where, 1.0, "update.cosine_mean", 0.9 - 0.9 * (at == 3)) for where, at in places]
    path = written(tmp_path / "runs.db", findings=[finding("c3")], more=[*turns, *every])
    with open_reader(path) as reader:
        assert overview(reader, RUN).sign == "update.cosine_mean"
    numbers = {
        "since": 4,
        "numbers": [{"name": "loss_before", "value": 2.0, "usual": 1.0, "of": "peers", "score": 4.0}],
    }
    stamp([replace(finding("c3"), evidence=numbers)], path)
    with open_reader(path) as reader:
        assert overview(reader, RUN).sign == "fit.loss_before"


@pytest.mark.browser
@needs_browser
def test_a_live_run_does_not_switch_what_is_looked_at(page, tmp_path):
    path = written(tmp_path / "runs.db", finished=False)
    with serve(path) as url:
        ready(page, f"{url}/runs/{RUN}", "overview")
        sign = page.locator(CHOSEN)
        assert sign.input_value() == "loss"
        stamp([*of_round(10, NODES), *of_round(11, NODES), free_rider()], path)
        page.locator(".verdict-headline", has_text="c2").wait_for()
        assert sign.input_value() == "loss"
        page.get_by_role("button", name="show update norm").click()  # offered, not forced
        page.wait_for_url("**sign=update.norm")
        assert sign.input_value() == "update.norm"
        ready(page, f"{url}/runs/{RUN}", "overview")
        assert sign.input_value() == "update.norm"  # opened anew, it begins with the evidence


@pytest.mark.browser
@needs_browser
def test_evidence_has_the_unit_of_its_sign(page, tmp_path):
    times = [Metric(Where(RUN, number, f"c{at}"), 1.0, "time.client", 2.0) for number in range(10) for at in range(6)]
    path = written(tmp_path / "runs.db", findings=[finding("c2", issue="STRAGGLER")], more=times)
    with serve(path) as url:
        ready(page, f"{url}/runs/{RUN}/findings/STRAGGLER~c2~~", "finding")
        plot = page.locator(".evidence .chart-plot[aria-label^='client time']")
        plot.wait_for()
        ticks = plot.locator("svg text").all_text_contents()
        assert [text for text in ticks if text.endswith("\u202fs")], ticks


@pytest.mark.browser
@needs_browser
@pytest.mark.parametrize("page", [{}, {"color_scheme": "dark"}], indirect=True, ids=["light", "dark"])
def test_a_clients_page_shows_what_its_finding_rests_on(page, tmp_path):
    path = written(tmp_path / "runs.db", findings=[free_rider(9)])
    with serve(path) as url:
        ready(page, f"{url}/runs/{RUN}/clients/c2", "client")
        first = page.locator(".sign-grid > div").first
        assert first.get_attribute("data-sign") == "update.norm"
        first.get_by_text("evidence of its finding").wait_for()
        page.locator(".evidence .chart-title", has_text="update norm").wait_for()
        assert "Next step:" in page.locator(".verdict").inner_text()
