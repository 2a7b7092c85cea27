# SPDX-License-Identifier: Apache-2.0
"""What went over the wire, by whom and when, and what it took to get anywhere: pure functions of records.

«Up» is what a client sent and «down» what it received, whatever the message was: so it holds in a ring, too, where
clients pass models to each other. What edges and the server exchange is counted apart.
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
TROUBLES = {
    "client.dropped_out": "away",
    "client.failed": "failed",
    "update.lost": "lost",
    "update.late": "late",
}
"""What can become of a client in a round, from the worst on; «answered» if nothing of this."""
NEVER_CAME = "worker.lost"  # its records did not come home; where nothing else of it did either, it is lost itself
LEVELS = (0.80, 0.90, 0.95)
EXCHANGING = ("hierarchical", "rings")  # topologies in which a pair exchanges several messages in a round

_NO_NEED = ("download", "upload", "wait", "idle", "away")  # parts that are transfers, or no need of the client's own


@dataclass(frozen=True, slots=True)
class Flow:
    """What went one way: on the wire, and before compression."""

    bytes: int = 0
    raw_bytes: int = 0
    messages: int = 0
    timed_bytes: int = 0  # of which it is known how long they took
    seconds: float = 0.0  # that those took

    @property
    def bits_per_second(self) -> float | None:
        return 8 * self.timed_bytes / self.seconds if self.seconds > 0 else None

    @property
    def compression(self) -> float | None:
        """How many bytes became one."""
        return self.raw_bytes / self.bytes if self.bytes else None

    @staticmethod
    def of(sums: Iterable[Sequence[float]]) -> Flow:
        """Their sum; in this order: bytes, raw bytes, messages, timed bytes, seconds."""
        columns = [*zip(*sums, strict=True)] or [(), (), (), (), ()]
        size, raw, messages, timed = (int(sum(column)) for column in columns[:4])
        return Flow(size, raw, messages, timed, math.fsum(columns[4]))


@dataclass(frozen=True, slots=True)
class ClientTraffic:
    node: str
    up: Flow
    down: Flow
    telemetry_bytes: int
    retries: int | None  # None: where pairs exchange many messages in a round, a second one tells nothing
    outcomes: Mapping[int, str]  # round → «answered», «late», «lost», «failed», «away»; rounds not asked are absent
    round_bytes: float = 0.0  # up and down in one round: the median over those in which anything moved

    @property
    def asked(self) -> int:
        return len(self.outcomes)

    @property
    def availability(self) -> float | None:
        """Share of the rounds in which it was asked and was there."""
        return 1 - self.count("away") / self.asked if self.asked else None

    @property
    def failure_rate(self) -> float | None:
        """Share of the rounds in which it was there and nothing of use came back in time."""
        there = self.asked - self.count("away")
        return (there - self.count("answered")) / there if there else None

    def count(self, outcome: str) -> int:
        return sum(one == outcome for one in self.outcomes.values())


@dataclass(frozen=True, slots=True)
class RoundTraffic:
    round: int
    up: Flow
    down: Flow
    between: Flow  # edges, clusters and the server among themselves
    telemetry_bytes: int
    retries: int | None
    troubles: Mapping[str, int]  # «late» → 2
    bytes: int  # of the training, without telemetry: every message once, also one that a client sent to a client


@dataclass(frozen=True, slots=True)
class LayerTraffic:
    """Before compression exact, from the layer's shape; after it in proportion, since no message tells by layer."""

    layer: str
    share: float  # of a model's bytes
    raw_up_bytes: float
    up_bytes: float
    raw_down_bytes: float
    down_bytes: float


@dataclass(frozen=True, slots=True)
class Traffic:
    up: Flow
    down: Flow
    between: Flow
    telemetry_bytes: int
    retries: int | None
    clients: tuple[ClientTraffic, ...]  # who moved the most bytes first
    rounds: tuple[RoundTraffic, ...]
    layers: tuple[LayerTraffic, ...]  # the largest first

    @property
    def bytes(self) -> int:
        """Of the training, without telemetry; every message once."""
        return sum(one.bytes for one in self.rounds)

    @property
    def telemetry_share(self) -> float | None:
        """Of all that went over the wire."""
        whole = self.bytes + self.telemetry_bytes
        return self.telemetry_bytes / whole if whole else None


@dataclass(frozen=True, slots=True)
class Reached:
    """What it took to reach an accuracy, or the best that there was."""

    accuracy: float
    round: int | None  # in which it was reached first
    rounds: int | None  # how many that are
    seconds: float | None
    virtual_seconds: float | None
    bytes: int | None
    best: float | None


@dataclass(frozen=True, slots=True)
class Needed:
    """The bandwidth a client needs if the round is to take no longer than `target_seconds`."""

    node: str
    target_seconds: float
    other_seconds: float  # what it needs beside its transfers
    bytes: float  # up and down, in one round
    bits_per_second: float | None  # None: no bandwidth is enough, latency and the rest alone take longer
    now_bits_per_second: float | None
    latency_seconds: float = 0.0  # of its messages in a round, both ways: no bandwidth shortens these


def traffic_of(
    transfers: Iterable[Transfer],
    events: Iterable[Event] = (),
    attendance: Mapping[str | None, Sequence[int]] | None = None,
    tables: Sequence[LayerTable] = (),
    topology: str | None = None,
) -> Traffic:
    """All of a run's traffic, by client, by round and by layer. `attendance`: the rounds in which each one answered."""
    books = _Books()
    for one in transfers:
        books.enter(one)
    outcomes = outcomes_of(events, attendance or {}, {*books.up, *books.down}, books.up)
    again = topology not in EXCHANGING
    up, down = Flow.of(books.up.values()), Flow.of(books.down.values())
    return Traffic(
        up,
        down,
        Flow.of(books.between.values()),
        books.telemetry.total(),
        books.twice.total() if again else None,
        _by_client(books, outcomes, again),
        _by_round(books, outcomes, again),
        layers_of(tables, up, down),
    )


class _Books:
    """Sums by node and round while the messages pass by: bytes, raw bytes, messages, timed bytes, seconds."""

    def __init__(self) -> None:
        self.up: dict[tuple[str, int], list[float]] = {}
        self.down: dict[tuple[str, int], list[float]] = {}
        self.between: dict[tuple[str, int], list[float]] = {}
        self.telemetry: Counter[tuple[str, int]] = Counter()
        self.twice: Counter[tuple[str, int]] = Counter()
        self.once: Counter[int] = Counter()  # bytes of each round, every message once
        self._seen: set[tuple[str, str, str, int, int]] = set()

    def enter(self, one: Transfer) -> None:
        number = -1 if one.where.round is None else one.where.round
        sends, receives = is_client(one.sender), is_client(one.receiver)
        client, size = one.sender if sends else one.receiver, max(0, one.bytes)
        if one.kind == TELEMETRY:
            self.telemetry[client, number] += size
            return
        self.once[number] += size
        lasted = one.seconds if one.seconds is not None and 0 < one.seconds < math.inf else 0.0
        flow = (size, max(0, one.raw_bytes), int(size > 0), size if lasted else 0, lasted)
        if sends:
            _add(self.up, (one.sender, number), flow)
        if receives:
            _add(self.down, (one.receiver, number), flow)
        if not sends and not receives:
            _add(self.between, (one.sender, number), flow)
        message = (one.sender, one.receiver, one.kind, number, one.raw_bytes)
        if message in self._seen:
            self.twice[client, number] += 1
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
    """What became of each client in each round in which it was asked; of several troubles the worst.

    `moved`: clients and rounds with any message; `sent`: with one of the client's own.
    """
    found: dict[str, dict[int, str]] = {}
    for node, number in moved:
        found.setdefault(node, {})[number] = "answered"
    for who, rounds in attendance.items():
        if who is not None and is_client(who):
            found.setdefault(who, {}).update(dict.fromkeys(rounds, "answered"))
    order = list(TROUBLES.values())
    for event in events:
        outcome, client, when = TROUBLES.get(event.name), event.where.node, event.where.round
        if event.name == NEVER_CAME and (client, when) not in sent and when not in attendance.get(client, ()):
            outcome = "lost"
        if outcome is None or client is None or when is None or not is_client(client):
            continue
        before = found.setdefault(client, {}).get(when, "answered")
        if before == "answered" or order.index(outcome) < order.index(before):
            found[client][when] = outcome
    return {node: dict(sorted(told.items())) for node, told in found.items()}


def _by_client(books: _Books, outcomes: Mapping[str, Mapping[int, str]], again: bool) -> tuple[ClientTraffic, ...]:
    up, down = _by(0, books.up), _by(0, books.down)
    telemetry, twice = _by(0, books.telemetry), _by(0, books.twice)
    moved: Counter[tuple[str, int]] = Counter()
    for sums in (books.up, books.down):
        for key, flow in sums.items():
            moved[key] += int(flow[0])
    usual = {node: median(sizes) for node, sizes in _by(0, moved).items()}
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
    return tuple(sorted(clients, key=lambda one: (-one.up.bytes - one.down.bytes, len(one.node), one.node)))


def _by_round(books: _Books, outcomes: Mapping[str, Mapping[int, str]], again: bool) -> tuple[RoundTraffic, ...]:
    up, down, between = (_by(1, of) for of in (books.up, books.down, books.between))
    telemetry, twice = _by(1, books.telemetry), _by(1, books.twice)
    troubles: dict[int, Counter[str]] = {}
    for told in outcomes.values():
        for number, outcome in told.items():
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
            books.once[number],
        )
        for number in sorted({*up, *down, *between, *telemetry, *troubles})
    )


def _by(place: int, sums: Mapping[tuple[str, int], T]) -> dict[Any, list[T]]:
    """By node (0) or by round (1)."""
    found: dict[Any, list[T]] = {}
    for key, value in sums.items():
        found.setdefault(key[place], []).append(value)
    return found


def width(dtype: str) -> int:
    """Bytes of one value, by its type's name: «uint8», «float8_e4m3fn», «complex128»; 4 of what has no number."""
    found = re.search(r"(?<![0-9])(8|16|32|64|128)(?![0-9])", dtype)
    return 1 if dtype == "bool" else int(found[1]) // 8 if found else 4


def layers_of(tables: Sequence[LayerTable], up: Flow, down: Flow) -> tuple[LayerTraffic, ...]:
    """Each layer's part of the clients' traffic, the largest first; parameters and buffers, since both are sent."""
    sizes: dict[str, int] = {}
    for table in tables:
        if table.rows in ("parameter", "buffer"):
            sizes |= {one.name: math.prod(one.shape) * width(one.dtype) for one in table.layers}
    whole = sum(sizes.values())
    found = [
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
    return tuple(sorted(found, key=lambda one: -one.share))


def reached(
    accuracy: Mapping[int, float],
    *,
    seconds: Mapping[int, float],
    virtual_seconds: Mapping[int, float],
    bytes: Mapping[int, int],  # noqa: A002 - the vocabulary's word
    levels: Sequence[float] = LEVELS,
) -> tuple[Reached, ...]:
    """For each accuracy the first round that has it, and what had been spent by its end; all by round.

    A federation that was evaluated every few rounds only counts as having reached it when that was seen.
    """
    finite = {number: value for number, value in accuracy.items() if math.isfinite(value)}
    best = max(finite.values(), default=None)
    known = sorted({*accuracy, *seconds, *virtual_seconds, *bytes})
    found = []
    for level in levels:
        first = min((number for number, value in finite.items() if value >= level), default=None)
        if first is None:
            found.append(Reached(level, None, None, None, None, None, best))
            continue
        until = [number for number in known if number <= first]
        found.append(
            Reached(
                level,
                first,
                len(until),
                math.fsum(seconds.get(n, 0.0) for n in until) if seconds else None,
                math.fsum(virtual_seconds.get(n, 0.0) for n in until) if virtual_seconds else None,
                sum(bytes.get(n, 0) for n in until) if bytes else None,
                best,
            )
        )
    return tuple(found)


def needed(
    ways: Mapping[str, Sequence[Mapping[str, float]]],
    traffic: Traffic,
    target_seconds: float,
    server_seconds: float,
    latency: Mapping[str, float] | None = None,
) -> tuple[Needed, ...]:
    """The bandwidth that each client needs for rounds of `target_seconds`, the neediest first.

    bits/s = 8 · (bytes up + down) / (target − server's own part − what the client needs beside transfers − latency),
    each a median over its rounds. `ways`: each client's parts, round by round; waiting is no need, for it is what is
    saved. `latency`: seconds of each way of a round that no bandwidth shortens, where they are known.
    """
    found = []
    for client in traffic.clients:
        own = ways.get(client.node, ())
        size = client.round_bytes
        if not own or not size:
            continue
        other = median(sum(v for part, v in one.items() if part not in _NO_NEED) for one in own)
        moving = median(one.get("download", 0.0) + one.get("upload", 0.0) for one in own)
        still = min(2 * max(0.0, (latency or {}).get(client.node, 0.0)), moving)
        left = target_seconds - server_seconds - other - still
        now = 8 * size / (moving - still) if moving > still else None
        enough = 8 * size / left if left > 0 else None
        found.append(Needed(client.node, target_seconds, other, size, enough, now, still))
    return tuple(sorted(found, key=lambda one: -(math.inf if one.bits_per_second is None else one.bits_per_second)))
