# SPDX-License-Identifier: Apache-2.0
"""Attaching with no line in the app: what `site/sitecustomize.py` leads the calls of an app's own objects to.

Does what a person would write: `client_mod()` first among the mods of each ClientApp, and `attach` to the strategy that
is started, else to the grid before the first message. Who attached a monitor himself keeps his, and only his.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

from flwr.serverapp.strategy import Strategy

from fedvitals.errors import MissingExtraError
from fedvitals.hosts.flower.attach import attach
from fedvitals.hosts.flower.client_mod import TRAIN, ClientMod, client_mod
from fedvitals.hosts.flower.environment import Settings
from fedvitals.hosts.flower.grid_hooks import MARK
from fedvitals.hosts.flower.reply_envelope import run_name
from fedvitals.monitor.monitor import Monitor

logger = logging.getLogger("fedvitals")
SENDING = ("send_and_receive", "push_messages")
UPDATES = 3  # of how many rounds all updates are kept, on the tape of an app without a line
HOOKED = (*SENDING, "pull_messages", MARK)


def client_app(
    original: Callable[..., None], app: Any, client_fn: Any = None, mods: Sequence[Any] | None = None, **more: Any
) -> None:
    """`ClientApp.__init__`, with our mod first."""
    original(app, client_fn, _with_ours(mods), **more)


def _with_ours(mods: Sequence[Any] | None) -> Sequence[Any] | None:
    given = [] if mods is None else [*mods]
    if any(isinstance(mod, ClientMod) for mod in given):
        return mods
    try:
        told = Settings.read(os.environ)
        own: dict[str, Any] = {"privacy": told.privacy, "tracebacks": bool(told.tracebacks), "tape": _folder(told)}
        ours = client_mod(probes=told.probes or "standard", **own)
    except Exception as error:  # noqa: BLE001 - the app runs, whatever happens to us
        _warn(error)
        return mods
    return [ours, *given]


def _folder(told: Settings) -> str | None:
    """Of this client's tape; without the extra that tapes need, the app is watched as if nobody had asked for one."""
    return None if _tape(told) is None else told.tape


def _tape(told: Settings) -> Any:
    if told.tape is None:
        return None
    try:
        from fedvitals.replay.tape.tape import Tape  # noqa: PLC0415 - an extra
    except MissingExtraError as error:
        _warn(error, "keeps no tape of")
        return None
    except ModuleNotFoundError as error:
        _warn(MissingExtraError(error.name or "torch", "replay", "A tape"), "keeps no tape of")
        return None
    return Tape(every=1, updates=UPDATES, durable=True)


def server_app(original: Callable[..., None], app: Any, grid: Any, context: Any, *more: Any, **others: Any) -> None:
    """`ServerApp.__call__`, with a monitor that is there when it is needed, and closed at the end."""
    visit = Visit(grid, context)
    server_fn = visit.guarded(lambda: visit.begin(app))
    token = _VISIT.set(visit)
    try:
        original(app, grid, context, *more, **others)
    except BaseException as error:
        visit.guarded(functools.partial(visit.failed, error))
        raise
    finally:
        _VISIT.reset(token)
        if server_fn is not None:
            app._server_fn = server_fn  # noqa: SLF001 - as it was
        visit.guarded(visit.end)


class Visit:
    """One run of a ServerApp.

    Each strategy that it starts, and each loop of its own, is a run of ours with rounds from 1 on. A monitor is made
    when it is needed: an app that has its own has no other.
    """

    def __init__(self, grid: Any, context: Any) -> None:
        self._grid, self._context = grid, context
        self._monitors: list[Monitor] = []
        self._told: BaseException | None = None
        self._over = False
        self._lock = threading.Lock()  # the older API sends from many threads

    def begin(self, app: Any) -> Callable[..., Any] | None:
        """Wait wherever the app may come by. Gives the function that we stand before, if there is one."""
        self._wait()
        for kind in (Strategy, *_below(Strategy)):
            _lead_start(kind)
        self.attach_legacy(app)
        server_fn: Callable[..., Any] | None = getattr(app, "_server_fn", None)
        if server_fn is not None:  # the older API has no other seam
            app._server_fn = functools.partial(self.of_components, server_fn)  # noqa: SLF001
        return server_fn

    def guarded(self, work: Callable[[], Any]) -> Any:
        """The app runs, whatever happens to us."""
        try:
            return work()
        except Exception as error:  # noqa: BLE001
            self._over = True  # it would happen again with each message
            _warn(error)
            return None

    def _attach(self, what: Any) -> bool:
        """Whether it is watched from now on, and was not before."""
        with self._lock:
            if what is None or self._over or getattr(what, MARK, None) is not None:
                return False
            return self.guarded(lambda: attach(what, self._new_monitor())) is not None

    def _new_monitor(self) -> Monitor:
        told = Settings.read(os.environ)
        if self._monitors:
            self._monitors[-1].close()
        number = len(self._monitors) + 1
        monitor = Monitor(
            told.store or "runs.db",
            run=told.run or "flower",
            id=run_name(self._context.run_id) + (f"-{number}" if number > 1 else ""),
            probes=told.probes or "standard",
            privacy=told.privacy,
            tracebacks=told.tracebacks,
            config={"app": dict(self._context.run_config)},
            tape=_tape(told),
        )
        self._monitors.append(monitor)
        return monitor

    # -- loops of the app's own ---------------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Attach to the grid when somebody is asked to train, unless it is watched by then."""
        for name in SENDING:
            send = getattr(self._grid, name)
            if not hasattr(send, MARK):
                waiting = functools.partial(self._send, name, send)
                setattr(waiting, MARK, self)
                setattr(self._grid, name, waiting)

    def _send(self, name: str, send: Callable[..., Any], messages: Iterable[Any], *args: Any, **more: Any) -> Any:
        outgoing = [*messages]
        if any(message.metadata.message_type.partition(".")[0] == TRAIN for message in outgoing):
            send = getattr(self._grid, name) if self._attach(self._grid) else send  # the hooks come back here
        return send(outgoing, *args, **more)

    def _leave_grid(self) -> None:
        """A loop is over, with its last round: a strategy has hooks of its own."""
        journal = vars(self._grid).get(MARK)
        if journal is not None and journal.monitor in self._monitors:
            for name in HOOKED:
                vars(self._grid).pop(name, None)
            journal.close()

    # -- strategies ---------------------------------------------------------------------------------------------------

    def start(self, strategy: Any, start: Callable[..., Any], *args: Any, **more: Any) -> Any:
        """A strategy is started: attached to first, if nobody is."""
        if getattr(strategy, MARK, None) is None:
            self.guarded(self._leave_grid)
            if self._attach(strategy):
                start = strategy.start  # the hook, which comes back here
        try:
            return start(*args, **more)
        except BaseException as error:
            self._told = error  # the journal has it
            raise
        finally:
            self.guarded(self._wait)  # hooks that are taken off take ours with them

    def of_components(self, server_fn: Callable[..., Any], *args: Any, **more: Any) -> Any:
        """The older API: a function makes the server's parts, its strategy among them."""
        components = server_fn(*args, **more)
        self.guarded(lambda: self.attach_legacy(components))
        return components

    def attach_legacy(self, parts: Any) -> None:
        server = getattr(parts, "server", None) or getattr(parts, "_server", None)
        for holder in (parts, server):
            self._attach(getattr(holder, "strategy", None) or getattr(holder, "_strategy", None))

    # -- the end ------------------------------------------------------------------------------------------------------

    def failed(self, error: BaseException) -> None:
        if self._monitors and error is not self._told:
            data = {"exception": type(error).__name__}
            text = f"The ServerApp ended: {type(error).__name__}: {error}"[:1000]
            self._monitors[-1].host.event("error", "round.failed", text, data=data)

    def end(self) -> None:
        self._over = True
        self._leave_grid()
        for name in SENDING:
            if getattr(vars(self._grid).get(name), MARK, None) is self:
                delattr(self._grid, name)
        for monitor in self._monitors:
            monitor.close()


_VISIT: ContextVar[Visit | None] = ContextVar("fedvitals_flower_visit", default=None)


def _lead_start(kind: type) -> None:
    """A strategy is attached to when it is started; each class may have a `start` of its own."""
    original = vars(kind).get("start")
    if not callable(original) or hasattr(original, MARK):
        return

    @functools.wraps(original)
    def start(self: Any, *args: Any, **more: Any) -> Any:
        visit = _VISIT.get()
        begin = functools.partial(original, self)
        return begin(*args, **more) if visit is None else visit.start(self, begin, *args, **more)

    setattr(start, MARK, True)
    kind.start = start  # type: ignore[attr-defined]


def _below(kind: type) -> Iterator[type]:
    children: list[type] = kind.__subclasses__()
    for child in children:
        yield child
        yield from _below(child)


def _warn(error: Exception, does: str = "does not watch") -> None:
    logger.warning("fedvitals %s this app (%s: %s); it runs as ever.", does, type(error).__name__, error)
