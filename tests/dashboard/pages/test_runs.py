# SPDX-License-Identifier: Apache-2.0
"""The list of runs in a real browser: what is seen, filters, order, keys, tags, deletion, live, hostile names."""

import re
import time

import pytest

from fedvitals.records import Metric, Where
from fedvitals.store import open_reader, open_store
from fedvitals.store.lock import WriterLock
from fedvitals.store.read.queries import list_runs
from support.dashboard_server import enter, expect, judge, ready, serve
from support.runs_by_hand import HOSTILE, course, find, ward
from support.timed_run import STARTED, stored

pytestmark = pytest.mark.browser


@pytest.fixture
def store(tmp_path):
    return ward(tmp_path / "runs.db")


@pytest.fixture
def home(store):
    with serve(store) as url:
        yield url


def names(page):
    return page.locator("tbody a.run-link").all_inner_texts()


def row(page, name):
    return page.locator("tbody tr", has=page.get_by_role("link", name=name, exact=True))


def test_shows_at_a_glance_which_run_is_ill(home, page):
    ready(page, home, "runs")
    assert names(page) == ["goes on", HOSTILE, "fell quiet", "good one", "ill one"]
    ill = row(page, "ill one")
    assert ill.locator(".health").inner_text() == "▲problem"
    assert "c1 seems to have wrong labels, since round 1 (96 %)" in ill.locator(".headline").inner_text()
    assert row(page, "good one").locator(".health").inner_text().endswith("OK")
    assert row(page, "goes on").locator(".run-state").inner_text() == "● live"
    assert row(page, "goes on").locator(".progress-cell").inner_text().startswith("4/10")
    assert "died, last heard" in row(page, "fell quiet").locator(".run-state").inner_text()
    assert ill.locator("svg.sparkline").count() == 1
    assert "38.4\u202fkB" in ill.inner_text()
    assert judge(page) == []


@pytest.mark.parametrize("page", [{"color_scheme": "dark"}, {"viewport": {"width": 390, "height": 844}}], indirect=True)
def test_in_the_dark_and_on_a_phone(home, page):
    ready(page, home, "runs")
    assert judge(page) == []
    wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert wide <= 0
    assert row(page, "ill one").locator(".health").is_visible()


def test_filters_and_order_are_in_the_address_and_the_back_button_takes_them_back(home, page):
    ready(page, home, "runs")
    page.get_by_label("Health").select_option("ill")
    expect(page.locator("tbody tr")).to_have_count(2)
    page.get_by_role("button", name="worst first").click()
    expect(page).to_have_url(re.compile("sort=worst"))
    assert names(page) == [HOSTILE, "ill one"]
    page.get_by_role("button", name="run", exact=True).click()
    expect(page.locator("th[aria-sort]")).to_have_text("run ↑")
    page.go_back()
    expect(page.get_by_role("button", name="worst first")).to_have_attribute("aria-pressed", "true")
    page.go_back()
    page.go_back()
    expect(page.locator("tbody tr")).to_have_count(5)
    assert page.get_by_label("Health").input_value() == ""
    ready(page, f"{home}/?search=good&sort=name", "runs")  # as sent to a colleague
    assert names(page) == ["good one"]
    assert page.get_by_label("Search name, id, tag or host").input_value() == "good"


def test_a_column_sorts_down_then_up_then_not(home, page):
    ready(page, home, "runs")
    button = page.locator("th button", has_text="bytes")
    button.click()
    expect(page.locator("th[aria-sort='descending']")).to_have_text("bytes ↓")
    expect(page.locator("tbody a.run-link").first).to_have_text("good one")
    button.click()
    expect(page.locator("th[aria-sort='ascending']")).to_have_text("bytes ↑")
    expect(page.locator("tbody a.run-link").last).to_have_text("good one")
    button.click()
    expect(page.locator("th[aria-sort]")).to_have_count(0)


def test_typing_searches_and_nothing_found_says_so(home, page):
    ready(page, home, "runs")
    page.keyboard.press("/")
    page.keyboard.type("nobody of that name")
    expect(page.get_by_text("No run is like that.")).to_be_visible()
    page.get_by_role("link", name="Show all runs").click()
    expect(page.locator("tbody tr")).to_have_count(5)


def test_keys_move_select_and_open(home, page):
    ready(page, home, "runs")
    for key in "jjxjkx":  # the second is selected, the third visited, the second left out again
        page.keyboard.press(key)
    assert page.locator("tbody input:checked").count() == 0
    page.keyboard.press("x")
    page.keyboard.press("j")
    page.keyboard.press("x")
    expect(page.get_by_role("link", name="Compare 2 runs")).to_be_visible()
    assert page.locator("tr:has(input:checked) a.run-link").all_inner_texts() == [HOSTILE, "fell quiet"]
    page.keyboard.press("Enter")
    expect(page).to_have_url(f"{home}/runs/d-silent")
    page.go_back()
    expect(page.locator("tbody input:checked")).to_have_count(2)  # it was in the address


def test_compares_what_is_selected(home, page):
    ready(page, home, "runs")
    for name in ("ill one", "good one"):
        row(page, name).get_by_role("checkbox").check()
    page.get_by_role("link", name="Compare 2 runs").click()
    page.wait_for_selector("html[data-ready='compare']", state="attached")
    assert page.locator(".side .name").all_inner_texts() == ["ill one", "good one"]


def test_tags_are_given_filtered_by_and_taken(home, page):
    enter(page, home)
    row(page, "ill one").get_by_role("button", name="Tags of ill one").click()
    dialog = page.get_by_role("dialog")
    for tag in ("paper", f"{HOSTILE}"):
        dialog.get_by_label("New tag").fill(tag)
        page.keyboard.press("Enter")
        expect(dialog.locator(".tag", has_text=tag)).to_be_visible()
    dialog.get_by_role("button", name="Done").click()
    expect(row(page, "ill one").locator(".tag")).to_have_count(2)
    row(page, "ill one").get_by_role("link", name="paper", exact=True).click()
    expect(page.locator("tbody tr")).to_have_count(1)
    assert page.get_by_label("Tag", exact=True).input_value() == "paper"
    row(page, "ill one").get_by_role("button", name="Tags of ill one").click()
    dialog.get_by_role("button", name="Remove the tag paper").click()
    expect(dialog.locator(".tag")).to_have_count(1)
    page.keyboard.press("Escape")
    expect(page.get_by_text("No run is like that.")).to_be_visible()


def test_deletes_only_after_a_second_word(home, page, store):
    enter(page, home)
    row(page, "ill one").get_by_role("button", name="Delete ill one").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_text(re.compile("4 rounds, .* records, about"))).to_be_visible()
    assert judge(page) == []
    page.keyboard.press("Enter")  # what has the focus is «keep it»
    expect(dialog).to_have_count(0)
    expect(page.locator("tbody tr")).to_have_count(5)
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Delete ill one"
    row(page, "ill one").get_by_role("button", name="Delete ill one").click()
    dialog.get_by_role("button", name="Delete for good").click()
    expect(page.locator("tbody tr")).to_have_count(4)
    with open_reader(store) as reader:
        assert "a-ill" not in [run.id for run in list_runs(reader)]


def test_a_run_that_is_being_written_is_not_deleted_and_the_dialog_says_why(home, page, store):
    lock = WriterLock(store)  # this process trains, so to speak; the dashboard is another one
    lock.hold()
    try:
        page.expected_errors.append("409")
        enter(page, home)
        row(page, "goes on").get_by_role("button", name="Delete goes on").click()
        page.get_by_role("dialog").get_by_role("button", name="Delete for good").click()
        expect(page.get_by_role("dialog").get_by_role("alert")).to_contain_text("is being written by process")
        page.get_by_role("dialog").get_by_role("button", name="Keep it").click()
        expect(page.locator("tbody tr")).to_have_count(5)
    finally:
        lock.release()


def test_running_ones_move_and_nothing_else_does(home, page, store):
    """A round arrives: its row gets it; focus, selection and what is typed stay."""
    ready(page, home, "runs")
    row(page, "ill one").get_by_role("checkbox").check()
    row(page, "goes on").locator("a.run-link").focus()
    sink = open_store(store)
    sink.write([Metric(Where("c-now", 4), time.time(), "accuracy", 0.123, "later", 0)])
    expect(row(page, "goes on").locator(".progress-cell")).to_contain_text("5/10")
    assert "12.3" in row(page, "goes on").inner_text()
    assert page.evaluate("document.activeElement.textContent") == "goes on"
    assert page.locator("tbody input:checked").count() == 1
    new = course("z-new", "just begun", started=time.time() + 1200, finished=None)
    find(new, "c0")
    sink.write(new.records)
    sink.close()
    expect(row(page, "just begun")).to_be_visible()
    assert names(page)[0] == "just begun"


def test_hostile_names_are_text(home, page):
    page.add_init_script("window.alert = () => { window.broken = true; }")
    enter(page, home)
    hostile = row(page, HOSTILE)
    assert page.locator("main img").count() == 0
    hostile.get_by_role("button", name=f"Delete {HOSTILE}").click()
    expect(page.get_by_role("dialog")).to_contain_text(HOSTILE)
    assert page.locator("dialog img").count() == 0
    page.keyboard.press("Escape")
    hostile.locator("a.run-link").click()
    expect(page).to_have_url(re.compile(r"/runs/e-%3Cimg"))
    assert page.evaluate("window.broken") is None


def test_an_empty_store_shows_the_lines_that_fill_it(page, tmp_path):
    path = stored(tmp_path / "runs.db", course("r", "only"))
    with serve(path) as url:
        enter(page, url)
        row(page, "only").get_by_role("button", name="Delete only").click()
        page.get_by_role("dialog").get_by_role("button", name="Delete for good").click()
        expect(page.get_by_text("No run yet.")).to_be_visible()
        expect(page.locator("pre")).to_contain_text("fv.Monitor(")
        expect(page.locator("main")).to_contain_text("fedvitals demo")
        stored(path, course("s", "next"))
        expect(row(page, "next")).to_be_visible()  # by itself
        page.goto("about:blank")


def test_many_runs_come_in_pages(page, tmp_path):
    told = [course(f"r{i:03d}", f"run {i:03d}", rounds=1, clients=1, started=STARTED + i) for i in range(120)]
    with serve(stored(tmp_path / "runs.db", *told)) as url:
        ready(page, url, "runs")
        assert (names(page)[0], len(names(page))) == ("run 119", 50)
        page.get_by_role("button", name="older").click()
        expect(page.get_by_text("51 to 100 of 120")).to_be_visible()
        expect(page.locator("tbody a.run-link").first).to_have_text("run 069")
        page.get_by_role("button", name="older").click()
        expect(page.locator("tbody tr")).to_have_count(20)
        assert page.get_by_role("button", name="older").is_disabled()
        page.go_back()
        expect(page.get_by_text("51 to 100 of 120")).to_be_visible()
        page.goto("about:blank")
