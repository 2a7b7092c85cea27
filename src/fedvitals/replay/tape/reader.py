# SPDX-License-Identifier: Apache-2.0
"""Read a tape: rounds, states and updates, and which rounds can still be replayed, and how."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fedvitals.errors import StoreError
from fedvitals.replay.tape.digests import StateDigest, Tensors, bytes_of
from fedvitals.replay.tape.journal import RoundEntry, RoundJournal, TapeSettings, round_ranges
from fedvitals.replay.tape.objects import StateFiles
from fedvitals.replay.tape.unpack_limits import SMALL_ROUND, too_large
from fedvitals.store import Target
from fedvitals.store.tapes import tape_folder


@dataclass(frozen=True, slots=True)
class RoundCoverage:
    """How one round can be replayed. `stored`: its state is on the tape; `since`: the round from which it is run
    again.
    """

    round: int
    stored: bool
    since: int | None  # the nearest earlier whole state; None: there is none
    updates: int  # whole ones on the tape
    answers: int
    trouble: str | None = None  # why the round cannot be read

    @property
    def how(self) -> str:
        """Return in words how the round's state is obtained."""
        if self.trouble is not None:
            return "cannot be read"
        if self.stored:
            return "stored"
        if self.since is None:
            return "digests only"
        return f"run again from round {self.since}" if self.since else "run again from the beginning"


class TapeReader:
    """Reads one run's tape."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.journal, self._objects = RoundJournal(folder), StateFiles(folder / "objects")
        self.setting: TapeSettings = self.journal.setting()
        self._sealed: frozenset[str] = frozenset()
        self._entries: dict[int, tuple[int | None, RoundEntry]] = {}

    @property
    def rounds(self) -> list[int]:
        """Return the rounds on the tape."""
        return self.journal.rounds()

    @property
    def bytes(self) -> int:
        """Return the bytes of the whole tape."""
        return StateFiles(self.folder / "objects").bytes + self.journal.bytes()

    def entry(self, round_index: int) -> RoundEntry:
        """Return a round's entry, cached until its file changes, as it does when a run continues from an earlier
        round.
        """
        written = self.journal.written(round_index)
        if round_index not in self._entries or self._entries[round_index][0] != written:
            self._entries[round_index] = (written, self.journal.read(round_index))
        return self._entries[round_index][1]

    @property
    def begins_from_seed(self) -> bool:
        """Return whether the first state can be recreated without the tape: a lab run that has its first round."""
        return self.setting.host == "lab" and self.rounds[:1] == [0]

    def whole(self) -> frozenset[str]:
        """Return the digests of all states and updates that are stored at this moment."""
        return frozenset(StateFiles(self.folder / "objects"))

    def has(self, digest: str) -> bool:
        """Return whether a state is stored and may be read now."""
        return digest in self._objects and digest not in self._sealed

    def size(self, digest: str) -> int:
        """Return a state's bytes on disk; 0 if it is not there."""
        return self._objects.size(digest)

    def tensors(self, digest: str) -> Tensors:
        """Return a stored state or update by its digest."""
        if digest in self._sealed:
            raise StoreError(f"The state {digest} is under test, and out of reach while it is proved.")
        return self._objects.get(digest)

    def has_state(self, round_index: int) -> bool:
        """Return whether all of a round's initial state is stored; also for the round after the last."""
        return self._stored(self.marks(round_index))

    def state(self, round_index: int) -> dict[str, Tensors]:
        """Return all tensors of a round's initial state. Equal states share their tensors.

        Raises StoreError where together they would unpack to more than is plausible on this tape.
        """
        total, limit = 0, SMALL_ROUND
        state: dict[str, Tensors] = {}
        by_digest: dict[str, Tensors] = {}
        for name, mark in self.marks(round_index).items():
            if mark.digest not in by_digest:
                by_digest[mark.digest] = self.tensors(mark.digest)
            state[name] = by_digest[mark.digest]
            total += bytes_of(state[name])
            if total > limit:
                limit = StateFiles(self.folder / "objects").limit_together()  # a run that still trains adds to them
            if total > limit:
                raise StoreError(f"The state of round {round_index} cannot be read: {too_large(total, limit)}.")
        return state

    def notes(self, round_index: int) -> dict[str, object]:
        """Return the part of a round's initial state that is not tensors."""
        return self.entry(round_index).notes if round_index in self.rounds else self.entry(round_index - 1).after_notes

    def update(self, round_index: int, node: str) -> Tensors | None:
        """Return a client's whole update; None where the tape does not have it."""
        came = self.entry(round_index).reply_of(node)
        if came is None or came.mark is None or not self.has(came.mark.digest):
            return None
        return self.tensors(came.mark.digest)

    def nearest(self, round_index: int) -> int | None:
        """Return the latest round up to this one from whose beginning everything can be run again; None if there is
        none.
        """
        known = [r for r in self.rounds if r <= round_index]
        if round_index - 1 in self.rounds and round_index not in self.rounds and self.has_state(round_index):
            return round_index
        start = next((r for r in reversed(known) if self.has_state(r)), None)
        if start is None:
            return 0 if self.begins_from_seed and known[:1] == [0] else None
        return self._before_restores(start, round_index)

    def start_of(self, round_index: int, advice: str) -> int:
        """Return the round that `nearest` gives. Raises StoreError with the advice if there is none."""
        start = self.nearest(round_index)
        if start is None:
            why = "no whole state before it is on the tape any more"
            raise StoreError(f"Round {round_index} cannot be run again: {why}. {advice}")
        return start

    def coverage(self) -> list[RoundCoverage]:
        """Return for every round how it can be replayed, in one pass; a correction that went back costs a second look.

        A round that cannot be read says why in `trouble`; those after it are run again from the next stored state.
        """
        coverage: list[RoundCoverage] = []
        since = 0 if self.begins_from_seed else None
        back = False
        for round_index in self.journal.rounds():
            try:
                entry = self.journal.read(round_index)
            except StoreError as error:
                since = None
                coverage.append(RoundCoverage(round_index, False, None, 0, 0, trouble=str(error)))
                continue
            stored = self._stored(entry.state)
            since = entry.round if stored else since
            back = back or entry.goes_back
            marks = [came.mark for came in entry.came if came.mark is not None]
            here = sum(self.has(mark.digest) for mark in marks)
            start = self.nearest(entry.round) if back else since
            coverage.append(RoundCoverage(entry.round, stored, start, here, len(entry.came)))
        return coverage

    def _stored(self, marks: Mapping[str, StateDigest]) -> bool:
        return bool(marks) and all(self.has(mark.digest) for mark in marks.values())

    @contextlib.contextmanager
    def sealed(self, first: int, last: int) -> Iterator[None]:
        """Make everything recorded of these rounds unreadable inside the block, except for their digests.

        The beginning of the first round is what a proof may start from; a proof of round 0 starts from the seed.
        """
        from_seed = first == 0 and self.begins_from_seed
        before = set() if from_seed else {mark.digest for mark in self.marks(first).values()}
        within: set[str] = set()
        for round_index in self.rounds:
            if first <= round_index <= last:
                entry = self.entry(round_index)
                within |= {mark.digest for mark in (*entry.state.values(), *entry.after.values())}
                within |= {came.mark.digest for came in entry.came if came.mark is not None}
        self._sealed = frozenset(within - before)
        try:
            yield
        finally:
            self._sealed = frozenset()

    def _before_restores(self, start: int, round_index: int) -> int:
        """Return an earlier start if a later round went back to a state before `start`, which must be passed again."""
        for later in [r for r in self.rounds if start <= r <= round_index]:
            for action in self.entry(later).actions:
                target = action.get("arguments", {}).get("restore")
                if target is not None and later > start and int(target) + 1 < start:
                    earlier = self.nearest(int(target) + 1)
                    return start if earlier is None else earlier
        return start

    def marks(self, round_index: int) -> dict[str, StateDigest]:
        """Return the digests of a round's initial state."""
        rounds = self.rounds
        if round_index in rounds:
            return self.entry(round_index).state
        if round_index - 1 in rounds:
            return self.entry(round_index - 1).after
        raise StoreError(f"Round {round_index} is not on the tape. It has: {round_ranges(rounds)}.")


def open_tape(store: Target, run: str) -> TapeReader:
    """Open the tape of a run. Raises StoreError if it has none."""
    folder = tape_folder(store, run)
    if not (folder / "tape.json").exists():
        raise StoreError(
            f"The run '{run}' has no tape ({folder} is not there). Runs of `fedvitals lab` have one unless they were "
            "started with --no-tape; in Python:  fv.Monitor(..., tape=fv.Tape())."
        )
    return TapeReader(folder)
