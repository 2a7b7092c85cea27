# SPDX-License-Identifier: Apache-2.0
"""Convert a worker's observer to text and bytes and back, for other machines, where nothing may be unpickled."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from fedvitals.errors import ConfigError, RecordError
from fedvitals.monitor.workers import INITIAL_BYTES, WorkerObserver
from fedvitals.probes.allowance import Turn
from fedvitals.probes.presets import preset
from fedvitals.protocols import NullObserver
from fedvitals.protocols import WorkerObserver as AnyWatcher
from fedvitals.resources.capture import Capture
from fedvitals.transport.privacy import PrivacyPolicy

PRESETS = ("light", "standard", "deep")


class _ObserverFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields of a `WorkerObserver`, with the preset by name; its first model is sent separately, as bytes."""

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
    turn: Turn


def write_watcher(watcher: AnyWatcher) -> tuple[str, bytes]:
    """Return the observer's text and the run's first model; both empty if nothing is watched."""
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
    del fields["monitor_process"]  # a process id means nothing on another machine
    document = _ObserverFields(**{**fields, "preset": name})
    return msgspec.json.encode(document).decode(), initial or b""


def read_watcher(text: str, initial: bytes) -> AnyWatcher:
    """Return the observer that was written. Raises RecordError if it is not valid."""
    if not text:
        return NullObserver()
    try:
        document = msgspec.json.decode(text, type=_ObserverFields)
    except msgspec.MsgspecError as error:
        raise RecordError(f"The observer that came with a task cannot be read: {error}.") from error
    if len(initial) > INITIAL_BYTES or len(initial) % 4:
        raise RecordError(f"The first model that came with a task has {len(initial)} bytes; {INITIAL_BYTES} may come.")
    fields = {**msgspec.structs.asdict(document), "preset": preset(document.preset), "initial": initial or None}
    return WorkerObserver(**fields)
