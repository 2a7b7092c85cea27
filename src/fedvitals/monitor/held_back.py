# SPDX-License-Identifier: Apache-2.0
"""Measures the new global model's loss on held-back samples each round, as `held_back.loss`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fedvitals.monitor.host import HostObserver


def log_held_back(host: HostObserver, model: Any, data: Any, loss: Callable[..., Any] | None) -> None:
    """Measure a model on held-back samples, for the open round. A failure is reported once."""
    from fedvitals.probes.held_back import held_back_loss  # noqa: PLC0415 - needs torch, which a server may lack

    def measure() -> None:
        host.log({"held_back.loss": held_back_loss(model, data, loss)})

    host.monitored.spine.guard("measuring held-back samples", measure)
