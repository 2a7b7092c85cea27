# SPDX-License-Identifier: Apache-2.0
"""Reads the sketches of clients' updates."""

from __future__ import annotations

from fedvitals.store.read.reader import Reader


def rounds_with_sketches(reader: Reader, run: str, most: int) -> list[int]:
    """Return the newest rounds, ascending and at most `most`, with sketches of the run's newest version."""
    rows = reader.database.rows(
        "SELECT r.round FROM run_round AS r WHERE r.run = ? AND EXISTS (SELECT 1 FROM sketch AS s WHERE s.run = r.run "
        "AND s.round = r.round AND s.version = ?) ORDER BY r.round DESC LIMIT ?",
        (reader.names.number(run) or 0, newest_version(reader, run), most),
    )
    return [row[0] for row in reversed(rows)]


def newest_version(reader: Reader, run: str) -> int:
    """Return the version of the sketches of the run's last round: a run may continue after an upgrade of fedvitals."""
    rows = reader.database.rows(
        "SELECT version FROM sketch WHERE run = ? ORDER BY round DESC, arrival DESC LIMIT 1",
        (reader.names.number(run) or 0,),
    )
    return int(rows[0][0]) if rows else 1


def sketches_of_round(reader: Reader, run: str, round_index: int) -> dict[str, bytes]:
    """Return each node's newest sketch of a round, of the run's newest version, as bytes of float32."""
    rows = reader.database.rows(
        'SELECT n.text, s."values" FROM sketch AS s JOIN symbol AS n ON n.id = s.node WHERE s.run = ? AND s.round = ? '
        "AND s.version = ? ORDER BY s.arrival",
        (reader.names.number(run) or 0, round_index, newest_version(reader, run)),
    )
    return {node: bytes(numbers) for node, numbers in rows if numbers}


def sketch_count(reader: Reader, run: str, round_index: int) -> object:
    """Return a value that changes when a sketch of that round arrives."""
    return reader.database.rows(
        "SELECT COUNT(*), MAX(arrival) FROM sketch WHERE run = ? AND round = ?",
        (reader.names.number(run) or 0, round_index),
    )[0]
