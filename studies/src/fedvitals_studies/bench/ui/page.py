# SPDX-License-Identifier: Apache-2.0
"""A dashboard in a separate process and a headless browser that opens it, with a stopwatch inside the page."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fedvitals.errors import ConfigError

VIEW = {"width": 1440, "height": 1000}
PATIENCE = 60_000  # milliseconds

# Runs before the page's own scripts. Ready: two frames after the page reports that it has shown its data.
_WATCH = """
window.__bench = {ready: {}, tasks: [], events: [], input: 0};
const frames = (then) => requestAnimationFrame(() => requestAnimationFrame(then));
new MutationObserver(() => {
  const name = document.documentElement.dataset.ready;
  if (!name || name in __bench.ready) return;
  __bench.ready[name] = -1;
  frames(() => (__bench.ready[name] = performance.now()));
}).observe(document, {subtree: true, attributes: true, attributeFilter: ["data-ready"]});
new PerformanceObserver((list) => list.getEntries().forEach((one) => __bench.tasks.push(one.duration)))
  .observe({type: "longtask", buffered: true});
new PerformanceObserver((list) => list.getEntries().forEach((one) => __bench.events.push([one.name, one.duration])))
  .observe({type: "event", buffered: true, durationThreshold: 16});
for (const kind of ["pointerdown", "pointerup", "keydown", "click", "wheel"]) {
  addEventListener(kind, (event) => (__bench.input = event.timeStamp), {capture: true, passive: true});
}
const until = (holds, give) => new Promise((done) => {
  const end = performance.now() + 20000; // a page that shows nothing by then never will
  const look = () => (holds() || performance.now() > end ? done(give()) : requestAnimationFrame(look));
  look();
});
__bench.opened = (view) => until(() => __bench.ready[view] > 0, () => __bench.ready[view] || performance.now());
// Milliseconds from the last input to the frame in which something holds; and when something is drawn that holds.
__bench.since = (holds) => until(holds, () => performance.now() - __bench.input);
__bench.when = (holds) => until(holds, () => null).then(() => new Promise((done) => frames(() => done(Date.now()))));
"""


def browser_path() -> str | None:
    """Return this machine's Chromium; None: the one that Playwright has installed, if any."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


@contextlib.contextmanager
def serving(store: Path) -> Iterator[tuple[str, int]]:
    """Yield the address and the process id of a dashboard over this store, freshly started with empty caches."""
    command = [sys.executable, "-m", "fedvitals", "ui", "--no-open", "--port", "0", "--store", str(store)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ})  # noqa: S603
    try:
        line = process.stdout.readline() if process.stdout else ""
        found = re.search(r"(http://\S+)/login#", line)  # measured as a page that only reads
        if found is None:
            raise ConfigError(f"The dashboard did not start: {line.strip() or 'it said nothing'}.")
        yield found[1], process.pid
    finally:
        process.terminate()
        process.wait(20)
        if process.stdout:
            process.stdout.close()


@contextlib.contextmanager
def browsing() -> Iterator[Any]:
    try:
        from playwright.sync_api import Error, sync_playwright  # noqa: PLC0415 - an extra
    except ImportError:
        raise ConfigError(
            "`fedvitals bench ui` needs Playwright, which is not installed: pip install playwright."
        ) from None
    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(
                executable_path=browser_path(), args=["--no-sandbox", "--disable-gpu", "--enable-precise-memory-info"]
            )
        except Error as error:
            first = str(error).strip().splitlines()[0]
            raise ConfigError(f"No Chromium could be started: {first} Debian: apt install chromium.") from error
        try:
            yield browser
        finally:
            browser.close()


class Visitor:
    """A page in a fresh browser, and all its requests to the server."""

    def __init__(self, browser: Any, url: str) -> None:
        self.url = url
        self._context = browser.new_context(viewport=VIEW)
        self.page = self._context.new_page()
        self.page.set_default_timeout(PATIENCE)
        self.page.add_init_script(_WATCH)
        self.weight = 0
        self.strangers: set[str] = set()
        self.calls: list[tuple[str, float]] = []
        self.errors: list[str] = []
        self.longest: list[float] = []
        self.events: list[tuple[str, float]] = []
        self._asked: dict[str, tuple[str, float]] = {}
        session = self._context.new_cdp_session(self.page)
        session.on("Network.requestWillBeSent", self._sent)
        session.on("Network.responseReceived", self._answered)
        session.on("Network.dataReceived", self._received)
        session.on("Network.loadingFinished", self._finished)
        session.send("Network.enable")
        self.page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))

    def _sent(self, event: Any) -> None:
        address = urlsplit(event["request"]["url"])
        self._asked[event["requestId"]] = (f"{address.path}?{address.query}".rstrip("?"), event["timestamp"])
        if address.scheme in ("http", "https", "ws", "wss") and address.hostname not in ("127.0.0.1", "localhost"):
            self.strangers.add(event["request"]["url"])

    def _answered(self, event: Any) -> None:
        """Record a request from when it was sent: a browser delays requests while six others are in progress."""
        timing = event["response"].get("timing")
        if timing and event["requestId"] in self._asked:
            began = timing["requestTime"] + timing["sendStart"] / 1000
            self._asked[event["requestId"]] = (self._asked[event["requestId"]][0], began)

    def _received(self, event: Any) -> None:
        self.weight += event["dataLength"]

    def _finished(self, event: Any) -> None:
        path, began = self._asked.pop(event["requestId"], ("", 0.0))
        if path.startswith("/api/"):
            self.calls.append((path, 1000 * (event["timestamp"] - began)))

    def open(self, path: str, view: str) -> float:
        """Return milliseconds from the beginning of the navigation until the view's data are on the screen."""
        self.gather()
        self.page.goto(self.url + path, wait_until="commit")
        return float(self.page.evaluate(f"__bench.opened('{view}')"))

    def settle(self, seconds: float = 0.5) -> None:
        """Wait until the page makes no more requests."""
        count = -1
        while count != len(self.calls):
            count = len(self.calls)
            self.page.wait_for_timeout(1000 * seconds)

    def gather(self) -> None:
        """Collect what the page has counted so far: a navigation resets it."""
        found = self.page.evaluate("window.__bench ? {tasks: __bench.tasks, events: __bench.events} : null")
        if found:
            self.longest += found["tasks"]
            self.events += [(name, duration) for name, duration in found["events"]]
            self.page.evaluate("() => { __bench.tasks = []; __bench.events = []; }")

    def since_input(self, holds: str) -> float:
        """Return milliseconds from the newest input until a frame in which the expression holds."""
        return float(self.page.evaluate(f"__bench.since(() => {holds})"))

    def close(self) -> None:
        self.gather()
        self._context.close()


@contextlib.contextmanager
def unwatched(browser: str, url: str, folder: Path) -> Iterator[int]:
    """Yield the port of a browser without an attached debugger, which would keep a copy of every answer.

    It draws the page on a screen that nobody sees.
    """
    command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--mute-audio",
               "--disable-background-timer-throttling", "--remote-debugging-port=0", f"--user-data-dir={folder}",
               f"--window-size={VIEW['width']},{VIEW['height']}", url]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # noqa: S603
    try:
        told = folder / "DevToolsActivePort"
        until = time.monotonic() + 30
        while not (told.exists() and told.read_text().strip()) and time.monotonic() < until:
            time.sleep(0.1)
        yield int(told.read_text().split()[0])
    finally:
        process.terminate()
        process.wait(20)


def renderer_bytes() -> float:
    """Return the memory of the largest process that draws a page for us (its proportional share); NaN if unknown.

    The pages of one bench are drawn one after the other, so there is one.
    """
    largest = float("nan")
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            if b"--type=renderer" not in (process / "cmdline").read_bytes() or not _is_ours(int(process.name)):
                continue
            found = re.search(r"^Pss:\s+(\d+) kB", (process / "smaps_rollup").read_text(), re.MULTILINE)
            size = 1024.0 * int(found[1]) if found else 0.0
            largest = size if not largest >= size else largest
    return largest


def _is_ours(process: int) -> bool:
    """Whether it descends from this process: others on this machine may run browsers, too."""
    while process > 1:
        if process == os.getpid():
            return True
        status = Path(f"/proc/{process}/stat").read_text()
        process = int(status.rpartition(")")[2].split()[1])
    return False


def now() -> float:
    """Return milliseconds in the page's time."""
    return 1000 * time.time()
