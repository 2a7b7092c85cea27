# SPDX-License-Identifier: Apache-2.0
"""What a round, and a run, is bound by: the part that it would have to be rid of to become shorter.

First the few slowest: if the round would be much shorter without them, no part of the others' work is to blame.
Otherwise the class of work with the largest share of the critical path. Where clients take turns in one process that
path leads through all of them, so the shares are those of all their work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedvitals.analysis.critical_path import Path, critical_path, in_words
from fedvitals.analysis.round_shape import CLASSES, Shape
from fedvitals.analysis.timeline import WAITING, RoundTime, asynchronous
from fedvitals.analysis.warmup import WarmUp, warm_up
from fedvitals.resources.node_spans import UNACCOUNTED
from fedvitals.time_parts import WORK

STRAGGLER, NOTHING = "straggler", "nothing"
KINDS = ("compute", "upload", "download", STRAGGLER, "aggregation", "data loading", "server", NOTHING)

BOUND = 1 / 3  # of the path, or of the round: below it, even to be rid of it all gains less than half in speed
FEW = 0.1  # of the clients, at most, are «the slowest few»: more of them are a kind of device, not stragglers
PAIR = 6  # clients, from which on two may be the slowest few
TIE = 0.1  # of the larger of two shares, by which upload and download may differ and are named together
FEWEST_CLIENTS = 3  # of two, one is always the slower, and nobody says which of them is usual
SLOWER = 1.5  # times the others' median: of clients that take turns, three equal ones make a third each
LONG = 1.5  # times the median: what a round lasts beyond it does not count more than others' when a run is judged
OFTEN = 0.5  # of a client's rounds: chance makes somebody the slowest in every round, but seldom the same one


@dataclass(frozen=True, slots=True)
class RoundVerdict:
    """What one round is bound by."""

    round: int
    clock: str
    seconds: float
    kind: str
    share: float  # of the round: of the class on its critical path, or what it would save without the stragglers
    shares: dict[str, float]  # by class
    path: Path
    stragglers: tuple[str, ...]
    without: float | None  # seconds without them
    bound_by: str | None  # what makes them slow
    text: str


@dataclass(frozen=True, slots=True)
class RunVerdict:
    """What a run is bound by, over all of its rounds."""

    clock: str
    kind: str
    share: float
    shares: dict[str, float]
    rounds: int
    seconds: float  # of a round, the mean; a warm-up is left out
    stragglers: tuple[str, ...]
    without: float | None  # seconds of a round without them, the mean
    bound_by: str | None
    evidence: dict[str, Any]
    text: str
    by_round: tuple[RoundVerdict, ...]
    warm_up: WarmUp | None = None  # the first round, where it took long because everything began in it


def judge_round(time: RoundTime, path: Path | None = None, *, waits: bool = True) -> RoundVerdict:
    """What this round is bound by. `path`: its critical path, where that is known already.

    `waits`: False of an asynchronous server, which goes on with the others; who brings what it began before the round
    holds nobody up either.
    """
    path = critical_path(time) if path is None else path
    slow, seconds = slowest_few(path.shape) if waits and not time.overlapping else ((), time.seconds)
    bound_by: str | None = None
    if slow:
        kind, share = STRAGGLER, 1 - seconds / time.seconds
        bound_by = excess(path.shape, slow)
    else:
        kind, share = largest(path.shares)
    text = f"{path.text}; {bound_words(kind, share, slow, bound_by, path.shares)}"
    rest = seconds if slow else None
    return RoundVerdict(
        time.round, time.clock, time.seconds, kind, share, path.shares, path, slow, rest, bound_by, text
    )


def slowest_few(shape: Shape) -> tuple[tuple[str, ...], float]:
    """The fewest clients without whom the round is a third shorter, and its seconds then; () where there are none."""
    count = len(shape.nodes)
    if count < FEWEST_CLIENTS or shape.seconds <= 0:
        return (), shape.seconds
    ends = shape.ends
    order = np.argsort(-ends, kind="stable")
    most = few(count)
    if _rest(shape, order[:most]) > (1 - BOUND) * shape.seconds:
        return (), shape.seconds
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        enough = _rest(shape, order[:middle]) <= (1 - BOUND) * shape.seconds
        low, high = (low, middle) if enough else (middle + 1, high)
    if ends[order[low - 1]] < SLOWER * float(np.median(ends[order[low:]])):
        return (), shape.seconds
    return tuple(shape.nodes[i] for i in order[:low]), _rest(shape, order[:low])


def few(clients: int) -> int:
    """How many of so many clients may be the slowest few: a tenth, or two."""
    return max(2 if clients >= PAIR else 1, int(FEW * clients))


def _rest(shape: Shape, gone: Any) -> float:
    keep = np.ones(len(shape.nodes), bool)
    keep[gone] = False
    return min(shape.seconds, shape.length(keep=keep))


def excess(shape: Shape, nodes: Collection[str]) -> str | None:
    """The class of work in which some clients are furthest behind the median of the others."""
    chosen = np.array([node in nodes for node in shape.nodes], bool)
    if not chosen.any() or chosen.all():
        return None
    more = shape.work[chosen].mean(axis=0) - np.median(shape.work[~chosen], axis=0)
    name = CLASSES[int(more.argmax())]
    return UNACCOUNTED if name == "other" else name


def largest(shares: Mapping[str, float]) -> tuple[str, float]:
    """The class of work with the largest share, and that share; «nothing» where no share is over a third.

    Of upload and download that are about equal it is upload, which more can be done about.
    """
    known = {kind: shares.get(kind, 0.0) for kind in WORK.values()}
    kind = max(known, key=lambda one: known[one])
    if known[kind] <= BOUND:
        return NOTHING, known[kind]
    return ("upload", known["upload"]) if kind == "download" and tied(shares) else (kind, known[kind])


def tied(shares: Mapping[str, float]) -> bool:
    """Whether upload and download take about the same."""
    less, more = sorted(shares.get(way, 0.0) for way in ("upload", "download"))
    return less >= (1 - TIE) * more > 0


def judge(times: Sequence[RoundTime], *, paths: Sequence[Path] | None = None) -> RunVerdict | None:
    """What these rounds are bound by; all of one clock (`timeline.of_clock`). None where there are none.

    `paths`: those of the rounds, where they are known already.
    """
    paths = [critical_path(time) for time in times] if paths is None else paths
    first = warm_up(times, paths)
    waits = not asynchronous(times)
    both = [(time, path) for time, path in zip(times, paths, strict=True) if time.seconds > 0]
    every = tuple(judge_round(time, path, waits=waits) for time, path in both)
    times = [time for time, _ in both]
    if not every:
        return None
    rounds = [one for one in every if first is None or one.round != first.round]
    total = sum(one.seconds for one in rounds)
    shares = _usual_shares(rounds)
    slow, rest = _steady_stragglers(rounds, total)
    bound_by = None
    if slow:
        kind, share = STRAGGLER, 1 - rest / total
        known = Counter(one.bound_by for one in rounds if one.bound_by and set(one.stragglers) & set(slow))
        bound_by = known.most_common(1)[0][0] if known else None
    else:
        kind, share = largest(shares)
    seconds = total / len(rounds)
    without = rest / len(rounds) if slow else None
    evidence = {
        "rounds": len(every),
        "seconds_per_round": seconds,
        "shares": shares,
        "bound_from": BOUND,
        "kinds": dict(Counter(one.kind for one in rounds)),
        "stragglers": {node: sum(node in one.stragglers for one in rounds) for node in slow},
        "seconds_without": without,
        "idle_per_round": sum(time.idle for time in times) / len(times),
        "warm_up": None if first is None else first.round,
    }
    text = f"A round takes {in_words(seconds)}: {bound_words(kind, share, slow, bound_by, shares)}"
    text += f", and takes {in_words(without)} without {_names(slow)}." if without is not None else "."
    if first is not None:
        text += f" Round {first.round} took {in_words(first.seconds)}, a warm-up of {in_words(first.extra)}."
    return RunVerdict(
        rounds[0].clock,
        kind,
        share,
        shares,
        len(every),
        seconds,
        slow,
        without,
        bound_by,
        evidence,
        text,
        every,
        first,
    )


def _weights(rounds: Sequence[RoundVerdict]) -> list[float]:
    """How much each round counts: as long as it lasted, but one that was held up once no more than a long one."""
    longest = LONG * float(np.median([one.seconds for one in rounds]))
    return [min(one.seconds, longest) for one in rounds]


def _usual_shares(rounds: Sequence[RoundVerdict]) -> dict[str, float]:
    """Of the whole run."""
    found: dict[str, float] = {}
    weights = _weights(rounds)
    for one, weight in zip(rounds, weights, strict=True):
        for kind, share in one.shares.items():
            found[kind] = found.get(kind, 0.0) + share * weight / sum(weights)
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _steady_stragglers(rounds: Sequence[RoundVerdict], total: float) -> tuple[tuple[str, ...], float]:
    """Who holds up most of the rounds that they take part in, and the run's seconds without them."""
    named = Counter(node for one in rounds for node in one.stragglers)
    if not named:
        return (), total
    there = Counter(node for one in rounds for node in one.path.shape.nodes)
    fewest = min(2, len(rounds))
    often = [n for n, times in named.most_common() if times >= fewest and times > OFTEN * there[n]]
    slow = tuple(often[: few(len(there))])
    left = [one.path.shape.without(slow) for one in rounds]
    weights = _weights(rounds)
    saved = sum(w * (1 - rest / one.seconds) for w, rest, one in zip(weights, left, rounds, strict=True))
    return (slow, sum(left)) if slow and saved >= BOUND * sum(weights) else ((), total)


def bound_words(
    kind: str,
    share: float,
    stragglers: Sequence[str] = (),
    bound_by: str | None = None,
    shares: Mapping[str, float] | None = None,
) -> str:
    """«upload-bound, 62 % of its critical path», «straggler-bound: it waits for c7, slow in upload»."""
    if kind == STRAGGLER:
        behind = f", slow in {bound_by}" if bound_by and bound_by != UNACCOUNTED else ""
        return f"straggler-bound: it waits for {_names(stragglers)}{behind}"
    if kind in ("upload", "download") and tied(shares or {}):
        up, down = ((shares or {}).get(way, 0.0) for way in ("upload", "download"))
        return f"transfer-bound: upload {up:.0%}, download {down:.0%} of its critical path"
    if kind != NOTHING:
        return f"{kind.replace(' ', '-')}-bound, {share:.0%} of its critical path"
    unknown = (shares or {}).get(UNACCOUNTED, 0.0)
    waiting = (shares or {}).get(WAITING, 0.0)
    if max(unknown, waiting) > BOUND:
        what = "is unaccounted for" if unknown >= waiting else "is spent waiting for what is not seen"
        return f"bound by nothing that is known, {max(unknown, waiting):.0%} of its critical path {what}"
    return "bound by nothing in particular, no kind of work is a third of its critical path"


def _names(nodes: Sequence[str]) -> str:
    shown = [*nodes[:3], *([f"{len(nodes) - 3} more"] if len(nodes) > 3 else [])]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
