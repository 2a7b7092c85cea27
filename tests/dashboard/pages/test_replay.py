# SPDX-License-Identifier: Apache-2.0
"""The replay page in a real browser: scrubbed with keys and mouse, opened by an address or from a finding, hostile."""

import re
from urllib.parse import parse_qs, urlsplit

import pytest

from fedvitals.records import Finding, Run, Suspect, Where
from support.dashboard_server import judge, ready, serve
from support.taped_by_hand import NOISY, ROUNDS, recorded, stored, written

pytestmark = pytest.mark.browser
LAST = ROUNDS - 1
EVIL = "c1'; rm -rf ~ #\"><img src=x onerror=alert(1)>, c9"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    store = tmp_path_factory.mktemp("site") / "runs.db"
    run = recorded(store)
    written(store, "evil", [EVIL, "b", "bad"], failed=["bad"], layers=[EVIL, "w"], name=EVIL, actions=[
        {"kind": EVIL, "target": EVIL, "arguments": {EVIL: EVIL}},
    ])  # fmt: skip
    suspect = (Suspect(EVIL, 0.9, EVIL),)
    stored(store, Finding(Where("evil", 2), 1.0, "BYZANTINE", "critical", 0.9, EVIL, {"since": 1}, suspect))
    stored(store, Run(id="bare", name="bare", host="torch"))
    written(store, "many", [f"c{i}" for i in range(200)])
    with serve(store) as url:
        yield url, run


@pytest.mark.parametrize("page", [{}, {"color_scheme": "dark"}], indirect=True, ids=["light", "dark"])
def test_one_scrubs_over_the_rounds(site, page):
    url, run = site
    ready(page, f"{url}/runs/{run}/replay", "replay")
    slider = page.get_by_role("slider", name="Round")
    assert slider.get_attribute("aria-valuenow") == str(LAST)
    page.keyboard.press("ArrowLeft")
    page.wait_for_url(f"**round={LAST - 1}")
    page.locator(".said", has_text=f"Round {LAST - 1} of 0 to {LAST}").wait_for()
    page.keyboard.press("ArrowRight")
    page.locator(".said", has_text=f"Round {LAST} of 0 to {LAST}").wait_for()
    box = slider.bounding_box()
    page.mouse.click(box["x"] + box["width"] * 4.5 / ROUNDS, box["y"] + box["height"] / 2)
    page.wait_for_url("**round=4")
    page.locator("main", has_text="1 failed").wait_for()
    slider.press("Home")
    page.locator(".said", has_text=f"Round 0 of 0 to {LAST}").wait_for()
    page.keyboard.press("n")
    page.wait_for_url(lambda address: "round=0" not in address)
    page.wait_for_load_state("networkidle")
    assert judge(page) == []


def test_an_address_leads_to_a_round_and_a_client_and_what_if(site, page):
    url, run = site
    ready(page, f"{url}/runs/{run}/replay?round={LAST}&node={NOISY}", "replay")
    page.get_by_role("heading", name=f"{NOISY} against the other clients").wait_for()
    assert f"goto {LAST}; into {NOISY}" in page.locator("main").inner_text()
    page.locator("#whatif .said", has_text=f"Without {NOISY}, the model would have moved by").wait_for()
    page.get_by_label(f"What if without {NOISY}").uncheck()
    page.wait_for_url("**keep=all")
    page.locator("#whatif .said", has_text="bit for bit").wait_for()
    page.get_by_role("button", name="leave out suspects").click()
    page.wait_for_url(f"**drop={NOISY}")
    page.get_by_label("aggregation").select_option("median")
    page.locator("#whatif .said", has_text="by median").wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("link", name=f"← round {LAST - 1}").click()
    page.locator("#whatif .said", has_text="That cannot be computed at once").wait_for()
    assert f"goto {LAST - 1}; whatif drop {NOISY} and aggregator median" in page.locator("#whatif").inner_text()


def test_suspects_are_marked_and_left_out_and_the_accuracy_without_them_is_told(site, page):
    """Table and what-if are on the first screen, side by side; the number has its error."""
    url, run = site
    page.set_viewport_size({"width": 1440, "height": 900})
    ready(page, f"{url}/runs/{run}/replay?round={LAST}", "replay")
    told = page.locator("#whatif .predicted")
    told.wait_for()
    assert page.locator("tr", has_text="▲ suspect").count() == 1
    assert "▲ suspect" in page.locator(".cohort tbody tr").first.inner_text()
    assert page.get_by_label(f"What if without {NOISY}").is_checked()
    words = re.search(r"([\d.]+)\s%\s± ([\d.]+) points accuracy .* instead of ([\d.]+)\s%", told.inner_text())
    assert words, told.inner_text()
    predicted, error, recorded = map(float, words.groups())
    assert 0 < error < 5
    assert abs(predicted - recorded) < 50
    table, what_if = (page.locator(which).bounding_box() for which in (".cohort", "#whatif"))
    assert table["x"] + table["width"] <= what_if["x"] + 1
    assert told.bounding_box()["y"] < 600


def test_two_hundred_clients_take_no_more_room_than_a_screen(site, page):
    url, _ = site
    page.set_viewport_size({"width": 1440, "height": 900})
    ready(page, f"{url}/runs/many/replay", "replay")
    page.get_by_text("clients 1 to 20 of 200").wait_for()
    assert page.locator(".cohort").bounding_box()["height"] < 900
    page.get_by_role("button", name="next", exact=True).click()
    page.get_by_text("clients 21 to 40 of 200").wait_for()


def test_replay_this_opens_the_round_and_the_suspect(site, page):
    url, _ = site
    ready(page, f"{url}/runs/evil/findings/BYZANTINE~~~", "finding")
    page.get_by_role("link", name="replay this").click()
    page.wait_for_selector("html[data-ready='replay']", state="attached")
    assert parse_qs(urlsplit(page.url).query) == {"round": ["1"], "node": [EVIL]}
    page.locator(".said", has_text="Round 1 of 0 to 2").wait_for()
    page.wait_for_load_state("networkidle")
    assert EVIL in page.locator("main").inner_text()
    assert page.locator("img").count() == 0
    assert page.get_by_role("heading", name=f"{EVIL} against the other clients").count() == 1


def test_a_page_without_a_tape_says_how_to_get_one(site, page):
    ready(page, f"{site[0]}/runs/bare/replay", "replay")
    assert "fv.Tape(" in page.locator("main").inner_text()
    assert judge(page) == []


@pytest.mark.parametrize("page", [{"viewport": {"width": 390, "height": 844}}], indirect=True, ids=["phone"])
def test_it_fits_a_phone(site, page):
    url, run = site
    ready(page, f"{url}/runs/{run}/replay?round={LAST}&node={NOISY}", "replay")
    page.wait_for_load_state("networkidle")
    wide = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert wide[0] <= wide[1] + 1
