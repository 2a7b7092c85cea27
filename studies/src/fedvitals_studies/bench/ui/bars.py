# SPDX-License-Identifier: Apache-2.0
"""The dashboard against its bars, in a real browser, on a synthetic run of 1,000 clients × 500 rounds × 50 layers.

The overview is opened three times on a freshly started server with empty caches; every other view once, in the order of
a plausible user, who stays three seconds on the first. Live updates are rounds that another store object writes into
the file at the same time.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedvitals.measurements import stamped
from fedvitals.records import Metric, Where
from fedvitals.store.schema import VERSION
from fedvitals.store.sqlite import SqliteStore
from fedvitals_studies.bench import synthetic
from fedvitals_studies.bench.synthetic import Synthetic, records_of_round, write_run
from fedvitals_studies.bench.ui.page import Visitor, browser_path, browsing, now, renderer_bytes, serving, unwatched

Row = dict[str, Any]
Tell = Callable[[str], None]
OVERVIEW, OTHER, CALL, LIVE, INTERACTION, BLOCKED = 1500, 1000, 100, 1000, 100, 200  # milliseconds
LISTED, RUNS = 1000, 1000  # milliseconds, and the number of runs in the list
MEMORY, WEIGHT = 300e6, 6e6  # bytes
STAY = 3.0  # seconds on the overview before the other views


def bench_ui(*, quick: bool = False, tell: Tell = lambda _: None) -> list[Row]:
    """Return a row for each bar; `details` has the single figures."""
    size = Synthetic(60, 40, 12) if quick else Synthetic()
    busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if busy > (os.cpu_count() or 1) / 2:
        tell(f"this machine is busy (load {busy:.1f}): every figure is worse than it would be alone")
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "runs.db"
        shutil.copyfile(cached(size, tell), store)
        many = write_many_runs(Path(folder) / "many.db", 50 if quick else RUNS)
        with browsing() as browser:
            rows = _measure(browser, store, size, quick, tell)
            return [*rows, _listed(browser, many, 50 if quick else RUNS, tell)]


def write_many_runs(path: Path, count: int) -> Path:
    """Write a store of `count` short runs: three clients, two rounds each."""
    with SqliteStore(path) as store:
        for number in range(count):
            write_run(store, Synthetic(3, 2, 2, run=f"run{number:04d}", seed=number))
    return path


def _listed(browser: Any, store: Path, runs: int, tell: Tell) -> Row:
    """Time the list of runs, opened three times on a freshly started server."""
    opened = []
    for _ in range(3):
        with serving(store) as (url, _):
            visitor = Visitor(browser, url)
            opened.append(visitor.open("/", "runs"))
            visitor.close()
    tell(f"{runs} runs: {max(opened):.0f} ms")
    return _row(f"list of {runs} runs", max(opened), LISTED, "ms", f"worst of {len(opened)}", opened)


def cached(size: Synthetic, tell: Tell) -> Path:
    """Return the synthetic run, created once; without an end, so that more can be written."""
    source = Path(synthetic.__file__).read_bytes() + repr((size, VERSION)).encode()
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedvitals-bench"
    name = f"synthetic-{size.clients}x{size.rounds}x{size.layers}"
    path = folder / f"{name}-{hashlib.blake2b(source, digest_size=6).hexdigest()}.db"
    if not path.exists():
        tell(f"inventing a run of {size.clients} clients, {size.rounds} rounds, {size.layers} layers")
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob(f"{name}-*.db"):
            old.unlink()
        making = path.with_suffix(".making")
        making.unlink(missing_ok=True)
        with SqliteStore(making) as store:
            write_run(store, size, size.rounds)
        making.rename(path)
    return path


def _measure(browser: Any, store: Path, size: Synthetic, quick: bool, tell: Tell) -> list[Row]:
    opened, weights, visits = [], [], list[Visitor]()
    for turn in range(1 if quick else 3):
        with serving(store) as (url, _):
            visitor = Visitor(browser, url)
            opened.append(visitor.open(f"/runs/{size.run}", "overview"))
            visitor.settle()
            weights.append(visitor.weight)
            tell(f"overview, turn {turn + 1}: {opened[-1]:.0f} ms, {weights[-1] / 1e6:.2f} MB")
            visitor.close()
            visits.append(visitor)
    with serving(store) as (url, _):
        visitor = Visitor(browser, url)
        visits.append(visitor)
        views = _views(visitor, size, tell)
        touched = _interactions(visitor, size, tell)
        live = 5 if quick else 20
        before = len(visitor.calls)
        updates = _live(visitor, store, size, live, tell)
        visitor.close()
        in_live = [milliseconds for _, milliseconds in visitor.calls[before:]]
        memory = _hour(browser, url, store, size, size.rounds + live, 20 if quick else 300, tell)
    return _rows(opened, weights, views, touched, updates, in_live, memory, visits, size.run, tell)


def _views(visitor: Visitor, size: Synthetic, tell: Tell) -> dict[str, float]:
    run, found = f"/runs/{size.run}", dict[str, float]()
    visitor.open(run, "overview")
    visitor.page.wait_for_timeout(1000 * STAY)
    paths = {
        "clients": f"{run}/clients", "client": f"{run}/clients/c7", "map": f"{run}/map", "layers": f"{run}/layers",
        "rounds": f"{run}/rounds", "round": f"{run}/rounds/{size.rounds - 1}", "topology": f"{run}/topology",
        "findings": f"{run}/findings", "finding": f"{run}/findings/LABEL_NOISE~c7~~", "runs": "/",
        "compare": f"/compare?runs={size.run}",
    }  # fmt: skip
    for view, path in paths.items():
        found[view] = visitor.open(path, view)
        visitor.settle()
        tell(f"{view}: {found[view]:.0f} ms")
    return found


_TABLE = "document.querySelector('table tbody').innerText"


def _interactions(visitor: Visitor, size: Synthetic, tell: Tell) -> dict[str, float]:
    """Return the milliseconds from an input to the frame that answers it, the worst of some."""
    page, found = visitor.page, dict[str, float]()
    visitor.open(f"/runs/{size.run}/clients", "clients")
    visitor.settle()
    for key in ("loss", "norm", "name"):
        page.evaluate(f"() => {{ __bench.before = {_TABLE}; }}")
        page.click(f"th[data-key={key}] button")
        found["sort"] = max(found.get("sort", 0.0), visitor.since_input(f"{_TABLE} !== __bench.before"))
        visitor.settle(0.2)
    for name, path, view in (("clients", "/clients", "clients"), ("overview", "", "overview")):
        visitor.open(f"/runs/{size.run}{path}", view)
        visitor.settle()
        box = _chart(page)
        middle = box["y"] + box["height"] / 2
        for step in range(30):  # a pointer moving around
            page.mouse.move(box["x"] + box["width"] * (0.2 + 0.02 * step), middle + step)
        page.mouse.move(box["x"] + 0.4 * box["width"], middle)
        page.mouse.down()
        for step in range(10):
            page.mouse.move(box["x"] + (0.4 + 0.03 * step) * box["width"], middle)
        page.mouse.up()
        found[f"zoom ({name})"] = visitor.since_input("location.search.includes('from=')")
        visitor.settle(0.2)
    visitor.gather()
    slow = [duration for _, duration in visitor.events]
    found["event to paint"] = max(slow, default=0.0)
    for name, value in found.items():
        tell(f"{name}: {value:.0f} ms")
    return found


def _chart(page: Any) -> dict[str, float]:
    """Return the visible part of the largest canvas."""
    page.wait_for_selector("canvas")
    largest = page.evaluate_handle(
        "[...document.querySelectorAll('canvas')].sort((a, b) => b.clientHeight - a.clientHeight)[0]"
    ).as_element()
    largest.scroll_into_view_if_needed()
    box: dict[str, float] = largest.bounding_box()
    return {**box, "height": min(box["height"], 300.0)}


def _live(visitor: Visitor, store: Path, size: Synthetic, rounds: int, tell: Tell) -> list[float]:
    """Return the milliseconds from the end of the transaction that stores a round until the page has drawn it."""
    visitor.open(f"/runs/{size.run}", "overview")
    visitor.settle()
    found = []
    with SqliteStore(store) as sink:
        for number in range(size.rounds, size.rounds + rounds):
            records = records_of_round(size, number)
            shown = _shows(number)
            visitor.page.evaluate(f"() => {{ __bench.drawn = __bench.when(() => {shown}); }}")
            sink.write(records)
            written = now()
            found.append(float(visitor.page.evaluate("__bench.drawn")) - written)
            visitor.page.wait_for_timeout(400)
    tell(f"live: {statistics.median(found):.0f} ms, at most {max(found):.0f}")
    return found


def _shows(number: int) -> str:
    """Return JavaScript: whether the page's header counts that round. The header is written after everything else."""
    facts = r"document.querySelector('.facts')?.innerText.replace(/[^\w/]/g, '')"
    return rf"/(^|\D){number + 1}(\/|round)/.test({facts})"


def _hour(browser: Any, url: str, store: Path, size: Synthetic, first: int, updates: int, tell: Tell) -> list[float]:
    """Return the memory of the overview's process in bytes: before, in the middle and at the end of an hour's updates.

    With rounds of 12 s an hour has 300; here they come as fast as the page looks for news, from the round `first` on,
    which follows those that are stored: the page's header counts rounds.
    """
    page = f"/runs/{size.run}"
    binary = browser_path() or str(browser.browser_type.executable_path)
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        unwatched(binary, url + page, Path(folder)) as port,
    ):
        time.sleep(5)
        found = [renderer_bytes()]
        with SqliteStore(store) as sink:
            for i in range(updates):
                where, at = Where(size.run, first + i), synthetic.STARTED + 12.0 * (first + i)
                told = {"accuracy": 0.9, "loss": 0.3, "time.round": 12.0}
                records = [Metric(where, at, name, value) for name, value in told.items()]
                sink.write([stamped(record, f"hour-{i}", k) for k, record in enumerate(records)])
                time.sleep(0.4)
                if i + 1 in (updates // 2, updates):
                    found.append(renderer_bytes())
                    tell(f"after {i + 1} updates: {found[-1] / 1e6:.0f} MB")
        # The measured page must have been active: its header counts the last round.
        late = browser.browser_type.connect_over_cdp(f"http://127.0.0.1:{port}")
        shown = False
        for _ in range(40):
            shown = shown or bool(late.contexts[0].pages[0].evaluate(_shows(first + updates - 1)))
            time.sleep(0 if shown else 0.5)
        late.close()
    if not shown:
        tell("the page whose memory was measured did not show the last round")
    return found if shown else [math.nan]


def by_endpoint(calls: Sequence[tuple[str, float]], run: str) -> list[Row]:
    """Return for each endpoint how many calls it answered and how long they took, the slowest 95th percentile first."""
    known: dict[str, list[float]] = {}
    for address, milliseconds in calls:
        path = re.sub(r"/findings/[^/]+", "/findings/KEY", re.sub(r"/rounds/-?\d+", "/rounds/N", address.split("?")[0]))
        known.setdefault(path.replace(f"/api/runs/{run}", "/api/runs/RUN"), []).append(milliseconds)
    rows = [
        {"endpoint": endpoint, "calls": len(times), "median": statistics.median(times), "p95": p95_of(times),
         "over the bar": sum(time > CALL for time in times)}
        for endpoint, times in known.items()
    ]  # fmt: skip
    return sorted(rows, key=lambda row: row["p95"], reverse=True)


def p95_of(values: Sequence[float]) -> float:
    """Return the value that 95 % of the values do not exceed; NaN without values."""
    return sorted(values)[max(0, math.ceil(0.95 * len(values)) - 1)] if values else math.nan


def _rows(
    opened: Sequence[float],
    weights: Sequence[float],
    views: dict[str, float],
    touched: dict[str, float],
    updates: Sequence[float],
    in_live: Sequence[float],
    memory: Sequence[float],
    visits: Sequence[Visitor],
    run: str,
    tell: Tell,
) -> list[Row]:
    called = [call for visitor in visits for call in visitor.calls]
    calls = [milliseconds for _, milliseconds in called]
    slowest = sorted(((milliseconds, call) for call, milliseconds in called), reverse=True)[:12]
    endpoints = by_endpoint(called, run)
    for row in endpoints:
        tell(
            "{endpoint}: {calls} calls, median {median:.0f} ms, p95 {p95:.0f} ms, {over the bar} over the bar".format(
                **row
            )
        )
    tasks = sorted((duration for visitor in visits for duration in visitor.longest), reverse=True)
    longest = tasks[0] if tasks else 0.0
    strangers = {url for visitor in visits for url in visitor.strangers}
    errors = [error for visitor in visits for error in visitor.errors]
    slow, fast = max(views, key=lambda view: views[view]), max(touched, key=lambda name: touched[name])
    rows = [
        _row("first useful paint, overview", max(opened), OVERVIEW, "ms", f"worst of {len(opened)}", opened),
        _row("first useful paint, other views", views[slow], OTHER, "ms", f"slowest: {slow}", views),
        _row("API calls of the live session, p95", p95_of(in_live), CALL, "ms", _calls_in_words(in_live), in_live),
        _row("API calls of all sessions, p95", p95_of(calls), CALL, "ms", _calls_in_words(calls),
             {"by endpoint": endpoints, "slowest": slowest}),
        _row("live: written → drawn", max(updates), LIVE, "ms", f"median {statistics.median(updates):.0f}", updates),
        _row("interaction", touched[fast], INTERACTION, "ms", f"slowest: {fast}", touched),
        _row("main thread blocked", longest, BLOCKED, "ms", f"{len(tasks)} tasks over 50 ms", tasks[:12]),
        _row("memory after an hour", max(memory) / 1e6, MEMORY / 1e6, "MB", f"before {memory[0] / 1e6:.0f}", memory),
        _row("weight of first load", max(weights) / 1e6, WEIGHT / 1e6, "MB", f"{len(strangers)} strangers", weights),
    ]  # fmt: skip
    if strangers:
        rows[-1] |= {"verdict": "missed", "details": sorted(strangers)}
    if errors:
        told = {"bar": "none", "measured": str(len(errors)), "verdict": "missed", "details": errors[:12]}
        rows.append({"what": "errors in the console", **told})
    return rows


def _calls_in_words(calls: Sequence[float]) -> str:
    return (
        f"{len(calls)} calls, median {statistics.median(calls):.0f}, {sum(time > CALL for time in calls)} over the bar"
    )


def _row(what: str, value: float, bar: float, unit: str, note: str, details: Any) -> Row:
    shown = f"{value:.0f}" if unit == "ms" or value >= 100 else f"{value:.2f}"
    verdict = "met" if value <= bar else "missed"
    measured = f"{shown} {unit} ({note})"
    return {"what": what, "bar": f"≤ {bar:g} {unit}", "measured": measured, "verdict": verdict, "value": value,
            "details": details}  # fmt: skip
