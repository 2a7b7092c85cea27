# SPDX-License-Identifier: Apache-2.0
"""The parts of a web framework that the dashboard needs: requests, responses, and routes defined by their signatures.

A route is a function of a request and its parameters. Those named in its path come from there, all others from the
query; types and limits (`msgspec.Meta`) are checked before the call, and published as OpenAPI. In `Meta.extra`: `name`
is a parameter's name in addresses if Python cannot use it («from»), `convert` is applied to an accepted value, and `in`
is "body" for what is read from the request's body as JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import re
import threading
import types
import typing
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs

import msgspec

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

THREADS = 40  # requests answered at the same time
REFERENCE = "#/components/schemas/{name}"
JSON = "application/json"


class HttpError(Exception):
    """Ends a request with a status and a sentence."""

    def __init__(self, status: int, message: str, hint: str | None = None, headers: Mapping[str, str] = {}) -> None:
        super().__init__(message)
        self.status, self.message, self.hint, self.headers = status, message, hint, headers


class Response:
    """A status, headers and a body in memory."""

    def __init__(
        self, body: bytes = b"", status: int = 200, *, media_type: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        self.body, self.status = body, status
        self.headers = {**({"Content-Type": media_type} if media_type else {}), **(headers or {})}

    async def write(self, receive: Receive, send: Send) -> None:  # noqa: ARG002 - like a stream's
        """Send it to the client."""
        length = {} if self.status == 304 else {"Content-Length": str(len(self.body))}
        await send(_start(self.status, {**self.headers, **length}))
        await send({"type": "http.response.body", "body": self.body})


class Stream(Response):
    """A body that is sent in parts, until there are no more or the client has disconnected."""

    def __init__(self, parts: AsyncIterator[bytes], *, media_type: str, headers: Mapping[str, str]) -> None:
        super().__init__(media_type=media_type, headers=headers)
        self._parts = parts

    async def write(self, receive: Receive, send: Send) -> None:
        """Send the parts to the client as they arrive."""

        async def pour() -> None:
            async with contextlib.aclosing(self._parts) as parts:  # type: ignore[type-var]
                async for part in parts:
                    await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

        async def leave() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        await send(_start(self.status, self.headers))
        tasks = [asyncio.create_task(pour()), asyncio.create_task(leave())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def encoded_headers(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """Return headers in ASGI's form."""
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]


def _start(status: int, headers: Mapping[str, str]) -> Message:
    return {"type": "http.response.start", "status": status, "headers": encoded_headers(headers)}


def headers_of(scope: Scope) -> dict[str, str]:
    """Return the headers of a request by their names in lower case; for a repeated one, the first."""
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in reversed(scope["headers"])}


class Request:
    """A client's request."""

    def __init__(self, app: App, scope: Scope, path_parameters: Mapping[str, str]) -> None:
        self.app, self.method, self.path = app, str(scope["method"]), str(scope["path"])
        self.headers, self.path_parameters = headers_of(scope), path_parameters
        self.query_string = scope["query_string"].decode("latin-1")
        self.client = str((scope.get("client") or ("", 0))[0])

    @property
    def url(self) -> str:
        """The path and the query."""
        return f"{self.path}?{self.query_string}"

    @property
    def query(self) -> dict[str, list[str]]:
        return parse_qs(self.query_string, keep_blank_values=True)

    def has_current(self, etag: str) -> bool:
        """Whether the client reports that it has the version with this tag."""
        return etag in [tag.strip() for tag in self.headers.get("if-none-match", "").split(",")]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a route's function: its name there, its name in the address, and its type."""

    argument: str
    name: str
    place: str  # "path", "query" or "body"
    type: Any
    default: Any
    convert: Callable[[Any], Any] | None

    @property
    def is_required(self) -> bool:
        return self.default is inspect.Parameter.empty

    @property
    def is_list(self) -> bool:
        return typing.get_origin(typing.get_args(self.type)[0] if _is_annotated(self.type) else self.type) is list

    def read(self, texts: Sequence[str]) -> Any:
        """Return the value of these texts; of several, the last counts, unless it is a list."""
        value = msgspec.convert(list(texts) if self.is_list else texts[-1], self.type, strict=False)
        return self.convert(value) if self.convert is not None else value

    def described(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Return the parameter in OpenAPI's form."""
        if not self.is_required and self.default is not None:
            schema = {**schema, "default": self.default}
        return {"name": self.name, "in": self.place, "required": self.is_required, "schema": schema}


def _is_annotated(annotation: Any) -> bool:
    return typing.get_origin(annotation) is typing.Annotated


def _parameters(function: Callable[..., Any], path_names: Iterable[str]) -> tuple[Parameter, ...]:
    """Return a function's parameters besides the request. `X | None`: an X, or nothing."""
    hints = typing.get_type_hints(function, include_extras=True)
    parameters = []
    for argument, declared in list(inspect.signature(function).parameters.items())[1:]:
        annotation = hints[argument]
        if typing.get_origin(annotation) in (typing.Union, types.UnionType):
            (annotation,) = (kind for kind in typing.get_args(annotation) if kind is not types.NoneType)
        extra: dict[str, Any] = {}
        for meta in typing.get_args(annotation)[1:] if _is_annotated(annotation) else ():
            extra |= meta.extra or {}
        name = extra.get("name", argument)
        place = "path" if name in path_names else extra.get("in", "query")
        parameters.append(Parameter(argument, name, place, annotation, declared.default, extra.get("convert")))
    return tuple(parameters)


class Route:
    """A path, the methods that it answers, and the function that does.

    In the path, «{name}» matches one segment of an address and «{name:path}» any number of segments.
    """

    def __init__(
        self,
        path: str,
        function: Callable[..., Any],
        methods: tuple[str, ...] = ("GET", "HEAD"),
        *,
        answers: Any = None,
        statuses: tuple[int, ...] = (),
        tag: str = "",
    ) -> None:
        """`answers`: the type of the returned JSON; `statuses`: with which it may fail besides the usual ones."""
        self.path, self.function, self.methods = re.sub(r":path\}", "}", path), function, methods
        self.answers, self.statuses, self.tag = answers, statuses, tag
        self.pattern = re.compile(
            re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", re.sub(r"\{(\w+):path\}", r"(?P<\1>.*)", path)), re.DOTALL
        )
        self.parameters = _parameters(function, self.pattern.groupindex)

    def arguments(self, request: Request, body: bytes) -> dict[str, Any]:
        """Return the arguments for the function; HttpError 422 if one is missing or invalid."""
        problems, arguments = [], dict[str, Any]()
        query = request.query
        for parameter in self.parameters:
            try:
                if parameter.place == "body":
                    if body.strip() not in (b"", b"null"):
                        arguments[parameter.argument] = msgspec.json.decode(body, type=parameter.type)
                    continue
                path_text = request.path_parameters.get(parameter.name)
                texts = [path_text] if path_text is not None else query.get(parameter.name)
                if texts is not None:
                    arguments[parameter.argument] = parameter.read(texts)
                elif parameter.is_required:
                    problems.append(f"{parameter.name}: it is missing")
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                problems.append(f"{parameter.name}: {error}")
        if problems:
            message = f"The request cannot be answered: {'; '.join(problems)}."
            raise HttpError(422, message, "GET /api/openapi.json lists what can be requested.")
        return arguments


@dataclass(frozen=True, slots=True)
class Router:
    """The routes of one module."""

    tag: str
    routes: list[Route] = field(default_factory=list)

    def get(self, path: str, answers: Any = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Make the function answer GET at a path; `answers` is the type of its JSON."""
        return self._adding("GET", path, answers, ())

    def put(
        self, path: str, answers: Any = None, *, statuses: tuple[int, ...] = ()
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Make the function answer PUT at a path; `statuses`: with which it may fail besides the usual ones."""
        return self._adding("PUT", path, answers, statuses)

    def delete(
        self, path: str, answers: Any = None, *, statuses: tuple[int, ...] = ()
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Make the function answer DELETE at a path; `statuses`: with which it may fail besides the usual ones."""
        return self._adding("DELETE", path, answers, statuses)

    def _adding(
        self, method: str, path: str, answers: Any, statuses: tuple[int, ...]
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def add(function: Callable[..., Any]) -> Callable[..., Any]:
            self.routes.append(Route(path, function, (method,), answers=answers, statuses=statuses, tag=self.tag))
            return function

        return add


class App:
    """Routes behind a guard, as an ASGI application."""

    def __init__(
        self,
        routes: Sequence[Route],
        *,
        guard: Callable[[AsgiApp], AsgiApp],
        failed: Callable[[Request, Exception], Response],
        lifespan: Callable[[], contextlib.AbstractAsyncContextManager[None]],
        state: types.SimpleNamespace,
        description: Mapping[str, Any],
        failure: Any,
        statuses: tuple[int, ...],
    ) -> None:
        """Of several routes that match, the first answers.

        `guard` wraps what answers requests. `failed`: the answer to a request whose route raised. `description`: the
        `info` of the OpenAPI document; `failure`: the type of all errors' JSON, `statuses`: those that any may have.
        """
        self.routes, self.state = tuple(routes), state
        self._guarded, self._failed, self._lifespan = guard(self._respond), failed, lifespan
        self._description, self._failure, self._statuses = dict(description), failure, statuses
        self._places = asyncio.Semaphore(THREADS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        else:
            await self._guarded(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        """Handle the server's start and end."""
        await receive()
        try:
            async with self._lifespan():
                await send({"type": "lifespan.startup.complete"})
                await receive()
        except Exception as error:
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            raise
        await send({"type": "lifespan.shutdown.complete"})

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        matches = ((route, route.pattern.fullmatch(scope["path"])) for route in self.routes)
        known = [(route, match.groupdict()) for route, match in matches if match is not None]
        route, path_parameters = next(
            (entry for entry in known if scope["method"] in entry[0].methods), known[0] if known else (None, {})
        )
        request = Request(self, scope, path_parameters)
        try:
            response = await self._answer(route, request, receive)
        except Exception as error:  # noqa: BLE001 - it is answered, and logged there
            response = self._failed(request, error)
        await response.write(receive, send)

    async def _answer(self, route: Route | None, request: Request, receive: Receive) -> Response:
        if route is None:
            raise HttpError(404, "There is nothing at this address.")
        if request.method not in route.methods:
            allowed = {"Allow": ", ".join(route.methods)}
            raise HttpError(405, "This address does not accept that method.", headers=allowed)
        wants_body = any(parameter.place == "body" for parameter in route.parameters)
        arguments = route.arguments(request, await read_body(receive) if wants_body else b"")
        if inspect.iscoroutinefunction(route.function):
            response = await route.function(request, **arguments)
        else:
            async with self._places:
                response = await _in_thread(lambda: route.function(request, **arguments))
        return typing.cast("Response", response)

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document of all routes that declare their answers."""
        routes = [route for route in self.routes if route.tag]
        wanted = [self._failure, *(route.answers for route in routes if route.answers is not None)]
        wanted += [parameter.type for route in routes for parameter in route.parameters]
        schemas, components = msgspec.json.schema_components(wanted, ref_template=REFERENCE)
        rest = iter(schemas)
        broken = {"description": "Why it cannot be answered.", "content": {JSON: {"schema": next(rest)}}}
        answered = {id(route): next(rest) for route in routes if route.answers is not None}
        paths: dict[str, dict[str, Any]] = {}
        for route in routes:
            (method,) = route.methods
            content = {JSON: {"schema": answered[id(route)]}} if id(route) in answered else {"*/*": {}}
            operation: dict[str, Any] = {
                "tags": [route.tag],
                "operationId": f"{method.lower()}_{route.function.__name__}_{route.tag}",
                "description": inspect.getdoc(route.function) or "",
                "parameters": [],
                "responses": {
                    "200": {"description": "The answer.", "content": content},
                    **{str(status): broken for status in sorted({*self._statuses, *route.statuses})},
                },
            }
            for parameter in route.parameters:
                schema = next(rest)
                if parameter.place == "body":
                    operation["requestBody"] = {"content": {JSON: {"schema": schema}}, "required": False}
                else:
                    operation["parameters"].append(parameter.described(schema))
            paths.setdefault(route.path, {})[method.lower()] = operation
        document = {"openapi": "3.1.0", "info": self._description, "paths": paths}
        return {**document, "components": {"schemas": components}}


async def _in_thread(work: Callable[[], Any]) -> Any:
    """Do the work in a thread that does not keep the process from ending, unlike those of an executor."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def run() -> None:
        settle: Callable[[Any], None]
        try:
            outcome, settle = work(), future.set_result
        except Exception as error:  # noqa: BLE001 - raised where the work is awaited
            outcome, settle = error, future.set_exception
        with contextlib.suppress(RuntimeError):  # the server has ended in the meantime
            loop.call_soon_threadsafe(lambda: None if future.done() else settle(outcome))

    threading.Thread(target=run, name="dashboard-answer", daemon=True).start()
    return await future


async def read_body(receive: Receive) -> bytes:
    """Return the body of a request, or the part that arrived before the client disconnected."""
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if message["type"] != "http.request" or not message.get("more_body"):
            return bytes(body)
