# SPDX-License-Identifier: Apache-2.0
"""A client's message run again at its site, through the user's own ClientApp, with proof or under a debugger.

    fedvitals replay flower-7 --round 12 --node 4711 --tape /var/lib/fedvitals/tape --app . --pdb

Message, context and generators are as they were; the reply must have the digest that was recorded. What an app keeps
elsewhere (files, variables of a module in a process that lived on) is the app's own.
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
from fedvitals.hosts.flower.replaying import generators, replaying
from fedvitals.hosts.flower.reply_envelope import KEY
from fedvitals.hosts.flower.rerun import app as rerun_app
from fedvitals.hosts.flower.rerun.debugger import called, own_frames, post_mortem
from fedvitals.hosts.flower.rerun.server import Reaggregation, replay_aggregation
from fedvitals.hosts.flower.tape import records
from fedvitals.hosts.flower.tape.client import settle
from fedvitals.hosts.flower.tape.entries import Heard, Site, find_node, find_run
from fedvitals.replay.player.comparison import Mismatch
from fedvitals.replay.tape.digests import Tensors, first_difference, state_digest_of
from fedvitals.replay.tape.tape import machine_description

__all__ = ["Reaggregation", "Rerun", "replay_aggregation", "rerun_client"]
TRAIN = "train"


@dataclass
class Rerun:
    """What came of it. `holds`: the reply has the recorded bits; None: nothing of the reply was recorded."""

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
    error: str | None = None  # of this time
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

    `folder`: where clients keep their tapes. `app`: the app's folder, or a ClientApp. It has to be named: a tape may
    come from somebody else, and the folder that it mentions is never imported unasked.
    `debugger`: stops under pdb at the first line of the handler; after an exception, where it was raised.
    """
    settle()
    site = Site(Path(folder))
    name = find_run(site, run)
    heard = site.read(name, find_node(site, name, node), round_index, phase)
    client_app, where = _app(app, heard, site.folder)
    message, context = _message(site, heard), _context(site, heard)
    found = Rerun(name, heard.node, round_index, phase, where, heard.handler, recorded_error=heard.error)
    found.notes = _notes(heard)
    began = time.perf_counter()
    with replaying(), _threads(heard.threads), generators(heard.rng):
        try:
            found.reply = called(client_app, message, context, debugger=debugger)
        except bdb.BdbQuit:
            found.notes.append("The debugger was left before the handler was done.")
        except Exception as error:  # noqa: BLE001 - of the user's code
            found.error = f"{type(error).__name__}: {error}"
            found.traceback = "".join(traceback.format_exception(type(error), error, own_frames(error)))
            if debugger:
                post_mortem(error)
    found.seconds = time.perf_counter() - began
    _compare(site, heard, found)
    return found


# -- what it was ------------------------------------------------------------------------------------------------------


def _message(site: Site, heard: Heard) -> Message:
    content = records.content_of(heard.content, site.tensors(heard.run, heard.sent))
    told = heard.metadata
    try:
        metadata = Metadata(
            run_id=int(told["run_id"]),
            message_id=str(told["message_id"]),
            src_node_id=int(told["src_node_id"]),
            dst_node_id=int(told["dst_node_id"]),
            reply_to_message_id=str(told["reply_to_message_id"]),
            group_id=str(told["group_id"]),
            created_at=float(told["created_at"]),
            ttl=float(told["ttl"]),
            message_type=str(told["message_type"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(f"The message on the tape cannot be read: {type(error).__name__}: {error}") from error
    return Message(metadata=metadata, content=content)  # type: ignore[call-overload,no-any-return]


def _context(site: Site, heard: Heard) -> Context:
    state = records.content_of(heard.state, site.tensors(heard.run, heard.held))
    try:
        return Context(
            run_id=int(heard.context["run_id"]),
            node_id=int(heard.context["node_id"]),
            node_config=_config(heard.context["node_config"]),
            state=state,
            run_config=_config(heard.context["run_config"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(f"The context on the tape cannot be read: {type(error).__name__}: {error}") from error


def _config(told: Mapping[str, Any]) -> dict[str, Any]:
    return {name: records.given_back(value) for name, value in told.items()}


def _app(chosen: Any, heard: Heard, folder: Path) -> tuple[Any, str]:
    """The ClientApp that the user chose, and how to call it in words. Nothing else is ever imported."""
    if chosen is None:
        raise ConfigError(_not_run(heard, folder))
    if isinstance(chosen, str | Path):
        return rerun_app.client_app(Path(chosen)), str(Path(chosen))
    if not callable(chosen):
        raise ConfigError(f"app= takes the folder of an app, or a ClientApp; got {chosen!r}.")
    return chosen, type(chosen).__name__


def _not_run(heard: Heard, folder: Path) -> str:
    """Why nothing was run: a tape may come from anybody, so its word is not enough to import code."""
    words = [heard.run, "--round", str(heard.round), "--node", heard.node, "--tape", str(folder)]
    words += ["--phase", heard.phase] if heard.phase != TRAIN else []
    command = f"fedvitals replay {shlex.join(words)}"
    if heard.app is None:
        return (
            "This tape does not say where its app is. Nothing was run: code is imported only from a folder that you "
            f"name. To run it:  {command} --app DIR  (in Python: app=DIR)."
        )
    inside = False
    with suppress(OSError, ValueError, RuntimeError):  # a path that cannot be one
        inside = Path(heard.app).resolve().is_relative_to(folder.resolve())
    warning = " That folder is part of the tape itself: whoever made the tape wrote the code in it." if inside else ""
    return (
        f"This tape says its app is in {heard.app}.{warning} Nothing was run: code is imported only from a folder that "
        f"you name. To run it:  {command} --app {shlex.quote(heard.app)}  (in Python: app=DIR)."
    )


def _notes(heard: Heard) -> list[str]:
    here = machine_description()
    other = [f"{name} {was} (here {here.get(name)})" for name, was in heard.machine.items() if here.get(name) != was]
    return [f"It was recorded with {', '.join(other)}: bits may differ."] if other else []


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Sums on several threads come in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(max(1, count), 1024))
    try:
        yield
    finally:
        torch.set_num_threads(before)


# -- the comparison ---------------------------------------------------------------------------------------------------


def _compare(site: Site, heard: Heard, found: Rerun) -> None:
    if heard.reply is None and heard.error is None:
        return
    if found.reply is None and found.error is None:
        return  # the debugger was left
    error = found.error
    if found.reply is not None and found.reply.has_error():
        error = str(found.reply.error.reason)
    if (heard.error is None) != (error is None) or (error is not None and _kind(error) != _kind(heard.error)):
        outcomes = [heard.error or "a reply", error or "a reply"]
        found.mismatch = Mismatch(found.round, "outcome", found.node, recorded=outcomes[0], replayed=outcomes[1])
    elif found.reply is not None and error is None:
        found.mismatch = _arrays(site, heard, found)
    found.error = error
    found.holds = found.mismatch is None


def _kind(error: str | None) -> str:
    return (error or "").partition(":")[0]


def _arrays(site: Site, heard: Heard, found: Rerun) -> Mismatch | None:
    assert found.reply is not None  # noqa: S101 - asked before
    content = {key: record for key, record in found.reply.content.items() if key != KEY}
    outline, tensors = records.outlined(content, whole=True)
    _note_values(heard.reply or {}, outline, found.notes)
    mark = state_digest_of(tensors)
    if heard.mark is None or mark.digest == heard.mark.digest:
        return None
    with suppress(StoreError):
        recorded = site.tensors(heard.run, heard.mark.digest)
        return _first(found, recorded, tensors)
    names = [*tensors]
    for place, (was, now) in enumerate(zip(heard.mark.layers, mark.layers, strict=False)):
        if was != now:
            norms = heard.mark.norms[place], mark.norms[place]
            return Mismatch(found.round, "reply", found.node, layer=names[place], recorded=norms[0], replayed=norms[1])
    return Mismatch(found.round, "reply", found.node, recorded=heard.mark.digest, replayed=mark.digest)


def _first(found: Rerun, recorded: Tensors, replayed: Tensors) -> Mismatch:
    for name in dict.fromkeys((*recorded, *replayed)):
        before, after = recorded.get(name), replayed.get(name)
        if before is None or after is None or before.dtype != after.dtype or before.shape != after.shape:
            shown = [
                "not there" if one is None else f"{one.dtype} {list(one.shape)}".removeprefix("torch.")
                for one in (before, after)
            ]
            return Mismatch(found.round, f"reply's array {name}", found.node, recorded=shown[0], replayed=shown[1])
        place = first_difference({name: before}, {name: after})
        if place is not None:
            return Mismatch(
                found.round, "reply", found.node, None, name, place.recorded, place.replayed, index=place.index
            )
    names = [", ".join(one) for one in (recorded, replayed)]
    what = "order of the reply's arrays"
    return Mismatch(found.round, what, found.node, recorded=names[0], replayed=names[1])


def _note_values(recorded: Mapping[str, Any], replayed: Mapping[str, Any], notes: list[str]) -> None:
    """What is no array may differ in good faith (a time): it is told, and proves nothing."""
    for key in dict.fromkeys((*recorded, *replayed)):
        before, after = recorded.get(key, {}).get("values", {}), replayed.get(key, {}).get("values", {})
        apart = [name for name in dict.fromkeys((*before, *after)) if before.get(name) != after.get(name)]
        for name in apart[:5]:
            was, now = (records.given_back(values.get(name)) for values in (before, after))
            notes.append(f"{key}/{name} was {was!r}, and is {now!r} now.")
