# SPDX-License-Identifier: Apache-2.0
"""The comparison in a real browser: choosing runs, words, pictures, baseline, zoom, settings, hostile names."""

import re
import time

import pytest

from fedvitals.records import Metric, Where
from fedvitals.store import open_store
from support.dashboard_server import expect, judge, ready, serve
from support.runs_by_hand import HOSTILE, course, find
from support.timed_run import STARTED, stored

pytestmark = pytest.mark.browser
STRANGE = f"h,{HOSTILE}%2/x"  # an id that is a list, a tag, an escape and a path


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    plain, fast = course("one", "plain", rate=0.1), course("two", "faster", rate=0.2, best=0.7)
    find(fast, "c1")
    hostile = course(STRANGE, HOSTILE, rate=0.3, config={HOSTILE: HOSTILE})
    find(hostile, HOSTILE, severity="critical")
    more = [course(f"more-{i}", f"more {i}", best=0.5 + i / 20, rate=0.1 + i, started=STARTED + i) for i in range(4)]
    repeats = [course(f"rep-{name}-{seed}", name, seed=seed, rate=rate, best=best + seed / 100, started=STARTED + seed)
               for name, rate, best in (("low", 0.01, 0.5), ("high", 0.02, 0.9)) for seed in range(3)]  # fmt: skip
    return stored(tmp_path_factory.mktemp("compare") / "runs.db", plain, fast, hostile, *more, *repeats)


@pytest.fixture(scope="module")
def home(store):
    with serve(store) as url:
        yield url


def sides(page):
    return [" ".join(text.split()) for text in page.locator(".side").all_inner_texts()]


def pictures(page):
    return page.evaluate("[...document.querySelectorAll('[data-picture]')].map((one) => one.dataset.picture)")


def swatches(page):
    return page.evaluate("[...document.querySelectorAll('.side .swatch')].map((one) => one.style.background)")


def test_says_what_changed_and_shows_it(home, page):
    ready(page, f"{home}/compare?runs=one,two", "compare")
    assert sides(page) == ["A plain baseline ×", "B faster make baseline ×"]
    said = page.locator(".verdict-words").inner_text()
    assert "B (faster) against A (plain): accuracy 20 points lower" in said
    assert "local.lr 0.1 → 0.2" in said
    assert "A and B diverge at round 0" in said
    assert "no difference here can be distinguished from chance" in said
    assert pictures(page) == ["accuracy", "loss", "gsc", "difference.accuracy", "difference.loss", "seconds", "bytes"]
    last = page.locator("table.compared tr", has_text="accuracy, last").inner_text()
    assert re.sub(r"\s+", " ", last) == "learning accuracy, last 90 % 70 % −20 points worse"
    assert "Labels are wrong" in page.get_by_role("region", name="Findings").last.inner_text()
    assert page.locator("td.changed").all_inner_texts()[-1] == "0.2"
    page.get_by_text("settings are the same").click()
    expect(page.get_by_role("region", name="Settings that are the same")).to_contain_text("host")
    assert judge(page) == []


@pytest.mark.parametrize("page", [{"color_scheme": "dark"}, {"viewport": {"width": 390, "height": 844}}], indirect=True)
def test_in_the_dark_and_on_a_phone(home, page):
    ready(page, f"{home}/compare?runs=one,two,more-1", "compare")
    assert judge(page) == []
    assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0


def test_runs_are_added_and_taken_out_and_the_back_button_undoes_it(home, page):
    ready(page, f"{home}/compare", "compare")
    expect(page.get_by_text("Choose two to six runs")).to_be_visible()
    search = page.get_by_label("Search a run to add")
    for name, text in (("plain", "plain"), ("faster", "faster")):
        search.fill(text)
        page.locator(".picker-run", has_text=name).click()
        expect(page.locator(".side .name", has_text=name)).to_be_visible()
    expect(page.locator(".verdict-words")).to_contain_text("B (faster) against A (plain)")
    search.fill("more 2")
    page.locator(".picker-run", has_text="more 2").click()
    expect(page.locator(".side")).to_have_count(3)
    page.get_by_role("button", name="Take plain out of the comparison").click()
    expect(page.locator(".side")).to_have_count(2)
    assert page.locator(".side .name").all_inner_texts() == ["faster", "more 2"]
    page.go_back()
    expect(page.locator(".side")).to_have_count(3)
    page.go_back()
    expect(page.locator(".side")).to_have_count(2)
    expect(page).to_have_url(re.compile("runs=one%2Ctwo$"))


def test_another_baseline_turns_the_differences_round_and_changes_no_colour(home, page):
    ready(page, f"{home}/compare?runs=one,two", "compare")
    before = swatches(page)
    page.get_by_role("button", name="Make faster the baseline").click()
    expect(page.locator(".side").first).to_contain_text("Afaster")
    assert swatches(page) == before[::-1]
    expect(page.locator(".verdict-words")).to_contain_text("B (plain) against A (faster): accuracy 20 points higher")
    expect(page).to_have_url(re.compile("baseline=two"))
    page.reload()
    page.wait_for_selector("html[data-ready='compare']", state="attached")
    assert sides(page)[0].startswith("A faster")


def test_repeats_become_bands(home, page):
    ready(page, f"{home}/compare?runs=low,high", "compare")
    page.get_by_label("all repeats of each").check()
    expect(page.locator(".side").first).to_contain_text("3 runs")
    expect(page).to_have_url(re.compile("repeats=1"))
    expect(page.locator("table.compared").first).to_contain_text("*")
    expect(page.locator(".verdict-words")).to_contain_text("Beyond chance: accuracy, last")


def test_six_runs_and_no_more(home, page):
    ready(page, f"{home}/compare?runs=one,two,more-0,more-1,more-2,more-3,rep-low-0", "compare")
    assert page.locator(".side").count() == 6
    assert len(set(swatches(page))) == 6
    assert page.locator(".picker").is_hidden()


def test_a_zoom_is_in_the_address_and_survives_a_live_round(home, page, store):
    ready(page, f"{home}/compare?runs=one,more-0&from=1&to=2", "compare")
    label = page.locator("[data-picture='accuracy'] [aria-label*='rounds']")
    expect(label).to_have_attribute("aria-label", re.compile("rounds 1 to 2"))
    sink = open_store(store)
    sink.write([Metric(Where("more-0", 4), time.time(), "accuracy", 0.777, f"later-{time.time()}", 0)])
    sink.close()
    expect(page.locator("table.compared").first).to_contain_text(re.compile(r"77\.7\s%"))
    expect(page).to_have_url(re.compile("from=1&to=2"))
    expect(label).to_have_attribute("aria-label", re.compile("rounds 1 to 2"))


def test_hostile_ids_and_names_are_text(home, page):
    page.add_init_script("window.alert = () => { window.broken = true; }")
    ready(page, home, "runs")
    for name in ("plain", HOSTILE):
        page.locator("tbody tr", has=page.get_by_role("link", name=name, exact=True)).get_by_role("checkbox").check()
    page.get_by_role("link", name="Compare 2 runs").click()
    page.wait_for_selector("html[data-ready='compare']", state="attached")
    assert page.locator(".side .name").all_inner_texts() == ["plain", HOSTILE]
    expect(page.locator("table.compared").last).to_contain_text(HOSTILE)
    assert page.locator("main img").count() == 0
    assert page.evaluate("window.broken") is None


def test_a_run_that_is_not_there_says_so(home, page):
    page.expected_errors.append("404")
    page.goto(f"{home}/compare?runs=one,nobody")
    expect(page.get_by_role("alert").last).to_contain_text("nobody")
