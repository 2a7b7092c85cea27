# SPDX-License-Identifier: Apache-2.0
"""Who may ask the dashboard what: addresses, tokens, writes, sizes, headers."""

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from fedvitals.dashboard import guard, tokens
from fedvitals.dashboard.app import create_app
from fedvitals.dashboard.server import Address, bind, is_loopback
from fedvitals.errors import ConfigError
from support.dashboard_server import TOKEN, WRITE
from support.timed_run import begin, stored

HOME = "http://127.0.0.1:8321"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    told = begin("20260101-000000-tiny", "tiny")
    told.round({"c0": (0.1, 1.0, 0.2), "c1": (0.1, 2.0, 0.2)}, accuracy=0.5)
    return stored(tmp_path_factory.mktemp("guarded") / "runs.db", told)


@pytest.fixture(scope="module")
def open_(store: Path) -> Iterator[TestClient]:
    with TestClient(create_app(store, token=TOKEN), base_url=HOME) as client:
        yield client


def _with_token(store: Path) -> TestClient:
    return TestClient(create_app(store, token=TOKEN, private=True), base_url="http://lab.example:8321")


@pytest.fixture(scope="module")
def with_token(store: Path) -> Iterator[TestClient]:
    with _with_token(store) as client:
        yield client


@pytest.fixture
def never_asked(store: Path) -> Iterator[TestClient]:
    """A client of a dashboard with a token that nobody has tried to guess."""
    with _with_token(store) as client:
        yield client


@pytest.fixture
def closed(with_token: TestClient) -> TestClient:
    """A client of a dashboard with a token, without cookies of the tests before."""
    with_token.cookies.clear()
    return with_token


def test_every_answer_carries_the_headers_that_keep_other_peoples_scripts_out(open_: TestClient) -> None:
    for path in ("/", "/api/store", "/api/nothing", "/static/app.js", "/static/../pyproject.toml"):
        policy = open_.get(path).headers["Content-Security-Policy"]
        assert "script-src 'self';" in policy
        assert "unsafe" not in policy
        assert "default-src 'none'" in policy
        assert open_.get(path).headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "[::2]", "", "localhost.evil"])
def test_another_name_for_this_machine_is_refused(open_: TestClient, host: str) -> None:
    answer = open_.get("/api/store", headers={"Host": host})
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "refused"


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:1", "[::1]:8321", "LOCALHOST:5"])
def test_its_own_names_are_served(open_: TestClient, host: str) -> None:
    assert open_.get("/api/store", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"X-Fedvitals": "2"},
        {**WRITE, "Origin": "https://evil.example"},
        {**WRITE, "Origin": "null"},
        {**WRITE, "Sec-Fetch-Site": "cross-site"},
        {**WRITE, "Sec-Fetch-Site": "same-site", "Origin": "http://127.0.0.1:9000"},  # another port of this machine
        {"Authorization": WRITE["Authorization"]},
    ],
)
def test_a_change_must_come_from_our_own_page(open_: TestClient, headers: dict[str, str]) -> None:
    for method, path in (("PUT", "/api/runs/tiny/tags/x"), ("DELETE", "/api/runs/tiny")):
        assert open_.request(method, path, headers=headers).status_code == 403
    assert open_.get("/api/store").json()["runs"] == 1


CHANGES = [
    (method.upper(), path)
    for path, methods in create_app("none.db").openapi()["paths"].items()
    for method in methods
    if method != "get"
]


@pytest.mark.parametrize(
    ("method", "path"), [*CHANGES, ("POST", "/api/runs"), ("PATCH", "/x"), ("DELETE", "/static/a.js")]
)
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer "},
        {"Authorization": f"Basic {TOKEN}"},
        {"Cookie": f"{tokens.COOKIE}_8321={TOKEN}; token={TOKEN}"},
        {"X-HTTP-Method-Override": "GET"},
    ],
)
def test_nothing_is_changed_without_the_token(
    open_: TestClient, method: str, path: str, headers: dict[str, str]
) -> None:
    address = path.format(run="20260101-000000-tiny", tag="x", key="y")
    answer = open_.request(
        method, f"{address}?token={TOKEN}&access_token={TOKEN}", headers={"X-Fedvitals": "1", **headers}
    )
    assert answer.status_code in (401, 405, 429)


def test_the_routes_that_change_something_are_known() -> None:
    assert len(CHANGES) == 7, "a new one needs a control that is disabled without the token: see static/access.js"


@pytest.mark.parametrize("private", [False, True])
def test_a_cookie_is_never_enough_to_change_something(store: Path, private: bool) -> None:
    """Browsers send the cookies of a host to every port of it: another user's server on this machine gets them, too."""
    with TestClient(create_app(store, token=TOKEN, private=private), base_url=HOME) as client:
        entered = client.post("/api/login", json={"token": TOKEN}, headers={"X-Fedvitals": "1"})
        assert entered.status_code == 200
        assert ("set-cookie" in entered.headers) == private
        assert client.get("/api/store").status_code == 200
        assert client.delete("/api/runs/20260101-000000-tiny", headers={"X-Fedvitals": "1"}).status_code == 401
        tagged = client.put("/api/runs/20260101-000000-tiny/tags/x", headers=WRITE)
        assert tagged.json()["tags"] == ["x"]


def test_a_page_can_ask_whether_it_may_change_something(open_: TestClient) -> None:
    allowed = [
        open_.get("/api/login", headers=headers).json() for headers in ({}, {"Authorization": "Bearer x"}, WRITE)
    ]
    assert [answer["changes"] for answer in allowed] == [False, False, True]


def test_an_app_without_a_token_only_reads(store: Path) -> None:
    with TestClient(create_app(store), base_url=HOME) as client:
        assert client.get("/api/store").status_code == 200
        for token in ("", "None", TOKEN):
            headers = {"X-Fedvitals": "1", "Authorization": f"Bearer {token}"}
            assert client.delete("/api/runs/20260101-000000-tiny", headers=headers).status_code == 401


def test_reading_changes_nothing(tmp_path: Path) -> None:
    """Every GET of the API, with and without what it may be asked, leaves the store as it was."""
    told = begin("20260101-000000-tiny", "tiny")
    told.round({"c0": (0.1, 1.0, 0.2), "c1": (0.1, 2.0, 0.2)}, accuracy=0.5)
    path = stored(tmp_path / "runs.db", told)

    def content() -> list[str]:
        with contextlib.closing(sqlite3.connect(path)) as connection:
            return list(connection.iterdump())

    before = content()
    app = create_app(path, token=TOKEN)
    with TestClient(app, base_url=HOME) as client:
        for address, methods in app.openapi()["paths"].items():
            if "get" in methods:
                filled = address.format(run="tiny", key="x", number=0, round=0)
                for query in ("", "?node=c0&runs=tiny&runs=tiny&_method=DELETE"):
                    assert client.get(filled + query).status_code in (200, 404, 422), filled
    assert content() == before


def test_a_page_of_another_site_reads_nothing(open_: TestClient) -> None:
    for site in ("cross-site", "same-site"):
        for path in ("/api/runs", "/api/live"):
            assert open_.get(path, headers={"Sec-Fetch-Site": site}).status_code == 403
    assert open_.get("/", headers={"Sec-Fetch-Site": "cross-site"}).status_code == 200  # a link may lead here


def test_large_requests_are_refused(open_: TestClient) -> None:
    large = b"x" * (guard.LARGEST_BODY + 1)
    assert open_.put("/api/runs/tiny/tags/x", content=large, headers=WRITE).status_code == 413
    assert open_.get("/api/runs?search=" + "x" * 9000).status_code == 413


def test_a_body_that_does_not_say_its_length_ends_where_it_becomes_too_long(closed: TestClient) -> None:
    def login(size: int) -> int:
        parts = iter([b'{"token": "', b"x" * size, b'"}'])
        return closed.post("/api/login", content=parts, headers=WRITE).status_code

    assert login(1000) == 401  # read whole, and wrong
    assert login(guard.LARGEST_BODY) == 400  # cut, and so no longer JSON


@pytest.mark.parametrize(
    "path",
    [
        "/static/../app.py",
        "/static/%2e%2e/app.py",
        "/static/..%2fapp.py",
        "/static//etc/passwd",
        "/static/%00",
        "/static/views/../../guard.py",
    ],
)
def test_no_file_outside_the_static_folder_is_served(open_: TestClient, path: str) -> None:
    answer = open_.get(path)
    assert answer.status_code in (404, 400)
    assert "from __future__" not in answer.text
    assert "root:" not in answer.text


def test_without_the_token_only_the_way_in_is_open(closed: TestClient) -> None:
    for path in ("/api/store", "/api/runs", "/api/live", "/api/openapi.json"):
        answer = closed.get(path)
        assert answer.status_code == 401, path
        assert answer.json()["error"]["code"] == "token_needed"
    assert closed.get("/login").status_code == 200
    assert "tiny" not in closed.get("/runs/tiny").text


def test_the_token_becomes_a_cookie_that_no_script_and_no_other_site_can_use(closed: TestClient) -> None:
    answer = closed.post("/api/login", json={"token": "right"}, headers=WRITE)
    assert answer.status_code == 200
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert "right" not in cookie
    assert closed.get("/api/store").json()["runs"] == 1
    closed.cookies.clear()
    assert closed.get("/api/store").status_code == 401
    assert closed.get("/api/store", headers={"Cookie": f"{tokens.COOKIE}_8321=right"}).status_code == 401


def test_cookies_of_other_servers_on_this_host_are_in_nobodys_way(closed: TestClient) -> None:
    """They come along, whatever they look like, and one may even have our name."""
    answer = closed.post("/api/login", json={"token": "right"}, headers=WRITE)
    ours = answer.headers["set-cookie"].partition(";")[0]
    closed.cookies.clear()
    name = ours.partition("=")[0]
    for others in ('a={"b": [1, 2]}', "\x01\x02", "=;;=", f"{name}=stolen", f"{name}"):
        assert closed.get("/api/store", headers={"Cookie": f"{others}; {ours}"}).status_code == 200, others
        assert closed.get("/api/store", headers={"Cookie": others}).status_code == 401, others


def test_a_script_may_send_the_token_itself(closed: TestClient) -> None:
    assert closed.get("/api/store", headers={"Authorization": "Bearer right"}).status_code == 200
    assert closed.get("/api/store", headers={"Authorization": "Bearer wrong"}).status_code == 401


@pytest.mark.parametrize("bearer", [False, True])
def test_wrong_tokens_are_slowed_down_and_the_right_one_always_works(never_asked: TestClient, bearer: bool) -> None:
    def attempt(token: str) -> int:
        if bearer:
            return never_asked.get("/api/store", headers={"Authorization": f"Bearer {token}"}).status_code
        return never_asked.post("/api/login", json={"token": token}, headers=WRITE).status_code

    wrong = [attempt(f"guess {i}") for i in range(3 * tokens.TRIES)]
    assert wrong[0] == 401
    assert wrong[-1] == 429
    assert attempt("right") == 200
    assert attempt("wrong") == 429, "the right one does not start the count anew"
    refused = never_asked.get("/api/runs", headers={"Authorization": "Bearer x", "Cookie": ""})
    assert int(refused.headers["Retry-After"]) > 0


def test_one_address_slows_down_no_other_and_few_are_remembered() -> None:
    counted = tokens.Tokens("right")
    for guess in range(tokens.TRIES):
        counted.wait_after(f"guess {guess}", "192.0.2.1")
    assert counted.wait("192.0.2.1") > 0
    assert counted.wait_after("wrong", "192.0.2.2") == 0
    for number in range(3 * tokens.ADDRESSES):
        counted.wait_after("wrong", f"2001:db8::{number:x}")
    assert len(counted._tries) == tokens.ADDRESSES


def test_a_login_that_says_nothing_is_told_so(closed: TestClient) -> None:
    for body in (b"", b"[]", b"{}", b'{"token": 3}', b"\xff", b'{"token": null}'):
        assert closed.post("/api/login", content=body, headers=WRITE).status_code == 400, body


def test_a_login_from_another_site_is_refused(closed: TestClient) -> None:
    assert closed.post("/api/login", json={"token": "right"}).status_code == 403


def test_which_addresses_are_this_machines_own() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.org", "localhost.example")))


def test_the_token_stands_where_no_server_log_sees_it() -> None:
    assert Address("192.0.2.1", 80, "secret").url == "http://192.0.2.1:80/login#token=secret"
    assert Address("::1", 81, "s", "/runs/a%2Fb").url == "http://[::1]:81/login#token=s&back=%2Fruns%2Fa%252Fb"


@pytest.mark.parametrize("host", ["nowhere.invalid", "192.0.2.1"])
def test_an_address_that_is_not_this_machines_is_told(host: str) -> None:
    with pytest.raises(ConfigError, match=r"--host"):
        bind(host, None)


def test_a_port_that_is_taken_is_told_and_a_free_one_is_found() -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        with pytest.raises(ConfigError, match="--port"):
            bind("127.0.0.1", taken.getsockname()[1])
    with bind("127.0.0.1", None) as one:
        one.listen()
        with bind("127.0.0.1", None) as two:
            assert one.getsockname()[1] != two.getsockname()[1]
