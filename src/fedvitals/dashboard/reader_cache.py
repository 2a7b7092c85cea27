# SPDX-License-Identifier: Apache-2.0
"""Lends readers of the store to requests, and keeps the caches between them."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fedvitals.dashboard.change_tracker import ChangeTracker
from fedvitals.dashboard.warming import Warming
from fedvitals.errors import StoreError
from fedvitals.store import open_reader, store_target
from fedvitals.store.postgres import address_of
from fedvitals.store.read.reader import Reader
from fedvitals.store.symbols import SymbolCache
from fedvitals.views.clients import Rosters
from fedvitals.views.matrix import Matrices, share
from fedvitals.views.update_map import Layouts

READERS = 4  # the most: each holds what it reads, and SQLite keeps the descriptor of each
REMEMBERED = 64_000_000  # of cached answers
PATIENCE = 60.0  # seconds for one statement of a request


@dataclass(frozen=True, slots=True)
class _Answer:
    """A cached answer, and the run that it is about, with its version."""

    version: str
    body: bytes
    run: str | None
    run_version: str


class ReaderCache:
    """Readers of one store, the cached answers, and the known changes; thread-safe."""

    def __init__(self, store: str | Path | None = None) -> None:
        self.target = store_target(store)
        self._start_over()
        self.warming = Warming(self)
        self.tracker = ChangeTracker()  # replaced once another store has this name
        self._lock = threading.Lock()
        self._opening = threading.Lock()  # a store is examined once, not by every thread that opens it first
        self._looking = threading.Lock()  # separate: a check may take long, and cached answers need not wait
        self._looks = self._looked = 0  # the number of the last check that began, and of the last that succeeded
        self._turns = threading.BoundedSemaphore(READERS)
        self._readers: list[tuple[object, Reader]] = []  # idle readers
        self._watcher: tuple[object, Reader] | None = None  # the one whose `data_version` reveals changes
        self._symbols: tuple[object, SymbolCache] = object(), SymbolCache()  # of the watched store
        self._answers: OrderedDict[str, _Answer] = OrderedDict()  # by address, least recently used first
        self._answered = 0

    @property
    def shown(self) -> str:
        """The store's name for users, without a password."""
        return address_of(self.target).shown if isinstance(self.target, str) else str(self.target)

    @contextlib.contextmanager
    def reader(self) -> Iterator[Reader]:
        """Lend a reader of the store to one request, which waits for its turn if all are lent.

        A request must not ask for a second one. A reader that failed is not used again.
        """
        with self._turns, self._lent() as reader:
            yield reader

    @contextlib.contextmanager
    def _lent(self) -> Iterator[Reader]:
        identity = self._identity()
        with self._lock:
            kept = [pair for pair in self._readers if pair[0] == identity]
            gone = [pair for pair in self._readers if pair[0] != identity]
            reader = kept.pop()[1] if kept else None
            self._readers = kept
        for _, old in gone:
            old.close()
        if reader is not None and _is_outdated(reader):
            reader.close()
            reader = None
        reader = reader or self._open(identity)
        share(reader, self.matrices)
        try:
            yield reader
            reader.release_memory()  # for a run that trains, it is outdated by the next request
        except BaseException:
            reader.close()
            raise
        with self._lock:
            self._readers.append((identity, reader))

    def _start_over(self) -> None:
        """Clear all caches: the store is read for the first time, or another store now has its name."""
        self.matrices, self.layouts, self.rosters = Matrices(notice=False), Layouts(), Rosters()

    def _open(self, identity: object) -> Reader:
        """Open a reader of the store with that identity, sharing names with the watched store's other readers."""
        with self._opening:
            reader = open_reader(self.target, patience=PATIENCE)
        if self._symbols[0] == identity:
            reader.names.use(self._symbols[1])
        return reader

    def _identity(self) -> object:
        """Return what distinguishes this store from another with its name, which may have replaced it."""
        if isinstance(self.target, str):
            return None
        try:
            status = self.target.stat()
        except FileNotFoundError:
            return None
        return status.st_dev, status.st_ino

    def look(self) -> None:
        """Detect what has changed in the store since the last check."""
        came = self._looks
        with self._looking:
            if self._looked > came:  # another thread's check, which began after we came
                return
            self._looks += 1
            self._look(self._identity())
            self._looked = self._looks

    def _look(self, identity: object) -> None:
        watcher = self._watcher
        if watcher is not None and (watcher[0] != identity or _is_outdated(watcher[1])):
            watcher[1].close()
            self._watcher = None
            if watcher[0] != identity:
                self.tracker = ChangeTracker()
                self._start_over()
        if self._watcher is None:
            self._symbols = identity, SymbolCache()
            self._watcher = identity, self._open(identity)
        try:
            if self.tracker.look(self._watcher[1]):
                self.matrices.forget()
        except BaseException:
            self._watcher[1].close()
            self._watcher = None
            raise

    def remembered(self, asked: str, version: str) -> bytes | None:
        """Return the cached answer for this address at this version, or None."""
        with self._lock:
            answer = self._answers.get(asked)
            if answer is None or answer.version != version:
                return None
            self._answers.move_to_end(asked)
            return answer.body

    def remember(self, asked: str, version: str, body: bytes, run: str | None = None, run_version: str = "") -> None:
        """Cache the newest answer for this address, as long as there is room.

        `run`, `run_version`: the run that it is about, if any, and its version when it was read. Answers about an
        earlier version of a run are never requested: they are dropped as soon as a newer one is cached.
        """
        with self._lock:
            outdated = {name for name, answer in self._answers.items() if self._is_old(answer)} | {asked}
            for name in outdated & self._answers.keys():
                self._answered -= len(self._answers.pop(name).body)
            if len(body) > REMEMBERED // 4:
                return
            self._answers[asked] = _Answer(version, body, run, run_version)
            self._answered += len(body)
            while self._answered > REMEMBERED:
                self._answered -= len(self._answers.popitem(last=False)[1].body)

    def _is_old(self, answer: _Answer) -> bool:
        return answer.run is not None and self.tracker.version(answer.run) != answer.run_version

    def close(self) -> None:
        """Close all readers that are not lent, and stop reading ahead."""
        self.warming.close()
        with self._looking, self._lock:
            for _, reader in self._readers:
                reader.close()
            if self._watcher is not None:
                self._watcher[1].close()
            self._readers, self._watcher = [], None


def _is_outdated(reader: Reader) -> bool:
    """Whether a reader is outdated, or can no longer be used."""
    try:
        return reader.is_outdated()
    except StoreError:
        return True
