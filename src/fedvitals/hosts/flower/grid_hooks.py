# SPDX-License-Identifier: Apache-2.0
"""Hooks on the methods of a grid through which a server sends, receives, and lists nodes.

They are set on the instance, so that everything that holds the grid (a strategy, a custom loop, the threads of the
older API) works as before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from flwr.app import Message

MARK = "_fedvitals"  # on a grid or strategy: its observer; on a reply: that it was processed
HOOKED = ("push_messages", "pull_messages", "send_and_receive", "get_node_ids")
LATE_REPLIES_ASKED = 100  # limit on late answers that are pulled


class GridObserver(Protocol):
    """Notified of each message sent, of each reply, which it may replace, and of the connected nodes."""

    @property
    def unanswered(self) -> Mapping[str, Any]:
        """Return the messages that were given up on, by id."""
        ...

    def messages_sent(self, messages: Sequence[Message], ids: Sequence[str | None], sent: float) -> None: ...
    def reply_received(self, reply: Message, at: float) -> Message: ...
    def replies_read(self, replies: list[Message]) -> list[Message]: ...
    def replies_given_up(self, ids: set[str]) -> None: ...
    def late_reply_received(self, reply: Message, at: float) -> None: ...
    def nodes_listed(self, ids: Iterable[int]) -> None: ...


def hook_grid(grid: Any, observer: GridObserver) -> Callable[[], None]:
    """Hook a grid, and return the function that removes the hooks again."""
    push, pull, both = grid.push_messages, grid.pull_messages, grid.send_and_receive
    list_nodes = grid.get_node_ids
    calls = threading.local()  # ids sent within this thread's `send_and_receive`

    def push_messages(messages: Iterable[Message], *args: Any, **more: Any) -> Iterable[str]:
        outgoing, sent = [*messages], time.time()
        pushed_ids = [*push(outgoing, *args, **more)]
        ids = pushed_ids if len(pushed_ids) == len(outgoing) else [message.metadata.message_id for message in outgoing]
        inside: set[str] = getattr(calls, "ids", set())
        inside.update(key for key in ids if key)
        observer.messages_sent(outgoing, ids, sent)
        return pushed_ids

    def pull_messages(message_ids: Iterable[str], *args: Any, **more: Any) -> Iterable[Message]:
        ids = [*message_ids]
        _pull_late_replies(pull, observer, ids)  # first, because an answer to a newer request settles the older one
        return observer.replies_read(_read_once(pull(ids, *args, **more), observer))

    def send_and_receive(messages: Iterable[Message], *args: Any, **more: Any) -> Iterable[Message]:
        outgoing, sent = [*messages], time.time()
        calls.ids = set()
        replies = [*both(outgoing, *args, **more)]
        if not calls.ids:  # a grid with a sending method of its own
            keys = [message.metadata.message_id for message in outgoing]
            calls.ids = {key for key in keys if key}
            observer.messages_sent(outgoing, keys, sent)
        replies = _read_once(replies, observer)
        observer.replies_given_up(calls.ids - {reply.metadata.reply_to_message_id for reply in replies})
        return observer.replies_read(replies)

    def get_node_ids(*args: Any, **more: Any) -> Iterable[int]:
        listed = list_nodes(*args, **more)
        ids = listed if isinstance(listed, Collection) else [*listed]
        observer.nodes_listed(ids)
        return ids

    hooks = dict(zip(HOOKED, (push_messages, pull_messages, send_and_receive, get_node_ids), strict=True))
    # The app's own attributes on its grid are restored; the hook that waits for the first message is not.
    before = {name: own for name in HOOKED if (own := vars(grid).get(name)) is not None and not hasattr(own, MARK)}
    for name, hook in hooks.items():
        setattr(grid, name, hook)
    setattr(grid, MARK, observer)

    def take_off() -> None:
        for name in (*hooks, MARK):
            grid.__dict__.pop(name, None)
        vars(grid).update(before)

    return take_off


def _read_once(replies: Iterable[Message], observer: GridObserver) -> list[Message]:
    """Return the replies as the observer wants them.

    Each is read once, in the order of creation, however often it passes.
    """
    received = [*replies]
    instead: dict[int, Message] = {}
    for reply in sorted(received, key=lambda message: message.metadata.created_at):
        if MARK not in reply.__dict__:
            instead[id(reply)] = observer.reply_received(reply, time.time())
            instead[id(reply)].__dict__[MARK] = True
    return [instead.get(id(reply), reply) for reply in received]


def _pull_late_replies(
    pull: Callable[[list[str]], Iterable[Message]], observer: GridObserver, asked: Collection[str]
) -> None:
    """Pull replies to messages that the server has given up on.

    Nobody else will ask for them, and they say why they were late. Those that the app asks for itself (`asked`), as a
    loop without a barrier does, are left to the app.
    """
    owed = [key for key in observer.unanswered if key not in asked][:LATE_REPLIES_ASKED]
    if not owed:
        return
    with suppress(Exception):
        for reply in pull(owed):
            observer.late_reply_received(reply, time.time())


@contextmanager
def grid_hooked(grid: Any, observer: GridObserver) -> Iterator[None]:
    """Hook a grid inside the block; a grid that is already hooked stays unchanged."""
    if getattr(grid, MARK, None) is not None:
        yield
        return
    take_off = hook_grid(grid, observer)
    try:
        yield
    finally:
        take_off()
