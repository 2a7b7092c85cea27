# SPDX-License-Identifier: Apache-2.0
"""Computes where a run's time, memory and bytes went: everything that `fedvitals profile` shows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from fedvitals.analysis.bottleneck import RunVerdict, judge
from fedvitals.analysis.critical_path import CriticalPath, critical_path
from fedvitals.analysis.remedies import LEAST, Remedy, by_worth, remedies
from fedvitals.analysis.stragglers import Straggler, stragglers
from fedvitals.analysis.timeline import RoundTime, main_clock, rounds_of_clock, timeline, waiting_for
from fedvitals.analysis.traffic import (
    AccuracyMilestone,
    BandwidthNeed,
    Traffic,
    accuracy_milestones,
    bandwidth_needs,
    traffic_of,
)
from fedvitals.analysis.what_if import WhatIfRow, latencies, what_if
from fedvitals.errors import ConfigError, FedvitalsError
from fedvitals.plain_json import Fields, PlainJson, unchanged
from fedvitals.records import Event, Run, Span, Transfer
from fedvitals.store.read import queries
from fedvitals.store.read.reader import Reader
from fedvitals.time_parts import REST, WORK
from fedvitals.views.machine import (
    Machine,
    Memory,
    Operators,
    Throughput,
    machine_of,
    memory_of,
    operators_of,
    throughput_of,
)
from fedvitals.views.run_figures import federation
from fedvitals.views.timed_rounds import without_open_round
from fedvitals.views.waiting import Waiting, waiting_of

if TYPE_CHECKING:
    from fedvitals.lab import Experiment

ORDER = (*WORK, *REST, "unaccounted")  # of parts, wherever they are shown


@dataclass(frozen=True, slots=True)
class Profile:
    """Where a run's time, memory and bytes went."""

    run: Run
    clock: str  # of the times below: «real» or «virtual»
    clocks: tuple[str, ...]  # that the run has
    verdict: RunVerdict | None  # None: no round of the run has any times
    times: tuple[RoundTime, ...]
    path_parts: Mapping[str, float]  # part → seconds, over all rounds' critical paths, which are the rounds' own length
    client_parts: Mapping[str, float]  # over all clients' rounds
    server_parts: Mapping[str, float]
    unaccounted: float | None  # largest share of a node's round that no part explains, median over the rounds
    waterfall: RoundTime | None  # the requested round, else the longest
    path: CriticalPath | None  # of that round
    stragglers: tuple[Straggler, ...]
    what_if: tuple[WhatIfRow, ...]
    remedies: tuple[Remedy, ...]
    throughput: tuple[Throughput, ...]  # the slowest client first
    memory: Memory | None
    machine: tuple[Machine, ...]
    operators: tuple[Operators, ...]
    traffic: Traffic
    reached: tuple[AccuracyMilestone, ...]
    needed: tuple[BandwidthNeed, ...]  # for the pace of the median client, unless a target is given
    needed_why: str | None  # why it is empty
    target_seconds: float | None  # as requested
    waiting: Waiting  # for whom the rounds waited, and how long
    waits: Mapping[str, str]  # in the round that is shown: who waited for whom
    worked: float | None  # share of a round in which any client worked, median; if clients are remote and reported it
    left_open: int | None  # the unfinished round of a run that is still open, which is not included


@dataclass(frozen=True, slots=True)
class Gains:
    """What other settings would have given, and which of these are worthwhile."""

    what_if: tuple[WhatIfRow, ...]
    remedies: tuple[Remedy, ...]
    latency: Mapping[str, float]  # seconds of each client's message that do not depend on its size, if known

    @property
    def worthwhile(self) -> list[WhatIfRow]:
        """The rows with a gain, in the order of the remedies: best gain for the cost first."""
        return [row for row in by_worth(self.what_if) if row.share >= LEAST]


def gains_of(
    run: Run,
    clock: str,
    times: Sequence[RoundTime],
    paths: Sequence[CriticalPath],
    transfers: Iterable[Transfer],
) -> Gains:
    """Compute what would have made these rounds shorter; the same for the terminal, the dashboard and the report."""
    messages = list(transfers)
    described = latency_of(run, times, messages) if clock == "virtual" else None
    latency = latencies(messages) if described is None else described
    rows = what_if(times, latency=latency, paths=paths)
    verdict = judge(times, paths=paths)
    return Gains(tuple(rows), tuple(remedies(verdict, rows)) if verdict else (), latency)


def profile_of(
    reader: Reader,
    run: str,
    round_index: int | None = None,
    *,
    clock: str | None = None,
    target_seconds: float | None = None,
) -> Profile:
    """Return a run's profile; `round_index` selects the waterfall's round, `clock` the times to use."""
    described = queries.get_run(reader, run)
    transfers, events = queries.records(reader, run, Transfer), queries.records(reader, run, Event)
    everything = timeline(queries.records(reader, run, Span))
    clocks = tuple(dict.fromkeys(time.clock for time in everything))
    if clock is not None and clocks and clock not in clocks:
        raise ConfigError(f"The run {run} has no {clock} clock, only the {' and '.join(clocks)} one.")
    clock = clock or (main_clock(everything) if everything else "real")
    times, left_open = without_open_round(rounds_of_clock(everything, clock), described)
    shown = _shown(times, round_index, run)
    paths = [critical_path(time) for time in times]
    verdict = judge(times, paths=paths)
    gains = gains_of(described, clock, times, paths, transfers)
    traffic = traffic_of(transfers, events, queries.attendance(reader, run), described.tables, described.topology)
    _, worked = reader.history(run).series("time.worked", None)
    needs = _needed(times, traffic, target_seconds, gains.latency)
    return Profile(
        run=described,
        clock=clock,
        clocks=clocks,
        verdict=verdict,
        times=tuple(times),
        path_parts=seconds_by_part(link.parts for judged in verdict.by_round for link in judged.path.links)
        if verdict
        else {},
        client_parts=seconds_by_part(client.parts for time in times for client in time.clients),
        server_parts=seconds_by_part(time.server.parts for time in times if time.server is not None),
        unaccounted=median(time.unaccounted for time in times) if times else None,
        waterfall=shown,
        path=None if shown is None else paths[times.index(shown)],
        stragglers=tuple(stragglers(times, paths=paths)),
        what_if=gains.what_if,
        remedies=gains.remedies,
        throughput=throughput_of(reader, run, rounds_of_clock(everything, "real")),
        memory=memory_of(reader, run),
        machine=machine_of(reader, run),
        operators=operators_of(events),
        traffic=traffic,
        reached=_reached(reader, run, traffic),
        needed=needs,
        needed_why=None if needs else _why_not_needed(traffic),
        target_seconds=target_seconds,
        waiting=waiting_of(times, paths),
        waits={} if shown is None or _in_turns(paths[times.index(shown)]) else waiting_for(shown),
        worked=median(worked) if worked else None,
        left_open=left_open,
    )


def _in_turns(path: CriticalPath) -> bool:
    """Whether clients took turns: each then waits for all others, before and after its own turn."""
    return path.shape.slots is not None


def _why_not_needed(traffic: Traffic) -> str:
    if not traffic.up.bytes + traffic.down.bytes:
        return "not known which one a target needs: no transfers were recorded. Monitor.transfer(..., seconds=) does."
    return (
        "not known which one a target needs: of no client's transfers is it known how long they took. "
        "Monitor.exchange() tells that, or a lab with a network."
    )


def _shown(times: Sequence[RoundTime], number: int | None, run: str) -> RoundTime | None:
    if number is None:
        return max(times, key=lambda time: time.seconds, default=None)
    for time in times:
        if time.round == number:
            return time
    there = f"Rounds {times[0].round} to {times[-1].round} are timed" if times else "None is timed"
    raise ConfigError(f"The run {run} has no times of round {number}. {there}.")


def seconds_by_part(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return seconds by part, in the common order of parts."""
    sums: dict[str, float] = {}
    for seconds_by_part in parts:
        for part, seconds in seconds_by_part.items():
            sums[part] = sums.get(part, 0.0) + seconds
    return {part: sums[part] for part in sorted(sums, key=lambda p: ORDER.index(p) if p in ORDER else len(ORDER))}


def _reached(reader: Reader, run: str, traffic: Traffic) -> tuple[AccuracyMilestone, ...]:
    accuracy = federation(reader, run, "accuracy")
    if not accuracy:
        return ()
    return accuracy_milestones(
        accuracy,
        seconds=federation(reader, run, "time.round"),
        virtual_seconds=federation(reader, run, "time.round_virtual"),
        bytes={sent.round: sent.bytes for sent in traffic.rounds if sent.bytes},
    )


def _needed(
    times: Sequence[RoundTime], traffic: Traffic, target: float | None, latency: Mapping[str, float]
) -> tuple[BandwidthNeed, ...]:
    """Return the bandwidth needs, only if the duration of transfers is known."""
    ways: dict[str, list[Mapping[str, float]]] = {}
    own: list[float] = []  # the median client's time in each round
    for time in times:
        busy = []
        for client in time.clients:
            # Asynchronous journeys begin before the round.
            parts = client.reported if time.overlapping else client.parts
            if parts.get("download", 0.0) + parts.get("upload", 0.0) > 0 and not parts.get("away"):
                ways.setdefault(client.node, []).append(parts)
                busy.append(math.fsum(s for part, s in parts.items() if part not in ("wait", "idle")))
        own += [median(busy)] if busy else []
    if not own:
        return ()
    servers = [math.fsum(s for part, s in time.server.parts.items() if part in WORK) for time in times if time.server]
    server = median(servers) if servers else 0.0
    return bandwidth_needs(ways, traffic, target if target is not None else median(own) + server, server, latency)


def as_data(profile: Profile) -> dict[str, Any]:
    """Return the profile for scripts: including derived numbers, without redundant ones."""
    data: dict[str, Any] = plain(profile)
    data["rounds"] = data["verdict"].pop("by_round") if data["verdict"] else []
    data["times"] = [
        {"round": t.round, "clock": t.clock, "began": t.began, "seconds": t.seconds, "idle": t.idle,
         "complete": t.complete, "left_out": t.left_out, "unaccounted": t.unaccounted,
         "nodes": {node: {"kind": n.kind, "group": n.group, "parts": n.parts} for node, n in t.nodes.items()}}
        for t in profile.times
    ]  # fmt: skip
    shown = profile.waterfall
    data["waterfall"] = None if shown is None else {"round": shown.round, "intervals": plain(shown.intervals)}
    data["run"] = {name: getattr(profile.run, name) for name in ("id", "name", "host", "topology", "seed")}
    return data


_LEFT_OUT = ("shape", "stays")  # only intermediate results of the other numbers


def _fields_and_properties(value: Any) -> Fields | None:
    if hasattr(value, "__dataclass_fields__"):
        derived = [name for name, member in vars(type(value)).items() if isinstance(member, property)]
        names = [name for name in (*value.__dataclass_fields__, *derived) if name not in _LEFT_OUT]
        return {name: getattr(value, name) for name in names}
    return value._asdict() if isinstance(value, tuple) and hasattr(value, "_asdict") else None


plain = PlainJson(nonfinite=unchanged, fields=_fields_and_properties, name=unchanged)


# Computes how much of a transfer's time is latency, if the run's own description defines it.


def latency_of(run: Run, times: Sequence[RoundTime], transfers: Iterable[Transfer]) -> dict[str, float] | None:
    """Return seconds per direction of a client's round that do not depend on sizes; None if unknown.

    Known if `fedvitals lab` stored the experiment. The lab is only imported then, and needs torch: without it, None.
    """
    text = run.config.get("experiment")
    if run.host != "lab" or not isinstance(text, str) or "network" not in text:
        return None
    try:
        from fedvitals import lab  # noqa: PLC0415 - it needs torch

        return latency_in(lab.read(text), times, transfers)
    except (ModuleNotFoundError, FedvitalsError):
        return None


def latency_in(
    experiment: Experiment, times: Sequence[RoundTime], transfers: Iterable[Transfer]
) -> dict[str, float] | None:
    """Return the same for an experiment; times the messages of a round, if a group exchanges after each step."""
    if experiment.network is None:
        return None
    from fedvitals.lab.network.virtual_clock import profile_of  # noqa: PLC0415 - it needs torch

    seconds_of: dict[str, list[float]] = {}  # seconds of a single message
    for transfer in transfers:
        if transfer.kind == "update" and transfer.seconds is not None and transfer.seconds > 0:
            seconds_of.setdefault(transfer.sender, []).append(transfer.seconds)
    all_of_them: dict[str, list[float]] = {}
    for time in times:
        for client in time.clients:
            all_of_them.setdefault(client.node, []).append(client.reported.get("upload", 0.0))
    latencies = {}
    for node, sent in all_of_them.items():
        messages = max(1, round(median(sent) / median(seconds_of[node]))) if node in seconds_of else 1
        link, _ = profile_of(experiment.network, node, experiment.seed)
        latencies[node] = messages * link.latency_seconds
    return latencies
