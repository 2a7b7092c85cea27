# SPDX-License-Identifier: Apache-2.0
"""A refit that was tried and not taken: `python -m fedvitals_studies.faultbank.masked_fit RUNS`.

RUNS are recordings of `tune-wide`. Missing signs stay missing in learning and in use, fewer than four measured clients
give no score, and every run is learnt from twice: as it is, and with groups of signs masked at random. Each data set is
judged by models that never saw it, beside the shipped model, at limits that give both the same alarms on clean runs.
Culprits that something exact explains are left out, since these are named by that. docs/method.md has the figures.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fedvitals.diagnosis.evidence.attendance import groups_of
from fedvitals.diagnosis.evidence.client_table import Rows as Places
from fedvitals.diagnosis.evidence.exact_relations import exact_relations
from fedvitals.diagnosis.evidence.fault_kinds import ISSUE_OF
from fedvitals.diagnosis.evidence.learning_rates import own_learning_rates
from fedvitals.diagnosis.evidence.log_odds import VIEWS, features, shipped_model
from fedvitals.diagnosis.evidence.scores import CLIP, FEWEST, LASTING, OWN, Scorer, Scores
from fedvitals.diagnosis.evidence.suspect_data import examine_data
from fedvitals.diagnosis.evidence.transformed_updates import transformation
from fedvitals.diagnosis.evidence.trend import cohort_kind, groups_exchange_models
from fedvitals.diagnosis.evidence.vital_signs import (
    ABSOLUTE,
    ABSOLUTE_SERVER,
    FIT,
    FLOOR,
    SERVER,
    SIGNS,
    VitalSigns,
    vital_signs_of,
)
from fedvitals.diagnosis.history_cutoff import CutoffRound, HistoryCutoff
from fedvitals.diagnosis.medians import column_medians
from fedvitals.protocols import History, Node
from fedvitals.stats import Array
from fedvitals_studies.faultbank.cases import read_bank
from fedvitals_studies.faultbank.fit import Rows, judge, learn, limits_of, totals
from fedvitals_studies.faultbank.lying import lying
from fedvitals_studies.faultbank.outcome import liars, planted
from fedvitals_studies.faultbank.pool import is_there, load
from fedvitals_studies.faultbank.recording import Recording
from fedvitals_studies.faultbank.run import About

MASKED = 0.3  # of the groups, in the copy of a run
STRIKES = 6  # occurrences of a fault within which its client must exceed the limit
BUDGET = 0.3  # alarms per 100 healthy rounds, of one view; one of `fit.BUDGETS`
GROUPS = {  # signs that are missing together
    "fit": {*FIT, "confusion", "accuracy", "flip"},
    "gradient": {"gradient", "gradient_last", "gradient_ratio", "gradient_first", "rate", "samples_per_step"},
    "labels": {"diversity"},
    "told": {"told"},
    "models": {"step", "back", "previous"},
    "bias": {"bias"},
    "classes": {"classes", "classes_min", "class_entropy"},
    "layers": {"share_first", "share_head", "cosine_first", "cosine_head"},
}
COLUMNS = {  # of each view's features, by name, as `log_odds.features` has them
    "server": (*SERVER * 3, *ABSOLUTE_SERVER, "count"),
    **dict.fromkeys(("telemetry", "flip"), (*SIGNS * 3, *ABSOLUTE, "count", *("flip",) * 3)),
}
_FLOORS = np.array([FLOOR[name] for name in SIGNS])


def masked_scores(centred: Array) -> Array:
    """Return normal scores of what was measured; NaN elsewhere, and where fewer than four clients measured it."""
    measured = np.isfinite(centred)
    count = measured.sum(axis=0)
    t = centred / np.hypot(1.4826 * _middle(np.abs(centred)), _FLOORS)
    freedom = np.maximum(1, count - 2)
    size = np.sqrt(freedom * np.log1p(t**2 / freedom)) * (8 * freedom + 1) / (8 * freedom + 3)
    return np.where(measured & (count >= FEWEST), np.clip(np.sign(t) * size, -CLIP, CLIP), np.nan)


def _middle(values: Array) -> Array:
    return np.where(np.isfinite(values).any(axis=0), column_medians(values), 0.0)


class MaskedScorer(Scorer):
    """As `Scorer`, except that what was not measured has no score."""

    def __call__(self, vitals: VitalSigns) -> Scores | None:
        """Return the scores of a round, NaN where unknown; None if there are too few clients to compare."""
        if len(vitals.nodes) < FEWEST:
            return None
        rows = self._clients.rows_of(vitals.nodes)
        values, earlier = self._with_newest_fit(vitals.values, rows)
        residual = self._corrected(values - _middle(values), [vitals.size, vitals.diversity])
        peers = np.where(earlier, np.nan, masked_scores(residual))
        own = self._masked_own(np.where(earlier, np.nan, residual), rows)
        lasting = self._masked_lasting(peers, rows)
        persistent, rare = self._confusion_pairs(vitals.pairs, rows)
        self._count.values[rows] += 1
        unmeasured = earlier[:, SIGNS.index(FIT[0])]
        return Scores(vitals.nodes, peers, own, lasting, self._count.values[rows], persistent, rare, unmeasured)

    def _masked_own(self, residual: Array, rows: Places) -> Array:
        before, weight, there = self._residual.values[rows], self._weight.values[rows], np.isfinite(residual)
        change = np.where(weight > 0, residual - before / np.maximum(weight, 1e-9), np.nan)
        self._residual.values[rows] = np.where(there, OWN * before + np.nan_to_num(residual), before)
        self._weight.values[rows] = np.where(there, OWN * weight + 1, weight)
        return masked_scores(change - _middle(change))

    def _masked_lasting(self, peers: Array, rows: Places) -> Array:
        sums, weights, there = self._lasting.values[rows], self._lasting_weight.values[rows], np.isfinite(peers)
        sums = self._lasting.values[rows] = np.where(there, LASTING * sums + np.nan_to_num(peers), sums)
        weights = self._lasting_weight.values[rows] = np.where(there, LASTING * weights + 1, weights)
        scaled = sums / np.maximum(weights, 1e-9) * np.sqrt(np.minimum(weights, 3.0))
        return np.where(weights > 0, scaled, np.nan)


@dataclass
class Watched:
    """One run, as it is or with lying culprits, its features by both scorers, and the clients with an exact
    explanation.
    """

    shipped: Rows
    masked: Rows
    explained: list[bool]
    lies: bool


def watched(recording: Recording, about: About, domain: str, *, lies: bool) -> Watched | None:
    """Return a run's client-rounds; None if clients are not compared in it, as when updates are transformed."""
    scorers = {"shipped": Scorer(), "masked": MaskedScorer()}
    parts: dict[str, dict[str, list[Array]]] = {name: {view: [] for view in VIEWS} for name in scorers}
    nodes, kinds, explained = list[Node](), list[str](), list[bool]()
    struck = {node: fault for fault in about.faults for node in fault["nodes"]}
    known, cohort, cutoff = set[Node](), "large", CutoffRound()
    history = HistoryCutoff(recording, cutoff, finished=True)
    for number in recording.rounds():
        cutoff.move_to(number)
        signs = vital_signs_of(history, number)
        known |= {*signs.nodes}
        if transformation(history, number) is not None:
            continue
        if len(signs.nodes) < FEWEST:
            continue
        for name, scorer in scorers.items():
            scores = scorer(signs)
            for view in VIEWS if scores is not None else ():
                parts[name][view].append(features(scores, signs, view))  # type: ignore[arg-type]
        exchanged = groups_exchange_models(groups_of(history, number))
        cohort = cohort_kind(len(signs.nodes), len(known), exchanged=exchanged)
        exact = _explained(history, number)
        nodes += signs.nodes
        kinds += [_kind(struck.get(node), number) for node in signs.nodes]
        explained += [node in exact for node in signs.nodes]
    if not nodes:
        return None
    shipped, masked = (
        Rows(domain, not about.faults, cohort, len(recording.rounds()), nodes, kinds, _joined(parts[name]))
        for name in scorers
    )
    return Watched(shipped, masked, explained, lies)


def _joined(parts: Mapping[str, Sequence[Array]]) -> dict[str, Array]:
    return {view: np.concatenate(own) for view, own in parts.items()}


def _explained(history: History, number: int) -> set[Node]:
    relations, settings = exact_relations(history, number), own_learning_rates(history, number)
    return {*relations, *settings, *examine_data(history, number).suspects}


def _kind(fault: Mapping[str, object] | None, number: int) -> str:
    """Return the kind of a fault that occurs in this round."""
    if fault is None or number < int(str(fault["since"])):
        return ""
    every = fault.get("every")
    return str(fault["kind"]) if every is None or (number - int(str(fault["since"]))) % int(str(every)) == 0 else ""


def with_masks(run: Rows, chance: np.random.Generator) -> Rows:
    """Return a copy of a run in which groups of signs are missing from all client-rounds."""
    gone = set[str]().union(*(signs for signs in GROUPS.values() if chance.random() < MASKED))
    found = {view: own.copy() for view, own in run.found.items()}
    for view, own in found.items():
        own[:, [name in gone for name in COLUMNS[view]]] = np.nan
    return replace(run, found=found, evidence={})


def found_culprits(run: Watched, rows: Rows, view: str, limit: float) -> Iterator[tuple[str, bool]]:
    """Yield the kind of each culprit without an exact explanation, and whether its sum exceeded the limit in time."""
    sums, strikes = totals(rows, view), dict[Node, int]()
    hits, exact, kinds = set[Node](), set[Node](), dict[Node, str]()
    for node, kind, total, explained in zip(rows.nodes, rows.kinds, sums, run.explained, strict=True):
        if kind in ISSUE_OF:
            kinds[node] = kind
            strikes[node] = strikes.get(node, 0) + 1
        if 0 < strikes.get(node, 0) <= STRIKES:
            hits |= {node} if total > limit else set()
            exact |= {node} if explained else set()
    yield from ((kind, node in hits) for node, kind in kinds.items() if node not in exact)


def report(runs: Sequence[Watched], view: str) -> Iterator[str]:
    """Yield one line per model and kind of report: culprits found among those without an exact explanation."""
    for name in ("shipped", "masked"):
        limits = limits_of((getattr(run, name) for run in runs if not run.lies), view)
        for lies in (False, True):
            tally: dict[str, list[bool]] = {}
            for run in runs:
                rows: Rows = getattr(run, name)
                limit = next(limit for budget, limit in limits[rows.cohort] if budget == BUDGET)
                for kind, hit in found_culprits(run, rows, view, limit) if run.lies == lies else ():
                    tally.setdefault(kind, []).append(hit)
            hits, culprits = sum(map(sum, tally.values())), sum(map(len, tally.values()))
            by_kind = ", ".join(f"{kind} {sum(own)} of {len(own)}" for kind, own in sorted(tally.items()))
            yield f"{view}, {name}, {'lying' if lies else 'as they are'}: {hits} of {culprits} ({by_kind})"


def main(folder: str) -> None:
    runs: list[Watched] = []
    for case in read_bank("tune-wide").cases:
        if case.transformation is None and is_there(Path(folder), case):
            recording, about = load(Path(folder), case)
            culprits = liars(planted(case, about, None))
            versions = [(recording, False), *([(lying(recording, culprits), True)] if culprits else [])]
            runs += [run for own, lies in versions if (run := watched(own, about, case.domain, lies=lies)) is not None]
    datasets = sorted({_dataset(run.masked) for run in runs})
    for view in VIEWS:
        for dataset in datasets:
            chance = np.random.default_rng(0)
            others = [run.masked for run in runs if not run.lies and _dataset(run.masked) != dataset]
            models = learn([*others, *(with_masks(run, chance) for run in others)], view)
            for run in runs:
                if _dataset(run.masked) == dataset:
                    run.masked.evidence[view] = judge(models, run.masked.found[view], view)
                    run.shipped.evidence[view] = shipped_model().views[view].evidence(run.shipped.found[view])
        for line in report(runs, view):
            print(line, flush=True)  # noqa: T201 - it takes minutes, and is run by hand


def _dataset(run: Rows) -> str:
    return run.domain.partition("-")[0]


if __name__ == "__main__":
    main(*sys.argv[1:])
