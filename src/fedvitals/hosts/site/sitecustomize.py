# SPDX-License-Identifier: Apache-2.0
"""Run by Python at startup if this folder is on PYTHONPATH: lets fedvitals watch frameworks without changing apps.

It runs in every process of an app, so it loads almost nothing and waits until the framework's classes are imported; if
anything goes wrong on our side, they work as before. `fedvitals.hosts.startup_path` says who sets the path.
"""
# ruff: noqa: INP001, PLC0415, PTH120 - no package, and nothing is loaded before it is needed

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# By the variable that switches on a framework's hooks: where its classes are, and our handler of each call.
# For Flower, in both the newest version and the oldest that we support.
FLOWER, NVFLARE = "fedvitals.hosts.flower.unmodified", "fedvitals.hosts.nvflare.unmodified"
TRAINER = "fedvitals.hosts.nvflare.site.trainer"
CLIENT, SERVER = ("ClientApp", "__init__", FLOWER, "client_app"), ("ServerApp", "__call__", FLOWER, "server_app")
HOOKED_METHODS = {
    "FEDVITALS_FLOWER": {
        "flwr.clientapp.client_app": [CLIENT],
        "flwr.client.client_app": [CLIENT],
        "flwr.serverapp.server_app": [SERVER],
        "flwr.server.server_app": [SERVER],
    },
    "FEDVITALS_NVFLARE": {
        "nvflare.job_config.fed_job_config": [("FedJobConfig", "generate_job_config", NVFLARE, "generate_job_config")],
    },
    "FEDVITALS_NVFLARE_TRAINER": {
        "nvflare.client.cell.api": [
            ("CellClientAPI", "receive", TRAINER, "receive"),
            ("CellClientAPI", "send", TRAINER, "send"),
        ],
    },
}


class ImportHook:
    """An import finder that finds no modules itself, but hooks classes once their modules are imported.

    `hooked`: module → the methods of its classes, as in HOOKED_METHODS.
    """

    def __init__(self, hooked: dict[str, list[tuple[str, str, str, str]]]) -> None:
        self._hooked = hooked

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        places = self._hooked.get(name)
        if places is None:
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec: Any = next((candidate for finder in others if (candidate := finder.find_spec(name, path, target))), None)
        execute = getattr(getattr(spec, "loader", None), "exec_module", None)
        if execute is not None:

            def exec_module(module: Any) -> None:
                execute(module)
                for place in places:
                    redirect_method(module, *place)

            spec.loader.exec_module = exec_module
        return spec


def redirect_method(module: Any, owner: str, method: str, ours: str, handler: str) -> None:
    """Redirect calls of a method to our handler, which gets the original method before the arguments."""
    import functools
    import importlib

    try:
        kind = getattr(module, owner)
        original = getattr(kind, method)

        @functools.wraps(original)
        def redirected(*arguments: Any, **more: Any) -> Any:
            try:
                handle = getattr(importlib.import_module(ours), handler)
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
        words = "fedvitals does not watch this process (%s: %s); the app runs as usual."
        logging.getLogger("fedvitals").warning(words, type(error).__name__, error)


def note_failure(path: str) -> None:
    """Write the exception that ends this process to a file, for the component of the NVFlare site that started it."""
    previous = sys.excepthook

    def hook(kind: Any, error: Any, trace: Any) -> None:
        import json
        import traceback

        try:
            text = "".join(traceback.format_exception(error))
            fields = {"exception": kind.__name__, "message": str(error)[:1_000], "traceback": text[-20_000:]}
            fields["trainer"] = "nvflare.client.cell.api" in sys.modules  # otherwise another program that it started
            part = f"{path}.{os.getpid()}"
            with open(part, "w", encoding="utf-8") as file:  # noqa: PTH123
                json.dump(fields, file)
            os.replace(part, path)  # noqa: PTH105
        except Exception as ours:  # noqa: BLE001 - the script's own error is what counts
            warn(ours)
        previous(kind, error, trace)

    sys.excepthook = hook


def run_next_sitecustomize() -> None:
    """Run the `sitecustomize` that Python would have run without this one."""
    here = os.path.realpath(os.path.dirname(__file__))
    spec = PathFinder.find_spec("sitecustomize", [place for place in sys.path if os.path.realpath(place) != here])
    if spec is not None and spec.loader is not None:
        from importlib.util import module_from_spec

        sys.modules["sitecustomize"] = module = module_from_spec(spec)
        spec.loader.exec_module(module)


for switch, modules in HOOKED_METHODS.items():
    if os.environ.get(switch, "0") not in {"", "0"}:
        sys.meta_path.insert(0, ImportHook(modules))
if os.environ.get("FEDVITALS_NVFLARE_FAILURE"):
    note_failure(os.environ["FEDVITALS_NVFLARE_FAILURE"])
run_next_sitecustomize()
