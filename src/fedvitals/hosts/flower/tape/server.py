# SPDX-License-Identifier: Apache-2.0
"""What a Flower server hands to a tape, where its monitor has one: so that each aggregation can be computed again.

Of each round: the arrays that were sent and what the strategy remembers, every reply as the strategy was handed it, and
what it made of them. Arrays of messages lie in bytes that nobody changes, so nothing is copied; what a strategy holds
is. Digests, packing and writing are the tape's own thread's.
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
from fedvitals.hosts.flower.failures import failure_of
from fedvitals.hosts.flower.tape import records
from fedvitals.hosts.flower.tape import strategy as tape_strategy
from fedvitals.hosts.flower.tape.records import Outline, Tensors
from fedvitals.loop_tape import random_states

if TYPE_CHECKING:
    from fedvitals.hosts.flower.server_rounds import Asked, Journal

TRAIN, MODEL, AGGREGATED = "train", "model", "aggregated"
LATE = "no answer in time"
HIDDEN = (
    "With {why} nobody may look at a single client: the tape of this run has its global states, and no client's "
    "update, weight or metrics. Its rounds can be looked at, and its aggregations not be computed again."
)


class Scribe:
    """Told by the journal. Without a tape it does nothing; whatever fails in here costs the tape alone."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.strategy: Any = None  # whose attributes are read
        self._recorder: protocols.TapeRecorder | None = None
        self._described = self._told_hidden = False
        self._number: int | None = None  # of the round that is on the tape
        self._begun = False  # whether the tape was told of its beginning
        self._rng: dict[str, Any] = {}
        self._config: Outline | None = None  # what all clients were asked with
        self._asked: dict[str, Any] = {}  # by node, where it was something else
        self._after: dict[str, Tensors] = {}
        self._after_notes: dict[str, Any] = {}

    # -- the round ----------------------------------------------------------------------------------------------------

    def begins(self, number: int) -> None:
        """Before the strategy chooses anybody: the generators are as they are now."""
        self._recorder = self._journal.monitor.host.recorder
        self._number = None
        if self._recorder is None:
            return
        self._number, self._begun = number, False
        self._rng, self._config, self._asked = random_states(), None, {}
        self._after, self._after_notes = {}, {}

    def asked(self, asked: Asked) -> None:
        """With the first message of a round the strategy has made up its mind: what it remembers is noted now."""
        if self._number is None or asked.phase != TRAIN:
            return
        content = asked.message.content
        self._begin(arrays.model_of(content))
        if self._journal.hidden is not None:
            return
        known = self._journal.models.started
        told = _request(content, known)
        if self._config is None:
            self._config = told
        if told != self._config:
            self._asked[asked.node] = told

    def _begin(self, model: ArrayRecord | None) -> None:
        if self._begun or self._recorder is None or self._number is None:
            return
        self._begun = True
        self._describe()
        state: dict[str, Tensors] = {}
        start = self._journal.models.started or model
        if start is not None:
            state[MODEL] = _named(start, self._journal.layers)
        own, outline, unknown = tape_strategy.read(self.strategy)
        notes = {"rng": self._rng, "strategy": outline, "unknown": unknown}
        self._recorder.begin(self._number, {**state, **own}, notes)

    def _describe(self) -> None:
        if self._described or self._recorder is None:
            return
        self._described = True
        journal = self._journal
        config = journal.monitor.run.config.get("app")
        self._recorder.describe(
            {
                "framework": "flower",
                "flwr": version("flwr"),
                "strategy": None if self.strategy is None else tape_strategy.described(self.strategy),
                "weight": journal.weight,
                "layers": None if journal.layers is None else [*journal.layers],
                "app": {name: records.plain(v) for name, v in config.items()} if isinstance(config, dict) else {},
                "hidden": journal.hidden,
            }
        )

    # -- answers ------------------------------------------------------------------------------------------------------

    def came(self, asked: Asked, reply: Message, instead: Message | None) -> None:
        """A reply as the strategy will see it; `instead`: what it is given in its place, as if it had failed."""
        if asked.phase != TRAIN or self._number != asked.number or self._recorder is None:
            return
        key = reply.metadata.reply_to_message_id
        if reply.has_error():
            failure = failure_of(reply.error, asked.phase)  # its class alone: a client's words may quote data
            error, code = str(failure.data["exception"]), failure.data["code"]
            told = protocols.Message(asked.node, None, used=False, error=error, notes={"id": key, "code": code})
        elif self._journal.hidden is not None:
            self._tell_hidden(self._journal.hidden)
            told = protocols.Message(asked.node, None, notes={"id": key, "hidden": self._journal.hidden})
        else:
            told = self._update(asked, reply, key, instead)
        self._recorder.messages(asked.number, [told])

    def _update(self, asked: Asked, reply: Message, key: str, instead: Message | None) -> protocols.Message:
        content, tensors = records.outlined(reply.content, layers=self._journal.layers)
        said: dict[str, Any] = {"id": key, "content": content, "request": _digest(self._request_of(asked.node))}
        if asked.node in self._asked:
            said["asked"] = self._asked[asked.node]
        if instead is not None and instead.has_error():
            said["left_out"] = str(instead.error.reason)
        if self._journal.ward.orders.of_replies:
            said["corrected"] = True
        return protocols.Message(
            asked.node, tensors, _weight(reply, self._journal.weight), used=instead is None, notes=said
        )

    def _request_of(self, node: str) -> Outline | None:
        return self._asked.get(node, self._config)

    def missing(self, asked: Asked) -> None:
        if asked.phase == TRAIN and self._number == asked.number and self._recorder is not None:
            self._recorder.messages(asked.number, [protocols.Message(asked.node, None, used=False, error=LATE)])

    def _tell_hidden(self, why: str) -> None:
        if not self._told_hidden:
            self._told_hidden = True
            self._journal.monitor.host.event("info", "tape.hidden", HIDDEN.format(why=why))

    # -- aggregation --------------------------------------------------------------------------------------------------

    def aggregating(self, replies: Sequence[Message], *, changed: bool) -> None:
        """The order in which the strategy gets the replies counts: sums of floating numbers depend on it."""
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
        """`own`: what the strategy made; `model`: what the run goes on with, which a correction may have changed."""
        if self._number is None or self._recorder is None:
            return
        layers = self._journal.layers
        after = model if model is not None else self._journal.models.started
        states, outline, _ = tape_strategy.read(self.strategy)
        if after is not None:
            states[MODEL] = _named(after, layers)
        if own is not None and own is not model:
            states[AGGREGATED] = _named(own, layers)
        self._after = states
        self._after_notes |= {"strategy": outline, "empty": own is None}
        if isinstance(metrics, MetricRecord):
            self._after_notes["metrics"] = {name: records.plain(value) for name, value in metrics.items()}

    def ends(self, metrics: Mapping[str, float]) -> None:
        recorder, number = self._recorder, self._number
        if recorder is None or number is None:
            return
        self._begin(None)
        self._number = None
        notes = {**self._after_notes, "request": self._config}
        recorder.end(number, self._after, notes, {name: float(value) for name, value in metrics.items()})
        self._after, self._after_notes = {}, {}


def _named(record: ArrayRecord, layers: Sequence[str] | None) -> Tensors:
    """The tensors of a model by their layers, whatever the wire calls them."""
    return {name: records.tensor_of(array)[0] for name, array in arrays.renamed(record, layers).items()}


def _request(content: Any, model: ArrayRecord | None) -> Outline:
    """What a client was asked with. Arrays that are the round's model are its state; of others there are digests."""
    sent = arrays.model_of(content)
    if sent is not None and model is not None and _same_bytes(sent, model):
        rest = {key: record for key, record in content.items() if record is not sent}
        outline, _ = records.outlined(rest)
        return {**outline, _key_of(content, sent): {"kind": records.ARRAYS, "state": MODEL}}
    outline, tensors = records.outlined(content)
    from fedvitals.replay.tape.digests import digest_of  # noqa: PLC0415 - where there is a tape, there is the extra

    return {**outline, "digest": digest_of(tensors)} if tensors else outline


def _same_bytes(one: ArrayRecord, other: ArrayRecord) -> bool:
    return [*one] == [*other] and all(a.data is b.data for a, b in zip(one.values(), other.values(), strict=True))


def _key_of(content: Any, record: ArrayRecord) -> str:
    return str(next(key for key, own in content.items() if own is record))


def _digest(outline: Outline | None) -> str:
    """Of what a client was asked with, its arrays by their name or digest."""
    written: bytes = msgspec.json.encode(outline, order="deterministic")
    return hashlib.blake2b(written, digest_size=16).hexdigest()


def _weight(reply: Message, key: str) -> float:
    for record in reply.content.values():
        value = record.get(key) if isinstance(record, MetricRecord) else None
        if isinstance(value, int | float):
            return float(value)
    return 0.0
