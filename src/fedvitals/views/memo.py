# SPDX-License-Identifier: Apache-2.0
"""Caches answers as long as the records behind them stay the same."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

from fedvitals.store.read.reader import Reader
from fedvitals.views.matrix import memory_of

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
MOST = 6  # of one kind
_GATE = threading.Lock()


class Remembered(Generic[K, T]):
    """Cached values by key, each valid until its sign changes; least recently used ones are dropped. Thread-safe."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._known: OrderedDict[K, tuple[object, T]] = OrderedDict()

    def get(self, key: K, sign: object, make: Callable[[], T]) -> T:
        """Return the value of that key at this sign: the cached one, else what `make` returns."""
        with self._lock:
            known = self._known.get(key)
        if known is None or known[0] != sign:
            known = sign, make()
        with self._lock:
            self._known[key] = known
            self._known.move_to_end(key)
            while len(self._known) > self._most:
                self._known.popitem(last=False)
        return known[1]


class _Entry:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.sign: object = self  # equal to no other
        self.value: Any = None


def remembered(reader: Reader, kind: str, key: Hashable, sign: object, make: Callable[[], T]) -> T:
    """Return what `make` returns, called once for each `sign`: concurrent callers wait for it instead of working, too.

    `key`: what the answer is about, of which the last few are kept. Cached between readers that share `Matrices`;
    otherwise it is just computed.
    """
    memory = memory_of(reader)
    with _GATE:
        entries: OrderedDict[Hashable, _Entry] = memory.setdefault(("memo", kind), OrderedDict())
        entry = entries.setdefault(key, _Entry())
        entries.move_to_end(key)
        while len(entries) > MOST:
            entries.popitem(last=False)
    with entry.lock:
        if entry.sign != sign:
            entry.value = make()
            entry.sign = sign
        answer: T = entry.value
        return answer
