# SPDX-License-Identifier: Apache-2.0
"""Samples the machine that the run is on in the background: processors, memory, disk, network, and GPUs.

Uses psutil, and NVML (the package nvidia-ml-py) if there is a driver. Without psutil nothing is sampled, and `why_not`
says so. Rates are computed here from two samples: psutil's own (`cpu_percent`) are shared by the whole process, and
using them would change the values that the user's code gets.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from fedvitals.resources.memory import kernel_kills
from fedvitals.resources.periodic_thread import PeriodicThread

PERIOD = 1.0  # seconds
GPUS = 16  # the most that are sampled
Tell = Callable[[dict[str, float]], None]


def why_not() -> str | None:
    """Return why the machine is not sampled here; None if it is."""
    try:
        import psutil  # type: ignore[import-untyped]  # noqa: F401, PLC0415 - an extra
    except ImportError:
        return "The machine is not sampled: pip install 'fedvitals[system]' adds psutil, which measures it."
    return None


class MachineSampler:
    """Reports samples through `tell`, on its own thread, from `start` to `stop`. Calling either again has no effect."""

    def __init__(self, tell: Tell, failed: Callable[[Exception], None], period: float = PERIOD) -> None:
        self._tell, self._failed = tell, failed
        self._thread = PeriodicThread("fedvitals-machine", period, self._work)

    def start(self) -> None:
        """Start the thread, unless it was started or stopped before, or psutil is missing."""
        if why_not() is None:
            self._thread.start()

    def stop(self) -> None:
        """Stop the thread and wait for it."""
        self._thread.stop()

    def _work(self, ticks: Iterator[None]) -> None:
        with contextlib.ExitStack() as stack:
            try:
                sample = Sample(gpus(stack))
                for _ in ticks:
                    self._tell(sample())
            except Exception as error:  # noqa: BLE001 - reported once; the run goes on without
                self._failed(error)


class Sample:
    """Callable that returns current values, and rates since the previous call."""

    def __init__(self, devices: list[Any]) -> None:
        import psutil  # noqa: PLC0415 - an extra

        self._psutil = psutil
        self._process = psutil.Process(os.getpid())
        self._devices = devices
        self._before: dict[str, float] = {}
        self._at = time.monotonic()
        self._counters()

    def __call__(self) -> dict[str, float]:
        memory = self._psutil.virtual_memory()
        metrics = {
            "machine.memory": float(memory.total - memory.available),
            "machine.memory_free": float(memory.available),
            "process.resident": float(self._process.memory_info().rss),
        }
        if self._devices:
            metrics |= _together([device() for device in self._devices])
        return metrics | self._counters()

    def _counters(self) -> dict[str, float]:
        """Return rates of the system's counters, and how many processes the kernel has killed since, if any."""
        now, at = self._count(), time.monotonic()
        seconds, before = at - self._at, self._before
        self._before, self._at = now, at
        if not before or seconds <= 0:
            return {}
        change = {name: now[name] - before[name] for name in now.keys() & before.keys()}
        busy, whole = change.pop("busy", 0.0), change.pop("whole", 0.0)
        kills = change.pop("machine.oom_kills", 0.0)
        rates = {name: max(0.0, more) / seconds for name, more in change.items()}
        if "process.cpu" in rates:
            rates["process.cpu"] *= 100.0  # percent of one core
        if whole > 0:
            rates["machine.cpu"] = min(100.0, max(0.0, 100 * busy / whole))
        return rates | ({"machine.oom_kills": kills} if kills > 0 else {})

    def _count(self) -> dict[str, float]:
        times = self._psutil.cpu_times()
        # Guests' time is already included in their host's; waiting for a disk is not work.
        idle = times.idle + getattr(times, "iowait", 0.0)
        whole = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        own = self._process.cpu_times()
        counters = {"busy": whole - idle, "whole": whole, "process.cpu": own.user + own.system}
        disk = self._psutil.disk_io_counters(nowrap=False)
        if disk is not None:
            counters |= {"machine.disk_read": disk.read_bytes, "machine.disk_written": disk.write_bytes}
        network = self._psutil.net_io_counters(nowrap=False)
        if network is not None:
            counters |= {"machine.sent": network.bytes_sent, "machine.received": network.bytes_recv}
        kills = kernel_kills()
        return counters if kills is None else {**counters, "machine.oom_kills": float(kills)}


def gpus(stack: contextlib.ExitStack) -> list[Callable[[], dict[str, float]]]:
    """Return a function for each GPU that NVML knows; none without its package or driver. CUDA is not touched."""
    try:
        import pynvml  # type: ignore[import-untyped]  # noqa: PLC0415 - an extra

        pynvml.nvmlInit()
    except Exception:  # noqa: BLE001 - not installed, no driver, no rights: nothing to report
        return []
    stack.callback(pynvml.nvmlShutdown)
    count = min(pynvml.nvmlDeviceGetCount(), GPUS)
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]

    def ask(handle: Any) -> dict[str, float]:
        memory, used = pynvml.nvmlDeviceGetMemoryInfo(handle), pynvml.nvmlDeviceGetUtilizationRates(handle)
        return {"gpu.utilisation": float(used.gpu), "gpu.memory": float(memory.used)}

    return [functools.partial(ask, handle) for handle in handles]


def _together(devices: list[dict[str, float]]) -> dict[str, float]:
    """Combine several GPUs: the mean of their utilisation, the sum of their memory."""
    return {
        "gpu.utilisation": sum(device["gpu.utilisation"] for device in devices) / len(devices),
        "gpu.memory": sum(device["gpu.memory"] for device in devices),
    }
