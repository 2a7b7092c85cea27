# SPDX-License-Identifier: Apache-2.0
"""Where two runs part: the first round in which they differ at all, beyond noise, and beyond what repeats differ by."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedvitals.views.comparison.chance import change, pairing
from fedvitals.views.run_figures import Figures

NOISE = 1e-5  # relative: what the order of float32 sums may change, over a local training
SURE_IN_ALL = 0.95  # over all rounds together


@dataclass(frozen=True, slots=True)
class Differing:
    """A round in which two runs are not the same, and what is not."""

    round: int
    metrics: Mapping[str, tuple[float | None, float | None]]  # of the federation
    nodes: Mapping[str, tuple[float | None, float | None]]  # update norms that differ; None: it took no part
    same_nodes: int  # clients whose update norms are the same
    node_count: int


@dataclass(frozen=True, slots=True)
class Parting:
    exact: Differing | None  # the first difference at all; None: equal as far as both go
    beyond_noise: Differing | None
    beyond_repeats: int | None
    beyond_repeats_by: str | None  # which metric
    repeats: tuple[int, int]
    rounds: tuple[int, int]

    @property
    def equal(self) -> bool:
        return self.exact is None and self.rounds[0] == self.rounds[1]


def parting(before: Sequence[Figures], after: Sequence[Figures]) -> Parting:
    """Of two sides: number by number of one run each, of the same seed if possible; with repeats also as wholes."""
    one, two = _pair(before, after)
    number, metric = _beyond_repeats(before, after)
    return Parting(
        _first(one, two, 0.0),
        _first(one, two, NOISE),
        number,
        metric,
        (len(before), len(after)),
        (one.rounds, two.rounds),
    )


def _pair(before: Sequence[Figures], after: Sequence[Figures]) -> tuple[Figures, Figures]:
    """Two runs of one seed where there are such: others differ from the first number on."""
    pairs = [(one, two) for one in before for two in after if one.run.seed == two.run.seed]
    return pairs[0] if pairs else (before[0], after[0])


def _first(one: Figures, two: Figures, noise: float) -> Differing | None:
    if (one.accuracy, one.loss, one.norms) == (two.accuracy, two.loss, two.norms):
        return None  # number by number this would take seconds, of a thousand clients
    shared = {"accuracy": (one.accuracy, two.accuracy), "loss": (one.loss, two.loss)}
    for number in _rounds(one, two):
        metrics = {name: (a.get(number), b.get(number)) for name, (a, b) in shared.items()}
        nodes = {node: (_at(one, node, number), _at(two, node, number)) for node in {**one.norms, **two.norms}}
        present = {node: pair for node, pair in nodes.items() if pair != (None, None)}
        differing = {node: pair for node, pair in present.items() if not _same(*pair, noise)}
        told = {name: pair for name, pair in metrics.items() if not _same(*pair, noise)}
        if told or differing:
            return Differing(number, told, differing, len(present) - len(differing), len(present))
    return None


def _at(figures: Figures, node: str, number: int) -> float | None:
    return figures.norms.get(node, {}).get(number)


def _rounds(one: Figures, two: Figures) -> list[int]:
    """As far as both go: that one goes on longer is no difference in what they did."""
    ends = [max((n for c in (f.accuracy, f.loss, *f.norms.values()) for n in c), default=-1) for f in (one, two)]
    known = {n for f in (one, two) for c in (f.accuracy, f.loss, *f.norms.values()) for n in c}
    return sorted(n for n in known if n <= min(ends))


def _same(one: float | None, two: float | None, noise: float) -> bool:
    if one is None or two is None:
        return one is two
    if math.isnan(one) or math.isnan(two):
        return math.isnan(one) and math.isnan(two)
    return one == two or (noise > 0 and math.isclose(one, two, rel_tol=noise))


def _beyond_repeats(before: Sequence[Figures], after: Sequence[Figures]) -> tuple[int | None, str | None]:
    """The first round in which the interval leaves out 0, held to 95 % over all rounds and both metrics at once."""
    if min(len(before), len(after)) < 2:
        return None, None
    kinds = {
        "accuracy": ([f.accuracy for f in before], [f.accuracy for f in after]),
        "loss": ([f.loss for f in before], [f.loss for f in after]),
    }
    tests = [
        (number, name, [c[number] for c in one if number in c], [c[number] for c in two if number in c])
        for name, (one, two) in kinds.items()
        for number in {n for course in (*one, *two) for n in course}
    ]
    sure = 1 - (1 - SURE_IN_ALL) / max(1, len(tests))
    pairs = pairing([f.run.seed for f in before], [f.run.seed for f in after])
    for number, name, a, b in sorted(tests, key=lambda test: test[:2]):
        whole = len(a) == len(before) and len(b) == len(after)  # a run that ended sooner has no partner here
        found = change(a, b, sure, pairs if whole else None)
        if found is not None and found.beyond_chance:
            return number, name
    return None, None
