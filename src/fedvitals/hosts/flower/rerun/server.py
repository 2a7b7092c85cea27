# SPDX-License-Identifier: Apache-2.0
"""An aggregation computed again: the replies of a recorded round, handed to the user's own strategy once more.

The strategy is put into the state that it was in, gets the very messages in the order in which it got them, and what it
makes of them must have the digest that was recorded.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord, Error, Message, Metadata, MetricRecord
from torch import Tensor

from fedvitals.errors import ConfigError, StoreError
from fedvitals.hosts.flower.grid_hooks import MARK
from fedvitals.hosts.flower.replaying import generators, replaying
from fedvitals.hosts.flower.tape import records
from fedvitals.hosts.flower.tape import strategy as tape_strategy
from fedvitals.hosts.flower.tape.server import AGGREGATED, MODEL, TRAIN
from fedvitals.replay.player.comparison import Mismatch
from fedvitals.replay.tape.digests import StateDigest, digest_of, first_difference, state_digest_of
from fedvitals.replay.tape.tape import machine_description

if TYPE_CHECKING:
    from fedvitals.replay.tape.journal import ClientReply, RoundEntry
    from fedvitals.replay.tape.reader import TapeReader

Tensors = Mapping[str, Tensor]
KEEP = "fv.Tape(every=1, updates=N, durable=True) keeps the updates of the last N rounds and each round's state."
FAILED = 2  # Flower's code for an exception in a client
MANY = 5  # names in a sentence


@dataclass
class Reaggregation:
    """`start`: from which recorded state; `notes`: what could not be as it was, each as a sentence."""

    run: str
    round: int
    strategy: str
    start: int
    replies: int
    seconds: float = 0.0
    mismatch: Mismatch | None = None
    notes: list[str] = field(default_factory=list)
    arrays: Tensors = field(default_factory=dict, repr=False)
    metrics: dict[str, Any] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        return self.mismatch is None

    def __str__(self) -> str:
        who = f"round {self.round}, {self.strategy}, {self.replies} replies"
        text = f"The same bits: {who}." if self.mismatch is None else f"Not the same ({who}). {self.mismatch}"
        return "\n".join((text, *self.notes))


def replay_aggregation(tape: TapeReader, round_index: int, strategy: Any = None) -> Reaggregation:
    """Let `strategy` aggregate a recorded round again, and compare. None: one of Flower's own, made as it was.

    Its attributes become those that were recorded; give it an object that nobody else uses.
    """
    _check(tape)
    told = tape.setting.told.get("strategy") or {}
    strategy = strategy if strategy is not None else tape_strategy.made_again(told)
    if strategy is None or not callable(getattr(strategy, "aggregate_train", None)):
        raise ConfigError(_no_strategy(strategy, told))
    began = time.perf_counter()
    known: dict[str, Tensors] = {}  # what was computed on the way, by digest
    start = _start(tape, round_index)
    for number in range(start, round_index):
        _aggregate(tape, tape.entry(number), strategy, known)
    entry = tape.entry(round_index)
    found = Reaggregation(
        tape.setting.run, round_index, type(strategy).__name__, start, 0, notes=_notes(tape, entry, strategy)
    )
    arrays, metrics, found.replies = _aggregate(tape, entry, strategy, known)
    found.seconds = time.perf_counter() - began
    found.arrays, found.metrics = arrays or {}, dict(metrics or {})
    found.mismatch = _compared(tape, entry, arrays, found.metrics)
    return found


# -- what is needed ---------------------------------------------------------------------------------------------------


def _check(tape: TapeReader) -> None:
    told = tape.setting.told
    if told.get("framework") != "flower":
        raise ConfigError(
            f"'{tape.setting.run}' is no run of Flower's: `fedvitals replay {tape.setting.run} --verify`."
        )
    if told.get("hidden"):
        raise ConfigError(
            f"With {told['hidden']} the tape has no client's update, so the aggregation cannot be computed again."
        )


def _start(tape: TapeReader, number: int) -> int:
    """The latest round from whose recorded state the strategy comes to this one by aggregating what is recorded."""
    for start in range(number, tape.rounds[0] - 1, -1):
        entry = tape.entry(start)
        _check_updates(tape, entry)
        if all(tape.has(mark.digest) for mark in _needed(entry).values()):
            return start
    raise StoreError(f"What the strategy remembered before round {number} is not on the tape (any more). {KEEP}")


def _needed(entry: RoundEntry) -> dict[str, StateDigest]:
    return {name: mark for name, mark in entry.state.items() if name.startswith(tape_strategy.STATE)}


def _check_updates(tape: TapeReader, entry: RoundEntry) -> None:
    gone = [came.node for came in entry.came if came.mark is not None and came.used and not tape.has(came.mark.digest)]
    if gone:
        more = f" and {len(gone) - MANY} more" if len(gone) > MANY else ""
        raise StoreError(
            f"Round {entry.round}: the updates of {', '.join(gone[:MANY])}{more} are not on the tape (any more). {KEEP}"
        )
    if entry.lost:
        raise StoreError(
            f"Round {entry.round}: the tape had no room for {entry.lost} of the answers. See Tape(memory=)."
        )
    if entry.after_notes.get("corrected"):
        raise StoreError(
            f"Round {entry.round}: a correction ({entry.after_notes['corrected']}) aggregated in the strategy's place."
        )


def _states(tape: TapeReader, entry: RoundEntry, known: Mapping[str, Tensors]) -> dict[str, Tensors]:
    """From the tape, or as it was computed in the rounds before."""
    found: dict[str, Tensors] = {}
    for name, mark in _needed(entry).items():
        own = known.get(mark.digest)
        found[name] = tape.tensors(mark.digest) if own is None else own
    return found


# -- the round --------------------------------------------------------------------------------------------------------


def _aggregate(
    tape: TapeReader, entry: RoundEntry, strategy: Any, known: dict[str, Tensors]
) -> tuple[Tensors | None, MetricRecord | None, int]:
    tape_strategy.restore(strategy, entry.notes.get("strategy", {}), _states(tape, entry, known))
    replies = _replies(tape, entry)
    aggregate = strategy.aggregate_train
    if getattr(strategy, MARK, None) is not None:  # a monitor's hooks are no part of it
        aggregate = type(strategy).aggregate_train.__get__(strategy)
    stood = {**entry.notes.get("rng", {}), **entry.after_notes.get("rng", {})}
    with replaying(), generators(stood):
        result = aggregate(entry.round, replies)
    if not isinstance(result, tuple) or len(result) != 2:
        raise ConfigError(f"aggregate_train() gives arrays and metrics; this one gave {type(result).__name__}.")
    record, metrics = result
    states, _, _ = tape_strategy.read(strategy)
    arrays = _named(record, tape) if isinstance(record, ArrayRecord) else None
    for tensors in (*states.values(), *([] if arrays is None else [arrays])):
        known[digest_of(tensors)] = tensors
    return arrays, metrics, len(replies)


def _named(record: ArrayRecord, tape: TapeReader) -> dict[str, Tensor]:
    layers = tape.setting.told.get("layers") or [*record]
    if len(layers) != len(record):
        layers = [*record]
    return {name: records.tensor_of(array)[0] for name, array in zip(layers, record.values(), strict=True)}


def _replies(tape: TapeReader, entry: RoundEntry) -> list[Message]:
    """In the order of the strategy; of a loop of the user's own, in that of their coming."""
    by_id = {str(came.said["id"]): came for came in entry.came if "id" in came.said}
    order = [str(key) for key in entry.after_notes.get("replies", by_id)]
    strange = [key for key in order if key not in by_id]
    if strange:
        raise StoreError(
            f"Round {entry.round}: the strategy was handed {len(strange)} messages that the tape has not: "
            "they did not come over the grid that was watched."
        )
    return [_reply(tape, entry, by_id[key]) for key in order]


def _reply(tape: TapeReader, entry: RoundEntry, came: ClientReply) -> Message:
    metadata = Metadata(
        run_id=0,
        message_id="",
        src_node_id=int(came.node) if came.node.isdecimal() else 0,
        dst_node_id=1,
        reply_to_message_id=str(came.said["id"]),
        group_id=str(entry.round),
        created_at=0.0,
        ttl=1.0,
        message_type=TRAIN,
    )
    if came.mark is None or not came.used:
        reason = str(came.error or came.said.get("left_out", "left out"))
        return Message(metadata=metadata, error=Error(int(came.said.get("code", FAILED)), reason))  # type: ignore[call-overload,no-any-return]
    content = records.content_of(came.said["content"], tape.tensors(came.mark.digest))
    return Message(metadata=metadata, content=content)  # type: ignore[call-overload,no-any-return]


# -- the comparison ---------------------------------------------------------------------------------------------------


def _compared(
    tape: TapeReader, entry: RoundEntry, arrays: Tensors | None, metrics: Mapping[str, Any]
) -> Mismatch | None:
    number = entry.round
    name = AGGREGATED if AGGREGATED in entry.after else MODEL
    recorded = entry.after.get(name)
    if recorded is None and not entry.after_notes.get("empty"):
        return Mismatch(number, "state after", recorded="nothing", replayed="a model" if arrays else "nothing")
    if (arrays is None) != bool(entry.after_notes.get("empty")):
        there = ["nothing" if empty else "a model" for empty in (entry.after_notes.get("empty"), arrays is None)]
        return Mismatch(number, "state after", recorded=there[0], replayed=there[1])
    if arrays is not None and recorded is not None:
        replayed = state_digest_of(arrays)
        if replayed.digest != recorded.digest:
            return _array(tape, number, recorded, replayed, arrays)
    for key, told in entry.after_notes.get("metrics", {}).items():
        before, after = records.given_back(told), metrics.get(key)
        if records.plain(after) != told:
            return Mismatch(number, f"metric {key}", recorded=str(before), replayed=str(after))
    return None


def _array(tape: TapeReader, number: int, recorded: StateDigest, replayed: StateDigest, arrays: Tensors) -> Mismatch:
    """The first array that differs, and where the tape has the recorded one, its first element."""
    names = [*arrays]
    if len(recorded.layers) != len(replayed.layers):
        return Mismatch(number, "state after", recorded=len(recorded.layers), replayed=len(replayed.layers))
    place = next(
        (i for i, pair in enumerate(zip(recorded.layers, replayed.layers, strict=True)) if pair[0] != pair[1]), None
    )
    if place is None:
        return Mismatch(
            number, "state after (names, kinds or shapes)", recorded=recorded.digest, replayed=replayed.digest
        )
    if tape.has(recorded.digest):
        before = tape.tensors(recorded.digest)
        alike = [*before] == names and all(before[n].shape == arrays[n].shape for n in names)
        found = first_difference(before, arrays) if alike else None
        if found is not None:
            return Mismatch(
                number, "state after", None, None, found.tensor, found.recorded, found.replayed, index=found.index
            )
    return Mismatch(number, "state after", None, None, names[place], recorded.norms[place], replayed.norms[place])


def _notes(tape: TapeReader, entry: RoundEntry, strategy: Any) -> list[str]:
    notes = []
    told = tape.setting.told.get("strategy") or {}
    if told and told.get("class") != type(strategy).__qualname__:
        notes.append(f"The run's strategy was a {told.get('class')}; this is a {type(strategy).__qualname__}.")
    unknown = entry.notes.get("unknown", [])
    if unknown:
        notes.append(f"Not restored, because they are no numbers: {', '.join(unknown[:MANY])}.")
    long = [f"{came.node}: {name}" for came in entry.came for name in records.left_out(came.said.get("content", {}))]
    if long:
        notes.append(f"Too long for the tape, so the replies are without: {', '.join(long[:MANY])}.")
    here = machine_description()
    other = [
        f"{name} {was} (here {here.get(name)})" for name, was in tape.setting.machine.items() if here.get(name) != was
    ]
    if other:
        notes.append(f"It was recorded with {', '.join(other)}: bits may differ.")
    return notes


def _no_strategy(strategy: Any, told: Mapping[str, Any]) -> str:
    if strategy is not None and callable(getattr(strategy, "aggregate_fit", None)):
        return (
            "Aggregations of strategies of Flower's older API (aggregate_fit) cannot be computed again, only looked at."
        )
    name = f"{told.get('module')}.{told.get('class')}" if told else "a loop of its own"
    return (
        f"The run aggregated with {name}, which cannot be made by its name alone. Say where the app is (--app DIR), or "
        "where a strategy is made (--strategy module:factory); in Python: replay_aggregation(tape, round, strategy)."
    )
