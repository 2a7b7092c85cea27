# SPDX-License-Identifier: Apache-2.0
"""Read the result of one task: admit its telemetry, report its times and numbers, and apply the guard."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from nvflare.apis.dxo import DXO, DataKind, MetaKey
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import Shareable

from fedvitals.errors import RecordError
from fedvitals.hosts import client_telemetry, update_guard
from fedvitals.hosts.nvflare import models
from fedvitals.hosts.nvflare.envelope import ResultEnvelope, SiteFailure, journey_id, read_envelope, run_name
from fedvitals.hosts.nvflare.return_codes import client_failure_of
from fedvitals.hosts.nvflare.server_rounds import TRAIN, ServerRounds, SiteRequest
from fedvitals.resources.clocks import worked_interval

# The weight of an update that is left out: negligible next to any other, and the model stays unchanged if all are left
# out.
NO_WEIGHT = 1e-12


def read_result(server_rounds: ServerRounds, request: SiteRequest, result: Shareable, header: Any) -> str | None:
    """Report a result that arrived; return why the job must end, if the guard requires it.

    `header`: the telemetry that came with it, unread; None if there was none. An update to leave out is replaced in
    place.
    """
    monitor, node = server_rounds.monitor, request.node
    at = max(request.returned or time.time(), request.sent)
    size = models.bytes_of(result)
    envelope = _read_telemetry(server_rounds, request, header, at, size)
    code = result.get_return_code()
    server_rounds.answered(request, failed=code != ReturnCode.OK)
    if code != ReturnCode.OK:
        if not request.failed:
            report_failure(server_rounds, request, str(code), None if envelope is None else envelope.failure)
        return None
    monitor.host.transfer(node, "server", size, kind="update" if request.phase == TRAIN else request.phase)
    dxo = models.dxo_of(result)
    if dxo is None:
        return None
    _log_metrics(server_rounds, request, dxo)
    return _check_update(server_rounds, request, result, dxo) if request.phase == TRAIN else None


def read_failure(server_rounds: ServerRounds, request: SiteRequest, failure: SiteFailure) -> None:
    """Report that a task failed, from a message of its site that comes before its result, or instead of it."""
    if not request.failed:
        request.failed = True
        server_rounds.answered(request, failed=True)
        report_failure(server_rounds, request, ReturnCode.EXECUTION_EXCEPTION, failure)


def report_failure(server_rounds: ServerRounds, request: SiteRequest, code: str, failure: SiteFailure | None) -> None:
    """Report that a site failed, by the event `client.failed`."""
    known = client_failure_of(request.node, code, request.phase, failure)
    data = {**known.data, "round": request.round_index}
    server_rounds.monitor.host.event("error", "client.failed", known.message, node=request.node, data=data)


def _read_telemetry(
    server_rounds: ServerRounds, request: SiteRequest, header: Any, at: float, size: int
) -> ResultEnvelope | None:
    """Admit the telemetry of a result, if any. Problems with it are only reported for its sender."""
    host, node = server_rounds.monitor.host, request.node
    if header is None:
        server_rounds.worked(request.sent, at)
        if request.phase == TRAIN:  # a site without our component: only the times of task and answer are known
            host.exchange(node, request.sent, request.sent, at, at)
        return None
    try:
        envelope = read_envelope(header, at - request.sent)
        if not envelope.is_dated:
            client_telemetry.report_impossible_clock(host, node, request.phase)
            envelope = replace(envelope, received=request.sent, replied=at, started=request.sent)
        server_rounds.worked(*worked_interval(request.sent, envelope.received, envelope.replied, at))
        if request.phase == TRAIN:
            host.log({"time.cpu": envelope.cpu}, node=node)
            span = journey_id(server_rounds.job_id, node, request.round_index)
            times = (request.sent, envelope.received, envelope.replied, at)
            host.exchange(node, *times, started=envelope.started, span=span)
        largest, run = max(size, request.size), run_name(server_rounds.job_id)
        client_telemetry.absorb_payload(host, node, run, envelope.payload, largest)
    except RecordError as error:
        client_telemetry.report_impossible(host, node, request.phase, error)
        return None
    return envelope


def _log_metrics(server_rounds: ServerRounds, request: SiteRequest, dxo: DXO) -> None:
    """Log the metrics that a site sent: those of its model's meta, or of a result that contains nothing else."""
    if server_rounds.hides:
        return
    source = dxo.data if dxo.data_kind == DataKind.METRICS else dxo.meta.get(MetaKey.INITIAL_METRICS)
    if not isinstance(source, Mapping):
        return
    metrics = {str(name): float(value) for name, value in source.items() if _is_number(value)}
    steps = dxo.meta.get(MetaKey.NUM_STEPS_CURRENT_ROUND)
    more = {"num_steps": float(steps)} if request.phase == TRAIN and _is_number(steps) else {}
    client_telemetry.log_metrics(server_rounds.monitor.host, request.node, request.phase, metrics, more)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.floating | np.integer) and not isinstance(value, bool)


def _check_update(server_rounds: ServerRounds, request: SiteRequest, result: Shareable, dxo: DXO) -> str | None:
    sent, got = models.arrays_of(request.data), models.arrays_of(result)
    if got is None or not got.values:
        return None
    start, end = models.ends_of_update({} if sent is None else sent.values, got)
    actions = () if server_rounds.hides else server_rounds.measure_update(request, start, end)
    excluded = next((a for a in actions if a.kind == "exclude" and a.target == request.node), None)
    why = None if excluded is None else str(excluded.arguments.get("why", "it cannot be used"))
    if why is None and server_rounds.guard_mode != update_guard.REPORT:
        why = update_guard.nonfinite_words(got.values)
    if why is None and request.node in server_rounds.corrections.in_force.quarantined:
        why = "the site is in quarantine"
    if why is None:
        return None
    text = f"The update of {request.node} was not taken: {why}."
    data = {"guard": server_rounds.guard_mode, "round": request.round_index}
    server_rounds.monitor.host.event("error", "update.left_out", text, node=request.node, data=data)
    if server_rounds.guard_mode == update_guard.FAIL and excluded is None:
        return (
            f"fedvitals, guard='fail': round {request.round_index}: {why}, in the update of {request.node}. "
            "Aggregating it would make the model so. guard='drop' leaves such updates out; 'report' lets them pass."
        )
    sent_dxo = models.dxo_of(request.data)
    leave_out(dxo, {} if sent_dxo is None else sent_dxo.data)
    return None


def leave_out(dxo: DXO, start: Mapping[Any, Any]) -> None:
    """Replace an update in place by none at all, with negligible weight. `start`: the entries that the site was sent.

    NVFlare's controllers end a job if too few results are good, and average the others: so the result stays a good one,
    says that nothing changed, and has negligible weight.
    """
    for name, entry in [*dxo.data.items()]:
        before = None if dxo.data_kind == DataKind.WEIGHT_DIFF else start.get(name)
        dxo.data[name] = _zeros_like(entry) if before is None else _like(before, entry)
    dxo.meta[MetaKey.NUM_STEPS_CURRENT_ROUND] = NO_WEIGHT


def _zeros_like(entry: Any) -> Any:
    return entry.new_zeros(entry.shape) if hasattr(entry, "new_zeros") else np.zeros_like(entry)


def _like(before: Any, entry: Any) -> Any:
    """Return values in the form of another entry: an array, or a tensor of its type."""
    if hasattr(entry, "new_tensor"):
        return entry.new_tensor(np.asarray(before))
    return np.array(before, dtype=getattr(entry, "dtype", None))
