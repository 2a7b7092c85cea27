# SPDX-License-Identifier: Apache-2.0
"""Lends readers of the store to requests, and keeps what is remembered between them."""

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

READERS = 4  # at most: what more of them read at once would be held at once, and SQLite keeps the descriptor of each
REMEMBERED = 64_000_000  # bytes of answers
PATIENCE = 60.0  # seconds for one statement of a request


@dataclass(frozen=True, slots=True)
class _Answer:
    """An answer that was given, and the run that it is about, as that was then."""

    version: str
    body: bytes
    run: str | None
    run_version: str


class ReaderCache:
    """Readers of one store, the answers that were given, and what is known of changes; for several threads."""

    def __init__(self, store: str | Path | None = None) -> None:
        self.target = store_target(store)
        self._start_over()
        self.warming = Warming(self)
        self.tracker = ChangeTracker()  # another one once another store has this name
        self._lock = threading.Lock()
        self._looking = threading.Lock()  # its own: a look may take long, and answers that are known need not wait
        self._looks = self._looked = 0  # the number of the last look that began, and of the last that ended well
        self._turns = threading.BoundedSemaphore(READERS)
        self._readers: list[tuple[object, Reader]] = []  # that wait for the next request
        self._watcher: tuple[object, Reader] | None = None  # the one whose `data_version` tells of changes
        self._symbols: tuple[object, SymbolCache] = object(), SymbolCache()  # of the store that is watched
        self._answers: OrderedDict[str, _Answer] = OrderedDict()  # by address, the longest unused first
        self._answered = 0

    @property
    def shown(self) -> str:
        """The store's name for people: no password in it."""
        return address_of(self.target).shown if isinstance(self.target, str) else str(self.target)

    @contextlib.contextmanager
    def reader(self) -> Iterator[Reader]:
        """Lend a reader of the store to one request, which waits for its turn if all are lent.

        Nobody may ask for a second one meanwhile. A reader that failed is not used again.
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
            reader.release_memory()  # of a run that trains, it is outdated by the next request
        except BaseException:
            reader.close()
            raise
        with self._lock:
            self._readers.append((identity, reader))

    def _start_over(self) -> None:
        """Remember nothing of the store: this is the first time that it is read, or another has its name now."""
        self.matrices, self.layouts, self.rosters = Matrices(notice=False), Layouts(), Rosters()

    def _open(self, identity: object) -> Reader:
        """Open a reader of the store of that identity; it shares names with the other readers of the watched store."""
        reader = open_reader(self.target, patience=PATIENCE)
        if self._symbols[0] == identity:
            reader.names.use(self._symbols[1])
        return reader

    def _identity(self) -> object:
        """What tells this store from another of its name, which may have taken its place."""
        if isinstance(self.target, str):
            return None
        try:
            status = self.target.stat()
        except FileNotFoundError:
            return None
        return status.st_dev, status.st_ino

    def look(self) -> None:
        """Notice what has changed in the store since the last look."""
        came = self._looks
        with self._looking:
            if self._looked > came:  # somebody else's look, which began after we came
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
        """Return the answer that was given to this address at this version, or None."""
        with self._lock:
            answer = self._answers.get(asked)
            if answer is None or answer.version != version:
                return None
            self._answers.move_to_end(asked)
            return answer.body

    def remember(self, asked: str, version: str, body: bytes, run: str | None = None, run_version: str = "") -> None:
        """Keep the newest answer to this address, as long as there is room.

        `run`, `run_version`: the run that it is about, if it is about one, and how that was when it was read. Nobody
        asks for answers about a run as it was before: they go as soon as there is one to be kept.
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
    """Also one that can no longer be asked."""
    try:
        return reader.is_outdated()
    except StoreError:
        return True
