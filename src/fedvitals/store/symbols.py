# SPDX-License-Identifier: Apache-2.0
"""Numbers for names: a store keeps every name once. A symbol never changes and is never removed."""

from __future__ import annotations

from collections.abc import Iterable

from fedvitals.store.dialect import Database


def encodable(text: str) -> str:
    """Return the text without lone surrogates: undecodable log lines have them, and no database accepts them."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


NAMES_REMEMBERED = 100_000  # some 15 MB; a federation has thousands


class Symbols:
    """A writer's cache of the table `symbol`, and the names that it still has to add."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._numbers: dict[str | None, int | None] = {None: None}
        self._next: int | None = None
        self._new: list[tuple[int, str]] = []

    def number(self, text: str | None) -> int | None:
        """Return the number of a name, adding it if it is new; None for None."""
        try:
            return self._numbers[text]
        except KeyError:
            return self._learn(str(text))

    def known(self, text: str) -> int:
        """Return the number of a name that is not None, typed accordingly."""
        return self.number(text) or 0

    def _learn(self, text: str) -> int:
        clean = encodable(text)
        number = self._numbers.get(clean)
        if number is None:
            rows = self._database.rows("SELECT id FROM symbol WHERE text = ?", (clean,))
            number = int(rows[0][0]) if rows else self._add(clean)
            self._numbers[clean] = number
        self._numbers[text] = number
        return number

    def _add(self, text: str) -> int:
        if self._next is None:
            if self._database.dialect.shared:
                # The process before us may have added the same name, which becomes visible only now.
                self._database.take_turn("names")
                rows = self._database.rows("SELECT id FROM symbol WHERE text = ?", (text,))
                if rows:
                    return int(rows[0][0])
            self._next = int(self._database.rows("SELECT COALESCE(MAX(id), 0) + 1 FROM symbol")[0][0])
        number, self._next = self._next, self._next + 1
        self._new.append((number, text))
        return number

    def save(self) -> None:
        """Write the new names, in the same transaction as the rows that use them."""
        if self._new:
            self._database.many("INSERT INTO symbol (id, text) VALUES (?, ?)", self._new)
            self._new = []
        if len(self._numbers) > NAMES_REMEMBERED:  # they can be read from the table again
            self._numbers = {None: None}

    def begin(self) -> None:
        """Begin a transaction: if other processes write too, they may have added names since the last one."""
        if self._database.dialect.shared:
            self._next = None

    def forget(self) -> None:
        """Forget everything, after a rollback or a write by another process: the cache can no longer be trusted."""
        self._numbers, self._next, self._new = {None: None}, None, []


class SymbolCache:
    """Known names and their numbers, shared by all readers of one store: neither ever changes."""

    def __init__(self) -> None:
        self.texts: dict[int, str] = {}
        self.numbers: dict[str, int] = {}
        self.complete_to = 0  # the number up to which all names are known


class Names:
    """A reader's names by number and numbers by name, each fetched once."""

    def __init__(self, database: Database, cache: SymbolCache | None = None) -> None:
        self._database = database
        self._cache = cache or SymbolCache()

    def use(self, cache: SymbolCache) -> None:
        """Share known names with the other readers of the same store that use this cache."""
        self._cache = cache

    def learn(self, symbols: Iterable[tuple[int, str]]) -> None:
        """Remember numbers and their names from an answer that contains both."""
        for number, text in symbols:
            self._cache.texts[number], self._cache.numbers[text] = text, number

    def texts(self, numbers: Iterable[int]) -> list[str]:
        """Return the names for these numbers."""
        wanted = [int(number) for number in numbers]
        cache = self._cache
        if any(number not in cache.texts for number in wanted):
            # One walk over all new rows beats one query per name.
            symbols = self._database.rows("SELECT id, text FROM symbol WHERE id > ?", (cache.complete_to,))
            self.learn(symbols)
            cache.complete_to = max([cache.complete_to, *(number for number, _ in symbols)])
        return [cache.texts[number] for number in wanted]

    def number(self, text: str) -> int | None:
        """Return the number of a name, or None if no record in the store has it."""
        name = encodable(text)
        if name not in self._cache.numbers:
            self.learn(
                (number, name) for (number,) in self._database.rows("SELECT id FROM symbol WHERE text = ?", (name,))
            )
        return self._cache.numbers.get(name)
