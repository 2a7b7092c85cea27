# SPDX-License-Identifier: Apache-2.0
"""Healthy rounds of uneven length under the real watching thread, on a clock that runs ten times as fast.

Each kind of unevenness is one run of 100 rounds of three clients, in the loop's own process. Nothing hangs: every
finding is false.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import fedvitals as fv
from fedvitals.monitor import stall_watch

ROUNDS = 100
FASTER = 10.0
USUAL = 3.0 / FASTER  # seconds of a round
Length = Callable[[random.Random, int], float]

KINDS: dict[str, Length] = {
    "even": lambda _rng, _n: 1.0,
    "a tenth": lambda rng, _n: rng.lognormvariate(0, 0.1),
    "a third": lambda rng, _n: rng.lognormvariate(0, 0.3),
    "a half": lambda rng, _n: rng.lognormvariate(0, 0.5),
    "once to three times": lambda rng, _n: rng.uniform(1, 3),
    "waits of random length": lambda rng, _n: 0.5 + rng.expovariate(1.5),
    "slower and slower": lambda rng, n: (1 + n / 25) * rng.lognormvariate(0, 0.1),
    "an evaluation every tenth": lambda rng, n: (3 if n % 10 == 9 else 1) * rng.lognormvariate(0, 0.1),
    "by day and by night": lambda rng, n: (1.7 + 0.7 * math.sin(n / 8)) * rng.lognormvariate(0, 0.1),
    "now and then a straggler": lambda rng, _n: (2.5 if rng.random() < 0.05 else 1) * rng.lognormvariate(0, 0.1),
}


def run() -> dict[str, Any]:
    """Return the rounds, the false findings, and each of them in words."""
    with ProcessPoolExecutor(len(KINDS), mp_context=get_context("spawn")) as pool:  # they sleep most of the time
        false = dict(zip(KINDS, pool.map(_findings, KINDS), strict=True))
    return {
        "rounds": ROUNDS * len(KINDS),
        "false": sum(map(len, false.values())),
        "kinds": {kind: len(own) for kind, own in false.items()},
        "messages": [message for own in false.values() for message in own],
    }


def _findings(kind: str) -> list[str]:
    length, rng = KINDS[kind], random.Random(kind)  # noqa: S311 - no secret
    for name in ("SHORTEST", "PERIOD", "PAUSE"):
        setattr(stall_watch, name, getattr(stall_watch, name) / FASTER)
    with fv.Monitor(None, run=kind, machine=False) as monitor:
        for number in range(ROUNDS):
            # An evaluation is a separate part; all else makes the clients slower.
            evaluates = kind.startswith("an evaluation")
            whole = USUAL * length(rng, number)
            training = min(whole, USUAL) if evaluates else whole
            with monitor.round(number):
                for client in range(3):
                    with monitor.client(f"c{client}"):
                        time.sleep(training / 3)
                if evaluates and whole > training:
                    with monitor.part("evaluate"):
                        time.sleep(whole - training)
        return [finding.message for finding in monitor.findings(notes=True) if finding.issue == "STALLED"]
