# SPDX-License-Identifier: Apache-2.0
"""What other settings would have given, computed from the recorded times: a table of rows with their assumptions.

Every row changes one thing and leaves the rest as recorded. The cost in accuracy cannot be computed from times; it is
measured by running the experiment again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedvitals.analysis.critical_path import CriticalPath, critical_path, format_seconds, without_warm_up
from fedvitals.analysis.round_shape import CLASSES, RoundShape, Seconds, asynchronous_shape, scaled_work, turns_seconds
from fedvitals.analysis.sampling import ClientPool, buffered_round_seconds, expected_longest
from fedvitals.analysis.timeline import RoundTime, asynchronous
from fedvitals.records import Transfer
from fedvitals.resources.node_spans import CLOSE
from fedvitals.time_parts import WORK

QUANTILES = (0.5, 0.75, 0.9, 0.95)  # of all clients' times, for deadlines
OVER_SELECTION = (1.3, 1.5)  # 1.3 is that of Bonawitz et al. 2019
COMPRESSION = (("upload", 4), ("upload", 16), ("download", 4))  # int8 gives 4, and a few per cent of the values 16
WORKERS = 4  # data-loading workers, if there is one now
RARELY = 5  # rounds from one evaluation to the next
FASTER = 4  # times: an aggregation accelerated by another device or method
BUFFER = 4  # an asynchronous server aggregates a quarter of the cohort at a time
AGGREGATIONS = 20  # the least number simulated for an asynchronous server: the first ones are faster than usual


@dataclass(frozen=True, slots=True)
class WhatIfRow:
    """One change, and the mean seconds of a round with it; if asynchronous, for as many updates as a round has."""

    key: dict[str, Any]
    name: str
    before: float
    after: float
    assumes: str
    costs: str
    cut: tuple[str, ...] = ()  # clients that would be left out in most of their rounds
    lost: float | None = None  # share of the data, or of the clients' work, that would be lost
    lost_of: str = "clients"  # «samples» where their number is known
    at_most: bool = False  # the gain is an upper bound: what takes part in it is unknown

    @property
    def saving(self) -> float:
        return self.before - self.after

    @property
    def share(self) -> float:
        """The saving as a share of a round."""
        return self.saving / self.before if self.before > 0 else 0.0


@dataclass(frozen=True, slots=True)
class _RecordedRounds:
    """The recorded rounds with their paths and shapes."""

    times: Sequence[RoundTime]
    paths: Sequence[CriticalPath]
    shapes: Sequence[RoundShape]
    before: float
    seed: int

    def row(
        self, key: dict[str, Any], name: str, after: Iterable[float], assumes: str, costs: str, **more: Any
    ) -> WhatIfRow:
        return WhatIfRow(key, name, self.before, max(0.0, float(np.mean([*after]))), assumes, costs, **more)

    def on_path(self, part: str) -> list[float]:
        """Return the seconds of each round's critical path that the server and the edges spent on a part."""
        return [
            sum(link.parts.get(part, 0.0) for link in path.links if link.node not in path.shape.nodes)
            for path in self.paths
        ]

    def total(self, kind: str) -> float:
        return float(sum(shape.work[:, CLASSES.index(kind)].sum() for shape in self.shapes))


def what_if(
    times: Sequence[RoundTime],
    *,
    transfers: Iterable[Transfer] = (),
    latency: float | Mapping[str, float] | None = None,
    seed: int = 0,
    paths: Sequence[CriticalPath] | None = None,
) -> list[WhatIfRow]:
    """Return the rows that apply to these rounds of one clock; empty if no client worked.

    `latency` is the seconds per direction of a client's round that do not depend on sizes, where known; else it is
    estimated from `transfers` of two sizes. `paths` are those of the rounds, if already known. A warm-up is left out.
    """
    paths = [critical_path(time) for time in times] if paths is None else paths
    times, paths = without_warm_up(times, paths)
    both = [(t, p) for t, p in zip(times, paths, strict=True) if t.seconds > 0 and p.shape.nodes]
    if not both:
        return []
    seen = _RecordedRounds(
        [time for time, _ in both],
        [path for _, path in both],
        [path.shape for _, path in both],
        float(np.mean([time.seconds for time, _ in both])),
        seed,
    )
    delays = latency if latency is not None else latencies(transfers)
    is_asynchronous = asynchronous(seen.times)
    if is_asynchronous:
        seen = replace(seen, shapes=[asynchronous_shape(time) for time in seen.times])
    rows = [*_transfers(seen, delays), *_training(seen), *_server(seen)]
    if not is_asynchronous:
        rows += _cohorts(seen)
        several = any(len(shape.ends) > 1 for shape in seen.shapes)  # a single client is always the last
        if several and all(shape.slots is None for shape in seen.shapes):
            rows += [*_deadlines(seen), *_over_selections(seen), *_asynchronous(seen)]
    return rows


# -- the work itself --------------------------------------------------------------------------------------------------


def _transfers(seen: _RecordedRounds, latency: float | Mapping[str, float]) -> Iterable[WhatIfRow]:
    known = bool(latency) or latency == 0.0
    unknown = "latency takes part in the saving: from one size of message it cannot be told from transfer"
    ways = {way: _fixed(seen.shapes, way, latency) for way in dict(COMPRESSION) if seen.total(way)}
    for way, factor in COMPRESSION:
        if way not in ways:
            continue
        fixed = ways[way]
        after = []
        for shape in seen.shapes:
            stays = np.array([fixed.get(node, 0.0) for node in shape.nodes])
            after.append(shape.length(scaled_work(shape, {way: stays + (1 - stays) / factor})))
        key = "compress" if way == "upload" else "compress_download"
        yield seen.row(
            {key: factor},
            f"{way}s compressed to 1/{factor}",
            after,
            f"Seconds shrink as bytes do; {'latency stays as it is' if known else unknown}; encoding takes no time.",
            "Rounding errors in every update." if factor <= 4 else "Most small changes are dropped or delayed.",
            at_most=not known,
        )


def _fixed(shapes: Sequence[RoundShape], way: str, latency: float | Mapping[str, float]) -> dict[str, float]:
    """Return the share of latency in each client's mean seconds of one direction."""
    taken: dict[str, list[float]] = {}
    for shape in shapes:
        for node, seconds in zip(shape.nodes, shape.work[:, CLASSES.index(way)].tolist(), strict=True):
            taken.setdefault(node, []).append(seconds)
    delays = {node: latency.get(node, 0.0) if isinstance(latency, Mapping) else latency for node in taken}
    means = _typical(taken)
    return {node: min(1.0, max(0.0, delays[node]) / mean) for node, mean in means.items() if mean > 0}


def _typical(taken: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return each client's mean, shrunk towards the overall mean as far as they differ by chance.

    The weights are those of James and Stein: 1 − (variance due to rounds) / (variance of the means).
    """
    means: dict[str, float] = {}
    rounds: list[float] = []
    for count in {len(own) for own in taken.values()}:  # all clients with the same number of rounds at once
        nodes = [node for node, own in taken.items() if len(own) == count]
        table = np.array([taken[node] for node in nodes])
        means.update(zip(nodes, np.mean(table, axis=1).tolist(), strict=True))
        rounds += (np.var(table, axis=1, ddof=1) / count).tolist() if count > 1 else []
    means = {node: means[node] for node in taken}
    middle, between = float(np.mean([*means.values()])), float(np.var([*means.values()]))
    own = max(0.0, 1 - float(np.mean(rounds)) / between) if rounds and between > 0 else 1.0
    return {node: middle + own * (mean - middle) for node, mean in means.items()}


def latencies(transfers: Iterable[Transfer]) -> dict[str, float]:
    """Return the seconds of each client's message that do not depend on its size, where two clearly different sizes are
    known.

    Uploads count; downloads where only these differ, since both directions have the same latency.
    """
    seen: dict[tuple[bool, str], dict[int, list[float]]] = {}
    for transfer in transfers:
        timed = transfer.seconds is not None and 0 < transfer.seconds < math.inf and transfer.bytes > 0
        if timed and transfer.seconds is not None and transfer.kind in ("update", "model"):
            up = transfer.kind == "update"
            times_by_size = seen.setdefault((up, transfer.sender if up else transfer.receiver), {})
            times_by_size.setdefault(transfer.bytes, []).append(transfer.seconds)
    latency_of_node = {}
    for (_, node), sizes in sorted(seen.items()):  # uploads last, so that they take precedence
        small, large = min(sizes), max(sizes)
        if large >= 1.5 * small:
            less, more = float(np.median(sizes[small])), float(np.median(sizes[large]))
            per_byte = max(0.0, (more - less) / (large - small))
            latency_of_node[node] = max(0.0, less - per_byte * small)
    return latency_of_node


_STEPS = ("compute", "data loading", "download", "upload")  # grows with the number of local steps


def _training(seen: _RecordedRounds) -> Iterable[WhatIfRow]:
    if seen.total("compute"):
        yield seen.row(
            {"steps": 0.5},
            "half the local steps",
            [
                shape.length(scaled_work(shape, dict.fromkeys(_STEPS[: 4 if shape.exchanging else 2], 0.5)))
                for shape in seen.shapes
            ],
            "Computing and loading shrink as the steps do, and messages where each step sends some.",
            "Clients learn less in a round, so more rounds are needed.",
        )
        factors = [_batch_factors(time, shape) for time, shape in zip(seen.times, seen.shapes, strict=True)]
        if any((factor < 1).any() for factor in factors):
            yield seen.row(
                {"batch": 2},
                "batches twice as large",
                [s.length(scaled_work(s, {"compute": f})) for s, f in zip(seen.shapes, factors, strict=True)],
                "As many samples in half as many steps: the optimiser's time halves, forward and backward stay.",
                "Fewer, larger steps: the learning rate may have to grow with them.",
            )
    if seen.total("data loading"):
        yield seen.row(
            {"loading_workers": WORKERS},
            f"{WORKERS} processes that load data",
            [shape.length(scaled_work(shape, {"data loading": 1 / WORKERS})) for shape in seen.shapes],
            f"{WORKERS} of them load {WORKERS} times as fast; what they load ahead of need saves more.",
            "Cores, and memory for batches that wait; none in accuracy.",
        )


def _batch_factors(time: RoundTime, shape: RoundShape) -> Seconds:
    """Return how computing shrinks if the fixed cost of each step is paid half as often."""
    factors = np.ones(len(shape.nodes))
    for index, node in enumerate(shape.nodes):
        parts = time.nodes[node].parts
        whole = sum(seconds for part, seconds in parts.items() if WORK.get(part) == "compute")
        steps = parts.get("optimizer", 0.0) + parts.get("measure", 0.0)
        factors[index] = 1 - 0.5 * steps / whole if whole > 0 else 1.0
    return factors


def _server(seen: _RecordedRounds) -> Iterable[WhatIfRow]:
    lengths = [time.seconds for time in seen.times]
    evaluating, averaging, receiving = (seen.on_path(part) for part in ("evaluate", "aggregate", "receive"))
    if sum(evaluating):
        now = sum(seconds > 0 for seconds in evaluating)
        rarely = 1 - math.ceil(len(lengths) / RARELY) / now
        for key, name, share in (
            ({"evaluate_every": RARELY}, f"evaluation every {RARELY} rounds", rarely),
            ({"evaluate_every": 0}, "no evaluation", 1.0),
        ):
            if share <= 0:
                continue
            after = [length - share * seconds for length, seconds in zip(lengths, evaluating, strict=True)]
            yield seen.row(
                key, name, after, "The round waits for its evaluation.", "Fewer values of accuracy; no more."
            )
    if sum(averaging):
        after = [length - (1 - 1 / FASTER) * seconds for length, seconds in zip(lengths, averaging, strict=True)]
        name = f"aggregation {FASTER} times as fast"
        costs = "A simpler rule, which withstands less; or none, if it is made to run on all cores."
        yield seen.row({"aggregate": FASTER}, name, after, "The round waits for the aggregation.", costs)
    work = [sum(parts) for parts in zip(evaluating, averaging, receiving, strict=True)]
    if sum(work):
        after = [length - (1 - 1 / FASTER) * seconds for length, seconds in zip(lengths, work, strict=True)]
        assumes = "Receiving, aggregating and evaluating all shrink with the device."
        name = f"a server {FASTER} times as fast"
        yield seen.row({"server": FASTER}, name, after, assumes, "A faster device; none in accuracy.")


# -- who is waited for ------------------------------------------------------------------------------------------------


def _cohorts(seen: _RecordedRounds) -> Iterable[WhatIfRow]:
    sizes = [len(shape.nodes) for shape in seen.shapes]
    if max(sizes) < 2:
        return
    halves = [max(1, round(size / 2)) for size in sizes]
    yield seen.row(
        {"cohort": 0.5},
        "half as many clients in a round",
        [_fewer(shape, half, seen.seed) for shape, half in zip(seen.shapes, halves, strict=True)],
        "The clients of each round are drawn from those that were there, by chance.",
        "Half the data in a round, and a noisier average.",
        lost=1 - sum(halves) / sum(sizes),
    )


def _fewer(shape: RoundShape, count: int, seed: int) -> float:
    """Return the expected seconds of a round with a random part of its clients."""
    if shape.slots is None:
        # Fewer clients also receive the model sooner, if the server sends to one after the other.
        return expected_longest(shape.ends - (1 - count / len(shape.nodes)) * shape.line, count) + shape.rest
    each = shape.ends
    if shape.slots == 1:
        return float(each.sum()) * count / len(each) + shape.rest
    chance = np.random.default_rng(seed)
    draws = [turns_seconds(each[np.sort(chance.permutation(len(each))[:count])], shape.slots) for _ in range(16)]
    return float(np.mean(draws)) + shape.rest


def _deadlines(seen: _RecordedRounds) -> Iterable[WhatIfRow]:
    everybody = np.concatenate([shape.ends for shape in seen.shapes])
    longest = float(everybody.max())
    limits: dict[float, float] = {}
    for quantile in QUANTILES:
        limits.setdefault(float(np.quantile(everybody, quantile, method="lower")), quantile)
    for limit, quantile in limits.items():
        limit += 2 * CLOSE  # noqa: PLW2901 - so that a client that takes exactly this long is in time
        if limit >= longest or limit <= 4 * CLOSE:
            continue
        after = [min(float(s.ends.max()), limit) + s.rest for s in seen.shapes]
        cut, lost, of = _lost(seen, limit)
        yield seen.row(
            {"deadline": limit},
            f"a deadline of {format_seconds(limit)} ({100 * quantile:.0f} % of all answers)",
            after,
            "Who is not done by then is left out; who was cut off already counts as done when it was.",
            f"{100 * lost:.0f} % of the {of} would not count"
            + (f", those of {_first_nodes(cut)} in most rounds." if cut else "."),
            cut=cut,
            lost=lost,
            lost_of=of,
        )


def _lost(seen: _RecordedRounds, limit: float) -> tuple[tuple[str, ...], float, str]:
    """Return which clients a deadline would cut off in most rounds, and how much of the data."""
    late: dict[str, int] = {}
    there: dict[str, int] = {}
    samples = np.concatenate([shape.samples for shape in seen.shapes])
    known = bool(np.isfinite(samples).all() and samples.sum() > 0)
    gone = np.concatenate([shape.ends > limit for shape in seen.shapes])
    for shape in seen.shapes:
        for node, out in zip(shape.nodes, shape.ends > limit, strict=True):
            there[node] = there.get(node, 0) + 1
            late[node] = late.get(node, 0) + bool(out)
    cut = tuple(sorted((n for n in late if late[n] > there[n] / 2), key=lambda n: (-late[n], n)))
    lost = float(samples[gone].sum() / samples.sum()) if known else float(gone.mean())
    return cut, lost, "samples" if known else "clients"


def _over_selections(seen: _RecordedRounds) -> Iterable[WhatIfRow]:
    """Yield rows for asking more clients than needed and taking the first. If all are asked, fewer are needed."""
    pool = ClientPool(seen.shapes, seen.seed)
    if pool.cohort < 2:
        return
    rest = float(np.mean([shape.rest for shape in seen.shapes]))
    called = int(np.median([len(time.clients) for time in seen.times]))  # including those that were away
    spare = len({node.node for time in seen.times for node in time.clients}) > called
    known: set[tuple[int, int]] = set()
    for more in OVER_SELECTION:
        needed = pool.cohort if spare else max(1, round(called / more))
        asked = min(len(pool.nodes), math.ceil(needed * more - 1e-9))
        if (asked, needed) in known:  # with few clients
            continue
        known.add((asked, needed))
        if spare:
            after = [pool.mean_time_of_nth(needed, asked) + rest]
        else:  # all were present: the last client to count is known
            both = zip(seen.times, seen.shapes, strict=True)
            after = [_seconds_until_count(shape, round(needed / called * len(time.clients))) for time, shape in both]
        yield seen.row(
            {"over_select": more, "needed": needed, "all_asked": not spare},
            f"{asked} clients asked, the first {needed} taken",
            after,
            "Clients are drawn by chance, and take the times that they took in these rounds.",
            "Slow clients seldom count, and their data with them"
            + ("." if spare else f"; {100 * (1 - needed / called):.0f} % fewer updates in a round."),
            lost=1 - needed / asked,
        )


def _seconds_until_count(shape: RoundShape, count: int) -> float:
    """Return the round's seconds if it ends when `count` of its clients are done."""
    place = min(len(shape.nodes), max(1, count)) - 1
    return float(np.partition(shape.ends, place)[place]) + shape.rest


def _asynchronous(seen: _RecordedRounds) -> Iterable[WhatIfRow]:
    """Yield the row for FedBuff: nobody waits for slow clients, the server averages some updates at a time."""
    pool = ClientPool(seen.shapes, seen.seed)
    cohort = pool.cohort
    grouped = any(node.group is not None for time in seen.times for node in time.nodes.values())
    if cohort < 2 or grouped:
        return
    buffer = max(1, cohort // BUFFER)
    testing = seen.on_path("evaluate")
    rest = float(np.mean([max(0.0, shape.rest - tests) for shape, tests in zip(seen.shapes, testing, strict=True)]))
    count = max(AGGREGATIONS, math.ceil(len(seen.times) * cohort / buffer))
    seconds = buffered_round_seconds(pool, buffer, count, rest * buffer / cohort) * cohort / buffer
    yield seen.row(
        {"asynchronous": buffer, "concurrency": cohort},
        f"asynchronous aggregation of {buffer} updates at a time",
        [seconds],
        f"{cohort} clients train at any time; seconds are those of {cohort} updates, as many as a round has now, from "
        "the first on. The model is tested meanwhile: nobody waits for that.",
        "Updates that began from older models, and more of them from fast clients.",
    )


def _first_nodes(nodes: Sequence[str]) -> str:
    return ", ".join(nodes[:3]) + (f" and {len(nodes) - 3} more" if len(nodes) > 3 else "")
