# SPDX-License-Identifier: Apache-2.0
"""The dashboard behind a reverse proxy that shows it under a path, and under a name of its own."""

import contextlib
import http.client
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest
from starlette.testclient import TestClient

from fedvitals.dashboard.app import create_app
from fedvitals.dashboard.server import checked_host, checked_root
from fedvitals.errors import ConfigError
from support.dashboard_server import Url, enter, expect, needs_browser, serve
from support.timed_run import begin, stored
from support.waiting import PATIENCE

ROOT, NAME, RUN = "/fedvitals", "lab.example.org", "20260101-000000-tiny"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    told = begin(RUN, "tiny")
    told.round({"c0": (0.1, 1.0, 0.2), "c1": (0.1, 2.0, 0.2)}, accuracy=0.5)
    return stored(tmp_path_factory.mktemp("proxied") / "runs.db", told)


@pytest.fixture(scope="module")
def behind(store: Path) -> Iterator[Url]:
    with serve(store, "--root-path", ROOT, "--allow-host", NAME) as url:
        yield url


@contextlib.contextmanager
def proxy(target: str, *, strips: bool, host: str | None = NAME) -> Iterator[str]:
    """The address of a reverse proxy for `ROOT`. `strips`: takes the root away. `host`: the Host header that it sends.

    None: the one that it got.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.0"  # an answer ends with its connection

        def forward(self) -> None:
            if not f"{self.path}/".startswith(f"{ROOT}/"):
                self.send_error(404, "another application")
                return
            path = self.path.removeprefix(ROOT) or "/" if strips else self.path
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            headers = {name: value for name, value in self.headers.items() if name.lower() != "connection"}
            headers["Host"] = host or headers["Host"]
            address = urlsplit(target)
            connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=PATIENCE)
            with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
                connection.request(self.command, path, body, headers)
                answer = connection.getresponse()
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in ("transfer-encoding", "connection", "date", "server"):
                        self.send_header(name, value)
                self.end_headers()
                while part := answer.read1():
                    self.wfile.write(part)
                    self.wfile.flush()

        do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = forward  # noqa: N815 - of http.server

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(PATIENCE)


@pytest.mark.parametrize("strips", [True, False])
def test_pages_data_streams_and_cookies_are_below_the_path_of_the_proxy(behind: Url, strips: bool) -> None:
    url = behind
    with proxy(url, strips=strips) as front:
        assert urlsplit(url).path == ROOT
        with httpx2.Client(base_url=front, timeout=PATIENCE) as client:
            assert client.get(f"{ROOT}/api/runs").status_code == 401, "others come by the proxy, too"
            for path in (ROOT, f"{ROOT}/", f"{ROOT}/runs/{RUN}/clients", f"{ROOT}/login"):
                page = client.get(path)
                assert page.status_code == 200
                addresses = re.findall(r'(?:href|src)="(/[^"]*)"', page.text)
                assert addresses
                assert all(address.startswith(f"{ROOT}/static/") for address in addresses)
            assert {client.get(address).status_code for address in addresses} == {200}
            assert client.get("/api/runs").status_code == 404, "the proxy has other applications beside it"
            ours = {"X-Fedvitals": "1", "Origin": f"https://{NAME}", "Sec-Fetch-Site": "same-origin"}
            entered = client.post(f"{ROOT}/api/login", json={"token": url.token}, headers=ours)
            assert entered.status_code == 200
            assert f"Path={ROOT};" in entered.headers["Set-Cookie"]
            assert client.get(f"{ROOT}/api/runs").json()["stored"] == 1, "by the cookie"
            with client.stream("GET", f"{ROOT}/api/live") as stream:
                assert "event: hello" in stream.iter_lines()
            right = {**ours, "Authorization": f"Bearer {url.token}"}
            assert client.put(f"{ROOT}/api/runs/{RUN}/tags/x", headers=right).status_code < 300
            assert client.get(f"{ROOT}/runs/none/nothing/at/all/api").status_code == 200
            assert client.get(f"{ROOT}/nothing").status_code == 404


@pytest.mark.parametrize("host", [NAME, f"{NAME}:8443", NAME.upper(), "127.0.0.1:8321"])
@pytest.mark.parametrize("origin", [f"https://{NAME}", f"https://{NAME}:8443"])
def test_the_name_of_the_proxy_is_served_whether_or_not_it_keeps_the_host(store: Path, host: str, origin: str) -> None:
    app = create_app(store, token="right", private=True, proxy_hosts=(NAME,), root=ROOT)
    with TestClient(app, base_url=f"http://{NAME}") as client:
        headers = {"Host": host, "Origin": origin, "X-Fedvitals": "1"}
        assert client.post("/api/login", json={"token": "right"}, headers=headers).status_code == 200


@pytest.mark.parametrize("path", ["", ROOT])
def test_other_names_and_origins_are_still_refused(store: Path, path: str) -> None:
    app = create_app(store, token="right", private=True, proxy_hosts=(NAME,), root=ROOT)
    right = {"X-Fedvitals": "1", "Authorization": "Bearer right"}
    with TestClient(app, base_url=f"http://{NAME}") as client:
        for host in ("evil.example", f"{NAME}.evil.example", f"evil.{NAME}", ""):
            assert client.get(f"{path}/api/store", headers={**right, "Host": host}).status_code == 403
        for origin in ("https://evil.example", f"https://{NAME}.evil.example", "null", "http://127.0.0.1:9"):
            headers = {**right, "Origin": origin}
            assert client.delete(f"{path}/api/runs/{RUN}", headers=headers).status_code == 403
        assert client.get(f"{path}/api/store").status_code == 401
        assert client.delete(f"{path}/api/runs/{RUN}", headers={"X-Fedvitals": "1"}).status_code == 401
        site = {**right, "Sec-Fetch-Site": "same-site"}
        assert client.get(f"{path}/api/store", headers=site).status_code == 403


def test_without_a_name_the_dashboard_behind_a_path_answers_this_machine_alone(store: Path) -> None:
    with TestClient(create_app(store, root=ROOT), base_url="http://127.0.0.1:8321") as client:
        assert client.get(f"{ROOT}/api/store").status_code == 200
        refused = client.get(f"{ROOT}/api/store", headers={"Host": NAME})
        assert refused.status_code == 403
        assert "--allow-host" in refused.json()["error"]["hint"]


def test_paths_and_names_are_checked() -> None:
    assert [checked_root(root) for root in ("", "/", "/a", "a/b/", "/a.b~c-d_e")] == [
        "",
        "",
        "/a",
        "/a/b",
        "/a.b~c-d_e",
    ]
    for root in ("/api", "/runs/x", "/a//b", "/a/../b", "/.", '/"x', "/a b", "https://x/y", "/%41"):
        with pytest.raises(ConfigError, match="--root-path is the path"):
            checked_root(root)
    assert checked_host("Lab.Example.org") == NAME
    for host in ("", "https://lab.example.org", "lab.example.org:443", "*", "a/b", "a b"):
        with pytest.raises(ConfigError, match="--allow-host is the name"):
            checked_host(host)


@needs_browser
@pytest.mark.thorough
@pytest.mark.browser
def test_a_browser_goes_through_the_dashboard_behind_a_proxy(store: Path, page: object) -> None:
    with (
        serve(store, "--root-path", ROOT, "--allow-host", "localhost") as url,
        proxy(url, strips=True, host=None) as front,
    ):
        enter(page, Url(f"{front}{urlsplit(url.printed).path}#{urlsplit(url.printed).fragment}"))
        page.click(".run-link")
        page.wait_for_selector("html[data-ready='overview']", state="attached")
        assert urlsplit(page.url).path == f"{ROOT}/runs/{RUN}"
        page.reload()
        page.wait_for_selector("html[data-ready='overview']", state="attached")
        page.click(".brand")
        page.wait_for_selector("html[data-ready='runs']", state="attached")
        assert urlsplit(page.url).path == f"{ROOT}/"
        expect(page.locator(".run-link")).to_have_count(1)
