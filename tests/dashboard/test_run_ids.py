# SPDX-License-Identifier: Apache-2.0
"""Ids of runs that a path does not keep: none is made any more, and those of older stores are read everywhere."""

from pathlib import Path
from urllib.parse import quote, urlsplit

import httpx2
import pytest
from click.testing import CliRunner

import fedvitals as fv
from fedvitals.cli.main import app as command_line
from fedvitals.dashboard.app import create_app
from fedvitals.dashboard.run_address import run_of_part, run_page
from fedvitals.errors import ConfigError
from fedvitals.records import LONGEST_RUN_ID
from fedvitals.store import open_reader
from fedvitals.store.read.queries import list_runs
from support.dashboard_server import Url, enter, expect, ready, serve
from support.runs_by_hand import course
from support.timed_run import stored
from support.waiting import PATIENCE

REFUSED = (
    "a/b",
    "..",
    ".",
    "../../etc/passwd",
    "a\\b",
    "tab\there",
    "\x1b[31m",
    "x" * (LONGEST_RUN_ID + 1),
    "line\nend",
)
USED = ("%2f", "%2e%2e", "a?b#c&d=e", "~tilde", "~a%2Fb", "...", "a,b", "ünï code", "<b>", "a'b\"c", "+", " ")
OLD = (*REFUSED[:7], "a//b", "x/clients", "/", *USED)


def test_an_id_that_names_no_folder_is_refused_when_it_is_made(tmp_path: Path) -> None:
    for identity in REFUSED:
        with pytest.raises(ConfigError, match="cannot be the id of a run"):
            fv.Monitor(tmp_path / "runs.db", id=identity)
    assert list(tmp_path.iterdir()) == []
    for identity in USED:
        assert fv.Monitor(tmp_path / "runs.db", id=identity).run.id == identity


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As a store of an older version may be: whatever was given was written."""
    runs = [course(identity, f"run {number}") for number, identity in enumerate((*OLD, "plain"))]
    return stored(tmp_path_factory.mktemp("ids") / "runs.db", *runs)


def test_an_address_means_the_run_that_it_was_made_for() -> None:
    for identity in OLD:
        path = run_page(identity)
        assert path.count("/") == 2, "one part, and no dots that a browser would resolve"
        assert path.rpartition("/")[2] not in ("", ".", "..")
        assert "?" not in path
        assert "#" not in path


def client_of(url: Url) -> httpx2.Client:
    """One that changes things, of the real server: Starlette's own for tests decodes addresses twice."""
    headers = {"X-Fedvitals": "1", "Authorization": f"Bearer {url.token}"}
    return httpx2.Client(base_url=str(url), headers=headers, timeout=PATIENCE)


@pytest.mark.thorough
def test_every_route_answers_for_an_old_id(store: Path) -> None:
    paths = [path for path, methods in create_app(store).openapi()["paths"].items() if "get" in methods]
    asked = [path.format(run="\0", number=0, round=0, key="x") for path in paths if "{run}" in path]

    def statuses(client: httpx2.Client, identity: str) -> dict[str, int]:
        part = run_page(identity).removeprefix("/runs/")
        query = "node=c0&names=accuracy&name=accuracy&sign=accuracy"
        return {path: client.get(f"{path.replace(chr(0), part)}?{query}").status_code for path in asked}

    with serve(store) as url, client_of(url) as client:
        usual = statuses(client, "plain")
        assert list(usual.values()).count(200) > 15
        for identity in ("a/b", "..", "a\\b", "tab\there", "x/clients", "/", "%2f", "a?b#c&d=e", "~a%2Fb"):
            part = run_page(identity).removeprefix("/runs/")
            assert client.get(f"/api/runs/{part}").json()["id"] == identity
            assert statuses(client, identity) == usual, identity
            tagged = client.put(f"/api/runs/{part}/tags/paper").json()
            assert tagged == {"id": identity, "tags": ["paper"]}
            other = OLD[0] if identity != OLD[0] else OLD[1]
            sides = client.get("/api/compare", params={"runs": [identity, other]}).json()["sides"]
            assert identity in [run["id"] if isinstance(run, dict) else run for side in sides for run in side["runs"]]


def test_one_run_is_not_deleted_in_place_of_another(tmp_path: Path) -> None:
    ids = ["a/b", "~a%2Fb", "a%2Fb", "a", "..", "x"]
    path = stored(tmp_path / "runs.db", *(course(identity, "run") for identity in ids))
    with serve(path) as url, client_of(url) as client:
        for identity in ids[:-1]:
            assert client.delete(f"/api{run_page(identity)}").json()["id"] == identity
    with open_reader(path) as reader:
        assert [run.id for run in list_runs(reader)] == ["x"]


@pytest.mark.thorough
@pytest.mark.parametrize("identity", ["a/b", "..", "../../etc/passwd", "tab\there", "%2f"])
def test_the_command_line_reads_an_old_id(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, identity: str
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for verb, *options in (
        ["show"],
        ["profile"],
        ["report"],
        ["export", "--to", "csv"],
        ["export", "--to", "perfetto"],
    ):
        result = CliRunner().invoke(command_line, [verb, identity, "--store", str(store), *options])
        assert result.exit_code in (0, 1), (verb, result.output, result.exception)
    assert list((tmp_path / "here").iterdir())
    assert [path.name for path in tmp_path.iterdir()] == ["here"], "nothing is written outside of this folder"


@pytest.mark.browser
@pytest.mark.thorough
def test_links_of_the_page_lead_to_old_ids(page, tmp_path: Path) -> None:
    ids = ["a/b", "..", "a?b#c"]
    path = stored(tmp_path / "runs.db", *(course(identity, f"run {number}") for number, identity in enumerate(ids)))
    with serve(path) as url:
        enter(page, url)
        for number, identity in enumerate(ids):
            ready(page, url, "runs")
            page.get_by_role("link", name=f"run {number}", exact=True).click()
            page.wait_for_selector("html[data-ready='overview']", state="attached", timeout=1000 * PATIENCE)
            assert urlsplit(page.url).path == run_page(identity)
            page.reload()
            page.wait_for_selector("html[data-ready='overview']", state="attached", timeout=1000 * PATIENCE)
            assert page.locator(".run-name").get_attribute("title") == identity
            page.get_by_role("link", name="clients", exact=True).first.click()
            page.wait_for_selector("html[data-ready='clients']", state="attached", timeout=1000 * PATIENCE)
        ready(page, url, "runs")
        for number in range(len(ids)):
            page.get_by_role("button", name=f"Delete run {number}").click()
            page.get_by_role("dialog").get_by_role("button", name="Delete for good").click()
            expect(page.get_by_role("button", name=f"Delete run {number}")).to_have_count(0)
        page.goto("about:blank")


def test_a_part_that_was_escaped_by_hand_means_the_same() -> None:
    for identity in OLD:
        assert run_of_part("~" + quote(identity, safe="")) == identity
