# SPDX-License-Identifier: Apache-2.0
"""The guard on Flower's replies: updates that are not finite, and replies that do not fit the others.

    fv.flower.attach(FedAvg(), monitor, guard="drop")

«drop» turns the reply into an error reply, which every strategy leaves out and Flower's own log reports. «fail» ends
the run with an exception that names the client. «report» only names the client, before the strategy sees the replies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from flwr.app import Error, Message
from flwr.common.constant import ErrorCode

from fedvitals.errors import FedvitalsError
from fedvitals.hosts import update_guard
from fedvitals.hosts.array_models import Values
from fedvitals.hosts.flower import arrays, corrections, protection
from fedvitals.hosts.flower.message_forms import form_of
from fedvitals.hosts.flower.misfits import CheckedReply
from fedvitals.records import Action, printable

if TYPE_CHECKING:
    from fedvitals.hosts.flower.server_rounds import ClientRequest, ServerRounds

TRAIN = "train"
REASON = 1000  # characters
CHOICE = 'guard="drop" leaves such replies out; guard="report" lets them pass.'


class UnusableUpdateError(FedvitalsError):
    """An update must not be aggregated, and the user asked to fail."""


class NonFiniteUpdateError(UnusableUpdateError):
    """An update contains NaN or infinity, and the user asked to fail."""


class MalformedReplyError(UnusableUpdateError):
    """A reply does not fit the model or the other replies, and the user asked to fail."""


def error_reply_instead(reply: Message, request: Message, why: str) -> Message:
    """Return an error reply to replace a reply: for the strategy, the client failed."""
    error = Error(ErrorCode.UNKNOWN, f"fedvitals left this update out: {why}")
    instead = Message(error, reply_to=request)
    instead.metadata.__dict__["_message_id"] = reply.metadata.message_id
    return instead


def check_reply(server_rounds: ServerRounds, request: ClientRequest, reply: Message) -> Message | None:
    """Record the form of a reply that has arrived, and check its update. Returns a message to replace it, or None.

    A reply to «train» whose form differs from its request's waits until `judge_replies` sees the others.
    """
    if protection.masked(request.message.content) or protection.masked(reply.content):
        return None
    got = arrays.model_of(reply.content)
    read = None if got is None else arrays.read_arrays(got)
    form, key = form_of(reply.content, read), reply.metadata.reply_to_message_id
    checks = server_rounds.reply_checks(request.phase)
    if request.phase != TRAIN:
        checks.add(CheckedReply(request, key, form, form))
        return None
    sent = arrays.model_of(request.message.content)
    checked = CheckedReply(request, key, form, server_rounds.models.form(sent))
    before = None if sent is None else server_rounds.models.values(sent)
    if checked.waits:
        fitting = read is not None and not form.unreadable and len(read) == len(server_rounds.layers or read)
        checked.message, checked.before = reply, before
        checked.after = arrays.trained_of(read, server_rounds.layers) if read is not None and fitting else None
    checks.add(checked)
    if checked.waits or before is None or read is None:
        return None
    return _check_update(server_rounds, request, reply, before, arrays.trained_of(read, server_rounds.layers))


def _check_update(
    server_rounds: ServerRounds,
    request: ClientRequest,
    reply: Message,
    start: Mapping[str, Values],
    end: Mapping[str, Values],
) -> Message | None:
    answers: Sequence[Action] = ()
    if server_rounds.hidden is None and end:  # a model may consist of integers only, such as trees
        answers = server_rounds.measure_update(request, start, end)
    left = next((a for a in answers if a.kind == "exclude" and a.target == request.node), None)
    why = None if left is None else str(left.arguments.get("why", "it cannot be used"))
    if why is None and server_rounds.guard_mode != update_guard.REPORT:
        why = update_guard.nonfinite_words(end)
        if why is not None:
            _refuse_nonfinite(server_rounds, request, why)
    in_force = server_rounds.corrections.in_force
    if why is None and request.node in in_force.quarantined:
        why = "the client is in quarantine"
    if why is not None:
        return error_reply_instead(reply, request.message, why)
    if in_force.of_replies:
        corrections.correct_reply(in_force, request.node, reply, start, end, server_rounds.weight, server_rounds.layers)
    return None


def _refuse_nonfinite(server_rounds: ServerRounds, request: ClientRequest, why: str) -> None:
    text = f"The update of {request.node} was not taken: {why}."
    server_rounds.monitor.host.event(
        "error", "update.left_out", text, node=request.node, data={"guard": server_rounds.guard_mode}
    )
    if server_rounds.guard_mode == update_guard.FAIL:
        raise NonFiniteUpdateError(
            f"Round {request.round_index}: {why}, in the update of node {request.node}. Aggregating it would put "
            f"such values into the model. {CHOICE}"
        )


def judge_replies(server_rounds: ServerRounds, phase: str = TRAIN, *, entries: bool = False) -> dict[str, Message]:
    """Judge the waiting replies of a phase, report those that do not fit, and measure the others.

    `entries`: the strategy also needs the same metrics in all replies. Returns replacements for replies, by the id of
    their request. Raises MalformedReplyError if the guard is «fail».
    """
    checks = server_rounds.reply_checks(phase)
    instead: dict[str, Message] = {}
    for checked, why in checks.judge():
        if checked.message is not None:
            other = _judged(server_rounds, checked, checked.message, why)
            instead |= {} if other is None else {checked.key: other}
    if entries and server_rounds.guard_mode != update_guard.REPORT:
        for checked, why in checks.entry_misfits():
            report_misfit(server_rounds, checked, why)
            error = Error(ErrorCode.UNKNOWN, f"fedvitals left this reply out: {why}")
            instead[checked.key] = Message(error, reply_to=checked.request.message)
    return instead


def _judged(server_rounds: ServerRounds, checked: CheckedReply, reply: Message, why: str | None) -> Message | None:
    """Return the replacement for a judged reply, and tape it; `why`: how it does not fit."""
    request, instead, taped = checked.request, None, reply
    if why is not None:
        nonfinite = update_guard.nonfinite_words(checked.after or {})
        why = printable(f"{why}, and {nonfinite}" if nonfinite else why)[:REASON]
        report_misfit(server_rounds, checked, why)
        error_reply = error_reply_instead(reply, request.message, why)
        instead = None if server_rounds.guard_mode == update_guard.REPORT else error_reply
        taped = error_reply if checked.form.unreadable else reply
    elif checked.before is not None and checked.after is not None:
        instead = _check_update(server_rounds, request, reply, checked.before, checked.after)
    server_rounds.record_on_tape(lambda tape: tape.came(request, taped, instead))
    return instead


def report_entry_misfits(server_rounds: ServerRounds, phase: str) -> None:
    """Report the replies whose metrics differ from most others', because the strategy could not aggregate them."""
    for checked, why in server_rounds.reply_checks(phase).entry_misfits():
        report_misfit(server_rounds, checked, why)


def report_misfit(server_rounds: ServerRounds, checked: CheckedReply, why: str) -> None:
    """Report a reply that does not fit, by the event `update.refused`. Raises if the guard is «fail»."""
    request, mode = checked.request, server_rounds.guard_mode
    left_out = " It was left out." if mode == update_guard.DROP else ""
    text = f"The reply of {request.node} to {request.phase} does not fit: {why}.{left_out}"
    data = {"phase": request.phase, "misfit": why, "guard": mode}
    server_rounds.monitor.host.event("error", "update.refused", text, node=request.node, data=data)
    if mode == update_guard.FAIL:
        raise MalformedReplyError(f"Round {request.round_index}: the reply of node {request.node}: {why}. {CHOICE}")
