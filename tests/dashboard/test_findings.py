# SPDX-License-Identifier: Apache-2.0
"""Findings in the dashboard: told as the store has them, marked for good, and names of clients are text."""

import dataclasses
import math
import re
from urllib.parse import quote

import numpy as np
import pytest
from starlette.testclient import TestClient

from fedvitals.dashboard.app import create_app
from fedvitals.diagnosis.cases import cases
from fedvitals.diagnosis.finding import Number, finding
from fedvitals.diagnosis.issues.table import measured_rates
from fedvitals.records import Action, Event, Finding, Layer, LayerStats, LayerTable, Metric, Run, Suspect, Where
from fedvitals.stats import STATISTICS
from fedvitals.store import open_reader, open_store
from fedvitals.views.cases import case_key, cases_of
from fedvitals.views.findings import number_row
from support.dashboard_server import TOKEN, WRITE, enter, judge, needs_browser, ready, serve

RUN = "20260101-000000-ill"
HOSTILE = '<img src=x onerror="alert(1)">/~%2F é'
LAYER = "<script>alert(2)</script>.weight"
CLIENTS = ("c1", "c2", "c3", "c7", HOSTILE)
TRACEBACK = f"Traceback\n  {HOSTILE}"
TOLD = "c7 is unlike its peers since round 5."


def in_run(record, sequence):
    where = dataclasses.replace(record.where, run=RUN)
    return dataclasses.replace(record, where=where, source="test", sequence=sequence)


def findings():
    for number in range(5, 12):
        numbers = [Number("loss_before", 1.2, 0.3, 9.5), Number("norm", 0.5, 0.1, 3.0)]
        more = {"evidence": {"server": 2.0 * number}, "limit": {"server": 6.5}, "causes": [["label_noise", 0.9]]}
        suspects = [Suspect("c7", 0.96, "random wrong labels")]
        sure = 0.5 + number / 25
        yield finding(
            "LABEL_NOISE",
            number,
            TOLD,
            confidence=sure,
            since=5,
            node="c7",
            numbers=numbers,
            suspects=suspects,
            more=more,
        )
    message = f"{HOSTILE} failed with ValueError."
    yield finding(
        "CRASH", 11, message, confidence=1.0, node=HOSTILE, severity="critical", more={"event": "client.failed"}
    )
    yield finding("VANISHING_GRADIENT", 11, f"'{LAYER}' gets none.", confidence=0.9, layer=LAYER, severity="warning")
    yield finding("STRAGGLER", 1, "c2 takes 9.0 times as long.", confidence=0.95, node="c2")
    yield finding("MISSING_CLASSES", 11, "c3 has no sample of class 4.", confidence=0.8, node="c3", severity="note")
    yield Finding(
        Where("", 11, HOSTILE), 1.0, HOSTILE, "warning", 0.7, f"{HOSTILE}\n{HOSTILE}", {"numbers": [{"name": HOSTILE}]}
    )


def measured():
    rng = np.random.default_rng(1)
    for number in range(12):
        for place, node in enumerate(CLIENTS):
            ill = node == "c7" and number >= 5
            yield Metric(Where("", number, node), number + place / 10, "steps", 5.0)
            yield Metric(Where("", number, node), float(number), "fit.loss_before", 1.2 if ill else 0.3 + 0.01 * place)
            yield Metric(Where("", number, node), float(number), "update.norm", 0.5 if ill else 0.1 + 0.01 * place)
            sums = np.zeros((2, len(STATISTICS)))
            sums[:, STATISTICS.index("count")] = 10
            sums[:, STATISTICS.index("sum_squares")] = rng.random(2)
            yield LayerStats(Where("", number, node), float(number), "gradient", sums, TABLE.digest)
        yield Metric(Where("", number), float(number), "accuracy", 0.5 + number / 40)


TABLE = LayerTable("parameter", (Layer(LAYER, (10,), "float32"), Layer("1.weight", (10,), "float32")))


def written(path, *more):
    described = Run(
        RUN, "ill", config={"fedvitals": {"detectors": 34}}, started=1.7e9, finished=1.7e9 + 60, tables=(TABLE,)
    )
    why = "The loss is better than the trend before it."
    other = [
        Event(Where("", 11, HOSTILE), 9, "error", "client.failed", f"ValueError: {HOSTILE}", {"traceback": TRACEBACK}),
        Action(Where("", 8, "c7"), 8.0, "LABEL_NOISE c7", "quarantine", "c7", {"why": why}, "applied"),
    ]  # fmt: skip
    records = [in_run(record, i) for i, record in enumerate([*measured(), *findings(), *other, *more])]
    store = open_store(path)
    store.write([described, *records])
    store.close()
    return path


@pytest.fixture
def store(tmp_path):
    return written(tmp_path / "runs.db")


@pytest.fixture(scope="module")
def asking(tmp_path_factory):
    """For all tests that change nothing."""
    with _asking(written(tmp_path_factory.mktemp("findings") / "runs.db")) as client:
        yield client


@pytest.fixture
def marking(store):
    with _asking(store) as client:
        yield client


def _asking(store):
    return TestClient(create_app(store, token=TOKEN), base_url="http://127.0.0.1:8321")


def of(*parts):
    return "/".join([f"/api/runs/{RUN}", *(quote(part, safe="") for part in parts)])


def keys(store):
    with open_reader(store) as reader:
        return {(case.issue, case.node): case_key(case) for case in cases_of(reader, RUN)}


# -- the answers ------------------------------------------------------------------------------------------------------


def test_every_trouble_once_what_is_there_now_first_and_worst_first(asking):
    found = asking.get(of("findings")).json()
    assert [(one["issue"], one["still_there"]) for one in found["cases"]] == [
        ("CRASH", True), ("LABEL_NOISE", True), ("VANISHING_GRADIENT", True), (HOSTILE, True),
        ("STRAGGLER", False),
    ]  # fmt: skip
    assert found["counts"] == {"open": 4, "past": 1, "muted": 0, "acknowledged": 0, "all": 5}
    assert found["severities"] == {"critical": 1, "warning": 3, "note": 0}
    assert found["notes"] == 1
    asked = asking.get(of("findings"), params={"notes": True}).json()
    assert [one["issue"] for one in asked["cases"]][-2:] == ["MISSING_CLASSES", "STRAGGLER"]
    assert (asked["counts"]["all"], asked["notes"]) == (6, 0)
    assert found["verdict"]["state"] == "ill"
    (noise,) = [one for one in found["cases"] if one["issue"] == "LABEL_NOISE"]
    assert (noise["seen"], noise["since"], noise["message"]) == (7, 5, TOLD)
    assert noise["sentence"] == "c7 seems to have wrong labels"


@pytest.mark.parametrize(
    ("asked", "issues"),
    [
        ({"state": "past"}, ["STRAGGLER"]),
        ({"state": "muted"}, []),
        ({"node": "c7"}, ["LABEL_NOISE"]),
        ({"search": "samples CLASS 4"}, []),
        ({"search": "takes 9.0 TIMES"}, ["STRAGGLER"]),
        ({"limit": 1, "offset": 1}, ["LABEL_NOISE"]),
    ],
)
def test_filters(asking, asked, issues):
    found = asking.get(of("findings"), params=asked).json()
    assert [one["issue"] for one in found["cases"]] == issues
    assert found["counts"]["all"] == 5
    noted = asking.get(of("findings"), params={"severity": "note"}).json()
    assert [one["issue"] for one in noted["cases"]] == ["MISSING_CLASSES"]


def test_one_finding_in_full(asking, store):
    found = asking.get(of("findings", keys(store)["LABEL_NOISE", "c7"])).json()
    assert found["case"]["message"] == TOLD
    assert found["refutation"].startswith("A sample of its labels")
    raw = {name: found["numbers"][0].pop(name) for name in ("raw_value", "raw_usual")}
    assert raw == pytest.approx({"raw_value": math.exp(1.2) - 0.05, "raw_usual": math.exp(0.3) - 0.05})
    assert found["numbers"][0] == {
        "name": "loss_before", "title": "loss before local training", "unit": "1", "compared_as": "log",
        "value": 1.2, "usual": 0.3,
        "of": "other clients", "score": 9.5, "meaning": "Loss of the received model on own samples, before training.",
    }  # fmt: skip
    assert found["suspects"] == [
        {"node": "c7", "label": "", "score": 0.96, "sure": "96 %", "reason": "random wrong labels"}
    ]
    assert [(a["kind"], a["status"], a["round"]) for a in found["actions"]] == [("quarantine", "applied", 8)]
    assert found["trust"]["words"].startswith("Calibrated")
    assert found["trust"]["false_alarms"] == measured_rates()["LABEL_NOISE"] > 0
    shown = asking.get(of("findings", keys(store)["LABEL_NOISE", "c7"], "evidence")).json()
    plots = {plot["id"]: plot for plot in shown["plots"]}
    assert list(plots) == ["fit.loss_before", "update.norm", "evidence"]
    assert plots["fit.loss_before"]["lines"][0]["values"][-1] == pytest.approx(1.2)
    assert plots["fit.loss_before"]["band"]["max"][-1] < 0.4  # its peers, without itself
    assert plots["evidence"]["threshold"]["value"] == 6.5


@pytest.mark.parametrize(
    ("issue", "name", "title", "unit"),
    [
        ("LABEL_NOISE", "labels changed, at least", "labels changed, at least", "share"),
        ("LABEL_NOISE", "share of wrong labels", "share of wrong labels", "share"),
        ("MISSING_CLASSES", "classes missing", "classes missing", ""),  # no «3 nats», though entropy shows them best
        ("LABEL_NOISE", "fit.accuracy_before", "accuracy before local training", "share"),
    ],
)
def test_a_number_of_a_finding_has_the_unit_of_its_name(issue, name, title, unit):
    detected = finding(issue, 5, "so it is", confidence=0.9, node="c7", numbers=[Number(name, 0.39, 0.0)])
    (case,) = cases([detected], {None: range(6)})
    row = number_row(case.newest.evidence["numbers"][0], case)
    assert (row.title, row.unit, row.raw_value) == (title, unit, 0.39)


def test_an_error_comes_with_its_traceback(asking, store):
    found = asking.get(of("findings", keys(store)["CRASH", HOSTILE])).json()
    assert found["error"] == {
        "event": "client.failed", "round": 11, "message": f"ValueError: {HOSTILE}",
        "traceback": TRACEBACK.splitlines(),
    }  # fmt: skip
    assert found["trust"]["words"].startswith("An equality test")


def test_what_is_not_there_is_told_in_the_one_shape(asking, store):
    key = keys(store)["LABEL_NOISE", "c7"]
    for method, path in (
        ("GET", of("findings", "NOTHING~~~")),
        ("GET", of("findings", "NOTHING~~~", "evidence")),
        ("PUT", of("findings", "NOTHING~~~", "muted")),
        ("PUT", f"/api/runs/ill/findings/{key}/acknowledged"),  # a name may mean another run tomorrow
        ("DELETE", f"/api/runs/none/findings/{key}/muted"),
    ):
        answer = asking.request(method, path, headers=WRITE)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found"), (method, path)
    long = asking.put(of("findings", key, "muted"), headers=WRITE, json={"reason": "x" * 501})
    assert long.status_code == 422


def test_marks_last_and_change_the_verdict(marking, store):
    crash, noise = keys(store)["CRASH", HOSTILE], keys(store)["LABEL_NOISE", "c7"]
    said = marking.put(of("findings", crash, "muted"), headers=WRITE, json={"reason": " planned\n outage "}).json()
    assert said == {"key": crash, "acknowledged": False, "muted": True, "reason": "planned outage"}
    found = marking.get(of("findings")).json()
    assert found["verdict"]["key"] == noise
    assert found["cases"][-1]["key"] == crash  # muted ones come last
    assert found["counts"]["muted"] == 1
    marking.put(of("findings", found["verdict"]["key"], "acknowledged"), headers=WRITE)
    assert "acknowledged" in marking.get(of("findings")).json()["verdict"]["headline"]
    marking.delete(of("findings", found["verdict"]["key"], "acknowledged"), headers=WRITE)
    marking.delete(of("findings", crash, "muted"), headers=WRITE)
    again = marking.get(of("findings")).json()
    assert again["verdict"]["key"] == crash
    assert again["counts"]["muted"] == again["counts"]["acknowledged"] == 0
    assert marking.get(of("findings", noise)).json()["case"]["acknowledged"] is False


# -- in the browser ---------------------------------------------------------------------------------------------------


@pytest.fixture
def shown(store, page):
    """A page over the store, and its address."""
    with serve(store) as url:
        enter(page, url)
        yield page, f"{url}/runs/{RUN}", store
        page.goto("about:blank")  # before the server goes, which it would notice


def expect(locator):
    from playwright.sync_api import expect

    return expect(locator)


def card_of(page, key):
    return page.locator(f".finding-card[data-key={quote_css(key)}]")


def quote_css(text):
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


@pytest.mark.browser
@needs_browser
def test_cards_say_what_the_store_says_and_hostile_names_are_text(shown):
    page, url, store = shown
    ready(page, f"{url}/findings", "findings")
    card = card_of(page, keys(store)["LABEL_NOISE", "c7"])
    said = card.inner_text()
    for words in ("▲", "warning", "c7 seems to have wrong labels", TOLD, "94", "since round 5"):
        assert words in said
    assert HOSTILE in card_of(page, keys(store)["CRASH", HOSTILE]).inner_text()
    assert page.locator("main img, main script").count() == 0
    assert judge(page) == []


@pytest.mark.browser
@needs_browser
def test_acknowledging_and_muting_survive_a_reload_and_change_the_verdict(shown):
    page, url, store = shown
    crash = keys(store)["CRASH", HOSTILE]
    ready(page, f"{url}/findings", "findings")
    assert HOSTILE in page.locator(".verdict-headline").inner_text()
    card_of(page, crash).get_by_role("button", name="acknowledge").click()
    page.locator(".verdict-headline", has_text="acknowledged").wait_for()
    card = card_of(page, crash)
    card.get_by_role("button", name="mute …").click()
    card.get_by_label("Why it is muted").fill("planned outage")
    card.get_by_role("button", name="Mute", exact=True).click()
    card_of(page, crash).get_by_text("muted: planned outage").wait_for()
    assert HOSTILE not in page.locator(".verdict-headline").inner_text()
    page.reload()
    page.wait_for_selector("html[data-ready=findings]", state="attached")
    assert "muted: planned outage" in card_of(page, crash).inner_text()
    assert HOSTILE not in page.locator(".verdict-headline").inner_text()
    card_of(page, crash).get_by_role("button", name="unmute").click()
    page.locator(".verdict-headline", has_text=HOSTILE).wait_for()


@pytest.mark.browser
@needs_browser
def test_filters_are_in_the_address(shown):
    page, url, _ = shown
    ready(page, f"{url}/findings?state=past", "findings")
    assert page.locator(".finding-card").count() == 1
    page.get_by_role("button", name="open 4").click()
    page.wait_for_url("**/findings?state=open")
    expect(page.locator(".finding-card")).to_have_count(4)
    page.get_by_role("button", name="Show 1 note").click()  # notes are shown on request only
    expect(page.locator(".finding-card")).to_have_count(5)
    assert "notes=true" in page.url
    page.get_by_label("search").fill("class 4")
    expect(page.locator(".finding-card")).to_have_count(1)
    assert re.search(r"search=class(\+|%20)4", page.url)
    page.get_by_label("search").fill("no such thing")
    page.get_by_role("button", name="Show all").click()
    expect(page.locator(".finding-card")).to_have_count(5)
    assert page.url.endswith("/findings")


@pytest.mark.browser
@needs_browser
def test_by_keyboard(shown):
    page, url, store = shown
    ready(page, f"{url}/findings", "findings")
    page.keyboard.press("j")
    page.keyboard.press("j")
    focused = page.evaluate("document.activeElement.dataset.key")
    assert focused == keys(store)["LABEL_NOISE", "c7"]
    page.keyboard.press("a")
    card_of(page, focused).get_by_text("✓ acknowledged").first.wait_for()
    page.keyboard.press("m")
    page.keyboard.type("known")
    page.keyboard.press("Escape")
    assert card_of(page, focused).locator("input").count() == 0
    page.keyboard.press("j")
    page.keyboard.press("k")
    page.keyboard.press("o")
    page.wait_for_selector("html[data-ready=finding]", state="attached")
    assert page.url.endswith(f"/findings/{quote(focused, safe='~')}")
    page.keyboard.press("u")
    page.wait_for_selector("html[data-ready=findings]", state="attached")


@pytest.mark.browser
@needs_browser
def test_one_finding_shows_what_it_rests_on(shown):
    page, url, store = shown
    ready(page, f"{url}/findings/{quote(keys(store)['LABEL_NOISE', 'c7'])}", "finding")
    assert page.locator("h1").inner_text() == "c7 seems to have wrong labels"
    expect(page.locator("#evidence .chart:visible")).to_have_count(4)  # loss, norm, sum of evidence, confidence
    numbers = page.locator("#numbers").inner_text()
    assert "9.5" in numbers
    assert "compared as log" in numbers
    assert "A sample of its labels checked by hand is right" in page.locator("#refutation").inner_text()
    assert "quarantine" in page.locator("#actions").inner_text()
    assert (
        page.get_by_role("link", name="round 11, in which it was seen last").get_attribute("href")
        == f"/runs/{RUN}/rounds/11"
    )
    raw = page.get_by_role("link", name="raw records: fit.loss_before").get_attribute("href")
    assert page.request.get(url.split("/runs/")[0] + raw).json()["rows"]
    assert judge(page) == []


@pytest.mark.browser
@needs_browser
def test_a_hostile_finding_is_text_to_the_last_line(shown):
    page, url, store = shown
    for case, key in keys(store).items():
        ready(page, f"{url}/findings/{quote(key, safe='')}", "finding")
        page.locator("#evidence .chart:visible").first.wait_for()
        assert page.locator("main img, main script").count() == 0, case
    ready(page, f"{url}/findings/{quote(keys(store)['CRASH', HOSTILE], safe='')}", "finding")
    assert HOSTILE in page.locator("#error pre").inner_text()
    link = page.get_by_role("link", name="against the other clients").get_attribute("href")
    assert link == f"/runs/{RUN}/clients/{quote(HOSTILE, safe='()')}"


@pytest.mark.browser
@needs_browser
def test_a_finding_that_changes_is_told_anew_where_it_is_seen(shown):
    page, url, store = shown
    ready(page, f"{url}/findings/{quote(keys(store)['LABEL_NOISE', 'c7'])}", "finding")
    page.locator("#evidence .chart").first.wait_for()
    newer = finding("LABEL_NOISE", 12, "c7 is worse than ever.", confidence=0.99, since=4, node="c7")
    sink = open_store(store)
    sink.write([in_run(newer, 10_000)])
    sink.close()
    page.get_by_text("c7 is worse than ever.").wait_for()
    assert "99" in page.locator("#trust .big").inner_text()
    assert "since round 4" in page.locator(".finding-top").inner_text()


@pytest.mark.browser
@needs_browser
@pytest.mark.parametrize("page", [{"viewport": {"width": 390, "height": 800}, "color_scheme": "dark"}], indirect=True)
def test_on_a_phone_and_in_the_dark(shown):
    page, url, store = shown
    for path, name in (("findings", "findings"), (f"findings/{quote(keys(store)['LABEL_NOISE', 'c7'])}", "finding")):
        ready(page, f"{url}/{path}", name)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert judge(page) == []
