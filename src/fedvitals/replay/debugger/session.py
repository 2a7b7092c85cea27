# SPDX-License-Identifier: Apache-2.0
"""A debugger session: a place in a recorded run, and everything that can be asked and done from there.

    with fv.open_replay("digits") as r:
        r.goto(12)
        r.into("c7")
        r.step(3)
        print(r.show("gradient conv1"))

A place is a round, optionally a client in it, and one of the client's local steps. The state of a round is the one at
its beginning. What the tape does not have is run again when it is first needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from fedvitals.diagnosis.cases import cases, is_trouble
from fedvitals.errors import ConfigError, unknown
from fedvitals.protocols import History, Replayable
from fedvitals.records import Finding, Run
from fedvitals.replay.debugger import differences, overview
from fedvitals.replay.debugger.breakpoints import Breakpoints, Hit
from fedvitals.replay.debugger.cached_history import CachedHistory
from fedvitals.replay.debugger.conditions import RoundCondition, parse
from fedvitals.replay.debugger.debugger_output import DebuggerOutput, table_output, text_output
from fedvitals.replay.debugger.exporting import export_file
from fedvitals.replay.debugger.live_session import HeldRun
from fedvitals.replay.debugger.printing import print_words
from fedvitals.replay.player import proof
from fedvitals.replay.player.loop_player import LoopPlayer, loop_player
from fedvitals.replay.player.player import Player
from fedvitals.replay.player.states import Progress, ReplayStates
from fedvitals.replay.player.trace import TracedStep
from fedvitals.replay.tape.journal import round_ranges
from fedvitals.replay.tape.reader import TapeReader, open_tape
from fedvitals.store import Reader, Target, open_reader, store_target
from fedvitals.store.read import queries

if TYPE_CHECKING:
    from fedvitals.lab.experiment import Experiment
    from fedvitals.replay.counterfactual.bisect import BisectResult
    from fedvitals.replay.counterfactual.fork import Fork
    from fedvitals.replay.counterfactual.reaggregate import WhatIfResult


def open_replay(
    run: str,
    store: Target = None,
    *,
    experiment: Experiment | None = None,
    data: str | Path | None = None,
    workers: int | None = 1,
    loop: Replayable | str | None = None,
) -> Session:
    """Open a session on a run's tape; use it in a `with` block.

    Args:
        run: An id, the beginning of one, or a name (its newest run).
        store: The store of the run; by default FEDVITALS_STORE, else runs.db here.
        experiment: The experiment, which is needed if parts of it are your own objects.
        data: The folder of its data set, if it has moved.
        workers: Processes that run rounds again.
        loop: For a plain loop, an object with `restore` and `train` (docs/replay.md), or its name, "module:name".

    Returns:
        The session: `goto`, `into`, `step`, `show`, `diff`, `verify`, `whatif`, ...
    """
    reader = open_reader(store)
    try:
        chosen = queries.find_run(reader, run)
        tape = open_tape(store, chosen)
        described = queries.get_run(reader, chosen)
    except BaseException:
        reader.close()
        raise

    def make() -> Player | LoopPlayer:
        if loop is not None:
            return loop_player(tape, loop)
        if tape.setting.host != "lab":
            raise ConfigError(overview.replay_instructions(tape))
        return Player(tape, experiment=experiment, data=data, workers=workers)

    return Session(described, tape, reader, make, store)


class Session:
    """A session; `round`, `node` and `step_number` are its place. `progress` is called for each round that is run
    again.
    """

    def __init__(
        self,
        run: Run,
        tape: TapeReader,
        reader: Reader,
        player: Callable[[], Player | LoopPlayer],
        store: Target = None,
    ) -> None:
        if not tape.rounds:
            raise ConfigError(f"The tape of '{run.name}' has no finished round yet: there is nothing to replay.")
        self.run, self.tape, self.store, self._reader = run, tape, store, reader
        self.progress: Progress = lambda *_: None
        self.states = ReplayStates(tape, player, self._report_progress)
        self.breakpoints, self.running = Breakpoints(), HeldRun(self)
        self.round: int = tape.rounds[0]
        self.node: str | None = None
        self.step_number = 0
        self.last: DebuggerOutput | None = None  # what was shown last
        self.watch_hits: list[Hit] = []  # by watchpoints, when it last ran on

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the run, the player and the store."""
        self.running.close()
        self.states.close()
        self._reader.close()

    def _report_progress(self, round_index: int, first: int, last: int) -> None:
        self.progress(round_index, first, last)

    # -- what there is ------------------------------------------------------------------------------------------------

    @property
    def player(self) -> Any:
        """Return the player that runs rounds again."""
        return self.states.player

    @property
    def history(self) -> History:
        """Return the history of the run."""
        return self._reader.history(self.run.id)

    @property
    def layers(self) -> tuple[str, ...]:
        """Return the names of the model's layers."""
        return self.tape.setting.layers

    @property
    def nodes(self) -> list[str]:
        """Return all clients of the run, as far as the tape knows them."""
        recorded = self.tape.setting.description.get("nodes")
        here = [came.node for came in self.tape.entry(self.round).came]
        return list(dict.fromkeys([*(recorded or ()), *here]))

    def described(self) -> Run:
        """Return the run as it is now; it may end meanwhile."""
        self.run = queries.get_run(self._reader, self.run.id)
        return self.run

    def metric_names(self) -> list[str]:
        """Return the names of the run's metrics."""
        return queries.metric_names(self._reader, self.run.id)

    def findings_until(self, round_index: int | None = None) -> list[Finding]:
        """Return the findings up to a round (default: all)."""
        findings = queries.records(self._reader, self.run.id, Finding)
        if round_index is None:
            return [*findings]
        return [f for f in findings if f.where.round is not None and f.where.round <= round_index]

    def suspects(self, round_index: int) -> list[str]:
        """Return the clients that findings up to a round name."""
        findings = self.findings_until(round_index)
        named = [f.where.node for f in findings] + [suspect.node for f in findings for suspect in f.suspects]
        return [node for node in dict.fromkeys(named) if node in self.nodes]

    def overview(self) -> DebuggerOutput:
        """Show what can be replayed, and how."""
        return self.kept(overview.show_run(self.described(), self.tape, self.findings_until()))

    def rounds(self) -> DebuggerOutput:
        """Show the rounds on the tape."""
        return self.kept(overview.show_rounds(self.tape, self.findings_until(), self.round))

    def clients(self) -> DebuggerOutput:
        """Show the clients of this round."""
        return self.kept(overview.show_clients(self.tape, self.history, self.round))

    def findings(self) -> DebuggerOutput:
        """Show the findings up to the end of this round, worst first, without notes."""
        findings = self.findings_until(self.round)
        attended = queries.attendance(self._reader, self.run.id, {f.where.node for f in findings})
        attended = {who: [r for r in rounds if r <= self.round] for who, rounds in attended.items()}
        rows = [
            (case.severity, case.issue, case.place, case.timeline, case.newest.message)
            for case in cases(findings, attended)
            if is_trouble(case)
        ]
        columns = ("severity", "issue", "where", "since", "what")
        return self.kept(table_output(f"findings up to round {self.round}", columns, rows))

    def how(self, round_index: int) -> str:
        """Return in words how the state of a round is obtained."""
        since = self.tape.nearest(round_index)
        if self.tape.has_state(round_index) or since == round_index:
            return "Read from the tape."
        return "Digests only." if since is None else f"Run again from round {since}."

    # -- where it is --------------------------------------------------------------------------------------------------

    def where(self) -> DebuggerOutput:
        """Show where the session is, and what is there."""
        return self.kept(overview.show_place(self))

    def goto(self, round_index: int) -> DebuggerOutput:
        """Go to the beginning of a round."""
        if round_index not in self.tape.rounds:
            raise ConfigError(f"Round {round_index} is not on the tape. It has: {round_ranges(self.tape.rounds)}.")
        self.round, self.node, self.step_number = round_index, None, 0
        return self.where()

    def next(self) -> DebuggerOutput:
        """Go to the next round; of a run that is held, the one that it trains now."""
        return self._neighbour(1)

    def back(self) -> DebuggerOutput:
        """Go to the previous round."""
        return self._neighbour(-1)

    def _neighbour(self, by: int) -> DebuggerOutput:
        others = [n for n in self.tape.rounds if (n > self.round if by > 0 else n < self.round)]
        if not others and by > 0 and self.running.held is not None:
            self.running.one_more()
            others = [n for n in self.tape.rounds if n > self.round]
        if not others:
            raise ConfigError(f"Round {self.round} is the {'last' if by > 0 else 'first'} one on the tape.")
        return self.goto(others[0] if by > 0 else others[-1])

    def into(self, node: str) -> DebuggerOutput:
        """Go into a client's local training of this round: it is run again, and traced."""
        if node not in self.nodes:
            raise ConfigError(unknown("client", node, self.nodes))
        self.states.trace(self.round, node)
        self.node, self.step_number = node, 0
        return self.where()

    def step(self, count: int = 1) -> DebuggerOutput:
        """Go forward in a client's local training, or back where `count` is negative; it stops at the ends."""
        if self.node is None:
            raise ConfigError("Steps are a client's: go into one first (into c7).  next  goes to the next round.")
        last = len(self.states.trace(self.round, self.node).steps) - 1
        wanted = self.step_number + count
        self.step_number = max(0, min(last, wanted))
        output = self.where()
        if wanted > last:
            text = f"{output.text}\n  That was its last step: it has sent its update (print update; out)."
            return self.kept(text_output(output.title, text, output.note))
        return output

    def out(self) -> DebuggerOutput:
        """Go out of a client, back to its round."""
        if self.node is None:
            raise ConfigError(f"The session is in no client, but at round {self.round}.")
        self.node, self.step_number = None, 0
        return self.where()

    def step_of(self, node: str) -> int:
        """Return the current step of a client; 0 for a client that the session is not in."""
        return self.step_number if node == self.node else 0

    def at(self, node: str) -> TracedStep:
        """Return the client's current step with its tensors; of a client that the session is not in, the first."""
        step_number = self.step_of(node)
        client_trace = self.states.trace(self.round, node, step_number)
        if not client_trace.steps:
            raise ConfigError(
                f"{node} took no step in round {self.round}: {client_trace.error or 'it was asked for none'}."
            )
        return client_trace.steps[step_number]

    def exactness(self, node: str) -> str:
        """Return in words whether a client's traced steps are exactly what happened."""
        exact = self.states.trace(self.round, node, self.step_of(node)).exact
        if exact is None:
            return ""
        return "Bit for bit as recorded." if exact else "Run again, it sent other bits than recorded: see  verify."

    # -- looking ------------------------------------------------------------------------------------------------------

    def show(self, *what: str) -> DebuggerOutput:
        """Show a gradient, weight, update, loss, metric, batch or state; of a layer, client or metric: "update c7"."""
        return self.kept(print_words(self, " ".join(what).split()))

    def diff(self, first: str | int, second: str | int) -> DebuggerOutput:
        """Compare two clients, a client and the «others», or the models at the beginnings of two rounds."""
        if isinstance(first, int) and isinstance(second, int):
            return self.kept(differences.compare_rounds(self, first, second))
        for name in (first, second):
            if name != differences.OTHERS and name not in self.nodes:
                raise ConfigError(unknown("client", str(name), [*self.nodes, differences.OTHERS]))
        return self.kept(differences.compare_clients(self, str(first), str(second)))

    def export(self, path: str | Path, *what: str) -> Path:
        """Export to .safetensors (a state, update, gradient), .csv or .json (what is named, else what was shown
        last).
        """
        return export_file(self, Path(path), " ".join(what).split())

    def kept(self, output: DebuggerOutput) -> DebuggerOutput:
        """Remember an output as the last one shown, and return it."""
        self.last = output
        return output

    # -- stopping -----------------------------------------------------------------------------------------------------

    def break_(self, text: str) -> int:
        """Add a condition at which `run_until` stops, and return its number."""
        return self.breakpoints.add(text, self._checked())

    def watch(self, text: str) -> int:
        """Add a value whose changes `run_until` reports, and return its number."""
        return self.breakpoints.watch(text, self._checked())

    def _checked(self) -> History | None:
        """Return the history that names are checked against; None for a run that goes on, since they may still come."""
        return None if self.running.goes_on else self.history

    def run_until(self, text: str | None = None, *, timeout: float | None = None) -> Hit | None:
        """Go forward to the first round in which a condition holds or a breakpoint is hit; None: to the last round.

        A run that is still training is let go, and held where it is hit (on Flower the hit is only reported).
        `timeout`: in seconds. What watchpoints saw on the way is in `watch_hits`.
        """
        wanted = None if text is None else parse(text)
        goes_on = self.running.goes_on
        if wanted is None and not len(self.breakpoints):
            raise ConfigError("There is no breakpoint yet:  run until accuracy drops by 3 points, or  break any NaN.")
        if wanted is not None and not goes_on:
            wanted.check(self.history)
        if goes_on:
            self.running.attach()  # before the tape is read: no round is missed between the two
        ahead = [round_index for round_index in self.tape.rounds if round_index > self.round]
        if not ahead and not goes_on:
            first = self.tape.rounds[0]
            raise ConfigError(f"Round {self.round} is the last one on the tape: go back first (goto {first}).")
        self.watch_hits = []
        hit = self._first(wanted, ahead)
        if hit is None and goes_on:
            hit = self._on(text, timeout)
        known = self.tape.rounds
        self.goto(hit.round if hit is not None and hit.round in known else known[-1])
        return hit

    def _on(self, text: str | None, timeout: float | None) -> Hit | None:
        breakpoint_number = None if text is None else self.breakpoints.add(text)
        try:
            hit = self.running.until_hit(timeout)
            return replace(hit, number=0) if hit is not None and hit.number == breakpoint_number else hit
        finally:
            if breakpoint_number is not None:
                self.breakpoints.remove(breakpoint_number)

    def _first(self, wanted: RoundCondition | None, rounds: list[int]) -> Hit | None:
        known, findings = CachedHistory(self.history), self.findings_until()
        for round_index in rounds:
            hits = self.breakpoints.check(known, findings, round_index)
            self.watch_hits += [hit for hit in hits if not hit.stops]
            seen = None if wanted is None else wanted.holds(known, findings, round_index)
            if seen is not None:
                return Hit(0, round_index, str(wanted), seen)
            stopping = [hit for hit in hits if hit.stops]
            if stopping:
                return stopping[0]
        return None

    def pause(self, *, timeout: float | None = None) -> DebuggerOutput:
        """Hold a run that is still training after its current round, and go there."""
        hit = self.running.pause(timeout)
        known = self.tape.rounds
        return self.goto(hit.round if hit is not None and hit.round in known else known[-1])

    # -- doing --------------------------------------------------------------------------------------------------------

    def verify(self, first: int | None = None, last: int | None = None, *, node: str | None = None) -> proof.Proof:
        """Run rounds again and compare all digests."""
        numbers = [n for n in self.tape.rounds if (first is None or n >= first) and (last is None or n <= last)]
        if first is not None and last is not None and first > last:
            raise ConfigError(f"The last round, {last}, lies before the first, {first}.")
        if node is not None and numbers:  # else nothing would be compared, and nothing would differ
            asked = {came.node for round_index in numbers for came in self.tape.entry(round_index).came}
            if node not in asked:
                raise ConfigError(
                    f"{unknown('client', node, asked)} These took part in rounds {round_ranges(numbers)}."
                )
        ends = (numbers[0], numbers[-1]) if numbers else (self.round, self.round)
        return proof.verify(self.player, first, last, node=node, progress=lambda r: self.progress(r, *ends))

    def whatif(
        self, text: str | None = None, *, first: int | None = None, last: int | None = None, **change: Any
    ) -> WhatIfResult:
        """Aggregate recorded updates again with a change, from this round to the last: no client trains.

        In words ("drop c7"), or as `whatif(drop=("c7",), clip=1.5)`.
        """
        from fedvitals.replay.counterfactual.change import change_from  # noqa: PLC0415 - what a session seldom needs
        from fedvitals.replay.counterfactual.reaggregate import reaggregate  # noqa: PLC0415

        ends = self.round if first is None else first, self.tape.rounds[-1] if last is None else last
        chosen = change_from(text, **change)
        return reaggregate(self.player, *ends, chosen, progress=lambda r: self.progress(r, *ends))

    def fork(
        self, text: str | None = None, *, until: int | None = None, name: str | None = None, **change: Any
    ) -> Fork:
        """Train on from this round with a change, as a new run in the store."""
        from fedvitals.replay.counterfactual.change import change_from  # noqa: PLC0415
        from fedvitals.replay.counterfactual.fork import fork  # noqa: PLC0415

        last = self.tape.rounds[-1] if until is None else until
        return fork(
            self.player,
            self.round,
            change_from(text, **change),
            store=store_target(self.store),
            until=until,
            name=name,
            progress=lambda round_index, _: self.progress(round_index, self.round, last),
        )

    def bisect(self, good: int, bad: int, until: str | None = None) -> BisectResult:
        """Return the first bad round between two, and the smallest set of clients whose removal restores the good
        metrics.
        """
        from fedvitals.replay.counterfactual.bisect import bisect  # noqa: PLC0415

        condition = None if until is None else parse(until)
        return bisect(self.player, good, bad, until=condition, suspects=self.suspects(bad))
