# SPDX-License-Identifier: Apache-2.0
"""The fields of the wire format: the allowed values, checked on reading; and conversion of free-form data to plain.

One entry per record, except for metrics, of which an entry holds all with the same time and source. Repeated text is a
word: a number in `wire_words.WORDS`, or beyond its end in the payload's own list. If `at`, `source` or `sequence` is
absent, it is that of the previous entry, or the next number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta, Raw, Struct

from fedvitals.errors import RecordError
from fedvitals.stats import FAMILIES, STATISTICS

WORD_CHARACTERS, TEXT_CHARACTERS = 1024, 1 << 16
DEPTH = 16  # of free-form data

# All families of nine sums are packed alike, and so together, as if they were one family.
ANY_SUMS = "gradient"
HOLDS_SUMS = {name: family.columns is STATISTICS for name, family in FAMILIES.items()}
WIDTH = {name: len(family.columns) for name, family in FAMILIES.items()}

Whole = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]  # what a database can hold
Natural = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Word = Annotated[int, Meta(ge=0, le=1 << 20)]
Text = Annotated[str, Meta(max_length=TEXT_CHARACTERS)]


class Place(Struct, array_like=True, forbid_unknown_fields=True):
    run: Word
    round: Whole | None
    node: Word | None
    step: Whole | None
    layer: Word | None
    group: Word | None


class Metrics(Struct, array_like=True, forbid_unknown_fields=True, tag=0):
    place: Word
    at: float | None
    source: Word | None
    sequence: Natural | None
    names: list[Word]
    moves: list[Natural]  # the index of the first metric in another place, and the place; and so on
    values: bytes  # float64, little-endian


class Layers(Struct, array_like=True, forbid_unknown_fields=True, tag=1):
    """Its matrix follows the head, in the order of the entries."""

    place: Word
    at: float | None
    source: Word | None
    sequence: Natural | None
    family: Word
    table: Word
    rows: Natural


class Spans(Struct, array_like=True, forbid_unknown_fields=True, tag=2):
    place: Word
    at: float | None
    source: Word | None
    sequence: Natural | None
    name: Word
    seconds: float
    trace: Word
    id: Word
    parent: Word | None
    attributes: Raw


class Transfers(Struct, array_like=True, forbid_unknown_fields=True, tag=3):
    place: Word
    at: float | None
    source: Word | None
    sequence: Natural | None
    sender: Word
    receiver: Word
    bytes: Natural
    raw_bytes: Natural
    seconds: float | None
    kind: Word


class Events(Struct, array_like=True, forbid_unknown_fields=True, tag=4):
    place: Word
    at: float | None
    source: Word | None
    sequence: Natural | None
    level: Word
    name: Word
    message: Text
    data: Raw


class Sketches(Struct, array_like=True, forbid_unknown_fields=True, tag=5):
    place: Word
    at: float | None
    source: Word | None
    sequence: Natural | None
    values: bytes
    digest: Word
    version: Natural = 1


class Findings(Struct, array_like=True, forbid_unknown_fields=True, tag=6):
    place: Word
    at: float | None
    source: Word | None
    sequence: Natural | None
    issue: Word
    severity: Word
    confidence: float
    message: Text
    evidence: Raw
    suspects: list[tuple[Word, float, Text]]


class Actions(Struct, array_like=True, forbid_unknown_fields=True, tag=7):
    place: Word
    at: float | None
    source: Word | None
    sequence: Natural | None
    finding: Word
    kind: Word
    target: Word | None
    arguments: Raw
    status: Word


class Snapshots(Struct, array_like=True, forbid_unknown_fields=True, tag=8):
    place: Word
    at: float | None
    source: Word | None
    sequence: Natural | None
    kind: Word
    digest: Word
    bytes: Natural


class Runs(Struct, array_like=True, forbid_unknown_fields=True, tag=9):
    place: Word  # of the run as a whole
    at: float | None
    source: Word | None
    sequence: Natural | None
    name: Text
    host: Word
    topology: Text | None
    config: Raw
    seed: Whole | None
    started: float
    finished: float | None
    versions: Raw
    tables: list[tuple[Word, list[tuple[Word, list[Natural], Word]]]]


class MeasuredLayersEntry(Struct, array_like=True, forbid_unknown_fields=True):
    family: Word
    table: Word
    step: Whole | None
    rows: list[Word]  # places among the entry's nodes
    layers: Natural


class MeasurementsEntry(Struct, array_like=True, forbid_unknown_fields=True, tag=10):
    """Its arrays follow the matrices, in the order of the entries.

    They are: which values are present, as bits; the values; for those with a step, the positions among the values and
    the steps; the sketches.
    """

    place: Word  # of the round
    at: float | None
    source: Word | None
    sequence: Natural | None
    nodes: list[Word | None]
    groups: list[Word | None]
    names: list[Word]
    values: Natural  # how many
    steps: Natural | None  # how many of them have a step; None: no array of steps at all
    layers: list[MeasuredLayersEntry]
    sketch_rows: list[Word]
    sketch_numbers: Natural  # of each
    sketch_version: Natural


Entry = (
    Metrics | Layers | Spans | Transfers | Events | Sketches | Findings | Actions | Snapshots | Runs | MeasurementsEntry
)


class Head(Struct, array_like=True, forbid_unknown_fields=True):
    words: list[Annotated[str, Meta(max_length=WORD_CHARACTERS)]]
    places: list[Place]
    entries: list[Entry]


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one payload. An object takes up to 80 times the bytes that announce it; a matrix twice."""

    bytes: int = 8 << 20
    head: int = 512 << 10  # bytes of everything except the matrices
    data: int = 256 << 10  # bytes of all free-form data together
    records: int = 100_000
    cells: int = 1_000_000  # nodes × names of all measurements, present or not


def check_size(what: str, size: int, limit: int) -> None:
    if size > limit:
        raise RecordError(f"The payload has {size} {what}; {limit} are the limit.")


def text(value: str, characters: int = TEXT_CHARACTERS) -> str:
    """Return text as UTF-8 can hold it, shortened to the limit."""
    value = value[:characters]
    return value if value.isascii() else value.encode("utf-8", "replace").decode()


def plain(value: Any, depth: int = DEPTH) -> Any:  # noqa: PLR0911 - one per kind of value
    """Return a value as JSON could hold it, whatever a user passed: other types, and levels too deep, become text."""
    kind = type(value)
    if value is None or kind is bool or kind is float:
        return value
    if kind is str:
        return text(value)
    if kind is int:
        return value if -(2**63) <= value < 2**63 else float(value) if abs(value) < 1 << 1000 else text(str(value))
    if (kind is dict or isinstance(value, Mapping)) and depth:
        return {
            name if type(name) is str and name.isascii() and len(name) <= TEXT_CHARACTERS else text(str(name)): (
                item if type(item) is float else plain(item, depth - 1)
            )
            for name, item in value.items()
        }
    if isinstance(value, list | tuple) and depth:
        return [plain(item, depth - 1) for item in value]
    if isinstance(value, str | int | float):  # of a subclass: an enumeration, a number of numpy
        return plain(next(base for base in (str, bool, int, float) if isinstance(value, base))(value), 0)
    if hasattr(value, "tolist") and depth:
        return plain(value.tolist(), depth - 1)
    return text(str(value))


def check_plain(value: Any, depth: int = DEPTH) -> None:
    """Raise unless `plain` could have produced it."""
    kind = type(value)
    if kind is dict or kind is list:
        if not depth:
            raise RecordError(f"Free-form data in a payload is nested deeper than {DEPTH} levels.")
        for item in value if kind is list else value.values():
            if type(item) is not float:
                check_plain(item, depth - 1)
        if kind is dict and {*map(type, value)} - {str}:
            raise RecordError("Free-form data in a payload has names that are not text.")
    elif kind is str:
        if len(value) > TEXT_CHARACTERS:
            raise RecordError(f"A text in a payload has {len(value)} characters, {TEXT_CHARACTERS} are the limit.")
    elif not (value is None or kind is bool or kind is int or kind is float):
        raise RecordError(f"Free-form data in a payload holds a {kind.__name__}.")
