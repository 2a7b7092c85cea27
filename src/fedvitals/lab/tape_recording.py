# SPDX-License-Identifier: Apache-2.0
"""Records lab runs on a tape: the state between rounds, and every update.

With these and the experiment's description, each round can be re-executed to the last bit: all random numbers of the
lab come from streams of (seed, purpose, round, node), so no generator state needs to be recorded.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fedvitals.errors import ConfigError
from fedvitals.lab.engines.tasks import Node, Task, Update
from fedvitals.lab.state import NamedTensors
from fedvitals.protocols import Message, TapeRecorder
from fedvitals.records import Action

if TYPE_CHECKING:
    from fedvitals.lab.engines.engine import AnyEngine
    from fedvitals.lab.experiment import Experiment
    from fedvitals.lab.federation import Federation, ServerState

State = dict[str, Mapping[str, Tensor]]
OPTIMIZER = "optimizer/"


def rerun_settings(experiment: Experiment, engine: AnyEngine, data: object) -> dict[str, Any]:
    """Return what re-execution needs. An experiment with the user's own objects has no text: they must be passed
    again.
    """
    try:
        text = experiment.to_toml()
    except ConfigError:
        text = None
    where = data if data is not None else os.environ.get("FEDVITALS_DATA")
    return {
        "host": "lab",  # whatever the monitor was told
        "experiment": text,
        "digest": experiment.digest(),
        "engine": engine.name,
        "workers": getattr(engine, "workers", 1),
        "device": str(getattr(engine, "device", "cpu")),
        "precision": getattr(engine, "precision", "float32"),
        "data": None if where is None else os.path.abspath(os.fspath(where)),  # type: ignore[call-overload]  # noqa: PTH100
        "rounds": experiment.rounds,
        "nodes": list(experiment.nodes),
        "keep_optimizer": experiment.local.keep_optimizer,
    }


def begin(federation: Federation, actions: Sequence[Action]) -> None:
    recorder = federation.observer.recorder
    if recorder is None:
        return
    server = federation.server
    notes = {**server_notes(server), "actions": [describe_action(action) for action in actions]}
    recorder.begin(federation.round, state_tensors_of(federation), notes)


def messages(
    federation: Federation,
    recorder: TapeRecorder | None,
    batch: Sequence[Update],
    arrived: Sequence[Update],
    excluded: AbstractSet[Node],
    task_of: Mapping[Node, Task],
) -> None:
    """Record a batch of updates as they arrived, usable or not."""
    if recorder is None:
        return
    corrections, states = federation.corrections, _kept_states(federation, arrived)
    absent = "refused" if federation.experiment.secure_aggregation is None else "masked: only the sum is visible"
    messages = []
    for update in batch:
        tensors = states.get(update.node)
        used = tensors is not None and update.node not in excluded
        messages.append(
            Message(
                update.node,
                tensors,
                float(update.samples),
                used and not corrections.is_quarantined(update.node, update.group),
                update.group,
                _origin(federation.server, task_of[update.node].start),
                update.losses,
                update.error if update.error is not None or tensors is not None else absent,
            )
        )
    recorder.messages(federation.round, messages)


def _kept_states(federation: Federation, arrived: Sequence[Update]) -> dict[Node, NamedTensors]:
    """Return the updates' states by client, to be kept: by reference if nothing writes to their memory again.

    That is the case if an update is as a worker wrote it, and only the lab's own code sees it on its way.
    """
    layout, copied = federation.site.layout, []
    kept: dict[Node, NamedTensors] = {}
    for update in arrived:
        lease = update.lease if federation.never_modifies_updates else None
        if lease is None:
            copied.append(update)
        else:
            kept[update.node] = NamedTensors(layout, update.state, lease)
    if copied:
        copies = federation.tape_copies([update.state for update in copied])
        kept |= {update.node: copy for update, copy in zip(copied, copies, strict=True)}
    return kept


def end(federation: Federation, metrics: Mapping[str, float]) -> None:
    recorder = federation.observer.recorder
    if recorder is not None:
        recorder.end(federation.round, state_tensors_of(federation), server_notes(federation.server), metrics)


def state_tensors_of(federation: Federation) -> State:
    """Return copies of the federation's tensors, since memory may be changed in place."""
    server, layout = federation.server, federation.site.layout
    held: dict[str, Tensor] = {"model": server.model}
    held |= {f"memory/{key}": tensor for key, tensor in server.memory.items()}
    held |= {f"past/{i}": tensor for i, tensor in enumerate(server.past)}
    optimizers = federation.engine.optimizers() if hasattr(federation.engine, "optimizers") else {}
    held |= {OPTIMIZER + key: tensor for key, tensor in optimizers.items()}
    sizes = (layout.size, layout.weights)
    whole = {key: tensor for key, tensor in held.items() if tensor.dim() == 1 and len(tensor) in sizes}
    copies: State = {key: {"": tensor.cpu().clone()} for key, tensor in held.items() if key not in whole}  # few numbers
    copies |= zip(whole, federation.tape_copies([*whole.values()]), strict=True)
    return {key: copies[key] for key in held}


def server_notes(server: ServerState) -> dict[str, Any]:
    return {"notes": copy.deepcopy(server.notes), "clock": float(server.clock).hex()}


def describe_action(action: Action) -> dict[str, Any]:
    table = dataclasses.asdict(action)
    table["where"] = {"run": action.where.run, "round": action.where.round, "node": action.where.node}
    return table


def _origin(server: ServerState, start: Tensor) -> str:
    if start is server.model:
        return "model"
    return next((f"memory/{key}" for key, tensor in server.memory.items() if tensor is start), "model")
