# SPDX-License-Identifier: Apache-2.0
"""Call a ClientApp under pdb, stopping at the first line of the user's own handler."""

from __future__ import annotations

import inspect
import pdb  # noqa: T100 - what a person asked for
import sys
from types import CodeType, FrameType
from typing import Any

from flwr.app import Context, Message

from fedvitals.hosts.flower.protection import innermost

OURS = "fedvitals.hosts.flower."


def call_app(app: Any, message: Message, context: Context, *, debugger: bool) -> Message:
    """Return the app's reply to a message, optionally under the debugger."""
    code = _handler(app, message) if debugger else None
    before = sys.gettrace()
    if code is not None:
        sys.settrace(_stopping_at(code))
    elif debugger:
        pdb.set_trace()  # noqa: T100 - no handler of the user's own is known: at least here
    try:
        reply: Message = app(message, context)
    finally:
        if debugger:
            sys.settrace(before)
    return reply


def post_mortem(error: BaseException) -> None:
    """Open the debugger where an error was raised."""
    pdb.post_mortem(own_frames(error))


def own_frames(error: BaseException) -> Any:
    """Return the traceback from the app onwards, without our own leading frames."""
    place = error.__traceback__
    while place is not None and str(place.tb_frame.f_globals.get("__name__")).startswith(OURS):
        place = place.tb_next
    return place or error.__traceback__


def _handler(app: Any, message: Message) -> CodeType | None:
    """Return the code of the user's function that gets the message; for a NumPyClient, that of its `client_fn`."""
    category, _, action = message.metadata.message_type.partition(".")
    functions = getattr(app, "_registered_funcs", {})
    function = functions.get(f"{category}.{action or 'default'}", functions.get(message.metadata.message_type))
    function = innermost(function if function is not None else getattr(app, "_call", None))
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    return code if isinstance(code, CodeType) else None


def _stopping_at(code: CodeType) -> Any:
    """Return a trace function that does nothing until that code is entered, and then starts pdb."""

    def watch(frame: FrameType, event: str, _: Any) -> Any:
        if event != "call" or frame.f_code is not code:
            return None
        session = pdb.Pdb(nosigint=True)
        session.set_trace(frame)
        return session.trace_dispatch

    return watch
