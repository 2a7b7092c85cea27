# SPDX-License-Identifier: Apache-2.0
"""Names that want to be code: whatever a client, a layer or a run is called, every page shows it as the text it is."""

from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import httpx2
import numpy as np
import pytest

from fedvitals.records import (
    Action,
    Event,
    Finding,
    LayerStats,
    LayerTable,
    Metric,
    Run,
    Suspect,
    Transfer,
    Where,
)  # fmt: skip
from fedvitals.store import open_store
from fedvitals.store.marks import set_mark
from fedvitals_studies.bench.synthetic import Synthetic, records_of_round
from support import overview_run as charted
from support.dashboard_server import ready, serve

pytestmark = [pytest.mark.browser, pytest.mark.thorough]
EVIL = '"><img src=x onerror="window.pwned=1"><script>window.pwned=1</script>{{7*7}}${7*7}'
SIZE = Synthetic(clients=6, rounds=8, layers=3, every=1, run="20260101-000000-evil")
PAGES = ("", "/clients", "/map", "/layers", "/rounds", "/rounds/6", "/topology", "/findings", "/replay")


def _evil(name: str | None) -> str | None:
    return None if name is None else f"{name}{EVIL}"


def _turned(record: object) -> object:
    """The record with every name and sentence made hostile; codes and metric names are ours."""
    if isinstance(record, Run):
        tables = tuple(map(_table, record.tables))
        return replace(record, name=EVIL, config={EVIL: EVIL, **record.config}, versions={EVIL: EVIL}, tables=tables)
    where = record.where
    node = where.node if where.node in (None, "server") else _evil(where.node)
    record = replace(record, where=replace(where, node=node, layer=_evil(where.layer), group=_evil(where.group)))
    match record:
        case Finding():
            suspects = tuple(Suspect(_evil(one.node), one.score, EVIL) for one in record.suspects)
            return replace(record, message=EVIL, suspects=suspects, evidence={**record.evidence, EVIL: EVIL})
        case Event():
            return replace(record, message=EVIL, data={**record.data, "traceback": EVIL})
        case Transfer():
            return replace(record, sender=_named(record.sender), receiver=_named(record.receiver))
        case LayerStats():
            return replace(record, table=_table(next(t for t in SIZE.tables if t.digest == record.table)).digest)
    return record


def _table(table: LayerTable) -> LayerTable:
    return LayerTable(table.rows, tuple(replace(one, name=_evil(one.name)) for one in table.layers))


def _named(node: str) -> str:
    return node if node == "server" else _evil(node)


@pytest.fixture(scope="module")
def site(session_folder: Path):
    store = session_folder / "evil.db"
    sink = open_store(store)
    records = [SIZE.as_run(), *(one for number in range(SIZE.rounds) for one in records_of_round(SIZE, number))]
    turned = [_turned(record) for record in records]
    own = Metric(Where(SIZE.run, 3, _evil("c1")), 1.0, f"user.{EVIL}", 1.0)
    act = Action(Where(SIZE.run, 6), 1.0, EVIL, "quarantine", _evil("c1"), {EVIL: EVIL})
    bad = charted.finding(_evil("c2"), number=7, run=SIZE.run, message=EVIL)
    sink.write([replace(one, source="evil", sequence=i) for i, one in enumerate([*turned, own, act, bad])])
    sink.close()
    set_mark(store, SIZE.run, "tag", EVIL)
    with serve(store) as url:
        yield url


def _harmless(page) -> None:
    page.wait_for_load_state("networkidle")
    assert page.evaluate("window.pwned") is None
    assert page.locator("img").count() == 0
    assert page.locator("main script").count() == 0
    for handler in ("onerror", "onclick", "onload"):
        assert page.locator(f"[{handler}]").count() == 0


@pytest.mark.parametrize("path", PAGES, ids=[path or "overview" for path in PAGES])
def test_a_page_shows_hostile_names_as_text(page, site: str, path: str) -> None:
    ready(page, f"{site}/runs/{SIZE.run}{path}")
    _harmless(page)
    assert "<img src=x" in page.locator("body").inner_text(), "the run's own name stands in the header"


def test_the_page_of_a_hostile_client_is_reached_by_its_link(page, site: str) -> None:
    ready(page, f"{site}/runs/{SIZE.run}/clients", "clients")
    page.locator("main a[href*='/clients/c']").first.click()
    page.wait_for_selector("html[data-ready='client']", state="attached", timeout=120_000)
    _harmless(page)
    assert "<img src=x" in page.locator("main").inner_text()


def test_a_hostile_finding_is_told_letter_for_letter(page, site: str) -> None:
    cases = httpx2.get(f"{site}/api/runs/{SIZE.run}/findings").json()["cases"]
    key = next(case["key"] for case in cases if "LABEL_NOISE" in case["key"])
    ready(page, f"{site}/runs/{SIZE.run}/findings/{quote(key, safe='')}", "finding")
    _harmless(page)
    assert EVIL in page.locator("main").inner_text()


def test_lists_and_comparisons_too(page, site: str) -> None:
    ready(page, site, "runs")
    _harmless(page)
    assert EVIL in page.locator("main").inner_text()
    ready(page, f"{site}/compare?runs={SIZE.run}", "compare")
    _harmless(page)


def test_a_hostile_search_stays_in_its_field(page, site: str) -> None:
    ready(page, f"{site}/?search={quote(EVIL)}", "runs")
    _harmless(page)


def test_json_says_that_it_is_json(site: str) -> None:
    answer = httpx2.get(f"{site}/api/runs/{SIZE.run}")
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert np.isfinite(answer.json()["last_round"])


def test_a_script_in_an_address_is_no_script(page, site: str) -> None:
    page.expected_errors += ["404"]
    page.goto(f"{site}/runs/{quote('<img src=x onerror=window.pwned=1>', safe='')}")
    page.locator(".state").wait_for()
    _harmless(page)
    assert "<img src=x" in page.locator(".state").inner_text()
