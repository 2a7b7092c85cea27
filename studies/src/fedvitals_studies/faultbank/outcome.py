# SPDX-License-Identifier: Apache-2.0
"""Turns a recorded case into its outcome: every method's results, with what was planted.

Methods get the recording, round after round, through the same view that detectors have live and in `fedvitals check`.
The truth is added to their results afterwards. Three baselines ran while the case trained, since they need the updates
themselves: in two rounds, the middle and the last one.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fedvitals.diagnosis.abstentions import examination
from fedvitals.diagnosis.evidence.fault_kinds import ISSUE_OF
from fedvitals.diagnosis.examine import DETECTORS, DetectorExamination
from fedvitals.diagnosis.history_cutoff import CutoffRound, HistoryCutoff
from fedvitals.lab.description import kind_of
from fedvitals.lab.experiment import kinds_of
from fedvitals.lab.faults.table import FAULTS
from fedvitals.protocols import Detector, History, Node
from fedvitals.records import Finding
from fedvitals_studies.faultbank.asked import LYING
from fedvitals_studies.faultbank.baselines.differential import healthy_limit
from fedvitals_studies.faultbank.baselines.history import BY_HISTORY, cohort_scores
from fedvitals_studies.faultbank.baselines.published import ALIGN_INS, FL_DETECTOR
from fedvitals_studies.faultbank.baselines.updates import DIFFERENTIAL, KRUM, accused_by, feddebug_accused
from fedvitals_studies.faultbank.brought_detectors import load_detectors
from fedvitals_studies.faultbank.cases import Case
from fedvitals_studies.faultbank.lying import lying
from fedvitals_studies.faultbank.privacy_levels import at_level
from fedvitals_studies.faultbank.recording import Recording
from fedvitals_studies.faultbank.report import OURS
from fedvitals_studies.faultbank.run import About
from fedvitals_studies.faultbank.score import Alarm, Outcome, Planted

NAMED = 100.0  # more than any sum of evidence
LAST_ROUNDS = 3  # over which damage and an attack's success are averaged: single rounds fluctuate
DIFFERENTIAL_ALARMS = 0.01  # per round: as in `differential_scores`
BY_SCORE = {KRUM: "Multi-Krum", ALIGN_INS: "AlignIns", FL_DETECTOR: "FLDetector"}
NAMES = {**BY_SCORE, "feddebug": "FedDebug, count told", DIFFERENTIAL: "differential activations"}
UNUSUAL = "UNUSUAL_CLIENT"  # for methods that cannot name an issue
LOCALISER = "fedvitals.diagnosis.evidence.faulty_clients"

ScoresByMethod = Mapping[str, Mapping[Node, float]]
Judged = Callable[[History, int], Mapping[Node, float]]
KINDS = kinds_of(FAULTS)


def outcome_of(
    case: Case,
    recording: Recording,
    about: About,
    twin: tuple[Recording, About] | None = None,
    *,
    lies: bool = False,
    level: int | None = None,
    brought: Sequence[str] = (),
) -> Outcome:
    """Return all methods' results on a case; `twin`: the same run without its faults; `lies`: the culprits lie.

    `level`: a privacy level. Only our detectors are run, on what would have been released at that level. `brought`:
    names of a user's own detectors; each is judged as a separate method.
    """
    faults = planted(case, about, None if twin is None else twin[0])
    if lies:
        recording = lying(recording, liars(faults))
    if level is not None:
        recording = at_level(recording, level)
    experiment = case.experiment
    matrix = case.setting is not None
    ours = _Examined(recording, faults, about.present, with_messages=matrix)
    methods, scores = ({}, {}) if matrix or level is not None else _by_history(recording, about.present)
    if level is None:
        methods |= _by_updates(about, faults)
        scores |= _scores_by_updates(about, faults)
    for name in brought:
        methods[name] = _by_detectors(recording, load_detectors(name))
        scores[name] = suspects_of(methods[name], about.present)
    examined = examination(recording)
    return Outcome(
        client_rounds=examined.client_rounds,
        not_judged=sum(examined.not_judged.values()),
        case=f"{case.name}{LYING}" if lies else case.name,
        level=level,
        transformation=f"{case.transformation}, untold" if case.untold else case.transformation,
        control=case.control_group,
        bank=case.bank,
        domain=case.domain,
        dataset=_kind(experiment.dataset),
        model=_kind(experiment.model),
        topology=_kind(experiment.topology),
        partition=_partition(experiment.partition),
        clients=experiment.clients,
        participation=experiment.participation,
        rounds=experiment.rounds,
        faults=faults,
        lying=lies,
        accuracy=about.accuracy,
        damage=None if twin is None or not faults else _damage(about, twin[1]),
        attack=float(np.mean(about.attack[-LAST_ROUNDS:])) if about.attack else None,
        present=about.present,
        groups=about.groups,
        seconds_rounds=_seconds(recording, about),
        methods={OURS: ours.alarms, **methods},
        scores={OURS: ours.scores, **scores},
        probabilities=ours.probabilities,
        seconds_detectors=ours.seconds,
    )


# -- what was planted -------------------------------------------------------------------------------------------------


def planted(case: Case, about: About, clean: Recording | None) -> list[Planted]:
    """Return the faults according to the truth."""
    found = []
    for fault in about.faults:
        kind = str(fault["kind"])
        known: Any = KINDS.get(kind)
        strength = fault.get(case.strength) if case.strength else None
        found.append(
            Planted(
                kind,
                str(fault["issue"]),
                str(fault["family"]),
                "clients" if known is None else known.strikes,
                list(fault["nodes"]),
                int(fault["since"]),
                fault["until"],
                None if strength is None else float(strength),
                _affected(fault, clean),
                fault.get("every"),
                fault.get("ramp"),
            )
        )
    return found


def _affected(fault: Mapping[str, Any], clean: Recording | None) -> float | None:
    """Return the share of a culprit's labels that are wrong; for several culprits, the mean. None: not a fault of
    labels.

    The number of samples of a flipped class is read from the clean twin, which has the same samples.
    """
    if fault["kind"] == "label_noise":
        return float(fault["rate"])
    if fault["kind"] != "label_flip" or clean is None:
        return None
    shares = []
    for node in fault["nodes"]:
        told = next((e.data["histogram"] for e in clean.told if e.name == "labels" and e.where.node == node), None)
        if told:
            shares.append(float(fault["rate"]) * told.get(str(fault["source"]), 0) / sum(told.values()))
    return float(np.mean(shares)) if shares else None


def liars(faults: Iterable[Planted]) -> dict[Node, int]:
    """Return the clients with a reason to lie, and since when: those at fault themselves. A slow line or a full disk is
    not.
    """
    return {
        node: fault.since
        for fault in faults
        if fault.family == "client" and fault.strikes == "clients"
        for node in fault.nodes
    }


def _damage(about: About, clean: About) -> float | None:
    """Return the percentage points of accuracy below the clean twin, over the last rounds."""
    ends = [each.accuracy[-LAST_ROUNDS:] for each in (clean, about)]
    if not all(ends):
        return None
    before, after = (float(np.mean([0.0 if math.isnan(value) else value for value in end])) for end in ends)
    return 100 * (before - after)


# -- how the case is described ----------------------------------------------------------------------------------------


def _kind(described: Any) -> str:
    return kind_of(type(described).__name__)


def _partition(described: Any) -> str:
    alpha = getattr(described, "alpha", None)
    return _kind(described) if alpha is None else f"{_kind(described)} {alpha:g}"


def _seconds(recording: Recording, about: About) -> float:
    """Return the duration of the rounds: the median, times their number. Baselines ran in some of them, which took
    time.
    """
    _, seconds = recording.series("time.round", None)
    return float(np.median(seconds)) * len(recording.numbers) if seconds else about.seconds


# -- ours -------------------------------------------------------------------------------------------------------------


class _Examined:
    """Our detectors' alarms, and what they would state of each client if asked: in the middle, and at the end."""

    def __init__(
        self, recording: Recording, faults: Sequence[Planted], clients: Collection[Node], *, with_messages: bool = False
    ) -> None:
        self.alarms: list[Alarm] = []
        self.scores: Mapping[Node, float] = {}
        self.probabilities: list[tuple[float, bool]] = []
        self._faults, self._seconds_asked = faults, 0.0
        rounds = recording.rounds()
        self._last = rounds[-1] if rounds else -1
        self._asked = {rounds[(len(rounds) - 1) // 2], self._last} if rounds else set()
        self._suspicion: Judged | None = _localiser("evidence_totals")
        self._probability: Judged | None = _localiser("fault_probabilities")
        detectors: tuple[Detector, ...] = (*DETECTORS, self._ask)
        examination = DetectorExamination(recording, detectors, None, finished=True)
        began = time.process_time()  # excludes the time of other processes
        found = [finding for number in rounds for finding in examination.findings_of(number)]
        self.seconds = time.process_time() - began - self._seconds_asked
        self.alarms = [alarm_of(finding, with_message=with_messages) for finding in found]
        # Clients named by any rule rank before all others; among these, by the evidence.
        named = suspects_of(self.alarms, clients)
        self.scores = {node: self.scores.get(node, 0.0) + NAMED * score for node, score in named.items()}

    def _ask(self, history: History, number: int) -> Iterator[Finding]:
        """Record what the localiser would state: runs as the last detector, to have their view; finds nothing."""
        began = time.process_time()
        if number == self._last and self._suspicion is not None:
            self.scores = dict(self._suspicion(history, number))
        if number in self._asked and self._probability is not None:
            self.probabilities += stated(self._probability(history, number), self._faults, number)
        self._seconds_asked += time.process_time() - began
        yield from ()


def _localiser(name: str) -> Judged | None:
    """Return the function of the localiser of clients, if that is one of the detectors."""
    if importlib.util.find_spec(LOCALISER) is None:
        return None
    module = importlib.import_module(LOCALISER)
    found: Judged | None = getattr(module, name, None) if set(module.DETECTORS) <= set(DETECTORS) else None
    return found


def alarm_of(finding: Finding, *, with_message: bool = False) -> Alarm:
    """Return the parts of a finding that count."""
    causes = finding.evidence.get("causes") or ()
    pairs = causes.items() if isinstance(causes, Mapping) else causes
    views = finding.evidence.get("views") or ()  # the views that raised it
    where = finding.where
    return Alarm(
        -1 if where.round is None else where.round,
        finding.issue,
        where.node,
        where.group,
        finding.confidence,
        finding.severity,
        " and ".join(views) or None,
        tuple((str(name), float(sure)) for name, sure in pairs),
        finding.message if with_message else None,
    )


def suspects_of(alarms: Iterable[Alarm], nodes: Iterable[Node]) -> dict[Node, float]:
    """Return a ranking from alarms alone: the more often and the more certainly a client was named, the higher."""
    scores = dict.fromkeys(nodes, 0.0)
    for alarm in alarms:
        if alarm.node in scores and alarm.severity != "note":
            scores[alarm.node] += alarm.confidence
    return scores


def stated(probabilities: Mapping[Node, float], faults: Sequence[Planted], number: int) -> list[tuple[float, bool]]:
    """Return stated probabilities that a client is faulty, each with whether it was so in that round.

    Clients failed by the host or the network are excluded: they are neither faulty nor fully healthy.
    """
    guilty = {
        node
        for fault in faults
        if fault.kind in ISSUE_OF and fault.since <= number and (fault.until is None or number <= fault.until)
        for node in fault.nodes
    }
    aside = {node for fault in faults if not fault.whole and fault.kind not in ISSUE_OF for node in fault.nodes}
    return [(float(p), node in guilty) for node, p in probabilities.items() if node in guilty or node not in aside]


# -- the others -------------------------------------------------------------------------------------------------------


def _by_detectors(recording: Recording, detectors: Sequence[Detector]) -> list[Alarm]:
    examination = DetectorExamination(recording, detectors, None, finished=True)
    return [alarm_of(finding) for number in recording.rounds() for finding in examination.findings_of(number)]


def _by_history(
    recording: Recording, clients: Collection[Node]
) -> tuple[dict[str, list[Alarm]], dict[str, Mapping[Node, float]]]:
    horizon = CutoffRound()
    past = HistoryCutoff(recording, horizon, finished=True)
    found: dict[str, list[Alarm]] = {name: [] for name in BY_HISTORY}
    scores: dict[Node, list[float]] = {}
    for number in recording.rounds():
        horizon.move_to(number)
        for name, baseline in BY_HISTORY.items():
            found[name] += [_plain(number, issue, node) for issue, node in baseline(past, number)]
        for node, score in cohort_scores(past, number).items():
            scores.setdefault(node, []).append(score)
    ranked: dict[str, Mapping[Node, float]] = {name: suspects_of(alarms, clients) for name, alarms in found.items()}
    ranked["cohort z-score"] = {node: float(np.mean(values)) for node, values in scores.items() if node in clients}
    return found, ranked


def _plain(number: int, issue: str, node: Node | None) -> Alarm:
    return Alarm(number, issue, node, None, 1.0, "warning")


def _by_round(about: About) -> dict[int, dict[str, Mapping[Node, float]]]:
    """Return the results from the training: by round, then by method."""
    found: dict[int, dict[str, Mapping[Node, float]]] = {}
    for method, rounds in about.updates.items():
        for number, said in rounds.items():
            found.setdefault(int(number), {})[method] = said
    return dict(sorted(found.items()))


def _culprits(faults: Iterable[Planted]) -> int:
    return len({node for fault in faults if not fault.whole for node in fault.nodes})


def _by_updates(about: About, faults: Sequence[Planted]) -> dict[str, list[Alarm]]:
    """Return the alarms of the methods that need updates; empty if they cannot run (models of tokens), so the run does
    not count.
    """
    asked = {*about.updates, "feddebug"} if about.updates else set()
    found: dict[str, list[Alarm]] = {name: [] for method, name in NAMES.items() if method in asked}
    for number, said in _by_round(about).items():
        accused = {
            **{name: accused_by(method, said) for method, name in BY_SCORE.items() if method in asked},
            NAMES["feddebug"]: feddebug_accused(said, _culprits(faults)),
            NAMES[DIFFERENTIAL]: _differential_accused(said),
        }
        for name, nodes in accused.items():
            found[name] += [_plain(number, UNUSUAL, node) for node in nodes]
    return found


def _differential_accused(scores_by_method: ScoresByMethod) -> list[Node]:
    scores = scores_by_method.get(DIFFERENTIAL, {})
    if len(scores) < 4:
        return []
    limit = healthy_limit(len(scores), DIFFERENTIAL_ALARMS)
    return [node for node, score in scores.items() if score > limit]


def _scores_by_updates(about: About, faults: Sequence[Planted]) -> dict[str, Mapping[Node, float]]:
    """Return each method's own numbers, over the rounds in which it ran."""
    rounds = _by_round(about).values()
    known = max((int(key.rpartition(".")[2]) for key in about.updates if key.startswith("feddebug.")), default=0)
    told = f"feddebug.{max(1, min(_culprits(faults), known))}"
    found: dict[str, Mapping[Node, float]] = {}
    methods = [*((method, method) for method in BY_SCORE if method in about.updates), (told, "feddebug")]
    for key, method in [*methods, (DIFFERENTIAL, DIFFERENTIAL)]:
        nodes = {node for said in rounds for node in said.get(KRUM, {})}
        if nodes:
            values = {node: [said.get(key, {}).get(node, 0.0) for said in rounds] for node in nodes}
            found[NAMES[method]] = {node: float(np.mean(each)) for node, each in values.items()}
    return found
