# SPDX-License-Identifier: Apache-2.0
"""The post office: everything that a server sends and gets passes through three methods of its grid.

They are hooked on the instance, so whoever holds the grid, a strategy, a loop of one's own or the threads of the older
API, goes on as before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from flwr.app import Message

MARK = "_fedvitals"  # on a grid, a strategy: who watches it; on a reply: that it was seen
AT_ONCE = 100  # late answers that are asked after


class Clerk(Protocol):
    """Told of each message that leaves and of each reply, which it may put another in the place of."""

    @property
    def owed(self) -> Mapping[str, Any]:
        """By the ids of messages that were given up."""
        ...

    def asked(self, messages: Sequence[Message], ids: Sequence[str | None], sent: float) -> None: ...
    def returned(self, reply: Message, at: float) -> Message: ...
    def given_up(self, ids: set[str]) -> None: ...
    def came_late(self, reply: Message, at: float) -> None: ...


def watch_post(grid: Any, clerk: Clerk) -> Callable[[], None]:
    """Hook a grid; gives what takes the hooks off again."""
    push, pull, both = grid.push_messages, grid.pull_messages, grid.send_and_receive
    calls = threading.local()  # ids that went out inside of the `send_and_receive` of this thread

    def push_messages(messages: Iterable[Message], *args: Any, **more: Any) -> Iterable[str]:
        outgoing, sent = [*messages], time.time()
        given = [*push(outgoing, *args, **more)]
        ids = given if len(given) == len(outgoing) else [message.metadata.message_id for message in outgoing]
        inside: set[str] = getattr(calls, "ids", set())
        inside.update(key for key in ids if key)
        clerk.asked(outgoing, ids, sent)
        return given

    def pull_messages(message_ids: Iterable[str], *args: Any, **more: Any) -> Iterable[Message]:
        _ask_after(pull, clerk)  # first: who answers the newer question owes nothing any more
        return _handed_over(pull(message_ids, *args, **more), clerk)

    def send_and_receive(messages: Iterable[Message], *args: Any, **more: Any) -> Iterable[Message]:
        outgoing, sent = [*messages], time.time()
        calls.ids = set()
        replies = [*both(outgoing, *args, **more)]
        if not calls.ids:  # a grid that sends by a way of its own
            keys = [message.metadata.message_id for message in outgoing]
            calls.ids = {key for key in keys if key}
            clerk.asked(outgoing, keys, sent)
        replies = _handed_over(replies, clerk)
        clerk.given_up(calls.ids - {reply.metadata.reply_to_message_id for reply in replies})
        return replies

    hooks = {"push_messages": push_messages, "pull_messages": pull_messages, "send_and_receive": send_and_receive}
    for name, hook in hooks.items():
        setattr(grid, name, hook)
    setattr(grid, MARK, clerk)

    def take_off() -> None:
        for name in (*hooks, MARK):
            grid.__dict__.pop(name, None)

    return take_off


def _handed_over(replies: Iterable[Message], clerk: Clerk) -> list[Message]:
    """Each once, however often it passes: read in the order of their making."""
    came = [*replies]
    instead: dict[int, Message] = {}
    for reply in sorted(came, key=lambda one: one.metadata.created_at):
        if MARK not in reply.__dict__:
            instead[id(reply)] = clerk.returned(reply, time.time())
            instead[id(reply)].__dict__[MARK] = True
    return [instead.get(id(reply), reply) for reply in came]


def _ask_after(pull: Callable[[list[str]], Iterable[Message]], clerk: Clerk) -> None:
    """Answers to messages that the server has given up: nobody else will ever ask for them, and they say why."""
    owed = [*clerk.owed][:AT_ONCE]
    if not owed:
        return
    with suppress(Exception):
        for reply in pull(owed):
            clerk.came_late(reply, time.time())


@contextmanager
def watched_post(grid: Any, clerk: Clerk) -> Iterator[None]:
    """Hooked for a while; a grid that is hooked already stays as it is."""
    if getattr(grid, MARK, None) is not None:
        yield
        return
    take_off = watch_post(grid, clerk)
    try:
        yield
    finally:
        take_off()
