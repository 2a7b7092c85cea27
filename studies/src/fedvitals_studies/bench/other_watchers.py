# SPDX-License-Identifier: Apache-2.0
"""Common alternatives to fedvitals for monitoring gradients, with the scopes of a monitor: round and client."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

BINS = 64


class CockpitHooks:
    """Hooks like Cockpit's: a backward hook at each parameter, whose numbers are fetched at each step.

    Norm, mean, standard deviation, largest element and histogram of each gradient. Cockpit itself also measures
    quantities of single samples, which cost more.
    """

    def __init__(self) -> None:
        self.numbers: list[tuple[float, ...]] = []

    def round(self, number: int, model: nn.Module) -> Any:  # noqa: ARG002 - the scope of a monitor
        self.numbers.clear()
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def client(self, name: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:  # noqa: ARG002
        handles = [p.register_hook(self._measure) for p in model.parameters() if p.requires_grad]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _measure(self, gradient: Tensor) -> None:
        exact = gradient.detach().float()
        low, high = exact.min().item(), exact.max().item()
        sums = exact.norm().item(), exact.mean().item(), exact.std().item(), low, high
        self.numbers.append((*sums, *torch.histc(exact, BINS, low, high).tolist()))

    def flush(self) -> None:
        """Do nothing: everything was fetched at its step."""

    def close(self) -> None:
        self.numbers.clear()


class WandbWatch:
    """`wandb.watch(model, log="gradients", log_freq=1)`, offline, with one `log` at each step. ImportError without it.

    The gradients' histograms of all clients go to one run.
    """

    def __init__(self, folder: Path) -> None:
        import wandb  # noqa: PLC0415 - no dependency of ours

        settings = wandb.Settings(silent=True, console="off", x_disable_stats=True)
        self._run: Any = wandb.init(mode="offline", dir=str(folder), project="fedvitals-bench", settings=settings)

    def round(self, number: int, model: nn.Module) -> Any:  # noqa: ARG002 - the scope of a monitor
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def client(self, name: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        self._run.watch(model, log="gradients", log_freq=1)
        handle = optimizer.register_step_post_hook(lambda *_: self._run.log({"client": name}))
        try:
            yield
        finally:
            handle.remove()
            self._run.unwatch(model)

    def flush(self) -> None:
        """Do nothing: pending writes belong to wandb's own process."""

    def close(self) -> None:
        self._run.finish()
