# SPDX-License-Identifier: Apache-2.0
"""Faults of a client on demand, and their rounds: read from the run's configuration."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

FAULTS = ("none", "fail", "timeout", "kill", "nan", "label-noise")
NOISE = 0.9  # share of the labels that are shuffled among themselves


def fault_of(config: Mapping[str, Any], partition: int, number: int) -> str:
    """Return the fault of this client in this round; «none» for all others."""
    fault = str(config["fault"])
    if fault not in FAULTS:
        raise ValueError(f"There is no fault '{fault}'. Known: {', '.join(FAULTS)}.")
    struck = partition == int(config["faulty"]) and int(config["since"]) <= number <= int(config["until"])
    return fault if struck else "none"


def before(fault: str, config: Mapping[str, Any]) -> None:
    """Fail, or sleep past the deadline."""
    if fault == "fail":
        raise RuntimeError("planted: this client cannot read its data")
    if fault == "timeout":
        time.sleep(float(config["round-timeout"]) + float(config["oversleep"]))


def halfway(fault: str) -> None:
    """End without a message, as when the kernel kills a process for lack of memory."""
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


def labels(fault: str, y: Tensor, seed: int) -> Tensor:
    if fault != "label-noise":
        return y
    stream = torch.Generator().manual_seed(seed)
    struck = torch.randperm(len(y), generator=stream)[: round(NOISE * len(y))]
    noisy = y.clone()
    noisy[struck] = y[struck[torch.randperm(len(struck), generator=stream)]]
    return noisy


def weights(fault: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Put a single NaN into the first layer, which ruins the mean over all clients."""
    if fault == "nan":
        first = next(iter(state))
        state[first] = state[first].clone()
        state[first].view(-1)[0] = math.nan
    return state
