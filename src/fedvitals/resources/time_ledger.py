# SPDX-License-Identifier: Apache-2.0
"""Collects where the nodes' time of one round went, and makes Spans of it when the round is over.

Real seconds only: a host with a virtual clock reports its own Spans.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from fedvitals.errors import ConfigError, unknown
from fedvitals.records import Span
from fedvitals.resources.clocks import Offset
from fedvitals.resources.node_spans import covered
from fedvitals.time_parts import EDGE, JOURNEY, REST, SERVER, WORK, edge_span, parts_of

SAME = 0.05  # seconds: a process's start is known to a tick of the kernel
UNKNOWN_CLOCK = Offset(0.0, 0.0)  # assumed to be right
NODES = 100_000  # whose clocks are known; a bound against hosts that name every message's sender anew


@dataclass(frozen=True, slots=True)
class LedgerSpan:
    """A future Span: its node, beginning, duration and parts."""

    node: str
    name: str
    began: float  # since the epoch, by the server's clock
    seconds: float
    parts: dict[str, float]
    group: str | None = None
    id: str | None = None
    parent: str | None = None
    attributes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request to a remote client and its answer: `sent` and `returned` by the server's clock, the rest by the
    client's.

    `started`: when the process began that took the message, which was started for it or is older; time before that
    counts as waiting, not download. `span`: the id under which the client knows its journey.
    """

    sent: float
    received: float
    replied: float
    returned: float
    started: float | None = None
    span: str | None = None

    @property
    def times_of_client_known(self) -> bool:
        """Whether the client reported when it received the message and replied; else the server's times are used."""
        return (self.received, self.replied) != (self.sent, self.returned)


@dataclass(slots=True)
class _Trained:
    """A client's own period of training, by the server's clock."""

    began: float
    ended: float
    data: float
    group: str | None


class Ledger:
    """`begin` opens a round; `close` returns its Spans. Clock offsets are kept from round to round."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clocks: dict[str, Offset] = {}
        self.begin(None, 0.0)

    def begin(self, span: str | None, at: float) -> None:
        """Begin a round: `span` is the id of its Span, `at` when it began."""
        with self._lock:
            self._round, self._at = span, at
            self._spent: dict[str, dict[str, float]] = {}
            # A client has several if a round has stages: keys, shares and masks of secure aggregation.
            self._exchanges: dict[str, list[Exchange]] = {}
            self._trained: dict[str, list[_Trained]] = {}
            self.recorded_edges: set[str] = set()  # whose own Span was written

    def spent(self, part: str, seconds: float, node: str) -> None:
        """Add seconds that a node spent on a part of the round. ConfigError for an unknown part."""
        if part not in WORK and part not in REST:
            raise ConfigError(unknown("part of a round", part, [*WORK, *REST]))
        with self._lock:
            own = self._spent.setdefault(node, {})
            own[part] = own.get(part, 0.0) + max(0.0, float(seconds))

    def exchange(self, node: str, exchange: Exchange) -> Offset:
        """Add an exchange. Returns the current estimate of the client's clock offset."""
        offset = self._clocks.get(node, UNKNOWN_CLOCK)
        if exchange.times_of_client_known:
            times = (exchange.sent, exchange.received, exchange.replied, exchange.returned)
            offset = self._clocks.get(node, Offset()).learn(*times)
        with self._lock:
            if exchange.times_of_client_known and (node in self._clocks or len(self._clocks) < NODES):
                self._clocks[node] = offset
            self._exchanges.setdefault(node, []).append(exchange)
        return offset

    def trained(self, span: Span) -> None:
        """Add a client's own Span, its times by the server's clock (see `ahead`)."""
        data = parts_of(span).get("data", 0.0)
        with self._lock:
            own = _Trained(span.at, span.at + span.seconds, data, span.where.group)
            node = span.where.node or ""
            stages = self._trained.setdefault(node, [])
            if len(stages) >= max(1, len(self._exchanges.get(node, ()))):  # reported again
                stages.pop()
            stages.append(own)

    @property
    def exchanged(self) -> bool:
        """Whether a remote client has answered in this round: then clocks may differ."""
        return bool(self._exchanges)

    def ahead(self, node: str | None) -> float:
        """Return the seconds to subtract from a client's times; 0 unless it exchanged messages in this round."""
        known = node is not None and node in self._exchanges
        return self._clocks.get(node or "", UNKNOWN_CLOCK).seconds if known else 0.0

    def seen(self, node: str) -> tuple[float, float] | None:
        """Return when a client of this round was last asked and when it had answered, by the server's clock."""
        exchanges = self._exchanges.get(node)
        return None if exchanges is None else (exchanges[-1].sent, exchanges[-1].returned)

    def journey(self, node: str) -> str | None:
        """Return the id of the Span of a client's latest journey in this round, if there will be one."""
        exchanges = self._exchanges.get(node)
        return None if exchanges is None else self._journey_id(node, len(exchanges) - 1)

    def _journey_id(self, node: str, stage: int) -> str:
        again = f"/{stage}" if stage else ""
        return self._exchanges[node][stage].span or edge_span(self._round, f"journey/{node}{again}")

    def _server(self, ended: float) -> LedgerSpan:
        """Return the server's Span: unless the host reported it, waiting while clients are away or train in its
        process.
        """
        seconds = max(0.0, ended - self._at)
        parts = dict(self._spent.get("server", {}))
        if "wait" not in parts:
            away = [(exchange.sent, exchange.returned) for own in self._exchanges.values() for exchange in own]
            away = away or [(client.began, client.ended) for own in self._trained.values() for client in own]
            parts = {"wait": min(covered(away), max(0.0, seconds - sum(parts.values()))), **parts}
        return LedgerSpan("server", SERVER, self._at, seconds, parts, None, None, self._round, {"folded": True})

    def close(self, ended: float) -> list[LedgerSpan]:
        """Return the round's Spans: the server's, each group's, each journey."""
        with self._lock:
            spans = [self._server(ended)] if self._spent or self._trained or self._exchanges else []
            for node, exchanges in self._exchanges.items():
                ends = [*(later.sent for later in exchanges[1:]), ended]  # until then it waits
                spans += [self._journey(node, stage, until) for stage, until in enumerate(ends)]
            groups: dict[str, list[_Trained]] = {}
            for client in (client for own in self._trained.values() for client in own):
                if client.group is not None and client.group not in self.recorded_edges:
                    groups.setdefault(client.group, []).append(client)
            for group, members in groups.items():
                began, last = min(m.began for m in members), max(m.ended for m in members)
                parts = self._spent.get(group, {})
                own = edge_span(self._round, group)
                spans.append(LedgerSpan(group, EDGE, began, max(0.0, last - began), parts, group, own, self._round))
            return spans

    def _journey(self, node: str, stage: int, ended: float) -> LedgerSpan:
        exchange = self._exchanges[node][stage]
        stages = self._trained.get(node, [])
        own = stages[stage] if stage < len(stages) else None
        offset = self._clocks.get(node, UNKNOWN_CLOCK)
        # With a clock that runs fast, or was set, a client's times are longer than it was away.
        here = min(max(exchange.received - offset.seconds, exchange.sent), exchange.returned)
        away = min(max(exchange.replied - offset.seconds, here), exchange.returned)
        group = None if own is None else own.group
        # The client's own times may be false: they only count as far as they lie within what the server saw.
        began, over = (here, away) if own is None else (own.began, own.ended)
        began = min(max(began, here), away)
        over = min(max(over, began), away)
        data = 0.0 if own is None else min(own.data, over - began)
        compute = away - began - data  # packing and compressing an update is also the client's own work
        if exchange.started is None:
            parts = {"download": here - exchange.sent, "queue": began - here, "data": data, "compute": compute}
            parts |= {"upload": exchange.returned - away}
        else:
            start = min(max(0.0, exchange.received - exchange.started), max(0.0, here - exchange.sent))
            # An older process already existed.
            start = start if exchange.started - offset.seconds >= exchange.sent - SAME else 0.0
            parts = {"queue": here - exchange.sent - start, "start": start, "data": data}
            parts |= {"compute": compute + began - here, "reply": exchange.returned - away}
        if not exchange.times_of_client_known:
            # Nothing is known except that it was away.
            parts = {"compute": exchange.returned - exchange.sent}
        parts = {name: max(0.0, seconds) for name, seconds in {**parts, "wait": ended - exchange.returned}.items()}
        attributes = {"clock_offset": offset.seconds, "clock_error": offset.error}
        parent = self._round if group is None else edge_span(self._round, group)
        whole = sum(parts.values())
        return LedgerSpan(
            node, JOURNEY, exchange.sent, whole, parts, group, self._journey_id(node, stage), parent, attributes
        )
