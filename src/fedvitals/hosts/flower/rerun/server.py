# SPDX-License-Identifier: Apache-2.0
"""Repeat a recorded aggregation by passing the round's replies to the user's strategy once more.

The strategy is set to the recorded state and gets the recorded messages in their order; the result must have the
recorded digest.
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
from fedvitals.hosts.flower.replaying import random_generators_at, replaying
from fedvitals.hosts.flower.tape import records
from fedvitals.hosts.flower.tape import strategy as tape_strategy
from fedvitals.hosts.flower.tape.server import AGGREGATED, MODEL, TRAIN
from fedvitals.replay.player.comparison import Mismatch
from fedvitals.replay.tape.digests import StateDigest, digest_of, first_difference, state_digest_of
from fedvitals.replay.tape.tape import other_machine_notes

if TYPE_CHECKING:
    from fedvitals.replay.tape.journal import ClientReply, RoundEntry
    from fedvitals.replay.tape.reader import TapeReader

Tensors = Mapping[str, Tensor]
KEEP = "fv.Tape(every=1, updates=N, durable=True) keeps the updates of the last N rounds and each round's state."
FAILED = 2  # Flower's code for an exception in a client
NAMES_IN_SENTENCE = 5  # names in a sentence


@dataclass
class Reaggregation:
    """The result of a repeated aggregation.

    `start`: the round of the recorded state; `notes`: what could not be restored, as sentences.
    """

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
        """Return whether the result has the recorded bits."""
        return self.mismatch is None

    def __str__(self) -> str:
        who = f"round {self.round}, {self.strategy}, {self.replies} replies"
        text = f"The same bits: {who}." if self.mismatch is None else f"Not the same ({who}). {self.mismatch}"
        return "\n".join((text, *self.notes))


def replay_aggregation(tape: TapeReader, round_index: int, strategy: Any = None) -> Reaggregation:
    """Let `strategy` aggregate a recorded round again, and compare. None: one of Flower's own, recreated.

    Its attributes are overwritten by the recorded ones, so pass an object that nobody else uses.
    """
    _check(tape)
    description = tape.setting.description.get("strategy") or {}
    strategy = strategy if strategy is not None else tape_strategy.rebuild_strategy(description)
    if strategy is None or not callable(getattr(strategy, "aggregate_train", None)):
        raise ConfigError(_no_strategy(strategy, description))
    began = time.perf_counter()
    known: dict[str, Tensors] = {}  # intermediate results, by digest
    start = _start(tape, round_index)
    for past_round in range(start, round_index):
        _aggregate(tape, tape.entry(past_round), strategy, known)
    entry = tape.entry(round_index)
    result = Reaggregation(
        tape.setting.run, round_index, type(strategy).__name__, start, 0, notes=_notes(tape, entry, strategy)
    )
    arrays, metrics, result.replies = _aggregate(tape, entry, strategy, known)
    result.seconds = time.perf_counter() - began
    result.arrays, result.metrics = arrays or {}, dict(metrics or {})
    result.mismatch = _mismatch_of(tape, entry, arrays, result.metrics)
    return result


# -- what is needed ---------------------------------------------------------------------------------------------------


def _check(tape: TapeReader) -> None:
    settings = tape.setting.description
    if settings.get("framework") != "flower":
        raise ConfigError(
            f"'{tape.setting.run}' is no run of Flower's: `fedvitals replay {tape.setting.run} --verify`."
        )
    if settings.get("hidden"):
        raise ConfigError(
            f"With {settings['hidden']} the tape has no client's update, so the aggregation cannot be computed again."
        )


def _start(tape: TapeReader, round_index: int) -> int:
    """Return the latest round whose recorded state suffices.

    From there the strategy reaches this round by aggregating recorded replies.
    """
    for start in range(round_index, tape.rounds[0] - 1, -1):
        entry = tape.entry(start)
        _check_updates(tape, entry)
        if all(tape.has(mark.digest) for mark in _strategy_states(entry).values()):
            return start
    raise StoreError(f"What the strategy remembered before round {round_index} is not on the tape (any more). {KEEP}")


def _strategy_states(entry: RoundEntry) -> dict[str, StateDigest]:
    return {name: mark for name, mark in entry.state.items() if name.startswith(tape_strategy.STATE)}


def _check_updates(tape: TapeReader, entry: RoundEntry) -> None:
    gone = [came.node for came in entry.came if came.mark is not None and came.used and not tape.has(came.mark.digest)]
    if gone:
        more = f" and {len(gone) - NAMES_IN_SENTENCE} more" if len(gone) > NAMES_IN_SENTENCE else ""
        raise StoreError(
            f"Round {entry.round}: the updates of {', '.join(gone[:NAMES_IN_SENTENCE])}{more} are not on the tape (any "
            f"more). {KEEP}"
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
    """Return the strategy's states before a round, from the tape or as computed in the previous rounds."""
    states: dict[str, Tensors] = {}
    for name, mark in _strategy_states(entry).items():
        own = known.get(mark.digest)
        states[name] = tape.tensors(mark.digest) if own is None else own
    return states


# -- the round --------------------------------------------------------------------------------------------------------


def _aggregate(
    tape: TapeReader, entry: RoundEntry, strategy: Any, known: dict[str, Tensors]
) -> tuple[Tensors | None, MetricRecord | None, int]:
    tape_strategy.restore_attributes(strategy, entry.notes.get("strategy", {}), _states(tape, entry, known))
    replies = _replies(tape, entry)
    aggregate = strategy.aggregate_train
    if getattr(strategy, MARK, None) is not None:  # a monitor's hooks are not part of it
        aggregate = type(strategy).aggregate_train.__get__(strategy)
    stood = {**entry.notes.get("rng", {}), **entry.after_notes.get("rng", {})}
    with replaying(), random_generators_at(stood):
        result = aggregate(entry.round, replies)
    if not isinstance(result, tuple) or len(result) != 2:
        raise ConfigError(f"aggregate_train() gives arrays and metrics; this one gave {type(result).__name__}.")
    record, metrics = result
    states, _, _ = tape_strategy.read_attributes(strategy)
    arrays = _named(record, tape) if isinstance(record, ArrayRecord) else None
    for tensors in (*states.values(), *([] if arrays is None else [arrays])):
        known[digest_of(tensors)] = tensors
    return arrays, metrics, len(replies)


def _named(record: ArrayRecord, tape: TapeReader) -> dict[str, Tensor]:
    layers = tape.setting.description.get("layers") or [*record]
    if len(layers) != len(record):
        layers = [*record]
    return {name: records.tensor_of(array)[0] for name, array in zip(layers, record.values(), strict=True)}


def _replies(tape: TapeReader, entry: RoundEntry) -> list[Message]:
    """Return the replies in the order in which the strategy got them; for a custom loop, in order of arrival."""
    by_id = {str(came.notes["id"]): came for came in entry.came if "id" in came.notes}
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
        reply_to_message_id=str(came.notes["id"]),
        group_id=str(entry.round),
        created_at=0.0,
        ttl=1.0,
        message_type=TRAIN,
    )
    if came.mark is None or not came.used:
        reason = str(came.error or came.notes.get("left_out", "left out"))
        return Message(metadata=metadata, error=Error(int(came.notes.get("code", FAILED)), reason))  # type: ignore[call-overload,no-any-return]
    content = records.content_of(came.notes["content"], tape.tensors(came.mark.digest))
    return Message(metadata=metadata, content=content)  # type: ignore[call-overload,no-any-return]


# -- the comparison ---------------------------------------------------------------------------------------------------


def _mismatch_of(
    tape: TapeReader, entry: RoundEntry, arrays: Tensors | None, metrics: Mapping[str, Any]
) -> Mismatch | None:
    round_index = entry.round
    name = AGGREGATED if AGGREGATED in entry.after else MODEL
    recorded = entry.after.get(name)
    if recorded is None and not entry.after_notes.get("empty"):
        return Mismatch(round_index, "state after", recorded="nothing", replayed="a model" if arrays else "nothing")
    if (arrays is None) != bool(entry.after_notes.get("empty")):
        there = ["nothing" if empty else "a model" for empty in (entry.after_notes.get("empty"), arrays is None)]
        return Mismatch(round_index, "state after", recorded=there[0], replayed=there[1])
    if arrays is not None and recorded is not None:
        replayed = state_digest_of(arrays)
        if replayed.digest != recorded.digest:
            return _array_mismatch(tape, round_index, recorded, replayed, arrays)
    for key, recorded_metric in entry.after_notes.get("metrics", {}).items():
        before, after = records.value_from_json(recorded_metric), metrics.get(key)
        if records.json_value(after) != recorded_metric:
            return Mismatch(round_index, f"metric {key}", recorded=str(before), replayed=str(after))
    return None


def _array_mismatch(
    tape: TapeReader, round_index: int, recorded: StateDigest, replayed: StateDigest, arrays: Tensors
) -> Mismatch:
    """Return the first array that differs and, where the tape has the recorded one, its first differing element."""
    names = [*arrays]
    if len(recorded.layers) != len(replayed.layers):
        return Mismatch(round_index, "state after", recorded=len(recorded.layers), replayed=len(replayed.layers))
    place = next(
        (i for i, pair in enumerate(zip(recorded.layers, replayed.layers, strict=True)) if pair[0] != pair[1]), None
    )
    if place is None:
        return Mismatch(
            round_index, "state after (names, kinds or shapes)", recorded=recorded.digest, replayed=replayed.digest
        )
    if tape.has(recorded.digest):
        before = tape.tensors(recorded.digest)
        alike = [*before] == names and all(before[n].shape == arrays[n].shape for n in names)
        difference = first_difference(before, arrays) if alike else None
        if difference is not None:
            return Mismatch(round_index, "state after").at(difference)
    return Mismatch(round_index, "state after", None, None, names[place], recorded.norms[place], replayed.norms[place])


def _notes(tape: TapeReader, entry: RoundEntry, strategy: Any) -> list[str]:
    notes = []
    description = tape.setting.description.get("strategy") or {}
    if description and description.get("class") != type(strategy).__qualname__:
        notes.append(f"The run's strategy was a {description.get('class')}; this is a {type(strategy).__qualname__}.")
    unknown = entry.notes.get("unknown", [])
    if unknown:
        notes.append(f"Not restored, because they are no numbers: {', '.join(unknown[:NAMES_IN_SENTENCE])}.")
    long = [
        f"{came.node}: {name}" for came in entry.came for name in records.left_out_names(came.notes.get("content", {}))
    ]
    if long:
        notes.append(f"Too long for the tape, so the replies are without: {', '.join(long[:NAMES_IN_SENTENCE])}.")
    return notes + other_machine_notes(tape.setting.machine)


def _no_strategy(strategy: Any, description: Mapping[str, Any]) -> str:
    if strategy is not None and callable(getattr(strategy, "aggregate_fit", None)):
        return (
            "Aggregations of strategies of Flower's older API (aggregate_fit) cannot be computed again, only looked at."
        )
    name = f"{description.get('module')}.{description.get('class')}" if description else "a loop of its own"
    return (
        f"The run aggregated with {name}, which cannot be made by its name alone. Say where the app is (--app DIR), or "
        "where a strategy is made (--strategy module:factory); in Python: replay_aggregation(tape, round, strategy)."
    )
