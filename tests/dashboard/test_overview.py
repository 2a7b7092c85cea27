# SPDX-License-Identifier: Apache-2.0
"""The overview in a real browser: verdict from stored findings, four bands on one axis, everything in the address."""

import contextlib
import re
import time

import pytest

from fedvitals.records import Run
from support import overview_run as charted
from support.dashboard_server import expect, judge, ready, serve

pytestmark = pytest.mark.browser
HOSTILE = "<img src=x onerror=alert(1)>"
BANDS = ("learning", "gradients", "clients", "system")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A run with an ill client, read by most tests."""
    return charted.written(
        tmp_path_factory.mktemp("overview") / "s.db",
        rounds=20,
        findings=[charted.finding(number=n) for n in range(5, 20)],
        more=[charted.failed("c1", 2)],
    )


@pytest.fixture(scope="module")
def address(store):
    with serve(store) as url:
        yield f"{url}/runs/{charted.RUN}"


@contextlib.contextmanager
def shown(page, store):
    """The address of the overview of a store of the test's own; the page leaves before the server does."""
    with serve(store) as url:
        yield f"{url}/runs/{charted.RUN}"
        page.goto("about:blank")


def drawn(page, url):
    """The page with all its bands."""
    ready(page, url, "overview")
    for band in BANDS:
        page.wait_for_selector(f"[data-band={band}] .chart-plot", state="attached")
    page.wait_for_selector("[data-band=clients] canvas.chart-base", state="attached")
    page.wait_for_selector("[data-band=system] .chart-plot svg *", state="attached")


def plot(page, band, which=0):
    """Where a band's picture of the rounds lies in the window."""
    place = page.locator(f"[data-band={band}] .chart-plot").nth(which)
    place.scroll_into_view_if_needed()
    return place, place.bounding_box()


def at_round(box, number, rounds=20, left=84, right=92):
    """The pixel in the middle of a round's column, with the gutters that all charts share."""
    return box["x"] + left + (number + 0.5) * (box["width"] - left - right) / rounds


def test_the_verdict_is_the_stored_findings_sentence(tmp_path, page):
    store = charted.written(tmp_path / "s.db", finished=False, findings=[charted.finding("c3", number=9)])
    with shown(page, store) as url:
        ready(page, url, "overview")
        headline = page.locator(".verdict-headline")
        assert "c3" in headline.inner_text()
        assert "since round 4" in headline.inner_text()
        assert page.locator(".verdict-state").inner_text().endswith("PROBLEM")
        worse = charted.finding("c1", since=7, number=9, severity="critical", confidence=0.99, issue="SIGN_FLIP")
        charted.stamp([worse], store)
        expect(headline).to_have_text(re.compile("^c1"))
        assert "since round 7" in headline.inner_text()
        assert "99" in headline.inner_text()


def test_a_healthy_run_says_so_as_plainly(tmp_path, page):
    with shown(page, charted.written(tmp_path / "s.db")) as url:
        ready(page, url, "overview")
        assert page.locator(".verdict-state").inner_text().endswith("OK")
        assert "10 rounds, 6 clients" in page.locator(".verdict-headline").inner_text()
        assert "Nobody is suspected." in page.locator("aside").inner_text()


def test_the_verdict_leads_to_evidence_client_and_remedy(address, page):
    ready(page, address, "overview")
    links = {a.inner_text(): a.get_attribute("href") for a in page.locator(".verdict-links a").all()}
    run = f"/runs/{charted.RUN}"
    assert links["evidence"] == f"{run}/findings/LABEL_NOISE~c3~~"
    assert links["c3\N{RIGHT SINGLE QUOTATION MARK}s page"] == f"{run}/clients/c3"
    assert links["what to do"].startswith(f"{run}/findings/LABEL_NOISE~c3~~")


def test_findings_are_flags_in_all_bands(address, page):
    drawn(page, address)
    for band in BANDS:
        for chart in page.locator(f"[data-band={band}] figure.chart:visible").all():
            chart.scroll_into_view_if_needed()
            assert chart.locator("a[href*='/findings/LABEL_NOISE']").count() >= 1, (band, chart.inner_text())


def test_hovering_one_band_shows_the_round_in_all(address, page):
    drawn(page, address)
    _, box = plot(page, "learning")
    page.mouse.move(at_round(box, 7), box["y"] + 30)
    page.wait_for_selector("[data-band=system] .chart-over line", state="attached")
    told = page.locator("[data-band=learning] .chart-readout").first.inner_text()
    assert told == "accuracy 35\u202f%"
    xs = {
        round(float(line.get_attribute("x1")), 1)
        for line in page.locator(".bands figure.chart:visible .chart-over > line[x1]").all()
        if line.get_attribute("x1") == line.get_attribute("x2")
    }
    assert len(xs) == 1  # the same pixel everywhere: the rounds of all bands stand under each other


def test_a_zoom_is_in_the_address_and_comes_back_with_it(address, page):
    drawn(page, address)
    _, box = plot(page, "learning")
    page.mouse.move(at_round(box, 5), box["y"] + 30)
    page.mouse.down()
    page.mouse.move(at_round(box, 8), box["y"] + 30, steps=4)
    page.mouse.move(at_round(box, 12), box["y"] + 30, steps=4)
    page.mouse.up()
    page.wait_for_url(re.compile(r"from=5&to=12"))
    assert page.locator(".follow").is_visible()
    page.go_back()  # one gesture, one step: the zoom is undone and the page stays
    page.wait_for_url(re.compile("chart1$"))
    expect(page.locator(".follow")).to_be_hidden()
    page.go_forward()
    page.wait_for_url(re.compile(r"from=5&to=12"))
    page.reload()
    page.wait_for_selector("html[data-ready=overview]", state="attached")
    expect(page.locator("[data-band=learning] .chart-plot").first).to_have_attribute(
        "aria-label", re.compile("rounds 5 to 12")
    )
    page.locator(".follow").click()
    page.wait_for_url(re.compile("chart1$"))
    assert not page.locator(".follow").is_visible()


def test_what_is_out_of_sight_holds_the_data_all_the_same(address, page):
    page.set_viewport_size({"width": 1440, "height": 400})
    drawn(page, address)
    expect(page.locator("[data-band=system] .chart-base > *").first).to_be_attached()
    assert page.get_by_text("Nothing was recorded").count() == 0
    assert page.get_by_text("Not loaded yet").count() == 0


def test_a_saved_picture_names_its_run_and_rounds(address, page, tmp_path):
    drawn(page, address)
    band = page.locator("[data-band=clients]")
    band.locator(".chart-menu-button").click()
    with page.expect_download() as waiting:
        band.get_by_role("menuitem", name="SVG").click()
    name = page.locator(".run-name").inner_text()
    assert waiting.value.suggested_filename == f"{name}-overview-loss.svg"
    waiting.value.save_as(tmp_path / "x.svg")
    words = (tmp_path / "x.svg").read_text(encoding="utf-8")
    assert f"{name} · rounds " in words
    assert "in trouble, then furthest from the others" in words
    assert words.count("data:image/png") >= 3  # the hatching, the cells, the colour scale


def test_the_sign_is_chosen_in_the_catalogues_words(address, page):
    drawn(page, address)
    select = page.locator("[data-band=clients] select").first
    assert "update norm" in select.inner_text()
    select.select_option("update.norm")
    page.wait_for_url(re.compile("sign=update.norm"))
    expect(page.locator("[data-band=clients] .chart-title")).to_have_text("update norm")
    page.go_back()
    expect(page.locator("[data-band=clients] .chart-title")).to_have_text("loss")


def test_a_cell_leads_to_that_client_in_that_round(address, page):
    drawn(page, address)
    _, box = plot(page, "clients")
    page.mouse.click(at_round(box, 8), box["y"] + 7)  # the first row: who is in trouble
    page.wait_for_url(re.compile(r"/clients/c3\?round=8"))


def test_a_chosen_client_is_drawn_and_stays_in_the_address(address, page):
    drawn(page, address)
    button = page.get_by_role("button", name="Show c3 in all pictures")
    button.click()
    page.wait_for_url(re.compile("client=c3"))
    expect(page.locator(".suspect-list button").first).to_have_attribute("aria-pressed", "true")
    assert page.locator(".client-field").input_value() == "c3"


def test_new_rounds_extend_the_axis_and_do_not_move_a_zoom(tmp_path, page):
    store = charted.written(tmp_path / "s.db", rounds=10, finished=False)
    with shown(page, store) as url:
        drawn(page, f"{url}?from=2&to=5")
        assert page.locator(".follow").is_visible()
        charted.stamp(charted.of_round(10, [f"c{i}" for i in range(6)]), store)
        expect(page.locator(".facts")).to_contain_text("11 rounds")
        assert "from=2&to=5" in page.url
        assert "rounds 2 to 5" in page.locator("[data-band=learning] .chart-plot").first.get_attribute("aria-label")
        page.locator(".follow").click()
        expect(page.locator("[data-band=learning] .chart-plot").first).to_have_attribute(
            "aria-label", re.compile("rounds 0 to 10")
        )


def test_hostile_names_are_text(tmp_path, page):
    names = [f"{HOSTILE}{i}" for i in range(6)]
    found = charted.finding(names[3], message=f"{HOSTILE} is ill.")
    store = charted.written(tmp_path / "s.db", names=names, name=HOSTILE, findings=[found])
    page.on("dialog", lambda dialog: pytest.fail(f"a name ran: {dialog.message}"))
    with shown(page, store) as url:
        drawn(page, f"{url}?client={names[2].replace('<', '%3C').replace('>', '%3E')}")
        assert names[3] in page.locator(".verdict").inner_text()
        assert names[3] in page.locator(".suspect-list").inner_text()
        assert page.locator("main img").count() == 0


def test_a_run_without_rounds_says_what_will_come(tmp_path, page):
    with shown(page, charted.written(tmp_path / "s.db", rounds=0, finished=False)) as url:
        ready(page, url, "overview")
        assert "No round yet." in page.locator("main").inner_text()
        assert "0 rounds" in page.locator(".facts").inner_text()  # how many were planned is not known
        assert page.locator(".bands figure.chart:visible").count() == 0


def test_a_run_that_has_just_begun_waits_for_round_0(tmp_path, page):
    config = {"rounds": 9, "fedvitals": {"detectors": 34}}
    charted.stamp([Run(charted.RUN, "charted", config=config, started=time.time())], tmp_path / "s.db")
    with shown(page, tmp_path / "s.db") as url:
        ready(page, url, "overview")
        expect(page.locator(".facts")).to_contain_text("waiting for round 0")
        expect(page.locator(".verdict-headline")).to_have_text("Waiting for round 0.")


@pytest.mark.parametrize("page", [{"color_scheme": "light"}, {"color_scheme": "dark"}], indirect=True)
def test_axe_has_nothing_against_it(address, page):
    drawn(page, address)
    assert judge(page) == []


@pytest.mark.parametrize("page", [{"viewport": {"width": 390, "height": 800}}], indirect=True)
def test_on_a_phone_it_is_one_column_and_fits(address, page):
    ready(page, address, "overview")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    verdict, findings, bands = (
        page.locator(f".overview > {one}").bounding_box() for one in (".verdict", "aside", ".bands")
    )
    assert verdict["y"] < findings["y"] < bands["y"]
