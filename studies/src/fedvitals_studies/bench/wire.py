# SPDX-License-Identifier: Apache-2.0
"""The cost of a client-round on the wire: bytes, and the time to encode and decode them; and of damaged bytes."""

from __future__ import annotations

import itertools
import resource
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from fedvitals.errors import RecordError
from fedvitals.measurements import Telemetry, record_count, stamped
from fedvitals.monitor.monitor import Monitor
from fedvitals.records import Run
from fedvitals.testing import examples_of_records
from fedvitals.transport.wire.payload import decode, encode
from fedvitals_studies.bench.fuzzed_payloads import fuzzed_payloads
from fedvitals_studies.bench.workloads import WORKLOADS, step

BAR = 60  # microseconds to encode and decode a client-round of the paper's CNN


def client_round(*, first: bool = False, probes: str = "standard") -> list[Telemetry]:
    """Return the records of one client-round of the paper's CNN, 20 steps, as sent by a worker.

    Layer tables are named by their digest. `first`: of round 0, in which a client also reports its label histogram.
    """
    workload = next(w for w in WORKLOADS if w.name == "paper-cnn")
    x, y = workload.data(160)
    payload = b""
    with torch.random.fork_rng(devices=[]), Monitor(None, probes=probes) as monitor:
        torch.manual_seed(0)
        for number in (0,) if first else (0, 1):
            model = workload.model()
            with monitor.round(number, model):
                worker = monitor.host.for_worker()
                with worker.client("c17", model, data=(x, y), loss=functional.cross_entropy):
                    optimizer = workload.optimizer(model)
                    for i in range(20):
                        step(model, optimizer, x[16 * (i % 10) :][:16], y[16 * (i % 10) :][:16])
                payload = worker.payload()
    here = [item for item in decode(payload) if not isinstance(item, Run)]
    numbers = itertools.accumulate(map(record_count, here), initial=1000)
    return [stamped(item, "worker-12345-0a1b2c3d", number) for item, number in zip(here, numbers, strict=False)]


def sound_payloads() -> list[bytes]:
    """Return a client-round, and one record of each type that a worker may send, as payloads."""
    *sendable, _ = examples_of_records()  # the last is a Truth, which no worker may send
    return [encode(client_round()), encode(sendable[:5]), encode(sendable[5:8]), encode(sendable[8:])]


def bench_wire(*, quick: bool = False) -> list[dict[str, Any]]:
    """Return bytes, and median microseconds of many calls, for a typical round, a first one, and with `deep`.

    The last row is on damaged payloads: how many were refused, the slowest of them, and by how much they made the
    process grow.
    """
    found = []
    for name, records in (
        ("standard", client_round()),
        ("standard, with labels", client_round(first=True)),
        ("deep", client_round(probes="deep")),
    ):
        payload = encode(records)
        repeats = 200 if quick else 2000
        times = [_microseconds(partial(encode, records), repeats), _microseconds(partial(decode, payload), repeats)]
        found.append(
            {
                "client_round": name,
                "records": len(records),
                "bytes": len(payload),
                "encode_microseconds": times[0],
                "decode_microseconds": times[1],
                "both_microseconds": sum(times),
                "bar_microseconds": BAR if name == "standard" else None,
            }
        )
    return [*found, _fuzzed(3_000 if quick else 100_000)]


def _fuzzed(count: int) -> dict[str, Any]:
    """Measure the decoding, or refusal, of `count` damaged payloads."""
    memory, refused, times = _peak_megabytes(), 0, []
    for payload in fuzzed_payloads(sound_payloads(), count):
        began = time.perf_counter()
        try:
            decode(payload)
        except RecordError:
            refused += 1
        times.append(time.perf_counter() - began)
    return {
        "client_round": "damaged at random",
        "payloads": count,
        "refused": refused,
        "decode_microseconds": 1e6 * float(np.median(times)),
        "slowest_milliseconds": 1e3 * max(times),
        "grown_megabytes": _peak_megabytes() - memory,
    }


def _peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _microseconds(work: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return 1e6 * float(np.median(times))
