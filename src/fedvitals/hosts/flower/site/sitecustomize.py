# SPDX-License-Identifier: Apache-2.0
"""Run by Python at startup where this folder is on PYTHONPATH: lets fedvitals watch Flower apps without a line in them.

It runs in every process of an app, so it loads almost nothing and waits for Flower's classes to be imported; if
anything goes wrong on our side, they work as before. `fedvitals.hosts.flower.environment` says who sets the path.
"""
# ruff: noqa: INP001, PLC0415, PTH120 - no package, and nothing is loaded before it is needed

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# Where the classes are, in the newest Flower and in the oldest that we know; and who of ours is told of which call.
CLIENT, SERVER = ("ClientApp", "__init__", "client_app"), ("ServerApp", "__call__", "server_app")
HOOKED_METHODS = {
    "flwr.clientapp.client_app": CLIENT,
    "flwr.client.client_app": CLIENT,
    "flwr.serverapp.server_app": SERVER,
    "flwr.server.server_app": SERVER,
}
OURS = "fedvitals.hosts.flower.unmodified"


class FlowerImportHook:
    """An import finder that finds no modules itself, but hooks the classes of HOOKED_METHODS once they are imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        place = HOOKED_METHODS.get(name)
        if place is None:
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec: Any = next((candidate for finder in others if (candidate := finder.find_spec(name, path, target))), None)
        execute = getattr(getattr(spec, "loader", None), "exec_module", None)
        if execute is not None:

            def exec_module(module: Any) -> None:
                execute(module)
                redirect_method(module, *place)

            spec.loader.exec_module = exec_module
        return spec


def redirect_method(module: Any, owner: str, method: str, handler: str) -> None:
    """Redirect calls of a method to our handler, with the original method before the arguments."""
    import functools
    import importlib

    try:
        kind = getattr(module, owner)
        original = getattr(kind, method)

        @functools.wraps(original)
        def redirected(*arguments: Any, **more: Any) -> Any:
            try:
                handle = getattr(importlib.import_module(OURS), handler)
            except Exception as error:  # noqa: BLE001 - not installed here, or broken: the app runs without us
                warn(error)
                return original(*arguments, **more)
            return handle(original, *arguments, **more)

        setattr(kind, method, redirected)
    except Exception as error:  # noqa: BLE001
        warn(error)


def warn(error: Exception, warned: list[Exception] = []) -> None:  # noqa: B006 - remembers that it was said
    import logging

    if not warned:
        warned.append(error)
        words = "fedvitals does not watch this process (%s: %s); the app runs as ever."
        logging.getLogger("fedvitals").warning(words, type(error).__name__, error)


def run_next_sitecustomize() -> None:
    """Run the `sitecustomize` that Python would have run without this one."""
    here = os.path.realpath(os.path.dirname(__file__))
    spec = PathFinder.find_spec("sitecustomize", [place for place in sys.path if os.path.realpath(place) != here])
    if spec is not None and spec.loader is not None:
        from importlib.util import module_from_spec

        sys.modules["sitecustomize"] = module = module_from_spec(spec)
        spec.loader.exec_module(module)


if os.environ.get("FEDVITALS_FLOWER", "0") not in {"", "0"}:
    sys.meta_path.insert(0, FlowerImportHook())
run_next_sitecustomize()
