# SPDX-License-Identifier: Apache-2.0
"""Capture of repeated work as a CUDA graph: many small kernels are then started with one call."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch


def captured(
    work: Callable[[], None],
    warm_ups: Sequence[Callable[[], None]],
    pool: Any = None,
    device: torch.device | None = None,
) -> torch.cuda.CUDAGraph:
    """Return `work` as a CUDA graph, whose `replay` does the work again on the same memory.

    `warm_ups` run before, in this order, so that what is compiled or chosen at a first call is so before the capture.
    `pool` is memory that several graphs share; `device` is the current one if not named.
    Other threads may use CUDA meanwhile: a monitor's, a tape's.
    Raises RuntimeError where the work cannot be captured, and a warning as an error where it does nothing on the
    device; the current stream is then the one of before.
    """
    now, stream = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    stream.wait_stream(now)
    with torch.cuda.stream(stream):
        for warm_up in warm_ups:
            warm_up()
    now.wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    gc.collect()
    collecting = gc.isenabled()
    gc.disable()  # an old graph that dies in the midst of a capture would spoil it
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="The CUDA Graph is empty")
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                work()
    finally:
        torch.cuda.set_stream(now)  # a capture that breaks off leaves its own behind
        if collecting:
            gc.enable()
    return graph
