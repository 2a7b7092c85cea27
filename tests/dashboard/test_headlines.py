# SPDX-License-Identifier: Apache-2.0
"""The first screen says what happened to the model, who caused it and what else is wrong, and draws no NaN as 0."""

import math
import re
from base64 import b64decode

import pytest

from fedvitals import lab
from fedvitals.dashboard.pages.client import client_times
from fedvitals.dashboard.pages.runs import facts_of as runs_facts
from fedvitals.diagnosis.abstentions import LOOKED_AT
from fedvitals.monitor.monitor import Monitor
from fedvitals.records import Metric, Where
from fedvitals.store import open_reader
from fedvitals.views.card import health_card
from fedvitals.views.cases import cases_of
from fedvitals.views.clients import roster
from fedvitals.views.comparison.page import compare_page
from fedvitals.views.comparison.runs import compared
from fedvitals.views.evidence import evidence_of
from fedvitals.views.heat import layer_grid
from fedvitals.views.matrix import metric_matrix
from fedvitals.views.round import round_table
from fedvitals.views.run_figures import figures_of
from fedvitals.views.series import series
from fedvitals.views.status import status_of
from fedvitals.views.verdict import verdict_of
from support import overview_run
from support.dashboard_server import needs_browser, ready, serve
from support.verbs import run as run_verb

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


def test_the_norm_of_nan_is_not_zero(lost):
    """Kernels add up the finite values: of a gradient of NaN they give 0, which no list and no plot may show."""
    path, run = lost
    with open_reader(path) as reader:
        line = series(reader, run, "gradient.norm", "c5", 100)
        matrix = metric_matrix(reader, run, "update.norm")
        rows = {row.name: row for row in roster(reader, run).rows}
        signs = {sign.name: sign for sign in health_card(reader, run).signs}
    assert line.odd == [6, 7, 8]
    assert [value for value in line.values if value is not None and value < 0.1] == []
    assert math.isnan(matrix["c0"][1][-1])
    assert (rows["c5"].norm, "norm" in rows["c5"].odd) == (None, True)
    assert math.isnan(signs["gradient.norm"].values[-1])


def test_the_tables_of_a_round_and_of_the_replay_have_no_norm_of_0_for_nan(lost):
    path, run = lost
    with open_reader(path) as reader:
        table = round_table(reader, run, 7)
        ratios = metric_matrix(reader, run, "weight.update_ratio")
    place = [column.name for column in table.columns].index("gradient.norm")
    assert all(place in row.odd for row in table.rows if row.client)
    assert math.isnan(ratios["c5"][1][-1])


def test_findings_are_counted_once_and_the_same_everywhere(lost, capsys):
    path, run = lost
    with open_reader(path) as reader:
        listed, counted = runs_facts(reader, run).findings, len(cases_of(reader, run))
        shown = status_of(reader, run).findings
    assert sum(listed.values()) == counted == shown == 4
    _, out, _ = run_verb(capsys, "findings", run, "--store", path)
    assert "4 findings (2 consequences), 4 still there" in out
    _, out, _ = run_verb(capsys, "runs", "--store", path)
    assert out.splitlines()[1].split()[-3] == "4"  # before «3.41 s»


def test_the_report_and_the_comparison_say_so_too(lost, tmp_path, capsys):
    """A lost model has a loss of NaN in the report as in `runs`, and the cause comes before what follows from it."""
    path, run = lost
    run_verb(capsys, "report", run, "--store", path, "--output", tmp_path / "lost.md")
    written = (tmp_path / "lost.md").read_text(encoding="utf-8")
    assert re.search(r"accuracy, loss.{0,20}%, NaN", written, re.DOTALL), written[:2000]
    assert "last round" in written
    with open_reader(path) as reader:
        figures = figures_of(reader, run)
    comparison, page = compared([[figures], [figures]]), compare_page([[figures], [figures]])
    assert [trouble.issue for trouble in comparison.troubles] == ["NAN_GRADIENT", "NAN_WEIGHTS", "DIVERGENCE", "CRASH"]
    assert [side.verdict for side in comparison.sides] == [f"Problem: {HEADLINE}"] * 2
    assert [row.odd for row in page.rows if row.name in ("loss, last", "accuracy, last")] == [(), (0, 1)]
    (losses,) = (picture for picture in page.pictures if picture.name == "loss")
    assert [line.odd for line in losses.lines] == [[6, 7, 8]] * 2


def test_evidence_of_a_crash_is_the_errors_and_not_what_stayed_the_same(lost):
    path, run = lost
    with open_reader(path) as reader:
        crash = next(case for case in cases_of(reader, run) if case.issue == "CRASH")
        assert [plot.title for plot in evidence_of(reader, run, crash).plots] == ["errors in a round"]


def test_what_is_not_judged_yet_is_not_over(tmp_path):
    """Detectors are a round or two behind a training: the headline does not turn to «nothing serious» meanwhile."""
    found = [overview_run.finding("c3", number=number) for number in range(4, 8)]
    path = overview_run.written(tmp_path / "runs.db", finished=False, findings=found)

    def looked_at(rounds):
        overview_run.stamp([Metric(Where(overview_run.RUN, r), 1.7e9, LOOKED_AT, 6.0) for r in rounds], path)
        with open_reader(path) as reader:
            (case,) = cases_of(reader, overview_run.RUN)
            return case.still_there, verdict_of(reader, overview_run.RUN).state

    assert looked_at(range(8)) == (True, "ill")  # two rounds more have been recorded
    assert looked_at([8, 9]) == (False, "watch")


def test_a_client_that_trains_in_a_batch_is_not_called_slow(lost):
    """Its spans are those of the whole batch; it is compared by the seconds that it was given."""
    path, run = lost
    with open_reader(path) as reader:
        times = client_times(reader, run, "c7")
    assert times.own[-1] == pytest.approx(times.median[-1], rel=0.5)


@pytest.mark.browser
@needs_browser
def test_pages_use_words_for_people(page, lost):
    """No raw id, no backtick, no advice twice, no title that has lost its noun, outside of tooltips."""
    path, run = lost
    with serve(path) as url:
        ready(page, f"{url}/runs/{run}/rounds/5", "round")
        heads = page.locator(".view-round th").all_inner_texts()
        assert "loss before local training" in heads
        assert not [text for text in heads if "." in text or "_" in text]
        for key in ("CRASH~c2~~", "NAN_GRADIENT~c5~~dense1.weight"):
            ready(page, f"{url}/runs/{run}/findings/{key}", "finding")
            page.wait_for_load_state("networkidle")
            text = page.locator("main").inner_text()
            assert not [word for word in ("`", "advise", "how often:", "client.failed or") if word in text], text
        titles = page.locator(".chart-title").all_inner_texts()
        assert "gradient norm" in titles


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
        assert "findings (4)" in page.locator(".pages").inner_text()
        assert "9/9 rounds" in page.locator(".facts").inner_text()
        for line in page.locator(".finding-line .num").all():  # «> 99 %» is whole
            assert line.evaluate("node => node.scrollWidth <= node.clientWidth + 1")
            ends = "node => [node, node.closest('.panel')].map((one) => one.getBoundingClientRect().right)"
            right, edge = line.evaluate(ends)
            assert right <= edge + 1
