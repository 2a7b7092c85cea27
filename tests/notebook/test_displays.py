# SPDX-License-Identifier: Apache-2.0
"""What a notebook shows of monitors, runs and findings: escaped, small, without scripts, readable in both themes."""

import re

import pytest

import fedvitals as fv
from fedvitals.diagnosis.live_detectors import FindingList
from fedvitals.records import Finding, Suspect, Where
from support.runs_by_hand import HOSTILE, course, find
from support.timed_run import stored

LIGHT, DARK = ("#ffffff", "rgb(34, 34, 34)"), ("#111111", "rgb(238, 238, 238)")


def hostile(round_index=1, node=HOSTILE):
    """A finding whose every text is markup, or a character that cannot be shown."""
    where = Where("r", round_index, node, layer="<script>")
    return Finding(where, 1.0, "LABEL_NOISE", "warning", 0.9, f"{HOSTILE}\x1b[2J", suspects=(Suspect(HOSTILE, 1.0),))


def displays(tmp_path):
    """Every display, of things with hostile names."""
    ill = course("r1", HOSTILE)
    find(ill, HOSTILE)
    runs = fv.open(stored(tmp_path / "runs.db", ill))
    findings = FindingList([hostile()], installed=3)
    with fv.Monitor(None, HOSTILE, detectors=[lambda history, at: [hostile(at)] if at else []]) as monitor:
        for at in range(2):
            with monitor.round(at):
                pass
        monitor.flush()
        yield from (monitor, runs, runs.newest, findings, findings[0], findings.cases[0])


def test_displays_are_escaped_and_small(tmp_path):
    for thing in displays(tmp_path):
        html = thing._repr_html_()
        assert "&lt;img src=x onerror=alert(1)&gt;" in html, type(thing)
        assert "<img" not in html
        assert "<script" not in html
        assert "\x1b" not in html
        assert not re.search(r"class=|href=|src=(?!x)|url\(", html)
        assert len(html) < 4000


def test_a_monitor_shows_its_run_rounds_verdict_and_newest_findings():
    """Also before its first round, and when it has ended; nothing is opened by looking."""
    monitor = fv.Monitor(None, "digits", detectors=[lambda history, at: [hostile(at, f"c{at}")] if at else []])
    html = monitor._repr_html_()
    assert "waiting for the first round" in html
    assert monitor.run.id in html
    assert monitor.run.started == 0
    for at in range(8):
        with monitor.round(at):
            pass
    monitor.flush()
    html = monitor._repr_html_()
    assert "8 rounds so far" in html
    assert "problem" in html
    assert "c7" in html
    assert "c1" not in html.replace(monitor.run.id, "")  # five of them, the newest
    assert repr(monitor) == f"<Monitor of run 'digits', {monitor.run.id}: 8 rounds so far>"
    monitor.close()
    assert "ended" in monitor._repr_html_()


def test_verdicts_in_words():
    """A problem, one that is over, none, and nobody who looked."""
    assert FindingList([hostile()], installed=3).verdict == "1 problem now."
    over = FindingList([hostile()], installed=3, attendance={None: range(9), HOSTILE: range(9)}, gaps=["x failed"])
    assert over.verdict == "1 resolved. Not fully examined: x failed."
    assert FindingList([], installed=3).verdict == "No findings by 3 detectors."
    assert FindingList([], installed=0).verdict.startswith("Not judged")


def test_runs_are_listed_with_their_figures_and_a_run_with_its_verdict(tmp_path):
    ill = course("r1", "ill")
    find(ill, "c1")
    runs = fv.open(stored(tmp_path / "runs.db", ill, *(course(f"q{i:02}", "quiet", started=9.0) for i in range(21))))
    html = runs._repr_html_()
    assert "22 runs" in html
    assert "and 2 older runs" in html
    assert "90 %" in html  # as everywhere, not 0.9
    html = runs["ill"]._repr_html_()
    for words in ("r1", "accuracy 90 %", "4 rounds, 3 clients", "c1 seems to have wrong labels", "border-left"):
        assert words in html


def test_pictures_take_runs_of_fv_open(tmp_path):
    """From their own store, whatever the default is."""
    pytest.importorskip("matplotlib")
    run = fv.open(stored(tmp_path / "elsewhere.db", course("r1", "quiet"))).newest
    assert fv.plot.learning(run)._repr_png_().startswith(b"\x89PNG")


@pytest.mark.browser
@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_displays_take_the_colours_of_the_notebook(tmp_path, page, theme):
    background, colour = theme
    parts = "".join(thing._repr_html_() for thing in displays(tmp_path))
    style = f"background:{background};color:{colour};width:800px"
    page.set_content(f'<body style="margin:0"><main style="{style}">{parts}</main></body>')  # without a doctype, too
    colours = page.eval_on_selector_all("main *", "all => [...new Set(all.map(e => getComputedStyle(e).color))]")
    assert colours == [colour]
    assert page.evaluate("document.querySelector('main').scrollWidth") <= 800
