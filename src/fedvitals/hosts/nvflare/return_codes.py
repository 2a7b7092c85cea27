# SPDX-License-Identifier: Apache-2.0
"""Translate NVFlare's return codes, and a site's report of its failure, into the events that detectors know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nvflare.apis.fl_constant import ReturnCode

from fedvitals.hosts.nvflare.envelope import SiteFailure

# The meaning of the code alone, for people; the site's own exception is named if it reports one.
WORDS = {
    ReturnCode.TASK_ABORTED: "its task was aborted: the training script failed, or the job was stopped",
    ReturnCode.EXECUTION_EXCEPTION: "its executor raised an exception, or its training script is no longer there",
    ReturnCode.EXECUTION_RESULT_ERROR: "its executor gave no usable result",
    ReturnCode.TASK_DATA_FILTER_ERROR: "a filter failed on what it was sent",
    ReturnCode.TASK_RESULT_FILTER_ERROR: "a filter failed on what it sends",
    ReturnCode.BAD_TASK_DATA: "it could not read what it was sent",
    ReturnCode.TASK_UNKNOWN: "it has no executor for the task",
    ReturnCode.EMPTY_RESULT: "it sent nothing",
}


@dataclass(frozen=True, slots=True)
class ClientFailure:
    """A failure of a client, for the event `client.failed`."""

    message: str
    data: dict[str, Any]


def client_failure_of(node: str, code: str, task: str, failure: SiteFailure | None) -> ClientFailure:
    """Return what is known of a failed task: NVFlare's return code, and the site's own exception if it reported one."""
    words = WORDS.get(code, f"its return code is {code}")
    data: dict[str, Any] = {"exception": code, "code": code, "phase": task}
    if failure is None:
        return ClientFailure(f"{node} failed: {words} ({code}).", data)
    data["exception"] = failure.exception
    if failure.traceback:
        data["traceback"] = failure.traceback
    message = f": {failure.message}" if failure.message else ""
    return ClientFailure(f"{failure.exception}{message}", data)
