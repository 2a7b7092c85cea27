# SPDX-License-Identifier: Apache-2.0
"""The client's own tape: the input of its ClientApp, message by message, so that it can be run again at its site.

    app = ClientApp(mods=[fv.flower.client_mod(tape="/var/lib/fedvitals/tape")])

It holds the whole message, the context, the random generators' previous states, and the reply: the most private data
(level 4). Nothing of it ever leaves the folder. Files are written by a thread while the handler works.
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
from fedvitals.hosts.flower.reply_envelope import KEY, node_name, round_of_message, run_name
from fedvitals.hosts.flower.rerun.app import PROJECT, is_app
from fedvitals.hosts.flower.tape import records
from fedvitals.hosts.flower.tape.entries import LONGEST, METADATA, ClientTapeFolder, ReceivedMessage, source_location
from fedvitals.loop_tape import random_states
from fedvitals.replay.tape.digests import Tensors, state_digest_of
from fedvitals.replay.tape.tape import Tape, machine_description

logger = logging.getLogger("fedvitals")
WRITERS_AT_ONCE = 3  # messages of one process waiting to be written; the next one waits for the first of them
FOLDERS_ABOVE = 6  # folders above a handler's file in which the app is searched for


def client_tape(tape: Any) -> ClientTape | None:
    """Return the tape of a folder, or of a `fv.Tape(folder=..., budget=...)`; None for None."""
    if tape is None:
        return None
    if isinstance(tape, str | Path):
        tape = Tape(folder=tape)
    if not isinstance(tape, Tape):
        raise ConfigError(f"client_mod(tape=...) takes a folder, or a fv.Tape(folder=..., budget=...); got {tape!r}.")
    if tape.chosen is None:
        raise ConfigError("A client has no store that its tape could lie beside: fv.Tape(folder=...) says where.")
    return ClientTape(tape.chosen, tape.budget)


_WRITING: list[threading.Thread] = []


def _start_writer(*work: Any) -> threading.Thread:
    wait_for_writers(WRITERS_AT_ONCE)
    thread = threading.Thread(target=work[0], args=work[1:], name="fedvitals-site")
    thread.start()
    _WRITING.append(thread)
    return thread


def wait_for_writers(left: int = 0) -> None:
    """Wait until all but `left` of this process's messages have been written."""
    _WRITING[:] = [thread for thread in _WRITING if thread.is_alive()]
    for thread in [*_WRITING][: len(_WRITING) - left if left else None]:
        thread.join()


class ClientTape:
    """The tape of all clients of a machine, in one folder: processes come and go, and may write at once."""

    def __init__(self, folder: Path, budget: int) -> None:
        self.site = ClientTapeFolder(folder.absolute(), budget)
        self._told = False

    def begin(self, message: Message, context: Context, call_next: Callable[..., Any]) -> MessageRecording | None:
        """Start recording a message before its handler runs; None if that failed."""
        recording: MessageRecording | None = self.guarded(lambda: MessageRecording(self, message, context, call_next))
        return recording

    def guarded(self, work: Callable[[], Any]) -> Any:
        """Return the result of our own work; a failure is logged once, and training goes on."""
        try:
            return work()
        except Exception as error:  # noqa: BLE001 - training goes on, whatever happens to us
            if not self._told:
                self._told = True
                words = "fedvitals: this client's tape lacks something (%s: %s); training goes on."
                logger.warning(words, type(error).__name__, error)
            return None


class MessageRecording:
    """The recording of one message.

    It is on the tape before its handler is done, so that a killed client can also be run again.
    """

    def __init__(self, tape: ClientTape, message: Message, context: Context, call_next: Callable[..., Any]) -> None:
        self._tape = tape
        content, sent = records.outline_of(message.content, whole=True)
        state, held = records.outline_of(context.state, whole=True)
        metadata = message.metadata
        handler = innermost(call_next)
        self._received = ReceivedMessage(
            run=run_name(context.run_id),
            node=node_name(context.node_id),
            round=round_of_message(message),
            phase=metadata.message_type,
            at=time.time(),
            metadata={name: getattr(metadata, name) for name in METADATA},
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
            handler=source_location(handler),
        )
        self._thread = _start_writer(self._guarded, self._write, sent, held)

    def end(self, reply: Any, error: BaseException | None) -> None:
        """Record the handler's result, before telemetry is added to the reply."""
        self._guarded(self._end, reply, error)

    def _end(self, reply: Any, error: BaseException | None) -> None:
        """Write the rest on a thread while the reply is sent; a process that ends waits for its threads."""
        arrays: Tensors = {}
        if error is not None:
            self._received.error = f"{type(error).__name__}: {error}"[:LONGEST]
        elif isinstance(reply, Message) and reply.has_content():
            content = {key: record for key, record in reply.content.items() if key != KEY}
            self._received.reply, arrays = records.outline_of(content, whole=True)
        elif isinstance(reply, Message) and reply.has_error():
            self._received.error = str(reply.error.reason)[:LONGEST]
        else:
            return
        self._thread = _start_writer(self._guarded, self._close, self._thread, arrays)

    def _guarded(self, work: Callable[..., Any], *args: Any) -> None:
        self._tape.guarded(lambda: work(*args))

    # -- on the threads -----------------------------------------------------------------------------------------------

    def _write(self, sent: Tensors, held: Tensors) -> None:
        site, received = self._tape.site, self._received
        with site.writing(received.run):
            received.sent, received.held = (site.put(received.run, tensors) for tensors in (sent, held))
            site.write(received)

    def _close(self, before: threading.Thread, arrays: Tensors) -> None:
        before.join()
        site, received = self._tape.site, self._received
        received.seconds = time.time() - received.at
        received.mark = state_digest_of(arrays) if received.reply is not None else None
        with site.writing(received.run):
            if arrays:
                site.put(received.run, arrays)
            site.write(received)
        site.thin()


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    return {str(name): records.json_value(value) for name, value in config.items()}


def app_of(handler: Any) -> str | None:
    """Return the folder of the app that a handler belongs to; None if there is none.

    It is the nearest folder above its file that is an app.
    """
    file = getattr(getattr(handler, "__code__", None), "co_filename", None)
    return None if file is None else _app_above(file)


@functools.lru_cache(maxsize=64)
def _app_above(file: str) -> str | None:
    with suppress(OSError):
        for folder in [*Path(file).resolve().parents][:FOLDERS_ABOVE]:
            if (folder / PROJECT).exists() and is_app(folder):
                return str(folder)
    return None
