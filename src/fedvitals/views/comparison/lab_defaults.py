# SPDX-License-Identifier: Apache-2.0
"""Default settings of the lab's experiments, which a run's description omits.

A copy of the defaults of `lab.experiment.Experiment()`, compared with it by a test: pages are also shown where torch,
which the lab needs, is not installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PREFIX = "experiment."
DEFAULTS: Mapping[str, Any] = {
    "experiment.dataset.kind": "digits",
    "experiment.partition.kind": "iid",
    "experiment.test_share": 0.2,
    "experiment.model.kind": "cnn",
    "experiment.model.channels": [32, 64],
    "experiment.local.batch": 16,
    "experiment.local.optimizer.kind": "sgd",
    "experiment.local.optimizer.learning_rate": 0.05,
    "experiment.local.optimizer.momentum": 0.0,
    "experiment.local.proximal": 0.0,
    "experiment.local.keep_optimizer": False,
    "experiment.clients": 10,
    "experiment.participation": 1.0,
    "experiment.rounds": 10,
    "experiment.topology.kind": "centralized",
    "experiment.aggregator.kind": "fedavg",
    "experiment.aggregator.server_learning_rate": 1.0,
    "experiment.evaluation.every": 1,
    "experiment.evaluation.local": True,
    "experiment.repeats": 1,
}
_PARTS = {name.split(".")[1] for name in DEFAULTS}


def is_default(name: str, settings: Mapping[str, Any]) -> bool:
    """Return whether a setting of a lab's experiment is left at its default.

    `name`: its path, such as «experiment.local.batch». `settings`: everything that the description states, by path. A
    part that it omits is as in `DEFAULTS`; a part that is not there either, such as a compression, is off.
    """
    if not name.startswith(PREFIX):
        return False
    if name in settings:
        return name in DEFAULTS and bool(settings[name] == DEFAULTS[name])
    part = name.split(".")[1]
    left_out = not any(stated.split(".")[1] == part for stated in settings if stated.startswith(PREFIX))
    return left_out and (name in DEFAULTS or part not in _PARTS)
