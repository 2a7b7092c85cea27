# SPDX-License-Identifier: Apache-2.0
"""Reads what the detectors examined while a run trained, and which clients trained outside of rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedvitals.records import is_client, natural
from fedvitals.store.read import queries
from fedvitals.store.read.reader import Reader

MOST = 100  # clients outside of rounds that are named


@dataclass(frozen=True, slots=True)
class ExaminationRecords:
    """The store's records about the examination of a run."""

    sums: Mapping[str, tuple[float, int, int]]  # metric of rounds → its sum, its first and its last round
    newest: Sequence[float]  # values of the one metric, in the newest rounds
    outside: Sequence[str]  # clients that trained outside of any round; only the first of many
    lost: Sequence[tuple[str, str, float]]  # `monitor.lost` and `monitor.thinned`: name, source, the largest value


def examination_records(reader: Reader, run: str, prefix: str, name: str, count: int) -> ExaminationRecords:
    """Read the metrics of rounds whose names begin with `prefix`, and the newest `count` values of one of them."""
    number = reader.names.number(run) or 0
    rows = reader.database.rows(
        # One statement, because every page of a run asks.
        "SELECT 'sum' AS kind, s.text AS name, SUM(m.value) AS value, MIN(m.round) AS first, "  # noqa: S608 - our own
        "MAX(m.round) AS last "
        "FROM symbol AS s CROSS JOIN metric AS m WHERE s.text LIKE ? AND m.run = ? AND m.name = s.id "
        "AND m.node IS NULL AND m.round IS NOT NULL GROUP BY s.text "
        "UNION ALL SELECT * FROM (SELECT 'newest' AS kind, '' AS name, value, round AS first, round AS last "
        "FROM metric WHERE run = ? AND name = (SELECT id FROM symbol WHERE text = ?) AND node IS NULL "
        "AND round IS NOT NULL ORDER BY round DESC LIMIT ?) AS newest "
        "UNION ALL SELECT * FROM (SELECT DISTINCT 'outside' AS kind, s.text AS name, 0.0 AS value, 0 AS first, "
        "0 AS last FROM metric AS m JOIN symbol AS s ON s.id = m.node WHERE m.run = ? AND m.round IS NULL "
        "AND m.layer IS NULL AND m.name = (SELECT id FROM symbol WHERE text = 'time.client') LIMIT ?) AS outside "
        f"UNION ALL SELECT n.text, s.text, MAX(m.value), 0, 0 {queries.LOSSES} GROUP BY n.text, s.text",
        (f"{prefix}%", number, number, name, count, number, MOST, number),
    )
    return ExaminationRecords(
        {name: (float(value), int(first), int(last)) for kind, name, value, first, last in rows if kind == "sum"},
        [float(value) for kind, _, value, _, _ in rows if kind == "newest"],
        sorted((name for kind, name, *_ in rows if kind == "outside" and is_client(name)), key=natural),
        [(kind, name, value) for kind, name, value, _, _ in rows if kind.startswith("monitor.")],
    )
