# SPDX-License-Identifier: Apache-2.0
"""Who may ask what: names this machine is called by, tokens, writes that come from our own page, sizes, headers.

Plain ASGI around the app, so that nothing, not even a static file or an error, leaves without passing here.
"""

from __future__ import annotations

import hmac
import secrets
import time
from collections import OrderedDict, deque
from http.cookies import SimpleCookie
from typing import Any
from urllib.parse import urlsplit

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fedvitals.dashboard.answers import failure

COOKIE = "fedvitals_session"
OWN = {"localhost", "127.0.0.1", "::1"}
LARGEST_BODY = 65_536
LONGEST_URL = 8192
SESSIONS = 1000
TRIES, WITHIN = 5, 60.0  # wrong tokens of one address, seconds
TRIES_OF_ALL = 50
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


class Guard:
    def __init__(self, app: ASGIApp, *, token: str | None = None, hosts: tuple[str, ...] = ()) -> None:
        self._app, self._token = app, token
        # With a token the name does not matter: a page from elsewhere has no cookie of ours to use.
        self._hosts = None if token is not None else {*OWN, *hosts}
        self._sessions: OrderedDict[str, None] = OrderedDict()
        self._tries: dict[str, deque[float]] = {}

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

        headers = Headers(scope=scope)
        refused = self._refused(scope, headers)
        if refused is not None:
            await failure(*refused)(scope, receive, with_headers)
        elif scope["path"] == "/api/login" and scope["method"] == "POST":
            await self._login(scope, receive, with_headers)
        else:
            await self._app(scope, _bounded(receive), with_headers)

    def _refused(self, scope: Scope, headers: Headers) -> tuple[int, str, str | None] | None:
        """Status, what is wrong, and what to do; None where the request may pass."""
        host = _host(headers.get("host", ""))
        if self._hosts is not None and host not in self._hosts:
            # Another site may point its own name at this machine, and would then be «the same origin» as we are.
            return 403, f"This dashboard is not called '{host[:100]}'.", "Open it by the address that it printed."
        if len(scope.get("raw_path") or b"") + len(scope["query_string"]) > LONGEST_URL:
            return 413, f"The address is longer than {LONGEST_URL} bytes.", None
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > LARGEST_BODY:
            return 413, f"A request may have a body of at most {LARGEST_BODY} bytes.", None
        if scope["path"].startswith("/api/") and headers.get("sec-fetch-site") == "cross-site":
            return 403, "Another site's page asked; only our own page may.", None
        if scope["method"] not in ("GET", "HEAD", "OPTIONS") and not _ours(headers):
            return 403, "A change must come from the dashboard's own page.", "Scripts: send the header X-Fedvitals: 1."
        if not self._let_in(scope, headers):
            return 401, "This dashboard needs its token.", "Open /login, or send the header Authorization: Bearer ..."
        return None

    def _let_in(self, scope: Scope, headers: Headers) -> bool:
        path = scope["path"]
        if self._token is None or path in OPEN or path.startswith("/static/"):
            return True
        if not path.startswith("/api/") and scope["method"] in ("GET", "HEAD"):
            return True  # the empty page, which then asks for data, is told to log in, and comes back
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and self._right(given.strip(), _address(scope)) is None:
            return True
        morsel = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
        return morsel is not None and morsel.value in self._sessions

    def _right(self, given: str, address: str) -> int | None:
        """None for the right token; else the seconds after which one more try is allowed, 0: at once."""
        wait = self._wait(address)
        if wait:
            return wait
        if hmac.compare_digest(given.encode(), (self._token or "").encode()):
            return None
        for who in (address, ""):
            self._tries.setdefault(who, deque(maxlen=TRIES_OF_ALL)).append(time.monotonic())
        return self._wait(address)

    def _wait(self, address: str) -> int:
        """Seconds until this address may try again: five wrong tokens a minute, and fifty from everywhere together."""
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

    async def _login(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = _token_in(await _body(receive))
        wait = 0 if given is None else self._right(given, _address(scope))
        if self._token is None or given is None:
            await failure(400, 'Send {"token": "..."}.' if self._token else "No token is needed here.")(
                scope, receive, send
            )
        elif wait is not None:
            message = "That is not the token." if wait == 0 else f"Too many wrong tokens. Wait {wait} s."
            hint = "`fedvitals ui` printed it when it started."
            told = {"Retry-After": str(wait)} if wait else None
            await failure(429 if wait else 401, message, hint, told)(scope, receive, send)
        else:
            session = secrets.token_urlsafe(32)
            self._sessions[session] = None
            while len(self._sessions) > SESSIONS:
                self._sessions.popitem(last=False)
            secure = "; Secure" if scope.get("scheme") == "https" else ""
            cookie = f"{COOKIE}={session}; Path=/; HttpOnly; SameSite=Strict{secure}"
            response = failure(200, "")
            response.body, response.status_code = b"{}", 200
            response.headers["content-length"] = "2"
            response.headers["set-cookie"] = cookie
            await response(scope, receive, send)


def _host(header: str) -> str:
    """The name in a Host header, without its port."""
    try:
        return (urlsplit(f"//{header}").hostname or "").lower()
    except ValueError:
        return ""


def _ours(headers: Headers) -> bool:
    """Whether a write comes from our page: a form of another site can set no header, and tells where it comes from."""
    origin = headers.get("origin")
    return headers.get("x-fedvitals") == "1" and (origin is None or urlsplit(origin).netloc == headers.get("host"))


def _address(scope: Scope) -> str:
    return str((scope.get("client") or ("unknown", 0))[0])


def _token_in(body: bytes) -> str | None:
    try:
        found: Any = msgspec.json.decode(body, type=dict[str, str])
    except msgspec.MsgspecError:
        return None
    token = found.get("token")
    return token if isinstance(token, str) else None


async def _body(receive: Receive) -> bytes:
    body, bounded = b"", _bounded(receive)
    while True:
        message = await bounded()
        body += message.get("body", b"")
        if message["type"] != "http.request" or not message.get("more_body"):
            return body


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
