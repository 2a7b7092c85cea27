# SPDX-License-Identifier: Apache-2.0
"""fedvitals: observability, debugging and profiling for federated learning in PyTorch.

    import fedvitals as fv

    monitor = fv.Monitor("runs.db", run="digits")

These names are the public interface; tests/golden/public_names.txt lists them with their signatures. They load on
first use: `import fedvitals` itself loads neither torch nor any extra.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    from fedvitals import errors as errors
    from fedvitals import lab as lab
    from fedvitals import plot as plot
    from fedvitals import probes as probes
    from fedvitals import sinks as sinks
    from fedvitals.diagnosis.corrections.policy import CorrectionPolicy as CorrectionPolicy
    from fedvitals.hosts import flower as flower
    from fedvitals.hosts import huggingface as huggingface
    from fedvitals.hosts import lightning as lightning
    from fedvitals.hosts import nvflare as nvflare
    from fedvitals.hosts.loop.single_model import watch as watch
    from fedvitals.monitor.monitor import Monitor as Monitor
    from fedvitals.notebook import open as open  # noqa: A004
    from fedvitals.probes.presets import preset as preset
    from fedvitals.probes.sample_review import suspect_samples as suspect_samples
    from fedvitals.records import Event as Event
    from fedvitals.records import Finding as Finding
    from fedvitals.records import Metric as Metric
    from fedvitals.records import Where as Where
    from fedvitals.replay.debugger.session import open_replay as open_replay
    from fedvitals.replay.tape.tape import Tape as Tape
    from fedvitals.resources.capture import Capture as Capture
    from fedvitals.schedule import budget as budget
    from fedvitals.schedule import every as every
    from fedvitals.schedule import first as first
    from fedvitals.schedule import last as last
    from fedvitals.sinks.alerts.sink import Alerts as Alerts
    from fedvitals.store import open_store as open_store
    from fedvitals.transport.timing import timed as timed

# Where each public name is defined: a module that has the name, or the package itself.
_HOME = {
    "Monitor": "fedvitals.monitor.monitor",
    "flower": "fedvitals.hosts.flower",
    "nvflare": "fedvitals.hosts.nvflare",
    "huggingface": "fedvitals.hosts.huggingface",
    "lightning": "fedvitals.hosts.lightning",
    "lab": "fedvitals.lab",
    "plot": "fedvitals.plot",
    "probes": "fedvitals.probes",
    "sinks": "fedvitals.sinks",
    "errors": "fedvitals.errors",
    "watch": "fedvitals.hosts.loop.single_model",
    "preset": "fedvitals.probes.presets",
    "suspect_samples": "fedvitals.probes.sample_review",
    "budget": "fedvitals.schedule",
    "every": "fedvitals.schedule",
    "first": "fedvitals.schedule",
    "last": "fedvitals.schedule",
    "timed": "fedvitals.transport.timing",
    "Alerts": "fedvitals.sinks.alerts.sink",
    "Capture": "fedvitals.resources.capture",
    "CorrectionPolicy": "fedvitals.diagnosis.corrections.policy",
    "open": "fedvitals.notebook",
    "open_store": "fedvitals.store",
    "Tape": "fedvitals.replay.tape.tape",
    "open_replay": "fedvitals.replay.debugger.session",
    "Event": "fedvitals.records",
    "Finding": "fedvitals.records",
    "Metric": "fedvitals.records",
    "Where": "fedvitals.records",
}

# What is missing where torch is; else «torch».
_EXTRA = {
    "lab": "lab", "Tape": "replay", "open_replay": "replay", "flower": "flower", "huggingface": "huggingface",
    "lightning": "lightning",
}  # fmt: skip

__all__ = ["__version__", *_HOME]  # noqa: PLE0604 - the names are strings


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'fedvitals' has no attribute '{name}'. It offers: {', '.join(_HOME)}.")
    try:
        module = importlib.import_module(home)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("torch", "flwr", "nvflare", "transformers", "lightning"):
            raise
        from fedvitals.errors import MissingExtraError  # noqa: PLC0415 - nothing is loaded before it is needed

        raise MissingExtraError(missing, _EXTRA.get(name, missing), f"fedvitals.{name}") from error
    public = module if home.endswith(f".{name}") else getattr(module, name)  # a package stands for itself
    globals()[name] = public
    return public


def __dir__() -> list[str]:
    return sorted(__all__)
