# SPDX-License-Identifier: Apache-2.0
"""Sends live progress from inside a long client task to a server that runs a `hosts.otlp.receiver`.

    with live(headers, "http://server:4318", token="...", node="c7") as scope:     # headers: `carried`, by the server
        for epoch in range(epochs):
            with timed("epoch", number=epoch):
                train()
            tell(scope, loss=loss)

Values leave the client within a second, so they are available even if the client dies afterwards. This does not replace
payloads: `WorkerObserver` measures, and its records arrive at the end.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Iterator, Mapping

from fedvitals.catalog import public_name
from fedvitals.records import Metric
from fedvitals.scope import Scope
from fedvitals.sinks.otel.sink import OpenTelemetry
from fedvitals.transport.privacy import PrivacyPolicy
from fedvitals.transport.recorder import where
from fedvitals.transport.sink_writer import SinkWriter
from fedvitals.transport.traceparent import arrived, entered


@contextlib.contextmanager
def live(
    headers: Mapping[str, str],
    endpoint: str,
    *,
    token: str | None = None,
    node: str | None = None,
    policy: PrivacyPolicy | None = None,
    timeout: float = 5.0,
) -> Iterator[Scope]:
    """Open a scope whose `timed` blocks and metrics are sent to the server at once.

    They are children of the span in `headers`. `policy`: what may leave this client; by default that of a deployment
    (level 2, no tracebacks). At the end it waits at most `timeout` seconds for pending data.
    """
    sink = OpenTelemetry(endpoint, {} if token is None else {"Authorization": f"Bearer {token}"}, timeout=timeout)
    policy = policy or PrivacyPolicy(level=2, tracebacks=False)
    writer = SinkWriter([sink], policy=policy, spill=None, strict=False, source=f"live-{os.urandom(4).hex()}")
    # Stray: everything from this process is a client's, whatever node it names.
    scope = arrived(headers, functools.partial(writer.emit, stray=True), node=node)
    try:
        with entered(scope):
            yield scope
    finally:
        writer.close(timeout)


def tell(scope: Scope, **values: float) -> None:
    """Send metrics of the client with the current time."""
    for name, value in values.items():
        scope.emit(Metric(where(scope), time.time(), public_name(name), float(value)))
