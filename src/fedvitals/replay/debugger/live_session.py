# SPDX-License-Identifier: Apache-2.0
"""Debug a run while it trains: after each round it waits at its gate until the breakpoints have been checked.

    with LiveSession("runs.db", "digits", Breakpoints("accuracy drops by 3 points")) as live:
        hit = live.wait_for_hit()
        ...                            # the run waits: look at it
        live.resume()

Breakpoints are checked on what is stored. A run on Flower is never held up: a hit is reported, and the round can be
replayed. If this process dies, the run goes on by itself.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Self

from fedvitals.errors import ConfigError, FedvitalsError
from fedvitals.records import Finding
from fedvitals.replay.debugger.breakpoints import Breakpoints, Hit
from fedvitals.replay.debugger.round_gate import RENEWAL_SECONDS, GateHandle, is_process
from fedvitals.store import Reader, Target, open_reader, store_target
from fedvitals.store.lock import writer_of
from fedvitals.store.read.queries import find_run, get_run, records, summary_of
from fedvitals.store.tapes import tape_folder

if TYPE_CHECKING:
    from fedvitals.replay.debugger.session import Session

ROUND_COMPLETE = "time.round"  # the monitor's last record of a round
GATE_POLL_SECONDS = 0.05  # seconds between two looks at the gate
STORE_POLL_SECONDS = 0.5  # between two questions to the store
STORE_WAIT_SECONDS = 30.0  # for a round to come into the store, that the run says is over
SETTLE_SECONDS = 2.0  # after which a round that nobody held has its findings, too
SILENT_SECONDS = 60.0  # without a word from a run, and with nobody who writes
HOSTS_NEVER_HELD = ("flower",)


class LiveSession:
    """A session attached to one running run. `tell` is called with every hit, also of watchpoints, on a thread of
    its own.
    """

    def __init__(
        self,
        store: Target,
        run: str,
        breakpoints: Breakpoints | None = None,
        *,
        tell: Callable[[Hit], None] | None = None,
    ) -> None:
        self.breakpoints = Breakpoints() if breakpoints is None else breakpoints
        self.hits: list[Hit] = []  # all so far
        self.error: Exception | None = None  # why it no longer looks
        self._store, self._tell = store, tell
        self._trainer = _writer(store)
        with open_reader(store) as reader:
            described = get_run(reader, find_run(reader, run))
            last = described.started + (summary_of(reader, described.id).seconds or 0.0)
        silent = self._trainer is None and time.time() - last > SILENT_SECONDS
        if described.finished is not None or silent:
            how = "was broken off" if described.finished is None else "has ended"
            raise ConfigError(f"The run {described.id} {how}: replay it, with  fedvitals replay {described.id}")
        self.run, self.holds = described.id, described.host not in HOSTS_NEVER_HELD
        folder = tape_folder(store, self.run)
        if self.holds and not (folder / "tape.json").exists():
            raise ConfigError(
                f"The run {self.run} has no tape ({folder} is not there), and cannot be held up. "
                "In Python:  fv.Monitor(..., tape=fv.Tape())."
            )
        self._handle = GateHandle(folder)
        self._turn = threading.Condition()
        self._stop = threading.Event()
        self._paused: int | None = None
        self._ended = self._pausing = False
        self._stopping: deque[Hit] = deque()  # those that nobody has waited for yet
        self._seen: dict[int, float] = {}  # rounds of which the store has everything, and since when we know
        self._checked: set[int] = set()
        self._knew: set[int] = set()  # the points that there were when it was checked
        self._hit: dict[int, set[int]] = {}  # the newest round that was checked, and which were hit in it
        self._asked = 0.0
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        with open_reader(self._store) as reader:  # what was before is for a replay
            self._checked = set(reader.history(self.run).series(ROUND_COMPLETE, None)[0])
        work = [self._look]
        if self.holds:
            self._handle.claim()
            work.append(self._beat)
        self._threads = [threading.Thread(target=each, name="fedvitals-live", daemon=True) for each in work]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Detach; the run goes on, unwatched."""
        self._stop.set()
        for thread in self._threads:
            if thread is not threading.current_thread():  # of `tell`
                thread.join()
        self._threads = []
        if self.holds:
            with contextlib.suppress(OSError):
                self._handle.release()

    # -- what a person does -------------------------------------------------------------------------------------------

    @property
    def paused(self) -> int | None:
        """Return the round after which the run is held now; None if it is not held."""
        return self._paused

    @property
    def ended(self) -> bool:
        """Return whether the run, or its process, has ended."""
        return self._ended

    def wait_for_hit(self, timeout: float | None = None) -> Hit | None:
        """Return the next hit of a breakpoint; None on timeout or at the end of the run. Raises the error that ended
        watching.
        """
        with self._turn:
            self._turn.wait_for(lambda: self._stopping or self._ended or self._stop.is_set(), timeout)
            if self._stopping:
                return self._stopping.popleft()
            if self.error is not None:
                raise self.error
            return None

    def resume(self) -> None:
        """Let the run go on to the next hit."""
        with self._turn:
            self._pausing = False
            self._go_on()

    def step(self) -> None:
        """Let the run do one more round, then hold it again."""
        with self._turn:
            self._check_holds()
            self._pausing = True
            self._go_on()

    def pause(self) -> None:
        """Hold the run after its current round."""
        with self._turn:
            self._check_holds()
            self._pausing = True

    def _check_holds(self) -> None:
        if not self.holds:
            raise ConfigError(f"The run {self.run} is on Flower, and is never held up: replay the round instead.")

    def _go_on(self) -> None:
        round_index, self._paused = self._paused, None
        if round_index is not None:
            self._stopping.clear()  # a user who resumes the run knows why it stopped
            self._handle.renew(go=round_index)

    # -- the threads --------------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        """Renew the claim, whatever the other thread is busy with."""
        while not self._stop.wait(RENEWAL_SECONDS):
            try:
                self._handle.renew()
            except (OSError, FedvitalsError) as error:
                self._give_up(error)

    def _look(self) -> None:
        try:
            with open_reader(self._store) as reader:
                while not self._stop.wait(GATE_POLL_SECONDS):
                    self._at_gate(reader)
                    if time.monotonic() - self._asked > STORE_POLL_SECONDS:
                        self._in_store(reader)
        except Exception as error:  # noqa: BLE001 - whatever it is: the run must not wait for us
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        with self._turn:
            self.error = self.error or error
            self._stop.set()
            self._turn.notify_all()
        if self.holds:
            with contextlib.suppress(OSError):
                self._handle.release()

    def _at_gate(self, reader: Reader) -> None:
        round_index = self._handle.waiting() if self.holds else None
        if round_index is None:
            if self._handle.go >= 0 and self.holds:
                self._handle.renew(go=-1)  # a run that goes on from an earlier round waits there again
            if self._paused is not None and not self._handle.stands():
                with self._turn:
                    self._paused = None  # it did not want to wait any longer
            return
        if round_index == self._paused or round_index <= self._handle.go:
            return
        late = [r for r in self._complete(reader, round_index) if r < round_index]
        hits = [hit for each in (*late, round_index) for hit in self._check(reader, each)]
        with self._turn:
            if self._pausing and not any(hit.stops for hit in hits):
                hits.append(Hit(0, round_index, "pause", "held, as asked"))
            if any(hit.stops for hit in hits):
                self._paused, self._pausing = round_index, False
            else:
                self._handle.renew(go=round_index)
        self._announce(hits)

    def _complete(self, reader: Reader, round_index: int | None = None) -> list[int]:
        """Return the rounds that are completely stored and not checked yet.

        A run has written all of a round before it waits after it; but a store may be slow, or on another machine.
        """
        deadline, history = time.monotonic() + STORE_WAIT_SECONDS, reader.history(self.run)
        while True:
            stored = history.series(ROUND_COMPLETE, None)[0]
            if (
                round_index is None
                or round_index in stored
                or time.monotonic() > deadline
                or self._stop.wait(GATE_POLL_SECONDS)
            ):
                return [r for r in stored if r not in self._checked]

    def _in_store(self, reader: Reader) -> None:
        """Check rounds that nobody held, and whether the run has ended."""
        over = self._is_over(reader)
        now = self._asked = time.monotonic()
        complete = self._complete(reader)
        for round_index in complete:
            since = self._seen.setdefault(round_index, now)
            # A run that can be held may be about to wait after its last round.
            passed = round_index != complete[-1] if self.holds else now - since > SETTLE_SECONDS
            if over or passed:
                self._announce(self._check(reader, round_index))
        if over:
            for round_index in tuple(self._hit):
                self._announce(self._check(reader, round_index))
            with self._turn:
                self._ended, self._paused = True, None
                self._turn.notify_all()
            self._stop.set()

    def _is_over(self, reader: Reader) -> bool:
        """Return whether the run has finished or was killed."""
        gone = self._trainer is not None and not is_process(self._trainer)
        return gone or get_run(reader, self.run).finished is not None

    def _check(self, reader: Reader, round_index: int) -> list[Hit]:
        """Return the hits of this round, and again of the one before: a loop may log its accuracy after the round is
        closed.
        """
        history, findings = reader.history(self.run), records(reader, self.run, Finding)
        points = {point.number for point in self.breakpoints}
        later = points - self._knew  # made since the round before was looked at: they are not about it
        rounds = {
            **{each: known | later for each, known in self._hit.items()},
            round_index: self._hit.get(round_index, set()),
        }
        self._knew = points
        hits: list[Hit] = []
        for each, known in rounds.items():
            hits += self.breakpoints.check(history, findings, each, but=known)
        self._hit = {round_index: rounds[round_index] | {hit.number for hit in hits if hit.round == round_index}}
        self._checked.add(round_index)
        return hits

    def _announce(self, hits: list[Hit]) -> None:
        with self._turn:
            self.hits.extend(hits)
            self._stopping.extend([hit for hit in hits if hit.stops][:1])
            self._turn.notify_all()
        for hit in hits if self._tell is not None else ():
            self._tell(hit)  # type: ignore[misc]


def _writer(store: Target) -> int | None:
    """Return the id of the training process, where it is known: it writes the store, a file on this machine."""
    target = store_target(store)
    process_id = None if isinstance(target, str) or sys.platform == "win32" else writer_of(target)
    return process_id if process_id is not None and is_process(process_id) else None


class HeldRun:
    """A session's hold on its run while that trains, taken when first needed and released when the session ends.

    Going forward lets the run train on, and it waits while a person looks.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._live: LiveSession | None = None

    @property
    def goes_on(self) -> bool:
        """Return whether the run has not ended yet."""
        return self._session.described().finished is None

    @property
    def held(self) -> int | None:
        """Return the round after which the run waits for this session; None if it does not wait."""
        return None if self._live is None else self._live.paused

    def attach(self) -> LiveSession:
        """Return the live session, attached on first use. Raises ConfigError if the run has ended."""
        if not self.goes_on:
            raise ConfigError(f"The run {self._session.run.name} has ended: there is nothing to hold up.")
        if self._live is None:
            session = self._session
            self._live = LiveSession(session.store, session.run.id, session.breakpoints)
            self._live.__enter__()
        return self._live

    def close(self) -> None:
        """Release the run, which then goes on."""
        live, self._live = self._live, None
        if live is not None:
            live.close()

    def pause(self, timeout: float | None = None) -> Hit | None:
        """Hold the run after its current round, and wait until it stands."""
        live = self.attach()
        if live.paused is not None:
            return Hit(0, live.paused, "pause", "it is held already")
        live.pause()
        return self._wait(live, timeout)

    def one_more(self) -> Hit | None:
        """Let the run do one more round."""
        live = self.attach()
        live.step()
        return self._wait(live)

    def until_hit(self, timeout: float | None = None) -> Hit | None:
        """Let the run go on to the next breakpoint; None: it has ended, or the time is over."""
        live = self.attach()
        live.resume()
        return self._wait(live, timeout)

    def _wait(self, live: LiveSession, timeout: float | None = None) -> Hit | None:
        hit = live.wait_for_hit(timeout)
        if hit is None and live.ended:
            self.close()
        return hit
