# SPDX-License-Identifier: Apache-2.0
"""The dashboard as `fedvitals ui` starts it: reading is open on this machine, changes need the printed token."""

import os
import stat
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest

from fedvitals.store import open_reader
from fedvitals.store.read.queries import list_runs
from support.dashboard_server import enter, expect, judge, ready, serve, serving
from support.timed_run import begin, stored
from support.waiting import wait_until

pytestmark = pytest.mark.thorough

RUN = "20260101-000000-live"
OURS = {"X-Fedvitals": "1"}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    told = begin(RUN, "live")
    told.round({"c0": (0.1, 1.0, 0.2), "c1": (0.1, 2.0, 0.2)}, accuracy=0.5)
    return stored(tmp_path / "runs.db", told)


def runs_in(store: Path) -> list[str]:
    with open_reader(store) as reader:
        return [run.id for run in list_runs(reader)]


def test_another_user_of_this_machine_reads_but_changes_nothing(store: Path) -> None:
    with serving(store) as (url, process):
        assert urlsplit(url).hostname == "127.0.0.1"
        assert httpx2.get(f"{url}/api/runs").json()["stored"] == 1
        refused = httpx2.delete(f"{url}/api/runs/{RUN}", headers=OURS)
        assert refused.status_code == 401
        assert "printed" in refused.json()["error"]["hint"]
        assert runs_in(store) == [RUN]
        if Path("/proc/self/cmdline").exists():  # what every user can see of a process
            assert url.token.encode() not in Path(f"/proc/{process.pid}/cmdline").read_bytes()
        right = {**OURS, "Authorization": f"Bearer {url.token}"}
        assert httpx2.delete(f"{url}/api/runs/{RUN}", headers=right).status_code == 200
    assert runs_in(store) == []


def test_nobody_gets_around_the_token_by_what_a_proxy_would_say(store: Path) -> None:
    """Names and addresses in headers are those of whoever sends them."""
    with serve(store) as url:
        delete = lambda **headers: httpx2.delete(f"{url}/api/runs/{RUN}", headers={**OURS, **headers})  # noqa: E731
        for address in range(6):
            wrong = {"Authorization": "Bearer wrong", "X-Forwarded-For": f"192.0.2.{address}", "Forwarded": "for=[::1]"}
            last = delete(**wrong)
        assert last.status_code == 429, "another address in a header is not another client"
        right = {"Authorization": f"Bearer {url.token}"}
        for name in ("evil.example", "127.0.0.1.evil.example", "127.0.0.1@evil.example", "evil.example:80", "0x7f.1"):
            assert delete(Host=name, **right).status_code == 403, "a name that another site points at this machine"
            assert httpx2.get(f"{url}/api/runs", headers={"Host": name}).status_code == 403
        for origin in ("http://evil.example", "null", f"http://localhost:{urlsplit(url).port}", "http://127.0.0.1:9"):
            assert delete(Origin=origin, **right).status_code == 403
        for path in (
            f"//api/runs/{RUN}",
            f"/api//runs/{RUN}",
            f"/static/../api/runs/{RUN}",
            f"/api/login/../runs/{RUN}",
        ):
            refused = httpx2.request("DELETE", f"{url}{path}", headers=OURS)
            assert refused.status_code in (401, 404, 405, 429)
        post = httpx2.post(f"{url}/api/runs/{RUN}", headers={**OURS, "X-HTTP-Method-Override": "DELETE"})
        assert post.status_code in (401, 429)
    assert runs_in(store) == [RUN]


@pytest.mark.skipif(os.name != "posix", reason="a browser that is a shell script")
def test_the_browser_is_opened_without_the_token_among_its_arguments(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, browser = tmp_path / "told", tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\nprintf %s "$1" > "{told}.new" && mv "{told}.new" "{told}"\n')
    browser.chmod(0o700)
    monkeypatch.setenv("BROWSER", f"{browser} %s")
    monkeypatch.setenv("DISPLAY", ":0")
    with serving(store, RUN, opened=True) as (url, _):
        wait_until(told.exists, what="the browser to be opened")
        opened = told.read_text()
        assert url.token not in opened
        file = Path(urlsplit(opened).path)
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
        assert url.token in file.read_text()
        assert f"back=%2Fruns%2F{RUN}" in file.read_text()
    wait_until(lambda: not file.exists(), what="the file to be removed")


# -- in the browser ---------------------------------------------------------------------------------------------------

browser = pytest.mark.browser


def stored_token(page: object) -> str:
    return page.evaluate("localStorage.getItem('fedvitals-token')")


@browser
def test_a_page_without_the_token_says_how_to_get_it(page, store: Path) -> None:
    with serve(store) as url:
        ready(page, url, "runs")
        for name in ("Tags of live", "Delete live"):
            button = page.get_by_role("button", name=name)
            assert button.is_disabled()
            assert "fedvitals ui printed" in button.get_attribute("title")
        expect(page.locator("footer")).to_contain_text("open the address that fedvitals ui printed when it started")
        assert judge(page) == []
        page.get_by_role("button", name="enter the token").click()
        page.get_by_label("Token").fill(url.token)
        page.get_by_role("button", name="Open").click()
        page.wait_for_selector("html[data-ready='runs']", state="attached")
        assert page.get_by_role("button", name="Delete live").is_enabled()
        expect(page.locator("footer .read-only")).to_be_hidden()
        page.goto("about:blank")


@browser
def test_the_printed_address_lets_the_page_change_things_and_the_token_leaves_the_address(page, store: Path) -> None:
    with serve(store, RUN) as url:
        enter(page, url, "overview")
        assert page.url == f"{url}/runs/{RUN}"
        assert page.evaluate("document.cookie") == ""
        assert page.context.cookies() == [], "a cookie would be sent to every server on this machine"
        page.goto("about:blank")
        other = page.context.new_page()
        ready(other, url, "runs")  # a second tab, by hand
        other.get_by_role("button", name="Delete live").click()
        other.get_by_role("dialog").get_by_role("button", name="Delete for good").click()
        expect(other.get_by_text("No run yet.")).to_be_visible()
        other.goto("about:blank")
    assert runs_in(store) == []


@browser
def test_no_page_of_another_port_is_sent_or_shown_the_token(page, store: Path, tmp_path: Path) -> None:
    other = stored(tmp_path / "other.db", begin("20260101-000000-other", "other"))
    with serve(store) as url, serve(other) as foreign:
        enter(page, url)
        headers = []
        page.on("request", lambda request: headers.append((request.url, request.all_headers())))
        ready(page, f"{foreign}/", "runs")
        assert stored_token(page) is None
        wanted = """async (url) => {
            const options = {method: 'DELETE', headers: {'X-Fedvitals': '1'}};
            try { return (await fetch(url, options)).status } catch (error) { return error.name }
        }"""
        page.expected_errors += ["CORS", "net::ERR_FAILED", "Content Security Policy", "Connecting to"]
        assert page.evaluate(wanted, f"{url}/api/runs/{RUN}") == "TypeError"
        assert headers
        for _, sent in headers:
            assert url.token not in str(sent)
            assert "referer" not in sent or url.token not in sent["referer"]
        page.goto("about:blank")
    assert runs_in(store) == [RUN]


@browser
@pytest.mark.thorough
def test_after_a_new_start_an_open_page_only_reads(page, store: Path) -> None:
    page.expected_errors += ["net::ERR_", "ERR_"]
    with serving(store) as (url, process):
        port = urlsplit(url).port
        enter(page, url)
        assert page.get_by_role("button", name="Delete live").is_enabled()
        process.terminate()
        process.wait()
    with serve(store, port=port) as again:
        assert again.token != url.token
        expect(page.get_by_role("button", name="Delete live")).to_be_disabled()
        expect(page.locator("footer")).to_contain_text("This page can only read.")
        enter(page, again)
        assert page.get_by_role("button", name="Delete live").is_enabled()
        page.goto("about:blank")
