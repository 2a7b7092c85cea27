# SPDX-License-Identifier: Apache-2.0
"""Evaluates which rules hold, from the stream of records: the same alerts live as later from the store.

Nothing here depends on when a record arrives, only on its content. A round's metrics are judged when the round is
complete (marked by `time.round`), or with the next one if they come later. Findings are made beside the training and
may lag: they are judged in the order of their rounds, none before its own round is complete. The end of a case is
reported once no finding can still be on its way: one of a later round has come, the run has ended, or `SETTLE_SECONDS`
have passed.
"""

from __future__ import annotations

import fnmatch
import json
import math
import operator
import statistics
import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fedvitals.records import Finding, Metric, Record, natural
from fedvitals.sinks.alerts.message import FIRING, RESOLVED, Alert, value_text
from fedvitals.sinks.alerts.rules import SEVERITIES, WINDOW, Condition, FindingCondition, Rule

COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {
    ">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le,
}  # fmt: skip
ROUND_COMPLETE = "time.round"  # the monitor's last record of a round
ATTENDANCE = ("steps", "update.norm")  # a node with one of these took part, as in `diagnosis.cases`
QUIET = 5  # rounds with the node but without the trouble, after which it counts as over; as in `diagnosis.cases`
LEAST_PAST, LEAST_COHORT = 3, 3  # values that a median needs
SETTLE_SECONDS = 10.0  # by which detectors may lag behind a training in progress
MOST_PLACES = 10_000  # nodes (or cases) of one rule that are watched
MOST_ROUNDS_AHEAD = 64  # rounds waiting to be completed
REMEMBERED = 256  # rounds of attendance


@dataclass(slots=True)
class _RuleState:
    """One rule at one place: how long it has held, and what was reported of it."""

    since: int | None = None  # the first round of the current stretch
    last: int | None = None  # its newest round
    count: int = 0  # number of its rounds
    judged: int | None = None  # the newest round whose value was judged
    open_since: int | None = None  # the onset of the alert that is open
    severity: str = "warning"  # of that alert
    sent_round: int | None = None  # when an alert was last sent
    sent_at: float = -math.inf
    past: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))  # usual values, newest last
    stretch: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))  # values since `since`


class RuleEvaluation:
    """Evaluates rules on the records of one run. `families`: the family of each issue, for rules that name one.

    `open_alerts` (rule, place, onset) were reported before this process began, and are not reported again.
    """

    def __init__(
        self,
        run: str,
        rules: Sequence[Rule],
        *,
        families: Mapping[str, str] | None = None,
        open_alerts: Iterable[tuple[str, str, int]] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.left_out = 0  # values and findings that were not checked against rules, since there were too many places
        self._run, self._families, self._clock = run, families or {}, clock
        self._by_metric: dict[str, list[tuple[Rule, Condition]]] = {}
        self._on_findings: list[tuple[Rule, FindingCondition]] = []
        for rule in rules:
            if isinstance(rule.when, FindingCondition):
                self._on_findings.append((rule, rule.when))
            else:
                self._by_metric.setdefault(rule.when.metric, []).append((rule, rule.when))
        self._states: dict[str, dict[str, _RuleState]] = {rule.name: {} for rule in rules}
        for name, place, onset in open_alerts:
            if name in self._states:
                self._states[name][place] = _RuleState(open_since=onset, since=onset, last=onset, sent_round=onset)
        # Metric → round → node → (at, value), until judged.
        self._waiting: dict[str, dict[int, dict[str | None, tuple[float, float]]]] = {}
        self._findings: dict[int, list[Finding]] = {}
        self._heard = -1  # the newest round that has a finding
        self._attending: dict[int, set[str]] = {}
        self._attended: dict[str | None, list[int]] = {None: []}  # complete rounds, ascending, by node; None: all
        self._completed: dict[int, tuple[float, float]] = {}  # round → when: by its record, and by our clock
        self._pending: list[Alert] = []

    def see(self, record: Record) -> None:
        """Process one record; `alerts` returns the resulting alerts."""
        where = None if not isinstance(record, Metric | Finding) else record.where
        if where is None or where.run != self._run:
            return
        if isinstance(record, Finding):
            number = max(0, self._newest) if where.round is None else where.round
            self._heard = max(self._heard, number)
            waiting = self._findings.setdefault(number, []) if self._on_findings else []
            if len(waiting) < MOST_PLACES:
                waiting.append(record)
            else:
                self.left_out += 1
            return
        whole_of_a_group = where.node is None and where.group is not None
        if isinstance(record, Metric) and where.round is not None and where.layer is None and not whole_of_a_group:
            self._take(record, where.round, where.node)

    def alerts(self, *, final: bool = False) -> list[Alert]:
        """Return the alerts that began or ended since the last call, in order; `final`: nothing more will come."""
        for number in sorted(number for number in self._findings if final or number <= self._newest):
            for finding in self._findings.pop(number):
                self._judge_finding(finding, number)
        self._end_cases(final=final)
        alerts, self._pending = self._pending, []
        return alerts

    def finish(self) -> list[Alert]:
        """Return the last alerts of a run that has ended."""
        for metric, waiting in self._waiting.items():
            for number in sorted(waiting):
                self._judge_values(metric, number, waiting[number])
        self._waiting.clear()
        return self.alerts(final=True)

    @property
    def _newest(self) -> int:
        """The newest complete round."""
        complete = self._attended[None]
        return complete[-1] if complete else -1

    # --- metrics -----------------------------------------------------------------------------------------------------

    def _take(self, metric: Metric, number: int, node: str | None) -> None:
        if metric.name in self._by_metric:
            rounds = self._waiting.setdefault(metric.name, {})
            values = rounds.setdefault(number, {})
            before = values.get(node)
            if before is None and len(values) >= MOST_PLACES:
                self.left_out += 1
            elif before is None or metric.at >= before[0]:
                values[node] = (metric.at, metric.value)
            if len(rounds) > MOST_ROUNDS_AHEAD:
                del rounds[min(rounds)]
                self.left_out += 1
        if self._on_findings and node is not None and metric.name in ATTENDANCE:
            there = self._attending.setdefault(number, set())
            if len(there) < MOST_PLACES:
                there.add(node)
            if len(self._attending) > MOST_ROUNDS_AHEAD:
                del self._attending[min(self._attending)]
        if metric.name == ROUND_COMPLETE and node is None:
            self._complete(number, metric.at)

    def _complete(self, number: int, at: float) -> None:
        for metric, waiting in self._waiting.items():
            for ready in sorted(round_index for round_index in waiting if round_index <= number):
                self._judge_values(metric, ready, waiting.pop(ready))
        if number not in self._completed:
            for node in (None, *sorted(self._attending.pop(number, ()))):
                if node in self._attended or len(self._attended) <= MOST_PLACES:
                    _insert(self._attended.setdefault(node, []), number)
            self._completed[number] = (at, self._clock())
            if len(self._completed) > REMEMBERED:
                del self._completed[min(self._completed)]

    def _judge_values(self, metric: str, number: int, values: Mapping[str | None, tuple[float, float]]) -> None:
        cohort = [value for node, (_, value) in values.items() if node not in (None, "server") and math.isfinite(value)]
        common = statistics.median(cohort) if len(cohort) >= LEAST_COHORT else None
        places = [(node, json.dumps({"node": node})) for node in sorted(values, key=lambda name: natural(name or ""))]
        for rule, condition in self._by_metric[metric]:
            for node, place in places:
                state = self._state_of(rule, place) if _meant(rule, node) else None
                if state is not None and (state.judged is None or state.judged < number):
                    state.judged = number
                    at, value = values[node]
                    draft = self._draft(rule, place, number, at, node=node, metric=metric)
                    self._judge_value(rule, condition, state, draft, value, common)

    def _judge_value(
        self, rule: Rule, condition: Condition, state: _RuleState, draft: Alert, value: float, common: float | None
    ) -> None:
        number, node = draft.round, draft.node
        bound = _bound(condition, state, common)
        only_nan = state.count > 0 and all(math.isnan(earlier) for earlier in state.stretch)
        if bound is None and not math.isnan(value) and not only_nan:  # too little to compare with
            if math.isfinite(value):
                state.past.append(value)
            return
        if math.isnan(value) or (bound is not None and _breaks(condition.comparison, value, bound)):
            if state.count == 0 and state.open_since is None:
                state.since = number
            state.count, state.last = state.count + 1, number
            state.stretch.append(value)
            if (
                state.count >= condition.rounds
                and state.open_since is None
                and _after_gap(rule, state, number, draft.at)
            ):
                state.severity = rule.severity or "warning"
                words = _words(condition, node, value, bound, state)
                self._tell(FIRING, state, draft, words, value, bound)
            if state.count % WINDOW == 0 and condition.against in ("own", "before"):
                # It has lasted so long that it has become the usual value.
                state.past = deque((v for v in state.stretch if math.isfinite(v)), maxlen=WINDOW)
            return
        if state.open_since is not None:
            now = value_text(value, condition.metric)
            words = f"{condition.metric} of {_place(node)} is {now}: no longer «{condition}»"
            self._tell(RESOLVED, state, draft, words, value, bound)
        state.since, state.last, state.count = None, None, 0
        state.stretch.clear()
        if math.isfinite(value):
            state.past.append(value)

    # --- findings ----------------------------------------------------------------------------------------------------

    def _judge_finding(self, finding: Finding, number: int) -> None:
        where = finding.where
        group = where.group if where.node is None else None
        place = json.dumps({"issue": finding.issue, "node": where.node, "group": group, "layer": where.layer})
        # For all rules before any reports: a case that is over must not block a report
        for rule, _ in self._on_findings:
            past = self._states[rule.name].get(place)
            over = None if past is None else self._over(past, where.node, before=number)
            if past is not None and over is not None:
                self._end_case(rule, past, place, over)
        first = len(self._pending)
        for rule, asked in self._on_findings:
            if not self._matches(rule, asked, finding):
                continue
            state = self._state_of(rule, place)
            if state is None:
                continue
            if state.last is None:
                state.since = number
            if state.last is None or number > state.last:
                state.count, state.last = state.count + 1, number
            if state.count >= asked.rounds and state.open_since is None and _after_gap(rule, state, number, finding.at):
                state.severity = rule.severity or finding.severity
                draft = self._draft(rule, place, number, finding.at, **json.loads(place))
                self._tell(FIRING, state, draft, finding.message)
        if len(self._pending) > first:
            self._pending[first] = replace(self._pending[first], others=len(self._pending) - first - 1)

    def _matches(self, rule: Rule, asked: FindingCondition, finding: Finding) -> bool:
        if asked.issue not in (None, finding.issue) or not _meant(rule, finding.where.node or finding.where.group):
            return False
        if asked.family is not None and self._families.get(finding.issue, "user") != asked.family:
            return False
        worse = SEVERITIES[SEVERITIES.index(asked.severity) :] if asked.severity else None
        return (worse is None or finding.severity in worse) and finding.confidence >= asked.confidence

    def _over(self, state: _RuleState, node: str | None, before: int | None = None) -> int | None:
        """Return the round in which a case counted as over; None while it does not."""
        if state.last is None:
            return None
        rounds = (self._attended.get(node) if node is not None else None) or self._attended[None]
        start = bisect_right(rounds, state.last)
        end = len(rounds) if before is None else bisect_left(rounds, before)
        return rounds[start + QUIET] if end - start > QUIET else None

    def _end_cases(self, *, final: bool) -> None:
        for rule, _ in self._on_findings:
            for place, state in self._states[rule.name].items():
                over = self._over(state, json.loads(place)["node"]) if state.last is not None else None
                if over is None:
                    continue
                settled = self._clock() - self._completed.get(over, (0.0, -math.inf))[1] >= SETTLE_SECONDS
                if final or over < self._heard or settled:
                    self._end_case(rule, state, place, over)

    def _end_case(self, rule: Rule, state: _RuleState, place: str, over: int) -> None:
        if state.open_since is not None:
            at = self._completed.get(over, (0.0, 0.0))[0]
            draft = self._draft(rule, place, over, at, **json.loads(place))
            where = _place(draft.node or draft.group)
            self._tell(RESOLVED, state, draft, f"{draft.issue} at {where} has not been seen since round {state.last}")
        state.since, state.last, state.count = None, None, 0

    # --- both --------------------------------------------------------------------------------------------------------

    def _state_of(self, rule: Rule, place: str) -> _RuleState | None:
        states = self._states[rule.name]
        state = states.get(place)
        if state is None and len(states) < MOST_PLACES:
            state = states[place] = _RuleState()
        if state is None:
            self.left_out += 1
        return state

    def _draft(self, rule: Rule, place: str, number: int, at: float, **where: str | None) -> Alert:
        """Return a draft of a rule's alert at a place, without its message; `where`: node, group, layer, ..."""
        return Alert(self._run, rule.name, place, number, FIRING, "", number, at, "", **where)  # type: ignore[arg-type]

    def _tell(
        self,
        kind: str,
        state: _RuleState,
        draft: Alert,
        words: str,
        value: float | None = None,
        bound: float | None = None,
    ) -> None:
        """Queue the alert that a rule began to hold (firing), or that it no longer holds (resolved)."""
        if kind == FIRING:
            state.open_since = draft.round if state.since is None else state.since
            state.sent_round, state.sent_at = draft.round, draft.at
        onset = draft.round if state.open_since is None else state.open_since
        alert = replace(draft, onset=onset, kind=kind, severity=state.severity, message=words)
        self._pending.append(replace(alert, value=value, limit=bound))
        if kind == RESOLVED:
            state.open_since = None


def _bound(condition: Condition, state: _RuleState, common: float | None) -> float | None:
    """Return the bound that the value is compared with; None if there is too little data."""
    match condition.against:
        case "limit":
            return condition.limit
        case "cohort":
            return None if common is None else condition.number * common
        case "own":
            usual = statistics.median(state.past) if len(state.past) >= LEAST_PAST else None
            return None if usual is None else condition.number * usual
    before = list(state.past)[-condition.within :]
    if not before:
        return None
    return max(before) - condition.limit if condition.comparison == "drops" else min(before) + condition.limit


def _breaks(comparison: str, value: float, bound: float) -> bool:
    if comparison in COMPARISONS:
        return COMPARISONS[comparison](value, bound)
    further = value <= bound if comparison == "drops" else value >= bound
    return further or math.isclose(value, bound, rel_tol=1e-9)  # 0.8 − 0.77 is not 0.03 in binary


def _words(condition: Condition, node: str | None, value: float, bound: float | None, state: _RuleState) -> str:
    metric = condition.metric
    text = f"{metric} of {_place(node)} is {value_text(value, metric)}"
    match condition.against if bound is not None else None:
        case None:
            pass
        case "limit":
            text += f" ({condition.comparison} {value_text(condition.limit, metric)})"
        case "before":
            step = condition.limit if condition.comparison == "drops" else -condition.limit
            text += f", after {value_text((bound or 0.0) + step, metric)}"
        case _:
            whose = "its own median" if condition.against == "own" else "the median of all"
            usual = value_text((bound or 0.0) / condition.number, metric)
            text += f" ({condition.comparison} {condition.number:g} × {whose}, {usual})"
    return text + (f", for {state.count} rounds, since round {state.since}" if condition.rounds > 1 else "")


def _after_gap(rule: Rule, state: _RuleState, number: int, at: float) -> bool:
    if state.sent_round is None:
        return True
    seconds = rule.gap.seconds
    return number - state.sent_round >= rule.gap.number if seconds is None else at - state.sent_at >= seconds


def _meant(rule: Rule, node: str | None) -> bool:
    return rule.node is None or fnmatch.fnmatchcase("whole" if node is None else node, rule.node)


def _place(node: str | None) -> str:
    return "the whole run" if node is None else node


def _insert(rounds: list[int], number: int) -> None:
    at = bisect_left(rounds, number)
    if at == len(rounds) or rounds[at] != number:
        rounds.insert(at, number)
    if len(rounds) > REMEMBERED:
        del rounds[: REMEMBERED // 4]


def replay(
    run: str,
    rules: Sequence[Rule],
    metrics: Iterable[Metric],
    findings: Iterable[Finding],
    families: Mapping[str, str],
    channels: Sequence[str] = ("",),
) -> list[Alert]:
    """Return the alerts of a stored run on any of these channels, by round: the same as during the training."""
    deduplication = CaseDeduplication(rules, channels)
    evaluation = RuleEvaluation(run, rules, families=families)
    alerts: list[Alert] = []
    for finding in findings:
        evaluation.see(finding)
    for metric in metrics:
        evaluation.see(metric)
        if metric.name == ROUND_COMPLETE and metric.where.node is None:
            alerts += evaluation.alerts()
    alerts += evaluation.finish()
    alerts = [alert for alert in alerts if deduplication.channels(alert)]
    return sorted(
        alerts, key=lambda alert: (alert.round, alert.kind != RESOLVED, alert.rule, natural(alert.node or ""))
    )


class CaseDeduplication:
    """Remembers which rule reported a case on each channel. A rule that reports a higher severity is sent as well."""

    def __init__(self, rules: Iterable[Rule], channels: Sequence[str]) -> None:
        self._wanted = {rule.name: rule.channels or tuple(channels) for rule in rules}
        self._channels = tuple(channels)
        self._speaks: dict[tuple[str, str, str], tuple[str, str]] = {}  # channel, run, place → rule, severity

    def begin(self, run: str, open_alerts: Iterable[tuple[str, str, int]]) -> None:
        """Take over the alerts (rule, place, onset) that an earlier process sent and that are still open."""
        order = list(self._wanted)
        known = [(rule, place) for rule, place, _ in open_alerts if rule in self._wanted]
        for rule, place in sorted(known, key=lambda rule_and_place: order.index(rule_and_place[0])):
            for channel in self._wanted[rule]:
                self._speaks.setdefault((channel, run, place), (rule, SEVERITIES[-1]))

    def end(self, run: str) -> None:
        """Forget a run."""
        self._speaks = {key: speaker for key, speaker in self._speaks.items() if key[1] != run}

    def channels(self, alert: Alert) -> list[str]:
        """Return the channels that should receive an alert, in their order."""
        wanted = [name for name in self._channels if name in self._wanted[alert.rule]]
        return wanted if alert.issue is None else [name for name in wanted if self._is_news(name, alert)]

    def _is_news(self, channel: str, alert: Alert) -> bool:
        key = (channel, alert.run, alert.place)
        rule, severity = self._speaks.get(key, (alert.rule, ""))
        if alert.kind == RESOLVED:
            return rule == alert.rule and self._speaks.pop(key, None) is not None
        if rule != alert.rule and _rank(alert.severity) <= _rank(severity):
            return False
        self._speaks[key] = (alert.rule, alert.severity)
        return True


def _rank(severity: str) -> int:
    return SEVERITIES.index(severity) if severity in SEVERITIES else -1
