# SPDX-License-Identifier: Apache-2.0
"""The front end's files: announced at once, asked for again only when they have changed, and nothing else."""

import re

import pytest
from starlette.testclient import TestClient

from fedvitals.dashboard.app import create_app
from fedvitals.dashboard.files import STATIC, Files, view_of

VIEWS = sorted(path.stem for path in (STATIC / "views").glob("*.js"))


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    with TestClient(create_app(tmp_path_factory.mktemp("no-runs") / "runs.db"), base_url="http://127.0.0.1") as client:
        yield client


@pytest.mark.parametrize("view", VIEWS)
def test_a_page_names_every_module_that_it_needs_and_only_those_that_exist(view):
    files = Files()
    page = files.page(view).body.decode()
    named = re.findall(r'rel="modulepreload" href="/static/([^"]+)"', page)
    assert named[:2] == ["app.js", f"views/{view}.js"]
    assert len(set(named)) == len(named)
    for name in named:
        text = files.get(name).body.decode()
        for target in re.findall(r"""from ["'](\.[^"']+)["']""", text):
            assert str(((STATIC / name).parent / target).resolve().relative_to(STATIC)) in named, (name, target)


def test_which_view_an_address_shows():
    shown = {"/": "runs", "/compare": "compare", "/runs/r": "overview", "/runs/r/clients": "clients",
             "/runs/r/clients/c7": "client", "/runs/r/rounds/3": "round", "/runs/r/findings/A~b~~": "finding",
             "/runs/r/map": "map"}  # fmt: skip
    assert {path: view_of(path) for path in shown} == shown


def test_a_file_comes_again_only_when_it_has_changed(tmp_path, client):
    first = client.get("/static/app.js")
    assert (first.status_code, first.headers["content-type"]) == (200, "text/javascript; charset=utf-8")
    assert client.get("/static/app.js", headers={"If-None-Match": first.headers["etag"]}).status_code == 304
    (tmp_path / "a.js").write_text("1;")
    files = Files(tmp_path)
    before = files.get("a.js")
    assert files.get("a.js") is before
    (tmp_path / "a.js").write_text("22;")
    assert files.get("a.js").body == b"22;"


@pytest.mark.parametrize(
    "name", ["../app.py", "/etc/passwd", "x\x00.js", "views", "", "views/../../app.py", "nothing.js"]
)
def test_nothing_else_can_be_asked_for(name):
    assert Files().get(name) is None


def test_pages_and_strange_addresses(client):
    for path in ("/", "/compare?runs=a", "/runs/x", "/runs/x/clients/%3Cimg%3E", "/runs/x/..%2F..%2Fapp", "/runs/"):
        found = client.get(path)
        assert (found.status_code, found.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert "/static/app.js" in found.text
    assert client.get("/favicon.ico").headers["content-type"] == "image/svg+xml"
    assert client.post("/static/app.js").status_code in (403, 405)
