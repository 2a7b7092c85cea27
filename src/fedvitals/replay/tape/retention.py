# SPDX-License-Identifier: Apache-2.0
"""Which states and updates of a run are kept whole, and which are removed when space runs out; runs on the tape's
thread.
"""

from __future__ import annotations

import errno
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedvitals.protocols import Message
from fedvitals.records import Finding, Snapshot, Where
from fedvitals.replay.tape.digests import StateDigest, Tensors, bytes_of, state_digest_of, state_digests_of
from fedvitals.replay.tape.journal import ClientReply, RoundEntry, RoundJournal, TapeSettings
from fedvitals.replay.tape.objects import StateFiles

if TYPE_CHECKING:
    from fedvitals.replay.tape.tape import Tape

STATE, UPDATE = "state", "update"
KINDS = {"model": "global"}  # what the store's list calls it
GRACE_ROUNDS = 3  # findings come a little later than the rounds that they speak of


@dataclass
class _OpenRound:
    """A round that is being recorded."""

    number: int
    state: dict[str, StateDigest]
    notes: dict[str, Any]
    came: list[ClientReply] = field(default_factory=list)
    lost: int = 0


class TapeWriter:
    """Writes what the tape hands over, and decides what is kept. `tell` takes events, `file` the records of what is
    kept.
    """

    def __init__(
        self,
        journal: RoundJournal,
        setting: TapeSettings,
        tape: Tape,
        tell: Callable[[str, str, str], None],
        file: Callable[[Snapshot], None],
    ) -> None:
        self.journal, self.setting, self._tape, self._tell, self._file = journal, setting, tape, tell, file
        self.objects = StateFiles(journal.folder / "objects")
        self._open: _OpenRound | None = None
        # By round, kind and name: what is not on disk (yet).
        self._recent: OrderedDict[tuple[int, str, str], tuple[StateDigest, Tensors]] = OrderedDict()
        self._recent_bytes = 0
        self._uses: dict[str, set[tuple[str, int]]] = defaultdict(set)  # digest → (state or update, round)
        self.flagged: set[int] = set()  # rounds that a finding speaks of
        self.suspects: dict[str, tuple[int, int]] = {}  # and the first and the newest round in which they were
        self._stopped = self._thinned = self._optimizers_told = False
        self._bytes = self.objects.bytes
        self._known: list[int] = []  # rounds in the journal
        for entry in journal.entries():
            self._note(entry)

    # -- what the tape hands over -------------------------------------------------------------------------------------

    def describe(self, description: dict[str, Any]) -> None:
        """Store the host's description of the run."""
        self.setting.description, self.setting.host = description, str(description.get("host", self.setting.host))
        self.journal.set(self.setting)

    def begin(self, round_index: int, state: Mapping[str, Tensors], notes: Mapping[str, Any]) -> None:
        """Take in a round's initial state."""
        if round_index <= self._last():
            self.journal.forget_from(round_index)
            self._known = [known for known in self._known if known < round_index]
        marks = state_digests_of(state)
        if not self.setting.layers and "model" in state:
            self.setting.layers = tuple(state["model"])
            self.journal.set(self.setting)
        self._tell_optimizers(state)
        self._open = _OpenRound(round_index, marks, dict(notes))
        whole = self._whole(round_index)
        for name, tensors in state.items():
            if whole:
                self._write(marks[name], tensors, STATE, round_index, name)
            else:
                self._hold(round_index, STATE, name, marks[name], tensors)

    def _tell_optimizers(self, state: Mapping[str, Tensors]) -> None:
        """Report once what it costs that clients keep their optimisers from round to round."""
        kept = [tensors for name, tensors in state.items() if name.startswith("optimizer/")]
        if kept and not self._optimizers_told:
            self._optimizers_told = True
            whole, theirs = bytes_of(*state.values()) / 1e6, bytes_of(*kept) / 1e6
            self._tell(
                "info",
                "tape.optimizers",
                f"Clients keep their optimisers, which are part of each whole state on the tape: {theirs:.1f} of its "
                f"{whole:.1f} MB. Tape(every=...) says how often one is kept.",
            )

    def messages(self, round_index: int, messages: Sequence[Message]) -> None:
        """Take in clients' replies."""
        opened = self._of(round_index)
        for message in messages:
            mark = None if message.tensors is None else state_digest_of(message.tensors)
            if mark is not None and message.tensors is not None:
                if self._wanted(message.node, round_index) or (self._tape.durable and self._tape.updates):
                    self._write(mark, message.tensors, UPDATE, round_index, message.node)
                elif self._tape.updates:
                    self._hold(round_index, UPDATE, message.node, mark, message.tensors)
            opened.came.append(reply_entry_of(message, mark))

    def _wanted(self, node: str, round_index: int) -> bool:
        """Return whether to keep this update: a suspect's first rounds, and later those with a whole state."""
        if node not in self.suspects:
            return False
        return round_index - self.suspects[node][0] < GRACE_ROUNDS or self._whole(round_index)

    def _whole(self, round_index: int) -> bool:
        return (round_index - self._first()) % self._tape.every == 0

    def missed(self, round_index: int, count: int) -> None:
        """Note replies for which there was no room."""
        self._of(round_index).lost += count

    def end(
        self, round_index: int, state: Mapping[str, Tensors], notes: dict[str, Any], metrics: Mapping[str, float]
    ) -> None:
        """Write the round's entry, and remove what is no longer needed."""
        opened, self._open = self._of(round_index), None
        after = state_digests_of(state)
        before, came = (opened.state, opened.notes), tuple(opened.came)
        entry = RoundEntry(round_index, *before, came, after, notes, finite_or_none(metrics), opened.lost)
        self.journal.write(entry)
        self._note(entry)
        for name, tensors in state.items():  # the next round's beginning; the last one's is kept at the close
            self._hold(round_index + 1, STATE, name, after[name], tensors)
        self._let_go(round_index)
        self._thin()

    def findings(self, findings: Sequence[Finding]) -> None:
        """Keep what is around findings: the states in memory, and the suspects' updates."""
        for finding in findings:
            last = self._open.number if self._open is not None else self._last()
            self.flagged.add(last if finding.where.round is None else finding.where.round)
            for suspect in finding.suspects:
                self.suspects[suspect.node] = (self.suspects.get(suspect.node, (last, last))[0], last)
        nodes = {suspect.node for finding in findings for suspect in finding.suspects}
        for key in [*self._recent]:
            round_index, kind, name = key
            if kind == STATE or (name in nodes and self._wanted(name, round_index)):
                mark, tensors = self._recent.pop(key)
                self._recent_bytes -= bytes_of(tensors)
                self._write(mark, tensors, kind, round_index, name)
        healed = [node for node, (_, seen) in self.suspects.items() if self._last() - seen > self._tape.every]
        for node in healed:
            del self.suspects[node]

    def close(self) -> None:
        """Write the last state, and the last rounds' updates with the states that they began from."""
        last = self._last()
        for (round_index, kind, name), (mark, tensors) in [*self._recent.items()]:
            if kind == UPDATE or round_index > last - self._tape.updates:
                self._write(mark, tensors, kind, round_index, name)
        self._recent.clear()
        self._thin()

    def failed(self, error: Exception) -> None:
        """Report that a part of the tape is lost."""
        if not self._stopped:
            self._tell("warning", "tape.failed", f"A part of the tape is lost: {type(error).__name__}: {error}")

    # -- on disk ------------------------------------------------------------------------------------------------------

    def _write(self, mark: StateDigest, tensors: Tensors, kind: str, round_index: int, name: str) -> None:
        """Write a state or update. `name`: of the state, or of the client."""
        if self._stopped:
            return
        for again in (True, False):
            try:
                written = self.objects.put(mark.digest, tensors)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or not again:
                    self._stopped = True
                    text = f"The tape keeps no more states: {error}. Digests go on; the training does, too."
                    self._tell("warning", "tape.stopped", text)
                    return
                self._thin(self._bytes // 2)
            else:
                self._bytes += written
                self._uses[mark.digest].add((kind, round_index))
                node = name if kind == UPDATE else "server"
                kind_word = kind if kind == UPDATE else KINDS.get(name.partition("/")[0], name)
                # After the last round there is no other: its end belongs to it.
                known = round_index if self._open is not None else min(round_index, self._last())
                self._file(Snapshot(Where(self.setting.run, known, node), time.time(), kind_word, mark.digest, written))
                return

    def _thin(self, most: int | None = None) -> None:
        """Reduce the tape to the budget: updates before states, healthy rounds before others, old ones first."""
        limit = self._tape.budget if most is None else most
        if self._bytes <= limit:
            return
        gone = 0
        for digest in self._dispensable():
            if self._bytes <= limit:
                break
            self._bytes -= self.objects.remove(digest)
            self._uses.pop(digest, None)
            gone += 1
        if gone and not self._thinned:
            self._thinned = True
            self._tell("info", "tape.thinned", "The tape is full, and keeps fewer states: oldest healthy rounds go.")

    def _dispensable(self) -> list[str]:
        def rank(digest: str) -> tuple[bool, bool, int]:
            uses = self._uses.get(digest, {("", -1)})
            flagged = any(abs(round_index - near) <= 1 for _, round_index in uses for near in self.flagged)
            newest = max(round_index for _, round_index in uses)
            return flagged, any(kind == STATE for kind, _ in uses), newest

        return sorted(self.objects, key=rank)

    # -- at hand ------------------------------------------------------------------------------------------------------

    def _hold(self, round_index: int, kind: str, name: str, mark: StateDigest, tensors: Tensors) -> None:
        size = bytes_of(tensors)
        if self._recent_bytes + size > self._tape.memory:
            return  # it can be run again
        before = self._recent.pop((round_index, kind, name), None)
        self._recent_bytes += size - (0 if before is None else bytes_of(before[1]))
        self._recent[round_index, kind, name] = (mark, tensors)

    def _let_go(self, round_index: int) -> None:
        for key in [*self._recent]:
            kept = self._tape.updates if key[1] == UPDATE else GRACE_ROUNDS
            if key[0] <= round_index - kept:
                _, tensors = self._recent.pop(key)
                self._recent_bytes -= bytes_of(tensors)
        if self._tape.durable:
            self._forget_updates(round_index - self._tape.updates)

    def _forget_updates(self, last: int) -> None:
        """Remove the updates of one old round, except those of suspects and of rounds with a finding."""
        if last not in self._known:
            return
        for came in self.journal.read(last).came:
            if came.mark is None or came.node in self.suspects or last in self.flagged:
                continue
            uses = self._uses.get(came.mark.digest, set())
            uses.discard((UPDATE, last))
            if not uses:
                self._bytes -= self.objects.remove(came.mark.digest)
                self._uses.pop(came.mark.digest, None)

    # -- what is known ------------------------------------------------------------------------------------------------

    def _note(self, entry: RoundEntry) -> None:
        self._known.append(entry.round)
        for mark in entry.state.values():
            if self.objects.size(mark.digest):
                self._uses[mark.digest].add((STATE, entry.round))
        for came in entry.came:
            if came.mark is not None and self.objects.size(came.mark.digest):
                self._uses[came.mark.digest].add((UPDATE, entry.round))

    def _of(self, round_index: int) -> _OpenRound:
        if self._open is None or self._open.number != round_index:
            self._open = _OpenRound(round_index, {}, {})
        return self._open

    def _first(self) -> int:
        opened = [] if self._open is None else [self._open.number]
        return min([*self._known[:1], *opened], default=0)

    def _last(self) -> int:
        return max(self._known, default=0)


def reply_entry_of(message: Message, mark: StateDigest | None) -> ClientReply:
    """Return a message as it is stored in the journal."""
    losses = b""
    if message.losses is not None and len(message.losses):
        losses = torch.as_tensor(message.losses).to(torch.float32).cpu().numpy().astype("<f4").tobytes()
    return ClientReply(
        message.node,
        mark,
        float(message.weight),
        message.used,
        message.group,
        message.start,
        losses,
        message.error,
        dict(message.notes or {}),
    )


def losses_of(came: ClientReply) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the loss of each local step, to the last bit."""
    return np.frombuffer(came.losses, dtype="<f4")


def finite_or_none(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Return the metrics with None for values that are not finite, because JSON has no NaN."""
    return {name: float(value) if np.isfinite(value) else None for name, value in metrics.items()}
