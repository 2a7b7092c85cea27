# SPDX-License-Identifier: Apache-2.0
"""Determine what bounds a round, and a run: the part without which it would be shorter.

The few slowest clients come first: if the round would be much shorter without them, no part of the others' work is to
blame. Otherwise it is the class of work with the largest share of the critical path. If clients take turns in one
process, that path leads through all of them, so the shares are those of all their work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedvitals.analysis.critical_path import CriticalPath, WarmUp, critical_path, format_seconds, warm_up
from fedvitals.analysis.round_shape import CLASSES, RoundShape
from fedvitals.analysis.timeline import WAITING, RoundTime, asynchronous
from fedvitals.resources.node_spans import UNACCOUNTED
from fedvitals.time_parts import WORK

STRAGGLER, NOTHING = "straggler", "nothing"
KINDS = ("compute", "upload", "download", STRAGGLER, "aggregation", "data loading", "server", NOTHING)

BOUND = 1 / 3  # of the path, or of the round: a smaller part gains less than half in speed even if removed entirely
FEW = 0.1  # share of the clients that «the slowest few» are at most: more of them are a type of device, not stragglers
PAIR = 6  # clients from which on two may be the slowest few
TIE = 0.1  # relative to the larger share: upload and download that differ by less are named together
FEWEST_CLIENTS = 3  # of two, one is always slower, and it is unknown which of them is usual
SLOWER = 1.5  # times the others' median: among clients that take turns, three equal ones take a third each
LONG = 1.5  # times the median: a round's length counts only up to this when a run is judged
OFTEN = 0.5  # share of a client's rounds: by chance some client is the slowest in every round, but seldom the same one


@dataclass(frozen=True, slots=True)
class RoundVerdict:
    """What one round is bound by."""

    round: int
    clock: str
    seconds: float
    kind: str
    share: float  # of the round: of the class on its critical path, or the saving without the stragglers
    shares: dict[str, float]  # by class
    path: CriticalPath
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
    seconds: float  # mean seconds of a round, without a warm-up
    stragglers: tuple[str, ...]
    without: float | None  # mean seconds of a round without them
    bound_by: str | None
    evidence: dict[str, Any]
    text: str
    by_round: tuple[RoundVerdict, ...]
    warm_up: WarmUp | None = None  # the first round, if it took long because everything started in it


def judge_round(time: RoundTime, path: CriticalPath | None = None, *, waits: bool = True) -> RoundVerdict:
    """Return what this round is bound by. `path` is its critical path, if already known.

    `waits` is False for an asynchronous server, which continues with the other clients; a client that began before the
    round delays nobody there.
    """
    path = critical_path(time) if path is None else path
    slow, seconds = slowest_few(path.shape) if waits and not time.overlapping else ((), time.seconds)
    bound_by: str | None = None
    if slow:
        kind, share = STRAGGLER, 1 - seconds / time.seconds
        bound_by = slowest_kind_of(path.shape, slow)
    else:
        kind, share = dominant_kind(path.shares)
    text = f"{path.text}; {describe_bound(kind, share, slow, bound_by, path.shares)}"
    rest = seconds if slow else None
    return RoundVerdict(
        time.round, time.clock, time.seconds, kind, share, path.shares, path, slow, rest, bound_by, text
    )


def slowest_few(shape: RoundShape) -> tuple[tuple[str, ...], float]:
    """Return the fewest clients without whom the round is a third shorter, and its seconds without them; () if none."""
    count = len(shape.nodes)
    if count < FEWEST_CLIENTS or shape.seconds <= 0:
        return (), shape.seconds
    ends = shape.ends
    order = np.argsort(-ends, kind="stable")
    most = max_stragglers(count)
    if _seconds_without(shape, order[:most]) > (1 - BOUND) * shape.seconds:
        return (), shape.seconds
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        enough = _seconds_without(shape, order[:middle]) <= (1 - BOUND) * shape.seconds
        low, high = (low, middle) if enough else (middle + 1, high)
    if ends[order[low - 1]] < SLOWER * float(np.median(ends[order[low:]])):
        return (), shape.seconds
    return tuple(shape.nodes[i] for i in order[:low]), _seconds_without(shape, order[:low])


def max_stragglers(clients: int) -> int:
    """Return how many of so many clients may count as the slowest few: a tenth, or two."""
    return max(2 if clients >= PAIR else 1, int(FEW * clients))


def _seconds_without(shape: RoundShape, gone: Any) -> float:
    keep = np.ones(len(shape.nodes), bool)
    keep[gone] = False
    return min(shape.seconds, shape.length(keep=keep))


def slowest_kind_of(shape: RoundShape, nodes: Collection[str]) -> str | None:
    """Return the class of work in which these clients are furthest behind the median of the others."""
    chosen = np.array([node in nodes for node in shape.nodes], bool)
    if not chosen.any() or chosen.all():
        return None
    more = shape.work[chosen].mean(axis=0) - np.median(shape.work[~chosen], axis=0)
    name = CLASSES[int(more.argmax())]
    return UNACCOUNTED if name == "other" else name


def dominant_kind(shares: Mapping[str, float]) -> tuple[str, float]:
    """Return the class of work with the largest share, and that share; «nothing» if no share is over a third.

    If upload and download are about equal it is upload, which is easier to reduce.
    """
    known = {kind: shares.get(kind, 0.0) for kind in WORK.values()}
    kind = max(known, key=lambda kind: known[kind])
    if known[kind] <= BOUND:
        return NOTHING, known[kind]
    return (
        ("upload", known["upload"]) if kind == "download" and upload_and_download_tied(shares) else (kind, known[kind])
    )


def upload_and_download_tied(shares: Mapping[str, float]) -> bool:
    """Return whether upload and download take about the same time."""
    less, more = sorted(shares.get(way, 0.0) for way in ("upload", "download"))
    return less >= (1 - TIE) * more > 0


def judge(times: Sequence[RoundTime], *, paths: Sequence[CriticalPath] | None = None) -> RunVerdict | None:
    """Return what these rounds of one clock (`timeline.rounds_of_clock`) are bound by, or None if there are none.

    `paths` are the critical paths of the rounds, if already known.
    """
    paths = [critical_path(time) for time in times] if paths is None else paths
    first = warm_up(times, paths)
    waits = not asynchronous(times)
    timed = [(time, path) for time, path in zip(times, paths, strict=True) if time.seconds > 0]
    verdicts = tuple(judge_round(time, path, waits=waits) for time, path in timed)
    times = [time for time, _ in timed]
    if not verdicts:
        return None
    rounds = [verdict for verdict in verdicts if first is None or verdict.round != first.round]
    total = sum(verdict.seconds for verdict in rounds)
    shares = _usual_shares(rounds)
    stragglers, rest = _steady_stragglers(rounds, total)
    bound_by = None
    if stragglers:
        kind, share = STRAGGLER, 1 - rest / total
        known = Counter(
            verdict.bound_by for verdict in rounds if verdict.bound_by and set(verdict.stragglers) & set(stragglers)
        )
        bound_by = known.most_common(1)[0][0] if known else None
    else:
        kind, share = dominant_kind(shares)
    seconds = total / len(rounds)
    without = rest / len(rounds) if stragglers else None
    evidence = {
        "rounds": len(verdicts),
        "seconds_per_round": seconds,
        "shares": shares,
        "bound_from": BOUND,
        "kinds": dict(Counter(verdict.kind for verdict in rounds)),
        "stragglers": {node: sum(node in verdict.stragglers for verdict in rounds) for node in stragglers},
        "seconds_without": without,
        "idle_per_round": sum(time.idle for time in times) / len(times),
        "warm_up": None if first is None else first.round,
    }
    text = f"A round takes {format_seconds(seconds)}: {describe_bound(kind, share, stragglers, bound_by, shares)}"
    text += f", and takes {format_seconds(without)} without {_names(stragglers)}." if without is not None else "."
    if first is not None:
        took, extra = format_seconds(first.seconds), format_seconds(first.extra)
        text += f" Round {first.round} took {took}, a warm-up of {extra}."
    return RunVerdict(
        rounds[0].clock,
        kind,
        share,
        shares,
        len(verdicts),
        seconds,
        stragglers,
        without,
        bound_by,
        evidence,
        text,
        verdicts,
        first,
    )


def _weights(rounds: Sequence[RoundVerdict]) -> list[float]:
    """Return each round's weight: its length, capped so that a single delayed round does not dominate."""
    longest = LONG * float(np.median([verdict.seconds for verdict in rounds]))
    return [min(verdict.seconds, longest) for verdict in rounds]


def _usual_shares(rounds: Sequence[RoundVerdict]) -> dict[str, float]:
    """Return the shares by class over the whole run, the largest first."""
    shares: dict[str, float] = {}
    weights = _weights(rounds)
    for verdict, weight in zip(rounds, weights, strict=True):
        for kind, share in verdict.shares.items():
            shares[kind] = shares.get(kind, 0.0) + share * weight / sum(weights)
    return dict(sorted(shares.items(), key=lambda entry: -entry[1]))


def _steady_stragglers(rounds: Sequence[RoundVerdict], total: float) -> tuple[tuple[str, ...], float]:
    """Return the clients that delay most rounds in which they take part, and the run's seconds without them."""
    named_count = Counter(node for verdict in rounds for node in verdict.stragglers)
    if not named_count:
        return (), total
    rounds_present = Counter(node for verdict in rounds for node in verdict.path.shape.nodes)
    fewest = min(2, len(rounds))
    often = [n for n, times in named_count.most_common() if times >= fewest and times > OFTEN * rounds_present[n]]
    slow = tuple(often[: max_stragglers(len(rounds_present))])
    seconds_left = [verdict.path.shape.without(slow) for verdict in rounds]
    weights = _weights(rounds)
    saved = sum(
        w * (1 - rest / verdict.seconds) for w, rest, verdict in zip(weights, seconds_left, rounds, strict=True)
    )
    return (slow, sum(seconds_left)) if slow and saved >= BOUND * sum(weights) else ((), total)


def describe_bound(
    kind: str,
    share: float,
    stragglers: Sequence[str] = (),
    bound_by: str | None = None,
    shares: Mapping[str, float] | None = None,
) -> str:
    """Return the bound in words: «upload-bound, 62 % of its critical path», «straggler-bound: it waits for c7, slow
    in upload».
    """
    if kind == STRAGGLER:
        behind = f", slow in {bound_by}" if bound_by and bound_by != UNACCOUNTED else ""
        return f"straggler-bound: it waits for {_names(stragglers)}{behind}"
    if kind in ("upload", "download") and upload_and_download_tied(shares or {}):
        up, down = ((shares or {}).get(way, 0.0) for way in ("upload", "download"))
        return f"transfer-bound: upload {100 * up:.0f} %, download {100 * down:.0f} % of its critical path"
    if kind != NOTHING:
        return f"{kind.replace(' ', '-')}-bound, {100 * share:.0f} % of its critical path"
    unknown = (shares or {}).get(UNACCOUNTED, 0.0)
    waiting = (shares or {}).get(WAITING, 0.0)
    if max(unknown, waiting) > BOUND:
        what = "is unaccounted for" if unknown >= waiting else "is spent waiting for what is not seen"
        return f"bound by nothing that is known, {100 * max(unknown, waiting):.0f} % of its critical path {what}"
    return "bound by nothing in particular, no kind of work is a third of its critical path"


def _names(nodes: Sequence[str]) -> str:
    shown = [*nodes[:3], *([f"{len(nodes) - 3} more"] if len(nodes) > 3 else [])]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
