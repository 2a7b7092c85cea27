# SPDX-License-Identifier: Apache-2.0
"""Checks the token of a dashboard that others can reach, and limits how often it may be guessed."""

from __future__ import annotations

import hmac
import secrets
import time
from collections import OrderedDict, deque
from http.cookies import CookieError, SimpleCookie

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
