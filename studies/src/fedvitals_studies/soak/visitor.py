# SPDX-License-Identifier: Apache-2.0
"""Views a run that trains as open pages do: requests every page's data repeatedly, and listens for changes."""

from __future__ import annotations

import http.client
import itertools
import json
import threading
import time
from typing import Any, Self
from urllib.parse import urlsplit

TIMEOUT = 60.0  # seconds for an answer on a busy machine
ALWAYS = ("", "/overview", "/findings")
IN_TURN = (
    "/clients", "/client?node=c9", "/client/signs?node=c9", "/client/layers?node=c9", "/map", "/layers", "/phases",
    "/profile", "/profile/changes", "/costs", "/topology", "/rounds/{round}", "/rounds/{round}/metrics",
)  # fmt: skip


class Visitor:
    """Polls the run's pages once a second and keeps the live stream open, in separate threads, inside its block.

    `requests` and `events` count answers and received changes; `failures` lists what went wrong, including each end of
    the stream.
    """

    def __init__(self, url: str, run: str, *, every: float = 1.0) -> None:
        address = urlsplit(url)
        self._host, self._port = str(address.hostname), int(address.port or 80)
        self._run, self._every = f"/api/runs/{run}", every
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._poll, self._listen)]
        self.requests = self.events = 0
        self.failures: list[str] = []

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(TIMEOUT)

    def _poll(self) -> None:
        connection = self._connect()
        for page in itertools.cycle(IN_TURN):
            try:
                newest = self._get(connection, self._run)["last_round"]
                for path in (*(self._run + part for part in ALWAYS), "/api/runs"):
                    self._get(connection, path)
                self._get(connection, self._run + page.format(round=newest))
            except (OSError, http.client.HTTPException, ValueError) as error:
                self._fail(f"{page or 'status'}: {error!r}")
                connection.close()
                connection = self._connect()
            if self._stop.wait(self._every):
                break
        connection.close()

    def _get(self, connection: http.client.HTTPConnection, path: str) -> Any:
        connection.request("GET", path)
        response = connection.getresponse()
        body = response.read()
        self.requests += 1
        if response.status != http.HTTPStatus.OK:
            raise ValueError(f"{path} was answered with {response.status}: {body[:200]!r}")
        return json.loads(body)

    def _listen(self) -> None:
        while not self._stop.is_set():
            connection = self._connect()
            try:
                connection.request("GET", "/api/live")
                for line in connection.getresponse():
                    self.events += line.startswith(b"event: change")
                    if self._stop.is_set():
                        return
                self._fail("the live stream ended")
            except (OSError, http.client.HTTPException) as error:
                self._fail(f"live stream: {error!r}")
            finally:
                connection.close()
            time.sleep(min(1.0, self._every))

    def _fail(self, words: str) -> None:
        if not self._stop.is_set():
            self.failures.append(words)

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT)
