# SPDX-License-Identifier: Apache-2.0
"""Decides which requests are allowed, by host name, token, origin and size, and sets security headers.

Plain ASGI around the app, so that nothing, not even a static file or an error, bypasses it. Any request but a GET
changes something, and needs the token in its Authorization header, whatever its route. A cookie is never enough for
that: browsers send the cookies of a host to all its ports, so also to another user's server.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from urllib.parse import urlsplit

import msgspec

from fedvitals.dashboard.answers import encode, failure
from fedvitals.dashboard.asgi import (
    AsgiApp,
    Message,
    Receive,
    Response,
    Scope,
    Send,
    encoded_headers,
    headers_of,
    read_body,
)
from fedvitals.dashboard.tokens import Tokens
from fedvitals.transport.http_server import LOOPBACK

LARGEST_BODY = 65_536
LONGEST_URL = 8192
READING = ("GET", "HEAD", "OPTIONS")
METHODS = (*READING, "POST", "PUT", "DELETE")
LOGIN = "/api/login"
OPEN = {"/login", LOGIN, "/favicon.ico"}  # accessible to anybody, with the static files: the way in
HOW_TO_CHANGE = (
    "Open the address that `fedvitals ui` printed when it started, or enter the token at /login. "
    "Scripts: send the header Authorization: Bearer ..."
)
PRINTED = "`fedvitals ui` printed it when it started."

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
Refusal = tuple[int, str, str | None]
"""Status, what is wrong, and what to do."""


class Guard:
    """Middleware in front of all routes."""

    def __init__(
        self,
        app: AsgiApp,
        *,
        token: str,
        private: bool = False,
        hosts: tuple[str, ...] = (),
        proxy_hosts: tuple[str, ...] = (),
        root: str = "",
    ) -> None:
        """Only requests to this machine, to `hosts` and to `proxy_hosts` are served, as `create_app` explains.

        `private`: reading needs the token, too; without `proxy_hosts`, any name will then do.
        """
        self._app, self._private, self._root = app, private, root
        self._tokens = Tokens(token, root)
        # If everything needs the token, the name does not matter: a page from elsewhere has no cookie of ours to use.
        self._hosts = None if private and not proxy_hosts else {*LOOPBACK, *hosts, *proxy_hosts}
        self._proxy_hosts = frozenset(proxy_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":  # not supported
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                present = {name for name, _ in message["headers"]}
                added = [header for header in encoded_headers(HEADERS) if header[0] not in present]
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        scope = _below(self._root, scope)
        refused = self._refused(scope, headers_of(scope))
        if refused is not None:
            await failure(*refused, self._more(refused, scope)).write(receive, with_headers)
        elif scope["path"] == LOGIN and scope["method"] == "POST":
            await (await self._login(scope, receive)).write(receive, with_headers)
        elif scope["path"] == LOGIN and scope["method"] == "GET":
            await self._access(scope).write(receive, with_headers)
        else:
            await self._app(scope, _bounded(receive), with_headers)

    def _more(self, refused: Refusal, scope: Scope) -> dict[str, str]:
        """Return a refusal's additional headers."""
        if refused[0] == 405:
            return {"Allow": ", ".join(METHODS)}
        if refused[0] == 429:
            return {"Retry-After": str(self._tokens.wait(_address(scope)))}
        return {}

    def _refused(self, scope: Scope, headers: Mapping[str, str]) -> Refusal | None:
        return (
            self._misnamed(headers)
            or _oversized(scope, headers)
            or _foreign(scope, headers, self._proxy_hosts)
            or self._unknown(scope, headers)
        )

    def _misnamed(self, headers: Mapping[str, str]) -> Refusal | None:
        """Refuse an unknown host name: another site may point its own name here, and would have «the same origin»."""
        host = _host(headers.get("host", ""))
        if self._hosts is None or host in self._hosts:
            return None
        return (
            403,
            f"This dashboard is not called '{host[:100]}'.",
            "Open it by the address that it printed, or start it with --allow-host and this name.",
        )

    def _unknown(self, scope: Scope, headers: Mapping[str, str]) -> Refusal | None:
        """Refuse a request without the token if it is needed."""
        authorization, reads = headers.get("authorization", ""), scope["method"] in READING
        if self._is_open(scope, headers, reads=reads) or self._tokens.shown_in(authorization, _address(scope)):
            return None
        if authorization and (wait := self._tokens.wait(_address(scope))):
            return 429, f"Too many wrong tokens. Wait {wait} s.", PRINTED
        if reads:
            return 401, "This dashboard needs its token.", "Open /login, or send the header Authorization: Bearer ..."
        return 401, "Changing a store needs the dashboard's token.", HOW_TO_CHANGE

    def _is_open(self, scope: Scope, headers: Mapping[str, str], *, reads: bool) -> bool:
        """Whether a request needs no token, or comes from a client that has shown it."""
        path = scope["path"]
        if not reads:
            return bool(path == LOGIN)
        # The page itself is open and empty; it then requests data, is told to log in, and returns.
        return (
            not self._private
            or path in OPEN
            or not path.startswith("/api/")
            or self._tokens.has_session(headers.get("cookie", ""), _port(scope))
        )

    def _access(self, scope: Scope) -> Response:
        """Answer whether the client may change something, so that a page only offers what is possible."""
        changes = self._tokens.shown_in(headers_of(scope).get("authorization", ""), _address(scope))
        body = encode({"changes": changes})
        return Response(body, media_type="application/json", headers={"Cache-Control": "no-store"})

    async def _login(self, scope: Scope, receive: Receive) -> Response:
        token = _token_in(await read_body(_bounded(receive)))
        if token is None:
            return failure(400, 'Send {"token": "..."}.')
        wait = self._tokens.wait_after(token, _address(scope))
        if wait is None:
            secure = "https" in (scope.get("scheme"), headers_of(scope).get("x-forwarded-proto"))
            cookie = {"Set-Cookie": self._tokens.cookie(_port(scope), secure=secure)} if self._private else {}
            return Response(b"{}", media_type="application/json", headers={"Cache-Control": "no-store", **cookie})
        if wait == 0:
            return failure(401, "That is not the token.", PRINTED)
        return failure(429, f"Too many wrong tokens. Wait {wait} s.", PRINTED, {"Retry-After": str(wait)})


def _oversized(scope: Scope, headers: Mapping[str, str]) -> Refusal | None:
    if len(scope.get("raw_path") or b"") + len(scope["query_string"]) > LONGEST_URL:
        return 413, f"The address is longer than {LONGEST_URL} bytes.", None
    length = headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > LARGEST_BODY:
        return 413, f"A request may have a body of at most {LARGEST_BODY} bytes.", None
    return None


def _below(root: str, scope: Scope) -> Scope:
    """Return the request without the root in its path, which some proxies leave there and others remove."""
    path = scope["path"]
    if not root or not (path == root or path.startswith(f"{root}/")):
        return scope
    raw = scope.get("raw_path") or b""
    return {**scope, "path": path[len(root) :] or "/", "raw_path": raw.removeprefix(root.encode()) or b"/"}


def _foreign(scope: Scope, headers: Mapping[str, str], proxy_hosts: Collection[str]) -> Refusal | None:
    """Refuse requests from other sites: their forms cannot set headers, and browsers report where a request comes from.

    `proxy_hosts`: the page's host may be one of these if the proxy has replaced the Host header.
    """
    # «same-site» is another port of this host: possibly another user's server.
    if scope["path"].startswith("/api/") and headers.get("sec-fetch-site") in ("cross-site", "same-site"):
        return 403, "Another site's page asked; only our own page may.", None
    if scope["method"] not in METHODS:
        return 405, "This address does not accept that method.", None
    origin = headers.get("origin")
    own = origin is None or _netloc(origin) == headers.get("host") or _host(_netloc(origin)) in proxy_hosts
    if scope["method"] not in READING and not (own and headers.get("x-fedvitals") == "1"):
        return 403, "A change must come from the dashboard's own page.", "Scripts: send the header X-Fedvitals: 1."
    return None


def _host(header: str) -> str:
    """Return the name in a Host header, without its port."""
    try:
        return (urlsplit(f"//{header}").hostname or "").lower()
    except ValueError:
        return ""


def _netloc(origin: str) -> str:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


def _address(scope: Scope) -> str:
    return str((scope.get("client") or ("unknown", 0))[0])


def _port(scope: Scope) -> int:
    return int((scope.get("server") or ("", 0))[1] or 0)


def _token_in(body: bytes) -> str | None:
    try:
        return msgspec.json.decode(body, type=dict[str, str]).get("token")
    except msgspec.MsgspecError:
        return None


def _bounded(receive: Receive) -> Receive:
    """Limit a body without a declared length: it ends where it becomes too long."""
    left = LARGEST_BODY

    async def bounded() -> Message:
        nonlocal left
        message = await receive()
        if message["type"] == "http.request":
            left -= len(message.get("body", b""))
            if left < 0:
                return {"type": "http.disconnect"}
        return message

    return bounded
