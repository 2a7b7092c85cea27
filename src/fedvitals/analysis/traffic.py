# SPDX-License-Identifier: Apache-2.0
"""What was transferred, by client, round and layer, and what it took to reach an accuracy.

«Up» is what a client sent and «down» what it received, whatever the message was; so it also holds in a ring, where
clients pass models to each other. Traffic between edges and the server is counted separately.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

from fedvitals.records import Event, LayerTable, Transfer, is_client

T = TypeVar("T")

TELEMETRY = "telemetry"
FAILURES = {
    "client.dropped_out": "away",
    "client.failed": "failed",
    "update.lost": "lost",
    "update.late": "late",
}
"""What can become of a client in a round, from the worst on; «answered» if nothing of this."""
NEVER_CAME = "worker.lost"  # its records did not arrive; if nothing else from it did, the client itself is lost
LEVELS = (0.80, 0.90, 0.95)
EXCHANGING = ("hierarchical", "rings")  # topologies in which a pair exchanges several messages in a round

_NO_NEED = ("download", "upload", "wait", "idle", "away")  # parts that are transfers, or not the client's own work


@dataclass(frozen=True, slots=True)
class Flow:
    """Traffic in one direction: on the wire, and before compression."""

    bytes: int = 0
    raw_bytes: int = 0
    messages: int = 0
    timed_bytes: int = 0  # bytes whose transfer time is known
    seconds: float = 0.0  # duration of these

    @property
    def bits_per_second(self) -> float | None:
        return 8 * self.timed_bytes / self.seconds if self.seconds > 0 else None

    @property
    def compression(self) -> float | None:
        """The compression ratio: bytes before compression per byte on the wire."""
        return self.raw_bytes / self.bytes if self.bytes else None

    @staticmethod
    def of(sums: Iterable[Sequence[float]]) -> Flow:
        """Return the sum of rows of bytes, raw bytes, messages, timed bytes and seconds."""
        columns = [*zip(*sums, strict=True)] or [(), (), (), (), ()]
        size, raw, messages, timed = (int(sum(column)) for column in columns[:4])
        return Flow(size, raw, messages, timed, math.fsum(columns[4]))


@dataclass(frozen=True, slots=True)
class ClientTraffic:
    """The traffic of one client, and its outcome in each round."""

    node: str
    up: Flow
    down: Flow
    telemetry_bytes: int
    retries: int | None  # None if pairs exchange many messages in a round, so that a second one shows nothing
    outcomes: Mapping[int, str]  # round → «answered», «late», «lost», «failed», «away»; rounds not asked are absent
    round_bytes: float = 0.0  # up and down in one round: the median over those with any transfer

    @property
    def asked(self) -> int:
        return len(self.outcomes)

    @property
    def availability(self) -> float | None:
        """The share of the rounds in which it was asked and was available."""
        return 1 - self.count("away") / self.asked if self.asked else None

    @property
    def failure_rate(self) -> float | None:
        """The share of the rounds in which it was available but returned nothing usable in time."""
        there = self.asked - self.count("away")
        return (there - self.count("answered")) / there if there else None

    def count(self, outcome: str) -> int:
        return sum(recorded == outcome for recorded in self.outcomes.values())


@dataclass(frozen=True, slots=True)
class RoundTraffic:
    """The traffic of one round."""

    round: int
    up: Flow
    down: Flow
    between: Flow  # edges, clusters and the server among themselves
    telemetry_bytes: int
    retries: int | None
    troubles: Mapping[str, int]  # «late» → 2
    bytes: int  # of the training, without telemetry: every message once, including messages between clients


@dataclass(frozen=True, slots=True)
class LayerTraffic:
    """A layer's part of the traffic: exact before compression, from its shape; proportional after it."""

    layer: str
    share: float  # of a model's bytes
    raw_up_bytes: float
    up_bytes: float
    raw_down_bytes: float
    down_bytes: float


@dataclass(frozen=True, slots=True)
class Traffic:
    """The traffic of a run, by client, round and layer."""

    up: Flow
    down: Flow
    between: Flow
    telemetry_bytes: int
    retries: int | None
    clients: tuple[ClientTraffic, ...]  # ordered by bytes transferred, the most first
    rounds: tuple[RoundTraffic, ...]
    layers: tuple[LayerTraffic, ...]  # the largest first

    @property
    def bytes(self) -> int:
        """The bytes of the training, without telemetry; every message counts once."""
        return sum(round_traffic.bytes for round_traffic in self.rounds)

    @property
    def telemetry_share(self) -> float | None:
        """The share of telemetry in all bytes transferred."""
        whole = self.bytes + self.telemetry_bytes
        return self.telemetry_bytes / whole if whole else None


@dataclass(frozen=True, slots=True)
class AccuracyMilestone:
    """What it took to reach an accuracy, or the best accuracy if it was not reached."""

    accuracy: float
    round: int | None  # the first round that reached it
    rounds: int | None  # their number until then
    seconds: float | None
    virtual_seconds: float | None
    bytes: int | None
    best: float | None


@dataclass(frozen=True, slots=True)
class BandwidthNeed:
    """The bandwidth that a client needs if the round is to take no longer than `target_seconds`."""

    node: str
    target_seconds: float
    other_seconds: float  # time besides its transfers
    bytes: float  # up and down, in one round
    bits_per_second: float | None  # None: no bandwidth is enough, since latency and the rest alone take longer
    now_bits_per_second: float | None
    latency_seconds: float = 0.0  # of its messages in a round, both ways: bandwidth does not shorten these


def traffic_of(
    transfers: Iterable[Transfer],
    events: Iterable[Event] = (),
    attendance: Mapping[str | None, Sequence[int]] | None = None,
    tables: Sequence[LayerTable] = (),
    topology: str | None = None,
) -> Traffic:
    """Return a run's traffic by client, round and layer. `attendance` is the rounds in which each client answered."""
    sums = _TrafficSums()
    for transfer in transfers:
        sums.enter(transfer)
    outcomes = outcomes_of(events, attendance or {}, {*sums.up, *sums.down}, sums.up)
    again = topology not in EXCHANGING
    up, down = Flow.of(sums.up.values()), Flow.of(sums.down.values())
    return Traffic(
        up,
        down,
        Flow.of(sums.between.values()),
        sums.telemetry.total(),
        sums.twice.total() if again else None,
        _by_client(sums, outcomes, again),
        _by_round(sums, outcomes, again),
        layers_of(tables, up, down),
    )


class _TrafficSums:
    """Sums by node and round over all messages: bytes, raw bytes, messages, timed bytes, seconds."""

    def __init__(self) -> None:
        self.up: dict[tuple[str, int], list[float]] = {}
        self.down: dict[tuple[str, int], list[float]] = {}
        self.between: dict[tuple[str, int], list[float]] = {}
        self.telemetry: Counter[tuple[str, int]] = Counter()
        self.twice: Counter[tuple[str, int]] = Counter()
        self.once: Counter[int] = Counter()  # bytes of each round, every message once
        self._seen: set[tuple[str, str, str, int, int]] = set()

    def enter(self, transfer: Transfer) -> None:
        """Add one transfer."""
        round_index = -1 if transfer.where.round is None else transfer.where.round
        sends, receives = is_client(transfer.sender), is_client(transfer.receiver)
        client, size = transfer.sender if sends else transfer.receiver, max(0, transfer.bytes)
        if transfer.kind == TELEMETRY:
            self.telemetry[client, round_index] += size
            return
        self.once[round_index] += size
        lasted = transfer.seconds if transfer.seconds is not None and 0 < transfer.seconds < math.inf else 0.0
        flow = (size, max(0, transfer.raw_bytes), int(size > 0), size if lasted else 0, lasted)
        if sends:
            _add(self.up, (transfer.sender, round_index), flow)
        if receives:
            _add(self.down, (transfer.receiver, round_index), flow)
        if not sends and not receives:
            _add(self.between, (transfer.sender, round_index), flow)
        message = (transfer.sender, transfer.receiver, transfer.kind, round_index, transfer.raw_bytes)
        if message in self._seen:
            self.twice[client, round_index] += 1
        self._seen.add(message)


def _add(sums: dict[tuple[str, int], list[float]], key: tuple[str, int], flow: Sequence[float]) -> None:
    known = sums.get(key)
    sums[key] = [*flow] if known is None else [a + b for a, b in zip(known, flow, strict=True)]


def outcomes_of(
    events: Iterable[Event],
    attendance: Mapping[str | None, Sequence[int]],
    moved: Iterable[tuple[str, int]] = (),
    sent: Collection[tuple[str, int]] = (),
) -> dict[str, dict[int, str]]:
    """Return each client's outcome in each round in which it was asked; of several failures the worst.

    `moved` are clients and rounds with any message, `sent` those with a message from the client.
    """
    outcomes: dict[str, dict[int, str]] = {}
    for node, number in moved:
        outcomes.setdefault(node, {})[number] = "answered"
    for who, rounds in attendance.items():
        if who is not None and is_client(who):
            outcomes.setdefault(who, {}).update(dict.fromkeys(rounds, "answered"))
    order = list(FAILURES.values())
    for event in events:
        outcome, client, when = FAILURES.get(event.name), event.where.node, event.where.round
        if event.name == NEVER_CAME and (client, when) not in sent and when not in attendance.get(client, ()):
            outcome = "lost"
        if outcome is None or client is None or when is None or not is_client(client):
            continue
        before = outcomes.setdefault(client, {}).get(when, "answered")
        if before == "answered" or order.index(outcome) < order.index(before):
            outcomes[client][when] = outcome
    return {node: dict(sorted(reported.items())) for node, reported in outcomes.items()}


def _by_client(sums: _TrafficSums, outcomes: Mapping[str, Mapping[int, str]], again: bool) -> tuple[ClientTraffic, ...]:
    up, down = _grouped(0, sums.up), _grouped(0, sums.down)
    telemetry, twice = _grouped(0, sums.telemetry), _grouped(0, sums.twice)
    moved: Counter[tuple[str, int]] = Counter()
    for flows in (sums.up, sums.down):
        for key, flow in flows.items():
            moved[key] += int(flow[0])
    usual = {node: median(sizes) for node, sizes in _grouped(0, moved).items()}
    clients = [
        ClientTraffic(
            node,
            Flow.of(up.get(node, ())),
            Flow.of(down.get(node, ())),
            sum(telemetry.get(node, ())),
            sum(twice.get(node, ())) if again else None,
            outcomes.get(node, {}),
            usual.get(node, 0.0),
        )
        for node in {*up, *down, *outcomes}
    ]
    return tuple(
        sorted(clients, key=lambda client: (-client.up.bytes - client.down.bytes, len(client.node), client.node))
    )


def _by_round(sums: _TrafficSums, outcomes: Mapping[str, Mapping[int, str]], again: bool) -> tuple[RoundTraffic, ...]:
    up, down, between = (_grouped(1, of) for of in (sums.up, sums.down, sums.between))
    telemetry, twice = _grouped(1, sums.telemetry), _grouped(1, sums.twice)
    troubles: dict[int, Counter[str]] = {}
    for reported in outcomes.values():
        for number, outcome in reported.items():
            troubles.setdefault(number, Counter()).update(() if outcome == "answered" else (outcome,))
    return tuple(
        RoundTraffic(
            number,
            Flow.of(up.get(number, ())),
            Flow.of(down.get(number, ())),
            Flow.of(between.get(number, ())),
            sum(telemetry.get(number, ())),
            sum(twice.get(number, ())) if again else None,
            dict(troubles.get(number, {})),
            sums.once[number],
        )
        for number in sorted({*up, *down, *between, *telemetry, *troubles})
    )


def _grouped(index: int, sums: Mapping[tuple[str, int], T]) -> dict[Any, list[T]]:
    """Group the values by node (0) or by round (1)."""
    grouped: dict[Any, list[T]] = {}
    for key, entry in sums.items():
        grouped.setdefault(key[index], []).append(entry)
    return grouped


def bytes_per_value(dtype: str) -> int:
    """Return the bytes of one value by its dtype's name: «uint8», «float8_e4m3fn», «complex128»; 4 if it has no
    number.
    """
    digits = re.search(r"(?<![0-9])(8|16|32|64|128)(?![0-9])", dtype)
    return 1 if dtype == "bool" else int(digits[1]) // 8 if digits else 4


def layers_of(tables: Sequence[LayerTable], up: Flow, down: Flow) -> tuple[LayerTraffic, ...]:
    """Return each layer's part of the clients' traffic, the largest first; parameters and buffers, since both are
    sent.
    """
    sizes: dict[str, int] = {}
    for table in tables:
        if table.rows in ("parameter", "buffer"):
            sizes |= {layer.name: math.prod(layer.shape) * bytes_per_value(layer.dtype) for layer in table.layers}
    whole = sum(sizes.values())
    layers = [
        LayerTraffic(
            layer,
            size / whole,
            up.raw_bytes * size / whole,
            up.bytes * size / whole,
            down.raw_bytes * size / whole,
            down.bytes * size / whole,
        )
        for layer, size in sizes.items()
        if whole
    ]
    return tuple(sorted(layers, key=lambda layer: -layer.share))


def accuracy_milestones(
    accuracy: Mapping[int, float],
    *,
    seconds: Mapping[int, float],
    virtual_seconds: Mapping[int, float],
    bytes: Mapping[int, int],  # noqa: A002 - the vocabulary's word
) -> tuple[AccuracyMilestone, ...]:
    """Return for each accuracy the first round that reached it, and what had been spent by its end; all by round.

    If a federation is evaluated only every few rounds, the evaluation that shows the accuracy counts.
    """
    finite = {number: value for number, value in accuracy.items() if math.isfinite(value)}
    best = max(finite.values(), default=None)
    known = sorted({*accuracy, *seconds, *virtual_seconds, *bytes})
    milestones = []
    for level in LEVELS:
        first = min((number for number, value in finite.items() if value >= level), default=None)
        if first is None:
            milestones.append(AccuracyMilestone(level, None, None, None, None, None, best))
            continue
        rounds_until = [number for number in known if number <= first]
        milestones.append(
            AccuracyMilestone(
                level,
                first,
                len(rounds_until),
                math.fsum(seconds.get(n, 0.0) for n in rounds_until) if seconds else None,
                math.fsum(virtual_seconds.get(n, 0.0) for n in rounds_until) if virtual_seconds else None,
                sum(bytes.get(n, 0) for n in rounds_until) if bytes else None,
                best,
            )
        )
    return tuple(milestones)


def bandwidth_needs(
    client_parts: Mapping[str, Sequence[Mapping[str, float]]],
    traffic: Traffic,
    target_seconds: float,
    server_seconds: float,
    latency: Mapping[str, float] | None = None,
) -> tuple[BandwidthNeed, ...]:
    """Return the bandwidth that each client needs for rounds of `target_seconds`, the neediest first.

    bits/s = 8 · (bytes up + down) / (target − server's own part − client's other needs − latency), each a median over
    its rounds. `client_parts` are each client's parts, round by round; waiting is not a need, since it is what can be
    saved. `latency` is the seconds per direction of a round that bandwidth does not shorten, where known.
    """
    needs = []
    for client in traffic.clients:
        rounds_parts = client_parts.get(client.node, ())
        size = client.round_bytes
        if not rounds_parts or not size:
            continue
        other = median(sum(v for part, v in parts.items() if part not in _NO_NEED) for parts in rounds_parts)
        moving = median(parts.get("download", 0.0) + parts.get("upload", 0.0) for parts in rounds_parts)
        still = min(2 * max(0.0, (latency or {}).get(client.node, 0.0)), moving)
        left = target_seconds - server_seconds - other - still
        now = 8 * size / (moving - still) if moving > still else None
        enough = 8 * size / left if left > 0 else None
        needs.append(BandwidthNeed(client.node, target_seconds, other, size, enough, now, still))
    return tuple(
        sorted(needs, key=lambda parts: -(math.inf if parts.bits_per_second is None else parts.bits_per_second))
    )
