# SPDX-License-Identifier: Apache-2.0
"""Numbers for names: a store keeps every name once. A symbol never changes and is never removed."""

from __future__ import annotations

from collections.abc import Iterable

from fedvitals.store.dialect import Database


def encodable(text: str) -> str:
    """The text without lone surrogates, which log lines from undecodable bytes have and no database takes."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


NAMES_REMEMBERED = 100_000  # names: some 15 MB; a federation has thousands


class Symbols:
    """What a writer knows of the table `symbol`, and the names that it has to add."""

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
        """The number of a name that is not None, for those who count on it."""
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
                # Whoever was before us may have added this very name, which is seen only now.
                self._database.take_turn("names")
                rows = self._database.rows("SELECT id FROM symbol WHERE text = ?", (text,))
                if rows:
                    return int(rows[0][0])
            self._next = int(self._database.rows("SELECT COALESCE(MAX(id), 0) + 1 FROM symbol")[0][0])
        number, self._next = self._next, self._next + 1
        self._new.append((number, text))
        return number

    def save(self) -> None:
        """Write the new names; in the transaction of the rows that use them."""
        if self._new:
            self._database.many("INSERT INTO symbol (id, text) VALUES (?, ?)", self._new)
            self._new = []
        if len(self._numbers) > NAMES_REMEMBERED:  # they are in the table, and asked for again
            self._numbers = {None: None}

    def begin(self) -> None:
        """A new transaction: where others write too, they may have added names since the last one."""
        if self._database.dialect.shared:
            self._next = None

    def forget(self) -> None:
        """After a rollback, or when someone else has written: nothing known here can be trusted."""
        self._numbers, self._next, self._new = {None: None}, None, []


class SymbolCache:
    """Names and their numbers as far as they are known, for all readers of one store: neither ever changes."""

    def __init__(self) -> None:
        self.texts: dict[int, str] = {}
        self.numbers: dict[str, int] = {}
        self.complete_to = 0  # the number up to which all names are known


class Names:
    """Names by number and numbers by name for a reader, each fetched once."""

    def __init__(self, database: Database, cache: SymbolCache | None = None) -> None:
        self._database = database
        self._cache = cache or SymbolCache()

    def use(self, cache: SymbolCache) -> None:
        """Share what is known with the other readers of the same store that use this cache."""
        self._cache = cache

    def learn(self, symbols: Iterable[tuple[int, str]]) -> None:
        """Note numbers and their names, out of an answer that has both."""
        for number, text in symbols:
            self._cache.texts[number], self._cache.numbers[text] = text, number

    def texts(self, numbers: Iterable[int]) -> list[str]:
        """Return the names of these numbers."""
        wanted = [int(number) for number in numbers]
        cache = self._cache
        if any(number not in cache.texts for number in wanted):
            # One walk over what is new since the last time beats one question a name.
            symbols = self._database.rows("SELECT id, text FROM symbol WHERE id > ?", (cache.complete_to,))
            self.learn(symbols)
            cache.complete_to = max([cache.complete_to, *(number for number, _ in symbols)])
        return [cache.texts[number] for number in wanted]

    def number(self, text: str) -> int | None:
        """Return the number of a name, or None if no record in the store bears it."""
        name = encodable(text)
        if name not in self._cache.numbers:
            self.learn(
                (number, name) for (number,) in self._database.rows("SELECT id FROM symbol WHERE text = ?", (name,))
            )
        return self._cache.numbers.get(name)
