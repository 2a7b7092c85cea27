# SPDX-License-Identifier: Apache-2.0
"""A grid in this process: what is pushed to a node is answered at once by a ClientApp, called as Flower calls it."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.serverapp import Grid


@contextlib.contextmanager
def flower_run(run_id: int = 7) -> Iterator[None]:
    """Inside, messages can be made: from some version on they belong to a process's run."""
    try:
        from flwr.supercore.task_identity import TaskIdentity
    except ImportError:  # the oldest versions know no such thing
        yield
        return
    before = {name: getattr(TaskIdentity, name) for name in ("_run_id", "_node_id", "_task_id")}
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run_id, 1, 1
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(TaskIdentity, name, value)


class InProcessGrid(Grid):
    """`on_reply(node, reply)` may change an answer, or lose it (None)."""

    def __init__(
        self,
        app: Any,
        nodes: Iterable[int],
        on_reply: Callable[[int, Message], Message | None] = lambda _, reply: reply,
    ) -> None:
        self._app, self.nodes, self._on_reply = app, [*nodes], on_reply
        self._replies: dict[str, Message] = {}
        self.asked: list[Message] = []

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any:
        return None

    def create_message(self, *_: Any, **__: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return [*self.nodes]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        names = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = str(uuid.uuid4())
            self.asked.append(message)
            names.append(message.metadata.message_id)
            node = message.metadata.dst_node_id
            context = Context(run_id=7, node_id=node, node_config={}, state=RecordDict(), run_config={})
            try:
                reply = self._app(message, context)
            except Exception as error:  # noqa: BLE001 - as Flower does
                reply = Message(Error(2, f"{type(error)}:<'{error}'>"), reply_to=message)
            changed = self._on_reply(node, reply)
            if changed is not None:
                self._replies[message.metadata.message_id] = changed
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._replies.pop(name) for name in message_ids if name in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))
