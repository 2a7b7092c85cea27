# SPDX-License-Identifier: Apache-2.0
"""Choose the instruments of a run: torch's if torch is installed, else NumPy's.

Nothing here imports torch by itself, so a process that has not imported it, such as the client of a federation of
scikit-learn models, does not load it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from fedvitals.errors import ConfigError
from fedvitals.probes import numpy_updates
from fedvitals.probes.allowance import Turn
from fedvitals.probes.attempts import Attempt
from fedvitals.probes.numpy_updates import ArrayInstruments
from fedvitals.probes.presets import Preset, preset_without_torch, resolve
from fedvitals.stats import Array

if TYPE_CHECKING:
    from fedvitals.probes.instruments import Instruments

    AnyInstruments = Instruments | ArrayInstruments


def torch_is_loaded() -> bool:
    """Return whether torch has been imported in this process."""
    return sys.modules.get("torch") is not None


def torch_is_installed() -> bool:
    """Return whether torch can be imported, without the second that importing it takes."""
    if "torch" in sys.modules:
        return torch_is_loaded()
    try:
        return importlib.util.find_spec("torch") is not None
    except (ImportError, ValueError):  # from a finder that rejects the name
        return False


def make_instruments(probes: Any, update_memory: int) -> AnyInstruments:
    """Return the instruments of a run with these probes; `update_memory` is in bytes.

    Without torch, updates are measured by NumPy and no probe runs.
    """
    if not isinstance(update_memory, int | float) or not update_memory >= 0:
        raise ConfigError(
            f"update_memory= takes a number of bytes from 0 on, such as 512 << 20; got {update_memory!r}."
        )
    if not torch_is_installed():
        return ArrayInstruments(preset_without_torch(probes), update_memory)
    from fedvitals.probes.instruments import Instruments  # noqa: PLC0415 - imports torch

    return Instruments(resolve(probes), update_memory)


class WorkerInstruments:
    """Torch's instruments in a worker process, created for the first model that is watched.

    Many clients have neither such a model nor torch. Calling it returns the instruments.
    """

    def __init__(self, preset: Preset | str) -> None:
        self._preset = preset
        self._initial: bytes | None = None  # the run's first model, float32
        self._trained: frozenset[str] = frozenset()  # names of the layers that train
        self._turn = Turn()
        self._made: Instruments | None = None

    def know(self, initial: bytes | None, trained: frozenset[str], turn: Turn) -> None:
        """Set what the parent process knows: the initial model, the layers that train, and the turn.

        The turn says which clients are measured.
        """
        self._initial, self._trained = self._initial or initial, self._trained | trained
        self._turn = turn

    def __call__(self) -> Instruments:
        if self._made is None:
            from fedvitals.probes.instruments import Instruments  # noqa: PLC0415 - imports torch

            self._made = Instruments(resolve(self._preset), update_memory=0, compares_updates=False)
        return self._made

    def prepare(self) -> None:
        """Reset the instruments before a client trains: the run's initial model, and nothing from other clients."""
        import torch  # noqa: PLC0415 - the model that is watched has imported it

        kit = self()
        if kit.initial is None and self._initial:
            kit.initial = torch.frombuffer(bytearray(self._initial), dtype=torch.float32)
        kit.trained |= self._trained
        kit.turns.now = self._turn
        kit.norms.clear()  # a client's last round may have been in another process, so the parent compares


def flatten_and_sum(updates: Mapping[str, Sequence[Any]]) -> list[tuple[str, Any, Array]]:
    """Return each update as (node, one vector, its nine sums per layer)."""
    if not torch_is_loaded():
        return [*numpy_updates.flatten_and_sum(updates)]
    from fedvitals.probes.updates import flatten_and_sum as by_torch  # noqa: PLC0415 - imports torch

    return [*by_torch(updates)]


def flatten_and_sum_each(updates: Mapping[str, Sequence[Any]], attempt: Attempt) -> list[tuple[str, Any, Array]]:
    """Like `flatten_and_sum`; if that fails, try each update separately and return those that can be read."""
    try:
        return flatten_and_sum(updates)
    except Exception:  # noqa: BLE001 - because of somebody, and the attempts below say who that is
        measured = [attempt("updates()", partial(flatten_and_sum, {node: own}), node) for node, own in updates.items()]
        return [entry for own in measured for entry in own or ()]


def as_array(values: Any) -> Array:
    """Return numbers of any library as a float64 array; tensors are copied to the CPU."""
    on_cpu = values.detach().cpu() if hasattr(values, "detach") else values
    return np.asarray(on_cpu, dtype=np.float64)
