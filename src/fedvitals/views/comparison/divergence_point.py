# SPDX-License-Identifier: Apache-2.0
"""Finds the first round in which two runs differ: at all, beyond noise, and beyond the spread of repeats."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedvitals.views.comparison.chance import change, pairing
from fedvitals.views.run_figures import Figures

NOISE = 1e-5  # relative: the effect of the order of float32 sums over a local training
SURE_IN_ALL = 0.95  # over all rounds together


@dataclass(frozen=True, slots=True)
class Differing:
    """A round in which two runs differ, and in what."""

    round: int
    metrics: Mapping[str, tuple[float | None, float | None]]  # of the federation
    nodes: Mapping[str, tuple[float | None, float | None]]  # update norms that differ; None: it took no part
    same_nodes: int  # clients whose update norms are the same
    node_count: int


@dataclass(frozen=True, slots=True)
class DivergencePoint:
    """Where two sides begin to differ."""

    exact: Differing | None  # the first difference of any size; None: equal as far as both go
    beyond_noise: Differing | None
    beyond_repeats: int | None
    beyond_repeats_by: str | None  # which metric
    repeats: tuple[int, int]
    rounds: tuple[int, int]

    @property
    def equal(self) -> bool:
        """Whether they do not differ at all."""
        return self.exact is None and self.rounds[0] == self.rounds[1]


def divergence_point(before: Sequence[Figures], after: Sequence[Figures]) -> DivergencePoint:
    """Compare one run of each side number by number, with the same seed if possible; with repeats also the sides."""
    first, second = _pair(before, after)
    number, metric = _beyond_repeats(before, after)
    return DivergencePoint(
        _first(first, second, 0.0),
        _first(first, second, NOISE),
        number,
        metric,
        (len(before), len(after)),
        (first.rounds, second.rounds),
    )


def _pair(before: Sequence[Figures], after: Sequence[Figures]) -> tuple[Figures, Figures]:
    """Return two runs with the same seed if there are any: with others, all numbers differ."""
    pairs = [(first, second) for first in before for second in after if first.run.seed == second.run.seed]
    return pairs[0] if pairs else (before[0], after[0])


def _first(first: Figures, second: Figures, noise: float) -> Differing | None:
    if (first.accuracy, first.loss, first.norms) == (second.accuracy, second.loss, second.norms):
        return None  # comparing each number would take seconds for a thousand clients
    shared = {"accuracy": (first.accuracy, second.accuracy), "loss": (first.loss, second.loss)}
    for number in _rounds(first, second):
        metrics = {name: (a.get(number), b.get(number)) for name, (a, b) in shared.items()}
        known = {**first.norms, **second.norms}
        nodes = {node: (_at(first, node, number), _at(second, node, number)) for node in known}
        present = {node: pair for node, pair in nodes.items() if pair != (None, None)}
        differing = {node: pair for node, pair in present.items() if not _same(*pair, noise)}
        differing_metrics = {name: pair for name, pair in metrics.items() if not _same(*pair, noise)}
        if differing_metrics or differing:
            return Differing(number, differing_metrics, differing, len(present) - len(differing), len(present))
    return None


def _at(figures: Figures, node: str, number: int) -> float | None:
    return figures.norms.get(node, {}).get(number)


def _rounds(first: Figures, second: Figures) -> list[int]:
    """Return the rounds that both have: if one continues longer, that is no difference in what they did."""
    ends = [max((n for c in (f.accuracy, f.loss, *f.norms.values()) for n in c), default=-1) for f in (first, second)]
    known = {n for f in (first, second) for c in (f.accuracy, f.loss, *f.norms.values()) for n in c}
    return sorted(n for n in known if n <= min(ends))


def _same(first: float | None, second: float | None, noise: float) -> bool:
    if first is None or second is None:
        return first is second
    if math.isnan(first) or math.isnan(second):
        return math.isnan(first) and math.isnan(second)
    return first == second or (noise > 0 and math.isclose(first, second, rel_tol=noise))


def _beyond_repeats(before: Sequence[Figures], after: Sequence[Figures]) -> tuple[int | None, str | None]:
    """Return the first round in which the interval excludes 0, at 95 % over all rounds and both metrics jointly."""
    if min(len(before), len(after)) < 2:
        return None, None
    kinds = {
        "accuracy": ([f.accuracy for f in before], [f.accuracy for f in after]),
        "loss": ([f.loss for f in before], [f.loss for f in after]),
    }
    tests = [
        (number, name, [c[number] for c in first if number in c], [c[number] for c in second if number in c])
        for name, (first, second) in kinds.items()
        for number in {n for values in (*first, *second) for n in values}
    ]
    sure = 1 - (1 - SURE_IN_ALL) / max(1, len(tests))
    pairs = pairing([f.run.seed for f in before], [f.run.seed for f in after])
    for number, name, a, b in sorted(tests, key=lambda test: test[:2]):
        whole = len(a) == len(before) and len(b) == len(after)  # a run that ended earlier has no partner here
        difference = change(a, b, sure, pairs if whole else None)
        if difference is not None and difference.beyond_chance:
            return number, name
    return None, None
