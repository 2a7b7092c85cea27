# SPDX-License-Identifier: Apache-2.0
"""What topologies, engines and faults pass to each other: tasks, updates and exchanges."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from fedvitals.lab.local import Local

Node = str
Home = NDArray[np.float32]

Exchange = Callable[[Tensor, Tensor], Tensor]
"""What the members of a group pass to each other between two local iterations.

From the states after an iteration, [members, size], and the members' numbers of samples, [members], to the states with
which they begin the next one. It is a function of a module, since it goes to worker processes.
"""


@dataclass(frozen=True, slots=True)
class Task:
    """The local training of one group in one round; a client that trains alone is a group of one.

    Args:
        round: The round.
        nodes: The clients.
        start: The flat state that all of them begin with.
        group: The edge, cluster or ring.
        exchange: What members do with their states between local iterations; None: nothing.
        every: Local iterations between two exchanges.
        iterations: The number of local iterations, instead of the experiment's.
        parent: Who hands out the model and takes the updates; a client in a ring takes them only.
        local: Settings instead of the experiment's: a correction.
        stop_at_nonfinite: Whether a loss that is not finite ends a client's training: a correction.
        homes: What each member has at home, flat.
        shift: Added to every gradient.
    """

    round: int
    nodes: tuple[Node, ...]
    start: Tensor  # [size], for all members
    group: str | None = None
    exchange: Exchange | None = None
    every: int = 1  # local iterations between two exchanges
    iterations: int | None = None  # instead of the experiment's
    parent: Node = "server"  # who hands out the model and takes the updates
    local: Local | None = None  # settings instead of the experiment's: a correction
    stop_at_nonfinite: bool = False  # whether a loss that is not finite ends a client's training: a correction
    homes: Mapping[Node, Home] | None = None  # what each member has at home, flat; arrays, since they go through pipes
    shift: Tensor | None = None  # [weights], added to every gradient (`aggregators/drift.py`)


@dataclass(slots=True)
class Update:
    """What one client sends at the end of its local training. Faults change it on its way.

    Args:
        node: The client.
        state: Its flat state; replaced, never modified; valid until the next update is taken, unless it is cloned.
        start: What it was trained from.
        samples: The number of samples that it reports.
        group: The edge, cluster or ring.
        losses: The loss of each local batch.
        steps: Local steps.
        seconds: The real computing time.
        sent: Whether the faults that affect sending have been applied.
        error: Why the client failed; `state` is then the one that it started from, and is not used.
        error_type: The class of the exception.
        home: What the client keeps at home; it is not sent.
    """

    node: Node
    state: Tensor  # [size]; replaced, never modified; valid until the next update is taken, unless it is cloned
    start: Tensor  # [size]: what it was trained from
    samples: int
    group: str | None = None
    losses: Tensor = field(default_factory=lambda: torch.empty(0))  # [iterations]: of each local batch
    steps: int = 0
    seconds: float = 0.0  # of real computing
    sent: bool = False  # what is wrong with its sending has been applied
    error: str | None = None  # why there is nothing to use: the client failed; `state` is then its start
    error_type: str | None = None
    home: Home | None = None  # what the client keeps at home, as an array; it is not sent
    # The state as it arrived, and what to hold on to so that its memory stays as it is; None: it may not be kept.
    arrived: tuple[Tensor, object] | None = field(default=None, init=False, repr=False)

    @property
    def lease(self) -> object:
        """What to hold on to in order to keep `state` without a copy; None if it has to be copied."""
        return None if self.arrived is None or self.arrived[0] is not self.state else self.arrived[1]

    def fail(self, error: BaseException) -> None:
        """Note that the client failed with this error."""
        self.error, self.error_type = f"{type(error).__name__}: {error}", type(error).__name__
