# SPDX-License-Identifier: Apache-2.0
"""Searches the documentation of fedvitals' metrics, issues, tables and verbs.

The entries come from the tables in the package from which the pages of `docs/` are generated as well, so that an
installed wheel needs no files of the documentation.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from fedvitals.catalog import LEVELS, MEASURES
from fedvitals.diagnosis.issues.table import ISSUES
from fedvitals.stats import DERIVED, FAMILIES, PEERS
from fedvitals.store.schema import LAYER_STATISTICS, TABLES

SATURATION, LENGTH = 1.2, 0.6  # k₁ and b of BM25
TITLE = 4  # weight of a word in the title
_WORD = re.compile(r"[a-z0-9]+")
_COMMON = frozenset(
    ("a", "an", "and", "are", "as", "at", "be", "by", "do", "for", "from", "has", "how", "i", "in", "is", "it", "my",
     "of", "on", "or", "the", "this", "to", "what", "which", "why", "with")
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Entry:
    """One documented item."""

    kind: str  # «metric», «layer statistics», «issue», «table», «verb» or «privacy»
    title: str
    text: str


@dataclass(frozen=True, slots=True)
class _Index:
    entries: tuple[Entry, ...]
    words: tuple[Counter[str], ...]
    rarity: dict[str, float]
    mean_length: float


def search(query: str, most: int = 5, more: tuple[Entry, ...] = ()) -> list[Entry]:
    """Return the entries that best match the words of the query (BM25), best first; none if no word occurs.

    `more` are the caller's own entries, such as its verbs, which are searched as well.
    """
    index = _index(more)
    wanted = set(_words(query))
    scored = [(_score(wanted, words, index), i) for i, words in enumerate(index.words)]
    best = sorted((pair for pair in scored if pair[0] > 0), key=lambda pair: (-pair[0], pair[1]))
    return [index.entries[i] for _, i in best[:most]]


def _score(wanted: set[str], words: Counter[str], index: _Index) -> float:
    norm = SATURATION * (1 - LENGTH + LENGTH * words.total() / index.mean_length)
    return sum(
        index.rarity[word] * words[word] * (SATURATION + 1) / (words[word] + norm) for word in wanted if words[word]
    )


def _words(text: str) -> list[str]:
    """Return the words in lower case, without common ones; a plural counts as its singular."""
    words = (word for word in _WORD.findall(text.lower()) if word not in _COMMON)
    return [word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word for word in words]


@functools.cache
def _index(more: tuple[Entry, ...]) -> _Index:
    entries = (*_entries(), *more)
    words = tuple(Counter(TITLE * _words(entry.title) + _words(entry.text)) for entry in entries)
    occurs = Counter(word for counts in words for word in counts)
    rarity = {word: math.log(1 + (len(entries) - n + 0.5) / (n + 0.5)) for word, n in occurs.items()}
    return _Index(entries, words, rarity, sum(counts.total() for counts in words) / len(words))


def _entries() -> Iterator[Entry]:
    for measure in MEASURES:
        formula = f" Formula: {measure.formula}." if measure.formula else ""
        needs = f" Needs {measure.needs}." if measure.needs else ""
        yield Entry("metric", measure.name, f"{measure.meaning} Unit: {measure.unit}.{formula}{needs}")
    for name, family in FAMILIES.items():
        columns = ", ".join(family.columns[:20])
        yield Entry("layer statistics", name, f"A row for each {family.rows}; columns: {columns}.")
    for column, meaning in PEERS.items():
        yield Entry("layer statistics", f"update.peers {column}", meaning)
    yield Entry("layer statistics", "derived statistics", ", ".join(DERIVED))
    for issue in ISSUES:
        yield Entry(
            "issue",
            f"{issue.code}: {issue.title}",
            f"{issue.symptom} Causes: {'; '.join(issue.causes)}. Remedies: {'; '.join(issue.remedies)}. "
            f"Refuted by: {issue.refutation}",
        )
    for table in TABLES:
        columns = "; ".join(f"{column.name}: {column.meaning}" for column in table.columns)
        yield Entry("table", table.view or table.name, f"{table.meaning} Columns: {columns}")
    yield Entry("table", "layer_statistics", f"A view for SQL, a row a layer: {', '.join(LAYER_STATISTICS)}")
    for level, allowed in enumerate(LEVELS):
        yield Entry("privacy", f"privacy level {level}", f"Monitor(privacy={level}): {allowed}")
