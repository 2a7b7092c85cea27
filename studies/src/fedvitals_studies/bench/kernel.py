# SPDX-License-Identifier: Apache-2.0
"""Measures the statistics kernel: its speed against `torch.sum`, the cost of a call, its error, its start-up.

`torch.sum` reads the same memory for one of nine statistics, which makes it the reference for reading speed. Both take
turns in one process and on one thread, so that a busy machine slows both; ratios are portable, absolute numbers are
not.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedvitals.kernels import backend, sums
from fedvitals.stats import SUM, SUM_MAGNITUDES, SUM_SQUARES

Row = dict[str, Any]

READING_BAR = 0.7  # of the speed of torch.sum at 44 MB
CALLS_BAR = 10.0  # times cheaper than nine torch calls per tensor
ERROR_BAR = 1e-5


def bench_kernel(quick: bool = False) -> list[Row]:
    """Return rows of `case, unit, ours, ours_p10, torch, torch_p10, ratio, ratio_p10, bar`; see `_row` for their
    meaning.
    """
    with _one_thread():
        return [
            {"case": "backend", "unit": "", "ours": str(backend())},
            *_reading(quick),
            *_calls(quick),
            *_errors(),
            _start_up(),
        ]


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _reading(quick: bool) -> Iterator[Row]:
    generator = torch.Generator().manual_seed(0)
    for megabytes in (0.5, 8, 44):
        flat = torch.randn(int(megabytes * 1e6 / 4), generator=generator)
        yield _read(f"float32, {megabytes} MB flat", [flat], quick, READING_BAR if megabytes == 44 else None)
    gradients = [torch.randn(shape, generator=generator) for shape in _transformer_shapes()]
    yield _read(f"float32, 44 MB in {len(gradients)} tensors", gradients, quick, READING_BAR)
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        flat = torch.randn(44_000_000 // dtype.itemsize, generator=generator).to(dtype)
        yield _read(f"{str(dtype).removeprefix('torch.')}, 44 MB flat", [flat], quick, None)


def _transformer_shapes() -> list[tuple[int, ...]]:
    """Ten layers of width 302: large matrices beside small vectors, 11 million values in 60 tensors."""
    width = 302
    layer = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width), (width,), (4 * width,)]
    return layer * 10


def _read(case: str, tensors: list[Tensor], quick: bool, bar: float | None) -> Row:
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    repeats = int((0.5e9 if quick else 10e9) / size) + 10

    def yardstick() -> None:
        for tensor in tensors:
            torch.sum(tensor)

    ours, theirs = _take_turns([lambda: sums(tensors), yardstick], repeats)
    return _row(case, "GB/s", size / 1e9 / ours, size / 1e9 / theirs, bar)


def _calls(quick: bool) -> Iterator[Row]:
    for number in (4, 60, 100):
        tensors = [torch.randn(64) for _ in range(number)]
        calls: list[Callable[[], object]] = [partial(sums, tensors), partial(_nine_calls, tensors)]
        ours, theirs = _take_turns(calls, 100 if quick else 1000)
        yield _row(f"one call, {number} tensors of 64 values", "µs", 1e6 * ours, 1e6 * theirs, CALLS_BAR)


def _nine_calls(tensors: list[Tensor]) -> None:
    """Compute the same statistics in the usual way."""
    for tensor in tensors:
        tensor.mean()
        tensor.std()
        torch.linalg.vector_norm(tensor)
        tensor.min()
        tensor.max()
        tensor.abs().max()
        tensor.isnan().sum()
        tensor.isinf().sum()
        (tensor == 0).sum()


def _take_turns(calls: Sequence[Callable[[], object]], repeats: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the seconds of every call, `[calls, repeats]`."""
    seconds = np.zeros((len(calls), repeats))
    for call in calls:
        call()
    for repeat in range(repeats):
        for number, call in enumerate(calls):
            begin = time.perf_counter()
            call()
            seconds[number, repeat] = time.perf_counter() - begin
    return seconds


def _row(case: str, unit: str, ours: Any, theirs: Any, bar: float | None) -> Row:
    """Return medians, and the best tenth (`_p10`); `ratio` is how many times better ours is, `bar` the required ratio.

    Better is more for GB/s and less for µs.
    """
    more_is_better = unit == "GB/s"
    best = 0.9 if more_is_better else 0.1
    row: Row = {"case": case, "unit": unit}
    for suffix, share in (("", 0.5), ("_p10", best)):
        mine, other = float(np.quantile(ours, share)), float(np.quantile(theirs, share))
        row |= {f"ours{suffix}": mine, f"torch{suffix}": other}
        row[f"ratio{suffix}"] = mine / other if more_is_better else other / mine
    return row | {"bar": bar}


def _errors() -> Iterator[Row]:
    """Yield relative errors on ten million values; the sum's relative to the sum of magnitudes, as sums may cancel."""
    values = torch.randn(10_000_000, generator=torch.Generator().manual_seed(1))
    for case, tensor in (("normal", values), ("constant 0.1", torch.full_like(values, 0.1))):
        exact = tensor.double()
        magnitudes, squares = float(exact.abs().sum()), float(exact.square().sum())
        row = sums([tensor])[0]
        errors = {
            "sum": (row[SUM] - float(exact.sum())) / magnitudes,
            "squares": (row[SUM_SQUARES] - squares) / squares,
            "magnitudes": (row[SUM_MAGNITUDES] - magnitudes) / magnitudes,
        }
        worst = max(errors, key=lambda name: abs(errors[name]))
        error = abs(float(errors[worst]))
        yield {"case": f"error on 1e7 values, {case} ({worst})", "unit": "relative", "ours": error, "bar": ERROR_BAR}


def _start_up() -> Row:
    """Measure the first call in a fresh process that has imported torch: importing llvmlite and compiling all types."""
    script = (
        "import time, torch, fedvitals.kernels as k; t = torch.ones(8); begin = time.perf_counter(); "
        "k.sums([t]); print(time.perf_counter() - begin)"
    )
    runs = [subprocess.run([sys.executable, "-c", script], capture_output=True, check=True) for _ in range(3)]  # noqa: S603 - our own text
    return {"case": "first call in a fresh process", "unit": "ms", "ours": 1e3 * min(float(run.stdout) for run in runs)}
