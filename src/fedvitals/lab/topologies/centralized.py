# SPDX-License-Identifier: Apache-2.0
"""Centralized federated learning (FedAvg, McMahan et al. 2016): all train the server's model, the server averages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from fedvitals.lab.description import Description
from fedvitals.lab.engines.tasks import Task

if TYPE_CHECKING:
    from fedvitals.lab.experiment import Experiment
    from fedvitals.lab.federation import Federation


class Centralized(Description, frozen=True):
    """All selected clients train the server's model, and the server averages."""

    def check(self, experiment: Experiment) -> None:
        """Accept any experiment."""

    def round(self, federation: Federation) -> Tensor:
        model = federation.server.model
        updates = federation.train(Task(federation.round, (node,), model) for node in federation.cohort())
        return federation.aggregate(updates)
