# SPDX-License-Identifier: Apache-2.0
"""Two to six runs side by side: words, courses, differences, partings, settings."""

import random

import pytest
from starlette.testclient import TestClient

from fedvitals.analysis.traffic import traffic_of
from fedvitals.dashboard.app import create_app
from fedvitals.records import Metric, Transfer, Where
from fedvitals.store import open_reader
from fedvitals.store.read import queries
from fedvitals.views.comparison.page import POINTS
from fedvitals.views.run_figures import traffic_sums
from support.conditions import holds_for_each
from support.runs_by_hand import HOSTILE, course, find
from support.timed_run import STARTED, stored

HOME = "http://127.0.0.1:8321"


def noisy(identity, name, seed, best, rate):
    """Repeats: the seed moves the accuracy of every round a little."""
    told, chance = course(identity, name, seed=seed, rate=rate, best=best, started=STARTED + seed), random.Random(seed)
    for record in told.records:
        if isinstance(record, Metric) and record.name == "accuracy":
            object.__setattr__(record, "value", record.value + chance.uniform(-0.01, 0.01))
    return told


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    one, two = course("one", "plain", rate=0.1), course("two", "faster", rate=0.2, best=0.7, rounds=6)
    twin = course("twin", "plain too", rate=0.1)
    find(two, "c1")
    late = course("late", "late", rate=0.1)
    for record in late.records:  # as `one`, but for one client from round 2 on
        if (
            isinstance(record, Metric)
            and record.name == "update.norm"
            and record.where.node == "c2"
            and record.where.round >= 2
        ):
            object.__setattr__(record, "value", 5.0)
    hostile = course(f"h,{HOSTILE}%2", HOSTILE, rate=0.3, config={HOSTILE: HOSTILE})
    find(hostile, HOSTILE, severity="critical")
    repeats = [noisy(f"{name}-{seed}", name, seed, best, rate)
               for name, best, rate in (("low", 0.5, 0.1), ("high", 0.9, 0.2)) for seed in range(4)]  # fmt: skip
    path = stored(tmp_path_factory.mktemp("compare") / "runs.db", one, two, twin, late, hostile, *repeats)
    with TestClient(create_app(path), base_url=HOME) as client:
        yield client


def compare(client, *runs, **params):
    answer = client.get("/api/compare", params={"runs": list(runs), **params})
    assert answer.status_code == 200, answer.text
    return answer.json()


def picture(comparison, name, kind="pictures"):
    return next(one for one in comparison[kind] if one["name"] == name)


def test_says_what_changed_in_words(client):
    found = compare(client, "one", "two")
    assert found["words"][0].startswith("B (faster) against A (plain): accuracy 20 points lower (chance not ruled out")
    assert found["words"][0].endswith("1 finding more.")
    assert any(word.startswith("Settings that differ:") and "local.lr 0.1 → 0.2" in word for word in found["costs"])
    assert found["chance"].startswith("One run each: no difference here can be distinguished from chance.")
    assert "--repeats" not in found["chance"]  # which is the command line's word


def test_every_run_is_a_line_and_gsc_has_a_log_axis(client):
    found = compare(client, "one", "two", "late")
    assert [one["name"] for one in found["pictures"]] == ["accuracy", "loss", "gsc", "seconds", "bytes"]
    gsc = picture(found, "gsc")
    assert gsc["scale"] == "log0"
    assert [line["letter"] for line in gsc["lines"]] == ["A", "B", "C"]
    assert gsc["lines"][0]["values"] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert gsc["lines"][1]["values"] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.2])
    assert picture(found, "seconds")["note"] == "virtual clock"
    assert picture(found, "bytes")["lines"][0]["values"] == [3 * 2 * 1600] * 4


def test_differences_are_from_the_baseline_that_one_chooses(client):
    found = compare(client, "one", "two")
    (line,) = picture(found, "accuracy", "differences")["lines"]
    assert line["rounds"] == [0, 1, 2, 3]  # as far as both go
    assert line["values"][0] == pytest.approx(100 * (0.7 / 6 - 0.9 / 4))
    turned = compare(client, "one", "two", baseline="two")
    assert [side["runs"] for side in turned["sides"]] == [["two"], ["one"]]
    (line,) = picture(turned, "accuracy", "differences")["lines"]
    assert line["values"][0] == pytest.approx(100 * (0.9 / 4 - 0.7 / 6))


def test_where_runs_part(client):
    found = compare(client, "one", "late", "twin")
    late, twin = found["partings"]
    assert (late["exact"], late["noise"], late["equal"]) == (2, 2, False)
    assert "update norms of c2 (1 against 5); no difference in those of the other 2 clients" in late["words"]
    assert (twin["exact"], twin["equal"]) == (None, True)
    assert "do not diverge" in twin["words"]


def test_repeats_give_bands_and_intervals(client):
    found = compare(client, "low", "high", repeats=True)
    assert [len(side["runs"]) for side in found["sides"]] == [4, 4]
    line = picture(found, "accuracy")["lines"][0]
    assert holds_for_each(
        low < value < high for low, value, high in zip(line["low"], line["values"], line["high"], strict=True)
    )
    (gap,) = picture(found, "accuracy", "differences")["lines"]
    assert gap["low"][-1] < gap["values"][-1] < gap["high"][-1]
    assert gap["low"][-1] > 0
    assert "95 %" in picture(found, "accuracy", "differences")["note"]
    assert "more than chance explains" in found["words"][0]
    assert "are larger than chance explains" in found["chance"]
    rows = {row["name"]: row for row in found["rows"]}
    assert rows["accuracy, last"]["changes"][0]["beyond_chance"] is True
    assert found["partings"][0]["repeats"] is not None


def test_settings_that_differ_come_first_and_the_others_are_there_too(client):
    settings = compare(client, "one", "two")["settings"]
    assert [one["differs"] for one in settings] == sorted((one["differs"] for one in settings), reverse=True)
    by_name = {one["name"]: one for one in settings}
    assert by_name["local.lr"] == {
        "name": "local.lr",
        "values": ["0.1", "0.2"],
        "differs": True,
        "defaults": [False, False],
    }
    assert by_name["host"] == {"name": "host", "values": ["lab", "lab"], "differs": False, "defaults": [False, False]}


def test_findings_side_by_side(client):
    (trouble,) = compare(client, "one", "two")["troubles"]
    assert (trouble["issue"], trouble["place"], trouble["severity"], trouble["runs"]) == (
        "LABEL_NOISE",
        "c1",
        "warning",
        [0, 1],
    )
    assert trouble["title"]


def test_hostile_names_stay_text(client):
    found = compare(client, "one", f"h,{HOSTILE}%2")
    assert found["sides"][1]["name"] == HOSTILE
    assert any(one["name"] == HOSTILE and one["values"] == [None, HOSTILE] for one in found["settings"])


@pytest.mark.parametrize(
    ("runs", "status"),
    [
        (["one"], 422),
        ([], 422),
        (["one", "one"], 404),
        (["one", "nobody"], 404),
        (["one"] * 7, 422),
        (["one", ""], 422),
    ],
)
def test_what_cannot_be_compared(client, runs, status):
    answer = client.get("/api/compare", params={"runs": runs})
    assert answer.status_code == status
    assert answer.json()["error"]["message"]


def test_a_run_that_gets_longer_is_not_remembered_as_it_was(tmp_path):
    path = stored(tmp_path / "runs.db", course("one"), course("two", "other"))
    with TestClient(create_app(path), base_url=HOME) as client:
        assert len(picture(compare(client, "one", "two"), "accuracy")["lines"][0]["rounds"]) == 4
        more = course("one", rounds=4)
        more.records = [Metric(Where("one", 4), STARTED + 60, "accuracy", 0.95, "more", 0)]
        stored(path, more)
        assert picture(compare(client, "one", "two"), "accuracy")["lines"][0]["values"][-1] == 0.95


@pytest.mark.thorough
def test_long_runs_come_in_buckets_that_keep_their_extremes(tmp_path):
    told = course("one", rounds=0), course("two", "other", rounds=0)
    for one in told:
        for number in range(3000):
            value = 9.0 if number == 1234 else 0.5
            one.add(Metric(Where(one.run.id, number), STARTED + number, "accuracy", value))
    with TestClient(create_app(stored(tmp_path / "runs.db", *told)), base_url=HOME) as client:
        line = picture(compare(client, "one", "two"), "accuracy")["lines"][0]
    assert len(line["rounds"]) <= POINTS
    assert (max(line["high"]), line["total"]) == (9.0, 3000)


@pytest.mark.parametrize("groups", [None, {"c0": "edge-0", "c1": "edge-0", "c2": "edge-1"}])
def test_the_database_adds_up_the_same_traffic_as_we_do(tmp_path, groups):
    """By round and by direction; with edges, telemetry, a message without a round and one between clients."""
    told = course("r", rounds=0)
    for size in (100, 900):
        told.round({f"c{i}": (1.0, 2.0, 1.0) for i in range(3)}, groups=groups, sent={"c0": size})
    messages = (
        (0, "c0", "server", 50, "telemetry"),
        (None, "server", "c1", 7, "model"),
        (1, "c1", "c2", 11, "model"),
        (1, "edge-0", "server", 13, "update"),
        (1, "edge-box-1", "server", 17, "update"),
        (0, "c0", "server", -5, "update"),
    )
    for number, sender, receiver, size, kind in messages:
        told.add(Transfer(Where("r", number, "c0"), STARTED, sender, receiver, size, 2 * size, None, kind))
    path = stored(tmp_path / "runs.db", told)
    with open_reader(path) as reader:
        ours, theirs = traffic_of(queries.records(reader, "r", Transfer)), traffic_sums(reader, "r")
    flow = lambda sums: (sums.bytes, sums.raw_bytes, sums.messages)  # noqa: E731
    for name in ("up", "down", "between"):
        assert flow(getattr(theirs, name)) == flow(getattr(ours, name)), name
    assert (theirs.bytes, theirs.telemetry_bytes) == (ours.bytes, ours.telemetry_bytes)
    assert [(one.round, one.bytes) for one in theirs.rounds] == [(one.round, one.bytes) for one in ours.rounds]
