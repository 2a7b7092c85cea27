# SPDX-License-Identifier: Apache-2.0
"""Two bars of the exporters: the size and speed of a Prometheus page with many clients, and what an outage loses."""

from __future__ import annotations

import secrets
import time
import urllib.request
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedvitals.catalog import CATALOG
from fedvitals.hosts.otlp.receiver import Receiver
from fedvitals.measurements import stamped
from fedvitals.monitor.monitor import Monitor
from fedvitals.records import Metric, Record, Run, Span, Where
from fedvitals.sinks.otel.sink import OpenTelemetry
from fedvitals.sinks.prometheus.sink import Prometheus
from fedvitals.time_parts import ROUND

Row = dict[str, Any]

OUTAGE = 60.0  # seconds, of the bar
PACE = 0.05  # seconds between rounds, so that a training continues through an outage


def scraping(clients: int = 1000, scrapes: int = 30) -> Row:
    """Return series and milliseconds of the page, with every metric of the catalogue for every client, over HTTP."""
    sink = Prometheus(port=0)
    try:
        sink.write(_everything(clients))
        url, milliseconds, page = sink.url or "", [], b""
        for _ in range(scrapes):
            began = time.perf_counter()
            with urllib.request.urlopen(url, timeout=30) as answer:  # noqa: S310 - our own page, on loopback
                page = answer.read()
            milliseconds.append(1000 * (time.perf_counter() - began))
    finally:
        sink.close()
    series = sum(1 for line in page.splitlines() if line and not line.startswith(b"#"))
    return {
        "clients": clients,
        "metrics": len(CATALOG),
        "series": series,
        "bytes": len(page),
        "milliseconds": float(np.median(milliseconds)),
        "slowest_milliseconds": max(milliseconds),
    }


def _everything(clients: int) -> list[Record]:
    """Return one round of a run in which every metric is reported for every client and for the whole."""
    run = "bench"
    records: list[Record] = [Run(run, "bench", started=1.0)]
    for place, name in enumerate(CATALOG):
        nodes = [None, *(f"c{client}" for client in range(clients))]
        records += [Metric(Where(run, 0, node), 2.0, name, 0.1 * place + 0.001 * at) for at, node in enumerate(nodes)]
    return [stamped(record, "bench", sequence) for sequence, record in enumerate(records)]


class _Kept:
    """Keeps what a receiver accepts that disappears and returns on the same port."""

    def __init__(self, run: str) -> None:
        self.rounds: list[int] = []
        self.records = 0
        self._run, self._port, self.secret = run, 0, secrets.token_urlsafe()
        self._receiver: Receiver | None = None

    def start(self) -> str:
        self._receiver = Receiver(self._take, {self._run}, secret=self.secret, port=self._port, whole=True)
        self._port = int(self._receiver.endpoint.rpartition(":")[2])
        return self._receiver.endpoint

    def stop(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    def _take(self, records: Sequence[Record], _sender: str | None, _size: int) -> None:
        self.records += len(records)
        for record in records:
            if isinstance(record, Span) and record.name == ROUND and record.where.round is not None:
                self.rounds.append(record.where.round)


def outage(seconds: float = OUTAGE) -> Row:
    """Train while the OTLP receiver is unavailable for `seconds`: what did not arrive, and what it changed."""
    run = f"outage-{time.time_ns()}"
    kept = _Kept(run)
    sink = OpenTelemetry(kept.start(), {"Authorization": f"Bearer {kept.secret}"})
    rounds = max(12, round(seconds / PACE))
    away = range(4, rounds - 4)
    monitor = Monitor(None, id=run, sinks=[sink], detectors=(), machine=False)

    def between(number: int) -> None:
        if number == away.start:
            monitor.flush()
            kept.stop()
        if number == away.stop:
            kept.start()
        time.sleep(PACE)

    began = time.perf_counter()
    try:
        watched = _train(rounds, monitor, between)
        took = time.perf_counter() - began
        monitor.flush(60)
        monitor.close()
    finally:
        kept.stop()
    missing = set(range(rounds)) - set(kept.rounds)
    return {
        "rounds": rounds,
        "seconds_away": len(away) * took / rounds,
        "records_arrived": kept.records,
        "rounds_missing": len(missing),
        "rounds_twice": len(kept.rounds) - len(set(kept.rounds)),
        "records_lost": monitor.lost,
        "weights_equal": bool(torch.equal(watched, _train(rounds))),
    }


def _train(rounds: int, monitor: Monitor | None = None, between: Any = None) -> Tensor:
    """Run a small training, with or without a monitor; returns its weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch.nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number in range(rounds):
        if between is not None:
            between(number)
        if monitor is not None:
            monitor.host.round_begin(number, model)
            monitor.host.client_begin("c0", model)
        optimizer.zero_grad()
        model(torch.ones(8, 16) * (number % 7) / 7).square().mean().backward()
        optimizer.step()
        if monitor is not None:
            monitor.host.client_end("c0")
            monitor.host.round_end(number, model)
    return model.weight.detach().clone()
