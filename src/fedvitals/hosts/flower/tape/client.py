# SPDX-License-Identifier: Apache-2.0
"""The client's own tape: what its ClientApp was handed, message by message, so that it can be run again at its site.

    app = ClientApp(mods=[fv.flower.client_mod(tape="/var/lib/fedvitals/tape")])

It holds the whole message, the context and the generators' states before, and the reply: the most private things there
are (level 4). Nothing of it ever leaves the folder. Files are written by a thread while the handler works.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message

from fedvitals.errors import ConfigError
from fedvitals.hosts.flower.protection import innermost
from fedvitals.hosts.flower.reply_envelope import KEY, node_name, run_name, told_round
from fedvitals.hosts.flower.rerun.app import PROJECT, is_app
from fedvitals.hosts.flower.tape import records
from fedvitals.hosts.flower.tape.entries import LONGEST, Heard, Site, place_of
from fedvitals.loop_tape import random_states
from fedvitals.replay.tape.digests import Tensors, state_digest_of
from fedvitals.replay.tape.tape import Tape, machine_description

logger = logging.getLogger("fedvitals")
AT_ONCE = 3  # messages of one process that may wait to be written; the next one waits for the first of them
UP = 6  # folders above a handler's file in which the app is looked for


def client_tape(said: Any) -> ClientTape | None:
    """Of what a person says: a folder, or a `fv.Tape(folder=..., budget=...)`."""
    if said is None:
        return None
    if isinstance(said, str | Path):
        said = Tape(folder=said)
    if not isinstance(said, Tape):
        raise ConfigError(f"client_mod(tape=...) takes a folder, or a fv.Tape(folder=..., budget=...); got {said!r}.")
    if said.chosen is None:
        raise ConfigError("A client has no store that its tape could lie beside: fv.Tape(folder=...) says where.")
    return ClientTape(said.chosen, said.budget)


_WRITING: list[threading.Thread] = []


def _started(*work: Any) -> threading.Thread:
    settle(AT_ONCE)
    thread = threading.Thread(target=work[0], args=work[1:], name="fedvitals-site")
    thread.start()
    _WRITING.append(thread)
    return thread


def settle(left: int = 0) -> None:
    """Wait until this process has written what it was handed, but for so many messages."""
    _WRITING[:] = [thread for thread in _WRITING if thread.is_alive()]
    for thread in [*_WRITING][: len(_WRITING) - left if left else None]:
        thread.join()


class ClientTape:
    """In one folder, for all clients of a machine: processes come and go, and may write at once."""

    def __init__(self, folder: Path, budget: int) -> None:
        self.site = Site(folder.absolute(), budget)
        self._told = False

    def begin(self, message: Message, context: Context, call_next: Callable[..., Any]) -> Recording | None:
        """Before the handler: all is read now, and written meanwhile."""
        found: Recording | None = self.guarded(lambda: Recording(self, message, context, call_next))
        return found

    def guarded(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except Exception as error:  # noqa: BLE001 - training goes on, whatever happens to us
            if not self._told:
                self._told = True
                logger.warning(
                    "fedvitals: this client's tape lacks something (%s: %s); training goes on.",
                    type(error).__name__,
                    error,
                )
            return None


class Recording:
    """One message. It is on the tape before its handler is done: a client that is killed can be run again, too."""

    def __init__(self, tape: ClientTape, message: Message, context: Context, call_next: Callable[..., Any]) -> None:
        self._tape = tape
        content, sent = records.outlined(message.content, whole=True)
        state, held = records.outlined(context.state, whole=True)
        metadata = message.metadata
        handler = innermost(call_next)
        self._heard = Heard(
            run=run_name(context.run_id),
            node=node_name(context.node_id),
            round=told_round(message),
            phase=metadata.message_type,
            at=time.time(),
            metadata={name: getattr(metadata, name) for name in _METADATA},
            content=content,
            state=state,
            context={
                "run_id": context.run_id,
                "node_id": context.node_id,
                "node_config": _plain(context.node_config),
                "run_config": _plain(context.run_config),
            },
            rng=random_states(),
            threads=torch.get_num_threads(),
            machine=machine_description(),
            app=app_of(handler),
            handler=place_of(handler),
        )
        self._thread = _started(self._guarded, self._write, sent, held)

    def end(self, reply: Any, error: BaseException | None) -> None:
        """After the handler; before the telemetry that rides home is added to the reply."""
        self._guarded(self._end, reply, error)

    def _end(self, reply: Any, error: BaseException | None) -> None:
        if error is not None:
            self._heard.error = f"{type(error).__name__}: {error}"[:LONGEST]
            self._finish({})
        elif isinstance(reply, Message) and reply.has_content():
            content = {key: record for key, record in reply.content.items() if key != KEY}
            self._heard.reply, arrays = records.outlined(content, whole=True)
            self._finish(arrays)
        elif isinstance(reply, Message) and reply.has_error():
            self._heard.error = str(reply.error.reason)[:LONGEST]
            self._finish({})

    def _finish(self, arrays: Tensors) -> None:
        """The reply goes its way meanwhile; a process that ends waits for its threads."""
        self._thread = _started(self._guarded, self._close, self._thread, arrays)

    def _guarded(self, work: Callable[..., Any], *args: Any) -> None:
        self._tape.guarded(lambda: work(*args))

    # -- on the threads -----------------------------------------------------------------------------------------------

    def _write(self, sent: Tensors, held: Tensors) -> None:
        site, heard = self._tape.site, self._heard
        with site.writing(heard.run):
            heard.sent, heard.held = (site.put(heard.run, tensors) for tensors in (sent, held))
            site.write(heard)

    def _close(self, before: threading.Thread, arrays: Tensors) -> None:
        before.join()
        site, heard = self._tape.site, self._heard
        heard.seconds = time.time() - heard.at
        heard.mark = state_digest_of(arrays) if heard.reply is not None else None
        with site.writing(heard.run):
            if arrays:
                site.put(heard.run, arrays)
            site.write(heard)
        site.thin()


_METADATA = (
    "run_id", "message_id", "src_node_id", "dst_node_id", "reply_to_message_id", "group_id", "created_at", "ttl",
    "message_type",
)  # fmt: skip


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    return {str(name): records.plain(value) for name, value in config.items()}


def app_of(handler: Any) -> str | None:
    """The folder of the app that a handler belongs to: the nearest one above its file that is one."""
    file = getattr(getattr(handler, "__code__", None), "co_filename", None)
    return None if file is None else _app_above(file)


@functools.lru_cache(maxsize=64)
def _app_above(file: str) -> str | None:
    with suppress(OSError):
        for folder in [*Path(file).resolve().parents][:UP]:
            if (folder / PROJECT).exists() and is_app(folder):
                return str(folder)
    return None
