# SPDX-License-Identifier: Apache-2.0
"""Read one reply: extract its telemetry, report its times and numbers, and pass it to the guard."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flwr.app import Message, MetricRecord

from fedvitals.errors import RecordError
from fedvitals.hosts import client_telemetry
from fedvitals.hosts.client_telemetry import TRAIN
from fedvitals.hosts.flower import guard
from fedvitals.hosts.flower.failures import client_failure_of, dead_process
from fedvitals.hosts.flower.reply_envelope import KEY, ReplyEnvelope, bytes_of, journey_id, run_name
from fedvitals.hosts.flower.reply_envelope import read_envelope as read_letter
from fedvitals.hosts.metric_names import numbers_of
from fedvitals.resources.clocks import worked_interval

if TYPE_CHECKING:
    from fedvitals.hosts.flower.server_rounds import ClientRequest, ServerRounds

EVALUATE = "evaluate"
UNKNOWN = (3, 4)  # codes: the message or its reply is no longer kept, which says nothing about the client
LEGACY_METRICS = ("fitres.metrics", "evaluateres.metrics")  # metrics of the older API, among its settings


def read_reply(server_rounds: ServerRounds, request: ClientRequest, reply: Message, at: float) -> Message | None:
    """Return a message to use in place of the reply; None: the reply itself, without the telemetry it carried."""
    monitor, node = server_rounds.monitor, request.node
    if reply.has_error():
        server_rounds.answered(request, failed=True)
        _report_failure(server_rounds, request, reply)
        return None
    record = reply.content.pop(KEY, None)
    size = bytes_of(reply.content)
    monitor.host.transfer(node, "server", size, kind="update" if request.phase == TRAIN else request.phase)
    _read_telemetry(server_rounds, request, reply, record, at, size)
    server_rounds.answered(request, failed=False)
    _log_metrics(server_rounds, request, reply)
    return guard.check_reply(server_rounds, request, reply)


def read_late_reply(server_rounds: ServerRounds, request: ClientRequest, reply: Message, at: float) -> None:
    """Report a reply that came after the server had given up; it has no further effect."""
    waited = at - request.sent
    if reply.has_error():
        if int(reply.error.code) not in UNKNOWN:
            _report_failure(server_rounds, request, reply)
        return
    reply.content.pop(KEY, None)
    answer = f"The answer of {request.node} to round {request.round_index}"
    text = f"{answer} came after {waited:.1f} s, when nobody waited any more."
    data = {"phase": request.phase, "waited": waited, "round": request.round_index}
    server_rounds.monitor.host.event("info", "client.answered_late", text, node=request.node, data=data)


def _report_failure(server_rounds: ServerRounds, request: ClientRequest, reply: Message) -> None:
    failure = client_failure_of(reply.error, request.phase)
    actor = dead_process(reply.error)
    first = request if actor is None else server_rounds.dead_processes.setdefault(actor, request)
    if first is not request:
        text = f"{request.node} was not served: Flower gave it a process that had died before, with {first.node}."
        data = {"phase": request.phase, "died_with": first.node}
        server_rounds.monitor.host.event("warning", "client.unserved", text, node=request.node, data=data)
        return
    gone = failure.event == "client.dropped_out"
    if gone:
        server_rounds.connections.unavailable(request.node)
    level = "warning" if gone else "error"
    data_with_round = {**failure.data, "round": request.round_index}
    server_rounds.monitor.host.event(level, failure.event, failure.message, node=request.node, data=data_with_round)


def _read_telemetry(
    server_rounds: ServerRounds, request: ClientRequest, reply: Message, record: Any, at: float, size: int
) -> None:
    """Admit the reply's telemetry, if any. Problems with it are only reported for its sender.

    `size`: bytes of the reply without it.
    """
    monitor, node = server_rounds.monitor, request.node
    if record is None:
        if request.phase == TRAIN:  # a client without the mod: only the times of request and answer are known
            monitor.host.exchange(node, request.sent, request.sent, at, at)
            server_rounds.worked(request.sent, at)
        return
    at = max(at, request.sent)  # the server's clock may have been set back
    try:
        envelope = read_letter(record, reply.metadata.src_node_id, node, at - request.sent)
        if not envelope.is_dated:
            client_telemetry.report_impossible_clock(monitor.host, node, request.phase)
            envelope = replace(envelope, received=request.sent, replied=at, started=request.sent)
        began, ended = _handler_interval(envelope, request.sent, at)
        server_rounds.worked(began, ended)
        if request.phase != TRAIN:
            _report_phase_time(server_rounds, request, began, ended)
            return
        stage = server_rounds.handler_times(node)
        stage.add(envelope.cpu, envelope.replied - envelope.received)
        monitor.host.log({"time.cpu": stage.cpu}, node=node)
        span = journey_id(reply.metadata.reply_to_message_id)
        times = (request.sent, envelope.received, envelope.replied, at)
        monitor.host.exchange(node, *times, started=envelope.started, span=span)
        # A mod between ours and the network may have compressed the reply, but hardly the request.
        largest, run = max(size, request.size), run_name(reply.metadata.run_id)
        client_telemetry.absorb_payload(monitor.host, node, run, envelope.payload, largest)
        if stage.count > 1:  # the client only reports its time for this message
            monitor.host.log({"time.client": stage.seconds}, node=node)
    except RecordError as error:
        client_telemetry.report_impossible(monitor.host, node, request.phase, error)


def _report_phase_time(server_rounds: ServerRounds, request: ClientRequest, began: float, ended: float) -> None:
    """Report how long a client worked on a request other than «train»: as a Span, and for an evaluation as a metric."""
    host, seconds = server_rounds.monitor.host, ended - began
    host.span(request.node, request.phase, began - server_rounds.monitor.run.started, seconds)
    if request.phase == EVALUATE:
        host.log({"time.client_evaluate": seconds}, node=request.node)


def _handler_interval(envelope: ReplyEnvelope, sent: float, returned: float) -> tuple[float, float]:
    """Return when the client's handler ran, within what the server saw; the whole interval if that is impossible."""
    return worked_interval(sent, envelope.received, envelope.replied, returned)


def _log_metrics(server_rounds: ServerRounds, request: ClientRequest, reply: Message) -> None:
    """Log the metrics that a client sent its server."""
    if server_rounds.hidden is not None:
        return
    metrics: dict[str, float] = {}
    for key, record in reply.content.items():
        if isinstance(record, MetricRecord) or key in LEGACY_METRICS:
            metrics |= numbers_of(record)
    if request.phase == TRAIN and server_rounds.weight in metrics:
        server_rounds.monitor.host.log({"update.samples": metrics.pop(server_rounds.weight)}, node=request.node)
    metrics.pop(server_rounds.weight, None)
    client_telemetry.log_metrics(server_rounds.monitor.host, request.node, request.phase, metrics)
