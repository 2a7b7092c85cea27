# SPDX-License-Identifier: Apache-2.0
"""A laboratory for federated learning: describe a federation in ten lines, plant faults in it, and observe it.

    from fedvitals import lab
    result = lab.run(lab.Experiment(dataset="digits", model="cnn", clients=20, rounds=15, seed=7,
        topology=lab.Hierarchical(edges=4), aggregator=lab.trimmed_mean(0.1), partition=lab.dirichlet(0.3),
        faults=[lab.label_noise(nodes=["c4"], rate=0.8, since=5)]), observer=fv.Monitor("runs.db"))

Each kind of part is available under two names: its class (`lab.LabelNoise`) and its name in TOML (`lab.label_noise`).
The lab reports to the monitor through the `Observer` protocol only.
"""

from __future__ import annotations

from typing import Any

from fedvitals.lab.adapters import ADAPTERS as _ADAPTERS
from fedvitals.lab.aggregators.averages import AggregationError as AggregationError
from fedvitals.lab.data.arrays import Arrays as Arrays
from fedvitals.lab.engines.site import Site as Site
from fedvitals.lab.engines.tasks import Task as Task
from fedvitals.lab.engines.tasks import Update as Update
from fedvitals.lab.experiment import CHOICES as _CHOICES
from fedvitals.lab.experiment import Evaluation as Evaluation
from fedvitals.lab.experiment import Experiment as Experiment
from fedvitals.lab.experiment import kinds_of as _kinds_of
from fedvitals.lab.experiment import read as read
from fedvitals.lab.faults.table import FAULTS as _FAULTS
from fedvitals.lab.learning_rates import SCHEDULES as _SCHEDULES
from fedvitals.lab.local import OPTIMIZERS as _OPTIMIZERS
from fedvitals.lab.local import Clip as Clip
from fedvitals.lab.local import Local as Local
from fedvitals.lab.models.catalog import Own as Own
from fedvitals.lab.network.profiles import Device as Device
from fedvitals.lab.network.profiles import Link as Link
from fedvitals.lab.network.virtual_clock import Network as Network
from fedvitals.lab.parameters import Parameters as Parameters
from fedvitals.lab.population import CHANGES as _CHANGES
from fedvitals.lab.population import Population as Population
from fedvitals.lab.run import Result as Result
from fedvitals.lab.run import Round as Round
from fedvitals.lab.run import rounds as rounds
from fedvitals.lab.run import run as run
from fedvitals.lab.secure_aggregation import SecureAggregation as SecureAggregation

KINDS: dict[str, type] = {name: kind for kinds in _CHOICES.values() for name, kind in kinds.items()}
KINDS |= _kinds_of(_FAULTS) | _kinds_of(_OPTIMIZERS) | _kinds_of(_SCHEDULES) | _kinds_of(_CHANGES)
KINDS |= _kinds_of(_ADAPTERS)
_CLASSES = {kind.__name__: kind for kind in KINDS.values()}


def __getattr__(name: str) -> Any:
    kind = KINDS.get(name) or _CLASSES.get(name)
    if kind is None:
        from fedvitals.errors import unknown  # noqa: PLC0415

        raise AttributeError(unknown("part of the lab", name, [*KINDS, *_CLASSES]))
    return kind


def __dir__() -> list[str]:
    return sorted([*globals(), *KINDS, *_CLASSES])
