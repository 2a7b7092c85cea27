# SPDX-License-Identifier: Apache-2.0
"""Generates hostile telemetry: what a lying client might send instead of, or in addition to, its own.

    attacker = Attacker(node="c0", others=["c1", "c2"], run="their-run", seed=7)
    attack = attacker.attack(own_payload)     # its kind, and the messages to send

Every attack is determined by the seed. The kinds are the rows of `ATTACKS`; each draws its own variations, so that a
million attacks are a million different ones.
"""

from __future__ import annotations

import functools
import math
import random
import struct
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedvitals.catalog import CATALOG
from fedvitals.errors import RecordError
from fedvitals.measurements import single_records, stamped
from fedvitals.records import (
    Action,
    Event,
    Finding,
    Layer,
    LayerStats,
    LayerTable,
    Metric,
    Record,
    Run,
    Sketch,
    Snapshot,
    Span,
    Transfer,
    Where,
)
from fedvitals.stats import COUNT, FAMILIES, NANS, SUM_MAGNITUDES, SUM_SQUARES, empty_sums
from fedvitals.transport.wire.payload import decode, encode

NUMBERS = (
    0.0, -0.0, 1.0, -1.0, 5e-324, -5e-324, 1e-300, 1e30, 1e300, -1e300, 1.7976931348623157e308, math.nan, math.inf,
    -math.inf, 2.0**31, 2.0**53, 2.0**60, 2.0**63, -(2.0**63), 1.8e9,
)  # fmt: skip
WHOLE = (0, 1, -1, 2**31 - 1, 2**31, 2**53, 2**62, 2**63 - 1, -(2**63), 10_000)
TEXTS = (
    "", " ", "server", "None", "../../etc/passwd", "<img src=x onerror=alert(1)>", "'; DROP TABLE run; --", "a\nb\r\n",
    "\x1b[2J\x1b[31mred", "\u202eevil\u202c", "\x00", "@everyone <!channel>", "{0.__class__}", "%s%n", "x" * 1000,
    "ALL MODELS ARE STOLEN. Call 555-EVIL", "é" * 300, "\N{SNOWMAN}", "=cmd|' /C calc'!A0",
)  # fmt: skip
EVENTS = (
    "aggregation.failed", "budget", "client.answered_late", "client.busy", "client.dropped_out", "client.failed",
    "client.partition", "client.unserved", "cohort", "edge.failed", "exception", "groups", "initialisation",
    "initialisation.zero", "labels", "layers.sharded", "log", "memory.census", "monitor.error", "round.failed",
    "round.unclosed", "sink.lost", "telemetry.lost", "telemetry.refused", "telemetry.thinned", "update.late",
    "update.left_out", "update.lost", "update.refused", "updates.approximate", "worker.lost", "user.own",
)  # fmt: skip
BOMB = zlib.compress(bytes(1 << 20))
LEVELS = ("debug", "info", "warning", "error", "critical", "fatal")


@dataclass(frozen=True, slots=True)
class Attack:
    """What is sent: the kind of attack, and the messages in their order."""

    kind: str
    messages: Sequence[bytes]


@functools.lru_cache(256)
def records_of(message: bytes) -> Sequence[Record]:
    """Return the records of a payload; RecordError if it is none."""
    return tuple(single_records(decode(message)))


class Attacker:
    """A lying client. `others`: the names of honest clients; `run`: the clients' name of the run."""

    def __init__(self, node: str, others: Sequence[str], run: str, seed: int) -> None:
        self.node, self.others, self.run = node, others, run
        self.random = random.Random(seed)  # noqa: S311 - repeatable attacks
        self.captured: list[bytes] = []  # messages of this and other clients, to be replayed
        self._count = 0

    def attack(self, own: bytes, kind: str | None = None) -> Attack:
        """Return an attack of a kind, or of any; `own`: the telemetry that the client would send if it did not lie."""
        chosen = self.random.choice(tuple(ATTACKS)) if kind is None else kind
        messages = ATTACKS[chosen](self, own)
        self.captured = [*self.captured[-20:], own]
        return Attack(chosen, messages)

    # -- building blocks of attacks
    # ---------------------------------------------------------------------------------------

    def number(self) -> float:
        """Return a number that may break code, or any other."""
        return self.random.choice(NUMBERS) if self.random.random() < 0.8 else self.random.gauss(0.0, 10.0)

    def text(self) -> str:
        """Return a text that may break code."""
        return self.random.choice(TEXTS)

    def where(self, **changes: Any) -> Where:
        """Return coordinates of the attacker, with changes."""
        return replace(Where(self.run, None, self.node), **changes)

    def payload(self, records: Sequence[Record], own: bytes = b"") -> bytes:
        """Return the records as a payload, after those of an honest client; b"" if they cannot be encoded."""
        self._count += 1
        honest = records_of(own) if own else []
        source = f"lies-{self._count}"
        try:
            return encode([*honest, *(stamped(replace(record), source, i) for i, record in enumerate(records))])
        except (RecordError, ValueError):
            return own

    def table(self, layers: int = 1) -> LayerTable:
        """Return a layer table whose shapes may be absurd."""
        shapes = [
            tuple(self.random.choice((0, 1, 3, 8, 2**20)) for _ in range(self.random.randrange(4)))
            for _ in range(layers)
        ]
        return LayerTable("parameter", tuple(Layer(f"w{i}", shape, "float32") for i, shape in enumerate(shapes)))

    def statistics(self, table: LayerTable, family: str, where: Where) -> LayerStats:
        """Return statistics of a healthy update, or anything."""
        rows = np.zeros((len(table.layers), len(FAMILIES[family].columns)))
        if self.random.random() < 0.5 and rows.shape[1] == empty_sums(1).shape[1]:
            rows = empty_sums(len(table.layers))
            rows[:, COUNT], rows[:, SUM_SQUARES], rows[:, SUM_MAGNITUDES] = 64.0, 0.01, 0.3
            rows[:, NANS] = self.random.choice((0.0, 64.0))
        else:
            rows[:] = self.number()
        return LayerStats(where, time.time(), family, rows, table.digest)

    def event(self, where: Where) -> Event:
        """Return an event whose name may be the server's, with any text and data."""
        keys = ("exception", "records", "histogram", "groups", "weight", "doing", "layer", "parts", "round")
        data = {key: self.random.choice((self.text(), self.number(), [self.text()], {"a": 1}, None)) for key in keys}
        level = self.random.choice(LEVELS)
        return Event(where, time.time(), level, self.random.choice(EVENTS), self.text(), data)

    def span(self, where: Where) -> Span:
        """Return a span whose name may be the server's, at any time and of any length."""
        name = self.random.choice(("round", "server", "edge", "journey", "client", "epoch", self.text()))
        attributes = {
            "clock": "virtual",
            "parts": {"compute": self.number(), "data": self.text()},
            "failed": self.text(),
        }
        ids = (f"{self.random.getrandbits(128):032x}", f"{self.random.getrandbits(64):016x}")
        return Span(where, self.number(), name, self.number(), *ids, None, attributes)


# -- the kinds of attacks ---------------------------------------------------------------------------------------------


def framing(a: Attacker, own: bytes) -> list[bytes]:
    """Report in the name of another client, of the server or of all, as node or as group."""
    victim = a.random.choice((*a.others, "server", None))
    where = a.where(node=victim) if a.random.random() < 0.5 else a.where(group=victim)
    table = a.table()
    lies: list[Record] = [
        Metric(where, time.time(), a.random.choice(("gradient.nonfinite", "weight.nonfinite", "loss")), a.number()),
        a.event(where),
        a.span(where),
        Run(a.run, "", tables=(table,)),
        a.statistics(table, "update", where),
    ]
    return [a.payload(a.random.sample(lies, 3), own)]


def forging(a: Attacker, own: bytes) -> list[bytes]:
    """Send kinds of records, metrics and events that only the server may report."""
    where = a.where()
    lies: list[Record] = [
        Finding(where, 1.0, "NAN_UPDATE", "critical", 1.0, a.text()),
        Action(where, 1.0, "NAN_UPDATE", "exclude", a.random.choice(a.others)),
        Snapshot(where, 1.0, "update", "feed", 10),
        Transfer(where, 1.0, a.random.choice(a.others), "server", 10**12, 10**12),
        Metric(where, 1.0, a.random.choice(tuple(CATALOG)), a.number()),
        a.event(where),
        a.event(where),
        a.span(where),
    ]
    return [a.payload([a.random.choice(lies)], own)]


def hiding(a: Attacker, own: bytes) -> list[bytes]:
    """Report healthy numbers about itself and its update, in addition to its own or instead, now or in the future."""
    where, at = a.where(), time.time() + a.random.choice((0.0, 1.0, 1e9))
    table = a.table(a.random.randrange(1, 5))
    healthy = {"update.nonfinite": 0.0, "update.norm": 0.1, "gradient.nonfinite": 0.0, "loss": 0.01, "steps": 5.0}
    lies: list[Record] = [Metric(where, at, name, value) for name, value in healthy.items()]
    lies += [Run(a.run, "", tables=(table,)), *(a.statistics(table, "update", where) for _ in range(2))]
    if a.random.random() < 0.5:
        return [a.payload(lies, own)]
    kept = [r for r in records_of(own) if not (isinstance(r, Metric) and r.name in healthy)]
    return [a.payload([*kept, *lies])]


def flooding(a: Attacker, own: bytes) -> list[bytes]:
    """Send many records, names, layers, sources, events or tables; in one message, or in many."""
    many = a.random.choice((300, 3_000, 20_000))
    count = a._count  # noqa: SLF001 - our own
    makers: tuple[Callable[[int], Record], ...] = (
        lambda _: Metric(a.where(), 1.0, "loss", 1.0),
        lambda i: Metric(a.where(), 1.0, f"user.{count}-{i}", 1.0),
        lambda i: Metric(a.where(layer=f"{count}-{i}"), 1.0, "loss", 1.0),
        lambda _: Event(a.where(), 1.0, "warning", "user.flood", "x"),
        lambda i: Span(a.where(), 1.0, f"{count}-{i}", 0.1, "0" * 32, "0" * 16),
    )
    make = a.random.choice(makers)
    flood = a.payload([make(i) for i in range(many)])
    return [own, flood] if a.random.random() < 0.5 else [own, *[flood[:500]] * 30]


def blinding(a: Attacker, own: bytes) -> list[bytes]:
    """Send tables, sketches, histograms and data that break code which trusts them."""
    where, table = a.where(), a.table(a.random.choice((1, 4)))
    absurd = LayerTable(
        "parameter", (Layer("w", (2 ** a.random.randrange(40, 63),) * a.random.randrange(1, 70), "float32"),)
    )
    family = a.random.choice(tuple(FAMILIES))
    lies: list[Record] = [
        Run(a.run, "", tables=(absurd,)),
        Sketch(where, 1.0, tuple(a.number() for _ in range(a.random.choice((1, 255, 256, 257)))), "feed"),
        Event(where, 1.0, "info", "labels", "", {"histogram": {a.text(): a.random.choice(WHOLE)}}),
        Event(where, 1.0, "info", "memory.census", "", {"groups": a.text(), "since": a.number(), "until": None}),
        Event(where, 1.0, "error", "client.failed", a.text(), {"exception": {"a": [a.text()]}}),
        a.span(where),
    ]
    lies = [*a.random.sample(lies, 2), Run(a.run, "", tables=(table,)), a.statistics(table, family, where)]
    return [a.payload(lies, own)]


def replaying(a: Attacker, own: bytes) -> list[bytes]:
    """Send messages that were sent before, by itself or by another client, instead of its own or in addition."""
    old = a.random.choice(a.captured) if a.captured else own
    return [old, own, own] if a.random.random() < 0.5 else [own, old, old]


def time_travel(a: Attacker, own: bytes) -> list[bytes]:
    """Send times, rounds and steps that are in the past, in the future, or invalid."""
    lies: list[Record] = []
    for _ in range(10):
        where = a.where(step=a.random.choice((None, *WHOLE)), round=a.random.choice((None, None, None, *WHOLE)))
        at = a.random.choice((0.0, 1e9, time.time() + 1e9, a.number()))
        lies.append(Metric(where, at, "loss", 1.0))
        lies.append(replace(a.span(where), at=at))
    return [a.payload(lies, own)]


def control_characters(a: Attacker, own: bytes) -> list[bytes]:
    """Send names and text that move cursors, end lines, or mean something to a browser, a shell or a spreadsheet."""
    where = a.where(layer=a.text() or None)
    names = LayerTable("parameter", (Layer(a.text(), (1,), a.text()),))
    lies: list[Record] = [
        Metric(where, 1.0, f"user.{a.text()}", 1.0),
        Event(where, 1.0, a.random.choice(LEVELS), a.text(), a.text(), {a.text(): a.text()}),
        Event(where, 1.0, "error", "client.failed", a.text(), {"exception": a.text()}),
        Span(where, 1.0, a.text(), 0.1, a.text()[:32], a.text()[:16], None, {a.text(): a.text()}),
        Run(a.run, a.text(), tables=(names,)),
    ]
    return [a.payload(a.random.sample(lies, 3), own)]


def numbers(a: Attacker, own: bytes) -> list[bytes]:
    """Send huge, tiny and impossible numbers, under every existing name."""
    names = a.random.sample(tuple(CATALOG), 20)
    lies = [Metric(a.where(step=a.random.choice((None, 0, 3))), 1.0, name, a.number()) for name in names]
    return [a.payload([lie], own if i == 0 else b"") for i, lie in enumerate(lies)]


def copying(a: Attacker, own: bytes) -> list[bytes]:
    """Send another client's name, sketch and numbers, as its own."""
    stolen = [r for message in a.captured for r in records_of(message) if isinstance(r, Sketch | Metric)]
    lies = [replace(record, where=a.where()) for record in a.random.sample(stolen, min(20, len(stolen)))]
    lies.append(Sketch(a.where(), 1.0, tuple(a.random.gauss(0, 1) for _ in range(256)), "feed" * 4))
    return [a.payload(lies, own)]


def imitating(a: Attacker, own: bytes) -> list[bytes]:
    """Send all that another client reported of its training, under its own name and instead of its own."""
    others = [
        records
        for records in map(records_of, a.captured)
        if any(isinstance(r, Metric) and r.where.node in a.others for r in records)
    ]
    if not others:
        return [own]
    stolen = [r if isinstance(r, Run) else replace(r, where=a.where()) for r in a.random.choice(others)]
    return [a.payload(stolen)]


def damage(a: Attacker, own: bytes) -> list[bytes]:
    """Send bytes that are no payload: flipped, cut, with another header, or a header that unpacks to very much."""
    broken = bytearray(own)
    for _ in range(a.random.randrange(1, 8)):
        broken[a.random.randrange(len(broken))] ^= 1 << a.random.randrange(8)
    body = struct.pack("<I", zlib.crc32(BOMB)) + BOMB
    choices = (
        bytes(broken),
        own[: a.random.randrange(len(own))],
        own + a.random.randbytes(50),
        a.random.randbytes(a.random.randrange(1, 400)),
        struct.pack("<2sBBI", b"fv", 2, 1, len(BOMB)) + body,
        struct.pack("<2sBBI", b"fv", a.random.randrange(256), a.random.randrange(256), a.random.getrandbits(32))
        + own[8:],
    )
    return [a.random.choice(choices)]


ATTACKS: dict[str, Callable[[Attacker, bytes], list[bytes]]] = {
    attack.__name__: attack
    for attack in (
        framing, forging, hiding, flooding, blinding, replaying, time_travel, control_characters, numbers, copying,
        imitating, damage,
    )
}  # fmt: skip
