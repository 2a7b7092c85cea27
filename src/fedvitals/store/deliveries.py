# SPDX-License-Identifier: Apache-2.0
"""Records which sequence numbers of each source are stored, as closed intervals, so that nothing is stored twice."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

from fedvitals.measurements import Measurements, Telemetry, run_of
from fedvitals.records import Run
from fedvitals.store.dialect import Database
from fedvitals.store.symbols import Symbols

SOURCES_REMEMBERED = 10_000  # without asking the table; a run with any number of senders must fit into memory


class Intervals:
    """A set of mostly consecutive integers, with the changes since it was last saved."""

    def __init__(self, intervals: Iterable[tuple[int, int]] = ()) -> None:
        pairs = sorted(intervals)
        self._first = [first for first, _ in pairs]
        self._last = [last for _, last in pairs]
        self.changed: dict[int, int | None] = {}  # first → last; None: no interval begins there any more

    def add(self, number: int) -> bool:
        """Add a number. Returns whether it is new."""
        first, last = self._first, self._last
        i = len(last) - 1
        if i >= 0 and number <= last[i]:
            i = bisect_right(first, number) - 1
            if i >= 0 and number <= last[i]:
                return False
        grows_left = i >= 0 and last[i] == number - 1
        grows_right = i + 1 < len(first) and first[i + 1] == number + 1
        if grows_left and grows_right:
            self.changed[first.pop(i + 1)] = None
            last[i] = last.pop(i + 1)
        elif grows_left:
            last[i] = number
        elif grows_right:
            self.changed[first[i + 1]] = None
            i += 1
            first[i] = number
        else:
            i += 1
            first.insert(i, number)
            last.insert(i, number)
        self.changed[first[i]] = last[i]
        return True

    def add_range(self, first: int, last: int) -> bool | None:
        """Add consecutive numbers if all are new. Returns whether they were; None, and adds nothing, if only some are
        new.
        """
        i = bisect_right(self._first, last) - 1  # the last interval that begins at or before the end
        if i >= 0 and self._last[i] >= first:
            return False if self._first[i] <= first and last <= self._last[i] else None
        self.add(first)
        if last > first:
            i = bisect_right(self._first, first) - 1
            start = self._first[i]
            self._last[i] = last
            self.changed[start] = last
            if i + 1 < len(self._first) and self._first[i + 1] == last + 1:  # the next interval begins right after it
                self.changed[self._first.pop(i + 1)] = None
                self._last[i] = self._last.pop(i + 1)
                self.changed[start] = self._last[i]
        return True

    @property
    def count(self) -> int:
        """The number of intervals."""
        return len(self._first)

    def pairs(self) -> list[tuple[int, int]]:
        """Return the intervals as pairs of first and last number."""
        return list(zip(self._first, self._last, strict=True))


def fresh(records: Sequence[Telemetry], intervals: dict[tuple[str, str], Intervals]) -> list[Telemetry]:
    """Return the records that have not been seen before, and add them to `intervals`, which are by run and source.

    A record without a source has no identity and counts as new. So does a Run, which is overwritten. Measurements that
    were partly seen before are returned as the single records that were not.
    """
    new: list[Telemetry] = []
    key, here = ("", ""), Intervals()  # for records without a source
    for record in records:
        if not record.source:
            new.append(record)
            continue
        if key != (run_of(record), record.source):
            key = (run_of(record), record.source)
            here = intervals.setdefault(key, Intervals())
        if isinstance(record, Measurements):
            added = here.add_range(record.sequence, record.sequence + len(record) - 1) if len(record) else False
            if added:
                new.append(record)
            elif added is None:
                new += [single for single in record.records() if here.add(single.sequence)]
        elif here.add(record.sequence) or isinstance(record, Run):
            new.append(record)
    return new


class Delivered:
    """The writer's cached copy of the table `delivered`."""

    def __init__(self, database: Database, symbols: Symbols) -> None:
        self._database = database
        self._symbols = symbols
        self._intervals: dict[tuple[str, str], Intervals] = {}
        self._touched: set[tuple[str, str]] = set()  # by the batch being written

    def fresh(self, records: Sequence[Telemetry]) -> list[Telemetry]:
        """Return the records that are not stored yet, and mark them as stored."""
        self._touched = {(run_of(record), record.source) for record in records}
        for key in self._touched:
            if key not in self._intervals:
                self._intervals[key] = self._load(*key)
        return fresh(records, self._intervals)

    def _load(self, run: str, source: str) -> Intervals:
        sql = "SELECT first, last FROM delivered WHERE run = ? AND source = ?"
        return Intervals((int(a), int(b)) for a, b in self._database.rows(sql, self._key(run, source)))

    def _key(self, run: str, source: str) -> tuple[int, int]:
        return self._symbols.known(run), self._symbols.known(source)

    def save(self) -> None:
        """Write the changes, in the same transaction as the records."""
        for key in self._touched:
            intervals = self._intervals[key]
            if not intervals.changed:
                continue
            place = self._key(*key)
            for first, last in intervals.changed.items():
                if last is None:
                    gone = "DELETE FROM delivered WHERE run = ? AND source = ? AND first = ?"
                    self._database.execute(gone, (*place, first))
                else:
                    self._database.execute(
                        "INSERT INTO delivered (run, source, first, last) VALUES (?, ?, ?, ?) "
                        "ON CONFLICT (run, source, first) DO UPDATE SET last = excluded.last",
                        (*place, first, last),
                    )
            intervals.changed = {}
        for key in [*self._intervals][: max(0, len(self._intervals) - SOURCES_REMEMBERED)]:
            del self._intervals[key]  # read from the table again if more arrives from this source

    def forget(self) -> None:
        """Forget everything known of all sources, after a failed transaction or a write by another process."""
        self._intervals = {}
