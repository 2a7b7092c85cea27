# SPDX-License-Identifier: Apache-2.0
"""Corrections of one run: suggests them, tries them, keeps those that help and undoes the others.

Nothing is changed here: before each round, a host asks which actions are in force and applies them. Two rules keep this
from harming a healthy run. A client is excluded only for a time, and readmitted at once if the loss rises. The run as a
whole is corrected only while it does not learn, and only what beats its own trend is kept.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedvitals.diagnosis.corrections.catalog import (
    CLIENT_KINDS,
    CUMULATIVE_KINDS,
    ONE_ROUND_KINDS,
    corrections_for,
    finding_label,
    suspect_of,
)
from fedvitals.diagnosis.corrections.model_trend import WORSE, ModelTrend, log_losses, model_trend_of
from fedvitals.diagnosis.corrections.policy import CorrectionPolicy
from fedvitals.protocols import History, Node
from fedvitals.records import Action, Finding, Where
from fedvitals.stats import Array

FORGOTTEN = 20  # rounds after which a correction that did not help may be tried again
HALVED = 0.7  # of the log loss: a run that has learnt this much does not need larger steps
MOST_AWAY = 0.4  # share of the clients that may be excluded
BEGINNING = -(2**31)
FIRST_MODEL = -1  # the checkpoint of the model before round 0
LONGEST_TRIAL = 4  # times the rounds of a trial, if losses are logged too rarely to decide earlier


@dataclass(slots=True)
class ActiveCorrection:
    """A correction in force, on trial or kept, and the state needed to judge it."""

    action: Action
    finding: Finding
    began: int  # the first round under it
    before: LossTrend
    term: int
    restored: float | None = None  # loss of the restored checkpoint
    last_seen: int = 0  # the newest round with the finding
    kept: bool = False
    kept_since: int = 0  # the round in which it was kept
    trend_since: int = BEGINNING  # where the trend of the loss began before this correction

    @property
    def raises(self) -> bool:
        """Return whether it makes steps larger; such corrections stay under watch after they are kept."""
        return float(self.action.arguments.get("factor", 0.0)) > 1

    @property
    def number(self) -> str:
        return str(self.action.arguments["id"])


@dataclass
class ComingRound:
    """What is known before a round: the global model's results, and the start of the current trend of its loss."""

    index: int
    model: ModelTrend
    history: History
    trend_since: int

    @property
    def state(self) -> dict[str, Any]:
        """Return round, loss and accuracy of the newest model, for people to read."""
        return self.model.state(self.index)

    @property
    def best_if_worse(self) -> int | None:
        """Return the round of the best model if the newest models are clearly worse, else None."""
        return self.model.best_if_worse(self.index, self.trend_since)

    @property
    def loss_trend(self) -> LossTrend:
        """Return the trend of the loss."""
        return loss_trend_of(self.model.loss, self.index - 1, self.trend_since)


class CorrectionTrials:
    """Decides which corrections of a run are suggested, tried, kept and undone.

    `emit` takes the resulting actions as records; `history` returns the history of what was measured so far.
    """

    def __init__(
        self, run: str, policy: CorrectionPolicy, emit: Callable[[Action], None], history: Callable[[], History]
    ) -> None:
        self.policy, self._run, self._emit, self._history = policy, run, emit, history
        self._lock = threading.Lock()
        self._new_findings: dict[int, list[Finding]] = {}
        self._suggested: set[tuple[str, str]] = set()
        self._active: dict[str, ActiveCorrection] = {}
        self._failed_in: dict[tuple[str, str], int] = {}  # (finding, kind) → round in which it proved useless
        self._relapses: dict[str, int] = {}
        self._numbers = itertools.count(1)
        self._trend_since = BEGINNING  # the last restore; earlier losses do not belong to the trend after it

    # -- input --------------------------------------------------------------------------------------------------------

    def add_finding(self, finding: Finding) -> None:
        """Add a new finding, on the detectors' thread. Suggestions are emitted at once, and once per finding."""
        if self.policy.word(finding.issue) == "off":
            return
        round_index = finding.where.round or 0
        with self._lock:
            # A host may never ask what is prescribed, and one that does only needs the findings of the round before.
            for earlier in [r for r in self._new_findings if r < round_index - 1]:
                del self._new_findings[earlier]
            self._new_findings.setdefault(round_index, []).append(finding)
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
        """Return the action that excludes an update which breaks an exact rule; None if the policy does not allow that.

        No trial is needed, because the rule is exact.
        """
        if self.policy.word(issue, "exclude") != "auto":
            return None
        action = Action(Where(self._run, round_index, node), time.time(), f"{issue} {node}", "exclude", node)
        return self._emit_status(action, "applied", round_index, why=why)

    def refused(self, action: Action, why: str) -> None:
        """Record that the host cannot apply an action, so that the finding's next correction is tried."""
        treatment = self._active.pop(str(action.arguments.get("id")), None)
        self._failed_in[action.finding, action.kind] = action.where.round or 0
        if treatment is not None:
            self._trend_since = treatment.trend_since
        self._emit_status(action, "refused", action.where.round, why=why)

    # -- output -------------------------------------------------------------------------------------------------------

    def prescribed(self, round_index: int) -> Sequence[Action]:
        """Return the actions in force in the coming round, and which checkpoints to keep."""
        history = self._history()
        coming = ComingRound(round_index, model_trend_of(history), history, self._trend_since)
        with self._lock:
            new_findings = self._new_findings.pop(round_index - 1, [])
            self._new_findings = {r: findings for r, findings in self._new_findings.items() if r >= round_index}
        once = self._review(coming, new_findings)
        once += self._begin_trials(coming, new_findings)
        back = {a.arguments.get("restore") for a in once}
        back |= {t.action.arguments.get("restore") for t in self._active.values() if t.began == round_index}
        first = FIRST_MODEL if coming.model.learnt_nothing else None
        wanted = {round_index - 1, coming.model.best_round(round_index), first, *back}
        keep = sorted(past_round for past_round in wanted if past_round is not None)
        checkpoint = Action(Where(self._run, round_index), time.time(), "", "checkpoint", None, {"keep": keep})
        return [checkpoint, *once, *(t.action for t in self._active.values() if t.action.kind not in ONE_ROUND_KINDS)]

    def _restart_trend(self, coming: ComingRound) -> None:
        """Begin a new trend of the loss with the coming round, because it starts from an earlier model."""
        self._trend_since = coming.trend_since = coming.index

    # -- keeping and undoing ------------------------------------------------------------------------------------------

    def _review(self, coming: ComingRound, new_findings: Sequence[Finding]) -> list[Action]:
        labels = {finding_label(finding) for finding in new_findings}
        actions: list[Action] = []
        on_trial = [t for t in self._active.values() if not t.kept]
        for correction in list(self._active.values())[::-1]:
            of_client = correction.action.kind in CLIENT_KINDS
            if correction.action.finding in labels:
                correction.last_seen = coming.index - 1
            if not correction.kept:
                together = [t for t in on_trial if t.action.kind in CLIENT_KINDS] if of_client else [correction]
                actions += self._judge_trial(correction, together, coming)
            elif of_client and coming.index - 1 - correction.last_seen >= correction.term:
                self._end(correction, coming, "Its time is over: admitted again, on probation.", helped=True)
            elif correction.raises and coming.best_if_worse is not None:
                actions += self._undo(correction, coming, "The loss rose under it, later.")
                break  # undo the newest first, then wait for the effect
        return actions

    def _judge_trial(
        self, correction: ActiveCorrection, together: Sequence[ActiveCorrection], coming: ComingRound
    ) -> list[Action]:
        """Keep, undo or continue a trial.

        Clients excluded one after the other are judged together, because each alone may make no difference.
        """
        first, watch = together[0], self.policy.watch
        losses = [loss for r, loss in sorted(coming.model.loss.items()) if first.began <= r < coming.index]
        verdict = judge_correction(first.before, losses, correction.restored, raising=correction.raises)
        if verdict == "worse" and coming.model.more_accurate(first.began, coming.index):
            verdict = "better"  # a few confident mistakes raise the loss while accuracy rises
        rounds, waited = coming.index - together[-1].began, coming.index - first.began >= LONGEST_TRIAL * watch
        if verdict == "worse" and (len(losses) >= 2 or log_losses(losses[-1:])[0] == float("inf")):
            return self._undo(correction, coming, "The loss rose under it.")
        if not waited and (rounds < watch or len(losses) < min(FEWEST, watch)):
            return []
        if verdict != "better":
            return self._undo(correction, coming, "The loss is no better than the trend before it.")
        correction.kept, correction.kept_since = True, coming.index
        why = "The loss is better than the trend before it."
        correction.action = self._emit_status(correction.action, "applied", coming.index, why=why, after=coming.state)
        return []

    def _undo(self, correction: ActiveCorrection, coming: ComingRound, why: str) -> list[Action]:
        """End a correction; if the model is clearly worse than before, restore the best one."""
        actions = []
        best = coming.best_if_worse
        if best is not None:
            arguments = {"restore": best, "id": f"{coming.index}-{next(self._numbers)}"}
            restoring = replace(correction.action, kind="roll_back", target=None, arguments=arguments)
            undoing = f"Undoing {correction.action.kind}. {why}"
            actions = [self._emit_status(restoring, "applied", coming.index, why=undoing)]
            self._restart_trend(coming)
        self._end(correction, coming, why, helped=False)
        return actions

    def _end(self, correction: ActiveCorrection, coming: ComingRound, why: str, *, helped: bool) -> None:
        del self._active[correction.number]
        if not helped:
            self._failed_in[correction.action.finding, correction.action.kind] = coming.index
        self._emit_status(correction.action, "undone", coming.index, why=why, after=coming.state)

    # -- beginning ----------------------------------------------------------------------------------------------------

    def _begin_trials(self, coming: ComingRound, new_findings: Sequence[Finding]) -> list[Action]:
        """Start new trials: clients first, since one may be the cause; then one at a time for the whole run."""
        certain = [f for f in new_findings if f.severity != "note" and f.confidence >= self.policy.confidence]
        actions: list[Action] = []
        for finding in sorted(certain, key=lambda f: (suspect_of(f) is None, -f.confidence)):
            action = self._next_action(finding, coming)
            if action is None:
                continue
            if not coming.model.loss:
                why = "No loss of the global model is known, so nothing could be judged: log it."
                self._refuse(action, coming.index, why)
            elif action.kind in CLIENT_KINDS:
                self._try_on_client(action, finding, coming)
            elif all(t.kept and coming.index - t.kept_since >= self.policy.watch for t in self._active.values()):
                actions += self._try_on_run(action, finding, coming)
        return actions

    def _next_action(self, finding: Finding, coming: ComingRound) -> Action | None:
        """Return the first correction that may be tried and has not failed recently."""
        label = finding_label(finding)
        running = [t.action for t in self._active.values()]
        for action in corrections_for(finding, coming.history):
            tried = self._failed_in.get((label, action.kind))
            same = [a for a in running if (a.kind, a.target) == (action.kind, action.target)]
            if action.kind in CLIENT_KINDS and same:
                return None  # already being corrected, for this or another finding
            if self.policy.word(finding.issue, action.kind) != "auto" or action.kind in ("advise", "exclude"):
                continue
            failed_lately = tried is not None and coming.index - tried < FORGOTTEN
            if not failed_lately and (not same or action.kind in CUMULATIVE_KINDS):
                return action
        return None

    def _try_on_client(self, action: Action, finding: Finding, coming: ComingRound) -> None:
        rounds = coming.history.rounds()[-10:]
        clients = {n for past_round in rounds for n in coming.history.latest("update.norm", past_round)}
        quarantined = sum(t.action.kind == "quarantine" for t in self._active.values())
        if action.kind == "quarantine" and quarantined + 1 > max(1.0, MOST_AWAY * len(clients)):
            already = f"{quarantined} of {len(clients)} clients are in quarantine already: no more are shut out."
            self._refuse(action, coming.index, already)
            return
        if coming.loss_trend.rounds < FEWEST and not math.isinf(coming.loss_trend.level):
            return  # nothing to compare with yet; the finding will recur
        relapses = self._relapses.get(action.finding, 0)
        self._relapses[action.finding] = relapses + 1
        self._start(action, finding, coming, term=self.policy.term * 2**relapses)

    def _try_on_run(self, action: Action, finding: Finding, coming: ComingRound) -> list[Action]:
        loss_trend = coming.loss_trend
        raising = float(action.arguments.get("factor", 0.0)) > 1
        early = loss_trend.end > float(max(log_losses([*coming.model.loss.values()]))) - HALVED
        if not (loss_trend.too_slow and early if raising else loss_trend.unhealthy):
            return []  # the run is learning, so harm could not be told from benefit
        best = None if raising else coming.best_if_worse
        if not raising and loss_trend.rounds >= FEWEST and coming.model.learnt_nothing:
            best = FIRST_MODEL  # every later model is useless
        if action.kind == "roll_back" and best is None:
            return []
        if best is not None:
            action = replace(action, arguments={**action.arguments, "restore": best})
        correction = self._start(action, finding, coming, term=0)
        if best is not None:
            # Starting from the first model, it must learn: staying level is not enough.
            correction.restored = coming.model.loss.get(best)
            self._restart_trend(coming)
        return [correction.action] if action.kind in ONE_ROUND_KINDS else []

    def _start(self, action: Action, finding: Finding, coming: ComingRound, term: int) -> ActiveCorrection:
        numbered = replace(action, arguments={**action.arguments, "id": f"{coming.index}-{next(self._numbers)}"})
        announced = self._emit_status(numbered, "trial", coming.index, why=finding.message, before=coming.state)
        correction = ActiveCorrection(announced, finding, coming.index, coming.loss_trend, term)
        correction.last_seen, correction.trend_since = coming.index - 1, self._trend_since
        self._active[correction.number] = correction
        return correction

    def _refuse(self, action: Action, round_index: int, why: str) -> None:
        """Emit once that an action was not started, and why."""
        if (action.finding, "refused") not in self._suggested:
            self._suggested.add((action.finding, "refused"))
            self._emit_status(action, "refused", round_index, why=why)

    # -- records ------------------------------------------------------------------------------------------------------

    def _emit_status(self, action: Action, status: str, round_index: int | None, **more: Any) -> Action:
        """Emit the action with its new status and the reason, and return it."""
        arguments = {**action.arguments, "by": "policy", **{k: v for k, v in more.items() if v is not None}}
        where = Where(self._run, round_index, action.target)
        current = replace(action, where=where, at=time.time(), arguments=arguments, status=status)
        self._emit(replace(current))  # a copy, because emitting assigns an identity
        return current


# Did it help? A correction is judged by the trend of the global loss, against the run's own trend before it.
#
# Losses are compared as logarithms, so that halving counts the same early and late. The log loss of a run that learns
# falls along a line; a correction of the whole run must beat that line, which a healthy, slowing run does not do.


WINDOW = 5  # rounds before the correction, from which the trend is fitted
FEWEST = 3  # below this many rounds there is no trend
LEARNING = -0.005  # change of the log loss per round, above which a run is not learning
ERRATIC = 0.15  # scatter about the line beyond any healthy run
RESTLESS, CALM = 0.05, 0.5  # scatter that may be reduced, and the fraction it must fall to
BETTER = 0.03
SMOOTH, CREEPING = 0.01, -0.1  # scatter and slope of a run whose steps are too small
QUICKER = 1.5  # times as fast as before, required when larger steps are on trial


@dataclass(frozen=True, slots=True)
class LossTrend:
    """Level, slope and scatter of the log loss; level inf: it was not finite."""

    level: float  # median of the last three
    end: float  # of the line
    slope: float
    noise: float
    rounds: int

    @property
    def too_slow(self) -> bool:
        """Return whether the loss falls smoothly but in tiny steps, so that larger steps are possible."""
        return self.rounds >= FEWEST and self.noise < SMOOTH and CREEPING < self.slope < 0

    @property
    def unhealthy(self) -> bool:
        """Return whether the run is not learning, or only erratically; False if there are too few rounds to tell."""
        if math.isinf(self.level):
            return True
        return self.rounds >= FEWEST and (self.slope > LEARNING or self.noise > ERRATIC)


def loss_trend_of(losses: Mapping[int, float], until: int, since: int = -(2**31)) -> LossTrend:
    """Return the trend of the newest rounds up to `until`, but not before `since`."""
    rounds = [round_index for round_index in sorted(losses) if since <= round_index <= until][-WINDOW:]
    if not rounds:
        return LossTrend(math.nan, math.nan, 0.0, 0.0, 0)
    values = log_losses([losses[round_index] for round_index in rounds])
    if not np.isfinite(values[-1]):
        return LossTrend(math.inf, math.inf, 0.0, 0.0, len(rounds))
    finite = np.isfinite(values)
    x, y = np.asarray(rounds, dtype=np.float64)[finite] - rounds[-1], values[finite]
    if len(y) < FEWEST:
        return LossTrend(float(np.median(y)), float(y[-1]), 0.0, WORSE, len(y))
    slope, end = (float(value) for value in np.polyfit(x, y, 1))
    noise = math.sqrt(float(np.sum((y - slope * x - end) ** 2)) / (len(y) - 2))
    return LossTrend(float(np.median(y[-3:])), end, slope, noise, len(y))


def judge_correction(
    before: LossTrend, after: Sequence[float], restored: float | None = None, *, raising: bool = False
) -> str:
    """Return «better», «worse» or «same», for the losses since a correction against the trend before it.

    `restored`: the loss of the checkpoint that the trial started from, if it did; it only has to stay as good.
    `raising`: larger steps are on trial, so the loss must fall faster than before, however slow that was.
    """
    values = log_losses(after)
    if not len(values) or math.isnan(before.level):
        return "same"
    if not np.isfinite(values[-1]):
        return "worse"
    now = float(np.median(values[-3:]))
    base, room = before.level, max(2 * before.noise, WORSE)
    if restored is not None:
        base, room = float(log_losses([restored])[0]), WORSE
    if now > base + room:
        return "worse"
    if restored is not None:
        return "better" if now <= base + BETTER else "same"
    return "better" if math.isinf(base) or _helped(before, values, raising=raising) else "same"


def _helped(before: LossTrend, values: Array, *, raising: bool) -> bool:
    """Return whether the loss is below the continued trend, or much calmer than before, and not rising again."""
    if values[-1] > values.min() + WORSE:
        return False
    expected = before.end + min(before.slope, 0.0) * np.arange(1, len(values) + 1)
    gain = float(np.mean((expected - np.where(np.isfinite(values), values, expected))[-3:]))
    if raising:
        quicker = before.end - values[-1] > QUICKER * (before.end - expected[-1])
        return bool(quicker and gain > 3 * before.noise)
    steps = np.abs(np.diff(values[-3:]))
    calmer = before.noise > RESTLESS and len(steps) > 1 and steps.max() < CALM * before.noise
    return gain > max(before.noise, BETTER) or bool(calmer and values[-1] < before.level)
