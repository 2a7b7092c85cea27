# SPDX-License-Identifier: Apache-2.0
"""Stores alerts until they are delivered, in a small SQLite file: they survive a crash, and none is sent twice.

A row is «waiting», then «sending», which is written before the first byte leaves; then «sent», «lost», or «doubt» if
the outcome is unknown. A process that dies while sending leaves a row that is in doubt when its lease ends, and that is
not sent again unless the channel asks for it. Its key (alert, channel) stays, so that the same alert is never sent
twice.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from fedvitals.errors import RecordError
from fedvitals.sinks.alerts.message import RESOLVED, Alert, from_line, to_line

WAITING, SENDING, SENT, LOST, DOUBTFUL, SILENT = "waiting", "sending", "sent", "lost", "doubt", "silent"
MOST_WAITING = 10_000  # rows of one channel
KEPT_SECONDS = 30 * 86_400.0  # finished rows, so that nothing is repeated
LEASE_SECONDS = 60.0  # beyond the time limit of one attempt
BUSY_SECONDS = 5.0  # another process may hold the file

_SCHEMA = """
CREATE TABLE IF NOT EXISTS delivery (
  alert TEXT NOT NULL, channel TEXT NOT NULL, run TEXT NOT NULL, rule TEXT NOT NULL, place TEXT NOT NULL,
  onset INTEGER NOT NULL, kind TEXT NOT NULL, state TEXT NOT NULL, attempts INTEGER NOT NULL DEFAULT 0,
  due REAL NOT NULL, made REAL NOT NULL, content TEXT NOT NULL, reason TEXT NOT NULL DEFAULT '',
  bundle TEXT NOT NULL DEFAULT '', -- what went out together goes out together again, under the same key
  PRIMARY KEY (alert, channel)
);
CREATE INDEX IF NOT EXISTS delivery_due ON delivery (channel, state, due);
"""


class Outbox:
    """The rows of one channel. Used by one thread; other processes may have the file open as well."""

    def __init__(self, folder: Path | None, channel: str) -> None:
        self.on_disk = folder is not None
        self._channel = channel
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            # Alerts name clients and runs: only the user may read them.
            with contextlib.suppress(FileExistsError):
                os.close(os.open(path_in(folder), os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        target = ":memory:" if folder is None else str(path_in(folder))
        self._database = sqlite3.connect(target, timeout=BUSY_SECONDS, isolation_level=None)
        self._database.executescript(_SCHEMA)
        self._database.execute(
            "DELETE FROM delivery WHERE state IN (?, ?, ?, ?) AND made < ?",
            (SENT, LOST, DOUBTFUL, SILENT, time.time() - KEPT_SECONDS),
        )

    def add(self, alerts: Sequence[Alert], *, silent: bool = False) -> int:
        """Store alerts to be sent (`silent`: only to be remembered). Returns how many did not fit."""
        refused, now = 0, time.time()
        with self._changing():
            ((free_places,),) = self._database.execute(
                "SELECT ? - COUNT(*) FROM delivery WHERE channel = ? AND state = ?",
                (MOST_WAITING, self._channel, WAITING),
            )
            for alert in alerts:
                if free_places <= 0:
                    refused += 1
                    continue
                row = (alert.id, self._channel, _text(alert.run), alert.rule, alert.place, alert.onset, alert.kind)
                free_places -= self._database.execute(
                    "INSERT OR IGNORE INTO delivery (alert, channel, run, rule, place, onset, kind, state, due, made, "
                    "content) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (*row, SILENT if silent else WAITING, now, now, to_line(alert)),
                ).rowcount
        return refused

    def claim(self, most: int, lease: float, *, everything: bool = False) -> list[Alert]:
        """Return alerts of one run that are due (or all that wait), oldest first, and mark them as being sent."""
        now = time.time()
        with self._changing():
            rows = self._database.execute(
                "SELECT alert, run, bundle, content FROM delivery WHERE channel = ? AND state = ? AND (due <= ? OR ?) "
                "ORDER BY made, rowid LIMIT ?",
                (self._channel, WAITING, now, everything, most),
            ).fetchall()
            mine: list[Alert] = []
            together = os.urandom(8).hex()
            for alert, run, bundle, content in rows:
                if (run, bundle) != rows[0][1:3]:
                    continue
                try:
                    mine.append(from_line(content))
                except RecordError:  # written by something else
                    self._end([alert], LOST, "unreadable")
                    continue
                self._database.execute(
                    "UPDATE delivery SET state = ?, attempts = attempts + 1, due = ?, bundle = ? "
                    "WHERE alert = ? AND channel = ?",
                    (SENDING, now + lease + LEASE_SECONDS, bundle or together, alert, self._channel),
                )
        return mine

    def settle(self, alerts: Sequence[Alert], state: str, reason: str = "") -> None:
        """Record the outcome of claimed alerts: sent, lost, or in doubt."""
        with self._changing():
            self._end([alert.id for alert in alerts], state, reason)

    def postpone(self, alerts: Sequence[Alert], seconds: float, reason: str, *, together: bool) -> None:
        """Let claimed alerts wait again. `together`: they may have arrived, so they are resent under the same key."""
        due = time.time() + seconds
        with self._changing():
            for alert in alerts:
                self._database.execute(
                    "UPDATE delivery SET state = ?, due = ?, reason = ?, bundle = CASE WHEN ? THEN bundle ELSE '' END "
                    "WHERE alert = ? AND channel = ?",
                    (WAITING, due, reason, together, alert.id, self._channel),
                )

    def expire(self, patience: float, *, again: bool) -> tuple[int, int]:
        """Give up alerts that are too old. Returns how many, and how many are in doubt because their sender died."""
        now = time.time()
        with self._changing():
            old = self._database.execute(
                "UPDATE delivery SET state = ?, reason = 'too old' WHERE channel = ? AND state = ? AND made < ?",
                (LOST, self._channel, WAITING, now - patience),
            ).rowcount
            dead = self._database.execute(
                "UPDATE delivery SET state = ?, reason = 'its sender died' WHERE channel = ? AND state = ? AND due < ?",
                (WAITING if again else DOUBTFUL, self._channel, SENDING, now),
            ).rowcount
        return old, 0 if again else dead

    def attempts(self, alerts: Sequence[Alert]) -> int:
        """Return the largest number of attempts among these alerts."""
        asked = ", ".join("?" * len(alerts))
        rows = self._database.execute(
            f"SELECT MAX(attempts) FROM delivery WHERE channel = ? AND alert IN ({asked})",  # noqa: S608 - marks only
            (self._channel, *(alert.id for alert in alerts)),
        ).fetchall()
        return int(rows[0][0] or 0)

    def waiting(self) -> int:
        """Return how many alerts are waiting."""
        ((count,),) = self._database.execute(
            "SELECT COUNT(*) FROM delivery WHERE channel = ? AND state = ?", (self._channel, WAITING)
        )
        return int(count)

    def next_due(self) -> float | None:
        """Return when the next alert is due, in seconds since the epoch; leases of dead senders count."""
        ((due,),) = self._database.execute(
            "SELECT MIN(due) FROM delivery WHERE channel = ? AND state IN (?, ?)", (self._channel, WAITING, SENDING)
        )
        return None if due is None else float(due)

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def _end(self, alerts: Sequence[str], state: str, reason: str) -> None:
        for alert in alerts:
            self._database.execute(
                "UPDATE delivery SET state = ?, reason = ? WHERE alert = ? AND channel = ?",
                (state, reason, alert, self._channel),
            )

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")


def _text(name: str) -> str:
    """Return text that SQLite accepts: without lone surrogates."""
    return name.encode("utf-8", "backslashreplace").decode()


def path_in(folder: Path) -> Path:
    """Return the outbox file in a folder."""
    return folder / "alerts.db"


def open_alerts(folder: Path | None, run: str) -> list[tuple[str, str, int]]:
    """Return the alerts (rule, place, onset) of a run that an earlier process sent and that are still open."""
    if folder is None or not path_in(folder).exists():
        return []
    with contextlib.closing(sqlite3.connect(path_in(folder), timeout=BUSY_SECONDS)) as database:
        rows = database.execute(
            "SELECT rule, place, onset, MAX(kind = ?) FROM delivery WHERE run = ? GROUP BY rule, place, onset",
            (RESOLVED, _text(run)),
        ).fetchall()
    return [(rule, place, onset) for rule, place, onset, over in rows if not over]
