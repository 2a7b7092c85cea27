# SPDX-License-Identifier: Apache-2.0
"""Measures the global model's loss on held-back samples, before the first round and after each one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fedvitals.monitor.host import HostObserver

INITIAL = "initial.held_back.loss"


def log_held_back(
    host: HostObserver, model: Any, data: Any, loss: Callable[..., Any] | None, name: str = "held_back.loss"
) -> None:
    """Measure a model on held-back samples, for the open round. A failure is reported once."""
    from fedvitals.probes.held_back import held_back_loss  # noqa: PLC0415 - needs torch, which a server may lack

    def measure() -> None:
        host.log({name: held_back_loss(model, data, loss)})

    host.monitored.spine.guard("measuring held-back samples", measure)
