# SPDX-License-Identifier: Apache-2.0
"""Rounds, one round, and who talks to whom: every second and byte of these runs is known beforehand."""

import pytest
from starlette.testclient import TestClient

from fedvitals.dashboard.app import create_app
from fedvitals.dashboard.pages.costs import costs
from fedvitals.dashboard.pages.time_costs import changes, time_costs
from fedvitals.errors import ConfigError
from fedvitals.records import Event, Finding, Metric, Span, Where
from fedvitals.store import open_reader, open_store
from fedvitals.views import timed_rounds
from fedvitals.views.profile import profile_of
from fedvitals.views.round import round_page, round_table
from fedvitals.views.timed_rounds import window_of
from fedvitals.views.topology import topology_page
from support.conditions import holds_for_each
from support.dashboard_server import judge, ready, serve
from support.timed_run import BYTES, begin, stored

HOME = "http://127.0.0.1:8321"
HOSTILE = "<img src=x onerror=alert(1)>"
SLOW = {"c0": (1.0, 2.0, 1.0), "c1": (1.0, 9.0, 2.0), "c2": (1.0, 3.0, 1.0), "c3": (1.0, 2.5, 1.0)}


def slow_run(name="slow", rounds=6, **kwargs):
    """c1 computes three times as long as the others: it determines every round, at 12.5 s."""
    run = begin(name, name, **kwargs)
    for number in range(rounds):
        run.round(SLOW, accuracy=0.5 + 0.1 * number)
        for node in SLOW:
            where = Where(name, number, node)
            for metric, value in (("traffic.sent", BYTES), ("traffic.received", BYTES), ("loss", 1.0 + number)):
                run.add(Metric(where, run.at, metric, float(value)))
    return run


def grouped(topology, groups, name="grouped", rounds=2):
    run = begin(name, name, topology=topology)
    run.add(Event(Where(name, 0), run.at, "info", "groups", "groups.", dict(groups)))
    members = {node: group for group, nodes in groups.items() for node in nodes}
    for _ in range(rounds):
        run.round(dict.fromkeys(members, (1.0, 1.0, 1.0)), groups=members)
    return run


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return stored(tmp_path_factory.mktemp("rounds") / "runs.db", slow_run())


@pytest.fixture
def reader(store):
    with open_reader(store) as reader:
        yield reader


@pytest.fixture(scope="module")
def client(store):
    with TestClient(create_app(store), base_url=HOME) as client:
        yield client


# -- one round --------------------------------------------------------------------------------------------------------


def test_a_round_says_who_made_it_long(reader):
    page = round_page(reader, "slow", 3)
    assert "c1" in page.headline
    assert page.headline.startswith("Round 3 took 12.5 s") or page.headline.startswith("Round 3 took 12 s")
    assert (page.previous, page.next, page.seconds, page.clock) == (2, 4, 12.5, "virtual")
    lane = next(one for one in page.lanes if one.node == "c1")
    assert [part.name for part in lane.parts if part.critical] == ["download", "compute", "upload"]
    other = next(one for one in page.lanes if one.node == "c0")
    assert not any(part.critical for part in other.parts)
    assert other.waits_for == "c1"


def test_the_path_covers_the_round(reader):
    page = round_page(reader, "slow", 0)
    assert sum(part.seconds for part in page.path) == pytest.approx(12.5)
    assert page.path[0].detail == "c1"
    assert page.path[-1].name == "aggregate"


def test_the_slowest_lane_comes_first_and_lanes_are_limited(reader):
    page = round_page(reader, "slow", 0, limit=2)
    assert [lane.node for lane in page.lanes] == ["server", "c1"]
    assert page.total == 5
    by_name = round_page(reader, "slow", 0, sort="name")
    assert [lane.node for lane in by_name.lanes] == ["server", "c0", "c1", "c2", "c3"]
    assert [lane.node for lane in round_page(reader, "slow", 0, limit=2, offset=2).lanes] == ["c2", "c3"]


def test_only_one_round_is_read(reader, monkeypatch):
    """A run of a thousand clients and rounds has a million Spans: a page must not read them all."""
    asked = []
    rows = reader.database.rows
    monkeypatch.setattr(
        type(reader.database), "rows", lambda self, sql, values=(): asked.append(sql) or rows(sql, values)
    )
    round_page(reader, "slow", 3)
    spans = [sql for sql in asked if "FROM span" in sql]
    assert spans
    assert holds_for_each("round = ?" in sql for sql in spans)
    plan = rows("EXPLAIN QUERY PLAN SELECT * FROM spans WHERE run = ? AND round = ?", ("slow", 3))
    assert any("span_by_run_round" in str(row) for row in plan)


def test_no_such_round(reader):
    with pytest.raises(ConfigError, match="rounds 0 to 5"):
        round_page(reader, "slow", 77)


def test_a_round_that_was_not_timed(tmp_path):
    run = begin("bare", "bare")
    run.add(Metric(Where("bare", 0, "c0"), run.at, "loss", 1.0))
    with open_reader(stored(tmp_path / "bare.db", run)) as reader:
        page = round_page(reader, "bare", 0)
        assert (page.timed, page.lanes, page.seconds) == (False, (), None)
        assert time_costs(reader, "bare").timed is False
        assert topology_page(reader, "bare").has_transfers is False


def test_a_round_that_failed_has_no_end(tmp_path):
    run = slow_run(rounds=2)
    run.records = [
        one for one in run.records if not (isinstance(one, Span) and one.name == "round" and one.where.round == 1)
    ]
    with open_reader(stored(tmp_path / "open.db", run)) as reader:
        assert round_page(reader, "slow", 1).complete is False


def test_the_table_of_a_round_is_sorted_and_paged(reader):
    table = round_table(reader, "slow", 2, ["update.norm", "loss"], sort="loss", limit=2)
    assert [column.name for column in table.columns] == ["update.norm", "loss"]
    assert (len(table.rows), table.total) == (2, 4)
    whole = round_table(reader, "slow", 2)
    assert {"loss", "update.norm", "traffic.sent"} <= {column.name for column in whole.columns}
    with pytest.raises(ConfigError, match="no metric"):
        round_table(reader, "slow", 2, ["nonsense"])


# -- the profile ------------------------------------------------------------------------------------------------------


def test_a_page_says_of_all_rounds_what_the_terminal_says(reader):
    page, whole = time_costs(reader, "slow"), profile_of(reader, "slow")
    assert page.headline == whole.verdict.text
    assert page.kind == "straggler"
    assert [one.node for one in page.stragglers] == [one.node for one in whole.stragglers] == ["c1"]
    assert {one.name: pytest.approx(one.seconds) for one in page.path} == whole.path_parts
    assert page.waited == whole.waiting.in_words() == "Rounds 0 to 5 waited 42 s for c1 (56 % of their time)"
    assert (page.window.rounds, page.window.of) == (6, 6)


def test_remedies_are_those_of_the_terminal(reader):
    page, whole = changes(reader, "slow"), profile_of(reader, "slow")
    assert [(one.name, one.after) for one in page.remedies] == [(one.name, one.after) for one in whole.remedies]
    assert page.before == pytest.approx(12.5)
    rows = {one.name: one.after for one in whole.what_if}
    assert all(one.after == rows[one.name] for one in page.what_if)
    assert page.remedies[0].name == "Speed up c1, or leave it out"
    assert max(one.lost or 0.0 for one in page.what_if[:2]) <= 0.25  # what leaves out much data comes last


def test_a_large_run_is_looked_at_in_its_newest_rounds(reader, monkeypatch):
    monkeypatch.setattr(timed_rounds, "SPANS", 12)  # six Spans a round
    window = window_of(reader, "slow", None, None)
    assert (window.first, window.last, window.rounds, window.of, window.narrowed) == (4, 5, 2, 6, False)
    monkeypatch.setattr(timed_rounds, "MOST_SPANS", 18)
    asked = window_of(reader, "slow", 0, 4)
    assert (asked.first, asked.last, asked.rounds, asked.narrowed) == (2, 4, 3, True)
    assert window_of(reader, "slow", 1, 2).narrowed is False


def test_costs_are_counted(reader):
    found = costs(reader, "slow").traffic
    assert (found.sent, found.received) == (6 * 4 * BYTES, 6 * 4 * BYTES)
    assert {kind.kind: kind.bytes for kind in found.kinds} == {"model": 24.0 * BYTES, "update": 24.0 * BYTES}
    reached = {one.accuracy: one.round for one in found.reached}
    assert reached == {0.8: 3, 0.9: 4, 0.95: 5}
    assert found.trends[0].values == [4.0 * BYTES] * 6


@pytest.mark.thorough
def test_memory_is_told_by_what_it_is_for(tmp_path):
    run = slow_run(rounds=3)
    for number in range(3):
        for node, size in (("c0", 10.0), ("c1", 100.0 + number)):
            run.add(Metric(Where("slow", number, node), run.at, "memory.resident", size))
    for name, size in (("tensors", 70.0), ("model", 30.0), ("activations", 40.0), ("batch", 16.0)):
        run.add(Metric(Where("slow", 0, "c1"), run.at, f"memory.{name}", size))
    with open_reader(stored(tmp_path / "memory.db", run)) as reader:
        found = costs(reader, "slow").memory
    assert (found.node, found.batch) == ("c1", 16.0)
    assert {one.name: one.bytes for one in found.shares} == {"model": 30.0, "activations": 40.0}
    peak = next(one for one in found.peaks if one.metric == "memory.resident")
    assert (peak.bytes, peak.node, peak.round, peak.growth_bytes, peak.growth_node) == (102.0, "c1", 2, 2.0, "c1")


# -- who talks to whom ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("topology", "kind"),
    [("hierarchical", "tree"), ("clustered", "clusters"), ("rings", "rings"), ("centralized", "star")],
)
def test_each_topology_has_its_picture(tmp_path, topology, kind):
    groups = {"edge-0": ["c0", "c2"], "edge-1": ["c1"]} if topology != "centralized" else {}
    run = grouped(topology, groups) if groups else slow_run()
    with open_reader(stored(tmp_path / "t.db", run)) as reader:
        page = topology_page(reader, run.run.id)
    assert page.kind == kind
    if groups:
        assert {node.name: node.group for node in page.nodes if node.role == "client"} == {
            "c0": "edge-0",
            "c2": "edge-0",
            "c1": "edge-1",
        }
        assert [node.name for node in page.nodes if node.role == "group"] == ["edge-0", "edge-1"]
        assert page.groups == 2
    assert sum(edge.bytes for edge in page.edges) == page.bytes
    assert sum(edge.share for edge in page.edges) == pytest.approx(1.0)


def test_groups_are_those_of_the_round(tmp_path):
    run = grouped("clustered", {"cluster-0": ["c0", "c1"]}, rounds=3)
    run.add(Event(Where("grouped", 2), run.at, "info", "groups", "groups.", {"cluster-0": ["c0"], "cluster-1": ["c1"]}))
    with open_reader(stored(tmp_path / "t.db", run)) as reader:
        assert {n.name: n.group for n in topology_page(reader, "grouped", 1).nodes}["c1"] == "cluster-0"
        assert {n.name: n.group for n in topology_page(reader, "grouped", 2).nodes}["c1"] == "cluster-1"
        assert topology_page(reader, "grouped").changed == (0, 2)


def test_health_is_that_of_the_round(tmp_path):
    run = slow_run()
    for number in (3, 4, 5):
        run.add(Finding(Where("slow", number, "c1"), run.at, "STRAGGLER", "warning", 0.9, "c1 is slow.", {"since": 3}))
    with open_reader(stored(tmp_path / "t.db", run)) as reader:
        assert {n.name: n.health for n in topology_page(reader, "slow", 1).nodes}["c1"] == "ok"
        now = {n.name: n for n in topology_page(reader, "slow", 4).nodes}
        assert (now["c1"].health, now["c0"].health) == ("warning", "ok")
        assert now["c1"].key.startswith("STRAGGLER~c1")


def test_who_was_not_there_is_told(tmp_path):
    run = begin("away", "away")
    run.round({"c0": (1, 1, 1), "c1": (1, 1, 1)})
    run.round({"c0": (1, 1, 1)})
    run.round({"c0": (1, 1, 1), "c1": None})
    with open_reader(stored(tmp_path / "t.db", run)) as reader:
        assert {n.name: n.health for n in topology_page(reader, "away", 1).nodes}["c1"] == "absent"
        page = topology_page(reader, "away", 2)
        assert {n.name: n.health for n in page.nodes}["c1"] == "failed"
        assert (page.took_part, page.clients) == (1, 2)


def test_many_clients_stand_together_and_the_ill_ones_alone(tmp_path):
    run = begin("many", "many")
    run.round({f"c{i}": (1.0, 1.0, 1.0) for i in range(300)})
    run.add(Finding(Where("many", 0, "c17"), run.at, "LABEL_NOISE", "critical", 0.9, "c17 is ill.", {"since": 0}))
    with open_reader(stored(tmp_path / "t.db", run)) as reader:
        page = topology_page(reader, "many", most=200)
        assert page.joined
        assert {node.name: node.count for node in page.nodes} == {
            "server": 1,
            "c17": 1,
            "299 clients without a finding": 299,
        }
        assert sum(edge.bytes for edge in page.edges) == page.bytes == 600 * BYTES
        assert page.took_part == page.clients == 300
        assert len(topology_page(reader, "many").nodes) == 301


# -- routes -----------------------------------------------------------------------------------------------------------

PATHS = ("profile", "profile/changes", "costs", "rounds/2", "rounds/2/metrics", "topology")


@pytest.mark.parametrize("path", PATHS)
def test_answers_and_says_when_nothing_changed(client, path):
    first = client.get(f"/api/runs/slow/{path}")
    assert first.status_code == 200
    again = client.get(f"/api/runs/slow/{path}", headers={"If-None-Match": first.headers["ETag"]})
    assert again.status_code == 304


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("rounds/99", 404),
        ("rounds/2?clock=real", 404),
        ("topology?round=99", 404),
        ("rounds/2/metrics?names=nonsense", 404),
        ("profile?clock=real", 404),
        ("profile?from=x", 422),
    ],
)
def test_what_cannot_be_answered_has_the_one_shape(client, path, status):
    found = client.get(f"/api/runs/slow/{path}")
    assert found.status_code == status
    assert set(found.json()["error"]) == {"code", "message", "hint"}


# -- in a browser -----------------------------------------------------------------------------------------------------


@pytest.fixture
def site(tmp_path):
    rings = grouped("rings", {"ring-0": ["c0", "c2"], "ring-1": ["c1"]}, name="rings")
    hostile = begin("hostile", HOSTILE)
    for _ in range(3):
        hostile.round({HOSTILE: (1.0, 5.0, 1.0), "c1": (1.0, 1.0, 1.0), "c2": (1.0, 1.0, 1.0)})
    hostile.add(Finding(Where("hostile", 1, HOSTILE), hostile.at, "STRAGGLER", "warning", 0.9, "slow.", {"since": 1}))
    with serve(stored(tmp_path / "site.db", slow_run(), rings, hostile)) as url:
        yield url


@pytest.fixture
def growing(tmp_path):
    path = stored(tmp_path / "live.db", slow_run(rounds=2))
    with serve(path) as url:
        yield url, path


@pytest.mark.browser
def test_the_profile_speaks_first_and_leads_to_a_round(site, page):
    ready(page, f"{site}/runs/slow/rounds", "rounds")
    page.wait_for_selector(".view-rounds[data-complete]")
    text = page.locator("main").inner_text()
    assert "straggler-bound: it waits for c1" in text
    assert "Speed up c1, or leave it out" in text
    page.get_by_role("region", name="The slowest rounds").get_by_role("link").first.click()
    page.wait_for_selector("html[data-ready='round']")
    assert "/rounds/" in page.url
    assert judge(page) == []


@pytest.mark.browser
def test_a_round_has_neighbours_an_order_and_a_table(site, page):
    ready(page, f"{site}/runs/slow/rounds/3", "round")
    assert "waited" in page.locator("main").inner_text()
    page.get_by_role("link", name="round 4 →").click()
    page.wait_for_url("**/rounds/4")
    page.wait_for_selector("html[data-ready='round']")
    page.keyboard.press("[")
    page.wait_for_url("**/rounds/3")
    page.wait_for_selector("html[data-ready='round']")
    page.get_by_role("button", name="by name").click()
    page.wait_for_url("**order=name**")
    page.get_by_role("button", name="loss").click()
    page.wait_for_url("**sort=loss**")
    page.go_back()
    page.go_back()
    page.wait_for_url(lambda url: "order" not in url)


@pytest.mark.browser
def test_the_topology_is_of_the_round_that_is_chosen(site, page):
    ready(page, f"{site}/runs/rings/topology?round=0", "topology")
    assert page.locator("output").inner_text() == "0"
    page.locator("#topology-round").focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_url("**round=1")
    page.locator(".said", has_text="Round 1. Rings:").wait_for()
    assert judge(page) == []


@pytest.mark.browser
@pytest.mark.parametrize("path", ["rounds", "rounds/1", "topology"])
def test_a_hostile_name_is_text(site, page, path):
    ready(page, f"{site}/runs/hostile/{path}")
    page.locator("main", has_text=HOSTILE).wait_for()
    assert HOSTILE in page.locator("main").inner_text()
    assert page.locator("main img").count() == 0


@pytest.mark.browser
def test_a_new_round_comes_by_itself(growing, page):
    url, path = growing
    ready(page, f"{url}/runs/slow/topology", "topology")
    assert page.locator("output").inner_text() == "1"
    store = open_store(path)
    store.write(slow_run(rounds=3).records)
    store.close()
    page.locator("output", has_text="2").wait_for()
