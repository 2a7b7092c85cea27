# SPDX-License-Identifier: Apache-2.0
"""A run of one model without a federation: parts of its training are rounds of one client, «model»."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from fedvitals.monitor.held_back import INITIAL, log_held_back
from fedvitals.monitor.monitor import Monitor
from fedvitals.probes.ranks import group_of

NODE = "model"


def train_for_federation(model: nn.Module) -> None:
    """Tell the other processes that train the model that its training belongs to a federation, and is not divided."""
    group = group_of(model)
    if group is not None:
        group.divide(divided=False)


class ModelRun:
    """Opens and closes the rounds of one model's training; numbering continues after the monitor's last round.

    If several processes train the model together, the one of the lowest rank records it.
    """

    def __init__(
        self,
        monitor: Monitor,
        model: nn.Module,
        data: Any = None,
        loss: Callable[..., Any] | None = None,
        node: str = NODE,
        held_back: Any = None,
    ) -> None:
        self._monitor, self._model, self._data, self._loss, self.node = monitor, model, data, loss, node
        self._held_back = held_back
        last = monitor.host.monitored.last_round
        self._round = 0 if last is None else last + 1
        self._group = group_of(model)
        if self._group is not None:
            self._group.divide(divided=True)
            if not self._group.reports:
                monitor.host.monitored.silence()

    @property
    def is_divided(self) -> bool:
        """Whether a round may end before the training does; False if another process reports it to a federation."""
        return self._group is None or self._group.is_divided

    def begin(self) -> None:
        """Open the next round and its client."""
        host = self._monitor.host
        is_first = host.monitored.last_round is None
        host.round_begin(self._round, self._model)
        if is_first:
            self._measure_held_back(INITIAL)
        host.client_begin(self.node, self._model, data=self._data, loss=self._loss)

    def end(self, error: BaseException | None = None) -> None:
        """Close the client and its round; `error` is the exception that its training raised."""
        host = self._monitor.host
        host.client_end(self.node, error)
        if error is None:
            self._measure_held_back("held_back.loss")
        host.round_end(self._round, self._model)
        self._round += 1

    def _measure_held_back(self, name: str) -> None:
        if self._held_back is not None and (self._group is None or self._group.reports):
            log_held_back(self._monitor.host, self._model, self._held_back, self._loss, name)
