# SPDX-License-Identifier: Apache-2.0
"""What is said of a faulty client goes as far as it is sure: the cause, the family, or that something is wrong."""

import html
import math
from dataclasses import replace

import pytest

from fedvitals.diagnosis.cases import cases
from fedvitals.diagnosis.finding import finding
from fedvitals.diagnosis.issues.table import how_sure
from fedvitals.records import Finding, Where
from fedvitals.report.write import report
from fedvitals.store import open_reader
from fedvitals.views.case_sentences import sure
from fedvitals.views.cause_levels import levels_in_words, levels_of, what_looks_wrong
from fedvitals.views.overview import suspects
from support.dashboard_server import expect, judge, needs_browser, ready, serve
from support.runs_by_hand import course
from support.timed_run import stored
from support.verbs import run

DATA = [["label_noise", 0.6], ["input_noise", 0.35], ["gaussian", 0.05]]
WRONG = "something is wrong with c7"
LOOKS = "c1's data looks wrong (labels likelier than inputs)"
LINE = "something is wrong 90 %, with its labels 25 %, random wrong labels 22 %"


def case_with(causes=DATA, views=("telemetry",), confidence=0.9, **more):
    evidence = {"causes": causes, "views": [*views]}
    found = finding("LABEL_NOISE", 5, "so it is", confidence=confidence, node="c7", more=evidence | more)
    return cases([found], {None: range(6)})[0]


@pytest.mark.parametrize(
    ("causes", "views", "words"),
    [
        ([["label_noise", 1.0]], "exact", ""),
        ([["label_noise", 0.4], ["label_flip", 0.6]], "exact", "c7's labels look wrong"),
        ([["scaling", 0.4], ["gaussian", 0.4]], "exact", "c7's updates look wrong"),
        (DATA, "telemetry", "c7's data looks wrong (labels likelier than inputs)"),
        (DATA[::-1], "server", "c7's data looks wrong (labels likelier than inputs)"),
        ([["label_flip", 0.9], ["gaussian", 0.1]], "flip", f"{WRONG} (labels likelier than updates)"),
        ([["wrong_learning_rate", 0.4], ["label_flip", 0.3]], "exact", f"{WRONG} (training likelier than labels)"),
        ([["label_flip", 1.0]], "flip", f"{WRONG} (likeliest labels)"),
    ],
)
def test_words_go_as_far_as_they_are_sure(causes, views, words):
    assert what_looks_wrong(case_with(causes, [views]), "c7") == words


def test_several_are_named_in_the_plural_and_nobody_by_its():
    assert what_looks_wrong(case_with(), "c3 and c7", several=True).startswith("the data of c3 and c7 looks wrong")
    assert what_looks_wrong(case_with()).startswith("its data looks wrong")


@pytest.mark.parametrize(
    ("issue", "probability", "words"),
    [
        ("LABEL_NOISE", 0.9, "90 %"),
        ("LABEL_NOISE", 0.996, "> 99 %"),
        ("LABEL_NOISE", 1.0, "> 99 %"),  # a statistic
        ("NAN_UPDATE", 1.0, "100 %"),  # an exact test
        ("MY_RULE", 1.0, "100 %"),  # a user's own
        ("MY_RULE", 0.996, "> 99 %"),
        ("MY_RULE", math.nan, "–"),
    ],
)
def test_a_probability_has_one_format_in_lists_cards_and_sentences(issue, probability, words):
    assert how_sure(issue, probability) == words
    if math.isfinite(probability):
        detected = Finding(Where("", 5, "c7"), 0.0, issue, "critical", probability, "so it is")
        (case,) = cases([detected], {None: range(6)})
        assert f"({issue}, {words}; " in str(case)
        assert sure(case) == words
        assert suspects([case], {})[0].sure == words


def test_each_level_has_its_own_probability():
    wrong, family, cause = levels_of(case_with())
    assert (wrong.words, family.words, cause.words) == ("something is wrong", "with its labels", "random wrong labels")
    assert 0 < cause.probability < family.probability < wrong.probability == 0.9


@pytest.mark.parametrize("levels", [None, 3, {}, {"wrong": "x"}, {"wrong": 0.5, "family": "labels", "cause": [1, 2]}])
def test_what_somebody_elses_detector_wrote_is_passed_over(levels):
    case = case_with([], levels=levels)
    assert (levels_of(case), levels_in_words(case), what_looks_wrong(case, "c7")) == ((), "", "")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A run with a client whose data looks wrong, while it is unclear how."""
    told = course("doubtful", "doubtful", rounds=6, clients=5)
    for number in range(2, 6):
        more = {"causes": DATA, "views": ["telemetry"]}
        found = finding("LABEL_NOISE", number, "c1 differs.", confidence=0.9, node="c1", since=2, more=more)
        told.add(replace(found, where=Where(told.run.id, number, "c1"), at=told.at))
    return stored(tmp_path_factory.mktemp("levels") / "runs.db", told)


@pytest.mark.parametrize("arguments", [["show"], ["findings"], ["findings", "--all"]])
def test_the_command_line_shows_the_three_levels(store, arguments, capsys):
    _, shown, _ = run(capsys, arguments[0], "doubtful", *arguments[1:], "--store", store)
    assert LINE in " ".join(shown.split())


def test_the_report_shows_the_three_levels(store, tmp_path):
    pytest.importorskip("matplotlib", reason="the report's pictures are drawn with matplotlib")
    with open_reader(store) as reader:
        report(reader, ["doubtful"], tmp_path / "report.html")
    page = html.unescape((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert LOOKS in page
    assert LINE in page


@pytest.mark.browser
@needs_browser
def test_the_dashboard_shows_the_three_levels(store, page):
    """In the overview's headline, on the client's page, among the findings and on the finding's own page."""
    with serve(store) as url:
        address = f"{url}/runs/doubtful"
        for path, view in (("", "overview"), ("/clients/c1", "client"), ("/findings", "findings")):
            ready(page, address + path, view)
            levels = page.get_by_label("How sure of what").first
            expect(levels).to_contain_text("something is wrong")
            assert levels.locator("dd").all_inner_texts() == ["90\u202f%", "25\u202f%", "22\u202f%"]
            assert judge(page) == []
        expect(page.locator(".finding-card h2").first).to_have_text(LOOKS)
        ready(page, address, "overview")
        expect(page.locator(".verdict-headline")).to_contain_text(LOOKS)
        expect(page.locator(".finding-line").first).to_contain_text("its data looks wrong")
        page.locator(".finding-line").first.click()
        page.wait_for_selector("html[data-ready='finding']", state="attached")
        expect(page.locator("#trust")).to_contain_text("random wrong labels")
        page.goto("about:blank")
