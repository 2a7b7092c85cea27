# SPDX-License-Identifier: Apache-2.0
"""Ways to damage the files of a store, a tape or a spill folder: each takes a folder and a source of chance."""

from __future__ import annotations

import contextlib
import os
import random
import sqlite3
from collections.abc import Callable, Mapping
from pathlib import Path

PAGE = 8192
Damage = Callable[[Path, random.Random], None]
TABLES = ("symbol", "run", "metric", "event", "span", "transfer", "sketch", "finding", "layer", "layer_block",
          "layer_matrix", "run_round", "run_node", "delivered", "mark", "snapshot")  # fmt: skip


def _flip(path: Path, chance: random.Random, low: int = 0, high: int | None = None) -> None:
    """Flip one bit."""
    size = path.stat().st_size if high is None else min(high, path.stat().st_size)
    _change(path, chance.randrange(low, size), lambda old: bytes([old[0] ^ 1 << chance.randrange(8)]), 1)


def _garble(path: Path, chance: random.Random, count: int = 64) -> None:
    """Write noise over a few bytes."""
    _change(path, chance.randrange(path.stat().st_size), lambda old: chance.randbytes(len(old)), count)


def _change(path: Path, place: int, change: Callable[[bytes], bytes], count: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        old = file.read(count)
        file.seek(place)
        file.write(change(old))


def _pages(path: Path) -> int:
    return int.from_bytes(path.read_bytes()[28:32], "big")


def _page(path: Path, number: int) -> bytes:
    with path.open("rb") as file:
        file.seek((number - 1) * PAGE)
        return file.read(PAGE)


def _put(path: Path, number: int, content: bytes) -> None:
    _change(path, (number - 1) * PAGE, lambda _: content, len(content))


def _zero_page(path: Path, chance: random.Random) -> None:
    _put(path, chance.randrange(1, _pages(path) + 1), bytes(PAGE))


def _zero_sector(path: Path, chance: random.Random) -> None:
    _change(path, 512 * chance.randrange(path.stat().st_size // 512), lambda old: bytes(len(old)), 512)


def _swap_pages(path: Path, chance: random.Random) -> None:
    one, two = chance.sample(range(1, _pages(path) + 1), 2)
    first, second = _page(path, one), _page(path, two)
    _put(path, one, second)
    _put(path, two, first)


def _misplace_page(path: Path, chance: random.Random) -> None:
    one, two = chance.sample(range(1, _pages(path) + 1), 2)
    _put(path, one, _page(path, two))


def _cut(path: Path, chance: random.Random) -> None:
    os.truncate(path, chance.randrange(path.stat().st_size))


def _cut_pages(path: Path, chance: random.Random) -> None:
    os.truncate(path, PAGE * chance.randrange(path.stat().st_size // PAGE))


def _append(path: Path, chance: random.Random) -> None:
    with path.open("ab") as file:
        file.write(chance.randbytes(chance.randrange(1, 3 * PAGE)))


def _flip_in_type(kind: int) -> Damage:
    """Flip bits in a page of one type: 2 and 10 of indexes, 5 and 13 of tables, 0 of overflow."""

    def damage(folder: Path, chance: random.Random) -> None:
        path = folder / "runs.db"
        pages = [n for n in range(2, _pages(path) + 1) if _page(path, n)[0] == kind] or [1]
        place = (chance.choice(pages) - 1) * PAGE
        for _ in range(chance.choice((1, 1, 4))):
            _flip(path, chance, place, place + PAGE)

    return damage


def _flip_in_table(folder: Path, chance: random.Random) -> None:
    """Flip a bit in the used part of a page of one table, each table being as likely."""
    path = folder / "runs.db"
    with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?immutable=1", uri=True)) as database:
        roots = dict(database.execute("SELECT name, rootpage FROM sqlite_master WHERE type = 'table'"))
    number = roots[chance.choice([name for name in TABLES if name in roots])]
    while (page := _page(path, number))[0] == 5:
        cells = int.from_bytes(page[3:5], "big")
        at = int.from_bytes(page[12 + 2 * chance.randrange(cells) :][:2], "big")
        number = int.from_bytes(page[at : at + 4], "big")
    content = int.from_bytes(page[5:7], "big") % PAGE
    _flip(path, chance, (number - 1) * PAGE + content, number * PAGE)


def _invalid_name(path: Path, chance: random.Random) -> None:
    """Put a byte that is not valid UTF-8 into a name."""
    content = path.read_bytes()
    names = [b"train.loss", b"gradient", b"train.accuracy", b"server", b"warning"]
    places = [place for name in names if (place := content.find(name)) >= 0]
    _change(path, chance.choice(places) + chance.randrange(4), lambda _: b"\xff", 1)


def _foreign(path: Path, chance: random.Random) -> None:
    """Replace the file with something else."""
    kind = chance.randrange(5)
    path.unlink()
    if kind == 0:
        path.write_bytes(chance.randbytes(20_000))
    elif kind == 1:
        path.write_text("remember the milk\n")
    elif kind == 2:
        path.mkdir()
    elif kind == 3:
        path.write_bytes(b"SQLite format 3\x00" + chance.randbytes(chance.choice((100, 9000))))
    else:
        with contextlib.closing(sqlite3.connect(path)) as database:
            database.execute("CREATE TABLE holiday (day TEXT)")


def _sql(*statements: str) -> Damage:
    """Change the store through SQLite, as another program might."""

    def damage(folder: Path, chance: random.Random) -> None:
        with contextlib.closing(sqlite3.connect(folder / "runs.db", isolation_level=None)) as database:
            database.execute("PRAGMA writable_schema = ON")
            database.execute(chance.choice(statements))

    return damage


def _on(name: str, damage: Damage) -> Damage:
    """Apply a damage to one file of the folder, whose name may contain a star."""

    def damaged(folder: Path, chance: random.Random) -> None:
        files = sorted(file for file in folder.glob(name) if file.is_file() and file.stat().st_size)
        damage(chance.choice(files), chance)

    return damaged


def _remove(path: Path, _: random.Random) -> None:
    path.unlink()


def _swap_files(pattern: str) -> Damage:
    def damage(folder: Path, chance: random.Random) -> None:
        one, two = chance.sample(sorted(folder.glob(pattern)), 2)
        first, second = one.read_bytes(), two.read_bytes()
        one.write_bytes(second)
        two.write_bytes(first)

    return damage


def _swap_frames(path: Path, chance: random.Random) -> None:
    content, size = bytearray(path.read_bytes()), PAGE + 24
    one, two = chance.sample(range((len(content) - 32) // size), 2)
    a, b = 32 + one * size, 32 + two * size
    content[a : a + size], content[b : b + size] = content[b : b + size], content[a : a + size]
    path.write_bytes(bytes(content))


def _foreign_log(path: Path, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[16:24] = chance.randbytes(8)
    path.write_bytes(bytes(content))


def _insert_noise(path: Path, chance: random.Random) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    lines.insert(chance.randrange(len(lines)), chance.randbytes(chance.randrange(1, 200)) + b"\n")
    path.write_bytes(b"".join(lines))


_STORE, _LOG, _INDEX = "runs.db", "runs.db-wal", "runs.db-shm"
_TAPE, _SPILL = "runs.db.d/tape/*", "runs.db.d/spill-*"

AT_REST: Mapping[str, Damage] = {
    "a bit": _on(_STORE, _flip),
    "8 bytes": _on(_STORE, lambda path, chance: _garble(path, chance, 8)),
    "64 bytes": _on(_STORE, _garble),
    "a zeroed page": _on(_STORE, _zero_page),
    "a zeroed sector": _on(_STORE, _zero_sector),
    "two pages swapped": _on(_STORE, _swap_pages),
    "a page in another's place": _on(_STORE, _misplace_page),
    "cut off": _on(_STORE, _cut),
    "cut off at a page": _on(_STORE, _cut_pages),
    "noise behind the end": _on(_STORE, _append),
    "the file's header": _on(_STORE, lambda path, chance: _flip(path, chance, 0, 100)),
    "a table's leaf page": _flip_in_type(13),
    "a table's inner page": _flip_in_type(5),
    "an index's leaf page": _flip_in_type(10),
    "an index's inner page": _flip_in_type(2),
    "an overflow page": _flip_in_type(0),
    "a row of each table": _flip_in_table,
    "the list of tables": _on(_STORE, lambda path, chance: _flip(path, chance, 100, PAGE)),
    "the checksums": _on(_STORE, lambda path, chance: _flip(path, chance, _pages(path) * PAGE)),
    "a name that is no UTF-8": _on(_STORE, _invalid_name),
    "another file in its place": _on(_STORE, _foreign),
}
BY_SQL: Mapping[str, Damage] = {
    "SQL: wrong types": _sql(
        "UPDATE metric SET value = 'much' WHERE arrival = 7",
        "UPDATE metric SET name = 'loss' WHERE arrival = 9",
        "UPDATE run SET started = 'yesterday'",
        "UPDATE run SET name = x'00ff'",
        "UPDATE event SET data = 17",
        "UPDATE finding SET suspects = x'00'",
        "UPDATE finding SET confidence = 'sure'",
        "UPDATE layer_block SET entries = 'many' WHERE arrival = 1",
        "UPDATE layer_matrix SET numbers = 'none'",
        "UPDATE metric SET round = 'first' WHERE arrival = 11",
        "UPDATE sketch SET \"values\" = 'none'",
        "UPDATE delivered SET last = 'all'",
    ),
    "SQL: no UTF-8, no JSON": _sql(
        "UPDATE symbol SET text = CAST(x'ff' || text AS TEXT) WHERE id = 3",
        "UPDATE run SET name = CAST(x'c328' AS TEXT)",
        "UPDATE event SET message = CAST(x'fe' AS TEXT)",
        "UPDATE run SET config = '{'",
        "UPDATE event SET data = '[1,'",
        "UPDATE finding SET evidence = 'x'",
        "UPDATE layer SET shape = 'round'",
    ),
    "SQL: a damaged schema": _sql(
        "UPDATE sqlite_master SET sql = 'CREATE TABLE' WHERE name = 'metric'",
        "UPDATE sqlite_master SET sql = 'CREATE VIEW runs AS SELECT 1' WHERE name = 'runs'",
        "UPDATE sqlite_master SET sql = CAST(x'ff' AS TEXT) WHERE name = 'metrics'",
        "UPDATE sqlite_master SET rootpage = 2 WHERE name = 'event'",
        "UPDATE sqlite_master SET sql = replace(sql, 'value', 'worth') WHERE name = 'metric'",
        "DELETE FROM sqlite_master WHERE name = 'layer_block'",
        "DELETE FROM sqlite_master WHERE name = 'run_by_id' OR name LIKE 'metric_by%'",
        "DELETE FROM sqlite_master WHERE name = 'findings'",
        "DROP TABLE finding",
    ),
}
KILLED: Mapping[str, Damage] = {
    "killed: a bit of the log": _on(_LOG, _flip),
    "killed: 64 bytes of the log": _on(_LOG, _garble),
    "killed: a zeroed sector of the log": _on(_LOG, _zero_sector),
    "killed: the log's header": _on(_LOG, lambda path, chance: _flip(path, chance, 0, 32)),
    "killed: two frames swapped": _on(_LOG, _swap_frames),
    "killed: the log cut off": _on(_LOG, _cut),
    "killed: the log is missing": _on(_LOG, _remove),
    "killed: the log is empty": _on(_LOG, lambda path, _: os.truncate(path, 0)),
    "killed: another log": _on(_LOG, _foreign_log),
    "killed: the log's index is missing": _on(_INDEX, _remove),
    "killed: a bit of the log's index": _on(_INDEX, _flip),
    "killed: noise in the log's index": _on(_INDEX, _garble),
    "killed: the log's index cut off": _on(_INDEX, _cut),
    "killed: a bit of the file": _on(_STORE, _flip),
    "killed: 64 bytes of the file": _on(_STORE, _garble),
    "killed: a zeroed page": _on(_STORE, _zero_page),
    "killed: two pages swapped": _on(_STORE, _swap_pages),
    "killed: the file cut off": _on(_STORE, _cut),
    "killed: the checksums": _on("runs.db.sums", _flip),
    "killed: the checksums are missing": _on("runs.db.sums", _remove),
    "killed: the lock file is missing": _on("runs.db.lock", _remove),
    "killed: a bit of the lock file": _on("runs.db.lock", _flip),
}
TAPE: Mapping[str, Damage] = {
    "tape: a bit of a state": _on(f"{_TAPE}/objects/*/*", _flip),
    "tape: 64 bytes of a state": _on(f"{_TAPE}/objects/*/*", _garble),
    "tape: a state cut off": _on(f"{_TAPE}/objects/*/*", _cut),
    "tape: a state is missing": _on(f"{_TAPE}/objects/*/*", _remove),
    "tape: two states swapped": _swap_files(f"{_TAPE}/objects/*/*"),
    "tape: a bit of a round": _on(f"{_TAPE}/rounds/*", _flip),
    "tape: 64 bytes of a round": _on(f"{_TAPE}/rounds/*", _garble),
    "tape: a round cut off": _on(f"{_TAPE}/rounds/*", _cut),
    "tape: a round is missing": _on(f"{_TAPE}/rounds/*", _remove),
    "tape: two rounds swapped": _swap_files(f"{_TAPE}/rounds/*"),
    "tape: a bit of its settings": _on(f"{_TAPE}/tape.json", _flip),
    "tape: 64 bytes of its settings": _on(f"{_TAPE}/tape.json", _garble),
    "tape: its settings cut off": _on(f"{_TAPE}/tape.json", _cut),
    "tape: a folder or noise in place of a file": _on(f"{_TAPE}/*/*", _foreign),
}
SPILL: Mapping[str, Damage] = {
    "spill: a bit": _on(_SPILL, _flip),
    "spill: 64 bytes": _on(_SPILL, _garble),
    "spill: cut off": _on(_SPILL, _cut),
    "spill: noise between the lines": _on(_SPILL, _insert_noise),
    "spill: zeros": _on(_SPILL, _zero_sector),
    "spill: another file in its place": _on(_SPILL, _foreign),
}
KINDS: Mapping[str, Damage] = {**AT_REST, **BY_SQL, **KILLED, **TAPE, **SPILL}
