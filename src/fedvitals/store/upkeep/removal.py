# SPDX-License-Identifier: Apache-2.0
"""Tells readers that rows were removed, so that they drop what they have cached.

Arrival numbers are reused after a deletion (SQLite), so the newest of them does not reveal one.
"""

from __future__ import annotations

import time

from fedvitals.store.dialect import Database


def removals(database: Database) -> object:
    """Return a value that changes when rows are removed."""
    if database.dialect.shared:
        sql = "SELECT pg_relation_filenode('metric'), obj_description('metric'::regclass, 'pg_class')"
        return tuple(database.rows(sql)[0])
    return database.rows("PRAGMA schema_version")[0][0]


def note_removal(database: Database) -> None:
    """Change the value of `removals`, in the transaction that removes."""
    if database.dialect.shared:
        database.execute(f"COMMENT ON TABLE metric IS 'rows were removed at {time.time():.6f}'")
        return
    database.execute("CREATE VIEW removal AS SELECT 1")  # each change of the schema counts
    database.execute("DROP VIEW removal")
