# SPDX-License-Identifier: Apache-2.0
"""The server's side: attach a monitor to a strategy, or to the grid of a custom loop."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from typing import Any, TypeVar

from fedvitals.errors import ConfigError
from fedvitals.hosts import update_guard
from fedvitals.hosts.flower.grid_hooks import MARK, hook_grid
from fedvitals.hosts.flower.legacy import is_legacy, watch_legacy
from fedvitals.hosts.flower.protection import LEVEL, hiding_strategy
from fedvitals.hosts.flower.replaying import in_replay
from fedvitals.hosts.flower.reply_envelope import trace_id
from fedvitals.hosts.flower.server_rounds import ServerRounds
from fedvitals.hosts.flower.strategy import watch_strategy
from fedvitals.monitor.lifecycle import close_at_exit
from fedvitals.monitor.monitor import Monitor
from fedvitals.probes.backends import torch_is_installed
from fedvitals.probes.numpy_updates import REMARK

What = TypeVar("What")
HIGHEST_LEVEL = 4  # of the privacy levels


def attach(
    what: What, monitor: Monitor, *, guard: str = update_guard.REPORT, layers: Sequence[str] | None = None
) -> What:
    """Let a monitor watch a strategy, or the grid of a custom loop.

    Args:
        what: A strategy of the Message API or of the older one, or a grid.
        monitor: The `fv.Monitor` of the server.
        guard: What to do with an update that contains NaN or infinity, before it is aggregated: «report» names the
            client and changes nothing, «drop» leaves it out, «fail» ends the run.
        layers: Names for the arrays, if the messages carry none.

    Returns:
        The same object as `what`.
    """
    if not isinstance(monitor, Monitor):
        raise ConfigError(f"attach(strategy, monitor) takes a fv.Monitor('runs.db'); got {monitor!r}.")
    if isinstance(what, type):  # hooking the class would affect all its instances
        raise ConfigError(f"attach() takes a strategy, not its class: {what.__name__}(...), and not {what.__name__}.")
    if in_replay():  # the app's own code is run again: nothing is to be watched
        return what
    known = getattr(what, MARK, None)
    if known is not None:
        if known.monitor is monitor:
            return what
        raise ConfigError(f"This {type(what).__name__} is watched by another monitor already; attach one only.")
    if monitor.host.attached:
        raise ConfigError("This monitor is attached already. Attach a strategy or a grid: a strategy's own is seen.")
    hidden = hiding_strategy(what)
    server_rounds = ServerRounds(
        monitor,
        guard_mode=update_guard.check_guard(guard),
        layers=None if layers is None else tuple(layers),
        weight=str(getattr(what, "weighted_by_key", "num_examples" if is_legacy(what) else "num-examples")),
        hidden=hidden,
    )
    begin = _FlowerRunSetup(monitor, type(what).__name__, LEVEL if hidden else HIGHEST_LEVEL)
    begin.check()
    if is_legacy(what):
        watch_legacy(what, server_rounds, begin)
    elif callable(getattr(what, "configure_train", None)) and callable(getattr(what, "start", None)):
        watch_strategy(what, server_rounds, begin)
    elif callable(getattr(what, "push_messages", None)) and callable(getattr(what, "send_and_receive", None)):
        begin(what)
        hook_grid(what, server_rounds)
    else:
        raise ConfigError(
            f"attach() takes a strategy (flwr.serverapp.strategy), or the grid that main(grid, context) is given; "
            f"got {type(what).__name__}."
        )
    monitor.host.before_close(server_rounds.end)
    close_at_exit(server_rounds)
    return what


class _FlowerRunSetup:
    """Marks the monitor's run as one of Flower when its first grid is seen.

    Only the grid knows the run's id.
    """

    def __init__(self, monitor: Monitor, strategy: str, most: int) -> None:
        self._monitor, self._strategy, self._most, self._done = monitor, strategy, most, False

    def check(self) -> None:
        """Raise ConfigError early for settings that cannot work, rather than when the federation runs."""
        self._monitor.host.describe("flower", {"flower": self._config()}, most=self._most)

    def _config(self, run: Any = None) -> dict[str, Any]:
        """Return what is known of a run: its strategy, Flower's version, and the id and app of Flower's run."""
        config = {"strategy": self._strategy, "flwr": version("flwr")}
        if getattr(run, "run_id", None) is not None:
            config["run"] = str(run.run_id)
        for own, name in (("app", "fab_id"), ("app_version", "fab_version")):
            text = getattr(run, name, None)
            if isinstance(text, str) and text:
                config[own] = text
        return config

    def __call__(self, grid: Any) -> None:
        if self._done:
            return
        self._done = True
        with suppress(ConfigError):  # an unusable store is reported when it is opened
            file = self._monitor.file
            asking = "" if file is None else f" --store {shlex.quote(str(file))}"
            logging.getLogger("flwr").info("fedvitals watches: fedvitals show %s%s", self._monitor.run.id, asking)
        if not torch_is_installed():
            logging.getLogger("flwr").info("fedvitals: %s", REMARK)
        run = getattr(grid, "run", None)
        if run is None or getattr(run, "run_id", None) is None:
            return
        config, trace = {"flower": self._config(run)}, trace_id(run.run_id)
        try:
            self._monitor.host.describe("flower", config, trace=trace, most=self._most)
        except ConfigError:
            return  # already started: something was reported before the federation began, and stays unchanged
