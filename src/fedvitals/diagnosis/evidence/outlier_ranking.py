# SPDX-License-Identifier: Apache-2.0
"""Rank clients and layers by how far they differ from their peers: a ranking for people, never a finding.

The score is the distance of a value from its peers' median in robust standard deviations (see `robust_scores`), for the
size of the update or its direction, whichever is larger; the median over the newest rounds. With fewer than four
clients it is the distance of the newest update's size from the client's own earlier ones. It suggests where to look
first: with ten clients one exceeds 3.5 in every eighth round, so it accuses nobody. Norms cover finite values only, so
a client with non-finite values ranks above all scores: the first to have them is first, since the others may have got
them from it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from fedvitals.diagnosis.evidence.attendance import SERVER
from fedvitals.protocols import History, Node
from fedvitals.stats import Array

NEWEST = 5  # rounds considered
FEWEST = 4  # peers, below which a median says nothing
# Least spread among peers: keeps rounding from turning into scores in a cohort of near-equal values.
FLOORS = {"update.norm": 0.05, "update.cosine_mean": 0.05}


@dataclass(frozen=True, slots=True)
class Outlier:
    """A client or layer, how far it differs from its peers, and in which quantity."""

    name: str
    score: float
    why: str


def robust_scores(values: Array, floor: float, of: Array | None = None) -> Array:
    """Return the signed distance of these values (or of `of`) from their median in robust standard deviations; NaN
    stays NaN.

    The definition wherever a person reads these words: √((1.4826 · MAD)² + floor²), where the floor is a twentieth of
    the value (for logarithms and artanh: 0.05).
    """
    middle = np.nanmedian(values)
    spread = 1.4826 * np.nanmedian(np.abs(values - middle))
    return np.asarray(((values if of is None else of) - middle) / np.hypot(spread, floor))


def rank_outlier_clients(history: History) -> list[Outlier]:
    """Return every client of the newest rounds, the largest outlier first."""
    scores: dict[Node, list[tuple[float, str]]] = {}
    broken: dict[Node, float] = {}  # in the order of the first rounds
    for round_index in history.rounds()[-NEWEST:]:
        for node, score in _scores_of_round(history, round_index).items():
            scores.setdefault(node, []).append(score)
        counts = nonfinite_counts(history, round_index)
        for node in sorted(counts.keys() - {SERVER}, key=lambda node: -counts[node]):
            broken[node] = broken.get(node, 0.0) + counts[node]
    ranked = [_median_outlier(node, client_scores) for node, client_scores in scores.items() if node not in broken]
    ranked += _against_own_rounds(history, {*scores, *broken})
    lead = [Outlier(node, float("inf"), f"{_in_full(count)} values NaN or Inf") for node, count in broken.items()]
    return [*lead, *sorted(ranked, key=lambda s: -s.score)]


def nonfinite_counts(history: History, round_index: int) -> dict[Node, float]:
    """Return how many values of each client's gradients and weights were NaN or infinite in a round.

    Clients without any are left out.
    """
    counts: dict[Node, float] = {}
    for name in ("gradient.nonfinite", "weight.nonfinite"):
        for node, count in history.latest(name, round_index).items():
            if count != 0:  # a count of NaN does not mean none
                counts[node] = counts.get(node, 0.0) + count
    return counts


def _in_full(count: float) -> str:
    return f"{count:,.0f}".replace(",", "\u2009")


def _scores_of_round(history: History, round_index: int) -> Mapping[Node, tuple[float, str]]:
    norms, cosines = history.latest("update.norm", round_index), history.latest("update.cosine_mean", round_index)
    nodes = [node for node in norms if node in cosines]
    if len(nodes) < FEWEST:
        return {}
    with np.errstate(divide="ignore", invalid="ignore"):
        sizes = np.log(np.array([norms[node] for node in nodes]))
        turns = np.arctanh(np.clip(np.array([cosines[node] for node in nodes]), -0.999, 0.999))
    sizes[~np.isfinite(sizes)] = np.nan
    size = robust_scores(sizes, FLOORS["update.norm"])
    turn = robust_scores(turns, FLOORS["update.cosine_mean"])
    scores = {}
    for i, node in enumerate(nodes):
        candidates = [
            (abs(size[i]), "larger updates" if size[i] > 0 else "smaller updates"),
            (-turn[i], "other direction"),
        ]
        usable = [c for c in candidates if np.isfinite(c[0])]
        scores[node] = max(usable) if usable else (float("inf"), "zero or not finite")
    return scores


def _against_own_rounds(history: History, known: Collection[Node]) -> list[Outlier]:
    """Return the newest clients that have too few peers, with the size of their newest update among their own."""
    norms: dict[Node, list[float]] = {}
    for round_index in history.rounds()[-NEWEST:]:
        for node, norm in history.latest("update.norm", round_index).items():
            if node not in known:
                norms.setdefault(node, []).append(norm)
    ranked = []
    for node, values in norms.items():
        with np.errstate(divide="ignore"):
            *before, newest = np.log(np.array(values))
        if not before or not np.isfinite([*before, newest]).all():
            ranked.append(Outlier(node, 0.0, "too few clients to compare it with"))
            continue
        score = float(robust_scores(np.array(before), FLOORS["update.norm"], np.array([newest]))[0])
        ratio = float(np.exp(newest - np.median(before)))
        ranked.append(Outlier(node, abs(score), f"its update is {ratio:.2g}× as large as in its rounds before"))
    return ranked


def _median_outlier(node: Node, scores: list[tuple[float, str]]) -> Outlier:
    ordered = sorted(scores)
    score, why = ordered[len(ordered) // 2]
    return Outlier(node, float(score), why)


def rank_outlier_layers(history: History) -> list[Outlier]:
    """Return every layer, the one whose gradient changed most since the first rounds first; non-finite ones on top."""
    ranked = []
    for layer in history.layers("gradient"):
        rounds, _, norms = history.matrix("gradient", "rms", layer)
        _, _, nans = history.matrix("gradient", "nans", layer)
        _, _, infs = history.matrix("gradient", "infs", layer)
        broken = float(np.nansum(nans) + np.nansum(infs))
        if broken:
            ranked.append(Outlier(layer, float("inf"), f"{_in_full(broken)} gradient values NaN or Inf"))
            continue
        typical = np.array([np.nanmedian(row) if np.isfinite(row).any() else np.nan for row in norms])
        early, late = typical[: max(1, len(rounds) // 4)], typical[-NEWEST:]
        ratio = float(np.nanmedian(late) / np.nanmedian(early)) if len(rounds) and np.nanmedian(early) > 0 else 1.0
        if ratio == 0:
            ranked.append(Outlier(layer, float("inf"), "gradient became zero"))
            continue
        change = abs(float(np.log2(ratio)))
        ranked.append(Outlier(layer, change, f"gradient {ratio:.2g}× its size in the first rounds"))
    return sorted(ranked, key=lambda s: -s.score)
