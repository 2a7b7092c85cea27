# SPDX-License-Identifier: Apache-2.0
"""Records at rest: one file that a training writes and anyone may read meanwhile."""

from __future__ import annotations

import os
from pathlib import Path

from fedvitals.errors import ConfigError, StoreError
from fedvitals.store.memory import MemoryStore
from fedvitals.store.reader import Reader, read_sqlite
from fedvitals.store.sqlite import SqliteStore

__all__ = ["MemoryStore", "Reader", "SqliteStore", "open_reader", "open_store", "store_path"]

DEFAULT = "runs.db"


def store_path(target: str | os.PathLike[str] | None = None) -> Path:
    """The store's file. FEDVITALS_STORE wins over a relative path, so that a cluster can say where stores go."""
    wanted = os.fspath(target) if target is not None else DEFAULT
    setting = os.environ.get("FEDVITALS_STORE")
    if setting and "://" not in wanted and not Path(wanted).expanduser().is_absolute():
        wanted = setting
    if wanted.startswith(("postgresql://", "postgres://")):
        raise StoreError(f"The store '{wanted}' is in PostgreSQL, which this fedvitals cannot use yet. Name a file.")
    if "://" in wanted or wanted in ("", ":memory:"):
        raise ConfigError(f"A store is a file, got '{wanted}'. Name one, for example 'runs.db'.")
    return Path(wanted).expanduser()


def open_store(target: str | os.PathLike[str] | None = None) -> SqliteStore:
    """A sink that keeps what it is given. Nothing is opened or made before the first write."""
    return SqliteStore(store_path(target))


def open_reader(target: str | os.PathLike[str] | None = None) -> Reader:
    """A reader of a store, beside any writer; `queries` has what can be asked of it. Close it, or use it in `with`."""
    return read_sqlite(store_path(target))
