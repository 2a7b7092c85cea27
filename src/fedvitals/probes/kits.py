# SPDX-License-Identifier: Apache-2.0
"""The instruments of a run: torch's where torch is installed, NumPy's where it is not.

Nothing in here imports torch by itself. A process in which nobody has imported it, such as the client of a federation
of scikit-learn models, does without.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedvitals.probes import numpy_updates
from fedvitals.probes.numpy_updates import ArrayInstruments
from fedvitals.probes.presets import named, resolve
from fedvitals.stats import Array

if TYPE_CHECKING:
    from fedvitals.probes.session import Instruments

    Kit = Instruments | ArrayInstruments


def torch_is_loaded() -> bool:
    """Whether somebody in this process has imported torch."""
    return sys.modules.get("torch") is not None


def torch_is_installed() -> bool:
    """Whether torch could be imported here. Importing it takes more than a second, asking does not."""
    if "torch" in sys.modules:
        return torch_is_loaded()
    try:
        return importlib.util.find_spec("torch") is not None
    except (ImportError, ValueError):  # a finder that refuses
        return False


def instruments(probes: Any, update_memory: int) -> Kit:
    """What measures a run by these probes. Without torch, probes cannot run: updates are measured by NumPy alone."""
    if not torch_is_installed():
        return ArrayInstruments(named(probes), update_memory)
    from fedvitals.probes.session import Instruments  # noqa: PLC0415 - imports torch

    return Instruments(resolve(probes), update_memory)


def measured(updates: Mapping[str, Sequence[Any]]) -> list[tuple[str, Any, Array]]:
    """Each update as one vector, with its nine sums per layer."""
    if not torch_is_loaded():
        return [*numpy_updates.measured(updates)]
    from fedvitals.probes.updates import measured as by_torch  # noqa: PLC0415 - imports torch

    return [*by_torch(updates)]


def as_array(values: Any) -> Array:
    """Numbers of any library as float64; tensors come to the CPU."""
    found = values.detach().cpu() if hasattr(values, "detach") else values
    return np.asarray(found, dtype=np.float64)
