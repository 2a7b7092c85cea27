# SPDX-License-Identifier: Apache-2.0
"""How a server processes the telemetry and the metrics in a client's answer, in any framework.

They come from a machine that may lie: problems are reported for their sender, and affect no other client.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fedvitals.hosts.metric_names import with_known_names
from fedvitals.hosts.telemetry_budget import telemetry_budget
from fedvitals.transport.sender import NO_ROUND, Sender

if TYPE_CHECKING:
    from fedvitals.monitor.host import HostObserver

TRAIN = "train"


def report_refused(host: HostObserver, node: str, phase: str, text: str, level: str = "warning") -> None:
    """Report that telemetry of a client is not used, in whole or in part; `text`: why."""
    host.event(level, "telemetry.refused", text, node=node, data={"phase": phase})


def report_impossible(host: HostObserver, node: str, phase: str, error: Exception) -> None:
    """Report that the telemetry of a client is invalid."""
    report_refused(host, node, phase, f"Telemetry of {node} cannot be: {error}")


def report_impossible_clock(host: HostObserver, node: str, phase: str) -> None:
    """Report that the clock of a client is years off."""
    text = f"The clock of {node} is not between 1970 and 2099. Its times are not used; set its clock."
    report_refused(host, node, phase, text)


def absorb_payload(host: HostObserver, node: str, run: str, payload: bytes, message_bytes: int) -> None:
    """Admit the records that a client sent. RecordError if they are invalid.

    `run`: the client's name for the run. `message_bytes`: the size of the larger of its request and its answer.
    """
    if payload:
        host.absorb(payload, Sender(node, run, budget=telemetry_budget(message_bytes), newest_round=NO_ROUND))


def log_metrics(
    host: HostObserver, node: str, phase: str, metrics: Mapping[str, float], more: Mapping[str, float] | None = None
) -> None:
    """Log the metrics that a client sent its server. «train_loss» and similar become its loss.

    Outside training they are prefixed with the phase. `more`: metrics that keep their names.
    """
    named = with_known_names(metrics)
    if phase != TRAIN:
        local = {f"local.{name}": value for name, value in named.items() if name in ("loss", "accuracy")}
        named = {f"{phase}.{name}": value for name, value in metrics.items()} | local
    named |= more or {}
    left_out = host.log_of_sender(named, node)
    if left_out:
        text = f"Of {len(named)} metrics that {node} sent, these were left out: {left_out}."
        report_refused(host, node, phase, text, "info")
