# SPDX-License-Identifier: Apache-2.0
"""Indexes what is on a run's tape, a few numbers for each round, for the scrubber over all rounds.

A round of a thousand clients has a third of a megabyte of digests. So each is read once, and only in part; what was
read stays valid, since entries never change. What is stored completely does change, as a tape thins itself: it is read
again.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from fedvitals.errors import ConfigError, FedvitalsError, MissingExtraError, StoreError
from fedvitals.store import Target, spill_folder
from fedvitals.store.read.reader import Reader
from fedvitals.store.tapes import tape_folder
from fedvitals.views.memo import remembered

if TYPE_CHECKING:
    from fedvitals.replay.tape.reader import TapeReader

WHOLE, AGAIN, DIGESTS, DAMAGED = "whole", "again", "digests", "damaged"
Keys = np.ndarray[Any, np.dtype[np.uint64]]


class NoTapeError(FedvitalsError):
    """There is nothing to read; `extra`: because a package is missing."""

    def __init__(self, message: str, *, extra: bool = False, damaged: bool = False) -> None:
        super().__init__(message)
        self.extra, self.damaged = extra, damaged


class StateDigest(msgspec.Struct, frozen=True, array_like=True):
    """The digest of a state's mark."""

    digest: str


class Answered(msgspec.Struct, frozen=True):
    """The parts of a client's answer that the index needs."""

    mark: StateDigest | None = None
    used: bool = True


class Noted(msgspec.Struct, frozen=True):
    """The parts of a round's notes that the index needs."""

    actions: Any = None  # corrections in force, as the host wrote them


class EntrySummary(msgspec.Struct, frozen=True):
    """The parts of an Entry that the index needs."""

    state: dict[str, StateDigest] = {}
    notes: Noted = Noted()
    came: list[Answered] = []
    lost: int = 0


@dataclass(frozen=True, slots=True)
class TapedRound:
    """One round; `trouble`: why it cannot be read."""

    round: int
    state: tuple[str, ...] = ()
    updates: Keys = field(default_factory=lambda: np.empty(0, np.uint64))
    answers: int = 0
    failed: int = 0
    left_out: int = 0
    lost: int = 0
    restores: int | None = None  # the round whose model this one restored
    trouble: str | None = None


@dataclass(frozen=True, slots=True)
class RoundCoverage:
    """What can be done with one round now. `since`: the round from which it is rerun; None: it cannot be."""

    kind: str
    since: int | None
    updates: int


def tape_of(store: Target, run: str) -> TapeReader:
    """Open the run's tape; NoTapeError says why there is none."""
    try:
        from fedvitals.replay.tape.reader import open_tape  # noqa: PLC0415 - needs torch

        there = (tape_folder(store, run) / "tape.json").exists()
    except MissingExtraError as error:
        raise NoTapeError(str(error), extra=True) from error
    except ModuleNotFoundError as error:
        missing = MissingExtraError(error.name or "torch", "replay", "Reading a tape")
        raise NoTapeError(str(missing), extra=True) from error
    except (StoreError, OSError) as error:
        raise NoTapeError(str(error)) from error
    if not there:
        raise NoTapeError(f"The run '{run}' has no tape.")
    try:
        return open_tape(store, run)
    except (StoreError, OSError) as error:
        raise NoTapeError(str(error), damaged=True) from error


def sign_of(store: Target, run: str) -> str:
    """Return a value that changes when something is written to the tape or removed; checks folders, not files."""
    folder = spill_folder(store) / "tape" / Path(run).name
    times = [_when(folder / "tape.json"), _when(folder / "rounds"), _when(folder / "objects")]
    times += [_when(folder_of_objects) for folder_of_objects in sorted(folder.glob("objects/??"))]
    return f"{hash(tuple(times)) & 0xFFFFFFFFFFFF:x}"


def _when(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return -1


class Index:
    """The rounds of one tape; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: dict[int, tuple[tuple[int, int], TapedRound]] = {}
        self._sign = ""
        self._coverages: list[RoundCoverage] = []
        self.rows: list[TapedRound] = []

    def look(self, tape: TapeReader, sign: str) -> tuple[list[TapedRound], list[RoundCoverage]]:
        """Return what is on the tape now; only rounds that are new since the last call are read."""
        with self._lock:
            if sign != self._sign:
                self.rows = [self._row(tape, number) for number in tape.rounds]
                self._rows = {row.round: self._rows[row.round] for row in self.rows}
                self._coverages = coverages(self.rows, tape.whole(), from_seed=tape.begins_from_seed)
                self._sign = sign
            return self.rows, self._coverages

    def _row(self, tape: TapeReader, number: int) -> TapedRound:
        state = _state_of(tape.folder / "rounds" / f"{number:08d}")
        known = self._rows.get(number)
        if known is None or known[0] != state:
            known = self._rows[number] = (state, _read(tape, number))
        return known[1]


@dataclass(frozen=True, slots=True)
class Opened:
    """A tape, and the current content of its index."""

    tape: TapeReader
    rows: Sequence[TapedRound]
    coverages: Sequence[RoundCoverage]
    sign: str

    def place(self, number: int) -> int:
        """Return the position of a round among all; ConfigError if it is not on the tape."""
        place = bisect_left(self.rows, number, key=lambda row: row.round)
        if place == len(self.rows) or self.rows[place].round != number:
            ends = f"It has rounds {self.rows[0].round} to {self.rows[-1].round}." if self.rows else "It has none yet."
            raise ConfigError(f"Round {number} is not on the tape. {ends}")
        return place


def opened(reader: Reader, store: Target, run: str) -> Opened:
    """Open a tape with its index, cached between requests; NoTapeError if there is no tape."""
    sign = sign_of(store, run)
    tape = remembered(reader, "tape", run, sign, lambda: tape_of(store, run))
    index = remembered(reader, "tape index", run, str(tape.folder), Index)
    return Opened(tape, *index.look(tape, sign), sign)


def _state_of(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return -1, -1
    return status.st_mtime_ns, status.st_size


def _read(tape: TapeReader, number: int) -> TapedRound:
    try:
        entry = tape.journal.read_as(EntrySummary, number)
        marks = [came.mark for came in entry.came if came.mark is not None]
        return TapedRound(
            number,
            tuple(state.digest for state in entry.state.values()),
            keys_of([mark.digest for mark in marks]),
            len(entry.came),
            len(entry.came) - len(marks),
            sum(came.mark is not None and not came.used for came in entry.came),
            entry.lost,
            _restored(entry.notes.actions),
        )
    except (StoreError, OSError, ValueError, OverflowError) as error:
        return TapedRound(number, trouble=str(error) or type(error).__name__)


def _restored(actions: Any) -> int | None:
    """Return the round that a correction restored."""
    for action in actions if isinstance(actions, list) else ():
        arguments = action.get("arguments") if isinstance(action, dict) else None
        target = arguments.get("restore") if isinstance(arguments, dict) else None
        if isinstance(target, int | float):
            return int(target)
    return None


def keys_of(digests: Sequence[str]) -> Keys:
    """Return the first eight bytes of each digest: half a million take four megabytes instead of forty as texts."""
    if any(len(digest) != 32 for digest in digests):
        raise ValueError("A digest on the tape does not have 32 digits.")
    packed = np.frombuffer(bytes.fromhex("".join(digests)), np.uint64)
    return packed[::2].copy()


def coverages(rows: Sequence[TapedRound], whole: frozenset[str], *, from_seed: bool) -> list[RoundCoverage]:
    """Return for each round whether its state is stored, else from which one it is rerun, and its number of updates.

    Like `TapeReader.coverage`, in one pass.
    """
    there = keys_of([digest for digest in whole if len(digest) == 32])
    restores = [(row.round, row.restores) for row in rows if row.restores is not None]
    since: dict[int, int | None] = {}
    by_round, start = [], None
    for row in rows:
        stored = row.trouble is None and bool(row.state) and all(digest in whole for digest in row.state)
        start = row.round if stored else start
        begin = start if start is not None else 0 if from_seed else None
        since[row.round] = begin = _before_restores(begin, row.round, restores, since)
        kind = DAMAGED if row.trouble is not None else WHOLE if stored else DIGESTS if begin is None else AGAIN
        by_round.append(RoundCoverage(kind, begin, int(np.isin(row.updates, there).sum())))
    return by_round


def _before_restores(
    start: int | None, number: int, restores: Sequence[tuple[int, int]], since: Mapping[int, int | None]
) -> int | None:
    """Return where to start: a round that restored an earlier state requires passing that one again."""
    if start is None:
        return None
    for later, target in restores:
        if start < later <= number and target + 1 < start:
            earlier = since.get(target + 1, start)
            return start if earlier is None else earlier
    return start
