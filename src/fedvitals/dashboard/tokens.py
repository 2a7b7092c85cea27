# SPDX-License-Identifier: Apache-2.0
"""Checks the dashboard's token, keeps the sessions of clients that have shown it, and slows down guessing."""

from __future__ import annotations

import hmac
import secrets
import time
from collections import OrderedDict, deque

COOKIE = "fedvitals_session"
SESSIONS = 1000
TRIES, WITHIN = 5, 60.0  # allowed wrong tokens per address, within this many seconds
ADDRESSES = 1000  # whose wrong tokens are counted


class Tokens:
    """The token, and the sessions of clients that have shown it.

    The right token is always accepted, however many wrong ones came before it: behind a proxy or a tunnel, all clients
    have the same address. It is too long to be guessed; the limit only prevents a guesser from being answered at full
    speed.
    """

    def __init__(self, token: str, root: str = "") -> None:
        """`root`: the path below which browsers are to send the session's cookie."""
        self._token, self._root = token.encode(), root
        self._sessions: OrderedDict[str, None] = OrderedDict()
        self._tries: OrderedDict[str, deque[float]] = OrderedDict()

    def shown_in(self, authorization: str, address: str) -> bool:
        """Whether an Authorization header contains the token; a wrong one is counted against the address."""
        kind, _, token = authorization.partition(" ")
        return kind.lower() == "bearer" and self.wait_after(token.strip(), address) is None

    def has_session(self, cookies: str, port: int) -> bool:
        """Whether a Cookie header contains the session of a client that has shown the token."""
        # By hand: cookies of other servers on this host are sent along, and `http.cookies` gives up at the first bad
        # one.
        pairs = (cookie.strip().partition("=") for cookie in cookies.split(";"))
        return any(name == _cookie_name(port) and value in self._sessions for name, _, value in pairs)

    def wait_after(self, token: str, address: str) -> int | None:
        """Try a token. Returns None if it is right, else the seconds until another wrong one is checked."""
        if hmac.compare_digest(token.encode("utf-8", "replace"), self._token):
            return None
        wait = self.wait(address)
        if wait:
            return wait
        self._tries.setdefault(address, deque(maxlen=TRIES)).append(time.monotonic())
        self._tries.move_to_end(address)
        while len(self._tries) > ADDRESSES:
            self._tries.popitem(last=False)
        return self.wait(address)

    def wait(self, address: str) -> int:
        """Return the seconds for which wrong tokens of this address are refused unchecked."""
        tries, now = self._tries.get(address, deque()), time.monotonic()
        while tries and now - tries[0] > WITHIN:
            tries.popleft()
        return 1 + int(WITHIN - (now - tries[0])) if len(tries) >= TRIES else 0

    def cookie(self, port: int, *, secure: bool) -> str:
        """Return a Set-Cookie for a client that has shown the token, which is not contained in it."""
        session = secrets.token_urlsafe(32)
        self._sessions[session] = None
        while len(self._sessions) > SESSIONS:
            self._sessions.popitem(last=False)
        path = self._root or "/"
        return f"{_cookie_name(port)}={session}; Path={path}; HttpOnly; SameSite=Strict{'; Secure' if secure else ''}"


def _cookie_name(port: int) -> str:
    """Return the cookie's name with the port, since a browser sends a host's cookies to all its ports."""
    return f"{COOKIE}_{port}"
