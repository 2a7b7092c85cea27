# SPDX-License-Identifier: Apache-2.0
"""Triggers that are trained in, found by the inputs that updates move; and federations in which there are none."""

from __future__ import annotations

import functools

import pytest

from fedvitals import lab
from fedvitals.diagnosis.detectors.input_profiles import trained_in_triggers
from fedvitals.diagnosis.examine import examine
from fedvitals.monitor.monitor import Monitor
from fedvitals.store import MemoryStore

CLIENTS = {"clients": 10, "rounds": 12, "partition": {"kind": "dirichlet", "alpha": 0.5}, "seed": 3}
TRIGGER = {"nodes": ["c2", "c6"], "share": 0.7, "target": 3, "size": 4}


@functools.cache
def history_of(kind, **more):
    """A federation on the digits whose clients c2 and c6 have a fault of this kind, or none."""
    faults = [] if kind is None else [{"kind": kind, **TRIGGER, **more}]
    experiment = lab.Experiment(
        dataset="digits",
        model={"kind": "mlp", "hidden": [32]},
        local={"iterations": 10, "optimizer": {"kind": "sgd", "learning_rate": 0.2}},
        faults=faults,
        **CLIENTS,
    )
    store = MemoryStore()
    monitor = Monitor(None, host="lab", detectors=(), sinks=[store], machine=False)
    lab.run(experiment, monitor.host, engine="stacked", workers=1)
    monitor.close()
    return store.history(monitor.run.id)


@pytest.mark.parametrize("kind", ["backdoor", "distributed_backdoor"])
def test_attackers_are_named_by_their_updates_alone(kind):
    findings = examine(history_of(kind), detectors=[trained_in_triggers])
    assert {finding.where.node for finding in findings} == {"c2", "c6"}
    assert {finding.issue for finding in findings} == {"BYZANTINE"}
    assert min(finding.where.round for finding in findings) >= 5  # nobody before the sixth participation


def test_nobody_is_named_where_nothing_is_trained_in():
    assert examine(history_of(None), detectors=[trained_in_triggers]) == []
