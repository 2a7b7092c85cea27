# SPDX-License-Identifier: Apache-2.0
"""The statistics kernel for GPUs against the memory's own speed: 2 GB in 512 segments, by the device's clock."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from fedvitals.kernels import sums
from fedvitals.kernels.cuda.sums import DeviceRing

Row = dict[str, Any]
BAR = 3.5  # TB/s
SEGMENTS, LENGTH = 512, 1_000_000  # 2.05 GB of float32


def kernel_rows(quick: bool, tell: Callable[[str], None]) -> list[Row]:
    tell("the statistics kernel on 2 GB")
    matrix = torch.randn(SEGMENTS, LENGTH, device="cuda")
    parts = [*matrix]
    ring = DeviceRing([LENGTH], [True], SEGMENTS, 1, matrix.device)
    slot = torch.zeros(1, dtype=torch.int64, device="cuda")
    ways: dict[str, Callable[[], object]] = {
        "nine sums, stacked clients": lambda: ring.record(matrix, slot),
        "nine sums, a list of tensors": lambda: sums(parts),
        "torch.sum, of all as one": lambda: torch.sum(matrix),
        "torch._foreach_norm": lambda: torch._foreach_norm(parts),  # noqa: SLF001 - has no other name
    }
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(3 if quick else 15):
        for name, way in ways.items():
            speeds[name].append(matrix.numel() * 4 / _seconds(way) / 1e12)
    found = []
    for name, values in speeds.items():
        ours = name.startswith("nine")
        speed = statistics.median(values[1:])  # the first call compiles
        told = f"{speed:.2f} TB/s ({min(values[1:]):.2f} to {max(values[1:]):.2f})"
        verdict = "" if not ours else "met" if speed >= BAR else "missed"
        found.append({"what": f"2 GB in 512 segments: {name}", "bar": f"≥ {BAR} TB/s" if ours else "",
                      "measured": told, "verdict": verdict, "terabytes": speed})  # fmt: skip
    return found


def _seconds(work: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000
