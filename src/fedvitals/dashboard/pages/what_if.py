# SPDX-License-Identifier: Apache-2.0
"""Answers what-if questions about a round at once: its updates from the tape, aggregated differently, without training.

If the tape lacks some of a round's updates, the answer says so, with the command that computes them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fedvitals.dashboard.pages.predicted_accuracy import PredictedScore, predicted_score
from fedvitals.dashboard.pages.shell_commands import what_if_command
from fedvitals.dashboard.pages.tape_index import Opened, opened
from fedvitals.errors import ConfigError, FedvitalsError, unknown
from fedvitals.store import Target
from fedvitals.store.read.reader import Reader
from fedvitals.views.memo import remembered

if TYPE_CHECKING:
    from torch import Tensor

    from fedvitals.replay.tape.journal import RoundEntry
    from fedvitals.replay.tape.reader import TapeReader

LARGEST = 128 << 20  # bytes of updates that a page holds: more is left to the command line
RECORDED = "recorded"
RULES = ("fedavg", "median", "trimmed_mean", "geometric_median", "norm_clipping", "krum", "multi_krum")
BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
LAYERS = 2000


class LackingError(FedvitalsError):
    """The tape lacks something needed; the message says what."""


@dataclass(frozen=True, slots=True)
class Updates:
    """All used updates of a round, complete: [clients, size]; `starts`: the model each was trained from."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    nodes: tuple[str, ...]
    weights: tuple[float, ...]
    states: Tensor
    starts: dict[str, Tensor]
    start_of: tuple[str, ...]

    def deltas(self) -> Tensor:
        import torch  # noqa: PLC0415 - an extra

        return self.states - torch.stack([self.starts[name] for name in self.start_of])

    @property
    def trained(self) -> int:
        """How many of the values are weights; the rest are buffers, which come last."""
        sizes = zip(self.names, self.sizes, strict=True)
        return sum(size for name, size in sizes if name.rpartition(".")[2] not in BUFFERS)


@dataclass(frozen=True, slots=True)
class ChangedLayer:
    """A layer's step as recorded, and the hypothetical one."""

    name: str
    recorded: float | None  # norm of the recorded step
    changed: float | None  # of the hypothetical step
    apart: float | None  # norm of their difference
    cosine: float | None


@dataclass(frozen=True, slots=True)
class WhatIf:
    """A round's step as recorded, and the hypothetical one."""

    run: str
    round: int
    ready: bool  # False: `why`, and `command` computes it
    why: str
    command: str
    rule: str
    rules: tuple[str, ...]
    own: str  # the run's own rule, if it is known
    dropped: tuple[str, ...]
    used: int  # updates that are aggregated
    of: int
    against: str  # the reference: «the recorded step», or «the mean of all»
    same: bool | None  # whether aggregating all by the run's own rule gives the recorded model, bit for bit
    recorded: float | None
    changed: float | None
    apart: float | None
    share: float | None  # of the recorded step
    cosine: float | None
    layers: tuple[ChangedLayer, ...]
    notes: tuple[str, ...]
    score: PredictedScore | None = None  # of the model after the round, if the experiment's test data are here


def what_if(
    reader: Reader,
    store: Target,
    run: str,
    number: int,
    drop: Sequence[str] = (),
    rule: str = RECORDED,
    *,
    scored: bool = True,
) -> WhatIf:
    """Compute a round's step without some clients, or by another rule, and compare it with the recorded one.

    `scored`: whether to test the models on the experiment's own data, which do not lie in the store.
    """
    index = opened(reader, store, run)
    place = index.place(number)
    command = what_if_command(run, store, number, drop, rule)
    row = index.rows[place]
    if row.trouble is not None:
        return _not_ready(run, number, row.trouble, command, drop, rule)
    if rule not in (RECORDED, *RULES):
        raise ConfigError(unknown("aggregator", rule, [RECORDED, *RULES]))
    try:
        entry = index.tape.entry(number)
        updates = updates_of(reader, run, index, entry)
        compared, models = _compared(run, index, entry, updates, (drop, rule, command))
    except FedvitalsError as error:
        if isinstance(error, ConfigError):
            raise
        return _not_ready(run, number, str(error), command, drop, rule)
    return replace(compared, score=predicted_score(reader, run, index, *models)) if scored else compared


def updates_of(reader: Reader, run: str, index: Opened, entry: RoundEntry) -> Updates:
    """Read the updates of a round, which are cached for the next question."""
    key = (run, entry.round, index.sign)
    return remembered(reader, "tape updates", "one round", key, lambda: whole_updates(index.tape, entry))


def whole_updates(tape: TapeReader, entry: RoundEntry) -> Updates:
    """Read the complete updates of a round; LackingError says what the tape lacks."""
    import torch  # noqa: PLC0415 - an extra

    used = [came for came in entry.came if came.mark is not None and came.used]
    if not used:
        raise LackingError("No update was used in this round.")
    there = [came for came in used if came.mark is not None and tape.has(came.mark.digest)]
    if len(there) < len(used):
        raise LackingError(f"{len(there)} of the {len(used)} updates of this round are on the tape whole.")
    begun = {came.start for came in used}
    lacking = [name for name in begun if name not in entry.state or not tape.has(entry.state[name].digest)]
    if lacking:
        raise LackingError("The updates are on the tape, but not the model from which they began.")
    starts = {name: tape.tensors(entry.state[name].digest) for name in begun}
    first = next(iter(starts.values()))
    names, sizes = tuple(first), tuple(tensor.numel() for tensor in first.values())
    if len(used) * sum(sizes) * 4 > LARGEST:
        raise LackingError(f"{len(used)} updates of {sum(sizes)} values each are more than a page computes.")
    states = torch.empty(len(used), sum(sizes))
    for row, came in enumerate(used):
        assert came.mark is not None  # noqa: S101 - guaranteed by the selection
        tensors = tape.tensors(came.mark.digest)
        if tuple(tensor.numel() for tensor in tensors.values()) != sizes:
            raise LackingError(f"The update of {came.node} has other tensors than the model.")
        states[row] = flat(tensors.values())
    return Updates(
        names,
        sizes,
        tuple(came.node for came in used),
        tuple(came.weight for came in used),
        states,
        {name: flat(tensors.values()) for name, tensors in starts.items()},
        tuple(came.start for came in used),
    )


def flat(tensors: Any) -> Tensor:
    import torch  # noqa: PLC0415 - an extra

    return torch.cat([tensor.reshape(-1).to(torch.float32) for tensor in tensors])


def _compared(
    run: str, index: Opened, entry: RoundEntry, updates: Updates, asked: tuple[Sequence[str], str, str]
) -> tuple[WhatIf, tuple[Tensor, Tensor]]:
    """Return the comparison, and the recorded and the hypothetical model."""
    drop, rule, command = asked
    tape = index.tape
    if set(updates.start_of) != {"model"}:
        raise LackingError("In this round clients began from several models, one for each group.")
    own, memory, notes = _own_rule(tape, entry)
    strangers = [node for node in drop if node not in updates.nodes]
    if strangers:
        notes.append(f"Not in this round, or not used: {', '.join(strangers[:5])}.")
    keep = [i for i, node in enumerate(updates.nodes) if node not in drop]
    before = updates.starts["model"]
    all_of_them = _aggregated(own, updates, range(len(updates.nodes)), memory)
    recorded = entry.after.get("model")
    after = tape.tensors(recorded.digest) if recorded is not None and tape.has(recorded.digest) else None
    changed = _aggregated(own if rule == RECORDED else _rule(rule, len(keep)), updates, keep, memory)
    model = all_of_them if after is None else flat(after.values())
    step = model - before
    other = changed - before
    whole, layers = _numbers(step, other), []
    for name, mine, yours in zip(updates.names, step.split(updates.sizes), other.split(updates.sizes), strict=True):
        layers.append(ChangedLayer(name, *_numbers(mine, yours)))
    if any(came.group is not None for came in entry.came):
        notes.append("Here all updates are aggregated at once; the run itself did so in groups.")
    compared = WhatIf(
        run, entry.round, True, "", command, rule, RULES, type(own).__name__, tuple(drop), len(keep),
        len(updates.nodes), "the mean of all" if after is None else "the recorded step",
        _is_recorded(updates, all_of_them, entry), whole[0], whole[1], whole[2],
        None if not whole[0] or whole[2] is None else whole[2] / whole[0], whole[3], tuple(layers[:LAYERS]),
        tuple(notes),
    )  # fmt: skip
    return compared, (model, changed)


def _own_rule(tape: TapeReader, entry: RoundEntry) -> tuple[Any, dict[str, Any], list[str]]:
    """Return the run's own aggregator, with its state; the mean if it is unknown."""
    from fedvitals.lab.aggregators.averages import FedAvg  # noqa: PLC0415 - needs torch

    notes = []
    if entry.notes.get("actions"):
        notes.append("Corrections that were in force are not applied here.")
    text = tape.setting.description.get("experiment")
    if not isinstance(text, str):
        return FedAvg(), {}, [*notes, "The run's own rule is not on the tape: the mean by samples stands for it."]
    try:
        from fedvitals.lab import read  # noqa: PLC0415 - needs torch

        rule = read(text).aggregator
    except (FedvitalsError, ModuleNotFoundError):
        return FedAvg(), {}, [*notes, "The run's own rule cannot be read here: the mean by samples stands for it."]
    prefix = "memory/aggregator/"
    kept = {name: mark for name, mark in entry.state.items() if name.startswith(prefix)}
    if not all(tape.has(mark.digest) for mark in kept.values()):
        return FedAvg(), {}, [*notes, "What the run's own rule remembered is not on the tape: the mean stands for it."]
    return rule, {n.removeprefix(prefix): flat(tape.tensors(m.digest).values()) for n, m in kept.items()}, notes


def _rule(name: str, clients: int) -> Any:
    from fedvitals.lab import KINDS  # noqa: PLC0415 - needs torch

    if name not in ("krum", "multi_krum"):
        return KINDS[name]()
    return KINDS[name](faulty=max(0, min(clients // 4, (clients - 3) // 2)))


def _aggregated(rule: Any, updates: Updates, rows: Sequence[int], memory: dict[str, Any]) -> Tensor:
    before = updates.starts["model"]
    total = rule.begin(before, {name: tensor.clone() for name, tensor in memory.items()}, updates.trained)
    for row in rows:
        total.add(updates.states[row], updates.weights[row], updates.nodes[row])
    result: Tensor = total.finish()
    return result


def _is_recorded(updates: Updates, model: Tensor, entry: RoundEntry) -> bool | None:
    from fedvitals.replay.tape.digests import state_digest_of  # noqa: PLC0415 - needs torch

    recorded = entry.after.get("model")
    if recorded is None:
        return None
    parts = zip(updates.names, model.split(updates.sizes), strict=True)
    return state_digest_of(dict(parts)).layers == recorded.layers


def _numbers(mine: Tensor, yours: Tensor) -> tuple[float | None, float | None, float | None, float | None]:
    """Return the norms of two steps and of their difference, and their cosine."""
    first, second = mine.double(), yours.double()
    lengths = float(first.norm()), float(second.norm())
    cosine = float(first @ second) / (lengths[0] * lengths[1]) if lengths[0] and lengths[1] else None
    return *lengths, float((second - first).norm()), cosine


def _not_ready(run: str, number: int, why: str, command: str, drop: Sequence[str], rule: str) -> WhatIf:
    return WhatIf(
        run, number, False, why, command, rule, RULES, "", tuple(drop), 0, 0, "", None, None, None, None, None, None,
        (), (),
    )  # fmt: skip
