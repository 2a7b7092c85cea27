# SPDX-License-Identifier: Apache-2.0
"""Convert tasks and updates of the lab to Flower's records and back. States are sent as arrays, the rest as JSON.

Both ends check everything that arrives: missing data, another size or another version is a RecordError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from msgspec.structs import asdict
from torch import Tensor

from fedvitals.errors import ConfigError, RecordError
from fedvitals.hosts.flower.lab.observer import read_watcher, write_watcher
from fedvitals.lab.engines.tasks import Exchange, Task, Update
from fedvitals.lab.local import Local
from fedvitals.lab.topologies.exchanges import average, pass_to_next
from fedvitals.protocols import WorkerObserver

KEY = "fedvitals.lab"  # of the single record of each kind
VERSION = 1  # of this format
HEAD = 4096  # maximum bytes of an array's own header
S = TypeVar("S", bound=msgspec.Struct)
EXCHANGES: dict[str, Exchange] = {"pass_on": pass_to_next, "average": average}


class _Task(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A `Task` on the wire; `start` is the name of an array."""

    round: int
    nodes: tuple[str, ...]
    start: str
    group: str | None
    exchange: str | None
    iterations: int | None
    parent: str
    local: Local | None
    stop_at_nonfinite: bool


class _Update(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An `Update` on the wire; its state and losses are rows and ranges of arrays."""

    node: str
    samples: int
    steps: int
    seconds: float
    error: str | None
    error_type: str | None


@dataclass(frozen=True)
class TrainRequest:
    """A node's training request."""

    experiment: str  # as TOML
    tasks: list[Task]
    watcher: WorkerObserver


def arrays_by_state(starts: Sequence[Tensor]) -> dict[int, Array]:
    """Return the arrays of the distinct states, by the states' identities: most tasks start from the same one."""
    return {key: Array(state.numpy()) for key, state in {id(start): start for start in starts}.items()}


def write_request(tasks: Sequence[Task], experiment: str, watcher: WorkerObserver, arrays: Mapping[int, Array]) -> Any:
    """Return the records that ask a node to train these tasks."""
    names = {key: str(place) for place, key in enumerate(dict.fromkeys(id(task.start) for task in tasks))}
    text, initial = write_watcher(watcher)
    task_fields = []
    for task in tasks:
        fields = {field: getattr(task, field) for field in _Task.__struct_fields__}
        fields |= {"start": names[id(task.start)], "exchange": _name_of(task.exchange)}
        task_fields.append(_Task(**fields))
    config = {"experiment": experiment, "tasks": msgspec.json.encode(task_fields).decode()}
    return _message({**config, "watcher": text, "initial": initial}, {name: arrays[key] for key, name in names.items()})


def read_request(content: Any) -> TrainRequest:
    """Return the request of a message. Raises RecordError if it is not valid."""
    config, arrays = _records(content)
    task_fields = _decoded(config, "tasks", _Task)
    starts = {name: _tensor(array, None) for name, array in arrays.items()}
    tasks = []
    for task in task_fields:
        if task.start not in starts or not task.nodes:
            raise RecordError(f"A task of the nodes {task.nodes!r} came without its model.")
        if task.exchange is not None and task.exchange not in EXCHANGES:
            raise RecordError(f"A task asks for the exchange '{task.exchange}', which is not known here.")
        exchange = None if task.exchange is None else EXCHANGES[task.exchange]
        tasks.append(Task(**{**asdict(task), "start": starts[task.start], "exchange": exchange}))
    watcher = read_watcher(_field(config, "watcher", str), _field(config, "initial", bytes))
    return TrainRequest(_field(config, "experiment", str), tasks, watcher)


def write_reply(updates: Sequence[Update], states: Tensor, payload: bytes) -> Any:
    """Return the records of the updates, in the order of the tasks' members.

    `states`, [members, size], holds their states as rows.
    """
    update_fields = [_Update(u.node, int(u.samples), u.steps, u.seconds, u.error, u.error_type) for u in updates]
    losses = torch.cat([u.losses.to(torch.float32) for u in updates])
    config = {"updates": msgspec.json.encode(update_fields).decode(), "payload": payload}
    return _message(config, {"states": Array(states.numpy()), "losses": Array(losses.numpy())})


def read_reply(content: Any, tasks: Sequence[Task], size: int) -> tuple[list[Update], bytes]:
    """Return the updates of these tasks, and the telemetry. Raises RecordError if they do not match."""
    config, arrays = _records(content)
    update_fields = _decoded(config, "updates", _Update)
    asked = [(task, node) for task in tasks for node in task.nodes]
    if [fields.node for fields in update_fields] != [node for _, node in asked]:
        raise RecordError(f"Updates of {len(asked)} clients were asked for, and those of others came, or of too few.")
    if any(fields.steps < 0 or fields.samples < 0 for fields in update_fields):
        raise RecordError("An update reports negative steps or samples: both are numbers from 0 on.")
    if not {"states", "losses"} <= set(arrays):
        raise RecordError("Updates came without their states or losses.")
    states = _tensor(arrays["states"], (len(update_fields), size))
    steps = [fields.steps for fields in update_fields]
    losses = _tensor(arrays["losses"], (sum(steps),)).split(steps)
    updates = [
        Update(state=state, start=task.start, group=task.group, losses=loss, **asdict(fields))
        for fields, (task, _), state, loss in zip(update_fields, asked, states, losses, strict=True)
    ]
    return updates, _field(config, "payload", bytes)


def _decoded(config: Mapping[str, Any], name: str, kind: type[S]) -> list[S]:
    """Return the structs that a field of the message holds as JSON."""
    try:
        return msgspec.json.decode(_field(config, name, str), type=list[kind])  # type: ignore[valid-type]
    except msgspec.MsgspecError as error:
        raise RecordError(f"The {name} of a message cannot be read: {error}.") from error


def _name_of(exchange: Exchange | None) -> str | None:
    for name, known in EXCHANGES.items():
        if exchange is known:
            return name
    if exchange is not None:
        raise ConfigError(
            "Groups with an exchange of your own cannot train on Flower's nodes: a function is not sent to them. "
            f"Known: {', '.join(EXCHANGES)}. Use another engine."
        )
    return None


def _message(config: dict[str, Any], arrays: dict[str, Array]) -> RecordDict:
    """Return the two records of a message, which `_records` reads."""
    return RecordDict({KEY: ConfigRecord({"version": VERSION, **config}), f"{KEY}.states": ArrayRecord(arrays)})


def _records(content: Any) -> tuple[Mapping[str, Any], Mapping[str, Array]]:
    config, arrays = content.get(KEY), content.get(f"{KEY}.states")
    if not isinstance(config, ConfigRecord) or not isinstance(arrays, ArrayRecord):
        raise RecordError(
            f"The message does not belong to fedvitals' lab: it has {', '.join(sorted(content)) or 'nothing'}."
        )
    if config.get("version") != VERSION:
        raise RecordError(
            f"The message is of version {config.get('version')!r} of the lab's format, and here it is {VERSION}. "
            "Install the same fedvitals on all machines."
        )
    return config, arrays


def _field(config: Mapping[str, Any], name: str, kind: type) -> Any:
    value = config.get(name)
    if type(value) is not kind:
        raise RecordError(f"The message's '{name}' should be of type {kind.__name__}; got {type(value).__name__}.")
    return value


def _tensor(array: Array, shape: tuple[int, ...] | None) -> Tensor:
    """Return an array as a float32 tensor of this shape; without a shape, a vector of any length."""
    if shape is not None and len(array.data) > HEAD + 4 * int(np.prod(shape)):  # before memory is allocated for it
        raise RecordError(f"An array of {len(array.data)} bytes came where {shape} numbers were expected.")
    try:
        numbers = array.numpy()
    except Exception as error:
        raise RecordError(f"An array cannot be read: {type(error).__name__}: {error}.") from error
    fits = numbers.ndim == 1 if shape is None else numbers.shape == shape
    if numbers.dtype != np.float32 or not fits:
        wanted = "a vector" if shape is None else f"{shape}"
        raise RecordError(f"An array is {numbers.dtype} {numbers.shape}; expected float32, {wanted}.")
    return torch.from_numpy(np.array(numbers))  # a copy, because data read from a message are read-only
