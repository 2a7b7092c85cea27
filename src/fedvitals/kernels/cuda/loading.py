# SPDX-License-Identifier: Apache-2.0
"""Loads the GPU kernels: Triton is imported and checked when a tensor on a GPU is first measured.

Torch installs Triton with its CUDA builds. Where Triton is missing or cannot compile, `load_kernels()` says why, and
torch is used instead. Without a GPU nothing of this is imported.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

_LOG = logging.getLogger("fedvitals.kernels")
_LOCK = threading.RLock()


@dataclass(frozen=True, slots=True)
class LoadedKernels:
    """The kernels of this process, or None with the reason."""

    kernels: Any  # the module `statistics`; None: torch must do
    reason: str


def load_kernels() -> LoadedKernels:
    """Return the kernels of this process, or why there are none. Decided on the first call outside a graph capture."""
    undecided = not _load.cache_info().currsize
    if undecided and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return LoadedKernels(None, "a CUDA graph is being captured, in which nothing can be compiled")
    with _LOCK:  # a second thread waits here and then gets what the first one made
        return _load()


@cache
def _load() -> LoadedKernels:
    if os.environ.get("FEDVITALS_KERNEL", "") == "torch":
        return _fall_back("FEDVITALS_KERNEL=torch asks for it", logging.INFO)
    try:
        import triton  # type: ignore[import-not-found, unused-ignore]  # noqa: PLC0415 - only those pay who have a GPU
    except ImportError:
        return _fall_back("triton is not installed (pip install triton)", logging.WARNING)
    version = triton.__version__
    begin = time.perf_counter()
    try:
        from fedvitals.kernels.cuda import statistics  # noqa: PLC0415 - needs Triton

        _check(statistics)
    except Exception as error:  # noqa: BLE001 - whatever goes wrong in a compiler, training must go on
        first_line = (str(error) or repr(error)).splitlines()[0]
        return _fall_back(f"triton {version} could not compile it ({first_line})", logging.WARNING)
    milliseconds = 1000 * (time.perf_counter() - begin)
    return LoadedKernels(statistics, f"compiled by triton {version} in {milliseconds:.0f} ms")


def _check(kernels: Any) -> None:
    """Raise unless the kernels' results on known values are right. Synchronises once, before anything is measured."""
    from fedvitals.kernels import sketch  # noqa: PLC0415 - they ask us
    from fedvitals.kernels.cuda import sums as device_sums  # noqa: PLC0415

    gpu = torch.cuda.is_available()
    strict = torch.cuda.get_sync_debug_mode() if gpu else 0
    if strict:  # setting it makes torch warn, so only where the user has set it
        torch.cuda.set_sync_debug_mode(0)
    try:
        clean = torch.arange(-3.0, 300.0, device="cuda" if gpu else "cpu")
        with_nan = clean.clone()
        with_nan[7] = torch.nan
        rows = device_sums.sums_of_list(kernels, [clean, with_nan], None).tolist()
        sketches = [measure(clean[None]).tolist() for measure in (sketch.by_triton, sketch.by_torch)]
    finally:
        if strict:
            torch.cuda.set_sync_debug_mode(strict)
    numbers = [float(value) for value in range(-3, 300)]
    total = [sum(numbers), sum(x * x for x in numbers), sum(map(abs, numbers))]  # all of them exact in float32
    expected = [
        [303.0, *total, -3.0, 299.0, 1.0, 0.0, 0.0],
        [303.0, total[0] - 4, total[1] - 16, total[2] - 4, -3.0, 299.0, 1.0, 1.0, 0.0],
    ]
    if rows != expected:
        raise RuntimeError(f"on known values it returned {rows} instead of {expected}")
    if sketches[0] != sketches[1]:  # sums of small whole numbers: exact in any order
        raise RuntimeError("its sketch of known values is not that of torch")


def _fall_back(reason: str, level: int) -> LoadedKernels:
    _LOG.log(level, "Statistics on the GPU are computed by torch, without the compiled kernel: %s.", reason)
    return LoadedKernels(None, reason)
