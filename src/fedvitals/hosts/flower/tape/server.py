# SPDX-License-Identifier: Apache-2.0
"""Record what a Flower server does on the monitor's tape, so that each aggregation can be computed again.

For each round: the arrays that were sent and the strategy's state, every reply as the strategy got it, and the result.
Arrays of messages are immutable bytes, so they are not copied; what a strategy holds is. Digests, compression and
writing happen on the tape's thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import msgspec
from flwr.app import ArrayRecord, Message, MetricRecord

from fedvitals import protocols
from fedvitals.hosts.flower import arrays
from fedvitals.hosts.flower.failures import client_failure_of
from fedvitals.hosts.flower.tape import records
from fedvitals.hosts.flower.tape import strategy as tape_strategy
from fedvitals.hosts.flower.tape.records import Outline, Tensors
from fedvitals.loop_tape import random_states

if TYPE_CHECKING:
    from fedvitals.hosts.flower.server_rounds import ClientRequest, ServerRounds

TRAIN, MODEL, AGGREGATED = "train", "model", "aggregated"
LATE = "no answer in time"
HIDDEN = (
    "With {why} nobody may look at a single client: the tape of this run has its global states, and no client's "
    "update, weight or metrics. Its rounds can be looked at, and its aggregations not be computed again."
)


class ServerTape:
    """Records for the server rounds. Without a tape it does nothing; a failure costs only the tape."""

    def __init__(self, server_rounds: ServerRounds) -> None:
        self._server_rounds = server_rounds
        self.strategy: Any = None  # its attributes are read
        self._recorder: protocols.TapeRecorder | None = None
        self._described = self._told_hidden = False
        self._number: int | None = None  # of the round on the tape
        self._begun = False  # whether the tape has the round's beginning
        self._rng: dict[str, Any] = {}
        self._config: Outline | None = None  # what all clients were asked with
        self._asked: dict[str, Any] = {}  # by node, where it differed
        self._after: dict[str, Tensors] = {}
        self._after_notes: dict[str, Any] = {}

    # -- the round ----------------------------------------------------------------------------------------------------

    def begins(self, round_index: int) -> None:
        """Record the state of the random generators, before the strategy chooses any client."""
        self._recorder = self._server_rounds.monitor.host.recorder
        self._number = None
        if self._recorder is None:
            return
        self._number, self._begun = round_index, False
        self._rng, self._config, self._asked = random_states(), None, {}
        self._after, self._after_notes = {}, {}

    def asked(self, request: ClientRequest) -> None:
        """Record a request.

        With the first one of a round the strategy has decided, so its state is recorded now.
        """
        if self._number is None or request.phase != TRAIN:
            return
        content = request.message.content
        self._begin(arrays.model_of(content))
        if self._server_rounds.hidden is not None:
            return
        known = self._server_rounds.models.started
        outline = _request_outline(content, known)
        if self._config is None:
            self._config = outline
        if outline != self._config:
            self._asked[request.node] = outline

    def _begin(self, model: ArrayRecord | None) -> None:
        if self._begun or self._recorder is None or self._number is None:
            return
        self._begun = True
        self._describe()
        state: dict[str, Tensors] = {}
        start = self._server_rounds.models.started or model
        if start is not None:
            state[MODEL] = _tensors_by_layer(start, self._server_rounds.layers)
        own, outline, unknown = tape_strategy.read_attributes(self.strategy)
        notes = {"rng": self._rng, "strategy": outline, "unknown": unknown}
        self._recorder.begin(self._number, {**state, **own}, notes)

    def _describe(self) -> None:
        if self._described or self._recorder is None:
            return
        self._described = True
        server_rounds = self._server_rounds
        config = server_rounds.monitor.run.config.get("app")
        self._recorder.describe(
            {
                "framework": "flower",
                "flwr": version("flwr"),
                "strategy": None if self.strategy is None else tape_strategy.description_of(self.strategy),
                "weight": server_rounds.weight,
                "layers": None if server_rounds.layers is None else [*server_rounds.layers],
                "app": {name: records.json_value(v) for name, v in config.items()} if isinstance(config, dict) else {},
                "hidden": server_rounds.hidden,
            }
        )

    # -- answers ------------------------------------------------------------------------------------------------------

    def came(self, request: ClientRequest, reply: Message, instead: Message | None) -> None:
        """Record a reply as the strategy will see it.

        `instead`: what it gets in its place, as if the client had failed.
        """
        if request.phase != TRAIN or self._number != request.round_index or self._recorder is None:
            return
        key = reply.metadata.reply_to_message_id
        if reply.has_error():
            failure = client_failure_of(reply.error, request.phase)  # only its class: a client's words may quote data
            error, code = str(failure.data["exception"]), failure.data["code"]
            message = protocols.Message(request.node, None, used=False, error=error, notes={"id": key, "code": code})
        elif self._server_rounds.hidden is not None:
            if not self._told_hidden:
                self._told_hidden = True
                text = HIDDEN.format(why=self._server_rounds.hidden)
                self._server_rounds.monitor.host.event("info", "tape.hidden", text)
            message = protocols.Message(request.node, None, notes={"id": key, "hidden": self._server_rounds.hidden})
        else:
            message = self._update(request, reply, key, instead)
        self._recorder.messages(request.round_index, [message])

    def _update(self, request: ClientRequest, reply: Message, key: str, instead: Message | None) -> protocols.Message:
        content, tensors = records.outline_of(reply.content, layers=self._server_rounds.layers)
        asked = self._asked.get(request.node, self._config)
        notes: dict[str, Any] = {"id": key, "content": content, "request": _digest(asked)}
        if request.node in self._asked:
            notes["asked"] = self._asked[request.node]
        if instead is not None and instead.has_error():
            notes["left_out"] = str(instead.error.reason)
        if self._server_rounds.corrections.in_force.of_replies:
            notes["corrected"] = True
        return protocols.Message(
            request.node, tensors, _weight(reply, self._server_rounds.weight), used=instead is None, notes=notes
        )

    def missing(self, request: ClientRequest) -> None:
        """Record that a client did not reply in time."""
        if request.phase == TRAIN and self._number == request.round_index and self._recorder is not None:
            message = protocols.Message(request.node, None, used=False, error=LATE)
            self._recorder.messages(request.round_index, [message])

    # -- aggregation --------------------------------------------------------------------------------------------------

    def aggregating(self, replies: Sequence[Message], *, changed: bool) -> None:
        """Record the order in which the strategy gets the replies, because floating-point sums depend on it."""
        if self._number is None or self._recorder is None:
            return
        now = random_states()
        self._after_notes = {
            "replies": [reply.metadata.reply_to_message_id for reply in replies],
            "rng": {name: state for name, state in now.items() if state != self._rng.get(name)},
        }
        if changed:
            self._after_notes["corrected"] = "robust_aggregator"

    def aggregated(self, own: ArrayRecord | None, model: ArrayRecord | None, metrics: Any) -> None:
        """Record the result. `own`: the strategy's.

        `model`: what the run continues with, which a correction may have changed.
        """
        if self._number is None or self._recorder is None:
            return
        layers = self._server_rounds.layers
        after = model if model is not None else self._server_rounds.models.started
        states, outline, _ = tape_strategy.read_attributes(self.strategy)
        if after is not None:
            states[MODEL] = _tensors_by_layer(after, layers)
        if own is not None and own is not model:
            states[AGGREGATED] = _tensors_by_layer(own, layers)
        self._after = states
        self._after_notes |= {"strategy": outline, "empty": own is None}
        if isinstance(metrics, MetricRecord):
            self._after_notes["metrics"] = {name: records.json_value(value) for name, value in metrics.items()}

    def ends(self, metrics: Mapping[str, float]) -> None:
        """Record the end of the round."""
        recorder, round_index = self._recorder, self._number
        if recorder is None or round_index is None:
            return
        self._begin(None)
        self._number = None
        notes = {**self._after_notes, "request": self._config}
        recorder.end(round_index, self._after, notes, {name: float(value) for name, value in metrics.items()})
        self._after, self._after_notes = {}, {}


def _tensors_by_layer(record: ArrayRecord, layers: Sequence[str] | None) -> Tensors:
    """Return the tensors of a model by layer, whatever their names in transport."""
    return {name: records.tensor_of(array)[0] for name, array in arrays.with_layer_names(record, layers).items()}


def _request_outline(content: Any, model: ArrayRecord | None) -> Outline:
    """Return what a client was asked with.

    Arrays equal to the round's model refer to its state; others are given by digests.
    """
    sent = arrays.model_of(content)
    if sent is not None and model is not None and _same_bytes(sent, model):
        rest = {key: record for key, record in content.items() if record is not sent}
        outline, _ = records.outline_of(rest)
        key = str(next(key for key, record in content.items() if record is sent))
        return {**outline, key: {"kind": records.ARRAYS, "state": MODEL}}
    outline, tensors = records.outline_of(content)
    from fedvitals.replay.tape.digests import digest_of  # noqa: PLC0415 - where there is a tape, there is the extra

    return {**outline, "digest": digest_of(tensors)} if tensors else outline


def _same_bytes(first: ArrayRecord, second: ArrayRecord) -> bool:
    return [*first] == [*second] and all(a.data is b.data for a, b in zip(first.values(), second.values(), strict=True))


def _digest(outline: Outline | None) -> str:
    """Return the digest of what a client was asked with, its arrays by name or digest."""
    written: bytes = msgspec.json.encode(outline, order="deterministic")
    return hashlib.blake2b(written, digest_size=16).hexdigest()


def _weight(reply: Message, key: str) -> float:
    for record in reply.content.values():
        value = record.get(key) if isinstance(record, MetricRecord) else None
        if isinstance(value, int | float):
            return float(value)
    return 0.0
