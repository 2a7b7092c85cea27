# SPDX-License-Identifier: Apache-2.0
"""A dashboard in a process of its own, and a real browser that looks at it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qsl, urlsplit

import pytest

from support.waiting import PATIENCE

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), None)
MISSING = "no Chromium on this machine (Debian: apt install chromium)"
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason=MISSING)
_ENDED: set[int] = set()  # ports of servers that are gone
VIEW = {"width": 1440, "height": 1000}


TOKEN = "right"  # of apps that tests make in their own process
WRITE = {"X-Fedvitals": "1", "Authorization": f"Bearer {TOKEN}"}


class Url(str):
    """The address of a dashboard, as a base for others; `printed` is the one that a person opens, with the token."""

    __slots__ = ("printed",)

    def __new__(cls, printed: str) -> Self:
        url = super().__new__(cls, printed.partition("/login#")[0])
        url.printed = printed
        return url

    @property
    def token(self) -> str:
        return dict(parse_qsl(urlsplit(self.printed).fragment))["token"]


@contextlib.contextmanager
def serve(store: str | Path, *arguments: str, port: int = 0) -> Iterator[Url]:
    """The address of a dashboard over this store, until the block ends."""
    with serving(store, *arguments, port=port) as (url, _):
        yield url


@contextlib.contextmanager
def serving(
    store: str | Path, *arguments: str, port: int = 0, opened: bool = False
) -> Iterator[tuple[Url, subprocess.Popen[str]]]:
    """The same, with the process, for tests that end it. `opened`: in the browser that $BROWSER names."""
    command = [sys.executable, "-m", "fedvitals", "ui", "--port", str(port), "--store", str(store)]
    process = subprocess.Popen(
        [*command, *([] if opened else ["--no-open"]), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ},
    )
    said: list[str] = []
    url = Url("")
    reading = threading.Thread(target=lambda: said.extend(process.stderr), daemon=True)
    reading.start()
    try:
        line = process.stdout.readline()
        found = re.search(r"(http://\S+)", line)
        assert found, f"the dashboard did not start: {line}{''.join(said)}"
        url = Url(found[1])
        _ENDED.discard(urlsplit(url).port)
        yield url, process
    finally:
        _ENDED.add(urlsplit(url).port)
        process.terminate()
        process.wait(PATIENCE)
        process.stdout.close()
        reading.join(PATIENCE)
        process.stderr.close()


def expect(subject: Any, message: str | None = None) -> Any:
    """Playwright's `expect`, loaded when a test of a browser needs it: most runs have none."""
    from playwright.sync_api import expect as expect_of_playwright

    return expect_of_playwright(subject, message)


@pytest.fixture(scope="module")
def chromium() -> Iterator[object]:
    """One browser for the tests of a file, no longer: Playwright keeps an event loop running, and others start one."""
    if CHROMIUM is None:
        pytest.skip(MISSING)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def page(chromium: object, request: pytest.FixtureRequest) -> Iterator[object]:
    """A page of its own. An error in its console, or a request that leaves this machine, fails the test.

    Errors that a test provokes: `page.expected_errors.append("part of the text")`.
    """
    options = getattr(request, "param", None) or {}
    context = chromium.new_context(**{"viewport": VIEW, "reduced_motion": "reduce", **options})
    page = context.new_page()
    page.expected_errors = []
    troubles: list[str] = []
    page.on(
        "console",
        lambda message: message.type == "error" and troubles.append(f"{message.text} ({message.location.get('url')})"),
    )
    page.on("pageerror", lambda error: troubles.append(f"uncaught: {error}"))
    context.on("request", lambda asked: _is_local(asked.url) or troubles.append(f"left this machine: {asked.url}"))
    yield page
    context.close()
    # A server that a test has ended before its page: that the page then tries to reach it is as it should be.
    ended = [text for text in troubles if "net::ERR_" in text and any(f":{port}/" in text for port in _ENDED)]
    left = [text for text in troubles if text not in ended and not any(part in text for part in page.expected_errors)]
    assert not left, "\n".join(left)


def _is_local(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme in ("data", "blob", "about", "file") or parts.hostname in ("127.0.0.1", "localhost", "::1")


def ready(page: object, url: str, view: str | None = None) -> None:
    """Open an address, and wait until its page has been drawn."""
    page.goto(url)
    wanted = "html[data-ready]" if view is None else f"html[data-ready='{view}']"
    page.wait_for_selector(wanted, state="attached", timeout=1000 * PATIENCE)


def enter(page: object, url: Url, view: str = "runs") -> None:
    """Open the printed address: from then on the page may change the store."""
    ready(page, url.printed, view)


def judge(page: object) -> list[str]:
    """What axe has against the page as it is: WCAG 2 A and AA."""
    from axe_core_python.sync_playwright import Axe

    found = Axe().run(page, options={"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]})
    return [
        f"{one['id']}: {one['help']}: {json.dumps([node['target'] for node in one['nodes']][:4])}"
        for one in found["violations"]
    ]
