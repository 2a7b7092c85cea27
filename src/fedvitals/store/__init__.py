# SPDX-License-Identifier: Apache-2.0
"""Stores records durably, in an SQLite file or a PostgreSQL database, and opens stores for reading."""

from __future__ import annotations

import os
from pathlib import Path

from fedvitals.errors import ConfigError
from fedvitals.store.in_memory import MemoryStore
from fedvitals.store.postgres import SCHEMES, PostgresStore, address_of, read_postgres
from fedvitals.store.read.reader import Reader, read_sqlite
from fedvitals.store.sqlite import SqliteStore

__all__ = [
    "MemoryStore",
    "PostgresStore",
    "Reader",
    "SqliteStore",
    "open_reader",
    "open_store",
    "spill_folder",
    "store_target",
]

DEFAULT = "runs.db"
Target = str | os.PathLike[str] | None


def store_target(target: Target = None) -> Path | str:
    """The store's file, or its address in PostgreSQL.

    The environment variable FEDVITALS_STORE replaces a relative path, so that a cluster can decide where stores go.
    """
    wanted = os.fspath(target) if target is not None else DEFAULT
    setting = os.environ.get("FEDVITALS_STORE")
    if setting and "://" not in wanted and not Path(wanted).expanduser().is_absolute():
        wanted = setting
    if wanted.startswith(SCHEMES):
        return wanted
    if "://" in wanted or wanted in ("", ":memory:"):
        raise ConfigError(
            f"A store is a file or postgresql://..., got '{address_of(wanted).shown}'. Name one, for example 'runs.db'."
        )
    return Path(wanted).expanduser()


def spill_folder(target: Target = None) -> Path:
    """Return the folder where records that the store could not accept wait for the next process."""
    where = store_target(target)
    return address_of(where).folder() if isinstance(where, str) else Path(f"{where}.d")


def open_store(target: Target = None) -> SqliteStore | PostgresStore:
    """Return a sink that stores records. Nothing is opened or created before the first write.

    Args:
        target: A file, or an address `postgresql://...`.

    Returns:
        The store, for `Monitor(sinks=[...])`.
    """
    where = store_target(target)
    return PostgresStore(where) if isinstance(where, str) else SqliteStore(where)


def open_reader(target: Target = None, *, patience: float | None = None) -> Reader:
    """Open a store for reading, next to any writer. Close the reader, or use it in a `with` block; see `queries`.

    `patience`: seconds after which a database server is asked to cancel a statement.
    """
    where = store_target(target)
    return read_postgres(where, patience) if isinstance(where, str) else read_sqlite(where)
