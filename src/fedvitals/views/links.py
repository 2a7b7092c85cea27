# SPDX-License-Identifier: Apache-2.0
"""Computes how much of a transfer's time is latency, where a run's own description tells."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import TYPE_CHECKING

from fedvitals.analysis.timeline import RoundTime
from fedvitals.errors import FedvitalsError
from fedvitals.records import Run, Transfer

if TYPE_CHECKING:
    from fedvitals.lab import Experiment


def latency_of(run: Run, times: Sequence[RoundTime], transfers: Iterable[Transfer]) -> dict[str, float] | None:
    """Seconds of each way of a client's round that sizes do not change; None where nobody knows.

    Known where `fedvitals lab` kept the experiment. The lab is loaded only then, and needs torch: without it, None.
    """
    text = run.config.get("experiment")
    if run.host != "lab" or not isinstance(text, str) or "network" not in text:
        return None
    try:
        from fedvitals import lab  # noqa: PLC0415 - it needs torch

        return latency_in(lab.read(text), times, transfers)
    except (ModuleNotFoundError, FedvitalsError):
        return None


def latency_in(
    experiment: Experiment, times: Sequence[RoundTime], transfers: Iterable[Transfer]
) -> dict[str, float] | None:
    """The same of an experiment; times the messages of a round, where a group exchanges after each step."""
    if experiment.network is None:
        return None
    from fedvitals.lab.network.virtual_clock import profile_of  # noqa: PLC0415 - it needs torch

    seconds_of: dict[str, list[float]] = {}  # seconds of a single message
    for transfer in transfers:
        if transfer.kind == "update" and transfer.seconds is not None and transfer.seconds > 0:
            seconds_of.setdefault(transfer.sender, []).append(transfer.seconds)
    all_of_them: dict[str, list[float]] = {}
    for time in times:
        for client in time.clients:
            all_of_them.setdefault(client.node, []).append(client.told.get("upload", 0.0))
    latencies = {}
    for node, sent in all_of_them.items():
        messages = max(1, round(median(sent) / median(seconds_of[node]))) if node in seconds_of else 1
        link, _ = profile_of(experiment.network, node, experiment.seed)
        latencies[node] = messages * link.latency_seconds
    return latencies
