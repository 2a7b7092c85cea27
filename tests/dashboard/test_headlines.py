# SPDX-License-Identifier: Apache-2.0
"""The first screen says what happened to the model, who caused it and what else is wrong, and draws no NaN as 0."""

from base64 import b64decode

import pytest

from fedvitals import lab
from fedvitals.monitor.monitor import Monitor
from fedvitals.store import open_reader
from fedvitals.views.heat import layer_grid
from fedvitals.views.verdict import verdict_of
from support.dashboard_server import needs_browser, serve

HEADLINE = "The model was lost in round 6: NaN from c5. c2 also crashes since round 4."


@pytest.fixture(scope="module")
def lost(session_folder):
    """A federation in which c2 crashes from round 4 on, and c5's NaN destroys the model in round 6."""
    path = session_folder / "lost.db"
    faults = (lab.not_finite(nodes=["c5"], since=6), lab.crash(nodes=["c2"], since=4))
    experiment = lab.Experiment(dataset="digits", model="mlp", clients=8, rounds=9, seed=5, faults=faults)
    with Monitor(path, run="lost", seed=5, config={"rounds": 9}) as monitor:
        lab.run(experiment, monitor)
    return path, monitor.run.id


def test_damage_comes_first_then_who_causes_it_then_others(lost):
    path, run = lost
    with open_reader(path) as reader:
        verdict = verdict_of(reader, run)
        grid = layer_grid(reader, run, "gradient", "l2")
    assert verdict.headline == HEADLINE
    assert verdict.detail.startswith("Accuracy fell from ")
    assert (verdict.state, verdict.node) == ("ill", "c5")
    assert grid.smallest is None or grid.smallest > 0  # the gradients of a model of NaN are no zeros, but NaN
    assert b64decode(grid.state)[-1] == 3


@pytest.mark.browser
@needs_browser
def test_the_first_screen_has_it(page, lost):
    path, run = lost
    with serve(path) as url:
        page.set_viewport_size({"width": 1440, "height": 900})
        page.goto(f"{url}/runs/{run}")
        page.wait_for_selector("html[data-ready='overview']", state="attached")
        assert page.locator(".verdict-headline").inner_text() == HEADLINE
        assert page.locator(".verdict-state").inner_text().endswith("PROBLEM")
        page.locator(".chart-note", has_text="measured on up to").first.wait_for()
        assert "9/9 rounds" in page.locator(".facts").inner_text()
        for line in page.locator(".finding-line .num").all():  # «> 99 %» is whole
            assert line.evaluate("node => node.scrollWidth <= node.clientWidth + 1")
            ends = "node => [node, node.closest('.panel')].map((one) => one.getBoundingClientRect().right)"
            right, edge = line.evaluate(ends)
            assert right <= edge + 1
