# SPDX-License-Identifier: Apache-2.0
"""What each metric of the study costs a client, in time and bytes, which the paper only discusses.

One client-round of the paper's CNN is monitored with one probe at a time; time is what the monitor reports for the
training thread, bytes are what a worker process sends. Both without the cost of an empty monitor.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fedvitals import lab
from fedvitals.lab.engines.engine import executor_factory, single_threaded
from fedvitals.lab.engines.tasks import Task
from fedvitals.monitor.monitor import Monitor
from fedvitals.probes.full_gradient import full_gradient
from fedvitals.probes.gradients import gradients
from fedvitals.probes.nonlinearity import nonlinearity
from fedvitals.probes.presets import Planned, Preset
from fedvitals.probes.scale import scale
from fedvitals.probes.weights import weights
from fedvitals.protocols import NullObserver
from fedvitals.records import Metric, Record
from fedvitals.schedule import always
from fedvitals_studies.reproduce.conditions import BY_NAME
from fedvitals_studies.reproduce.measure import experiment_of

FILE = "costs.json"
CLIENTS = 5
METRICS: dict[str, tuple[Planned, ...]] = {
    "nothing": (),
    "gradient statistics, every iteration merged": (Planned(gradients, always),),
    "gradient statistics, every iteration stored": (Planned(gradients, always, each=True),),
    "weight statistics": (Planned(weights),),
    "gradient scale, 16 images, estimated": (Planned(scale()),),
    "gradient scale, 16 images, exact": (Planned(scale(exact=True)),),
    "gradient scale, whole set, exact (the paper's)": (Planned(scale(images="all", exact=True)),),
    "nonlinearity coefficient": (Planned(nonlinearity()),),
    "gradient over the whole set": (Planned(full_gradient),),
}


class _Costs:
    """A sink that keeps what the monitor reports of itself."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def write(self, records: Sequence[Record], /) -> None:
        found = (r for r in records if isinstance(r, Metric) and r.name == "monitor.cost" and r.where.node)
        self.seconds += [r.value for r in found]


def measure(data: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """Return seconds and bytes per client-round of each metric, and the seconds of the training itself."""
    site = lab.Site.of(experiment_of(BY_NAME["extended-centralized-baseline"], 0), data)
    executor, start = executor_factory(site, "reuse")(), site.layout.flat(site.module)
    out = torch.empty(1, site.layout.size)
    tasks = [Task(0, (f"c{i}",), start) for i in range(CLIENTS)]
    found: dict[str, tuple[float, float]] = {}
    with single_threaded():
        times = []
        for task in tasks:
            began = time.process_time()
            executor.train([task], NullObserver(), out)
            times.append(time.process_time() - began)
        for name, plan in METRICS.items():
            sink, sizes = _Costs(), []
            with Monitor(None, probes=Preset("cost", plan, fit_percent=0), sinks=[sink], host="lab") as monitor:
                monitor.host.round_begin(0, site.module)
                for task in tasks:
                    watcher = monitor.host.for_worker()
                    executor.train([task], watcher, out)
                    payload = watcher.payload()
                    sizes.append(len(payload))
                    monitor.host.absorb(payload)
                monitor.host.round_end(0, site.module)
            # The first includes layer names
            found[name] = statistics.median(sink.seconds), statistics.median(sizes[1:])
    seconds, size = found.pop("nothing")
    costs = {name: {"seconds": max(0.0, s - seconds), "bytes": max(0, int(b - size))} for name, (s, b) in found.items()}
    return {"training": statistics.median(times), "dataset": site.dataset.name, "costs": costs}


def write(folder: Path, data: str | os.PathLike[str] | None = None) -> None:
    (folder / FILE).write_text(json.dumps(measure(data), indent=1) + "\n", encoding="utf-8")
