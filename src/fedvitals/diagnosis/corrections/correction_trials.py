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

from fedvitals.diagnosis.corrections.catalog import (
    CLIENT_KINDS,
    CUMULATIVE_KINDS,
    ONE_ROUND_KINDS,
    corrections_for,
    finding_label,
    suspect_of,
)
from fedvitals.diagnosis.corrections.model_trend import ModelTrend, log_losses, model_trend_of
from fedvitals.diagnosis.corrections.outcome import FEWEST, LossTrend, judge_correction, loss_trend_of
from fedvitals.diagnosis.corrections.policy import CorrectionPolicy
from fedvitals.protocols import History, Node
from fedvitals.records import Action, Finding, Where

FORGOTTEN = 20  # rounds after which a correction that did not help may be tried again
HALVED = 0.7  # of the log loss: a run that has learnt as much as that does not need larger steps
MOST_AWAY = 0.4  # share of the clients that may be shut out
BEGINNING = -(2**31)
FIRST_MODEL = -1  # its checkpoint: as before round 0
LONGEST_TRIAL = 4  # times the rounds of a trial, where the loss is told so rarely that nothing can be said earlier


@dataclass(slots=True)
class ActiveCorrection:
    """An action in force, and what it takes to judge it."""

    action: Action
    finding: Finding
    began: int  # the first round under it
    before: LossTrend
    term: int
    restored: float | None = None  # loss of the checkpoint that it began from
    last_seen: int = 0  # the newest round with the finding
    kept: bool = False
    kept_since: int = 0  # the round from which it is kept
    trend_since: int = BEGINNING  # where the path of the loss began before it

    @property
    def raises(self) -> bool:
        """Whether it makes steps larger: what is kept of such a kind stays under watch."""
        return float(self.action.arguments.get("factor", 0.0)) > 1

    @property
    def number(self) -> str:
        return str(self.action.arguments["id"])


class CorrectionTrials:
    """`emit` takes the actions, as records. `history`: of what was measured so far. Both are the caller's."""

    def __init__(
        self, run: str, policy: CorrectionPolicy, emit: Callable[[Action], None], history: Callable[[], History]
    ) -> None:
        self.policy, self._run, self._emit, self._history = policy, run, emit, history
        self._lock = threading.Lock()
        self._new_findings: dict[int, list[Finding]] = {}
        self._suggested: set[tuple[str, str]] = set()
        self._active: dict[str, ActiveCorrection] = {}
        self._failed_in: dict[tuple[str, str], int] = {}  # (finding, kind) → round in which it was found of no use
        self._relapses: dict[str, int] = {}
        self._numbers = itertools.count(1)
        self._trend_since = BEGINNING  # the last restoring: the loss before it is no trend of what came after

    # -- what is told to it -------------------------------------------------------------------------------------------

    def add_finding(self, finding: Finding) -> None:
        """On the detectors' thread. What is only suggested is so at once, and once for each trouble."""
        if self.policy.word(finding.issue) == "off":
            return
        with self._lock:
            self._new_findings.setdefault(finding.where.round or 0, []).append(finding)
        if finding.severity != "note":
            self._suggest(finding)

    def _suggest(self, finding: Finding) -> None:
        for action in corrections_for(finding, self._history()):
            if self.policy.word(finding.issue, action.kind) != "suggest" and action.kind != "advise":
                continue
            if (action.finding, action.kind) not in self._suggested:
                self._suggested.add((action.finding, action.kind))
                self._emit_status(action, "suggested", finding.where.round, why=finding.message)

    def unusable(self, round_index: int, node: Node, issue: str, why: str) -> Action | None:
        """This round's update of a client breaks an exact rule: whether to leave it out. Needs no trial."""
        if self.policy.word(issue, "exclude") != "auto":
            return None
        action = Action(Where(self._run, round_index, node), time.time(), f"{issue} {node}", "exclude", node)
        return self._emit_status(action, "applied", round_index, why=why)

    def refused(self, action: Action, why: str) -> None:
        """The host cannot do it. The next correction of the same finding gets its turn."""
        treatment = self._active.pop(str(action.arguments.get("id")), None)
        self._failed_in[action.finding, action.kind] = action.where.round or 0
        if treatment is not None:
            self._trend_since = treatment.trend_since
        self._emit_status(action, "refused", action.where.round, why=why)

    # -- what is asked of it ------------------------------------------------------------------------------------------

    def prescribed(self, round_index: int) -> Sequence[Action]:
        """All that is in force in the coming round, and which checkpoints are to be kept."""
        history = self._history()
        model_trend = model_trend_of(history)
        with self._lock:
            new_findings = self._new_findings.pop(round_index - 1, [])
            self._new_findings = {
                past_round: findings for past_round, findings in self._new_findings.items() if past_round >= round_index
            }
        once = [
            *self._review(round_index, model_trend, new_findings),
            *self._begin_trials(round_index, model_trend, new_findings, history),
        ]
        wanted = {a.arguments["restore"] for a in once if "restore" in a.arguments}
        first = {FIRST_MODEL} if model_trend.learnt_nothing else set()
        keep = sorted({round_index - 1, *wanted, *first, *self._checkpoints(model_trend, round_index)})
        checkpoint = Action(Where(self._run, round_index), time.time(), "", "checkpoint", None, {"keep": keep})
        return [checkpoint, *once, *(t.action for t in self._active.values() if t.action.kind not in ONE_ROUND_KINDS)]

    def _checkpoints(self, model_trend: ModelTrend, round_index: int) -> set[int]:
        """The best model so far, and those that are gone back to now."""
        best = model_trend.best_round(round_index)
        back = {t.action.arguments.get("restore") for t in self._active.values() if t.began == round_index}
        return {past_round for past_round in (best, *back) if past_round is not None}

    # -- keeping and undoing ------------------------------------------------------------------------------------------

    def _review(self, round_index: int, model_trend: ModelTrend, new_findings: Sequence[Finding]) -> list[Action]:
        labels = {finding_label(finding) for finding in new_findings}
        actions: list[Action] = []
        on_trial = [t for t in self._active.values() if not t.kept]
        for correction in list(self._active.values())[::-1]:
            if correction.action.finding in labels:
                correction.last_seen = round_index - 1
            if not correction.kept:
                of_clients = correction.action.kind in CLIENT_KINDS
                together = [t for t in on_trial if t.action.kind in CLIENT_KINDS] if of_clients else [correction]
                actions += self._judge_trial(correction, together, round_index, model_trend)
            elif correction.action.kind in CLIENT_KINDS and round_index - 1 - correction.last_seen >= correction.term:
                self._end(
                    correction, round_index, model_trend, "Its time is over: admitted again, on probation.", helped=True
                )
            elif correction.raises and model_trend.best_if_worse(round_index, self._trend_since) is not None:
                actions += self._undo(correction, round_index, model_trend, "The loss rose under it, later.")
                break  # the newest first, and then see
        return actions

    def _judge_trial(
        self,
        correction: ActiveCorrection,
        together: Sequence[ActiveCorrection],
        round_index: int,
        model_trend: ModelTrend,
    ) -> list[Action]:
        """Clients shut out one after the other are judged together: each alone may make no difference."""
        first = together[0]
        losses = [
            model_trend.loss[past_round]
            for past_round in sorted(model_trend.loss)
            if first.began <= past_round < round_index
        ]
        verdict = judge_correction(first.before, losses, correction.restored, raising=correction.raises)
        if verdict == "worse" and model_trend.more_accurate(first.began, round_index):
            verdict = "better"  # a few samples got wrong with great certainty, for many got right
        rounds, waited = (
            round_index - together[-1].began,
            round_index - first.began >= LONGEST_TRIAL * self.policy.watch,
        )
        broken = verdict == "worse" and (len(losses) >= 2 or log_losses(losses[-1:])[0] == float("inf"))
        if broken:
            return self._undo(correction, round_index, model_trend, "The loss rose under it.")
        if not waited and (rounds < self.policy.watch or len(losses) < min(FEWEST, self.policy.watch)):
            return []
        if verdict == "better":
            correction.kept, correction.kept_since = True, round_index
            why = "The loss is better than the trend before it."
            correction.action = self._emit_status(
                correction.action, "applied", round_index, why=why, after=model_trend.state(round_index)
            )
            return []
        return self._undo(correction, round_index, model_trend, "The loss is no better than the trend before it.")

    def _undo(self, correction: ActiveCorrection, round_index: int, model_trend: ModelTrend, why: str) -> list[Action]:
        """No longer in force; and where the model is worse than it has been, it is taken back to there."""
        actions = []
        best = model_trend.best_if_worse(round_index, self._trend_since)
        if best is not None:
            arguments = {"restore": best, "id": f"{round_index}-{next(self._numbers)}"}
            restoring = replace(correction.action, kind="roll_back", target=None, arguments=arguments)
            actions = [
                self._emit_status(restoring, "applied", round_index, why=f"Undoing {correction.action.kind}. {why}")
            ]
            self._trend_since = round_index
        self._end(correction, round_index, model_trend, why, helped=False)
        return actions

    def _end(
        self, correction: ActiveCorrection, round_index: int, model_trend: ModelTrend, why: str, *, helped: bool
    ) -> None:
        del self._active[correction.number]
        if not helped:
            self._failed_in[correction.action.finding, correction.action.kind] = round_index
        self._emit_status(correction.action, "undone", round_index, why=why, after=model_trend.state(round_index))

    # -- beginning ----------------------------------------------------------------------------------------------------

    def _begin_trials(
        self,
        round_index: int,
        model_trend: ModelTrend,
        new_findings: Sequence[Finding],
        history: History,
    ) -> list[Action]:
        """New trials: of clients first, since a client may be why the run is ill; of the run one at a time."""
        certain = [f for f in new_findings if f.severity != "note" and f.confidence >= self.policy.confidence]
        actions: list[Action] = []
        for finding in sorted(certain, key=lambda f: (suspect_of(f) is None, -f.confidence)):
            action = self._next_action(finding, history, round_index)
            if action is None:
                continue
            if not model_trend.loss:
                self._refuse(
                    action, round_index, "No loss of the global model is known, so nothing could be judged: log it."
                )
            elif action.kind in CLIENT_KINDS:
                self._try_on_client(action, finding, round_index, model_trend, history)
            elif all(t.kept and round_index - t.kept_since >= self.policy.watch for t in self._active.values()):
                actions += self._try_on_run(action, finding, round_index, model_trend)
        return actions

    def _next_action(self, finding: Finding, history: History, round_index: int) -> Action | None:
        """The first correction that may be tried and has not failed lately."""
        label = finding_label(finding)
        running = [t.action for t in self._active.values()]
        for action in corrections_for(finding, history):
            tried = self._failed_in.get((label, action.kind))
            same = [a for a in running if (a.kind, a.target) == (action.kind, action.target)]
            if action.kind in CLIENT_KINDS and same:
                return None  # it is being treated already, for this or for another finding
            if self.policy.word(finding.issue, action.kind) != "auto" or action.kind in ("advise", "exclude"):
                continue
            if (tried is not None and round_index - tried < FORGOTTEN) or (
                same and action.kind not in CUMULATIVE_KINDS
            ):
                continue
            return action
        return None

    def _try_on_client(
        self,
        action: Action,
        finding: Finding,
        round_index: int,
        model_trend: ModelTrend,
        history: History,
    ) -> None:
        clients = {n for past_round in history.rounds()[-10:] for n in history.latest("update.norm", past_round)}
        quarantined = sum(t.action.kind == "quarantine" for t in self._active.values())
        if action.kind == "quarantine" and quarantined + 1 > max(1.0, MOST_AWAY * len(clients)):
            already = f"{quarantined} of {len(clients)} clients are in quarantine already: no more are shut out."
            self._refuse(action, round_index, already)
            return
        loss_trend = loss_trend_of(model_trend.loss, round_index - 1, self._trend_since)
        if loss_trend.rounds < FEWEST and not math.isinf(loss_trend.level):
            return  # nothing yet to compare with; the finding will come again
        relapses = self._relapses.get(action.finding, 0)
        self._relapses[action.finding] = relapses + 1
        self._start(action, finding, round_index, model_trend, term=self.policy.term * 2**relapses)

    def _try_on_run(self, action: Action, finding: Finding, round_index: int, model_trend: ModelTrend) -> list[Action]:
        loss_trend = loss_trend_of(model_trend.loss, round_index - 1, self._trend_since)
        raising = float(action.arguments.get("factor", 0.0)) > 1
        early = loss_trend.end > float(max(log_losses([*model_trend.loss.values()]))) - HALVED
        if not (loss_trend.too_slow and early if raising else loss_trend.unhealthy):
            return []  # it learns: nothing that is done to all of it could be told from harm
        best = None if raising else model_trend.best_if_worse(round_index, self._trend_since)
        if not raising and loss_trend.rounds >= FEWEST and model_trend.learnt_nothing:
            best = FIRST_MODEL  # all that came after it is of no use
        if action.kind == "roll_back" and best is None:
            return []
        if best is not None:
            action = replace(action, arguments={**action.arguments, "restore": best})
        correction = self._start(action, finding, round_index, model_trend, term=0)
        if best is not None:
            correction.restored = model_trend.loss.get(
                best
            )  # from the first model it must learn: staying as good is not enough
            self._trend_since = round_index
        return [correction.action] if action.kind in ONE_ROUND_KINDS else []

    def _start(
        self, action: Action, finding: Finding, round_index: int, model_trend: ModelTrend, term: int
    ) -> ActiveCorrection:
        numbered = replace(action, arguments={**action.arguments, "id": f"{round_index}-{next(self._numbers)}"})
        announced = self._emit_status(
            numbered, "trial", round_index, why=finding.message, before=model_trend.state(round_index)
        )
        loss_trend = loss_trend_of(model_trend.loss, round_index - 1, self._trend_since)
        correction = ActiveCorrection(
            announced, finding, round_index, loss_trend, term, last_seen=round_index - 1, trend_since=self._trend_since
        )
        self._active[correction.number] = correction
        return correction

    def _refuse(self, action: Action, round_index: int, why: str) -> None:
        """Not begun, and said once."""
        if (action.finding, "refused") not in self._suggested:
            self._suggested.add((action.finding, "refused"))
            self._emit_status(action, "refused", round_index, why=why)

    # -- what is written down -----------------------------------------------------------------------------------------

    def _emit_status(self, action: Action, status: str, round_index: int | None, **more: Any) -> Action:
        """As a record: who, why, before and after. Gives the action as it stands now."""
        arguments = {**action.arguments, "by": "policy", **{k: v for k, v in more.items() if v is not None}}
        where = Where(self._run, round_index, action.target)
        current = replace(action, where=where, at=time.time(), arguments=arguments, status=status)
        self._emit(replace(current))  # a copy: what is emitted gets an identity
        return current
