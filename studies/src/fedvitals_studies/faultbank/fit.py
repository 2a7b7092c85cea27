# SPDX-License-Identifier: Apache-2.0
"""Learn `diagnosis.evidence.log_odds` on the tuning set: `python -m fedvitals_studies.faultbank.fit RUNS`.

Limits come from runs scored by models that never saw their domain (leave-domains-out): from models that did, a nominal
half alarm per 100 rounds becomes two and more on other data. The shipped models are then trained on all domains of the
tuning set. Nothing of the held-out set is read.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedvitals.diagnosis.evidence.attendance import groups_of
from fedvitals.diagnosis.evidence.fault_kinds import ISSUE_OF
from fedvitals.diagnosis.evidence.log_odds import VIEWS, features, linear_features
from fedvitals.diagnosis.evidence.scores import Scorer
from fedvitals.diagnosis.evidence.trend import CAP, DRIFT, LEAST, MOST, cohort_kind, groups_exchange_models
from fedvitals.diagnosis.evidence.vital_signs import SERVER, SIGNS, vital_signs_of
from fedvitals.stats import Array
from fedvitals_studies.faultbank.cases import Case, read_bank
from fedvitals_studies.faultbank.pool import is_there, load

# For these, the model's question is answered elsewhere, or has no single answer.
ASIDE = {"group_left_behind", "wrong_sample_count", "frozen_layer", "not_finite", "dominant_client"}
FOLDS = (
    ("cifar10-cnn", "digits-mlp"),
    ("cifar10-mlp", "digits-cnn"),
    ("digits-transformer", "synthetic-mlp"),
    ("synthetic-deep",),
)
BUDGETS = (0.03, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)  # alarms per 100 healthy rounds
SMALL_MORE = 4.0
NEVER = 1e9
NEGATIVES = 0.2  # share of the healthy client-rounds used for training; weighted up to all of them
SCORED = {"telemetry": 3 * len(SIGNS), "server": 3 * len(SERVER), "flip": 3 * len(SIGNS)}


@dataclass
class Rows:
    """One run's client-rounds in their order."""

    domain: str
    clean: bool
    cohort: str
    rounds: int
    nodes: list[str]
    kinds: list[str]  # of the fault that affects the client in this round; "" for none
    found: dict[str, Array]
    evidence: dict[str, Array] = field(default_factory=dict)

    def target(self, view: str) -> npt.NDArray[np.int64]:
        """Return 1 for faulty, 0 for healthy, -1 for not used in training."""
        sought = {"label_flip"} if view == "flip" else set(ISSUE_OF)
        aside = ASIDE | (set(ISSUE_OF) - sought)
        return np.array([1 if kind in sought else -1 if kind in aside else 0 for kind in self.kinds])


def rows_of(case: Case, folder: Path) -> Rows | None:
    recording, about = load(folder, case)
    struck = {node: fault for fault in about.faults for node in fault["nodes"]}
    scorer, nodes, kinds = Scorer(), list[str](), list[str]()
    found: dict[str, list[Array]] = {view: [] for view in VIEWS}
    known: set[str] = set()
    cohort = "large"
    for number in recording.rounds():
        seen = vital_signs_of(recording, number)
        scores = scorer(seen)
        known |= set(seen.nodes)
        if scores is None:
            continue
        exchanged = groups_exchange_models(groups_of(recording, number))
        cohort = cohort_kind(len(seen.nodes), len(known), exchanged=exchanged)
        for view in VIEWS:
            found[view].append(features(scores, seen, view))
        nodes += seen.nodes
        kinds += [_kind(struck.get(node), number) for node in seen.nodes]
    if not nodes:
        return None
    if any(fault["kind"] == "group_left_behind" for fault in about.faults):
        kinds = ["group_left_behind"] * len(nodes)
    arrays = {view: np.concatenate(parts) for view, parts in found.items()}
    return Rows(case.domain, not case.faulty, cohort, len(recording.rounds()), nodes, kinds, arrays)


def _kind(fault: dict[str, Any] | None, number: int) -> str:
    if fault is None or number < fault["since"] or (fault["until"] is not None and number > fault["until"]):
        return ""
    return str(fault["kind"])


def learn(runs: Sequence[Rows], view: str) -> tuple[Any, Any]:
    """Return boosted trees and a linear model, every domain with about the same weight."""
    from sklearn.ensemble import HistGradientBoostingClassifier  # noqa: PLC0415 - needed for learning only
    from sklearn.linear_model import LogisticRegression  # noqa: PLC0415

    chance = np.random.default_rng(0)
    share = {run.domain: sum(other.domain == run.domain for other in runs) for run in runs}
    parts, targets, weights = [], [], []
    for run in runs:
        target = run.target(view)
        kept = (target == 1) | ((target == 0) & (chance.random(len(target)) < NEGATIVES))
        parts.append(run.found[view][kept])
        targets.append(target[kept])
        weights.append(np.where(target[kept] == 1, 1.0, 1 / NEGATIVES) / np.sqrt(share[run.domain]))
    x, y, w = np.concatenate(parts), np.concatenate(targets), np.concatenate(weights)
    w /= w.mean()
    trees = HistGradientBoostingClassifier(
        max_iter=120, max_leaf_nodes=14, learning_rate=0.12, l2_regularization=10, min_samples_leaf=40, random_state=0
    ).fit(x, y, sample_weight=w)
    straight = LogisticRegression(C=0.03, max_iter=300).fit(linear_features(x, SCORED[view]), y, sample_weight=w)
    return trees, straight


def judge(models: tuple[Any, Any], features: Array, view: str) -> Array:
    trees, straight = models
    return np.asarray(
        0.5 * (trees.decision_function(features) + straight.decision_function(linear_features(features, SCORED[view])))
    )


def totals(run: Rows, view: str) -> Array:
    """Return the running sums of `locate`, client-round by client-round."""
    gained = np.clip(run.evidence[view] + DRIFT[view], LEAST, MOST)
    now: dict[str, float] = {}
    found = np.empty(len(gained))
    for i, node in enumerate(run.nodes):
        found[i] = now[node] = min(CAP, max(0.0, now.get(node, 0.0) + gained[i]))
    return found


def alarms(run: Rows, sums: Array, limit: float) -> int:
    accused: set[str] = set()
    count = 0
    for node, total in zip(run.nodes, sums, strict=True):
        if total > limit and node not in accused:
            accused.add(node)
            count += 1
        elif node in accused and total < limit / 2:
            accused.discard(node)
    return count


def limits_of(runs: Iterable[Rows], view: str) -> dict[str, list[list[float]]]:
    """Return, by kind of cohort and number of alarms allowed, the smallest limit that respects it on clean runs."""
    clean = [(run, totals(run, view)) for run in runs if run.clean]
    found: dict[str, list[list[float]]] = {}
    for cohort in ("partial", "small", "large", "exchanging"):
        # Too few runs of a kind cannot determine one alarm in a thousand rounds: small cohorts also use all others.
        these = [(run, sums) for run, sums in clean if run.cohort == cohort]
        rounds = sum(run.rounds for run, _ in these)
        rates = [(h, 100 * sum(alarms(run, sums, h) for run, sums in these) / max(1, rounds)) for h in _grid()]
        found[cohort] = [[budget, next((h for h, rate in rates if rate <= budget), CAP)] for budget in BUDGETS]
    if view == "server":  # an update in such a group also depends on the neighbours: nobody is accused by it
        found["exchanging"] = [[budget, NEVER] for budget in BUDGETS]
    small = sum(run.rounds for run, _ in clean if run.cohort == "small")
    found["small"] = [
        # Fewer than one alarm cannot be counted: there, the limit of large cohorts is raised by a fixed amount.
        [b, large + SMALL_MORE if b * small < 100 else max(h, large)]
        for (b, h), (_, large) in zip(found["small"], found["large"], strict=True)
    ]
    return found


def _grid() -> list[float]:
    return [0.25 * step for step in range(2, int(4 * CAP))]


def kinds_of(runs: Sequence[Rows], view: str) -> dict[str, Any]:
    """Return a linear model of the kind of fault, trained on faulty client-rounds."""
    from sklearn.linear_model import LogisticRegression  # noqa: PLC0415

    if view == "flip":
        width = linear_features(runs[0].found[view][:1], SCORED[view]).shape[1]
        return {"kinds": ["label_flip"], "kind_weights": [[0.0] * width], "kind_offsets": [0.0]}
    parts, labels = [], []
    for run in runs:
        ill = run.target(view) == 1
        parts.append(run.found[view][ill])
        labels += [kind for kind, struck in zip(run.kinds, ill, strict=True) if struck]
    fitted = LogisticRegression(C=0.1, max_iter=400, class_weight="balanced").fit(
        linear_features(np.concatenate(parts), SCORED[view]), labels
    )
    return {
        "kinds": fitted.classes_.tolist(),
        "kind_weights": fitted.coef_.round(4).tolist(),
        "kind_offsets": fitted.intercept_.round(4).tolist(),
    }


def as_numbers(models: tuple[Any, Any], view: str) -> dict[str, Any]:
    """Return the models as plain numbers."""
    trees, straight = models
    packed: dict[str, list[Any]] = {
        name: [] for name in ("feature", "limit", "left", "right", "missing_left", "value", "leaf")
    }
    nodes = [predictor[0].nodes for predictor in trees._predictors]  # noqa: SLF001 - there is no public access to them
    most = max(len(tree) for tree in nodes)
    for tree in nodes:
        rest = most - len(tree)
        columns = {
            "feature": tree["feature_idx"],
            "limit": tree["num_threshold"].astype(np.float64),
            "left": tree["left"],
            "right": tree["right"],
            "missing_left": tree["missing_go_to_left"],
            "value": np.round(tree["value"].astype(np.float64), 5),
            "leaf": tree["is_leaf"],
        }
        for name, column in columns.items():
            fill = 1 if name == "leaf" else 0
            packed[name].append([*(x.item() for x in column), *([fill] * rest)])
    baseline = float(np.asarray(trees._baseline_prediction).ravel()[0])  # noqa: SLF001
    return {
        "trees": {**packed, "baseline": round(baseline, 5)},
        "weights": straight.coef_[0].round(5).tolist(),
        "offset": round(float(straight.intercept_[0]), 5),
        "scored": SCORED[view],
    }


def main(folder: str, target: str) -> None:
    bank = read_bank("tune")
    runs: list[Rows] = []
    for case in bank.cases:
        rows = rows_of(case, Path(folder)) if is_there(Path(folder), case) else None
        runs += [] if rows is None else [rows]
    say(f"{len(runs)} runs of {len(bank.cases)}, {sum(len(run.nodes) for run in runs)} client-rounds")
    views = {}
    for view in VIEWS:
        for fold in FOLDS:
            models = learn([run for run in runs if run.domain not in fold], view)
            for run in runs:
                if run.domain in fold:
                    run.evidence[view] = judge(models, run.found[view], view)
            say(f"{view}: scored {', '.join(fold)}")
        views[view] = {**as_numbers(learn(runs, view), view), **kinds_of(runs, view)}
        views[view] |= {"limits": limits_of(runs, view)}
        say(f"{view}: limits {views[view]['limits']}")
    model = {"bank": bank.digest, "views": views}
    Path(target).write_text(json.dumps(model) + "\n", encoding="utf-8")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - it takes minutes, and is run by hand


if __name__ == "__main__":
    main(*sys.argv[1:])
