# SPDX-License-Identifier: Apache-2.0
"""Predict a training step's peak memory from the measured shares (`memory.*`), and what would make it fit a limit.

The peak is estimated as the sum of the shares. Compared with all storages alive in real steps, that is between 6 % too
low (a small CNN, whose optimiser briefly holds copies) and 12 % too high (a transformer, whose gradients arrive as its
activations are freed); `fedvitals bench profile` measures it again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

FIXED = ("model", "buffers", "gradients", "optimizer", "telemetry")  # independent of the batch
SHARES = (*FIXED, "activations")
WORDS = {
    "model": "the model",
    "buffers": "the model's buffers",
    "gradients": "gradients",
    "optimizer": "the optimiser's state",
    "telemetry": "fedvitals itself",
    "activations": "activations",
}
USABLE_SHARE = 0.9  # of a limit that may be filled: allocators round up, and others use memory too
HALF, EIGHT = 0.5, 0.25  # of float32: float16 or bfloat16, int8
MOST_PRUNED = 0.9  # share of the weights; beyond this it is another model


@dataclass(frozen=True, slots=True)
class MemoryRemedy:
    """One change that makes a training step fit the memory limit."""

    kind: str  # «batch», «half», «int8», «prune»
    text: str
    value: float  # samples, factor, factor, share
    bytes: int  # the peak with it


def predicted_peak(shares: Mapping[str, float], batch: float | None = None, to_batch: float | None = None) -> int:
    """Return the predicted peak bytes of a step; scaled to another batch size if both batch sizes are given."""
    scale = to_batch / batch if batch and to_batch else 1.0
    return round(_bytes(shares, *FIXED) + _bytes(shares, "activations") * scale)


def _bytes(shares: Mapping[str, float], *names: str) -> float:
    """Return the total bytes of these shares; what was not measured counts as 0."""
    return sum(shares.get(name, 0.0) for name in names)


def largest_share(shares: Mapping[str, float]) -> tuple[str, float] | None:
    """Return the name of the largest share and its fraction of the whole; None if nothing was measured."""
    whole = _bytes(shares, *SHARES)
    if whole <= 0:
        return None
    name = max(SHARES, key=lambda share_name: shares.get(share_name, 0.0))
    return name, shares.get(name, 0.0) / whole


def memory_remedies(shares: Mapping[str, float], limit_bytes: float, batch: float | None = None) -> list[MemoryRemedy]:
    """Return what would bring the predicted peak under the limit, the least costly in accuracy first; [] if it fits.

    `shares`: bytes by name, as in `SHARES`. `batch`: the number of samples that the activations belong to.
    """
    usable = USABLE_SHARE * limit_bytes
    if predicted_peak(shares) <= usable:
        return []
    candidates = [
        _smaller_batch(shares, usable, batch),
        _half(shares, usable),
        _int8(shares, usable),
        _pruned(shares, usable),
    ]
    return [remedy for remedy in candidates if remedy is not None]


def _smaller_batch(shares: Mapping[str, float], usable: float, batch: float | None) -> MemoryRemedy | None:
    active = _bytes(shares, "activations")
    if not batch or active <= 0:
        return None
    size = math.floor((usable - _bytes(shares, *FIXED)) / (active / batch))
    if size < 1:
        return None
    text = f"a batch of {size} in place of {batch:.0f}, gradients accumulated over {math.ceil(batch / size)} of them"
    return MemoryRemedy("batch", text, size, predicted_peak(shares, batch, size))


def _half(shares: Mapping[str, float], usable: float) -> MemoryRemedy | None:
    """Train model, gradients and activations in 16 bits; as is usual, the optimiser keeps 32 bits."""
    peak = HALF * _bytes(shares, "model", "gradients", "activations")
    peak += _bytes(shares, "buffers", "optimizer", "telemetry")
    text = "model, gradients and activations in 16 bits (bfloat16)"
    return MemoryRemedy("half", text, HALF, round(peak)) if peak <= usable else None


def _int8(shares: Mapping[str, float], usable: float) -> MemoryRemedy | None:
    """Freeze the model in 8 bits and train small adapters, which nearly eliminates gradients and optimiser state."""
    peak = EIGHT * _bytes(shares, "model") + HALF * _bytes(shares, "activations")
    peak += _bytes(shares, "buffers", "telemetry")
    text = "the model quantised to 8 bits, with adapters trained in 16"
    return MemoryRemedy("int8", text, EIGHT, round(peak)) if peak <= usable else None


def _pruned(shares: Mapping[str, float], usable: float) -> MemoryRemedy | None:
    """Prune channels: model, gradients, optimiser state and activations all shrink."""
    by_width = _bytes(shares, "model", "gradients", "optimizer", "activations")
    rest = _bytes(shares, "buffers", "telemetry")
    if by_width <= 0 or usable <= rest:
        return None
    share = math.ceil(100 * (1 - (usable - rest) / by_width)) / 100
    if share > MOST_PRUNED:
        return None
    text = f"{100 * share:.0f} % of the channels pruned"
    return MemoryRemedy("prune", text, share, round((1 - share) * by_width + rest))


def device_table(
    shares: Mapping[str, float], devices: Mapping[str, float], batch: float | None = None
) -> list[DeviceFit]:
    """Return for each device (name and memory in bytes) the predicted peak, whether it fits, and what would help."""
    peak = predicted_peak(shares)
    return [
        DeviceFit(
            name, round(memory), peak, peak <= USABLE_SHARE * memory, tuple(memory_remedies(shares, memory, batch))
        )
        for name, memory in devices.items()
    ]


@dataclass(frozen=True, slots=True)
class DeviceFit:
    """Whether the training fits one device, and what would make it fit."""

    device: str
    memory_bytes: int
    peak_bytes: int
    fits: bool
    remedies: tuple[MemoryRemedy, ...]


def size_words(count: float) -> str:
    """Return a number of bytes in words, such as «1.5 GB»."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
