# SPDX-License-Identifier: Apache-2.0
"""Opens a store for repair or deletion, in either database."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from fedvitals.store.dialect import Database
from fedvitals.store.postgres import maintain_postgres
from fedvitals.store.sqlite import maintain_sqlite


@contextlib.contextmanager
def upkeep(where: Path | str) -> Iterator[Database]:
    """Yield a connection that may change the store; a file is closed to every other writer in the meantime."""
    with maintain_postgres(where) if isinstance(where, str) else maintain_sqlite(where) as database:
        yield database


@contextlib.contextmanager
def transaction(database: Database) -> Iterator[None]:
    """Run the block in one transaction, which is undone if it fails."""
    database.execute(database.dialect.begin)
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        database.rollback()
        raise
