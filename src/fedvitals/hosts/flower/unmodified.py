# SPDX-License-Identifier: Apache-2.0
"""Watch an app without changing its code: the handlers to which `hosts/site/` redirects calls of Flower's classes.

They do what a user would write: `client_mod()` first among the mods of each ClientApp, and `attach` to the strategy
that is started, or else to the grid before the first message. An app that attaches its own monitor keeps it, and gets
no other.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from typing import Any

from flwr.serverapp.strategy import Strategy

from fedvitals.errors import MissingExtraError, text_of
from fedvitals.hosts.flower.attach import attach
from fedvitals.hosts.flower.client_mod import TRAIN, ClientMod, client_mod
from fedvitals.hosts.flower.grid_hooks import HOOKED, MARK
from fedvitals.hosts.flower.reply_envelope import run_name
from fedvitals.hosts.flower.rerun.app import with_subclasses
from fedvitals.hosts.watch_settings import WatchSettings
from fedvitals.monitor.monitor import Monitor

logger = logging.getLogger("fedvitals")
SENDING = ("send_and_receive", "push_messages")
UPDATES = 3  # number of rounds whose updates are all kept, on the tape of an unchanged app


def client_app(
    original: Callable[..., None], app: Any, client_fn: Any = None, mods: Sequence[Any] | None = None, **more: Any
) -> None:
    """Call `ClientApp.__init__` with our mod first."""
    original(app, client_fn, _with_our_mod(mods), **more)


def _with_our_mod(mods: Sequence[Any] | None) -> Sequence[Any] | None:
    others = [] if mods is None else [*mods]
    if any(isinstance(mod, ClientMod) for mod in others):
        return mods
    try:
        settings = WatchSettings.read(os.environ)
        # Without the extra that tapes need, the app is watched without a tape.
        folder = None if _tape(settings) is None else settings.tape
        probes, tracebacks = settings.probes or "standard", bool(settings.tracebacks)
        ours = client_mod(probes=probes, privacy=settings.privacy, tracebacks=tracebacks, tape=folder)
    except Exception as error:  # noqa: BLE001 - the app runs, whatever happens to us
        _warn(error)
        return mods
    return [ours, *others]


def _tape(settings: WatchSettings) -> Any:
    if settings.tape is None:
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
    """Call `ServerApp.__call__` with a monitor that is created when needed, and closed at the end."""
    app_run = ServerAppRun(grid, context)
    server_fn = app_run.guarded(lambda: app_run.begin(app))
    token = _SERVER_APP_RUN.set(app_run)
    try:
        original(app, grid, context, *more, **others)
    except BaseException as error:
        app_run.guarded(functools.partial(app_run.failed, error))
        raise
    finally:
        _SERVER_APP_RUN.reset(token)
        if server_fn is not None:
            app._server_fn = server_fn  # noqa: SLF001 - as it was
        app_run.guarded(app_run.end)


class ServerAppRun:
    """One run of a ServerApp.

    Each strategy that it starts, and each custom loop, is a run of ours with rounds from 1. A monitor is created when
    needed: an app with its own monitor gets no other.
    """

    def __init__(self, grid: Any, context: Any) -> None:
        self._grid, self._context = grid, context
        self._monitors: list[Monitor] = []
        self._told: BaseException | None = None
        self._over = False
        self._lock = threading.Lock()  # the older API sends from many threads

    def begin(self, app: Any) -> Callable[..., Any] | None:
        """Hook every place where the app may start training.

        Returns the replaced server function, if there is one.
        """
        self._wait()
        for kind in with_subclasses(Strategy):
            _hook_start(kind)
        self.attach_legacy(app)
        server_fn: Callable[..., Any] | None = getattr(app, "_server_fn", None)
        if server_fn is not None:  # the older API cannot be hooked elsewhere
            app._server_fn = functools.partial(self.of_components, server_fn)  # noqa: SLF001
        return server_fn

    def guarded(self, work: Callable[[], Any]) -> Any:
        """Return the result of our own work; errors are logged once and end the watching, never the app."""
        try:
            return work()
        except Exception as error:  # noqa: BLE001
            self._over = True  # it would fail again with each message
            _warn(error)
            return None

    def _attach(self, what: Any) -> bool:
        """Attach a monitor, and return whether that is new."""
        with self._lock:
            if what is None or self._over or getattr(what, MARK, None) is not None:
                return False
            return self.guarded(lambda: attach(what, self._new_monitor())) is not None

    def _new_monitor(self) -> Monitor:
        settings = WatchSettings.read(os.environ)
        if self._monitors:
            self._monitors[-1].close()
        number = len(self._monitors) + 1
        monitor = Monitor(
            settings.store or "runs.db",
            run=settings.run or "flower",
            id=run_name(self._context.run_id) + (f"-{number}" if number > 1 else ""),
            probes=settings.probes or "standard",
            privacy=settings.privacy,
            tracebacks=settings.tracebacks,
            config={"app": dict(self._context.run_config)},
            tape=_tape(settings),
        )
        self._monitors.append(monitor)
        return monitor

    # -- loops of the app's own ---------------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Attach to the grid once a client is asked to train, unless it is watched by then."""
        for name in SENDING:
            send = getattr(self._grid, name)
            if not hasattr(send, MARK):
                waiting = functools.partial(self._send, name, send)
                setattr(waiting, MARK, self)
                setattr(self._grid, name, waiting)

    def _send(self, name: str, send: Callable[..., Any], messages: Iterable[Any], *args: Any, **more: Any) -> Any:
        outgoing = [*messages]
        if any(message.metadata.message_type.partition(".")[0] == TRAIN for message in outgoing):
            send = getattr(self._grid, name) if self._attach(self._grid) else send  # the hooks call this again
        return send(outgoing, *args, **more)

    def _leave_grid(self) -> None:
        """End a custom loop's last round and remove its hooks: a strategy has hooks of its own."""
        server_rounds = vars(self._grid).get(MARK)
        if server_rounds is not None and server_rounds.monitor in self._monitors:
            for name in (*HOOKED, MARK):
                vars(self._grid).pop(name, None)
            server_rounds.close()

    # -- strategies ---------------------------------------------------------------------------------------------------

    def start(self, strategy: Any, start: Callable[..., Any], *args: Any, **more: Any) -> Any:
        """Start a strategy, attaching to it first unless it is attached."""
        if getattr(strategy, MARK, None) is None:
            self.guarded(self._leave_grid)
            if self._attach(strategy):
                start = strategy.start  # the hook, which calls this again
        try:
            return start(*args, **more)
        except BaseException as error:
            self._told = error  # reported by the server rounds
            raise
        finally:
            self.guarded(self._wait)  # removing hooks removes ours as well

    def of_components(self, server_fn: Callable[..., Any], *args: Any, **more: Any) -> Any:
        """Call the older API's function that creates the server's components, and attach to its strategy."""
        components = server_fn(*args, **more)
        self.guarded(lambda: self.attach_legacy(components))
        return components

    def attach_legacy(self, parts: Any) -> None:
        """Attach to the strategy of the older API's components, if there is one."""
        server = getattr(parts, "server", None) or getattr(parts, "_server", None)
        for holder in (parts, server):
            self._attach(getattr(holder, "strategy", None) or getattr(holder, "_strategy", None))

    # -- the end ------------------------------------------------------------------------------------------------------

    def failed(self, error: BaseException) -> None:
        """Report that the ServerApp ended with an error, unless that was reported already."""
        if self._monitors and error is not self._told:
            data = {"exception": type(error).__name__}
            text = f"The ServerApp ended: {type(error).__name__}: {text_of(error)}"[:1000]
            self._monitors[-1].host.event("error", "round.failed", text, data=data)

    def end(self) -> None:
        """Remove all hooks and close the monitors."""
        self._over = True
        self._leave_grid()
        for name in SENDING:
            if getattr(vars(self._grid).get(name), MARK, None) is self:
                delattr(self._grid, name)
        for monitor in self._monitors:
            monitor.close()


_SERVER_APP_RUN: ContextVar[ServerAppRun | None] = ContextVar("fedvitals_flower_visit", default=None)


def _hook_start(kind: type) -> None:
    """Make a strategy class attach when it is started; each class may have a `start` of its own."""
    original = vars(kind).get("start")
    if not callable(original) or hasattr(original, MARK):
        return

    @functools.wraps(original)
    def start(self: Any, *args: Any, **more: Any) -> Any:
        app_run = _SERVER_APP_RUN.get()
        begin = functools.partial(original, self)
        return begin(*args, **more) if app_run is None else app_run.start(self, begin, *args, **more)

    setattr(start, MARK, True)
    kind.start = start  # type: ignore[attr-defined]


def _warn(error: Exception, does: str = "does not watch") -> None:
    logger.warning("fedvitals %s this app (%s: %s); it runs as usual.", does, type(error).__name__, error)
