# SPDX-License-Identifier: Apache-2.0
"""Translate Flower's error replies into the events that detectors know."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from flwr.app import Error
from flwr.common.constant import ErrorCode

_REPLY = re.compile(r"<class '([\w.<>]{1,200})(?:\(\w{1,200}\))?'>:<'(.*?)'>(?:\n(Traceback.*))?", re.DOTALL)
# Ray joins the texts of an exception and of its causes, the outermost last.
_CAUSE = re.compile(
    r"\n\n(?:The above exception was the direct cause of the following|During handling of the above) exception"
    r"[^\n]*\n\n"
)
_RAISED = re.compile(r"([A-Za-z_][\w.<>]{0,199})(?:: (.*))?", re.DOTALL)
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")  # colours of a terminal
RAY = "RayTaskError"
_ACTOR = re.compile(r"ActorDiedError.*?actor_id: ([0-9a-f]{1,64})", re.DOTALL)
_NAMES = {value: name for name, value in vars(ErrorCode).items() if isinstance(value, int)}
LONGEST = 20_000  # characters of a traceback
NODE_UNAVAILABLE, APP_CRASHED = 5, 8  # error codes, which the oldest version does not name


@dataclass(frozen=True, slots=True)
class ClientFailure:
    """A failure of a client: the event's name, its message and its data."""

    event: str
    message: str
    data: dict[str, Any]


def dead_process(error: Error) -> str | None:
    """Return the id of the Ray actor that died, if that is why there is no answer; else None.

    Flower's simulation returns a dead actor to its pool, and gives it the next clients' messages: only the first of
    these errors belongs to the client in whose training it died.
    """
    match = _ACTOR.search(str(error.reason or "")[:LONGEST])
    return None if match is None else match[1]


def client_failure_of(error: Error, phase: str) -> ClientFailure:
    """Return `client.failed`, or `client.dropped_out` if the node is gone."""
    code, reason = int(error.code), str(error.reason or "")
    kind = "WorkerDied" if code == APP_CRASHED else _NAMES.get(code, f"ERROR_{code}")
    text, frames = reason[:LONGEST].partition("\n")[0] or kind, None
    raised = _REPLY.fullmatch(reason)
    if raised is not None:
        kind, frames = raised[1].rpartition(".")[2], raised[3]
        text = f"{kind}: {raised[2]}" if raised[2] else kind
    if kind == RAY:
        kind, text = _raised_on_ray(reason)
    data: dict[str, Any] = {"exception": kind, "code": code, "phase": phase}
    if frames is not None:
        data["traceback"] = frames[:LONGEST]
    return ClientFailure("client.dropped_out" if code == NODE_UNAVAILABLE else "client.failed", text[:LONGEST], data)


def _raised_on_ray(reason: str) -> tuple[str, str]:
    """Return the class and text of an exception raised by a client in a Ray process, from Ray's own text.

    It has the traceback of the client's own exception, followed by that of Flower's ClientAppException around it.
    """
    text = _ESCAPES.sub("", reason[-LONGEST:])
    tracebacks = _CAUSE.split(text)
    own = tracebacks[-2] if len(tracebacks) > 1 else text
    lines = own.removesuffix("'>").splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith("  ")]
    raised = _RAISED.fullmatch("\n".join(lines[frames[-1] + 1 :])) if frames else None
    if raised is None:
        return RAY, RAY
    kind = raised[1].rpartition(".")[2]
    return kind, f"{kind}: {raised[2]}" if raised[2] else kind
