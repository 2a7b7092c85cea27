# SPDX-License-Identifier: Apache-2.0
"""A worker's observer as text and bytes, and back: it goes to other machines, where nothing may ever be unpickled."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from fedvitals.errors import ConfigError, RecordError
from fedvitals.monitor.workers import INITIAL_BYTES, WorkerObserver
from fedvitals.probes.presets import preset
from fedvitals.protocols import NullObserver
from fedvitals.protocols import WorkerObserver as AnyWatcher
from fedvitals.resources.capture import Capture
from fedvitals.transport.privacy import PrivacyPolicy

PRESETS = ("light", "standard", "deep")


class _Told(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields of a `WorkerObserver`, a preset by its name; its first model travels beside it, as bytes."""

    run: str
    name: str
    preset: str
    policy: PrivacyPolicy
    strict: bool
    round: int | None
    trace: str
    span: str | None
    known: frozenset[str]
    profile: bool
    capture: Capture | None
    trained: frozenset[str]


def write_watcher(watcher: AnyWatcher) -> tuple[str, bytes]:
    """Its text and the run's first model; both empty where nothing is watched."""
    if isinstance(watcher, NullObserver):
        return "", b""
    if not isinstance(watcher, WorkerObserver):
        raise ConfigError(
            f"On Flower's nodes a fv.Monitor watches, or nothing: {type(watcher).__name__} cannot be sent there."
        )
    name = watcher.preset if isinstance(watcher.preset, str) else watcher.preset.name
    if name not in PRESETS:
        raise ConfigError(
            f"Probes of your own stay on this machine, and Flower's nodes measure by a preset: {', '.join(PRESETS)}. "
            f"Got '{name}'."
        )
    fields: dict[str, Any] = {field.name: getattr(watcher, field.name) for field in dataclasses.fields(watcher)}
    initial = fields.pop("initial")
    told = _Told(**{**fields, "preset": name})
    return msgspec.json.encode(told).decode(), initial or b""


def read_watcher(text: str, initial: bytes) -> AnyWatcher:
    """The observer that was written; RecordError if it is none."""
    if not text:
        return NullObserver()
    try:
        told = msgspec.json.decode(text, type=_Told)
    except msgspec.MsgspecError as error:
        raise RecordError(f"The observer that came with a task cannot be read: {error}.") from error
    if len(initial) > INITIAL_BYTES or len(initial) % 4:
        raise RecordError(f"The first model that came with a task has {len(initial)} bytes; {INITIAL_BYTES} may come.")
    fields = {field: getattr(told, field) for field in told.__struct_fields__}
    return WorkerObserver(**{**fields, "preset": preset(told.preset), "initial": initial or None})
