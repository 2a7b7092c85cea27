# SPDX-License-Identifier: Apache-2.0
"""Finding, rounds page, profile, report and terminal name the same client, the same seconds and the same remedies."""

import pytest

from fedvitals import lab
from fedvitals.dashboard.pages.time_costs import changes, time_costs
from fedvitals.monitor.monitor import Monitor
from fedvitals.store import open_reader
from fedvitals.views.card import health_card
from fedvitals.views.cases import cases_of
from fedvitals.views.profile import profile_of
from fedvitals.views.round import round_page
from fedvitals.views.verdict import verdict_of
from fedvitals.views.waiting import waiting_in
from support.dashboard_server import needs_browser, ready, serve
from support.stored_runs import RUNS
from support.verbs import run as run_verb

WAITED = "Rounds 0 to 8 waited "


@pytest.fixture(scope="module")
def slow(session_folder):
    """A federation on a virtual clock, with links whose latency only the experiment knows; c3 is slow from round 3."""
    path = session_folder / "slow.db"
    with Monitor(path, run="slow", seed=1, config={"rounds": 9}) as monitor:
        lab.run(RUNS["straggler"](1), monitor)
    return path, monitor.run.id


def test_everybody_names_the_same_client_and_seconds(slow):
    path, run = slow
    with open_reader(path) as reader:
        profile, page, verdict = profile_of(reader, run), time_costs(reader, run), verdict_of(reader, run)
        waiting = waiting_in(reader, run)
        longest = round_page(reader, run, profile.waterfall.round)
    assert next(iter(profile.waiting.lost)) == "c3"
    assert waiting == profile.waiting
    assert [one.node for one in page.stragglers] == ["c3"]
    assert page.stragglers[0].seconds_lost == pytest.approx(waiting.lost["c3"])
    assert page.waited == profile.waiting.in_words()
    assert page.waited.startswith(WAITED)
    assert verdict.node == "c3"
    assert waiting.for_clients(["c3"], {}) in verdict.detail
    assert profile.path.slowest == longest.waited[0].whom == "c3"


def test_what_if_has_one_engine(slow):
    """The links' latency counts on the page as in the terminal: a compressed update would not arrive much sooner."""
    path, run = slow
    with open_reader(path) as reader:
        profile, page = profile_of(reader, run), changes(reader, run)
    terminal = {row.name: (row.after, row.at_most) for row in profile.what_if}
    assert page.what_if
    assert all((row.after, row.at_most) == terminal[row.name] for row in page.what_if)
    assert [(one.name, one.after) for one in page.remedies] == [(one.name, one.after) for one in profile.remedies]
    assert page.remedies[0].name == "Speed up c3, or leave it out"
    assert not any(one.at_most for one in page.what_if)


def test_who_is_slow_but_not_waited_for_is_a_note(tmp_path, capsys):
    """Ten times as slow in computing is nothing, where nearly all of a round is its messages."""
    path = tmp_path / "runs.db"
    faults = (lab.straggler(nodes=["c3"], since=3),)
    settings = {"dataset": "digits", "model": "mlp", "clients": 8, "rounds": 9, "seed": 1}
    with Monitor(path, run="messages", seed=1, config={"rounds": 9}) as monitor:
        lab.run(lab.Experiment(**settings, network=lab.Network(links="3g"), faults=faults), monitor)
    with open_reader(path) as reader:
        verdict, found = verdict_of(reader, monitor.run.id), cases_of(reader, monitor.run.id, notes=True)
        assert cases_of(reader, monitor.run.id) == list(health_card(reader, monitor.run.id).cases) == []
    assert (verdict.state, verdict.next_step) == ("healthy", "")
    assert [(case.issue, case.node, case.severity) for case in found if case.issue == "STRAGGLER"] == [
        ("STRAGGLER", "c3", "note")
    ]
    _, out, _ = run_verb(capsys, "findings", monitor.run.id, "--notes", "--store", path)
    assert "Rounds waited less than 1 % of their time for it." in " ".join(out.split())


def test_the_card_begins_with_the_verdict_and_has_the_times_that_rounds_wait_for(slow, capsys):
    path, run = slow
    _, out, _ = run_verb(capsys, "show", run, "--store", path)
    order = [
        out.index(words) for words in ("Problem: c3 is far slower", "Next step:", "Vital signs", "Measured in turns")
    ]
    assert order == sorted(order)
    times = {line.split()[0]: " ".join(line.split()[-2:]) for line in out.splitlines() if line.endswith(" ms")}
    assert (times["c3"], times["c0"]) == ("156 ms", "24.6 ms")


def test_the_report_gives_one_advice_for_a_straggler(slow, tmp_path, capsys):
    path, run = slow
    run_verb(capsys, "report", run, "--store", path, "--output", tmp_path / "slow.md")
    todo = (tmp_path / "slow.md").read_text(encoding="utf-8").partition("\n## What to do")[2].partition("\n## ")[0]
    assert todo.count("Speed up c3, or leave it out") == 1
    assert "Speed up the client" not in todo
    assert "its data, if it is left out" in todo


@pytest.mark.browser
@needs_browser
def test_the_pages_and_the_terminal_say_it(page, slow, capsys):
    path, run = slow
    with open_reader(path) as reader:
        words = profile_of(reader, run).waiting.in_words()
    _, out, _ = run_verb(capsys, "profile", run, "--store", path)
    printed = " ".join(out.split())
    assert words.replace("\u202f", " ") in printed.replace("\u202f", " ")
    with serve(path) as url:
        ready(page, f"{url}/runs/{run}/rounds", "rounds")
        page.wait_for_selector(".view-rounds[data-complete]")
        shown = page.locator("main").inner_text()
        assert words in shown
        ready(page, f"{url}/runs/{run}", "overview")
        assert WAITED in page.locator(".verdict").inner_text()
