# SPDX-License-Identifier: Apache-2.0
"""A sink that serves the newest values at /metrics for Prometheus, with a bounded number of series.

    Monitor("runs.db", sinks=[Prometheus()])             then scrape http://127.0.0.1:9464/metrics

| series | what |
| --- | --- |
| `fedvitals_<metric>{run}` | the newest value about the round as a whole |
| `fedvitals_node_<metric>{run,node}` | `signs` of each node; with more than `nodes` clients, only of the worst |
| `fedvitals_nodes_<metric>{run,point}` | over the clients of the last round, the newest of each: min to max |
| `fedvitals_*_total{run,...}` | counters: rounds, findings, failures, events, bytes, records lost |

`rules.yml` beside this file has alert rules for them; its path is `Prometheus.RULES`.
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fedvitals.errors import ConfigError, MissingExtraError
from fedvitals.protocols import Sink
from fedvitals.records import Event, Finding, Metric, Record, Run, Transfer
from fedvitals.sinks.prometheus.state import SIGNS, RunState, Series
from fedvitals.sinks.spread import all_but
from fedvitals.transport.http_server import LOOPBACK, HttpServer, Refused, Request, Response

logger = logging.getLogger("fedvitals.telemetry")

PORT = 9464
NODES, WORST, SERIES, RUNS = 50, 10, 2000, 8
AT_ONCE = 8  # scrapes
PLAIN = "text/plain; charset=utf-8"
RETRY_SECONDS = 10.0  # between two attempts at a port that is taken


class Prometheus(Sink):
    """A sink that serves the page /metrics, which Prometheus scrapes.

    It is served from the first record until the last monitor that uses the sink is closed. One object may serve several
    monitors.

    Args:
        port: The port; 0 takes a free one, which is logged.
        host: The address to listen on. One other than this machine's own needs a `token`.
        token: What the scraper sends as a Bearer token.
        signs: Metrics with a series for each node.
        nodes: The largest number of clients that all have series of their own.
        worst: With more clients, how many of them have series: most findings first, then the farthest from the
            others.
        series: The most series on the whole page.
    """

    RULES = Path(__file__).with_name("rules.yml")  # alert rules for a Prometheus server
    name = "prometheus"
    ignores = all_but(Event, Finding, Metric, Transfer)

    def __init__(
        self,
        port: int = PORT,
        host: str = "127.0.0.1",
        token: str | None = None,
        *,
        signs: Sequence[str] = SIGNS,
        nodes: int = NODES,
        worst: int = WORST,
        series: int = SERIES,
    ) -> None:
        try:
            self._core: Any = importlib.import_module("prometheus_client.core")
            self._exposition: Any = importlib.import_module("prometheus_client.exposition")
        except ImportError as error:
            raise MissingExtraError("prometheus-client", "prometheus", "The Prometheus exporter") from error
        if host not in LOOPBACK and not token:
            raise ConfigError(
                f"Prometheus on host '{host}' can be read by other machines, and has no token. Give one, "
                "Prometheus(host=..., token=...), and the same to the scraper (`authorization: {credentials: ...}`)."
            )
        self._wanted, self._host, self._token = port, host, token
        self._signs, self._series = tuple(signs), series
        # More nodes than fit on the page would be rendered at each scrape, only to be dropped: 49 ms of CPU, not 24.
        most_nodes = series // max(1, len(self._signs))
        self._nodes, self._worst = min(nodes, most_nodes), min(worst, most_nodes)
        self._lock = threading.Lock()
        self._runs: dict[str, RunState] = {}
        self._open: set[str] = set()
        self._writers: set[int] = set()  # thread ids: each monitor's queue has one thread, which also closes
        self._page: HttpServer | None = None
        self._next_attempt = 0.0
        self._port_reported = False

    @property
    def port(self) -> int | None:
        """The port that is served; None while nothing is served."""
        return None if self._page is None else self._page.port

    @property
    def url(self) -> str | None:
        """The address of the page; None while nothing is served."""
        return None if self._page is None else f"{self._page.url}/metrics"

    def write(self, records: Sequence[Record], /) -> None:
        """Process records. Never raises, so that nothing is counted twice.

        Args:
            records: The records that the monitor has produced since the last call.
        """
        with self._lock:
            self._writers.add(threading.get_ident())
            touched: dict[str, RunState] = {}
            for record in records:
                run = record.id if isinstance(record, Run) else record.where.run
                state = touched[run] = self._state(run)
                state.add(record)
                if isinstance(record, Run):
                    (self._open.discard if record.finished is not None else self._open.add)(run)
            for state in touched.values():
                state.settle()
        if records:
            self._serve()

    def close(self) -> None:
        """Stop serving, unless another monitor still writes."""
        with self._lock:
            self._writers.discard(threading.get_ident())
            page, self._page = (None, self._page) if self._writers else (self._page, None)
        if page is not None:
            page.close()

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Return the page as it is scraped, and its content type.

        Args:
            accept: The formats that the scraper accepts, as it says in its header.

        Returns:
            The page's text and its content type.
        """
        encode, kind = self._exposition.choose_encoder(accept)
        return encode(_SingleCollection(self._families())), kind

    def _state(self, run: str) -> RunState:
        if run not in self._runs:
            self._make_room()
            taken = {state.label for state in self._runs.values()}
            self._runs[run] = RunState(run, self._signs, self._nodes, self._worst, taken)
        return self._runs[run]

    def _make_room(self) -> None:
        """Keep the newest runs: the oldest that has ended is dropped first."""
        while len(self._runs) >= RUNS:
            ended = [run for run in self._runs if run not in self._open]
            gone = (ended or list(self._runs))[0]
            self._runs.pop(gone)
            self._open.discard(gone)

    def _serve(self) -> None:
        if self._page is not None or time.monotonic() < self._next_attempt:
            return
        try:
            name = "fedvitals-prometheus-page"
            where = (self._host, self._wanted, self._token)
            self._page = HttpServer(*where, self._answer, _refuse, name=name, at_once=AT_ONCE)
        except OSError as error:
            self._next_attempt = time.monotonic() + RETRY_SECONDS
            if not self._port_reported:
                self._port_reported = True
                logger.warning(
                    "Prometheus metrics cannot be served on %s port %s (%s); training goes on, and it is tried again. "
                    "Logged once. Prometheus(port=0) takes a free port.", self._host, self._wanted, error,
                )  # fmt: skip
            return
        # A port chosen by the system would otherwise be unknown: programs without logging only show warnings.
        logger.log(logging.INFO if self._wanted else logging.WARNING, "Prometheus metrics are served on %s", self.url)

    def _answer(self, request: Request) -> Response:
        if request.method not in ("GET", "HEAD"):
            raise Refused(405, "The metrics are read by GET /metrics.")
        if request.path.partition("?")[0] not in ("/metrics", "/"):
            raise Refused(404, "The metrics are at /metrics.")
        return Response(200, *self.render(request.headers.get("Accept", "")))

    def _families(self) -> Iterator[Any]:
        """Yield the series of all runs by family, up to the limit; the rest is counted."""
        with self._lock:
            states = list(self._runs.values())
            # By kind first, so that a crowded run leaves room for the most important series of the others.
            kinds = [[series for state in states for series in state.kind(kind)] for kind in RunState.KINDS]
        left_out = 0
        families: dict[str, Any] = {}
        shown: set[tuple[str, ...]] = set()  # long names may coincide once they are cut
        for series in (series_of_kind for kind in kinds for series_of_kind in kind):
            values = tuple(series.labels.values())
            if len(shown) >= self._series - 1 or (series.name, *values) in shown:
                left_out += 1
                continue
            shown.add((series.name, *values))
            if series.name not in families:
                families[series.name] = self._family(series)
            families[series.name].add_metric(values, series.value)
        yield from families.values()
        yield self._core.GaugeMetricFamily(
            "fedvitals_series_left_out", "Series that had no place on this page (see docs/exporters.md).", left_out
        )

    def _family(self, series: Series) -> Any:
        counter = series.name.endswith("_total")
        make = self._core.CounterMetricFamily if counter else self._core.GaugeMetricFamily
        return make(series.name.removesuffix("_total"), series.help, labels=list(series.labels))


class _SingleCollection:
    """A collection in the form that an encoder expects of a registry."""

    def __init__(self, families: Iterator[Any]) -> None:
        self._families = families

    def collect(self) -> Iterator[Any]:
        return self._families


def _refuse(refused: Refused, _request: Request) -> Response:
    return Response(refused.status, f"{refused}\n".encode(), PLAIN)
