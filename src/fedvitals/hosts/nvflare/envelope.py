# SPDX-License-Identifier: Apache-2.0
"""The telemetry in a site's result: one header with our payload bytes, a few times, and why the task failed.

It comes from a machine that may lie: everything in it is checked, and only believed about its sender. What a site is
sent is never changed. What both sides must know is derived from what NVFlare gives both: job, site, task and round.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedvitals.errors import RecordError
from fedvitals.hosts import envelope_checks
from fedvitals.hosts.envelope_checks import VERSION, checked_fields
from fedvitals.resources.clocks import LATEST

KEY = "fedvitals"  # of the header in a result, and of the entry in a model's meta sent by a trainer
LONGEST_TRACEBACK, LONGEST_MESSAGE = 20_000, 1_000  # characters
FIELDS = {**envelope_checks.FIELDS, "failure": dict}
FAILURE_FIELDS = {"exception": str, "message": str, "traceback": str}
_EXCEPTION = re.compile(r"[A-Za-z_][A-Za-z0-9_.]{0,99}")


@dataclass(frozen=True, slots=True)
class SiteFailure:
    """Why a task failed at a site: the class of the exception; its text only if the site releases it."""

    exception: str
    message: str = ""
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class ResultEnvelope:
    """The telemetry of one result. Times are the site's own, since the epoch; `cpu`: processor seconds of the task."""

    payload: bytes
    received: float
    replied: float
    started: float  # of the process that trains
    cpu: float
    failure: SiteFailure | None = None

    @property
    def is_dated(self) -> bool:
        """Whether its times lie between 1970 and 2099."""
        return all(0 <= t <= LATEST for t in (self.received, self.replied, self.started))

    def header(self) -> dict[str, Any]:
        """Return the envelope as plain data for a header."""
        failure = self.failure
        reason = {} if failure is None else {name: getattr(failure, name) for name in FAILURE_FIELDS}
        own = {name: getattr(self, name) for name in FIELDS if name not in ("version", "failure")}
        return {"version": VERSION, **own, "failure": reason}


def read_envelope(header: Any, away: float) -> ResultEnvelope:
    """Return the envelope of a result, whose times are not checked yet. Raises RecordError saying what is wrong.

    `away`: seconds from the task's assignment to its result, by the server's clock.
    """
    if type(header) is not dict:
        raise RecordError(f"Under the header '{KEY}' of a result lies a {type(header).__name__}, not a dict.")
    fields = checked_fields(header, FIELDS, away)
    return ResultEnvelope(**{**fields, "failure": _read_failure(fields["failure"])})


def _read_failure(fields: Mapping[Any, Any]) -> SiteFailure | None:
    if not fields:
        return None
    if set(fields) != set(FAILURE_FIELDS) or any(
        type(fields[name]) is not kind for name, kind in FAILURE_FIELDS.items()
    ):
        raise RecordError("Telemetry reports a failure with fields that are missing, too many or of another type.")
    if not _EXCEPTION.fullmatch(fields["exception"]):
        raise RecordError("Telemetry reports a failure whose exception has no name that a class can have.")
    message, traceback = fields["message"][:LONGEST_MESSAGE], fields["traceback"][-LONGEST_TRACEBACK:]
    return SiteFailure(fields["exception"], message, traceback)


# -- what both sides know -------------------------------------------------------------------------------------------


def run_name(job_id: str) -> str:
    """Return a site's name for the run; the server knows it by its id in the store."""
    return f"nvflare-{job_id}"[:200]


def trace_id(job_id: str) -> str:
    """Return the trace id of a job."""
    return hashlib.blake2b(f"nvflare/job/{job_id}".encode(), digest_size=16).hexdigest()


def journey_id(job_id: str, site: str, round_index: int | None) -> str:
    """Return the id of the span of a training task's journey to a site and back."""
    place = f"nvflare/{job_id}/{site}/{round_index}"
    return hashlib.blake2b(place.encode(), digest_size=8).hexdigest()
