# SPDX-License-Identifier: Apache-2.0
"""Translate Flower's error replies into the events that detectors know."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from flwr.app import Error
from flwr.common.constant import ErrorCode

_CLASS = re.compile(r"<class '([\w.]{1,200})'>")
_ACTOR = re.compile(r"ActorDiedError.*?actor_id: ([0-9a-f]{1,64})", re.DOTALL)
_NAMES = {value: name for name, value in vars(ErrorCode).items() if isinstance(value, int)}
LONGEST = 20_000  # characters of a traceback
NODE_UNAVAILABLE, APP_CRASHED = 5, 8  # codes, which the oldest version does not have by name


@dataclass(frozen=True, slots=True)
class ClientFailure:
    """A failure of a client: the event's name, its message and its data."""

    event: str
    message: str
    data: dict[str, Any]


def dead_process(error: Error) -> str | None:
    """Return the id of the Ray actor that died, where that is why there is no answer; else None.

    Flower's simulation puts a dead actor back into its pool, and gives it the next clients' messages: only the first of
    these errors belongs to the client in whose training it died.
    """
    match = _ACTOR.search(str(error.reason or "")[:LONGEST])
    return None if match is None else match[1]


def client_failure_of(error: Error, phase: str) -> ClientFailure:
    """Return `client.failed`, or `client.dropped_out` where the node is no longer there."""
    code, reason = int(error.code), str(error.reason or "")[:LONGEST]
    first, _, rest = reason.partition("\n")
    raised = _CLASS.search(first)
    kind = "WorkerDied" if code == APP_CRASHED else _NAMES.get(code, f"ERROR_{code}")
    if raised is not None:
        kind = raised[1].rpartition(".")[2]
    data: dict[str, Any] = {"exception": kind, "code": code, "phase": phase}
    if rest.startswith("Traceback"):
        data["traceback"] = rest
    return ClientFailure("client.dropped_out" if code == NODE_UNAVAILABLE else "client.failed", first or kind, data)
