# SPDX-License-Identifier: Apache-2.0
"""A client's memory in one round: the growth of the process, the peak on the device, and what the memory consists of.

The shares (model, gradients, ...) hardly ever change. They are reported in a client's first round, after a change, and
every hundred rounds, and measured every tenth: a tenth of the cost, of measuring and of storing.

On CUDA the allocator's own statistics give the peak. They are reset when a client begins, if its model is there: a user
who reads `torch.cuda.max_memory_allocated` sees the peak since then. What a captured graph uses during its replay was
allocated when it was captured: the reserved memory includes it, the allocated memory may not.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fedvitals.resources.leaks import LeakWatch, in_words
from fedvitals.resources.memory import heap_bytes, limit_bytes, resident_bytes
from fedvitals.resources.seen_tensors import ClientTensors
from fedvitals.resources.tensors import StepWatch, shares

LOOK_EVERY = 10  # rounds
HEAP_SHARE = 1 / 1000  # of the time, for measuring the heap in use
TELL_EVERY = 100  # rounds, at the latest: detectors only look back a limited number of rounds


@dataclass(slots=True)
class OpenMemory:
    """The memory measurement of a client that is training now."""

    model: Any
    began: int | None  # resident bytes; None: not alone in its process
    number: int  # how many clients had begun here, including this one
    steps: StepWatch
    device: Any = None  # the CUDA device, if the model is on one
    heap: int | None = None  # bytes in use at its beginning; only while the process is suspected of a leak
    sights: ClientTensors | None = None  # likewise
    closed: bool = False


@dataclass(slots=True)
class _LastMetrics:
    round: int
    looked: int
    batch: int | None
    values: dict[str, float]


class _Turns:
    """Decides whose heap is measured: walking through it may take as long as a local step, so clients take turns."""

    def __init__(self) -> None:
        self._cost = 0.0  # seconds of one measurement
        self._began = time.perf_counter()
        self._spent = 0.0
        self._times: dict[str, int] = {}
        self._all_times = 0

    def due(self, node: str) -> bool:
        """Whether it is this client's turn, and the time spent so far is a small enough share of all the time."""
        times = self._times.setdefault(node, 0)
        dear = self._spent + 2 * self._cost > HEAP_SHARE * (time.perf_counter() - self._began)
        if dear or times * len(self._times) > self._all_times:
            return False
        self._times[node] += 1
        self._all_times += 1
        return True

    def timed(self, ask: Callable[[], int | None]) -> int:
        """Return the answer of `ask`, and count its cost twice, for the client's beginning and end."""
        began = time.perf_counter()
        answer = ask() or 0
        self._cost = time.perf_counter() - began
        self._spent += 2 * self._cost
        return answer


class ClientMemory:
    """Measures the memory of clients in one process and one run."""

    def __init__(self) -> None:
        self._activations: dict[Any, int] = {}  # bytes, by model and shape of its input
        self._last: dict[str, _LastMetrics] = {}
        self._begun = 0
        self._open = 0
        self._leak = LeakWatch()
        self._heaps = _Turns()
        self._lock = threading.RLock()  # a finalizer may close another client on the thread that holds it

    def begin(
        self, model: Any, parameters: Sequence[Any], node: str = "", round_index: int | None = None
    ) -> OpenMemory:
        """Begin to measure a client's memory. Returns what `end` and `close` need."""
        device = _cuda_device(parameters)
        if device is not None and not self._open:  # another client's training must not lose its peak
            torch.cuda.reset_peak_memory_stats(device)
        steps = StepWatch(self._activations, model, sum(p.numel() for p in parameters if p.requires_grad))
        with self._lock:
            sights = self._leak.watch(model, parameters, round_index)
            self._begun += 1
            self._open += 1
            alone = self._open == 1
            heap = heap_bytes() if alone and self._leak.suspected and self._heaps.due(node) else None
            return OpenMemory(model, resident_bytes() if alone else None, self._begun, steps, device, heap, sights)

    def close(self, opened: OpenMemory) -> None:
        """Remove our hooks from the model. A second call does nothing."""
        if not opened.closed:
            opened.closed = True
            opened.steps.remove()
            with self._lock:
                self._open -= 1
            if opened.sights is not None:
                opened.sights.close()

    def end(
        self,
        opened: OpenMemory,
        node: str,
        round_index: int | None,
        optimizers: Sequence[Any],
        telemetry: Callable[[], int],
        *,
        failed: bool,
    ) -> dict[str, float]:
        """Return the client's metrics. `telemetry`: returns the number of bytes that fedvitals itself holds."""
        self.close(opened)
        metrics: dict[str, float] = {}
        resident = resident_bytes()
        if resident is not None:
            metrics["memory.resident"] = resident
            if opened.began is not None and opened.number == self._begun:
                metrics["memory.growth"] = resident - opened.began
                if opened.heap is not None:
                    metrics["memory.kept"] = self._heaps.timed(heap_bytes) - opened.heap
        metrics |= _peaks(opened.device)
        return metrics | self._shares(opened, node, round_index or 0, optimizers, telemetry, failed=failed)

    def begin_stack(self, states: Any) -> Any:
        """Reset the peak of the GPU on which clients train as one batch, and return the GPU; None if there is none."""
        device = _cuda_device([states])
        if device is not None and not self._open:
            torch.cuda.reset_peak_memory_stats(device)
        return device

    def end_stack(self, device: Any, clients: int) -> dict[str, float]:
        """Return each client's peak there: its share of the stack's peak. Does not wait for the device."""
        return {name: peak / max(1, clients) for name, peak in _peaks(device).items()}

    def grown(self, round_index: int | None, resident: float | None) -> tuple[str, dict[str, Any]] | None:
        """Return text and data of the event `memory.census`, if the process grows and a census is due."""
        with self._lock:
            census = None if resident is None else self._leak.note(round_index, int(resident))
        return None if census is None else (in_words(census), census)

    def _shares(
        self,
        opened: OpenMemory,
        node: str,
        number: int,
        optimizers: Sequence[Any],
        telemetry: Callable[[], int],
        *,
        failed: bool,
    ) -> dict[str, float]:
        steps, model, known = opened.steps, opened.model, self._last.get(node)
        fresh = known is not None and 0 <= number - known.looked < LOOK_EVERY and steps.batch == known.batch
        if fresh and not failed:
            return {}
        metrics: dict[str, float] = {f"memory.{name}": size for name, size in shares(model, optimizers).items()}
        if steps.bytes is not None:
            metrics["memory.activations"] = steps.bytes
        metrics["memory.telemetry"] = telemetry()
        metrics["memory.tensors"] = sum(metrics.values())
        if steps.batch is not None:
            metrics["memory.batch"] = steps.batch
        device = opened.device
        limit = limit_bytes() if device is None else int(torch.cuda.mem_get_info(device)[1])
        if limit is not None:
            metrics["memory.limit"] = limit
        same = known is not None and _steady(metrics) == _steady(known.values)
        if known is not None and same and not failed and number - known.round < TELL_EVERY:
            known.looked = number
            return {}
        self._last[node] = _LastMetrics(number, number, steps.batch, metrics)
        return metrics


def _steady(metrics: dict[str, float]) -> dict[str, float]:
    """Return the metrics that do not vary a little each time, as our own memory does with who trained before."""
    return {name: value for name, value in metrics.items() if name not in ("memory.telemetry", "memory.tensors")}


def _cuda_device(parameters: Sequence[Any]) -> Any:
    """Return the CUDA device of a model, if it is on one. Asks the model, never CUDA, which would initialise it."""
    return parameters[0].device if parameters and parameters[0].is_cuda else None


def _peaks(device: Any) -> dict[str, float]:
    """Return a GPU's peak values since its statistics were reset."""
    if device is None:
        return {}
    # once: torch's own functions query again for each number
    statistics = torch.cuda.memory_stats_as_nested_dict(device)
    allocated, reserved = (statistics.get(name, {}).get("all", {}) for name in ("allocated_bytes", "reserved_bytes"))
    return {"memory.cuda_allocated": allocated.get("peak", 0), "memory.cuda_reserved": reserved.get("peak", 0)}
