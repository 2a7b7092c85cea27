# SPDX-License-Identifier: Apache-2.0
"""The tape records as little of a run as is needed to run any part of it again, beside the training.

    monitor = fv.Monitor("runs.db", tape=fv.Tape(budget="2 GB"))

For each round it stores which clients took part, with which weight, and a digest of every state and update. Whole
states are kept every few rounds and around findings, whole updates of the last rounds and of suspects; everything in
between is run again.
"""

from __future__ import annotations

import contextlib
import platform
import queue
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import torch

from fedvitals.errors import ConfigError
from fedvitals.protocols import Message, Probe, Schedule, Sink
from fedvitals.records import Finding, Record, Run, Snapshot
from fedvitals.replay.debugger.round_gate import RoundGate
from fedvitals.replay.tape.digests import bytes_of
from fedvitals.replay.tape.gradients import PRIVACY_LEVEL, GradientFolder, GradientTape
from fedvitals.replay.tape.journal import RoundJournal, TapeSettings
from fedvitals.replay.tape.retention import TapeWriter
from fedvitals.schedule import always

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
GATHERED_BYTES = 64 << 20  # bytes of answers that wait for the end of their round
FLUSH_SECONDS = 60.0  # seconds that the end of a run waits for what is still to be written

EmitEvent = Callable[[str, str, str], None]  # level, name, message


class Tape(Sink):
    """Records a run, so that it can be replayed bit for bit; pass it to a `Monitor`. It never stops, slows or changes
    the training.

    Args:
        every: Rounds between two whole states.
        updates: The number of newest rounds of which all updates are kept.
        budget: Bytes on disk, or "2 GB"; beyond it the oldest healthy rounds are thinned first.
        memory: Bytes that may wait to be written.
        durable: Whether updates are written in each round, not only at the end, for clients that cannot be asked
            again.
        folder: Where the tape is kept; by default beside the store.
    """

    name = "tape"
    ignores = tuple(kind for kind in get_args(Record) if kind is not Finding)  # as a sink

    def __init__(
        self,
        *,
        every: int = 5,
        updates: int = 1,
        budget: int | str = "1 GB",
        memory: int | str = "512 MB",
        durable: bool = False,
        folder: str | Path | None = None,
    ) -> None:
        if every < 1 or updates < 0:
            raise ConfigError(f"Tape(every=, updates=) are at least 1 and 0; got {every} and {updates}.")
        self.every, self.updates, self.durable = every, updates, durable
        self.budget, self.memory = byte_count(budget, "budget"), byte_count(memory, "memory")
        self.chosen = None if folder is None else Path(folder)
        self._queue: queue.SimpleQueue[tuple[str, tuple[Any, ...], int] | None] = queue.SimpleQueue()
        self._gathered: list[tuple[str, tuple[Any, ...], int]] = []  # to be handed to the thread
        self._lock = threading.Lock()
        self._waiting = 0  # bytes
        self.lost = 0  # messages that found no room, or failed
        self._keeper: TapeWriter | None = None
        self._thread: threading.Thread | None = None
        self._gate: RoundGate | None = None
        self._place, self._wants_gradients = GradientFolder(), False
        self._tell: EmitEvent = lambda *_: None
        self._settle: Callable[[], object] = lambda: None

    # -- of the monitor -----------------------------------------------------------------------------------------------

    def gradients(
        self, nodes: Collection[str] | None = None, *, rounds: int = 1, steps: Schedule = always
    ) -> tuple[Probe, Schedule]:
        """Return a probe that writes gradients to the tape, and its schedule, for the monitor's list of probes. It
        needs privacy level 4, and does nothing at lower levels.

        Args:
            nodes: The clients; None: all of them.
            rounds: The interval in rounds at which gradients are written; 1: in each round.
            steps: At which steps: a schedule, such as `fv.every(5)`.

        Returns:
            The probe and its schedule.
        """
        if isinstance(nodes, str) or rounds < 1:
            raise ConfigError(f"gradients(nodes=[...], rounds=1 or more); got {nodes!r} and {rounds!r}.")
        probe = GradientTape(self._place, None if nodes is None else tuple(nodes), rounds, steps)
        self._wants_gradients = True
        return probe, probe.wants

    def open(
        self,
        beside: Path,
        run: Run,
        tell: EmitEvent,
        file: Callable[[Snapshot], None] = lambda _: None,
        level: int = 4,
        settle: Callable[[], object] = lambda: None,
    ) -> None:
        """Start recording a run; called by the monitor. A run that is continued is recorded on the same tape.

        Args:
            beside: The folder of the store's large files.
            run: The run that is recorded.
            tell: A function that receives events.
            file: A function that receives a record of each stored state, for the store's list.
            level: The privacy level.
            settle: A function that waits until the store and the detectors have received everything.
        """
        folder = (self.chosen or beside / "tape") / run.id
        kept = {"every": self.every, "updates": self.updates, "budget": self.budget, "durable": self.durable}
        journal = RoundJournal(folder)
        setting = journal.setting() if (folder / "tape.json").exists() else TapeSettings()
        setting.run, setting.name, setting.host, setting.kept = run.id, run.name, run.host, kept
        setting.machine = machine_description()
        self._tell, self._settle = tell, settle
        self._keeper = TapeWriter(journal, setting, self, tell, file)
        self._gate = RoundGate(folder)
        if self._wants_gradients and level < PRIVACY_LEVEL:
            text = f"No gradients are kept: they need Monitor(privacy={PRIVACY_LEVEL}), got {level}."
            tell("warning", "tape.gradients", text)
        elif self._wants_gradients:
            self._place.folder, self._place.budget = str(folder), self.budget
        thread = threading.Thread(target=self._work, name="fedvitals-tape", daemon=True)
        thread.start()  # raises at the system's limit of threads
        self._thread = thread

    @property
    def folder(self) -> Path | None:
        """The folder of the tape; None before it is open."""
        return None if self._keeper is None else self._keeper.journal.folder

    def write(self, records: Sequence[Record], /) -> None:
        """Take records as a sink; only findings matter to the tape.

        Args:
            records: The records that the monitor has produced since the last call.
        """
        findings = [record for record in records if isinstance(record, Finding)]
        if findings:
            self._put("findings", (findings,), 0)

    def flush(self, timeout: float = FLUSH_SECONDS) -> bool:
        """Wait until everything that was handed over is on the tape.

        Args:
            timeout: Seconds to wait at most.

        Returns:
            Whether everything is written.
        """
        done = threading.Event()
        self._put("mark", (done,), 0)
        return self._thread is None or done.wait(timeout)

    def close(self, timeout: float = FLUSH_SECONDS) -> None:
        """Write what is left and end the thread.

        Args:
            timeout: Seconds to wait at most.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return
        with self._lock:
            self._hand_over()
        self._queue.put(None)
        thread.join(timeout)
        if thread.is_alive():
            self._tell("warning", "tape.unfinished", f"The tape was not finished in {timeout:.0f} s: its end is lost.")
        if self._gate is not None:
            self._gate.close()

    # -- the TapeRecorder protocol ------------------------------------------------------------------------------------

    def describe(self, description: Mapping[str, Any]) -> None:
        """Record the host's description of the run.

        Args:
            description: The experiment or the app, as plain values.
        """
        self._put("describe", (dict(description),), 0)

    def begin(self, round_index: int, state: Mapping[str, Mapping[str, Any]], notes: Mapping[str, Any]) -> None:
        """Record the state at the beginning of a round.

        Args:
            round_index: The round.
            state: The tensors of each node, by node and name.
            notes: What else the host needs to run the round again, as plain values.
        """
        if not self._put("begin", (round_index, state, notes), bytes_of(*state.values())):
            self._put("begin", (round_index, {}, notes), 0)

    def messages(self, round_index: int, messages: Sequence[Message]) -> None:
        """Record the replies of clients.

        Args:
            round_index: The round.
            messages: Clients' replies as the server received them, in order.
        """
        size = bytes_of(*(message.tensors for message in messages if message.tensors is not None))
        if not self._put("messages", (round_index, messages), size):
            self._put("missed", (round_index, len(messages)), 0)

    def end(
        self,
        round_index: int,
        state: Mapping[str, Mapping[str, Any]],
        notes: Mapping[str, Any],
        metrics: Mapping[str, float],
    ) -> None:
        """Record the state at the end of a round, and its metrics.

        Args:
            round_index: The round.
            state: The tensors of each node, by node and name.
            notes: What else the host needs, as plain values.
            metrics: The round's metrics, such as its accuracy.
        """
        if not self._put("end", (round_index, state, notes, dict(metrics)), bytes_of(*state.values())):
            self._put("end", (round_index, {}, notes, dict(metrics)), 0)

    def gate(self, round_index: int) -> None:
        """Wait after a round if a debugger session is attached.

        Args:
            round_index: The round that has ended.
        """
        if self._gate is not None and self._gate.asked:
            self.flush()
            self._settle()  # who debugs decides by what is stored and found
            with contextlib.suppress(OSError):
                self._gate.wait(round_index)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _put(self, what: str, arguments: tuple[Any, ...], size: int) -> bool:
        if self._thread is None:
            return False
        with self._lock:
            if size and self._waiting and self._waiting + size > self.memory:
                self.lost += 1
                return False
            self._waiting += size
            self._gathered.append((what, arguments, size))
            if what != "messages" or self._waiting > GATHERED_BYTES:
                self._hand_over()
        return True

    def _hand_over(self) -> None:
        """Pass gathered replies on at the round's end: a thread that wakes for each of them would take the server's
        time.
        """
        for item in self._gathered:
            self._queue.put(item)
        self._gathered.clear()

    def _work(self) -> None:
        assert self._keeper is not None  # noqa: S101 - opened first
        while (item := self._queue.get()) is not None:
            what, arguments, size = item
            try:
                if what == "mark":
                    arguments[0].set()
                else:
                    getattr(self._keeper, what)(*arguments)
            except Exception as error:  # noqa: BLE001 - whatever it is, the training goes on
                self.lost += 1
                self._keeper.failed(error)
            finally:
                del item, arguments  # the tensors go as soon as they can
                with self._lock:
                    self._waiting -= size
        with contextlib.suppress(Exception):
            self._keeper.close()


def byte_count(size: int | str, setting: str) -> int:
    """Return a number of bytes from an integer or a text such as "2 GB". `setting` names it in the error."""
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    with contextlib.suppress(ValueError, KeyError, AttributeError):
        text = str(size).strip().upper()
        unit = next(unit for unit in ("TB", "GB", "MB", "KB", "B", "") if text.endswith(unit))
        count = int(float(text.removesuffix(unit)) * UNITS[unit or "B"])
        if count > 0:
            return count
    raise ConfigError(f"The tape's {setting} is a number of bytes, or a text such as '2 GB'; got {size!r}.")


def machine_description() -> dict[str, str]:
    """Return what the bits of a training may depend on: torch, CPU and system."""
    return {
        "torch": str(torch.__version__),
        "cpu": platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "system": platform.system(),
    }


def other_machine_notes(recorded: Mapping[str, str]) -> list[str]:
    """Return a sentence on what was otherwise where something was recorded; [] if nothing was."""
    here = machine_description()
    other = [f"{name} {was} (here {here.get(name)})" for name, was in recorded.items() if here.get(name) != was]
    return [f"It was recorded with {', '.join(other)}: bits may differ."] if other else []
