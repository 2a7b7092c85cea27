# SPDX-License-Identifier: Apache-2.0
"""The results of a matrix of healthy settings: false alarms, and the share of planted faults that were found.

An alarm is a case of severity «warning» or worse, as everywhere in the bank. The first setting is the plain one, and
the recall of the others is compared with its recall.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fedvitals_studies.faultbank.bars import Bar
from fedvitals_studies.faultbank.cases import Bank, Case
from fedvitals_studies.faultbank.intervals import NOTHING, Estimate, poisson_rate, share
from fedvitals_studies.faultbank.matrix import Setting
from fedvitals_studies.faultbank.report import OURS
from fedvitals_studies.faultbank.run import About
from fedvitals_studies.faultbank.score import Alarm, Judgement, Outcome, Raised, judge

LEAST_RECALL = 0.8  # of the plain setting's recall
POOLED = "all settings"


@dataclass(frozen=True, slots=True)
class Run:
    """A run of the matrix with our detectors' results."""

    case: Case
    judgement: Judgement
    about: About

    @property
    def outcome(self) -> Outcome:
        return self.judgement.outcome

    @property
    def fault(self) -> str | None:
        return self.outcome.faults[0].kind if self.outcome.faults else None

    @property
    def hit(self) -> bool:
        return any(target.hit for target in self.judgement.targets)

    @property
    def located(self) -> bool:
        return any(target.is_located for target in self.judgement.targets)


@dataclass(frozen=True, slots=True)
class Line:
    """One setting, or all combined."""

    name: str
    group: str
    runs: int  # healthy ones
    rounds: int
    alarms: Estimate  # per 100 healthy rounds
    raised: int
    critical: int
    recall: Mapping[str, Estimate]  # fault kind → recall: right node and an accepted issue
    recall_all: Estimate
    located: Mapping[str, Estimate]  # right node, whatever the issue
    located_all: Estimate
    undecidable: Mapping[str, str]  # fault kinds that were missed where rules had reported that they could not judge
    not_judged: Estimate  # share of the healthy runs' client-rounds
    secure: bool
    score: Sequence[float]  # of the healthy runs on the server's test, first and last round; accuracy, else loss
    score_name: str


@dataclass(frozen=True, slots=True)
class Healthy:
    """The matrix with its bars."""

    bank: str
    counts: Mapping[str, int]
    lines: Sequence[Line]
    pooled: Line
    bars: Sequence[Bar]
    alarms: Sequence[Mapping[str, Any]]  # each false case, for investigation
    missed: Sequence[Mapping[str, Any]]  # each fault that was not found, with what was reported instead

    @property
    def plain(self) -> Line:
        return self.lines[0]

    def as_facts(self) -> dict[str, Any]:
        """Return the facts for JSON, with the verdicts; the lists are separate files."""
        facts = {name: value for name, value in asdict(self).items() if name not in ("alarms", "missed")}
        for entry, bar in zip(facts["bars"], self.bars, strict=True):
            entry["verdict"], entry["certain"] = bar.verdict, bar.certain
        return facts


def summarise_matrix(bank: Bank, outcomes: Sequence[Outcome], abouts: Mapping[str, About]) -> Healthy:
    """Summarise a matrix. `abouts`: the facts about each run, by its case's name."""
    cases = {case.name: case for case in bank.cases}
    runs = [Run(cases[o.case], judge(o, OURS), abouts[o.case]) for o in outcomes]
    lines = []
    for setting in bank.settings:
        own = [run for run in runs if run.case.setting == setting.name]
        if own:
            lines.append(line_of(setting, own))
    pooled = line_of(Setting(POOLED, "", undecidable={}), runs)
    counts = {
        "settings": len(lines),
        "healthy runs": sum(run.fault is None for run in runs),
        "healthy rounds": pooled.rounds,
        "faulty runs": sum(run.fault is not None for run in runs),
    }
    alarms = [fact for run in runs for fact in _false_cases(run)]
    missed = [_missed(run) for run in runs if run.fault is not None and not run.hit]
    return Healthy(bank.name, counts, lines, pooled, bars_of(lines, pooled, runs), alarms, missed)


def line_of(setting: Setting, runs: Sequence[Run]) -> Line:
    clean = [run for run in runs if run.fault is None]
    raised = [case for run in clean for case in run.judgement.raised]
    critical = sum(_severity(run.outcome, case) == "critical" for run in clean for case in run.judgement.raised)
    rounds = sum(run.outcome.rounds for run in clean)
    kinds = sorted({run.fault for run in runs if run.fault is not None})
    excused = {
        kind: why
        for kind, why in setting.undecidable.items()
        if any(_excused(run, setting) for run in runs if run.fault == kind)
    }
    return Line(
        setting.name,
        setting.group,
        len(clean),
        rounds,
        poisson_rate(len(raised), rounds),
        len(raised),
        critical,
        {kind: _recall(runs, setting, lambda run: run.hit, kind) for kind in kinds},
        _recall(runs, setting, lambda run: run.hit),
        {kind: _recall(runs, setting, lambda run: run.located, kind) for kind in kinds},
        _recall(runs, setting, lambda run: run.located),
        excused,
        share([run.outcome.not_judged for run in clean], [run.outcome.client_rounds for run in clean])
        if clean
        else NOTHING,
        any(run.case.experiment.secure_aggregation is not None for run in runs),
        *_score(clean),
    )


def _excused(run: Run, setting: Setting) -> bool:
    """Whether it was missed, but the setting's kind is known to be undecidable, and the run's findings report
    abstentions.
    """
    return run.fault in setting.undecidable and not run.hit and run.outcome.not_judged > 0


def _recall(runs: Sequence[Run], setting: Setting, is_hit: Callable[[Run], bool], kind: str | None = None) -> Estimate:
    counted = [run for run in runs if run.fault and kind in (None, run.fault) and not _excused(run, setting)]
    return share([float(is_hit(run)) for run in counted], [1.0] * len(counted)) if counted else NOTHING


def _score(clean: Sequence[Run]) -> tuple[tuple[float, ...], str]:
    """Return the mean over the runs, first and last."""
    for name in ("accuracy", "loss"):
        courses = [course for run in clean if (course := getattr(run.about, name))]
        if courses:
            ends = [[math.nan if course[place] is None else course[place] for course in courses] for place in (0, -1)]
            return tuple(sum(end) / len(end) for end in ends), name
    return (), "none: no client has the whole model"


def _alarms_of(outcome: Outcome, case: Raised) -> list[Alarm]:
    """Return the alarms of a case."""
    rounds = set(case.rounds)
    return [
        alarm
        for alarm in outcome.methods[OURS]
        if alarm.issue == case.issue
        and alarm.round in rounds
        and alarm.severity != "note"
        and (case.node is None or alarm.node == case.node)
    ]


def _severity(outcome: Outcome, case: Raised) -> str:
    return "critical" if any(alarm.severity == "critical" for alarm in _alarms_of(outcome, case)) else "warning"


def _false_cases(run: Run) -> Iterator[dict[str, Any]]:
    for case in run.judgement.raised:
        if case.verdict == "false":
            first = _alarms_of(run.outcome, case)[0]
            yield {
                **_which(run),
                "issue": case.issue,
                "node": case.node,
                "group": case.group,
                "round": case.rounds[0],
                "rounds": list(case.rounds),
                "severity": _severity(run.outcome, case),
                "confidence": first.confidence,
                "causes": list(first.causes),
                "message": first.message,
            }


def _missed(run: Run) -> dict[str, Any]:
    fault = run.outcome.faults[0]
    after = [alarm for alarm in run.outcome.methods[OURS] if alarm.round >= fault.since]
    return {
        **_which(run),
        "nodes": list(fault.nodes),
        "since": fault.since,
        "accepted": sorted(fault.accepted),
        "located": run.located,
        "said": [
            {"round": a.round, "issue": a.issue, "node": a.node, "severity": a.severity, "confidence": a.confidence}
            for a in after
        ],
    }


def _which(run: Run) -> dict[str, Any]:
    return {"case": run.case.name, "setting": run.case.setting, "seed": run.case.experiment.seed, "fault": run.fault}


def bars_of(lines: Sequence[Line], pooled: Line, runs: Sequence[Run]) -> tuple[Bar, ...]:
    loudest = max(lines, key=lambda line: line.alarms.low or 0.0)
    open_ones = [run for run in runs if run.fault is None and run.case.experiment.secure_aggregation is None]
    unjudged = share([run.outcome.not_judged for run in open_ones], [run.outcome.client_rounds for run in open_ones])
    return (
        Bar("alarms per 100 healthy rounds, all settings together", 0.5, False, pooled.alarms),
        Bar(
            "the lower 95 % limit in the worst setting",
            1.0,
            False,
            Estimate(loudest.alarms.low, None, None, loudest.rounds),
            note=_names(line.name for line in lines if (line.alarms.low or 0.0) > 1.0) or f"worst: {loudest.name}",
        ),
        Bar(
            "critical alarms in healthy runs",
            0,
            False,
            Estimate(pooled.critical, None, None, pooled.rounds),
            note=_names(line.name for line in lines if line.critical),
        ),
        _recall_bar(lines),
        Bar(
            "client-rounds not judged, without secure aggregation",
            0.1,
            False,
            unjudged,
            "%",
            _names(line.name for line in lines if not line.secure and (line.not_judged.value or 0.0) > 0.1),
        ),
    )


def ratio(line: Line, plain: Line) -> float | None:
    """Return a setting's recall as a share of the plain one's."""
    if line.recall_all.value is None or not plain.recall_all.value:
        return None
    return line.recall_all.value / plain.recall_all.value


def _recall_bar(lines: Sequence[Line]) -> Bar:
    held = [(value, line) for line in lines[1:] if (value := ratio(line, lines[0])) is not None]
    name = "recall on faulty twins in the worst setting, as a share of the plain setting's"
    if not held:
        return Bar(name, LEAST_RECALL, True, NOTHING, "%")
    worst = min(held, key=lambda pair: pair[0])
    low = _names(line.name for value, line in held if value < LEAST_RECALL)
    obtained = Estimate(worst[0], None, None, worst[1].recall_all.count)
    return Bar(name, LEAST_RECALL, True, obtained, "%", low or f"worst: {worst[1].name}")


def _names(names: Iterator[str]) -> str:
    return ", ".join(names)
