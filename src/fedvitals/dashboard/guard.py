# SPDX-License-Identifier: Apache-2.0
"""Decides who may ask what, by host name, token, origin and size, and sets security headers.

Plain ASGI around the app, so that nothing, not even a static file or an error, leaves without passing here. The token
of a dashboard that others can reach is checked here, too, and how often it may be guessed is limited.
"""

from __future__ import annotations

import hmac
import secrets
import time
from collections import OrderedDict, deque
from http.cookies import CookieError, SimpleCookie
from urllib.parse import urlsplit

import msgspec
from fastapi.responses import Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fedvitals.dashboard.answers import failure
from fedvitals.transport.http_server import LOOPBACK

LARGEST_BODY = 65_536
LONGEST_URL = 8192
METHODS = ("GET", "HEAD", "OPTIONS", "POST", "PUT", "DELETE")
OPEN = {"/login", "/api/login", "/favicon.ico"}  # to anybody, with the static files: the way in

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

    def __init__(self, app: ASGIApp, *, token: str | None = None, hosts: tuple[str, ...] = ()) -> None:
        self._app = app
        self._tokens = None if token is None else Tokens(token)
        # With a token the name does not matter: a page from elsewhere has no cookie of ours to use.
        self._hosts = None if token is not None else {*LOOPBACK, *hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        refused = self._refused(scope, Headers(scope=scope))
        if refused is not None:
            await failure(*refused, self._more(refused, scope))(scope, receive, with_headers)
        elif scope["path"] == "/api/login" and scope["method"] == "POST":
            await (await self._login(scope, receive))(scope, receive, with_headers)
        else:
            await self._app(scope, _bounded(receive), with_headers)

    def _more(self, refused: Refusal, scope: Scope) -> dict[str, str]:
        """What a refusal says in its headers."""
        if refused[0] == 405:
            return {"Allow": ", ".join(METHODS)}
        if refused[0] == 429 and self._tokens is not None:
            return {"Retry-After": str(self._tokens.wait(_address(scope)))}
        return {}

    def _refused(self, scope: Scope, headers: Headers) -> Refusal | None:
        return (
            self._misnamed(headers)
            or _oversized(scope, headers)
            or _foreign(scope, headers)
            or self._unknown(scope, headers)
        )

    def _misnamed(self, headers: Headers) -> Refusal | None:
        """Another site may point its own name at this machine, and would then be «the same origin» as we are."""
        host = _host(headers.get("host", ""))
        if self._hosts is None or host in self._hosts:
            return None
        return 403, f"This dashboard is not called '{host[:100]}'.", "Open it by the address that it printed."

    def _unknown(self, scope: Scope, headers: Headers) -> Refusal | None:
        path = scope["path"]
        if self._tokens is None or path in OPEN or path.startswith("/static/"):
            return None
        if not path.startswith("/api/") and scope["method"] in ("GET", "HEAD"):
            return None  # the empty page, which then asks for data, is told to log in, and comes back
        if self._tokens.knows(headers.get("cookie", ""), headers.get("authorization", ""), _address(scope)):
            return None
        if headers.get("authorization") and (wait := self._tokens.wait(_address(scope))):
            return 429, f"Too many wrong tokens. Wait {wait} s.", "`fedvitals ui` printed it when it started."
        return 401, "This dashboard needs its token.", "Open /login, or send the header Authorization: Bearer ..."

    async def _login(self, scope: Scope, receive: Receive) -> Response:
        token = _token_in(await _body(receive))
        if self._tokens is None:
            return failure(400, "No token is needed here.")
        if token is None:
            return failure(400, 'Send {"token": "..."}.')
        wait = self._tokens.wait_after(token, _address(scope))
        if wait is None:
            cookie = self._tokens.cookie(secure=scope.get("scheme") == "https")
            return Response(b"{}", media_type="application/json", headers={"Set-Cookie": cookie})
        hint = "`fedvitals ui` printed it when it started."
        if wait == 0:
            return failure(401, "That is not the token.", hint)
        return failure(429, f"Too many wrong tokens. Wait {wait} s.", hint, {"Retry-After": str(wait)})


def _oversized(scope: Scope, headers: Headers) -> Refusal | None:
    if len(scope.get("raw_path") or b"") + len(scope["query_string"]) > LONGEST_URL:
        return 413, f"The address is longer than {LONGEST_URL} bytes.", None
    length = headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > LARGEST_BODY:
        return 413, f"A request may have a body of at most {LARGEST_BODY} bytes.", None
    return None


def _foreign(scope: Scope, headers: Headers) -> Refusal | None:
    """A form of another site can set no header of its own, and a browser tells where a request comes from."""
    if scope["path"].startswith("/api/") and headers.get("sec-fetch-site") == "cross-site":
        return 403, "Another site's page asked; only our own page may.", None
    if scope["method"] not in METHODS:
        return 405, "This address cannot be asked in that way.", None
    origin = headers.get("origin")
    ours = headers.get("x-fedvitals") == "1" and (origin is None or _netloc(origin) == headers.get("host"))
    if scope["method"] not in ("GET", "HEAD", "OPTIONS") and not ours:
        return 403, "A change must come from the dashboard's own page.", "Scripts: send the header X-Fedvitals: 1."
    return None


def _host(header: str) -> str:
    """The name in a Host header, without its port."""
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


def _token_in(body: bytes) -> str | None:
    try:
        return msgspec.json.decode(body, type=dict[str, str]).get("token")
    except msgspec.MsgspecError:
        return None


async def _body(receive: Receive) -> bytes:
    body, bounded = bytearray(), _bounded(receive)
    while True:
        message = await bounded()
        body += message.get("body", b"")
        if message["type"] != "http.request" or not message.get("more_body"):
            return bytes(body)


def _bounded(receive: Receive) -> Receive:
    """A body that does not say how long it is ends where it becomes too long."""
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


COOKIE = "fedvitals_session"
SESSIONS = 1000
TRIES, WITHIN = 5, 60.0  # wrong tokens of one address, in so many seconds
TRIES_OF_ALL = 50  # of all addresses together


class Tokens:
    """The token, and the sessions of those who have shown it."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()
        self._sessions: OrderedDict[str, None] = OrderedDict()
        self._tries: dict[str, deque[float]] = {}

    def knows(self, cookies: str, authorization: str, address: str) -> bool:
        """Whether a request shows the token itself, or the cookie of who has shown it before."""
        kind, _, shown = authorization.partition(" ")
        if kind.lower() == "bearer" and self.wait_after(shown.strip(), address) is None:
            return True
        try:
            morsel = SimpleCookie(cookies).get(COOKIE)
        except CookieError:
            return False
        return morsel is not None and morsel.value in self._sessions

    def wait_after(self, token: str, address: str) -> int | None:
        """Try a token: None if it is right, else the seconds until one more try is allowed."""
        wait = self.wait(address)
        if wait:
            return wait
        if hmac.compare_digest(token.encode("utf-8", "replace"), self._token):
            return None
        for who in (address, ""):
            self._tries.setdefault(who, deque(maxlen=TRIES_OF_ALL)).append(time.monotonic())
        return self.wait(address)

    def wait(self, address: str) -> int:
        """Return the seconds until this address may try again."""
        now = time.monotonic()
        for who in list(self._tries):
            tries = self._tries[who]
            while tries and now - tries[0] > WITHIN:
                tries.popleft()
            if not tries:
                del self._tries[who]
        for who, most in ((address, TRIES), ("", TRIES_OF_ALL)):
            tries = self._tries.get(who, deque())
            if len(tries) >= most:
                return 1 + int(WITHIN - (now - tries[0]))
        return 0

    def cookie(self, *, secure: bool) -> str:
        """Return a Set-Cookie for somebody who has shown the token; the token itself is not in it."""
        session = secrets.token_urlsafe(32)
        self._sessions[session] = None
        while len(self._sessions) > SESSIONS:
            self._sessions.popitem(last=False)
        return f"{COOKIE}={session}; Path=/; HttpOnly; SameSite=Strict{'; Secure' if secure else ''}"
