# SPDX-License-Identifier: Apache-2.0
"""Run a client's message again at its site, through the user's own ClientApp, with proof or under a debugger.

    fedvitals replay flower-7 --round 12 --node 4711 --tape /var/lib/fedvitals/tape --app . --pdb

Message, context and generators are as they were; the reply must have the recorded digest. State that an app keeps
elsewhere (files, module variables in a process that lived on) is its own responsibility.
"""

from __future__ import annotations

import bdb
import shlex
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message, Metadata

from fedvitals.errors import ConfigError, StoreError
from fedvitals.hosts.flower.replaying import random_generators_at, replaying
from fedvitals.hosts.flower.reply_envelope import KEY
from fedvitals.hosts.flower.rerun import app as rerun_app
from fedvitals.hosts.flower.rerun.debugger import call_app, own_frames, post_mortem
from fedvitals.hosts.flower.rerun.server import Reaggregation, replay_aggregation
from fedvitals.hosts.flower.tape import records
from fedvitals.hosts.flower.tape.client import wait_for_writers
from fedvitals.hosts.flower.tape.entries import METADATA, ClientTapeFolder, ReceivedMessage, find_node, find_run
from fedvitals.replay.player.comparison import Mismatch
from fedvitals.replay.tape.digests import Tensors, first_difference, state_digest_of
from fedvitals.replay.tape.tape import other_machine_notes

__all__ = ["Reaggregation", "Rerun", "replay_aggregation", "rerun_client"]
TRAIN = "train"


@dataclass
class Rerun:
    """The result of a re-run. `holds`: whether the reply has the recorded bits; None if no reply was recorded."""

    run: str
    node: str
    round: int
    phase: str
    app: str
    handler: str | None = None
    seconds: float = 0.0
    holds: bool | None = None
    mismatch: Mismatch | None = None
    recorded_error: str | None = None
    error: str | None = None  # of this run
    traceback: str | None = None
    notes: list[str] = field(default_factory=list)
    reply: Message | None = field(default=None, repr=False)

    def __str__(self) -> str:
        who = f"round {self.round} ({self.phase}), node {self.node}"
        if self.mismatch is not None:
            text = f"Not the same: {who}. {self.mismatch}"
        elif self.holds is None:
            text = f"Run again: {who}. Nothing of its reply was recorded, so there is nothing to compare it with."
            text += f" This time it raised {self.error}." if self.error else ""
        elif self.error is not None:
            text = f"The same exception: {who} raised {self.error}."
        else:
            text = f"The same bits: {who}."
        return "\n".join((text, *self.notes))


def rerun_client(
    folder: str | Path,
    round_index: int,
    node: str,
    *,
    app: str | Path | Any = None,
    debugger: bool = False,
    run: str | None = None,
    phase: str = TRAIN,
) -> Rerun:
    """Run what a client was sent in a round through its ClientApp again, and compare the replies.

    `folder`: where clients keep their tapes. `app`: the app's folder, or a ClientApp. It is required: a tape may come
    from someone else, and the folder that it names is never imported unasked. `debugger`: stops under pdb at the first
    line of the handler, or after an exception where it was raised.
    """
    wait_for_writers()
    site = ClientTapeFolder(Path(folder))
    name = find_run(site, run)
    received = site.read(name, find_node(site, name, node), round_index, phase)
    client_app, where = _app(app, received, site.folder)
    message, context = _message(site, received), _context(site, received)
    rerun = Rerun(name, received.node, round_index, phase, where, received.handler, recorded_error=received.error)
    rerun.notes = other_machine_notes(received.machine)
    began = time.perf_counter()
    with replaying(), _threads(received.threads), random_generators_at(received.rng):
        try:
            rerun.reply = call_app(client_app, message, context, debugger=debugger)
        except bdb.BdbQuit:
            rerun.notes.append("The debugger was left before the handler was done.")
        except Exception as error:  # noqa: BLE001 - of the user's code
            rerun.error = f"{type(error).__name__}: {error}"
            rerun.traceback = "".join(traceback.format_exception(type(error), error, own_frames(error)))
            if debugger:
                post_mortem(error)
    rerun.seconds = time.perf_counter() - began
    _compare(site, received, rerun)
    return rerun


# -- what it was ------------------------------------------------------------------------------------------------------


def _message(site: ClientTapeFolder, received: ReceivedMessage) -> Message:
    content = records.content_of(received.content, site.tensors(received.run, received.sent))
    try:
        metadata = Metadata(**{name: kind(received.metadata[name]) for name, kind in METADATA.items()})
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(f"The message on the tape cannot be read: {type(error).__name__}: {error}") from error
    return Message(metadata=metadata, content=content)  # type: ignore[call-overload,no-any-return]


def _context(site: ClientTapeFolder, received: ReceivedMessage) -> Context:
    state = records.content_of(received.state, site.tensors(received.run, received.held))
    try:
        return Context(
            run_id=int(received.context["run_id"]),
            node_id=int(received.context["node_id"]),
            node_config=_config(received.context["node_config"]),
            state=state,
            run_config=_config(received.context["run_config"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(f"The context on the tape cannot be read: {type(error).__name__}: {error}") from error


def _config(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: records.value_from_json(value) for name, value in values.items()}


def _app(chosen: Any, received: ReceivedMessage, folder: Path) -> tuple[Any, str]:
    """Return the ClientApp that the user chose, and its name in words. Nothing else is ever imported."""
    if chosen is None:
        raise ConfigError(_not_run(received, folder))
    if isinstance(chosen, str | Path):
        return rerun_app.client_app(Path(chosen)), str(Path(chosen))
    if not callable(chosen):
        raise ConfigError(f"app= takes the folder of an app, or a ClientApp; got {chosen!r}.")
    return chosen, type(chosen).__name__


def _not_run(received: ReceivedMessage, folder: Path) -> str:
    """Return why nothing was run: a tape may come from anyone, so it alone is not trusted to import code."""
    words = [received.run, "--round", str(received.round), "--node", received.node, "--tape", str(folder)]
    words += ["--phase", received.phase] if received.phase != TRAIN else []
    command = f"fedvitals replay {shlex.join(words)}"
    if received.app is None:
        return (
            "This tape does not say where its app is. Nothing was run: code is imported only from a folder that you "
            f"name. To run it:  {command} --app DIR  (in Python: app=DIR)."
        )
    inside = False
    with suppress(OSError, ValueError, RuntimeError):  # a path that is invalid
        inside = Path(received.app).resolve().is_relative_to(folder.resolve())
    warning = " That folder is part of the tape itself: whoever made the tape wrote the code in it." if inside else ""
    return (
        f"This tape says its app is in {received.app}.{warning} Nothing was run: code is imported only from a folder "
        f"that you name. To run it:  {command} --app {shlex.quote(received.app)}  (in Python: app=DIR)."
    )


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Use this many threads inside the block, because sums on several threads depend on their number."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(max(1, count), 1024))
    try:
        yield
    finally:
        torch.set_num_threads(before)


# -- the comparison ---------------------------------------------------------------------------------------------------


def _compare(site: ClientTapeFolder, received: ReceivedMessage, rerun: Rerun) -> None:
    if received.reply is None and received.error is None:
        return
    if rerun.reply is None and rerun.error is None:
        return  # the user quit the debugger
    error = rerun.error
    if rerun.reply is not None and rerun.reply.has_error():
        error = str(rerun.reply.error.reason)
    if (received.error is None) != (error is None) or (error is not None and _kind(error) != _kind(received.error)):
        outcomes = [received.error or "a reply", error or "a reply"]
        rerun.mismatch = Mismatch(rerun.round, "outcome", rerun.node, recorded=outcomes[0], replayed=outcomes[1])
    elif rerun.reply is not None and error is None:
        rerun.mismatch = _reply_mismatch(site, received, rerun)
    rerun.error = error
    rerun.holds = rerun.mismatch is None


def _kind(error: str | None) -> str:
    return (error or "").partition(":")[0]


def _reply_mismatch(site: ClientTapeFolder, received: ReceivedMessage, rerun: Rerun) -> Mismatch | None:
    assert rerun.reply is not None  # noqa: S101 - asked before
    content = {key: record for key, record in rerun.reply.content.items() if key != KEY}
    outline, tensors = records.outline_of(content, whole=True)
    _note_values(received.reply or {}, outline, rerun.notes)
    mark = state_digest_of(tensors)
    if received.mark is None or mark.digest == received.mark.digest:
        return None
    with suppress(StoreError):
        recorded = site.tensors(received.run, received.mark.digest)
        return _first_array_mismatch(rerun, recorded, tensors)
    names = [*tensors]
    for place, (was, now) in enumerate(zip(received.mark.layers, mark.layers, strict=False)):
        if was != now:
            norms = received.mark.norms[place], mark.norms[place]
            return Mismatch(rerun.round, "reply", rerun.node, layer=names[place], recorded=norms[0], replayed=norms[1])
    return Mismatch(rerun.round, "reply", rerun.node, recorded=received.mark.digest, replayed=mark.digest)


def _first_array_mismatch(rerun: Rerun, recorded: Tensors, replayed: Tensors) -> Mismatch:
    for name in dict.fromkeys((*recorded, *replayed)):
        before, after = recorded.get(name), replayed.get(name)
        if before is None or after is None or before.dtype != after.dtype or before.shape != after.shape:
            shown = [
                "not there" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}".removeprefix("torch.")
                for tensor in (before, after)
            ]
            return Mismatch(rerun.round, f"reply's array {name}", rerun.node, recorded=shown[0], replayed=shown[1])
        place = first_difference({name: before}, {name: after})
        if place is not None:
            return Mismatch(rerun.round, "reply", rerun.node).at(place)
    names = [", ".join(tensor) for tensor in (recorded, replayed)]
    what = "order of the reply's arrays"
    return Mismatch(rerun.round, what, rerun.node, recorded=names[0], replayed=names[1])


def _note_values(recorded: Mapping[str, Any], replayed: Mapping[str, Any], notes: list[str]) -> None:
    """Note values other than arrays that differ: they may differ legitimately (a time), so they prove nothing."""
    for key in dict.fromkeys((*recorded, *replayed)):
        before, after = recorded.get(key, {}).get("values", {}), replayed.get(key, {}).get("values", {})
        apart = [name for name in dict.fromkeys((*before, *after)) if before.get(name) != after.get(name)]
        for name in apart[:5]:
            was, now = (records.value_from_json(values.get(name)) for values in (before, after))
            notes.append(f"{key}/{name} was {was!r}, and is {now!r} now.")
