# SPDX-License-Identifier: Apache-2.0
"""Nodes that are named by twenty digits are called by their partition where people read; their id stays their name."""

import json

import pytest
from starlette.testclient import TestClient

from fedvitals.cli.main import main
from fedvitals.dashboard.app import create_app
from fedvitals.errors import ConfigError
from fedvitals.records import Event, Metric, Where
from fedvitals.report.write import report
from fedvitals.store import open_reader
from fedvitals.views.labels import labels_of, node_of
from fedvitals.views.short_ids import differing_parts, distinct_beginnings, short
from support.dashboard_server import expect, judge, ready, serve
from support.runs_by_hand import JUDGED, course, find
from support.timed_run import begin, stored

ILL, OTHER, MUTE, LIAR = "7249075217557368631", "195914681145553265", "12523771754974608524", "15247780462596926938"
HOSTILE = "[red]<img src=x onerror=alert(1)>"


def partition(timed, node, number, at_round):
    where = Where(timed.run.id, at_round, node)
    timed.add(Event(where, timed.at, "info", "client.partition", "Told.", {"partition": number}))


@pytest.fixture(scope="module")
def store(session_folder):
    """A run of Flower's kind, and an ordinary one beside it."""
    told = begin("20260101-000000-flower", "flower", config={**JUDGED, "rounds": 4})
    for number in range(4):
        told.round(dict.fromkeys((ILL, OTHER, MUTE, LIAR), (1.0, 2.0, 1.0)), accuracy=0.5, loss=1.0)
        for node in (ILL, OTHER, MUTE, LIAR):
            told.add(Metric(Where(told.run.id, number, node), told.at, "update.cosine_mean", 0.5))
        partition(told, ILL, 9 if number == 0 else 12, number)  # it was given other data meanwhile
        partition(told, OTHER, 1, number)
        partition(told, LIAR, [HOSTILE, True, -1, {"a": 1}][number], number)
    find(told, ILL)
    ordinary = course("20260101-000000-plain", "plain")
    find(ordinary, "c1")
    return stored(session_folder / "labels.db", told, ordinary)


@pytest.fixture
def ask(store, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")

    def printed(*arguments):
        with pytest.raises(SystemExit):
            main([*arguments, "--store", str(store)])
        return capsys.readouterr().out

    return printed


def test_the_newest_partition_is_the_label_and_lies_are_none(store):
    with open_reader(store) as reader:
        assert labels_of(reader, "20260101-000000-flower") == {ILL: "partition 12", OTHER: "partition 1"}
        assert labels_of(reader, "20260101-000000-plain") == {}


def test_who_is_back_under_a_new_id_has_the_label_and_the_old_id_until_when(tmp_path):
    told = begin("20260101-000000-back", "back", config=JUDGED)
    for number in range(6):
        told.round(dict.fromkeys((ILL, OTHER, MUTE), (1.0, 2.0, 1.0)), accuracy=0.5, loss=1.0)
        partition(told, ILL if number < 3 else OTHER, 1, number)
        partition(told, MUTE, 7, number)
        partition(told, LIAR, 7, number)  # two that claim one partition at the same time
    with open_reader(stored(tmp_path / "back.db", told)) as reader:
        labels = labels_of(reader, "20260101-000000-back")
    assert labels == {ILL: "partition 1 until round 2", OTHER: "partition 1", MUTE: "partition 7", LIAR: "partition 7"}
    assert node_of("partition 1", [ILL, OTHER], labels) == OTHER


def test_only_long_numbers_are_shortened():
    assert [short(name) for name in (ILL, "c12", "123456789", "hospital-of-the-north-1", "²" * 20)] == [
        "…368631", "c12", "123456789", "hospital-of-the-north-1", "²" * 20,
    ]  # fmt: skip


def test_a_node_is_found_by_what_people_read():
    known, labels = [ILL, OTHER, "c1", "1"], {ILL: "partition 12", OTHER: "partition 1"}
    for asked, meant in ((ILL, ILL), ("partition 1", OTHER), ("…368631", ILL), ("553265", OTHER), ("c1", "c1")):
        assert node_of(asked, known, labels) == meant
    for asked in ("partition 2", "68631", "c", "…c1"):
        with pytest.raises(ConfigError, match="Unknown node"):
            node_of(asked, known, labels)
    with pytest.raises(ConfigError, match="Unknown node"):
        node_of("partition 1", known, dict.fromkeys(known, "partition 1"))


def test_the_terminal_says_both(ask):
    card = ask("show", "flower")
    assert "…368631 partition 12" in card
    assert "…608524" in card
    assert f"{ILL} (partition 12): LABEL_NOISE" in card
    assert max(len(line) for line in card.partition("Clients, those")[2].partition("update:")[0].splitlines()) <= 80
    assert f"where     {ILL} (partition 12)" in ask("findings", "flower", "--node", "partition 12")
    assert f"{ILL} (partition 12)" in ask("show", "flower", "--node", "368631")
    assert json.loads(ask("show", "flower", "--json"))["result"]["labels"] == {
        ILL: "partition 12",
        OTHER: "partition 1",
    }
    assert "partition" not in ask("show", "plain") + ask("findings", "plain", "--all")


@pytest.mark.thorough
def test_answers_have_the_label_beside_the_id(store):
    app = TestClient(create_app(store), base_url="http://127.0.0.1:8321")
    get = lambda path, **query: app.get(f"/api/runs/20260101-000000-flower/{path}", params=query).json()  # noqa: E731
    rows = {row["name"]: row["label"] for row in get("clients")["rows"]}
    assert rows == {ILL: "partition 12", OTHER: "partition 1", MUTE: "", LIAR: ""}
    assert [row["name"] for row in get("clients", search="Partition 12")["rows"]] == [ILL]
    overview = get("overview")
    assert overview["verdict"]["headline"].startswith(f"{ILL} (partition 12) seems to have wrong labels")
    assert [(one["node"], one["label"]) for one in overview["suspects"]] == [(ILL, "partition 12")]
    (case,) = get("findings")["cases"]
    assert (case["node"], case["label"], case["place"]) == (ILL, "partition 12", f"{ILL} (partition 12)")
    assert get("client", node=ILL)["row"]["label"] == "partition 12"


@pytest.mark.thorough
def test_the_report_says_both(store, tmp_path):
    with open_reader(store) as reader:
        for name in ("flower", "plain"):
            report(reader, [name], tmp_path / f"{name}.md")
    told, plain = ((tmp_path / f"{name}.md").read_text(encoding="utf-8") for name in ("flower", "plain"))
    assert f"| {ILL} (partition 12) |" in told
    assert f"Labels are wrong at random: {ILL} (partition 12)" in told
    assert "(partition" not in plain


@pytest.mark.browser
def test_pages_hide_the_middle_of_an_id_and_keep_it_whole(store, page):
    with serve(store) as url:
        ready(page, f"{url}/runs/20260101-000000-flower/clients", "clients")
        cell = page.locator(".clients-table tbody tr", has_text="partition 12").locator("td").nth(1)
        expect(cell).to_have_text(f"{ILL} partition 12")  # what is copied
        expect(cell.locator(".long-id")).to_have_attribute("title", ILL)
        assert cell.locator(".long-id").bounding_box()["width"] < 120
        assert not judge(page)
        cell.locator("a").click()
        expect(page).to_have_url(f"{url}/runs/20260101-000000-flower/clients/{ILL}")
        expect(page.locator(".client-place")).to_contain_text(f"{ILL} partition 12: 1 of 4")
        expect(page).to_have_title("partition 12 · flower · fedvitals")
        ready(page, f"{url}/runs/20260101-000000-flower", "overview")
        expect(page.locator(".suspect-list li").first).to_contain_text("partition 12")
        expect(page.locator(".finding-line .what").first).to_contain_text("partition 12")


def test_long_names_are_shortened_to_the_part_that_differs():
    names = ["cnn-clients100-seed1", "cnn-clients100-seed2", "short"]
    assert differing_parts(names, 10) == ["…seed1", "…seed2", "short"]
    assert differing_parts(names, 30) == names
    assert differing_parts(["a-very-long-name-of-a-run"], 11) == ["a-ver…a-run"]
    assert differing_parts(["fedavg-on-digits", "scaffold-on-text"], 9) == ["feda…gits", "scaf…text"]
    assert differing_parts([], 9) == []


def test_ids_are_cut_to_beginnings_that_are_their_own():
    ids = ["20260101-000000-aa", "20260101-000000-ab", "20260102-000000-aa"]
    assert distinct_beginnings(ids, 15) == ["20260101-000000-aa", "20260101-000000-ab", "20260102-000000"]
    assert distinct_beginnings(["run", "run-2"], 2) == ["run", "run-"]
