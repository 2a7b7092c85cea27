# SPDX-License-Identifier: Apache-2.0
"""Clients: the table, one client's page, the map; out of a store that is written by hand, hostile names included."""

import base64

import numpy as np
import pytest
from starlette.testclient import TestClient

from fedvitals.dashboard.app import create_app
from fedvitals.dashboard.pages.client import deviation
from fedvitals.dashboard.pages.layer_deviation import MOST_ROUNDS, _shown, client_layers, medians
from fedvitals.records import Event, LayerStats, Metric, Sketch, Span, Where
from fedvitals.stats import empty_sums
from fedvitals.store import open_reader
from fedvitals.store.marks import set_mark
from fedvitals.views.clients import Rosters, clients_page, roster
from support import overview_run as charted
from support.dashboard_server import expect, judge, ready, serve

HOME = "http://127.0.0.1:8321"
IMAGE = "<img src=x onerror=alert(1)>"
NAMES = ["c0", IMAGE, "../../etc/passwd", "c3", "a/b?c#d", "c5", "c10"]
ROUNDS = 10
TRACE = (
    'Traceback (most recent call last):\n  File "<b>x</b>.py", line 1, in fit\nValueError: <script>alert(2)</script>'
)


def own_records(name: str, place: int, number: int):
    """What the overview's store does not have: direction, time, layers, sketches."""
    where, at = Where(charted.RUN, number, name), charted.STARTED + 10 * number
    ill = place == 3 and number >= 4
    yield Metric(where, at, "update.cosine_mean", -0.5 if ill else 0.6 + 0.01 * place)
    yield Metric(where, at, "time.client", 1.0 + 0.1 * place)
    matrix = empty_sums(2)
    size = (8.0 if ill else 1.0) * (1 + 0.01 * place)
    matrix[:, 0], matrix[:, 2], matrix[:, 4], matrix[:, 5] = 10, 10 * size**2, -size, size
    yield LayerStats(where, at, "update", matrix, charted.TABLE.digest)
    rng = np.random.default_rng([place, 7])
    direction = rng.normal(size=16) + (-6.0 if ill else 6.0)
    yield Sketch(where, at, tuple(direction + 0.01 * number))
    parts = {"data": 0.1, "forward": 0.4, "backward": 0.5}
    yield Span(where, at, "client", 1.0, "0" * 32, f"{place:08x}{number:08x}", None, {"parts": parts, "folded": True})


def more_records(names=NAMES):
    for number in range(ROUNDS):
        yield Span(Where(charted.RUN, number), charted.STARTED + 10 * number, "round", 2.0, "0" * 32, f"{number:016x}")
        for place, name in enumerate(names):
            if place != 5 or number % 2 == 0:
                yield from own_records(name, place, number)
    yield Event(
        Where(charted.RUN, 2, IMAGE), charted.STARTED + 25, "error", "client.failed", "ValueError: <b>bold</b>",
        {"exception": "ValueError", "traceback": TRACE},
    )  # fmt: skip
    yield Event(Where(charted.RUN, 3, "c5"), charted.STARTED + 35, "warning", "client.dropped_out", "c5 is not there.")
    labels = {"histogram": {"0": 30, "1": 10, IMAGE: 5}}
    yield Event(Where(charted.RUN, 0, "c3"), charted.STARTED, "info", "labels", "0: 30", labels)
    yield Event(Where(charted.RUN, 0, "c0"), charted.STARTED, "info", "labels", "0: 1", {"histogram": {"0": 1, "1": 1}})


def write_run(path, **options):
    found = [charted.finding("c3", number=n) for n in range(4, ROUNDS)]
    found += [charted.finding(IMAGE, since=8, number=9, severity="note", confidence=0.3, issue="UNUSUAL_CLIENT")]
    return charted.written(path, rounds=ROUNDS, names=NAMES, findings=found, more=[*more_records()], **options)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("clients") / "s.db")


@pytest.fixture(scope="module")
def client(store):
    with TestClient(create_app(store), base_url=HOME) as client:
        yield client


def get(client, what, **params):
    answer = client.get(f"/api/runs/{charted.RUN}/{what}", params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()


def names(client, **params):
    return [row["name"] for row in get(client, "clients", **params)["rows"]]


# -- the table --------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_worst_first_and_says_so(client):
    found = get(client, "clients")
    assert found["rows"][0]["name"] == "c3"
    assert found["order"].startswith("worst first")
    assert found["health"] == {"critical": 0, "warning": 1, "note": 0, "well": 6}  # a note makes nobody ill
    worst = found["rows"][0]
    assert (worst["severity"], worst["open_cases"], worst["cases"][0]["issue"]) == ("warning", 1, "LABEL_NOISE")
    assert worst["score"] > 3.5
    assert worst["why"] == "other direction"


def test_a_row_tells_attendance_signs_and_failures(client):
    row = next(row for row in get(client, "clients")["rows"] if row["name"] == "c5")
    assert (row["attended"], row["sampled"], row["last_seen"]) == (5, 6, 8)
    assert (row["failures"], row["trouble"]) == (1, "1 × client.dropped_out")
    assert row["loss"] == pytest.approx(2.0 / 9 + 0.05)
    assert row["seconds"] == pytest.approx(1.5)
    assert row["bytes"] == 5 * 3000


def test_sorting_filtering_and_paging_happen_on_the_server(client):
    assert names(client, sort="name")[:3] == ["../../etc/passwd", IMAGE, "a/b?c#d"]
    assert names(client, sort="name")[-2:] == ["c5", "c10"]
    assert names(client, sort="attended")[0] == "c5"
    assert names(client, sort="cosine")[0] == "c3"
    assert names(client, sort="seconds", descending=True)[0] == "c10"
    assert names(client, search="ETC") == ["../../etc/passwd"]
    assert names(client, health="ill") == ["c3"]
    assert names(client, health="failed") == [IMAGE, "c5"] or set(names(client, health="failed")) == {IMAGE, "c5"}
    found = get(client, "clients", sort="name", limit=2, offset=5)
    assert [row["name"] for row in found["rows"]] == ["c5", "c10"]
    assert (found["total"], found["matching"], found["offset"]) == (7, 7, 5)


def test_muted_troubles_do_not_count(tmp_path):
    path = write_run(tmp_path / "s.db")
    rosters = Rosters()
    with open_reader(path) as reader:
        assert clients_page(rosters.roster(reader, charted.RUN, "1")).rows[0].severity == "warning"
    set_mark(path, charted.RUN, "muted", "LABEL_NOISE~c3~~", "known")
    with open_reader(path) as reader:
        assert clients_page(rosters.roster(reader, charted.RUN, "2")).health["warning"] == 0
        # Still in front of those who are well: it lies far from them.
        assert rosters.roster(reader, charted.RUN, "2").rows[0].name == "c3"


def test_a_value_that_is_not_finite_is_told_as_such(tmp_path):
    broken = [
        Metric(Where(charted.RUN, 9, "c1"), charted.STARTED + 99, "loss", float("nan")),
        Metric(Where(charted.RUN, 9, "c1"), charted.STARTED + 99, "gradient.nonfinite", 12.0),
    ]
    path = charted.written(tmp_path / "s.db", more=broken)
    with open_reader(path) as reader:
        first = roster(reader, charted.RUN).rows[0]
    assert (first.name, first.broken, first.odd, first.loss) == ("c1", True, ("loss",), None)
    assert "NaN or Inf" in first.why


@pytest.mark.thorough
def test_a_run_without_clients_is_no_error(tmp_path):
    path = charted.written(tmp_path / "s.db", rounds=0)
    with TestClient(create_app(path), base_url=HOME) as client:
        assert get(client, "clients")["rows"] == []
        assert get(client, "map")["round"] is None


# -- one client -------------------------------------------------------------------------------------------------------


def test_the_verdict_on_a_client_is_of_its_own_cases(client):
    ill, different = get(client, "client", node="c3"), get(client, "client", node="c0")
    assert ill["verdict"]["state"] == "ill"
    assert ill["verdict"]["headline"].startswith("c3 ")
    assert "since round 4" in ill["verdict"]["headline"]
    assert ill["verdict"]["key"] == "LABEL_NOISE~c3~~"
    assert different["verdict"]["state"] == "healthy"
    assert "c3" not in different["verdict"]["headline"]
    assert (ill["place"], ill["worse"], ill["better"]) == (1, None, "c10")
    assert get(client, "client", node="c10")["worse"] == "c3"


@pytest.mark.thorough
def test_who_is_far_off_without_a_finding_is_different_not_ill(tmp_path):
    path = charted.written(tmp_path / "s.db", names=NAMES, rounds=ROUNDS, more=[*more_records()])
    with TestClient(create_app(path), base_url=HOME) as client:
        verdict = get(client, "client", node="c3")["verdict"]
    assert verdict["state"] == "different"
    assert "nothing says broken" in verdict["headline"]


def test_facts_labels_failures_and_events(client):
    found = get(client, "client", node="c3")
    facts = {fact["name"]: fact for fact in found["facts"]}
    assert (facts["samples"]["value"], facts["samples"]["median"], facts["samples"]["round"]) == (100, 100, 9)
    shares = {one["label"]: one for one in found["labels"]}
    assert shares["0"]["share"] == pytest.approx(30 / 45)
    assert shares["0"]["others"] == pytest.approx(0.5)
    assert shares[IMAGE]["others"] == 0
    failed = get(client, "client", node=IMAGE)
    assert failed["failures"][0]["traceback"] == TRACE
    assert failed["tracebacks"] is True
    assert found["failures"] == []
    assert [event["name"] for event in found["events"]] == ["labels"]


def test_signs_come_evidence_first_then_most_deviating(client):
    signs = get(client, "client/signs", node="c3")
    assert signs[0]["series"]["name"] in ("loss", "update.cosine_mean")
    places = [(not sign["evidence"], -abs(sign["z"] or 0)) for sign in signs]
    assert places == sorted(places)
    cosine = next(sign for sign in signs if sign["series"]["name"] == "update.cosine_mean")
    assert cosine["z"] < -3.5
    assert cosine["round"] == 9
    assert cosine["series"]["values"][-1] == pytest.approx(-0.5)
    zoomed = get(client, "client/signs", node="c3", **{"from": 2, "to": 3})
    assert zoomed[0]["series"]["rounds"] == [2, 3]


def test_a_deviation_is_in_robust_standard_deviations():
    rng = np.random.default_rng(0)
    values = rng.normal(10, 1, 4001)
    middle, z = deviation(13.0, dict(enumerate(values)))
    assert middle == pytest.approx(10, abs=0.1)
    assert z == pytest.approx(3 / np.hypot(1, 0.5), rel=0.05)
    assert deviation(5.0, {1: 5.0, 2: 5.0, 3: 5.0, 4: 5.0, 5: 5.0})[1] == 0
    assert deviation(1.0, {1: 1.0, 2: 2.0})[1] is None
    assert deviation(float("nan"), dict(enumerate(values)))[1] is None


def decoded(grid):
    values = np.frombuffer(base64.b64decode(grid["values"]), "<f4")
    return values.reshape(len(grid["rows"]), len(grid["columns"]))


def test_layers_are_compared_with_the_median_client(client):
    found = get(client, "client/layers", node="c3")
    assert (found["family"], found["statistic"], found["how"]) == ("update", "rms", "log2 ratio")
    assert found["grid"]["rows"] == ["conv.weight", "head.weight"]
    values = decoded(found["grid"])
    assert found["grid"]["columns"] == list(range(ROUNDS))
    np.testing.assert_allclose(values[:, :4], 0, atol=0.1)
    np.testing.assert_allclose(values[:, 4:], 3, atol=0.1)
    ordinary = decoded(get(client, "client/layers", node="c0", statistic="l2", **{"from": 5, "to": 7})["grid"])
    assert ordinary.shape == (2, 3)
    assert np.abs(ordinary).max() < 0.2
    assert client.get(f"/api/runs/{charted.RUN}/client/layers", params={"node": "c0", "family": "x"}).status_code == 404


def test_layers_of_many_rounds_are_read_as_far_as_the_budget_goes(store):
    with open_reader(store) as reader:
        few = client_layers(reader, charted.RUN, "c3", "update", "rms", budget=1)
        whole = client_layers(reader, charted.RUN, "c3", "update", "rms")
    assert few.older
    assert not whole.older
    assert 0 < few.rounds < whole.rounds == ROUNDS


def test_medians_are_those_of_numpy():
    values = np.array([[1.0, np.nan, np.inf], [5.0, np.nan, 3.0], [2.0, np.nan, 4.0], [9.0, np.nan, np.nan]])
    np.testing.assert_allclose(medians(values), [3.5, np.nan, 3.5])


def test_times_by_part_and_the_median_client(client):
    found = get(client, "client/times", node="c3")
    parts = {part["name"]: part for part in found["parts"]}
    assert found["rounds"] == list(range(ROUNDS))
    assert parts["forward"]["values"][0] == pytest.approx(0.4)
    assert parts["wait"]["waiting"] is True
    assert found["own"][0] == pytest.approx(1.3)
    assert found["median"][0] == pytest.approx(1.3)


@pytest.mark.parametrize("what", ["client", "client/signs", "client/layers", "client/times"])
@pytest.mark.parametrize("node", NAMES)
def test_every_name_is_found_whatever_is_in_it(client, what, node):
    get(client, what, node=node)


def test_who_is_not_there_is_not_found(client):
    for what in ("client", "client/signs", "client/layers", "client/times"):
        answer = client.get(f"/api/runs/{charted.RUN}/{what}", params={"node": "nobody"})
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "not_found"
    # The server is a node, and no client.
    assert client.get(f"/api/runs/{charted.RUN}/client", params={"node": "server"}).status_code == 404


def test_the_map_knows_who_is_ill(client):
    found = get(client, "map", node="c3")
    assert found["round"] == 9
    assert {point["name"]: point["severity"] for point in found["points"]}["c3"] == "warning"
    assert [step["round"] for step in found["trail"]] == list(range(1, 10))
    assert get(client, "map", round=3)["round"] == 3
    assert get(client, "map", round=5, plane="round", node="c3")["trail"][0]["round"] == 5
    last = found["similarity"]["names"]
    assert "c3" in (last[0], last[-1])  # unlike all others: at an end of the order


# -- in the browser ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def address(store):
    with serve(store) as url:
        yield f"{url}/runs/{charted.RUN}"


@pytest.mark.browser
def test_the_table_opens_worst_first_and_sorts(address, page):
    ready(page, f"{address}/clients", "clients")
    rows = page.locator(".clients-table tbody tr")
    assert rows.count() == len(NAMES)
    assert "c3" in rows.first.inner_text()
    assert "worst first" in page.locator(".table-controls").inner_text()
    page.locator("th[data-key=seconds] button").click()
    expect(rows.first).to_contain_text("c10")
    assert "sort=seconds" in page.url
    assert page.locator("th[aria-sort]").get_attribute("aria-sort") == "descending"
    page.locator("input[type=search]").fill("passwd")
    expect(rows).to_have_count(1)
    assert "search=passwd" in page.url
    page.reload()
    page.wait_for_selector("html[data-ready=clients]", state="attached")
    assert page.locator("input[type=search]").input_value() == "passwd"


@pytest.mark.browser
def test_a_chosen_row_is_marked_in_table_and_picture(address, page):
    ready(page, f"{address}/clients", "clients")
    page.wait_for_selector(".clients-map canvas", state="attached")
    page.locator(".clients-table tbody tr", has_text="c10").locator("td").last.click()
    page.wait_for_selector("tr[aria-selected=true]")
    assert "client=c10" in page.url
    assert page.locator("tr[aria-selected=true]").inner_text().count("c10") == 1


@pytest.mark.browser
@pytest.mark.parametrize("name", [IMAGE, "../../etc/passwd", "a/b?c#d"])
def test_hostile_names_are_text_and_lead_to_their_page(address, page, name):
    alerts = []
    page.on("dialog", lambda dialog: (alerts.append(dialog.message), dialog.dismiss()))
    ready(page, f"{address}/clients", "clients")
    page.locator(".clients-table a.name", has_text=name).click()
    page.wait_for_selector("html[data-ready=client]", state="attached")
    assert name in page.locator(".client-place").inner_text()
    assert name in page.title()
    page.wait_for_selector(".sign-grid .chart-plot", state="attached")
    if name == IMAGE:
        page.locator("summary", has_text="traceback").first.click()
        assert "<script>alert(2)</script>" in page.locator("pre").first.inner_text()
    page.reload()
    page.wait_for_selector("html[data-ready=client]", state="attached")
    assert name in page.locator(".client-place").inner_text()
    assert page.locator("img").count() == 0
    assert alerts == []
    ready(page, f"{address}/map", "map")
    assert page.locator("img").count() == 0


@pytest.mark.browser
def test_the_page_of_one_client(address, page):
    ready(page, f"{address}/clients/c3?round=6", "client")
    assert page.locator(".verdict-state").inner_text().endswith("PROBLEM")
    assert "c3" in page.locator(".verdict-headline").inner_text()
    first = page.locator(".sign-grid .chart-title").first.inner_text()
    assert first in ("loss", "cosine to the other clients' updates")
    page.wait_for_selector("section[aria-label^=layers] canvas", state="attached")
    page.locator("section[aria-label^=layers] select").nth(1).select_option("absmax")
    expect(page.locator("section[aria-label^=layers] .chart-title")).to_contain_text("absmax")
    assert "statistic=absmax" in page.url
    page.keyboard.press("Escape")
    page.locator("h1").click()
    page.keyboard.press("j")
    expect(page.locator(".client-place")).to_contain_text("2 of 7")
    page.keyboard.press("k")
    expect(page.locator(".client-place")).to_contain_text("1 of 7")
    page.go_back()
    expect(page.locator(".client-place")).to_contain_text("2 of 7")


@pytest.mark.browser
def test_the_map_has_its_round_in_the_address(address, page):
    ready(page, f"{address}/map?client=c3", "map")
    assert "since round 1" in page.locator(".map-chosen").inner_text()
    slider = page.locator(".round-slider")
    assert slider.get_attribute("aria-valuetext") == "round 9"
    slider.focus()
    page.keyboard.press("ArrowLeft")
    expect(slider).to_have_attribute("aria-valuetext", "round 8")
    assert "round=8" in page.url
    page.locator("h1").click()
    page.keyboard.press(".")
    expect(slider).to_have_attribute("aria-valuetext", "round 9")
    ready(page, f"{address}/map?round=2", "map")
    assert page.locator(".round-said").inner_text() == "2"


@pytest.mark.browser
def test_a_run_without_sketches_says_what_to_set(tmp_path, page):
    with serve(charted.written(tmp_path / "s.db")) as url:
        ready(page, f"{url}/runs/{charted.RUN}/map", "map")
        said = page.locator("main").inner_text()
        page.goto("about:blank")  # before its server ends, which would be an error in its console
    assert "No sketches" in said
    assert 'probes="standard"' in said


@pytest.mark.browser
def test_new_rounds_come_by_themselves_and_leave_what_was_chosen(tmp_path, page):
    store = charted.written(tmp_path / "s.db", finished=False)
    with serve(store) as url:
        ready(page, f"{url}/runs/{charted.RUN}/clients?sort=name&client=c2", "clients")
        assert "r9" in page.locator(".clients-table tbody tr").first.inner_text()
        charted.stamp(charted.of_round(10, [f"c{i}" for i in range(6)]), store)
        expect(page.locator(".clients-table tbody tr").first).to_contain_text("r10")
        assert page.locator("tr[aria-selected=true]").inner_text().count("c2") == 1
        assert "sort=name" in page.url
        page.goto("about:blank")


@pytest.mark.browser
@pytest.mark.parametrize(
    "page", [{}, {"color_scheme": "dark"}, {"viewport": {"width": 390, "height": 800}}], indirect=True
)
@pytest.mark.parametrize("what", ["clients", "clients/c3", "map"])
def test_pages_are_accessible(address, page, what):
    ready(page, f"{address}/{what}")
    page.wait_for_timeout(300)
    assert judge(page) == []
    wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert wide <= 0


def test_of_layer_statistics_only_the_rounds_that_some_page_shows_are_remembered():
    often, seldom = 1, 2
    by_round = {n: ([often, seldom] if n % 10 == 0 else [often], np.zeros((1, 1))) for n in range(1000)}
    kept = _shown(by_round)
    assert [n for n in sorted(kept) if n % 10] == [n for n in range(1000 - MOST_ROUNDS, 1000) if n % 10]
    assert [n for n in sorted(kept) if seldom in kept[n][0]] == list(range(0, 1000, 10))
