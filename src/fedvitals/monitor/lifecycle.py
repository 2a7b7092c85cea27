# SPDX-License-Identifier: Apache-2.0
"""The beginning and the end of a monitored run: its parts are checked, versions are noted, and it is closed at exit."""

from __future__ import annotations

import atexit
import platform
import sys
import weakref
from typing import Any

import numpy as np

import fedvitals
from fedvitals.errors import ConfigError
from fedvitals.protocols import Recorder as TapeRecorder
from fedvitals.resources.capture import Capture


def check_parts(sinks: Any, capture: Any, tape: Any) -> None:
    """What was passed in, as soon as it is."""
    if tape is not None and not isinstance(tape, TapeRecorder):
        raise ConfigError(f"tape= takes a fv.Tape(budget=...); got {tape!r}.")
    for sink in sinks:
        if not callable(getattr(sink, "write", None)):
            raise ConfigError(
                f"sinks= takes objects with a method write(records); got {sink!r}. Exporters: docs/exporters.md."
            )
    if capture is not None and not isinstance(capture, Capture):
        raise ConfigError(f"capture= takes a fv.Capture(rounds=..., nodes=..., steps=...); got {capture!r}.")


def close_at_exit(closeable: Any) -> None:
    """Close what the user forgot. Weakly held: what was let go earlier is not kept alive for this."""
    reference = weakref.ref(closeable)

    def close() -> None:
        alive = reference()
        if alive is not None:
            alive.close()

    atexit.register(close)
    weakref.finalize(closeable, atexit.unregister, close)


def versions() -> dict[str, str]:
    """Versions of fedvitals, Python and NumPy, and of torch where it is loaded."""
    return {
        "fedvitals": fedvitals.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        **_torch_versions(),
    }


def _torch_versions() -> dict[str, str]:
    """Of torch and what measures its tensors, where somebody has imported it: this does not."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    from fedvitals.kernels import backend  # noqa: PLC0415 - imports torch

    return {"torch": str(getattr(torch, "__version__", "")), "kernel": str(backend())}
