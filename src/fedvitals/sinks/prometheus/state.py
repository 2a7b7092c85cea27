# SPDX-License-Identifier: Apache-2.0
"""The state of one run for Prometheus: the newest values by node, the spread over clients, and counters."""

from __future__ import annotations

import math
import re
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fedvitals.catalog import CATALOG
from fedvitals.records import FAILURES, Event, Finding, Metric, Record, Run, Transfer, is_client
from fedvitals.sinks.spread import CLIENTS_KEPT, ClientSpread, ClosedRound, of_the_round, plain

SIGNS = (
    "loss",
    "accuracy",
    "update.norm",
    "update.cosine_mean",
    "gradient.norm",
    "weight.drift",
    "scale.gsc",
    "time.client",
    "memory.peak",
    "traffic.sent",
)
"""The vital signs that have a series for each node."""

UNITS = {"seconds": "_seconds", "bytes": "_bytes", "share": "_ratio"}
OTHERS, ISSUES, FAILING, NAMES = 50, 200, 100, 300  # limits: servers and edges, issues, failing nodes, metrics
SEEN = 20_000  # records whose identity is remembered: a record delivered twice is counted once
LEVELS = ("debug", "info", "warning", "error", "critical")
SEVERITIES = {"note": 0, "warning": 1, "critical": 5}  # weight of a finding when the worst nodes are chosen
FADING = 0.8  # share of a finding's weight that is left after each round
KINDS = ("model", "update", "telemetry")


@dataclass(frozen=True, slots=True)
class Series:
    """One series of the page: name, help text, labels and value."""

    name: str
    help: str
    labels: Mapping[str, str]
    value: float


class RunState:
    """The state of one run. `add` takes records, `kind` returns the series."""

    KINDS = ("counters", "whole", "worst", "spread")

    def __init__(self, run: str, signs: Sequence[str], nodes: int, worst: int, taken: set[str]) -> None:
        self.label, self._taken = plain(run), taken
        self._run = Run(run, run)
        self._signs, self._most, self._worst = dict.fromkeys(signs), nodes, worst
        self._whole: dict[str, tuple[float, int, float]] = {}  # name → when, round, value
        self._nodes: dict[str, dict[str, float]] = {sign: {} for sign in signs}
        self._clients: set[str] = set()
        self._others: set[str] = set()
        self._trouble: dict[str, float] = {}  # by node, fading from round to round
        self._spread = ClientSpread()
        self._closed: ClosedRound | None = None
        self._newest: dict[str, dict[str, float]] = {}  # metric → client → value, as of the last completed round
        self._points: dict[str, dict[str, float]] = {}
        self._chosen: list[str] = []
        self._stale = False  # whether the choice of nodes must be made again
        self._seen: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._findings: Counter[tuple[str, str]] = Counter()
        self._failures: Counter[str] = Counter()
        self._events: Counter[str] = Counter(dict.fromkeys(LEVELS, 0))
        self._bytes: Counter[str] = Counter()
        self._raw_bytes: Counter[str] = Counter()
        self._transfers: Counter[str] = Counter()
        self._rounds: set[int] = set()
        self._rounds_over = 0
        self._names: dict[str, str] = {}  # on the page → of the metric: two metrics may not share a name

    def add(self, record: Record) -> None:
        """Process one record."""
        match record:
            case Run():
                self._know(record)
            case Metric():
                self._measure(record)
            case Finding() | Event() | Transfer() if self._is_new(record):
                self._count(record)

    def settle(self) -> None:
        """Update the spread and the worst nodes after a batch, if a round has ended since the last call."""
        for closed in self._spread.closed():
            if self._closed is not None and closed.round < self._closed.round:
                continue  # a straggler's value for a round that is no longer the last
            self._stale = True
            self._closed = known = self._carried(closed)
            self._points = {name: known.points(name) for name in known.values}
            self._trouble = {node: weight * FADING for node, weight in self._trouble.items() if weight > 0.05}
        if self._stale:
            self._stale = False
            self._chosen = self._choose()

    def _carried(self, closed: ClosedRound) -> ClosedRound:
        """Return the round with earlier values of its clients added, if they take turns at a metric.

        The spread is then over the same values that the nodes' own series show.
        """
        there = {node: None for values in closed.values.values() for node in values}
        for name, values in closed.values.items():
            if name in self._newest or name in self._signs or len(self._newest) < NAMES:
                known = self._newest.setdefault(name, {})
                known.update(values if len(known) < CLIENTS_KEPT else {n: v for n, v in values.items() if n in known})
        carried = dict(closed.values)
        for name, known in self._newest.items():
            now = closed.values.get(name, {})
            if len(now) < len(there):
                carried[name] = {node: known[node] for node in there if node in known} | dict(now)
        return replace(closed, values={name: values for name, values in carried.items() if values})

    # -- input ---------------------------------------------------------------------------------------------------------

    def _know(self, run: Run) -> None:
        if self._run.name == self._run.id:  # the first time
            name = plain(run.name)
            self.label = name if name not in self._taken else plain(f"{name} {run.id}")
        self._run = run

    def _is_new(self, record: Finding | Event | Transfer) -> bool:
        key = (record.source, record.sequence)
        if key in self._seen:
            return False
        self._seen[key] = None
        if len(self._seen) > SEEN:
            self._seen.popitem(last=False)
        return True

    def _measure(self, metric: Metric) -> None:
        where = metric.where
        if not of_the_round(metric):
            return
        self._spread.add(metric)
        node, number = where.node or where.group, -1 if where.round is None else where.round
        if metric.value != metric.value and where.node is not None:
            self._newest.get(metric.name, {}).pop(where.node, None)  # NaN: no older value replaces it
        if node is None:
            if metric.name == "time.round" and number not in self._rounds:
                self._rounds = {n for n in self._rounds if n > number - SEEN} | {number}
                self._rounds_over += 1
            before = self._whole.get(metric.name)
            if (before is None and len(self._whole) < NAMES) or (before is not None and before[1] <= number):
                self._whole[metric.name] = (metric.at, number, metric.value)
        elif metric.name in self._signs:
            known, most = (self._clients, CLIENTS_KEPT) if is_client(node) else (self._others, OTHERS)
            if node not in known and len(known) < most:
                known.add(node)
                self._stale = self._stale or len(self._clients) <= self._most + 1
            if node in known:
                self._nodes[metric.name][node] = metric.value

    def _count(self, record: Finding | Event | Transfer) -> None:
        match record:
            case Finding():
                key = (record.severity if record.severity in SEVERITIES else "other", plain(record.issue))
                self._findings[key if key in self._findings or len(self._findings) < ISSUES else (key[0], "other")] += 1
                self._stale = True
                for node in [record.where.node, *(suspect.node for suspect in record.suspects[:10])]:
                    weight = SEVERITIES.get(record.severity, 0)
                    if node is not None and is_client(node) and len(self._trouble) < CLIENTS_KEPT:
                        self._trouble[node] = self._trouble.get(node, 0.0) + weight
            case Event():
                self._events[record.level if record.level in LEVELS else "info"] += 1
                if record.name in FAILURES and record.where.node is not None:
                    node = plain(record.where.node)
                    self._failures[node if node in self._failures or len(self._failures) < FAILING else "other"] += 1
            case Transfer():
                kind = record.kind if record.kind in KINDS else "other"
                self._bytes[kind] += max(0, record.bytes)
                self._raw_bytes[kind] += max(0, record.raw_bytes)
                self._transfers[kind] += 1

    def _choose(self) -> list[str]:
        """Return the nodes with their own series: all, or with too many clients the worst ones."""
        others = sorted(self._others)
        if len(self._clients) <= self._most:
            return [*others, *sorted(self._clients)]
        off: dict[str, float] = {}
        for sign in self._signs:
            values = {} if self._closed is None else self._closed.values.get(sign, {})
            if values:
                points = self._points[sign]
                span = points["p95"] - points["p5"]
                for node, value in values.items():
                    distance = abs(value - points["median"])
                    off[node] = max(off.get(node, 0.0), distance / span if span > 0 else math.inf if distance else 0.0)
        ranked = sorted(self._clients, key=lambda node: (-self._trouble.get(node, 0.0), -off.get(node, 0.0), node))
        return [*others, *ranked[: self._worst]]

    # -- output --------------------------------------------------------------------------------------------------------

    def kind(self, kind: str) -> Iterator[Series]:
        """Return the series of one of KINDS, the most important first, since there may not be room for all."""
        makers = {
            "counters": self._counters,
            "whole": self._of_the_whole,
            "worst": self._of_nodes,
            "spread": self._over_clients,
        }
        for name, words, labels, value in makers[kind]():
            yield Series(f"fedvitals_{name}", words, {"run": self.label, **labels}, value)

    def _counters(self) -> Iterator[tuple[str, str, dict[str, str], float]]:
        run = self._run
        labels = {"id": plain(run.id), "host": plain(run.host), "topology": plain(run.topology or "")}
        yield "run_info", "The run behind the label `run`.", labels, 1.0
        yield "run_open", "1 while the run is on, 0 when it has ended.", {}, float(run.finished is None)
        yield "run_started_timestamp_seconds", "When the run began.", {}, run.started
        yield "rounds_total", "Rounds that are over.", {}, self._rounds_over
        over, number, _ = self._whole.get("time.round", (0.0, -1, 0.0))
        yield "last_round", "The newest round that is over.", {}, number
        yield "last_round_timestamp_seconds", "When it ended (0: none has).", {}, over
        lost = self._whole.get("monitor.lost", (0.0, 0, 0.0))[2]
        yield "records_lost_total", "Records that fedvitals lost on their way.", {}, lost
        for (severity, issue), count in sorted(self._findings.items()):
            labels = {"severity": severity, "issue": issue}
            yield "findings_total", "Findings, one in each round that has the trouble.", labels, count
        for node, count in sorted(self._failures.items()):
            yield "node_failures_total", "Times that a node failed, dropped out or was lost.", {"node": node}, count
        for level, count in self._events.items():
            yield "events_total", "Events and log lines, by level.", {"level": level}, count
        for kind, count in sorted(self._bytes.items()):
            yield "transfer_bytes_total", "Bytes on the wire.", {"kind": kind}, count
        for kind, count in sorted(self._raw_bytes.items()):
            yield "transfer_raw_bytes_total", "The same before compression.", {"kind": kind}, count
        for kind, count in sorted(self._transfers.items()):
            yield "transfers_total", "Transfers.", {"kind": kind}, count

    def _of_the_whole(self) -> Iterator[tuple[str, str, dict[str, str], float]]:
        for name, (_, _, value) in self._whole.items():
            page = self._name(name)
            if page is not None and name != "monitor.lost":
                yield page, f"{_meaning(name)} Of the round as a whole.", {}, value

    def _of_nodes(self) -> Iterator[tuple[str, str, dict[str, str], float]]:
        for sign, values in self._nodes.items():
            page = self._name(sign)
            for node in self._chosen if page is not None else ():
                if node in values:
                    yield f"node_{page}", f"{_meaning(sign)} Of a node.", {"node": plain(node)}, values[node]

    def _over_clients(self) -> Iterator[tuple[str, str, dict[str, str], float]]:
        # Signs first: they are included even if there is no room for every metric.
        for name in sorted(self._points, key=lambda name: (name not in self._signs, name)):
            page = self._name(name)
            for point, value in self._points[name].items() if page is not None else ():
                words = f"{_meaning(name)} Over the clients of the last round that is over, the newest of each."
                yield f"nodes_{page}", words, {"point": point}, value

    def _name(self, metric: str) -> str | None:
        """Return the metric's name by Prometheus' conventions; None if another metric already has it."""
        page = page_name(metric)
        return page if self._names.setdefault(page, metric) == metric else None


def page_name(metric: str) -> str:
    """Return a metric's name on the page: `time.round` → `round_seconds`, `memory.peak` → `memory_peak_bytes`."""
    measure = CATALOG.get(metric)
    base = re.sub(r"[^a-zA-Z0-9_]", "_", metric.removeprefix("time.").replace(".", "_"))[:100]
    return base + (UNITS.get(measure.unit, "") if measure is not None else "")


def _meaning(metric: str) -> str:
    measure = CATALOG.get(metric)
    return measure.meaning if measure is not None else f"{plain(metric)}, as the user logged it."
