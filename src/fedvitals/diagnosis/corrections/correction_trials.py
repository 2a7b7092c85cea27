# SPDX-License-Identifier: Apache-2.0
"""The doctor of one run: hears findings, suggests, prescribes on trial, keeps what helps and undoes what does not.

It changes nothing itself: a host asks before each round what is in force, and applies it. Two rules keep it from
making a healthy run ill. A client is shut out only for a time, and let in at once if the loss rises. The run as a
whole is treated only while it does not learn, and only what beats its own trend is kept.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedvitals.diagnosis.corrections.catalog import ADDING_UP, OF_CLIENTS, ONCE, culprit, proposals, told
from fedvitals.diagnosis.corrections.model_trend import Path, logs, path_of
from fedvitals.diagnosis.corrections.outcome import FEWEST, Trend, judge, trend_of
from fedvitals.diagnosis.corrections.policy import Policy
from fedvitals.protocols import History, Node
from fedvitals.records import Action, Finding, Where

FORGOTTEN = 20  # rounds after which a correction that did not help may be tried again
HALVED = 0.7  # of the log loss: a run that has learnt as much as that does not need larger steps
MOST_AWAY = 0.4  # share of the clients that may be shut out
BEGINNING = -(2**31)
FIRST_MODEL = -1  # its checkpoint: as before round 0
LONGEST_TRIAL = 4  # times the rounds of a trial, where the loss is told so rarely that nothing can be said earlier


@dataclass(slots=True)
class Treatment:
    """An action in force, and what it takes to judge it."""

    action: Action
    finding: Finding
    began: int  # the first round under it
    before: Trend
    term: int
    restored: float | None = None  # loss of the checkpoint that it began from
    heard: int = 0  # the newest round with the finding
    kept: bool = False
    since: int = 0  # the round from which it is kept
    path_since: int = BEGINNING  # where the path of the loss began before it

    @property
    def raises(self) -> bool:
        """Whether it makes steps larger: what is kept of such a kind stays under watch."""
        return float(self.action.arguments.get("factor", 0.0)) > 1

    @property
    def number(self) -> str:
        return str(self.action.arguments["id"])


class Care:
    """`emit` takes the actions, as records. `history`: of what was measured so far. Both are the caller's."""

    def __init__(
        self, run: str, policy: Policy, emit: Callable[[Action], None], history: Callable[[], History]
    ) -> None:
        self.policy, self._run, self._emit, self._history = policy, run, emit, history
        self._lock = threading.Lock()
        self._heard: dict[int, list[Finding]] = {}
        self._suggested: set[tuple[str, str]] = set()
        self._in_force: dict[str, Treatment] = {}
        self._tried: dict[tuple[str, str], int] = {}  # (finding, kind) → round in which it was found of no use
        self._relapses: dict[str, int] = {}
        self._numbers = itertools.count(1)
        self._path_since = BEGINNING  # the last restoring: the loss before it is no trend of what came after

    # -- what is told to it -------------------------------------------------------------------------------------------

    def hear(self, finding: Finding) -> None:
        """On the detectors' thread. What is only suggested is so at once, and once for each trouble."""
        if self.policy.word(finding.issue) == "off":
            return
        with self._lock:
            self._heard.setdefault(finding.where.round or 0, []).append(finding)
        if finding.severity != "note":
            self._suggest(finding)

    def _suggest(self, finding: Finding) -> None:
        for action in proposals(finding, self._history()):
            if self.policy.word(finding.issue, action.kind) != "suggest" and action.kind != "advise":
                continue
            if (action.finding, action.kind) not in self._suggested:
                self._suggested.add((action.finding, action.kind))
                self._say(action, "suggested", finding.where.round, why=finding.message)

    def unusable(self, round_index: int, node: Node, issue: str, why: str) -> Action | None:
        """This round's update of a client breaks an exact rule: whether to leave it out. Needs no trial."""
        if self.policy.word(issue, "exclude") != "auto":
            return None
        action = Action(Where(self._run, round_index, node), time.time(), f"{issue} {node}", "exclude", node)
        return self._say(action, "applied", round_index, why=why)

    def refused(self, action: Action, why: str) -> None:
        """The host cannot do it. The next correction of the same finding gets its turn."""
        treatment = self._in_force.pop(str(action.arguments.get("id")), None)
        self._tried[action.finding, action.kind] = action.where.round or 0
        if treatment is not None:
            self._path_since = treatment.path_since
        self._say(action, "refused", action.where.round, why=why)

    # -- what is asked of it ------------------------------------------------------------------------------------------

    def prescribed(self, round_index: int) -> Sequence[Action]:
        """All that is in force in the coming round, and which checkpoints are to be kept."""
        history = self._history()
        path = path_of(history)
        with self._lock:
            heard = self._heard.pop(round_index - 1, [])
            self._heard = {number: found for number, found in self._heard.items() if number >= round_index}
        once = [*self._review(round_index, path, heard), *self._begin(round_index, path, heard, history)]
        wanted = {a.arguments["restore"] for a in once if "restore" in a.arguments}
        first = {FIRST_MODEL} if path.nothing_learnt else set()
        keep = sorted({round_index - 1, *wanted, *first, *self._checkpoints(path, round_index)})
        checkpoint = Action(Where(self._run, round_index), time.time(), "", "checkpoint", None, {"keep": keep})
        return [checkpoint, *once, *(t.action for t in self._in_force.values() if t.action.kind not in ONCE)]

    def _checkpoints(self, path: Path, round_index: int) -> set[int]:
        """The best model so far, and those that are gone back to now."""
        best = path.best(round_index)
        back = {t.action.arguments.get("restore") for t in self._in_force.values() if t.began == round_index}
        return {number for number in (best, *back) if number is not None}

    # -- keeping and undoing ------------------------------------------------------------------------------------------

    def _review(self, round_index: int, path: Path, heard: Sequence[Finding]) -> list[Action]:
        names = {told(finding) for finding in heard}
        orders: list[Action] = []
        on_trial = [t for t in self._in_force.values() if not t.kept]
        for treatment in list(self._in_force.values())[::-1]:
            if treatment.action.finding in names:
                treatment.heard = round_index - 1
            if not treatment.kept:
                of_clients = treatment.action.kind in OF_CLIENTS
                together = [t for t in on_trial if t.action.kind in OF_CLIENTS] if of_clients else [treatment]
                orders += self._judge(treatment, together, round_index, path)
            elif treatment.action.kind in OF_CLIENTS and round_index - 1 - treatment.heard >= treatment.term:
                self._end(treatment, round_index, path, "Its time is over: admitted again, on probation.", helped=True)
            elif treatment.raises and path.lost(round_index, self._path_since) is not None:
                orders += self._undo(treatment, round_index, path, "The loss rose under it, later.")
                break  # the newest first, and then see
        return orders

    def _judge(
        self,
        treatment: Treatment,
        together: Sequence[Treatment],
        round_index: int,
        path: Path,
    ) -> list[Action]:
        """Clients shut out one after the other are judged together: each alone may make no difference."""
        first = together[0]
        since = [path.loss[number] for number in sorted(path.loss) if first.began <= number < round_index]
        verdict = judge(first.before, since, treatment.restored, raising=treatment.raises)
        if verdict == "worse" and path.more_accurate(first.began, round_index):
            verdict = "better"  # a few samples got wrong with great certainty, for many got right
        rounds, waited = (
            round_index - together[-1].began,
            round_index - first.began >= LONGEST_TRIAL * self.policy.watch,
        )
        broken = verdict == "worse" and (len(since) >= 2 or logs(since[-1:])[0] == float("inf"))
        if broken:
            return self._undo(treatment, round_index, path, "The loss rose under it.")
        if not waited and (rounds < self.policy.watch or len(since) < min(FEWEST, self.policy.watch)):
            return []
        if verdict == "better":
            treatment.kept, treatment.since = True, round_index
            why = "The loss is better than the trend before it."
            treatment.action = self._say(
                treatment.action, "applied", round_index, why=why, after=path.state(round_index)
            )
            return []
        return self._undo(treatment, round_index, path, "The loss is no better than the trend before it.")

    def _undo(self, treatment: Treatment, round_index: int, path: Path, why: str) -> list[Action]:
        """No longer in force; and where the model is worse than it has been, it is taken back to there."""
        orders = []
        best = path.lost(round_index, self._path_since)
        if best is not None:
            arguments = {"restore": best, "id": f"{round_index}-{next(self._numbers)}"}
            restoring = replace(treatment.action, kind="roll_back", target=None, arguments=arguments)
            orders = [self._say(restoring, "applied", round_index, why=f"Undoing {treatment.action.kind}. {why}")]
            self._path_since = round_index
        self._end(treatment, round_index, path, why, helped=False)
        return orders

    def _end(self, treatment: Treatment, round_index: int, path: Path, why: str, *, helped: bool) -> None:
        del self._in_force[treatment.number]
        if not helped:
            self._tried[treatment.action.finding, treatment.action.kind] = round_index
        self._say(treatment.action, "undone", round_index, why=why, after=path.state(round_index))

    # -- beginning ----------------------------------------------------------------------------------------------------

    def _begin(
        self,
        round_index: int,
        path: Path,
        heard: Sequence[Finding],
        history: History,
    ) -> list[Action]:
        """New trials: of clients first, since a client may be why the run is ill; of the run one at a time."""
        certain = [f for f in heard if f.severity != "note" and f.confidence >= self.policy.confidence]
        orders: list[Action] = []
        for finding in sorted(certain, key=lambda f: (culprit(f) is None, -f.confidence)):
            action = self._next(finding, history, round_index)
            if action is None:
                continue
            if not path.loss:
                self._refuse(
                    action, round_index, "No loss of the global model is known, so nothing could be judged: log it."
                )
            elif action.kind in OF_CLIENTS:
                self._treat_client(action, finding, round_index, path, history)
            elif all(t.kept and round_index - t.since >= self.policy.watch for t in self._in_force.values()):
                orders += self._treat_run(action, finding, round_index, path)
        return orders

    def _next(self, finding: Finding, history: History, round_index: int) -> Action | None:
        """The first correction that may be tried and has not failed lately."""
        name = told(finding)
        running = [t.action for t in self._in_force.values()]
        for action in proposals(finding, history):
            tried = self._tried.get((name, action.kind))
            same = [a for a in running if (a.kind, a.target) == (action.kind, action.target)]
            if action.kind in OF_CLIENTS and same:
                return None  # it is being treated already, for this or for another finding
            if self.policy.word(finding.issue, action.kind) != "auto" or action.kind in ("advise", "exclude"):
                continue
            if (tried is not None and round_index - tried < FORGOTTEN) or (same and action.kind not in ADDING_UP):
                continue
            return action
        return None

    def _treat_client(
        self,
        action: Action,
        finding: Finding,
        round_index: int,
        path: Path,
        history: History,
    ) -> None:
        clients = {n for number in history.rounds()[-10:] for n in history.latest("update.norm", number)}
        away = sum(t.action.kind == "quarantine" for t in self._in_force.values())
        if action.kind == "quarantine" and away + 1 > max(1.0, MOST_AWAY * len(clients)):
            already = f"{away} of {len(clients)} clients are in quarantine already: no more are shut out."
            self._refuse(action, round_index, already)
            return
        trend = trend_of(path.loss, round_index - 1, self._path_since)
        if trend.rounds < FEWEST and not math.isinf(trend.level):
            return  # nothing yet to compare with; the finding will come again
        relapses = self._relapses.get(action.finding, 0)
        self._relapses[action.finding] = relapses + 1
        self._start(action, finding, round_index, path, term=self.policy.term * 2**relapses)

    def _treat_run(self, action: Action, finding: Finding, round_index: int, path: Path) -> list[Action]:
        trend = trend_of(path.loss, round_index - 1, self._path_since)
        raising = float(action.arguments.get("factor", 0.0)) > 1
        early = trend.end > float(max(logs([*path.loss.values()]))) - HALVED
        if not (trend.too_slow and early if raising else trend.ill):
            return []  # it learns: nothing that is done to all of it could be told from harm
        best = None if raising else path.lost(round_index, self._path_since)
        if not raising and trend.rounds >= FEWEST and path.nothing_learnt:
            best = FIRST_MODEL  # all that came after it is of no use
        if action.kind == "roll_back" and best is None:
            return []
        if best is not None:
            action = replace(action, arguments={**action.arguments, "restore": best})
        treatment = self._start(action, finding, round_index, path, term=0)
        if best is not None:
            treatment.restored = path.loss.get(
                best
            )  # from the first model it must learn: staying as good is not enough
            self._path_since = round_index
        return [treatment.action] if action.kind in ONCE else []

    def _start(self, action: Action, finding: Finding, round_index: int, path: Path, term: int) -> Treatment:
        numbered = replace(action, arguments={**action.arguments, "id": f"{round_index}-{next(self._numbers)}"})
        said = self._say(numbered, "trial", round_index, why=finding.message, before=path.state(round_index))
        trend = trend_of(path.loss, round_index - 1, self._path_since)
        treatment = Treatment(
            said, finding, round_index, trend, term, heard=round_index - 1, path_since=self._path_since
        )
        self._in_force[treatment.number] = treatment
        return treatment

    def _refuse(self, action: Action, round_index: int, why: str) -> None:
        """Not begun, and said once."""
        if (action.finding, "refused") not in self._suggested:
            self._suggested.add((action.finding, "refused"))
            self._say(action, "refused", round_index, why=why)

    # -- what is written down -----------------------------------------------------------------------------------------

    def _say(self, action: Action, status: str, round_index: int | None, **more: Any) -> Action:
        """As a record: who, why, before and after. Gives the action as it stands now."""
        arguments = {**action.arguments, "by": "policy", **{k: v for k, v in more.items() if v is not None}}
        where = Where(self._run, round_index, action.target)
        now = replace(action, where=where, at=time.time(), arguments=arguments, status=status)
        self._emit(replace(now))  # a copy: what is emitted gets an identity
        return now
