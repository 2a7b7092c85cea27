# SPDX-License-Identifier: Apache-2.0
"""Computes what a run used of its machines: throughput, memory by purpose, processors, operators."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from fedvitals.analysis.timeline import RoundTime
from fedvitals.catalog import unit_of
from fedvitals.records import Event, is_client
from fedvitals.store.read import queries
from fedvitals.store.read.metrics import ValuesByRound, values_of_everybody
from fedvitals.store.read.reader import Reader
from fedvitals.views.metric_titles import metric_title

SHARES = ("model", "buffers", "gradients", "optimizer", "activations", "telemetry")  # metrics memory.* that add up
ROOM = ("memory.limit", "machine.memory_free")  # for which small values are the problem
OPERATORS = "profile.operators"  # the event with the operators recorded by torch.profiler
MOST_OPERATORS = 50


@dataclass(frozen=True, slots=True)
class Throughput:
    """How fast a client trained."""

    node: str
    samples_per_second: float  # median over its rounds
    epoch_seconds: float | None  # for its whole data set at this pace; None: its size is unknown
    by_round: ValuesByRound


@dataclass(frozen=True, slots=True)
class Peak:
    """The largest value of a memory metric (the smallest of a limit): whose, when, and its growth over the run."""

    metric: str
    bytes: float
    node: str | None
    round: int
    growth_bytes: float  # from its first round to its last, for the node that grew most; as in `compare`
    growth_node: str | None


@dataclass(frozen=True, slots=True)
class Grown:
    """The growth of memory while one client trained."""

    node: str
    bytes: float  # over all its measured rounds
    rounds: int  # their number
    most_bytes: float  # in a single round
    most_round: int


@dataclass(frozen=True, slots=True)
class Memory:
    """What a run held in memory."""

    peaks: tuple[Peak, ...]  # memory.resident, memory.peak, memory.cuda_*, ... as measured
    node: str | None  # the client whose tensors take most memory
    shares: Mapping[str, float]  # its bytes by purpose, in its largest round
    by_client: Mapping[str, float]  # largest tensor bytes, else resident memory, largest first
    batch: float | None  # samples behind its activations
    grown: tuple[Grown, ...]  # of the process, while one client alone trained in it; the largest first
    kept: tuple[Grown, ...]  # of the heap, if a leak was suspected; the largest in a round first


@dataclass(frozen=True, slots=True)
class Machine:
    """One metric machine.*, process.* or gpu.* over nodes and rounds."""

    metric: str
    unit: str
    mean: float
    extreme: float  # the largest; for free amounts, the smallest
    node: str | None  # the node with that value
    round: int
    title: str = ""


@dataclass(frozen=True, slots=True)
class Operators:
    """The result of recording some steps, as reported by the client."""

    node: str | None
    round: int | None
    data: Mapping[str, Any]


def throughput_of(reader: Reader, run: str, times: Sequence[RoundTime]) -> tuple[Throughput, ...]:
    """Return each client's samples per second, the slowest first; from its metric, else from its Span on the real
    clock.
    """
    known = {
        node: by_round
        for node, by_round in values_of_everybody(reader, run, "throughput.samples").items()
        if node is not None
    }
    if not known:
        for time in times:
            for client in time.clients:
                own = client.busy - client.parts.get("measure", 0.0)
                if client.samples and own > 0:
                    known.setdefault(client.node, {})[time.round] = client.samples / own
    sizes = values_of_everybody(reader, run, "samples")
    paces = []
    for node, by_round in known.items():
        finite = [v for v in by_round.values() if math.isfinite(v) and v > 0]
        if not finite or not is_client(node):
            continue
        pace, size = median(finite), [v for v in sizes.get(node, {}).values() if math.isfinite(v)]
        paces.append(Throughput(node, pace, size[-1] / pace if size else None, by_round))
    return tuple(sorted(paces, key=lambda client: client.samples_per_second))


def memory_of(reader: Reader, run: str) -> Memory | None:
    """Read the memory that the run used; None if nothing was measured."""
    names = [name for name in queries.metric_names(reader, run) if name.startswith("memory.")]
    known = {name: values_of_everybody(reader, run, name) for name in names if unit_of(name, "bytes") == "bytes"}
    peaks = [peak for name, by_node in known.items() if (peak := _peak(name, by_node)) is not None]
    if not peaks:
        return None
    tensors = {node: _largest(c) for node, c in known.get("memory.tensors", {}).items() if node is not None}
    resident = {node: _largest(c) for node, c in known.get("memory.resident", {}).items() if node is not None}
    by_client = {node: top for node, top in (tensors or resident).items() if is_client(node)}
    order = sorted(by_client, key=lambda node: -by_client[node])
    worst = order[0] if tensors and order else None
    batches = values_of_everybody(reader, run, "memory.batch").get(worst, {}) if worst is not None else {}
    return Memory(
        tuple(peak for peak in peaks if peak.metric.removeprefix("memory.") not in SHARES),
        worst,
        {} if worst is None else _shares(known, worst),
        {node: by_client[node] for node in order},
        None if worst is None else batches.get(_largest_round(known["memory.tensors"][worst])),
        tuple(sorted(_by_client(known.get("memory.growth", {})), key=lambda grown: -grown.bytes)),
        tuple(sorted(_by_client(known.get("memory.kept", {})), key=lambda grown: -grown.bytes / grown.rounds)),
    )


def growth(by_node: Mapping[str | None, ValuesByRound]) -> tuple[float, str | None] | None:
    """Return the largest growth of a node from its first to its last value, and the node; None with fewer than two."""
    ends = [(node, [v for v in by_round.values() if math.isfinite(v)]) for node, by_round in by_node.items()]
    growths = [(values[-1] - values[0], node) for node, values in ends if len(values) > 1]
    return max(growths, key=lambda growth_and_node: growth_and_node[0], default=None)


def _by_client(by_node: Mapping[str | None, ValuesByRound]) -> list[Grown]:
    grown = []
    for node, by_round in by_node.items():
        finite = {number: value for number, value in by_round.items() if math.isfinite(value)}
        if node is not None and is_client(node) and finite:
            most = max(finite, key=lambda number: finite[number])
            grown.append(Grown(node, math.fsum(finite.values()), len(finite), finite[most], most))
    return grown


def _largest(by_round: ValuesByRound) -> float:
    return max((v for v in by_round.values() if math.isfinite(v)), default=0.0)


def _largest_round(by_round: ValuesByRound) -> int:
    return max(by_round, key=lambda number: by_round[number] if math.isfinite(by_round[number]) else -1.0)


def _peak(name: str, by_node: Mapping[str | None, ValuesByRound]) -> Peak | None:
    every = _finite(by_node)
    if not every:
        return None
    value, node, number = _extreme(name, every)
    grew, whose = growth(by_node) or (0.0, node)
    return Peak(name, value, node, number, grew, whose)


Measured = tuple[float, str | None, int]
"""A value, whose it is, and of which round."""


def _finite(by_node: Mapping[str | None, ValuesByRound]) -> list[Measured]:
    return [(v, node, number) for node, c in by_node.items() for number, v in c.items() if math.isfinite(v)]


def _extreme(name: str, every: Sequence[Measured]) -> Measured:
    """Return the largest value of a metric; for free amounts, the smallest."""
    return (min if name in ROOM else max)(every, key=lambda measured: measured[0])


def _shares(known: Mapping[str, Mapping[str | None, ValuesByRound]], node: str) -> dict[str, float]:
    number = _largest_round(known["memory.tensors"][node])
    shares = {share: known.get(f"memory.{share}", {}).get(node, {}).get(number, 0.0) for share in SHARES}
    return {share: value for share, value in shares.items() if math.isfinite(value) and value > 0}


def machine_of(reader: Reader, run: str) -> tuple[Machine, ...]:
    """Read the extremes and means of what was sampled on the machines."""
    machine = []
    for name in queries.metric_names(reader, run):
        if not name.startswith(("machine.", "process.", "gpu.")):
            continue
        every = _finite(values_of_everybody(reader, run, name))
        if every:
            machine.append(
                Machine(name, unit_of(name), fmean(v for v, _, _ in every), *_extreme(name, every), metric_title(name))
            )
    return tuple(machine)


def operators_of(events: Iterable[Event]) -> tuple[Operators, ...]:
    """Return the recordings, the newest last; no more than a terminal or a script can use."""
    captures = [Operators(e.where.node, e.where.round, e.data) for e in events if e.name == OPERATORS]
    return tuple(captures[-MOST_OPERATORS:])
