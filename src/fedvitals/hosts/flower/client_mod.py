# SPDX-License-Identifier: Apache-2.0
"""The client's side: a mod around the user's handler that measures, and sends the numbers along with the reply.

First in the list of mods, it sees what actually leaves the machine. It changes no request, no result and no weight; an
error on our side only costs telemetry.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flwr.app import Context, Error, Message
from flwr.common.constant import ErrorCode

from fedvitals.errors import MissingExtraError, text_of
from fedvitals.hosts import array_models
from fedvitals.hosts.flower import arrays
from fedvitals.hosts.flower.protection import LEVEL, hiding_mods
from fedvitals.hosts.flower.replaying import in_replay
from fedvitals.hosts.flower.reply_envelope import (
    KEY,
    ReplyEnvelope,
    bytes_of,
    journey_id,
    node_name,
    round_of_message,
    run_name,
    trace_id,
)
from fedvitals.hosts.private_training import trains_privately
from fedvitals.hosts.telemetry_budget import telemetry_budget
from fedvitals.monitor.workers import WorkerObserver
from fedvitals.probes.allowance import Turn
from fedvitals.probes.presets import Preset, check_name, resolve
from fedvitals.records import Layer, LayerTable
from fedvitals.resources.process_start import process_started
from fedvitals.scope import Scope, current
from fedvitals.transport.privacy import WORDS, PrivacyPolicy, policy_for
from fedvitals.transport.traceparent import entered

if TYPE_CHECKING:
    from fedvitals.hosts.flower.tape.client import ClientTape

logger = logging.getLogger("fedvitals")
Handler = Callable[[Message, Context], Message]
TRAIN = "train"
NAME = "name"  # in a SuperNode's --node-config, if it has no partition
PARTITION = "partition-id"  # the name in Flower's engines and examples for a client's share of the data


def client_mod(
    *,
    probes: Any = "standard",
    privacy: int | None = None,
    tracebacks: bool = False,
    layers: Sequence[str] | None = None,
    tape: Any = None,
) -> ClientMod:
    """Return the mod for `ClientApp(mods=[...])`; put it first.

    Args:
        probes: What `fv.watch` measures inside `train`.
        privacy: What may leave this client, 0 to 4; by default 2 (its own scalars, no layers, no text:
            docs/metrics.md), and 1 for a model that Opacus trains.
        tracebacks: Whether to send the server the whole traceback of an exception, which may quote data.
        layers: Names for the arrays, if the messages carry none.
        tape: A folder of this machine, or a `fv.Tape(folder=..., budget=...)`, that keeps what the client was sent,
            so that it can be run again here (docs/flower.md); nothing of it leaves the machine.
    """
    policy = policy_for("flower", 2 if privacy is None else privacy, tracebacks=tracebacks)
    names = None if layers is None else tuple(layers)
    return ClientMod(_checked(probes), policy, names, _tape(tape), chosen=privacy is not None)


def _checked(probes: Any) -> Preset | str:
    """Return the probes. A name stays a name: its probes import torch, and are created once a model is watched."""
    if isinstance(probes, str):
        check_name(probes)
        return probes
    return resolve(probes)


def _tape(tape: Any) -> ClientTape | None:
    if tape is None:
        return None
    try:
        from fedvitals.hosts.flower.tape.client import client_tape  # noqa: PLC0415 - an extra, for those who want a tape
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torch":
            raise
        raise MissingExtraError("torch", "replay", "A client's tape") from error
    return client_tape(tape)


class ClientMod:
    """The mod, called by Flower for each message, in processes that may live for one message only."""

    __name__ = "fedvitals"

    def __init__(
        self,
        preset: Preset | str,
        policy: PrivacyPolicy,
        layers: Sequence[str] | None,
        tape: ClientTape | None = None,
        *,
        chosen: bool = True,
    ) -> None:
        self._preset, self._policy, self._layers, self._tape = preset, policy, layers, tape
        self._chosen = chosen  # whether the user chose the privacy level
        self._told = False

    def __call__(self, message: Message, context: Context, call_next: Handler) -> Message:
        if in_replay():
            return call_next(message, context)
        handler = self._taped(message, context, call_next)
        received, cpu = time.time(), time.process_time()
        request_bytes = self._guarded("reading the request", lambda: bytes_of(message.content))  # mods may change it
        worker = self._guarded("beginning", lambda: self._worker(message, context, call_next))
        try:
            with self._scope(worker, message, context):
                reply = handler(message, context)
        except Exception as error:
            if worker is None or not worker.policy.tracebacks:
                raise
            return _failed(error, message)

        def write() -> ReplyEnvelope | None:
            payload = self._payload(worker, message, context, reply, request_bytes or 0)
            if payload is None:
                return None
            return ReplyEnvelope(
                payload, received, time.time(), process_started() or received, time.process_time() - cpu
            )

        envelope = self._guarded("writing home", write)
        if envelope is not None:
            reply.content[KEY] = envelope.record()
        return reply

    def _taped(self, message: Message, context: Context, call_next: Handler) -> Handler:
        """Return the handler, wrapped so that its result is recorded on the tape."""
        recording = None if self._tape is None else self._tape.begin(message, context, call_next)
        if recording is None:
            return call_next

        @functools.wraps(call_next)
        def taped(message: Message, context: Context) -> Message:
            try:
                reply = call_next(message, context)
            except BaseException as error:
                recording.end(None, error)
                raise
            recording.end(reply, None)
            return reply

        return taped

    def _worker(self, message: Message, context: Context, call_next: Handler) -> WorkerObserver:
        """Return the observer of one message; its span is a child of the message's own, which the server reports."""
        level = self._policy.level
        hiding = hiding_mods(call_next)
        if hiding and level > LEVEL:
            self._warn_once(_REFUSED, level, ", ".join(hiding), LEVEL)
            level = LEVEL
        worker = WorkerObserver(
            run=run_name(context.run_id),
            name="flower",
            preset=self._preset,
            policy=PrivacyPolicy(level, self._policy.cohort, self._policy.tracebacks and not hiding),
            strict=False,
            round=None,  # known to the server
            trace=trace_id(context.run_id),
            span=journey_id(message.metadata.message_id),
            known=frozenset(),
            initial=None,
            turn=Turn(round_of_message(message)),
        )
        worker.payload()  # left over from a failed message: it would be sent with another client's reply
        return worker

    def _scope(self, worker: WorkerObserver | None, message: Message, context: Context) -> Any:
        if worker is None:
            return nullcontext()
        if message.metadata.message_type.partition(".")[0] == TRAIN:
            return self._training(worker, node_name(context.node_id))
        # Evaluations are timed, not measured: `fv.watch` in there watches nothing.
        return entered(Scope(worker.run, lambda _: None, node=node_name(context.node_id), watch=_unwatched(worker)))

    @contextmanager
    def _training(self, worker: WorkerObserver, node: str) -> Iterator[None]:
        """Open the scope of a client that trains.

        Unless the user chose a level, measurements of a model that Opacus trains do not leave the client.
        """
        with worker.client(node):
            scope = current.get()
            if self._chosen or scope is None or scope.watch is None:
                yield
                return
            with entered(replace(scope, watch=functools.partial(self._watching, worker, scope.watch))):
                yield

    @contextmanager
    def _watching(self, worker: WorkerObserver, watch: Callable[..., Any], model: Any, **more: Any) -> Iterator[Any]:
        def restrict() -> None:
            if worker.policy.level > LEVEL and trains_privately(model):
                worker.restrict(LEVEL)
                self._warn_once(_PRIVATE, LEVEL)

        self._guarded("looking for Opacus", restrict)
        with watch(model, **more) as observer:
            try:
                yield observer
            finally:  # it may have become private meanwhile; measurements are reported when `watch` ends
                self._guarded("looking for Opacus", restrict)

    def _warn_once(self, text: str, *words: Any) -> None:
        if not self._told:
            logger.warning(text, *words)
        self._told = True

    def _payload(
        self, worker: WorkerObserver | None, message: Message, context: Context, reply: Message, request_bytes: int
    ) -> bytes | None:
        """Return the telemetry of a message, within the server's byte limit; None if it cannot be attached."""
        if worker is None or not isinstance(reply, Message) or not reply.has_content() or KEY in reply.content:
            return None
        node = node_name(context.node_id)
        if message.metadata.message_type.partition(".")[0] == TRAIN:
            identity = _identity(context.node_config)
            if identity:
                words = f"Partition {identity['partition']}." if "partition" in identity else "A name of its own."
                worker.event("info", "client.partition", words, node=node, data=identity)
            if worker.policy.level >= WORDS:
                self._report_update(worker, node, message, reply)
        return worker.payload(most=telemetry_budget(max(request_bytes, bytes_of(reply.content))))

    def _report_update(self, worker: WorkerObserver, node: str, message: Message, reply: Message) -> None:
        """Report statistics per layer of the update, if the privacy level allows it."""
        sent, got = arrays.model_of(message.content), arrays.model_of(reply.content)
        if sent is None or got is None or [*sent] != [*got]:
            return
        before, after = arrays.values_of(sent, self._layers), arrays.values_of(got, self._layers)
        dtype = str(array_models.difference_dtype(after))
        layers = tuple(Layer(name, tuple(values.shape), dtype) for name, values in after.items())
        worker.tell_layers(node, "update", array_models.update_sums(before, after), LayerTable("parameter", layers))

    def _guarded(self, doing: str, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except Exception as error:  # noqa: BLE001 - training goes on, whatever happens to us
            logger.warning("fedvitals failed in %s (%s: %s); training goes on.", doing, type(error).__name__, error)
            return None


def _identity(node_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what identifies a SuperNode that returns under another id: its partition, or a digest of its name.

    The name itself is text, which does not leave the client; the server only compares digests.
    """
    partition, name = node_config.get(PARTITION), node_config.get(NAME)
    if isinstance(partition, int):
        return {"partition": partition}
    if isinstance(name, str) and name:
        return {"name_digest": hashlib.blake2b(name.encode(), digest_size=8).hexdigest()}
    return {}


_PRIVATE = (
    "fedvitals: Opacus trains this client's model with differential privacy. What is measured beside its noise (loss, "
    "accuracy, gradients) is not sent: privacy level %d holds. client_mod(privacy=2) sends it."
)
_REFUSED = (
    "fedvitals: privacy level %d is refused: with %s among the mods nobody may learn of a single client, and telemetry "
    "would tell. Level %d holds. Say client_mod(privacy=1) to say so yourself."
)


def _failed(error: Exception, message: Message) -> Message:
    """Return an error reply as Flower writes it, followed by the whole traceback."""
    frames = error.__traceback__ and error.__traceback__.tb_next  # without our own
    text = f"{type(error)}:<'{text_of(error)}'>\n{''.join(traceback.format_exception(type(error), error, frames))}"
    return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, text), reply_to=message)


def _unwatched(worker: WorkerObserver) -> Callable[..., Any]:
    @contextmanager
    def watch(*_: Any, **__: Any) -> Any:
        yield worker

    return watch
