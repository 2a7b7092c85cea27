# SPDX-License-Identifier: Apache-2.0
"""Requests reach the right route with checked parameters, and a stream ends with its client."""

import asyncio
import contextlib
import types
from typing import Annotated, Literal

import msgspec
import pytest
from msgspec import Meta
from starlette.testclient import TestClient

from fedvitals.dashboard.answers import STATUSES, Failure, failed
from fedvitals.dashboard.asgi import App, Request, Response, Router, Stream

router = Router("things")


def say(**values) -> Response:
    return Response(msgspec.json.encode(values), media_type="application/json")


@router.get("/api/things/{name}")
def get_thing(
    request: Request,
    name: Annotated[str, Meta(max_length=5, extra={"convert": str.upper})],
    first: Annotated[int, Meta(ge=0, le=9, extra={"name": "from"})] | None = None,
    words: Annotated[list[str], Meta(max_length=2)] = [],  # noqa: B006 - nobody changes it
    kind: Literal["a", "b"] = "a",
    text: str | None = None,
) -> Response:
    return say(name=name, first=first, words=words, kind=kind, text=text)


@router.put("/api/things/{key:path}/mark")
def mark(request: Request, key: str, body: Annotated[dict[str, int], Meta(extra={"in": "body"})] | None = None):
    return say(key=key, body=body)


@router.get("/api/needs")
def needs(request: Request, wanted: bool) -> Response:
    return say(wanted=wanted)


@contextlib.asynccontextmanager
async def nothing():
    yield


@pytest.fixture(scope="module")
def app() -> App:
    return App(
        router.routes, guard=lambda app: app, failed=failed, lifespan=nothing, state=types.SimpleNamespace(),
        description={}, failure=Failure, statuses=STATUSES,
    )  # fmt: skip


@pytest.fixture(scope="module")
def client(app):
    with TestClient(app) as client:
        yield client


@pytest.mark.parametrize(
    ("query", "changed"),
    [
        ("", {}),
        ("?from=3&from=4", {"first": 4}),
        ("?words=x&words=null", {"words": ["x", "null"]}),
        ("?kind=b&text=null&unknown=1", {"kind": "b", "text": "null"}),
        ("?text=", {"text": ""}),
    ],
)
def test_parameters_become_arguments(client, query, changed):
    expected = {"name": "ABC", "first": None, "words": [], "kind": "a", "text": None}
    assert client.get(f"/api/things/abc{query}").json() == {**expected, **changed}


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("/api/things/toolong", "name"), ("/api/things/a?from=10", "from"), ("/api/things/a?from=", "from"),
        ("/api/things/a?words=1&words=2&words=3", "words"), ("/api/things/a?kind=c", "kind"), ("/api/needs", "wanted"),
        ("/api/needs?wanted=perhaps", "wanted"),
    ],
)  # fmt: skip
def test_what_a_parameter_may_not_be_is_refused_by_its_name(client, path, named):
    answer = client.get(path)
    assert answer.status_code == 422
    assert f": {named}: " in answer.json()["error"]["message"]


def test_paths_bodies_and_methods(client):
    assert client.put("/api/things/a%2Fb/c/mark", content=b'{"x": 1}').json() == {"key": "a/b/c", "body": {"x": 1}}
    assert client.put("/api/things/a/mark").json() == {"key": "a", "body": None}
    assert client.put("/api/things/a/mark", content=b'{"x": "y"}').status_code == 422
    assert client.put("/api/things/a/mark", content=b"\xff").status_code == 422
    refused = client.delete("/api/things/a")
    assert (refused.status_code, refused.headers["allow"]) == (405, "GET")
    assert client.get("/elsewhere").status_code == 404


def test_the_document_says_what_can_be_asked(app):
    thing = app.openapi()["paths"]["/api/things/{name}"]["get"]
    first = thing["parameters"][1]
    assert (first["name"], first["in"], first["required"], first["schema"]["maximum"]) == ("from", "query", False, 9)
    assert "requestBody" in app.openapi()["paths"]["/api/things/{key}/mark"]["put"]


def test_a_stream_ends_when_its_client_leaves():
    ended, sent = [], []

    async def parts():
        try:
            while True:
                yield b"x"
                await asyncio.sleep(0)
        finally:
            ended.append(True)

    leaves = asyncio.Event()

    async def send(message):
        sent.append(message)
        if len(sent) == 5:
            leaves.set()

    async def receive():
        await leaves.wait()
        return {"type": "http.disconnect"}

    asyncio.run(Stream(parts(), media_type="text/plain", headers={}).write(receive, send))
    assert ended == [True]
    assert sent[0]["status"] == 200
