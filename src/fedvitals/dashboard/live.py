# SPDX-License-Identifier: Apache-2.0
"""Notifies open pages of changed runs, by one check of the store for all of them, four times a second."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

from fedvitals.dashboard.answers import encode
from fedvitals.dashboard.connections import Limits, Places
from fedvitals.dashboard.reader_cache import ReaderCache
from fedvitals.errors import FedvitalsError

logger = logging.getLogger("fedvitals.dashboard")
EVERY = 0.25  # seconds between two checks
ALIVE = 10.0  # seconds after which a page is sent a sign of life
Page = asyncio.Queue[bytes | None]
"""What a page is still to be told; None: no more."""


class Live:
    """The pages that listen, and the messages for them."""

    def __init__(self, cache: ReaderCache, limits: Limits) -> None:
        self._cache = cache
        self._pages: set[Page] = set()
        self._places = Places[Page](limits.streams, limits.streams_of_address, _end)

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Check for changes while the block runs."""
        task = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _watch(self) -> None:
        before, known, trouble = ("", 0, 0), dict[str, int](), ""
        while True:
            await asyncio.sleep(EVERY)
            if not self._pages:
                continue
            try:
                await asyncio.to_thread(self._cache.look)
            except Exception as error:
                if str(error) != trouble:
                    if not isinstance(error, FedvitalsError):  # a bug of ours: the pages should stay connected
                        logger.exception("The look for changes failed.")
                    trouble = str(error)
                    self._tell("trouble", {"message": trouble})
                continue
            if trouble:
                trouble = ""
                self._tell("healed", {})
            now, versions = self._cache.tracker.versions()
            if now != before:
                if now[:2] != before[:2]:  # another store, or rows were removed: all earlier state is invalid
                    changed = {**dict.fromkeys(known, 0), **versions}
                else:
                    changed = {run: version for run, version in versions.items() if version > before[2]}
                before, known = now, versions
                self._tell("change", {"runs": changed, "at": time.time()})

    def _tell(self, kind: str, data: dict[str, Any]) -> None:
        for page in self._pages:
            with contextlib.suppress(asyncio.QueueFull):  # a suspended page requests everything when it wakes
                page.put_nowait(_event(kind, data))

    async def events(self, address: str) -> AsyncIterator[bytes]:
        """Yield the messages for a page until it disconnects, or too many others listen: then it reconnects."""
        mine: Page = asyncio.Queue(32)
        if not self._places.enter(address, mine):
            return
        self._pages.add(mine)
        try:
            yield b"retry: 1000\n" + _event("hello", {"at": time.time()})
            while True:
                try:
                    event = await asyncio.wait_for(mine.get(), ALIVE)
                except TimeoutError:
                    event = _event("alive", {"at": time.time()})
                if event is None:
                    return
                yield event
        finally:
            self._pages.discard(mine)
            self._places.exit(address, mine)


def _end(page: Page) -> bool:
    """End a page's stream."""
    while not page.empty():
        page.get_nowait()
    page.put_nowait(None)
    return True


def _event(kind: str, data: dict[str, Any]) -> bytes:
    return f"event: {kind}\ndata: ".encode() + encode(data) + b"\n\n"
