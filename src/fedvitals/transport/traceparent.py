# SPDX-License-Identifier: Apache-2.0
"""W3C trace context: a server's span travels with a message, so that the client's work becomes its child.

    headers = carried(scope, node="c7")                    # server: into the message that asks the client
    with entered(arrived(headers, emit)):                  # client: `timed` and log lines are now inside that span
        train()

`carried` returns `traceparent`, and W3C `baggage` with run, round and node: texts by name, which any message can hold
(HTTP headers, gRPC metadata, a ConfigRecord of Flower). The reply may carry the client's own in the same way.
"""

from __future__ import annotations

import contextlib
import re
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fedvitals.errors import ConfigError
from fedvitals.scope import Scope, current
from fedvitals.transport import otel_names as names
from fedvitals.transport.timing import new_span_id, new_trace

_HEADER = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_CARRIED = {"run": names.RUN, "round": names.ROUND, "node": names.NODE, "group": names.GROUP}
LONGEST = 8192  # characters of a baggage, by the standard
NAME = 200


@dataclass(frozen=True, slots=True)
class TraceParent:
    """The content of a header: the trace, the parent span of what follows, and whether anything records it."""

    trace: str
    span: str
    sampled: bool = True

    def __str__(self) -> str:
        return f"00-{self.trace}-{self.span}-{'01' if self.sampled else '00'}"


def traceparent(scope: Scope) -> str:
    """Return the header that makes the scope's span the parent of whatever its receiver does."""
    return str(TraceParent(scope.trace or new_trace(), scope.span or new_span_id()))


def read_traceparent(header: object) -> TraceParent | None:
    """Return the content of a header; None for anything that the standard does not allow, which starts a new trace.

    A future version is read as far as it begins like version 00, as the standard requires.
    """
    match = _HEADER.fullmatch(header.strip(" \t")) if isinstance(header, str) and len(header) <= LONGEST else None
    if match is None:
        return None
    version, trace, span, flags, rest = match.groups()
    if version == "ff" or (version == "00" and rest is not None) or not trace.strip("0") or not span.strip("0"):
        return None
    return TraceParent(trace, span, bool(int(flags, 16) & 1))


def carried(scope: Scope, *, node: str | None = None, group: str | None = None) -> dict[str, str]:
    """Return the headers for a message from this scope: `traceparent` and `baggage`; `node`: the receiving client."""
    fields = {"run": scope.run, "round": scope.round, "node": node or scope.node, "group": group or scope.group}
    pairs = [f"{_CARRIED[name]}={urllib.parse.quote(str(v), safe='')}" for name, v in fields.items() if v is not None]
    return {"traceparent": traceparent(scope), "baggage": ",".join(pairs)}


def arrived(
    headers: Mapping[str, str], emit: Callable[[Any], None], *, node: str | None = None, run: str | None = None
) -> Scope:
    """Return the scope that a message came from, for its receiver; `node` and `run` override the headers.

    Headers come from other machines, so invalid parts are left out. ConfigError without a run.
    """
    by_name = {str(name).lower(): value for name, value in headers.items()}
    parent, fields = read_traceparent(by_name.get("traceparent")), _baggage(by_name.get("baggage"))
    run = run or fields.get("run")
    if not run:
        raise ConfigError(
            f"The headers name no run: «baggage» has no {names.RUN}. Make them with `carried`, or give run= yourself."
        )
    number = fields.get("round", "")
    return Scope(
        run,
        emit,
        int(number) if re.fullmatch(r"[0-9]{1,9}", number) else None,
        node or fields.get("node"),
        fields.get("group"),
        trace=new_trace() if parent is None else parent.trace,
        span=None if parent is None else parent.span,
    )


@contextlib.contextmanager
def entered(scope: Scope) -> Iterator[Scope]:
    """Context that runs inside the scope: `timed` blocks are children of its span."""
    token = current.set(scope)
    try:
        yield scope
    finally:
        current.reset(token)


def _baggage(header: object) -> dict[str, str]:
    if not isinstance(header, str) or len(header) > LONGEST:
        return {}
    fields = {name: field for field, name in _CARRIED.items()}
    texts = {}
    for pair in header.split(","):
        name, _, value = pair.partition(";")[0].partition("=")  # properties follow «;», and are not used here
        text = urllib.parse.unquote(value.strip())
        if name.strip() in fields and 0 < len(text) <= NAME and text.isprintable():
            texts[fields[name.strip()]] = text
    return texts
