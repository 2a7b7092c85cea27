# SPDX-License-Identifier: Apache-2.0
"""The page by itself: it follows a real training, says when the server is gone, and heals; the way in with a token."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from fedvitals.records import Metric, Where
from fedvitals.store import open_store
from support.dashboard_server import ready, serve, serving
from support.timed_run import begin, stored
from support.waiting import PATIENCE

pytestmark = [pytest.mark.browser, pytest.mark.thorough]
RUN = "20260101-000000-live"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    told = begin(RUN, "live")
    for number in range(6):
        told.round({"c0": (0.1, 1.0, 0.2), "c1": (0.1, 2.0, 0.2)}, accuracy=0.5 + number / 20)
    return stored(tmp_path / "runs.db", told)


def _round(store: Path, number: int) -> None:
    sink = open_store(store)
    sink.write([Metric(Where(RUN, number), 1.7e9 + number, "accuracy", 0.9, "later", number)])
    sink.close()


def test_a_page_follows_a_training_without_being_touched(page, tmp_path: Path) -> None:
    store = tmp_path / "live.db"
    with serve(store) as url:
        page.expected_errors.append("503")  # there is no store yet, which the page says in words
        page.goto(url)
        page.get_by_text("No store to read yet").wait_for()
        training = subprocess.Popen(
            [sys.executable, "-m", "fedvitals", "demo", "--quick", "--no-ui", "--store", str(store)],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        try:
            page.get_by_role("link", name="demo").first.click(timeout=1000 * PATIENCE)
            page.wait_for_selector("html[data-ready='overview']", state="attached", timeout=1000 * PATIENCE)
            page.evaluate("window.untouched = true")
            seen, pace = set(), set()
            until = time.monotonic() + 90
            while time.monotonic() < until and "8/8 rounds" not in seen:
                facts = page.locator(".facts").inner_text()
                seen.add(facts.split("\n")[1])
                pace |= {*re.findall("a round, about .+ left", facts)}
                page.wait_for_timeout(100)
            assert pace, "its rate and the time left stand there while it trains"
            assert "8/8 rounds" in seen
            assert len(seen) >= 3, f"it must have moved: {seen}"
            page.get_by_text("finished").first.wait_for(timeout=1000 * PATIENCE)
        finally:
            assert training.wait(60) == 0
        assert page.evaluate("window.untouched"), "the page was loaded anew"


def test_a_change_keeps_zoom_scroll_and_focus(page, store: Path) -> None:
    with serve(store) as url:
        page.set_viewport_size({"width": 1440, "height": 500})
        ready(page, f"{url}/runs/{RUN}?from=2&to=4", "overview")
        page.wait_for_timeout(1000)  # all bands have come; what is shown first takes no less room than what follows
        page.evaluate("scrollTo(0, 200)")
        button = page.locator("header button").last
        button.focus()
        at = page.evaluate("scrollY")
        assert at > 100
        _round(store, 6)
        page.get_by_text(re.compile(r"\b7(/\d+)? rounds")).first.wait_for(timeout=1000 * PATIENCE)
        assert "from=2&to=4" in page.url
        assert page.evaluate("scrollY") == at
        assert button.evaluate("node => node === document.activeElement")


def test_a_lost_server_is_told_and_its_return_heals_the_page(page, store: Path) -> None:
    page.expected_errors += [
        "ERR_CONNECTION_REFUSED",
        "ERR_INCOMPLETE_CHUNKED",
        "ERR_CONNECTION_RESET",
        "ERR_EMPTY_RESPONSE",
    ]
    with serving(store) as (url, process):
        port = int(url.rsplit(":", 1)[1])
        ready(page, f"{url}/runs/{RUN}", "overview")
        process.terminate()
        process.wait(PATIENCE)
        page.get_by_text("connection lost").wait_for(timeout=1000 * PATIENCE)
        assert page.get_by_text(re.compile(r"\b6(/\d+)? rounds")).first.is_visible(), "what was known stays"
    _round(store, 6)
    with serve(store, port=port):
        page.get_by_text(re.compile(r"\b7(/\d+)? rounds")).first.wait_for(timeout=1000 * PATIENCE)
        page.wait_for_function("!document.querySelector('.connection').textContent")


def test_another_address_needs_the_token_which_becomes_a_cookie(page, store: Path) -> None:
    page.expected_errors.append("401")
    with serve(store, "--host", "0.0.0.0") as printed:
        port, token = urlsplit(printed).port, printed.token
        url = f"http://127.0.0.1:{port}"
        page.goto(f"{url}/runs/{RUN}")
        page.wait_for_url("**/login")
        page.get_by_label("Token").fill("wrong")
        page.get_by_role("button", name="Open").click()
        page.get_by_text("That is not the token").wait_for()
        page.get_by_label("Token").fill(token)
        page.get_by_role("button", name="Open").click()
        page.wait_for_selector("html[data-ready='overview']", state="attached")
        assert page.evaluate("document.cookie") == ""
        page.context.clear_cookies()
        page.goto(f"{url}/login")
        page.goto(f"{url}/login#token={token}")  # only what stands behind «#» changes
        page.wait_for_selector("html[data-ready='runs']", state="attached")
        assert token not in page.url


@pytest.mark.parametrize("back", ["//evil.example", "/%09/evil.example", "/%5Cevil.example", "https://evil.example/"])
def test_the_way_in_leads_nowhere_else(page, store: Path, back: str) -> None:
    with serve(store, "--host", "0.0.0.0") as printed:
        port, token = urlsplit(printed).port, printed.token
        page.goto(f"http://127.0.0.1:{port}/login#token={token}&back={back}")
        page.wait_for_selector("html[data-ready='runs']", state="attached")
        assert page.url == f"http://127.0.0.1:{port}/"


def test_back_returns_and_keys_lead_on(page, store: Path) -> None:
    with serve(store) as url:
        ready(page, url, "runs")
        page.keyboard.press("g")
        page.goto(f"{url}/runs/{RUN}")
        page.wait_for_selector("html[data-ready='overview']", state="attached")
        for key, view in (("c", "clients"), ("l", "layers"), ("f", "findings"), ("r", "rounds")):
            page.keyboard.press("g")
            page.keyboard.press(key)
            page.wait_for_selector(f"html[data-ready='{view}']", state="attached")
        page.go_back()
        page.wait_for_selector("html[data-ready='findings']", state="attached")
        page.keyboard.press("?")
        page.get_by_role("dialog", name="Keys").wait_for()
        page.keyboard.press("Escape")
        page.keyboard.press("t")
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        page.reload()
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"


@pytest.mark.parametrize(
    "path", ["/runs/none", "/runs/%E0%A4%A", "/runs/a/nothing", "/runs//clients", "/nope", "/nope/x"]
)
def test_an_address_that_leads_nowhere_says_so(page, store: Path, path: str) -> None:
    page.expected_errors += ["404", "400"]
    with serve(store) as url:
        page.goto(url + path)
        page.locator(".state").wait_for()
        assert page.locator(".state h1").inner_text() in ("Not here.", "There is no such page.")
