# SPDX-License-Identifier: Apache-2.0
"""One reply: the telemetry is taken out of it, its times and numbers are told, and the guard has its say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flwr.app import Message, MetricRecord

from fedvitals.catalog import HOSTS
from fedvitals.errors import RecordError
from fedvitals.hosts.flower import arrays, corrections, guard, protection
from fedvitals.hosts.flower.failures import dead_process, failure_of
from fedvitals.hosts.flower.reply_envelope import KEY, Letter, bytes_of, journey_id, run_name
from fedvitals.hosts.flower.reply_envelope import read as read_letter
from fedvitals.records import Action
from fedvitals.transport.payload_check import NAMES_OF_SENDER
from fedvitals.transport.sender import Sender

if TYPE_CHECKING:
    from fedvitals.hosts.flower.server_rounds import Asked, Journal

TRAIN = "train"
UNKNOWN = (3, 4)  # codes: the message or its reply is not kept any more, which says nothing of the client
LOSSES = ("loss", "train_loss", "train-loss", "eval_loss", "eval-loss", "val_loss", "test_loss")
LEGACY_METRICS = ("fitres.metrics", "evaluateres.metrics")  # of the older API, among its settings
ACCURACIES = ("accuracy", "acc", "eval_acc", "eval-acc", "eval_accuracy", "val_accuracy", "test_accuracy")


def read(journal: Journal, asked: Asked, reply: Message, at: float) -> Message | None:
    """What to give in the place of a reply; None: the reply itself, without the telemetry that rode in it."""
    monitor, node = journal.monitor, asked.node
    if reply.has_error():
        journal.answered(asked, failed=True)
        _tell_failure(journal, asked, reply)
        return None
    record = reply.content.pop(KEY, None)
    size = bytes_of(reply.content)
    monitor.host.transfer(node, "server", size, kind="update" if asked.phase == TRAIN else asked.phase)
    _take_letter(journal, asked, reply, record, at)
    journal.answered(asked, failed=False)
    _tell_metrics(journal, asked, reply)
    return _take_update(journal, asked, reply) if asked.phase == TRAIN else None


def read_late(journal: Journal, asked: Asked, reply: Message, at: float) -> None:
    """An answer after the server had given up: it says why it was late, and changes nothing any more."""
    waited = at - asked.sent
    if reply.has_error():
        if int(reply.error.code) not in UNKNOWN:
            _tell_failure(journal, asked, reply)
        return
    reply.content.pop(KEY, None)
    text = f"The answer of {asked.node} to round {asked.number} came after {waited:.1f} s, when nobody waited any more."
    data = {"phase": asked.phase, "waited": waited, "round": asked.number}
    journal.monitor.host.event("info", "client.answered_late", text, node=asked.node, data=data)


def _tell_failure(journal: Journal, asked: Asked, reply: Message) -> None:
    found = failure_of(reply.error, asked.phase)
    actor = dead_process(reply.error)
    first = asked if actor is None else journal.dead.setdefault(actor, asked)
    if first is not asked:
        text = f"{asked.node} was not served: Flower gave it a process that had died before, with {first.node}."
        data = {"phase": asked.phase, "died_with": first.node}
        journal.monitor.host.event("warning", "client.unserved", text, node=asked.node, data=data)
        return
    level = "warning" if found.event == "client.dropped_out" else "error"
    told = {**found.data, "round": asked.number}
    journal.monitor.host.event(level, found.event, found.message, node=asked.node, data=told)


def _take_letter(journal: Journal, asked: Asked, reply: Message, record: Any, at: float) -> None:
    """Telemetry, if there is any. What is wrong with it is told of its sender, and costs nobody else."""
    monitor, node = journal.monitor, asked.node
    if record is None:
        if asked.phase == TRAIN:  # a client without the mod: all that is known is when it was asked and has answered
            monitor.host.exchange(node, asked.sent, asked.sent, at, at)
            journal.worked(asked.sent, at)
        return
    try:
        letter = read_letter(record, reply.metadata.src_node_id, node)
        began, ended = _seen(letter, asked.sent, at)
        journal.worked(began, ended)
        if asked.phase != TRAIN:
            return
        monitor.host.log({"time.cpu": letter.cpu}, node=node)
        span = journey_id(reply.metadata.reply_to_message_id)
        times = (asked.sent, letter.received, letter.replied, at)
        monitor.host.exchange(node, *times, started=letter.started, span=span)
        if letter.payload:
            monitor.host.absorb(letter.payload, Sender(node, run_name(reply.metadata.run_id)))
    except RecordError as error:
        text = f"Telemetry of {node} cannot be: {error}"
        monitor.host.event("warning", "telemetry.refused", text, node=node, data={"phase": asked.phase})


def _seen(letter: Letter, sent: float, returned: float) -> tuple[float, float]:
    """When its handler ran, inside of what the server saw, whatever its clock says; an error if there is no room."""
    seconds, away = letter.replied - letter.received, returned - sent
    if seconds > away:
        raise RecordError(f"It says that it worked for {seconds:.3g} s, and was away for {away:.3g} s.")
    began = min(max(letter.received, sent), returned - seconds)
    return began, began + seconds


def _tell_metrics(journal: Journal, asked: Asked, reply: Message) -> None:
    """What a client told its server itself: numbers by name. «train_loss» and the like are its loss."""
    if journal.hidden is not None:
        return
    told: dict[str, float] = {}
    for key, record in reply.content.items():
        if isinstance(record, MetricRecord) or key in LEGACY_METRICS:
            told |= {name: float(value) for name, value in record.items() if isinstance(value, int | float)}
    if asked.phase == TRAIN and journal.weight in told:
        journal.monitor.host.log({"update.samples": told.pop(journal.weight)}, node=asked.node)
    told.pop(journal.weight, None)
    named = renamed(told) if asked.phase == TRAIN else {f"{asked.phase}.{k}": v for k, v in told.items()}
    if asked.phase != TRAIN:
        named |= {"local." + k: v for k, v in renamed(told).items() if k in ("loss", "accuracy")}
    kept = _within_quota(journal.metric_names.setdefault(asked.node, set()), named)
    if len(kept) < len(named):
        text = f"{len(named) - len(kept)} of {len(named)} metrics of {asked.node} were left out: too many names."
        journal.monitor.host.event("warning", "telemetry.refused", text, node=asked.node, data={"phase": asked.phase})
    if kept:
        journal.monitor.host.log(kept, node=asked.node)


def _within_quota(names: set[str], named: Mapping[str, float]) -> dict[str, float]:
    """The metrics that have a meaning here, and those of the `names` that a client has used, with room for a few new.

    They pass through the same queues as what is measured of all clients.
    """
    for name in named:
        if len(names) >= NAMES_OF_SENDER:
            break
        names.add(name)
    return {name: value for name, value in named.items() if name in names or name in HOSTS}


def renamed(told: Mapping[str, float]) -> dict[str, float]:
    """With the names that have a meaning here."""
    found = dict(told)
    for own, names in (("loss", LOSSES), ("accuracy", ACCURACIES)):
        first = next((name for name in names if name in told), None)
        if first is not None:
            found[own] = found.pop(first)
    return found


def _take_update(journal: Journal, asked: Asked, reply: Message) -> Message | None:
    if protection.masked(asked.message.content) or protection.masked(reply.content):
        return None
    sent, got = arrays.model_of(asked.message.content), arrays.model_of(reply.content)
    if sent is None or got is None:
        return None
    start, end = journal.models.values(sent), arrays.values_of(got, journal.layers)
    answers: Sequence[Action] = ()
    if journal.hidden is None and end:  # a model may be all of whole numbers, as trees are
        update = arrays.update_of(start, end, journal.models.spare)
        answers = journal.monitor.host.updates(asked.number, {asked.node: update})
        del update  # its room is free again, unless somebody keeps it
    left = next((a for a in answers if a.kind == "exclude" and a.target == asked.node), None)
    why = None if left is None else str(left.arguments.get("why", "it cannot be used"))
    if why is None and journal.way != guard.REPORT:
        why = guard.nonfinite(end)
        if why is not None:
            _refuse(journal, asked, why)
    in_force = journal.ward.orders
    if why is None and asked.node in in_force.quarantined:
        why = "the client is in quarantine"
    if why is not None:
        return guard.left_out(reply, asked.message, why)
    if in_force.of_replies:
        corrections.applied(in_force, asked.node, reply, start, end, journal.weight, journal.layers)
    return None


def _refuse(journal: Journal, asked: Asked, why: str) -> None:
    text = f"The update of {asked.node} was not taken: {why}."
    journal.monitor.host.event("error", "update.left_out", text, node=asked.node, data={"guard": journal.way})
    if journal.way == guard.FAIL:
        raise guard.NonFiniteUpdateError(
            f"Round {asked.number}: {why}, in the update of node {asked.node}. Aggregating it would make the model "
            'so. guard="drop" leaves such updates out; guard="report" lets them pass.'
        )
